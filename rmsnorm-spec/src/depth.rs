//! Policy: the longest chain of f32 additions in a conformant sum. Plans keep to it, and the suite
//! derives its bounds from it ([math](crate::math), section 5).

/// Policy: the longest chain of f32 additions in a conformant sum over a row:
/// `ceil(cols / 32) + 16`. Long rows are summed in blocks: `2 ceil(sqrt(ceil(cols / 32))) + 80`.
pub fn sum_depth(cols: usize) -> usize {
    let of_lanes = cols.div_ceil(32);
    cols.saturating_sub(1).min(of_lanes + 16).min(2 * ceil_root(of_lanes) + 80)
}

/// Policy: the longest chain of f32 additions in a conformant sum over rows,
/// `2 ceil(sqrt(rows)) + 64`.
pub fn policy_depth_rows(rows: usize) -> usize {
    rows.saturating_sub(1).min(2 * ceil_root(rows) + 64)
}

/// The square root, rounded up.
pub fn ceil_root(n: usize) -> usize {
    let root = n.isqrt();
    if root * root < n { root + 1 } else { root }
}
