//! The calls on tensors of burn's CPU backend. Results are new vectors, of which nobody zeroes the matrices first, or, as in burn's own
//! operations, take the place of what they are computed from, if nobody else has that.

use std::sync::LazyLock;

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
use rmsnorm_core::cpu::{BackwardInputs, CpuBackend, Forward, ForwardInputs};
use rmsnorm_core::{Element, Error, Norm, RowLayout, Tensor, TensorSet, UnsizedNorm, WithDTypes};

use crate::native::mix;
use crate::rows::{Owned, Regular, wrap};

/// What all calls run on. To find out what the processor can takes a tenth of a call of one row.
static BACKEND: LazyLock<CpuBackend> = LazyLock::new(CpuBackend::new);

/// A forward pass's statistics, for backward.
#[derive(Debug)]
pub(crate) struct Statistics {
    /// Empty for RMS norm.
    mean: Vec<f32>,
    rstd: Vec<f32>,
}

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
        let saved = |is_saved: bool| vec![0f32; if is_saved { rows.rows } else { 0 }];
        let (mut mean, mut rstd) = (saved(save && spec.norm == Norm::Layer), saved(save));
        let mut args = Forward::<T>::in_place(x.elements::<T>()?).weight_dtype::<W>().residual_dtype::<R>();
        args = args.weight(weight.vector()?);
        if let Some(bias) = &bias {
            args = args.bias(bias.vector()?);
        }
        if let Some(residual) = &mut residual {
            args = args.residual_in_place(residual.elements::<R>()?);
        }
        if save {
            args = args.rstd(&mut rstd);
        }
        if save && spec.norm == Norm::Layer {
            args = args.mean(&mut mean);
        }
        BACKEND.forward(&spec.sized(&rows), args)?;
        let residual_out = residual.map(Owned::into_tensor);
        Ok(Normalized { y: x.into_tensor(), residual_out, statistics: Statistics { mean, rstd } })
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
        let made = BACKEND.forward_vec(&spec.sized(&x.rows), inputs, wanted)?;
        let statistics = Statistics { mean: made.mean, rstd: made.rstd };
        let residual_out = residual.map(|_| wrap(made.residual_out, shape.clone()));
        Ok(Normalized { y: wrap(made.y, shape), residual_out, statistics })
    }
}

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
    /// As [`ForwardCall::run`].
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
        let made = BACKEND.backward_vec(&spec.sized(&x.rows), inputs, tensors)?;
        Ok(Gradients {
            dx: if is_wider { wrap(made.dresidual, shape) } else { wrap(made.dx, shape) },
            dweight: wanted.has(Tensor::Dweight).then(|| wrap(made.dweight, parameter.clone())),
            dbias: wanted.has(Tensor::Dbias).then(|| wrap(made.dbias, parameter)),
        })
    }
}

/// Runs it with the types of these dtypes: of activations, weight and residual stream.
fn dispatch<T, F>(dtypes: [DType; 3], work: F) -> Result<T, Error>
where
    F: WithDTypes<Output = Result<T, Error>>,
{
    match mix(dtypes) {
        Some(dtypes) => dtypes.dispatch(work)?,
        None => {
            Err(Error::Unsupported { rule: format!("no kernels for activations, weight and residual of {dtypes:?}") })
        }
    }
}
