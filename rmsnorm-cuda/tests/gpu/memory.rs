//! Buffers between two calls.

use rmsnorm_conformance::testing::values;
use rmsnorm_cuda::spec::{Error, Memory, NormSpec, bf16};
use rmsnorm_cuda::{CudaBackend, DriverFailure, Forward};

use crate::support::{Gpu, bytes, upload};

const ROWS: usize = 1000;
const COLS: usize = 1024;
const LEN: usize = ROWS * COLS;

/// Two norms with a buffer in between, which is dropped before they have run. The next round gets
/// its memory at once.
#[test]
fn a_buffer_lives_as_long_as_the_calls_that_use_it() {
    let Some(gpu) = Gpu::open() else { return };
    let norm = NormSpec::rms(ROWS, COLS, 1e-6);
    let mut y = gpu.stream().alloc_zeros::<bf16>(LEN).unwrap();
    let mut results = Vec::new();
    for round in 0..40 {
        let x = upload::<bf16>(&gpu, round % 2, LEN);
        let mut buffer = gpu.buffer::<bf16>(LEN + 7).unwrap();
        let out = CudaBackend::buffer_out(&mut buffer, 7..LEN + 7);
        gpu.forward(&norm, Forward::new(x.as_view(), out)).unwrap();
        let input = CudaBackend::buffer_in(&buffer, 7..LEN + 7);
        gpu.forward(&norm, Forward::new(input, y.as_view_mut())).unwrap();
        drop(buffer);
        results.push(bytes(&gpu, &y));
    }
    assert!(results[0] != results[1]);
    for (round, result) in results.iter().enumerate() {
        assert!(*result == results[round % 2], "round {round}");
    }
}

/// A part of a view has the same elements as a range of the slice.
#[test]
fn parts_are_where_they_should_be() {
    let Some(gpu) = Gpu::open() else { return };
    let host = values::<bf16>(1, 100);
    let mut buffer = gpu.buffer::<bf16>(100).unwrap();
    gpu.stream().memcpy_htod(&host, &mut buffer).unwrap();
    let whole = CudaBackend::buffer_in(&buffer, 10..90);
    let part = CudaBackend::part_in(&whole, 5..25);
    assert_eq!(gpu.stream().clone_dtoh(&part).unwrap(), host[15..35]);
    assert_eq!(CudaBackend::part_in(&whole, 80..80).len(), 0);
    let mut whole = CudaBackend::buffer_out(&mut buffer, 10..90);
    gpu.stream().memset_zeros(&mut whole.slice_mut(70..80)).unwrap();
    assert_eq!(gpu.stream().clone_dtoh(&CudaBackend::read_out(&whole)).unwrap()[..70], host[10..80]);
    let all = gpu.stream().clone_dtoh(&buffer).unwrap();
    assert_eq!((&all[..80], &all[90..]), (&host[..80], &host[90..]));
    assert!(all[80..90].iter().all(|element| element.to_bits() == 0));
}

#[test]
fn a_buffer_may_be_empty_and_not_too_large() {
    let Some(gpu) = Gpu::open() else { return };
    assert_eq!(gpu.buffer::<f32>(0).unwrap().len(), 0);
    for len in [usize::MAX, isize::MAX as usize / 4, 1 << 50] {
        let Err(Error::Device { source, .. }) = gpu.buffer::<f32>(len) else { panic!("{len}: there is no such room") };
        assert!(source.downcast_ref().is_some_and(DriverFailure::is_out_of_memory), "{len}: {source}");
    }
    assert!(gpu.buffer::<f32>(1 << 20).is_ok());
}
