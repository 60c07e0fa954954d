//! A norm without its size.

use candle_core::{Result, bail};
use rmsnorm_core::{Norm, NormSpec, RowLayout};

/// What is computed, of tensors of any size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) norm: Norm,
    pub(crate) eps: f64,
    pub(crate) weight_offset: f32,
}

impl Spec {
    /// A norm of that kind. Fails where `eps` is negative or not finite.
    pub(crate) fn new(norm: Norm, eps: f64) -> Result<Spec> {
        if !(eps as f32).is_finite() || eps < 0.0 {
            bail!("{}: eps must be finite and not negative, got {eps}", norm.name());
        }
        Ok(Spec { norm, eps, weight_offset: 0.0 })
    }

    /// RMS norm with `1 + weight`.
    pub(crate) fn gemma(eps: f64) -> Result<Spec> {
        Ok(Spec { weight_offset: 1.0, ..Spec::new(Norm::Rms, eps)? })
    }

    /// Of these rows.
    pub(crate) fn sized(&self, rows: &RowLayout) -> NormSpec {
        NormSpec::new(self.norm, rows.rows, rows.cols, self.eps as f32).weight_offset(self.weight_offset)
    }

    pub(crate) fn name(&self) -> &'static str {
        self.norm.name()
    }
}
