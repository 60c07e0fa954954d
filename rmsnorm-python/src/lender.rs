//! Backends that can use foreign memory: the one place where addresses become views.

use std::ffi::c_void;

use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::cuda::{BorrowedSlice, CudaBackend};
use rmsnorm_core::quant::CodeType;
use rmsnorm_core::{AnyElement, AnyIn, AnyOut, DType, Error, F8E4M3, F8E5M2, NormBackend, Storage, bf16, f16};

use crate::foreign::Foreign;

/// A backend that can use memory at an address.
pub(crate) trait Lender: NormBackend {
    /// Elements that another library owns.
    type Lent<E: AnyElement>;

    /// `len` elements at the address `data`.
    ///
    /// # Safety
    /// - Memory: `len` elements of `E` are at `data`, on the backend's device, until the work that
    ///   uses them is done.
    /// - Sharing: while the result is used for output nobody else uses them; while it is used for
    ///   input nobody writes them.
    ///
    /// # Errors
    /// `InvalidArgument` if the address is null or not aligned.
    unsafe fn lend<E: AnyElement>(&self, data: *mut c_void, len: usize) -> Result<Self::Lent<E>, Error>;

    /// An input view.
    fn input<E: AnyElement>(lent: &Self::Lent<E>) -> Self::In<'_, E>;

    /// An output view.
    fn output<E: AnyElement>(lent: &mut Self::Lent<E>) -> Self::Out<'_, E>;
}

/// Declares the enum. It has the variants of [`AnyIn`] and [`AnyOut`].
macro_rules! lent {
    ($($any:ident of $element:ty: $storage:pat,)*) => {
        /// Elements that another library owns, of any type.
        pub(crate) enum Lent<B: Lender> {
            $($any(B::Lent<$element>),)*
        }

        impl<B: Lender> Lent<B> {
            /// The elements of a tensor.
            ///
            /// # Safety
            /// - Memory, sharing: as for [`Lender::lend`], with the tensor's address and span.
            pub(crate) unsafe fn new(backend: &B, foreign: &Foreign) -> Result<Self, Error> {
                let (data, len) = (foreign.data, foreign.layout.span());
                Ok(match foreign.storage {
                    // SAFETY:
                    // - memory, sharing: the caller's promises, of as many elements as the layout spans.
                    $($storage => Lent::$any(unsafe { backend.lend(data, len)? }),)*
                })
            }

            /// An input view.
            pub(crate) fn input(&self) -> AnyIn<'_, B> {
                match self {
                    $(Lent::$any(lent) => AnyIn::$any(B::input(lent)),)*
                }
            }

            /// An output view.
            pub(crate) fn output(&mut self) -> AnyOut<'_, B> {
                match self {
                    $(Lent::$any(lent) => AnyOut::$any(B::output(lent)),)*
                }
            }
        }
    };
}

lent! {
    F32 of f32: Storage::Float(DType::F32),
    F16 of f16: Storage::Float(DType::F16),
    Bf16 of bf16: Storage::Float(DType::Bf16),
    E4m3 of F8E4M3: Storage::Code(CodeType::E4m3),
    E5m2 of F8E5M2: Storage::Code(CodeType::E5m2),
    Int8 of i8: Storage::Code(CodeType::Int8),
    E8m0 of u8: Storage::E8m0,
}

/// Elements in host memory, at a valid address.
pub(crate) struct HostSlice<E>(*mut [E]);

impl Lender for CpuBackend {
    type Lent<E: AnyElement> = HostSlice<E>;

    unsafe fn lend<E: AnyElement>(&self, data: *mut c_void, len: usize) -> Result<HostSlice<E>, Error> {
        // An empty tensor may have a null address, an empty slice may not.
        let data = if len == 0 { std::ptr::dangling_mut() } else { data.cast::<E>() };
        if data.is_null() || !data.is_aligned() {
            let rule = format!("a {} tensor must begin at a multiple of its element's size, got {data:p}", E::STORAGE);
            return Err(Error::InvalidArgument { arg: "address", rule });
        }
        Ok(HostSlice(std::ptr::slice_from_raw_parts_mut(data, len)))
    }

    fn input<E: AnyElement>(lent: &HostSlice<E>) -> &[E] {
        // SAFETY:
        // - memory: promised to `lend`, where the address was checked; every bit pattern is a value of a `AnyElement` type;
        // - sharing: promised to `lend`, for an input: nobody writes it.
        unsafe { &*lent.0 }
    }

    fn output<E: AnyElement>(lent: &mut HostSlice<E>) -> &mut [E] {
        // SAFETY:
        // - memory: as above; another library owns it, so the compiler cannot assume that it is
        //   uninitialized. A call that is not in place does not read it before writing it;
        // - sharing: promised to `lend`: nobody else uses it, and `lent` is borrowed exclusively.
        unsafe { &mut *lent.0 }
    }
}

impl Lender for CudaBackend {
    type Lent<E: AnyElement> = BorrowedSlice<'static, E>;

    unsafe fn lend<E: AnyElement>(&self, data: *mut c_void, len: usize) -> Result<BorrowedSlice<'static, E>, Error> {
        // SAFETY:
        // - memory, sharing: the caller's promises; the owner keeps it alive until the work of the stream is done;
        // - order: the backend's stream is the owner's stream.
        unsafe { BorrowedSlice::new(self, data.addr() as u64, len) }
    }

    fn input<'a, E: AnyElement>(lent: &'a BorrowedSlice<'static, E>) -> Self::In<'a, E> {
        lent.as_view()
    }

    fn output<'a, E: AnyElement>(lent: &'a mut BorrowedSlice<'static, E>) -> Self::Out<'a, E> {
        lent.as_view_mut()
    }
}
