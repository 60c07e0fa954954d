//! The calls on CUDA storages, enqueued on their device's stream. Results are new memory, not
//! zeroed before it is written.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::{CudaDevice, CudaStorage, Error, Result, Storage, bail};
use rmsnorm_core::cuda::CudaBackend;
use rmsnorm_core::{
    AnyBackward, AnyCall, AnyElement, AnyForward, AnyIn, AnyOut, Checked, DType, NormBackend, NormSpec, Rows, Source,
    Tensor, TensorSet, with_type,
};

use crate::call::{BackwardCall, ForwardCall, Forwarded, Gradients, Kernels, kernels_dtype, rows, vector};

impl Kernels for CudaStorage {
    type Norms = CudaBackend;

    /// A backend on the device's stream. The first one of each context is kept, so that kernels are
    /// loaded once.
    fn norms(&self) -> Result<CudaBackend> {
        static BACKENDS: Mutex<Vec<CudaBackend>> = Mutex::new(Vec::new());
        let stream = self.device.cuda_stream();
        // A panic leaves only whole entries: each is complete before the push.
        let mut backends = BACKENDS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backend) = backends.iter().find(|backend| backend.stream().context() == stream.context()) {
            return backend.on(stream).map_err(Error::wrap);
        }
        let backend = CudaBackend::from_stream(stream).map_err(Error::wrap)?;
        backends.push(backend.clone());
        Ok(backend)
    }

    fn view(&self, range: Range<usize>) -> Result<AnyIn<'_, CudaBackend>> {
        with_type!(kernels_dtype(self)?; T => {
            let slice = self.as_cuda_slice::<T>()?;
            match slice.try_slice(range.clone()) {
                Some(view) => Ok(T::any_in::<CudaBackend>(view)),
                None => bail!("the rows of a tensor are elements {range:?}, its storage has {}", slice.len()),
            }
        })
    }

    fn view_mut(&mut self, range: Range<usize>) -> Result<AnyOut<'_, CudaBackend>> {
        with_type!(kernels_dtype(self)?; T => {
            let slice = self.as_cuda_slice_mut::<T>()?;
            let len = slice.len();
            match slice.try_slice_mut(range.clone()) {
                Some(view) => Ok(T::any_out::<CudaBackend>(view)),
                None => bail!("the rows of a tensor are elements {range:?}, its storage has {len}"),
            }
        })
    }

    fn forward(call: &ForwardCall<'_, Self>, spec: &NormSpec, wanted: TensorSet) -> Result<Forwarded<Self>> {
        let (dtypes, len) = (call.dtypes()?, spec.rows * spec.cols);
        let device = &call.x.0.device;
        let room = |name, dtype, len| wanted.has(name).then(|| room(device, dtype, len)).transpose();
        let statistics = spec.rows * spec.groups;
        let statistic = |name| room(name, DType::F32, statistics);
        let mut made = Forwarded {
            y: room(Tensor::Y, dtypes.activation, len)?,
            residual_out: room(Tensor::ResidualOut, dtypes.residual, len)?,
            mean: statistic(Tensor::Mean)?,
            rstd: statistic(Tensor::Rstd)?,
            next_mean: statistic(Tensor::NextMean)?,
            next_rstd: statistic(Tensor::NextRstd)?,
        };
        let mut args = AnyForward::<CudaBackend>::added_to_residual(rows(call.x)?);
        args.dtypes = dtypes;
        args.weight = Some(vector(call.weight)?);
        args.bias = call.bias.map(vector).transpose()?;
        args.residual = match call.is_cast() {
            true => args.x.take(),
            false => call.residual.map(rows).transpose()?.map(Source::Read),
        };
        args.gate = call.gate.map(rows).transpose()?;
        args.next_weight = call.next_weight.map(vector).transpose()?;
        args.next_bias = call.next_bias.map(vector).transpose()?;
        args.y = lend(&mut made.y, len)?.map(Rows::dense);
        args.residual_out = lend(&mut made.residual_out, len)?.map(Rows::dense);
        args.mean = lend(&mut made.mean, statistics)?;
        args.rstd = lend(&mut made.rstd, statistics)?;
        args.next_mean = lend(&mut made.next_mean, statistics)?;
        args.next_rstd = lend(&mut made.next_rstd, statistics)?;
        let checked = Checked::forward(*spec, args).map_err(Error::wrap)?;
        call.x.0.norms()?.launch(AnyCall::Forward(checked)).map_err(Error::wrap)?;
        Ok(made)
    }

    fn backward(call: &BackwardCall<'_, Self>, spec: &NormSpec) -> Result<Gradients<Self>> {
        let (dtypes, len) = (call.dtypes()?, spec.rows * spec.cols);
        let device = &call.x.0.device;
        // In the dtype of x: the gradient of an f32 stream must not be rounded to the activations'.
        let mut dx = room(device, dtypes.residual, len)?;
        let parameter = |name| call.wanted.has(name).then(|| room(device, dtypes.weight, spec.cols)).transpose();
        let (mut dweight, mut dbias) = (parameter(Tensor::Dweight)?, parameter(Tensor::Dbias)?);
        let mut dgate = call.wanted.has(Tensor::Dgate).then(|| room(device, dtypes.activation, len)).transpose()?;

        let statistics = spec.rows * spec.groups;
        let rstd = call.statistics.rstd.view(0..statistics)?;
        let (dy, x, of_x) = (rows(call.dy)?, rows(call.x)?, dx.view_mut(0..len)?);
        let mut args = match dtypes.activation == dtypes.residual {
            true => AnyBackward::<CudaBackend>::new(dy, x, rstd, of_x),
            false => AnyBackward::cast(dy, x, rstd, of_x),
        };
        args.dtypes = dtypes;
        args.weight = Some(vector(call.weight)?);
        args.mean = call.statistics.mean.as_ref().map(|mean| mean.view(0..statistics)).transpose()?;
        args.bias = call.bias.map(vector).transpose()?;
        args.gate = call.gate.map(rows).transpose()?;
        args.dgate = lend(&mut dgate, len)?.map(Rows::dense);
        args.dweight = lend(&mut dweight, spec.cols)?;
        args.dbias = lend(&mut dbias, spec.cols)?;
        let norms = call.x.0.norms()?;
        let checked = Checked::backward(&norms, *spec, args).map_err(Error::wrap)?;
        norms.launch(AnyCall::Backward(checked)).map_err(Error::wrap)?;
        Ok(Gradients { dx, dweight, dbias, dgate })
    }

    fn nothing(&self) -> Result<Self> {
        room(&self.device, DType::F32, 0)
    }

    fn into_storage(self) -> Storage {
        Storage::Cuda(self)
    }
}

/// An optional output, for writing.
fn lend(output: &mut Option<CudaStorage>, len: usize) -> Result<Option<AnyOut<'_, CudaBackend>>> {
    output.as_mut().map(|output| output.view_mut(0..len)).transpose()
}

/// Memory for `len` elements of a result; at least one, because CUDA does not allocate less.
#[expect(unsafe_code, reason = "the memory is not zeroed first")]
fn room(device: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    with_type!(dtype; T => {
        // SAFETY:
        // - contents: a result goes to a call that writes every element, on the stream that
        //   allocates it, before it leaves this file; if the call fails, it does not leave this
        //   file. Memory beyond `len` is no element of any tensor.
        let slice = unsafe { device.alloc::<T>(len.max(1)) }?;
        Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
    })
}
