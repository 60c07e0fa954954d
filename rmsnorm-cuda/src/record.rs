//! What a measured call ran: see [`Recorded`].

use rmsnorm_spec::conformance::{Record, Recorded, read_caps, write_caps};
use rmsnorm_spec::{Error, Problem, Stage};

use crate::caps::Caps;
use crate::plan::{Plan, Step, plan};
use crate::{CudaBackend, source};

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

/// The largest power of two, at most 16, that the row strides of a dense call are multiples of.
fn access_bytes(problem: &Problem) -> u32 {
    let has_stream = problem.stage == Stage::Backward || problem.present.residual;
    let narrowest =
        if has_stream { problem.activation.size().min(problem.residual.size()) } else { problem.activation.size() };
    let stride = if problem.rows > 1 { problem.cols * narrowest } else { 0 };
    1 << (16 | stride).trailing_zeros()
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{CastOrder, DType, GradReduction, Norm, Present};

    use super::*;

    fn problem(cols: usize) -> Problem {
        Problem {
            stage: Stage::Forward,
            norm: Norm::Rms,
            rows: 32768,
            cols,
            activation: DType::Bf16,
            weight: DType::Bf16,
            residual: DType::Bf16,
            has_weight_offset: false,
            cast_order: CastOrder::AtStore,
            grad_reduction: GradReduction::Partials,
            present: Present { weight: true, rstd: true, ..Present::default() },
        }
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
