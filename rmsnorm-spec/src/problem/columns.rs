//! Validation of the two halves of a call whose columns are divided among ranks.

use super::layout::{Layout, Placed};
use super::{Checked, check_spec, forbid_mean, problem};
use crate::args::{SpanVisitor, View, Views};
use crate::{
    Access, AnyElement, AnyPartialBackwardStatistics, AnyPartialStatistics, Backward, Direction, Element, Error,
    Forward, Norm, NormBackend, NormSpec, PartialBackwardStatistics, PartialStatistics, Parts, ResidualPlacement, Rows,
    Span, Storage, Tensor, Untyped, Visitor, WithStatistics,
};

impl<'a, B: NormBackend + ?Sized, T: Element, R: Element> Checked<PartialStatistics<'a, B, T, R>> {
    /// Validates the first half of a forward call.
    ///
    /// # Errors
    /// The first rule that fails, as the variant of [`Error`] that names the argument.
    pub fn partial_statistics(spec: NormSpec, args: PartialStatistics<'a, B, T, R>) -> Result<Self, Error> {
        check_spec(&spec)?;
        check_columns_form(&spec, None)?;
        args.dtypes.check()?;
        let found = Layout::check_spans(&spec, (Direction::Forward, args.dtypes), |layout| args.spans(layout))?;
        let numbers = spec.norm.statistics_len(Direction::Forward);
        let statistics = statistics(
            B::out_span::<f32>(&args.statistics),
            B::out_storage::<f32>(&args.statistics),
            &[spec.rows, numbers],
        )?;
        args.spans(&mut Beside { statistics, direction: None })?;
        let problem = problem(Direction::Forward, &spec, args.dtypes, found);
        Ok(Checked { spec, args, problem })
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element>
    Checked<PartialBackwardStatistics<'a, B, T, W, R>>
{
    /// Validates the first half of a backward call.
    ///
    /// # Errors
    /// As [`Checked::partial_statistics`].
    pub fn partial_backward_statistics(
        spec: NormSpec,
        args: PartialBackwardStatistics<'a, B, T, W, R>,
    ) -> Result<Self, Error> {
        check_spec(&spec)?;
        check_columns_form(&spec, None)?;
        args.dtypes.check()?;
        forbid_mean(&spec, "mean", args.mean.is_some())?;
        if spec.norm == Norm::Layer && args.mean.is_none() {
            return Err(Error::Missing { arg: "mean", why: "layer norm's backward pass needs the mean of whole rows" });
        }
        let found = Layout::check_spans(&spec, (Direction::Backward, args.dtypes), |layout| args.spans(layout))?;
        let numbers = spec.norm.statistics_len(Direction::Backward);
        let statistics = statistics(
            B::out_span::<f32>(&args.statistics),
            B::out_storage::<f32>(&args.statistics),
            &[spec.rows, numbers],
        )?;
        args.spans(&mut Beside { statistics, direction: None })?;
        let problem = problem(Direction::Backward, &spec, args.dtypes, found);
        Ok(Checked { spec, args, problem })
    }
}

impl<'a, 'g, B: NormBackend + ?Sized, T: Element, W: Element, R: Element>
    Checked<WithStatistics<'g, B, Forward<'a, B, T, W, R>>>
{
    /// Validates the second half of a forward call.
    ///
    /// # Errors
    /// As [`Checked::partial_statistics`].
    pub fn forward_with_statistics(
        spec: NormSpec,
        given: WithStatistics<'g, B, Forward<'a, B, T, W, R>>,
    ) -> Result<Self, Error> {
        check_columns_form(&spec, given.args.parts)?;
        check_one_dtype("columns", given.args.x.is_some())?;
        check_given(given, Direction::Forward, |args| Checked::forward(spec, args))
    }
}

impl<'a, 'g, B: NormBackend + ?Sized, T: Element, W: Element, R: Element>
    Checked<WithStatistics<'g, B, Backward<'a, B, T, W, R>>>
{
    /// Validates the second half of a backward call. The backend determines the length of the
    /// workspace.
    ///
    /// # Errors
    /// As [`Checked::partial_statistics`].
    pub fn backward_with_statistics(
        backend: &(impl NormBackend + ?Sized),
        spec: NormSpec,
        given: WithStatistics<'g, B, Backward<'a, B, T, W, R>>,
    ) -> Result<Self, Error> {
        check_columns_form(&spec, None)?;
        check_one_dtype("columns", given.args.dx.is_some())?;
        check_given(given, Direction::Backward, |args| Checked::backward(backend, spec, args))
    }
}

/// Validates a second half: its tensors with `check`, then the statistics and columns.
fn check_given<'a, 'g, B: NormBackend + ?Sized, A: Views<'a, B>>(
    given: WithStatistics<'g, B, A>,
    direction: Direction,
    check: impl FnOnce(A) -> Result<Checked<A>, Error>,
) -> Result<Checked<WithStatistics<'g, B, A>>, Error> {
    let WithStatistics { args, statistics, columns } = given;
    let Checked { spec, args, problem } = check(args)?;
    check_columns(columns, spec.cols)?;
    let shape = [columns.len(), spec.rows, spec.norm.statistics_len(direction)];
    let found = self::statistics(B::in_span::<f32>(&statistics), B::in_storage::<f32>(&statistics), &shape)?;
    args.spans(&mut Beside { statistics: found, direction: Some(direction) })?;
    Ok(Checked { spec, args: WithStatistics { args, statistics, columns }, problem })
}

