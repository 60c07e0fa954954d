//! The residual's sum and its RMS norm as a module.

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use super::RmsNorm;

/// `residual + x` and its RMS norm: what stands between the parts of a transformer's block.
#[derive(Clone, Debug)]
pub struct AddRmsNorm(RmsNorm);

impl AddRmsNorm {
    /// By this weight: (cols).
    pub fn new(weight: Tensor, eps: f64) -> Self {
        AddRmsNorm(RmsNorm::new(weight, eps))
    }

    /// The norm of the sum.
    pub fn norm(&self) -> &RmsNorm {
        &self.0
    }

    /// `(y, residual_out)`: the sum is `residual + x` in the dtype of `residual`, the next layer's residual, and y its norm in that of
    /// `x`.
    ///
    /// # Errors
    /// As [`crate::add_rms_norm`].
    pub fn forward(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.0.add_forward(x, residual)
    }
}

/// The same norm, behind a sum; of `1 + weight` if it is that.
impl From<RmsNorm> for AddRmsNorm {
    fn from(norm: RmsNorm) -> Self {
        AddRmsNorm(norm)
    }
}

/// Loads `weight` (or `gamma`), ones where a `VarMap` makes it new.
///
/// # Errors
/// As [`super::rms_norm`].
pub fn add_rms_norm(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<AddRmsNorm> {
    super::rms_norm(size, eps, vb).map(AddRmsNorm)
}
