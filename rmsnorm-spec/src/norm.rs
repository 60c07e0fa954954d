//! The kind of norm, its size and its scalars. The tensors are in [`crate::args`].

mod unsized_norm;

pub use unsized_norm::NormParams;

use crate::{Direction, Slot};

/// The kind of normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Norm {
    /// Root-mean-square norm: rows are divided by `sqrt(avg(x^2) + eps)`; the mean is not removed.
    Rms,
    /// Layer norm: the mean of each row is subtracted, then rows are divided by
    /// `sqrt(avg((x - mean)^2) + eps)`.
    Layer,
    /// L2 norm: rows are divided by `sqrt(sum(x^2) + eps)`, as in flash-linear-attention. It is RMS
    /// norm with sums in place of averages.
    L2,
    /// L2 norm with a least divisor: rows are divided by `max(sqrt(sum(x^2)), eps)`, as in
    /// `torch.nn.functional.normalize`. `eps` is 0 or from 2^-63 to 2^63, so that f32 holds its
    /// square. With an `eps` of 0 a row of zeros becomes NaN.
    L2Clamped,
}

impl Norm {
    /// Every kind.
    pub const ALL: [Norm; 4] = [Norm::Rms, Norm::Layer, Norm::L2, Norm::L2Clamped];

    /// The two kinds that most models have. Benchmarks measure them unless others are chosen, and
    /// tests draw from them where a list of calls has fixed names.
    pub const USUAL: [Norm; 2] = [Norm::Rms, Norm::Layer];

    /// The name used in test names, bench ids and files: `rms_norm`, `layer_norm`, `l2_norm` or
    /// `l2_norm_clamped`.
    pub const fn name(self) -> &'static str {
        match self {
            Norm::Rms => "rms_norm",
            Norm::Layer => "layer_norm",
            Norm::L2 => "l2_norm",
            Norm::L2Clamped => "l2_norm_clamped",
        }
    }

    /// What the sums over a row of `cols` elements are divided by, [math](crate::math), section 1:
    /// `cols`, or 1 for both L2 norms. With groups of columns, `cols` are those of a group.
    /// ```
    /// # use rmsnorm_spec::Norm;
    /// assert_eq!([Norm::Rms, Norm::Layer, Norm::L2].map(|norm| norm.divisor(128)), [128, 128, 1]);
    /// ```
    pub const fn divisor(self, cols: usize) -> usize {
        match self {
            Norm::Rms | Norm::Layer => cols,
            Norm::L2 | Norm::L2Clamped => 1,
        }
    }

    /// From this product of rstd and eps on, backward takes a row of the clamped L2 norm as clamped:
    /// [math](crate::math), (23).
    pub const CLAMPED_FROM: f32 = 1.0 - 1.0 / (1u32 << 20) as f32;

    /// The number that forward puts beside the variance inside the root, [math](crate::math), (4)
    /// and (23): `eps`, which is added, or of the clamped L2 norm `eps^2`, the least value.
    pub const fn inside_root(self, eps: f32) -> f32 {
        match self {
            Norm::Rms | Norm::Layer | Norm::L2 => eps,
            Norm::L2Clamped => eps * eps,
        }
    }

    /// Whether a call accepts this `eps`: finite and not negative, and of the clamped L2 norm 0 or
    /// from 2^-63 to 2^63.
    /// ```
    /// # use rmsnorm_spec::Norm;
    /// assert!(Norm::L2.takes_eps(1e-30) && !Norm::L2Clamped.takes_eps(1e-30));
    /// assert!(Norm::ALL.iter().all(|norm| norm.takes_eps(0.0) && norm.takes_eps(1e-12) && !norm.takes_eps(-1.0)));
    /// ```
    pub const fn takes_eps(self, eps: f32) -> bool {
        let (least, most) = (1.0 / (1u64 << 63) as f32, (1u64 << 63) as f32);
        match self {
            Norm::Rms | Norm::Layer | Norm::L2 => eps.is_finite() && eps >= 0.0,
            Norm::L2Clamped => eps == 0.0 || eps >= least && eps <= most,
        }
    }

    /// What [`takes_eps`](Self::takes_eps) asks for, in words.
    pub const fn eps_rule(self) -> &'static str {
        match self {
            Norm::Rms | Norm::Layer | Norm::L2 => "finite and not negative",
            Norm::L2Clamped => "0 or from 2^-63 to 2^63, as f32 holds its square",
        }
    }

    /// Whether backward takes the norm of a row with this `rstd` as clamped, so that rstd is a
    /// constant: [math](crate::math), (23).
    /// ```
    /// # use rmsnorm_spec::Norm;
    /// let (at_most_eps, more) = (1.0 / 0.5, 1.0 / 0.6);
    /// assert_eq!([at_most_eps, more].map(|rstd| Norm::L2Clamped.is_clamped(rstd, 0.5)), [true, false]);
    /// assert!(!Norm::L2.is_clamped(at_most_eps, 0.5));
    /// ```
    pub fn is_clamped(self, rstd: f32, eps: f32) -> bool {
        match self {
            Norm::Rms | Norm::Layer | Norm::L2 => false,
            Norm::L2Clamped => rstd * eps >= Norm::CLAMPED_FROM,
        }
    }

    /// The number of statistics of a row, if columns are divided among ranks. Forward: the sum of
    /// squares, or layer norm's three, [math](crate::math), (15). Backward: the sum of
    /// `wdy * x_hat`, and layer norm's of `wdy`, (17).
    pub const fn statistics_len(self, direction: Direction) -> usize {
        match (self, direction) {
            (Norm::Rms | Norm::L2 | Norm::L2Clamped, _) => 1,
            (Norm::Layer, Direction::Backward) => 2,
            (Norm::Layer, Direction::Forward | Direction::QuantizedForward) => 3,
        }
    }

    /// The norm of that [`name`](Self::name), if there is one.
    /// ```
    /// # use rmsnorm_spec::Norm;
    /// assert_eq!(Norm::ALL.map(|norm| Norm::from_name(norm.name())), Norm::ALL.map(Some));
    /// assert_eq!(Norm::from_name("rms"), None);
    /// ```
    pub fn from_name(name: &str) -> Option<Norm> {
        Norm::ALL.into_iter().find(|norm| norm.name() == name)
    }
}

