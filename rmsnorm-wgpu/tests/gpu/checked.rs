//! Shaders with and without wgpu's run-time checks give equal bits, and so do both conversions of
//! f16.

use rmsnorm_conformance::Harness;
use rmsnorm_wgpu::Forward;
use rmsnorm_wgpu::spec::{NormSpec, bf16, f16};

use crate::support::{backward, bits, forward, open, upload, whole};

#[test]
fn trusted_shaders_give_the_bits_of_checked_ones() {
    let Some(gpu) = open() else { return };
    let checked = gpu.checked();
    for (rows, cols) in [(5, 8), (3, 1024), (7, 33), (2, 4098), (40, 264), (2, 20001)] {
        assert_eq!(forward::<bf16>(&gpu, rows, cols), forward::<bf16>(&checked, rows, cols), "{rows}x{cols}");
        assert_eq!(forward::<f32>(&gpu, rows, cols), forward::<f32>(&checked, rows, cols), "{rows}x{cols}");
        assert_eq!(backward::<f16>(&gpu, rows, cols), backward::<f16>(&checked, rows, cols), "{rows}x{cols}");
        assert_eq!(backward::<f32>(&gpu, rows, cols), backward::<f32>(&checked, rows, cols), "{rows}x{cols}");
    }
}

/// With the device's conversions, if they are exact, and with integer arithmetic. Values range from
/// the smallest subnormals to results that overflow to infinity.
#[test]
fn f16_is_converted_to_the_bits_of_integer_arithmetic() {
    let Some(gpu) = open() else { return };
    let by_integers = gpu.with_integer_f16();
    assert!(!by_integers.converts_f16());
    println!("the device's own conversions: {}", gpu.converts_f16());
    for (rows, cols) in [(3, 1024), (7, 33), (2, 4098), (40, 264), (2, 20001), (2, 32768)] {
        assert_eq!(forward::<f16>(&gpu, rows, cols), forward::<f16>(&by_integers, rows, cols), "{rows}x{cols}");
    }
    let every_half: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).filter(|value| value.is_finite()).collect();
    let len = every_half.len();
    let x = gpu.upload(&every_half).unwrap();
    // Rows of one column, with rstd determined by eps for small x: y is about x, and takes any
    // value of f16 or next to one.
    for eps in [1.0, 0.99, 6.1e-5, 1e-9] {
        let results = [&gpu, &by_integers].map(|backend| {
            let (y, out) = (upload::<f16>(backend, 3, len), upload::<f16>(backend, 4, len));
            let args = Forward::new(whole(&x), whole(&y)).residual(whole(&x)).residual_out(whole(&out));
            backend.forward(&NormSpec::layer(len / 4, 4, eps), args).unwrap();
            (bits(backend, &y), bits(backend, &out))
        });
        assert_eq!(results[0], results[1], "eps {eps}");
    }
}
