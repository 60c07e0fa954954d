//! [`Forward`]: the tensors of a forward call.

use super::any::{self, AnyIn, AnyOut, Change, Erase, Restore, Untyped};
use super::{Parts, Rows, Source, SpanVisitor, Views, Visitor, tensors, visit};
use crate::{DTypes, Element, Error, NormBackend, Tensor};

/// The tensors of a forward call: [math](crate::math), equations (1) to (6), (13) and (14).
///
/// ```text
/// h = x (+ residual)        x_hat = (h - mean) * rstd        y = x_hat * (weight + weight_offset) + bias
/// ```
///
/// With [`NormSpec::residual_after`](crate::NormSpec::residual_after) the norm is added to the
/// residual. With `y`, a next norm of the sum is computed too;
/// [`added_to_residual`](Self::added_to_residual) makes the call without `y`:
///
/// ```text
/// residual_out = residual + norm(x) * (weight + weight_offset) + bias
/// y            = norm(residual_out) * (next_weight + weight_offset) + next_bias
/// ```
///
/// # Which tensors go together
/// `norm` and `next_norm` include weight and bias; `h` is the rounded sum. Each line is a valid
/// call, the last four with [`residual_after`](crate::NormSpec::residual_after):
///
/// | call | computes | needs | may have |
/// |---|---|---|---|
/// | [`new`](Self::new) | `y = norm(x)` | `x`, `y` | |
/// | [`cast`](Self::cast) | `y = norm(x)`, with `x` of the residual stream's dtype | `x`, `y` | |
/// | [`new`](Self::new), [`residual`](Self::residual) | `h = x + residual`, `y = norm(h)` | `x`, `y`, `residual` | `residual_out` (receives `h`) |
/// | [`new`](Self::new), [`parts`](Self::parts) | `h = x[0] + x[1] + .. (+ residual)`, `y = norm(h)` | `x`, `y` | `residual`, and with it `residual_out` |
/// | [`in_place`](Self::in_place) | `x = norm(x)` | `x` | |
/// | [`in_place`](Self::in_place), [`residual_in_place`](Self::residual_in_place) | `residual = x + residual`, `x = norm(residual)` | `x`, `residual` | |
/// | [`added_to_residual`](Self::added_to_residual), [`residual`](Self::residual) | `h = residual + norm(x)` | `x`, `residual`, `residual_out` (receives `h`) | |
/// | [`added_to_residual`](Self::added_to_residual), [`residual_in_place`](Self::residual_in_place) | `residual = residual + norm(x)` | `x`, `residual` | |
/// | [`new`](Self::new), [`residual`](Self::residual) | `h = residual + norm(x)`, `y = next_norm(h)` | `x`, `y`, `residual`, `residual_out` | the `next_*` tensors |
/// | [`new`](Self::new), [`residual_in_place`](Self::residual_in_place) | `residual = residual + norm(x)`, `y = next_norm(residual)` | `x`, `y`, `residual` | the `next_*` tensors |
///
/// Every call may have `weight`, `bias` and `rstd`, and for layer norm `mean`. A call of
/// [`NormSpec::gate_after`](crate::NormSpec::gate_after) or
/// [`gate_before`](crate::NormSpec::gate_before) has a `gate`. The `next_*` tensors
/// are `next_weight`, `next_bias`, `next_rstd`, and for layer norm `next_mean`. Other combinations
/// return `Missing`, `Unexpected`, `InvalidArgument` or `Unsupported`, see [`Error`].
///
/// # Shapes
/// `x`, `y`, `residual`, `residual_out`, `gate`: (rows, cols). `weight`, `bias`, `next_weight`,
/// `next_bias`: (cols). `mean`, `rstd`: (rows, groups). `next_mean`,
/// `next_rstd`: (rows).
///
/// # Dtypes
/// All tensors have one dtype by default. [`f32_weight`](Self::f32_weight) and
/// [`f32_residual`](Self::f32_residual) make the parameters and the residual stream f32 while the
/// activations have 16 bits. Call them before the tensors are passed. [`cast`](Self::cast) makes `y`
/// of another dtype than `x`.
///
/// # Example
/// Code that is generic over the backend names the dtype. With a concrete backend the views
/// determine it, and `Forward::new(x, y)` of the backend's alias, such as `rmsnorm_cpu::Forward`,
/// is enough.
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
    /// The input. In place, the call overwrites it with `y`. `None` if the call normalizes
    /// `residual` alone: [`cast`](Self::cast).
    pub x: Option<Source<B::In<'a, T>, B::Out<'a, T>>>,
    /// Multiplied with the normalized row, after `weight_offset` is added to it; ones if absent.
    pub weight: Option<B::In<'a, W>>,
    /// Added after the multiplication; zeros if absent.
    pub bias: Option<B::In<'a, W>>,
    /// Added to `x` before the norm: the call normalizes the sum, rounded to `R`. In place, the
    /// call overwrites it with the rounded sum. With
    /// [`ResidualPlacement::After`](crate::ResidualPlacement::After) the norm of `x` is added to
    /// it. Without `x` it is the input, and messages call it `x`.
    pub residual: Option<Source<B::In<'a, R>, B::Out<'a, R>>>,
    /// Receives the rounded sum, which is backward's `x`. Only with a `residual` that is not
    /// overwritten.
    pub residual_out: Option<Rows<B::Out<'a, R>>>,
    /// The output. `None` if it overwrites `x`, or if the residual is added after the norm and no
    /// next norm is wanted.
    pub y: Option<Rows<B::Out<'a, T>>>,
    /// Receives the mean of every row. Layer norm only.
    pub mean: Option<B::Out<'a, f32>>,
    /// Receives `1 / sqrt(var + eps)` of every row, for the backward pass.
    pub rstd: Option<B::Out<'a, f32>>,
    /// The weight of the next norm, to which `weight_offset` is added; ones if absent. The four
    /// `next_*` tensors need `y` and a residual that is added after the norm.
    pub next_weight: Option<B::In<'a, W>>,
    /// The bias of the next norm; zeros if absent.
    pub next_bias: Option<B::In<'a, W>>,
    /// Receives the mean of every row of the sum. Layer norm only.
    pub next_mean: Option<B::Out<'a, f32>>,
    /// Receives `1 / sqrt(var + eps)` of every row of the sum, for the next norm's backward pass.
    pub next_rstd: Option<B::Out<'a, f32>>,
    /// The gate: `x` or the result is multiplied by its activation ([`NormSpec::gate`](crate::NormSpec)).
    pub gate: Option<Rows<B::In<'a, T>>>,
    /// The count and stride of the matrices that `x` is the sum of. Not in place, and not with a
    /// residual after the norm.
    pub parts: Option<Parts>,
    /// The name of a tensor that a later change of its dtype dropped, or `x` if a residual replaced
    /// it. Validation refuses the call.
    pub(crate) lost: Option<&'static str>,
    /// The dtypes of the type parameters. Set it where views carry their types at run time;
    /// validation compares them with it.
    pub dtypes: DTypes,
}

