//! Failures on a working GPU are typed errors, and the next call works.

use std::env;
use std::process::Command;
use std::sync::Arc;

use rmsnorm_cuda::cudarc::driver::{CudaContext, CudaSlice, result};
use rmsnorm_cuda::{
    Backward, CudaBackend, DriverFailure, Forward,
    spec::{DType, Error, Norm, NormBackend, NormSpec, Problem, Tensor, bf16},
};

use crate::support::{Gpu, upload};

/// A second context: cudarc distinguishes contexts by device number too. How to create a real
/// second context depends on the CUDA version of cudarc.
fn another_context(gpu: &Gpu) -> Arc<CudaContext> {
    let ours = gpu.stream().context();
    // SAFETY:
    // - context: the primary one of its device, which `ours` keeps;
    // - ownership: never taken: only the last drop would release the context, and the clone below
    //   is never dropped.
    let context =
        unsafe { CudaContext::from_raw_context(ours.ordinal() + 1000, ours.cu_device(), ours.cu_ctx()) }.unwrap();
    std::mem::forget(context.clone());
    context
}

#[test]
fn a_backend_says_what_it_is() {
    let Some(gpu) = Gpu::open() else { return };
    let context = gpu.stream().context();
    let (major, minor) = context.compute_capability().unwrap();
    let gib = context.total_mem().unwrap() as f64 / f64::from(1 << 30);
    let (driver_major, driver_minor) = gpu.driver_version();
    let text = gpu.to_string();
    assert!(text.starts_with(&context.name().unwrap()), "{text}");
    let driver = format!("{gib:.1} GiB, driver {driver_major}.{driver_minor}, NVRTC ");
    assert!(text.contains(&format!(", sm_{major}{minor}, ")) && text.contains(&driver), "{text}");
    assert!(driver_major >= 12 && driver_minor < 10, "{driver_major}.{driver_minor}");
    assert!(format!("{:?}", *gpu).contains(&text), "{:?}", *gpu);
    assert_eq!(NormBackend::name(&*gpu), "cuda");
}

#[test]
fn a_stream_of_another_context_is_refused() {
    let Some(gpu) = Gpu::open() else { return };
    let Err(Error::InvalidArgument { arg: "stream", rule }) = gpu.on(another_context(&gpu).default_stream()) else {
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
        let answer = gpu.forward(&norm, Forward::new(x.as_view(), y.as_view_mut()));
        let Err(Error::InvalidArgument { arg, rule }) = answer else { panic!("{name}: {answer:?}") };
        assert_eq!(arg, name);
        assert!(rule.contains("device 1000") && rule.contains("device 0"), "{rule}");
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
        let args = Backward::new(dy.as_view(), dy.as_view(), rstd.as_view(), dx.as_view_mut());
        gpu.backward(&norm, args.dweight(dweight.as_view_mut()))
    };
    // Not a call: the pool would keep its workspace.
    gpu.prepare(&Problem::backward(Norm::Rms, rows, cols, DType::Bf16, &[Tensor::Dweight])).unwrap();
    let hog = fill_memory(&gpu);
    let Err(Error::Device { source, .. }) = call() else { panic!("it fitted") };
    let failure = source.downcast_ref::<DriverFailure>().unwrap();
    assert!(failure.is_out_of_memory() && !failure.is_context_lost(), "{failure}");
    drop(hog);
    call().unwrap();
    stream.synchronize().unwrap();
}

/// Allocates all memory of the device except a few MiB.
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

/// Set in the process that loses its context.
const IS_CHILD: &str = "RMSNORM_TEST_CONTEXT_LOSS";

/// A lost context breaks the whole process, so this test runs itself again in a child process.
#[test]
fn a_lost_context_is_a_device_error() {
    let Some(_gpu) = Gpu::open() else { return };
    let mut child = Command::new(env::current_exe().unwrap());
    let output = child.args(["--exact", "errors::child_loses_its_context", "--nocapture"]).env(IS_CHILD, "1").output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !text.contains("panicked"), "{output:?}");
    let answers: Vec<_> = text.lines().filter_map(|line| line.split_once("lost: ")).map(|(_, error)| error).collect();
    assert_eq!(answers.len(), 2 * CALLS_AFTER_LOSS, "{output:?}");
    assert!(answers.iter().all(|error| error.contains("must be restarted")), "{answers:?}");
}

const CALLS_AFTER_LOSS: usize = 3;

/// Runs in the child process of the test above: loses its context, and prints the errors of later
/// calls.
#[test]
fn child_loses_its_context() {
    if env::var_os(IS_CHILD).is_none() {
        return;
    }
    let gpu = CudaBackend::new(0).unwrap();
    let (norm, stream) = (NormSpec::rms(2, 1024, 1e-6), gpu.stream());
    let x = upload::<bf16>(&gpu, 1, 2048);
    let mut y = stream.alloc_zeros::<bf16>(2048).unwrap();
    let rstd = upload::<f32>(&gpu, 2, 2);
    let mut dweight = stream.alloc_zeros::<bf16>(1024).unwrap();
    gpu.forward(&norm, Forward::new(x.as_view(), y.as_view_mut())).unwrap();
    stream.synchronize().unwrap();

    // SAFETY:
    // - memory: none: no allocation has this address, so the device reports an error, which affects
    //   only this process;
    // - ownership: forgotten below, never freed.
    let nowhere = unsafe { stream.upgrade_device_ptr::<bf16>(1 << 12, 2048) };
    gpu.forward(&norm, Forward::new(nowhere.as_view(), y.as_view_mut())).unwrap();
    std::mem::forget(nowhere);
    assert!(stream.synchronize().is_err(), "the kernel has read from nowhere");

    for _ in 0..CALLS_AFTER_LOSS {
        let forward = gpu.forward(&norm, Forward::new(x.as_view(), y.as_view_mut()));
        let args = Backward::new(x.as_view(), x.as_view(), rstd.as_view(), y.as_view_mut());
        let backward = gpu.backward(&norm, args.dweight(dweight.as_view_mut()));
        for call in [forward, backward] {
            let Err(Error::Device { source, .. }) = call else { panic!("{call:?}") };
            assert!(source.downcast_ref().is_some_and(DriverFailure::is_context_lost), "{source}");
            println!("lost: {source}");
        }
    }
}
