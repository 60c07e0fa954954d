//! The sum with a residual and its RMS norm, as a module.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};

use super::parameter;
use crate::functions::add_rms_norm;

/// The configuration of an [`AddRmsNorm`].
#[derive(Config, Debug)]
pub struct AddRmsNormConfig {
    /// Elements of a row.
    pub d_model: usize,
    /// The number added to the mean square. 1e-5 by default, as in burn's own norms.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl AddRmsNormConfig {
    /// A norm with a weight of ones.
    pub fn init(&self, device: &Device) -> AddRmsNorm {
        AddRmsNorm { gamma: parameter(self.d_model, Initializer::Ones, device), epsilon: self.epsilon }
    }
}

/// `residual + x` and its RMS norm, as between the parts of a transformer block. Its record is the
/// record of the norm.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct AddRmsNorm {
    /// The weight: (d_model).
    pub gamma: Param<Tensor<1>>,
    /// The number added to the mean square.
    pub epsilon: f64,
}

impl AddRmsNorm {
    /// Returns `(y, h)` as [`crate::add_rms_norm`]: `h` is the next layer's residual, and `y` its
    /// norm.
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

/// The same norm, of a sum.
impl From<super::RmsNorm> for AddRmsNorm {
    fn from(norm: super::RmsNorm) -> Self {
        AddRmsNorm { gamma: norm.gamma, epsilon: norm.epsilon }
    }
}

in_one_line!(AddRmsNorm);
