//! The result of a whole run: a line of JSON, and one page for people.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};

use rmsnorm_spec::{DType, Storage};
use serde::ser::{Serialize, Serializer};
use serde_json::json;

use crate::case::profiles::Profile;
use crate::finding::{Finding, Status};
use crate::report::{CaseReport, Counts, Quality};
use crate::run::memory::sha256;
use crate::selftest::SelfTest;
use crate::{Arithmetic, NonFinite, StoreRounding};

/// Version of the suite. It is in every report, because results of different versions are not
/// comparable.
pub const SUITE_VERSION: &str = env!("CARGO_PKG_VERSION");

/// The beginning of the last field of a summary.
pub(crate) const SEAL: &str = r#","sha256":""#;

/// A whole run.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The backend's name.
    pub backend: &'static str,
    /// The device, as the backend describes it.
    pub device: String,
    /// The operating system and the processor architecture; or the browser and its adapter.
    pub host: String,
    /// The tuning table of its plans, as the backend describes it. Empty without a table.
    pub tuning: String,
    /// The profile; `part` for a part of its cases, or `case` for cases given by their ids.
    pub profile: &'static str,
    /// Seed of the drawn cases.
    pub seed: u64,
    /// SHA-256 of the ids of the profile's list (or of the part that ran), one per line. The cases
    /// of the backend's breakpoints are not included.
    pub list_hash: String,
    /// SHA-256 of the digests of all cases with their ids, in hexadecimal. Two runs of the same
    /// list (breakpoints included) have the same digest if and only if their outputs have the same
    /// bits.
    pub digest: String,
    /// SHA-256 of the cases' lines of JSON, in hexadecimal. Of no bytes if none were written.
    pub cases_sha256: String,
    /// The declared arithmetic.
    pub arithmetic: Arithmetic,
    /// The result of the self-test, if it was requested.
    pub self_test: Option<SelfTest>,
    /// The counts.
    pub counts: Counts,
    /// Features that a conformant backend must have but that no passed case has. Determined by the
    /// core profile only.
    pub missing: Vec<&'static str>,
    /// By output and dtype.
    pub quality: BTreeMap<(&'static str, Storage), Quality>,
    /// Reasons for which cases were not executed, with counts.
    pub not_executed: BTreeMap<String, usize>,
    /// Ids and findings of the failed cases.
    pub failures: Vec<(String, Finding)>,
    /// Wall time of the run in us.
    pub elapsed_us: u64,
}

impl Summary {
    /// Adds a case to the counts.
    pub fn add(&mut self, case: &CaseReport) {
        let counter = match &case.status {
            Status::Pass => &mut self.counts.passed,
            Status::Fail(_) => &mut self.counts.failed,
            Status::Unsupported(_) => &mut self.counts.unsupported,
            Status::Vacuous(_) => &mut self.counts.vacuous,
            Status::Skipped(_) => &mut self.counts.skipped,
        };
        *counter += 1;
        match &case.status {
            Status::Pass => {}
            Status::Fail(finding) => self.failures.push((case.id.clone(), finding.clone())),
            Status::Unsupported(_) | Status::Vacuous(_) | Status::Skipped(_) => {
                let line = format!("{}: {}", case.status.name(), case.status.reason().unwrap_or_default());
                *self.not_executed.entry(line).or_default() += 1;
            }
        }
        for report in &case.outputs {
            let quality = self.quality.entry((report.output, report.storage)).or_default();
            quality.checked += report.verdict.checked;
            quality.misrounded += report.verdict.misrounded;
            quality.budget = quality.budget.max(report.verdict.budget);
        }
    }

    /// Turns an unsupported case into a failed one. The case's JSON line, already written, keeps
    /// the backend's answer.
    pub(crate) fn refuse(&mut self, id: String, rule: &str, finding: Finding) {
        let line = format!("{}: {rule}", Status::Unsupported(String::new()).name());
        if let Some(count) = self.not_executed.get_mut(&line) {
            *count -= 1;
        }
        self.not_executed.retain(|_, count| *count > 0);
        self.counts.unsupported -= 1;
        self.counts.failed += 1;
        self.failures.push((id, finding));
    }

