//! What forward reads from a row.

use rmsnorm_gpu::program::inputs;
use rmsnorm_spec::{Direction, Problem, Slot, Storage, TensorSet};

/// The matrices besides `x` that the pieces of a call read in forward.
pub(crate) fn inputs_of(problem: &Problem) -> TensorSet {
    let inputs = |slot| inputs(problem.pieces(), slot, Direction::Forward);
    inputs(Slot::Before).union(inputs(Slot::After))
}

/// Bytes of the widest element that forward reads from a row, or of y if that is wider.
pub(crate) fn widest_input(problem: &Problem) -> usize {
    let sizes = inputs_of(problem).iter().filter_map(|tensor| problem.storage(tensor)).map(Storage::size);
    let of_x = problem.tensors.is_cast().then_some(problem.dtypes.residual.size());
    sizes.chain(of_x).fold(problem.dtypes.activation.size(), usize::max)
}

/// Whether forward reads more than `x` before it normalizes: matrices of pieces, several parts, or a
/// weight that comes before the norm.
pub(crate) fn reads_more(problem: &Problem) -> bool {
    !inputs_of(problem).is_empty() || problem.parts > 1 || problem.cast_order.is_weight_first()
}
