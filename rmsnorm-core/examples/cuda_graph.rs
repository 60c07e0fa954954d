//! Forward and backward on a stream of your own, captured into a CUDA graph and replayed.
//!
//!     cargo run -p rmsnorm-core --features cuda --example cuda_graph

use rmsnorm_core::cuda::cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use rmsnorm_core::cuda::{Backward, CudaBackend, Forward};
use rmsnorm_core::{DType, Error, Norm, NormSpec, Problem, Tensor, bf16};

const ROWS: usize = 4096;
const COLS: usize = 8192;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let backend = match CudaBackend::new(0) {
        Ok(backend) => backend,
        Err(error @ Error::Unavailable { .. }) => {
            println!("skipped: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    // The default stream cannot be captured. In a context without other streams cudarc records no
    // events.
    let backend = backend.on(backend.stream().context().per_thread_stream())?;
    let stream = backend.stream().clone();
    println!("{backend}");

    let norm = NormSpec::rms(ROWS, COLS, 1e-6);
    let x = stream.clone_htod(&(0..ROWS * COLS).map(|i| bf16::from_f32((i % 7) as f32 - 3.0)).collect::<Vec<_>>())?;
    let weight = stream.clone_htod(&vec![bf16::ONE; COLS])?;
    let mut y = stream.alloc_zeros::<bf16>(ROWS * COLS)?;
    let mut dx = stream.alloc_zeros::<bf16>(ROWS * COLS)?;
    let mut rstd = stream.alloc_zeros::<f32>(ROWS)?;
    let mut dweight = stream.alloc_zeros::<bf16>(COLS)?;
    // A workspace from the caller, so that a call allocates nothing.
    let tensors = [Tensor::Weight, Tensor::Dweight];
    let problem = Problem::backward(Norm::Rms, ROWS, COLS, DType::Bf16, &tensors);
    let mut workspace = stream.alloc_zeros::<f32>(backend.workspace_len(&problem).max(1))?;

    let mut step = || -> Result<(), Error> {
        let args = Forward::new(x.as_view(), y.as_view_mut()).weight(weight.as_view());
        backend.forward(&norm, args.rstd(rstd.as_view_mut()))?;
        let args = Backward::new(x.as_view(), x.as_view(), rstd.as_view(), dx.as_view_mut()).weight(weight.as_view());
        backend.backward(&norm, args.dweight(dweight.as_view_mut()).workspace(workspace.as_view_mut()))
    };
    // One call before the capture compiles the kernels.
    step()?;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    step()?;
    let graph = stream.end_capture(CUgraphInstantiate_flags(0))?.ok_or("nothing was captured")?;

    let replays = 100;
    let start = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
    for _ in 0..replays {
        graph.launch()?;
    }
    let end = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
    let milliseconds = start.elapsed_ms(&end)? / replays as f32;
    let bytes = (5 * ROWS * COLS * size_of::<bf16>()) as f32;
    println!("{ROWS}x{COLS} bf16, forward and backward: {milliseconds:.3} ms, {:.0} GB/s", bytes / milliseconds / 1e6);
    Ok(())
}
