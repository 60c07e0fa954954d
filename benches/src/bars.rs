//! Measurements of one shape as a bar chart: the time of each operation and source. Shorter bars
//! are faster.

use std::fmt::Write;

use plotters::style::{BLACK, RGBColor};

use crate::figure::{Figure, Subject, sources};
use crate::scheme::{COPY, WHITE, colours, hex, with_dark};
use crate::{BenchError, Shape};

/// Sizes in pixels: the picture's width, the bars' left end and longest length, a bar with its gap,
/// and a heading.
const WIDTH: usize = 820;
const LEFT: usize = 190;
const LONGEST: f64 = 520.0;
const STEP: usize = 20;
const HEAD: usize = 30;

/// Bars of one operation and dtype.
struct Group {
    name: String,
    bars: Vec<Bar>,
}

struct Bar {
    name: String,
    us: f64,
    colour: RGBColor,
}

/// The chart as SVG, for the shape with the most figures; of several, the largest one.
///
/// Each group has a bar for each source, and a bar for a copy of as many bytes on the first of our
/// devices. Times with gaps between launches are left out.
///
/// # Errors
/// No figure can be drawn.
pub fn svg(figures: &[Figure]) -> Result<String, BenchError> {
    let drawable: Vec<&Figure> = figures.iter().filter(|figure| !figure.has_gaps).collect();
    let shape = fullest(&drawable).ok_or_else(|| BenchError::Input("--bars: no figure can be drawn".into()))?;
    let of_shape: Vec<&Figure> = drawable.into_iter().filter(|figure| shape_of(figure) == shape).collect();
    Ok(with_dark(&draw(shape, &groups(&of_shape))))
}

fn shape_of(figure: &Figure) -> Shape {
    let Subject { rows, cols, .. } = figure.subject;
    Shape { rows, cols }
}

/// The shape with the most figures; of several, the one with the most elements.
fn fullest(figures: &[&Figure]) -> Option<Shape> {
    let count = |shape| figures.iter().filter(|figure| shape_of(figure) == shape).count();
    let shapes = figures.iter().map(|figure| shape_of(figure));
    shapes.max_by_key(|&shape| (count(shape), shape.rows as u128 * shape.cols as u128))
}

/// The groups in the order of their first figure.
fn groups(figures: &[&Figure]) -> Vec<Group> {
    let colours = colours(&sources(figures.iter().copied()));
    let colour = |source: &str| colours.iter().find(|(known, _)| known == source).map_or(BLACK, |(_, colour)| *colour);
    let mut groups: Vec<Group> = Vec::new();
    for figure in figures {
        let name = format!("{}, {}", figure.subject.title(), figure.subject.dtype);
        let place = groups.iter().position(|group| group.name == name).unwrap_or_else(|| {
            groups.push(Group { name, bars: copy(figure, figures).into_iter().collect() });
            groups.len() - 1
        });
        let bar = Bar { name: figure.source.clone(), us: figure.us, colour: colour(&figure.source) };
        // The bar of the copy stays the last.
        let bars = &mut groups[place].bars;
        let end = bars.iter().position(|bar| bar.colour == COPY).unwrap_or(bars.len());
        bars.insert(end, bar);
    }
    groups
}

/// The time in which the first of our devices copies as many bytes as the operation moves.
fn copy(first: &Figure, figures: &[&Figure]) -> Option<Bar> {
    let is_ours = |figure: &&&Figure| figure.subject == first.subject && figure.is_ours && figure.is_cold;
    let ours = figures.iter().find(is_ours)?;
    Some(Bar { name: format!("copy ({})", ours.source), us: ours.us * ours.gbs / ours.copy_gbs?, colour: COPY })
}

