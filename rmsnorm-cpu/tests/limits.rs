//! The limits of eps: with 0, a row without variance has an infinite rstd, by definition, not an
//! invented one.

use rmsnorm_cpu::{CpuBackend, Forward, Isa};
use rmsnorm_spec::NormSpec;

#[test]
fn eps_of_zero_is_zero() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with_isa_and_threads(isa, 1).unwrap();
        for cols in [1, 31, 32, 100] {
            for norm in [NormSpec::rms(2, cols, 0.0), NormSpec::layer(2, cols, 0.0)] {
                // A row of zeros, and a row with subnormal, nonzero squares in RMS norm.
                let x: Vec<f32> = [vec![0.0; cols], vec![1e-20; cols]].concat();
                let (mut y, mut rstd) = (vec![7.0f32; 2 * cols], [7.0f32; 2]);
                backend.forward(&norm, Forward::new(&x, &mut y).rstd(&mut rstd)).unwrap();
                assert_eq!(rstd[0], f32::INFINITY, "{norm:?} on {isa}");
                assert!(y[..cols].iter().all(|y| y.is_nan()), "0 times infinity, {norm:?} on {isa}");
                if norm.norm == rmsnorm_spec::Norm::Rms {
                    assert!((9e19..1.1e20).contains(&rstd[1]), "{}, {norm:?} on {isa}", rstd[1]);
                }
            }
        }
    }
}
