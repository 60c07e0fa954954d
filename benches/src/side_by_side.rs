//! Figures of several sources in one table, each subject in a line.

use std::collections::BTreeSet;

use crate::figure::{Figure, Subject, sources};

/// Times up to this multiple of the fastest are level with it: two runs of one program differ by as much.
const LEVEL: f64 = 1.005;

/// The table in Markdown. The first source is the one that the others are compared with: `1.20x` behind a time says that
/// the first takes so much less. Subjects that only one source has are left out unless there is but one source; `None` if
/// that leaves nothing.
pub fn table(figures: &[Figure]) -> Option<String> {
    let sources = sources(figures);
    let (first, others) = sources.split_first()?;
    let mut head = vec!["operation".to_owned(), "dtype".into(), "rows x cols".into(), "copy, GB/s".into()];
    head.push(format!("{first}, us"));
    head.extend(["GB/s".into(), "of copy".into()]);
    head.extend(others.iter().flat_map(|source| [format!("{source}, us"), "of copy".into(), format!("{first} is")]));
    let mut lines = Vec::new();
    for subject in subjects(figures) {
        let of = |source: &str| figures.iter().find(|figure| figure.subject == *subject && figure.source == source);
        if sources.len() > 1 && sources.iter().filter(|source| of(source).is_some()).count() < 2 {
            continue;
        }
        let reference = of(first);
        let copy = reference.and_then(|figure| figure.copy_gbs).filter(|_| reference.is_some_and(|f| f.is_cold));
        let Subject { norm, op, dtype, .. } = subject;
        let mut cells = vec![format!("{norm} {op}"), dtype.clone(), subject.shape()];
        cells.push(copy.map_or("-".into(), |copy| format!("{copy:.0}")));
        cells.extend(own(reference));
        for source in others {
            cells.extend(compared(of(source), reference, copy));
        }
        lines.push(line(&cells));
    }
    let rule = vec!["---".to_owned(); head.len()];
    (!lines.is_empty()).then(|| line(&head) + &line(&rule) + &lines.concat())
}

/// A table for a page: a line per subject, sorted by `order`, a column per source, and the share of its copy that the first source of ours
/// reaches. The fastest of a line is bold, and every time that is level with it. Times have three significant digits, in ms if all of them are above 1 ms. `+`
/// behind a time marks gaps between launches, which keep it from being the fastest.
pub fn page<K: Ord>(figures: &[Figure], order: impl Fn(&Subject) -> K) -> String {
    let sources = sources(figures);
    let first = figures.iter().find(|figure| figure.is_ours && figure.copy_gbs.is_some() && figure.is_cold);
    let ours =
        figures.iter().filter(|figure| figure.is_ours).map(|figure| &figure.source).collect::<BTreeSet<_>>().len();
    let (unit, scale) = if figures.iter().all(|figure| figure.us >= 1e3) { ("ms", 1e-3) } else { ("us", 1.0) };
    let dtypes: BTreeSet<&str> = figures.iter().map(|figure| figure.subject.dtype.as_str()).collect();

    let mut head = vec![format!("time in {unit}"), "shape".into()];
    for source in &sources {
        let is_ours = figures.iter().any(|figure| figure.is_ours && figure.source == *source);
        head.push(match (is_ours, ours) {
            (true, 1) => "rmsnorm".into(),
            (true, _) => format!("rmsnorm, {source}"),
            (false, _) => (*source).to_owned(),
        });
        if first.is_some_and(|first| first.source == *source) {
            head.push("of copy".into());
        }
    }
    let mut text = line(&head) + &"|---".repeat(head.len()) + "|\n";
    let mut operation = String::new();
    let mut subjects = subjects(figures);
    subjects.sort_by_cached_key(|subject| order(subject));
    for subject in subjects {
        let of = |source: &str| figures.iter().find(|figure| figure.subject == *subject && figure.source == source);
        let times = sources.iter().filter_map(|source| of(source)).filter(|figure| !figure.has_gaps);
        let best = times.map(|figure| value(&three_digits(scale * figure.us))).min_by(f64::total_cmp);
        let mut name = subject.title();
        if dtypes.len() > 1 {
            name = format!("{name}, {}", subject.dtype);
        }
        let mut cells = vec![if name == operation { String::new() } else { name.clone() }];
        operation = name;
        cells.push(subject.shape());
        for source in &sources {
            let figure = of(source);
            cells.push(figure.map_or(String::new(), |figure| {
                let time = three_digits(scale * figure.us);
                match figure.has_gaps {
                    true => time + "+",
                    false if best.is_some_and(|best| value(&time) <= LEVEL * best) => format!("**{time}**"),
                    false => time,
                }
            }));
            if first.is_some_and(|first| first.source == *source) {
                cells.push(figure.map_or(String::new(), |figure| share(figure, figure.copy_gbs)));
            }
        }
        text.push_str(&line(&cells));
    }
    text
}

/// A number with three significant digits, with no more than two behind the point.
fn three_digits(number: f64) -> String {
    let rounded = value(&format!("{number:.2e}"));
    let decimals = [10.0, 100.0].iter().filter(|limit| rounded < **limit).count();
    format!("{rounded:.decimals$}")
}

fn value(text: &str) -> f64 {
    text.parse().unwrap_or(f64::INFINITY)
}