    /// Whether the run proves as much as its profile can. Something ran, nothing failed, the
    /// self-test caught every bug, and at most one of 200 cases is vacuous. Unsupported cases are
    /// gaps that the backend declares, and are accepted, except for common calls of an operation,
    /// norm and dtype that the backend has: those count as failed.
    ///
    /// The core profile defines "conformant". It also demands the self-test, no skipped case, and a
    /// passed case for every mandatory feature.
    pub fn is_success(&self) -> bool {
        self.objection().is_none()
    }

    /// The result in a few words: `conformant` (core), `passed` (other profiles), or the reason why
    /// it is neither.
    pub fn conclusion(&self) -> String {
        let success = if self.is_core() { "conformant" } else { "passed" };
        self.objection().unwrap_or_else(|| success.into())
    }

    fn is_core(&self) -> bool {
        self.profile == Profile::Core.name()
    }

    /// The reason why the run is no success, if it is none.
    fn objection(&self) -> Option<String> {
        let Counts { passed, failed, vacuous, skipped, .. } = self.counts;
        if let Some(test) = self.self_test.as_ref().filter(|test| !test.is_success()) {
            let (survivors, alarms) = (test.survivors.len(), test.false_alarms.len());
            Some(format!(
                "nothing proven: in the self-test {survivors} planted bugs survived, with {alarms} false alarms"
            ))
        } else if failed > 0 {
            Some(format!("failed: {failed} cases"))
        } else if passed == 0 {
            Some("nothing proven: no case passed".into())
        } else if vacuous * 200 > passed + vacuous {
            Some(format!("nothing proven: {vacuous} cases are vacuous, more than one in 200"))
        } else if self.is_core() && self.self_test.is_none() {
            Some("incomplete: the self-test was left out".into())
        } else if self.is_core() && skipped > 0 {
            Some(format!("incomplete: {skipped} cases were skipped on this machine"))
        } else if self.is_core() && !self.missing.is_empty() {
            Some(format!("incomplete: no case with {} passed, which is mandatory", self.missing.join(" or ")))
        } else {
            None
        }
    }

    /// Writes the summary as one line of JSON. Its last field is a digest of the line without it,
    /// which [`check_report`](crate::check_report) compares.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn write_json(&self, writer: &mut dyn Write) -> io::Result<()> {
        let line = serde_json::to_string(self)?;
        let fields = line.strip_suffix('}').unwrap_or(&line);
        writeln!(writer, "{fields}{SEAL}{}\"}}", sha256(line.as_bytes()))
    }
}

impl Serialize for Summary {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let quality =
            |(&(output, storage), &quality): (&(&str, Storage), &Quality)| (format!("{output}/{storage}"), quality);
        let failures: Vec<_> = self.failures.iter().map(|(id, finding)| (id, finding.to_string())).collect();
        let quality: BTreeMap<_, _> = self.quality.iter().map(quality).collect();
        let line = json!({
            "suite_version": SUITE_VERSION, "backend": self.backend, "device": self.device, "tuning": self.tuning,
            "host": self.host, "profile": self.profile, "seed": self.seed,
            "list_hash": self.list_hash, "digest": self.digest, "cases_sha256": self.cases_sha256, "arithmetic": describe_arithmetic(&self.arithmetic),
            "self_test_planted": self.self_test.as_ref().map(|test| test.planted),
            "self_test_caught": self.self_test.as_ref().map(|test| test.caught),
            "counts": self.counts, "success": self.is_success(), "conclusion": self.conclusion(),
            "missing": self.missing, "quality": quality, "not_executed": self.not_executed, "failures": failures,
            "elapsed_us": self.elapsed_us,
        });
        line.serialize(serializer)
    }
}

/// The command that replays one case of a backend.
pub(crate) fn replay(backend: &str, id: &str) -> String {
    format!("rmsnorm conformance --backend {backend} --case {id}")
}

