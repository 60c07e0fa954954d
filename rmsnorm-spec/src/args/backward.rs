//! [`Backward`]: the tensors of a backward call.

use super::any::{self, Change, Erase, Restore, Untyped};
use super::{Rows, SpanVisitor, Views, Visitor, tensors, visit};
use crate::{DTypes, Element, Error, GradReduction, NormBackend, Tensor};

/// The tensors of a backward call: [math](crate::math), equations (7) to (12).
///
/// ```text
/// wdy = dy * (weight + weight_offset)     mean_wdy = avg(wdy) (layer norm, else 0)     mean_wdy_xhat = avg(wdy * x_hat)
/// dx = rstd * (wdy - mean_wdy - x_hat * mean_wdy_xhat) (+ dresidual_out)
/// dweight = sum over rows of dy * x_hat                  dbias = sum over rows of dy
/// ```
///
/// # Shapes
/// `dy`, `x`, `dx`, `dresidual_out`, `dresidual`: (rows, cols). `weight`, `dweight`, `dbias`, `dweight_sum`,
/// `dbias_sum`: (cols). `mean`, `rstd`: (rows).
/// `workspace`: at least [`NormBackend::workspace_len`] elements.
///
/// # Dtypes
/// One for all to begin with. [`f32_weight`](Self::f32_weight) makes those of the parameters f32; where the residual
/// stream is f32, [`mixed`](Self::mixed) takes `x` in it. `dweight_sum` and `dbias_sum` are f32.
///
/// # Example
/// ```
/// # use rmsnorm_spec::{Backward, Error, NormBackend, NormSpec};
/// struct Saved<'a> { x: &'a [f32], rstd: &'a [f32] }
/// fn gradients<B>(
///     backend: &B, saved: &Saved<'_>, weight: &[f32], dy: &[f32], dx: &mut [f32], dweight: &mut [f32],
/// ) -> Result<(), Error>
/// where
///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
/// {
///     let spec = NormSpec::rms(saved.rstd.len(), weight.len(), 1e-6);
///     let args = Backward::<_, f32>::new(dy, saved.x, saved.rstd, dx);
///     backend.backward(&spec, args.weight(weight).dweight(dweight))
/// }
/// ```
///
/// Of the two norms around a residual that [`NormSpec::residual_after`](crate::NormSpec::residual_after) makes in one call, backward is
/// two: the last norm's, whose `x` is the sum, then the first's, whose `dy` is what the last norm gave. What arrives at the sum from
/// elsewhere goes into the one, and the residual's gradient comes out of it. Without a next norm there is only the other, and the residual's
/// gradient is `dy`.
/// ```
/// # use rmsnorm_spec::{Backward, Error, NormBackend, NormSpec};
/// struct Saved<'a> { x: &'a [f32], rstd: &'a [f32], sum: &'a [f32], next_rstd: &'a [f32] }
/// fn gradients<B>(
///     backend: &B, saved: &Saved<'_>, [weight, next_weight]: [&[f32]; 2], [dy, dsum]: [&[f32]; 2],
///     [dx, dresidual]: [&mut [f32]; 2], [dweight, dnext_weight]: [&mut [f32]; 2],
/// ) -> Result<(), Error>
/// where
///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
/// {
///     let norm = NormSpec::rms(saved.rstd.len(), weight.len(), 1e-6);
///     let last = Backward::<_, f32>::new(dy, saved.sum, saved.next_rstd, &mut *dresidual).weight(next_weight);
///     backend.backward(&norm, last.dresidual_out(dsum).dweight(dnext_weight))?;
///     let first = Backward::<_, f32>::new(&*dresidual, saved.x, saved.rstd, dx).weight(weight);
///     backend.backward(&norm.residual_after(), first.dweight(dweight))
/// }
/// ```
#[non_exhaustive]
pub struct Backward<'a, B: NormBackend + ?Sized, T: Element, W: Element = T, R: Element = T> {
    /// The gradient of `y`; of `residual_out` where the residual was added after the norm, which is the residual's gradient, too.
    pub dy: Rows<B::In<'a, T>>,
    /// The tensor that was normalized: the forward pass's `x`, or its `residual_out` where a residual was added before the norm.
    pub x: Rows<B::In<'a, R>>,
    /// The forward pass's weight; ones if absent.
    pub weight: Option<B::In<'a, W>>,
    /// The forward pass's mean. Layer norm needs it, RMS norm has none.
    pub mean: Option<B::In<'a, f32>>,
    /// The forward pass's rstd.
    pub rstd: B::In<'a, f32>,
    /// The gradient that arrives at `residual_out` from elsewhere; added to `dx` in f32, before the rounding.
    pub dresidual_out: Option<Rows<B::In<'a, R>>>,
    /// Receives the gradient of `x`, which is the gradient of `residual` too, in the dtype of `y`.
    pub dx: Rows<B::Out<'a, T>>,
    /// Receives the gradient of `weight`. Overwritten, never added to.
    pub dweight: Option<B::Out<'a, W>>,
    /// Receives the gradient of `bias`. Overwritten, never added to.
    pub dbias: Option<B::Out<'a, W>>,
    /// Room for the partial sums of `dweight` and `dbias`; the backend allocates it if absent. Contents are
    /// unspecified before and after.
    pub workspace: Option<B::Out<'a, f32>>,
    /// Receives what `dx` receives, rounded to the residual stream's dtype instead: the gradient that goes on along an f32
    /// stream.
    pub dresidual: Option<Rows<B::Out<'a, R>>>,
    /// Receives the gradient of `weight` as the f32 sum that it is, whatever the weight's dtype: in place of `dweight`, for a bucket in which
    /// several devices add theirs before the one rounding.
    pub dweight_sum: Option<B::Out<'a, f32>>,
    /// Receives the gradient of `bias` in the same way, in place of `dbias`.
    pub dbias_sum: Option<B::Out<'a, f32>>,
    /// Whether `dweight_sum` and `dbias_sum` are added to what is there.
    pub accumulate: bool,
    /// How `dweight` and `dbias` are summed.
    pub grad_reduction: GradReduction,
    /// A tensor that was given before its dtype was changed, and is gone. Validation refuses the call.
    pub(crate) lost: Option<&'static str>,
    /// The dtypes of the type parameters. Where views say their types, the caller sets this, and validation compares them with it.
    pub dtypes: DTypes,
}

