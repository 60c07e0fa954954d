//! Compiled kernels of one device: a map from kernel key to pipeline.

mod trusted;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rmsnorm_gpu::cache::{Cache, Entry, Id, Magic};
use rmsnorm_gpu::parallel;
use rmsnorm_spec::Error;
use wgpu::{
    AdapterInfo, BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType, BufferBindingType,
    BufferSize, ComputePipeline, ComputePipelineDescriptor, Device, Features, PipelineCache,
    PipelineCompilationOptions, PipelineLayoutDescriptor, ShaderModuleDescriptor, ShaderSource, ShaderStages,
};

use crate::caps::{Caps, F16};
use crate::error::{BACKEND, scoped, unsupported};
use crate::params::{self, Uniform};
use crate::plan::{KernelKey, Plan};
use crate::source;

/// The magic number of the cache file.
const MAGIC: &Magic = b"rmsnorm wgpu  1\n";

/// Minimum time between writes of the pipeline cache to disk while pipelines are compiled.
const SAVE_INTERVAL: Duration = Duration::from_secs(2);

/// A pipeline and its bindings.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) pipeline: ComputePipeline,
    pub(crate) layout: BindGroupLayout,
    /// The parameters that the program reads.
    pub(crate) uniform: Uniform,
    /// Storage buffers, without the uniform buffer.
    pub(crate) bindings: Vec<source::Binding>,
}

/// The kernels of a device.
#[derive(Debug)]
pub(crate) struct Kernels {
    device: Device,
    is_trusted: bool,
    f16: F16,
    made: RwLock<HashMap<KernelKey, Arc<Kernel>>>,
    disk: Option<Disk>,
}

impl Kernels {
    /// No kernels yet. `is_trusted`: compile without wgpu's run-time checks.
    pub(crate) fn new(device: Device, caps: &Caps, is_trusted: bool) -> Self {
        let disk = Disk::open(&device);
        Kernels { device, is_trusted, f16: caps.f16, made: RwLock::default(), disk }
    }

    /// Number of compiled kernels.
    #[cfg(feature = "conformance")]
    pub(crate) fn len(&self) -> usize {
        self.made.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Forgets all kernels.
    pub(crate) fn forget(&self) {
        self.made.write().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The kernel of a key in a plan. If it is not compiled yet, all missing kernels of the plan
    /// are compiled first, in parallel.
    ///
    /// If several threads compile the same kernel at once, one copy is kept.
    ///
    /// # Errors
    /// `Unsupported` if a kernel needs more storage buffers than the device has; `Device` if the
    /// device rejects it.
    pub(crate) fn get(&self, key: &KernelKey, plan: &Plan) -> Result<Arc<Kernel>, Error> {
        if let Some(kernel) = self.find(key) {
            return Ok(kernel);
        }
        self.prepare(plan.keys())?;
        self.find_or_make(key)
    }

    /// Compiles the missing kernels of `keys`, on several threads.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub(crate) fn prepare(&self, keys: impl Iterator<Item = KernelKey>) -> Result<(), Error> {
        let keys: HashSet<KernelKey> = keys.filter(|key| self.find(key).is_none()).collect();
        keys.iter().try_for_each(|key| self.check_bindings(key))?;
        parallel::try_for_each(&Vec::from_iter(keys), |key| self.find_or_make(key).map(|_| ()))
    }

    fn find(&self, key: &KernelKey) -> Option<Arc<Kernel>> {
        // A poisoned map is valid: only finished kernels are inserted.
        self.made.read().unwrap_or_else(PoisonError::into_inner).get(key).map(Arc::clone)
    }

    fn check_bindings(&self, key: &KernelKey) -> Result<(), Error> {
        let (bound, most) = (source::bindings(key).len(), self.device.limits().max_storage_buffers_per_shader_stage);
        if bound > most as usize {
            let rule = format!(
                "a kernel of this device has at most {most} storage buffers, {} takes {bound} for the tensors of this call: pass \
                 fewer tensors, or request a larger max_storage_buffers_per_shader_stage",
                key.program.info().stem
            );
            return Err(unsupported(rule));
        }
        Ok(())
    }

    fn find_or_make(&self, key: &KernelKey) -> Result<Arc<Kernel>, Error> {
        if let Some(kernel) = self.find(key) {
            return Ok(kernel);
        }
        let kernel = Arc::new(scoped(&self.device, "making a pipeline", || Ok(self.make(key)))?);
        if let Some(disk) = &self.disk {
            disk.save_now_and_then();
        }
        let mut made = self.made.write().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(made.entry(*key).or_insert(kernel)))
    }

