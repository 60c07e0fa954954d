//! RMS norm as a module.

use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};

use super::{WEIGHT, vector};
use crate::Norm;

/// RMS norm over the last dimension, with `weight` or, as in Gemma, `1 + weight`. Called as
/// `forward(&x)`.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
    is_gemma: bool,
}

impl RmsNorm {
    /// With this weight: (cols).
    pub fn new(weight: Tensor, eps: f64) -> Self {
        RmsNorm { weight, eps, is_gemma: false }
    }

    /// With `1 + weight`, which is not rounded.
    pub fn gemma(weight: Tensor, eps: f64) -> Self {
        RmsNorm { weight, eps, is_gemma: true }
    }

    /// The loaded weight, without the 1 of Gemma.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The number added to the mean square.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// [`Module::forward`] under candle-nn's name for the form with gradients. Here both have
    /// gradients.
    ///
    /// # Errors
    /// As [`crate::rms_norm`].
    pub fn forward_diff(&self, x: &Tensor) -> Result<Tensor> {
        self.forward(x)
    }

    /// Returns `(y, h)`: `h = residual + x` in the dtype of `residual`, and `y` its norm in the
    /// dtype of `x`.
    ///
    /// # Errors
    /// As [`crate::add_rms_norm`].
    pub fn add_forward(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.norm().residual(residual).apply(x, &self.weight)
    }

    /// `residual` plus the norm of `x`, in the dtype of `residual`.
    ///
    /// # Errors
    /// As [`crate::rms_norm_add`].
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.norm().residual_after(residual).apply(x, &self.weight)
    }

    /// Returns `(y, h)`: `h` of [`forward_add`](Self::forward_add), and `y` its norm with the
    /// weight of `next`, in the dtype of `x`.
    ///
    /// # Errors
    /// As [`crate::rms_norm_add_rms_norm`], and if the norms differ in more than their weights: one
    /// call has one `eps`.
    pub fn forward_add_forward(&self, x: &Tensor, residual: &Tensor, next: &RmsNorm) -> Result<(Tensor, Tensor)> {
        if (self.eps, self.is_gemma) != (next.eps, next.is_gemma) {
            let what =
                |norm: &RmsNorm| format!("{} and {}", norm.eps, if norm.is_gemma { "1 + weight" } else { "weight" });
            bail!(
                "rms_norm: both norms must have one eps and one form of the weight, got {}, and {}",
                what(self),
                what(next)
            );
        }
        self.norm().residual_after(residual).next_norm(&next.weight).apply(x, &self.weight)
    }

    /// Overwrites `x`, for inference.
    ///
    /// # Errors
    /// As [`crate::rms_norm_in_place`], for example if the weight is a variable.
    pub fn forward_in_place(&self, x: &Tensor) -> Result<()> {
        self.norm().apply_in_place(x, &self.weight)
    }

    fn norm(&self) -> Norm<'_> {
        if self.is_gemma { Norm::gemma(self.eps) } else { Norm::rms(self.eps) }
    }
}

/// Errors as [`crate::rms_norm`].
impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.norm().apply(x, &self.weight)
    }
}

/// The same weight and `eps`.
impl From<candle_nn::RmsNorm> for RmsNorm {
    fn from(norm: candle_nn::RmsNorm) -> Self {
        RmsNorm::new(norm.weight().clone(), norm.eps())
    }
}

/// Loads `weight` (or `gamma`); a `VarMap` creates it as ones.
///
/// # Errors
/// If it is missing, or its shape is not (size).
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<RmsNorm> {
    Ok(RmsNorm::new(vector(size, WEIGHT, 1.0, &vb)?, eps))
}

/// Loads `weight` (or `gamma`) of a norm with `1 + weight`; a `VarMap` creates it as zeros.
///
/// # Errors
/// As [`rms_norm`].
pub fn gemma_rms_norm(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<RmsNorm> {
    Ok(RmsNorm::gemma(vector(size, WEIGHT, 0.0, &vb)?, eps))
}
