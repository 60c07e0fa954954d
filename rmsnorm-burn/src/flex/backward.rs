//! The gradients of a norm.

use burn::backend::Flex;
use rmsnorm_core::cpu::{BackwardInputs, CpuBackend};
use rmsnorm_core::{Element, Error, Tensor, WithDTypes};

use super::rows::{Regular, wrap};
use crate::kernels::{BackwardCall, Gradients, Maybe};

impl WithDTypes for BackwardCall<Flex> {
    type Output = Result<Gradients<Flex>, Error>;

    fn call<T: Element, W: Element, R: Element>(self) -> Self::Output {
        let BackwardCall { spec, dy, x, weight, mean, rstd, wanted } = self;
        let shape = x.layout().shape().clone();
        let parameter = weight.layout().shape().clone();
        let (dy, x, weight) = (Regular::new(dy)?, Regular::new(x)?, Regular::new(weight)?);
        let (mean, rstd) = (mean.map(Regular::new).transpose()?, Regular::new(rstd)?);
        let mut inputs = BackwardInputs::<T, W, R>::mixed(dy.read::<T>()?, x.read::<R>()?, rstd.vector()?);
        inputs = inputs.weight(weight.vector()?);
        if let Some(mean) = &mean {
            inputs = inputs.mean(mean.vector()?);
        }
        // The gradient of an f32 stream is not to be rounded to the activations' dtype.
        let is_wider = T::DTYPE != R::DTYPE;
        let tensors = wanted.set(Tensor::Dresidual, is_wider);
        let made = CpuBackend::new().backward_vec(&spec.sized(&x.rows), inputs, tensors)?;
        let give = |name: Tensor, values: Vec<W>| Maybe::of(wanted.has(name).then(|| wrap(values, parameter.clone())));
        Ok(Gradients {
            dx: if is_wider { wrap(made.dresidual, shape) } else { wrap(made.dx, shape) },
            dweight: give(Tensor::Dweight, made.dweight),
            dbias: give(Tensor::Dbias, made.dbias),
        })
    }
}
