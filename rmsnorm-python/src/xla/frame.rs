//! Safe access to the contents of XLA's call frames.

use std::ffi::{CString, c_void};
use std::mem::offset_of;
use std::ptr::null_mut;

use rmsnorm_core::{DType, Error, RowLayout, Storage, Tensor};

use super::api::{self, Buffer, CallFrame};
use crate::foreign::{Foreign, Place, not_a_float};

/// A call frame, valid during the call.
pub(super) struct Frame<'a>(&'a CallFrame);

/// The error of an invalid argument.
pub(super) fn invalid(arg: &'static str, rule: impl Into<String>) -> Error {
    Error::InvalidArgument { arg, rule: rule.into() }
}

fn failed(what: &'static str) -> Error {
    Error::Device { backend: "xla", source: format!("{what} failed").into() }
}

impl<'a> Frame<'a> {
    /// # Safety
    /// - Frame: XLA made it, and it lives for `'a`.
    pub(super) unsafe fn new(frame: *const CallFrame) -> Self {
        // SAFETY:
        // - frame: the caller's promise.
        Frame(unsafe { &*frame })
    }

    /// Answers a metadata query of XLA: the version of the interface, and that CUDA graphs may
    /// capture the handler's calls. Returns whether the frame is such a query.
    pub(super) fn answers_metadata(&self) -> bool {
        let mut extension = self.0.extension_start;
        // SAFETY:
        // - list: the extensions live as long as the frame, and each begins with these fields.
        while let Some(base) = unsafe { extension.as_ref() } {
            if base.kind == api::EXTENSION_METADATA {
                // SAFETY:
                // - kind: identifies this extension, whose metadata may be written. The fields
                //   exist in every version.
                let metadata = unsafe { &mut *(*extension.cast::<api::MetadataExtension>()).metadata };
                // SAFETY:
                // - table: null, or a table that lives as long as the process.
                let theirs = unsafe { self.0.api.as_ref() }.map_or(*api::MINOR.start(), |api| api.version.minor);
                metadata.api_version.major = api::MAJOR;
                metadata.api_version.minor = theirs.clamp(*api::MINOR.start(), *api::MINOR.end());
                metadata.traits = api::COMMAND_BUFFER_COMPATIBLE;
                return true;
            }
            extension = base.next;
        }
        false
    }

    pub(super) fn stage(&self) -> i32 {
        self.0.stage
    }

    /// An identifier of the call, unique while its program lives: the address of its attributes.
    pub(super) fn call_id(&self) -> usize {
        self.0.attributes.values.addr()
    }

