//! Kernels on burn's wgpu devices: in the buffers where its tensors lie, on its device and its queue.
//!
//! burn keeps the device of its wgpu runtime to itself, so a program that wants the kernels asks for it when it opens the runtime,
//! and [`share`]s it:
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
//! On an H100 burn's own norms take 1.0 to 3.1 times as long: `benches/results/burn-wgpu-2026-11-25` in the repository.
//!
//! # Dtypes
//! f32, f16 and bf16 in all mixes, as on the CPU; the kernels do not ask what the device's arithmetic knows. burn does, where a copy
//! or a cast of its own stands before a norm: of rows that are less regular than [the crate](crate#shapes) says, of gradients of a
//! sum of two dtypes, and where a norm is its own operations.
//!
//! # Fusion
//! Under burn's fusion, which this feature turns on for all of CubeCL's devices, the norms are operations of its stream: they run
//! when something asks for the values, and what stands before and behind them is fused without them. What fails then, such as a
//! device without memory, is reported where values are read.
//!
//! # Ordering
//! A call submits what burn has recorded for its tensors, and itself, to the device's queue. The device is not waited for. Each call
//! is a submission of its own, where burn's own operations share one by the dozen.
//!
//! # Memory
//! Results are new tensors of burn's pools. Tensors lie where they are: only rows that are less regular are copied first. But burn
//! itself makes a `narrow` a copy here, unless it begins and ends at a multiple of the device's offset alignment, 256 bytes at most.
//! Backward keeps a workspace for the gradients of parameters beside them, as large as the largest that was needed.
//!
//! # Graph capture and dry runs
//! A norm that is called while burn captures a graph on its stream is burn's own operations, which the graph records. Its backward
//! pass has to be on the same side of the capture: in a graph, that of a norm called before it fails where gradients are read. In a
//! dry run of CubeCL's the kernels do run.

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

/// A device that was shared.
struct Shared {
    device: CubeDevice,
    client: Client,
    norms: WgpuBackend,
}

static SHARED: RwLock<Vec<Shared>> = RwLock::new(Vec::new());

/// Norms of tensors on `device` are kernels from now on, for the rest of the process. `setup` is what burn's
/// `init_with_setup` gave with the device, or what was given to its `setup`. A second call with the same device changes nothing.
///
/// # Errors
/// `Unsupported` if `device` is no wgpu device of burn's, or a norm of a row on it gives something else by the setup: the two are
/// not of one runtime; `Device` if it fails. `Unavailable` if the setup's device leaves no room for kernels, or `RMSNORM_TUNING`
/// names a table that does not fit. Nothing is shared then.
///
/// # Panics
/// wgpu cannot tell buffers of one `wgpu::Instance` from another's. Where the two are of different ones it may panic, or the trial's
/// row of 4 values is written into a buffer of the setup's before it is refused.
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

/// The backend whose kernels norms on this device are, if it was [`share`]d: to encode calls of one's own on burn's device. Kernels
/// are compiled when they are first used; to have them before, call the function once: `prepare` compiles those for tensors in buffers
/// of their own, and burn has several in one.
pub fn backend(device: &Device) -> Option<WgpuBackend> {
    find(of(device)?, |shared| shared.norms.clone())
}

/// Whether a call on tensors of this device has kernels now.
pub(crate) fn has_kernels(device: &Device) -> bool {
    let is_capturing = of(device).and_then(|device| find(device, |shared| shared.client.is_capturing()));
    is_capturing == Some(false)
}

/// CubeCL's name of a wgpu device of burn's, with autodiff or without.
fn of(device: &Device) -> Option<&CubeDevice> {
    let mut device = device.as_dispatch();
    if let DispatchDevice::Autodiff(inner) = device {
        device = inner;
    }
    if let DispatchDevice::Cube(device @ CubeDevice::Wgpu(_)) = device { Some(device) } else { None }
}

/// What is asked of a device, if it was shared.
fn find<T>(device: &CubeDevice, ask: impl FnOnce(&Shared) -> T) -> Option<T> {
    let shared = SHARED.read().unwrap_or_else(PoisonError::into_inner);
    shared.iter().find(|one| one.device == *device).map(ask)
}

/// The kernels for a call that runs now.
///
/// # Errors
/// `Unsupported` where the device was not shared, or a graph is captured: callers have made sure of both when they made the call.
fn shared_backend(device: &CubeDevice, client: &Client) -> Result<WgpuBackend, Error> {
    let refuse = |why: &str| Error::Unsupported { rule: format!("a norm on {device:?}: {why}") };
    if client.is_capturing() {
        return Err(refuse("a graph that is captured would not have it"));
    }
    find(device, |shared| shared.norms.clone()).ok_or_else(|| refuse("the device was not shared"))
}

impl Run for CubeBackend {
    fn run_forward(call: ForwardCall<CubeBackend>) -> Result<Forwarded<CubeBackend>, Error> {
        on_device_thread(&call.x.client.clone(), || forward::forward(call))
    }

    fn run_backward(call: BackwardCall<CubeBackend>) -> Result<Gradients<CubeBackend>, Error> {
        on_device_thread(&call.x.client.clone(), || backward::backward(call))
    }
}
