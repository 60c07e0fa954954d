//! Groups of 32 elements: loads, stores, conversions, arithmetic and the final sum of lanes.
//!
//! A row sum has 32 running sums, one per lane, for every register width: 2 registers of AVX-512, 4
//! of AVX2, 8 of SSE2 or NEON. Long rows have 32 sums per block, and blocks are added pairwise
//! (`blocks`). Products and sums are never fused. So every instruction set computes the same bits.
//!
//! [`Simd`] has one implementation per instruction set, in the file of that name. The functions
//! here are shared.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
mod codes;
mod portable;
mod views;

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use rmsnorm_spec::{DType, Element};

pub(crate) use activations::activate;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use blocks::{BLOCK, Blocks, add_all, fold_all, sum_up};
pub(crate) use codes::{Float8, encode_into, store_codes};
pub(crate) use portable::Portable;
// For tests that iterate over all sets; on other architectures `Isa::is_available` is false for
// these.
#[cfg(all(test, not(target_arch = "x86_64")))]
use portable::{Portable as Avx2, Portable as Avx512};
pub(crate) use views::{Any, Elements, In, Mix, Numbers, Out};

/// Elements that are processed together.
pub(crate) const LANES: usize = 32;

/// A group of elements to write. They may be uninitialized, so they are only written.
pub(crate) type Group<E> = [MaybeUninit<E>; LANES];

/// What is compiled as a function of its own for each instruction set.
pub(crate) trait Work {
    /// What it returns.
    type Output<S: Simd>;

    /// Does the work.
    fn run<S: Simd>(self) -> Self::Output<S>;
}

/// The operations of an instruction set on a group of lanes.
pub(crate) trait Simd: Sized {
    /// Whether forward processes short rows in batches. Without wide registers, the
    /// cost of rounding outweighs the gain.
    const IS_BATCHED: bool;

    /// 32 f32.
    type Lanes: Copy;
    /// 32 values of 16 bits.
    type Halves: Copy;
    /// 32 codes.
    type Bytes: Copy;

    /// Does work in a function of its own, which is compiled for the instruction set.
    ///
    /// # Safety
    /// - feature: the processor has the instruction set.
    #[inline(never)]
    unsafe fn call<W: Work>(work: W) -> W::Output<Self> {
        work.run::<Self>()
    }

