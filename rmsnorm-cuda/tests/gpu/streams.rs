//! Several streams and several threads on one context.

use rmsnorm_conformance::testing::values;
use rmsnorm_cuda::cudarc::driver::CudaSlice;
use rmsnorm_cuda::{
    CudaBackend, Forward,
    spec::{NormSpec, bf16},
};

use crate::support::{Gpu, bytes, upload};

const ROWS: usize = 4096;
const COLS: usize = 2048;

fn normalize(backend: &CudaBackend, x: &CudaSlice<bf16>, y: &mut CudaSlice<bf16>) {
    backend.forward(&NormSpec::rms(ROWS, COLS, 1e-6), Forward::new(x.as_view(), y.as_view_mut())).unwrap();
}

/// The input is written, and the output read, on a stream that knows of the backend's only through cudarc's events.
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

/// Each thread has a stream of its own; all need the same kernel, which none has compiled.
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
