//! [`PartialStatistics`], [`PartialBackwardStatistics`] and [`WithStatistics`]: the two halves of a call whose
//! columns are divided among ranks.

use std::fmt;

use super::any::{self, AnyPartialBackwardStatistics, AnyPartialStatistics, Change, Erase};
use super::{Rows, SpanVisitor, Visitor, visit};
use crate::{DTypes, Element, Error, NormBackend, Tensor};

/// The tensors of the first half of a forward call on a rank's columns: [math](crate::math), (15).
///
/// # Shapes
/// `x`, `residual`: (rows, cols), where `cols` counts the columns of this rank. `statistics`:
/// (rows, [`Norm::statistics_len`](crate::Norm::statistics_len)).
///
/// # Example
/// One row, divided between two ranks:
/// ```
/// # use rmsnorm_spec::{PartialStatistics, Error, Forward, WithStatistics, NormBackend, NormSpec};
/// fn normalize_halves<B>(backend: &B, [low, high]: [&[f32]; 2], [y_low, y_high]: [&mut [f32]; 2]) -> Result<(), Error>
/// where
///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
/// {
///     let columns = [low.len(), high.len()];
///     let spec = |rank: usize| NormSpec::rms(1, columns[rank], 1e-6);
///     let mut found = [0.0; 2];
///     let (of_low, of_high) = found.split_at_mut(1);
///     backend.partial_statistics(&spec(0), PartialStatistics::<_, f32>::new(low, of_low))?;
///     backend.partial_statistics(&spec(1), PartialStatistics::<_, f32>::new(high, of_high))?;
///     // On two devices, an all-gather of the statistics belongs here.
///     backend.forward_with_statistics(&spec(0), WithStatistics::new(Forward::<_, f32>::new(low, y_low), &found[..], &columns))?;
///     backend.forward_with_statistics(&spec(1), WithStatistics::new(Forward::<_, f32>::new(high, y_high), &found[..], &columns))
/// }
/// ```
#[non_exhaustive]
pub struct PartialStatistics<'a, B: NormBackend + ?Sized, T: Element, R: Element = T> {
    /// The input.
    pub x: Rows<B::In<'a, T>>,
    /// Added to `x`; the sum is rounded to `R`.
    pub residual: Option<Rows<B::In<'a, R>>>,
    /// Receives this rank's contribution to the statistics of whole rows.
    pub statistics: B::Out<'a, f32>,
    /// The dtypes of the type parameters. Set it where views carry their types at run time;
    /// validation compares them with it.
    pub dtypes: DTypes,
}

impl<'a, B: NormBackend + ?Sized, T: Element> PartialStatistics<'a, B, T> {
    /// Statistics of `x` without a residual: a view of dense rows, [`Rows::strided`] or
    /// [`Rows::grouped`].
    pub fn new(x: impl Into<Rows<B::In<'a, T>>>, statistics: B::Out<'a, f32>) -> Self {
        PartialStatistics::mixed(x, None, statistics)
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, R: Element> PartialStatistics<'a, B, T, R> {
    /// Statistics of `x + residual`, or of `x`. The residual is in the activations' dtype or f32.
    pub fn mixed(
        x: impl Into<Rows<B::In<'a, T>>>,
        residual: Option<Rows<B::In<'a, R>>>,
        statistics: B::Out<'a, f32>,
    ) -> Self {
        PartialStatistics { x: x.into(), residual, statistics, dtypes: DTypes::of::<T, T, R>() }
    }

    /// The same call with dtypes that are values. Backends launch this form.
    pub fn erase(self) -> AnyPartialStatistics<'a, B> {
        let Ok(args) = self.change::<Erase<B>, f32, f32>();
        args
    }

