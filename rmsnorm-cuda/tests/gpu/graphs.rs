//! Calls that are captured into a CUDA graph and replayed on new data give the bits of direct
//! calls.

use std::sync::Arc;

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::values;
use rmsnorm_cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use rmsnorm_cuda::cudarc::driver::{CudaGraph, CudaSlice, CudaStream, DriverError};
use rmsnorm_cuda::{
    Backward, CudaBackend, Forward, QuantizedForward,
    spec::quant::{CodeType, QuantSpec, ScaleKind},
    spec::{AnyElement, DType, Error, F8E4M3, Norm, NormSpec, Problem, Rows, Tensor, bf16},
};

use crate::support::{Gpu, bytes, upload};

/// A shape for each kind of program: several rows per block, one row per block, a cluster per row,
/// streaming.
const SHAPES: [(usize, usize); 4] = [(3000, 384), (700, 4096), (150, 40000), (40, 300_000)];

/// The tensors of a forward call and of the backward call after it.
struct Tensors {
    norm: NormSpec,
    x: CudaSlice<bf16>,
    weight: CudaSlice<bf16>,
    y: CudaSlice<bf16>,
    rstd: CudaSlice<f32>,
    dy: CudaSlice<bf16>,
    dx: CudaSlice<bf16>,
    dweight: CudaSlice<bf16>,
    workspace: Option<CudaSlice<f32>>,
}

impl Tensors {
    fn new(backend: &CudaBackend, (rows, cols): (usize, usize), with_workspace: bool) -> Self {
        let (stream, len) = (backend.stream(), rows * cols);
        let workspace_len = backend.workspace_len(&backward_problem(rows, cols));
        Tensors {
            norm: NormSpec::rms(rows, cols, 1e-6),
            x: upload(backend, 1, len),
            weight: upload(backend, 2, cols),
            y: stream.alloc_zeros(len).unwrap(),
            rstd: stream.alloc_zeros(rows).unwrap(),
            dy: upload(backend, 3, len),
            dx: stream.alloc_zeros(len).unwrap(),
            dweight: stream.alloc_zeros(cols).unwrap(),
            workspace: with_workspace.then(|| stream.alloc_zeros(workspace_len.max(1)).unwrap()),
        }
    }

    fn fill(&mut self, backend: &CudaBackend, seed: u64) {
        let stream = backend.stream();
        stream.memcpy_htod(&values::<bf16>(seed, self.x.len()), &mut self.x).unwrap();
        stream.memcpy_htod(&values::<bf16>(seed + 1, self.dy.len()), &mut self.dy).unwrap();
        stream.memset_zeros(&mut self.y).unwrap();
        stream.memset_zeros(&mut self.dx).unwrap();
        stream.memset_zeros(&mut self.dweight).unwrap();
    }

    fn call(&mut self, backend: &CudaBackend) -> Result<(), Error> {
        let forward = Forward::new(self.x.as_view(), self.y.as_view_mut());
        backend.forward(&self.norm, forward.weight(self.weight.as_view()).rstd(self.rstd.as_view_mut()))?;
        let mut backward =
            Backward::new(self.dy.as_view(), self.x.as_view(), self.rstd.as_view(), self.dx.as_view_mut())
                .weight(self.weight.as_view())
                .dweight(self.dweight.as_view_mut());
        if let Some(workspace) = &mut self.workspace {
            backward = backward.workspace(workspace.as_view_mut());
        }
        backend.backward(&self.norm, backward)
    }

    fn results(&self, backend: &CudaBackend) -> [Vec<u8>; 4] {
        let rstd = bytes(backend, &self.rstd);
        [bytes(backend, &self.y), rstd, bytes(backend, &self.dx), bytes(backend, &self.dweight)]
    }
}

fn backward_problem(rows: usize, cols: usize) -> Problem {
    let tensors = [Tensor::Weight, Tensor::Dweight, Tensor::Workspace];
    Problem::backward(Norm::Rms, rows, cols, DType::Bf16, &tensors)
}

