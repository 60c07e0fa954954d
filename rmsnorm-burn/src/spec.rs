//! A norm without its size.

use rmsnorm_core::{Norm, NormSpec, RowLayout};

/// What is computed, of tensors of any size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) norm: Norm,
    pub(crate) eps: f64,
    pub(crate) weight_offset: f32,
}

impl Spec {
    /// A norm of that kind.
    pub(crate) const fn new(norm: Norm, eps: f64) -> Spec {
        Spec { norm, eps, weight_offset: 0.0 }
    }

    /// RMS norm with `1 + weight`.
    pub(crate) const fn gemma(eps: f64) -> Spec {
        Spec { norm: Norm::Rms, eps, weight_offset: 1.0 }
    }

    /// Of these rows.
    pub(crate) fn sized(&self, rows: &RowLayout) -> NormSpec {
        NormSpec::new(self.norm, rows.rows, rows.cols, self.eps as f32).weight_offset(self.weight_offset)
    }

    pub(crate) fn name(&self) -> &'static str {
        self.norm.name()
    }
}
