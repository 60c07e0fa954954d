//! Views of elements that a stage reads and writes. A body either knows their dtype at compile
//! time, or reads it from the view at run time: [`Any`]. A body of `Any` reads the dtype once per
//! piece, and serves every mix of dtypes.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::{ptr, slice};

use rmsnorm_spec::{AnyElement, DType, Element, bf16, f16};

use super::{ALIGNMENT, LANES, Piece, Simd, Stores, Work};

/// A type of elements: a stored type, or [`Any`].
pub(crate) trait Elements: Copy + 'static {
    /// The run-time tag of the element type.
    type Tag: Copy + Send + Sync;

    /// Bytes of an element.
    fn size(tag: Self::Tag) -> usize;
}

impl<E: AnyElement> Elements for E {
    type Tag = ();

    #[inline(always)]
    fn size((): ()) -> usize {
        size_of::<E>()
    }
}

/// Elements with a run-time dtype: f32, f16 or bf16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Any;

impl Elements for Any {
    type Tag = DType;

    #[inline(always)]
    fn size(dtype: DType) -> usize {
        dtype.size()
    }
}

/// A type of elements that can be loaded to lanes and stored from lanes.
pub(crate) trait Numbers: Elements {
    /// Whether the dtype is known at compile time.
    const IS_KNOWN: bool;
    /// The dtype, if the call states `said` as the run-time dtype.
    fn dtype(said: DType) -> DType;
    /// The tag of elements in such a call.
    fn tag(said: DType) -> Self::Tag;
    /// As [`load`](super::load).
    fn load<S: Simd, P: Piece>(from: In<'_, Self>, piece: P) -> S::Lanes;
    /// As [`store_or_stream`](super::store_or_stream).
    fn store_or_stream<S: Simd, P: Piece>(to: &mut Out<'_, Self>, piece: P, lanes: S::Lanes, stores: Stores<'_>);
}

impl<E: Element> Numbers for E {
    const IS_KNOWN: bool = true;

    #[inline(always)]
    fn dtype(_: DType) -> DType {
        E::DTYPE
    }

    #[inline(always)]
    fn tag(_: DType) {}

    #[inline(always)]
    fn load<S: Simd, P: Piece>(from: In<'_, E>, piece: P) -> S::Lanes {
        super::load::<S, E, P>(from.elements(), piece)
    }

    #[inline(always)]
    fn store_or_stream<S: Simd, P: Piece>(to: &mut Out<'_, E>, piece: P, lanes: S::Lanes, stores: Stores<'_>) {
        super::store_or_stream::<S, E, P>(to, piece, lanes, stores);
    }
}

impl Numbers for Any {
    const IS_KNOWN: bool = false;

    #[inline(always)]
    fn dtype(said: DType) -> DType {
        said
    }

    #[inline(always)]
    fn tag(said: DType) -> DType {
        said
    }

    #[inline(always)]
    fn load<S: Simd, P: Piece>(from: In<'_, Any>, piece: P) -> S::Lanes {
        super::of_piece::<S, P, _>(Load { from, piece })
    }

    #[inline(always)]
    fn store_or_stream<S: Simd, P: Piece>(to: &mut Out<'_, Any>, piece: P, lanes: S::Lanes, stores: Stores<'_>) {
        let values = &super::rounded::<S, f32>(lanes);
        super::of_piece::<S, P, _>(Store { to: to.reborrow(), piece, values, stores });
    }
}

/// A load of any dtype.
struct Load<'a, P> {
    from: In<'a, Any>,
    piece: P,
}

impl<P: Piece> Work for Load<'_, P> {
    type Output<S: Simd> = S::Lanes;

    #[inline(always)]
    fn run<S: Simd>(self) -> S::Lanes {
        let Load { from, piece } = self;
        match from.tag {
            DType::F32 => from.known::<f32>().load::<S, P>(piece),
            DType::F16 => from.known::<f16>().load::<S, P>(piece),
            DType::Bf16 => from.known::<bf16>().load::<S, P>(piece),
        }
    }
}

