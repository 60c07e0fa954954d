//! [`WgpuBackend`]: a device and its queue, the kernels made for it, and the trait.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use rmsnorm_spec::{
    AnyCall, Backward, Checked, Code, Element, Error, Forward, NormBackend, NormSpec, Problem, QuantizedForward, Span,
    Stored,
};
use rmsnorm_tuning::{Chosen, Identity, Source, choose};
use wgpu::{
    AdapterInfo, Buffer, BufferDescriptor, BufferUsages, CommandEncoder, CommandEncoderDescriptor, Device, DeviceType,
    Queue,
};

use crate::adapter::{self, Health};
use crate::caps::{Caps, F16};
use crate::error::{BACKEND, device_error, scoped, unavailable, unsupported};
use crate::kernel::Kernels;
use crate::launch::{self, Work};
use crate::plan::{self, KEPT, Tuning};
use crate::recording::{Recorder, Target};
use crate::view::WgpuSlice;

/// What compiles shaders, for a table of tiles: of another version it may make other kernels. A test compares.
const WGPU: &str = "wgpu 30";

/// Normalizes tensors on any device that wgpu finds.
///
/// Cheap to clone; clones share the kernels compiled for the device and the workspace. Calls may come from any thread.
///
/// # Tensors
/// Arguments are [`WgpuSlice`]s of buffers of the same device with `BufferUsages::STORAGE`, at any offset that is a
/// multiple of the element's size. Buffers of elements below 32 bits need a size that is a multiple of 4 bytes. Several tensors
/// may lie in one buffer, interleaved ones too. Rules that a call breaks are [`Error::InvalidArgument`] and name the tensor;
/// a buffer that is destroyed, mapped or of another device is [`Error::Device`] with wgpu's words. wgpu cannot tell the
/// buffers of one [`wgpu::Instance`] from those of another: do not mix them. All that [`new`](Self::new) opens is of one.
///
/// # Ordering
/// The methods of [`NormBackend`] record and submit; the `encode_` methods record into an encoder or a compute pass of the
/// caller's, as a [`Recorder`] does with calls of code that is generic over the backend. None waits, none copies a tensor.
/// wgpu orders what follows, within an encoder and from submission to submission.
///
/// # Memory
/// A backward call with `dweight` or `dbias` needs a workspace of [`NormBackend::workspace_len`] elements. It is passed
/// in, or the one that the backend keeps is used, which grows to the largest that was needed and is freed with the last
/// clone. Each call has a uniform buffer of some hundred bytes besides.
///
/// # First use
/// A kernel is compiled when it is first used, which takes a driver tens of milliseconds, and longer in software;
/// [`NormBackend::prepare`] does it ahead. Where
/// the device was opened with `Features::PIPELINE_CACHE`, as [`new`](Self::new) does, what the driver compiled is kept on
/// disk.
///
/// # Example
/// ```no_run
/// use rmsnorm_wgpu::{Backward, Forward, WgpuBackend, WgpuSlice, spec::{NormBackend, NormSpec, bf16}, wgpu};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backend = WgpuBackend::new(0)?; // or `from_device`, with a device and queue that are there already
/// let (rows, cols) = (4096, 8192);
/// let norm = NormSpec::rms(rows, cols, 1e-6);
/// let buffer = |bytes: usize| {
///     let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
///     let size = bytes as u64;
///     backend.device().create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
/// };
/// let (x, y, weight, rstd) = (buffer(rows * cols * 2), buffer(rows * cols * 2), buffer(cols * 2), buffer(rows * 4));
/// let weight = WgpuSlice::<bf16>::whole(&weight);
/// let args = Forward::new(WgpuSlice::<bf16>::whole(&x), WgpuSlice::whole(&y));
/// backend.forward(&norm, args.weight(weight).rstd(WgpuSlice::whole(&rstd)))?;
///
/// // Or as a part of something larger: recorded, and run when the encoder's commands are submitted.
/// let (dy, dx, dweight) = (buffer(rows * cols * 2), buffer(rows * cols * 2), buffer(cols * 2));
/// let (dy, x) = (WgpuSlice::<bf16>::whole(&dy), WgpuSlice::whole(&x));
/// let args = Backward::new(dy, x, WgpuSlice::whole(&rstd), WgpuSlice::whole(&dx)).weight(weight).dweight(WgpuSlice::whole(&dweight));
/// let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
/// backend.encode_backward(&mut encoder, &norm, args)?;
/// backend.queue().submit([encoder.finish()]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct WgpuBackend {
    shared: Arc<Shared>,
    /// Of a recorder: the calls that were not encoded yet.
    kept: Option<Arc<Mutex<Vec<Work>>>>,
}

