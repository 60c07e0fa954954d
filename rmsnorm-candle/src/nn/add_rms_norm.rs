//! The sum with a residual and its RMS norm, as a module.

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use super::RmsNorm;

/// `residual + x` and its RMS norm, as between the parts of a transformer block.
#[derive(Clone, Debug)]
pub struct AddRmsNorm(RmsNorm);

impl AddRmsNorm {
    /// With this weight: (cols).
    pub fn new(weight: Tensor, eps: f64) -> Self {
        AddRmsNorm(RmsNorm::new(weight, eps))
    }

    /// The norm of the sum.
    pub fn norm(&self) -> &RmsNorm {
        &self.0
    }

    /// Returns `(y, h)`: `h = residual + x` in the dtype of `residual`, the next layer's residual,
    /// and `y` its norm in the dtype of `x`.
    ///
    /// # Errors
    /// As [`crate::add_rms_norm`].
    pub fn forward(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.0.add_forward(x, residual)
    }
}

/// The same norm of a sum; with `1 + weight` if `norm` has it.
impl From<RmsNorm> for AddRmsNorm {
    fn from(norm: RmsNorm) -> Self {
        AddRmsNorm(norm)
    }
}

/// Loads `weight` (or `gamma`); a `VarMap` creates it as ones.
///
/// # Errors
/// As [`super::rms_norm`].
pub fn add_rms_norm(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<AddRmsNorm> {
    super::rms_norm(size, eps, vb).map(AddRmsNorm)
}