/// A store to any dtype.
struct Store<'a, 'v, P> {
    to: Out<'a, Any>,
    piece: P,
    values: &'v [f32; LANES],
    stores: Stores<'v>,
}

impl<P: Piece> Work for Store<'_, '_, P> {
    type Output<S: Simd> = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Store { to, piece, values, stores } = self;
        let lanes = S::load(values);
        match to.tag {
            DType::F32 => to.known::<f32>().store_or_stream::<S, P>(piece, lanes, stores),
            DType::F16 => to.known::<f16>().store_or_stream::<S, P>(piece, lanes, stores),
            DType::Bf16 => to.known::<bf16>().store_or_stream::<S, P>(piece, lanes, stores),
        }
    }
}

/// The types of activations, weights and residual stream that a body is compiled for.
pub(crate) trait Mix: Copy {
    type T: Numbers;
    type W: Numbers;
    type R: Numbers;
}

impl<T: Numbers, W: Numbers, R: Numbers> Mix for (T, W, R) {
    type T = T;
    type W = W;
    type R = R;
}

/// Elements to read.
#[derive(Clone, Copy)]
pub(crate) struct In<'a, T: Elements> {
    /// The first of `len` values of the type given by `T` and the tag, borrowed for `'a`.
    first: *const u8,
    len: usize,
    tag: T::Tag,
    borrowed: PhantomData<&'a [T]>,
}

// SAFETY:
// - threads: it is a shared slice of numbers, which any thread may read.
unsafe impl<T: Elements> Send for In<'_, T> {}
// SAFETY:
// - threads: as above.
unsafe impl<T: Elements> Sync for In<'_, T> {}

impl<'a, E: AnyElement> From<&'a [E]> for In<'a, E> {
    #[inline(always)]
    fn from(values: &'a [E]) -> Self {
        In { first: values.as_ptr().cast(), len: values.len(), tag: (), borrowed: PhantomData }
    }
}

impl<'a, T: Elements> In<'a, T> {
    /// No elements.
    #[inline(always)]
    pub(crate) fn none(tag: T::Tag) -> Self {
        In { first: ptr::without_provenance(ALIGNMENT), len: 0, tag, borrowed: PhantomData }
    }

    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// `len` elements from `start` on.
    #[inline(always)]
    pub(crate) fn part(self, start: usize, len: usize) -> Self {
        assert_within(self.len, start, len);
        In { first: self.first.wrapping_add(start * T::size(self.tag)), len, ..self }
    }

    /// All elements from `start` on.
    #[inline(always)]
    pub(crate) fn tail(self, start: usize) -> Self {
        self.part(start, self.len - start)
    }

    /// The elements before `index`, and the rest.
    pub(crate) fn split_at(self, index: usize) -> (Self, Self) {
        (self.part(0, index), self.tail(index))
    }

    /// Prefetches the same piece `distance` elements later. There may be no such row: a prefetch
    /// may name any address.
    #[inline(always)]
    pub(crate) fn prefetch<S: Simd, P: Piece>(self, distance: usize, piece: P) {
        let size = T::size(self.tag);
        let first = self.first.wrapping_add(distance.wrapping_add(piece.start()).wrapping_mul(size));
        S::prefetch(first);
        if size * LANES > ALIGNMENT {
            S::prefetch(first.wrapping_add(ALIGNMENT));
        }
    }
}

impl<'a, T: Numbers> In<'a, T> {
    /// As [`load`](super::load).
    #[inline(always)]
    pub(crate) fn load<S: Simd, P: Piece>(self, piece: P) -> S::Lanes {
        T::load::<S, P>(self, piece)
    }
}