struct Shared {
    device: Device,
    queue: Queue,
    caps: Caps,
    /// What a table of the device is for, and where the one in use comes from.
    identity: Identity,
    source: Source,
    /// A key says all of a tile, so that backends with other tables share what they have in common.
    kernels: Arc<Kernels>,
    /// The gradients' workspace, for calls that bring none.
    workspace: Mutex<Option<Buffer>>,
    /// Of a device that we opened.
    own: Option<Own>,
    description: String,
}

/// What is known of a device of our own.
#[derive(Clone)]
struct Own {
    /// The number of its adapter.
    ordinal: usize,
    health: Arc<Health>,
}

impl WgpuBackend {
    /// A backend on this device, which submits to this queue of it. The caller keeps both for anything else, too.
    ///
    /// The device's features and limits are taken as they are. More of them make more possible: subgroups
    /// (`Features::SUBGROUP`), fast f16 (`Features::SHADER_F16`, whose conversions are checked here, for which the queue is
    /// waited for), workgroups of more than 256 invocations, bindings of more than 128 MiB before a tensor is
    /// worked on in parts, a pipeline cache. wgpu tells a lost device to the callback of its owner only; where a call
    /// notices, it answers [`Error::Device`].
    ///
    /// # Errors
    /// `Unavailable` if the device's limits leave no room for any kernel, or `RMSNORM_TUNING` names a table that does not fit.
    pub fn from_device(device: Device, queue: Queue) -> Result<Self, Error> {
        WgpuBackend::build(device, queue, None)
    }