fn describe_arithmetic(arithmetic: &Arithmetic) -> String {
    let store = match arithmetic.store {
        StoreRounding::NearestEven => "stores round to nearest even",
        StoreRounding::EitherNeighbour => "stores round to either neighbour",
    };
    let non_finite = match arithmetic.non_finite {
        NonFinite::Ieee => "NaN and infinity propagate",
        NonFinite::Unspecified => "NaN and infinity are unspecified within their row",
    };
    let subnormals = if arithmetic.flushes_subnormals { "flushed" } else { "kept" };
    format!(
        "u = 2^{}, rstd within {} u, {store}, subnormals {subnormals}, {non_finite}",
        arithmetic.unit_roundoff.log2(),
        arithmetic.rstd_error / arithmetic.unit_roundoff,
    )
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "conformance {SUITE_VERSION}, profile {}, list sha256 {}", self.profile, self.list_hash)?;
        writeln!(f, "backend     {}: {}, {}", self.backend, self.device, self.host)?;
        if !self.tuning.is_empty() {
            writeln!(f, "tuning      {}", self.tuning)?;
        }
        writeln!(f, "arithmetic  {}", describe_arithmetic(&self.arithmetic))?;
        if let Some(test) = &self.self_test {
            writeln!(f, "self-test   {}", test.counts())?;
        }
        writeln!(f, "\n{:<18}{:<6}{:>12}{:>16}{:>15}", "output", "dtype", "elements", "bound used up", "not nearest")?;
        for ((output, storage), quality) in &self.quality {
            let (checked, used) = (quality.checked, 100.0 * quality.budget);
            let share = 100.0 * quality.misrounded as f64 / checked.max(1) as f64;
            let nearest = if *storage == DType::F32.into() { "-".into() } else { format!("{share:.3} %") };
            writeln!(f, "{output:<18}{:<6}{checked:>12}{used:>14.1} %{nearest:>15}", storage.name())?;
        }
        writeln!(f, "\nbits        sha256 {}\n", self.digest)?;
        for (reason, count) in &self.not_executed {
            writeln!(f, "{count:>5} {reason}")?;
        }
        for (id, finding) in &self.failures {
            writeln!(f, "FAILED {finding}\n       {}", replay(self.backend, id))?;
        }
        let Counts { passed, failed, unsupported, vacuous, skipped } = self.counts;
        if unsupported + vacuous > 0 {
            writeln!(f, "{unsupported} unsupported, {vacuous} vacuous; both are listed above")?;
        }
        writeln!(f, "{}", self.conclusion())?;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Check;

    fn report(status: Status) -> CaseReport {
        CaseReport { status, ..CaseReport::new("id".into()) }
    }

    fn finding() -> Finding {
        Finding { check: Check::Bounds, output: "y", detail: "far off".into() }
    }

    fn summary() -> Summary {
        Summary {
            backend: "stub",
            device: String::new(),
            host: String::new(),
            tuning: String::new(),
            profile: Profile::Smoke.name(),
            seed: 0,
            list_hash: String::new(),
            digest: String::new(),
            cases_sha256: String::new(),
            arithmetic: Arithmetic::IEEE,
            self_test: None,
            counts: Counts::default(),
            missing: Vec::new(),
            quality: BTreeMap::new(),
            not_executed: BTreeMap::new(),
            failures: Vec::new(),
            elapsed_us: 0,
        }
    }

    #[test]
    fn every_status_has_a_count_of_its_own() {
        let mut summary = summary();
        for (status, times) in [
            (Status::Pass, 1),
            (Status::Fail(finding()), 2),
            (Status::Unsupported("rule".into()), 3),
            (Status::Vacuous("y"), 4),
            (Status::Skipped("no memory".into()), 5),
        ] {
            (0..times).for_each(|_| summary.add(&report(status.clone())));
        }
        let counts = Counts { passed: 1, failed: 2, unsupported: 3, vacuous: 4, skipped: 5 };
        assert_eq!(summary.counts, counts);
        assert_eq!(summary.failures, vec![("id".to_owned(), finding()); 2]);
        assert_eq!(summary.not_executed.values().copied().collect::<Vec<_>>(), [5, 3, 4]);
    }

    /// JSON, the summary and the exit code agree.
    #[test]
    fn json_says_of_success_what_the_summary_does() {
        for (counts, success) in [
            (Counts { passed: 1, ..Counts::default() }, true),
            (Counts::default(), false),
            (Counts { unsupported: 7, ..Counts::default() }, false),
            (Counts { passed: 10, vacuous: 1, ..Counts::default() }, false),
            (Counts { passed: 10, failed: 1, ..Counts::default() }, false),
        ] {
            let summary = Summary { counts, ..summary() };
            let mut line = Vec::new();
            summary.write_json(&mut line).expect("memory takes it");
            let line: serde_json::Value = serde_json::from_slice(&line).expect("a line is JSON");
            assert_eq!((summary.is_success(), &line["success"]), (success, &success.into()), "{counts:?}");
            assert_eq!(line["conclusion"], summary.conclusion());
        }
    }
}
