//! [`ShardedRows`]: a forward call on a residual stream that is sharded over ranks by rows.

use std::ops::Range;

/// The rows of `y` that a rank receives in a [`ShardedRows`] call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OutputRows {
    /// All rows, with equal bits on every rank.
    #[default]
    All,
    /// The rows that the rank owns.
    Own,
}

/// One rank's tensors of a forward call, if each rank owns some of the rows.
///
/// # Shapes
/// `x`, which is summed over the ranks: (rows, cols). `residual`, `residual_out`, `mean`, `rstd`:
/// the own rows. `y`: all rows or the own rows. If `y` overwrites `x`, only these rows of `x` are
/// written.
#[derive(Debug)]
#[non_exhaustive]
pub struct ShardedRows<A> {
    /// The tensors, a [`Forward`](crate::Forward).
    pub args: A,
    /// The rows that this rank owns.
    pub own: Range<usize>,
    /// The rows of `y`.
    pub y_rows: OutputRows,
}

impl<A> ShardedRows<A> {
    /// These tensors, on the rank that owns the rows `own`.
    pub const fn new(args: A, own: Range<usize>, y_rows: OutputRows) -> Self {
        ShardedRows { args, own, y_rows }
    }
}
