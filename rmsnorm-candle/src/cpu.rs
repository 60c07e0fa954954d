//! The calls on CPU storages. Results are new vectors, not zeroed before they are written, and so
//! typed.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Error, Result, Storage, WithDType, bail};
use rmsnorm_core::cpu::{BackwardInputs, CpuBackend, ForwardInputs};
use rmsnorm_core::{AnyElement, AnyIn, AnyOut, Element, NormSpec, Rows, Tensor, TensorSet, with_type, with_types};

use crate::call::{self, BackwardCall, ForwardCall, Forwarded, Gradients, Kernels, Operand, kernels_dtype};

impl Kernels for CpuStorage {
    type Norms = CpuBackend;

    fn norms(&self) -> Result<CpuBackend> {
        Ok(CpuBackend::new())
    }

    fn view(&self, range: Range<usize>) -> Result<AnyIn<'_, CpuBackend>> {
        with_type!(kernels_dtype(self)?; T => {
            let elements = T::cpu_storage_as_slice(self)?;
            match elements.get(range.clone()) {
                Some(view) => Ok(T::any_in::<CpuBackend>(view)),
                None => bail!("the rows of a tensor are elements {range:?}, its storage has {}", elements.len()),
            }
        })
    }

    fn view_mut(&mut self, range: Range<usize>) -> Result<AnyOut<'_, CpuBackend>> {
        let dtype = self.dtype();
        let view = if let CpuStorage::F32(elements) = self {
            elements.get_mut(range.clone()).map(AnyOut::F32)
        } else if let CpuStorage::F16(elements) = self {
            elements.get_mut(range.clone()).map(AnyOut::F16)
        } else if let CpuStorage::BF16(elements) = self {
            elements.get_mut(range.clone()).map(AnyOut::Bf16)
        } else {
            None
        };
        match view {
            Some(view) => Ok(view),
            None => bail!("kernels cannot write elements {range:?} of a {dtype:?} storage"),
        }
    }

    fn forward(call: &ForwardCall<'_, Self>, spec: &NormSpec, wanted: TensorSet) -> Result<Forwarded<Self>> {
        let statistic = |name, values| wanted.has(name).then_some(CpuStorage::F32(values));
        with_types!(call.dtypes()?; T, W, R => {
            let mut inputs = match call.is_cast() {
                true => ForwardInputs::<T, W, R>::cast(rows(call.x)?),
                false => ForwardInputs::mixed(rows(call.x)?),
            };
            inputs = inputs.weight(vector(call.weight)?);
            if let Some(bias) = call.bias {
                inputs = inputs.bias(vector(bias)?);
            }
            if let Some(residual) = call.residual {
                inputs = inputs.residual(rows(residual)?);
            }
            if let Some(gate) = call.gate {
                inputs = inputs.gate(rows(gate)?);
            }
            if let Some(next_weight) = call.next_weight {
                inputs = inputs.next_weight(vector(next_weight)?);
            }
            if let Some(next_bias) = call.next_bias {
                inputs = inputs.next_bias(vector(next_bias)?);
            }
            let made = CpuBackend::new().forward_vec(spec, inputs, wanted).map_err(Error::wrap)?;
            Ok(Forwarded {
                y: wanted.has(Tensor::Y).then(|| T::to_cpu_storage_owned(made.y)),
                residual_out: wanted.has(Tensor::ResidualOut).then(|| R::to_cpu_storage_owned(made.residual_out)),
                mean: statistic(Tensor::Mean, made.mean),
                rstd: statistic(Tensor::Rstd, made.rstd),
                next_mean: statistic(Tensor::NextMean, made.next_mean),
                next_rstd: statistic(Tensor::NextRstd, made.next_rstd),
            })
        })
    }

    fn backward(call: &BackwardCall<'_, Self>, spec: &NormSpec) -> Result<Gradients<Self>> {
        let (dtypes, wanted) = (call.dtypes()?, call.wanted);
        // The gradient has the dtype of x: that of an f32 stream must not be rounded to the activations'.
        let is_cast = dtypes.activation != dtypes.residual;
        let rstd = call.statistics.rstd.as_slice()?;
        let mean = call.statistics.mean.as_ref().map(CpuStorage::as_slice).transpose()?;
        with_types!(dtypes; T, W, R => {
            let mut inputs = match is_cast {
                true => BackwardInputs::<T, W, R>::cast(rows(call.dy)?, rows(call.x)?, rstd),
                false => BackwardInputs::mixed(rows(call.dy)?, rows(call.x)?, rstd),
            };
            inputs = inputs.weight(vector(call.weight)?);
            if let Some(mean) = mean {
                inputs = inputs.mean(mean);
            }
            if let Some(bias) = call.bias {
                inputs = inputs.bias(vector(bias)?);
            }
            if let Some(gate) = call.gate {
                inputs = inputs.gate(rows(gate)?);
            }
            let made = CpuBackend::new().backward_vec(spec, inputs, wanted).map_err(Error::wrap)?;
            Ok(Gradients {
                dx: if is_cast { R::to_cpu_storage_owned(made.dresidual) } else { T::to_cpu_storage_owned(made.dx) },
                dweight: wanted.has(Tensor::Dweight).then(|| W::to_cpu_storage_owned(made.dweight)),
                dbias: wanted.has(Tensor::Dbias).then(|| W::to_cpu_storage_owned(made.dbias)),
                dgate: wanted.has(Tensor::Dgate).then(|| T::to_cpu_storage_owned(made.dgate)),
            })
        })
    }

    fn nothing(&self) -> Result<Self> {
        Ok(CpuStorage::F32(Vec::new()))
    }

    fn into_storage(self) -> Storage {
        Storage::Cpu(self)
    }
}

/// The typed rows of a tensor.
fn rows<T: Element>(operand: Operand<'_, CpuStorage>) -> Result<Rows<&[T]>> {
    let rows = call::rows(operand)?;
    let layout = rows.with(());
    Ok(layout.with(rows.view.typed().map_err(Error::wrap)?))
}

/// A typed weight or bias.
fn vector<W: Element>(operand: Operand<'_, CpuStorage>) -> Result<&[W]> {
    call::vector(operand)?.typed().map_err(Error::wrap)
}
