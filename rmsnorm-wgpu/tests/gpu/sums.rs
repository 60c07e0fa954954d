//! Gradients of weight and bias as f32 sums: stored or added without rounding to the weight's
//! dtype.

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::values;
use rmsnorm_wgpu::spec::{GradReduction, NormSpec, bf16};
use rmsnorm_wgpu::{Backward, TestBuffer, WgpuBackend, wgpu};

use crate::support::{Layer, backward, open, open_limited, upload, view, whole};

/// Few and many rows, streamed rows, and lengths that are not whole quads.
const SHAPES: [(usize, usize); 6] = [(7, 64), (300, 40), (5, 1024), (9, 33), (40, 501), (2, 1 << 17)];

/// dweight and dbias of a layer norm, as sums.
fn sums(backend: &WgpuBackend, layer: &Layer<bf16>, dx: &TestBuffer<bf16>) -> [Vec<f32>; 2] {
    let cols = layer.norm.cols;
    let [dweight, dbias] = [0; 2].map(|_| backend.upload(&vec![f32::NAN; cols]).unwrap());
    let args = layer.args(view(dx, layer.norm.rows * cols));
    backend.backward(&layer.norm, args.dweight_sum(whole(&dweight)).dbias_sum(whole(&dbias))).unwrap();
    [dweight, dbias].map(|gradient| backend.download(&gradient).unwrap())
}

/// The bits of values, including signs of zeros.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn added(held: &[f32], sums: &[f32]) -> Vec<f32> {
    held.iter().zip(sums).map(|(held, sum)| held + sum).collect()
}

#[test]
fn sums_are_what_is_rounded_elsewhere() {
    let Some(gpu) = open() else { return };
    for (rows, cols) in SHAPES {
        let (layer, dx) = (Layer::<bf16>::new(&gpu, rows, cols), upload::<bf16>(&gpu, 8, rows * cols));
        let (_, dweight, dbias) = backward::<bf16>(&gpu, rows, cols);
        let sums = sums(&gpu, &layer, &dx);
        for (name, sums, rounded) in [("dweight", &sums[0], dweight), ("dbias", &sums[1], dbias)] {
            let got: Vec<f32> = sums.iter().map(|&sum| bf16::from_f32(sum).to_f32()).collect();
            // A 16-bit buffer may have one more element than the tensor.
            assert_eq!(bits(&got), bits(&rounded[..cols]), "{name} of {rows}x{cols}");
            assert_ne!(bits(&got), bits(sums), "{name} of {rows}x{cols}: no sum of rows is a bf16");
        }
    }
}

/// Both sums in one buffer, with and without wide accesses; neighbouring elements stay unchanged.
#[test]
fn accumulated_sums_are_added_to_what_is_there() {
    let Some(gpu) = open() else { return };
    for ((rows, cols), first) in SHAPES.into_iter().flat_map(|shape| [(shape, 0), (shape, 3)]) {
        let (layer, dx) = (Layer::<bf16>::new(&gpu, rows, cols), upload::<bf16>(&gpu, 8, rows * cols));
        let sums = sums(&gpu, &layer, &dx);
        let places = [first..first + cols, first + cols..first + 2 * cols];
        let mut expected = values::<f32>(11, first + 2 * cols + 5);
        expected[first] = -0.0;
        let bucket = gpu.upload(&expected).unwrap();
        let call = || {
            let [dweight, dbias] = places.clone().map(|place| gpu.view(&bucket, place));
            layer.args(view(&dx, rows * cols)).dweight_sum(dweight).dbias_sum(dbias).accumulate()
        };
        let add = |expected: &mut [f32]| {
            for (place, sums) in places.iter().zip(&sums) {
                let added = added(&expected[place.clone()], sums);
                expected[place.clone()].copy_from_slice(&added);
            }
        };
        gpu.backward(&layer.norm, call()).unwrap();
        add(&mut expected);
        assert_eq!(bits(&gpu.download(&bucket).unwrap()), bits(&expected), "{rows}x{cols} from {first}");
        // Two micro-batches in one submission.
        let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for _ in 0..2 {
            gpu.encode_backward(&mut encoder, &layer.norm, call()).unwrap();
            add(&mut expected);
        }
        gpu.queue().submit([encoder.finish()]);
        assert_eq!(bits(&gpu.download(&bucket).unwrap()), bits(&expected), "{rows}x{cols} from {first}, encoded");
    }
}

/// A call whose rows take several dispatches adds their total once.
#[test]
fn a_call_in_parts_adds_once() {
    let Some(parts) = open_limited(|limits| limits.max_storage_buffer_binding_size = 64 << 10) else { return };
    for (rows, cols) in [(301, 257), (5000, 24), (9, 4000)] {
        let (layer, dx) = (Layer::<bf16>::new(&parts, rows, cols), upload::<bf16>(&parts, 8, rows * cols));
        let sums = sums(&parts, &layer, &dx);
        let held = [11, 12].map(|seed| values::<f32>(seed, cols));
        let gradients = held.each_ref().map(|held| parts.upload(held).unwrap());
        let [dweight, dbias] = gradients.each_ref().map(whole);
        let args = layer.args(view(&dx, rows * cols)).dweight_sum(dweight).dbias_sum(dbias);
        parts.backward(&layer.norm, args.accumulate()).unwrap();
        for (got, (held, sums)) in gradients.iter().zip(held.iter().zip(&sums)) {
            assert_eq!(bits(&parts.download(got).unwrap()), bits(&added(held, sums)), "{rows}x{cols}");
        }
    }
}

/// Integers so small that their sums are exact in any order.
#[test]
fn every_way_of_summing_adds_once() {
    let Some(gpu) = open() else { return };
    let Some(parts) = open_limited(|limits| limits.max_storage_buffer_binding_size = 64 << 10) else { return };
    for (backend, (rows, cols)) in [&gpu, &parts].into_iter().flat_map(|each| [(each, (700, 72)), (each, (6, 4001))]) {
        let whole_numbers =
            |factor: usize| -> Vec<f32> { (0..rows * cols).map(|at| (at * factor / 8 % 9) as f32 - 4.0).collect() };
        let (x, dy) = (whole_numbers(5), whole_numbers(11));
        let exact: Vec<f32> =
            (0..cols).map(|col| (col..rows * cols).step_by(cols).map(|at| dy[at] * x[at]).sum()).collect();
        let [x, dy, dx] = [&x, &dy, &x].map(|values| backend.upload(values).unwrap());
        let (mean, rstd) = (backend.upload(&vec![0f32; rows]).unwrap(), backend.upload(&vec![1f32; rows]).unwrap());
        let norm = NormSpec::layer(rows, cols, 1e-5);
        for grad_reduction in [GradReduction::Partials, GradReduction::Atomics] {
            let held: Vec<f32> = (0..cols).map(|col| col as f32 - 30.0).collect();
            let (stored, bucket) = (backend.upload(&held).unwrap(), backend.upload(&held).unwrap());
            let args = || {
                let args = Backward::new(whole(&dy), whole(&x), whole(&rstd), whole(&dx)).mean(whole(&mean));
                args.grad_reduction(grad_reduction)
            };
            backend.backward(&norm, args().dweight_sum(whole(&stored))).unwrap();
            backend.backward(&norm, args().dweight_sum(whole(&bucket)).accumulate()).unwrap();
            assert_eq!(backend.download(&stored).unwrap(), exact, "{rows}x{cols}, {grad_reduction:?}");
            assert_eq!(backend.download(&bucket).unwrap(), added(&held, &exact), "{rows}x{cols}, {grad_reduction:?}");
        }
    }
}
