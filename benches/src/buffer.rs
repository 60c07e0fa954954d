//! Device tensors whose element type is a run-time value, so that the benchmark is compiled once
//! per device, not once per dtype.

use std::ops::Range;

use rmsnorm_core::conformance::Harness;
use rmsnorm_core::conformance::testing::Bits;
use rmsnorm_core::quant::CodeType;
use rmsnorm_core::{AnyElement, AnyIn, AnyOut, DType, Element, Error, F8E4M3, Storage, bf16, f16};

use crate::Measurable;

/// A tensor of any measured type.
pub(crate) enum Buffer<D: Harness> {
    F32(D::Buffer<f32>),
    F16(D::Buffer<f16>),
    Bf16(D::Buffer<bf16>),
    E4m3(D::Buffer<F8E4M3>),
    E8m0(D::Buffer<u8>),
}

/// Runs `body` with the elements of a buffer of any type.
macro_rules! each {
    ($buffer:expr, $elements:ident => $body:expr) => {
        match $buffer {
            Buffer::F32($elements) => $body,
            Buffer::F16($elements) => $body,
            Buffer::Bf16($elements) => $body,
            Buffer::E4m3($elements) => $body,
            Buffer::E8m0($elements) => $body,
        }
    };
}

/// Runs `body` with the elements of two buffers of the same float type.
macro_rules! both {
    ($buffers:expr, $one:ident, $other:ident => $body:expr) => {
        match $buffers {
            (Buffer::F32($one), Buffer::F32($other)) => $body,
            (Buffer::F16($one), Buffer::F16($other)) => $body,
            (Buffer::Bf16($one), Buffer::Bf16($other)) => $body,
            (
                Buffer::F32(_) | Buffer::F16(_) | Buffer::Bf16(_) | Buffer::E4m3(_) | Buffer::E8m0(_),
                Buffer::F32(_) | Buffer::F16(_) | Buffer::Bf16(_) | Buffer::E4m3(_) | Buffer::E8m0(_),
            ) => Err(crate::buffer::no_floats()),
        }
    };
}

pub(crate) use both;

/// Runs `body` with the Rust type of a storage, and the variant of [`Buffer`].
macro_rules! typed {
    ($storage:expr; $element:ident, $variant:ident => $body:expr) => {
        match $storage {
            Storage::Float(DType::F32) => typed!(@ f32, F32, $element, $variant, $body),
            Storage::Float(DType::F16) => typed!(@ f16, F16, $element, $variant, $body),
            Storage::Float(DType::Bf16) => typed!(@ bf16, Bf16, $element, $variant, $body),
            Storage::Code(CodeType::E4m3) => typed!(@ F8E4M3, E4m3, $element, $variant, $body),
            Storage::E8m0 => typed!(@ u8, E8m0, $element, $variant, $body),
            Storage::Code(CodeType::E5m2 | CodeType::Int8) => Err(not_measured()),
        }
    };
    (@ $type:ty, $of:ident, $element:ident, $variant:ident, $body:expr) => {{
        type $element = $type;
        let $variant = Buffer::$of;
        $body
    }};
}

pub(crate) fn no_floats() -> Error {
    Error::Unsupported { rule: "both buffers must have the same float type".into() }
}

fn not_measured() -> Error {
    Error::Unsupported { rule: "codes must be e4m3 to be measured".into() }
}

/// The bits of a NaN; for E4M3 and E8M0, too.
const fn nan(storage: Storage) -> u32 {
    match storage {
        Storage::Float(DType::F32) => f32::NAN.to_bits(),
        Storage::Float(DType::F16) => f16::NAN.to_bits() as u32,
        Storage::Float(DType::Bf16) => bf16::NAN.to_bits() as u32,
        Storage::Code(_) => 0x7f,
        Storage::E8m0 => 0xff,
    }
}

fn from_bits<E: AnyElement>(elements: &Bits) -> Vec<E> {
    elements.bits.iter().map(|&bits| E::from_bits(bits)).collect()
}

fn repeat<D: Measurable, E: Element>(
    device: &D,
    period: &Bits,
    (len, count): (usize, usize),
    variant: fn(D::Buffer<E>) -> Buffer<D>,
) -> Result<Vec<Buffer<D>>, Error> {
    Ok(device.repeat(&from_bits(period), len, count)?.into_iter().map(variant).collect())
}

impl<D: Measurable> Buffer<D> {
    /// A buffer with these elements.
    pub(crate) fn upload(device: &D, elements: &Bits) -> Result<Self, Error> {
        typed!(elements.storage; E, variant => Ok(variant(device.upload(&from_bits::<E>(elements))?)))
    }

    /// A buffer of `len` NaNs, uploaded from the host.
    pub(crate) fn nan(device: &D, storage: impl Into<Storage>, len: usize) -> Result<Self, Error> {
        let storage = storage.into();
        typed!(storage; E, variant => Ok(variant(device.upload(&vec![<E as AnyElement>::from_bits(nan(storage)); len])?)))
    }

    /// `count` buffers of `len` floats, each of which repeats the period.
    pub(crate) fn repeat(device: &D, period: &Bits, len: usize, count: usize) -> Result<Vec<Self>, Error> {
        match period.storage {
            Storage::Float(DType::F32) => repeat(device, period, (len, count), Buffer::F32),
            Storage::Float(DType::F16) => repeat(device, period, (len, count), Buffer::F16),
            Storage::Float(DType::Bf16) => repeat(device, period, (len, count), Buffer::Bf16),
            Storage::Code(_) | Storage::E8m0 => Err(no_floats()),
        }
    }

    pub(crate) fn view(&self, device: &D, range: Range<usize>) -> AnyIn<'_, D::Backend> {
        each!(self, elements => AnyElement::any_in(device.view(elements, range)))
    }

    pub(crate) fn view_mut(&mut self, device: &D, range: Range<usize>) -> AnyOut<'_, D::Backend> {
        each!(self, elements => AnyElement::any_out(device.view_mut(elements, range)))
    }

    /// Downloads some elements, after all enqueued work is done.
    pub(crate) fn download(&self, device: &D, range: Range<usize>) -> Result<Bits, Error> {
        each!(self, elements => Ok(Bits::of(&device.download_part(elements, range)?)))
    }

    /// Enqueues a copy of some floats to another buffer. `way`: a number below
    /// [`Measurable::COPIES`].
    pub(crate) fn copy(
        device: &D,
        (from, source): (&Self, Range<usize>),
        (to, target): (&mut Self, Range<usize>),
        way: usize,
    ) -> Result<(), Error> {
        both!((from, to), from, to => device.copy(device.view(from, source), device.view_mut(to, target), way))
    }

    /// The number of floats that differ in another buffer, compared bit by bit.
    pub(crate) fn count_unlike(&self, device: &D, other: &Self) -> Result<usize, Error> {
        both!((self, other), from, to => {
            let (from, to) = (device.download(from)?, device.download(to)?);
            let unlike = from.iter().zip(&to).filter(|(from, to)| from.bits() != to.bits()).count();
            Ok(unlike + from.len().abs_diff(to.len()))
        })
    }
}
