//! A norm as a value, and the choice of our kernels or candle's operations.

use std::fmt::Debug;
use std::marker::PhantomData;

use candle_core::{DType, Result, Tensor, bail};
use rmsnorm_core::{Activation, CastOrder, Gate, NormParams, ResidualPlacement, Slot};

use crate::check::Args;
use crate::native::{element, mix};
use crate::ops::{gated, in_place, normalize, sum};
use crate::rows::{is_regular, regular};
use crate::slow;

/// A norm as a value: its options and its pieces. Each method adds a piece, and [`apply`](Self::apply) computes all of them with one
/// kernel.
///
/// | Pieces | `apply` returns |
/// |---|---|
/// | none | y |
/// | [`residual`](Norm::residual) | `(y, h)`: `h = residual + x`, y is the norm of h |
/// | [`residual_after`](Norm::residual_after) | `h = residual + norm(x)` |
/// | [`gate_after`](Norm::gate_after), also with `residual` | y is multiplied by an activation of the gate |
/// | [`gate_before`](Norm::gate_before) | y is the norm of `x` times an activation of the gate |
/// | `residual_after` and [`next_norm`](Norm::next_norm) | `(y, h)`: `h = residual + norm(x)`, y is the norm of h by the next weight |
///
/// # Shapes
/// `x`, residuals, gates and results: (.., cols), of any rank from 1. Weights and biases: (cols). y
/// has the dtype of `x` or [`out_dtype`](Norm::out_dtype), h that of the residual; each is rounded
/// once, unless a [`cast_order`](Norm::cast_order) rounds more.
///
/// # Gradients
/// Every tensor has one, from either result or both. The gradient of an f32 residual with 16-bit activations is never rounded to 16 bits.
/// After a norm, the gradient of h passes unchanged to the residual, and in the dtype of `x` to the norm. A sum after a norm with a bias
/// that is tracked computes the weight's gradient also for a frozen weight, and its graph holds a copy of both. See [the crate](crate) for
/// dtypes, devices and errors.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use rmsnorm_candle::Norm;
/// # fn main() -> candle_core::Result<()> {
/// let (x, residual) = (Tensor::new(&[[1f32, 3.0]], &Device::Cpu)?, Tensor::new(&[[3f32, 5.0]], &Device::Cpu)?);
/// let (weight, bias) = (Tensor::new(&[1f32, 1.0], &Device::Cpu)?, Tensor::new(&[1f32, 1.0], &Device::Cpu)?);
/// let norm = Norm::layer(0.0).residual_after(&residual).next_norm(&weight).next_bias(&bias);
/// let (y, h) = norm.apply(&x, &weight)?;
/// assert_eq!((y.to_vec2::<f32>()?, h.to_vec2::<f32>()?), (vec![vec![0.0, 2.0]], vec![vec![2.0, 6.0]]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a, P: Pieces = Alone> {
    params: NormParams,
    /// Of y.
    out_dtype: Option<DType>,
    bias: Option<&'a Tensor>,
    residual: Option<&'a Tensor>,
    gate: Option<&'a Tensor>,
    next_weight: Option<&'a Tensor>,
    next_bias: Option<&'a Tensor>,
    pieces: PhantomData<P>,
}

/// The pieces of a [`Norm`], which decide what [`apply`](Norm::apply) returns.
pub trait Pieces: Copy + Debug {
    /// y, h, or both.
    type Results;

    #[doc(hidden)]
    fn of(y: Option<Tensor>, h: Option<Tensor>) -> Option<Self::Results>;
}

macro_rules! pieces {
    ($($(#[$doc:meta])* $name:ident: $results:ty = |$y:ident, $h:ident| $given:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl Pieces for $name {
            type Results = $results;

            fn of($y: Option<Tensor>, $h: Option<Tensor>) -> Option<$results> {
                $given
            }
        }
    )*};
}

pieces! {
    /// [`Pieces`] of a norm without a residual: y.
    Alone: Tensor = |y, _h| y;
    /// [`Pieces`] of [`Norm::residual`]: y and h.
    Added: (Tensor, Tensor) = |y, h| y.zip(h);
    /// [`Pieces`] of [`Norm::residual_after`]: h.
    AddedAfter: Tensor = |_y, h| h;
    /// [`Pieces`] of [`Norm::next_norm`]: y and h.
    NormedAgain: (Tensor, Tensor) = |y, h| y.zip(h);
}

impl<'a> Norm<'a> {
    /// `x / sqrt(avg(x^2) + eps) * weight`.
    pub fn rms(eps: f64) -> Self {
        Norm::new(NormParams::new(rmsnorm_core::Norm::Rms, eps))
    }