/// The rounding of the normalized value before `y` ([math](crate::math), section 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CastOrder {
    /// Everything in f32, with one rounding at the store of `y`, as in Gemma, TransformerEngine and
    /// Quack.
    #[default]
    AtStore,
    /// `x_hat` is rounded to the dtype of `y` before the multiplication with the weight, and the
    /// result is rounded again at the store, as in Llama and ONNX. Forward only: the backward pass
    /// does not depend on it.
    /// ```
    /// # use rmsnorm_spec::{CastOrder, NormSpec};
    /// let llama = NormSpec::rms(8, 4096, 1e-5).cast_order(CastOrder::BeforeWeight);
    /// # assert_eq!(llama.cast_order, CastOrder::BeforeWeight);
    /// ```
    BeforeWeight,
    /// `rstd` is rounded to the dtype of `y` first, then as `BeforeWeight`: as in DeepSeek-V4 and
    /// GLM-5-next. The stored `rstd` is not rounded. Forward only: the backward pass does not
    /// depend on it.
    RstdFirst,
    /// `x * weight`, rounded to the dtype of `x`, is normalized: the weight comes before the
    /// statistics, as in Muse Spark. Backward depends on it, and reads the `x` of forward. Needs a
    /// weight.
    /// ```
    /// # use rmsnorm_spec::{CastOrder, NormSpec};
    /// let muse_spark = NormSpec::rms(8, 4096, 1e-5).weight_offset(1.0).cast_order(CastOrder::WeightFirst);
    /// # assert_eq!(muse_spark.cast_order, CastOrder::WeightFirst);
    /// ```
    WeightFirst,
}

impl CastOrder {
    /// Every cast order.
    pub const ALL: [CastOrder; 4] =
        [CastOrder::AtStore, CastOrder::BeforeWeight, CastOrder::RstdFirst, CastOrder::WeightFirst];

    /// The name in ids, reports and files.
    pub const fn name(self) -> &'static str {
        match self {
            CastOrder::AtStore => "at_store",
            CastOrder::BeforeWeight => "before_weight",
            CastOrder::RstdFirst => "rstd_first",
            CastOrder::WeightFirst => "weight_first",
        }
    }

    /// The cast order of that [`name`](Self::name), if there is one.
    /// ```
    /// # use rmsnorm_spec::CastOrder;
    /// assert_eq!(CastOrder::ALL.map(|order| CastOrder::from_name(order.name())), CastOrder::ALL.map(Some));
    /// assert_eq!(CastOrder::from_name("never"), None);
    /// ```
    pub fn from_name(name: &str) -> Option<CastOrder> {
        CastOrder::ALL.into_iter().find(|order| order.name() == name)
    }

    /// Whether `x_hat` is rounded to the dtype of `y`, and so is its product with the weight where
    /// a gate multiplies it.
    pub const fn rounds_x_hat(self) -> bool {
        match self {
            CastOrder::AtStore | CastOrder::WeightFirst => false,
            CastOrder::BeforeWeight | CastOrder::RstdFirst => true,
        }
    }

    /// Whether the `rstd` that makes `x_hat` is rounded to the dtype of `y`.
    pub const fn rounds_rstd(self) -> bool {
        match self {
            CastOrder::AtStore | CastOrder::BeforeWeight | CastOrder::WeightFirst => false,
            CastOrder::RstdFirst => true,
        }
    }

    /// Whether the weight multiplies `x` before the statistics, not the normalized row.
    pub const fn is_weight_first(self) -> bool {
        match self {
            CastOrder::AtStore | CastOrder::BeforeWeight | CastOrder::RstdFirst => false,
            CastOrder::WeightFirst => true,
        }
    }
}