    /// The same value in every lane.
    fn splat(value: f32) -> Self::Lanes;
    /// Lane by lane.
    fn add(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Lane by lane.
    fn sub(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Lane by lane.
    fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;

    /// Lane by lane, correctly rounded.
    fn div(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Per lane, the nearest value from `low` to `high`; NaN stays NaN.
    fn clamp(values: Self::Lanes, low: f32, high: f32) -> Self::Lanes;
    /// Per lane, a value from 1/2 to 2 times 2 to the power of an integer from -200 to 200, rounded once.
    fn scale(values: Self::Lanes, exponents: Self::Lanes) -> Self::Lanes;
    /// Per lane, `yes` if the sign of `of` is negative, otherwise `no`.
    fn select_negative(of: Self::Lanes, yes: Self::Lanes, no: Self::Lanes) -> Self::Lanes;
    /// Per lane, the larger of a magnitude and the magnitude of a value. They are compared as
    /// integers, with NaN above infinity.
    fn max_magnitude(magnitudes: Self::Lanes, values: Self::Lanes) -> Self::Lanes;
    /// The largest of all magnitudes, compared as in [`max_magnitude`](Self::max_magnitude).
    fn fold_max(magnitudes: Self::Lanes) -> f32;

    /// The sum of all lanes as a fixed tree: each lane of the lower half adds its partner in the
    /// upper half, until one lane is left.
    fn fold(lanes: Self::Lanes) -> f32;

    /// Reads 32 elements.
    fn load(from: &[f32; LANES]) -> Self::Lanes;
    /// Writes 32 elements, past the cache if `STREAM`.
    ///
    /// # Safety
    /// If `STREAM`:
    /// - `to` is aligned to its size, or to [`ALIGNMENT`] if it is larger;
    /// - [`fence`](Self::fence) is called on this thread before the elements are used elsewhere.
    unsafe fn store<const STREAM: bool>(to: &mut Group<f32>, lanes: Self::Lanes);

    /// Reads 32 values of 16 bits.
    fn load_halves(from: &[u16; LANES]) -> Self::Halves;
    /// Writes 32 values of 16 bits.
    ///
    /// # Safety
    /// As [`store`](Self::store).
    unsafe fn store_halves<const STREAM: bool>(to: &mut Group<u16>, halves: Self::Halves);

    /// Reads fewer than 32 elements, with zeros after them.
    #[inline(always)]
    fn load_part(from: &[f32]) -> Self::Lanes {
        Self::load(&padded(from))
    }
    /// Reads fewer than 32 values of 16 bits, with zeros after them.
    #[inline(always)]
    fn load_halves_part(from: &[u16]) -> Self::Halves {
        Self::load_halves(&padded(from))
    }
    /// The first `len` lanes, with zeros after them.
    #[inline(always)]
    fn first(lanes: Self::Lanes, len: usize) -> Self::Lanes {
        let mut array = rounded::<Self, f32>(lanes);
        array[len..].fill(0.0);
        Self::load(&array)
    }

    /// Exact.
    fn widen_f16(halves: Self::Halves) -> Self::Lanes;
    /// To nearest, ties to even; NaN stays NaN.
    fn narrow_f16(lanes: Self::Lanes) -> Self::Halves;
    /// Exact.
    fn widen_bf16(halves: Self::Halves) -> Self::Lanes;
    /// To nearest, ties to even; NaN stays NaN.
    fn narrow_bf16(lanes: Self::Lanes) -> Self::Halves;

    /// The nearest codes, ties to even. Larger values become the largest code; NaN stays NaN.
    fn encode_float(lanes: Self::Lanes, format: &Float8) -> Self::Bytes;
    /// The nearest integers, ties to even. Values outside become -128 or 127; NaN becomes 0.
    fn encode_int8(lanes: Self::Lanes) -> Self::Bytes;
    /// Writes 32 codes.
    ///
    /// # Safety
    /// As [`store`](Self::store).
    unsafe fn store_bytes<const STREAM: bool>(to: &mut Group<u8>, bytes: Self::Bytes);

    /// Orders stores past the cache before this thread's later stores.
    fn fence();
    /// Prefetches the cache line at an address, which may be invalid.
    fn prefetch(address: *const u8);
}

/// `[e(0), e(1), ..]`, one value per register. A macro, because `array::from_fn` is compiled without the instruction set,
/// and its intrinsics would become calls.
#[cfg(target_arch = "x86_64")]
macro_rules! each_of {
    ([$($number:literal),*], $i:ident => $e:expr) => {
        [$({
            let $i = $number;
            $e
        }),*]
    };
}

/// Functions of [`Simd`] for an instruction set. Each is compiled for it first, and then inlined. A stage body into which
/// single intrinsics were inlined had a place in memory for every operand, and took ten times as long to compile.
#[cfg(target_arch = "x86_64")]
macro_rules! compiled {
    ($features:literal; $(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty $body:block)*) => {
        $(#[inline(always)]
        fn $name($($arg: $type),*) -> $out {
            #[target_feature(enable = $features)]
            #[inline]
            fn compiled($($arg: $type),*) -> $out $body
            // SAFETY:
            // - feature: see the module.
            unsafe { compiled($($arg),*) }
        })*
    };
}
#[cfg(target_arch = "x86_64")]
use {compiled, each_of};

/// A piece of a row. Two types, so that the loop over full pieces is compiled without the code for
/// short ones: a call in the loop, even one that never happens, would spill every running sum.
pub(crate) trait Piece: Copy {
    /// Whether it is [`Full`].
    const IS_FULL: bool;
    /// Its first element.
    fn start(self) -> usize;
    /// Its elements, at most `LANES`.
    fn len(self) -> usize;
}

/// `LANES` elements.
#[derive(Clone, Copy)]
pub(crate) struct Full {
    pub(crate) start: usize,
}

impl Piece for Full {
    const IS_FULL: bool = true;
    #[inline(always)]
    fn start(self) -> usize {
        self.start
    }
    #[inline(always)]
    fn len(self) -> usize {
        LANES
    }
}

/// Fewer than `LANES` elements, at an end of the row.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Piece for Part {
    const IS_FULL: bool = false;
    #[inline(always)]
    fn start(self) -> usize {
        self.start
    }
    #[inline(always)]
    fn len(self) -> usize {
        self.len
    }
}

/// Does the work of a piece: where it stands for full pieces, by a call at the ends of rows, which are rare. So it takes half
/// as long to compile.
#[inline(always)]
pub(crate) fn of_piece<S: Simd, P: Piece, W: Work>(work: W) -> W::Output<S> {
    if P::IS_FULL {
        return work.run::<S>();
    }
    // SAFETY:
    // - feature: the caller is inlined into a stage body for this instruction set.
    unsafe { S::call(work) }
}

/// Runs the block for the full pieces that begin `head` elements after column `start`, in order,
/// then for the remaining elements at both ends.
macro_rules! for_each_piece_between {
    ($start:expr, $head:expr, $end:expr, $piece:ident => $body:block) => {{
        let (first, head, end) = ($start, $head, $end);
        let mut start = first + head;
        while start + $crate::lanes::LANES <= end {
            let $piece = $crate::lanes::Full { start };
            $body
            start += $crate::lanes::LANES;
        }
        let ends = [$crate::lanes::Part { start: first, len: head }, $crate::lanes::Part { start, len: end - start }];
        for $piece in ends {
            if $piece.len > 0 $body
        }
    }};
}
pub(crate) use for_each_piece_between;

/// Runs the block for the full pieces of a row of `cols` elements from `head` on, in order, then
/// for the remaining elements at both ends of the row.
///
/// A macro, because a closure is compiled without the instruction set of the enclosing function,
/// and its intrinsics would become calls.
macro_rules! for_each_piece {
    ($head:expr, $cols:expr, $piece:ident => $body:block) => {
        $crate::lanes::for_each_piece_between!(0, $head, $cols, $piece => $body)
    };
}
pub(crate) use for_each_piece;

/// The same with counted pieces: the compiler sees that all full pieces are aligned if the first one is. Backward of 16-bit
/// rows takes 5 % less time, forward of one short row 15 % more.
///
/// The ends of long rows have `scalars` of their own, as far as the compiler knows. Registers of the loop that the ends
/// shared would live across the calls for short pieces, which keep no wide register: the loop would load each of them from
/// the stack. Backward takes 5 to 18 % less time.
macro_rules! for_each_counted_piece {
    ($head:expr, $cols:expr, $scalars:ident, $piece:ident => $body:block) => {{
        let (head, cols): (usize, usize) = ($head, $cols);
        let full = (cols - head) / $crate::lanes::LANES;
        for i in 0..full {
            let $piece = $crate::lanes::Full { start: head + i * $crate::lanes::LANES };
            $body
        }
        let start = head + full * $crate::lanes::LANES;
        let $scalars = if full >= 8 { std::hint::black_box($scalars) } else { $scalars };
        for $piece in [$crate::lanes::Part { start: 0, len: head }, $crate::lanes::Part { start, len: cols - start }] {
            if $piece.len > 0 $body
        }
    }};
}
pub(crate) use for_each_counted_piece;

/// The elements of a piece as f32, with zeros beyond its length.
#[inline(always)]
pub(crate) fn load<S: Simd, E: Element, P: Piece>(from: &[E], piece: P) -> S::Lanes {
    if P::IS_FULL {
        widen::<S, E>(&from[piece.start()..piece.start() + LANES].as_chunks::<LANES>().0[0])
    } else {
        let part = &from[piece.start()..][..piece.len()];
        match E::DTYPE {
            DType::F32 => S::load_part(bytemuck::cast_slice(part)),
            DType::F16 => S::widen_f16(S::load_halves_part(bytemuck::cast_slice(part))),
            DType::Bf16 => S::widen_bf16(S::load_halves_part(bytemuck::cast_slice(part))),
        }
    }
}

/// Rounds to the nearest elements, ties to even, and stores those inside the piece.
#[inline(always)]
pub(crate) fn store<S: Simd, E: Element, P: Piece>(to: &mut Out<'_, E>, piece: P, lanes: S::Lanes) {
    if P::IS_FULL {
        narrow::<S, E>(to.group(piece.start()), lanes);
    } else {
        to.part(piece.start(), piece.len()).copy_from_start(&rounded::<S, E>(lanes));
    }
}

/// The source of [`Stores`], which stage bodies need for stores past the cache. Such stores may
/// become visible after later stores of the same thread, for example the one that reports the work
/// as finished; on x86-64 no test can provoke this. So only [`store_or_stream`] issues them, it
/// requires a [`Stores`], and a `Fenced` fences when it is dropped.
#[must_use = "dropping it fences: keep it until all stores are done"]
pub(crate) struct Fenced<S: Simd> {
    streaming: bool,
    /// Not `Send`, because the fence must run on the thread of the stores.
    thread: PhantomData<(S, *const ())>,
}

/// Permission to store, past the cache or through it, within the lifetime of its [`Fenced`].
#[derive(Clone, Copy)]
pub(crate) struct Stores<'f> {
    streaming: bool,
    fenced: PhantomData<&'f ()>,
}

impl<S: Simd> Fenced<S> {
    /// Past the cache if `streaming`.
    #[inline(always)]
    pub(crate) fn new(streaming: bool) -> Self {
        Fenced { streaming, thread: PhantomData }
    }

