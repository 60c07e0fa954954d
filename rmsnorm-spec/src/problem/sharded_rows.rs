//! Validation of a forward call on a residual stream that is sharded over ranks by rows.

use super::columns::{check_divided, check_one_dtype};
use super::layout::Layout;
use super::{Checked, check_forward, problem};
use crate::args::{SpanVisitor, View, Views};
use crate::{
    Direction, Element, Error, Forward, NormBackend, NormSpec, OutputRows, ShardedRows, Tensor, TensorSet, Visitor,
};

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Checked<ShardedRows<Forward<'a, B, T, W, R>>> {
    /// Validates one rank's call. Its [`problem`](Self::problem) has all rows; `residual`,
    /// `residual_out`, `mean`, `rstd`, and `y` with [`OutputRows::Own`], have only the rank's own rows.
    ///
    /// # Errors
    /// The first rule that fails, as the variant of [`Error`] that names the argument.
    /// `Unsupported` for a residual that is added after the norm, for a gate, for an `x` of several
    /// parts, and for grouped rows; `InvalidArgument` if the own rows exceed the rows of `spec`.
    pub fn forward_rows(spec: NormSpec, call: ShardedRows<Forward<'a, B, T, W, R>>) -> Result<Self, Error> {
        let ShardedRows { args, own, y_rows } = &call;
        check_divided("rows", "one matrix on every rank", &spec, args.parts)?;
        check_one_dtype("rows", args.x.is_some())?;
        check_forward(&spec, args)?;
        if own.start > own.end || own.end > spec.rows {
            let rule = format!("it must be a range within the {} rows, got {own:?}", spec.rows);
            return Err(Error::InvalidArgument { arg: "own", rule });
        }
        // A `y` that overwrites x has all rows.
        let has_own_y = *y_rows == OutputRows::Own && args.y.is_some();
        let of_own = TensorSet::of(&[Tensor::Residual, Tensor::ResidualOut, Tensor::Mean, Tensor::Rstd]);
        let of_own = (of_own.set(Tensor::Y, has_own_y), own.len());
        let found =
            Layout::check_own_rows(&spec, (Direction::Forward, args.dtypes), of_own, |layout| args.spans(layout))?;
        args.spans(&mut WithoutGroups)?;
        let problem = problem(Direction::Forward, &spec, args.dtypes, found);
        Ok(Checked { spec, args: call, problem })
    }

    /// The rows that this rank owns, and the rows of `y` that it receives.
    pub fn own_rows(&self) -> (std::ops::Range<usize>, OutputRows) {
        (self.args.own.clone(), self.args.y_rows)
    }

    /// Passes every tensor to the visitor, as [`Checked::<Forward>::visit`](Checked::visit) does.
    ///
    /// # Errors
    /// The first of the visitor's.
    pub fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<(), Error> {
        self.args.args.visit(visitor)
    }
}

/// Refuses grouped matrices: a rank's rows could begin inside a group.
struct WithoutGroups;

impl SpanVisitor for WithoutGroups {
    fn visit(&mut self, _: Tensor, view: View) -> Result<(), Error> {
        match view.rows.groups {
            None => Ok(()),
            Some(_) => {
                let divided = "cannot be grouped if rows are divided among ranks: pass rows with one stride";
                Err(Error::Unsupported { rule: format!("{} {divided}", view.arg) })
            }
        }
    }
}
