//! The memory that the graph holds after a forward pass: the result and the statistics, and no
//! copies.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Device, Tensor, TensorData};
use rmsnorm_burn::{
    add_layer_norm, add_rms_norm, layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
};
use rmsnorm_core::conformance::testing::values;
use rmsnorm_core::{Element, bf16};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY:
// - every method passes its arguments on to the system allocator unchanged;
// - counting touches atomics, which do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(live, Ordering::Relaxed);
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

/// The bytes that `forward` leaves allocated while its result lives, and the most allocated at any
/// time.
fn held<T>(forward: impl Fn() -> T) -> (usize, usize) {
    // The first call creates threads and tables.
    drop(forward());
    let before = LIVE.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let result = forward();
    let (after, most) = (LIVE.load(Ordering::Relaxed), MOST.load(Ordering::Relaxed));
    drop(result);
    (after - before, most - before)
}

/// Results and statistics in bytes, plus nodes of the graph; and no more at any time.
fn is_held((got, most): (usize, usize), results: usize, statistics: usize) {
    let least = results + statistics * ROWS * 4;
    let due = least..least + 16384;
    assert!(due.contains(&got) && due.contains(&most), "{got} bytes, at most {most}, where {least} are due");
}

fn leaf<E: Element + burn::tensor::Element, const D: usize>(device: &Device, dims: [usize; D], seed: u64) -> Tensor<D> {
    let data = TensorData::new(values::<E>(seed, dims.iter().product()), dims);
    let tensor = Tensor::<D>::from_data(data, (device, <E as burn::tensor::Element>::dtype()));
    if device.is_autodiff() { tensor.require_grad() } else { tensor }
}

fn of_dtype<E: Element + burn::tensor::Element>() {
    let device = Device::flex().autodiff();
    let matrix = |dims, seed| leaf::<E, 2>(&device, dims, seed);
    let (x, r) = (matrix([ROWS, COLS], 1), matrix([ROWS, COLS], 2));
    let (w, b) = (leaf::<f32, 1>(&device, [COLS], 3), leaf::<f32, 1>(&device, [COLS], 4));
    let size = ROWS * COLS * size_of::<E>();
    is_held(held(|| rms_norm(x.clone(), w.clone(), 1e-5)), size, 1);
    is_held(held(|| layer_norm(x.clone(), w.clone(), Some(b.clone()), 1e-5)), size, 2);
    is_held(held(|| add_rms_norm(x.clone(), r.clone(), w.clone(), 1e-5)), 2 * size, 1);
    is_held(held(|| add_layer_norm(x.clone(), r.clone(), w.clone(), Some(b.clone()), 1e-5)), 2 * size, 2);
    is_held(held(|| rms_norm_add(x.clone(), r.clone(), w.clone(), 1e-5)), size, 1);
    is_held(held(|| layer_norm_add(x.clone(), r.clone(), w.clone(), Some(b.clone()), 1e-5)), size, 2);
    let around = || rms_norm_add_rms_norm(x.clone(), r.clone(), w.clone(), b.clone(), 1e-5);
    is_held(held(around), 2 * size, 2);
    // The graph keeps only the sum.
    let (got, _) = held(|| around().0);
    assert!((2 * size..2 * size + 2 * ROWS * 4 + 16384).contains(&got), "{got} bytes");
    // If only the residual is tracked, it keeps neither x nor its statistics.
    let still = || matrix([ROWS, COLS], 6).detach().set_require_grad(false);
    let still_w = w.clone().detach().set_require_grad(false);
    let (got, _) = held(|| rms_norm_add(still(), r.clone(), still_w.clone(), 1e-5));
    assert!((size..size + 16384).contains(&got), "{got} bytes");
    // Views of a wider tensor, whose rows are not copied: of one head, and of all heads of a part.
    let wide = matrix([ROWS, 3 * COLS], 5);
    is_held(held(|| rms_norm(wide.clone().narrow(1, COLS, COLS), w.clone(), 1e-5)), size, 1);
    let heads = || wide.clone().reshape([ROWS / 2, 6, COLS]).narrow(1, 2, 2);
    is_held(held(|| rms_norm(heads(), w.clone(), 1e-5)), size, 1);
    // Without autodiff, only the result.
    let plain = Device::flex();
    let (x, w) = (leaf::<E, 2>(&plain, [ROWS, COLS], 1), leaf::<f32, 1>(&plain, [COLS], 3));
    is_held(held(|| rms_norm(x.clone(), w.clone(), 1e-5)), size, 0);
    // A call that overwrites an argument allocates nothing.
    let own = || leaf::<E, 2>(&plain, [ROWS, COLS], 1);
    is_held(held(|| add_rms_norm(own(), own(), w.clone(), 1e-5)), 2 * size, 0);
    is_held(held(|| rms_norm_add(x.clone(), own(), w.clone(), 1e-5)), size, 0);
}

