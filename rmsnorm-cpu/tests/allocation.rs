//! A warm call allocates nothing, except the partial sums of weight gradients when no workspace is given.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use rmsnorm_cpu::{Backward, CpuBackend, Forward, ForwardInPlace, Isa};
use rmsnorm_spec::{NormBackend, NormSpec};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY:
// - every method passes its arguments on to the system allocator unchanged;
// - counting touches a const-initialised thread local without a destructor, which does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
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

fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

#[test]
fn warm_calls_allocate_nothing_but_the_gradient_partials() {
    let backend = CpuBackend::with(Isa::detect(), 1).unwrap();
    let (rows, cols) = (100, 1000);
    let norm = NormSpec::layer(rows, cols, 1e-5);
    let (x, weight) = (vec![1.5f32; rows * cols], vec![0.5f32; cols]);
    let (mut y, mut mean, mut rstd) = (x.clone(), vec![0.0; rows], vec![1.0; rows]);
    let (mut dweight, mut dbias, mut workspace) = (vec![0.0; cols], vec![0.0; cols], vec![0.0; 20 * cols]);

    let mut run = |with_workspace: bool| {
        let forward = Forward::new(&x, &mut y).weight(&weight).bias(&weight).mean(&mut mean).rstd(&mut rstd);
        backend.forward(&norm, forward).unwrap();
        backend.forward_in_place(&norm, ForwardInPlace::new(&mut y).weight(&weight)).unwrap();
        let mut backward = Backward::new(&x, &x, &mut y).weight(&weight).mean(&mean).rstd(&rstd);
        backward = backward.dweight(&mut dweight).dbias(&mut dbias);
        if with_workspace {
            backward = backward.workspace(&mut workspace);
        }
        backend.backward(&norm, backward).unwrap();
    };
    run(true);
    assert_eq!(allocations(|| run(true)), 0, "with a workspace");
    assert_eq!(allocations(|| run(false)), 1, "the workspace, once");
}
