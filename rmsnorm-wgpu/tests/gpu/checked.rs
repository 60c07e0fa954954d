//! Shaders with and without wgpu's run-time checks give equal bits, and so do both ways of converting f16.

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

/// By the device's conversions, where it has those that give these bits, and by integers. Values from the smallest subnormals up to
/// results beyond the largest, which are infinite.
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
    // Rows of one column, whose rstd is that of eps where x is small: y is x times about 1, and any of the values of f16 or next to it.
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
