//! What a measured call ran: see [`Recorded`].

use rmsnorm_conformance::{Record, Recorded, read_caps, write_caps};
use rmsnorm_spec::{Error, Problem};

use crate::caps::Caps;
use crate::params::{Matrix, Params};
use crate::plan::{Plan, Step, plan};
use crate::{CudaBackend, launch, source};

impl Recorded for CudaBackend {
    fn caps(&self) -> String {
        write_caps(self.kernels().caps())
    }

    fn record(caps: &str, problem: &Problem) -> Result<Record, Error> {
        let caps: Caps = read_caps(caps)?;
        let plan = plan(problem, access_bytes(problem), &caps);
        let texts = texts(&plan, &caps);
        Ok(Record::new(plan.to_string(), texts))
    }
}

/// Every kernel's text with the compiler's options for it.
fn texts(plan: &Plan, caps: &Caps) -> Vec<String> {
    let mut texts = Vec::new();
    for step in plan.steps.iter().flatten() {
        if let Step::Launch { key, .. } = step {
            texts.push(source::options(key, caps.arch).join(" "));
            texts.push(source::text(key.program));
        }
    }
    texts
}

/// That of a call whose rows lie side by side, at addresses that ask for nothing.
fn access_bytes(problem: &Problem) -> u32 {
    let dense = Matrix { data: 0, row_stride: problem.cols as u64 };
    let residual = if problem.present.residual { dense } else { Matrix::default() };
    // y stands for dy and dx.
    launch::access_bytes(problem, &Params { x: dense, y: dense, residual, ..Params::default() })
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
        let record = |cols| CudaBackend::record(&caps, &problem(cols)).unwrap();
        assert_eq!(record(4096).plan, "Forward 1x256x2x8, on 32768x256");
        assert_eq!(record(4096), record(4096));
        assert_ne!(record(4096).sources, record(1024).sources);
        let other = write_caps(&Caps { sms: 1, ..Caps::h200() });
        assert_eq!(CudaBackend::record(&other, &problem(4096)).unwrap().sources, record(4096).sources);
        assert_eq!([4096, 4100, 4098, 4097].map(|cols| access_bytes(&problem(cols))), [16, 8, 4, 2]);
        assert!(CudaBackend::record("{}", &problem(4096)).is_err());
    }
}