    /// A backend on a device of its own, on one of the machine's adapters, with all its limits.
    ///
    /// Adapters are counted from discrete GPUs over integrated and virtual ones to software. The environment variable
    /// `WGPU_BACKEND` chooses among `vulkan`, `metal` and `dx12`; `WGPU_ADAPTER_NAME`, if set, is a part of the name of
    /// the adapters that count, in any case.
    ///
    /// # Errors
    /// `Unavailable` if there is no such adapter, with what was tried, or if it gives no device.
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        let adapters = adapter::adapters()?;
        let Some(adapter) = adapters.get(ordinal) else {
            let plural = if adapters.len() == 1 { "" } else { "s" };
            return Err(unavailable(format!("there is no adapter {ordinal}, only {} adapter{plural}", adapters.len())));
        };
        let (device, queue, health) = adapter::open(adapter)?;
        WgpuBackend::build(device, queue, Some(Own { ordinal, health }))
    }

    /// How many adapters [`new`](Self::new) can choose from; at least 1.
    ///
    /// # Errors
    /// `Unavailable` if there is none, with what was tried.
    pub fn device_count() -> Result<usize, Error> {
        adapter::adapters().map(|adapters| adapters.len())
    }

    fn build(device: Device, queue: Queue, own: Option<Own>) -> Result<Self, Error> {
        let limits = device.limits();
        if limits.max_compute_invocations_per_workgroup == 0 || limits.max_storage_buffers_per_shader_stage == 0 {
            let reason = "the device was requested without compute: its limits have no invocations or storage buffers; fix: \
                          request it with required_limits: adapter.limits()";
            return Err(unavailable(reason));
        }
        let caps = Caps::read(&device, &queue);
        let identity = identity(&device, &caps);
        let Chosen { table, source } = choose(&identity, Tuning::from_table).map_err(unavailable)?;
        let caps = Caps { tuning: table.map_or(caps.tuning, |table| KEPT.keep(table)), ..caps };
        let kernels = Arc::new(Kernels::new(device.clone(), &caps, true));
        let description = describe(&device, &caps);
        let workspace = Mutex::default();
        let shared = Shared { device, queue, caps, identity, source, kernels, workspace, own, description };
        Ok(WgpuBackend { shared: Arc::new(shared), kept: None })
    }

    /// The same device by other plans and kernels, with a workspace of its own.
    fn by(&self, caps: Caps, source: Source, kernels: Arc<Kernels>) -> Self {
        let Shared { device, queue, identity, own, description, .. } = &*self.shared;
        let shared = Shared {
            device: device.clone(),
            queue: queue.clone(),
            caps,
            identity: identity.clone(),
            source,
            kernels,
            workspace: Mutex::default(),
            own: own.clone(),
            description: description.clone(),
        };
        WgpuBackend { shared: Arc::new(shared), kept: None }
    }

    /// The same device, planned by another table.
    #[cfg(feature = "conformance")]
    pub(crate) fn with_tuning(&self, tuning: &'static Tuning) -> Self {
        let Shared { caps, kernels, .. } = &*self.shared;
        self.by(Caps { tuning, ..*caps }, Source::Tried, kernels.clone())
    }

    /// Which table calls are planned by, in words: `built in`, or a file and when it was made.
    pub fn tuning(&self) -> String {
        self.shared.source.to_string()
    }

    /// What a table of the device is for.
    #[cfg(feature = "conformance")]
    pub(crate) fn identity(&self) -> &Identity {
        &self.shared.identity
    }

    /// The same device with kernels of its own, compiled with the checks of bounds and loops that wgpu adds to shaders
    /// it does not trust. Slower, with equal results: for those who would rather not trust this crate's shaders.
    pub fn checked(&self) -> Self {
        let Shared { device, caps, source, .. } = &*self.shared;
        self.by(*caps, source.clone(), Arc::new(Kernels::new(device.clone(), caps, false)))
    }

    /// The same device as if it had no subgroups. For tests.
    #[doc(hidden)]
    pub fn without_subgroups(&self) -> Self {
        let Shared { device, caps, source, .. } = &*self.shared;
        let kernels = Arc::new(Kernels::new(device.clone(), caps, true));
        self.by(Caps { subgroup: None, ..*caps }, source.clone(), kernels)
    }

    /// The same device as if its conversions of f16 were none to rely on. For tests.
    #[doc(hidden)]
    pub fn with_integer_f16(&self) -> Self {
        let Shared { device, caps, source, .. } = &*self.shared;
        let caps = Caps { f16: caps.f16.without_conversions(), ..*caps };
        let kernels = Arc::new(Kernels::new(device.clone(), &caps, true));
        self.by(caps, source.clone(), kernels)
    }

    /// Whether f16 is converted by the device's own instructions. For tests.
    #[doc(hidden)]
    pub fn converts_f16(&self) -> bool {
        self.caps().f16 == F16::Converts
    }

    /// The number of the adapter that [`new`](Self::new) was asked for; `None` on a device of the caller's.
    pub fn ordinal(&self) -> Option<usize> {
        self.shared.own.as_ref().map(|own| own.ordinal)
    }

    /// Whether the device is a processor that plays a GPU: it takes minutes for what others do in seconds.
    pub fn is_software(&self) -> bool {
        self.device().adapter_info().device_type == DeviceType::Cpu
    }

    /// The device that tensors lie on.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The queue that the calls of [`NormBackend`] are submitted to.
    pub fn queue(&self) -> &Queue {
        &self.shared.queue
    }

    /// Encodes a forward call, [`NormBackend::forward`], into an encoder or a compute pass of the same device: `&mut encoder`
    /// or `&mut pass`. It runs when the encoder's commands are submitted.
    ///
    /// # Errors
    /// As [`NormBackend::forward`]; nothing is recorded then. What is wrong with a buffer only when the commands are
    /// submitted, such as being mapped, is the submission's error.
    pub fn encode_forward<'t, 'p: 't, T: Element, W: Element, R: Element>(
        &self,
        target: impl Into<Target<'t, 'p>>,
        spec: &NormSpec,
        args: Forward<'_, Self, T, W, R>,
    ) -> Result<(), Error> {
        self.encode(target.into(), || {
            launch::prepare_call(self, AnyCall::Forward(Checked::forward(*spec, args.erase())?))
        })
    }

    /// Encodes a backward call, [`NormBackend::backward`]. The workspace that the backend keeps is used from here to the
    /// end of this call's commands, so encoders of several threads may use it, each in its turn.
    ///
    /// # Errors
    /// As [`encode_forward`](Self::encode_forward); `InvalidArgument` for `GradReduction::Atomics` in a compute pass.
    pub fn encode_backward<'t, 'p: 't, T: Element, W: Element, R: Element>(
        &self,
        target: impl Into<Target<'t, 'p>>,
        spec: &NormSpec,
        args: Backward<'_, Self, T, W, R>,
    ) -> Result<(), Error> {
        self.encode(target.into(), || {
            launch::prepare_call(self, AnyCall::Backward(Checked::backward(self, *spec, args.erase())?))
        })
    }

    /// Encodes a quantized forward call, [`NormBackend::quantized_forward`].
    ///
    /// # Errors
    /// As [`encode_forward`](Self::encode_forward).
    pub fn encode_quantized_forward<'t, 'p: 't, T: Element, C: Code, W: Element, R: Element>(
        &self,
        target: impl Into<Target<'t, 'p>>,
        spec: &NormSpec,
        args: QuantizedForward<'_, Self, T, C, W, R>,
    ) -> Result<(), Error> {
        self.encode(target.into(), || {
            launch::prepare_call(self, AnyCall::QuantizedForward(Checked::quantized_forward(*spec, args.erase())?))
        })
    }

    /// A backend on the same device, with the same kernels, whose calls are encoded where the caller says.
    pub fn recorder(&self) -> Recorder {
        Recorder::new(WgpuBackend { kept: Some(Arc::default()), ..self.clone() })
    }

    /// Makes one submission of all calls that `calls` makes to the backend it is given. They share a compute pass, which is
    /// faster than one for each, by about 7 us a call on an H200; it ends before a backward call with
    /// `GradReduction::Atomics`, which zeroes its workspace.
    ///
    /// # Errors
    /// Those of `calls`, and nothing is submitted; `Device` if the submission fails.
    pub fn batch<O>(&self, calls: impl FnOnce(&Self) -> Result<O, Error>) -> Result<O, Error> {
        let recorder = self.recorder();
        let output = calls(&recorder)?;
        self.check_health()?;
        scoped(self.device(), "submitting a batch", || {
            let mut encoder = self.encoder();
            recorder.encode(&mut encoder)?;
            self.queue().submit([encoder.finish()]);
            Ok(output)
        })
    }

    /// Copies elements by a kernel, as far as the shorter of the two goes. For measurements.
    #[doc(hidden)]
    pub fn copy<T: Element>(&self, from: WgpuSlice<'_, T>, to: WgpuSlice<'_, T>) -> Result<(), Error> {
        self.run(|| launch::copy(self, from, to))
    }

    /// How many kernels were made. For tests.
    #[cfg(feature = "conformance")]
    #[doc(hidden)]
    pub fn kernel_count(&self) -> usize {
        self.kernels().len()
    }

    fn encoder(&self) -> CommandEncoder {
        self.device().create_command_encoder(&CommandEncoderDescriptor { label: Some("rmsnorm") })
    }

    fn encode(&self, target: Target<'_, '_>, prepare: impl FnOnce() -> Result<Work, Error>) -> Result<(), Error> {
        self.check_health()?;
        scoped(self.device(), "encoding", || launch::encode(&[prepare()?], target))
    }

    /// Encodes the calls that were kept, and keeps them no longer.
    pub(crate) fn encode_kept(&self, target: Target<'_, '_>) -> Result<(), Error> {
        let Some(kept) = &self.kept else { return Ok(()) };
        self.check_health()?;
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        scoped(self.device(), "encoding", || {
            launch::encode(&kept, target)?;
            // Whatever the device says of them: they are in the target.
            kept.clear();
            Ok(())
        })
    }

    /// Records and submits, or keeps what a recorder will encode.
    fn run(&self, prepare: impl FnOnce() -> Result<Work, Error>) -> Result<(), Error> {
        self.check_health()?;
        scoped(self.device(), "a call", || {
            let work = prepare()?;
            if work.is_empty() {
                return Ok(());
            }
            if let Some(kept) = &self.kept {
                kept.lock().unwrap_or_else(PoisonError::into_inner).push(work);
                return Ok(());
            }
            let mut encoder = self.encoder();
            launch::encode(&[work], Target::Encoder(&mut encoder))?;
            self.queue().submit([encoder.finish()]);
            Ok(())
        })
    }

    /// What is known of a device of our own: it is lost, or something failed where no error could be returned.
    pub(crate) fn check_health(&self) -> Result<(), Error> {
        let failure = self.shared.own.as_ref().and_then(|own| own.health.failure());
        failure.map_or(Ok(()), |failure| Err(device_error(failure)))
    }

    pub(crate) fn kernels(&self) -> &Kernels {
        &self.shared.kernels
    }

    pub(crate) fn caps(&self) -> &Caps {
        &self.shared.caps
    }

    /// The backend's own workspace, with room for that many f32. Calls use it one after the other: each in a stretch of
    /// commands of one encoder, and encoders of a queue run in order. A fresh one would be zeroed by wgpu every time.
    pub(crate) fn workspace(&self, len: u64) -> Result<Buffer, Error> {
        let size = len.saturating_mul(size_of::<f32>() as u64);
        let mut kept = self.shared.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = kept.as_ref().filter(|buffer| buffer.size() >= size) {
            return Ok(buffer.clone());
        }
        let most = self.device().limits().max_buffer_size;
        if size > most {
            let rule = format!("a buffer of this device has at most {most} bytes, got a workspace of {size}");
            return Err(unsupported(rule));
        }
        // Only one that is there is kept.
        let buffer = scoped(self.device(), "making the workspace", || {
            let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
            let label = Some("rmsnorm workspace");
            Ok(self.device().create_buffer(&BufferDescriptor { label, size, usage, mapped_at_creation: false }))
        })?;
        Ok(kept.insert(buffer).clone())
    }
}

