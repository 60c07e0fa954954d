//! The calls on CUDA storages, enqueued on their device's stream. Results are new memory that nobody zeroes first.

use std::sync::{Mutex, PoisonError};

use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, Error, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use rmsnorm_core::cuda::cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use rmsnorm_core::cuda::{Backward, CudaBackend, Forward};
use rmsnorm_core::{Norm, Tensor as Name};

use crate::call::{
    self, Added, AfterCall, BackwardCall, ForwardCall, Gradients, InPlaceCall, Kernels, Normalized, Operand,
};
use crate::native::Native;
use crate::rows::Place;

/// What a forward pass saves for backward: on the device.
#[derive(Debug)]
pub(crate) struct Statistics {
    /// Of layer norm.
    mean: Option<CudaSlice<f32>>,
    rstd: CudaSlice<f32>,
}

impl Statistics {
    fn of(statistics: &call::Statistics) -> Result<&Statistics> {
        match statistics {
            call::Statistics::Cuda(statistics) => Ok(statistics),
            call::Statistics::Cpu(_) => bail!("the forward pass was on another device"),
        }
    }
}

/// Room for the statistics of a norm, where they are saved: 4 bytes a row each.
struct Saved {
    /// Of layer norm.
    mean: Option<CudaSlice<f32>>,
    rstd: Option<CudaSlice<f32>>,
}

impl Saved {
    fn room(save: bool, norm: Norm, rows: usize, device: &CudaDevice) -> Result<Self> {
        let room = |is_saved: bool| is_saved.then(|| room::<f32>(device, rows)).transpose();
        Ok(Saved { mean: room(save && norm == Norm::Layer)?, rstd: room(save)? })
    }

    /// The mean's and the rstd's, to be written.
    fn views(&mut self, rows: usize) -> [Option<CudaViewMut<'_, f32>>; 2] {
        [&mut self.mean, &mut self.rstd].map(|room| room.as_mut().map(|room| room.slice_mut(..rows)))
    }

    fn statistics(self) -> Option<call::Statistics> {
        self.rstd.map(|rstd| call::Statistics::Cuda(Statistics { mean: self.mean, rstd }))
    }
}

impl Kernels for CudaStorage {
    fn forward<T: Native, W: Native, R: Native>(call: ForwardCall<'_, Self>) -> Result<Normalized<Self>> {
        let device = &call.x.0.device;
        let x = Place::of(call.x.1)?;
        let (rows, len) = (x.rows.rows, x.rows.rows * x.rows.cols);
        let mut y = room::<T>(device, len)?;
        let mut residual_out = call.residual.map(|_| room::<R>(device, len)).transpose()?;
        let mut saved = Saved::room(call.save, call.spec.norm, rows, device)?;

        let mut args = Forward::<T>::new(x.view(T::as_cuda_slice(call.x.0)?)?, y.slice_mut(..len))
            .weight_dtype::<W>()
            .residual_dtype::<R>()
            .weight(vector::<W>(call.weight)?);
        if let Some(bias) = call.bias {
            args = args.bias(vector::<W>(bias)?);
        }
        if let Some((residual, layout)) = call.residual {
            args = args.residual(Place::of(layout)?.view(R::as_cuda_slice(residual)?)?);
        }
        if let Some(residual_out) = &mut residual_out {
            args = args.residual_out(residual_out.slice_mut(..len));
        }
        [args.mean, args.rstd] = saved.views(rows);
        backend(device)?.forward(&call.spec.sized(&x.rows), args).map_err(Error::wrap)?;

        Ok(Normalized {
            y: CudaStorage::wrap_cuda_slice(y, device.clone()),
            residual_out: residual_out.map(|sum| CudaStorage::wrap_cuda_slice(sum, device.clone())),
            statistics: saved.statistics(),
        })
    }

