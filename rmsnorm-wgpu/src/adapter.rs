//! Adapters in order of preference, and devices opened on them with all their features and limits.

use std::env;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rmsnorm_spec::Error;
use wgpu::{
    Adapter, Backends, Device, DeviceDescriptor, DeviceType, DownlevelFlags, ExperimentalFeatures, Features, Instance,
    InstanceDescriptor, InstanceFlags, MemoryHints, PowerPreference, Queue, RequestAdapterOptions, Trace,
};

use crate::error::{IS_BROWSER, WgpuFailure, unavailable};

/// Part of an adapter's name, case-insensitive. Other adapters are ignored.
const NAME_VARIABLE: &str = "WGPU_ADAPTER_NAME";

/// The graphics APIs that wgpu searches for adapters.
const BACKEND_VARIABLE: &str = "WGPU_BACKEND";

/// Optional features that kernels or measurements use.
const USEFUL: Features = Features::SUBGROUP
    .union(Features::SHADER_F16)
    .union(Features::TIMESTAMP_QUERY)
    .union(Features::TIMESTAMP_QUERY_INSIDE_ENCODERS)
    .union(Features::PIPELINE_CACHE);

/// Errors of a device opened by this crate that were reported outside of calls.
#[derive(Debug, Default)]
pub(crate) struct Health {
    lost: OnceLock<String>,
    uncaptured: Mutex<Option<WgpuFailure>>,
}

