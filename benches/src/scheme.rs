//! Colours of pictures, in light and dark pages.

use plotters::style::{BLACK, RGBColor};

/// The background. Text is black.
pub(crate) const WHITE: RGBColor = RGBColor(255, 255, 255);
/// The grid of a chart.
pub(crate) const GRID: RGBColor = RGBColor(226, 226, 226);
/// The bar of a copy.
pub(crate) const COPY: RGBColor = RGBColor(168, 168, 168);

/// Each colour of a picture in a light page, with the colour that takes its place in a dark one.
const DARK: [(RGBColor, RGBColor); 14] = [
    (WHITE, RGBColor(13, 17, 23)),
    (BLACK, RGBColor(230, 237, 243)),
    (GRID, RGBColor(48, 54, 61)),
    (COPY, RGBColor(110, 118, 129)),
    (CUDA, RGBColor(118, 185, 0)),
    (WGPU, RGBColor(88, 166, 255)),
    (CPU, RGBColor(255, 150, 80)),
    (QUACK, RGBColor(190, 140, 255)),
    (LIGER, RGBColor(255, 110, 125)),
    (COMPILE, RGBColor(160, 160, 160)),
    (TORCH, RGBColor(205, 205, 205)),
    (OTHERS[1], RGBColor(60, 200, 215)),
    (OTHERS[2], RGBColor(224, 175, 75)),
    (OTHERS[3], RGBColor(190, 150, 120)),
];

const CUDA: RGBColor = RGBColor(74, 140, 0);
const WGPU: RGBColor = RGBColor(31, 98, 205);
const CPU: RGBColor = RGBColor(214, 96, 24);
const QUACK: RGBColor = RGBColor(135, 60, 190);
const LIGER: RGBColor = RGBColor(205, 40, 62);
const COMPILE: RGBColor = RGBColor(110, 110, 110);
const TORCH: RGBColor = RGBColor(180, 180, 180);
const OTHERS: [RGBColor; 4] = [BLACK, RGBColor(23, 158, 174), RGBColor(181, 126, 20), RGBColor(122, 88, 64)];

/// A colour for each source. Known sources always have the same colour.
pub(crate) fn colours(sources: &[&str]) -> Vec<(String, RGBColor)> {
    let mut others = OTHERS.into_iter().cycle();
    let colour = |source: &&str| {
        let known = match *source {
            "cuda" => Some(CUDA),
            "wgpu" => Some(WGPU),
            "cpu" => Some(CPU),
            "quack" => Some(QUACK),
            "liger" => Some(LIGER),
            "compile" => Some(COMPILE),
            "torch" => Some(TORCH),
            _ => others.next(),
        };
        (source.to_string(), known.unwrap_or(BLACK))
    };
    sources.iter().map(colour).collect()
}

/// A colour as SVG writes it.
pub(crate) fn hex(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// The picture with a style that replaces its colours where the reader prefers a dark scheme. A
/// rule of a style wins over the attributes `fill` and `stroke`.
pub(crate) fn with_dark(svg: &str) -> String {
    let rules = DARK.map(|(light, dark)| {
        let (light, dark) = (hex(light), hex(dark));
        format!("[fill=\"{light}\"]{{fill:{dark}}}[stroke=\"{light}\"]{{stroke:{dark}}}\n")
    });
    let style = format!("<style>\n@media (prefers-color-scheme:dark){{\n{}}}\n</style>", rules.concat());
    let (head, body) = svg.split_once('>').unwrap_or((svg, ""));
    format!("{head}>\n{style}{body}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_have_contrast_on_both_backgrounds() {
        // The formulas of WCAG 2. Its limit for graphics is 3; greys of background lines need less.
        let luminance = |RGBColor(red, green, blue): RGBColor| {
            let linear = |value: u8| {
                let value = f64::from(value) / 255.0;
                if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
            };
            0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)
        };
        let contrast = |one, other| {
            let (one, other) = (luminance(one) + 0.05, luminance(other) + 0.05);
            f64::max(one / other, other / one)
        };
        let dark_of = |colour| DARK.iter().find(|(light, _)| *light == colour).unwrap().1;
        for (source, colour) in
            colours(&["cuda", "wgpu", "cpu", "quack", "liger", "compile", "torch", "a", "b", "c", "d"])
        {
            let least = if source == "torch" { 2.0 } else { 3.0 };
            assert!(contrast(colour, WHITE) >= least, "{source} on white");
            assert!(contrast(dark_of(colour), dark_of(WHITE)) >= 3.0, "{source} on dark");
        }
    }

    #[test]
    fn dark_colours_are_a_style_of_the_picture() {
        let svg = with_dark("<svg width=\"1\">\n<text fill=\"#000000\">a</text>\n</svg>\n");
        assert!(svg.starts_with("<svg width=\"1\">\n<style>\n@media (prefers-color-scheme:dark){\n"), "{svg}");
        assert!(svg.contains("[fill=\"#000000\"]{fill:#E6EDF3}") && svg.ends_with("</svg>\n"), "{svg}");
        let attribute = format!("fill=\"{}\"", hex(BLACK));
        assert!(svg.contains(&attribute), "{attribute}");
    }
}