    fn forward_after<T: Native, W: Native, R: Native>(call: AfterCall<'_, Self>) -> Result<Added<Self>> {
        let device = &call.x.0.device;
        let x = Place::of(call.x.1)?;
        let (rows, len) = (x.rows.rows, x.rows.rows * x.rows.cols);
        let mut residual_out = room::<R>(device, len)?;
        let saved = || Saved::room(call.save, call.spec.norm, rows, device);
        let mut first = saved()?;
        let mut next = match call.next_weight {
            Some(_) => Some((room::<T>(device, len)?, saved()?)),
            None => None,
        };

        let mut args = Forward::<T>::onto_residual(x.view(T::as_cuda_slice(call.x.0)?)?)
            .weight_dtype::<W>()
            .residual_dtype::<R>()
            .weight(vector::<W>(call.weight)?)
            .residual(Place::of(call.residual.1)?.view(R::as_cuda_slice(call.residual.0)?)?)
            .residual_out(residual_out.slice_mut(..len));
        if let Some(bias) = call.bias {
            args = args.bias(vector::<W>(bias)?);
        }
        [args.mean, args.rstd] = first.views(rows);
        args.next_weight = call.next_weight.map(vector::<W>).transpose()?;
        if let Some((y, saved)) = &mut next {
            args.y = Some(y.slice_mut(..len).into());
            [args.next_mean, args.next_rstd] = saved.views(rows);
        }
        backend(device)?.forward(&call.spec.sized(&x.rows), args).map_err(Error::wrap)?;

        Ok(Added {
            residual_out: CudaStorage::wrap_cuda_slice(residual_out, device.clone()),
            statistics: first.statistics(),
            next: next.map(|(y, saved)| (CudaStorage::wrap_cuda_slice(y, device.clone()), saved.statistics())),
        })
    }

    fn backward<T: Native, W: Native, R: Native>(call: BackwardCall<'_, Self>) -> Result<Gradients<Self>> {
        let statistics = Statistics::of(call.statistics)?;
        let device = &call.x.0.device;
        let (dy, x) = (Place::of(call.dy.1)?, Place::of(call.x.1)?);
        let (rows, cols) = (x.rows.rows, x.rows.cols);
        let len = rows * cols;
        // The gradient of an f32 stream is not to be rounded to the activations' dtype.
        let is_wider = <T as WithDType>::DTYPE != <R as WithDType>::DTYPE;
        let mut dx = room::<T>(device, len)?;
        let mut dresidual = is_wider.then(|| room::<R>(device, len)).transpose()?;
        let mut dweight = call.wanted.has(Name::Dweight).then(|| room::<W>(device, cols)).transpose()?;
        let mut dbias = call.wanted.has(Name::Dbias).then(|| room::<W>(device, cols)).transpose()?;

        let (dy, x_rows) = (dy.view(T::as_cuda_slice(call.dy.0)?)?, x.view(R::as_cuda_slice(call.x.0)?)?);
        let mut args = Backward::<T, W, R>::mixed(dy, x_rows, statistics.rstd.slice(..rows), dx.slice_mut(..len))
            .weight(vector::<W>(call.weight)?);
        if let Some(mean) = &statistics.mean {
            args = args.mean(mean.slice(..rows));
        }
        if let Some(dresidual) = &mut dresidual {
            args = args.dresidual(dresidual.slice_mut(..len));
        }
        if let Some(dweight) = &mut dweight {
            args = args.dweight(dweight.as_view_mut());
        }
        if let Some(dbias) = &mut dbias {
            args = args.dbias(dbias.as_view_mut());
        }
        backend(device)?.backward(&call.spec.sized(&x.rows), args).map_err(Error::wrap)?;

        let parameter = |gradient| CudaStorage::wrap_cuda_slice::<W>(gradient, device.clone());
        Ok(Gradients {
            dx: match dresidual {
                Some(dresidual) => CudaStorage::wrap_cuda_slice(dresidual, device.clone()),
                None => CudaStorage::wrap_cuda_slice(dx, device.clone()),
            },
            dweight: dweight.map(parameter),
            dbias: dbias.map(parameter),
        })
    }

