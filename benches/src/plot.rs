//! Measurements as a picture. Each operation has two panels: the rate over the row length at about
//! equal bytes, with the rate of the copy, and the time over the number of rows. The colours adapt
//! to light and dark pages.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::BenchError;
use crate::figure::{Figure, Subject, sources};
use crate::scheme::{GRID, colours, with_dark};

/// The size of a panel, in pixels.
const PANEL: (u32, u32) = (560, 330);

/// The smallest number of points of a curve.
const FEWEST: usize = 3;

const FONT: &str = "sans-serif";

/// Whether a plot of these figures can be drawn. It does not depend on their times.
///
/// # Errors
/// If no operation has enough figures.
pub fn require(figures: &[Figure]) -> Result<(), BenchError> {
    panels(&drawable(figures)).map(drop)
}

/// The plot as SVG, with panels for every operation that has enough figures.
///
/// # Errors
/// As [`require`].
pub fn svg(figures: &[Figure]) -> Result<String, BenchError> {
    let figures = drawable(figures);
    let panels = lines(panels(&figures)?);
    let colours = colours(&sources(figures));
    let mut svg = String::new();
    {
        let size = (PANEL.0 * most_across(&panels) as u32, PANEL.1 * panels.len() as u32);
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        draw(&root, &panels, &colours).map_err(|error| BenchError::Input(format!("--plot: {error}")))?;
    }
    Ok(with_dark(&svg))
}

/// The figures whose times have no gaps between launches.
fn drawable(figures: &[Figure]) -> Vec<&Figure> {
    figures.iter().filter(|figure| !figure.has_gaps).collect()
}

fn panels(figures: &[&Figure]) -> Result<Vec<[Option<Panel>; 2]>, BenchError> {
    let panels: Vec<_> = operations(figures).iter().filter_map(|figures| panels_of(figures)).collect();
    if panels.is_empty() {
        let what = format!("a plot needs {FEWEST} row lengths of one size, or {FEWEST} numbers of rows of one length");
        return Err(BenchError::Input(format!(
            "--plot: {what}, of one operation and dtype: run `rmsnorm bench --sweep`"
        )));
    }
    Ok(panels)
}

/// One line of panels per operation. If no operation has both kinds, two operations share a line.
fn lines(panels: Vec<[Option<Panel>; 2]>) -> Vec<[Option<Panel>; 2]> {
    if panels.iter().any(|line| line.iter().all(Option::is_some)) {
        return panels;
    }
    let mut single = panels.into_iter().flatten().flatten();
    iter::from_fn(|| Some([Some(single.next()?), single.next()])).collect()
}

/// The number of panels of the longest line.
fn most_across(lines: &[[Option<Panel>; 2]]) -> usize {
    lines.iter().map(|line| line.iter().flatten().count()).max().unwrap_or(1)
}

/// The points of one source: {horizontal value: vertical value}.
type Curve = BTreeMap<usize, f64>;

/// One chart.
struct Panel {
    title: String,
    /// The label of the horizontal axis.
    across: &'static str,
    /// The label of the vertical axis. The axis is logarithmic for a time.
    up: &'static str,
    curves: Vec<(String, Curve)>,
    /// The copy of each backend of this project: its rate, or its time for as many bytes as the
    /// operation moves.
    copies: Vec<(String, Curve)>,
}

/// The figures of each operation and dtype.
fn operations<'f>(figures: &[&'f Figure]) -> Vec<Vec<&'f Figure>> {
    let kind = |figure: &Figure| {
        let Subject { norm, op, dtype, .. } = &figure.subject;
        [norm.clone(), op.clone(), dtype.clone()]
    };
    let mut operations: Vec<Vec<&Figure>> = Vec::new();
    for &figure in figures {
        match operations.iter_mut().find(|known| known.first().is_some_and(|first| kind(first) == kind(figure))) {
            Some(known) => known.push(figure),
            None => operations.push(vec![figure]),
        }
    }
    operations
}

