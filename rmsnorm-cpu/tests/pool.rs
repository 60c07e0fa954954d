//! A backend with its own threads uses only these, never rayon's global pool, which belongs to the
//! application.
#![cfg(target_os = "linux")]

use rmsnorm_cpu::{Backward, CpuBackend, Forward, Isa};
use rmsnorm_spec::NormSpec;

/// Both stages of backward are split here, into two and more tasks. The only test of this file,
/// because threads are counted.
#[test]
fn no_thread_is_started_but_the_backends_own_and_those_that_are_shared() {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 2).unwrap();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    // Two tasks in forward; eight in the second stage.
    for (rows, cols) in [(256, 1024), (64, 1 << 16)] {
        let norm = NormSpec::rms(rows, cols, 1e-5);
        let (x, mut out) = (vec![1.0f32; rows * cols], vec![0.0f32; rows * cols]);
        let (mut rstd, mut dweight) = (vec![0.0; rows], vec![0.0; cols]);
        backend.forward(&norm, Forward::new(&x, &mut out).rstd(&mut rstd)).unwrap();
        backend.backward(&norm, Backward::new(&x, &x, &rstd, &mut out).dweight(&mut dweight)).unwrap();
    }
    assert_eq!(threads(), before);
    // Equal thread counts share threads; one thread is the caller's.
    let shared = [3, 3, 1, 3].map(|threads| CpuBackend::shared(threads).unwrap());
    assert_eq!(shared.map(|backend| backend.threads()), [3, 3, 1, 3]);
    assert_eq!(threads(), before + 3);
    assert!(CpuBackend::shared(0).is_err());
}