    #[inline(always)]
    pub(crate) fn stores(&self) -> Stores<'_> {
        Stores { streaming: self.streaming, fenced: PhantomData }
    }
}

impl<S: Simd> Drop for Fenced<S> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.streaming {
            S::fence();
        }
    }
}

impl Stores<'_> {
    /// Through the cache.
    #[inline(always)]
    pub(crate) fn through_cache(self) -> Self {
        Stores { streaming: false, ..self }
    }

    /// Elements before the first aligned one, where full pieces can be stored past the cache. 0
    /// without streaming.
    #[inline(always)]
    pub(crate) fn head<T: Elements>(self, row: &Out<'_, T>) -> usize {
        if self.streaming { row.until_aligned(ALIGNMENT) } else { 0 }
    }

    /// The same for codes, with full pieces of half a cache line.
    #[inline(always)]
    pub(crate) fn head_of_codes(self, row: &Out<'_, u8>) -> usize {
        if self.streaming { row.until_aligned(ALIGNMENT / 2) } else { 0 }
    }
}

/// As [`store`], but past the cache if `stores` streams and the piece is full and aligned.
#[inline(always)]
pub(crate) fn store_or_stream<S: Simd, E: Element, P: Piece>(
    to: &mut Out<'_, E>,
    piece: P,
    lanes: S::Lanes,
    stores: Stores<'_>,
) {
    let address = to.address().wrapping_add(piece.start() * size_of::<E>());
    if !P::IS_FULL || !stores.streaming || !address.is_multiple_of(ALIGNMENT) {
        return store::<S, E, P>(to, piece, lanes);
    }
    // SAFETY:
    // - alignment: checked above;
    // - ordering: `stores` borrows a `Fenced`, which does not leave this thread and fences when it is dropped; no stage
    //   body forgets it.
    unsafe { put::<S, E, true>(to.group(piece.start()), lanes) }
}

