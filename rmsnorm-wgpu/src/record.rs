//! What a measured call ran: see [`Recorded`].

use rmsnorm_conformance::{Record, Recorded, read_caps, write_caps};
use rmsnorm_spec::{Error, Problem};

use crate::caps::Caps;
use crate::plan::{Layout, Plan, Step, plan};
use crate::{WgpuBackend, source};

impl Recorded for WgpuBackend {
    fn caps(&self) -> String {
        write_caps(WgpuBackend::caps(self))
    }

    fn record(caps: &str, problem: &Problem) -> Result<Record, Error> {
        let caps: Caps = read_caps(caps)?;
        let plan = plan(problem, &Layout::dense(problem), &caps)?;
        let texts = texts(&plan, &caps);
        Ok(Record::new(plan.describe(problem.cols), texts))
    }
}

/// Every program's text with the numbers that it leaves open.
fn texts(plan: &Plan, caps: &Caps) -> Vec<String> {
    let mut texts = Vec::new();
    for step in &plan.steps {
        if let Step::Dispatch(dispatch) = step {
            texts.push(format!("{:?}", source::constants(&dispatch.key)));
            texts.push(source::text(&dispatch.key, caps.has_unpack));
        }
    }
    texts
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{DType, Norm, Present, Stage};

    use super::*;

    fn problem(cols: usize) -> Problem {
        let present = Present { weight: true, rstd: true, ..Present::default() };
        Problem::uniform(Stage::Forward, Norm::Rms, 32768, cols, DType::Bf16, present)
    }

    #[test]
    fn a_record_needs_no_device_and_tells_plans_apart() {
        let caps = write_caps(&Caps::h200());
        let record = |cols| WgpuBackend::record(&caps, &problem(cols)).unwrap();
        assert_eq!(record(4096).plan, "Forward 128x4s, on 32768");
        assert_eq!(record(4096), record(4096));
        // The same text, other numbers.
        assert_ne!(record(4096).sources, record(5120).sources);
        assert!(WgpuBackend::record("{}", &problem(4096)).is_err());
    }
}
