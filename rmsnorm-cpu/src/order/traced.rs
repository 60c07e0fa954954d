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

macro_rules! as_portable {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name($($arg: $type),*) -> $result {
            Portable::$name($($arg),*)
        })*
    };
}

macro_rules! store_traced {
    ($($name:ident($element:ty, $values:ty);)*) => {
        $(unsafe fn $name<const STREAM: bool>(to: &mut Group<$element>, values: $values) {
            if STREAM {
                record(Event::Stream);
            }
            // SAFETY:
            // - through the cache there are no obligations.
            unsafe { Portable::$name::<false>(to, values) }
        })*
    };
}

/// [`Portable`], traced.
pub(crate) struct Traced;

impl Simd for Traced {
    const IS_BATCHED: bool = true;

    type Lanes = <Portable as Simd>::Lanes;
    type Halves = <Portable as Simd>::Halves;
    type Bytes = <Portable as Simd>::Bytes;

    as_portable! {
        splat(value: f32) -> Self::Lanes;
        add(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
        sub(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
        mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
        div(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
        clamp(values: Self::Lanes, low: f32, high: f32) -> Self::Lanes;
        scale(values: Self::Lanes, exponents: Self::Lanes) -> Self::Lanes;
        select_negative(of: Self::Lanes, yes: Self::Lanes, no: Self::Lanes) -> Self::Lanes;
        max_magnitude(magnitudes: Self::Lanes, values: Self::Lanes) -> Self::Lanes;
        fold_max(magnitudes: Self::Lanes) -> f32;
        fold(lanes: Self::Lanes) -> f32;
        load(from: &[f32; LANES]) -> Self::Lanes;
        load_halves(from: &[u16; LANES]) -> Self::Halves;
        widen_f16(halves: Self::Halves) -> Self::Lanes;
        narrow_f16(lanes: Self::Lanes) -> Self::Halves;
        widen_bf16(halves: Self::Halves) -> Self::Lanes;
        narrow_bf16(lanes: Self::Lanes) -> Self::Halves;
        encode_float(lanes: Self::Lanes, format: &Float8) -> Self::Bytes;
        encode_int8(lanes: Self::Lanes) -> Self::Bytes;
        prefetch(address: *const u8) -> ();
    }
    store_traced! {
        store(f32, Self::Lanes);
        store_halves(u16, Self::Halves);
        store_bytes(u8, Self::Bytes);
    }

    fn fence() {
        record(Event::Fence);
    }
}
