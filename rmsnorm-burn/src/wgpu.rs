//! Kernels on burn's wgpu devices: in the buffers of its tensors, on its device and queue.
//!
//! burn does not expose the device of a running wgpu runtime. A program that wants the kernels
//! requests the device when it opens the runtime, and [`share`]s it:
//!
//! ```no_run
//! use burn::tensor::{Device, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (device, setup) = Device::wgpu_options().init_with_setup()?;
//! rmsnorm_burn::wgpu::share(&device, &setup)?;
//! let x = Tensor::<2>::ones([4, 1024], &device);
//! let y = rmsnorm_burn::rms_norm(x, Tensor::ones([1024], &device), 1e-6);
//! # Ok(())
//! # }
//! ```
//!
//! On an H200 burn's own norms take 0.8 to 3.8 times as long as ours: `benches/results/h200` in the
//! repository.
//!
//! # Dtypes
//! f32, f16 and bf16 in all mixes, as on the CPU, even if the device has no arithmetic in these
//! dtypes. burn needs that arithmetic where it copies or casts before a norm: for rows that need
//! more than two strides ([the crate](crate#shapes)), for gradients of a sum of two dtypes, and if
//! a norm runs as burn's operations.
//!
//! # Fusion
//! Under burn's fusion, which this feature enables for all of CubeCL's devices, the norms are
//! operations of its stream: they run when their values are read, and burn fuses the operations
//! before and after them, but not the norms. Failures, such as a device without memory, are
//! reported when values are read.
//!
//! # Ordering
//! A call submits the commands that burn has recorded for its tensors, and then its own, to the
//! device's queue, without waiting. Each call is one submission, while burn's own operations share
//! one by the dozen.
//!
//! # Memory
//! Results are new tensors from burn's pools. Tensors are read in place; only rows that need more
//! than two strides are copied first. But burn itself copies a `narrow`, unless it begins and ends
//! at a multiple of the device's offset alignment, which is at most 256 bytes. The kernels keep a
//! workspace for the gradients of parameters, as large as the largest so far.
//!
//! # Graph capture and dry runs
//! While burn captures a graph on its stream, a norm runs as burn's own operations, which the graph
//! records. Forward and backward must be on the same side of the capture: the backward pass of an
//! earlier norm inside a graph fails when its gradients are read. In a dry run of CubeCL the
//! kernels do run.

mod backward;
mod buffers;
mod forward;
mod trial;

use std::sync::{PoisonError, RwLock};

use burn::backend::wgpu::{CubeBackend, WgpuSetup};
use burn::backend::{CubeDevice, DispatchDevice};
use burn::cubecl::client::Client;
use burn::tensor::Device;
#[doc(no_inline)]
pub use rmsnorm_core::Error;
#[doc(no_inline)]
pub use rmsnorm_core::wgpu::WgpuBackend;

use crate::kernels::{BackwardCall, ForwardCall, Forwarded, Gradients, Run};
use buffers::on_device_thread;

/// A shared device.
struct Shared {
    device: CubeDevice,
    client: Client,
    norms: WgpuBackend,
}

static SHARED: RwLock<Vec<Shared>> = RwLock::new(Vec::new());

/// Runs norms of tensors on `device` as kernels from now on, for the rest of the process. `setup`
/// comes with the device from burn's `init_with_setup`, or is the argument of its `setup`. A second
/// call with the same device changes nothing.
///
/// # Errors
/// `Unsupported` if `device` is not a wgpu device of burn, or a trial norm shows that device and
/// setup belong to different runtimes; `Device` if the trial fails. `Unavailable` if the setup's
/// device leaves no room for kernels, or `RMSNORM_TUNING` names a table that does not fit. On an
/// error nothing is shared.
///
/// # Panics
/// wgpu cannot distinguish buffers of two `wgpu::Instance`s. If device and setup belong to
/// different instances, it may panic, or the trial writes a row of 4 values into a buffer of the
/// setup before it is refused.
pub fn share(device: &Device, setup: &WgpuSetup) -> Result<(), Error> {
    let Some(cube) = of(device) else {
        return Err(Error::Unsupported { rule: format!("kernels are for burn's wgpu devices, got {device:?}") });
    };
    if backend(device).is_some() {
        return Ok(());
    }
    let (device, client) = (cube.clone(), cube.client());
    let norms = WgpuBackend::from_device(setup.device.clone(), setup.queue.clone())?;
    trial::run(&device, &client, &norms)?;
    let mut shared = SHARED.write().unwrap_or_else(PoisonError::into_inner);
    if shared.iter().all(|one| one.device != device) {
        shared.push(Shared { device, client, norms });
    }
    Ok(())
}

/// The backend of this device's norms, if it was [`share`]d: to encode your own calls on burn's
/// device. Kernels are compiled at first use. To compile them earlier, call the function once:
/// `prepare` compiles kernels for tensors in separate buffers, and burn puts several tensors in
/// one.
pub fn backend(device: &Device) -> Option<WgpuBackend> {
    find(of(device)?, |shared| shared.norms.clone())
}

/// Whether calls on this device run as kernels now.
pub(crate) fn has_kernels(device: &Device) -> bool {
    let is_capturing = of(device).and_then(|device| find(device, |shared| shared.client.is_capturing()));
    is_capturing == Some(false)
}

/// CubeCL's name of a burn wgpu device, with or without autodiff.
fn of(device: &Device) -> Option<&CubeDevice> {
    let mut device = device.as_dispatch();
    if let DispatchDevice::Autodiff(inner) = device {
        device = inner;
    }
    if let DispatchDevice::Cube(device @ CubeDevice::Wgpu(_)) = device { Some(device) } else { None }
}

/// Applies `ask` to a device, if it was shared.
fn find<T>(device: &CubeDevice, ask: impl FnOnce(&Shared) -> T) -> Option<T> {
    let shared = SHARED.read().unwrap_or_else(PoisonError::into_inner);
    shared.iter().find(|one| one.device == *device).map(ask)
}

/// The backend of a call that runs now.
///
/// # Errors
/// `Unsupported` if the device was not shared, or a graph is being captured; callers checked both
/// when they made the call.
fn shared_backend(device: &CubeDevice, client: &Client) -> Result<WgpuBackend, Error> {
    let refuse = |why: &str| Error::Unsupported { rule: format!("a norm on {device:?}: {why}") };
    if client.is_capturing() {
        return Err(refuse(
            "a captured graph would not contain it: run this norm, forward and backward, outside of the capture",
        ));
    }
    find(device, |shared| shared.norms.clone())
        .ok_or_else(|| refuse("call rmsnorm_burn::wgpu::share(&device, &setup) before the first norm"))
}

impl Run for CubeBackend {
    fn run_forward(call: ForwardCall<CubeBackend>) -> Result<Forwarded<CubeBackend>, Error> {
        on_device_thread(&call.x.client.clone(), || forward::forward(call))
    }

    fn run_backward(call: BackwardCall<CubeBackend>) -> Result<Gradients<CubeBackend>, Error> {
        on_device_thread(&call.x.client.clone(), || backward::backward(call))
    }
}
