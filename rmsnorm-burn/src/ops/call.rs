//! A forward call on any backend with kernels.

use rmsnorm_core::{Norm, ResidualPlacement, Tensor};

use crate::kernels::{ForwardCall, Forwarded, Kernels, Maybe, Optional};

impl<B: Kernels> ForwardCall<B> {
    /// Also wants the statistics, for a backward pass.
    pub(super) fn saving(self, save: bool) -> Self {
        let wanted = self.wanted.set(Tensor::Rstd, save).set(Tensor::Mean, save && self.spec.norm == Norm::Layer);
        ForwardCall { wanted, ..self }
    }

    /// Also wants the statistics of the next norm.
    pub(super) fn saving_next(self, save: bool) -> Self {
        let is_layer = self.spec.norm == Norm::Layer;
        let wanted = self.wanted.set(Tensor::NextRstd, save).set(Tensor::NextMean, save && is_layer);
        ForwardCall { wanted, ..self }
    }

    /// Runs the call, for its results and the other wanted outputs.
    pub(super) fn call(self) -> Forwarded<B> {
        let ForwardCall { spec, x, residual, gate, weight, bias, next_weight, next_bias, wanted } = self;
        let has_y = match spec.residual_placement {
            ResidualPlacement::Before => true,
            ResidualPlacement::After => next_weight.is_some(),
        };
        let wanted = wanted.set(Tensor::Y, has_y).set(Tensor::ResidualOut, residual.is_some());
        let optional = [residual, gate, bias, next_weight, next_bias].map(Maybe::of);
        let [residual, gate, bias, next_weight, next_bias] = optional;
        B::forward(x, weight, Optional { residual, gate, bias, next_weight, next_bias }, spec, wanted)
    }
}