    fn make(&self, key: &KernelKey) -> Kernel {
        let (device, bindings) = (&self.device, source::bindings(key));
        let label = Some(key.program.info().stem);
        let text = source::text(key, self.f16);
        let uniform = Uniform::of(&text);
        let descriptor = ShaderModuleDescriptor { label, source: ShaderSource::Wgsl(text.into()) };
        let module =
            if self.is_trusted { trusted::module(device, descriptor) } else { device.create_shader_module(descriptor) };
        let entry = |binding, ty, smallest| BindGroupLayoutEntry {
            binding,
            visibility: ShaderStages::COMPUTE,
            ty: BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: BufferSize::new(smallest) },
            count: None,
        };
        let params = entry(params::BINDING, BufferBindingType::Uniform, uniform.size());
        let storage = bindings.iter().map(|binding| {
            let ty = BufferBindingType::Storage { read_only: !binding.is_written };
            entry(binding.number(), ty, u64::from(binding.unit))
        });
        let entries: Vec<_> = std::iter::once(params).chain(storage).collect();
        let layout = device.create_bind_group_layout(&BindGroupLayoutDescriptor { label, entries: &entries });
        let pipeline_layout = device.create_pipeline_layout(&PipelineLayoutDescriptor {
            label,
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let pipeline = device.create_compute_pipeline(&ComputePipelineDescriptor {
            label,
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some(source::ENTRY),
            compilation_options: PipelineCompilationOptions {
                constants: &[],
                // Programs read no workgroup memory before writing it.
                zero_initialize_workgroup_memory: false,
            },
            cache: self.disk.as_ref().map(|disk| &disk.cache),
        });
        Kernel { pipeline, layout, uniform, bindings }
    }
}

/// The driver's pipeline cache, and its file.
#[derive(Debug)]
struct Disk {
    cache: PipelineCache,
    entry: Entry,
    saved: Mutex<Saved>,
}

#[derive(Debug)]
struct Saved {
    data: Vec<u8>,
    at: Instant,
}

impl Disk {
    /// `None` if the device has no pipeline cache, or the user no cache folder.
    fn open(device: &Device) -> Option<Disk> {
        if !device.features().contains(Features::PIPELINE_CACHE) {
            return None;
        }
        let info: AdapterInfo = device.adapter_info();
        let key = wgpu::util::pipeline_cache_key(&info)?;
        let entry = Cache::of_user(BACKEND).entry(id(&key, &info))?;
        let data = entry.read();
        let make = || Ok(trusted::pipeline_cache(device, data.as_deref()));
        let cache = scoped(device, "making a pipeline cache", make).ok()?;
        Some(Disk { cache, entry, saved: Mutex::new(Saved { data: data.unwrap_or_default(), at: Instant::now() }) })
    }

    /// Saves if the last save is long enough ago, for processes that end without dropping their
    /// backends.
    fn save_now_and_then(&self) {
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        if saved.at.elapsed() >= SAVE_INTERVAL {
            self.save(&mut saved);
        }
    }

    fn save(&self, saved: &mut Saved) {
        saved.at = Instant::now();
        let Some(data) = self.cache.get_data().filter(|data| *data != saved.data) else { return };
        // If this fails, the next process compiles again.
        let _ = self.entry.write(&data);
        saved.data = data;
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let mut saved = std::mem::replace(
            self.saved.get_mut().unwrap_or_else(PoisonError::into_inner),
            Saved { data: Vec::new(), at: Instant::now() },
        );
        self.save(&mut saved);
    }
}

/// The cache file of a device: a driver can read only code compiled by the same driver version for
/// the same device. `key` is wgpu's name of both.
fn id(key: &str, info: &AdapterInfo) -> Id {
    Id::of(MAGIC, [key, &info.name, &info.driver, &info.driver_info])
}

#[cfg(test)]
mod tests {
    use wgpu::{Backend, DeviceType};

    use super::*;

    #[test]
    fn another_device_or_driver_has_a_file_of_its_own() {
        let info = |name: &str, driver: &str, version: &str| AdapterInfo {
            name: name.into(),
            driver: driver.into(),
            driver_info: version.into(),
            ..AdapterInfo::new(DeviceType::DiscreteGpu, Backend::Vulkan)
        };
        let first = id("key", &info("H200", "NVIDIA", "580.1"));
        assert_eq!(first, id("key", &info("H200", "NVIDIA", "580.1")));
        for other in [
            id("yek", &info("H200", "NVIDIA", "580.1")),
            id("key", &info("H100", "NVIDIA", "580.1")),
            id("key", &info("H200", "NVK", "580.1")),
            id("key", &info("H200", "NVIDIA", "580.2")),
        ] {
            assert_ne!(first, other);
        }
    }
}