/// The subjects, in the order in which they come.
fn subjects(figures: &[Figure]) -> Vec<&Subject> {
    let mut subjects: Vec<&Subject> = Vec::new();
    for figure in figures {
        if !subjects.contains(&&figure.subject) {
            subjects.push(&figure.subject);
        }
    }
    subjects
}

fn own(figure: Option<&Figure>) -> [String; 3] {
    let Some(figure) = figure else { return ["-"; 3].map(Into::into) };
    [time(figure), rate(figure), share(figure, figure.copy_gbs)]
}

/// Another source's time, its share of its own copy (else of the first's), and how much faster the first is.
fn compared(figure: Option<&Figure>, first: Option<&Figure>, copy: Option<f64>) -> [String; 3] {
    let Some(figure) = figure else { return ["-"; 3].map(Into::into) };
    let ratio = first.filter(|first| !first.has_gaps && !figure.has_gaps);
    let ratio = ratio.map_or("-".into(), |first| format!("{:.2}x", figure.us / first.us));
    // Peers do not tell what is in a cache: as ours has it.
    let is_cold = first.is_none_or(|first| first.is_cold);
    [time(figure), share(figure, figure.copy_gbs.or(copy).filter(|_| is_cold)), ratio]
}

fn time(figure: &Figure) -> String {
    let decimals = if figure.us < 100.0 { 2 } else { 1 };
    format!("{:.decimals$}{}", figure.us, if figure.has_gaps { "+" } else { "" })
}

fn rate(figure: &Figure) -> String {
    if figure.is_cold { format!("{:.*}", usize::from(figure.gbs < 100.0), figure.gbs) } else { "-".into() }
}

fn share(figure: &Figure, copy: Option<f64>) -> String {
    copy.filter(|_| figure.is_cold).map_or("-".into(), |copy| format!("{:.1} %", 100.0 * figure.gbs / copy))
}

fn line(cells: &[String]) -> String {
    format!("| {} |\n", cells.join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(source: &str, cols: usize, us: f64, copy_gbs: Option<f64>) -> Figure {
        let subject = Subject { norm: "rms_norm".into(), op: "forward".into(), dtype: "bf16".into(), rows: 8, cols };
        Figure {
            subject,
            source: source.into(),
            is_ours: true,
            device: None,
            us,
            gbs: 1000.0 / us,
            copy_gbs,
            is_cold: true,
            has_gaps: false,
        }
    }

    #[test]
    fn the_first_source_is_compared_with() {
        let figures =
            [figure("cuda", 64, 10.0, Some(125.0)), figure("quack", 64, 12.5, None), figure("cuda", 128, 5.0, None)];
        let text = table(&figures).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(
            lines[2],
            "| rms_norm forward | bf16 | 8x64 | 125 | 10.00 | 100 | 80.0 % | 12.50 | 64.0 % | 1.25x |"
        );
    }

    #[test]
    fn page_has_a_column_per_source_and_marks_the_fastest() {
        let peer = |cols, us| Figure { is_ours: false, ..figure("quack", cols, us, None) };
        let late = Figure { has_gaps: true, source: "torch".into(), ..peer(64, 5.0) };
        let mut wide = figure("cuda", 128, 123.4, Some(125.0));
        wide.subject.op = "add_forward".into();
        let figures = [figure("cuda", 64, 10.0, Some(125.0)), peer(64, 9.996), late, wide.clone()];
        let expected = "| time in us | shape | rmsnorm | of copy | quack | torch |\n|---|---|---|---|---|---|\n\
            | RMS forward | 8x64 | **10.0** | 80.0 % | **10.0** | 5.00+ |\n\
            | residual + RMS forward | 8x128 | **123** | 6.5 % |  |  |\n";
        assert_eq!(page(&figures, |_| ()), expected);

        // Milliseconds where all times are long; two backends and two dtypes are told apart.
        wide.us = 1234.0;
        let mut half = Figure { source: "wgpu".into(), us: 56_789.0, ..wide.clone() };
        half.subject.dtype = "f16".into();
        let text = page(&[wide, half], |_| ());
        assert!(text.starts_with("| time in ms | shape | rmsnorm, cuda | of copy | rmsnorm, wgpu |\n"), "{text}");
        assert!(text.contains("| residual + RMS forward, f16 | 8x128 |  |  | **56.8** |\n"), "{text}");
    }

    #[test]
    fn one_source_is_shown_whole_and_gaps_are_not_compared_with() {
        assert_eq!(table(&[figure("cpu", 64, 10.0, None), figure("cpu", 128, 5.0, None)]).unwrap().lines().count(), 4);
        let mut late = figure("compile", 64, 20.0, None);
        late.has_gaps = true;
        let text = table(&[figure("cuda", 64, 10.0, Some(125.0)), late]).unwrap();
        assert!(text.lines().nth(2).unwrap().ends_with("| 20.00+ | 40.0 % | - |"), "{text}");
    }

    #[test]
    fn what_is_in_the_cache_has_no_rate() {
        let mut small = figure("cpu", 64, 0.5, Some(125.0));
        small.is_cold = false;
        let peer = Figure { is_ours: false, ..figure("quack", 64, 1.0, Some(125.0)) };
        let text = table(&[small, peer]).unwrap();
        assert!(text.ends_with("| rms_norm forward | bf16 | 8x64 | - | 0.50 | - | - | 1.00 | - | 2.00x |\n"), "{text}");
        assert_eq!(table(&[figure("cpu", 64, 1.0, None), figure("cuda", 128, 1.0, None)]), None);
    }
}
