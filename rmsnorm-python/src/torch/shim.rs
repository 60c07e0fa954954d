//! The functions of libtorch's stable C interface that are used here
//! (torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h). They are looked up in
//! the libraries that PyTorch has loaded; nothing is linked.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null_mut;

use libloading::os::unix::{Library, RTLD_NOW};
use rmsnorm_core::quant::CodeType;
use rmsnorm_core::{DType, Storage};

/// A tensor owned by libtorch.
pub(super) type Handle = *mut c_void;
/// An entry of the dispatcher's stack: a tensor's handle, the bits of a number, or an address.
pub(super) type Value = u64;
/// 0 for success. libtorch has printed the reason of a failure.
type Code = i32;

/// A kernel of the dispatcher: reads its arguments from the stack and leaves its results there.
pub(super) type Kernel = unsafe extern "C-unwind" fn(*mut Value, u64, u64);

/// `RTLD_NOLOAD` of glibc and musl: opening a library that is not loaded fails.
const RTLD_NOLOAD: i32 = 4;

/// Declares the table of functions and its `load`.
macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// libtorch's functions.
        pub(super) struct Shim {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            pub(super) codes: Codes,
            /// From libtorch_cuda; `None` if this PyTorch does not have it.
            pub(super) current_cuda_stream: Option<unsafe extern "C" fn(i32, *mut *mut c_void) -> Code>,
            pub(super) thrower: Thrower,
        }

        impl Shim {
            /// Looks the functions up in the loaded libraries with these paths.
            ///
            /// # Safety
            /// - Libraries: they are libtorch_cpu and libtorch_cuda of PyTorch 2.10 or later, and stay loaded.
            pub(super) unsafe fn load(cpu: &str, cuda: Option<&str>) -> Result<Self, String> {
                // SAFETY:
                // - libraries: loaded already, so no constructor runs; forgotten below, so never
                //   unloaded;
                // - types: as declared in the headers that are named above.
                unsafe {
                    let (torch, cuda) = (loaded(cpu)?, cuda.map(|path| loaded(path)).transpose()?);
                    let stream = |cuda: &Library| look_up(cuda, "aoti_torch_get_current_cuda_stream").ok();
                    let shim = Shim {
                        $($name: look_up(&torch, $symbol)?,)*
                        codes: Codes::load(&torch)?,
                        current_cuda_stream: cuda.as_ref().and_then(stream),
                        thrower: Thrower::load(&loaded("libstdc++.so.6")?)?,
                    };
                    std::mem::forget((torch, cuda));
                    Ok(shim)
                }
            }
        }
    };
}

functions! {
    data_ptr = "aoti_torch_get_data_ptr": fn(Handle, *mut *mut c_void) -> Code;
    dim = "aoti_torch_get_dim": fn(Handle, *mut i64) -> Code;
    sizes = "aoti_torch_get_sizes": fn(Handle, *mut *mut i64) -> Code;
    strides = "aoti_torch_get_strides": fn(Handle, *mut *mut i64) -> Code;
    dtype = "aoti_torch_get_dtype": fn(Handle, *mut i32) -> Code;
    device_type = "aoti_torch_get_device_type": fn(Handle, *mut i32) -> Code;
    device_index = "aoti_torch_get_device_index": fn(Handle, *mut i32) -> Code;
    empty_strided = "aoti_torch_empty_strided": fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> Code;
    copy = "aoti_torch_copy_": fn(Handle, Handle, i32) -> Code;
    delete_tensor = "aoti_torch_delete_tensor_object": fn(Handle) -> Code;
    num_threads = "torch_get_num_threads": fn(*mut u32) -> Code;
    library_impl = "aoti_torch_library_init_impl": fn(*const c_char, *const c_char, *const c_char, u32, *mut *mut c_void) -> Code;
    implement = "aoti_torch_library_impl": fn(*mut c_void, *const c_char, Kernel) -> Code;
}

/// libtorch's numbers for device types and dtypes.
pub(super) struct Codes {
    pub(super) cpu: i32,
    pub(super) cuda: i32,
    /// `None` for a dtype that this PyTorch does not have.
    pub(super) storages: [(Storage, Option<i32>); 7],
}

impl Codes {
    /// # Safety
    /// - Library: it is libtorch_cpu.
    unsafe fn load(torch: &Library) -> Result<Self, String> {
        // SAFETY:
        // - functions: they take no arguments and return a constant.
        let code =
            |symbol: &str| unsafe { Ok::<i32, String>(look_up::<unsafe extern "C" fn() -> i32>(torch, symbol)?()) };
        // PyTorch 2.11 and later have it, under one of two names.
        let e8m0 = code("aoti_torch_dtype_float8_e8m0fnu").or_else(|_| code("torch_dtype_float8_e8m0fnu"));
        Ok(Codes {
            cpu: code("aoti_torch_device_type_cpu")?,
            cuda: code("aoti_torch_device_type_cuda")?,
            storages: [
                (Storage::Float(DType::F32), Some(code("aoti_torch_dtype_float32")?)),
                (Storage::Float(DType::F16), Some(code("aoti_torch_dtype_float16")?)),
                (Storage::Float(DType::Bf16), Some(code("aoti_torch_dtype_bfloat16")?)),
                (Storage::Code(CodeType::E4m3), Some(code("aoti_torch_dtype_float8_e4m3fn")?)),
                (Storage::Code(CodeType::E5m2), Some(code("aoti_torch_dtype_float8_e5m2")?)),
                (Storage::Code(CodeType::Int8), Some(code("aoti_torch_dtype_int8")?)),
                (Storage::E8m0, e8m0.ok()),
            ],
        })
    }
}