/// Captures the work of `work`, in thread-local mode.
pub fn capture(stream: &Arc<CudaStream>, work: impl FnOnce() -> Result<(), Error>) -> (Result<(), Error>, Captured) {
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let outcome = work();
    // `end_capture` would return an error that cudarc has kept, and leave the capture open.
    stream.context().check_err().ok();
    (outcome, stream.end_capture(CUgraphInstantiate_flags(0)))
}

pub type Captured = Result<Option<CudaGraph>, DriverError>;

/// A stream that can be captured, in a context where cudarc records no events.
pub fn stream_without_events(gpu: &Gpu) -> Arc<CudaStream> {
    let context = gpu.stream().context();
    // SAFETY:
    // - streams: these tests use the tensors of one stream on that stream only.
    unsafe { context.disable_event_tracking() };
    context.new_stream().unwrap()
}

/// Replays three times on new data, and compares each replay with a direct call.
fn check_replays(backend: &CudaBackend, tensors: &mut Tensors, graph: &CudaGraph) {
    let shape = (tensors.norm.rows, tensors.norm.cols);
    for seed in [10, 20, 30] {
        tensors.fill(backend, seed);
        tensors.call(backend).unwrap();
        let expected = tensors.results(backend);
        tensors.fill(backend, seed);
        graph.launch().unwrap();
        assert!(tensors.results(backend) == expected, "{shape:?}, seed {seed}");
    }
}

fn check_captured(backend: &CudaBackend, shape: (usize, usize), with_workspace: bool) {
    let mut tensors = Tensors::new(backend, shape, with_workspace);
    tensors.call(backend).unwrap();
    let (outcome, graph) = capture(backend.stream(), || tensors.call(backend));
    outcome.unwrap();
    check_replays(backend, &mut tensors, &graph.unwrap().unwrap());
}

#[test]
fn calls_with_a_workspace_are_captured_and_replayed() {
    let Some(gpu) = Gpu::open() else { return };
    let backend = gpu.on(stream_without_events(&gpu)).unwrap();
    SHAPES.into_iter().for_each(|shape| check_captured(&backend, shape, true));
}

#[test]
fn calls_that_allocate_their_workspace_are_captured_and_replayed() {
    let Some(gpu) = Gpu::open() else { return };
    let backend = gpu.on(stream_without_events(&gpu)).unwrap();
    SHAPES.into_iter().for_each(|shape| check_captured(&backend, shape, false));
}

/// The tensors of a call to codes, with a given scale and an amax, or with the current scale; and
/// transposed codes.
struct ToCodes {
    norm: NormSpec,
    scale: ScaleKind,
    x: CudaSlice<bf16>,
    codes: CudaSlice<F8E4M3>,
    codes_t: CudaSlice<F8E4M3>,
    given: CudaSlice<f32>,
    /// The tensor's amax, or its scale.
    found: CudaSlice<f32>,
}

impl ToCodes {
    fn new(backend: &CudaBackend, scale: ScaleKind, (rows, cols): (usize, usize)) -> Self {
        let len = rows * cols;
        let codes = || backend.upload(&vec![F8E4M3::from_bits(0x7f); len]).unwrap();
        ToCodes {
            norm: NormSpec::rms(rows, cols, 1e-6),
            scale,
            x: upload(backend, 1, len),
            codes: codes(),
            codes_t: codes(),
            given: backend.upload(&[0.004]).unwrap(),
            found: backend.upload(&[1e9]).unwrap(),
        }
    }

    /// New values, and a wrong largest magnitude, which the call must clear.
    fn fill(&mut self, backend: &CudaBackend, seed: u64) {
        let stream = backend.stream();
        stream.memcpy_htod(&values::<bf16>(seed, self.x.len()), &mut self.x).unwrap();
        stream.memcpy_htod(&[1e9], &mut self.found).unwrap();
        stream.memset_zeros(&mut self.codes).unwrap();
        stream.memset_zeros(&mut self.codes_t).unwrap();
    }

