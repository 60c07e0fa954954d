//! Figures of several sources in one table, each subject in a line.

use crate::figure::{Figure, Subject, sources};

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
        let Subject { norm, op, dtype, rows, cols } = subject;
        let mut cells = vec![format!("{norm} {op}"), dtype.clone(), format!("{rows}x{cols}")];
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
