//! Tensors of PyTorch: their properties, their rows, and new ones.

use std::ffi::c_void;
use std::ptr::null_mut;

use rmsnorm_core::{Error, RowLayout, Storage, Tensor};

use super::shim::{Handle, Shim, Value};
use crate::foreign::{Foreign, Place, not_a_float, sizes};

/// The largest number of dimensions of a tensor, as in PyTorch.
const MOST_DIMS: usize = 64;

/// A device of PyTorch: type and index.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct DeviceOf {
    kind: i32,
    index: i32,
}

/// An owned reference to a tensor.
pub(super) struct Owned<'s> {
    handle: Handle,
    shim: &'s Shim,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY:
        // - tensor: owned, and released only here.
        let _ = unsafe { (self.shim.delete_tensor)(self.handle) };
    }
}

/// An error of libtorch, which has printed the reason.
fn failed(what: &'static str) -> Error {
    Error::Device { backend: "torch", source: format!("{what} failed; PyTorch has printed the reason").into() }
}

impl<'s> Owned<'s> {
    /// A tensor argument of a kernel.
    ///
    /// # Safety
    /// - Value: it is a tensor's handle that the dispatcher passed to the kernel with its
    ///   ownership.
    pub(super) unsafe fn of_value(shim: &'s Shim, value: Value) -> Self {
        Owned { handle: std::ptr::with_exposed_provenance_mut(value as usize), shim }
    }

    /// An optional argument: null, or the address of a handle on libtorch's heap, which this frees.
    ///
    /// # Safety
    /// - Value: as for [`of_value`](Self::of_value), of an optional argument.
    pub(super) unsafe fn of_optional(shim: &'s Shim, value: Value) -> Option<Self> {
        let boxed = std::ptr::with_exposed_provenance_mut::<Value>(value as usize);
        if boxed.is_null() {
            return None;
        }
        // SAFETY:
        // - memory: made by libtorch with `new`, read once and freed once.
        let value = unsafe {
            let value = boxed.read();
            (shim.thrower.delete)(boxed.cast());
            value
        };
        // SAFETY:
        // - value: the caller's promise.
        Some(unsafe { Owned::of_value(shim, value) })
    }

    /// The tensor as a result of a kernel: the dispatcher then owns it.
    pub(super) fn into_value(self) -> Value {
        let value = self.handle.expose_provenance() as Value;
        std::mem::forget(self);
        value
    }

    fn ask<T>(&self, function: unsafe extern "C" fn(Handle, *mut T) -> i32, mut answer: T) -> Result<T, Error> {
        // SAFETY:
        // - tensor: alive;
        // - pointer: to a local of the type that the function writes.
        match unsafe { function(self.handle, &raw mut answer) } {
            0 => Ok(answer),
            _ => Err(failed("a query of a tensor")),
        }
    }

    fn numbers(&self, function: unsafe extern "C" fn(Handle, *mut *mut i64) -> i32) -> Result<&[i64], Error> {
        let len = usize::try_from(self.ask(self.shim.dim, 0)?).unwrap_or(0);
        if len == 0 {
            return Ok(&[]);
        }
        let numbers = self.ask(function, null_mut())?;
        // SAFETY:
        // - memory: the tensor's, a number for each dimension, unchanged while the tensor is
        //   borrowed.
        Ok(unsafe { std::slice::from_raw_parts(numbers, len) })
    }

    /// The dimensions.
    pub(super) fn dims(&self) -> Result<&[i64], Error> {
        self.numbers(self.shim.sizes)
    }

    pub(super) fn data(&self) -> Result<*mut c_void, Error> {
        self.ask(self.shim.data_ptr, null_mut())
    }

    /// The storage of its elements.
    pub(super) fn storage(&self, tensor: Tensor) -> Result<Storage, Error> {
        let code = self.ask(self.shim.dtype, 0)?;
        let mut known = self.shim.codes.storages.into_iter();
        let found = known.find_map(|(storage, known)| (known == Some(code)).then_some(storage));
        found.ok_or_else(|| not_a_float(tensor, "another dtype"))
    }

    pub(super) fn device(&self) -> Result<DeviceOf, Error> {
        let kind = self.ask(self.shim.device_type, 0)?;
        Ok(DeviceOf { kind, index: self.ask(self.shim.device_index, 0)? })
    }