impl Health {
    /// The error of the next call: the device is lost (every time), or an uncaptured error (once).
    pub(crate) fn failure(&self) -> Option<WgpuFailure> {
        if let Some(reason) = self.lost.get() {
            return Some(WgpuFailure::lost("the device", reason.as_str()));
        }
        self.uncaptured.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The adapters that can run kernels: discrete GPUs, integrated, virtual, others, software;
/// adapters of the same kind in wgpu's order. At least one. A browser gives only the one that it
/// takes for the fastest.
///
/// # Errors
/// `Unavailable`, with the adapters that were tried, if none is left.
pub(crate) async fn adapters() -> Result<Vec<Adapter>, Error> {
    let instance = instance()?;
    let mut listed = Vec::new();
    if !IS_BROWSER {
        listed = instance.enumerate_adapters(Backends::all()).await;
    }
    if listed.is_empty() {
        // A request for one adapter returns an error that says what wgpu tried.
        let fastest =
            RequestAdapterOptions { power_preference: PowerPreference::HighPerformance, ..Default::default() };
        let tried = match instance.request_adapter(&fastest).await {
            Ok(adapter) if IS_BROWSER => return Ok(vec![adapter]),
            Ok(_) => "wgpu lists no adapter".into(),
            Err(error) => without_absent(&error.to_string()),
        };
        return Err(unavailable(format!("{tried}; fix: {}", install())));
    }
    let (mut adapters, unfit): (Vec<_>, Vec<_>) = listed
        .into_iter()
        .partition(|adapter| adapter.get_downlevel_capabilities().flags.contains(DownlevelFlags::COMPUTE_SHADERS));
    if adapters.is_empty() {
        return Err(unavailable(format!(
            "no adapter has compute shaders; there are: {}; fix: update the driver, or install one for Vulkan",
            names(&unfit)
        )));
    }
    if let Some(part) = env::var_os(NAME_VARIABLE) {
        let part = part.to_string_lossy().to_lowercase();
        let all = names(&adapters);
        adapters.retain(|adapter| adapter.get_info().name.to_lowercase().contains(&part));
        if adapters.is_empty() {
            let reason = format!(
                "no adapter's name contains {part:?} ({NAME_VARIABLE}); there are: {all}; fix: unset {NAME_VARIABLE}, or \
                 set it to a part of one of these names"
            );
            return Err(unavailable(reason));
        }
    }
    adapters.sort_by_key(|adapter| rank(adapter.get_info().device_type));
    Ok(adapters)
}

/// wgpu's list of the APIs that it tried, without those that this build or system lacks. The whole
/// list, if nothing else is left.
fn without_absent(error: &str) -> String {
    let Some((summary, ways)) = error.split_once("; ") else { return error.into() };
    let is_absent = |way: &&str| way.ends_with("not compiled in") || way.ends_with("not requested");
    let ways: Vec<&str> = ways.split(", ").filter(|way| !is_absent(way)).collect();
    if ways.is_empty() { error.into() } else { format!("{summary}: {}", ways.join(", ")) }
}

/// The fix of a machine without an adapter.
fn install() -> String {
    match env::var(BACKEND_VARIABLE) {
        _ if IS_BROWSER => {
            "use a browser with WebGPU (Chrome or Edge 132, Safari 26, or Firefox 145, or later), open the page from \
             https or localhost, and switch on graphics acceleration in the browser's settings"
                .into()
        }
        Ok(backend) => format!("unset {BACKEND_VARIABLE}, which is {backend:?}"),
        Err(_) if cfg!(target_os = "linux") => {
            "install the Vulkan loader and a driver (Debian and Ubuntu: apt install libvulkan1 mesa-vulkan-drivers, which \
             has Intel, AMD and a software adapter; NVIDIA: its own driver, and in a container docker run --gpus all -e \
             NVIDIA_DRIVER_CAPABILITIES=all)"
                .into()
        }
        Err(_) => "install or update the driver of the GPU".into(),
    }
}

/// The instance of all devices opened by this crate. Handles are valid in their own instance only,
/// and wgpu does not always notice a handle of another instance. `WGPU_BACKEND` is read once, at
/// the first use.
fn instance() -> Result<&'static Instance, Error> {
    static INSTANCE: OnceLock<Instance> = OnceLock::new();
    // `Instance::new` panics without any backend.
    if Instance::enabled_backend_features().is_empty() {
        return Err(unavailable(
            "wgpu was built without any of Vulkan, Metal and Direct3D 12; fix: cargo add wgpu --features vulkan",
        ));
    }
    Ok(INSTANCE.get_or_init(|| {
        Instance::new(InstanceDescriptor {
            // Validation layers (wgpu's default in debug builds) help graphics developers; they
            // stay off unless the environment enables them.
            flags: InstanceFlags::empty().with_env(),
            ..InstanceDescriptor::new_without_display_handle_from_env()
        })
    }))
}

/// A device with all features of the adapter that kernels can use. Errors outside of calls are kept
/// for the next call.
///
/// # Errors
/// `Unavailable` if the adapter provides no device.
pub(crate) async fn open(adapter: &Adapter) -> Result<(Device, Queue, Arc<Health>), Error> {
    let descriptor = DeviceDescriptor {
        label: Some("rmsnorm"),
        required_features: adapter.features() & USEFUL,
        required_limits: adapter.limits(),
        experimental_features: ExperimentalFeatures::disabled(),
        memory_hints: MemoryHints::Performance,
        trace: Trace::Off,
    };
    let (device, queue) = adapter
        .request_device(&descriptor)
        .await
        .map_err(|error| unavailable(format!("{} gives no device: {error}", name(adapter))))?;
    let health = Arc::new(Health::default());
    let kept = Arc::clone(&health);
    device.set_device_lost_callback(move |reason, message| {
        let text = if message.is_empty() { format!("{reason:?}") } else { format!("{reason:?}, {message}") };
        // The first reason is the cause.
        let _ = kept.lost.set(text);
    });
    let kept = Arc::clone(&health);
    device.on_uncaptured_error(Arc::new(move |error| {
        let failure = WgpuFailure::caught("outside of a call", &error);
        kept.uncaptured.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
    }));
    Ok((device, queue, health))
}

/// Better devices first.
fn rank(kind: DeviceType) -> u32 {
    match kind {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    }
}

fn name(adapter: &Adapter) -> String {
    let info = adapter.get_info();
    format!("{} ({})", info.name, info.backend)
}

fn names(adapters: &[Adapter]) -> String {
    adapters.iter().map(name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_that_this_system_has_not_are_left_out() {
        let tried = "None found; noop not requested, vulkan drivers could not be loaded, gl support not compiled in";
        assert_eq!(without_absent(tried), "None found: vulkan drivers could not be loaded");
        for whole in ["None found; gl support not compiled in", "None found"] {
            assert_eq!(without_absent(whole), whole);
        }
    }

    #[test]
    fn a_gpu_of_its_own_comes_first_and_software_last() {
        let mut kinds = [
            DeviceType::Cpu,
            DeviceType::Other,
            DeviceType::VirtualGpu,
            DeviceType::IntegratedGpu,
            DeviceType::DiscreteGpu,
        ];
        let expected: Vec<_> = kinds.into_iter().rev().collect();
        kinds.sort_by_key(|kind| rank(*kind));
        assert_eq!(kinds, *expected);
    }
}