    pub(super) fn change<C: Change<'a, From = B>, U: Element, S: Element>(
        self,
    ) -> Result<PartialStatistics<'a, C::To, U, S>, C::Error> {
        Ok(PartialStatistics {
            x: any::rows_in::<C, T, U>(self.x)?,
            residual: self.residual.map(any::rows_in::<C, R, S>).transpose()?,
            statistics: C::of_written::<f32, f32>(self.statistics)?,
            dtypes: self.dtypes,
        })
    }

    /// Passes every tensor to the visitor, except the statistics, which it returns.
    pub(crate) fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<B::Out<'a, f32>, Error> {
        visitor.read::<T>(Tensor::X, self.x)?;
        if let Some(residual) = self.residual {
            visitor.read::<R>(Tensor::Residual, residual)?;
        }
        Ok(self.statistics)
    }

    pub(crate) fn spans(&self, visitor: &mut impl SpanVisitor) -> Result<(), Error> {
        visit::matrix_in::<B, T>(visitor, Tensor::X, Some(&self.x))?;
        visit::matrix_in::<B, R>(visitor, Tensor::Residual, self.residual.as_ref())
    }
}

/// The tensors of the first half of a backward call on a rank's columns: [math](crate::math), (17).
///
/// # Shapes
/// `dy`, `x`: (rows, cols), where `cols` counts the columns of this rank. `weight`: (cols). `mean`,
/// `rstd`: (rows). `statistics`: (rows, [`Norm::statistics_len`](crate::Norm::statistics_len)).
#[non_exhaustive]
pub struct PartialBackwardStatistics<'a, B: NormBackend + ?Sized, T: Element, W: Element = T, R: Element = T> {
    /// The gradient of `y`.
    pub dy: Rows<B::In<'a, T>>,
    /// The tensor that forward normalized.
    pub x: Rows<B::In<'a, R>>,
    /// The forward pass's weight; ones if absent.
    pub weight: Option<B::In<'a, W>>,
    /// The mean of whole rows. Layer norm needs it, RMS norm has none.
    pub mean: Option<B::In<'a, f32>>,
    /// The `rstd` of whole rows.
    pub rstd: B::In<'a, f32>,
    /// Receives this rank's contribution to the averages over whole rows.
    pub statistics: B::Out<'a, f32>,
    /// The dtypes of the type parameters. Set it where views carry their types at run time;
    /// validation compares them with it.
    pub dtypes: DTypes,
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> PartialBackwardStatistics<'a, B, T, W, R> {
    /// The tensors of [`Backward::mixed`](crate::Backward::mixed). Matrices are views of dense
    /// rows, [`Rows::strided`] or [`Rows::grouped`]. Layer norm needs [`mean`](Self::mean), too.
    pub fn new(
        dy: impl Into<Rows<B::In<'a, T>>>,
        x: impl Into<Rows<B::In<'a, R>>>,
        rstd: B::In<'a, f32>,
        statistics: B::Out<'a, f32>,
    ) -> Self {
        let (dy, x, dtypes) = (dy.into(), x.into(), DTypes::of::<T, W, R>());
        PartialBackwardStatistics { dy, x, weight: None, mean: None, rstd, statistics, dtypes }
    }

    /// With this weight.
    pub fn weight(self, weight: B::In<'a, W>) -> Self {
        PartialBackwardStatistics { weight: Some(weight), ..self }
    }

    /// With this mean.
    pub fn mean(self, mean: B::In<'a, f32>) -> Self {
        PartialBackwardStatistics { mean: Some(mean), ..self }
    }

    /// The same call with dtypes that are values. Backends launch this form.
    pub fn erase(self) -> AnyPartialBackwardStatistics<'a, B> {
        let Ok(args) = self.change::<Erase<B>, f32, f32, f32>();
        args
    }

    pub(super) fn change<C: Change<'a, From = B>, U: Element, X: Element, S: Element>(
        self,
    ) -> Result<PartialBackwardStatistics<'a, C::To, U, X, S>, C::Error> {
        Ok(PartialBackwardStatistics {
            dy: any::rows_in::<C, T, U>(self.dy)?,
            x: any::rows_in::<C, R, S>(self.x)?,
            weight: self.weight.map(C::of_read::<W, X>).transpose()?,
            mean: self.mean.map(C::of_read::<f32, f32>).transpose()?,
            rstd: C::of_read::<f32, f32>(self.rstd)?,
            statistics: C::of_written::<f32, f32>(self.statistics)?,
            dtypes: self.dtypes,
        })
    }

    /// Passes every tensor to the visitor, except the statistics, which it returns.
    pub(crate) fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<B::Out<'a, f32>, Error> {
        visitor.read::<R>(Tensor::X, self.x)?;
        if let Some(weight) = self.weight {
            visitor.read::<W>(Tensor::Weight, Rows::dense(weight))?;
        }
        if let Some(mean) = self.mean {
            visitor.read::<f32>(Tensor::Mean, Rows::dense(mean))?;
        }
        visitor.read::<f32>(Tensor::Rstd, Rows::dense(self.rstd))?;
        visitor.read::<T>(Tensor::Dy, self.dy)?;
        Ok(self.statistics)
    }

    pub(crate) fn spans(&self, visitor: &mut impl SpanVisitor) -> Result<(), Error> {
        visit::matrix_in::<B, R>(visitor, Tensor::X, Some(&self.x))?;
        visit::vector_in::<B, W>(visitor, Tensor::Weight, self.weight.as_ref())?;
        visit::vector_in::<B, f32>(visitor, Tensor::Mean, self.mean.as_ref())?;
        visit::vector_in::<B, f32>(visitor, Tensor::Rstd, Some(&self.rstd))?;
        visit::matrix_in::<B, T>(visitor, Tensor::Dy, Some(&self.dy))
    }
}