/// The device in words: `NVIDIA H200, vulkan, driver NVIDIA 580.82.07, subgroups of 32, 1024 invocations, 48 KiB of
/// workgroup memory, bindings of 2.0 GiB, 1048576 storage buffers, f16 by conversions`.
impl fmt::Display for WgpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shared.description)
    }
}

impl fmt::Debug for WgpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WgpuBackend").field("device", &self.shared.description).finish_non_exhaustive()
    }
}

rmsnorm_spec::inherent_methods!(WgpuBackend);

impl NormBackend for WgpuBackend {
    type In<'a, T: Stored> = WgpuSlice<'a, T>;
    type Out<'a, T: Stored> = WgpuSlice<'a, T>;

    fn name(&self) -> &'static str {
        BACKEND
    }

    fn in_span<T: Stored>(view: &WgpuSlice<'_, T>) -> Span {
        view.span()
    }

    fn out_span<T: Stored>(view: &WgpuSlice<'_, T>) -> Span {
        view.span()
    }

    fn workspace_len(&self, problem: &Problem) -> usize {
        plan::workspace_len(problem, self.caps())
    }

    fn has_gradient_sums(&self) -> bool {
        true
    }

    fn prepare_all(&self, problems: &[Problem]) -> Result<(), Error> {
        self.check_health()?;
        launch::prepare(self, problems)
    }

    fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error> {
        self.run(|| launch::prepare_call(self, call))
    }
}

