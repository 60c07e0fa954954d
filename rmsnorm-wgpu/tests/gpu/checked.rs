//! Shaders with and without wgpu's run-time checks give equal bits.

use rmsnorm_wgpu::spec::{bf16, f16};

use crate::support::{backward, forward, open};

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