    /// The RMS norm with `1 + weight`, added in f32 and not rounded, as in Gemma.
    pub fn gemma(eps: f64) -> Self {
        Norm::new(NormParams::gemma(eps))
    }

    /// `(x - mean) / sqrt(var + eps) * weight`, and a [`bias`](Self::bias).
    pub fn layer(eps: f64) -> Self {
        Norm::new(NormParams::new(rmsnorm_core::Norm::Layer, eps))
    }

    /// `x / sqrt(sum(x^2) + eps) * weight`, as in flash-linear-attention.
    pub fn l2(eps: f64) -> Self {
        Norm::new(NormParams::new(rmsnorm_core::Norm::L2, eps))
    }

    /// `x / max(sqrt(sum(x^2)), eps) * weight`, as in PyTorch's `F.normalize`. `eps` is 0 or from
    /// 2^-63 to 2^63.
    pub fn l2_clamped(eps: f64) -> Self {
        Norm::new(NormParams::new(rmsnorm_core::Norm::L2Clamped, eps))
    }

    pub(crate) fn new(params: NormParams) -> Self {
        let (out_dtype, bias, residual, gate, next_weight, next_bias) = (None, None, None, None, None, None);
        Norm { params, out_dtype, bias, residual, gate, next_weight, next_bias, pieces: PhantomData }
    }

    /// Normalizes `h = residual + x`, rounded to the dtype of the residual.
    pub fn residual(self, residual: &'a Tensor) -> Norm<'a, Added> {
        Norm { residual: Some(residual), ..self.with() }
    }

    /// Adds the norm to the residual: `h = residual + norm(x)`.
    pub fn residual_after(self, residual: &'a Tensor) -> Norm<'a, AddedAfter> {
        Norm { params: self.params.residual_after(), residual: Some(residual), ..self.with() }
    }

    /// Multiplies `x` by an activation of the gate before the norm, as Mamba2 does. The product is not
    /// rounded. Not with a residual.
    pub fn gate_before(self, gate: &'a Tensor, activation: Activation) -> Self {
        self.gated(gate, activation, Slot::Before)
    }

    /// Overwrites `x` with its norm, for inference.
    ///
    /// # Errors
    /// As [`rms_norm_in_place`](crate::rms_norm_in_place), and with a gate or an
    /// [`out_dtype`](Self::out_dtype).
    pub fn apply_in_place(&self, x: &Tensor, weight: &Tensor) -> Result<()> {
        self.args(x, weight).overwrite(self.params, self.out_dtype)
    }
}

impl<'a> Norm<'a, AddedAfter> {
    /// Normalizes that sum as well, with the same options and this weight. Weights that differ in dtype take two kernels.
    pub fn next_norm(self, weight: &'a Tensor) -> Norm<'a, NormedAgain> {
        Norm { next_weight: Some(weight), ..self.with() }
    }
}

impl<'a> Norm<'a, NormedAgain> {
    /// Adds a bias to the next norm. `None` is none.
    pub fn next_bias(self, bias: impl Into<Option<&'a Tensor>>) -> Self {
        Norm { next_bias: bias.into(), ..self }
    }
}

impl<'a, P: Pieces> Norm<'a, P> {
    /// Adds a bias to the norm of `x` or, with [`residual`](Norm::residual), of h. `None` is none.
    pub fn bias(self, bias: impl Into<Option<&'a Tensor>>) -> Self {
        Norm { bias: bias.into(), ..self }
    }

    /// Multiplies the norm by an activation of the gate, as Qwen3-Next does: `y = norm(x) * activation(gate)`. Not with a
    /// residual after the norm.
    ///
    /// # Example
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use rmsnorm_candle::{Activation, Norm};
    /// # fn main() -> candle_core::Result<()> {
    /// let (x, gate) = (Tensor::new(&[[3f32, -3.0]], &Device::Cpu)?, Tensor::new(&[[0f32, 0.0]], &Device::Cpu)?);
    /// let weight = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
    /// let y = Norm::rms(0.0).gate_after(&gate, Activation::Sigmoid).apply(&x, &weight)?;
    /// assert_eq!(y.to_vec2::<f32>()?, [[0.5, -1.0]]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn gate_after(self, gate: &'a Tensor, activation: Activation) -> Self {
        self.gated(gate, activation, Slot::After)
    }

    fn gated(self, gate: &'a Tensor, activation: Activation, slot: Slot) -> Self {
        let params = NormParams { gate: Some(Gate { activation, slot }), ..self.params };
        Norm { params, gate: Some(gate), ..self }
    }

    /// Normalizes this number of groups of columns, each with its own statistics. It divides the columns. Not with a residual
    /// after the norm.
    pub fn groups(self, groups: usize) -> Self {
        Norm { params: NormParams { groups, ..self.params }, ..self }
    }

    /// Rounds in this order, as a model's own code does: [`CastOrder`] has the equations. `AtStore`
    /// is the default.
    ///
    /// | `cast_order` | What is rounded before y | Model |
    /// |---|---|---|
    /// | `AtStore` | nothing | Gemma |
    /// | `BeforeWeight` | the normalized value | Llama |
    /// | `RstdFirst` | `1 / sqrt(..)`, and then as `BeforeWeight` | DeepSeek-V4 |
    /// | `WeightFirst` | `x * weight`, which is then normalized | Muse Spark |
    ///
    /// `WeightFirst` goes with no residual and no gate before the norm. Gradients take these
    /// roundings to have derivative 1.
    ///
    /// # Example
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use rmsnorm_candle::{CastOrder, Norm};
    /// # fn main() -> candle_core::Result<()> {
    /// let x = Tensor::new(&[[3f32, 4.0]], &Device::Cpu)?;
    /// let weight = Tensor::new(&[4f32, -3.0], &Device::Cpu)?;
    /// // x * weight = [12, -12], whose norm has the weight in it.
    /// let y = Norm::rms(0.0).cast_order(CastOrder::WeightFirst).apply(&x, &weight)?;
    /// assert_eq!(y.to_vec2::<f32>()?, [[1.0, -1.0]]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn cast_order(self, cast_order: CastOrder) -> Self {
        Norm { params: NormParams { cast_order, ..self.params }, ..self }
    }

    /// Makes y of this dtype, rounded once, not of that of `x`. A gate then has the dtype of y, and
    /// the gradient of `x` that of `x`. Not with a residual nor a gate before the norm.
    ///
    /// Kernels compute f32 from 16 bits and 16 bits from f32, with a weight of the dtype of y or
    /// f32. candle's own operations compute other pairs, other weights, and
    /// [`CastOrder::WeightFirst`] with a y of another dtype.
    ///
    /// # Example
    /// A router in f32 that reads a bf16 stream:
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use rmsnorm_candle::Norm;
    /// # fn main() -> candle_core::Result<()> {
    /// let x = Tensor::new(&[[3f32, -3.0]], &Device::Cpu)?.to_dtype(DType::BF16)?;
    /// let weight = Tensor::new(&[1f32, 0.125], &Device::Cpu)?;
    /// let y = Norm::rms(0.0).out_dtype(DType::F32).apply(&x, &weight)?;
    /// assert_eq!(y.to_vec2::<f32>()?, [[1.0, -0.125]]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn out_dtype(self, dtype: DType) -> Self {
        Norm { out_dtype: Some(dtype), ..self }
    }

