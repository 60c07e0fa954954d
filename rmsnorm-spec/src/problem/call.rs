//! [`AnyCall`]: a validated call of any operation.

use super::Checked;
use crate::{
    AnyBackward, AnyForward, AnyPartialBackwardStatistics, AnyPartialStatistics, AnyQuantizedForward, Error,
    NormBackend, NormSpec, Problem, Untyped, Visitor, WithStatistics,
};

/// A validated call, the argument of a backend's [`launch`](NormBackend::launch). A second half
/// (`..WithStatistics`) borrows the statistics of all ranks for `'g`, its tensors for `'a`.
pub enum AnyCall<'a, 'g, B: NormBackend + ?Sized> {
    /// [`NormBackend::forward`].
    Forward(Checked<AnyForward<'a, B>>),
    /// [`NormBackend::backward`].
    Backward(Checked<AnyBackward<'a, B>>),
    /// [`NormBackend::quantized_forward`].
    QuantizedForward(Checked<AnyQuantizedForward<'a, B>>),
    /// [`NormBackend::partial_statistics`].
    PartialStatistics(Checked<AnyPartialStatistics<'a, B>>),
    /// [`NormBackend::forward_with_statistics`].
    ForwardWithStatistics(Checked<WithStatistics<'g, Untyped<B>, AnyForward<'a, B>>>),
    /// [`NormBackend::partial_backward_statistics`].
    PartialBackwardStatistics(Checked<AnyPartialBackwardStatistics<'a, B>>),
    /// [`NormBackend::backward_with_statistics`].
    BackwardWithStatistics(Checked<WithStatistics<'g, Untyped<B>, AnyBackward<'a, B>>>),
}

/// The statistics of a call whose columns are divided among ranks: an output of its first half, an
/// input of its second half.
pub enum Statistics<'a, 'g, B: NormBackend + ?Sized> {
    /// Receives the statistics of this rank's columns: (rows, numbers).
    Found(B::Out<'a, f32>),
    /// The statistics of all ranks.
    Given {
        /// (ranks, rows, numbers), in rank order.
        numbers: B::In<'g, f32>,
        /// The number of columns of each rank.
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
            AnyCall::PartialStatistics($checked) => $body,
            AnyCall::ForwardWithStatistics($checked) => $body,
            AnyCall::PartialBackwardStatistics($checked) => $body,
            AnyCall::BackwardWithStatistics($checked) => $body,
        }
    };
}

impl<'a, 'g, B: NormBackend + ?Sized> AnyCall<'a, 'g, B> {
    /// The norm that is computed.
    pub const fn spec(&self) -> &NormSpec {
        each!(self, checked => checked.spec())
    }

    /// The call without its pointers.
    pub const fn problem(&self) -> &Problem {
        each!(self, checked => checked.problem())
    }

    /// Elements from one part of `x` to the next; 0 for one part.
    pub fn part_stride(&self) -> usize {
        if let AnyCall::Forward(call) = self { call.part_stride() } else { 0 }
    }

    /// Passes every tensor to the visitor, in the order of [`Tensor::ALL`](crate::Tensor::ALL); an
    /// in-place output comes in its input's place. Returns the statistics of a half.
    ///
    /// # Errors
    /// The first of the visitor's.
    pub fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<Option<Statistics<'a, 'g, B>>, Error> {
        match self {
            AnyCall::Forward(call) => call.visit(visitor).map(|()| None),
            AnyCall::Backward(call) => call.visit(visitor).map(|()| None),
            AnyCall::QuantizedForward(call) => call.visit(visitor).map(|()| None),
            AnyCall::PartialStatistics(call) => call.visit(visitor).map(|found| Some(Statistics::Found(found))),
            AnyCall::PartialBackwardStatistics(call) => call.visit(visitor).map(|found| Some(Statistics::Found(found))),
            AnyCall::ForwardWithStatistics(call) => {
                let (call, numbers, columns) = call.into_parts()?;
                call.visit(visitor).map(|()| Some(Statistics::Given { numbers, columns }))
            }
            AnyCall::BackwardWithStatistics(call) => {
                let (call, numbers, columns) = call.into_parts()?;
                call.visit(visitor).map(|()| Some(Statistics::Given { numbers, columns }))
            }
        }
    }

    /// The error of the backend named `backend`, if it has no such operation.
    pub fn unsupported(&self, backend: &str) -> Error {
        let what = match self {
            AnyCall::Forward(_) => "does not normalize",
            AnyCall::Backward(_) => "computes no gradients",
            AnyCall::QuantizedForward(_) => "has no quantized results",
            AnyCall::PartialStatistics(_)
            | AnyCall::ForwardWithStatistics(_)
            | AnyCall::PartialBackwardStatistics(_)
            | AnyCall::BackwardWithStatistics(_) => "has no calls on columns that are divided among ranks",
        };
        Error::Unsupported { rule: format!("the {backend} backend {what}") }
    }
}
