//! The structs of XLA's foreign function interface that are used here, as in its C header
//! (xla/ffi/api/c_api.h), versions 0.1 to 0.3. A test compares offsets with the header that jaxlib
//! ships.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use pyo3::prelude::*;

/// The versions that this file describes.
pub(super) const MAJOR: c_int = 0;
pub(super) const MINOR: std::ops::RangeInclusive<c_int> = 1..=3;

pub(super) const EXTENSION_METADATA: c_int = 1;
pub(super) const STAGE_INITIALIZE: c_int = 2;
pub(super) const STAGE_EXECUTE: c_int = 3;
pub(super) const ATTRIBUTE_SCALAR: c_int = 3;
pub(super) const ATTRIBUTE_STRING: c_int = 4;

pub(super) const PRED: c_int = 1;
pub(super) const S64: c_int = 5;
pub(super) const F16: c_int = 10;
pub(super) const F32: c_int = 11;
pub(super) const BF16: c_int = 16;

pub(super) const INVALID_ARGUMENT: c_int = 3;
pub(super) const UNIMPLEMENTED: c_int = 12;
pub(super) const INTERNAL: c_int = 13;

/// The trait of a handler whose calls always launch the same work, so that CUDA graphs may capture
/// them.
pub(super) const COMMAND_BUFFER_COMPATIBLE: u32 = 1;

/// Declares structs of the header, and their layouts for a test. Most begin with the two fields in
/// parentheses.
macro_rules! structs {
    ($($header:literal struct $name:ident $(($size:ident, $start:ident))? { $($(#[$of:meta])* $field:ident = $theirs:literal: $type:ty,)* })*) => {
        $(
            #[repr(C)]
            pub(super) struct $name {
                $(pub(super) $size: usize, pub(super) $start: *mut ExtensionBase,)?
                $($(#[$of])* pub(super) $field: $type,)*
            }
        )*

        /// For the test: each struct's name in the header, and each field's name there and offset
        /// in bytes.
        #[pyfunction]
        pub(crate) fn xla_layouts() -> Vec<(&'static str, Vec<(&'static str, usize)>)> {
            vec![$(($header, vec![
                $((stringify!($size), offset_of!($name, $size)), (stringify!($start), offset_of!($name, $start)),)?
                $(($theirs, offset_of!($name, $field))),*
            ])),*]
        }
    };
}

/// A field that is not used here.
type Unused = *const c_void;

structs! {
    "XLA_FFI_Extension_Base" struct ExtensionBase {
        struct_size = "struct_size": usize,
        kind = "type": c_int,
        next = "next": *mut ExtensionBase,
    }
    "XLA_FFI_Api_Version" struct Version (struct_size, extension_start) {
        major = "major_version": c_int,
        minor = "minor_version": c_int,
    }
    "XLA_FFI_Metadata" struct Metadata {
        struct_size = "struct_size": usize,
        api_version = "api_version": Version,
        traits = "traits": u32,
    }
    "XLA_FFI_Metadata_Extension" struct MetadataExtension {
        base = "extension_base": ExtensionBase,
        metadata = "metadata": *mut Metadata,
    }
    "XLA_FFI_Error_Create_Args" struct ErrorCreateArgs (struct_size, extension_start) {
        message = "message": *const c_char,
        code = "errc": c_int,
    }
    "XLA_FFI_Stream_Get_Args" struct StreamGetArgs (struct_size, extension_start) {
        context = "ctx": *mut c_void,
        stream = "stream": *mut c_void,
    }
    "XLA_FFI_DeviceOrdinal_Get_Args" struct DeviceOrdinalGetArgs (struct_size, extension_start) {
        context = "ctx": *mut c_void,
        ordinal = "device_ordinal": i32,
    }
    "XLA_FFI_Api" struct Api (struct_size, extension_start) {
        version = "api_version": Version,
        internal = "internal_api": Unused,
        error_create = "XLA_FFI_Error_Create": Option<unsafe extern "C" fn(*mut ErrorCreateArgs) -> *mut c_void>,
        error_get_message = "XLA_FFI_Error_GetMessage": Unused,
        error_destroy = "XLA_FFI_Error_Destroy": Unused,
        handler_register = "XLA_FFI_Handler_Register": Unused,
        stream_get = "XLA_FFI_Stream_Get": Option<unsafe extern "C" fn(*mut StreamGetArgs) -> *mut c_void>,
        type_register = "XLA_FFI_Type_Register": Unused,
        execution_context_get = "XLA_FFI_ExecutionContext_Get": Unused,
        state_set = "XLA_FFI_State_Set": Unused,
        state_get = "XLA_FFI_State_Get": Unused,
        device_memory_allocate = "XLA_FFI_DeviceMemory_Allocate": Unused,
        device_memory_free = "XLA_FFI_DeviceMemory_Free": Unused,
        thread_pool_schedule = "XLA_FFI_ThreadPool_Schedule": Unused,
        thread_pool_num_threads = "XLA_FFI_ThreadPool_NumThreads": Unused,
        future_create = "XLA_FFI_Future_Create": Unused,
        future_set_available = "XLA_FFI_Future_SetAvailable": Unused,
        future_set_error = "XLA_FFI_Future_SetError": Unused,
        run_id_get = "XLA_FFI_RunId_Get": Unused,
        /// Earlier fields exist in all versions, this one only if `struct_size` includes it.
        device_ordinal_get = "XLA_FFI_DeviceOrdinal_Get":
            Option<unsafe extern "C" fn(*mut DeviceOrdinalGetArgs) -> *mut c_void>,
    }
    "XLA_FFI_Buffer" struct Buffer (struct_size, extension_start) {
        dtype = "dtype": c_int,
        data = "data": *mut c_void,
        rank = "rank": i64,
        dims = "dims": *const i64,
    }
    "XLA_FFI_Args" struct Buffers (struct_size, extension_start) {
        len = "size": i64,
        kinds = "types": *const c_int,
        buffers = "args": *const *const Buffer,
    }
    "XLA_FFI_ByteSpan" struct ByteSpan {
        data = "ptr": *const u8,
        len = "len": usize,
    }
    "XLA_FFI_Scalar" struct Scalar {
        dtype = "dtype": c_int,
        value = "value": *const c_void,
    }
    "XLA_FFI_Attrs" struct Attributes (struct_size, extension_start) {
        len = "size": i64,
        kinds = "types": *const c_int,
        names = "names": *const *const ByteSpan,
        values = "attrs": *const *const c_void,
    }
    "XLA_FFI_CallFrame" struct CallFrame (struct_size, extension_start) {
        api = "api": *const Api,
        context = "ctx": *mut c_void,
        stage = "stage": c_int,
        args = "args": Buffers,
        results = "rets": Buffers,
        attributes = "attrs": Attributes,
    }
}
