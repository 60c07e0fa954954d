//! Tensors at various offsets in their buffers.

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::values;
use rmsnorm_wgpu::spec::{DType, GradReduction, Norm, NormSpec, Problem, Tensor, bf16};
use rmsnorm_wgpu::{Forward, WgpuSlice, wgpu};

use crate::support::{Layer, backward, bits, forward, open, upload, view, whole};

const ROWS: usize = 7;
const COLS: usize = 264;

/// One vector without the alignment of vector accesses, with aligned matrices.
#[test]
fn a_weight_alone_may_be_unaligned() {
    let Some(gpu) = open() else { return };
    let expected = forward::<bf16>(&gpu, ROWS, COLS);
    let (x, y) = (upload::<bf16>(&gpu, 1, ROWS * COLS), upload::<bf16>(&gpu, 3, ROWS * COLS));
    let rstd = upload::<f32>(&gpu, 4, ROWS);
    for offset in [1, 2, 4] {
        let shifted = [values::<bf16>(9, offset), values(2, COLS), values(9, 8)].concat();
        let shifted = gpu.upload(&shifted).unwrap();
        let args = Forward::new(view(&x, ROWS * COLS), view(&y, ROWS * COLS)).rstd(whole(&rstd));
        let args = args.weight(gpu.view(&shifted, offset..offset + COLS));
        gpu.forward(&NormSpec::rms(ROWS, COLS, 1e-5), args).unwrap();
        assert_eq!(bits(&gpu, &y)[..ROWS * COLS], expected.0, "weight at element {offset}");
    }
}

/// Atomic additions start from zero; only the workspace is zeroed.
#[test]
fn atomics_zero_the_workspace_within_its_buffer() {
    let Some(gpu) = open() else { return };
    let (_, expected, _) = backward::<f32>(&gpu, ROWS, COLS);
    let layer = Layer::<f32>::new(&gpu, ROWS, COLS);
    let [dx, dweight] = [ROWS * COLS, COLS].map(|len| upload::<f32>(&gpu, 8, len));
    // Memory before and after the workspace must stay unchanged; the workspace itself is not zero.
    let problem = Problem::backward(Norm::Layer, ROWS, COLS, DType::F32, &[Tensor::Weight, Tensor::Dweight]);
    let problem = Problem { grad_reduction: GradReduction::Atomics, ..problem };
    let (before, len) = (300, gpu.workspace_len(&problem));
    let shared = gpu.upload(&vec![7.0f32; before + len + 1000]).unwrap();
    let args = layer.args(whole(&dx)).dweight(whole(&dweight)).grad_reduction(GradReduction::Atomics);
    gpu.backward(&layer.norm, args.workspace(gpu.view(&shared, before..before + len))).unwrap();
    let shared = gpu.download(&shared).unwrap();
    assert!(shared[..before].iter().chain(&shared[before + len..]).all(|&value| value == 7.0));
    let got = gpu.download(&dweight).unwrap();
    // The same terms, dy (x - mean) rstd of at most 2 * 4 * 2, in two orders. The error of each is
    // at most (rows - 1) u of their sum.
    let bound = (ROWS - 1) as f32 * f32::EPSILON * (ROWS * 16) as f32;
    for (got, expected) in got.iter().zip(&expected) {
        assert!((got - expected).abs() <= bound, "{got} for {expected}");
    }
}

#[test]
fn a_slice_of_a_buffer_is_a_view_of_just_that() {
    let Some(gpu) = open() else { return };
    let buffer = upload::<bf16>(&gpu, 1, 64);
    let slice: WgpuSlice<'_, bf16> = buffer.buffer().slice(16..48).into();
    assert_eq!((slice.offset(), slice.len()), (16, 16));
    let rest: WgpuSlice<'_, f32> = buffer.buffer().slice(wgpu::BufferAddress::from(96u32)..).into();
    assert_eq!((rest.offset(), rest.len()), (96, 8));
}
