//! A forward call of any backend's kernels, and what comes of it.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use rmsnorm_core::{Error, Norm, ResidualPlacement, Tensor, TensorSet, UnsizedNorm};

use crate::check::or_panic;
use crate::kernels::{Forwarded, Kernels, Maybe};

/// The tensors of a forward call.
pub(super) struct Call<B: Backend> {
    pub(super) spec: UnsizedNorm,
    pub(super) x: FloatTensor<B>,
    pub(super) residual: Option<FloatTensor<B>>,
    pub(super) weight: FloatTensor<B>,
    pub(super) bias: Option<FloatTensor<B>>,
    /// Of the next norm of a sum with a norm, if there is one: in the dtype of the weight.
    pub(super) next_weight: Option<FloatTensor<B>>,
    /// Whether there will be a backward pass.
    pub(super) save: bool,
    /// Whether there will be one of the next norm.
    pub(super) save_next: bool,
}

impl<B: Kernels> Call<B> {
    /// Of x alone, by a weight alone, without a backward pass.
    pub(super) fn new(spec: UnsizedNorm, x: FloatTensor<B>, weight: FloatTensor<B>) -> Self {
        let (residual, bias, next_weight) = (None, None, None);
        Call { spec, x, residual, weight, bias, next_weight, save: false, save_next: false }
    }

    /// That norm on its way to a residual. `spec` is that of the norm.
    pub(super) fn onto(spec: UnsizedNorm, x: FloatTensor<B>, residual: FloatTensor<B>, weight: FloatTensor<B>) -> Self {
        Call { residual: Some(residual), ..Call::new(spec.residual_after(), x, weight) }
    }

    pub(super) fn run(self) -> Forwarded<B> {
        let Call { spec, x, residual, weight, bias, next_weight, save, save_next } = self;
        let is_layer = spec.norm == Norm::Layer;
        let has_y = match spec.residual_placement {
            ResidualPlacement::Before => true,
            ResidualPlacement::After => next_weight.is_some(),
        };
        let wanted = TensorSet::NONE.set(Tensor::Y, has_y).set(Tensor::ResidualOut, residual.is_some());
        let wanted = wanted.set(Tensor::Rstd, save).set(Tensor::Mean, save && is_layer);
        let wanted = wanted.set(Tensor::NextRstd, save_next).set(Tensor::NextMean, save_next && is_layer);
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
