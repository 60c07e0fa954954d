//! The state of one context that all its backends share: its loaded kernels and the pool of
//! workspaces.

mod allocate;
mod pool;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use cudarc::driver::sys::{self, CUfunction_attribute_enum as FunctionAttribute};
use cudarc::driver::{CudaContext, CudaFunction, DriverError};
use cudarc::nvrtc::Ptx;
use rmsnorm_gpu::parallel;
use rmsnorm_spec::Error;
use rmsnorm_tuning::{Chosen, Identity, TuningSource, choose};

use crate::caps::Caps;
use crate::compile;
use crate::error::{device_error, unavailable};
use crate::plan::{KEPT, KernelKey, Plan, Tuning};
pub(crate) use allocate::bytes_of;
use pool::Pool;

/// Bytes of dynamic shared memory that a kernel may use without an attribute.
const SHARED_WITHOUT_OPTIN: u32 = 48 << 10;

/// The kernels of a context. A kernel that was handed out stays loaded until the process ends.
#[derive(Debug)]
pub(crate) struct Kernels {
    context: Arc<CudaContext>,
    caps: Caps,
    /// The device, driver and library that a tuning table of this device must match.
    #[cfg(feature = "conformance")]
    identity: Identity,
    /// The source of the tuning table in use.
    source: TuningSource,
    /// Shared by backends with different tuning tables: a key contains the whole tile.
    loaded: Arc<RwLock<HashMap<KernelKey, CudaFunction>>>,
    pool: Mutex<Option<Pool>>,
}

