//! Checks a report that someone else made.

use std::fmt;

use serde_json::Value;

use crate::case::profiles::Profile;
use crate::report::summary::{SEAL, SUITE_VERSION};
use crate::run::hash_of;
use crate::run::memory::sha256;

/// The last line of a report of [`run`](crate::run) or of `rmsnorm conformance --json`, checked: it is
/// as it was written, and from a whole profile of this version of the suite. `Display` prints the
/// cells of a row: backend, device, host, profile, cases, conclusion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedReport {
    /// The name of the backend.
    pub backend: String,
    /// The device, as the backend describes it.
    pub device: String,
    /// The operating system and the processor architecture; or the browser and its adapter.
    pub host: String,
    /// The profile.
    pub profile: &'static str,
    /// Number of cases that passed.
    pub passed: u64,
    /// Number of cases that failed.
    pub failed: u64,
    /// Number of cases that the backend does not support on the device.
    pub unsupported: u64,
    /// Whether the run proves as much as its profile can.
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

/// Checks a report: a line of JSON per case and the summary, or the summary alone.
///
/// The summary holds a digest of itself and one of the lines, so a report that was changed by hand is
/// refused. That is no signature: a program can make up a report.
///
/// # Errors
/// [`ReportError`]: the text is no report, was changed, is from another version of the suite, or
/// does not cover a whole profile.
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
    let text = text.trim_end();
    let (cases, summary) = text.rfind('\n').map_or(("", text), |end| text.split_at(end + 1));
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
    let version = text_of("suite_version");
    if version != SUITE_VERSION {
        return refused(format!(
            "the report is from version {version} of the suite, this program checks {SUITE_VERSION}; fix: use rmsnorm {version}"
        ));
    }
    let profile = text_of("profile");
    let Some(profile) = Profile::ALL.into_iter().find(|known| known.name() == profile) else {
        return refused(format!(
            "the run covers no whole profile, but {profile:?}; fix: run a profile without --case, --part and --most-cases"
        ));
    };
    let list = profile.cases(fields["seed"].as_u64().unwrap_or_default());
    if hash_of(&list) != text_of("list_hash") {
        return refused("the list of cases is not that of this version; fix: use a released version of the suite");
    }
    let count = |name: &str| fields["counts"][name].as_u64().unwrap_or_default();
    let (passed, failed, unsupported) = (count("passed"), count("failed"), count("unsupported"));
    let total = passed + failed + unsupported + count("vacuous") + count("skipped");
    if total < list.len() as u64 {
        return refused(format!(
            "the run has {total} of the {} cases; fix: let it run to its end, without --fail-fast",
            list.len()
        ));
    }
    Ok(CheckedReport {
        backend: text_of("backend"),
        device: text_of("device"),
        host: text_of("host"),
        profile: profile.name(),
        passed,
        failed,
        unsupported,
        is_success: fields["success"] == true,
        conclusion: text_of("conclusion"),
    })
}

impl fmt::Display for CheckedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedReport { backend, device, host, profile, passed, failed, unsupported, conclusion, .. } = self;
        write!(
            f,
            "{backend} | {device} | {host} | {profile} | {passed} passed, {failed} failed, {unsupported} unsupported | {conclusion}"
        )
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
        assert_eq!(
            (checked.backend.as_str(), checked.host.as_str(), checked.profile),
            ("simulated", "a browser", "smoke")
        );
        assert_eq!((checked.is_success, checked.failed, checked.conclusion.as_str()), (true, 0, "passed"));
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

    /// What a program wrote that is not this version, or ran less.
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
            (("\"passed\":", "\"passed\":0,\"x\":"), "of the"),
        ] {
            assert!(reason(&sealed(change)).contains(expected), "{change:?}: {}", reason(&sealed(change)));
        }
        let part = report(&Options { part: Some((1, 9)), ..options() });
        assert!(reason(&part).contains("no whole profile"), "{}", reason(&part));
    }
}
