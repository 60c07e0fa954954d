//! A warm call allocates nothing except the partial sums of weight gradients, if no workspace is
//! given, and blocks of the thread pool's queue.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use rmsnorm_cpu::{Backward, CpuBackend, Forward, Isa};
use rmsnorm_spec::NormSpec;

struct Counting;

thread_local! {
    static BY_THIS_THREAD: Cell<usize> = const { Cell::new(0) };
}

static BY_ALL_THREADS: AtomicUsize = AtomicUsize::new(0);

// SAFETY:
// - every method passes its arguments on to the system allocator unchanged;
// - counting touches an atomic, and a const-initialised thread local without a destructor: neither allocates.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BY_THIS_THREAD.set(BY_THIS_THREAD.get() + 1);
        BY_ALL_THREADS.fetch_add(1, Ordering::Relaxed);
        // SAFETY:
        // - layout: the caller's obligation, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY:
        // - pointer and layout: the caller's obligation, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The increase of a count during `work`.
fn added(count: impl Fn() -> usize, work: impl FnOnce()) -> usize {
    let before = count();
    work();
    count() - before
}

/// Both parts are in one test, because a concurrent test would be counted too.
#[test]
fn warm_calls_allocate_nothing_but_the_gradient_partials() {
    one_thread_allocates_the_partials_only();
    two_threads_allocate_blocks_of_the_queue_only();
}

fn one_thread_allocates_the_partials_only() {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap();
    let mut calls = Calls::new(100, 1000);
    calls.make(&backend, true);
    assert_eq!(added(|| BY_THIS_THREAD.get(), || calls.make(&backend, true)), 0, "with a workspace");
    assert_eq!(added(|| BY_THIS_THREAD.get(), || calls.make(&backend, false)), 1, "the workspace, once");
}

/// A split call enters the pool through rayon's injector queue, a list of blocks for 63 jobs each.
/// The thread that fills a block allocates the next. Each of these calls enters at most once,
/// because the second stage of backward is too small to split, so 200 calls take 3 or 4 blocks. The
/// limit of one allocation in 20 calls allows for another queue, but not for an allocation in every
/// call.
fn two_threads_allocate_blocks_of_the_queue_only() {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 2).unwrap();
    // 1.2 MB in and 1.2 MB out: enough for two tasks.
    let mut calls = Calls::new(300, 1000);
    calls.make(&backend, true);
    let warm_calls = 201;
    // Counts all threads, including the pool's. The test harness's thread makes a few allocations
    // as well.
    let all = || BY_ALL_THREADS.load(Ordering::Relaxed);
    let count = added(all, || (0..warm_calls / CALLS).for_each(|_| calls.make(&backend, true)));
    assert!(count <= warm_calls / 20, "{count} allocations in {warm_calls} calls");
}

/// The tensors of one call of each stage.
struct Calls {
    norm: NormSpec,
    x: Vec<f32>,
    weight: Vec<f32>,
    y: Vec<f32>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
    dweight: Vec<f32>,
    dbias: Vec<f32>,
    workspace: Vec<f32>,
}

/// The number of calls of [`Calls::make`].
const CALLS: usize = 3;

impl Calls {
    fn new(rows: usize, cols: usize) -> Self {
        Calls {
            norm: NormSpec::layer(rows, cols, 1e-5),
            x: vec![1.5; rows * cols],
            weight: vec![0.5; cols],
            y: vec![1.5; rows * cols],
            mean: vec![0.0; rows],
            rstd: vec![1.0; rows],
            dweight: vec![0.0; cols],
            dbias: vec![0.0; cols],
            workspace: vec![0.0; 40 * cols],
        }
    }

    fn make(&mut self, backend: &CpuBackend, with_workspace: bool) {
        let Calls { norm, x, weight, y, mean, rstd, dweight, dbias, workspace } = self;
        let forward = Forward::new(&*x, &mut *y).weight(&*weight).bias(&*weight).mean(&mut *mean).rstd(&mut *rstd);
        backend.forward(norm, forward).unwrap();
        backend.forward(norm, Forward::in_place(&mut *y).weight(&*weight)).unwrap();
        let mut backward = Backward::new(&*x, &*x, &*rstd, &mut *y).weight(&*weight).mean(&*mean);
        backward = backward.dweight(&mut *dweight).dbias(&mut *dbias);
        if with_workspace {
            backward = backward.workspace(&mut *workspace);
        }
        backend.backward(norm, backward).unwrap();
    }
}
