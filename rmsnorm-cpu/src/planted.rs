//! Wrong results on demand, for tests that a failed proof is handled. Needs the feature `planted`,
//! which only tests of other crates enable.

use std::sync::OnceLock;

use rmsnorm_spec::{Direction, NormSpec};

/// The environment variable that names the wrong operation: `forward`, `backward` or `copy`.
const VARIABLE: &str = "RMSNORM_PLANTED";

fn planted() -> &'static str {
    static PLANTED: OnceLock<String> = OnceLock::new();
    PLANTED.get_or_init(|| std::env::var(VARIABLE).unwrap_or_default())
}

/// The number of elements to copy, of `len`.
pub(crate) fn copied(len: usize) -> usize {
    if planted() == "copy" { len.saturating_sub(1) } else { len }
}

/// The norm that is computed instead of `spec`.
pub(crate) fn spoiled(spec: NormSpec, direction: Direction) -> NormSpec {
    match (direction, planted()) {
        (Direction::Forward, "forward") => spec.eps(spec.eps + 1.0),
        // Backward reads statistics and does not use eps.
        (Direction::Backward, "backward") => spec.weight_offset(spec.weight_offset + 1.0),
        _ => spec,
    }
}
