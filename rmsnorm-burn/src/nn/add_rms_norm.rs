//! The residual's sum and its RMS norm as a module.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};

use super::parameter;
use crate::functions::add_rms_norm;

/// What an [`AddRmsNorm`] is made by.
#[derive(Config, Debug)]
pub struct AddRmsNormConfig {
    /// Elements of a row.
    pub d_model: usize,
    /// What is added to the mean square. 1e-5 where it is not given, as in burn's own norms.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl AddRmsNormConfig {
    /// With a weight of ones.
    pub fn init(&self, device: &Device) -> AddRmsNorm {
        AddRmsNorm { gamma: parameter(self.d_model, Initializer::Ones, device), epsilon: self.epsilon }
    }
}

/// `residual + x` and its RMS norm: what stands between the parts of a transformer's block. Its record is that of the norm alone.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct AddRmsNorm {
    /// The weight: (d_model).
    pub gamma: Param<Tensor<1>>,
    /// What is added to the mean square.
    pub epsilon: f64,
}

impl AddRmsNorm {
    /// `(y, residual_out)`, as [`crate::add_rms_norm`]: the sum is the next layer's residual, and y its norm.
    ///
    /// # Shapes
    /// `x`, `residual` and the results: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn forward<const D: usize>(&self, x: Tensor<D>, residual: Tensor<D>) -> (Tensor<D>, Tensor<D>) {
        add_rms_norm(x, residual, self.gamma.val(), self.epsilon)
    }
}

/// The same norm, behind a sum.
impl From<super::RmsNorm> for AddRmsNorm {
    fn from(norm: super::RmsNorm) -> Self {
        AddRmsNorm { gamma: norm.gamma, epsilon: norm.epsilon }
    }
}

in_one_line!(AddRmsNorm);