/// The place of the residual addition: before the norm in pre-norm models, after it in post-norm
/// models.
///
/// # Example
/// Gemma's two norms around a residual: `h = residual + norm(x) * weight`,
/// `y = norm(h) * next_weight`.
/// ```
/// # use rmsnorm_spec::{Error, Forward, NormBackend, NormSpec};
/// fn around<B>(
///     backend: &B, x: &[f32], residual: &mut [f32], [weight, next_weight]: [&[f32]; 2], y: &mut [f32],
/// ) -> Result<(), Error>
/// where
///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
/// {
///     let spec = NormSpec::rms(x.len() / weight.len(), weight.len(), 1e-6).weight_offset(1.0).residual_after();
///     let args = Forward::<_, f32>::new(x, y).weight(weight).next_weight(next_weight);
///     backend.forward(&spec, args.residual_in_place(residual))
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ResidualPlacement {
    /// `x + residual` is normalized: [math](crate::math), equation (1).
    #[default]
    Before,
    /// The unrounded norm of `x` is added to `residual`: equation (13). If the call has `y`, it is
    /// the next norm, of the rounded sum: (14). Backward differentiates the first norm: its `dy` is
    /// the gradient of the sum, which is also the residual's.
    After,
}

/// The function that the gate `z` of a gated norm goes through: [math](crate::math), equation (19).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `z * sigmoid(z)`, also called swish.
    Silu,
    /// `1 / (1 + exp(-z))`.
    Sigmoid,
}

impl Activation {
    /// Every activation.
    pub const ALL: [Activation; 2] = [Activation::Silu, Activation::Sigmoid];

    /// The name in reports and files: `silu` or `sigmoid`.
    pub const fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::Sigmoid => "sigmoid",
        }
    }

    /// The activation of that [`name`](Self::name), if there is one.
    /// ```
    /// # use rmsnorm_spec::Activation;
    /// assert_eq!(Activation::ALL.map(|each| Activation::from_name(each.name())), Activation::ALL.map(Some));
    /// assert_eq!(Activation::from_name("swish"), None);
    /// ```
    pub fn from_name(name: &str) -> Option<Activation> {
        Activation::ALL.into_iter().find(|activation| activation.name() == name)
    }
}

/// A multiplication with an activated gate, before or after the norm: [math](crate::math), equation
/// (19).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gate {
    /// The function of the gate.
    pub activation: Activation,
    /// Before the norm as in Mamba2, or after it as in Qwen3-Next.
    pub slot: Slot,
}

/// How the gradients of weight and bias are summed over the rows. A backend ignores it in a call
/// that needs no partial sums.
///
/// # Example
/// ```
/// # use rmsnorm_spec::{Backward, Error, GradReduction, NormBackend, NormSpec};
/// /// Backward with atomic additions, or with partial sums where the backend has no atomics.
/// fn gradients<B>(
///     backend: &B, dy: &[f32], x: &[f32], rstd: &[f32], dx: &mut [f32], dweight: &mut [f32],
/// ) -> Result<(), Error>
/// where
///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
/// {
///     let spec = NormSpec::rms(rstd.len(), dweight.len(), 1e-6);
///     let args = Backward::<_, f32>::new(dy, x, rstd, &mut *dx).dweight(&mut *dweight);
///     match backend.backward(&spec, args.grad_reduction(GradReduction::Atomics)) {
///         Err(Error::Unsupported { .. }) => {
///             backend.backward(&spec, Backward::<_, f32>::new(dy, x, rstd, dx).dweight(dweight))
///         }
///         done => done,
///     }
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GradReduction {
    /// f32 partial sums of groups of rows, added in a fixed order by a second stage. Deterministic.
    #[default]
    Partials,
    /// `groups` f32 buffers, each behind a spin lock, added by a second stage. The order of
    /// additions and the last bits vary from run to run.
    Locks {
        /// The number of buffers that share the rows; at least 1.
        groups: u32,
    },
    /// f32 atomic additions into one or a few buffers. The order of additions and the last bits
    /// vary from run to run.
    Atomics,
}

