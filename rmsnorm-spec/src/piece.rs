//! The optional pieces of a norm, `y = After(Affine(Statistic(Before(x))))`.
//!
//! The order of slots is fixed. Statistic and affine part are in every norm ([`Norm`](crate::Norm),
//! `weight`, `bias`); the other two slots hold the pieces of this list. Backends, the suite and the
//! adapters derive what a call needs from it.

use crate::{Direction, Gate, Problem, ResidualPlacement, Tensor, TensorSet};

/// The place of a piece in a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// It makes the tensor that the statistics are of.
    Before,
    /// It takes the normalized row.
    After,
}

/// An optional piece of a norm. The order is the order of computation in forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Piece {
    /// `x` is the sum of several matrices, as each rank has one before an all-reduce.
    Parts,
    /// `x` is multiplied by an activated gate, and the product is not rounded.
    GateBefore,
    /// `x` is multiplied by the weight, and the product is rounded:
    /// [`CastOrder::WeightFirst`](crate::CastOrder::WeightFirst).
    WeightFirst,
    /// `residual` is added to `x`, and the sum is rounded.
    Residual,
    /// The result is multiplied by an activated gate.
    GateAfter,
    /// The result is added to `residual`: [`ResidualPlacement::After`].
    ResidualAfter,
    /// The sum with the residual is normalized as well, with its own weight and bias.
    NextNorm,
    /// The result is stored as 8-bit codes with scales.
    Quantize,
}

impl Piece {
    /// Every piece, in the order of declaration.
    pub const ALL: [Piece; 8] = [
        Piece::Parts,
        Piece::GateBefore,
        Piece::WeightFirst,
        Piece::Residual,
        Piece::GateAfter,
        Piece::ResidualAfter,
        Piece::NextNorm,
        Piece::Quantize,
    ];

    /// The name in ids and messages, and of the piece's file in every language.
    pub const fn name(self) -> &'static str {
        match self {
            Piece::Parts => "parts",
            Piece::GateBefore => "gate_before",
            Piece::WeightFirst => "weight_first",
            Piece::Residual => "residual",
            Piece::GateAfter => "gate_after",
            Piece::ResidualAfter => "residual_after",
            Piece::NextNorm => "next_norm",
            Piece::Quantize => "quantize",
        }
    }

    /// What a backend without it does not do, for messages.
    pub(crate) const fn lack(self) -> &'static str {
        match self {
            Piece::Parts => "adds no parts of x",
            Piece::GateBefore => "has no gate before the norm",
            Piece::WeightFirst => "multiplies no weight before the norm",
            Piece::Residual => "adds no residual before the norm",
            Piece::GateAfter => "has no gate after the norm",
            Piece::ResidualAfter => "adds no residual after the norm",
            Piece::NextNorm => "has no next norm",
            Piece::Quantize => "has no quantized results",
        }
    }

    /// The slot.
    pub const fn slot(self) -> Slot {
        match self {
            Piece::Parts | Piece::GateBefore | Piece::WeightFirst | Piece::Residual => Slot::Before,
            Piece::GateAfter | Piece::ResidualAfter | Piece::NextNorm | Piece::Quantize => Slot::After,
        }
    }

    /// The tensors that a call of that direction may have with the piece and not without it.
    pub const fn tensors(self, direction: Direction) -> TensorSet {
        Piece::TENSORS[self as usize][direction as usize]
    }

    /// [`Piece::tensors`] of every piece, in each direction.
    const TENSORS: [[TensorSet; Direction::ALL.len()]; Piece::ALL.len()] = {
        let mut tensors = [[TensorSet::NONE; Direction::ALL.len()]; Piece::ALL.len()];
        let mut index = 0;
        while index < Direction::ALL.len() * Tensor::COUNT {
            let (direction, tensor) = (Direction::ALL[index / Tensor::COUNT], Tensor::ALL[index % Tensor::COUNT]);
            let mut pieces = tensor.pieces();
            while let ([piece, rest @ ..], Some(_)) = (pieces, tensor.access(direction)) {
                let set = &mut tensors[*piece as usize][direction as usize];
                *set = set.with(tensor);
                pieces = rest;
            }
            index += 1;
        }
        // A residual has the same tensors before and after the norm, but only forward adds it after the norm.
        let forward = Direction::Forward as usize;
        tensors[Piece::ResidualAfter as usize][forward] = tensors[Piece::Residual as usize][forward];
        // The gradient of a gate after the norm is made of the norm's result, of which the bias is a part.
        let of_gate = &mut tensors[Piece::GateAfter as usize][Direction::Backward as usize];
        *of_gate = of_gate.with(Tensor::Bias);
        tensors
    };
}

