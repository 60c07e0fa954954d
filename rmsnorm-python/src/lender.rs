//! Backends that can be shown memory by its address: the one place where addresses become views.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use rmsnorm_core::cpu::{CpuBackend, UninitBackend};
use rmsnorm_core::cuda::{BorrowedSlice, CudaBackend};
use rmsnorm_core::{Error, NormBackend, Stored};

use crate::call::Call;
use crate::device;
use crate::foreign::Place;

/// A backend that takes memory by its address.
pub(crate) trait Lender: NormBackend {
    /// Elements of another owner's.
    type Lent<E: Stored>;

    /// `len` elements at that address.
    ///
    /// # Safety
    /// - Memory: `len` elements of `E` lie there, on the backend's device, until the work that uses them is done.
    /// - Sharing: while the result is used for output nobody else uses them, for input nobody writes them.
    unsafe fn lend<E: Stored>(&self, data: *mut c_void, len: usize) -> Result<Self::Lent<E>, Error>;

    /// To be read.
    fn input<E: Stored>(lent: &Self::Lent<E>) -> Self::In<'_, E>;

    /// To be written.
    fn output<E: Stored>(lent: &mut Self::Lent<E>) -> Self::Out<'_, E>;
}

/// Runs a call on the backend of its place.
///
/// # Safety
/// As [`Call::run`].
pub(crate) unsafe fn on(place: Place, call: &Call) -> Result<(), Error> {
    match place {
        Place::Cpu { threads } => {
            let backend = device::cpu(threads)?;
            // SAFETY:
            // - all: the caller's promises.
            unsafe { if call.is_in_place() { call.run_on(&backend) } else { call.run_on(&backend.uninit()) } }
        }
        Place::Cuda { ordinal, stream } => {
            let backend = device::cuda(ordinal)?;
            let _current = device::KeepCurrent::of(backend)?;
            // SAFETY:
            // - stream: the caller's promise; it is used until `run_on` returns.
            let backend = unsafe { backend.on_raw(stream.cast()) };
            // SAFETY:
            // - all: the caller's promises.
            unsafe { call.run_on(&backend) }
        }
    }
}

/// Elements in host memory, which may hold nothing before they are written.
pub(crate) struct HostSlice<E> {
    data: *mut E,
    len: usize,
    elements: PhantomData<E>,
}

impl<E: Stored> HostSlice<E> {
    /// `len` elements at that address, if they may lie there.
    fn new(data: *mut c_void, len: usize) -> Result<Self, Error> {
        let data = data.cast::<E>();
        // Of no elements the address may be null, and a slice's may not.
        let data = if len == 0 { std::ptr::dangling_mut() } else { data };
        if data.is_null() || !data.is_aligned() {
            let rule = format!("a {} tensor begins at a multiple of its element's size, got {data:p}", E::STORAGE);
            return Err(Error::InvalidArgument { arg: "address", rule });
        }
        Ok(HostSlice { data, len, elements: PhantomData })
    }

    /// To be read.
    ///
    /// # Safety
    /// As [`Lender::lend`], and the memory holds values.
    unsafe fn values(&self) -> &[E] {
        // SAFETY:
        // - memory: the caller's promise, and the address was checked; every bit pattern is a value of a `Stored` type;
        // - sharing: the caller's promise: nobody writes it.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }
}

impl Lender for UninitBackend {
    type Lent<E: Stored> = HostSlice<E>;

    unsafe fn lend<E: Stored>(&self, data: *mut c_void, len: usize) -> Result<HostSlice<E>, Error> {
        HostSlice::new(data, len)
    }

    fn input<E: Stored>(lent: &HostSlice<E>) -> &[E] {
        // SAFETY:
        // - all: promised to `lend`, of an input.
        unsafe { lent.values() }
    }

    fn output<E: Stored>(lent: &mut HostSlice<E>) -> &mut [MaybeUninit<E>] {
        // SAFETY:
        // - memory: as above, and it need hold nothing;
        // - sharing: promised to `lend`: nobody else uses it, and `lent` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(lent.data.cast(), lent.len) }
    }
}

/// In place, where outputs hold values.
impl Lender for CpuBackend {
    type Lent<E: Stored> = HostSlice<E>;

    unsafe fn lend<E: Stored>(&self, data: *mut c_void, len: usize) -> Result<HostSlice<E>, Error> {
        HostSlice::new(data, len)
    }

    fn input<E: Stored>(lent: &HostSlice<E>) -> &[E] {
        // SAFETY:
        // - all: promised to `lend`, of an input.
        unsafe { lent.values() }
    }

    fn output<E: Stored>(lent: &mut HostSlice<E>) -> &mut [E] {
        // SAFETY:
        // - memory: promised to `lend`; it is another library's, of which the compiler cannot tell whether it was written, and every
        //   bit pattern is a value;
        // - sharing: promised there: nobody else uses it, and `lent` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(lent.data, lent.len) }
    }
}

impl Lender for CudaBackend {
    type Lent<E: Stored> = BorrowedSlice<'static, E>;

    unsafe fn lend<E: Stored>(&self, data: *mut c_void, len: usize) -> Result<BorrowedSlice<'static, E>, Error> {
        // SAFETY:
        // - memory, sharing: the caller's promises; the owner keeps it alive until the work of the stream is done;
        // - order: the backend's stream is the one that the owner works on.
        unsafe { BorrowedSlice::new(self, data.addr() as u64, len) }
    }

    fn input<'a, E: Stored>(lent: &'a BorrowedSlice<'static, E>) -> Self::In<'a, E> {
        lent.as_view()
    }

    fn output<'a, E: Stored>(lent: &'a mut BorrowedSlice<'static, E>) -> Self::Out<'a, E> {
        lent.as_view_mut()
    }
}
