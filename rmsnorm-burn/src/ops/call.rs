//! A forward call of any backend's kernels, and what comes of it.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use rmsnorm_core::{Error, Norm, ResidualPlacement, Tensor, TensorSet, UnsizedNorm};

use crate::check::or_panic;
use crate::kernels::{ForwardCall, Forwarded, Kernels, Maybe};

impl<B: Kernels> ForwardCall<B> {
    /// Of x alone, by a weight alone.
    pub(super) fn new(spec: UnsizedNorm, x: FloatTensor<B>, weight: FloatTensor<B>) -> Self {
        let wanted = TensorSet::NONE;
        ForwardCall { spec, x, residual: None, weight, bias: None, next_weight: None, wanted }
    }

    /// That norm on its way to a residual. `spec` is that of the norm.
    pub(super) fn onto(spec: UnsizedNorm, x: FloatTensor<B>, residual: FloatTensor<B>, weight: FloatTensor<B>) -> Self {
        ForwardCall { residual: Some(residual), ..ForwardCall::new(spec.residual_after(), x, weight) }
    }

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

/// What a call gave because it was asked for it. It is a bug to take anything else.
pub(super) fn given<B: Backend>(arg: &'static str, tensor: Maybe<B>) -> FloatTensor<B> {
    or_panic(tensor.into_option().ok_or(Error::Missing { arg, why: "the call was not asked for it" }))
}

/// y of a call that gives it.
pub(super) fn y<B: Backend>(made: Forwarded<B>) -> FloatTensor<B> {
    given("y", made.y)
}

/// The sum of such a call: of x and residual, or of residual and the norm.
pub(super) fn sum<B: Backend>(made: Forwarded<B>) -> FloatTensor<B> {
    given("residual_out", made.residual_out)
}

/// y and the sum.
pub(super) fn both<B: Backend>(made: Forwarded<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    (given("y", made.y), given("residual_out", made.residual_out))
}

/// A forward pass's statistics, for backward: f32, (rows).
#[derive(Clone, Debug)]
pub(super) struct Statistics<B: Backend> {
    /// Of layer norm.
    pub(super) mean: Maybe<B>,
    pub(super) rstd: FloatTensor<B>,
}

impl<B: Backend> Statistics<B> {
    /// Of a call that was asked for them.
    pub(super) fn of(mean: Maybe<B>, rstd: Maybe<B>) -> Self {
        Statistics { mean, rstd: given("rstd", rstd) }
    }
}
