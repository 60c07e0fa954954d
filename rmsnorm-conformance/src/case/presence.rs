//! The optional tensors: their letters in an id, and the orders in which they are drawn and
//! counted.
//!
//! These orders determine the lists of cases, so a new tensor must come last.

use rmsnorm_spec::{Access, Direction, Tensor, TensorSet};

/// The letter of each optional tensor in an id, in the order in which they are drawn.
const LETTERS: [(char, Tensor); 19] = [
    ('w', Tensor::Weight),
    ('b', Tensor::Bias),
    ('r', Tensor::Residual),
    ('o', Tensor::ResidualOut),
    ('m', Tensor::Mean),
    ('s', Tensor::Rstd),
    ('d', Tensor::DresidualOut),
    ('W', Tensor::Dweight),
    ('B', Tensor::Dbias),
    ('k', Tensor::Workspace),
    ('R', Tensor::Dresidual),
    ('y', Tensor::Y),
    ('t', Tensor::CodesT),
    ('a', Tensor::Amax),
    ('c', Tensor::CodesColumnwise),
    ('v', Tensor::NextWeight),
    ('u', Tensor::NextBias),
    ('M', Tensor::NextMean),
    ('S', Tensor::NextRstd),
];

/// The optional tensors, in the order in which sets of them are enumerated.
pub(crate) const COUNTED: [Tensor; 11] = [
    Tensor::Weight,
    Tensor::Bias,
    Tensor::Mean,
    Tensor::Rstd,
    Tensor::DresidualOut,
    Tensor::Residual,
    Tensor::ResidualOut,
    Tensor::Dweight,
    Tensor::Dbias,
    Tensor::Workspace,
    Tensor::Dresidual,
];

/// Tensors that only a quantized call has. The columnwise copy is left out, because it has separate
/// cases.
pub(crate) const OF_CODES: TensorSet = TensorSet::of(&[Tensor::Y, Tensor::CodesT, Tensor::Amax]);

/// Tensors of a next norm besides `y`. Only a call that adds the residual after the norm has them.
pub(crate) const NEXT: TensorSet =
    TensorSet::of(&[Tensor::NextWeight, Tensor::NextBias, Tensor::NextMean, Tensor::NextRstd]);

/// Inputs of forward in the weight's dtype.
pub(crate) const OF_WEIGHT_DTYPE: TensorSet =
    TensorSet::of(&[Tensor::Weight, Tensor::Bias, Tensor::NextWeight, Tensor::NextBias]);

/// `given` and the tensors of every call that adds the residual after the norm.
pub(crate) const fn with_sum(given: TensorSet) -> TensorSet {
    given.with(Tensor::Residual).with(Tensor::ResidualOut)
}

/// All optional tensors of a call with float results.
pub(crate) const OPTIONAL: TensorSet = TensorSet::of(&COUNTED);

/// The tensors that most cases draw from. `dresidual` is left out, because devices with few buffer
/// bindings may not support it. Tensors that a kind of call cannot have are removed when its case
/// is normalized.
pub(crate) const ALL_PRESENT: TensorSet = OPTIONAL.without(Tensor::Dresidual);

/// The tensors of [`ALL_PRESENT`] in the order in which they are drawn.
pub(crate) fn drawn() -> impl Iterator<Item = Tensor> {
    LETTERS.into_iter().map(|(_, tensor)| tensor).filter(|tensor| ALL_PRESENT.has(*tensor))
}

/// The optional tensors of a backward call.
pub(crate) fn of_backward() -> TensorSet {
    OPTIONAL.iter().filter(|tensor| tensor.access(Direction::Backward).is_some()).collect()
}

/// The optional tensors that a forward call reads.
pub(crate) fn read_by_forward() -> TensorSet {
    OPTIONAL.iter().filter(|tensor| tensor.access(Direction::Forward) == Some(Access::Read)).collect()
}

/// A set as the letters of an id; `-` for none.
pub(crate) fn letters(present: TensorSet) -> String {
    let letters: String = LETTERS.iter().filter(|(_, tensor)| present.has(*tensor)).map(|(letter, _)| letter).collect();
    if letters.is_empty() { "-".into() } else { letters }
}

/// The set of an id's letters. `None` if a letter is unknown.
pub(crate) fn parse(letters: &str) -> Option<TensorSet> {
    let tensor = |letter| LETTERS.iter().find(|(known, _)| *known == letter).map(|(_, tensor)| *tensor);
    letters.chars().filter(|&letter| letter != '-').map(tensor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tensor of the spec that is missing here would be in no case.
    #[test]
    fn every_tensor_is_required_or_has_a_letter() {
        use Tensor::{Codes, CodesColumnwise, Dx, Dy, Scale, Scales, ScalesColumnwise, X};
        let required = TensorSet::of(&[X, Dy, Dx, Codes, Scale, Scales, ScalesColumnwise]);
        let optional = OPTIONAL.union(OF_CODES).with(CodesColumnwise).union(NEXT);
        assert_eq!(required.union(optional), Tensor::ALL.into_iter().collect());
        assert_eq!(LETTERS.map(|(_, tensor)| tensor).into_iter().collect::<TensorSet>(), optional);
        assert_eq!(ALL_PRESENT.with(Tensor::Dresidual), OPTIONAL);
        assert_eq!(drawn().collect::<TensorSet>(), ALL_PRESENT);
        let sets = [TensorSet::NONE, ALL_PRESENT, OPTIONAL]
            .into_iter()
            .chain(OPTIONAL.iter().map(|one| TensorSet::of(&[one])));
        for set in sets {
            assert_eq!(parse(&letters(set)), Some(set));
        }
        assert_eq!(parse("wx"), None);
    }
}
