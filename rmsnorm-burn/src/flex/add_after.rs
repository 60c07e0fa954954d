//! The sum of a residual and the norm of x, and the next norm of that sum.

use burn::backend::flex::FlexTensor;
use rmsnorm_core::cpu::{CpuBackend, Forward, ForwardInputs};
use rmsnorm_core::{Element, Error, Norm, Tensor, TensorSet, UnsizedNorm, WithDTypes};

use super::{Statistics, dispatch};
use crate::rows::{Owned, Regular, wrap};

/// The tensors of a forward call whose residual is added after the norm.
pub(crate) struct AddAfterCall {
    /// With the residual after the norm, as [`new`](Self::new) makes it.
    pub(crate) spec: UnsizedNorm,
    pub(crate) x: FlexTensor,
    pub(crate) residual: FlexTensor,
    pub(crate) weight: FlexTensor,
    pub(crate) bias: Option<FlexTensor>,
    /// Of the next norm, if there is one: in the dtype of the weight.
    pub(crate) next_weight: Option<FlexTensor>,
    /// Whether there will be a backward pass of the norm of x.
    pub(crate) save: bool,
    /// Whether there will be one of the next norm.
    pub(crate) save_next: bool,
}

/// What such a call gives.
pub(crate) struct Added {
    /// In the dtype of the residual.
    pub(crate) sum: FlexTensor,
    /// Of x. Empty unless they are saved.
    pub(crate) statistics: Statistics,
    /// y and the statistics of the sum, if there is a next norm.
    pub(crate) next: Option<(FlexTensor, Statistics)>,
}

impl Added {
    /// y and the statistics of the sum, of a call with a next norm.
    pub(crate) fn take_next(&mut self) -> Result<(FlexTensor, Statistics), Error> {
        self.next.take().ok_or(Error::Missing { arg: "next_weight", why: "there is no next norm without it" })
    }
}

impl AddAfterCall {
    /// By a weight alone, without a next norm and without a backward pass. `spec` is that of the norm.
    pub(crate) fn new(spec: UnsizedNorm, x: FlexTensor, residual: FlexTensor, weight: FlexTensor) -> Self {
        let spec = spec.residual_after();
        AddAfterCall { spec, x, residual, weight, bias: None, next_weight: None, save: false, save_next: false }
    }

    /// # Errors
    /// As [`ForwardCall::run`](super::ForwardCall::run).
    pub(crate) fn run(self) -> Result<Added, Error> {
        dispatch([self.x.dtype(), self.weight.dtype(), self.residual.dtype()], self)
    }

    /// The sum over the residual, without a next norm.
    fn in_place<T: Element, W: Element, R: Element>(self) -> Result<Added, Error> {
        let AddAfterCall { spec, x, residual, weight, bias, save, .. } = self;
        let (x, weight, bias) = (Regular::new(x)?, Regular::new(weight)?, bias.map(Regular::new).transpose()?);
        let mut residual = Owned::new(residual);
        let spec = spec.sized(&x.rows);
        let mut statistics = Statistics::new(&spec, save);
        let args = Forward::<T>::onto_residual(x.read::<T>()?).weight_dtype::<W>().residual_dtype::<R>();
        let mut args = args.weight(weight.vector()?).residual_in_place(residual.elements::<R>()?);
        if let Some(bias) = &bias {
            args = args.bias(bias.vector()?);
        }
        if save {
            args = args.rstd(&mut statistics.rstd);
        }
        if save && spec.norm == Norm::Layer {
            args = args.mean(&mut statistics.mean);
        }
        CpuBackend::new().forward(&spec, args)?;
        Ok(Added { sum: residual.into_tensor(), statistics, next: None })
    }
}

impl WithDTypes for AddAfterCall {
    type Output = Result<Added, Error>;

    fn call<T: Element, W: Element, R: Element>(self) -> Self::Output {
        // With a next norm y would have to be zeroed first: only where all results are new nobody needs to.
        if self.next_weight.is_none() && Owned::is(&self.residual) {
            return self.in_place::<T, W, R>();
        }
        let AddAfterCall { spec, x, residual, weight, bias, next_weight, save, save_next } = self;
        let shape = x.layout().shape().clone();
        let (x, residual, weight) = (Regular::new(x)?, Regular::new(residual)?, Regular::new(weight)?);
        let bias = bias.map(Regular::new).transpose()?;
        let next_weight = next_weight.map(Regular::new).transpose()?;
        let mut inputs = ForwardInputs::<T, W, R>::mixed(x.read::<T>()?).weight(weight.vector()?);
        inputs = inputs.residual(residual.read::<R>()?);
        if let Some(bias) = &bias {
            inputs = inputs.bias(bias.vector()?);
        }
        if let Some(next_weight) = &next_weight {
            inputs = inputs.next_weight(next_weight.vector()?);
        }
        let (is_layer, has_next) = (spec.norm == Norm::Layer, next_weight.is_some());
        let wanted = TensorSet::NONE.set(Tensor::Rstd, save).set(Tensor::Mean, save && is_layer);
        let wanted = wanted.set(Tensor::Y, has_next).set(Tensor::NextRstd, has_next && save_next);
        let wanted = wanted.set(Tensor::NextMean, has_next && save_next && is_layer);
        let made = CpuBackend::new().forward_vec(&spec.sized(&x.rows), inputs, wanted)?;
        let statistics = Statistics { mean: made.mean, rstd: made.rstd };
        let of_next = Statistics { mean: made.next_mean, rstd: made.next_rstd };
        let next = has_next.then(|| (wrap(made.y, shape.clone()), of_next));
        Ok(Added { sum: wrap(made.residual_out, shape), statistics, next })
    }
}