/// The second half of a call on a rank's columns: its tensors, [`Forward`](crate::Forward) or
/// [`Backward`](crate::Backward), and the statistics of all ranks from the first half.
#[non_exhaustive]
pub struct WithStatistics<'a, B: NormBackend + ?Sized, A> {
    /// The tensors of this rank's columns. `mean` and `rstd` are of whole rows.
    pub args: A,
    /// (ranks, rows, [`Norm::statistics_len`](crate::Norm::statistics_len)): the `statistics` of
    /// every rank's first half, in rank order.
    pub statistics: B::In<'a, f32>,
    /// The number of columns of each rank, in rank order.
    pub columns: &'a [usize],
}

impl<'a, B: NormBackend + ?Sized, A> WithStatistics<'a, B, A> {
    /// The call `args` with the statistics of all ranks.
    pub fn new(args: A, statistics: B::In<'a, f32>, columns: &'a [usize]) -> Self {
        WithStatistics { args, statistics, columns }
    }
}

/// Prints the tensors as [`Forward`](crate::Forward) does.
impl<B: NormBackend + ?Sized, T: Element, R: Element> fmt::Debug for PartialStatistics<'_, B, T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spans = |visitor: &mut visit::Fields<'_, '_, '_>| self.spans(visitor);
        visit::describe(f.debug_struct("PartialStatistics"), spans)
    }
}

/// Prints the tensors as [`Forward`](crate::Forward) does.
impl<B: NormBackend + ?Sized, T: Element, W: Element, R: Element> fmt::Debug
    for PartialBackwardStatistics<'_, B, T, W, R>
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spans = |visitor: &mut visit::Fields<'_, '_, '_>| self.spans(visitor);
        visit::describe(f.debug_struct("PartialBackwardStatistics"), spans)
    }
}

/// Prints the tensors of the call, and the number of columns of each rank.
impl<B: NormBackend + ?Sized, A: fmt::Debug> fmt::Debug for WithStatistics<'_, B, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WithStatistics { args, statistics, columns } = self;
        let statistics = B::in_span(statistics).len;
        let given = format_args!("f32[{statistics}]");
        f.debug_struct("WithStatistics")
            .field("args", args)
            .field("statistics", &given)
            .field("columns", columns)
            .finish()
    }
}
