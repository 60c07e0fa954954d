//! What a check found, and how a case ended.

use std::fmt;

use crate::names::named_enum;

named_enum! {
    /// The kind of check that found a failure.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    enum Check {
        /// An element lies outside its acceptance interval.
        Bounds = "bounds",
        /// NaN did not reach an element that it must reach.
        NonFinite = "non-finite",
        /// A byte outside the tensor changed.
        Canary = "canary",
        /// A byte between two rows changed.
        Padding = "padding",
        /// An input changed.
        Input = "input",
        /// An element was never written.
        Unwritten = "unwritten",
        /// A result depends on the old content of an output or of the workspace.
        Poison = "poison",
        /// A repeated call gave different bits.
        Repeat = "repeat",
        /// A row got different bits in a batch of another size.
        BatchInvariance = "batch invariance",
        /// A group of columns got different bits with other groups beside it.
        GroupInvariance = "group invariance",
        /// A relation between two calls does not hold.
        Metamorphic = "metamorphic",
        /// The span of a view is wrong.
        Span = "span",
        /// The backend claims a longer chain of additions than policy allows.
        Claim = "claim",
        /// An invalid call was not refused, or not in the required way.
        Misuse = "misuse",
        /// A valid call was refused, or the device failed.
        Error = "error",
        /// The backend panicked.
        Panic = "panic",
    }
}

/// One failed check.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The check.
    pub check: Check,
    /// The tensor or the argument.
    pub output: &'static str,
    /// The observation, in words.
    pub detail: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}: {}", self.check.name(), self.output, self.detail)
    }
}

/// How a case ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Status {
    /// Executed, all checks satisfied.
    Pass,
    /// A check failed.
    Fail(Finding),
    /// Refused with this rule, by [`Error::Unsupported`](rmsnorm_spec::Error::Unsupported).
    Unsupported(String),
    /// Executed, but the bound of this output is too wide for the result to prove anything.
    Vacuous(&'static str),
    /// Not executed because this machine lacks something; the backend is not the reason.
    Skipped(String),
}

impl Status {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Status::Pass => "pass",
            Status::Fail(_) => "fail",
            Status::Unsupported(_) => "unsupported",
            Status::Vacuous(_) => "vacuous",
            Status::Skipped(_) => "skipped",
        }
    }

    pub(crate) fn reason(&self) -> Option<String> {
        match self {
            Status::Pass => None,
            Status::Fail(finding) => Some(finding.to_string()),
            Status::Vacuous(output) => Some((*output).to_owned()),
            Status::Unsupported(reason) | Status::Skipped(reason) => Some(reason.clone()),
        }
    }
}
