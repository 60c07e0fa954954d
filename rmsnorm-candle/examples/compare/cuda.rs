//! The time of calls on a GPU, with and without candle.

use std::cell::RefCell;

use candle_core::{CudaDevice, DType, Device, Error, Result, Tensor, WithDType};
use rmsnorm_core::cuda::cudarc::driver::{DeviceRepr, ValidAsZeroBits, sys::CUevent_flags};
use rmsnorm_core::cuda::{Backward, CudaBackend, Forward};
use rmsnorm_core::{Element, NormSpec};

use crate::EPS;
use crate::table::{Table, case};

/// (rounds of other work, calls of a sample after it), tried in turn. A queue takes about a
/// thousand launches before the host waits, and a call may have about forty: with more rounds there
/// are fewer calls.
const TRIES: [(u32, u32); 3] = [(32, 16), (128, 16), (256, 4)];

/// The first GPU; prints its name.
pub fn device() -> Result<Device> {
    let device = Device::new_cuda(0)?;
    println!("{}", backend(device.as_cuda_device()?)?);
    Ok(device)
}

fn backend(device: &CudaDevice) -> Result<CudaBackend> {
    CudaBackend::from_stream(device.cuda_stream()).map_err(Error::wrap)
}

/// Work that keeps the GPU busy while calls are enqueued, so that they run without gaps.
pub struct Behind {
    device: CudaDevice,
    work: Tensor,
}

impl Behind {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let work = Tensor::zeros(64 << 20, DType::F32, &Device::Cuda(device.clone()))?;
        Ok(Behind { device: device.clone(), work })
    }

    /// GPU time of one call in microseconds; `None` if the host enqueues too slowly, so that the
    /// GPU would wait for calls.
    pub fn sample(&self, call: impl Fn() -> Result<()>) -> Result<Option<f64>> {
        let stream = self.device.cuda_stream();
        let mark = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(Error::wrap);
        // Each round takes 0.1 ms or more.
        for (rounds, calls) in TRIES {
            for _ in 0..rounds {
                drop(self.work.affine(1.0, 0.0)?);
            }
            let start = mark()?;
            for _ in 0..calls {
                call()?;
            }
            let is_behind = !start.is_complete();
            let milliseconds = start.elapsed_ms(&mark()?).map_err(Error::wrap)?;
            if is_behind {
                return Ok(Some(f64::from(milliseconds) * 1e3 / f64::from(calls)));
            }
        }
        Ok(None)
    }
}

/// Times forward and backward of an RMS norm without candle, and candle's engine without the norm.
pub fn apart<T>(table: &Table, device: &CudaDevice, [x, w, dy]: [&Tensor; 3]) -> Result<()>
where
    T: Element + WithDType + DeviceRepr + ValidAsZeroBits,
{
    let [rows, cols] = table.shape;
    let stream = device.cuda_stream();
    let upload = |tensor: &Tensor| stream.clone_htod(&tensor.flatten_all()?.to_vec1::<T>()?).map_err(Error::wrap);
    let (xs, ws, dys) = (upload(x)?, upload(w)?, upload(dy)?);
    let room = |len: usize| stream.alloc_zeros::<T>(len).map(RefCell::new).map_err(Error::wrap);
    let (y, dx, dweight) = (room(rows * cols)?, room(rows * cols)?, room(cols)?);
    let rstd = RefCell::new(stream.alloc_zeros::<f32>(rows).map_err(Error::wrap)?);
    let (backend, norm) = (backend(device)?, NormSpec::rms(rows, cols, EPS));
    let forward = || {
        let (mut y, mut rstd) = (y.borrow_mut(), rstd.borrow_mut());
        let args = Forward::<T>::new(xs.as_view(), y.as_view_mut()).weight(ws.as_view()).rstd(rstd.as_view_mut());
        backend.forward(&norm, args).map_err(Error::wrap)
    };
    let backward = || {
        let (rstd, mut dx, mut dweight) = (rstd.borrow(), dx.borrow_mut(), dweight.borrow_mut());
        let args = Backward::<T>::new(dys.as_view(), xs.as_view(), rstd.as_view(), dx.as_view_mut());
        backend.backward(&norm, args.weight(ws.as_view()).dweight(dweight.as_view_mut())).map_err(Error::wrap)
    };
    table.print("of rms_norm forward, without candle", 2, &[case("the kernel, into memory that is there", forward)])?;
    table.print(
        "of rms_norm forward + backward, told apart",
        5,
        &[
            case("the kernels, into memory that is there", || forward().and_then(|()| backward())),
            // candle's backward fills the result's gradient with ones, and adds each gradient to
            // zeros.
            case("candle's engine: ones, zeros, additions", || {
                Ok((x.ones_like()?, (x.zeros_like()? + dy)?, (w.zeros_like()? + w)?))
            }),
        ],
    )
}
