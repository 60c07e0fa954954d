//! The part of libtorch's stable C interface that is used here (torch/csrc/inductor/aoti_torch/c/shim.h and
//! torch/csrc/stable/c/shim.h), looked up in the libraries that PyTorch has loaded: nothing is linked.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null_mut;

use libloading::os::unix::{Library, RTLD_NOW};
use rmsnorm_core::quant::CodeType;
use rmsnorm_core::{DType, Storage};

/// A tensor that libtorch holds for us.
pub(super) type Handle = *mut c_void;
/// What the dispatcher's stack holds: a tensor's handle, the bits of a number, an address.
pub(super) type Value = u64;
/// 0, or a failure, which libtorch has printed.
type Code = i32;

/// A kernel as the dispatcher calls it: takes its arguments from the stack and leaves its results there.
pub(super) type Kernel = unsafe extern "C-unwind" fn(*mut Value, u64, u64);

/// `RTLD_NOLOAD` of glibc and musl: what is not loaded yet is not found.
const RTLD_NOLOAD: i32 = 4;

/// Declares the table of functions, and how it is filled.
macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// libtorch's functions.
        pub(super) struct Shim {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            pub(super) codes: Codes,
            /// Of libtorch_cuda, where this PyTorch has it.
            pub(super) current_cuda_stream: Option<unsafe extern "C" fn(i32, *mut *mut c_void) -> Code>,
            pub(super) thrower: Thrower,
        }

        impl Shim {
            /// Looks the functions up in the loaded libraries of these paths.
            ///
            /// # Safety
            /// - Libraries: they are libtorch_cpu and libtorch_cuda of PyTorch 2.10 or later, and stay loaded.
            pub(super) unsafe fn load(cpu: &str, cuda: Option<&str>) -> Result<Self, libloading::Error> {
                // SAFETY:
                // - libraries: loaded already, so nothing is run; forgotten below, so never unloaded;
                // - types: those of the headers that are named above.
                unsafe {
                    let open = |path: &str| Library::open(Some(path), RTLD_NOW | RTLD_NOLOAD);
                    let (torch, cuda) = (open(cpu)?, cuda.map(open).transpose()?);
                    let stream = |cuda: &Library| Some(*cuda.get(b"aoti_torch_get_current_cuda_stream\0").ok()?);
                    let shim = Shim {
                        $($name: *torch.get(concat!($symbol, "\0").as_bytes())?,)*
                        codes: Codes::load(&torch)?,
                        current_cuda_stream: cuda.as_ref().and_then(stream),
                        thrower: Thrower::load(&open("libstdc++.so.6")?)?,
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

/// libtorch's numbers of what we know.
pub(super) struct Codes {
    pub(super) cpu: i32,
    pub(super) cuda: i32,
    pub(super) storages: [(Storage, i32); 7],
}

impl Codes {
    /// # Safety
    /// - Library: it is libtorch_cpu.
    unsafe fn load(torch: &Library) -> Result<Self, libloading::Error> {
        // SAFETY:
        // - functions: without arguments, each answers a constant.
        let code = |symbol: &[u8]| unsafe {
            Ok::<i32, libloading::Error>(torch.get::<unsafe extern "C" fn() -> i32>(symbol)?())
        };
        Ok(Codes {
            cpu: code(b"aoti_torch_device_type_cpu\0")?,
            cuda: code(b"aoti_torch_device_type_cuda\0")?,
            storages: [
                (Storage::Float(DType::F32), code(b"aoti_torch_dtype_float32\0")?),
                (Storage::Float(DType::F16), code(b"aoti_torch_dtype_float16\0")?),
                (Storage::Float(DType::Bf16), code(b"aoti_torch_dtype_bfloat16\0")?),
                (Storage::Code(CodeType::E4m3), code(b"aoti_torch_dtype_float8_e4m3fn\0")?),
                (Storage::Code(CodeType::E5m2), code(b"aoti_torch_dtype_float8_e5m2\0")?),
                (Storage::Code(CodeType::Int8), code(b"aoti_torch_dtype_int8\0")?),
                (Storage::E8m0, code(b"aoti_torch_dtype_float8_e8m0fnu\0")?),
            ],
        })
    }
}

// SAFETY:
// - functions of loaded libraries, which any thread may call; addresses of static data.
unsafe impl Send for Shim {}
// SAFETY:
// - as above.
unsafe impl Sync for Shim {}

impl Shim {
    /// Gives the dispatcher a kernel for an operator, on a backend it calls `key`.
    pub(super) fn register(&self, namespace: &CStr, key: &CStr, operator: &CStr, kernel: Kernel) -> Result<(), String> {
        let file = c"rmsnorm-python";
        let mut library = null_mut();
        // SAFETY:
        // - strings: end with zero, and live to the end of the call; libtorch copies them;
        // - library: made by the first call, used by the second; libtorch keeps what is registered for as long as the process runs,
        //   and so is the library left to it.
        let codes = unsafe {
            let made = (self.library_impl)(namespace.as_ptr(), key.as_ptr(), file.as_ptr(), 0, &raw mut library);
            [made, if made == 0 { (self.implement)(library, operator.as_ptr(), kernel) } else { 0 }]
        };
        if codes == [0; 2] { Ok(()) } else { Err(format!("PyTorch refused the kernel of {operator:?} for {key:?}")) }
    }
}

/// `throw std::runtime_error(message)`, which is how a kernel fails: the dispatcher's caller sees a `RuntimeError`. By the Itanium
/// C++ ABI, so on Linux.
pub(super) struct Thrower {
    allocate: unsafe extern "C" fn(usize) -> *mut c_void,
    construct: unsafe extern "C" fn(*mut c_void, *const c_char),
    throw: unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void) -> !,
    type_info: *mut c_void,
    destroy: *mut c_void,
    /// `operator delete`
    pub(super) delete: unsafe extern "C" fn(*mut c_void),
}

/// Of a `std::runtime_error`: its table of virtual functions and its string.
const RUNTIME_ERROR_BYTES: usize = 16;

impl Thrower {
    /// # Safety
    /// - Library: it is libstdc++, the one that libtorch uses.
    unsafe fn load(library: &Library) -> Result<Self, libloading::Error> {
        // SAFETY:
        // - types: those of the C++ ABI and of libstdc++.
        unsafe {
            Ok(Thrower {
                allocate: *library.get(b"__cxa_allocate_exception\0")?,
                construct: *library.get(b"_ZNSt13runtime_errorC1EPKc\0")?,
                throw: *library.get(b"__cxa_throw\0")?,
                type_info: *library.get(b"_ZTISt13runtime_error\0")?,
                destroy: *library.get(b"_ZNSt13runtime_errorD1Ev\0")?,
                delete: *library.get(b"_ZdlPv\0")?,
            })
        }
    }

    /// Throws. Nothing of the caller's must be left to drop, as this unwinds through foreign frames.
    pub(super) fn throw(&self, message: String) -> ! {
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        // SAFETY:
        // - memory: as many bytes as the object has, from the function that `__cxa_throw` takes it from; the constructor copies the
        //   message, which is dropped before the throw.
        unsafe {
            let exception = (self.allocate)(RUNTIME_ERROR_BYTES);
            (self.construct)(exception, message.as_ptr());
            drop(message);
            (self.throw)(exception, self.type_info, self.destroy)
        }
    }
}
