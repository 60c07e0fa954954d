//! What the graph holds after a forward pass: the result and the statistics, and no copy of anything.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Var, WithDType};
use rmsnorm_candle::{add_rms_norm, layer_norm, rms_norm};
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

/// Bytes that are live after `forward` and were not before, while its result is.
fn held<T>(forward: impl Fn() -> T) -> usize {
    // Threads and tables that the first call makes.
    drop(forward());
    let before = LIVE.load(Ordering::Relaxed);
    let result = forward();
    let after = LIVE.load(Ordering::Relaxed);
    drop(result);
    after - before
}

/// Results and statistics in bytes, and a node of the graph each.
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
    // A view of a wider tensor, whose rows are not copied.
    let wide = var::<E>(&[ROWS, 3 * COLS], 5);
    is_held(held(|| rms_norm(&wide.narrow(1, COLS, COLS).unwrap(), &w, 1e-5).unwrap()), size, 1);
    // Without a graph, the result alone.
    let frozen = |var: &Var| var.detach();
    is_held(held(|| rms_norm(&frozen(&x), &frozen(&w), 1e-5).unwrap()), size, 0);
}

/// One test: another beside it would be counted.
#[test]
fn graph_holds_results_and_statistics_alone() {
    of_dtype::<f32>();
    of_dtype::<bf16>();
}
