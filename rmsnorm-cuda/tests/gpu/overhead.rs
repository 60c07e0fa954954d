//! What a warm call costs on the host. Printed, not judged: a busy machine is no failure.

use std::time::{Duration, Instant};

use rmsnorm_cuda::{
    Backward, CudaBackend, Forward,
    spec::{NormSpec, bf16},
};

use crate::support::{Gpu, upload};

const CALLS: usize = 2000;

/// Median time of a call, with the queue never full.
fn median(backend: &CudaBackend, mut call: impl FnMut()) -> Duration {
    let mut times: Vec<_> = (0..CALLS)
        .map(|index| {
            if index % 100 == 0 {
                backend.stream().synchronize().unwrap();
            }
            let start = Instant::now();
            call();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[CALLS / 2]
}

#[test]
fn the_overhead_of_a_warm_call_is_printed() {
    let Some(gpu) = Gpu::open() else { return };
    let (rows, cols, stream) = (4, 1024, gpu.stream());
    let norm = NormSpec::rms(rows, cols, 1e-6);
    let (x, weight) = (upload::<bf16>(&gpu, 1, rows * cols), upload::<bf16>(&gpu, 2, cols));
    let mut y = stream.alloc_zeros::<bf16>(rows * cols).unwrap();
    let mut rstd = stream.alloc_zeros::<f32>(rows).unwrap();
    let forward = median(&gpu, || {
        let args = Forward::new(x.as_view(), y.as_view_mut()).weight(weight.as_view());
        gpu.forward(&norm, args.rstd(rstd.as_view_mut())).unwrap();
    });
    let mut dweight = stream.alloc_zeros::<bf16>(cols).unwrap();
    let mut workspace = stream.alloc_zeros::<f32>(1 << 24).unwrap();
    let mut backward = |with_workspace: bool| {
        median(&gpu, || {
            let mut args = Backward::new(x.as_view(), x.as_view(), rstd.as_view(), y.as_view_mut())
                .weight(weight.as_view())
                .dweight(dweight.as_view_mut());
            if with_workspace {
                args = args.workspace(workspace.as_view_mut());
            }
            gpu.backward(&norm, args).unwrap();
        })
    };
    println!("host time of a warm call, median of {CALLS}, {rows}x{cols} bf16 on {}:", *gpu);
    println!("forward {forward:?}, backward {:?}, allocating its workspace {:?}", backward(true), backward(false));
}

/// Host time of every kernel's first call on a backend: forward and backward at rows of each regime.
fn first_calls(backend: &CudaBackend) -> Vec<Duration> {
    let (rows, stream) = (4, backend.stream());
    let mut times = Vec::new();
    for cols in [128, 1024, 4096, 16384, 65536, 131_072] {
        let norm = NormSpec::rms(rows, cols, 1e-6);
        let (x, weight) = (upload::<bf16>(backend, 1, rows * cols), upload::<bf16>(backend, 2, cols));
        let (mut y, mut rstd) =
            (stream.alloc_zeros::<bf16>(rows * cols).unwrap(), stream.alloc_zeros::<f32>(rows).unwrap());
        let mut dweight = stream.alloc_zeros::<bf16>(cols).unwrap();
        let mut time = |call: &mut dyn FnMut()| {
            stream.synchronize().unwrap();
            let start = Instant::now();
            call();
            times.push(start.elapsed());
        };
        time(&mut || {
            let args = Forward::new(x.as_view(), y.as_view_mut()).weight(weight.as_view());
            backend.forward(&norm, args.rstd(rstd.as_view_mut())).unwrap();
        });
        time(&mut || {
            let args =
                Backward::new(x.as_view(), x.as_view(), rstd.as_view(), y.as_view_mut()).weight(weight.as_view());
            backend.backward(&norm, args.dweight(dweight.as_view_mut())).unwrap();
        });
    }
    times.sort_unstable();
    times
}

/// With an empty `RMSNORM_CACHE_DIR` the first backend compiles. The second finds all in the folder, like a later process.
#[test]
fn the_time_of_first_calls_is_printed() {
    let Some(gpu) = Gpu::open() else { return };
    for which in ["first", "second"] {
        let times = first_calls(&CudaBackend::from_stream(gpu.stream().clone()).unwrap());
        println!(
            "first calls of the {which} backend: median {:?}, most {:?}",
            times[times.len() / 2],
            times[times.len() - 1]
        );
    }
}
