//! [`Forward`]: the tensors of a forward call.

use super::any::{self, Change, Erase, Restore, Untyped};
use super::{Parts, Rows, Source, SpanVisitor, Views, Visitor, tensors, visit};
use crate::{DTypes, Element, Error, NormBackend, Tensor};

/// The tensors of a forward call: [math](crate::math), equations (1) to (6), (13) and (14).
///
/// ```text
/// h = x (+ residual)        x_hat = (h - mean) * rstd        y = x_hat * (weight + weight_offset) + bias
/// ```
///
/// With [`NormSpec::residual_after`](crate::NormSpec::residual_after) the residual is added to the result instead, and `y`, if there is
/// one, is the next norm, of the sum; without ([`onto_residual`](Self::onto_residual)) there is no next norm:
///
/// ```text
/// residual_out = residual + norm(x) * (weight + weight_offset) + bias
/// y            = norm(residual_out) * (next_weight + weight_offset) + next_bias
/// ```
///
/// # Shapes
/// `x`, `y`, `residual`, `residual_out`: (rows, cols). `weight`, `bias`, `next_weight`, `next_bias`: (cols). `mean`, `rstd`,
/// `next_mean`, `next_rstd`: (rows).
///
/// # Dtypes
/// One for all to begin with. [`f32_weight`](Self::f32_weight) and [`f32_residual`](Self::f32_residual) make those of the
/// parameters and of the residual stream f32, while the activations have 16 bits.
///
/// # Example
/// Code that is generic over the backend names the dtype. With a concrete backend it follows from the views, and
/// `Forward::new(x, y)` is enough through the backend's own alias, such as `rmsnorm_cpu::Forward`.
/// ```
/// # use rmsnorm_spec::{Error, Forward, NormBackend, NormSpec};
/// fn normalize<B>(backend: &B, x: &[f32], weight: &[f32], y: &mut [f32], rstd: &mut [f32]) -> Result<(), Error>
/// where
///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
/// {
///     let spec = NormSpec::rms(rstd.len(), weight.len(), 1e-6);
///     backend.forward(&spec, Forward::<_, f32>::new(x, y).weight(weight).rstd(rstd))
/// }
/// ```
#[non_exhaustive]
pub struct Forward<'a, B: NormBackend + ?Sized, T: Element, W: Element = T, R: Element = T> {
    /// The input; in place it holds `y` afterwards.
    pub x: Source<B::In<'a, T>, B::Out<'a, T>>,
    /// Multiplied with the normalized row, after `weight_offset` was added to it; ones if absent.
    pub weight: Option<B::In<'a, W>>,
    /// Added to that; zeros if absent.
    pub bias: Option<B::In<'a, W>>,
    /// Added to `x` before the norm. The sum is rounded to `R`, and the rounded value is what is normalized. In place it
    /// holds the rounded sum afterwards, as `residual_out` would. With
    /// [`ResidualPlacement::After`](crate::ResidualPlacement::After) the norm of `x` is added to it.
    pub residual: Option<Source<B::In<'a, R>, B::Out<'a, R>>>,
    /// Receives the rounded sum; backward takes it as its `x`. Only with a `residual` that is not overwritten.
    pub residual_out: Option<Rows<B::Out<'a, R>>>,
    /// The output; `None` if it overwrites `x`, or where a residual is added after the norm and no next norm is wanted.
    pub y: Option<Rows<B::Out<'a, T>>>,
    /// Receives the mean of every row. Layer norm only.
    pub mean: Option<B::Out<'a, f32>>,
    /// Receives `1 / sqrt(var + eps)` of every row, for the backward pass.
    pub rstd: Option<B::Out<'a, f32>>,
    /// Multiplied with the normalized sum, after `weight_offset` was added to it; ones if absent. This and the other three of the next
    /// norm: only with a residual that is added after the norm, and with `y`.
    pub next_weight: Option<B::In<'a, W>>,
    /// Added to that; zeros if absent.
    pub next_bias: Option<B::In<'a, W>>,
    /// Receives the mean of every row of `residual_out`. Layer norm only.
    pub next_mean: Option<B::Out<'a, f32>>,
    /// Receives `1 / sqrt(var + eps)` of every row of `residual_out`, for the next norm's backward pass.
    pub next_rstd: Option<B::Out<'a, f32>>,
    /// Where `x` is the sum of several matrices: how many, and where they lie. Not in place, and not with a residual after the norm.
    pub parts: Option<Parts>,
    /// A tensor that was given before its dtype was changed, and is gone. Validation refuses the call.
    pub(crate) lost: Option<&'static str>,
    /// The dtypes of the type parameters. Where views say their types, the caller sets this, and validation compares them with it.
    pub dtypes: DTypes,
}