/// With autodiff but without tracked tensors: only the results.
fn of_untracked<E: Element + burn::tensor::Element>() {
    let device = Device::flex().autodiff();
    let matrix = |seed| leaf::<E, 2>(&device, [ROWS, COLS], seed).detach().set_require_grad(false);
    let vector = |seed| leaf::<f32, 1>(&device, [COLS], seed).detach().set_require_grad(false);
    let (x, r, w, b) = (matrix(1), matrix(2), vector(3), vector(4));
    let size = ROWS * COLS * size_of::<E>();
    is_held(held(|| rms_norm(x.clone(), w.clone(), 1e-5)), size, 0);
    is_held(held(|| layer_norm(x.clone(), w.clone(), Some(b.clone()), 1e-5)), size, 0);
    is_held(held(|| add_rms_norm(x.clone(), r.clone(), w.clone(), 1e-5)), 2 * size, 0);
    is_held(held(|| add_layer_norm(x.clone(), r.clone(), w.clone(), Some(b.clone()), 1e-5)), 2 * size, 0);
    is_held(held(|| rms_norm_add(x.clone(), r.clone(), w.clone(), 1e-5)), size, 0);
    is_held(held(|| layer_norm_add(x.clone(), r.clone(), w.clone(), Some(b.clone()), 1e-5)), size, 0);
    is_held(held(|| rms_norm_add_rms_norm(x.clone(), r.clone(), w.clone(), b.clone(), 1e-5)), 2 * size, 0);
}

/// y is kept for the operation that needs it or, with gradient checkpointing, recomputed.
fn checkpointing() {
    let kept = |device: &Device| {
        let (x, w) = (leaf::<f32, 2>(device, [ROWS, COLS], 1), leaf::<f32, 1>(device, [COLS], 3));
        held(|| {
            let y = rms_norm(x.clone(), w.clone(), 1e-5);
            (y.clone() * y).sum()
        })
        .0
    };
    let around = |device: &Device| {
        let (x, r) = (leaf::<f32, 2>(device, [ROWS, COLS], 1), leaf::<f32, 2>(device, [ROWS, COLS], 2));
        let w = leaf::<f32, 1>(device, [COLS], 3);
        held(|| {
            let (y, _) = rms_norm_add_rms_norm(x.clone(), r.clone(), w.clone(), w.clone(), 1e-5);
            (y.clone() * y).sum()
        })
        .0
    };
    let device = Device::flex().autodiff();
    let (size, statistics) = (ROWS * COLS * 4, ROWS * 4);
    let (all, few) = (around(&device), around(&device.clone().gradient_checkpointing()));
    let due = |matrices: usize| matrices * size + 2 * statistics..matrices * size + 2 * statistics + 16384;
    assert!(due(2).contains(&all) && due(1).contains(&few), "{all} bytes, {few} bytes");
    let (all, few) = (kept(&device), kept(&device.gradient_checkpointing()));
    assert!((size + statistics..size + statistics + 16384).contains(&all), "{all} bytes");
    assert!((statistics..statistics + 16384).contains(&few), "{few} bytes");
}

/// One test, because a concurrent one would be counted.
#[test]
fn graph_holds_results_and_statistics_alone() {
    of_dtype::<f32>();
    of_dtype::<bf16>();
    of_untracked::<f32>();
    of_untracked::<bf16>();
    checkpointing();
}
