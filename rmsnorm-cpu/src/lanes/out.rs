//! Elements that a stage writes, whether or not they hold values before.

use std::mem::MaybeUninit;

use rmsnorm_spec::Stored;

use super::LANES;

/// Elements to write, which may hold nothing yet: outputs need not be zeroed first. Only values go in, so that a slice of
/// values can be written through one.
pub(crate) struct Out<'a, E>(&'a mut [MaybeUninit<E>]);

impl<'a, E> From<&'a mut [MaybeUninit<E>]> for Out<'a, E> {
    fn from(elements: &'a mut [MaybeUninit<E>]) -> Self {
        Out(elements)
    }
}

impl<'a, E> From<&'a mut [E]> for Out<'a, E> {
    #[inline(always)]
    fn from(values: &'a mut [E]) -> Self {
        // SAFETY:
        // - memory: the same elements, borrowed as before; `MaybeUninit<E>` has the layout of `E`;
        // - contents: nothing but values is written through an `Out`, whose field is private to this file.
        Out(unsafe { &mut *(std::ptr::from_mut(values) as *mut [MaybeUninit<E>]) })
    }
}

impl<'a, E: Stored> Out<'a, E> {
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    #[inline(always)]
    pub(crate) fn as_ptr(&self) -> *const E {
        self.0.as_ptr().cast()
    }

    /// So many elements from there on.
    #[inline(always)]
    pub(crate) fn part(&mut self, start: usize, len: usize) -> Out<'_, E> {
        Out(&mut self.0[start..][..len])
    }

    /// No elements.
    #[inline(always)]
    pub(crate) fn none() -> Self {
        Out(&mut [])
    }

    /// All of them, for a while.
    pub(crate) fn reborrow(&mut self) -> Out<'_, E> {
        Out(self.0)
    }

    /// The elements before `index`, and the others.
    pub(crate) fn split_at(self, index: usize) -> (Self, Self) {
        let (low, high) = self.0.split_at_mut(index);
        (Out(low), Out(high))
    }

    /// The same elements under another name of their type.
    pub(crate) fn cast<F: Stored>(self) -> Out<'a, F> {
        assert_eq!((size_of::<E>(), align_of::<E>()), (size_of::<F>(), align_of::<F>()), "one dtype has one layout");
        // SAFETY:
        // - memory: the same bytes, borrowed as before, at the same size and alignment, which were compared;
        // - contents: any bytes are an element of any type, and `MaybeUninit` asks for none.
        Out(unsafe { &mut *(std::ptr::from_mut(self.0) as *mut [MaybeUninit<F>]) })
    }

    /// Writes one element.
    #[inline(always)]
    pub(crate) fn set(&mut self, index: usize, value: E) {
        self.0[index].write(value);
    }

    /// Writes every element, each from its place in `values`, which are as many.
    #[inline(always)]
    pub(crate) fn copy_from_slice(&mut self, values: &[E]) {
        assert_eq!(self.len(), values.len());
        // SAFETY:
        // - bounds: both have as many elements, which was compared;
        // - memory: what is borrowed mutably overlaps nothing else.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0.as_mut_ptr().cast(), values.len()) }
    }

    /// Writes this value everywhere, and gives the values.
    pub(crate) fn filled(self, value: E) -> &'a mut [E] {
        self.0.fill(MaybeUninit::new(value));
        // SAFETY:
        // - contents: every element was written in the line above.
        unsafe { &mut *(std::ptr::from_mut(self.0) as *mut [E]) }
    }

    /// The group of elements from there on. Only values may be written to it.
    #[inline(always)]
    pub(crate) fn group(&mut self, start: usize) -> &mut [MaybeUninit<E>; LANES] {
        &mut self.0[start..start + LANES].as_chunks_mut::<LANES>().0[0]
    }
}

/// Elements that a stage has written, for the next one to read: as rows, between which there may be nothing.
pub(crate) struct Written<'a, E>(&'a [MaybeUninit<E>]);

impl<E> Clone for Written<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Written<'_, E> {}

impl<'a, E> Written<'a, E> {
    /// Of elements that were written as far as anyone will ask for them.
    ///
    /// # Safety
    /// - contents: every element that [`part`](Self::part) will be asked for was written.
    pub(crate) unsafe fn new(out: &'a Out<'_, E>) -> Self {
        Written(out.0)
    }

    /// So many elements from there on.
    #[inline(always)]
    pub(crate) fn part(self, start: usize, len: usize) -> &'a [E] {
        let part = &self.0[start..][..len];
        // SAFETY:
        // - memory: the same elements, borrowed as before; `MaybeUninit<E>` has the layout of `E`;
        // - contents: who made this promised that they were written.
        unsafe { &*(std::ptr::from_ref(part) as *const [E]) }
    }
}

/// What a row is read from: its input, or without one, in place, what is to be overwritten.
#[inline(always)]
pub(crate) fn input_or_overwritten<'r, E>(input: Option<&'r [E]>, out: &'r Out<'_, E>) -> &'r [E] {
    // SAFETY:
    // - contents: work has no input in place only, and then `launch::overwritten` has made its `Out` of a slice of values.
    input.unwrap_or_else(|| unsafe { &*(std::ptr::from_ref(&*out.0) as *const [E]) })
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
        assert_eq!(input_or_overwritten(None, &out), [1.5, -2.0]);
        assert_eq!(input_or_overwritten(Some(&[5.0][..]), &out), [5.0]);
        out.set(1, 3.0);
        assert_eq!(values, [1.5, 3.0]);
    }

    #[test]
    #[should_panic = "one dtype has one layout"]
    fn out_of_a_wider_type_is_refused() {
        let mut values = [rmsnorm_spec::bf16::ONE; 4];
        let _ = Out::from(&mut values[..]).cast::<f32>();
    }
}
