//! The calls that a case makes.

use rmsnorm_spec::{Direction, GradStore, Piece, PieceSet, Problem, ResidualPlacement, Slot, Tensor};

use crate::case::presence::{self, GATES};

/// How many calls a case makes, and what they overwrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Calls {
    /// One call.
    One,
    /// One call that stores a result over an input: `y` over `x`, or `residual_out` over `residual`
    /// if the residual is added after the norm.
    InPlace,
    /// A forward call, then the backward calls of its norms, last norm first. Each call gets the
    /// results of the calls before it.
    EndToEnd,
    /// A call that stores the gradients of weight and bias as f32 sums, then one that adds to these
    /// sums.
    Sums,
}

/// The calls that a case makes: a direction, the pieces of the norm, and the number of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// The direction of the first call.
    pub(crate) direction: Direction,
    /// The pieces that every case of the kind has. Optional tensors bring others: a residual before
    /// the norm, or a next norm.
    pub(crate) pieces: PieceSet,
    /// The number of calls.
    pub(crate) calls: Calls,
}

/// Declares the kinds and their names in ids. The name consists of the direction, the pieces and
/// the calls.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal: $direction:ident [$($piece:ident)*] $calls:ident;)*) => {
        impl Kind {
            $(
                $(#[$doc])*
                pub const $kind: Kind = Kind {
                    direction: Direction::$direction,
                    pieces: PieceSet::of(&[$(Piece::$piece),*]),
                    calls: Calls::$calls,
                };
            )*

            /// All kinds. A new kind must come last, because this order determines lists of cases.
            pub const ALL: [Kind; [$($name),*].len()] = [$(Kind::$kind),*];

            const NAMES: [&str; Kind::ALL.len()] = [$($name),*];
        }
    };
}

kinds! {
    /// One forward call.
    FORWARD = "forward": Forward [] One;
    /// One in-place forward call.
    FORWARD_IN_PLACE = "forward_in_place": Forward [] InPlace;
    /// One backward call, with the statistics of the f64 reference rounded to f32.
    BACKWARD = "backward": Backward [] One;
    /// A forward call, then a backward call with the statistics and `residual_out` of the first.
    END_TO_END = "end_to_end": Forward [] EndToEnd;
    /// One forward call with a quantized result.
    QUANTIZED_FORWARD = "quantized_forward": QuantizedForward [Quantize] One;
    /// One forward call that adds the residual after the norm; with `y` it also computes the next
    /// norm.
    FORWARD_AFTER = "forward_after": Forward [ResidualAfter] One;
    /// As `FORWARD_AFTER`, with the sum stored over the residual.
    FORWARD_AFTER_IN_PLACE = "forward_after_in_place": Forward [ResidualAfter] InPlace;
    /// A forward call that adds the residual after the norm, then the backward calls of its norms.
    AFTER_END_TO_END = "after_end_to_end": Forward [ResidualAfter] EndToEnd;
    /// One forward call whose `x` is the sum of several parts.
    FORWARD_PARTS = "forward_parts": Forward [Parts] One;
    /// A backward call that stores gradients as f32 sums, then one that adds to these sums.
    BACKWARD_SUMS = "backward_sums": Backward [] Sums;
    /// A forward call whose `x` is the sum of several parts, then the backward call of that sum.
    PARTS_END_TO_END = "parts_end_to_end": Forward [Parts] EndToEnd;
    /// One forward call with a gate after the norm.
    FORWARD_GATE_AFTER = "forward_gate_after": Forward [GateAfter] One;
    /// The same in place.
    FORWARD_GATE_AFTER_IN_PLACE = "forward_gate_after_in_place": Forward [GateAfter] InPlace;
    /// One backward call with a gate after the norm.
    BACKWARD_GATE_AFTER = "backward_gate_after": Backward [GateAfter] One;
    /// A forward call with a gate after the norm, then its backward call.
    GATE_AFTER_END_TO_END = "gate_after_end_to_end": Forward [GateAfter] EndToEnd;
    /// As `BACKWARD_SUMS`, with a gate after the norm.
    BACKWARD_GATE_AFTER_SUMS = "backward_gate_after_sums": Backward [GateAfter] Sums;
    /// One forward call with a gate after the norm and a quantized result.
    QUANTIZED_FORWARD_GATE_AFTER = "quantized_forward_gate_after": QuantizedForward [GateAfter Quantize] One;
    /// One forward call with a gate before the norm.
    FORWARD_GATE_BEFORE = "forward_gate_before": Forward [GateBefore] One;
    /// The same in place.
    FORWARD_GATE_BEFORE_IN_PLACE = "forward_gate_before_in_place": Forward [GateBefore] InPlace;
    /// One backward call with a gate before the norm.
    BACKWARD_GATE_BEFORE = "backward_gate_before": Backward [GateBefore] One;
    /// A forward call with a gate before the norm, then its backward call.
    GATE_BEFORE_END_TO_END = "gate_before_end_to_end": Forward [GateBefore] EndToEnd;
    /// As `BACKWARD_SUMS`, with a gate before the norm.
    BACKWARD_GATE_BEFORE_SUMS = "backward_gate_before_sums": Backward [GateBefore] Sums;
    /// One forward call with a gate before the norm and a quantized result.
    QUANTIZED_FORWARD_GATE_BEFORE = "quantized_forward_gate_before": QuantizedForward [GateBefore Quantize] One;
}

impl Kind {
    /// The kinds with float results that add a residual before the norm.
    pub const BEFORE: [Kind; 4] = [Kind::FORWARD, Kind::FORWARD_IN_PLACE, Kind::BACKWARD, Kind::END_TO_END];

