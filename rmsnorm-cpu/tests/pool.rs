//! Whose threads work: a backend's own, never those of rayon's global pool, which is the caller's.
#![cfg(target_os = "linux")]

use rmsnorm_cpu::{Backward, CpuBackend, Forward, Isa};
use rmsnorm_spec::NormSpec;

/// Both stages of backward are split here, into two tasks and into more. The one test of this file, as threads are counted.
#[test]
fn no_thread_is_started_but_the_backends_own_and_those_that_are_shared() {
    let backend = CpuBackend::with(Isa::detect(), 2).unwrap();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    // Two tasks forward; a second stage of eight.
    for (rows, cols) in [(256, 1024), (64, 1 << 16)] {
        let norm = NormSpec::rms(rows, cols, 1e-5);
        let (x, mut out) = (vec![1.0f32; rows * cols], vec![0.0f32; rows * cols]);
        let (mut rstd, mut dweight) = (vec![0.0; rows], vec![0.0; cols]);
        backend.forward(&norm, Forward::new(&x, &mut out).rstd(&mut rstd)).unwrap();
        backend.backward(&norm, Backward::new(&x, &x, &rstd, &mut out).dweight(&mut dweight)).unwrap();
    }
    assert_eq!(threads(), before);
    // Who asks for as many threads shares them; one is the caller's own.
    let shared = [3, 3, 1, 3].map(|threads| CpuBackend::shared(threads).unwrap());
    assert_eq!(shared.map(|backend| backend.threads()), [3, 3, 1, 3]);
    assert_eq!(threads(), before + 3);
    assert!(CpuBackend::shared(0).is_err());
}
