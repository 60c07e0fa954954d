//! Calls, memory and exchanges whose dtypes are values. Code that uses them is compiled once, not
//! for every combination of dtypes.

use std::ops::Range;

use rmsnorm_spec::{
    AnyCall, AnyForward, AnyIn, AnyOut, Checked, DType, Error, Memory, NormBackend, NormSpec, Storage, bf16, f16,
};

use crate::{Collective, RowShares, Sharded};

/// Runs `body` with the element type of `storage`. Ranks exchange floats only.
macro_rules! with_float {
    ($storage:expr; $element:ident => $body:expr) => {
        match $storage {
            Storage::Float(DType::F32) => with_float!(@ f32, $element, $body),
            Storage::Float(DType::F16) => with_float!(@ f16, $element, $body),
            Storage::Float(DType::Bf16) => with_float!(@ bf16, $element, $body),
            other @ (Storage::Code(_) | Storage::E8m0) => Err(no_float(other)),
        }
    };
    (@ $type:ty, $element:ident, $body:expr) => {{
        type $element = $type;
        $body
    }};
}

fn no_float(storage: Storage) -> Error {
    Error::Unsupported { rule: format!("ranks exchange floats, got elements of {storage}") }
}

/// A temporary buffer, of any float dtype.
pub(crate) enum Room<B: Memory> {
    F32(B::Buffer<f32>),
    F16(B::Buffer<f16>),
    Bf16(B::Buffer<bf16>),
}

impl<B: Memory> Room<B> {
    pub(crate) fn view(&self, range: Range<usize>) -> AnyIn<'_, B> {
        match self {
            Room::F32(buffer) => AnyIn::F32(B::buffer_in(buffer, range)),
            Room::F16(buffer) => AnyIn::F16(B::buffer_in(buffer, range)),
            Room::Bf16(buffer) => AnyIn::Bf16(B::buffer_in(buffer, range)),
        }
    }

    pub(crate) fn view_mut(&mut self, range: Range<usize>) -> AnyOut<'_, B> {
        match self {
            Room::F32(buffer) => AnyOut::F32(B::buffer_out(buffer, range)),
            Room::F16(buffer) => AnyOut::F16(B::buffer_out(buffer, range)),
            Room::Bf16(buffer) => AnyOut::Bf16(B::buffer_out(buffer, range)),
        }
    }
}

/// Makes a forward call of the backend.
pub(crate) fn forward<B: NormBackend>(backend: &B, spec: &NormSpec, args: AnyForward<'_, B>) -> Result<(), Error> {
    backend.launch(AnyCall::Forward(Checked::forward(*spec, args)?))
}

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// A buffer of `len` elements.
    pub(crate) fn room(&self, dtype: DType, len: usize) -> Result<Room<B>, Error> {
        Ok(match dtype {
            DType::F32 => Room::F32(self.backend().buffer::<f32>(len)?),
            DType::F16 => Room::F16(self.backend().buffer::<f16>(len)?),
            DType::Bf16 => Room::Bf16(self.backend().buffer::<bf16>(len)?),
        })
    }

    /// [`room`](Self::room) for an optional output.
    pub(crate) fn room_if(&self, is_there: bool, dtype: DType, len: usize) -> Result<Option<Room<B>>, Error> {
        is_there.then(|| self.room(dtype, len)).transpose()
    }

    /// [`Memory::copy`].
    pub(crate) fn copy(&self, from: AnyIn<'_, B>, to: AnyOut<'_, B>) -> Result<(), Error> {
        with_float!(from.storage(); T => self.backend().copy::<T>(from.typed()?, to.typed()?))
    }

    /// [`Collective::all_to_all`].
    pub(crate) fn all_to_all(&self, shares: &RowShares, from: AnyIn<'_, B>, to: AnyOut<'_, B>) -> Result<(), Error> {
        with_float!(from.storage(); T => self.collective().all_to_all::<T>(shares, from.typed()?, to.typed()?))
    }

    /// [`Collective::all_gather`].
    pub(crate) fn all_gather(&self, shares: &RowShares, from: AnyIn<'_, B>, to: AnyOut<'_, B>) -> Result<(), Error> {
        with_float!(from.storage(); T => self.collective().all_gather::<T>(shares, from.typed()?, to.typed()?))
    }

    /// [`Collective::all_gather_in_place`].
    pub(crate) fn all_gather_in_place(&self, shares: &RowShares, tensor: AnyOut<'_, B>) -> Result<(), Error> {
        with_float!(tensor.storage(); T => self.collective().all_gather_in_place::<T>(shares, tensor.typed()?))
    }

    /// [`Collective::all_reduce`].
    pub(crate) fn all_reduce(&self, from: AnyIn<'_, B>, to: AnyOut<'_, B>) -> Result<(), Error> {
        with_float!(from.storage(); T => self.collective().all_reduce::<T>(from.typed()?, to.typed()?))
    }

    /// [`Collective::all_reduce_in_place`].
    pub(crate) fn all_reduce_in_place(&self, tensor: AnyOut<'_, B>) -> Result<(), Error> {
        with_float!(tensor.storage(); T => self.collective().all_reduce_in_place::<T>(tensor.typed()?))
    }
}
