//! [`WgpuBackend`]: a device and its queue, the kernels made for it, and the trait.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use rmsnorm_spec::{
    AnyCall, AnyElement, Backward, Checked, Code, Element, Error, Forward, NormBackend, NormSpec, Problem,
    QuantizedForward, Rows, Span, Tensor, Visitor,
};
use rmsnorm_tuning::{Chosen, Identity, TuningSource, choose};
use wgpu::{AdapterInfo, CommandEncoder, CommandEncoderDescriptor, Device, DeviceType, Queue};

use crate::adapter::{self, Health};
use crate::caps::{Caps, F16};
use crate::check_f16;
use crate::error::{BACKEND, IS_BROWSER, device_error, scoped, scoped_async, unavailable, wait};
use crate::kernel::Kernels;
use crate::launch::{self, Target, Tensors, Work};
use crate::plan::{self, KEPT, Tuning};
use crate::shared::Shared;
use crate::view::WgpuSlice;

/// The shader compiler that a tuning table is valid for. A test compares it with Cargo.lock.
const WGPU: &str = "wgpu 30";

/// Normalizes tensors on any device that wgpu supports.
///
/// Cheap to clone; clones share the compiled kernels of the device and the workspace. Calls may
/// come from any thread.
///
/// # Tensors
/// Arguments are [`WgpuSlice`]s of buffers of the same device with `BufferUsages::STORAGE`, at any
/// offset that is a multiple of the element's size. Buffers of 8-bit and 16-bit elements need a
/// size that is a multiple of 4 bytes. Several tensors may share a buffer, also interleaved. A call
/// that breaks a rule returns [`Error::InvalidArgument`] with the name of the tensor. A buffer that
/// is destroyed, mapped or of another device is [`Error::Device`] with wgpu's message. wgpu cannot
/// tell the buffers of one [`wgpu::Instance`] from buffers of another instance: do not mix them.
/// All devices of [`new`](Self::new) share one instance.
///
/// # Ordering
/// The methods of [`NormBackend`] record and submit. The `encode_` methods record into an encoder
/// or a compute pass of the caller; a [`Recorder`](crate::Recorder) does so for code that is generic over the
/// backend. No method waits or copies a matrix. wgpu orders commands within an encoder and across
/// submissions.
///
/// # Memory
/// A backward call with `dweight` or `dbias` needs a workspace of [`NormBackend::workspace_len`]
/// f32. Pass one, or the backend uses its own, which grows to the largest size needed and is freed
/// with the last clone. Each call also has a uniform buffer of a few hundred bytes.
///
/// # First use
/// A kernel is compiled at its first use. This takes a driver tens of milliseconds, and a software
/// device longer. [`NormBackend::prepare`] compiles in advance. If the device has
/// `Features::PIPELINE_CACHE`, as devices of [`new`](Self::new) do, compiled code is kept on disk.
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
    opened: Arc<Opened>,
    /// The calls of a recorder that were not encoded yet.
    pub(crate) kept: Option<Arc<Mutex<Vec<Work>>>>,
}

struct Opened {
    shared: Shared,
    queue: Queue,
    /// The device, driver and library that a tuning table must be made for; and the source of the
    /// table in use.
    identity: Identity,
    source: TuningSource,
    /// Set if this crate opened the device.
    own: Option<Own>,
    description: String,
}

/// State of a device that this crate opened.
#[derive(Clone)]
struct Own {
    /// The index of its adapter.
    ordinal: usize,
    health: Arc<Health>,
}

impl WgpuBackend {
    /// A backend on an existing device that submits to `queue`. The caller can keep using both.
    ///
    /// The device's features and limits are used as they are. Optional: subgroups
    /// (`Features::SUBGROUP`), fast f16 (`Features::SHADER_F16`; its conversions are checked here,
    /// which waits for the queue), workgroups of more than 256 invocations, bindings of more than
    /// 128 MiB (larger tensors are processed in parts), and a pipeline cache. wgpu reports a lost
    /// device only to its owner's callback. A call that notices it returns [`Error::Device`].
    ///
    /// # Errors
    /// `Unavailable` if the device's limits are too low for any kernel, or `RMSNORM_TUNING` names a
    /// table that is invalid or for another device. In a browser always: await
    /// [`from_device_async`](Self::from_device_async).
    pub fn from_device(device: Device, queue: Queue) -> Result<Self, Error> {
        wait("WgpuBackend::from_device_async", WgpuBackend::from_device_async(device, queue))
    }

