//! The mathematics of a piece.

use crate::Arithmetic;
use crate::case::dice::Lists;
use crate::judge::Expected;
use crate::run::bad_call::Misuse;
use crate::selftest::planted::Bug;
use crate::selftest::simulate::call::Call;
use crate::selftest::simulate::rows::{BackwardRow, ForwardRow};
use crate::selftest::simulate::tensors::Tensors;

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

    /// Takes the gradients of every row back through the piece, with the planted bug, and stores
    /// the gradients of its inputs.
    fn pull(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [BackwardRow]) {
        let _ = (call, tensors, rows);
    }
}
