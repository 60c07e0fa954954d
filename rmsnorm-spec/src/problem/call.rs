//! [`AnyCall`]: a validated call, whichever it is.

use super::Checked;
use crate::{
    AnyBackward, AnyBackwardStatistics, AnyColumnStatistics, AnyForward, AnyQuantizedForward, Error, Given,
    NormBackend, NormSpec, Problem, Untyped, Visitor,
};

/// A validated call on its way to a backend's [`launch`](NormBackend::launch). A second half (`..Given`) borrows what all ranks have found
/// for `'g`, its tensors for `'a`.
pub enum AnyCall<'a, 'g, B: NormBackend + ?Sized> {
    /// [`NormBackend::forward`].
    Forward(Checked<AnyForward<'a, B>>),
    /// [`NormBackend::backward`].
    Backward(Checked<AnyBackward<'a, B>>),
    /// [`NormBackend::quantized_forward`].
    QuantizedForward(Checked<AnyQuantizedForward<'a, B>>),
    /// [`NormBackend::column_statistics`].
    ColumnStatistics(Checked<AnyColumnStatistics<'a, B>>),
    /// [`NormBackend::forward_given`].
    ForwardGiven(Checked<Given<'g, Untyped<B>, AnyForward<'a, B>>>),
    /// [`NormBackend::backward_statistics`].
    BackwardStatistics(Checked<AnyBackwardStatistics<'a, B>>),
    /// [`NormBackend::backward_given`].
    BackwardGiven(Checked<Given<'g, Untyped<B>, AnyBackward<'a, B>>>),
}

/// The statistics of a call whose columns are divided among ranks, which its first half finds and its second half is given.
pub enum Statistics<'a, 'g, B: NormBackend + ?Sized> {
    /// Where a first half writes what it finds in a rank's columns: (rows, numbers).
    Found(B::Out<'a, f32>),
    /// What all ranks have found.
    Given {
        /// (ranks, rows, numbers), in the order of the ranks.
        numbers: B::In<'g, f32>,
        /// How many columns each rank has.
        columns: &'g [usize],
    },
}

/// Runs `$body` with the [`Checked`] of a call.
macro_rules! each {
    ($call:expr, $checked:ident => $body:expr) => {
        match $call {
            AnyCall::Forward($checked) => $body,
            AnyCall::Backward($checked) => $body,
            AnyCall::QuantizedForward($checked) => $body,
            AnyCall::ColumnStatistics($checked) => $body,
            AnyCall::ForwardGiven($checked) => $body,
            AnyCall::BackwardStatistics($checked) => $body,
            AnyCall::BackwardGiven($checked) => $body,
        }
    };
}

impl<'a, 'g, B: NormBackend + ?Sized> AnyCall<'a, 'g, B> {
    /// What is computed.
    pub const fn spec(&self) -> &NormSpec {
        each!(self, checked => checked.spec())
    }

    /// The call without its pointers.
    pub const fn problem(&self) -> &Problem {
        each!(self, checked => checked.problem())
    }

    /// Elements from a part of `x` to the next; 0 where there is one.
    pub fn part_stride(&self) -> usize {
        if let AnyCall::Forward(call) = self { call.part_stride() } else { 0 }
    }

    /// Hands every tensor to the visitor, in the order of [`Tensor::ALL`](crate::Tensor::ALL) but for what in place takes an input's turn.
    /// Returns the statistics of a half.
    ///
    /// # Errors
    /// The first of the visitor's.
    pub fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<Option<Statistics<'a, 'g, B>>, Error> {
        match self {
            AnyCall::Forward(call) => call.visit(visitor).map(|()| None),
            AnyCall::Backward(call) => call.visit(visitor).map(|()| None),
            AnyCall::QuantizedForward(call) => call.visit(visitor).map(|()| None),
            AnyCall::ColumnStatistics(call) => call.visit(visitor).map(|found| Some(Statistics::Found(found))),
            AnyCall::BackwardStatistics(call) => call.visit(visitor).map(|found| Some(Statistics::Found(found))),
            AnyCall::ForwardGiven(call) => {
                let (call, numbers, columns) = call.into_parts()?;
                call.visit(visitor).map(|()| Some(Statistics::Given { numbers, columns }))
            }
            AnyCall::BackwardGiven(call) => {
                let (call, numbers, columns) = call.into_parts()?;
                call.visit(visitor).map(|()| Some(Statistics::Given { numbers, columns }))
            }
        }
    }

    /// The answer of a backend of that name that has no such calls.
    pub fn unsupported(&self, backend: &str) -> Error {
        let what = match self {
            AnyCall::Forward(_) => "does not normalize",
            AnyCall::Backward(_) => "computes no gradients",
            AnyCall::QuantizedForward(_) => "has no quantized results",
            AnyCall::ColumnStatistics(_)
            | AnyCall::ForwardGiven(_)
            | AnyCall::BackwardStatistics(_)
            | AnyCall::BackwardGiven(_) => "normalizes no rows whose columns are divided among ranks",
        };
        Error::Unsupported { rule: format!("the {backend} backend {what}") }
    }
}
