//! Memory and streams of other owners, several backends on one context, and prepared kernels.

use rmsnorm_cuda::cudarc::driver::{DevicePtr, sys};
use rmsnorm_cuda::{
    Backward, BorrowedSlice, CudaBackend, Forward,
    spec::{DType, Error, Norm, NormSpec, Problem, Tensor, bf16},
};

use crate::support::{Gpu, bytes, upload};

const ROWS: usize = 64;
const COLS: usize = 1000;

#[test]
fn borrowed_memory_on_a_borrowed_stream_gives_the_same_bits() {
    let Some(gpu) = Gpu::open() else { return };
    let norm = NormSpec::rms(ROWS, COLS, 1e-6);
    let x = upload::<bf16>(&gpu, 1, ROWS * COLS);
    let [mut expected, theirs] = [2, 3].map(|seed| upload::<bf16>(&gpu, seed, ROWS * COLS));
    gpu.forward(&norm, Forward::new(x.as_view(), expected.as_view_mut())).unwrap();
    gpu.stream().synchronize().unwrap();

    let owner = gpu.stream().context().new_stream().unwrap();
    let [x_address, y_address] = [&x, &theirs].map(|slice| slice.device_ptr(slice.stream()).0);
    {
        // SAFETY:
        // - stream: of the same context, alive to the end of the test; nothing else is enqueued on
        //   it meanwhile;
        // - memory: of the slices above, initialized, alive to the end of the test and not used
        //   until synchronized.
        let (backend, x, mut y) = unsafe {
            let backend = gpu.on_raw(owner.cu_stream());
            let x = BorrowedSlice::<bf16>::new(&backend, x_address, ROWS * COLS).unwrap();
            let y = BorrowedSlice::<bf16>::new(&backend, y_address, ROWS * COLS).unwrap();
            (backend, x, y)
        };
        backend.forward(&norm, Forward::new(x.as_view(), y.as_view_mut())).unwrap();
        backend.stream().synchronize().unwrap();
    }
    // Dropping the borrowed slices freed neither the memory nor the stream.
    owner.synchronize().unwrap();
    assert!(bytes(&gpu, &theirs) == bytes(&gpu, &expected));
}

#[test]
fn an_address_between_two_elements_is_refused() {
    let Some(gpu) = Gpu::open() else { return };
    let x = upload::<f32>(&gpu, 1, 4);
    let (address, _in_use) = x.device_ptr(gpu.stream());
    for (offset, is_good) in [(0, true), (1, false), (2, false), (4, true)] {
        // SAFETY:
        // - memory: of the slice above, and never used through this.
        let borrowed = unsafe { BorrowedSlice::<f32>::new(&gpu, address + offset, 2) };
        let refused = matches!(borrowed, Err(Error::InvalidArgument { arg: "address", .. }));
        assert_eq!((borrowed.is_ok(), refused), (is_good, !is_good), "{offset}");
    }
}

#[test]
fn what_was_prepared_is_not_compiled_again() {
    let Some(gpu) = Gpu::open() else { return };
    // No other test has this length, so its kernels are not loaded yet.
    for (rows, cols) in [(40, 1944), (9, 1_000_008)] {
        let (stream, norm) = (gpu.stream(), NormSpec::rms(rows, cols, 1e-6));
        let forward = Problem::forward(Norm::Rms, rows, cols, DType::Bf16, &[Tensor::Rstd]);
        let backward = Problem::backward(Norm::Rms, rows, cols, DType::Bf16, &[Tensor::Dweight]);
        let before = gpu.kernel_count();
        gpu.prepare(&forward).unwrap();
        gpu.prepare(&backward).unwrap();
        let prepared = gpu.kernel_count();
        assert!(prepared >= before, "kernels stay loaded");

        let x = upload::<bf16>(&gpu, 1, rows * cols);
        let mut rstd = stream.alloc_zeros::<f32>(rows).unwrap();
        let mut out = stream.alloc_zeros::<bf16>(rows * cols).unwrap();
        let mut dweight = stream.alloc_zeros::<bf16>(cols).unwrap();
        gpu.forward(&norm, Forward::new(x.as_view(), out.as_view_mut()).rstd(rstd.as_view_mut())).unwrap();
        let args = Backward::new(x.as_view(), x.as_view(), rstd.as_view(), out.as_view_mut());
        gpu.backward(&norm, args.dweight(dweight.as_view_mut())).unwrap();
        assert_eq!(gpu.kernel_count(), prepared, "{rows}x{cols}: all was there");

        // Tensors with a lower alignment need another kernel.
        gpu.prepare_aligned(&forward, 2).unwrap();
        assert_eq!(gpu.kernel_count(), prepared + 1, "{rows}x{cols}");
        gpu.prepare_aligned(&forward, 6).unwrap();
        assert_eq!(gpu.kernel_count(), prepared + 1, "{rows}x{cols}: 6 bytes are as aligned as 2");
    }
}

/// Compiles on several threads; the context is made current on each.
#[test]
fn a_list_of_calls_is_prepared_at_once() {
    let Some(gpu) = Gpu::open() else { return };
    // No other test has this length.
    let forward = Problem::forward(Norm::Rms, 7, 1912, DType::Bf16, &[Tensor::Rstd]);
    let backward = Problem::backward(Norm::Rms, 7, 1912, DType::Bf16, &[Tensor::Dweight]);
    let too_many = Problem { rows: 1 << 33, rows_per_group: Some(2), ..forward };
    let before = gpu.kernel_count();
    assert!(matches!(gpu.prepare_all(&[forward, too_many]), Err(Error::Unsupported { .. })));
    assert_eq!(gpu.kernel_count(), before);
    gpu.prepare_all(&[forward, backward, forward]).unwrap();
    let prepared = gpu.kernel_count();
    assert!(prepared > before);
    gpu.prepare(&forward).unwrap();
    gpu.prepare(&backward).unwrap();
    assert_eq!(gpu.kernel_count(), prepared);
}

#[test]
fn backends_of_one_context_share_its_kernels() {
    let Some(gpu) = Gpu::open() else { return };
    let other = CudaBackend::new(0).unwrap();
    let problem = Problem::forward(Norm::Layer, 3, 1976, DType::F16, &[Tensor::Bias]);
    let before = other.kernel_count();
    gpu.prepare(&problem).unwrap();
    assert_eq!(other.kernel_count(), before + 1);
    // SAFETY:
    // - stream: the default one of a context, which lives as long as the context.
    let raw = unsafe { other.on_raw(sys::CUstream::default()) };
    assert_eq!(raw.kernel_count(), before + 1);
}