/// Bytes of a cache line. Stores past the cache write whole lines.
pub(crate) const ALIGNMENT: usize = 64;

/// The values of the lanes after a store and a load.
#[inline(always)]
pub(crate) fn round_through<S: Simd>(dtype: DType, lanes: S::Lanes) -> S::Lanes {
    match dtype {
        DType::F32 => lanes,
        DType::F16 => S::widen_f16(S::narrow_f16(lanes)),
        DType::Bf16 => S::widen_bf16(S::narrow_bf16(lanes)),
    }
}

/// The lanes of a piece, with zeros beyond its length.
#[inline(always)]
pub(crate) fn within<S: Simd, P: Piece>(piece: P, lanes: S::Lanes) -> S::Lanes {
    if P::IS_FULL { lanes } else { S::first(lanes, piece.len()) }
}

/// The nearest elements, ties to even.
#[inline(always)]
fn rounded<S: Simd, E: Element>(lanes: S::Lanes) -> [E; LANES] {
    let mut all = [E::default(); LANES];
    narrow::<S, E>(Out::from(&mut all[..]).group(0), lanes);
    all
}

#[inline(always)]
fn widen<S: Simd, E: Element>(from: &[E; LANES]) -> S::Lanes {
    match E::DTYPE {
        DType::F32 => S::load(cast(from)),
        DType::F16 => S::widen_f16(S::load_halves(cast(from))),
        DType::Bf16 => S::widen_bf16(S::load_halves(cast(from))),
    }
}