/// A library that is loaded already.
///
/// # Safety
/// - Library: if it is loaded, its constructors have run, so that nothing runs here.
unsafe fn loaded(path: &str) -> Result<Library, String> {
    // SAFETY:
    // - library: the caller's promise; a library that is not loaded is not found.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_NOLOAD) }
        .map_err(|error| format!("{path} is not loaded: {error:?}; import torch first"))
}

/// A function or another symbol of a library that stays loaded.
///
/// # Safety
/// - Type: `T` is the type of the symbol.
unsafe fn look_up<T: Copy>(library: &Library, symbol: &str) -> Result<T, String> {
    // SAFETY:
    // - type: the caller's promise.
    let found = unsafe { library.get::<T>(symbol.as_bytes()) };
    found.map(|found| *found).map_err(|_| format!("PyTorch 2.10 or later is needed: this one has no {symbol}"))
}

// SAFETY:
// - fields: functions of loaded libraries, which any thread may call; addresses of static data.
unsafe impl Send for Shim {}
// SAFETY:
// - as above.
unsafe impl Sync for Shim {}

impl Shim {
    /// Registers a kernel for an operator with the dispatcher. `key`: the dispatch key, "CPU" or
    /// "CUDA".
    pub(super) fn register(&self, namespace: &CStr, key: &CStr, operator: &CStr, kernel: Kernel) -> Result<(), String> {
        let file = c"rmsnorm-python";
        let mut library = null_mut();
        // SAFETY:
        // - strings: end with zero, and live to the end of the call; libtorch copies them;
        // - library: made by the first call, used by the second; libtorch keeps it, and its
        //   registrations, until the process ends.
        let codes = unsafe {
            let made = (self.library_impl)(namespace.as_ptr(), key.as_ptr(), file.as_ptr(), 0, &raw mut library);
            [made, if made == 0 { (self.implement)(library, operator.as_ptr(), kernel) } else { 0 }]
        };
        if codes == [0; 2] { Ok(()) } else { Err(format!("PyTorch refused the kernel of {operator:?} for {key:?}")) }
    }
}

/// The functions of `throw std::runtime_error(message)`: a kernel fails with it, and Python gets a
/// `RuntimeError`. It needs the Itanium C++ ABI, as on Linux.
///
/// libstdc++ unwinds with libgcc's functions. A library linked with another unwinder (by zig, for
/// old systems) would call that unwinder from Rust's landing pads, with libgcc's data. So the one
/// Rust frame that an exception passes has no destructors and therefore no landing pad.
pub(super) struct Thrower {
    allocate: unsafe extern "C" fn(usize) -> *mut c_void,
    construct: unsafe extern "C" fn(*mut c_void, *const c_char),
    throw: Throw,
    type_info: *mut c_void,
    destroy: *mut c_void,
    /// `operator delete`
    pub(super) delete: unsafe extern "C" fn(*mut c_void),
}

/// `__cxa_throw`
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void) -> !;

/// An exception to be thrown with `throw(object, type_info, destroy)`; no exception if `throw` is
/// `None`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Exception {
    pub(super) throw: Option<Throw>,
    pub(super) object: *mut c_void,
    pub(super) type_info: *mut c_void,
    pub(super) destroy: *mut c_void,
}

impl Exception {
    /// The value of a successful call.
    pub(super) const NONE: Exception =
        Exception { throw: None, object: null_mut(), type_info: null_mut(), destroy: null_mut() };
}

/// The size of a `std::runtime_error`: the pointers to its virtual functions and its string.
const RUNTIME_ERROR_BYTES: usize = 16;

impl Thrower {
    /// # Safety
    /// - Library: it is the libstdc++ that libtorch uses.
    unsafe fn load(library: &Library) -> Result<Self, String> {
        // SAFETY:
        // - types: as in the C++ ABI and in libstdc++.
        unsafe {
            Ok(Thrower {
                allocate: look_up(library, "__cxa_allocate_exception")?,
                construct: look_up(library, "_ZNSt13runtime_errorC1EPKc")?,
                throw: look_up(library, "__cxa_throw")?,
                type_info: look_up(library, "_ZTISt13runtime_error")?,
                destroy: look_up(library, "_ZNSt13runtime_errorD1Ev")?,
                delete: look_up(library, "_ZdlPv")?,
            })
        }
    }

    /// An exception with this message.
    pub(super) fn exception(&self, message: &str) -> Exception {
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        // SAFETY:
        // - memory: of the object's size, from the function that `__cxa_throw` requires; the
        //   constructor copies the message.
        let object = unsafe {
            let object = (self.allocate)(RUNTIME_ERROR_BYTES);
            (self.construct)(object, message.as_ptr());
            object
        };
        Exception { throw: Some(self.throw), object, type_info: self.type_info, destroy: self.destroy }
    }
}
