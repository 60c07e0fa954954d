//! For tests: the portable lanes with a record of stores past the cache and fences.

use std::cell::RefCell;

use crate::lanes::{Float8, Group, LANES, Portable, Simd};

/// One recorded operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// 32 elements were stored past the cache.
    Stream,
    /// A fence ordered these stores before later ones.
    Fence,
}

thread_local! {
    static EVENTS: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
}

/// The operations on this thread since the last call.
pub(crate) fn events() -> Vec<Event> {
    EVENTS.take()
}

fn record(event: Event) {
    EVENTS.with_borrow_mut(|events| events.push(event));
}

/// [`Portable`], traced.
pub(crate) struct Traced;

impl Simd for Traced {
    const IS_BATCHED: bool = true;

    type Lanes = <Portable as Simd>::Lanes;
    type Halves = <Portable as Simd>::Halves;
    type Bytes = <Portable as Simd>::Bytes;

    fn splat(value: f32) -> Self::Lanes {
        Portable::splat(value)
    }
    fn add(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        Portable::add(a, b)
    }
    fn sub(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        Portable::sub(a, b)
    }
    fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        Portable::mul(a, b)
    }
    fn fold(lanes: Self::Lanes) -> f32 {
        Portable::fold(lanes)
    }
    fn load(from: &[f32; LANES]) -> Self::Lanes {
        Portable::load(from)
    }
    fn store(to: &mut Group<f32>, lanes: Self::Lanes) {
        Portable::store(to, lanes);
    }
    unsafe fn stream(to: &mut Group<f32>, lanes: Self::Lanes) {
        record(Event::Stream);
        Portable::store(to, lanes);
    }
    fn load_halves(from: &[u16; LANES]) -> Self::Halves {
        Portable::load_halves(from)
    }
    fn store_halves(to: &mut Group<u16>, halves: Self::Halves) {
        Portable::store_halves(to, halves);
    }
    unsafe fn stream_halves(to: &mut Group<u16>, halves: Self::Halves) {
        record(Event::Stream);
        Portable::store_halves(to, halves);
    }
    fn widen_f16(halves: Self::Halves) -> Self::Lanes {
        Portable::widen_f16(halves)
    }
    fn narrow_f16(lanes: Self::Lanes) -> Self::Halves {
        Portable::narrow_f16(lanes)
    }
    fn widen_bf16(halves: Self::Halves) -> Self::Lanes {
        Portable::widen_bf16(halves)
    }
    fn narrow_bf16(lanes: Self::Lanes) -> Self::Halves {
        Portable::narrow_bf16(lanes)
    }
    fn div(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        Portable::div(a, b)
    }
    fn clamp(values: Self::Lanes, low: f32, high: f32) -> Self::Lanes {
        Portable::clamp(values, low, high)
    }
    fn power_of_two(exponents: Self::Lanes) -> Self::Lanes {
        Portable::power_of_two(exponents)
    }
    fn select_negative(of: Self::Lanes, yes: Self::Lanes, no: Self::Lanes) -> Self::Lanes {
        Portable::select_negative(of, yes, no)
    }
    fn max_magnitude(magnitudes: Self::Lanes, values: Self::Lanes) -> Self::Lanes {
        Portable::max_magnitude(magnitudes, values)
    }
    fn fold_max(magnitudes: Self::Lanes) -> f32 {
        Portable::fold_max(magnitudes)
    }
    fn encode_float(lanes: Self::Lanes, format: &Float8) -> Self::Bytes {
        Portable::encode_float(lanes, format)
    }
    fn encode_int8(lanes: Self::Lanes) -> Self::Bytes {
        Portable::encode_int8(lanes)
    }
    fn store_bytes(to: &mut Group<u8>, bytes: Self::Bytes) {
        Portable::store_bytes(to, bytes);
    }
    unsafe fn stream_bytes(to: &mut Group<u8>, bytes: Self::Bytes) {
        record(Event::Stream);
        Portable::store_bytes(to, bytes);
    }
    fn fence() {
        record(Event::Fence);
    }
    fn prefetch(_address: *const u8) {}
}