#[inline(always)]
fn narrow<S: Simd, E: Element>(to: &mut Group<E>, lanes: S::Lanes) {
    // SAFETY:
    // - through the cache there are no obligations.
    unsafe { put::<S, E, false>(to, lanes) }
}

/// # Safety
/// As [`Simd::store`].
#[inline(always)]
unsafe fn put<S: Simd, E: Element, const STREAM: bool>(to: &mut Group<E>, lanes: S::Lanes) {
    // SAFETY:
    // - alignment, ordering: the caller's obligations.
    unsafe {
        match E::DTYPE {
            DType::F32 => S::store::<STREAM>(cast_mut(to), lanes),
            DType::F16 => S::store_halves::<STREAM>(cast_mut(to), S::narrow_f16(lanes)),
            DType::Bf16 => S::store_halves::<STREAM>(cast_mut(to), S::narrow_bf16(lanes)),
        }
    }
}

// Not inlined into loops, because ends of rows are rare.
#[inline(never)]
fn padded<E: Copy + Default>(from: &[E]) -> [E; LANES] {
    let mut padded = [E::default(); LANES];
    padded[..from.len()].copy_from_slice(from);
    padded
}

/// The same bytes as elements of another type of the same size. `match E::DTYPE` has proved that
/// the types are the same.
#[inline(always)]
fn cast<E: Element, F: bytemuck::Pod>(from: &[E; LANES]) -> &[F; LANES] {
    &bytemuck::cast_slice(from).as_chunks::<LANES>().0[0]
}

