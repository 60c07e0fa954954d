//! A norm as a value, and the choice of our kernels or burn's operations.

use std::fmt::Debug;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};
use rmsnorm_core::{Activation, CastOrder, Gate, NormParams, ResidualPlacement, Slot};

use crate::check::{Args, given, or_panic};
use crate::kernels::{Maybe, Optional};
use crate::native::{element, mix};
use crate::ops::NormOps;
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
/// once, unless a [`cast_order`](Norm::cast_order) rounds more. On the CPU the bits equal those of
/// a call for each piece.
///
/// # Gradients
/// Every tensor has one, from either result or both. The gradient of an f32 residual with 16-bit activations is never rounded to 16 bits.
/// After a norm, the gradient of h passes unchanged to the residual, and in the dtype of `x` to the norm. See [the crate](crate) for dtypes,
/// devices and memory.
///
/// # Panics
/// As [the crate](crate#panics) says.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use rmsnorm_burn::Norm;
///
/// let device = Device::flex();
/// let (x, residual) = (Tensor::<2>::from_floats([[1.0, 3.0]], &device), Tensor::<2>::from_floats([[3.0, 5.0]], &device));
/// let ones = || Tensor::<1>::ones([2], &device);
/// let norm = Norm::layer(0.0).residual_after(residual).next_norm(ones()).next_bias(ones());
/// let (y, h) = norm.apply(x, ones());
/// assert_eq!(y.into_data().try_to_vec::<f32>().unwrap(), [0.0, 2.0]);
/// assert_eq!(h.into_data().try_to_vec::<f32>().unwrap(), [2.0, 6.0]);
/// ```
#[derive(Clone, Debug)]
pub struct Norm<P: Pieces = Alone> {
    params: NormParams,
    /// Of y.
    out_dtype: Option<DType>,
    bias: Option<Tensor<1>>,
    pieces: P,
}

/// The pieces of a [`Norm`], with their tensors.
pub trait Pieces: Clone + Debug {}

/// [`Pieces`] of a norm without a residual: [`Norm::apply`] returns y.
#[derive(Clone, Debug)]
pub struct Alone;

/// [`Pieces`] of [`Norm::gate_after`] and [`Norm::gate_before`]: [`Norm::apply`] returns y.
#[derive(Clone, Debug)]
pub struct Gated<const D: usize>(Tensor<D>);

/// [`Pieces`] of [`Norm::residual`]: [`Norm::apply`] returns y and h.
#[derive(Clone, Debug)]
pub struct Added<const D: usize> {
    residual: Tensor<D>,
    gate: Option<Tensor<D>>,
}

/// [`Pieces`] of [`Norm::residual_after`]: [`Norm::apply`] returns h.
#[derive(Clone, Debug)]
pub struct AddedAfter<const D: usize>(Tensor<D>);

/// [`Pieces`] of [`Norm::next_norm`]: [`Norm::apply`] returns y and h.
#[derive(Clone, Debug)]
pub struct NormedAgain<const D: usize> {
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
}

impl Pieces for Alone {}
impl<const D: usize> Pieces for Gated<D> {}
impl<const D: usize> Pieces for Added<D> {}
impl<const D: usize> Pieces for AddedAfter<D> {}
impl<const D: usize> Pieces for NormedAgain<D> {}

impl Norm {
    /// `x / sqrt(avg(x^2) + eps) * weight`.
    pub const fn rms(eps: f64) -> Self {
        Norm::new(NormParams::new(rmsnorm_core::Norm::Rms, eps))
    }

    /// The RMS norm with `1 + weight`, added in f32 and not rounded, as in Gemma.
    pub const fn gemma(eps: f64) -> Self {
        Norm::new(NormParams::gemma(eps))
    }

    /// `(x - mean) / sqrt(var + eps) * weight`, and a [`bias`](Self::bias).
    pub const fn layer(eps: f64) -> Self {
        Norm::new(NormParams::new(rmsnorm_core::Norm::Layer, eps))
    }