/// How the gradients of weight and bias are stored after the sum over the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GradStore {
    /// Rounded to the dtype of the weight: [`Backward::dweight`](crate::Backward::dweight).
    #[default]
    Rounded,
    /// As unrounded f32 sums: [`Backward::dweight_sum`](crate::Backward::dweight_sum).
    Sum,
    /// Added in f32 to the values in the buffer:
    /// [`Backward::accumulate`](crate::Backward::accumulate).
    Accumulated,
}

/// A normalization of `rows` rows of `cols` elements, without the tensors.
///
/// `cols` is the hidden size (PyTorch's `normalized_shape`), `rows` the product of all other
/// dimensions. Fields are public. Make a spec with [`rms`](Self::rms), [`layer`](Self::layer),
/// [`l2`](Self::l2) or [`new`](Self::new), since fields may be added.
///
/// # Example
/// A batch of 8 sequences of 512 tokens, with the norms of GPT-2 and of Gemma:
/// ```
/// # use rmsnorm_spec::{Norm, NormSpec};
/// let gpt2 = NormSpec::layer(8 * 512, 768, 1e-5);
/// let gemma = NormSpec::rms(8 * 512, 2048, 1e-6).weight_offset(1.0);
/// assert_eq!((gpt2.norm, gemma.norm, gemma.rows), (Norm::Layer, Norm::Rms, 4096));
/// let one_row = gemma.rows(1);
/// assert_eq!((one_row.rows, one_row.cols), (1, 2048));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct NormSpec {
    /// The kind of norm.
    pub norm: Norm,
    /// The number of rows. With 0 rows a call writes only `dweight` and `dbias`, which become zero.
    pub rows: usize,
    /// The length of a row, at least 1.
    pub cols: usize,
    /// Added to the variance, or to L2 norm's sum, inside the root; the least divisor of the clamped
    /// L2 norm. [`Norm::takes_eps`] has its limits: finite and not negative. It has no default, because
    /// models differ.
    pub eps: f32,
    /// Added to every weight in f32: 0 for most models, 1 for Gemma. No effect without a weight.
    pub weight_offset: f32,
    /// The roundings on the way to `y`.
    pub cast_order: CastOrder,
    /// The place of the residual addition.
    pub residual_placement: ResidualPlacement,
    /// The multiplication with an activated gate, if there is one.
    pub gate: Option<Gate>,
    /// The number of groups of columns, which divides `cols`: each group of `cols / groups` columns
    /// has its own mean and rstd. 1 for most models. Weight and bias have `cols` elements.
    pub groups: usize,
}

impl NormSpec {
    /// An RMS norm over `rows` rows of `cols` elements.
    pub const fn rms(rows: usize, cols: usize, eps: f32) -> Self {
        NormSpec::new(Norm::Rms, rows, cols, eps)
    }

    /// A layer norm over `rows` rows of `cols` elements.
    pub const fn layer(rows: usize, cols: usize, eps: f32) -> Self {
        NormSpec::new(Norm::Layer, rows, cols, eps)
    }

    /// An L2 norm over `rows` rows of `cols` elements: `x / sqrt(sum(x^2) + eps)`.
    ///
    /// # Example
    /// The heads of queries and keys in a gated delta net:
    /// ```
    /// # use rmsnorm_spec::{Norm, NormSpec};
    /// let heads = NormSpec::l2(512 * 16, 128, 1e-6);
    /// assert_eq!((heads.norm, heads.norm.divisor(heads.cols)), (Norm::L2, 1));
    /// ```
    pub const fn l2(rows: usize, cols: usize, eps: f32) -> Self {
        NormSpec::new(Norm::L2, rows, cols, eps)
    }

    /// A clamped L2 norm over `rows` rows of `cols` elements: `x / max(sqrt(sum(x^2)), eps)`.
    pub const fn l2_clamped(rows: usize, cols: usize, eps: f32) -> Self {
        NormSpec::new(Norm::L2Clamped, rows, cols, eps)
    }

    /// A norm of that kind over `rows` rows of `cols` elements, with no weight offset, the default
    /// cast order, and residuals added before the norm.
    pub const fn new(norm: Norm, rows: usize, cols: usize, eps: f32) -> Self {
        let (cast_order, residual_placement) = (CastOrder::AtStore, ResidualPlacement::Before);
        NormSpec { norm, rows, cols, eps, weight_offset: 0.0, cast_order, residual_placement, gate: None, groups: 1 }
    }