    /// Async form of [`from_device`](Self::from_device), for browsers, where a program must not block.
    /// On native devices it waits as `from_device` does.
    ///
    /// # Errors
    /// As [`from_device`](Self::from_device).
    pub async fn from_device_async(device: Device, queue: Queue) -> Result<Self, Error> {
        WgpuBackend::build(device, queue, None).await
    }

    /// A backend on a new device, on adapter `ordinal` of the machine, with all limits of the
    /// adapter.
    ///
    /// Adapters are ordered: discrete GPUs, integrated, virtual, software. The environment variable
    /// `WGPU_BACKEND` selects among `vulkan`, `metal` and `dx12`. `WGPU_ADAPTER_NAME`, if set, must
    /// be part of the adapter's name (case-insensitive).
    ///
    /// # Errors
    /// `Unavailable` if there is no such adapter, with the adapters that were tried, or if it
    /// provides no device. In a browser always: await [`new_async`](Self::new_async).
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        wait("WgpuBackend::new_async", WgpuBackend::new_async(ordinal))
    }

    /// Async form of [`new`](Self::new), for browsers, where a program must not block. On native
    /// devices it waits as `new` does. A browser offers one adapter, number 0, which it takes for the
    /// fastest.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub async fn new_async(ordinal: usize) -> Result<Self, Error> {
        let adapters = adapter::adapters().await?;
        let Some(adapter) = adapters.get(ordinal) else {
            let plural = if adapters.len() == 1 { "" } else { "s" };
            return Err(unavailable(format!("there is no adapter {ordinal}, only {} adapter{plural}", adapters.len())));
        };
        let (device, queue, health) = adapter::open(adapter).await?;
        WgpuBackend::build(device, queue, Some(Own { ordinal, health })).await
    }

    /// Number of adapters that [`new`](Self::new) can choose from, at least 1.
    ///
    /// # Errors
    /// `Unavailable` if there is none, with the adapters that were tried.
    pub fn device_count() -> Result<usize, Error> {
        wait("WgpuBackend::new_async", adapter::adapters()).map(|adapters| adapters.len())
    }

    async fn build(device: Device, queue: Queue, own: Option<Own>) -> Result<Self, Error> {
        let limits = device.limits();
        if limits.max_compute_invocations_per_workgroup == 0 || limits.max_storage_buffers_per_shader_stage == 0 {
            let reason = "the device was requested without compute: its limits have no invocations or storage buffers; fix: \
                          request it with required_limits: adapter.limits()";
            return Err(unavailable(reason));
        }
        let caps = Caps::read(&device, check_f16::best_form(&device, &queue).await);
        let identity = identity(&device, &caps);
        let Chosen { table, source } = choose(&identity, Tuning::from_table).map_err(unavailable)?;
        let caps = Caps { tuning: table.map_or(caps.tuning, |table| KEPT.keep(table)), ..caps };
        let kernels = Arc::new(Kernels::new(device.clone(), &caps, true));
        let description = describe(&device, &caps);
        let opened = Opened { shared: Shared::new(device, caps, kernels), queue, identity, source, own, description };
        Ok(WgpuBackend { opened: Arc::new(opened), kept: None })
    }

    /// The same device with other capabilities and kernels, and a new workspace.
    fn by(&self, caps: Caps, source: TuningSource, kernels: Arc<Kernels>) -> Self {
        let Opened { queue, identity, own, description, .. } = &*self.opened;
        let opened = Opened {
            shared: Shared::new(self.device().clone(), caps, kernels),
            queue: queue.clone(),
            identity: identity.clone(),
            source,
            own: own.clone(),
            description: description.clone(),
        };
        WgpuBackend { opened: Arc::new(opened), kept: None }
    }

    /// The same device with other capabilities, and kernels of its own.
    fn with(&self, caps: Caps, is_trusted: bool) -> Self {
        let kernels = Arc::new(Kernels::new(self.device().clone(), &caps, is_trusted));
        self.by(caps, self.opened.source.clone(), kernels)
    }

    /// The same device with another tuning table.
    #[cfg(feature = "conformance")]
    pub(crate) fn with_tuning(&self, tuning: &'static Tuning) -> Self {
        let Shared { caps, kernels, .. } = self.shared();
        self.by(Caps { tuning, ..*caps }, TuningSource::Tried, kernels.clone())
    }

    /// The tuning table in use: `built in`, or a file and its date.
    pub fn tuning(&self) -> String {
        self.opened.source.to_string()
    }

    /// The device, driver and library that a tuning table must be made for.
    #[cfg(feature = "conformance")]
    pub(crate) fn identity(&self) -> &Identity {
        &self.opened.identity
    }

    /// The same device with separate kernels, compiled with the bounds and loop checks that wgpu
    /// adds to untrusted shaders. Slower, with equal results. Use it if you do not want to trust
    /// this crate's shaders.
    pub fn checked(&self) -> Self {
        self.with(*self.caps(), false)
    }

    /// The same device without subgroups. For tests.
    #[doc(hidden)]
    pub fn without_subgroups(&self) -> Self {
        self.with(Caps { subgroup: None, ..*self.caps() }, true)
    }

    /// The same device with f16 converted by integer arithmetic. For tests.
    #[doc(hidden)]
    pub fn with_integer_f16(&self) -> Self {
        self.with(Caps { f16: self.caps().f16.without_conversions(), ..*self.caps() }, true)
    }

    /// Whether f16 is converted by the device's own instructions. For tests.
    #[doc(hidden)]
    pub fn converts_f16(&self) -> bool {
        self.caps().f16 == F16::Converts
    }

    /// The adapter index passed to [`new`](Self::new); `None` for a device of the caller.
    pub fn ordinal(&self) -> Option<usize> {
        self.opened.own.as_ref().map(|own| own.ordinal)
    }

    /// Whether the device is a software renderer, which is orders of magnitude slower than a GPU.
    pub fn is_software(&self) -> bool {
        self.device().adapter_info().device_type == DeviceType::Cpu
    }

    /// The device of the tensors.
    pub fn device(&self) -> &Device {
        &self.shared().device
    }

    /// The queue that the calls of [`NormBackend`] are submitted to.
    pub fn queue(&self) -> &Queue {
        &self.opened.queue
    }

    /// Encodes a forward call, [`NormBackend::forward`], into an encoder or a compute pass of the
    /// same device: `&mut encoder` or `&mut pass`. It runs when the encoder's commands are
    /// submitted.
    ///
    /// # Errors
    /// As [`NormBackend::forward`]; nothing is recorded then. Buffer errors that wgpu detects at
    /// submission, such as a mapped buffer, are errors of the submission.
    pub fn encode_forward<'t, 'p: 't, T: Element, W: Element, R: Element>(
        &self,
        target: impl Into<Target<'t, 'p>>,
        spec: &NormSpec,
        args: Forward<'_, Self, T, W, R>,
    ) -> Result<(), Error> {
        self.encode(target.into(), || self.prepare_call(AnyCall::Forward(Checked::forward(*spec, args.erase())?)))
    }

    /// Encodes a backward call, [`NormBackend::backward`]. The backend's workspace holds data only
    /// between the commands of one call, so encoders of several threads can share it.
    ///
    /// # Errors
    /// As [`encode_forward`](Self::encode_forward). `InvalidArgument` for `GradReduction::Atomics` in
    /// a compute pass.
    pub fn encode_backward<'t, 'p: 't, T: Element, W: Element, R: Element>(
        &self,
        target: impl Into<Target<'t, 'p>>,
        spec: &NormSpec,
        args: Backward<'_, Self, T, W, R>,
    ) -> Result<(), Error> {
        self.encode(target.into(), || {
            self.prepare_call(AnyCall::Backward(Checked::backward(self, *spec, args.erase())?))
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
            self.prepare_call(AnyCall::QuantizedForward(Checked::quantized_forward(*spec, args.erase())?))
        })
    }

    /// Copies elements with a kernel, up to the shorter length. For measurements.
    #[doc(hidden)]
    pub fn copy<T: Element>(&self, from: WgpuSlice<'_, T>, to: WgpuSlice<'_, T>) -> Result<(), Error> {
        self.run(|| launch::copy(self.shared(), from, to))
    }

    /// Number of compiled kernels. For tests.
    #[cfg(feature = "conformance")]
    #[doc(hidden)]
    pub fn kernel_count(&self) -> usize {
        self.shared().kernels.len()
    }

    /// Makes calls, and waits until the device has reported their errors. The kernels may still run
    /// then.
    ///
    /// On a native device every call returns its own errors. A browser reports errors of the device
    /// (a program that it does not compile, no memory left) after the call has returned `Ok`: a
    /// backend of [`new_async`](Self::new_async) returns them from its next call, and `catch` from
    /// the calls that caused them.
    ///
    /// # Errors
    /// Errors of `calls`; `Device` with the device's error. A lost device of
    /// [`from_device_async`](Self::from_device_async) is reported to its owner alone. wgpu 30 panics
    /// if a browser reports an internal error.
    pub async fn catch<O>(&self, calls: impl FnOnce(&Self) -> Result<O, Error>) -> Result<O, Error> {
        self.check_health()?;
        let output = scoped_async(self.device(), "a call", || calls(self)).await;
        if IS_BROWSER && output.is_err() {
            self.shared().forget();
        }
        self.check_health()?;
        output
    }

    pub(crate) fn encoder(&self) -> CommandEncoder {
        self.device().create_command_encoder(&CommandEncoderDescriptor { label: Some("rmsnorm") })
    }

    fn encode(&self, target: Target<'_, '_>, prepare: impl FnOnce() -> Result<Work, Error>) -> Result<(), Error> {
        self.check_health()?;
        scoped(self.device(), "encoding", || launch::encode(&[prepare()?], target))
    }

    /// Records and submits a call, or adds it to the recorder's list.
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

    /// Returns an error reported outside of calls, on a device that this crate opened.
    pub(crate) fn check_health(&self) -> Result<(), Error> {
        let Some(failure) = self.opened.own.as_ref().and_then(|own| own.health.failure()) else { return Ok(()) };
        if IS_BROWSER {
            self.shared().forget();
        }
        Err(device_error(failure))
    }

    /// The commands of a call.
    fn prepare_call(&self, call: AnyCall<'_, '_, WgpuBackend>) -> Result<Work, Error> {
        match &call {
            AnyCall::Forward(_) | AnyCall::Backward(_) | AnyCall::QuantizedForward(_) => {}
            AnyCall::PartialStatistics(_)
            | AnyCall::ForwardWithStatistics(_)
            | AnyCall::PartialBackwardStatistics(_)
            | AnyCall::BackwardWithStatistics(_) => return Err(call.unsupported(BACKEND)),
        }
        let (spec, problem) = (*call.spec(), *call.problem());
        launch::require_pieces(&problem)?;
        let mut tensors = Tensors::new(problem);
        call.visit(&mut tensors)?;
        launch::prepare_call(self.shared(), &spec, &problem, tensors)
    }

    fn shared(&self) -> &Shared {
        &self.opened.shared
    }

    pub(crate) fn caps(&self) -> &Caps {
        &self.shared().caps
    }
}

