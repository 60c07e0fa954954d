//! [`ShardedRows`]: a forward call whose residual stream is divided by rows among ranks.

use std::ops::Range;

/// The rows of `y` that a rank gets of a call whose residual stream is divided by rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum YRows {
    /// All, the same on every rank.
    #[default]
    All,
    /// Those that the rank owns.
    Own,
}

/// The tensors of a forward call on ranks that own some of the rows each, as this rank has them.
///
/// # Shapes
/// `x`, of which every rank has a part: (rows, cols). `residual`, `residual_out`, `mean`, `rstd`: of the own rows. `y`: of all or of the
/// own ones. Where `y` overwrites `x` it overwrites its rows of it, and nothing else.
#[derive(Debug)]
#[non_exhaustive]
pub struct ShardedRows<A> {
    /// The tensors, a [`Forward`](crate::Forward).
    pub args: A,
    /// The rows that this rank owns.
    pub own: Range<usize>,
    /// The rows of `y`.
    pub y_rows: YRows,
}

impl<A> ShardedRows<A> {
    /// These tensors, on the rank that owns those rows.
    pub const fn new(args: A, own: Range<usize>, y_rows: YRows) -> Self {
        ShardedRows { args, own, y_rows }
    }
}