/// The panels of an operation: row lengths, and numbers of rows.
fn panels_of(figures: &[&Figure]) -> Option<[Option<Panel>; 2]> {
    let Figure { subject: first, source: leading, .. } = figures.first()?;
    let name = format!("{} {} {}", first.norm, first.op, first.dtype);
    // About equal bytes: the size (to the nearest power of two) with the most row lengths. Each
    // source uses the first source's size if it has enough points of it, otherwise its own.
    let size = |figure: &Figure| (figure.subject.rows as f64 * figure.subject.cols as f64).log2().round() as i64;
    let lengths = |source: &str| {
        let own = figures.iter().filter(|f| f.is_cold && f.source == source);
        Groups::of(own.map(|f| (size(f), f.subject.cols)))
    };
    let common = lengths(leading).largest();
    let sizes: BTreeMap<&str, i64> = sources(figures.iter().copied())
        .into_iter()
        .filter_map(|source| {
            let own = lengths(source);
            Some((source, common.filter(|&size| own.has_enough(size)).or_else(|| own.largest())?))
        })
        .collect();
    let is_of_size = |f: &&&Figure| f.is_cold && sizes.get(f.source.as_str()) == Some(&size(f));
    let of_size: Vec<&Figure> = figures.iter().filter(is_of_size).copied().collect();
    let rates = curves(&of_size, |f| Some((f.subject.cols, f.gbs)));
    let drawn: BTreeSet<i64> = rates.iter().filter_map(|(source, _)| sizes.get(source.as_str()).copied()).collect();
    let drawn: Vec<String> = drawn.into_iter().map(|size| bytes(size, &first.dtype)).collect();
    let cols = Panel {
        title: format!("{name}, {} a matrix", drawn.join(" or ")),
        across: "columns",
        up: "GB/s",
        curves: rates,
        copies: curves(&ours(&of_size), |f| Some((f.subject.cols, f.copy_gbs?))),
    };
    // The row length with the most numbers of rows in the first source, otherwise in all sources.
    let counts =
        |figures: &mut dyn Iterator<Item = &&Figure>| Groups::of(figures.map(|f| (f.subject.cols, f.subject.rows)));
    let own = counts(&mut figures.iter().filter(|f| f.source == *leading));
    let own_cols = own.largest().filter(|&cols| own.has_enough(cols));
    let common_cols = own_cols.or_else(|| counts(&mut figures.iter()).largest());
    let of_cols: Vec<&Figure> = figures.iter().copied().filter(|f| Some(f.subject.cols) == common_cols).collect();
    let rows = Panel {
        title: format!("{name}, {} columns", common_cols.unwrap_or_default()),
        across: "rows",
        up: "microseconds",
        curves: curves(&of_cols, |f| Some((f.subject.rows, f.us))),
        copies: curves(&ours(&of_cols), |f| Some((f.subject.rows, f.us * f.gbs / f.copy_gbs?))),
    };
    let panels = [cols, rows].map(|panel| (!panel.curves.is_empty()).then_some(panel));
    panels.iter().any(Option::is_some).then_some(panels)
}

fn ours<'f>(figures: &[&'f Figure]) -> Vec<&'f Figure> {
    figures.iter().copied().filter(|figure| figure.is_ours).collect()
}

/// The bytes of 2^`size` elements, in the largest unit of which they are a multiple.
fn bytes(size: i64, dtype: &str) -> String {
    let bits = size + if dtype == "f32" { 2 } else { 1 };
    match bits {
        30.. => format!("{} GiB", 1u64 << (bits - 30).min(33)),
        20..30 => format!("{} MiB", 1 << (bits - 20)),
        10..20 => format!("{} KiB", 1 << (bits - 10)),
        _ => format!("{} bytes", 1 << bits.max(0)),
    }
}

/// The distinct values of each key.
struct Groups<K>(BTreeMap<K, BTreeSet<usize>>);

impl<K: Ord + Copy> Groups<K> {
    fn of(pairs: impl Iterator<Item = (K, usize)>) -> Self {
        let mut groups: BTreeMap<K, BTreeSet<usize>> = BTreeMap::new();
        for (key, value) in pairs {
            groups.entry(key).or_default().insert(value);
        }
        Groups(groups)
    }

    /// The key with the most values; the largest key if several have as many.
    fn largest(&self) -> Option<K> {
        self.0.iter().max_by_key(|(key, values)| (values.len(), **key)).map(|(key, _)| *key)
    }

    /// Whether the key has enough values for a curve.
    fn has_enough(&self, key: K) -> bool {
        self.0.get(&key).is_some_and(|values| values.len() >= FEWEST)
    }
}

/// The curves of the sources that have enough points.
fn curves(figures: &[&Figure], point: impl Fn(&Figure) -> Option<(usize, f64)>) -> Vec<(String, Curve)> {
    let mut curves: Vec<(String, Curve)> = Vec::new();
    for &figure in figures {
        let Some((at, value)) = point(figure) else { continue };
        match curves.iter_mut().find(|(source, _)| *source == figure.source) {
            Some((_, curve)) => drop(curve.insert(at, value)),
            None => curves.push((figure.source.clone(), Curve::from([(at, value)]))),
        }
    }
    curves.retain(|(_, curve)| curve.len() >= FEWEST);
    curves
}