set_of! {
    /// A set of pieces.
    PieceSet(u32) of Piece
}

impl Problem {
    /// The pieces of the call.
    pub const fn pieces(&self) -> PieceSet {
        let tensors = self.tensors;
        let is_after = matches!(self.residual_placement, ResidualPlacement::After);
        // A residual that is normalized alone is added to nothing.
        let of_residual = tensors.intersection(Piece::Residual.tensors(self.direction));
        let has_residual =
            !of_residual.is_empty() && (tensors.adds_residual() || matches!(self.direction, Direction::Backward));
        PieceSet::NONE
            .set(Piece::Parts, self.parts > 1)
            .set(Piece::GateBefore, matches!(self.gate, Some(Gate { slot: Slot::Before, .. })))
            .set(Piece::WeightFirst, self.cast_order.is_weight_first())
            .set(Piece::Residual, has_residual && !is_after)
            .set(Piece::GateAfter, matches!(self.gate, Some(Gate { slot: Slot::After, .. })))
            .set(Piece::ResidualAfter, is_after)
            .set(Piece::NextNorm, is_after && tensors.has(Tensor::Y))
            .set(Piece::Quantize, self.quant.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{CodeType, QuantSpec, ScaleKind};
    use crate::{Activation, CastOrder, DType, Norm, NormSpec};

    #[test]
    fn a_call_has_the_pieces_of_its_tensors() {
        let forward = |tensors: &[Tensor]| Problem::forward(Norm::Rms, 2, 3, DType::F16, tensors);
        let backward = |tensors: &[Tensor]| Problem::backward(Norm::Rms, 2, 3, DType::F16, tensors);
        let after = |problem| Problem { residual_placement: ResidualPlacement::After, ..problem };
        let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
        let sum = [Tensor::Residual, Tensor::ResidualOut];
        let alone = Problem { tensors: TensorSet::of(&[Tensor::X]).union(TensorSet::of(&sum)), ..forward(&[]) };
        for (problem, pieces) in [
            (forward(&[Tensor::Weight, Tensor::Rstd]), PieceSet::NONE),
            (forward(&sum), PieceSet::of(&[Piece::Residual])),
            (forward(&[Tensor::ResidualOut]), PieceSet::of(&[Piece::Residual])),
            (Problem { parts: 2, ..forward(&sum) }, PieceSet::of(&[Piece::Parts, Piece::Residual])),
            (
                Problem { gate: NormSpec::rms(2, 3, 0.0).gate_after(Activation::Silu).gate, ..forward(&sum) },
                PieceSet::of(&[Piece::Residual, Piece::GateAfter]),
            ),
            (
                Problem { gate: NormSpec::rms(2, 3, 0.0).gate_before(Activation::Silu).gate, ..backward(&[]) },
                PieceSet::of(&[Piece::GateBefore]),
            ),
            (
                Problem { cast_order: CastOrder::WeightFirst, ..backward(&[Tensor::Weight]) },
                PieceSet::of(&[Piece::WeightFirst]),
            ),
            (after(alone), PieceSet::of(&[Piece::ResidualAfter])),
            (after(forward(&sum)), PieceSet::of(&[Piece::ResidualAfter, Piece::NextNorm])),
            (backward(&[Tensor::Dweight]), PieceSet::NONE),
            (backward(&[Tensor::Dresidual]), PieceSet::of(&[Piece::Residual])),
            (Problem { tensors: TensorSet::of(&[Tensor::Residual, Tensor::Y]), ..forward(&[]) }, PieceSet::NONE),
            (
                Problem::quantized_forward(Norm::Rms, 2, 3, DType::F16, quant, &sum),
                PieceSet::of(&[Piece::Residual, Piece::Quantize]),
            ),
        ] {
            assert_eq!(problem.pieces(), pieces, "{problem:?}");
        }
    }

    /// A tensor of a piece belongs to calls of that direction, and to one piece of each slot.
    #[test]
    fn tensors_of_pieces_are_tensors_of_calls() {
        for direction in Direction::ALL {
            for piece in Piece::ALL {
                assert!(piece.tensors(direction).iter().all(|tensor| tensor.access(direction).is_some()), "{piece:?}");
                let others = Piece::ALL.into_iter().filter(|other| *other != piece && other.slot() == piece.slot());
                let of_others = others.map(|other| other.tensors(direction)).fold(TensorSet::NONE, TensorSet::union);
                assert!(piece.tensors(direction).intersection(of_others).is_empty(), "{piece:?}");
            }
        }
        for (index, piece) in Piece::ALL.into_iter().enumerate() {
            assert_eq!(piece as usize, index);
        }
    }
}