    /// Its rows, or the rows of a dense copy, returned with them, if they need more than two
    /// strides. A strided vector is copied, too.
    pub(super) fn rows(&self, tensor: Tensor) -> Result<(Foreign, Option<Owned<'s>>), Error> {
        let (dims, strides, storage) = (self.dims()?, self.numbers(self.shim.strides)?, self.storage(tensor)?);
        let rows = Foreign::strided(tensor, self.data()?, storage, dims, strides);
        if let Some(rows) = rows.filter(|rows| tensor.is_matrix() || rows.flat(tensor).is_ok()) {
            return Ok((rows, None));
        }
        let copy = Owned::empty(self.shim, dims, storage, self.device()?)?;
        // SAFETY:
        // - tensors: alive, of one shape.
        if unsafe { (self.shim.copy)(copy.handle, self.handle, 0) } != 0 {
            return Err(failed("a copy to dense rows"));
        }
        let no_dims = || Error::InvalidArgument { arg: tensor.name(), rule: "expected at least one dimension".into() };
        let layout = sizes(dims).and_then(RowLayout::dense).ok_or_else(no_dims)?;
        Ok((Foreign { data: copy.data()?, storage, layout }, Some(copy)))
    }

    /// A new uninitialized tensor in PyTorch's memory, with dense rows.
    pub(super) fn empty(shim: &'s Shim, dims: &[i64], storage: Storage, on: DeviceOf) -> Result<Self, Error> {
        let mut strides = [1; MOST_DIMS];
        let too_many =
            || Error::Unsupported { rule: format!("tensors have at most {MOST_DIMS} dimensions, got {}", dims.len()) };
        let strides = strides.get_mut(..dims.len()).ok_or_else(too_many)?;
        let mut step = 1;
        for (stride, &dim) in strides.iter_mut().zip(dims).rev() {
            *stride = step;
            step *= dim.max(1);
        }
        Owned::with_strides(shim, dims, strides, storage, on)
    }

    /// A new uninitialized tensor with these strides, in elements.
    pub(super) fn with_strides(
        shim: &'s Shim,
        dims: &[i64],
        strides: &[i64],
        storage: Storage,
        on: DeviceOf,
    ) -> Result<Self, Error> {
        let mut known = shim.codes.storages.into_iter();
        let dtype = known.find_map(|(known, code)| code.filter(|_| known == storage));
        let dtype =
            dtype.ok_or_else(|| Error::Unsupported { rule: format!("this PyTorch has no dtype for {storage}") })?;
        let (len, mut handle) = (dims.len() as i64, null_mut());
        let (dims, strides) = (dims.as_ptr(), strides.as_ptr());
        // SAFETY:
        // - pointers: to `len` numbers each, and to a local.
        match unsafe { (shim.empty_strided)(len, dims, strides, dtype, on.kind, on.index, &raw mut handle) } {
            0 => Ok(Owned { handle, shim }),
            _ => Err(failed("an allocation")),
        }
    }
}

impl Shim {
    /// The place of a device: with PyTorch's number of threads, or on its current stream.
    pub(super) fn place(&self, DeviceOf { kind, index }: DeviceOf) -> Result<Place, Error> {
        if kind == self.codes.cpu {
            let mut threads = 0;
            // SAFETY:
            // - pointer: to a local.
            let _ = unsafe { (self.num_threads)(&raw mut threads) };
            return Ok(Place::Cpu { threads: Some(threads as usize) });
        }
        if kind != self.codes.cuda {
            return Err(Error::Unsupported { rule: "tensors must be on the CPU or on CUDA: move them there".into() });
        }
        let unavailable = || Error::Unavailable { backend: "cuda", reason: "this PyTorch has no CUDA".into() };
        let current = self.current_cuda_stream.ok_or_else(unavailable)?;
        let mut stream = null_mut();
        // SAFETY:
        // - pointer: to a local.
        match unsafe { current(index, &raw mut stream) } {
            0 => Ok(Place::Cuda { ordinal: usize::try_from(index).unwrap_or(0), stream }),
            _ => Err(failed("aoti_torch_get_current_cuda_stream")),
        }
    }
}