type Drawn = Result<(), Box<dyn std::error::Error>>;

fn draw(
    root: &DrawingArea<SVGBackend<'_>, Shift>,
    panels: &[[Option<Panel>; 2]],
    colours: &[(String, RGBColor)],
) -> Drawn {
    root.fill(&WHITE)?;
    let across = most_across(panels);
    let areas = root.split_evenly((panels.len(), across));
    for (area, panel) in areas.iter().zip(panels.iter().flat_map(|line| &line[..across])) {
        if let Some(panel) = panel {
            draw_panel(area, panel, colours)?;
        }
    }
    root.present()?;
    Ok(())
}

fn draw_panel(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel, colours: &[(String, RGBColor)]) -> Drawn {
    let is_time = panel.up == "microseconds";
    // Coordinates are logarithms: to base 2 across, and to base 10 up for a time.
    let height = move |value: f64| if is_time { value.log10() } else { value };
    let across = |at: usize| (at as f64).log2();
    let every = || panel.curves.iter().chain(&panel.copies).flat_map(|(_, curve)| curve);
    let ends = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| (least.min(value), most.max(value)))
    };
    let (left, right) = ends(&mut every().map(|(&at, _)| across(at)));
    let (least, most) = ends(&mut every().map(|(_, &value)| height(value)));
    let bottom = if is_time { least - 0.1 } else { 0.0 };
    let top = if is_time { most + 0.3 } else { 1.18 * most };
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, (FONT, 15))
        .margin(8)
        .margin_right(26)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(left..right, bottom..top)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .x_desc(panel.across)
        .y_desc(panel.up)
        .label_style((FONT, 12))
        .axis_desc_style((FONT, 13))
        .x_labels((right - left).ceil().clamp(2.0, 11.0) as usize + 1)
        .y_labels(8)
        .x_label_formatter(&|&at| power_of_two(at))
        .y_label_formatter(&|&value| if is_time { power_of_ten(value) } else { format!("{value:.0}") })
        .draw()?;
    let colour_of =
        |source: &str| colours.iter().find(|(known, _)| known == source).map_or(BLACK, |(_, colour)| *colour);
    for (source, copy) in &panel.copies {
        let points = copy.iter().map(|(&at, &value)| (across(at), height(value)));
        let line = DashedLineSeries::new(points, 5, 4, colour_of(source).stroke_width(1));
        chart.draw_series(line)?.label(format!("copy ({source})")).legend(dashes(colour_of(source)));
    }
    for (source, curve) in &panel.curves {
        let points: Vec<(f64, f64)> = curve.iter().map(|(&at, &value)| (across(at), height(value))).collect();
        let colour = colour_of(source);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
            .label(source.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(points.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
    }
    // The legend: times grow to the right, so upper left; rates leave room below, on the side with
    // fewer low points.
    let low = |is_left: bool| {
        let is_there =
            |(at, value): (&usize, &f64)| *value < 0.6 * top && (across(*at) < (left + right) / 2.0) == is_left;
        panel.curves.iter().flat_map(|(_, curve)| curve).filter(|&point| is_there(point)).count()
    };
    let place = match (is_time, low(true) <= low(false)) {
        (true, _) => SeriesLabelPosition::UpperLeft,
        (false, true) => SeriesLabelPosition::LowerLeft,
        (false, false) => SeriesLabelPosition::LowerRight,
    };
    chart
        .configure_series_labels()
        .position(place)
        .label_font((FONT, 12))
        .background_style(WHITE.mix(0.8))
        .border_style(TRANSPARENT)
        .draw()?;
    Ok(())
}

/// The symbol of a dashed line in the legend.
fn dashes(colour: RGBColor) -> impl Fn((i32, i32)) -> PathElement<(i32, i32)> {
    move |(x, y)| PathElement::new([(x, y), (x + 6, y)], colour.stroke_width(1))
}

/// The number with this logarithm to base 2: `4096`, `128k`, `1M`; empty if the logarithm is not
/// whole.
fn power_of_two(log: f64) -> String {
    if (log - log.round()).abs() > 1e-6 || !(0.0..=62.0).contains(&log) {
        return String::new();
    }
    let number = 1u64 << log.round() as u32;
    match number {
        0..=65_536 => number.to_string(),
        65_537..=1_048_575 => format!("{}k", number >> 10),
        _ => format!("{}M", number >> 20),
    }
}

fn power_of_ten(log: f64) -> String {
    let value = 10f64.powf(log);
    let decimals = if value < 9.95 { 1 } else { 0 };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(source: &str, rows: usize, cols: usize, us: f64) -> Figure {
        let subject = Subject { norm: "rms_norm".into(), op: "forward".into(), dtype: "bf16".into(), rows, cols };
        let gbs = (rows * cols) as f64 / us;
        let copy_gbs = (source == "cuda").then_some(1.1 * gbs);
        Figure {
            subject,
            source: source.into(),
            is_ours: source == "cuda",
            device: None,
            us,
            gbs,
            copy_gbs,
            is_cold: true,
            has_gaps: false,
        }
    }

    #[test]
    fn a_picture_has_every_source_and_the_copy() {
        let mut figures: Vec<Figure> = (6..12).map(|bits| figure("cuda", 1 << (20 - bits), 1 << bits, 50.0)).collect();
        figures.extend((6..12).map(|bits| figure("quack", 1 << (20 - bits), 1 << bits, 60.0)));
        figures.extend((0..9).map(|bits| figure("cuda", 1 << bits, 2048, 1.0 + bits as f64)));
        let svg = svg(&figures).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        // The colours that a dark scheme replaces are those of the picture.
        for attribute in ["fill=\"#FFFFFF\"", "stroke=\"#E2E2E2\"", "fill=\"#000000\"", "stroke=\"#4A8C00\""] {
            assert!(svg.contains(&format!(" {attribute}")) && svg.contains(&format!("[{attribute}]")), "{attribute}");
        }
        for text in ["rms_norm forward bf16, 2 MiB a matrix", "2048 columns", "copy (cuda)", "quack"] {
            assert!(svg.contains(text), "{text}");
        }
        // Two panels: the copy in both, and quack, which has no sweep of rows, in one.
        assert_eq!((svg.matches("copy (cuda)").count(), svg.matches("quack").count()), (2, 1));
    }

    #[test]
    fn panels_of_one_kind_stand_two_a_line() {
        let lengths = |op: &str| {
            let figures = (6..12).map(|bits| figure("cuda", 1 << (20 - bits), 1 << bits, 50.0));
            figures.map(|f| Figure { subject: Subject { op: op.into(), ..f.subject }, ..f }).collect::<Vec<_>>()
        };
        let size = |figures: &[Figure]| svg(figures).unwrap().lines().next().unwrap().to_string();
        let (one, three) = (lengths("forward"), ["forward", "add_forward", "backward"].map(lengths).concat());
        assert!(size(&one).contains("width=\"560\" height=\"330\""), "{}", size(&one));
        assert!(size(&three).contains("width=\"1120\" height=\"660\""), "{}", size(&three));
        assert_eq!(svg(&three).unwrap().matches(" a matrix").count(), 3);
    }

    #[test]
    fn too_few_points_make_no_picture() {
        let figures = [figure("cuda", 1024, 1024, 50.0), figure("cuda", 2048, 512, 50.0)];
        assert!(matches!(svg(&figures), Err(BenchError::Input(message)) if message.contains("3 row lengths")));
    }

    #[test]
    fn the_panel_of_lengths_has_those_of_the_common_size() {
        let figures: Vec<Figure> =
            [(1024, 1000), (512, 2048), (256, 4096), (1, 4096)].map(|(m, n)| figure("cuda", m, n, 1.0)).into();
        let [cols, rows] = panels_of(&figures.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(cols.unwrap().curves[0].1.keys().copied().collect::<Vec<_>>(), [1000, 2048, 4096]);
        assert!(rows.is_none());
    }

    #[test]
    fn backends_have_sizes_of_their_own() {
        let mut figures: Vec<Figure> = (7..12).map(|bits| figure("cuda", 1 << (27 - bits), 1 << bits, 9.0)).collect();
        figures.extend((7..12).map(|bits| figure("cpu", 1 << (23 - bits), 1 << bits, 9.0)));
        let [cols, _] = panels_of(&figures.iter().collect::<Vec<_>>()).unwrap();
        let cols = cols.unwrap();
        assert!(cols.title.ends_with("16 MiB or 256 MiB a matrix"), "{}", cols.title);
        assert_eq!(cols.curves.iter().map(|(source, _)| source.as_str()).collect::<Vec<_>>(), ["cuda", "cpu"]);
    }

    #[test]
    fn labels_are_whole_powers() {
        assert_eq!([7.0, 7.5, 16.0, 17.0, 20.0].map(power_of_two), ["128", "", "65536", "128k", "1M"]);
        assert_eq!([0.0, 1.0, 2.5].map(power_of_ten), ["1.0", "10", "316"]);
    }
}
