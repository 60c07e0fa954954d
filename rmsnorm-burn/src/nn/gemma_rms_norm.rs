//! RMS norm by `1 + weight` as a module.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use rmsnorm_core::UnsizedNorm;

use super::{display, has_one_epsilon, in_one_line, parameter};
use crate::check::or_panic;
use crate::path::{add_normalize, normalize, normalize_add, normalize_add_normalize};

/// What a [`GemmaRmsNorm`] is made by.
#[derive(Config, Debug)]
pub struct GemmaRmsNormConfig {
    /// Elements of a row.
    pub d_model: usize,
    /// What is added to the mean square. 1e-5 where it is not given, as in burn's own norms; Gemma's is 1e-6.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl GemmaRmsNormConfig {
    /// With a weight of zeros, to which 1 is added.
    pub fn init(&self, device: &Device) -> GemmaRmsNorm {
        GemmaRmsNorm { gamma: parameter(self.d_model, Initializer::Zeros, device), epsilon: self.epsilon }
    }
}

/// RMS norm over the last dimension by `1 + gamma`, which is not rounded.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct GemmaRmsNorm {
    /// The weight less 1: (d_model).
    pub gamma: Param<Tensor<1>>,
    /// What is added to the mean square.
    pub epsilon: f64,
}

impl GemmaRmsNorm {
    /// As [`crate::gemma_rms_norm`].
    ///
    /// # Shapes
    /// `x` and the result: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        normalize(self.spec(), x, self.gamma.val(), None)
    }

    /// `(y, residual_out)`: `residual + x` in the dtype of `residual`, and y its norm in that of `x`. As [`crate::add_rms_norm`],
    /// by `1 + gamma`.
    ///
    /// # Shapes
    /// `x`, `residual` and the results: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn add_forward<const D: usize>(&self, x: Tensor<D>, residual: Tensor<D>) -> (Tensor<D>, Tensor<D>) {
        add_normalize(self.spec(), x, residual, self.gamma.val(), None)
    }

    /// `residual` and the norm of `x`, added and rounded once, to the dtype of `residual`. As [`crate::gemma_rms_norm_add`].
    ///
    /// # Shapes
    /// `x`, `residual` and the result: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn forward_add<const D: usize>(&self, x: Tensor<D>, residual: Tensor<D>) -> Tensor<D> {
        normalize_add(self.spec(), x, residual, self.gamma.val(), None)
    }

    /// `(y, residual_out)`: what [`forward_add`](Self::forward_add) gives, and y its norm by `next`, in the dtype of `x`. As
    /// [`crate::gemma_rms_norm_add_rms_norm`].
    ///
    /// # Shapes
    /// `x`, `residual` and the results: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says, and where `epsilon` of the two norms differs: one call has one.
    pub fn forward_add_forward<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
        next: &Self,
    ) -> (Tensor<D>, Tensor<D>) {
        or_panic(has_one_epsilon(self.epsilon, next.epsilon));
        normalize_add_normalize(self.spec(), x, residual, self.gamma.val(), next.gamma.val())
    }

    fn spec(&self) -> UnsizedNorm {
        UnsizedNorm::gemma(self.epsilon)
    }
}

impl ModuleDisplay for GemmaRmsNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        in_one_line()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        display(content, &self.gamma, self.epsilon).optional()
    }
}