fn draw(shape: Shape, groups: &[Group]) -> String {
    let bars: usize = groups.iter().map(|group| group.bars.len()).sum();
    let height = 2 * HEAD + groups.len() * HEAD + bars * STEP;
    let longest = groups.iter().flat_map(|group| &group.bars).map(|bar| bar.us).fold(0.0, f64::max);
    let mut svg = format!("<svg width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" ");
    svg += "xmlns=\"http://www.w3.org/2000/svg\" font-family=\"sans-serif\" font-size=\"13\">\n";
    let (white, black) = (hex(WHITE), hex(BLACK));
    let mut line = |text: std::fmt::Arguments<'_>| {
        let _ = writeln!(svg, "{text}");
    };
    line(format_args!("<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"{white}\"/>"));
    let title = format!("{shape}: time of one call in us, shorter is faster");
    line(format_args!("<text x=\"12\" y=\"24\" font-size=\"15\" fill=\"{black}\">{title}</text>"));
    let mut y = HEAD;
    for group in groups {
        y += HEAD;
        let name = escaped(&group.name);
        line(format_args!("<text x=\"12\" y=\"{}\" font-weight=\"bold\" fill=\"{black}\">{name}</text>", y - 8));
        for Bar { name, us, colour } in &group.bars {
            let (length, middle, colour) = (us / longest * LONGEST, y + 12, hex(*colour));
            let (name, decimals) = (escaped(name), if *us < 100.0 { 2 } else { 0 });
            let end = LEFT as f64 + length + 6.0;
            line(format_args!(
                "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\" fill=\"{black}\">{name}</text>",
                LEFT - 8
            ));
            line(format_args!("<rect x=\"{LEFT}\" y=\"{y}\" width=\"{length:.1}\" height=\"15\" fill=\"{colour}\"/>"));
            line(format_args!("<text x=\"{end:.1}\" y=\"{middle}\" fill=\"{black}\">{us:.decimals$}</text>"));
            y += STEP;
        }
    }
    svg + "</svg>\n"
}

/// Text for SVG.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(source: &str, op: &str, (rows, cols): (usize, usize), us: f64) -> Figure {
        let (norm, op, dtype) = ("rms_norm".into(), op.into(), "bf16".into());
        Figure {
            subject: Subject { norm, op, dtype, rows, cols },
            source: source.into(),
            is_ours: source == "cuda",
            device: None,
            us,
            gbs: 100.0,
            copy_gbs: (source == "cuda").then_some(125.0),
            is_cold: true,
            has_gaps: false,
        }
    }

    /// The texts of a picture, in order.
    fn texts(svg: &str) -> Vec<&str> {
        svg.lines().filter(|line| line.starts_with("<text")).filter_map(|line| line.split(['>', '<']).nth(2)).collect()
    }

    #[test]
    fn each_operation_has_a_bar_for_each_source_and_one_for_the_copy() {
        let figures = [
            figure("cuda", "forward", (8, 64), 10.0),
            figure("cuda", "backward", (8, 64), 40.0),
            figure("a<b", "forward", (8, 64), 12.5),
            figure("cuda", "forward", (1, 64), 1.0),
        ];
        let svg = svg(&figures).unwrap();
        let forward = ["RMS forward, bf16", "cuda", "10.00", "a&lt;b", "12.50", "copy (cuda)", "8.00"];
        let backward = ["RMS backward, bf16", "cuda", "40.00", "copy (cuda)", "32.00"];
        let title = ["8x64: time of one call in us, shorter is faster"];
        assert_eq!(texts(&svg), [&title[..], &forward, &backward].concat());
        // The longest bar has the full length, and a quarter of its time a quarter of it.
        assert!(svg.contains("width=\"520.0\"") && svg.contains("width=\"130.0\""), "{svg}");
        assert!(svg.contains("prefers-color-scheme:dark"));
    }

    #[test]
    fn the_largest_of_the_fullest_shapes_is_drawn() {
        let figures = [figure("cuda", "forward", (8, 64), 10.0), figure("cuda", "forward", (1, 64), 1.0)];
        assert!(texts(&svg(&figures).unwrap())[0].starts_with("8x64: "));
        let late = Figure { has_gaps: true, ..figure("cuda", "forward", (8, 64), 10.0) };
        assert!(matches!(svg(&[late]), Err(BenchError::Input(message)) if message.contains("--bars")));
    }
}