    /// `x / sqrt(sum(x^2) + eps) * weight`, as in flash-linear-attention.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use rmsnorm_burn::Norm;
    ///
    /// let device = Device::flex();
    /// let x = Tensor::<2>::from_floats([[0.0, -4.0]], &device);
    /// let y = Norm::l2(0.0).apply(x, Tensor::ones([2], &device));
    /// assert_eq!(y.into_data().try_to_vec::<f32>().unwrap(), [0.0, -1.0]);
    /// ```
    pub const fn l2(eps: f64) -> Self {
        Norm::new(NormParams::new(rmsnorm_core::Norm::L2, eps))
    }

    /// `x / max(sqrt(sum(x^2)), eps) * weight`, as in PyTorch's `F.normalize`. `eps` is 0 or from
    /// 2^-63 to 2^63. The gradient of a clamped row takes the divisor as a constant.
    pub const fn l2_clamped(eps: f64) -> Self {
        Norm::new(NormParams::new(rmsnorm_core::Norm::L2Clamped, eps))
    }

    const fn new(params: NormParams) -> Self {
        Norm { params, out_dtype: None, bias: None, pieces: Alone }
    }

    /// Normalizes `h = residual + x`, rounded to the dtype of the residual.
    pub fn residual<const D: usize>(self, residual: Tensor<D>) -> Norm<Added<D>> {
        self.with(|_| Added { residual, gate: None })
    }

    /// Multiplies the norm by an activation of the gate, as Qwen3-Next does: `y = norm(x) * activation(gate)`.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use rmsnorm_burn::{Activation, Norm};
    ///
    /// let device = Device::flex();
    /// let (x, gate) = (Tensor::<2>::from_floats([[3.0, -3.0]], &device), Tensor::<2>::zeros([1, 2], &device));
    /// let weight = Tensor::<1>::from_floats([1.0, 2.0], &device);
    /// let y = Norm::rms(0.0).gate_after(gate, Activation::Sigmoid).apply(x, weight);
    /// assert_eq!(y.into_data().try_to_vec::<f32>().unwrap(), [0.5, -1.0]);
    /// ```
    pub fn gate_after<const D: usize>(self, gate: Tensor<D>, activation: Activation) -> Norm<Gated<D>> {
        self.gated(activation, Slot::After).with(|_| Gated(gate))
    }

    /// Multiplies `x` by an activation of the gate before the norm, as Mamba2 does. The product is not rounded. Not with a
    /// residual.
    pub fn gate_before<const D: usize>(self, gate: Tensor<D>, activation: Activation) -> Norm<Gated<D>> {
        self.gated(activation, Slot::Before).with(|_| Gated(gate))
    }

    /// Adds the norm to the residual: `h = residual + norm(x)`.
    pub fn residual_after<const D: usize>(self, residual: Tensor<D>) -> Norm<AddedAfter<D>> {
        Norm { params: self.params.residual_after(), ..self }.with(|_| AddedAfter(residual))
    }

    /// Computes y of the rows of `x`.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn apply<const D: usize>(self, x: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
        given("y", Args::of(x, weight, self.bias).run(self.params, self.out_dtype).0)
    }
}

impl<const D: usize> Norm<Gated<D>> {
    /// Normalizes `h = residual + x`, rounded to the dtype of the residual. Not with a gate before the norm.
    pub fn residual(self, residual: Tensor<D>) -> Norm<Added<D>> {
        self.with(|Gated(gate)| Added { residual, gate: Some(gate) })
    }

    /// Computes y of the rows of `x`.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn apply(self, x: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
        let args = Args { gate: Some(self.pieces.0), ..Args::of(x, weight, self.bias) };
        given("y", args.run(self.params, self.out_dtype).0)
    }
}

impl<const D: usize> Norm<Added<D>> {
    /// Multiplies the norm of h by an activation of the gate.
    pub fn gate_after(self, gate: Tensor<D>, activation: Activation) -> Self {
        self.gated(activation, Slot::After).with(|pieces| Added { gate: Some(gate), ..pieces })
    }

    /// Computes y and h of the rows of `x`.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn apply(self, x: Tensor<D>, weight: Tensor<1>) -> (Tensor<D>, Tensor<D>) {
        let Added { residual, gate } = self.pieces;
        let args = Args { residual: Some(residual), gate, ..Args::of(x, weight, self.bias) };
        both(args.run(self.params, self.out_dtype))
    }
}

