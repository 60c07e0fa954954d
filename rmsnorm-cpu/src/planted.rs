//! A wrong result on demand, for tests of what happens when a proof fails. Only with the feature `planted`, which tests of
//! other crates turn on and nothing else does.

use std::sync::OnceLock;

use rmsnorm_spec::{Direction, NormSpec};

/// Names what is wrong: `forward`, `backward` or `copy`, in every process that it is set for.
const VARIABLE: &str = "RMSNORM_PLANTED";

fn planted() -> &'static str {
    static PLANTED: OnceLock<String> = OnceLock::new();
    PLANTED.get_or_init(|| std::env::var(VARIABLE).unwrap_or_default())
}

/// How many of so many elements are copied.
pub(crate) fn copied(len: usize) -> usize {
    if planted() == "copy" { len.saturating_sub(1) } else { len }
}

/// The norm that is computed in place of the one that was asked for.
pub(crate) fn spoiled(spec: NormSpec, direction: Direction) -> NormSpec {
    match (direction, planted()) {
        (Direction::Forward, "forward") => spec.eps(spec.eps + 1.0),
        // Statistics are given here, and eps is not used.
        (Direction::Backward, "backward") => spec.weight_offset(spec.weight_offset + 1.0),
        _ => spec,
    }
}
