//! Layer norm as a module.

use candle_core::{Result, Tensor};
use candle_nn::{LayerNormConfig, Module, VarBuilder};
use rmsnorm_core::{Norm, NormParams};

use super::{BIAS, WEIGHT, vector};

/// Layer norm over the last dimension, with a bias or without; RMS norm if the mean is not removed.
/// Called as `forward(&x)`.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    norm: Norm,
    eps: f64,
}

impl LayerNorm {
    /// With this weight and bias: (cols).
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        LayerNorm { weight, bias: Some(bias), norm: Norm::Layer, eps }
    }

    /// With this weight: (cols).
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        LayerNorm { weight, bias: None, norm: Norm::Layer, eps }
    }

    /// RMS norm with this weight: (cols).
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        LayerNorm { weight, bias: None, norm: Norm::Rms, eps }
    }

    /// The weight.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The number added to the variance.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Whether the mean of each row is subtracted.
    pub fn remove_mean(&self) -> bool {
        self.norm == Norm::Layer
    }

    /// Returns `(y, h)`: `h = residual + x` in the dtype of `residual`, and `y` its norm in the
    /// dtype of `x`.
    ///
    /// # Errors
    /// As [`crate::add_layer_norm`].
    pub fn add_forward(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.norm().residual(residual).bias(self.bias()).apply(x, &self.weight)
    }

    /// `residual` plus the norm of `x`, in the dtype of `residual`.
    ///
    /// # Errors
    /// As [`crate::layer_norm_add`].
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.norm().residual_after(residual).bias(self.bias()).apply(x, &self.weight)
    }

    fn norm(&self) -> crate::Norm<'_> {
        crate::Norm::new(NormParams::new(self.norm, self.eps))
    }

    /// Overwrites `x`, for inference.
    ///
    /// # Errors
    /// As [`crate::layer_norm_in_place`], for example if the weight is a variable.
    pub fn forward_in_place(&self, x: &Tensor) -> Result<()> {
        self.norm().bias(self.bias()).apply_in_place(x, &self.weight)
    }
}

/// Errors as [`crate::layer_norm`].
impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.norm().bias(self.bias()).apply(x, &self.weight)
    }
}

/// The same weight, bias and `eps`.
impl From<candle_nn::LayerNorm> for LayerNorm {
    fn from(theirs: candle_nn::LayerNorm) -> Self {
        let norm = if theirs.remove_mean() { Norm::Layer } else { Norm::Rms };
        LayerNorm { weight: theirs.weight().clone(), bias: theirs.bias().cloned(), norm, eps: theirs.eps() }
    }
}

/// Loads `weight` (or `gamma`) and, if the config is affine, `bias` (or `beta`); a `VarMap` creates
/// them as ones and zeros. An `f64` is a config too: that `eps`, with mean and bias.
///
/// # Errors
/// If one is missing, or its shape is not (size).
pub fn layer_norm(size: usize, config: impl Into<LayerNormConfig>, vb: VarBuilder<'_>) -> Result<LayerNorm> {
    let LayerNormConfig { eps, remove_mean, affine } = config.into();
    let weight = vector(size, WEIGHT, 1.0, &vb)?;
    let bias = affine.then(|| vector(size, BIAS, 0.0, &vb)).transpose()?;
    let norm = if remove_mean { Norm::Layer } else { Norm::Rms };
    Ok(LayerNorm { weight, bias, norm, eps })
}

/// Loads only `weight` (or `gamma`).
///
/// # Errors
/// As [`layer_norm`].
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<LayerNorm> {
    layer_norm(size, LayerNormConfig { eps, remove_mean: true, affine: false }, vb)
}