#[inline(always)]
fn cast_mut<E: Element, F: bytemuck::Pod>(to: &mut Group<E>) -> &mut Group<F> {
    assert!(size_of::<E>() == size_of::<F>() && align_of::<E>() == align_of::<F>());
    // SAFETY:
    // - memory: the same bytes, borrowed as before, at the same size and alignment, which were compared;
    // - contents: any bytes are an element of either type, and `MaybeUninit` asks for none.
    unsafe { &mut *std::ptr::from_mut(to).cast() }
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::quant::CodeType;
    use rmsnorm_spec::{bf16, f16};

    use super::*;
    use crate::Isa;

    /// Runs a check on every instruction set that this processor has.
    macro_rules! on_every_isa {
        ($check:ident) => {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                match isa {
                    Isa::Portable => $check::<Portable>(isa),
                    Isa::Avx2 => $check::<Avx2>(isa),
                    Isa::Avx512 => $check::<Avx512>(isa),
                }
            }
        };
    }

    /// f32 values whose conversion to 16 bits is hard: every 16-bit value, the midpoint above it, and both neighbours
    /// of that midpoint.
    fn hard_values<E: Element>(shift: u32) -> Vec<f32> {
        (0..=u32::from(u16::MAX))
            .flat_map(|bits| {
                let value = E::from_bits(bits).to_f32().to_bits();
                let midpoint = value | (1 << (shift - 1));
                [value, midpoint - 1, midpoint, midpoint.wrapping_add(1)]
            })
            .map(f32::from_bits)
            .collect()
    }

    fn assert_same<E: Element>(got: E, expected: E, value: f32, isa: Isa) {
        let same = got.bits() == expected.bits() || (got.to_f32().is_nan() && expected.to_f32().is_nan());
        assert!(same, "{value:e} on {isa}: got {:#06x}, expected {:#06x}", got.bits(), expected.bits());
    }

    fn stores_round_to_nearest_even<S: Simd>(isa: Isa) {
        fn check<S: Simd, E: Element>(values: Vec<f32>, isa: Isa) {
            for values in values.as_chunks::<LANES>().0 {
                for (got, value) in rounded::<S, E>(S::load(values)).into_iter().zip(values) {
                    assert_same(got, E::from_f32(*value), *value, isa);
                }
            }
        }
        check::<S, f16>(hard_values::<f16>(13), isa);
        check::<S, bf16>(hard_values::<bf16>(16), isa);
    }

    #[test]
    fn store_of_every_hard_value_rounds_to_nearest_even() {
        on_every_isa!(stores_round_to_nearest_even);
    }

    fn loads_are_exact<S: Simd>(isa: Isa) {
        fn check<S: Simd, E: Element>(isa: Isa) {
            let all: Vec<E> = (0..=u32::from(u16::MAX)).map(E::from_bits).collect();
            for start in (0..all.len()).step_by(LANES) {
                let got = rounded::<S, f32>(load::<S, E, _>(&all, Full { start }));
                for (got, element) in got.into_iter().zip(&all[start..]) {
                    let expected = element.to_f32();
                    let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
                    assert!(same, "{element:?} on {isa}: got {got:e}");
                }
            }
        }
        check::<S, f16>(isa);
        check::<S, bf16>(isa);
    }

    #[test]
    fn load_of_every_16_bit_value_is_exact() {
        on_every_isa!(loads_are_exact);
    }

    fn pieces_cover_each_element_once<S: Simd>(isa: Isa) {
        fn check<S: Simd, E: Element>(isa: Isa) {
            for cols in 1..=4 * LANES {
                for head in 0..=cols.min(LANES - 1) {
                    let from: Vec<E> = (0..cols).map(|col| E::from_f32(col as f32 + 1.0)).collect();
                    let (mut to, mut visits) = (vec![E::default(); cols], 0);
                    for_each_piece!(head, cols, piece => {
                        let lanes = load::<S, E, _>(&from, piece);
                        assert_eq!(rounded::<S, f32>(lanes)[piece.len()..].iter().sum::<f32>(), 0.0);
                        let ones = rounded::<S, f32>(within::<S, _>(piece, S::splat(1.0)));
                        assert!((0..LANES).all(|lane| ones[lane] == f32::from(lane < piece.len())));
                        store::<S, E, _>(&mut Out::from(&mut to[..]), piece, lanes);
                        visits += piece.len();
                    });
                    let [got, expected] = [&to, &from].map(|all| all.iter().map(|e| e.bits()).collect::<Vec<_>>());
                    assert_eq!((got, visits), (expected, cols), "cols {cols}, head {head}, {} on {isa}", E::DTYPE);
                }
            }
        }
        check::<S, f32>(isa);
        check::<S, f16>(isa);
        check::<S, bf16>(isa);
    }

    #[test]
    fn pieces_of_any_row_cover_each_element_once() {
        on_every_isa!(pieces_cover_each_element_once);
    }

    fn fold_uses_the_tree<S: Simd>(isa: Isa) {
        // Values of very different size: any other order of additions gives another sum.
        let values: [f32; LANES] = std::array::from_fn(|lane| 1.1f32.powi((lane * 37 % LANES) as i32 * 5));
        let mut tree = values;
        for half in [16, 8, 4, 2, 1] {
            for lane in 0..half {
                tree[lane] += tree[lane + half];
            }
        }
        assert_eq!(S::fold(S::load(&values)).to_bits(), tree[0].to_bits(), "on {isa}");
        let serial: f32 = values.iter().sum();
        assert_ne!(tree[0].to_bits(), serial.to_bits(), "the values do not tell the orders apart");
    }

    #[test]
    fn fold_adds_halves_in_a_fixed_tree() {
        on_every_isa!(fold_uses_the_tree);
    }

    /// The codes of 32 quotients.
    fn codes_of<S: Simd>(values: &[f32; LANES], codes: CodeType) -> [u8; LANES] {
        let mut all = [0; LANES];
        encode_into::<S>(&mut all, S::load(values), codes);
        all
    }

    /// Compares codes with their definition, for every sign, exponent and leading bit, with zero,
    /// little, half and all of the remaining bits.
    fn codes_are_those_of_the_definition<S: Simd>(isa: Isa) {
        let rest = [0, 1, 0xffff, 0x1_0000, 0x1_0001, 0x1_ffff];
        let values: Vec<f32> =
            (0..1u32 << 15).flat_map(|leading| rest.map(|rest| f32::from_bits(leading << 17 | rest))).collect();
        for codes in CodeType::ALL {
            for values in values.as_chunks::<LANES>().0 {
                let got = codes_of::<S>(values, codes);
                assert_eq!(got, values.map(|value| codes.encode(value)), "{codes} of {values:?} on {isa}");
            }
        }
    }

    #[test]
    fn every_lane_is_encoded_as_the_definition_says() {
        on_every_isa!(codes_are_those_of_the_definition);
    }

    /// For the largest magnitude in every lane and with either sign; NaN is above all.
    fn largest_is_found<S: Simd>(isa: Isa) {
        for lane in 0..LANES {
            for largest in [-7.5f32, 8.0, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
                let mut values = [2.0; LANES];
                values[lane] = largest;
                let others = S::load(&std::array::from_fn(|lane| lane as f32 / 8.0));
                for [first, second] in [[S::load(&values), others], [others, S::load(&values)]] {
                    let magnitudes = S::max_magnitude(S::max_magnitude(S::splat(0.0), first), second);
                    let (got, expected) = (S::fold_max(magnitudes), largest.abs());
                    assert!(
                        got == expected || got.is_nan() && expected.is_nan(),
                        "{largest} in {lane} on {isa}: {got}"
                    );
                }
            }
        }
        assert_eq!(S::fold_max(S::max_magnitude(S::splat(0.0), S::splat(-0.0))).to_bits(), 0);
        let quotients = rounded::<S, f32>(S::div(S::splat(1.0), S::load(&std::array::from_fn(|lane| lane as f32))));
        assert!((0..LANES).all(|lane| quotients[lane] == 1.0 / lane as f32), "on {isa}");
    }

    #[test]
    fn largest_magnitude_of_all_lanes_is_found() {
        on_every_isa!(largest_is_found);
    }

    /// A missing fence changes no result, so the test searches the machine code.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn fences_are_sfence() {
        #[inline(never)]
        fn fence<S: Simd>() {
            S::fence();
        }
        const SFENCE: [u8; 3] = [0x0f, 0xae, 0xf8];
        for fence in [fence::<Avx2>, fence::<Avx512>] as [fn(); 2] {
            // SAFETY:
            // - memory: the program's code can be read, and there are more than 64 bytes of it from any test on.
            let code = unsafe { std::slice::from_raw_parts(fence as *const u8, 64) };
            // Up to the function's return; bytes after it belong to another function.
            let end = code.iter().position(|&byte| byte == 0xc3).unwrap_or(code.len());
            assert!(code[..end].windows(3).any(|bytes| bytes == SFENCE), "{code:02x?}");
        }
    }
}
