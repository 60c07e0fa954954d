//! Codes by a tensor's own scale where blocks of several rows wait for each other, some of them with a
//! row less than others: the suite's cases have fewer rows. Codes with and without a transposed copy.

use rmsnorm_conformance::{Harness, Options, run};
use rmsnorm_cuda::cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED;
use rmsnorm_cuda::spec::quant::{CodeType, QuantSpec, ScaleKind};
use rmsnorm_cuda::spec::{DType, F8E4M3, Norm, NormSpec, Problem, Rows, Tensor, bf16};
use rmsnorm_cuda::{CudaBackend, QuantizedForward};

use crate::support::{Gpu, bytes, upload};

/// Norm, dtypes, shape and tensors of the suite's cases.
const CASES: [&str; 10] = [
    "rms_norm:bf16,bf16,bf16:133x1024:randn:eps1e-6:ws",
    "rms_norm:bf16,bf16,bf16:135x1024:randn:eps1e-6:wros",
    "rms_norm:f32,f32,f32:301x1000:randn:eps1e-6:ws",
    "rms_norm:bf16,f32,bf16:701x4096:nonfinite:eps1e-6:ws",
    // The most rows of an H200, but one.
    "rms_norm:bf16,bf16,bf16:1055x4096:zeros:eps1e-6:wst",
    "rms_norm:f16,f16,f16:2001x200:subnormal:eps1e-6:ws",
    "layer_norm:bf16,bf16,bf16:301x2048:randn:eps1e-6:wbms",
    "layer_norm:bf16,bf16,bf16:4001x16:randn:eps1e-6:wbms",
    // More rows than an H200 has in blocks of 512 threads.
    "rms_norm:bf16,bf16,bf16:700x8192:randn:eps1e-6:ws",
    "layer_norm:bf16,bf16,bf16:390x16384:randn:eps1e-6:wbms",
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

/// Codes, rstd and amax of one kernel, which also writes the copy, and of a kernel without it. Large plans use the
/// first for few rows too, so that 80 rows suffice, and the last tile is partial.
#[test]
fn a_transposed_copy_changes_no_bits() {
    let Some(gpu) = Gpu::open() else { return };
    const ROWS: usize = 80;
    let large = gpu.with_large_plans();
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Given);
    let scale = gpu.stream().clone_htod(&[0.01f32]).unwrap();
    let tensors = [Tensor::Weight, Tensor::Rstd, Tensor::Amax, Tensor::CodesT];
    let mut compared = 0;
    for (norm, cols) in Norm::USUAL.into_iter().flat_map(|norm| [1000, 2048, 2056, 4096].map(|cols| (norm, cols))) {
        let spec = match norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => NormSpec::new(norm, ROWS, cols, 1e-6),
            Norm::Layer => NormSpec::layer(ROWS, cols, 1e-6),
        };
        let (x, weight) = (upload::<bf16>(&gpu, 1, ROWS * cols), upload::<bf16>(&gpu, 3, cols));
        let run = |backend: &CudaBackend, is_copied: bool| {
            let zeros = || gpu.stream().alloc_zeros::<F8E4M3>(ROWS * cols).unwrap();
            let (mut codes, mut codes_t) = (zeros(), zeros());
            let mut rstd = gpu.stream().alloc_zeros::<f32>(ROWS).unwrap();
            let mut amax = gpu.stream().alloc_zeros::<f32>(1).unwrap();
            let args = QuantizedForward::<bf16, F8E4M3>::new(quant, x.as_view(), codes.as_view_mut());
            let args = args.weight(weight.as_view()).scale(scale.as_view());
            let args = args.rstd(rstd.as_view_mut()).amax(amax.as_view_mut());
            let args = if is_copied { args.codes_t(Rows::dense(codes_t.as_view_mut())) } else { args };
            backend.quantized_forward(&spec, args).unwrap();
            let codes: Vec<_> = gpu.download(&codes).unwrap().iter().map(|code: &F8E4M3| code.to_bits()).collect();
            (codes, bytes(&gpu, &rstd), bytes(&gpu, &amax))
        };
        let problem = Problem::quantized_forward(norm, ROWS, cols, DType::Bf16, quant, &tensors);
        let plan = Harness::plan(&large, &problem);
        if !plan.contains("quantized_forward_transposed") {
            println!("skipped: by {} {cols} columns of {} take two kernels: {plan}", gpu.tuning(), norm.name());
            continue;
        }
        assert!(run(&large, true) == run(&gpu, false), "{ROWS}x{cols} of {}", norm.name());
        compared += 1;
    }
    // Every device with such shared memory has it for one of these.
    let is_large = gpu.stream().context().attribute(SHARED).unwrap() >= 194 << 10;
    assert_eq!(compared > 0, is_large);
}