    /// Computes the norm of the rows of `x`.
    ///
    /// # Errors
    /// If a shape, a dtype or a device is wrong, or `eps` is not finite or negative: [the crate](crate#errors) has the rules.
    pub fn apply(&self, x: &Tensor, weight: &Tensor) -> Result<P::Results> {
        let (y, h) = self.args(x, weight).run(self.params, self.out_dtype)?;
        match P::of(y, h) {
            Some(results) => Ok(results),
            None => bail!("{}: the call did not compute a result, which is a bug", self.params.name()),
        }
    }

    fn args<'b>(&self, x: &'b Tensor, weight: &'b Tensor) -> Args<'b>
    where
        'a: 'b,
    {
        let &Norm { bias, residual, gate, next_weight, next_bias, .. } = self;
        Args { x, residual, gate, weight, bias, next_weight, next_bias }
    }

    /// The same norm, before another piece.
    fn with<Q: Pieces>(self) -> Norm<'a, Q> {
        let Norm { params, out_dtype, bias, residual, gate, next_weight, next_bias, .. } = self;
        Norm { params, out_dtype, bias, residual, gate, next_weight, next_bias, pieces: PhantomData }
    }
}

impl Args<'_> {
    /// y and the sum, if the call has them.
    fn run(&self, params: NormParams, out_dtype: Option<DType>) -> Result<(Option<Tensor>, Option<Tensor>)> {
        if !self.has_kernels(&params, out_dtype)? {
            return self.run_slowly(&params, out_dtype.unwrap_or(self.x.dtype()));
        }
        let params = NormParams { out_dtype: out_dtype.and_then(element), ..params };
        let x = regular(self.x)?;
        let [residual, gate] = [self.residual, self.gate].map(|rows| rows.map(regular).transpose());
        let (residual, gate) = (residual?, gate?);
        let weight = self.weight.contiguous()?;
        let [bias, next_weight, next_bias] = [self.bias, self.next_weight, self.next_bias].map(contiguous);
        let (bias, next_weight, next_bias) = (bias?, next_weight?, next_bias?);
        let (bias, next_weight, next_bias) = (bias.as_ref(), next_weight.as_ref(), next_bias.as_ref());
        let Some(residual) = &residual else {
            let y = match &gate {
                Some(gate) => gated::Gated::apply(params, &x, (&weight, bias), gate)?,
                None => normalize::Normalize::apply(params, &x, &weight, bias)?,
            };
            return Ok((Some(y), None));
        };
        let gate = gate.as_ref();
        let args = Args { x: &x, residual: Some(residual), gate, weight: &weight, bias, next_weight, next_bias };
        let (y, h) = sum::apply(params, &args, residual)?;
        Ok((y, Some(h)))
    }

    /// The same with candle's operations, and y in `dtype`.
    fn run_slowly(&self, params: &NormParams, dtype: DType) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let &Args { x, residual, gate, weight, bias, next_weight, next_bias } = self;
        let Some(residual) = residual else {
            return Ok((Some(slow::normalize(params, x, gate, (weight, bias), dtype)?), None));
        };
        let (h, of_h) = match params.residual_placement {
            ResidualPlacement::Before => (slow::add(x, residual)?, Some((weight, bias))),
            ResidualPlacement::After => {
                let h = slow::normalize_add(params, x, residual, (weight, bias))?;
                (h, next_weight.map(|weight| (weight, next_bias)))
            }
        };
        let y = of_h.map(|vectors| slow::normalize(params, &h, gate, vectors, dtype)).transpose()?;
        Ok((y, Some(h)))
    }

    /// Normalizes `x` in place.
    fn overwrite(&self, params: NormParams, out_dtype: Option<DType>) -> Result<()> {
        let (has_kernels, name) = (self.has_kernels(&params, out_dtype)?, params.name());
        let &Args { x, gate, weight, bias, .. } = self;
        if gate.is_some() {
            bail!("{name} in place takes no gate: use the form that returns y");
        }
        if out_dtype.is_some() {
            bail!("{name} in place takes no out_dtype, as y has the memory of x: use the form that returns y");
        }
        if let Some((arg, _)) = self.all().find(|(_, tensor)| tensor.track_op()) {
            bail!(
                "{name} in place has no gradient, and {arg} is part of a graph: detach() it, or use the form that returns y"
            );
        }
        if !has_kernels {
            if !x.is_contiguous() {
                bail!("{name} in place with candle's own operations needs a contiguous x, got {:?}", x.layout());
            }
            let y = slow::normalize(&params, x, None, (weight, bias), x.dtype())?;
            return x.slice_set(&y, 0, 0);
        }
        if !is_regular(x.layout()) {
            let rule = "the rows of x must not overlap nor need more than two strides: use the form that returns y";
            bail!("{name} in place: {rule}, got {:?}", x.layout());
        }
        in_place::apply(params, x, &weight.contiguous()?, contiguous(bias)?.as_ref())
    }

    /// Whether our kernels take these tensors: their device and dtypes.
    ///
    /// # Errors
    /// As [`Args::check`].
    fn has_kernels(&self, params: &NormParams, out_dtype: Option<DType>) -> Result<bool> {
        self.check(params, out_dtype)?;
        let &Args { x, residual, gate, weight, .. } = self;
        let dtype = out_dtype.unwrap_or(x.dtype());
        let is_gate_like_y = gate.is_none_or(|gate| gate.dtype() == dtype);
        // No kernel multiplies x with the weight first and makes y of another dtype.
        let has_order = dtype == x.dtype() || !params.cast_order.is_weight_first();
        let is_one_dtype = self.vectors().all(|(_, vector)| vector.dtype() == weight.dtype());
        let is_on_device = x.device().is_cpu() || (cfg!(feature = "cuda") && x.device().is_cuda());
        Ok(is_on_device
            && is_one_dtype
            && is_gate_like_y
            && has_order
            && mix([dtype, weight.dtype(), residual.unwrap_or(x).dtype()], residual.is_some()).is_some())
    }
}

fn contiguous(vector: Option<&Tensor>) -> Result<Option<Tensor>> {
    vector.map(Tensor::contiguous).transpose()
}
