//! The mathematics of a piece, and what its file needs from the rest of the suite.

pub(crate) use crate::Arithmetic;
pub(crate) use crate::case::dice::{Dice, Lists, alternate, drawn, each, is_meaningful, with_norms};
pub(crate) use crate::case::presence::{self, ALL_PRESENT, NEXT, OPTIONAL};
pub(crate) use crate::case::{Case, Family, Kind, Layout, Trial};
pub(crate) use crate::judge::Expected;
pub(crate) use crate::run::bad_call::{GoodCall, Misuse, Refusal};
pub(crate) use crate::run::memory::round;
pub(crate) use crate::selftest::planted::{Bug, BugList, bugs};
pub(crate) use crate::selftest::simulate::call::Call;
pub(crate) use crate::selftest::simulate::norm::{NormKernel, Normalized, weight_of_norm};
pub(crate) use crate::selftest::simulate::rows::{BackwardRow, ForwardRow};
pub(crate) use crate::selftest::simulate::tensors::{Matrix, Tensors};

/// A piece: its result in f32, its error bound, its gradient, and the ways to get them wrong.
pub(crate) trait PieceMath {
    /// The bugs that the self-test plants in the piece.
    const BUGS: &'static [Bug];

    /// The cases of the kinds that have the piece.
    const LISTS: Lists = Lists::NONE;

    /// The ways to misuse the piece. Wrong lengths, strides and dtypes of its tensors need no line.
    const MISUSE: &'static [Misuse] = &[];

    /// Computes the piece for every row, as a kernel does, with the planted bug. A piece of
    /// [`Slot::Before`](rmsnorm_spec::Slot::Before) changes the values to normalize; a piece of
    /// `After` takes the norm of them.
    fn forward(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [ForwardRow]);

    /// The range of an element after the piece, from its range before. `operand` is the element of
    /// the piece's input.
    fn bound(value: Expected, operand: f64, arithmetic: &Arithmetic) -> Expected {
        let _ = (operand, arithmetic);
        value
    }

    /// Makes again, in backward, what the norm took, if backward reads something else.
    fn again(call: &Call, tensors: &Tensors<'_, '_>, rows: &mut [BackwardRow]) {
        let _ = (call, tensors, rows);
    }

    /// Takes the gradients of every row back through the piece, with the planted bug, and stores
    /// the gradients of its inputs. A piece of [`Slot::After`](rmsnorm_spec::Slot::After) changes
    /// `dy`, before the norm's own gradients; a piece of `Before` changes `dx`.
    fn pull(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [BackwardRow]) {
        let _ = (call, tensors, rows);
    }
}