/// What a table of the device is for: its adapter and driver, and what of its limits decides how threads share a row.
fn identity(device: &Device, caps: &Caps) -> Identity {
    let info = device.adapter_info();
    let subgroups = caps.subgroup.map_or("no subgroups".into(), |lanes| format!("subgroups of {lanes}"));
    let Caps { max_threads, workgroup_bytes, .. } = caps;
    Identity {
        backend: BACKEND,
        device: format!(
            "{}, {}, {subgroups}, {max_threads} invocations, {}",
            info.name,
            info.backend,
            bytes(u64::from(*workgroup_bytes))
        ),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        library: WGPU.into(),
        kernels: Tuning::revision().to_owned(),
    }
}

fn describe(device: &Device, caps: &Caps) -> String {
    let (info, limits): (AdapterInfo, _) = (device.adapter_info(), device.limits());
    let driver = format!("{} {}", info.driver, info.driver_info);
    let subgroups = match (device.features().contains(wgpu::Features::SUBGROUP), info.subgroup_min_size) {
        (false, _) => "no subgroups".to_owned(),
        (true, least) if least == info.subgroup_max_size => format!("subgroups of {least}"),
        (true, least) => format!("subgroups of {least} to {}", info.subgroup_max_size),
    };
    format!(
        "{}, {}, driver {}, {subgroups}, {} invocations, {} of workgroup memory, bindings of {}, {} storage buffers, f16 by {}",
        info.name,
        info.backend,
        driver.trim(),
        limits.max_compute_invocations_per_workgroup,
        bytes(u64::from(limits.max_compute_workgroup_storage_size)),
        bytes(limits.max_storage_buffer_binding_size),
        limits.max_storage_buffers_per_shader_stage,
        if caps.f16 == F16::Converts { "conversions" } else { "integers" },
    )
}

/// A size for readers: `48 KiB`, `2.0 GiB`.
fn bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x3000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1u32 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::{WGPU, bytes};

    /// The one that Cargo has chosen, where the lock file is there to tell.
    #[test]
    fn the_version_of_wgpu_is_told() {
        let Ok(lock) = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock")) else { return };
        let version = lock.split("name = \"wgpu\"\nversion = \"").nth(1).and_then(|rest| rest.split('.').next());
        assert_eq!(version.map(|major| format!("wgpu {major}")), Some(WGPU.to_owned()));
    }

    #[test]
    fn sizes_are_in_the_unit_that_a_reader_would_choose() {
        let sizes = [0, 1023, 1024, 48 << 10, (1 << 20) - 1, 1 << 20, 128 << 20, (1 << 31) - 1, 3 << 30];
        let texts = ["0 B", "1023 B", "1 KiB", "48 KiB", "1023 KiB", "1 MiB", "128 MiB", "2.0 GiB", "3.0 GiB"];
        assert_eq!(sizes.map(bytes), texts);
    }
}
