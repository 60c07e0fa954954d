//! The calls on CPU storages. Results are new vectors that nobody zeroes first.

use candle_core::{CpuStorage, CustomOp1, Error, Layout, Result, Shape, Storage, WithDType, bail};
use rmsnorm_core::cpu::{BackwardInputs, CpuBackend, Forward, ForwardInputs};
use rmsnorm_core::{Norm, Tensor, TensorSet};

use crate::call::{
    self, Added, AfterCall, BackwardCall, ForwardCall, Gradients, InPlaceCall, Kernels, Normalized, Operand,
};
use crate::native::Native;
use crate::rows::Place;

/// What a forward pass saves for backward.
#[derive(Debug)]
pub(crate) struct Statistics {
    /// Empty for RMS norm.
    mean: Vec<f32>,
    rstd: Vec<f32>,
}

impl Statistics {
    fn of(statistics: &call::Statistics) -> Result<&Statistics> {
        match statistics {
            call::Statistics::Cpu(statistics) => Ok(statistics),
            #[cfg(feature = "cuda")]
            call::Statistics::Cuda(_) => bail!("the forward pass was on another device"),
        }
    }
}

impl Kernels for CpuStorage {
    fn forward<T: Native, W: Native, R: Native>(call: ForwardCall<'_, Self>) -> Result<Normalized<Self>> {
        let x = Place::of(call.x.1)?;
        let mut inputs = ForwardInputs::<T, W, R>::mixed(x.read(T::cpu_storage_as_slice(call.x.0)?)?);
        inputs = inputs.weight(vector::<W>(call.weight)?);
        let mut wanted = TensorSet::NONE;
        if let Some(bias) = call.bias {
            inputs = inputs.bias(vector::<W>(bias)?);
        }
        if let Some(residual) = call.residual {
            inputs = inputs.residual(Place::of(residual.1)?.read(R::cpu_storage_as_slice(residual.0)?)?);
            wanted = wanted.with(Tensor::ResidualOut);
        }
        wanted = wanted.set(Tensor::Rstd, call.save).set(Tensor::Mean, call.save && call.spec.norm == Norm::Layer);
        let made = CpuBackend::new().forward_vec(&call.spec.sized(&x.rows), inputs, wanted).map_err(Error::wrap)?;
        let statistics = call.save.then_some(Statistics { mean: made.mean, rstd: made.rstd });
        Ok(Normalized {
            y: T::to_cpu_storage_owned(made.y),
            residual_out: call.residual.map(|_| R::to_cpu_storage_owned(made.residual_out)),
            statistics: statistics.map(call::Statistics::Cpu),
        })
    }

    fn forward_after<T: Native, W: Native, R: Native>(call: AfterCall<'_, Self>) -> Result<Added<Self>> {
        let x = Place::of(call.x.1)?;
        let mut inputs = ForwardInputs::<T, W, R>::mixed(x.read(T::cpu_storage_as_slice(call.x.0)?)?);
        inputs = inputs.weight(vector::<W>(call.weight)?);
        if let Some(bias) = call.bias {
            inputs = inputs.bias(vector::<W>(bias)?);
        }
        inputs = inputs.residual(Place::of(call.residual.1)?.read(R::cpu_storage_as_slice(call.residual.0)?)?);
        if let Some(next_weight) = call.next_weight {
            inputs = inputs.next_weight(vector::<W>(next_weight)?);
        }
        let (has_next, has_mean) = (call.next_weight.is_some(), call.spec.norm == Norm::Layer);
        let mut wanted = TensorSet::NONE.with(Tensor::ResidualOut).set(Tensor::Y, has_next);
        if call.save {
            wanted = wanted.with(Tensor::Rstd).set(Tensor::Mean, has_mean);
            wanted = wanted.set(Tensor::NextRstd, has_next).set(Tensor::NextMean, has_next && has_mean);
        }
        let made = CpuBackend::new().forward_vec(&call.spec.sized(&x.rows), inputs, wanted).map_err(Error::wrap)?;
        let saved = |mean, rstd| call.save.then_some(call::Statistics::Cpu(Statistics { mean, rstd }));
        let next = has_next.then(|| (T::to_cpu_storage_owned(made.y), saved(made.next_mean, made.next_rstd)));
        let residual_out = R::to_cpu_storage_owned(made.residual_out);
        Ok(Added { residual_out, statistics: saved(made.mean, made.rstd), next })
    }