impl<'a, E: AnyElement> In<'a, E> {
    #[inline(always)]
    pub(crate) fn get(self, index: usize) -> E {
        self.part(index, 1).elements()[0]
    }

    #[inline(always)]
    pub(crate) fn elements(self) -> &'a [E] {
        // SAFETY:
        // - memory: the field's promise, which `part` keeps by its check;
        // - type: `E` is stored as itself, and nothing makes one of another type.
        unsafe { slice::from_raw_parts(self.first.cast(), self.len) }
    }
}

impl<'a, E: Element> In<'a, E> {
    /// The same elements with a run-time dtype.
    pub(crate) fn any(self) -> In<'a, Any> {
        In { first: self.first, len: self.len, tag: E::DTYPE, borrowed: PhantomData }
    }
}

impl<'a> In<'a, Any> {
    /// The same elements with a compile-time type, which must match their tag.
    #[inline(always)]
    pub(crate) fn known<T: Numbers>(self) -> In<'a, T> {
        assert!(T::dtype(self.tag) == self.tag, "elements are of the type that they say");
        In { first: self.first, len: self.len, tag: T::tag(self.tag), borrowed: PhantomData }
    }
}

/// Elements to write. They may be uninitialized, so outputs need not be zeroed first. Only values
/// are written, so a slice of values can be written through an `Out`.
pub(crate) struct Out<'a, T: Elements> {
    /// The first of `len` elements of the type given by `T` and the tag, borrowed mutably for `'a`.
    /// They may be uninitialized.
    first: *mut u8,
    len: usize,
    tag: T::Tag,
    borrowed: PhantomData<&'a mut [MaybeUninit<T>]>,
}

// SAFETY:
// - threads: it is a slice of numbers that is borrowed mutably, which any one thread may write.
unsafe impl<T: Elements> Send for Out<'_, T> {}

impl<'a, E: AnyElement> From<&'a mut [MaybeUninit<E>]> for Out<'a, E> {
    #[inline(always)]
    fn from(elements: &'a mut [MaybeUninit<E>]) -> Self {
        Out { first: elements.as_mut_ptr().cast(), len: elements.len(), tag: (), borrowed: PhantomData }
    }
}

impl<'a, E: AnyElement> From<&'a mut [E]> for Out<'a, E> {
    #[inline(always)]
    fn from(values: &'a mut [E]) -> Self {
        Out { first: values.as_mut_ptr().cast(), len: values.len(), tag: (), borrowed: PhantomData }
    }
}

impl<'a, T: Elements> Out<'a, T> {
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    pub(crate) fn address(&self) -> usize {
        self.first.addr()
    }

    /// The same elements as an input: one that is overwritten, or that an earlier stage has written.
    ///
    /// # Safety
    /// - contents: the elements that are read hold values; gaps between rows need not;
    /// - memory: nobody keeps a slice of an element while it is written. Stages load a piece to lanes before they store it.
    pub(crate) unsafe fn overwritten(&self) -> In<'a, T> {
        In { first: self.first, len: self.len, tag: self.tag, borrowed: PhantomData }
    }

    /// Whether it overwrites these elements.
    #[inline(always)]
    pub(crate) fn overwrites(&self, elements: In<'_, T>) -> bool {
        self.address() == elements.first.addr()
    }

    /// Elements before the first one with an address that is a multiple of `alignment`; at most
    /// all.
    #[inline(always)]
    pub(crate) fn until_aligned(&self, alignment: usize) -> usize {
        // A whole number of elements, because each is aligned.
        (self.address().wrapping_neg() % alignment / T::size(self.tag)).min(self.len)
    }

    /// `len` elements from `start` on.
    #[inline(always)]
    pub(crate) fn part(&mut self, start: usize, len: usize) -> Out<'_, T> {
        self.reborrow().into_part(start, len)
    }

    /// The same, of a view that is given up.
    #[inline(always)]
    pub(crate) fn into_part(self, start: usize, len: usize) -> Self {
        assert_within(self.len, start, len);
        Out { first: self.first.wrapping_add(start * T::size(self.tag)), len, ..self }
    }

    /// The same elements, reborrowed.
    #[inline(always)]
    pub(crate) fn reborrow(&mut self) -> Out<'_, T> {
        Out { first: self.first, len: self.len, tag: self.tag, borrowed: PhantomData }
    }

    /// The elements before `index`, and the rest.
    pub(crate) fn split_at(self, index: usize) -> (Self, Self) {
        assert_within(self.len, index, 0);
        let high = self.first.wrapping_add(index * T::size(self.tag));
        (Out { len: index, ..self }, Out { first: high, len: self.len - index, ..self })
    }
}