impl<'a, B: NormBackend + ?Sized, T: Element> Forward<'a, B, T> {
    /// `y` from `x`: views of dense rows, [`Rows::strided`] or [`Rows::grouped`].
    pub fn new(x: impl Into<Rows<B::In<'a, T>>>, y: impl Into<Rows<B::Out<'a, T>>>) -> Self {
        Forward { y: Some(y.into()), ..Forward::of(Source::Read(x.into())) }
    }

    /// `y` over `x`. A residual is overwritten, too: [`residual_in_place`](Self::residual_in_place).
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_spec::{Error, Forward, NormBackend, NormSpec};
    /// fn add_and_normalize<B>(backend: &B, x: &mut [f32], residual: &mut [f32], weight: &[f32]) -> Result<(), Error>
    /// where
    ///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
    /// {
    ///     let spec = NormSpec::rms(x.len() / weight.len(), weight.len(), 1e-6);
    ///     backend.forward(&spec, Forward::<_, f32>::in_place(x).residual_in_place(residual).weight(weight))
    /// }
    /// ```
    pub fn in_place(x: impl Into<Rows<B::Out<'a, T>>>) -> Self {
        Forward::of(Source::Overwrite(x.into()))
    }

    /// The norm of `x` on its way to a residual, with no next norm behind it:
    /// [`ResidualPlacement::After`](crate::ResidualPlacement::After), and no `y`. `x` stays as it is.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_spec::{Error, Forward, NormBackend, NormSpec};
    /// /// residual += norm(x) * weight
    /// fn add_normalized<B>(backend: &B, x: &[f32], weight: &[f32], residual: &mut [f32]) -> Result<(), Error>
    /// where
    ///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
    /// {
    ///     let spec = NormSpec::rms(x.len() / weight.len(), weight.len(), 1e-6).residual_after();
    ///     backend.forward(&spec, Forward::<_, f32>::onto_residual(x).residual_in_place(residual).weight(weight))
    /// }
    /// ```
    pub fn onto_residual(x: impl Into<Rows<B::In<'a, T>>>) -> Self {
        Forward::of(Source::Read(x.into()))
    }

    fn of(x: Source<B::In<'a, T>, B::Out<'a, T>>) -> Self {
        Forward {
            x,
            weight: None,
            bias: None,
            residual: None,
            residual_out: None,
            y: None,
            mean: None,
            rstd: None,
            next_weight: None,
            next_bias: None,
            next_mean: None,
            next_rstd: None,
            parts: None,
            lost: None,
            dtypes: DTypes::of::<T, T, T>(),
        }
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Forward<'a, B, T, W, R> {
    /// With this [`residual`](Self#structfield.residual), which stays as it is: a view of dense rows, or
    /// [`Rows::strided`] or [`Rows::grouped`].
    pub fn residual(self, residual: impl Into<Rows<B::In<'a, R>>>) -> Self {
        Forward { residual: Some(Source::Read(residual.into())), ..self }
    }

    /// Of the sum of `count` matrices, which `x` is a view of: the first where its rows begin, each `stride` elements further on than the
    /// one before. They are added in their order, in f32, then the residual; the sum is rounded once, to `R`, residual or not:
    /// [math](crate::math), equation (1').
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_spec::{Error, Forward, NormBackend, NormSpec};
    /// /// y = norm(x[0] + x[1] + x[2] + residual), of matrices that lie one after the other; the sum overwrites nothing.
    /// fn combine<B>(
    ///     backend: &B, x: &[f32], residual: &[f32], weight: &[f32], y: &mut [f32], sum: &mut [f32],
    /// ) -> Result<(), Error>
    /// where
    ///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
    /// {
    ///     let (len, spec) = (y.len(), NormSpec::rms(y.len() / weight.len(), weight.len(), 1e-6));
    ///     let args = Forward::<_, f32>::new(x, y).parts(3, len).weight(weight);
    ///     backend.forward(&spec, args.residual(residual).residual_out(sum))
    /// }
    /// ```
    pub fn parts(self, count: usize, stride: usize) -> Self {
        Forward { parts: Some(Parts { count, stride }), ..self }
    }

    /// With this [`residual`](Self#structfield.residual), which the rounded sum overwrites. Only with
    /// [`in_place`](Forward::in_place), or where it is added after the norm.
    pub fn residual_in_place(self, residual: impl Into<Rows<B::Out<'a, R>>>) -> Self {
        Forward { residual: Some(Source::Overwrite(residual.into())), ..self }
    }
}

tensors!(Forward [] {
    given source X = x: Y T;
    by_hand source Residual = residual: ResidualOut R;
    optional vector Weight = weight: In W;
    optional vector Bias = bias: In W;
    by_hand matrix Y = y: Out T;
    optional matrix ResidualOut = residual_out: Out R;
    optional vector Mean = mean: Out f32;
    optional vector Rstd = rstd: Out f32;
    optional vector NextWeight = next_weight: In W;
    optional vector NextBias = next_bias: In W;
    optional vector NextMean = next_mean: Out f32;
    optional vector NextRstd = next_rstd: Out f32;
} with { parts } and residual);