impl<const D: usize> Norm<AddedAfter<D>> {
    /// Normalizes that sum as well, with the same options and this weight. Weights that differ in dtype take burn's own
    /// operations. On wgpu two layer norms need a device with 12 storage buffers.
    pub fn next_norm(self, weight: Tensor<1>) -> Norm<NormedAgain<D>> {
        self.with(|AddedAfter(residual)| NormedAgain { residual, weight, bias: None })
    }

    /// Computes h of the rows of `x`.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn apply(self, x: Tensor<D>, weight: Tensor<1>) -> Tensor<D> {
        let args = Args { residual: Some(self.pieces.0), ..Args::of(x, weight, self.bias) };
        given("residual_out", args.run(self.params, self.out_dtype).1)
    }
}

impl<const D: usize> Norm<NormedAgain<D>> {
    /// Adds a bias to the next norm. `None` is none.
    pub fn next_bias(self, bias: impl Into<Option<Tensor<1>>>) -> Self {
        Norm { pieces: NormedAgain { bias: bias.into(), ..self.pieces }, ..self }
    }

    /// Computes y and h of the rows of `x`.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn apply(self, x: Tensor<D>, weight: Tensor<1>) -> (Tensor<D>, Tensor<D>) {
        let NormedAgain { residual, weight: next_weight, bias: next_bias } = self.pieces;
        let args = Args {
            residual: Some(residual),
            next_weight: Some(next_weight),
            next_bias,
            ..Args::of(x, weight, self.bias)
        };
        both(args.run(self.params, self.out_dtype))
    }
}

impl<P: Pieces> Norm<P> {
    /// Adds a bias to the norm of `x` or, with [`residual`](Norm::residual), of h. `None` is none.
    pub fn bias(self, bias: impl Into<Option<Tensor<1>>>) -> Self {
        Norm { bias: bias.into(), ..self }
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
    /// use burn::tensor::{Device, Tensor};
    /// use rmsnorm_burn::{CastOrder, Norm};
    ///
    /// let device = Device::flex();
    /// let x = Tensor::<2>::from_floats([[3.0, 4.0]], &device);
    /// // x * weight = [12, -12], whose norm has the weight in it.
    /// let norm = Norm::rms(0.0).cast_order(CastOrder::WeightFirst);
    /// let y = norm.apply(x, Tensor::<1>::from_floats([4.0, -3.0], &device));
    /// assert_eq!(y.into_data().try_to_vec::<f32>().unwrap(), [1.0, -1.0]);
    /// ```
    pub fn cast_order(self, cast_order: CastOrder) -> Self {
        Norm { params: NormParams { cast_order, ..self.params }, ..self }
    }

    /// Makes y of this dtype, rounded once, not of that of `x`. A gate then has the dtype of y, and
    /// the gradient of `x` that of `x`. Not with a residual nor a gate before the norm.
    ///
    /// Kernels compute f32 from 16 bits and 16 bits from f32, with a weight of the dtype of y or
    /// f32. burn's own operations compute other pairs, other weights, and
    /// [`CastOrder::WeightFirst`] with a y of another dtype.
    ///
    /// # Example
    /// A router in f32 that reads a bf16 stream:
    /// ```
    /// use burn::tensor::{DType, Device, Tensor};
    /// use rmsnorm_burn::Norm;
    ///
    /// let device = Device::flex();
    /// let x = Tensor::<2>::from_floats([[3.0, -3.0]], &device).cast(DType::BF16);
    /// let weight = Tensor::<1>::from_floats([1.0, 0.125], &device);
    /// let y = Norm::rms(0.0).out_dtype(DType::F32).apply(x, weight);
    /// assert_eq!(y.into_data().try_to_vec::<f32>().unwrap(), [1.0, -0.125]);
    /// ```
    pub fn out_dtype(self, dtype: DType) -> Self {
        Norm { out_dtype: Some(dtype), ..self }
    }

    fn gated(self, activation: Activation, slot: Slot) -> Self {
        Norm { params: NormParams { gate: Some(Gate { activation, slot }), ..self.params }, ..self }
    }

    /// The same norm with other pieces.
    fn with<Q: Pieces>(self, pieces: impl FnOnce(P) -> Q) -> Norm<Q> {
        Norm { params: self.params, out_dtype: self.out_dtype, bias: self.bias, pieces: pieces(self.pieces) }
    }
}

/// y and the sum of a call that has both.
fn both<const D: usize>((y, sum): (Option<Tensor<D>>, Option<Tensor<D>>)) -> (Tensor<D>, Tensor<D>) {
    (given("y", y), given("residual_out", sum))
}

impl<const D: usize> Args<D> {
    /// y and the sum, if the call has them.
    fn run(self, spec: NormParams, out_dtype: Option<DType>) -> (Option<Tensor<D>>, Option<Tensor<D>>) {
        or_panic(self.check(&spec, out_dtype));
        let dtype = out_dtype.unwrap_or(self.x.dtype());
        if !self.has_kernels(&spec, dtype) {
            return self.run_slowly(&spec, dtype);
        }
        let spec = NormParams { out_dtype: out_dtype.and_then(element), ..spec };
        let Args { x, residual, gate, weight, bias, next_weight, next_bias } = self;
        let [residual, gate] = [residual, gate].map(|rows| Maybe::of(rows.map(Tensor::into_dispatch)));
        let vectors = [bias, next_weight, next_bias].map(|vector| Maybe::of(vector.map(Tensor::into_dispatch)));
        let ([bias, next_weight, next_bias], x, weight) = (vectors, x.into_dispatch(), weight.into_dispatch());
        let made = Dispatch::norm(x, weight, Optional { residual, gate, bias, next_weight, next_bias }, spec);
        let [y, sum] = [made.y, made.residual_out].map(|tensor| tensor.into_option().map(Tensor::from_dispatch));
        (y, sum)
    }