impl<T: Numbers> Out<'_, T> {
    /// As [`store_or_stream`](super::store_or_stream).
    #[inline(always)]
    pub(crate) fn store_or_stream<S: Simd, P: Piece>(&mut self, piece: P, lanes: S::Lanes, stores: Stores<'_>) {
        T::store_or_stream::<S, P>(self, piece, lanes, stores);
    }
}

impl<'a, E: AnyElement> Out<'a, E> {
    /// The same elements as another type with the same layout.
    pub(crate) fn cast<F: AnyElement>(self) -> Out<'a, F> {
        assert_eq!((size_of::<E>(), align_of::<E>()), (size_of::<F>(), align_of::<F>()), "one dtype has one layout");
        Out { first: self.first, len: self.len, tag: (), borrowed: PhantomData }
    }

    #[inline(always)]
    fn elements_mut(&mut self) -> &mut [MaybeUninit<E>] {
        // SAFETY:
        // - memory: the field's promise, which `part` keeps by its check; `self` is borrowed mutably;
        // - type: any bytes are an element of a stored type of this size and alignment, and `MaybeUninit` asks for none;
        // - contents: nothing but values is written to it, which this file sees to.
        unsafe { slice::from_raw_parts_mut(self.first.cast(), self.len) }
    }

    /// Writes one element.
    #[inline(always)]
    pub(crate) fn set(&mut self, index: usize, value: E) {
        self.elements_mut()[index].write(value);
    }

    /// Writes every element from `values`, which must have the same length.
    #[inline(always)]
    pub(crate) fn copy_from_slice(&mut self, values: &[E]) {
        assert_eq!(self.len, values.len());
        // SAFETY:
        // - bounds: both have as many elements, which was compared;
        // - memory: what is borrowed mutably overlaps nothing else.
        unsafe { ptr::copy_nonoverlapping(values.as_ptr(), self.first.cast(), values.len()) }
    }

    /// Writes every element, of at most 31, from the first of `values`, in powers of two. A copy whose length the compiler
    /// does not know is a call. A masked store touches lines that it does not write.
    #[inline(always)]
    pub(super) fn copy_from_start(&mut self, values: &[E; LANES]) {
        let mut at = 0;
        macro_rules! copy {
            ($($count:literal)*) => {
                $(if self.len & $count != 0 {
                    let to: &mut [_; $count] = &mut self.elements_mut()[at..at + $count].as_chunks_mut().0[0];
                    let from: &[_; $count] = &values[at..at + $count].as_chunks().0[0];
                    *to = from.map(MaybeUninit::new);
                    at += $count;
                })*
            };
        }
        copy!(16 8 4 2 1);
        debug_assert_eq!(at, self.len);
    }

    /// Writes `value` to every element and returns the slice of values.
    pub(crate) fn filled(mut self, value: E) -> &'a mut [E] {
        self.elements_mut().fill(MaybeUninit::new(value));
        // SAFETY:
        // - memory: as `elements_mut`; `self` is consumed, so that nobody else uses the borrow of `'a`;
        // - contents: every element was written in the line above.
        unsafe { slice::from_raw_parts_mut(self.first.cast(), self.len) }
    }

    /// The group of elements that begins at `start`. Only values may be written to it.
    #[inline(always)]
    pub(crate) fn group(&mut self, start: usize) -> &mut [MaybeUninit<E>; LANES] {
        &mut self.elements_mut()[start..start + LANES].as_chunks_mut::<LANES>().0[0]
    }
}

