//! Several streams and several threads on one context.

use rmsnorm_conformance::testing::values;
use rmsnorm_cuda::cudarc::driver::CudaSlice;
use rmsnorm_cuda::{
    Backward, CudaBackend, Forward,
    spec::{NormSpec, bf16},
};

use crate::support::{Gpu, bytes, upload};

const ROWS: usize = 4096;
const COLS: usize = 2048;

fn normalize(backend: &CudaBackend, x: &CudaSlice<bf16>, y: &mut CudaSlice<bf16>) {
    backend.forward(&NormSpec::rms(ROWS, COLS, 1e-6), Forward::new(x.as_view(), y.as_view_mut())).unwrap();
}

/// The input is written, and the output read, on a stream that is ordered with the backend's stream
/// only by cudarc's events.
#[test]
fn accesses_on_other_streams_are_in_order() {
    let Some(gpu) = Gpu::open() else { return };
    let other = gpu.on(gpu.stream().context().new_stream().unwrap()).unwrap();
    let backend = gpu.on(gpu.stream().context().new_stream().unwrap()).unwrap();
    let host: Vec<Vec<bf16>> = (0..4).map(|seed| values(seed, ROWS * COLS)).collect();
    let mut x = other.stream().alloc_zeros::<bf16>(ROWS * COLS).unwrap();
    let mut y = other.stream().alloc_zeros::<bf16>(ROWS * COLS).unwrap();
    let expected: Vec<_> = (0..4)
        .map(|seed| {
            let x = upload(&other, seed, ROWS * COLS);
            normalize(&other, &x, &mut y);
            bytes(&other, &y)
        })
        .collect();
    for round in 0..40 {
        other.stream().memcpy_htod(&host[round % 4], &mut x).unwrap();
        normalize(&backend, &x, &mut y);
        assert!(bytes(&other, &y) == expected[round % 4], "round {round}");
    }
}

/// Each thread has its own stream; all need the same kernel, which is not compiled yet.
#[test]
fn threads_share_a_backend() {
    let Some(gpu) = Gpu::open() else { return };
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let backend = gpu.on(gpu.stream().context().new_stream().unwrap()).unwrap();
                scope.spawn(move || {
                    let x = upload(&backend, 1, ROWS * COLS);
                    let mut y = backend.stream().alloc_zeros::<bf16>(ROWS * COLS).unwrap();
                    (0..20).for_each(|_| normalize(&backend, &x, &mut y));
                    bytes(&backend, &y)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(results.iter().all(|result| *result == results[0]));
}

/// A workspace that a call allocated is used after the last backend of the context is dropped.
#[test]
fn the_last_backend_may_be_dropped_while_its_calls_run() {
    let Some(gpu) = Gpu::open() else { return };
    let (stream, norm) = (gpu.stream().clone(), NormSpec::rms(ROWS, COLS, 1e-6));
    let (x, rstd) = (upload::<bf16>(&gpu, 1, ROWS * COLS), upload::<f32>(&gpu, 2, ROWS));
    let mut dx = stream.alloc_zeros::<bf16>(ROWS * COLS).unwrap();
    let mut dweight = stream.alloc_zeros::<bf16>(COLS).unwrap();
    let mut workspace = stream.alloc_zeros::<f32>(1 << 22).unwrap();
    let args = Backward::new(x.as_view(), x.as_view(), rstd.as_view(), dx.as_view_mut());
    gpu.backward(&norm, args.dweight(dweight.as_view_mut()).workspace(workspace.as_view_mut())).unwrap();
    let expected = stream.clone_dtoh(&dweight).unwrap();
    let _alone = gpu.close();
    for round in 0..100 {
        stream.memset_zeros(&mut dweight).unwrap();
        let backend = CudaBackend::from_stream(stream.clone()).unwrap();
        for _ in 0..1 + round % 20 {
            let args = Backward::new(x.as_view(), x.as_view(), rstd.as_view(), dx.as_view_mut());
            backend.backward(&norm, args.dweight(dweight.as_view_mut())).unwrap();
        }
        drop(backend);
        stream.synchronize().unwrap();
        assert!(stream.clone_dtoh(&dweight).unwrap() == expected, "round {round}");
    }
}