impl<'a, B: NormBackend + ?Sized, T: Element> Forward<'a, B, T> {
    /// `y` from `x`: views of dense rows, [`Rows::strided`] or [`Rows::grouped`].
    pub fn new(x: impl Into<Rows<B::In<'a, T>>>, y: impl Into<Rows<B::Out<'a, T>>>) -> Self {
        Forward { y: Some(y.into()), ..Forward::of(Source::Read(x.into())) }
    }

    /// Overwrites `x` with `y`. A residual is overwritten too:
    /// [`residual_in_place`](Self::residual_in_place).
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

    /// Adds the norm of `x` to a residual and computes no next norm (no `y`): with
    /// [`ResidualPlacement::After`](crate::ResidualPlacement::After). `x` is only read.
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
    ///     backend.forward(&spec, Forward::<_, f32>::added_to_residual(x).residual_in_place(residual).weight(weight))
    /// }
    /// ```
    pub fn added_to_residual(x: impl Into<Rows<B::In<'a, T>>>) -> Self {
        Forward::of(Source::Read(x.into()))
    }

    fn of(x: Source<B::In<'a, T>, B::Out<'a, T>>) -> Self {
        Forward { x: Some(x), ..Forward::empty() }
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, R: Element> Forward<'a, B, T, T, R> {
    /// `y` from an `x` of another dtype, with one rounding: f32 to 16 bits, or 16 bits to f32. With
    /// one dtype it computes what [`new`](Forward::new) computes.
    ///
    /// Statistics are those of `x` as it is. Weight, bias and gate go with `y`: they have its dtype
    /// `T`, or after [`f32_weight`](Self::f32_weight) weight and bias are f32.
    /// [`CastOrder::BeforeWeight`](crate::CastOrder::BeforeWeight) rounds to the dtype of `y`.
    /// No such call adds a residual or parts, has a gate before the norm, or is in place.
    /// [`Backward::cast`](crate::Backward::cast) is its backward call.
    ///
    /// # Example
    /// The bf16 stream of a model, whose norm goes into a router in f32:
    /// ```
    /// # use rmsnorm_spec::{Error, Forward, NormBackend, NormSpec, bf16};
    /// fn normalize<B>(backend: &B, x: &[bf16], weight: &[f32], y: &mut [f32]) -> Result<(), Error>
    /// where
    ///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
    ///     B: for<'a> NormBackend<In<'a, bf16> = &'a [bf16]>,
    /// {
    ///     let spec = NormSpec::rms(x.len() / weight.len(), weight.len(), 1e-6);
    ///     backend.forward(&spec, Forward::<_, f32, f32, bf16>::cast(x, y).weight(weight))
    /// }
    /// ```
    pub fn cast(x: impl Into<Rows<B::In<'a, R>>>, y: impl Into<Rows<B::Out<'a, T>>>) -> Self {
        Forward { residual: Some(Source::Read(x.into())), y: Some(y.into()), ..Forward::empty() }
    }

    fn empty() -> Self {
        Forward {
            x: None,
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
            gate: None,
            parts: None,
            lost: None,
            dtypes: DTypes::of::<T, T, R>(),
        }
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Forward<'a, B, T, W, R> {
    /// With this [`residual`](Self#structfield.residual), which is only read: a view of dense rows,
    /// [`Rows::strided`] or [`Rows::grouped`].
    pub fn residual(self, residual: impl Into<Rows<B::In<'a, R>>>) -> Self {
        Forward { residual: Some(Source::Read(residual.into())), lost: self.lost_cast(), ..self }
    }

    /// Without `x`, the residual is what a cast normalizes: another one would replace it.
    fn lost_cast(&self) -> Option<&'static str> {
        self.lost.or(self.x.is_none().then_some("x"))
    }

    /// Normalizes the sum of `count` matrices in the view `x`: the first begins where `x` begins,
    /// each next one `stride` elements later. They are added in their order in f32, then the
    /// residual is added; the sum is rounded once, to `R`, with or without a residual:
    /// [math](crate::math), equation (1').
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_spec::{Error, Forward, NormBackend, NormSpec};
    /// /// y = norm(x[0] + x[1] + x[2] + residual): three matrices, one after the other in `x`.
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

    /// With this [`residual`](Self#structfield.residual), which the rounded sum overwrites. Only
    /// with [`in_place`](Forward::in_place), or if it is added after the norm.
    pub fn residual_in_place(self, residual: impl Into<Rows<B::Out<'a, R>>>) -> Self {
        Forward { residual: Some(Source::Overwrite(residual.into())), lost: self.lost_cast(), ..self }
    }
}

tensors!(Forward [] {
    by_hand source X = x: Y T;
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
    optional matrix Gate = gate: In T;
} with { parts: Option<Parts> } and residual);