impl<'a, B: NormBackend + ?Sized, T: Element> Backward<'a, B, T> {
    /// `dx` from `dy`, the normalized tensor `x` and its saved `rstd`. Matrices are views of dense rows, or
    /// [`Rows::strided`] or [`Rows::grouped`]. Layer norm needs [`mean`](Self::mean) too.
    pub fn new(
        dy: impl Into<Rows<B::In<'a, T>>>,
        x: impl Into<Rows<B::In<'a, T>>>,
        rstd: B::In<'a, f32>,
        dx: impl Into<Rows<B::Out<'a, T>>>,
    ) -> Self {
        Backward::mixed(dy, x, rstd, dx)
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Backward<'a, B, T, W, R> {
    /// As [`new`](Backward::new), where the residual stream (`R`: `x` and `dresidual_out`) or the weight (`W`) has a dtype
    /// of its own: that of the activations, or f32.
    pub fn mixed(
        dy: impl Into<Rows<B::In<'a, T>>>,
        x: impl Into<Rows<B::In<'a, R>>>,
        rstd: B::In<'a, f32>,
        dx: impl Into<Rows<B::Out<'a, T>>>,
    ) -> Self {
        Backward {
            dy: dy.into(),
            x: x.into(),
            weight: None,
            mean: None,
            rstd,
            dresidual_out: None,
            dx: dx.into(),
            dweight: None,
            dbias: None,
            workspace: None,
            dresidual: None,
            dweight_sum: None,
            dbias_sum: None,
            accumulate: false,
            grad_reduction: GradReduction::default(),
            lost: None,
            dtypes: DTypes::of::<T, W, R>(),
        }
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Backward<'a, B, T, W, R> {
    /// With `dweight_sum` and `dbias_sum` added to what is there, in f32, once they are sums over all rows of this call: micro-batches one
    /// after the other, or norms that share a weight. The views must hold values.
    ///
    /// # Example
    /// A bucket of a trainer's, which is summed over the devices when the last micro-batch is done:
    /// ```
    /// # use rmsnorm_spec::{Backward, Error, NormBackend, NormSpec, bf16};
    /// struct Saved<'a> { x: &'a [bf16], rstd: &'a [f32] }
    /// fn add_gradient<B>(
    ///     backend: &B, saved: &Saved<'_>, weight: &[bf16], dy: &[bf16], dx: &mut [bf16], bucket: &mut [f32],
    /// ) -> Result<(), Error>
    /// where
    ///     B: for<'a> NormBackend<In<'a, bf16> = &'a [bf16], Out<'a, bf16> = &'a mut [bf16]>,
    ///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
    /// {
    ///     let spec = NormSpec::rms(saved.rstd.len(), weight.len(), 1e-6);
    ///     let args = Backward::<_, bf16>::new(dy, saved.x, saved.rstd, dx).weight(weight);
    ///     backend.backward(&spec, args.dweight_sum(bucket).accumulate())
    /// }
    /// ```
    pub fn accumulate(self) -> Self {
        Backward { accumulate: true, ..self }
    }

    /// With this way of summing `dweight` and `dbias` over the rows.
    pub fn grad_reduction(self, grad_reduction: GradReduction) -> Self {
        Backward { grad_reduction, ..self }
    }
}

tensors!(Backward [] {
    given matrix X = x: In R;
    optional vector Weight = weight: In W;
    optional vector Mean = mean: In f32;
    given vector Rstd = rstd: In f32;
    given matrix Dy = dy: In T;
    optional matrix DresidualOut = dresidual_out: In R;
    given matrix Dx = dx: Out T;
    optional vector Dweight = dweight: Out W;
    optional vector Dbias = dbias: Out W;
    optional vector Workspace = workspace: Out f32;
    optional matrix Dresidual = dresidual: Out R;
    optional sum Dweight = dweight_sum: Out f32;
    optional sum Dbias = dbias_sum: Out f32;
} with { accumulate, grad_reduction });
