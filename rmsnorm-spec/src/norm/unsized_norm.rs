//! [`NormParams`]: a norm of tensors whose shapes are not known yet.

use super::{CastOrder, Gate, Norm, NormSpec, ResidualPlacement};
use crate::problem::{check_cast_pieces, check_weight_first};
use crate::{DType, Error, RowLayout};

/// A [`NormSpec`] without its size, for libraries that read the size from their tensors: the
/// adapters of candle and burn. `eps` is f64 as in these libraries; [`sized`](Self::sized) rounds
/// it to f32.
///
/// # Example
/// ```
/// # use rmsnorm_spec::{NormSpec, RowLayout, NormParams};
/// # fn main() -> Option<()> {
/// let gemma = NormParams::gemma(1e-6);
/// assert!(gemma.has_valid_eps());
/// assert_eq!(gemma.sized(&RowLayout::dense(&[2, 3, 64])?), NormSpec::rms(6, 64, 1e-6).weight_offset(1.0));
/// # Some(())
/// # }
/// # main().unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormParams {
    /// The kind of norm.
    pub norm: Norm,
    /// As [`NormSpec::eps`].
    pub eps: f64,
    /// As [`NormSpec::weight_offset`].
    pub weight_offset: f32,
    /// As [`NormSpec::residual_placement`].
    pub residual_placement: ResidualPlacement,
    /// As [`NormSpec::gate`].
    pub gate: Option<Gate>,
    /// As [`NormSpec::groups`].
    pub groups: usize,
    /// As [`NormSpec::cast_order`].
    pub cast_order: CastOrder,
    /// The dtype of `y`, if it is not that of `x`. [`sized`](Self::sized) leaves it out: the views
    /// of a call have their dtypes.
    pub out_dtype: Option<DType>,
}

impl NormParams {
    /// A norm of that kind, with no weight offset, residuals added before the norm, no gate, one
    /// group of columns, the default cast order, and `y` in the dtype of `x`.
    pub const fn new(norm: Norm, eps: f64) -> Self {
        let (residual_placement, cast_order) = (ResidualPlacement::Before, CastOrder::AtStore);
        let (weight_offset, gate, out_dtype) = (0.0, None, None);
        NormParams { norm, eps, weight_offset, residual_placement, gate, groups: 1, cast_order, out_dtype }
    }

    /// RMS norm with `1 + weight`.
    pub const fn gemma(eps: f64) -> Self {
        NormParams { weight_offset: 1.0, ..NormParams::new(Norm::Rms, eps) }
    }

    /// With the residual added after the norm.
    pub const fn residual_after(self) -> Self {
        NormParams { residual_placement: ResidualPlacement::After, ..self }
    }

    /// Whether a call accepts `eps`, as an f32: [`Norm::takes_eps`].
    pub const fn has_valid_eps(&self) -> bool {
        self.eps >= 0.0 && self.norm.takes_eps(self.eps as f32)
    }

    /// Refuses pieces that no call combines, also where a library computes the norm with operations
    /// of its own: a weight before the norm, or a `y` of another dtype than `x`, beside a residual
    /// or a gate before the norm.
    ///
    /// # Errors
    /// `Unsupported`.
    /// ```
    /// # use rmsnorm_spec::{CastOrder, NormParams};
    /// let cast_order = CastOrder::WeightFirst;
    /// let muse_spark = NormParams { cast_order, ..NormParams::gemma(1e-6) };
    /// assert!(muse_spark.check_pieces(false, false).is_ok());
    /// assert!(muse_spark.check_pieces(true, false).is_err(), "with a residual");
    /// assert!(NormParams::gemma(1e-6).check_pieces(true, true).is_err(), "y of another dtype");
    /// ```
    pub fn check_pieces(&self, has_residual: bool, has_out_dtype: bool) -> Result<(), Error> {
        let spec = self.with_size(0, 1);
        check_weight_first(&spec, true, has_residual, false)?;
        if has_out_dtype { check_cast_pieces(&spec, has_residual) } else { Ok(()) }
    }

    /// The spec of this norm for these rows.
    pub const fn sized(&self, rows: &RowLayout) -> NormSpec {
        self.with_size(rows.rows, rows.cols)
    }

    const fn with_size(&self, rows: usize, cols: usize) -> NormSpec {
        let &NormParams { norm, eps, weight_offset, residual_placement, gate, groups, cast_order, .. } = self;
        let spec = NormSpec::new(norm, rows, cols, eps as f32);
        NormSpec { weight_offset, residual_placement, gate, groups, cast_order, ..spec }
    }

    /// The norm's [`name`](Norm::name).
    pub const fn name(&self) -> &'static str {
        self.norm.name()
    }
}
