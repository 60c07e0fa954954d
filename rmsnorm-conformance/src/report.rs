//! The results of a run: a status per case, JSON lines for programs, and one page for people.
//!
//! Nothing is skipped silently. A case that did not run has a reason, and a run that executed
//! nothing has failed.

pub(crate) mod check;
pub(crate) mod summary;

use std::io::{self, Write};

use rmsnorm_spec::Storage;
use serde::ser::{Serialize, Serializer};
use serde_json::json;

use crate::finding::Status;
use crate::judge::{self, Verdict};

/// The verdict on one output of a case.
#[derive(Clone, Debug)]
pub struct OutputReport {
    /// The name of the output.
    pub output: &'static str,
    /// The type of its elements.
    pub storage: Storage,
    /// The verdict over its elements.
    pub verdict: Verdict,
}

/// One case, executed or not.
#[derive(Clone, Debug)]
pub struct CaseReport {
    /// The id that replays the case.
    pub id: String,
    /// How it ended.
    pub status: Status,
    /// SHA-256 of the bits of its outputs, in hexadecimal. Outputs that may differ from run to run
    /// are left out. `None` if no output was judged by bounds.
    pub digest: Option<String>,
    /// Its judged outputs.
    pub outputs: Vec<OutputReport>,
    /// Wall time in us, including the reference and the judge.
    pub elapsed_us: u64,
}

impl CaseReport {
    /// A case without results.
    pub(crate) fn new(id: String) -> Self {
        CaseReport { id, status: Status::Pass, digest: None, outputs: Vec::new(), elapsed_us: 0 }
    }

    /// Writes the case as one line of JSON.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn write_json(&self, writer: &mut dyn Write) -> io::Result<()> {
        writer.write_all(self.line()?.as_bytes())
    }

    pub(crate) fn line(&self) -> io::Result<String> {
        Ok(serde_json::to_string(self)? + "\n")
    }
}

impl Serialize for CaseReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let CaseReport { id, status, digest, outputs, elapsed_us } = self;
        let params: Vec<&str> = id.split(':').collect();
        let line = json!({
            "id": id, "params": params, "status": status.name(), "reason": status.reason(),
            "digest": digest, "outputs": outputs, "elapsed_us": elapsed_us,
        });
        line.serialize(serializer)
    }
}

impl Serialize for OutputReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Verdict { checked, failures, budget, misrounded, worst, .. } = &self.verdict;
        let output = json!({
            "output": self.output, "dtype": self.storage.name(), "checked": checked, "failures": failures,
            "budget": budget, "misrounded": misrounded, "worst": worst,
        });
        output.serialize(serializer)
    }
}

/// Each value as a decimal that reads back exactly, and as bits: `got` in the output's dtype, the
/// other values in f64.
impl Serialize for judge::Failure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let wide = |value: f64| [format!("{value:e}"), format!("{:#018x}", value.to_bits())];
        let got = [format!("{:e}", self.got), format!("{:#x}", self.got_bits)];
        let (reference, low, high) = (wide(self.reference), wide(self.low), wide(self.high));
        json!({ "index": self.index, "got": got, "reference": reference, "low": low, "high": high })
            .serialize(serializer)
    }
}

/// Number of cases per status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Executed, all checks satisfied.
    pub passed: usize,
    /// A check failed.
    pub failed: usize,
    /// Refused by the backend with a rule.
    pub unsupported: usize,
    /// Executed, but proving nothing.
    pub vacuous: usize,
    /// Not executed because this machine lacks something.
    pub skipped: usize,
}

/// The results of all cases for one output in one dtype.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Quality {
    /// Elements judged.
    pub checked: usize,
    /// Largest error as a fraction of its bound; above 1 is a failure.
    pub budget: f64,
    /// Elements that differ from the reference rounded to nearest. Not a failure: bounds are wider
    /// than half a unit.
    pub misrounded: usize,
}
