//! Calls recorded into the caller's encoders.

use rmsnorm_conformance::Harness;
use rmsnorm_wgpu::spec::quant::{CodeType, QuantSpec, ScaleKind};
use rmsnorm_wgpu::spec::{DType, Error, GradReduction, Norm, NormSpec, Problem, Tensor, bf16};
use rmsnorm_wgpu::{Forward, QuantizedForward, Recorder, TestBuffer, WgpuBackend, WgpuSlice, wgpu};
use wgpu::{CommandEncoderDescriptor, ComputePassDescriptor};

use crate::support::{Layer, backward, bits, forward, open, upload, view, whole};

const ROWS: usize = 6;
const COLS: usize = 264;

#[test]
fn a_call_runs_between_the_users_commands() {
    let Some(gpu) = open() else { return };
    let (expected, norm) = (forward::<bf16>(&gpu, ROWS, COLS), NormSpec::rms(ROWS, COLS, 1e-5));
    let (x, weight) = (upload::<bf16>(&gpu, 1, ROWS * COLS), upload::<bf16>(&gpu, 2, COLS));
    let [input, y, copy] = [7, 8, 9].map(|seed| upload::<bf16>(&gpu, seed, ROWS * COLS));
    let mut encoder = gpu.device().create_command_encoder(&CommandEncoderDescriptor::default());
    encoder.copy_buffer_to_buffer(x.buffer(), 0, input.buffer(), 0, None);
    let args = Forward::new(whole(&input), whole(&y)).weight(whole(&weight));
    gpu.encode_forward(&mut encoder, &norm, args).unwrap();
    encoder.copy_buffer_to_buffer(y.buffer(), 0, copy.buffer(), 0, None);
    let in_place = Forward::in_place(whole(&input)).weight(whole(&weight));
    gpu.encode_forward(&mut encoder, &norm, in_place).unwrap();
    let before = bits(&gpu, &y);
    assert_ne!(before, expected.0, "nothing runs before it is submitted");
    gpu.queue().submit([encoder.finish()]);
    for (name, buffer) in [("y", &y), ("its copy", &copy), ("in place", &input)] {
        assert_eq!(bits(&gpu, buffer), expected.0, "{name}");
    }
}

/// Both calls use the backend's workspace.
#[test]
fn two_backward_calls_fit_one_encoder() {
    let Some(gpu) = open() else { return };
    let layer = Layer::<f32>::new(&gpu, ROWS, COLS);
    let (dx, dweight, dbias) = backward::<f32>(&gpu, ROWS, COLS);
    let outputs = [0; 2].map(|_| [ROWS * COLS, COLS, COLS].map(|len| upload::<f32>(&gpu, 8, len)));
    let mut encoder = gpu.device().create_command_encoder(&CommandEncoderDescriptor::default());
    for [dx, dweight, dbias] in &outputs {
        let args = layer.args(whole(dx)).dweight(whole(dweight)).dbias(whole(dbias));
        gpu.encode_backward(&mut encoder, &layer.norm, args).unwrap();
    }
    gpu.queue().submit([encoder.finish()]);
    for [got_dx, got_dweight, got_dbias] in &outputs {
        assert_eq!(bits(&gpu, got_dx), dx);
        assert_eq!(gpu.download(got_dweight).unwrap(), dweight);
        assert_eq!(gpu.download(got_dbias).unwrap(), dbias);
    }
}

#[test]
fn a_call_that_is_refused_leaves_the_encoder_as_it_was() {
    let Some(gpu) = open() else { return };
    let (x, y) = (upload::<bf16>(&gpu, 1, 64), upload::<bf16>(&gpu, 2, 64));
    let before = bits(&gpu, &y);
    let mut encoder = gpu.device().create_command_encoder(&CommandEncoderDescriptor::default());
    let norm = NormSpec::rms(4, 17, 1e-6);
    let answer = gpu.encode_forward(&mut encoder, &norm, Forward::new(whole(&x), whole(&y)));
    assert!(matches!(answer, Err(Error::Length { arg: "x", .. })), "{answer:?}");
    gpu.queue().submit([encoder.finish()]);
    assert_eq!(bits(&gpu, &y), before);
}

