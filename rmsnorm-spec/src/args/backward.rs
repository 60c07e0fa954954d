//! [`Backward`]: the tensors of a backward call.

use super::any::{self, AnyIn, AnyOut, Change, Erase, Restore, Untyped};
use super::{Rows, Source, SpanVisitor, Views, Visitor, tensors, visit};
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
/// `dy`, `x`, `dx`, `dresidual_out`, `dresidual`, `gate`, `dgate`: (rows, cols). `weight`, `bias`, `dweight`, `dbias`,
/// `dweight_sum`, `dbias_sum`: (cols). `mean`, `rstd`: (rows, groups). `workspace`: at least
/// [`NormBackend::workspace_len`] elements.
///
/// # Dtypes
/// All tensors have one dtype by default. [`f32_weight`](Self::f32_weight) makes the parameters
/// f32. For an f32 residual stream, [`mixed`](Self::mixed) takes `x` in f32. [`cast`](Self::cast)
/// also writes `dx` in the dtype of `x`. `dweight_sum` and `dbias_sum` are always f32.
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
/// # Gated norms
/// With [`NormSpec::gate_after`](crate::NormSpec::gate_after) or
/// [`gate_before`](crate::NormSpec::gate_before) the call needs `gate`, and may write `dgate`:
/// equations (20) and (21). `dy` is the gradient of the gated result. A gate before the norm takes
/// as `x` the tensor before its multiplication, and `dx` is the gradient of it.
/// ```
/// # use rmsnorm_spec::{Activation, Backward, Error, NormBackend, NormSpec};
/// struct Saved<'a> { x: &'a [f32], gate: &'a [f32], rstd: &'a [f32] }
/// fn gradients<B>(
///     backend: &B, saved: &Saved<'_>, weight: &[f32], dy: &[f32], dx: &mut [f32], dgate: &mut [f32],
/// ) -> Result<(), Error>
/// where
///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
/// {
///     let spec = NormSpec::rms(saved.rstd.len(), weight.len(), 1e-6).gate_after(Activation::Silu);
///     let args = Backward::<_, f32>::new(dy, saved.x, saved.rstd, dx).weight(weight);
///     backend.backward(&spec, args.gate(saved.gate).dgate(dgate))
/// }
/// ```
///
/// # Two norms around a residual
/// A forward call with [`NormSpec::residual_after`](crate::NormSpec::residual_after) and a next
/// norm has two backward calls. The first differentiates the next norm: its `x` is the sum, its
/// `dresidual_out` the gradient that the sum has from later layers, its `dx` the gradient of the
/// residual. The second differentiates the first norm: its `dy` is that `dx`. Without a next norm
/// there is only the second call, and the gradient of the residual is `dy`.
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
    /// The gradient of `y`. If the residual was added after the norm: the gradient of
    /// `residual_out`, which is also the residual's.
    pub dy: Rows<B::In<'a, T>>,
    /// The tensor that forward normalized: its `x`, or its `residual_out` if a residual was added
    /// before the norm.
    pub x: Rows<B::In<'a, R>>,
    /// The forward pass's weight; ones if absent.
    pub weight: Option<B::In<'a, W>>,
    /// The forward pass's bias, which only a gate after the norm needs; zeros if absent.
    pub bias: Option<B::In<'a, W>>,
    /// The forward pass's mean. Layer norm needs it, RMS norm has none.
    pub mean: Option<B::In<'a, f32>>,
    /// The forward pass's rstd.
    pub rstd: B::In<'a, f32>,
    /// The gradient of `residual_out` from later layers; added to `dx` in f32, before rounding.
    pub dresidual_out: Option<Rows<B::In<'a, R>>>,
    /// Receives the gradient of `x`, which is also the gradient of `residual`, in the dtype of `y`.
    /// `None` if `dresidual` alone receives it: [`cast`](Self::cast).
    pub dx: Option<Rows<B::Out<'a, T>>>,
    /// Receives the gradient of `weight`. Overwritten, never added to.
    pub dweight: Option<B::Out<'a, W>>,
    /// Receives the gradient of `bias`. Overwritten, never added to.
    pub dbias: Option<B::Out<'a, W>>,
    /// Memory for the partial sums of `dweight` and `dbias`; the backend allocates it if absent.
    /// Its values are unspecified before and after.
    pub workspace: Option<B::Out<'a, f32>>,
    /// Receives the same gradient as `dx`, rounded to the dtype of the residual stream: for an f32
    /// stream. Without `dx`, messages call it `dx`.
    pub dresidual: Option<Rows<B::Out<'a, R>>>,
    /// Receives the gradient of `weight` as an unrounded f32 sum, for every dtype of the weight,
    /// instead of `dweight`: several devices can add their sums before one rounding.
    pub dweight_sum: Option<B::Out<'a, f32>>,
    /// Receives the gradient of `bias` as an unrounded f32 sum, instead of `dbias`.
    pub dbias_sum: Option<B::Out<'a, f32>>,
    /// The forward pass's gate.
    pub gate: Option<Rows<B::In<'a, T>>>,
    /// Receives the gradient of `gate`.
    pub dgate: Option<Rows<B::Out<'a, T>>>,
    /// Whether the call adds to the values in `dweight_sum` and `dbias_sum`.
    pub accumulate: bool,
    /// How `dweight` and `dbias` are summed.
    pub grad_reduction: GradReduction,
    /// The name of a tensor that a later change of its dtype dropped. Validation refuses the call.
    pub(crate) lost: Option<&'static str>,
    /// The dtypes of the type parameters. Set it where views carry their types at run time;
    /// validation compares them with it.
    pub dtypes: DTypes,
}