    /// The kinds that combine what other kinds have alone. Their number grows as a product, so no
    /// list has them all: the full profile draws cases of them from its seed.
    pub const PAIRS: [Kind; 1] = [Kind::PARTS_END_TO_END];

    /// The kinds that differ in the form of their first call.
    pub fn first_calls() -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(|kind| kind.calls != Calls::EndToEnd)
    }

    /// The place in [`ALL`](Self::ALL).
    pub(crate) fn index(self) -> usize {
        Kind::ALL.iter().position(|kind| *kind == self).unwrap_or(Kind::ALL.len())
    }

    /// The name in ids, in reports and on the command line.
    pub fn name(self) -> &'static str {
        Kind::NAMES.get(self.index()).copied().unwrap_or("a kind without a name")
    }

    /// The kind with this [`name`](Self::name), if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// The kind that makes the call `problem`.
    pub(crate) fn of(problem: &Problem) -> Kind {
        let is_after = matches!(problem.residual_placement, ResidualPlacement::After);
        // Optional tensors bring the other pieces.
        let of_kinds = Kind::ALL.into_iter().fold(PieceSet::NONE, |pieces, kind| pieces.union(kind.pieces));
        let gates = problem.pieces().intersection(GATES);
        let (pieces, calls) = match (problem.direction, problem.grad_store) {
            // Backward is the same call wherever forward adds the residual.
            (Direction::Backward, GradStore::Rounded) => (gates, Calls::One),
            (Direction::Backward, GradStore::Sum | GradStore::Accumulated) => (gates, Calls::Sums),
            (Direction::Forward | Direction::QuantizedForward, _) => {
                let overwrites = if is_after { !problem.has(Tensor::Residual) } else { problem.tensors.is_in_place() };
                let is_in_place = overwrites && problem.direction == Direction::Forward;
                let calls = if is_in_place { Calls::InPlace } else { Calls::One };
                (problem.pieces().intersection(of_kinds), calls)
            }
        };
        Kind { direction: problem.direction, pieces, calls }
    }

    /// The kind of the first call alone.
    pub(crate) const fn first(self) -> Kind {
        match self.calls {
            Calls::EndToEnd => Kind { calls: Calls::One, ..self },
            Calls::One | Calls::InPlace | Calls::Sums => self,
        }
    }

    /// The kind of a single backward call of its norm.
    pub(crate) const fn backward(self) -> Kind {
        Kind { direction: Direction::Backward, pieces: self.pieces.intersection(GATES), calls: Calls::One }
    }

    /// The place of the gate, if there is one.
    pub(crate) const fn gate(self) -> Option<Slot> {
        if self.pieces.has(Piece::GateBefore) {
            Some(Slot::Before)
        } else if self.pieces.has(Piece::GateAfter) {
            Some(Slot::After)
        } else {
            None
        }
    }

    pub(crate) const fn has_forward(self) -> bool {
        !matches!(self.direction, Direction::Backward)
    }

    pub(crate) const fn has_backward(self) -> bool {
        !self.has_forward() || matches!(self.calls, Calls::EndToEnd)
    }

    /// Whether the residual is added after the norm.
    pub(crate) const fn is_after(self) -> bool {
        self.pieces.has(Piece::ResidualAfter)
    }

    /// Whether `x` is the sum of several parts.
    pub(crate) const fn has_parts(self) -> bool {
        self.pieces.has(Piece::Parts)
    }

    /// Whether the result is quantized.
    pub(crate) const fn is_quantized(self) -> bool {
        self.pieces.has(Piece::Quantize)
    }

    /// Whether the first call may have the tensor, in memory of its own.
    pub(crate) fn has(self, tensor: Tensor) -> bool {
        let is_over_x = tensor == Tensor::Y && self.overwrites_x();
        let is_over_residual = tensor == Tensor::ResidualOut && self.calls == Calls::InPlace;
        presence::of_call(self.direction, self.pieces).has(tensor) && !is_over_x && !is_over_residual
    }

    /// Whether `y` overwrites `x`.
    pub(crate) const fn overwrites_x(self) -> bool {
        matches!(self.calls, Calls::InPlace) && !self.is_after()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Old ids must be readable, so a name never changes. It follows from the kind.
    #[test]
    fn names_say_what_a_kind_is() {
        let words = |kind: Kind| {
            let direction = match kind.direction {
                Direction::Forward if kind.calls == Calls::EndToEnd => "",
                Direction::Forward => "forward",
                Direction::Backward => "backward",
                Direction::QuantizedForward => "quantized_forward",
            };
            let renamed = [(Piece::ResidualAfter, "after"), (Piece::Quantize, "")];
            let pieces = kind.pieces.iter().map(|piece| {
                renamed.into_iter().find(|(renamed, _)| *renamed == piece).map_or(piece.name(), |(_, name)| name)
            });
            let calls = match kind.calls {
                Calls::One => "",
                Calls::InPlace => "in_place",
                Calls::EndToEnd => "end_to_end",
                Calls::Sums => "sums",
            };
            let words = std::iter::once(direction).chain(pieces).chain([calls]).filter(|word| !word.is_empty());
            words.collect::<Vec<_>>().join("_")
        };
        for kind in Kind::ALL {
            assert_eq!((kind.name(), Kind::from_name(kind.name())), (words(kind).as_str(), Some(kind)));
            assert_eq!(kind.first().first(), kind.first());
            assert!(Kind::first_calls().any(|first| first == kind.first()), "{kind:?}");
        }
        assert_eq!(Kind::from_name("onward"), None);
    }
}