#[test]
fn a_batch_is_submitted_at_its_end() {
    let Some(gpu) = open() else { return };
    let norm = NormSpec::rms(ROWS, COLS, 1e-5);
    let expected = forward::<bf16>(&gpu, ROWS, COLS);
    let (x, weight) = (upload::<bf16>(&gpu, 1, ROWS * COLS), upload::<bf16>(&gpu, 2, COLS));
    let ys = [3, 4].map(|seed| upload::<bf16>(&gpu, seed, ROWS * COLS));
    gpu.batch(|kept| {
        for y in &ys {
            kept.clone().forward(&norm, Forward::new(whole(&x), whole(y)).weight(whole(&weight)))?;
            assert_ne!(bits(&gpu, y), expected.0, "nothing runs before the end");
        }
        Ok(())
    })
    .unwrap();
    for y in &ys {
        assert_eq!(bits(&gpu, y), expected.0);
    }
    let y = upload::<bf16>(&gpu, 5, ROWS * COLS);
    let before = bits(&gpu, &y);
    let failed = gpu.batch(|kept| {
        kept.forward(&norm, Forward::new(whole(&x), whole(&y)))?;
        kept.forward(&norm, Forward::new(view(&x, 1), whole(&y)))
    });
    assert!(matches!(failed, Err(Error::Length { .. })), "{failed:?}");
    assert_eq!(bits(&gpu, &y), before, "nothing of a batch that failed is submitted");
    gpu.batch(|_| gpu.forward(&norm, Forward::new(whole(&x), whole(&y)))).unwrap();
    assert_ne!(bits(&gpu, &y), before, "only what the batch is told is of it");
}

/// The calls of a recorder share a compute pass, which ends where a workspace is zeroed for atomic
/// sums; then a new one begins.
#[test]
fn a_recorder_may_zero_a_workspace_between_its_calls() {
    let Some(gpu) = open() else { return };
    let layer = Layer::<f32>::new(&gpu, ROWS, COLS);
    let (dx, dweight, dbias) = backward::<f32>(&gpu, ROWS, COLS);
    let outputs = [0; 2].map(|_| [ROWS * COLS, COLS, COLS].map(|len| upload::<f32>(&gpu, 8, len)));
    let ys = [0; 2].map(|_| upload::<f32>(&gpu, 9, ROWS * COLS));
    let recorder = gpu.recorder();
    for ([dx, dweight, dbias], y) in outputs.iter().zip(&ys) {
        let args = layer.args(whole(dx)).dweight(whole(dweight)).dbias(whole(dbias));
        recorder.backward(&layer.norm, args.grad_reduction(GradReduction::Atomics)).unwrap();
        recorder.forward(&layer.norm, Forward::new(whole(dx), whole(y))).unwrap();
    }
    // A pass cannot zero memory. The encoder stays unchanged, and the recorder keeps its calls.
    let mut encoder = gpu.device().create_command_encoder(&CommandEncoderDescriptor::default());
    let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
    let refused = recorder.encode(&mut pass);
    assert!(matches!(refused, Err(Error::InvalidArgument { arg: "grad_reduction", .. })), "{refused:?}");
    drop(pass);
    recorder.encode(&mut encoder).unwrap();
    // No pass is open, so the encoder takes other commands.
    let copy = upload::<f32>(&gpu, 10, ROWS * COLS);
    encoder.copy_buffer_to_buffer(ys[1].buffer(), 0, copy.buffer(), 0, None);
    gpu.queue().submit([encoder.finish()]);
    // Six terms of at most 2 * (2 + 2) * 2, added in two orders. Each of the five additions of an
    // order has an error of at most 2^-23 of its sum.
    let most = 2.0 * 5.0 * f32::EPSILON * 6.0 * 16.0;
    let close =
        |got: &[f32], expected: &[f32]| got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() <= most);
    for [got_dx, got_dweight, got_dbias] in &outputs {
        assert_eq!(bits(&gpu, got_dx), dx);
        assert!(close(&gpu.download(got_dweight).unwrap(), &dweight));
        assert!(close(&gpu.download(got_dbias).unwrap(), &dbias));
    }
    assert_eq!(bits(&gpu, &ys[0]), bits(&gpu, &ys[1]));
    assert_eq!(bits(&gpu, &copy), bits(&gpu, &ys[1]));
}

