//! A child of `fork` has none of its parent's threads. A call there must not wait for them.
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::time::{Duration, Instant};

use rmsnorm_conformance::testing::values;
use rmsnorm_cpu::{BackwardInputs, CpuBackend, ForwardInputs, Isa};
use rmsnorm_spec::{NormSpec, Tensor};

/// Far longer than the calls take. A child that waits for missing threads waits forever.
const LIMIT: Duration = Duration::from_secs(120);

/// The bits of calls that are large enough to be split, in both stages of backward.
fn results(backend: &CpuBackend) -> Vec<u32> {
    let mut bits = Vec::new();
    for (rows, cols) in [(600, 1024), (64, 1 << 16)] {
        let norm = NormSpec::rms(rows, cols, 1e-5);
        let x = values::<f32>(1, rows * cols);
        let made = backend.forward_vec(&norm, ForwardInputs::new(&x), &[Tensor::Rstd]).unwrap();
        let inputs = BackwardInputs::new(&made.y, &x, &made.rstd);
        let gradients = backend.backward_vec(&norm, inputs, &[Tensor::Dweight]).unwrap();
        let mut copy = vec![0.0; x.len()];
        backend.copy(&gradients.dx, &mut copy, true).unwrap();
        bits.extend([made.y, copy, gradients.dweight].concat().into_iter().map(f32::to_bits));
    }
    bits
}

/// Runs `work` in a child. Returns its result, or an error if it did not end.
fn in_child(work: impl FnOnce() -> bool) -> Result<bool, &'static str> {
    // SAFETY:
    // - threads: of this process only the calling one goes on in the child; what it uses there (the allocator, which the C
    //   library makes usable in a child, and our calls) takes no lock of another thread's;
    // - ownership: the child leaves by `_exit`, which runs nothing of the parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(false);
        // SAFETY:
        // - process: ends this child, at once.
        unsafe { libc::_exit(if is_right { 0 } else { 1 }) };
    }
    let (start, mut status) = (Instant::now(), 0);
    // SAFETY:
    // - memory: `status` is an integer of ours;
    // - process: `child` is ours, and was not waited for.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if start.elapsed() > LIMIT {
            // SAFETY:
            // - process: as above; it is killed, then waited for.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &raw mut status, 0);
            }
            return Err("the child hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0)
}

/// A single test, so that no other test runs during a fork.
#[test]
fn calls_in_a_forked_child_end_and_have_the_bits_of_the_parent() {
    let (own, global) = (CpuBackend::with_isa_and_threads(Isa::detect(), 2).unwrap(), CpuBackend::new());
    let expected = results(&own);
    assert!(results(&global) == expected);
    assert_eq!(in_child(|| results(&own) == expected), Ok(true), "threads of the backend's own");
    assert_eq!(in_child(|| results(&global) == expected), Ok(true), "rayon's global threads");
    let new = in_child(|| CpuBackend::new().threads() == 1 && results(&CpuBackend::new()) == expected);
    assert_eq!(new, Ok(true), "made in the child");
    let with = in_child(|| {
        let of_child = CpuBackend::with_isa_and_threads(Isa::detect(), 2).unwrap();
        drop(own.clone());
        of_child.threads() == 2 && results(&of_child) == expected
    });
    assert_eq!(with, Ok(true), "threads of the child's own");
    let parents = CpuBackend::shared(2).unwrap();
    assert!(results(&parents) == expected);
    let shared = in_child(|| {
        let of_child = CpuBackend::shared(2).unwrap();
        of_child.threads() == 2 && results(&of_child) == expected && results(&parents) == expected
    });
    assert_eq!(shared, Ok(true), "as many threads as the parent shares");
    let dropped = in_child(move || {
        drop(own);
        true
    });
    assert_eq!(dropped, Ok(true), "the parent's threads are let go");
    assert!(results(&global) == expected, "the parent goes on");
}