    pub(super) fn args(&self) -> Vec<Array<'a>> {
        Frame::arrays(&self.0.args)
    }

    pub(super) fn results(&self) -> Vec<Array<'a>> {
        Frame::arrays(&self.0.results)
    }

    fn arrays(of: &'a api::Buffers) -> Vec<Array<'a>> {
        let array = |index| {
            // SAFETY:
            // - memory: `len` addresses of buffers that live as long as the frame.
            Array(unsafe { &**of.buffers.add(index) })
        };
        (0..usize::try_from(of.len).unwrap_or(0)).map(array).collect()
    }

    /// The kind and the value of an attribute.
    fn attribute(&self, name: &'static str) -> Result<(i32, *const c_void), Error> {
        let attributes = &self.0.attributes;
        for index in 0..usize::try_from(attributes.len).unwrap_or(0) {
            // SAFETY:
            // - memory: `len` names, kinds and values that live as long as the frame; a name is `len` bytes at `data`.
            let (found, kind, value) = unsafe {
                let span = &**attributes.names.add(index);
                let found = std::slice::from_raw_parts(span.data, span.len);
                (found, *attributes.kinds.add(index), *attributes.values.add(index))
            };
            if found == name.as_bytes() {
                return Ok((kind, value));
            }
        }
        Err(Error::Missing { arg: name, why: "every call needs this attribute" })
    }

    fn scalar<T: Copy>(&self, name: &'static str, dtype: i32) -> Result<T, Error> {
        let (kind, value) = self.attribute(name)?;
        if kind != api::ATTRIBUTE_SCALAR {
            return Err(invalid(name, "expected a scalar attribute"));
        }
        // SAFETY:
        // - kind: identifies a scalar, which has a dtype.
        let scalar = unsafe { &*value.cast::<api::Scalar>() };
        if scalar.dtype != dtype {
            return Err(invalid(name, format!("expected an attribute of XLA's dtype {dtype}, got {}", scalar.dtype)));
        }
        // SAFETY:
        // - dtype: was just checked; the callers below pass the dtype of `T`.
        Ok(unsafe { *scalar.value.cast::<T>() })
    }

    pub(super) fn float(&self, name: &'static str) -> Result<f32, Error> {
        self.scalar(name, api::F32)
    }

    pub(super) fn integer(&self, name: &'static str) -> Result<i64, Error> {
        self.scalar(name, api::S64)
    }

    pub(super) fn flag(&self, name: &'static str) -> Result<bool, Error> {
        Ok(self.scalar::<u8>(name, api::PRED)? != 0)
    }

    pub(super) fn string(&self, name: &'static str) -> Result<&'a str, Error> {
        let (kind, value) = self.attribute(name)?;
        if kind != api::ATTRIBUTE_STRING {
            return Err(invalid(name, "expected a string attribute"));
        }
        // SAFETY:
        // - kind: identifies a span of bytes, which lives as long as the frame.
        let bytes = unsafe {
            let span = &*value.cast::<api::ByteSpan>();
            std::slice::from_raw_parts(span.data, span.len)
        };
        std::str::from_utf8(bytes).map_err(|error| invalid(name, error.to_string()))
    }

    /// The number of the buffers' device.
    pub(super) fn ordinal(&self) -> Result<usize, Error> {
        // SAFETY:
        // - table: XLA's, which lives as long as the process.
        let api = unsafe { &*self.0.api };
        let end = offset_of!(api::Api, device_ordinal_get) + size_of::<*const c_void>();
        // A runtime without this function is assumed to use device 0.
        let Some(get) = (api.struct_size >= end).then_some(api.device_ordinal_get).flatten() else { return Ok(0) };
        let (struct_size, extension_start, context) =
            (size_of::<api::DeviceOrdinalGetArgs>(), null_mut(), self.0.context);
        let mut args = api::DeviceOrdinalGetArgs { struct_size, extension_start, context, ordinal: 0 };
        // SAFETY:
        // - function: of the type in the header, called with its struct.
        let ordinal = unsafe { get(&raw mut args) }.is_null().then_some(args.ordinal);
        ordinal.and_then(|ordinal| usize::try_from(ordinal).ok()).ok_or_else(|| failed("XLA_FFI_DeviceOrdinal_Get"))
    }

    /// The device and the stream of the call.
    pub(super) fn cuda(&self) -> Result<Place, Error> {
        // SAFETY:
        // - table: as above.
        let get = unsafe { &*self.0.api }.stream_get.ok_or_else(|| failed("XLA_FFI_Stream_Get"))?;
        let (struct_size, extension_start, context) = (size_of::<api::StreamGetArgs>(), null_mut(), self.0.context);
        let mut args = api::StreamGetArgs { struct_size, extension_start, context, stream: null_mut() };
        // SAFETY:
        // - function: of the type in the header, called with its struct.
        if !unsafe { get(&raw mut args) }.is_null() {
            return Err(failed("XLA_FFI_Stream_Get"));
        }
        Ok(Place::Cuda { ordinal: self.ordinal()?, stream: args.stream })
    }

    /// A new error object of XLA.
    pub(super) fn error(&self, code: i32, message: &str) -> *mut c_void {
        let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
        let (struct_size, message) = (size_of::<api::ErrorCreateArgs>(), text.as_ptr());
        let mut args = api::ErrorCreateArgs { struct_size, extension_start: null_mut(), message, code };
        // SAFETY:
        // - table, function: XLA's own; it copies the message.
        unsafe { (*self.0.api).error_create.map_or(null_mut(), |create| create(&raw mut args)) }
    }
}

/// An array of the call.
#[derive(Clone, Copy)]
pub(super) struct Array<'a>(&'a Buffer);

impl<'a> Array<'a> {
    pub(super) fn dims(&self) -> &'a [i64] {
        match usize::try_from(self.0.rank) {
            Ok(rank @ 1..) => {
                // SAFETY:
                // - memory: `rank` numbers that live as long as the frame.
                unsafe { std::slice::from_raw_parts(self.0.dims, rank) }
            }
            Ok(0) | Err(_) => &[],
        }
    }

    pub(super) fn storage(&self, tensor: Tensor) -> Result<Storage, Error> {
        Ok(Storage::Float(match self.0.dtype {
            api::F32 => DType::F32,
            api::F16 => DType::F16,
            api::BF16 => DType::Bf16,
            other => return Err(not_a_float(tensor, &format!("XLA's dtype {other}"))),
        }))
    }

    /// The `index`th part of the array, if it consists of equal parts with this layout.
    pub(super) fn part(&self, tensor: Tensor, index: usize, layout: RowLayout) -> Result<Foreign, Error> {
        let storage = self.storage(tensor)?;
        let bytes = index * layout.rows * layout.cols * storage.size();
        // `wrapping_add`, since the address may be null: XLA has no addresses before a call is
        // executed.
        let data = self.0.data.cast::<u8>().wrapping_add(bytes).cast();
        Ok(Foreign { data, storage, layout })
    }
}