/// Each call runs once, after it was encoded and submitted. A recorder within another's calls has a
/// separate list.
#[test]
fn a_recorder_encodes_each_call_once() {
    let Some(gpu) = open() else { return };
    let (expected, norm) = (forward::<bf16>(&gpu, ROWS, COLS), NormSpec::rms(ROWS, COLS, 1e-5));
    let (x, weight) = (upload::<bf16>(&gpu, 1, ROWS * COLS), upload::<bf16>(&gpu, 2, COLS));
    let ys = [3, 4, 5].map(|seed| upload::<bf16>(&gpu, seed, ROWS * COLS));
    let call = |backend: &WgpuBackend, y| {
        backend.forward(&norm, Forward::new(whole(&x), whole(y)).weight(whole(&weight))).unwrap();
    };
    let (outer, inner) = (gpu.recorder(), gpu.recorder().recorder());
    call(&outer, &ys[0]);
    call(&inner, &ys[1]);
    let encoded = |recorder: &Recorder| {
        let mut encoder = gpu.device().create_command_encoder(&CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        recorder.encode(&mut pass).unwrap();
        drop(pass);
        encoder.finish()
    };
    let before = ys.each_ref().map(|y| bits(&gpu, y));
    assert!(before.iter().all(|y| *y != expected.0), "nothing runs before it is submitted");
    gpu.queue().submit([encoded(&inner)]);
    assert_eq!((bits(&gpu, &ys[0]) == before[0], bits(&gpu, &ys[1]) == expected.0), (true, true));
    // Encoded calls are not encoded again.
    call(&inner, &ys[2]);
    let mut overwrite = gpu.device().create_command_encoder(&CommandEncoderDescriptor::default());
    overwrite.copy_buffer_to_buffer(x.buffer(), 0, ys[1].buffer(), 0, None);
    gpu.queue().submit([overwrite.finish(), encoded(&inner), encoded(&outer)]);
    let after = ys.each_ref().map(|y| bits(&gpu, y));
    assert!(after[0] == expected.0 && after[1] == bits(&gpu, &x) && after[2] == expected.0);
}

#[test]
fn a_call_joins_a_pass_of_the_users() {
    let Some(gpu) = open() else { return };
    let (expected, norm) = (forward::<bf16>(&gpu, ROWS, COLS), NormSpec::rms(ROWS, COLS, 1e-5));
    let (x, weight) = (upload::<bf16>(&gpu, 1, ROWS * COLS), upload::<bf16>(&gpu, 2, COLS));
    let y = upload::<bf16>(&gpu, 3, ROWS * COLS);
    let layer = Layer::<f32>::new(&gpu, ROWS, COLS);
    let gradients = backward::<f32>(&gpu, ROWS, COLS);
    let [dx, dweight, dbias] = [ROWS * COLS, COLS, COLS].map(|len| upload::<f32>(&gpu, 8, len));
    let mut encoder = gpu.device().create_command_encoder(&CommandEncoderDescriptor::default());
    let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
    gpu.encode_forward(&mut pass, &norm, Forward::new(whole(&x), whole(&y)).weight(whole(&weight))).unwrap();
    let args = || layer.args(whole(&dx)).dweight(whole(&dweight)).dbias(whole(&dbias));
    let refused = gpu.encode_backward(&mut pass, &layer.norm, args().grad_reduction(GradReduction::Atomics));
    assert!(matches!(refused, Err(Error::InvalidArgument { arg: "grad_reduction", .. })), "{refused:?}");
    gpu.encode_backward(&mut pass, &layer.norm, args()).unwrap();
    drop(pass);
    gpu.queue().submit([encoder.finish()]);
    assert_eq!(bits(&gpu, &y), expected.0);
    assert_eq!((bits(&gpu, &dx), gpu.download(&dweight).unwrap(), gpu.download(&dbias).unwrap()), gradients);
}

#[test]
fn what_was_prepared_is_not_compiled_again() {
    let Some(gpu) = open() else { return };
    // No other test uses this length with these kernels; `without_subgroups` has separate kernels.
    let gpu = gpu.without_subgroups();
    let problem = Problem::forward(Norm::Rms, ROWS, COLS, DType::Bf16, &[Tensor::Weight, Tensor::Rstd]);
    let gradients = [Tensor::Mean, Tensor::Weight, Tensor::Dweight, Tensor::Dbias];
    gpu.prepare(&problem).unwrap();
    gpu.prepare(&Problem::backward(Norm::Layer, ROWS, COLS, DType::F32, &gradients)).unwrap();
    let prepared = gpu.kernel_count();
    assert_eq!(prepared, 3, "forward, backward, and what adds the partial sums");
    forward::<bf16>(&gpu, ROWS, COLS);
    backward::<f32>(&gpu, ROWS, COLS);
    assert_eq!(gpu.kernel_count(), prepared);
}

/// Kernels shared by two calls are compiled once. If one call is unsupported, nothing is compiled.
#[test]
fn a_list_of_calls_is_prepared_at_once() {
    let Some(gpu) = open() else { return };
    let gpu = gpu.without_subgroups();
    let forward = Problem::forward(Norm::Rms, ROWS, COLS, DType::F32, &[Tensor::Weight, Tensor::Rstd]);
    let backward = Problem::backward(Norm::Layer, ROWS, COLS, DType::F32, &[Tensor::Mean, Tensor::Dweight]);
    let too_many = Problem { rows: 1 << 33, rows_per_group: Some(2), ..forward };
    let refused = gpu.prepare_all(&[forward, too_many]);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    assert_eq!(gpu.kernel_count(), 0);
    gpu.prepare_all(&[]).unwrap();
    gpu.prepare_all(&[forward, backward, forward]).unwrap();
    assert_eq!(gpu.kernel_count(), 3, "forward, backward, and what adds the partial sums");
    gpu.prepare_all(&[backward, forward]).unwrap();
    assert_eq!(gpu.kernel_count(), 3);
}

#[test]
fn copies_are_exact_at_any_offset() {
    let Some(gpu) = open() else { return };
    for (len, from, to) in [(4096, 0, 0), (4099, 1, 0), (77, 3, 6), (1, 5, 1), (30000, 8, 8)] {
        let (source, target) = (upload::<bf16>(&gpu, 1, len + 16), upload::<bf16>(&gpu, 2, len + 16));
        let mut expected = bits(&gpu, &target);
        expected[to..to + len].copy_from_slice(&bits(&gpu, &source)[from..from + len]);
        gpu.copy(gpu.view(&source, from..from + len), gpu.view(&target, to..to + len)).unwrap();
        assert!(bits(&gpu, &target) == expected, "{len} from {from} to {to}");
    }
    // Within one buffer.
    let both = upload::<bf16>(&gpu, 1, 2048);
    gpu.copy(gpu.view(&both, 0..1024), gpu.view(&both, 1024..2048)).unwrap();
    let both = bits(&gpu, &both);
    assert!(both[..1024] == both[1024..]);
}

/// Kernels clear the amax and the gaps of scales in a pass, which cannot zero memory otherwise.
#[test]
fn a_call_to_codes_joins_a_pass_of_the_users() {
    fn args<'a>(
        x: &'a TestBuffer<bf16>,
        (codes, scales): &'a (TestBuffer<i8>, TestBuffer<f32>),
    ) -> QuantizedForward<'a, bf16, i8> {
        let quant = QuantSpec::new(CodeType::Int8, ScaleKind::Current);
        QuantizedForward::new(quant, whole(x), WgpuSlice::whole(codes.buffer())).scales(whole(scales))
    }
    let Some(gpu) = open() else { return };
    let (x, norm) = (upload::<bf16>(&gpu, 1, ROWS * COLS), NormSpec::rms(ROWS, COLS, 1e-5));
    let [expected, got] =
        [8i8, 9].map(|byte| (gpu.upload(&[byte; ROWS * COLS]).unwrap(), gpu.upload(&[7.0f32]).unwrap()));
    gpu.quantized_forward(&norm, args(&x, &expected)).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&CommandEncoderDescriptor::default());
    let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
    gpu.encode_quantized_forward(&mut pass, &norm, args(&x, &got)).unwrap();
    drop(pass);
    gpu.queue().submit([encoder.finish()]);
    assert_eq!(gpu.download(&got.0).unwrap(), gpu.download(&expected.0).unwrap());
    assert_eq!(bits(&gpu, &got.1), bits(&gpu, &expected.1));
    assert_ne!(bits(&gpu, &got.1), [7.0f32.to_bits()]);
}