impl<'a, B: NormBackend + ?Sized, T: Element> Backward<'a, B, T> {
    /// `dx` from `dy`, the normalized tensor `x` and its saved `rstd`. Matrices are views of dense
    /// rows, [`Rows::strided`] or [`Rows::grouped`]. Layer norm needs [`mean`](Self::mean) too.
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
    /// As [`new`](Backward::new), if the residual stream (`R`: `x` and `dresidual_out`) or the
    /// weight (`W`) may have another dtype than the activations: f32.
    pub fn mixed(
        dy: impl Into<Rows<B::In<'a, T>>>,
        x: impl Into<Rows<B::In<'a, R>>>,
        rstd: B::In<'a, f32>,
        dx: impl Into<Rows<B::Out<'a, T>>>,
    ) -> Self {
        Backward { dx: Some(dx.into()), ..Backward::of(dy.into(), x.into(), rstd) }
    }

    fn of(dy: Rows<B::In<'a, T>>, x: Rows<B::In<'a, R>>, rstd: B::In<'a, f32>) -> Self {
        Backward {
            dy,
            x,
            weight: None,
            bias: None,
            mean: None,
            rstd,
            dresidual_out: None,
            dx: None,
            dweight: None,
            dbias: None,
            workspace: None,
            dresidual: None,
            dweight_sum: None,
            dbias_sum: None,
            gate: None,
            dgate: None,
            accumulate: false,
            grad_reduction: GradReduction::default(),
            lost: None,
            dtypes: DTypes::of::<T, W, R>(),
        }
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, R: Element> Backward<'a, B, T, T, R> {
    /// The gradient `dx` in the dtype of `x`, where `y` and `dy` have another dtype:
    /// [`Forward::cast`](crate::Forward::cast). It is rounded once.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_spec::{Backward, Error, NormBackend, NormSpec, bf16};
    /// fn gradient<B>(backend: &B, dy: &[f32], x: &[bf16], rstd: &[f32], dx: &mut [bf16]) -> Result<(), Error>
    /// where
    ///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32]>,
    ///     B: for<'a> NormBackend<In<'a, bf16> = &'a [bf16], Out<'a, bf16> = &'a mut [bf16]>,
    /// {
    ///     let spec = NormSpec::rms(rstd.len(), x.len() / rstd.len(), 1e-6);
    ///     backend.backward(&spec, Backward::<_, f32, f32, bf16>::cast(dy, x, rstd, dx))
    /// }
    /// ```
    pub fn cast(
        dy: impl Into<Rows<B::In<'a, T>>>,
        x: impl Into<Rows<B::In<'a, R>>>,
        rstd: B::In<'a, f32>,
        dx: impl Into<Rows<B::Out<'a, R>>>,
    ) -> Self {
        Backward { dresidual: Some(dx.into()), ..Backward::of(dy.into(), x.into(), rstd) }
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Backward<'a, B, T, W, R> {
    /// Adds `dweight_sum` and `dbias_sum`, complete sums over the rows of this call, to the values
    /// in these views, in f32: for consecutive micro-batches, or norms that share a weight. The
    /// views must hold values.
    ///
    /// # Example
    /// A trainer's gradient bucket, summed over the devices after the last micro-batch:
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

    /// Sums `dweight` and `dbias` over the rows in this way.
    pub fn grad_reduction(self, grad_reduction: GradReduction) -> Self {
        Backward { grad_reduction, ..self }
    }
}

tensors!(Backward [] {
    given matrix X = x: In R;
    optional vector Weight = weight: In W;
    optional vector Bias = bias: In W;
    optional vector Mean = mean: In f32;
    given vector Rstd = rstd: In f32;
    given matrix Dy = dy: In T;
    optional matrix DresidualOut = dresidual_out: In R;
    by_hand matrix Dx = dx: Out T;
    optional vector Dweight = dweight: Out W;
    optional vector Dbias = dbias: Out W;
    optional vector Workspace = workspace: Out f32;
    optional matrix Dresidual = dresidual: Out R;
    optional sum Dweight = dweight_sum: Out f32;
    optional sum Dbias = dbias_sum: Out f32;
    optional matrix Gate = gate: In T;
    optional matrix Dgate = dgate: Out T;
} with { accumulate: bool, grad_reduction: GradReduction });