    fn overwrite<T: Native, W: Native>(call: InPlaceCall<'_, Self>) -> Result<()> {
        let (storage, layout) = call.x;
        let x = Place::of(layout)?;
        let backend = backend(&storage.device)?;
        let slice = T::as_cuda_slice_mut(storage)?;
        let len = slice.len();
        let Some(view) = slice.try_slice_mut(x.range.clone()) else {
            bail!("rows at {:?} of a storage of {len} elements", x.range)
        };
        let mut args = Forward::<T>::in_place(x.rows.rows(view)).weight_dtype::<W>();
        args = args.weight(vector::<W>(call.weight)?);
        if let Some(bias) = call.bias {
            args = args.bias(vector::<W>(bias)?);
        }
        backend.forward(&call.spec.sized(&x.rows), args).map_err(Error::wrap)
    }

    fn lend(tensor: &Tensor, f: impl Fn(Operand<'_, Self>) -> Result<()>) -> Result<()> {
        tensor.apply_op1_no_bwd(&Lend(f)).map(|_| ())
    }

    fn into_storage(self) -> Storage {
        Storage::Cuda(self)
    }

    fn from_storage(storage: Storage) -> Option<Self> {
        match storage {
            Storage::Cuda(storage) => Some(storage),
            Storage::Cpu(_) | Storage::Metal(_) => None,
        }
    }
}

/// The backend on a device's stream. One is made for each context in use, and stays: kernels are loaded once.
fn backend(device: &CudaDevice) -> Result<CudaBackend> {
    static BACKENDS: Mutex<Vec<CudaBackend>> = Mutex::new(Vec::new());
    let stream = device.cuda_stream();
    // A thread that panicked has left whole entries: each is made before it is pushed.
    let mut backends = BACKENDS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(backend) = backends.iter().find(|backend| backend.stream().context() == stream.context()) {
        return backend.on(stream).map_err(Error::wrap);
    }
    let backend = CudaBackend::from_stream(stream).map_err(Error::wrap)?;
    backends.push(backend.clone());
    Ok(backend)
}

/// Memory for that many elements of a result; for one where there are none, as CUDA allocates nothing less.
#[expect(unsafe_code, reason = "nobody zeroes it first")]
fn room<T: Native>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
    // SAFETY:
    // - contents: a result is given to a call that writes every element, on the stream that it is allocated on, before it gets
    //   out of this file; where the call fails it does not. What is there beyond `len` is no element of any tensor.
    unsafe { device.alloc::<T>(len.max(1)) }
}

impl Place {
    /// The elements of a storage that are these rows.
    fn view<'a, T: Native>(&self, slice: &'a CudaSlice<T>) -> Result<rmsnorm_core::Rows<CudaView<'a, T>>> {
        match slice.try_slice(self.range.clone()) {
            Some(view) => Ok(self.rows.rows(view)),
            None => bail!("rows at {:?} of a storage of {} elements", self.range, slice.len()),
        }
    }
}

/// An operation without a result of its own, which is lent a storage.
struct Lend<F>(F);

impl<F: Fn(Operand<'_, CudaStorage>) -> Result<()>> CustomOp1 for Lend<F> {
    fn name(&self) -> &'static str {
        "lend"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("a tensor of another device")
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        (self.0)((storage, layout))?;
        let nothing = room::<f32>(&storage.device, 0)?;
        Ok((CudaStorage::wrap_cuda_slice(nothing, storage.device.clone()), Shape::from(0)))
    }
}

/// A weight or a bias, which callers have made contiguous.
fn vector<W: Native>(operand: Operand<'_, CudaStorage>) -> Result<CudaView<'_, W>> {
    Ok(Place::of(operand.1)?.view(W::as_cuda_slice(operand.0)?)?.view)
}
