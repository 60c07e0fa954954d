//! Equal calls give equal bits, especially where threads share words.

use rmsnorm_wgpu::spec::{bf16, f16};

use crate::support::{backward, forward, open};

#[test]
fn rows_that_share_words_repeat_their_bits() {
    let Some(gpu) = open() else { return };
    for (rows, cols) in [(500, 3), (200, 33), (40, 501)] {
        let (y, gradients) = (forward::<bf16>(&gpu, rows, cols), backward::<f16>(&gpu, rows, cols));
        for round in 0..20 {
            assert!(forward::<bf16>(&gpu, rows, cols) == y, "{rows}x{cols}, round {round}");
            assert!(backward::<f16>(&gpu, rows, cols) == gradients, "{rows}x{cols}, round {round}");
        }
    }
}