impl Kernels {
    /// The kernels of `context`: those of another backend in this process, or new ones, with the
    /// tuning table that the environment selects. A table depends on the versions `driver` and
    /// `library`.
    ///
    /// # Errors
    /// `Unavailable` if the environment names a table that does not fit; `Device` if the driver
    /// fails.
    pub(crate) fn of(context: &Arc<CudaContext>, driver: String, library: String) -> Result<Arc<Self>, Error> {
        static ALL: Mutex<Vec<Weak<Kernels>>> = Mutex::new(Vec::new());
        // A panic cannot leave a half-made entry: each is complete before it is pushed.
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|kernels| kernels.strong_count() > 0);
        if let Some(kernels) = all.iter().filter_map(Weak::upgrade).find(|kernels| kernels.context == *context) {
            return Ok(kernels);
        }
        let caps = Caps::read(context).map_err(device_error("cuDeviceGetAttribute"))?;
        let name = context.name().map_err(device_error("cuDeviceGetName"))?;
        let identity = Identity {
            backend: crate::error::BACKEND,
            device: format!("{name}, {}, {} SMs", caps.arch, caps.sms),
            driver,
            library,
            kernels: Tuning::revision().to_owned(),
        };
        let Chosen { table, source } = choose(&identity, Tuning::from_table).map_err(unavailable)?;
        let tuning = table.map_or(caps.tuning, |table| KEPT.keep(table));
        let kernels = Kernels {
            context: context.clone(),
            caps: Caps { tuning, ..caps },
            #[cfg(feature = "conformance")]
            identity,
            source,
            loaded: Arc::default(),
            pool: Mutex::default(),
        };
        let kernels = Arc::new(kernels);
        all.push(Arc::downgrade(&kernels));
        Ok(kernels)
    }

    /// The kernels of this context, planned with another tuning table.
    #[cfg(feature = "conformance")]
    pub(crate) fn with_tuning(&self, tuning: &'static Tuning, source: TuningSource) -> Arc<Self> {
        Arc::new(Kernels {
            context: self.context.clone(),
            caps: Caps { tuning, ..self.caps },
            identity: self.identity.clone(),
            source,
            loaded: self.loaded.clone(),
            pool: Mutex::default(),
        })
    }

    /// The device, driver and library that a tuning table of this device must match.
    #[cfg(feature = "conformance")]
    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The source of the tuning table in use.
    pub(crate) fn source(&self) -> &TuningSource {
        &self.source
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(crate) fn caps(&self) -> &Caps {
        &self.caps
    }

    /// The number of loaded kernels.
    #[cfg(feature = "conformance")]
    pub(crate) fn len(&self) -> usize {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The pool of workspaces, created at its first use. The context must be current on this
    /// thread.
    pub(crate) fn pool(&self) -> Result<sys::CUmemoryPool, Error> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = &*pool {
            return Ok(pool.handle());
        }
        Ok(pool.insert(Pool::new(&self.context)?).handle())
    }

    /// The kernel for a key of `plan`. If it is not loaded, all missing kernels of the plan are
    /// compiled first, in parallel. The context must be current on this thread.
    ///
    /// Threads that need the same new kernel at once may each compile it; one copy is kept.
    pub(crate) fn get(&self, key: &KernelKey, plan: &Plan) -> Result<sys::CUfunction, Error> {
        if let Some(kernel) = self.find(key) {
            return Ok(kernel);
        }
        self.prepare(plan.keys())?;
        self.find_or_load(key)
    }

    /// Compiles and loads the missing kernels, on several threads.
    pub(crate) fn prepare(&self, keys: impl Iterator<Item = KernelKey>) -> Result<(), Error> {
        let keys: HashSet<KernelKey> = keys.filter(|key| self.find(key).is_none()).collect();
        parallel::try_for_each(&Vec::from_iter(keys), |key| {
            self.context.bind_to_thread().map_err(device_error("before a kernel is loaded"))?;
            self.find_or_load(key).map(|_| ())
        })
    }

    fn find(&self, key: &KernelKey) -> Option<sys::CUfunction> {
        // A panic cannot leave the map half-written: a kernel is complete before it is inserted.
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).get(key).map(CudaFunction::cu_function)
    }

    /// The kernel for a key, loaded if it is missing. The context must be current on this thread.
    pub(crate) fn find_or_load(&self, key: &KernelKey) -> Result<sys::CUfunction, Error> {
        if let Some(kernel) = self.find(key) {
            return Ok(kernel);
        }
        let kernel = self.load(key)?;
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        Ok(loaded.entry(*key).or_insert_with(|| keep_loaded(kernel)).cu_function())
    }

    /// Loads a kernel, which is unloaded when the result is dropped.
    fn load(&self, key: &KernelKey) -> Result<CudaFunction, Error> {
        let cubin = compile::compile(key, self.caps.arch)?;
        let _permission = CapturePermission::enter()?;
        let cubin = Ptx::from_binary(cubin.to_vec());
        let module = self.context.load_module(cubin).map_err(device_error("cuModuleLoadData"))?;
        let kernel = module.load_function(key.program.info().stem).map_err(device_error("cuModuleGetFunction"))?;
        self.allow_shared_memory(&kernel).map_err(device_error("cuFuncSetAttribute"))?;
        Ok(kernel)
    }

    /// Allows a kernel all shared memory of a block; each launch says how much it uses.
    fn allow_shared_memory(&self, kernel: &CudaFunction) -> Result<(), DriverError> {
        let most = self.caps.shared_per_block_optin;
        if most <= SHARED_WITHOUT_OPTIN {
            return Ok(());
        }
        let dynamic = most.saturating_sub(kernel.shared_size_bytes()?.unsigned_abs());
        kernel.set_attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic.cast_signed())
    }
}

/// Keeps the kernel's module loaded for ever, and its context retained. cudarc unloads a module
/// with its last reference, while launches may still wait on a stream and graphs may still hold the
/// kernel; no document promises that unloading waits for either.
fn keep_loaded(kernel: CudaFunction) -> CudaFunction {
    std::mem::forget(kernel.clone());
    kernel
}

/// While it lives, this thread may load modules during a stream capture. Loading touches no stream,
/// so it disturbs no capture; the driver still forbids it by default.
struct CapturePermission {
    before: sys::CUstreamCaptureMode,
}

impl CapturePermission {
    fn enter() -> Result<Self, Error> {
        let before = exchange_capture_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
        Ok(CapturePermission { before: before.map_err(device_error("cuThreadExchangeStreamCaptureMode"))? })
    }
}

impl Drop for CapturePermission {
    fn drop(&mut self) {
        // The same call succeeded in `enter`; if it fails now, the next capture reports an error.
        let _ = exchange_capture_mode(self.before);
    }
}

/// Sets how this thread may interfere with captures; returns the previous mode.
fn exchange_capture_mode(mut mode: sys::CUstreamCaptureMode) -> Result<sys::CUstreamCaptureMode, DriverError> {
    // SAFETY:
    // - pointer: to a local of the type that the call reads and writes;
    // - value: the driver writes one of the enum's values, the ones that the mode can be set to.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result()?;
    Ok(mode)
}