    /// With this number of groups of columns, each with its own statistics: as in Mamba2, whose
    /// `norm` has `n_groups`.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_spec::{Activation, NormSpec};
    /// let mamba2 = NormSpec::rms(512, 4096, 1e-5).groups(8).gate_before(Activation::Silu);
    /// assert_eq!(mamba2.cols / mamba2.groups, 512);
    /// ```
    pub const fn groups(self, groups: usize) -> Self {
        NormSpec { groups, ..self }
    }

    /// With this number of rows: the same norm on another batch.
    pub const fn rows(self, rows: usize) -> Self {
        NormSpec { rows, ..self }
    }

    /// With rows of this length.
    pub const fn cols(self, cols: usize) -> Self {
        NormSpec { cols, ..self }
    }

    /// With this value added to the variance.
    pub const fn eps(self, eps: f32) -> Self {
        NormSpec { eps, ..self }
    }

    /// With this value added to every weight.
    pub const fn weight_offset(self, weight_offset: f32) -> Self {
        NormSpec { weight_offset, ..self }
    }

    /// With this cast order.
    pub const fn cast_order(self, cast_order: CastOrder) -> Self {
        NormSpec { cast_order, ..self }
    }

    /// With the residual added after the norm.
    pub const fn residual_after(self) -> Self {
        NormSpec { residual_placement: ResidualPlacement::After, ..self }
    }

    /// With the result multiplied by an activated gate: `y = norm(x) * activation(gate)`.
    ///
    /// # Example
    /// The gated norm of Qwen3-Next:
    /// ```
    /// # use rmsnorm_spec::{Activation, Error, Forward, NormBackend, NormSpec};
    /// fn gated<B>(backend: &B, x: &[f32], gate: &[f32], weight: &[f32], y: &mut [f32]) -> Result<(), Error>
    /// where
    ///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
    /// {
    ///     let spec = NormSpec::rms(x.len() / weight.len(), weight.len(), 1e-6).gate_after(Activation::Silu);
    ///     backend.forward(&spec, Forward::<_, f32>::new(x, y).gate(gate).weight(weight))
    /// }
    /// ```
    pub const fn gate_after(self, activation: Activation) -> Self {
        NormSpec { gate: Some(Gate { activation, slot: Slot::After }), ..self }
    }

    /// With `x` multiplied by an activated gate before the norm, as in Mamba2:
    /// `y = norm(x * activation(gate))`.
    pub const fn gate_before(self, activation: Activation) -> Self {
        NormSpec { gate: Some(Gate { activation, slot: Slot::Before }), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each method sets its own field and leaves the others, in either order.
    #[test]
    fn methods_set_their_field_and_no_other() {
        for (norm, spec) in [
            (Norm::Rms, NormSpec::rms(2, 3, 1e-6)),
            (Norm::Layer, NormSpec::layer(2, 3, 1e-6)),
            (Norm::L2, NormSpec::l2(2, 3, 1e-6)),
            (Norm::L2Clamped, NormSpec::l2_clamped(2, 3, 1e-6)),
        ] {
            let expected = NormSpec {
                norm,
                rows: 2,
                cols: 3,
                eps: 1e-6,
                weight_offset: -0.5,
                cast_order: CastOrder::BeforeWeight,
                residual_placement: ResidualPlacement::Before,
                gate: None,
                groups: 1,
            };
            assert_eq!(spec, NormSpec { weight_offset: 0.0, cast_order: CastOrder::AtStore, ..expected });
            let after = NormSpec { residual_placement: ResidualPlacement::After, ..spec };
            assert_eq!((spec.residual_after(), after.residual_after()), (after, after));
            let gated = |activation, slot| NormSpec { gate: Some(Gate { activation, slot }), ..spec };
            assert_eq!(spec.gate_after(Activation::Silu), gated(Activation::Silu, Slot::After));
            assert_eq!(spec.gate_before(Activation::Sigmoid), gated(Activation::Sigmoid, Slot::Before));
            assert_eq!(spec.weight_offset(-0.5).cast_order(CastOrder::BeforeWeight), expected);
            assert_eq!(spec.cast_order(CastOrder::BeforeWeight).weight_offset(-0.5), expected);
            assert_eq!(spec.rows(5).cols(7).eps(0.5), NormSpec { rows: 5, cols: 7, eps: 0.5, ..spec });
            assert_eq!(spec.groups(3), NormSpec { groups: 3, ..spec });
            assert_eq!(NormSpec::new(norm, 2, 3, 1e-6), spec);
        }
    }
}