    fn call(&mut self, backend: &CudaBackend) -> Result<(), Error> {
        let quant = QuantSpec::new(CodeType::E4m3, self.scale);
        let args = QuantizedForward::<bf16, F8E4M3>::new(quant, self.x.as_view(), self.codes.as_view_mut())
            .codes_t(Rows::dense(self.codes_t.as_view_mut()));
        let args = if self.scale == ScaleKind::Given {
            args.scale(self.given.as_view()).amax(self.found.as_view_mut())
        } else {
            args.scales(self.found.as_view_mut())
        };
        backend.quantized_forward(&self.norm, args)
    }

    fn results(&self, backend: &CudaBackend) -> (Vec<u32>, Vec<u32>, u32) {
        let codes = |buffer| backend.download::<F8E4M3>(buffer).unwrap().iter().map(|code| code.bits()).collect();
        (codes(&self.codes), codes(&self.codes_t), backend.download(&self.found).unwrap()[0].to_bits())
    }
}

#[test]
fn calls_to_codes_are_captured_and_replayed() {
    let Some(gpu) = Gpu::open() else { return };
    let backend = gpu.on(stream_without_events(&gpu)).unwrap();
    for (shape, scale) in [(700, 4096), (130, 1000), (40, 300_000)]
        .into_iter()
        .flat_map(|shape| [(shape, ScaleKind::Given), (shape, ScaleKind::Current)])
    {
        let mut tensors = ToCodes::new(&backend, scale, shape);
        tensors.call(&backend).unwrap();
        let (outcome, graph) = capture(backend.stream(), || tensors.call(&backend));
        outcome.unwrap();
        let graph = graph.unwrap().unwrap();
        for seed in [10, 20, 30] {
            tensors.fill(&backend, seed);
            tensors.call(&backend).unwrap();
            let expected = tensors.results(&backend);
            let amax = f32::from_bits(expected.2) * if scale == ScaleKind::Given { 1.0 } else { 448.0 };
            assert!((1.0..100.0).contains(&amax), "{shape:?} {scale:?}: {amax}");
            tensors.fill(&backend, seed);
            graph.launch().unwrap();
            assert!(tensors.results(&backend) == expected, "{shape:?} {scale:?}, seed {seed}");
        }
    }
}

/// In a context without other streams cudarc needs no events, so none must be turned off.
#[test]
fn the_stream_of_the_thread_is_captured_with_no_more_ado() {
    let Some(gpu) = Gpu::open() else { return };
    let backend = gpu.on(gpu.stream().context().per_thread_stream()).unwrap();
    check_captured(&backend, SHAPES[0], true);
}

/// The kernels are compiled and loaded during the capture.
#[test]
fn the_first_call_of_a_backend_may_be_a_captured_one() {
    let Some(gpu) = Gpu::open() else { return };
    let backend = gpu.on(stream_without_events(&gpu)).unwrap();
    let mut tensors = Tensors::new(&backend, (77, 1000), true);
    let (outcome, graph) = capture(backend.stream(), || tensors.call(&backend));
    outcome.unwrap();
    check_replays(&backend, &mut tensors, &graph.unwrap().unwrap());
}

/// cudarc waits for the event of the write of `x`, which was outside the capture: this must be an
/// error, not a missing wait.
#[test]
fn a_capture_that_cudarcs_events_spoil_is_an_error() {
    let Some(gpu) = Gpu::open() else { return };
    let backend = gpu.on(gpu.stream().context().new_stream().unwrap()).unwrap();
    let mut tensors = Tensors::new(&backend, (8, 128), true);
    tensors.call(&backend).unwrap();
    let (outcome, graph) = capture(backend.stream(), || tensors.call(&backend));
    assert!(matches!(outcome, Err(Error::Device { .. })), "{outcome:?}");
    assert!(graph.is_err());
    // The stream is usable again.
    tensors.call(&backend).unwrap();
}
