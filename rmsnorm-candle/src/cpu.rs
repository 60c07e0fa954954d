//! The calls on CPU storages. Results are new vectors that nobody zeroes first.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Error, Layout, Result, WithDType, bail};
use rmsnorm_core::cpu::{BackwardInputs, CpuBackend, Forward, ForwardInputs};
use rmsnorm_core::{Norm, Tensor, TensorSet};

use crate::native::{Native, Work, dispatch};
use crate::rows::Place;
use crate::spec::Spec;

/// A storage, and which of its elements a tensor has.
pub(crate) type Operand<'a> = (&'a CpuStorage, &'a Layout);

/// A forward pass's statistics, for backward.
#[derive(Debug)]
pub(crate) struct Statistics {
    /// Empty for RMS norm.
    mean: Vec<f32>,
    rstd: Vec<f32>,
}

/// The tensors of a forward call.
pub(crate) struct ForwardCall<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) x: Operand<'a>,
    pub(crate) residual: Option<Operand<'a>>,
    pub(crate) weight: Operand<'a>,
    pub(crate) bias: Option<Operand<'a>>,
    /// Whether there will be a backward pass.
    pub(crate) save: bool,
}

/// What a forward call gives.
pub(crate) struct Normalized {
    pub(crate) y: CpuStorage,
    /// The rounded sum; empty without a residual.
    pub(crate) residual_out: CpuStorage,
    /// If they are saved.
    pub(crate) statistics: Option<Statistics>,
}

impl ForwardCall<'_> {
    /// # Errors
    /// Where the kernels take no such tensors, which callers have made sure of.
    pub(crate) fn run(self) -> Result<Normalized> {
        let residual = self.residual.unwrap_or(self.x);
        dispatch(dtypes([self.x, self.weight, residual]), self)
    }
}

impl Work for ForwardCall<'_> {
    type Output = Normalized;

    fn call<T: Native, W: Native, R: Native>(self) -> Result<Normalized> {
        let x = Place::of(self.x.1)?;
        let mut inputs = ForwardInputs::<T, W, R>::mixed(x.read(T::cpu_storage_as_slice(self.x.0)?)?);
        inputs = inputs.weight(vector::<W>(self.weight)?);
        let mut wanted = TensorSet::NONE;
        if let Some(bias) = self.bias {
            inputs = inputs.bias(vector::<W>(bias)?);
        }
        if let Some(residual) = self.residual {
            inputs = inputs.residual(Place::of(residual.1)?.read(R::cpu_storage_as_slice(residual.0)?)?);
            wanted = wanted.with(Tensor::ResidualOut);
        }
        wanted = wanted.set(Tensor::Rstd, self.save).set(Tensor::Mean, self.save && self.spec.norm == Norm::Layer);
        let made = CpuBackend::new().forward_vec(&self.spec.sized(&x.rows), inputs, wanted).map_err(Error::wrap)?;
        Ok(Normalized {
            y: T::to_cpu_storage_owned(made.y),
            residual_out: R::to_cpu_storage_owned(made.residual_out),
            statistics: self.save.then_some(Statistics { mean: made.mean, rstd: made.rstd }),
        })
    }
}

/// The tensors of a backward call.
pub(crate) struct BackwardCall<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) dy: Operand<'a>,
    /// What was normalized.
    pub(crate) x: Operand<'a>,
    pub(crate) weight: Operand<'a>,
    pub(crate) statistics: &'a Statistics,
    pub(crate) wanted: Wanted,
}

/// Which gradients of parameters are wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) dweight: bool,
    pub(crate) dbias: bool,
}

/// What a backward call gives.
pub(crate) struct Gradients {
    /// In the dtype of x.
    pub(crate) dx: CpuStorage,
    pub(crate) dweight: Option<CpuStorage>,
    pub(crate) dbias: Option<CpuStorage>,
}

impl BackwardCall<'_> {
    /// # Errors
    /// As [`ForwardCall::run`].
    pub(crate) fn run(self) -> Result<Gradients> {
        dispatch(dtypes([self.dy, self.weight, self.x]), self)
    }
}

impl Work for BackwardCall<'_> {
    type Output = Gradients;

    fn call<T: Native, W: Native, R: Native>(self) -> Result<Gradients> {
        let (dy, x) = (Place::of(self.dy.1)?, Place::of(self.x.1)?);
        let (dy, rows) = (dy.read(T::cpu_storage_as_slice(self.dy.0)?)?, x.rows);
        let x = x.read(R::cpu_storage_as_slice(self.x.0)?)?;
        let mut inputs = BackwardInputs::<T, W, R>::mixed(dy, x, &self.statistics.rstd);
        inputs = inputs.weight(vector::<W>(self.weight)?);
        if self.spec.norm == Norm::Layer {
            inputs = inputs.mean(&self.statistics.mean);
        }
        // The gradient of an f32 stream is not to be rounded to the activations' dtype.
        let is_wider = <T as WithDType>::DTYPE != <R as WithDType>::DTYPE;
        let wanted = TensorSet::NONE.set(Tensor::Dresidual, is_wider);
        let wanted = wanted.set(Tensor::Dweight, self.wanted.dweight).set(Tensor::Dbias, self.wanted.dbias);
        let made = CpuBackend::new().backward_vec(&self.spec.sized(&rows), inputs, wanted).map_err(Error::wrap)?;
        Ok(Gradients {
            dx: if is_wider { R::to_cpu_storage_owned(made.dresidual) } else { T::to_cpu_storage_owned(made.dx) },
            dweight: self.wanted.dweight.then(|| W::to_cpu_storage_owned(made.dweight)),
            dbias: self.wanted.dbias.then(|| W::to_cpu_storage_owned(made.dbias)),
        })
    }
}

/// A forward call whose result takes the place of x.
pub(crate) struct InPlaceCall<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) x: (&'a mut CpuStorage, &'a Layout),
    pub(crate) weight: Operand<'a>,
    pub(crate) bias: Option<Operand<'a>>,
}

impl InPlaceCall<'_> {
    /// # Errors
    /// As [`ForwardCall::run`].
    pub(crate) fn run(self) -> Result<()> {
        let x = (&*self.x.0, self.x.1);
        dispatch(dtypes([x, self.weight, x]), self)
    }
}

impl Work for InPlaceCall<'_> {
    type Output = ();

    fn call<T: Native, W: Native, R: Native>(self) -> Result<()> {
        let x = Place::of(self.x.1)?;
        let Some(values) = T::values_mut(self.x.0) else { bail!("x is not of {:?}", <T as WithDType>::DTYPE) };
        let mut args = Forward::<T>::in_place(x.write(values)?).weight_dtype::<W>();
        args = args.weight(vector::<W>(self.weight)?);
        if let Some(bias) = self.bias {
            args = args.bias(vector::<W>(bias)?);
        }
        CpuBackend::new().forward(&self.spec.sized(&x.rows), args).map_err(Error::wrap)
    }
}

fn dtypes(operands: [Operand<'_>; 3]) -> [DType; 3] {
    operands.map(|(storage, _)| storage.dtype())
}

/// A weight or a bias, which callers have made contiguous.
fn vector<W: Native>(operand: Operand<'_>) -> Result<&[W]> {
    let place = Place::of(operand.1)?;
    Ok(place.read(W::cpu_storage_as_slice(operand.0)?)?.view)
}
