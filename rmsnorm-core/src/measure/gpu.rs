//! What measuring any GPU has in common.

/// Three matrices of all sets exceed this many bytes together: several times the L2 of any device.
const COLD_BYTES: usize = 512 << 20;

/// The most sets: small calls need not be told apart further.
const MOST_SETS: usize = 64;

/// As many sets as visit [`COLD_BYTES`]; the peers are measured with the same number.
pub(super) fn set_count(matrix_bytes: usize) -> usize {
    COLD_BYTES.div_ceil(3 * matrix_bytes.max(1)).clamp(2, MOST_SETS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_those_of_the_peers() {
        // bf16: 32768x4096, 4096x4096, 4096x1024, 1x4096.
        for (bytes, sets) in [(256 << 20, 2), (32 << 20, 6), (8 << 20, 22), (8 << 10, 64), (1, 64)] {
            assert_eq!(set_count(bytes), sets, "{bytes} bytes");
        }
    }
}
