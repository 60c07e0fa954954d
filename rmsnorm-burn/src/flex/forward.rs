//! y of x, or of the sum of x and a residual.

use burn::backend::flex::FlexTensor;
use rmsnorm_core::cpu::{CpuBackend, Forward, ForwardInputs};
use rmsnorm_core::{Element, Error, Norm, RowLayout, Tensor, TensorSet, UnsizedNorm, WithDTypes};

use super::{Statistics, dispatch};
use crate::rows::{Owned, Regular, wrap};

/// The tensors of a forward call.
pub(crate) struct ForwardCall {
    pub(crate) spec: UnsizedNorm,
    pub(crate) x: FlexTensor,
    pub(crate) residual: Option<FlexTensor>,
    pub(crate) weight: FlexTensor,
    pub(crate) bias: Option<FlexTensor>,
    /// Whether there will be a backward pass.
    pub(crate) save: bool,
}

/// What a forward call gives.
pub(crate) struct Normalized {
    pub(crate) y: FlexTensor,
    /// The rounded sum, if there is a residual.
    residual_out: Option<FlexTensor>,
    /// Empty unless they are saved.
    pub(crate) statistics: Statistics,
}

impl Normalized {
    /// y, the sum and the statistics of a call with a residual.
    pub(crate) fn with_sum(self) -> Result<(FlexTensor, FlexTensor, Statistics), Error> {
        match self.residual_out {
            Some(residual_out) => Ok((self.y, residual_out, self.statistics)),
            None => Err(Error::Missing { arg: "residual", why: "there is no sum without it" }),
        }
    }
}

impl ForwardCall {
    /// # Errors
    /// Where the kernels take no such tensors, which callers have made sure of, or there is no memory.
    pub(crate) fn run(self) -> Result<Normalized, Error> {
        let residual = self.residual.as_ref().unwrap_or(&self.x);
        dispatch([self.x.dtype(), self.weight.dtype(), residual.dtype()], self)
    }

    /// y over x, and the sum over the residual.
    fn in_place<T: Element, W: Element, R: Element>(self) -> Result<Normalized, Error> {
        let ForwardCall { spec, x, residual, weight, bias, save } = self;
        let Some(rows) = RowLayout::dense(x.layout().shape()) else {
            return Err(Error::Unsupported { rule: "x has no dimension to normalize over".to_owned() });
        };
        let (weight, bias) = (Regular::new(weight)?, bias.map(Regular::new).transpose()?);
        let (mut x, mut residual) = (Owned::new(x), residual.map(Owned::new));
        let spec = spec.sized(&rows);
        let mut statistics = Statistics::new(&spec, save);
        let mut args = Forward::<T>::in_place(x.elements::<T>()?).weight_dtype::<W>().residual_dtype::<R>();
        args = args.weight(weight.vector()?);
        if let Some(bias) = &bias {
            args = args.bias(bias.vector()?);
        }
        if let Some(residual) = &mut residual {
            args = args.residual_in_place(residual.elements::<R>()?);
        }
        if save {
            args = args.rstd(&mut statistics.rstd);
        }
        if save && spec.norm == Norm::Layer {
            args = args.mean(&mut statistics.mean);
        }
        CpuBackend::new().forward(&spec, args)?;
        let residual_out = residual.map(Owned::into_tensor);
        Ok(Normalized { y: x.into_tensor(), residual_out, statistics })
    }
}

impl WithDTypes for ForwardCall {
    type Output = Result<Normalized, Error>;

    fn call<T: Element, W: Element, R: Element>(self) -> Self::Output {
        if Owned::is(&self.x) && self.residual.as_ref().is_none_or(Owned::is) {
            return self.in_place::<T, W, R>();
        }
        let ForwardCall { spec, x, residual, weight, bias, save } = self;
        let shape = x.layout().shape().clone();
        let (x, weight) = (Regular::new(x)?, Regular::new(weight)?);
        let residual = residual.map(Regular::new).transpose()?;
        let bias = bias.map(Regular::new).transpose()?;
        let mut inputs = ForwardInputs::<T, W, R>::mixed(x.read::<T>()?).weight(weight.vector()?);
        if let Some(bias) = &bias {
            inputs = inputs.bias(bias.vector()?);
        }
        if let Some(residual) = &residual {
            inputs = inputs.residual(residual.read::<R>()?);
        }
        let wanted = TensorSet::NONE.set(Tensor::ResidualOut, residual.is_some());
        let wanted = wanted.set(Tensor::Rstd, save).set(Tensor::Mean, save && spec.norm == Norm::Layer);
        let made = CpuBackend::new().forward_vec(&spec.sized(&x.rows), inputs, wanted)?;
        let statistics = Statistics { mean: made.mean, rstd: made.rstd };
        let residual_out = residual.map(|_| wrap(made.residual_out, shape.clone()));
        Ok(Normalized { y: wrap(made.y, shape), residual_out, statistics })
    }
}