impl<'a, E: Element> Out<'a, E> {
    /// The same elements with a run-time dtype.
    pub(crate) fn any(self) -> Out<'a, Any> {
        Out { first: self.first, len: self.len, tag: E::DTYPE, borrowed: PhantomData }
    }
}

impl<'a> Out<'a, Any> {
    /// The same elements with a compile-time type, which must match their tag.
    #[inline(always)]
    pub(crate) fn known<T: Numbers>(self) -> Out<'a, T> {
        assert!(T::dtype(self.tag) == self.tag, "elements are of the type that they say");
        Out { first: self.first, len: self.len, tag: T::tag(self.tag), borrowed: PhantomData }
    }
}

/// Asserts that `wanted` elements from `start` on lie within `len` elements.
#[inline(always)]
fn assert_within(len: usize, start: usize, wanted: usize) {
    assert!(start <= len && wanted <= len - start, "a part lies within its elements");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_without_values_is_written_in_its_place() {
        let mut elements = [MaybeUninit::<f32>::uninit(); 5];
        let (mut low, mut high) = Out::from(&mut elements[..]).split_at(2);
        low.copy_from_slice(&[1.0, 2.0]);
        high.part(1, 2).copy_from_slice(&[4.0, 5.0]);
        high.set(0, 3.0);
        assert_eq!((low.len(), high.len()), (2, 3));
        // SAFETY:
        // - contents: each of the five was written above.
        assert_eq!(elements.map(|element| unsafe { element.assume_init() }), [1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(Out::from(&mut elements[1..3]).filled(7.0), [7.0; 2]);
    }

    #[test]
    fn out_of_values_is_read_as_they_are() {
        let mut values = [1.5f32, -2.0];
        let mut out = Out::from(&mut values[..]).cast::<f32>();
        // SAFETY:
        // - contents: it is made of a slice of values;
        // - memory: the slice ends before an element is written.
        let input = unsafe { out.overwritten() };
        assert_eq!(input.elements(), [1.5, -2.0]);
        assert!(out.overwrites(input) && !out.overwrites(input.tail(1)));
        out.set(1, 3.0);
        assert_eq!(values, [1.5, 3.0]);
    }

    /// Also after a split and a part.
    #[test]
    fn elements_are_found_by_the_type_that_they_say() {
        let (values, wide) = ([1.0, 2.0, 3.0, 4.0].map(bf16::from_f32), [5.0f32, 6.0]);
        let (low, high) = In::from(&values[..]).any().split_at(1);
        assert_eq!(
            (low.known::<bf16>().elements(), high.part(1, 2).known::<bf16>().elements()),
            (&values[..1], &values[2..])
        );
        assert_eq!(In::from(&wide[..]).any().tail(1).known::<f32>().elements(), [6.0]);
        let mut written = [f16::ZERO; 4];
        let (_, mut high) = Out::from(&mut written[..]).any().split_at(1);
        high.part(1, 1).known::<f16>().set(0, f16::ONE);
        assert_eq!(written, [f16::ZERO, f16::ZERO, f16::ONE, f16::ZERO]);
    }

    #[test]
    #[should_panic = "elements are of the type that they say"]
    fn elements_of_another_type_of_the_same_size_are_refused() {
        let _ = In::from(&[f16::ONE][..]).any().known::<bf16>();
    }

    #[test]
    #[should_panic = "one dtype has one layout"]
    fn out_of_a_wider_type_is_refused() {
        let mut values = [bf16::ONE; 4];
        let _ = Out::from(&mut values[..]).cast::<f32>();
    }
}