    /// The same with burn's operations, and y in `dtype`.
    fn run_slowly(self, spec: &NormParams, dtype: DType) -> (Option<Tensor<D>>, Option<Tensor<D>>) {
        let Args { x, residual, gate, weight, bias, next_weight, next_bias } = self;
        let Some(residual) = residual else {
            return (Some(slow::normalize(spec, x, gate, (weight, bias), dtype)), None);
        };
        let (sum, of_sum) = match spec.residual_placement {
            ResidualPlacement::Before => (slow::add(x, residual), Some((weight, bias))),
            ResidualPlacement::After => {
                let sum = slow::normalize_add(spec, x, residual, (weight, bias));
                (sum, next_weight.map(|weight| (weight, next_bias)))
            }
        };
        let y = of_sum.map(|vectors| slow::normalize(spec, sum.clone(), gate, vectors, dtype));
        (y, Some(sum))
    }

    /// Whether our kernels take these tensors, and make y of `dtype`: their device and dtypes.
    fn has_kernels(&self, spec: &NormParams, dtype: DType) -> bool {
        let Args { x, residual, gate, weight, .. } = self;
        gate.as_ref().is_none_or(|gate| gate.dtype() == dtype)
            // No kernel multiplies x with the weight first and makes y of another dtype.
            && (dtype == x.dtype() || !spec.cast_order.is_weight_first())
            && self.vectors().all(|(_, vector)| vector.dtype() == weight.dtype())
            && mix([dtype, weight.dtype(), residual.as_ref().unwrap_or(x).dtype()], residual.is_some()).is_some()
            // With or without autodiff.
            && (x.device() == Device::flex() || self.is_shared(spec))
    }

    /// Whether the tensors are on a shared device. Under fusion, burn would report a wrong device
    /// only later.
    #[cfg(feature = "wgpu")]
    fn is_shared(&self, spec: &NormParams) -> bool {
        // wgpu has no empty buffers.
        let is_shared = self.x.shape().num_elements() > 0 && crate::wgpu::has_kernels(&self.x.device());
        if is_shared {
            or_panic(self.check_devices(spec));
        }
        is_shared
    }

    #[cfg(not(feature = "wgpu"))]
    fn is_shared(&self, _: &NormParams) -> bool {
        false
    }
}
