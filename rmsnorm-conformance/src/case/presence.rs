//! The optional tensors: their letters in an id, and the orders in which they are drawn and
//! counted. These orders determine the lists of cases.
//!
//! An id has a tensor without a letter by its name, after a plus: a new tensor needs nothing here.

use rmsnorm_spec::Tensor::{
    Amax, Bias, CodesColumnwise, CodesT, Dbias, Dresidual, DresidualOut, Dweight, Dx, Dy, Gate, Mean, NextBias,
    NextMean, NextRstd, NextWeight, Residual, ResidualOut, Rstd, Weight, Workspace, X, Y,
};
use rmsnorm_spec::{Direction, Piece, PieceSet, Tensor, TensorSet};

/// The letters of tensors in an id. Most are drawn in this order.
const LETTERS: &str = "wbromsdWBkRytacvuMS";
const LETTERED: [&[Tensor]; 2] = [
    &[Weight, Bias, Residual, ResidualOut, Mean, Rstd, DresidualOut, Dweight, Dbias, Workspace, Dresidual],
    &[Y, CodesT, Amax, CodesColumnwise, NextWeight, NextBias, NextMean, NextRstd],
];

/// The optional tensors of a norm that adds a residual before it, in the order in which sets of
/// them are enumerated.
pub(crate) const COUNTED: [Tensor; 11] =
    [Weight, Bias, Mean, Rstd, DresidualOut, Residual, ResidualOut, Dweight, Dbias, Workspace, Dresidual];

/// Tensors that only a quantized call has. The columnwise copy is left out, because it has separate
/// cases.
pub(crate) const OF_CODES: TensorSet = TensorSet::of(&[Y, CodesT, Amax]);

/// Tensors of a next norm besides `y`. Only a call that adds the residual after the norm has them.
pub(crate) const NEXT: TensorSet = Piece::NextNorm.tensors(Direction::Forward);

/// All optional tensors of a call with float results and without another piece.
pub(crate) const OPTIONAL: TensorSet = TensorSet::of(&COUNTED);

/// The tensors that most cases draw from. `dresidual` is left out, because devices with few buffer
/// bindings may not support it. Tensors that a kind of call cannot have are removed when its case
/// is normalized.
pub(crate) const ALL_PRESENT: TensorSet = OPTIONAL.without(Dresidual);

/// The tensors of [`ALL_PRESENT`] in the order in which they are drawn.
pub(crate) fn drawn() -> impl Iterator<Item = Tensor> {
    LETTERED[0].iter().copied().filter(|tensor| ALL_PRESENT.has(*tensor))
}

/// The optional tensors of a call of a kind with these pieces, except those of a next norm and of a quantized result.
pub(crate) fn of_norm(direction: Direction, pieces: PieceSet) -> TensorSet {
    let others = NEXT.union(Piece::Quantize.tensors(direction)).union(TensorSet::of(&[X, Y, Dy, Dx, Gate]));
    of_call(direction, pieces).difference(others)
}

/// The pieces that forward and backward have.
pub(crate) const GATES: PieceSet = PieceSet::of(&[Piece::GateBefore, Piece::GateAfter]);

/// The tensors that a call of a kind with these pieces may have: those of a gate only if it is one
/// of them, and no residual beside a gate before the norm.
pub(crate) fn of_call(direction: Direction, pieces: PieceSet) -> TensorSet {
    let of = |pieces: PieceSet| pieces.iter().fold(TensorSet::NONE, |set, piece| set.union(piece.tensors(direction)));
    let all = direction.reads().union(direction.writes()).difference(of(GATES));
    let without = if pieces.has(Piece::GateBefore) { PieceSet::of(&[Piece::Residual]) } else { PieceSet::NONE };
    all.difference(of(without)).union(of(pieces.intersection(GATES)))
}

/// Every set of these tensors.
pub(crate) fn sets(tensors: &[Tensor]) -> impl Iterator<Item = TensorSet> {
    let has = |bits: u32| move |(bit, _): &(usize, &Tensor)| bits >> bit & 1 == 1;
    (0..1u32 << tensors.len())
        .map(move |bits| tensors.iter().enumerate().filter(has(bits)).map(|(_, it)| *it).collect())
}

fn lettered() -> impl Iterator<Item = (char, Tensor)> {
    LETTERS.chars().zip(LETTERED.into_iter().flatten().copied())
}

/// A set as the letters of an id; `-` for none.
pub(crate) fn letters(present: TensorSet) -> String {
    let letters = lettered().filter(|(_, tensor)| present.has(*tensor)).map(|(letter, _)| letter.to_string());
    let others = present.difference(lettered().map(|(_, tensor)| tensor).collect());
    let text: String = letters.chain(others.iter().map(|tensor| format!("+{tensor}"))).collect();
    if text.is_empty() { "-".into() } else { text }
}

/// The set of an id's letters. `None` if a letter or a name is unknown.
pub(crate) fn parse(text: &str) -> Option<TensorSet> {
    let mut parts = text.split('+');
    let letters = parts.next()?.chars().filter(|letter| *letter != '-');
    let tensor = |letter| lettered().find(|(known, _)| *known == letter).map(|(_, tensor)| tensor);
    letters.map(tensor).chain(parts.map(Tensor::from_name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A set reads back, with a letter or a name of each tensor.
    #[test]
    fn every_set_reads_back() {
        let optional = OPTIONAL.union(OF_CODES).with(CodesColumnwise).union(NEXT);
        assert_eq!(lettered().map(|(_, tensor)| tensor).collect::<TensorSet>(), optional);
        assert_eq!(LETTERS.len(), optional.len());
        assert_eq!(drawn().collect::<TensorSet>(), ALL_PRESENT);
        let sets = [TensorSet::NONE, ALL_PRESENT, OPTIONAL].into_iter();
        for set in sets.chain(Tensor::ALL.map(|one| TensorSet::of(&[one]))) {
            assert_eq!(parse(&letters(set)), Some(set));
        }
        assert_eq!(letters(TensorSet::of(&[Bias, Weight, Dx])), "wb+dx");
        assert_eq!((parse("wx"), parse("w+gat")), (None, None));
    }
}
