//! Any number of threads is accepted, and a thousand give the bits of one.

use rmsnorm_conformance::testing::values;
use rmsnorm_cpu::{Backward, CpuBackend, Forward, Isa};
use rmsnorm_spec::{Error, NormSpec};

#[test]
fn no_thread_at_all_is_refused() {
    let error = CpuBackend::with_isa_and_threads(Isa::Portable, 0).unwrap_err();
    assert!(matches!(error, Error::Unavailable { backend: "cpu", .. }), "{error}");
    assert!(error.to_string().ends_with("threads must be at least 1, got 0"), "{error}");
}

#[test]
fn a_backend_has_the_threads_that_were_asked_for() {
    for threads in [1, 2, 5] {
        let backend = CpuBackend::with_isa_and_threads(Isa::Portable, threads).unwrap();
        assert_eq!((backend.threads(), backend.isa()), (threads, Isa::Portable));
    }
}

/// y, dx and dweight of a call with more rows than threads and enough bytes for every thread, also
/// in the second stage.
#[test]
fn a_thousand_threads_give_the_bits_of_one() {
    let (rows, cols) = (1100, 4099);
    let [x, dy] = [1, 2].map(|seed| values::<f32>(seed, rows * cols));
    let results = [1, 1000].map(|threads| {
        let backend = CpuBackend::with_isa_and_threads(Isa::detect(), threads).unwrap();
        let norm = NormSpec::rms(rows, cols, 1e-5);
        let (mut y, mut dx) = (vec![0.0f32; rows * cols], vec![0.0f32; rows * cols]);
        let (mut rstd, mut dweight) = (vec![0.0; rows], vec![0.0; cols]);
        backend.forward(&norm, Forward::new(&x, &mut y).rstd(&mut rstd)).unwrap();
        backend.backward(&norm, Backward::new(&dy, &x, &rstd, &mut dx).dweight(&mut dweight)).unwrap();
        [y, dx, rstd, dweight].map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    });
    assert!(results[0] == results[1]);
}