impl<'a, B: NormBackend + ?Sized> Checked<AnyPartialStatistics<'a, B>> {
    /// Passes every tensor to the visitor, and returns the view of the statistics.
    ///
    /// # Errors
    /// The first of the visitor's.
    pub fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<B::Out<'a, f32>, Error> {
        self.args.visit(visitor)?.typed()
    }
}

impl<'a, B: NormBackend + ?Sized> Checked<AnyPartialBackwardStatistics<'a, B>> {
    /// Passes every tensor to the visitor, and returns the view of the statistics.
    ///
    /// # Errors
    /// The first of the visitor's.
    pub fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<B::Out<'a, f32>, Error> {
        self.args.visit(visitor)?.typed()
    }
}

/// A call, the statistics of all ranks, and the number of columns of each.
type CallParts<'g, B, A> = (Checked<A>, <B as NormBackend>::In<'g, f32>, &'g [usize]);

impl<'g, B: NormBackend + ?Sized, A> Checked<WithStatistics<'g, Untyped<B>, A>> {
    /// The call on this rank's columns, the statistics of all ranks, and the number of columns of
    /// each.
    ///
    /// # Errors
    /// `InvalidArgument` if the statistics are not f32.
    pub fn into_parts(self) -> Result<CallParts<'g, B, A>, Error> {
        let Checked { spec, args: WithStatistics { args, statistics, columns }, problem } = self;
        Ok((Checked { spec, args, problem }, statistics.typed()?, columns))
    }
}

impl<'g, B: NormBackend + ?Sized, A> Checked<WithStatistics<'g, B, A>> {
    /// The number of columns of all ranks together.
    pub fn whole_cols(&self) -> usize {
        self.args.columns.iter().sum()
    }
}

/// Every rank has columns, one rank has `here` columns, and their sum fits usize.
fn check_columns(columns: &[usize], here: usize) -> Result<(), Error> {
    let refuse = |rule| Err(Error::InvalidArgument { arg: "columns", rule });
    if columns.contains(&0) || !columns.contains(&here) {
        return refuse(format!("each must be at least 1, and one must be this rank's cols, {here}, got {columns:?}"));
    }
    match columns.iter().try_fold(0usize, |sum, &columns| sum.checked_add(columns)) {
        Some(_) => Ok(()),
        None => refuse(format!("their sum must fit usize, got {columns:?}")),
    }
}

/// Refuses forms that cannot divide columns among ranks: for callers that validate before they send
/// anything.
///
/// # Errors
/// `Unsupported` for a residual that is added after the norm, for a gate, for groups of columns,
/// for a weight before the norm, and for an `x` of several parts.
pub fn check_columns_form(spec: &NormSpec, parts: Option<Parts>) -> Result<(), Error> {
    check_divided("columns", "one matrix", spec, parts)
}

/// The same check, with words for the divided dimension and for `x`.
pub(super) fn check_divided(divided: &str, x: &str, spec: &NormSpec, parts: Option<Parts>) -> Result<(), Error> {
    let unsupported = |rule: String| Err(Error::Unsupported { rule });
    if spec.gate.is_some() {
        return unsupported(format!("where {divided} are divided among ranks, the norm has no gate"));
    }
    if spec.groups > 1 {
        return unsupported(format!(
            "where {divided} are divided among ranks, the norm has no groups of columns: give each rank whole groups, \
             and call the norm on its own columns"
        ));
    }
    if spec.cast_order.is_weight_first() {
        return unsupported(format!("where {divided} are divided among ranks, no weight comes before the norm"));
    }
    match (spec.residual_placement, parts) {
        (ResidualPlacement::After, _) => {
            unsupported(format!("where {divided} are divided among ranks, a residual is added before the norm"))
        }
        (ResidualPlacement::Before, Some(_)) => {
            unsupported(format!("where {divided} are divided among ranks, x is {x}, no sum of parts"))
        }
        (ResidualPlacement::Before, None) => Ok(()),
    }
}

/// Refuses casts: the first half takes x in the dtype of y.
pub(super) fn check_one_dtype(divided: &str, has_one: bool) -> Result<(), Error> {
    if has_one {
        return Ok(());
    }
    Err(Error::Unsupported { rule: format!("where {divided} are divided among ranks, x and y have one dtype") })
}

/// A statistics tensor of this shape, read or written.
fn statistics(span: Span, storage: Storage, shape: &[usize]) -> Result<Placed, Error> {
    let arg = "statistics";
    if storage != f32::STORAGE {
        return Err(Error::InvalidArgument { arg, rule: format!("its elements are f32, got {storage}") });
    }
    // A saturated product is longer than any view.
    let len = shape.iter().fold(1usize, |len, &factor| len.saturating_mul(factor));
    if span.len == len {
        Ok(Placed::whole(&View { arg, storage: f32::STORAGE, rows: Rows::dense(span) }))
    } else {
        Err(Error::Length { arg, min: len, max: len, got: span.len })
    }
}

/// Checks overlap with the statistics: if the call reads them, no written tensor overlaps them; if
/// it writes them, no tensor does. Gaps between rows count as part of a tensor.
struct Beside {
    statistics: Placed,
    /// The direction of a second half.
    direction: Option<Direction>,
}

impl SpanVisitor for Beside {
    fn visit(&mut self, tensor: Tensor, view: View) -> Result<(), Error> {
        if !self.statistics.overlaps(&Placed::whole(&view)) {
            return Ok(());
        }
        match self.direction {
            None => Err(Error::Overlap { output: "statistics", other: view.arg }),
            Some(direction) if tensor.access(direction) == Some(Access::Write) => {
                Err(Error::Overlap { output: view.arg, other: "statistics" })
            }
            Some(_) => Ok(()),
        }
    }
}
