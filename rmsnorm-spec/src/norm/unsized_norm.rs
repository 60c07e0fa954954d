//! [`NormParams`]: a norm of tensors whose shapes are not known yet.

use super::{Gate, Norm, NormSpec, ResidualPlacement};
use crate::RowLayout;

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
}

impl NormParams {
    /// A norm of that kind, with no weight offset, residuals added before the norm, no gate, and one
    /// group of columns.
    pub const fn new(norm: Norm, eps: f64) -> Self {
        let residual_placement = ResidualPlacement::Before;
        NormParams { norm, eps, weight_offset: 0.0, residual_placement, gate: None, groups: 1 }
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

    /// The spec of this norm for these rows.
    pub const fn sized(&self, rows: &RowLayout) -> NormSpec {
        let &NormParams { norm, eps, weight_offset, residual_placement, gate, groups } = self;
        let spec = NormSpec::new(norm, rows.rows, rows.cols, eps as f32);
        NormSpec { weight_offset, residual_placement, gate, groups, ..spec }
    }

    /// The norm's [`name`](Norm::name).
    pub const fn name(&self) -> &'static str {
        self.norm.name()
    }
}
