//! RMS norm as a module.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use rmsnorm_core::{Norm, UnsizedNorm};

use super::{display, in_one_line, parameter};
use crate::path::{add_normalize, normalize};

/// What an [`RmsNorm`] is made by.
#[derive(Config, Debug)]
pub struct RmsNormConfig {
    /// Elements of a row.
    pub d_model: usize,
    /// What is added to the mean square. 1e-5 where it is not given, as in burn's own.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl RmsNormConfig {
    /// With a weight of ones.
    pub fn init(&self, device: &Device) -> RmsNorm {
        RmsNorm { gamma: parameter(self.d_model, Initializer::Ones, device), epsilon: self.epsilon }
    }
}

/// RMS norm over the last dimension.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct RmsNorm {
    /// The weight: (d_model).
    pub gamma: Param<Tensor<1>>,
    /// What is added to the mean square.
    pub epsilon: f64,
}

impl RmsNorm {
    /// As [`crate::rms_norm`].
    ///
    /// # Shapes
    /// `x` and the result: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        normalize(UnsizedNorm::new(Norm::Rms, self.epsilon), x, self.gamma.val(), None)
    }

    /// `(y, residual_out)`: `residual + x` in the dtype of `residual`, and y its norm in that of `x`. As [`crate::add_rms_norm`].
    ///
    /// # Shapes
    /// `x`, `residual` and the results: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn forward_add<const D: usize>(&self, x: Tensor<D>, residual: Tensor<D>) -> (Tensor<D>, Tensor<D>) {
        add_normalize(UnsizedNorm::new(Norm::Rms, self.epsilon), x, residual, self.gamma.val(), None)
    }
}

/// The same parameter and `epsilon`.
impl From<burn::nn::RmsNorm> for RmsNorm {
    fn from(theirs: burn::nn::RmsNorm) -> Self {
        RmsNorm { gamma: theirs.gamma, epsilon: theirs.epsilon }
    }
}

impl ModuleDisplay for RmsNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        in_one_line()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        display(content, &self.gamma, self.epsilon).optional()
    }
}
