//! Checks a report that someone else made.

use std::fmt;

use serde_json::Value;

use crate::case::profiles::Profile;
use crate::report::summary::{SEAL, SUITE_VERSION};
use crate::run::hash_of;
use crate::run::memory::sha256;

/// The checked summary of a report of [`run`](crate::run) or of `rmsnorm conformance --json`: its
/// digests match, and its run covered a whole profile of this version of the suite. `Display`
/// prints the cells of a row: backend, device, host, profile, cases, conclusion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedReport {
    /// The version of the suite.
    pub version: String,
    /// The name of the backend.
    pub backend: String,
    /// The device, as the backend describes it.
    pub device: String,
    /// The operating system and the processor architecture; or the browser and its adapter.
    pub host: String,
    /// The profile; `part` or `case` for less.
    pub profile: String,
    /// Seed of the drawn cases.
    pub seed: u64,
    /// SHA-256 of the ids of the list of cases.
    pub list_hash: String,
    /// Numbers of cases that passed, failed, were refused as `Unsupported`, prove nothing, or were
    /// skipped, with their names.
    pub counts: [(&'static str, u64); 5],
    /// Whether the run meets all conditions of [`Summary::is_success`](crate::Summary::is_success).
    pub is_success: bool,
    /// The result in a few words: `conformant`, `passed`, or the reason why it is neither.
    pub conclusion: String,
}

/// The reason why a report is refused, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReportError(String);

fn refused<T>(reason: impl Into<String>) -> Result<T, ReportError> {
    Err(ReportError(reason.into()))
}

/// Reads a report whose digests match: a line of JSON per case and the summary, or the summary alone.
/// It may be from another version of the suite, and of a part of a profile.
///
/// # Errors
/// [`ReportError`]: the text is no report, or was changed.
pub fn read_report(text: &str) -> Result<CheckedReport, ReportError> {
    let text = text.replace("\r\n", "\n");
    let (cases, summary) =
        text.trim_end().rfind('\n').map_or(("", text.trim_end()), |end| text.trim_end().split_at(end + 1));
    let Ok(fields) = serde_json::from_str::<Value>(summary) else {
        return refused(
            "the last line is no JSON; fix: save the report of `rmsnorm conformance --json FILE` or of the page",
        );
    };
    let text_of = |name: &str| fields[name].as_str().unwrap_or_default().to_owned();
    let sealed = summary.rfind(SEAL).map(|place| (format!("{}}}", &summary[..place]), &summary[place + SEAL.len()..]));
    let is_sealed = |(line, seal): &(String, &str)| seal.strip_suffix("\"}") == Some(&sha256(line.as_bytes()));
    if !sealed.as_ref().is_some_and(is_sealed) {
        return refused(
            "the summary, its last line, is not as the suite wrote it; fix: save the report again, unchanged",
        );
    }
    if !cases.is_empty() && sha256(cases.as_bytes()) != text_of("cases_sha256") {
        return refused(
            "the lines of the cases are not as the suite wrote them; fix: save the report again, unchanged",
        );
    }
    let count = |name: &str| fields["counts"][name].as_u64().unwrap_or_default();
    Ok(CheckedReport {
        version: text_of("suite_version"),
        backend: text_of("backend"),
        device: text_of("device"),
        host: text_of("host"),
        profile: text_of("profile"),
        seed: fields["seed"].as_u64().unwrap_or_default(),
        list_hash: text_of("list_hash"),
        counts: ["passed", "failed", "unsupported", "vacuous", "skipped"].map(|name| (name, count(name))),
        is_success: fields["success"] == true,
        conclusion: text_of("conclusion"),
    })
}

/// Checks a report: its digests match, and its run covered a whole profile of this version of the
/// suite.
///
/// A report that was changed by hand is refused. The digests are no signature: a program can compute
/// them for invented results.
///
/// # Errors
/// [`ReportError`]: as [`read_report`]; or the report is from another version of the suite, or of a
/// part of a profile.
///
/// # Example
/// ```
/// use rmsnorm_conformance::{Options, check_report, run, simulate::SimulatedBackend};
///
/// let (mut lines, options) = (Vec::new(), Options { self_test: false, ..Options::default() });
/// run(&SimulatedBackend::new(None), &options, &mut |_, _| {}, Some(&mut lines)).unwrap();
/// let report = String::from_utf8(lines).unwrap();
/// assert!(check_report(&report).unwrap().is_success);
/// assert!(check_report(&report.replacen("pass", "fail", 1)).is_err());
/// ```
pub fn check_report(text: &str) -> Result<CheckedReport, ReportError> {
    let report = read_report(text)?;
    let CheckedReport { version, profile, seed, list_hash, .. } = &report;
    if version != SUITE_VERSION {
        return refused(format!(
            "the report is from version {version} of the suite, this program checks {SUITE_VERSION}; fix: use rmsnorm {version}"
        ));
    }
    let Some(known) = Profile::ALL.into_iter().find(|known| known.name() == profile) else {
        return refused(format!(
            "the run has no whole profile, but a {profile:?}; fix: run a profile without --case, --part, --most-cases and --fail-fast"
        ));
    };
    if hash_of(&known.cases(*seed)) != *list_hash {
        return refused("the list of cases is not that of this version; fix: use a released version of the suite");
    }
    Ok(report)
}

impl fmt::Display for CheckedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedReport { version, backend, device, host, profile, counts, conclusion, .. } = self;
        let counts = counts.iter().filter(|(_, count)| *count > 0).map(|(name, count)| format!("{count} {name}"));
        let counts = counts.collect::<Vec<_>>().join(", ");
        write!(f, "{backend} | {device} | {host} | {profile} {version} | {counts} | {conclusion}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selftest::simulate::SimulatedBackend;
    use crate::{Options, run};

    fn report(options: &Options) -> String {
        let mut lines = Vec::new();
        run(&SimulatedBackend::new(None), options, &mut |_, _| {}, Some(&mut lines)).expect("nothing is written");
        String::from_utf8(lines).expect("JSON is UTF-8")
    }

    fn options() -> Options {
        Options { self_test: false, host: Some("a browser".into()), ..Options::default() }
    }

    fn reason(text: &str) -> String {
        check_report(text).expect_err("it is refused").to_string()
    }

    #[test]
    fn whole_report_and_its_summary_alone_are_accepted() {
        let report = report(&options());
        let checked = check_report(&report).expect("it is as it was written");
        let CheckedReport { backend, host, profile, conclusion, is_success, counts, .. } = &checked;
        assert_eq!([backend, host, profile, conclusion], ["simulated", "a browser", "smoke", "passed"]);
        assert!(*is_success && counts[0].1 > 1000 && counts[1..].iter().all(|(_, count)| *count == 0), "{checked:?}");
        assert_eq!(check_report(&report.replace('\n', "\r\n")), Ok(checked.clone()));
        let summary = report.lines().last().expect("the summary");
        assert_eq!(check_report(summary), Ok(checked));
    }

    /// Any changed character of any line, a line less, and a line more.
    #[test]
    fn report_that_was_changed_is_refused() {
        let report = report(&options());
        let lines: Vec<&str> = report.lines().collect();
        for (line, from, to) in [
            (0, "pass", "fail"),
            (lines.len() / 2, "elapsed_us\":", "elapsed_us\":1"),
            (lines.len() - 1, "\"failed\":0", "\"failed\":1"),
            (lines.len() - 1, "a browser", "another browser"),
            (lines.len() - 1, "\"list_hash\":\"", "\"list_hash\":\"0"),
            (lines.len() - 1, "\"sha256\":\"", "\"sha256\":\"0"),
        ] {
            let mut changed = lines.clone();
            let text = lines[line].replacen(from, to, 1);
            assert_ne!(text, lines[line], "{from}");
            changed[line] = &text;
            assert!(reason(&changed.join("\n")).contains("as the suite wrote"), "{from}");
        }
        assert!(reason(&lines[1..].join("\n")).contains("lines of the cases"));
        assert!(reason(&[&lines[..1], &lines].concat().join("\n")).contains("lines of the cases"));
    }

    /// Reports of another version, of another list, and of a part of a profile.
    #[test]
    fn report_of_something_else_is_refused() {
        assert!(reason("").contains("no JSON"));
        assert!(reason("{}").contains("as the suite wrote it"));
        let sealed = |change: (&str, &str)| {
            let report = report(&options());
            let line = report.lines().last().expect("the summary");
            let line = line[..line.rfind(SEAL).expect("a seal")].replacen(change.0, change.1, 1) + "}";
            format!("{}{SEAL}{}\"}}", &line[..line.len() - 1], sha256(line.as_bytes()))
        };
        assert!(check_report(&sealed(("", ""))).is_ok());
        for (change, expected) in [
            (("\"suite_version\":\"", "\"suite_version\":\"9"), "version 9"),
            (("\"list_hash\":\"", "\"list_hash\":\"0"), "list of cases"),
            (("\"profile\":\"smoke\"", "\"profile\":\"case\""), "no whole profile"),
        ] {
            assert!(reason(&sealed(change)).contains(expected), "{change:?}: {}", reason(&sealed(change)));
            assert!(read_report(&sealed(change)).is_ok(), "{change:?}");
        }
        let part = report(&Options { part: Some((1, 9)), ..options() });
        assert!(reason(&part).contains("no whole profile"), "{}", reason(&part));
    }
}
