//! The memory that the graph holds after a forward pass: the result and the statistics, and no
//! copies.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Var, WithDType};
use rmsnorm_candle::{
    add_layer_norm, add_rms_norm, layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
};
use rmsnorm_core::conformance::testing::values;
use rmsnorm_core::{Element, bf16};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY:
// - every method passes its arguments on to the system allocator unchanged;
// - counting touches an atomic, which does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY:
        // - layout: the caller's obligation, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY:
        // - pointer and layout: the caller's obligation, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROWS: usize = 4096;
const COLS: usize = 128;

/// The bytes that `forward` leaves allocated while its result lives.
fn held<T>(forward: impl Fn() -> T) -> usize {
    // The first call creates threads and tables.
    drop(forward());
    let before = LIVE.load(Ordering::Relaxed);
    let result = forward();
    let after = LIVE.load(Ordering::Relaxed);
    drop(result);
    after - before
}

/// Results and statistics in bytes, plus a node of the graph for each.
fn is_held(got: usize, results: usize, statistics: usize) {
    let least = results + statistics * ROWS * 4;
    assert!((least..least + 4096).contains(&got), "{got} bytes, where {least} are due");
}

fn var<E: Element + WithDType>(shape: &[usize], seed: u64) -> Var {
    Var::from_vec(values::<E>(seed, shape.iter().product()), shape, &Device::Cpu).unwrap()
}

fn of_dtype<E: Element + WithDType>() {
    let x = var::<E>(&[ROWS, COLS], 1);
    let r = var::<E>(&[ROWS, COLS], 2);
    let (w, b) = (var::<f32>(&[COLS], 3), var::<f32>(&[COLS], 4));
    let size = ROWS * COLS * size_of::<E>();
    is_held(held(|| rms_norm(&x, &w, 1e-5).unwrap()), size, 1);
    is_held(held(|| layer_norm(&x, &w, Some(&b), 1e-5).unwrap()), size, 2);
    is_held(held(|| add_rms_norm(&x, &r, &w, 1e-5).unwrap()), 2 * size, 1);
    is_held(held(|| add_layer_norm(&x, &r, &w, Some(&b), 1e-5).unwrap()), 2 * size, 2);
    is_held(held(|| rms_norm_add(&x, &r, &w, 1e-5).unwrap()), size, 1);
    is_held(held(|| layer_norm_add(&x, &r, &w, Some(&b), 1e-5).unwrap()), size, 2);
    is_held(held(|| rms_norm_add_rms_norm(&x, &r, &w, &b, 1e-5).unwrap()), 2 * size, 2);
    // A view of a wider tensor; its rows are not copied.
    let wide = var::<E>(&[ROWS, 3 * COLS], 5);
    is_held(held(|| rms_norm(&wide.narrow(1, COLS, COLS).unwrap(), &w, 1e-5).unwrap()), size, 1);
    // Without a graph, only the result.
    let frozen = |var: &Var| var.detach();
    is_held(held(|| rms_norm(&frozen(&x), &frozen(&w), 1e-5).unwrap()), size, 0);
}

/// The same for GPU memory, in which candle's tensors come from the device's pool.
#[cfg(feature = "cuda")]
mod gpu {
    use candle_core::{CudaDevice, Device, Tensor};
    use rmsnorm_core::conformance::testing::available;
    use rmsnorm_core::cuda::CudaBackend;
    use rmsnorm_core::cuda::cudarc::driver::sys;

    use super::*;

    /// The unit of the pool.
    const GRAIN: usize = 512;

    /// The bytes of the device's pool that tensors use.
    fn used(device: &CudaDevice) -> usize {
        let mut used = 0u64;
        let context = device.cuda_stream().context().clone();
        context.synchronize().unwrap();
        // SAFETY:
        // - device: that of a context that is alive;
        // - pointers: to locals of the types that the calls write, which for this attribute is a
        //   64-bit number.
        unsafe {
            let mut pool = std::ptr::null_mut();
            sys::cuDeviceGetDefaultMemPool(&raw mut pool, context.cu_device()).result().unwrap();
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
            sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut used).cast()).result().unwrap();
        }
        used as usize
    }

    pub(super) fn graph_holds_results_and_statistics_alone() {
        if available(CudaBackend::new(0)).unwrap().is_none() {
            return;
        }
        let device = Device::new_cuda(0).unwrap();
        let make = |shape: &[usize]| Var::rand(-1f32, 1.0, shape, &device).unwrap();
        let (x, r, w, b) = (make(&[ROWS, COLS]), make(&[ROWS, COLS]), make(&[COLS]), make(&[COLS]));
        let wide = make(&[ROWS, 3 * COLS]);
        let size = ROWS * COLS * 4;
        let is_held = |results: usize, statistics: usize, forward: &dyn Fn() -> Vec<Tensor>| {
            // The first call creates kernels and pools.
            drop(forward());
            let cuda = device.as_cuda_device().unwrap();
            let before = used(cuda);
            let result = forward();
            let held = used(cuda) - before;
            drop(result);
            let least = results * size + statistics * ROWS * 4;
            assert!((least..least + 4 * GRAIN).contains(&held), "{held} bytes of the GPU, where {least} are due");
        };
        is_held(1, 1, &|| vec![rms_norm(&x, &w, 1e-5).unwrap()]);
        is_held(1, 2, &|| vec![layer_norm(&x, &w, Some(&b), 1e-5).unwrap()]);
        is_held(2, 1, &|| <[Tensor; 2]>::from(add_rms_norm(&x, &r, &w, 1e-5).unwrap()).into());
        let sum = || <[Tensor; 2]>::from(add_layer_norm(&x, &r, &w, Some(&b), 1e-5).unwrap()).into();
        is_held(2, 2, &sum);
        is_held(1, 1, &|| vec![rms_norm(&wide.narrow(1, COLS, COLS).unwrap(), &w, 1e-5).unwrap()]);
        is_held(1, 0, &|| vec![rms_norm(&x.detach(), &w.detach(), 1e-5).unwrap()]);
    }
}

/// One test, because a concurrent one would be counted.
#[test]
fn graph_holds_results_and_statistics_alone() {
    of_dtype::<f32>();
    of_dtype::<bf16>();
    #[cfg(feature = "cuda")]
    gpu::graph_holds_results_and_statistics_alone();
}
