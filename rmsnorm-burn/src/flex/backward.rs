//! The gradients of a norm.

use burn::backend::flex::FlexTensor;
use rmsnorm_core::cpu::{BackwardInputs, CpuBackend};
use rmsnorm_core::{Element, Error, Norm, Tensor, TensorSet, UnsizedNorm, WithDTypes};

use super::{Statistics, dispatch};
use crate::rows::{Regular, wrap};

/// The tensors of a backward call.
pub(crate) struct BackwardCall<'a> {
    pub(crate) spec: UnsizedNorm,
    pub(crate) dy: FlexTensor,
    /// What was normalized.
    pub(crate) x: FlexTensor,
    pub(crate) weight: FlexTensor,
    pub(crate) statistics: &'a Statistics,
    /// Which gradients of parameters are wanted: `Dweight`, `Dbias`.
    pub(crate) wanted: TensorSet,
}

/// What a backward call gives.
pub(crate) struct Gradients {
    /// In the dtype of x.
    pub(crate) dx: FlexTensor,
    pub(crate) dweight: Option<FlexTensor>,
    pub(crate) dbias: Option<FlexTensor>,
}

impl BackwardCall<'_> {
    /// # Errors
    /// As [`ForwardCall::run`](super::ForwardCall::run).
    pub(crate) fn run(self) -> Result<Gradients, Error> {
        dispatch([self.dy.dtype(), self.weight.dtype(), self.x.dtype()], self)
    }
}

impl WithDTypes for BackwardCall<'_> {
    type Output = Result<Gradients, Error>;

    fn call<T: Element, W: Element, R: Element>(self) -> Self::Output {
        let BackwardCall { spec, dy, x, weight, statistics, wanted } = self;
        let shape = x.layout().shape().clone();
        let parameter = weight.layout().shape().clone();
        let (dy, x, weight) = (Regular::new(dy)?, Regular::new(x)?, Regular::new(weight)?);
        let mut inputs = BackwardInputs::<T, W, R>::mixed(dy.read::<T>()?, x.read::<R>()?, &statistics.rstd);
        inputs = inputs.weight(weight.vector()?);
        if spec.norm == Norm::Layer {
            inputs = inputs.mean(&statistics.mean);
        }
        // The gradient of an f32 stream is not to be rounded to the activations' dtype.
        let is_wider = T::DTYPE != R::DTYPE;
        let tensors = wanted.set(Tensor::Dresidual, is_wider);
        let made = CpuBackend::new().backward_vec(&spec.sized(&x.rows), inputs, tensors)?;
        Ok(Gradients {
            dx: if is_wider { wrap(made.dresidual, shape) } else { wrap(made.dx, shape) },
            dweight: wanted.has(Tensor::Dweight).then(|| wrap(made.dweight, parameter.clone())),
            dbias: wanted.has(Tensor::Dbias).then(|| wrap(made.dbias, parameter)),
        })
    }
}
