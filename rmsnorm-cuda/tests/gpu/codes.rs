//! Codes by a tensor's own scale where blocks of several rows wait for each other, some of them with a
//! row less than others: the suite's cases have fewer rows.

use rmsnorm_conformance::{Harness, Options, run};
use rmsnorm_cuda::spec::quant::{CodeType, QuantSpec, ScaleKind};
use rmsnorm_cuda::spec::{DType, Norm, Problem, Tensor};

use crate::support::Gpu;

/// Norm, dtypes, shape and tensors of the suite's cases.
const CASES: [&str; 8] = [
    "rms_norm:bf16,bf16,bf16:133x1024:randn:eps1e-6:ws",
    "rms_norm:bf16,bf16,bf16:135x1024:randn:eps1e-6:wros",
    "rms_norm:f32,f32,f32:301x1000:randn:eps1e-6:ws",
    "rms_norm:bf16,f32,bf16:701x4096:nonfinite:eps1e-6:ws",
    // The most rows of an H200, but one.
    "rms_norm:bf16,bf16,bf16:1055x4096:zeros:eps1e-6:wst",
    "rms_norm:f16,f16,f16:2001x200:subnormal:eps1e-6:ws",
    "layer_norm:bf16,bf16,bf16:301x2048:randn:eps1e-6:wbms",
    "layer_norm:bf16,bf16,bf16:4001x16:randn:eps1e-6:wbms",
];

#[test]
fn rows_that_wait_for_each_other_have_their_scale() {
    let Some(gpu) = Gpu::open() else { return };
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Current);
    let problem = Problem::quantized_forward(Norm::Rms, 133, 1024, DType::Bf16, quant, &[Tensor::Weight]);
    assert!(Harness::plan(&*gpu, &problem).contains("cooperative"));
    let id = |case: &str| {
        let rest = "offset0:at_store:partials:p0o0:seed1:e4m3,current,f32,row_major,floor0e0,ceilinginf";
        format!("bounds:quantized_forward:{case}:{rest}")
    };
    let options = Options { cases: CASES.map(id).to_vec(), self_test: false, ..Options::default() };
    let summary = run(&*gpu, &options, &mut |_, _| {}, None).unwrap();
    assert!(summary.is_success() && summary.counts.passed == CASES.len(), "{summary}");
}
