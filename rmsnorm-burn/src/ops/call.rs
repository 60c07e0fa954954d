//! A forward call of any backend's kernels.

use rmsnorm_core::{Norm, ResidualPlacement, Tensor};

use crate::kernels::{ForwardCall, Forwarded, Kernels, Maybe};

impl<B: Kernels> ForwardCall<B> {
    /// With the statistics as well, for a backward pass.
    pub(super) fn saving(self, save: bool) -> Self {
        let wanted = self.wanted.set(Tensor::Rstd, save).set(Tensor::Mean, save && self.spec.norm == Norm::Layer);
        ForwardCall { wanted, ..self }
    }

    /// With those of the next norm as well.
    pub(super) fn saving_next(self, save: bool) -> Self {
        let is_layer = self.spec.norm == Norm::Layer;
        let wanted = self.wanted.set(Tensor::NextRstd, save).set(Tensor::NextMean, save && is_layer);
        ForwardCall { wanted, ..self }
    }

    /// The results, and what was asked for besides.
    pub(super) fn call(self) -> Forwarded<B> {
        let ForwardCall { spec, x, residual, weight, bias, next_weight, wanted } = self;
        let has_y = match spec.residual_placement {
            ResidualPlacement::Before => true,
            ResidualPlacement::After => next_weight.is_some(),
        };
        let wanted = wanted.set(Tensor::Y, has_y).set(Tensor::ResidualOut, residual.is_some());
        let [residual, bias, next_weight] = [residual, bias, next_weight].map(Maybe::of);
        B::forward(x, residual, weight, bias, next_weight, spec, wanted)
    }
}