/// The device's properties: `NVIDIA H200, vulkan, driver NVIDIA 580.82.07, subgroups of 32, 1024
/// invocations, 48 KiB of workgroup memory, bindings of 2.0 GiB, 1048576 storage buffers, f16 by
/// conversions`.
impl fmt::Display for WgpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.opened.description)
    }
}

impl fmt::Debug for WgpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WgpuBackend").field("device", &self.opened.description).finish_non_exhaustive()
    }
}

impl<'a> Visitor<'a, WgpuBackend> for Tensors<'a> {
    fn read<E: AnyElement>(&mut self, tensor: Tensor, rows: Rows<WgpuSlice<'a, E>>) -> Result<(), Error> {
        self.add(tensor, rows, false)
    }

    fn write<E: AnyElement>(&mut self, tensor: Tensor, rows: Rows<WgpuSlice<'a, E>>) -> Result<(), Error> {
        self.add(tensor, rows, true)
    }
}

rmsnorm_spec::inherent_methods!(WgpuBackend);

impl NormBackend for WgpuBackend {
    type In<'a, T: AnyElement> = WgpuSlice<'a, T>;
    type Out<'a, T: AnyElement> = WgpuSlice<'a, T>;

    fn name(&self) -> &'static str {
        BACKEND
    }

    fn in_span<T: AnyElement>(view: &WgpuSlice<'_, T>) -> Span {
        view.span()
    }

    fn out_span<T: AnyElement>(view: &WgpuSlice<'_, T>) -> Span {
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
        launch::prepare(self.shared(), problems)
    }

    fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error> {
        self.run(|| self.prepare_call(call))
    }
}

/// The key of a tuning table: adapter, driver, and the limits that tiles depend on.
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
    let storage = bytes(u64::from(limits.max_compute_workgroup_storage_size));
    let parts = [
        info.name,
        info.backend.to_string(),
        format!("driver {}", driver.trim()),
        subgroups,
        format!("{} invocations", limits.max_compute_invocations_per_workgroup),
        format!("{storage} of workgroup memory"),
        format!("bindings of {}", bytes(limits.max_storage_buffer_binding_size)),
        format!("{} storage buffers", limits.max_storage_buffers_per_shader_stage),
        format!("f16 by {}", if caps.f16 == F16::Converts { "conversions" } else { "integers" }),
    ];
    // A browser tells neither name nor driver.
    parts.into_iter().filter(|part| !part.is_empty() && part != "driver ").collect::<Vec<_>>().join(", ")
}

/// A human-readable size: `48 KiB`, `2.0 GiB`.
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

    /// Compares with Cargo.lock, if present.
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
