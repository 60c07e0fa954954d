//! What can go wrong on a working GPU is a typed error, and the next call works.

use std::sync::Arc;

use rmsnorm_cuda::cudarc::driver::{CudaContext, CudaSlice, result};
use rmsnorm_cuda::{
    Backward, CudaBackend, DriverFailure, Forward,
    spec::{Error, NormBackend, NormSpec, bf16},
};

use crate::support::{Gpu, upload};

/// cudarc tells contexts apart by their number too. How to make a real second one on the same device depends on the
/// version of CUDA that cudarc was built for.
fn another_context(gpu: &Gpu) -> Arc<CudaContext> {
    let ours = gpu.stream().context();
    // SAFETY:
    // - context: the primary one of its device, which `ours` keeps;
    // - ownership: never taken, because what would give it back, the last drop, does not happen.
    let context =
        unsafe { CudaContext::from_raw_context(ours.ordinal() + 1000, ours.cu_device(), ours.cu_ctx()) }.unwrap();
    std::mem::forget(context.clone());
    context
}

#[test]
fn a_stream_of_another_context_is_refused() {
    let Some(gpu) = Gpu::open() else { return };
    let Err(Error::Unsupported { rule }) = gpu.on(another_context(&gpu).default_stream()) else {
        panic!("not refused");
    };
    assert!(rule.contains("device 1000") && rule.contains("device 0"), "{rule}");
}

#[test]
fn a_tensor_of_another_context_is_refused_by_name() {
    let Some(gpu) = Gpu::open() else { return };
    let (norm, foreign) = (NormSpec::rms(2, 8, 1e-6), another_context(&gpu).default_stream());
    let ours = || gpu.stream().alloc_zeros::<bf16>(16).unwrap();
    let theirs = || foreign.alloc_zeros::<bf16>(16).unwrap();
    for (name, x, mut y) in [("x", theirs(), ours()), ("y", ours(), theirs())] {
        let Err(Error::Unsupported { rule }) = gpu.forward(&norm, Forward::new(x.as_view(), y.as_view_mut())) else {
            panic!("{name} was not refused");
        };
        assert!(rule.contains(&format!("got {name} in ")), "{rule}");
    }
}

#[test]
fn a_device_that_does_not_exist_is_unavailable() {
    let Some(_gpu) = Gpu::open() else { return };
    for ordinal in [CudaBackend::device_count().unwrap(), 1 << 32, usize::MAX] {
        let error = CudaBackend::new(ordinal).unwrap_err();
        assert!(
            matches!(&error, Error::Unavailable { reason, .. } if reason.contains("there is no device")),
            "{error}"
        );
    }
}

#[test]
fn a_workspace_that_does_not_fit_is_out_of_memory() {
    let Some(gpu) = Gpu::open() else { return };
    let (stream, rows, cols) = (gpu.stream(), 132, 1 << 20);
    let norm = NormSpec::rms(rows, cols, 1e-6);
    let dy = upload::<bf16>(&gpu, 1, rows * cols);
    let rstd = upload::<f32>(&gpu, 2, rows);
    let mut dx = stream.alloc_zeros::<bf16>(rows * cols).unwrap();
    let mut dweight = stream.alloc_zeros::<bf16>(cols).unwrap();
    let mut call = || {
        let args = Backward::new(dy.as_view(), dy.as_view(), dx.as_view_mut()).rstd(rstd.as_view());
        gpu.backward(&norm, args.dweight(dweight.as_view_mut()))
    };
    call().unwrap();
    let hog = fill_memory(&gpu);
    let Err(Error::Device { source, .. }) = call() else { panic!("it fitted") };
    let failure = source.downcast_ref::<DriverFailure>().unwrap();
    assert!(failure.is_out_of_memory() && !failure.is_context_lost(), "{failure}");
    drop(hog);
    call().unwrap();
    stream.synchronize().unwrap();
}

/// Takes all memory of the device but some MiB.
fn fill_memory(gpu: &Gpu) -> Vec<CudaSlice<u8>> {
    let stream = gpu.stream();
    stream.synchronize().unwrap();
    let mut hog = Vec::new();
    let mut bytes = result::mem_get_info().unwrap().0;
    while bytes >= 16 << 20 {
        // SAFETY:
        // - contents: never read.
        match unsafe { stream.alloc::<u8>(bytes) } {
            Ok(slice) => hog.push(slice),
            Err(_) => bytes /= 2,
        }
    }
    hog
}
