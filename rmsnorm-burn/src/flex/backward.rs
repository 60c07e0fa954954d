//! The gradients of a norm.

use burn::backend::Flex;
use rmsnorm_core::cpu::{BackwardInputs, CpuBackend};
use rmsnorm_core::{Error, Tensor, with_types};

use super::rows::{Regular, wrap};
use crate::kernels::{BackwardCall, Gradients, Maybe, Saved};

pub(super) fn backward(call: BackwardCall<Flex>) -> Result<Gradients<Flex>, Error> {
    let dtypes = call.dtypes()?;
    let BackwardCall { spec, dy, x, weight, rstd, saved: Saved { mean, gate, bias }, wanted } = call;
    let shape = x.layout().shape().clone();
    let parameter = weight.layout().shape().clone();
    let (dy, x, weight) = (Regular::new(dy)?, Regular::new(x)?, Regular::new(weight)?);
    let [mean, gate, bias] = [mean, gate, bias].map(|saved| saved.into_option().map(Regular::new).transpose());
    let (mean, gate, bias, rstd) = (mean?, gate?, bias?, Regular::new(rstd)?);
    // The gradient has the dtype of x: that of an f32 stream must not be rounded to the activations'.
    let is_cast = dtypes.activation != dtypes.residual;
    with_types!(dtypes; T, W, R => {
        let mut inputs = match is_cast {
            true => BackwardInputs::<T, W, R>::cast(dy.read()?, x.read()?, rstd.vector()?),
            false => BackwardInputs::mixed(dy.read()?, x.read()?, rstd.vector()?),
        };
        inputs = inputs.weight(weight.vector()?);
        if let Some(mean) = &mean {
            inputs = inputs.mean(mean.vector()?);
        }
        if let Some(gate) = &gate {
            inputs = inputs.gate(gate.read()?);
        }
        if let Some(bias) = &bias {
            inputs = inputs.bias(bias.vector()?);
        }
        let made = CpuBackend::new().backward_vec(&spec.sized(&x.rows), inputs, wanted)?;
        let give = |name: Tensor, values: Vec<W>| Maybe::of(wanted.has(name).then(|| wrap(values, parameter.clone())));
        Ok(Gradients {
            dgate: Maybe::of(wanted.has(Tensor::Dgate).then(|| wrap(made.dgate, shape.clone()))),
            dx: if is_cast { wrap(made.dresidual, shape) } else { wrap(made.dx, shape) },
            dweight: give(Tensor::Dweight, made.dweight),
            dbias: give(Tensor::Dbias, made.dbias),
        })
    })
}
