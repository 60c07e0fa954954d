//! Layer norm as a module.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};

use super::parameter;
use crate::Norm;

/// The configuration of a [`LayerNorm`].
#[derive(Config, Debug)]
pub struct LayerNormConfig {
    /// Elements of a row.
    pub d_model: usize,
    /// The number added to the variance. 1e-5 by default, as in burn's own norm.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether there is a bias. `true` by default.
    #[config(default = true)]
    pub bias: bool,
}

impl LayerNormConfig {
    /// A norm with a weight of ones and, with a bias, a bias of zeros.
    pub fn init(&self, device: &Device) -> LayerNorm {
        LayerNorm {
            gamma: parameter(self.d_model, Initializer::Ones, device),
            beta: self.bias.then(|| parameter(self.d_model, Initializer::Zeros, device)),
            epsilon: self.epsilon,
        }
    }
}

/// Layer norm over the last dimension, with a bias or without.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct LayerNorm {
    /// The weight: (d_model).
    pub gamma: Param<Tensor<1>>,
    /// The bias: (d_model).
    pub beta: Option<Param<Tensor<1>>>,
    /// The number added to the variance.
    pub epsilon: f64,
}

impl LayerNorm {
    /// As [`crate::layer_norm`].
    ///
    /// # Shapes
    /// `x` and the result: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let bias = self.beta.as_ref().map(|beta| beta.val());
        Norm::layer(self.epsilon).bias(bias).apply(x, self.gamma.val())
    }

    /// Returns `(y, h)`: `h = residual + x` in the dtype of `residual`, and `y` its norm in the
    /// dtype of `x`. As [`crate::add_layer_norm`].
    ///
    /// # Shapes
    /// `x`, `residual` and the results: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn add_forward<const D: usize>(&self, x: Tensor<D>, residual: Tensor<D>) -> (Tensor<D>, Tensor<D>) {
        let bias = self.beta.as_ref().map(|beta| beta.val());
        Norm::layer(self.epsilon).residual(residual).bias(bias).apply(x, self.gamma.val())
    }

    /// `residual` plus the norm of `x`, rounded once, to the dtype of `residual`. As
    /// [`crate::layer_norm_add`].
    ///
    /// # Shapes
    /// `x`, `residual` and the result: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn forward_add<const D: usize>(&self, x: Tensor<D>, residual: Tensor<D>) -> Tensor<D> {
        let bias = self.beta.as_ref().map(|beta| beta.val());
        Norm::layer(self.epsilon).residual_after(residual).bias(bias).apply(x, self.gamma.val())
    }

    fn has_bias(&self) -> bool {
        self.beta.is_some()
    }
}

in_one_line!(LayerNorm, "bias": LayerNorm::has_bias);
