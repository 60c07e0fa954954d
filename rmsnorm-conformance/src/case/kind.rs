//! The calls that a case makes.

use rmsnorm_spec::{Direction, GradStore, Problem, ResidualPlacement, Tensor};

use crate::names::named;

named! {
    /// The calls that a case makes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    enum Kind {
        /// One forward call.
        Forward = "forward",
        /// One in-place forward call.
        ForwardInPlace = "forward_in_place",
        /// One backward call, with the statistics of the f64 reference rounded to f32.
        Backward = "backward",
        /// A forward call, then a backward call with the statistics and `residual_out` of the
        /// first.
        EndToEnd = "end_to_end",
        /// One forward call with a quantized result.
        QuantizedForward = "quantized_forward",
        /// One forward call that adds the residual after the norm; with `y` it also computes the
        /// next norm.
        ForwardAfter = "forward_after",
        /// As `ForwardAfter`, with the sum stored over the residual.
        ForwardAfterInPlace = "forward_after_in_place",
        /// A forward call that adds the residual after the norm, then the backward calls of its
        /// norms, last norm first. Each call gets the results of the calls before it.
        AfterEndToEnd = "after_end_to_end",
        /// One forward call whose `x` is the sum of several parts.
        ForwardParts = "forward_parts",
        /// A backward call that stores the gradients of weight and bias as f32 sums, then one that
        /// adds to these sums.
        BackwardSums = "backward_sums",
    }
}

impl Kind {
    /// The kinds with float results that add a residual before the norm.
    pub const BEFORE: [Kind; 4] = [Kind::Forward, Kind::ForwardInPlace, Kind::Backward, Kind::EndToEnd];

    /// The kinds that differ in the form of their first call.
    pub const CALLS: [Kind; 8] = [
        Kind::Forward,
        Kind::ForwardInPlace,
        Kind::Backward,
        Kind::QuantizedForward,
        Kind::ForwardAfter,
        Kind::ForwardAfterInPlace,
        Kind::ForwardParts,
        Kind::BackwardSums,
    ];

    /// The kind that makes the call `problem`.
    pub(crate) const fn of(problem: &Problem) -> Kind {
        match (problem.direction, problem.residual_placement) {
            (Direction::Forward, ResidualPlacement::Before) if problem.tensors.is_in_place() => Kind::ForwardInPlace,
            (Direction::Forward, ResidualPlacement::Before) if problem.parts > 1 => Kind::ForwardParts,
            (Direction::Forward, ResidualPlacement::Before) => Kind::Forward,
            (Direction::Forward, ResidualPlacement::After) if problem.has(Tensor::Residual) => Kind::ForwardAfter,
            (Direction::Forward, ResidualPlacement::After) => Kind::ForwardAfterInPlace,
            (Direction::Backward, _) => match problem.grad_store {
                GradStore::Rounded => Kind::Backward,
                GradStore::Sum | GradStore::Accumulated => Kind::BackwardSums,
            },
            (Direction::QuantizedForward, _) => Kind::QuantizedForward,
        }
    }

    /// The direction of the first call of a case.
    pub(crate) const fn direction(self) -> Direction {
        match self {
            Kind::Backward | Kind::BackwardSums => Direction::Backward,
            Kind::QuantizedForward => Direction::QuantizedForward,
            Kind::Forward | Kind::ForwardInPlace | Kind::EndToEnd | Kind::ForwardParts => Direction::Forward,
            Kind::ForwardAfter | Kind::ForwardAfterInPlace | Kind::AfterEndToEnd => Direction::Forward,
        }
    }

    pub(crate) const fn has_forward(self) -> bool {
        !matches!(self.direction(), Direction::Backward)
    }

    pub(crate) const fn has_backward(self) -> bool {
        !self.has_forward() || matches!(self, Kind::EndToEnd | Kind::AfterEndToEnd)
    }

    /// Whether the residual is added after the norm.
    pub(crate) const fn is_after(self) -> bool {
        matches!(self, Kind::ForwardAfter | Kind::ForwardAfterInPlace | Kind::AfterEndToEnd)
    }
}