    fn backward<T: Native, W: Native, R: Native>(call: BackwardCall<'_, Self>) -> Result<Gradients<Self>> {
        let statistics = Statistics::of(call.statistics)?;
        let (dy, x) = (Place::of(call.dy.1)?, Place::of(call.x.1)?);
        let (dy, rows) = (dy.read(T::cpu_storage_as_slice(call.dy.0)?)?, x.rows);
        let x = x.read(R::cpu_storage_as_slice(call.x.0)?)?;
        let mut inputs = BackwardInputs::<T, W, R>::mixed(dy, x, &statistics.rstd);
        inputs = inputs.weight(vector::<W>(call.weight)?);
        if call.spec.norm == Norm::Layer {
            inputs = inputs.mean(&statistics.mean);
        }
        // The gradient of an f32 stream is not to be rounded to the activations' dtype.
        let is_wider = <T as WithDType>::DTYPE != <R as WithDType>::DTYPE;
        let wanted = call.wanted.set(Tensor::Dresidual, is_wider);
        let made = CpuBackend::new().backward_vec(&call.spec.sized(&rows), inputs, wanted).map_err(Error::wrap)?;
        Ok(Gradients {
            dx: if is_wider { R::to_cpu_storage_owned(made.dresidual) } else { T::to_cpu_storage_owned(made.dx) },
            dweight: wanted.has(Tensor::Dweight).then(|| W::to_cpu_storage_owned(made.dweight)),
            dbias: wanted.has(Tensor::Dbias).then(|| W::to_cpu_storage_owned(made.dbias)),
        })
    }

    fn overwrite<T: Native, W: Native>(call: InPlaceCall<'_, Self>) -> Result<()> {
        let x = Place::of(call.x.1)?;
        let Some(values) = T::values_mut(call.x.0) else { bail!("x is not of {:?}", <T as WithDType>::DTYPE) };
        let mut args = Forward::<T>::in_place(x.write(values)?).weight_dtype::<W>();
        args = args.weight(vector::<W>(call.weight)?);
        if let Some(bias) = call.bias {
            args = args.bias(vector::<W>(bias)?);
        }
        CpuBackend::new().forward(&call.spec.sized(&x.rows), args).map_err(Error::wrap)
    }

    fn lend(tensor: &candle_core::Tensor, f: impl Fn(Operand<'_, Self>) -> Result<()>) -> Result<()> {
        tensor.apply_op1_no_bwd(&Lend(f)).map(|_| ())
    }

    fn into_storage(self) -> Storage {
        Storage::Cpu(self)
    }

    fn from_storage(storage: Storage) -> Option<Self> {
        match storage {
            Storage::Cpu(storage) => Some(storage),
            Storage::Cuda(_) | Storage::Metal(_) => None,
        }
    }
}

/// An operation without a result of its own, which is lent a storage.
struct Lend<F>(F);

impl<F: Fn(Operand<'_, CpuStorage>) -> Result<()>> CustomOp1 for Lend<F> {
    fn name(&self) -> &'static str {
        "lend"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        (self.0)((storage, layout))?;
        Ok((CpuStorage::F32(Vec::new()), Shape::from(0)))
    }
}

/// A weight or a bias, which callers have made contiguous.
fn vector<W: Native>(operand: Operand<'_, CpuStorage>) -> Result<&[W]> {
    let place = Place::of(operand.1)?;
    Ok(place.read(W::cpu_storage_as_slice(operand.0)?)?.view)
}
