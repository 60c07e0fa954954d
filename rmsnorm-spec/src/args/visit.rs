//! Visits the tensors of the argument structs: by value for launches, by span for validation.

use std::fmt;

use super::{Backward, Forward, QuantizedForward, RowGroups, RowLayout, Rows, Scales, Source};
use crate::{AnyElement, Code, Element, Error, NormBackend, Span, Storage, Tensor};

/// A backend's handling of each tensor of a call, for every element type.
pub trait Visitor<'a, B: NormBackend + ?Sized> {
    /// A tensor that the call reads. A vector is one row.
    ///
    /// # Errors
    /// Ends the visit.
    fn read<E: AnyElement>(&mut self, tensor: Tensor, rows: Rows<B::In<'a, E>>) -> Result<(), Error>;

    /// A tensor that the call writes. A vector is one row.
    ///
    /// # Errors
    /// Ends the visit.
    fn write<E: AnyElement>(&mut self, tensor: Tensor, rows: Rows<B::Out<'a, E>>) -> Result<(), Error>;
}

/// A tensor's view without its type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    /// The argument's name; in place it differs from the tensor's.
    pub arg: &'static str,
    pub storage: Storage,
    /// A vector is one row.
    pub rows: Rows<Span>,
}

impl View {
    /// Elements to the end of the last group's stride, in the groups that the caller gave.
    pub(crate) fn padded_span(&self, rows: usize) -> Option<usize> {
        self.rows.groups.filter(|given| given.rows > 0)?.padded_span(rows)
    }

    /// The groups that the caller gave to a matrix with these rows, cut to the rows, if all rows
    /// lie in the first group and a next group would begin after it.
    pub(crate) fn single_group(&self, rows: &RowLayout) -> Option<RowGroups> {
        let given = self.rows.groups.filter(|given| given.rows >= rows.rows && rows.rows > 0)?;
        (rows.span() <= given.stride).then_some(RowGroups { rows: rows.rows, ..given })
    }
}

/// Records each tensor.
pub(crate) trait SpanVisitor {
    fn visit(&mut self, tensor: Tensor, view: View) -> Result<(), Error>;
}

/// Arguments whose tensors can be visited.
pub(crate) trait Views<'a, B: NormBackend + ?Sized> {
    /// Shows each tensor's view.
    fn spans(&self, visitor: &mut impl SpanVisitor) -> Result<(), Error>;

    /// Passes each tensor to the visitor.
    fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<(), Error>;
}

/// Prints the tensors with their dtypes, lengths and strides:
/// `Forward { x: f32[8] by 4, y: f32[6], .. }`, without values, which may be on a device.
impl<B: NormBackend + ?Sized, T: Element, W: Element, R: Element> fmt::Debug for Forward<'_, B, T, W, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut described = f.debug_struct("Forward");
        if let Some(parts) = self.parts {
            described.field("parts", &parts);
        }
        describe(described, |fields| self.spans(fields))
    }
}

/// As [`Forward`], and the reduction of weight gradients.
impl<B: NormBackend + ?Sized, T: Element, W: Element, R: Element> fmt::Debug for Backward<'_, B, T, W, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut described = f.debug_struct("Backward");
        described.field("grad_reduction", &self.grad_reduction);
        describe(described, |fields| self.spans(fields))
    }
}

/// As [`Forward`], and the quantization.
impl<B: NormBackend + ?Sized, T: Element, C: Code, W: Element, R: Element> fmt::Debug
    for QuantizedForward<'_, B, T, C, W, R>
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut described = f.debug_struct("QuantizedForward");
        described.field("quant", &self.quant);
        describe(described, |fields| self.spans(fields))
    }
}

/// Appends each tensor.
pub(super) struct Fields<'t, 'f, 'w>(&'t mut fmt::DebugStruct<'f, 'w>);

impl SpanVisitor for Fields<'_, '_, '_> {
    fn visit(&mut self, _: Tensor, view: View) -> Result<(), Error> {
        let View { arg, storage, rows: Rows { view: Span { len, .. }, row_stride, groups } } = view;
        let by = |stride: usize| format!(" by {stride}");
        let of = |RowGroups { rows, stride }| format!(" in groups of {rows} by {stride}");
        let (by, of) = (row_stride.map_or(String::new(), by), groups.map_or(String::new(), of));
        self.0.field(arg, &format_args!("{storage}[{len}]{by}{of}"));
        Ok(())
    }
}

/// Appends the tensors that `spans` shows, and finishes.
pub(super) fn describe(
    mut to: fmt::DebugStruct<'_, '_>,
    spans: impl FnOnce(&mut Fields<'_, '_, '_>) -> Result<(), Error>,
) -> fmt::Result {
    spans(&mut Fields(&mut to)).map_err(|_| fmt::Error)?;
    to.finish()
}

/// A matrix that a backend reads or overwrites.
type SourceOf<'a, B, E> = Source<<B as NormBackend>::In<'a, E>, <B as NormBackend>::Out<'a, E>>;

/// A backend's buffer for scales.
type ScalesOf<'a, B> = Scales<<B as NormBackend>::Out<'a, f32>, <B as NormBackend>::Out<'a, u8>>;

/// The visitor's result.
type Shown = Result<(), Error>;

pub(super) fn source<B: NormBackend + ?Sized, E: AnyElement>(
    visitor: &mut impl SpanVisitor,
    [read, overwritten]: [Tensor; 2],
    source: Option<&SourceOf<'_, B, E>>,
) -> Shown {
    let (tensor, storage, rows) = match source {
        Some(Source::Read(rows)) => (read, B::in_storage::<E>(&rows.view), rows.with(B::in_span::<E>(&rows.view))),
        Some(Source::Overwrite(rows)) => {
            (overwritten, B::out_storage::<E>(&rows.view), rows.with(B::out_span::<E>(&rows.view)))
        }
        None => return Ok(()),
    };
    visitor.visit(tensor, View { arg: read.name(), storage, rows })
}

pub(super) fn matrix_in<B: NormBackend + ?Sized, E: AnyElement>(
    visitor: &mut impl SpanVisitor,
    tensor: Tensor,
    rows: Option<&Rows<B::In<'_, E>>>,
) -> Shown {
    show(visitor, tensor, rows.map(|rows| (B::in_storage::<E>(&rows.view), rows.with(B::in_span::<E>(&rows.view)))))
}

pub(super) fn matrix_out<B: NormBackend + ?Sized, E: AnyElement>(
    visitor: &mut impl SpanVisitor,
    tensor: Tensor,
    rows: Option<&Rows<B::Out<'_, E>>>,
) -> Shown {
    show(visitor, tensor, rows.map(|rows| (B::out_storage::<E>(&rows.view), rows.with(B::out_span::<E>(&rows.view)))))
}

pub(super) fn vector_in<B: NormBackend + ?Sized, E: AnyElement>(
    visitor: &mut impl SpanVisitor,
    tensor: Tensor,
    view: Option<&B::In<'_, E>>,
) -> Shown {
    show(visitor, tensor, view.map(|view| (B::in_storage::<E>(view), Rows::dense(B::in_span::<E>(view)))))
}

pub(super) fn vector_out<B: NormBackend + ?Sized, E: AnyElement>(
    visitor: &mut impl SpanVisitor,
    tensor: Tensor,
    view: Option<&B::Out<'_, E>>,
) -> Shown {
    show(visitor, tensor, view.map(|view| (B::out_storage::<E>(view), Rows::dense(B::out_span::<E>(view)))))
}

pub(super) fn sum_out<B: NormBackend + ?Sized>(
    visitor: &mut impl SpanVisitor,
    tensor: Tensor,
    arg: &'static str,
    view: Option<&B::Out<'_, f32>>,
) -> Shown {
    let Some(view) = view else { return Ok(()) };
    visitor
        .visit(tensor, View { arg, storage: B::out_storage::<f32>(view), rows: Rows::dense(B::out_span::<f32>(view)) })
}

fn show(visitor: &mut impl SpanVisitor, tensor: Tensor, shown: Option<(Storage, Rows<Span>)>) -> Shown {
    let Some((storage, rows)) = shown else { return Ok(()) };
    visitor.visit(tensor, View { arg: tensor.name(), storage, rows })
}

pub(super) fn scales_out<B: NormBackend + ?Sized>(
    visitor: &mut impl SpanVisitor,
    tensor: Tensor,
    scales: Option<&ScalesOf<'_, B>>,
) -> Shown {
    match scales {
        Some(Scales::F32(view)) => vector_out::<B, f32>(visitor, tensor, Some(view)),
        Some(Scales::E8m0(view)) => vector_out::<B, u8>(visitor, tensor, Some(view)),
        None => Ok(()),
    }
}

pub(super) fn hand_scales<'a, B: NormBackend + ?Sized>(
    visitor: &mut impl Visitor<'a, B>,
    tensor: Tensor,
    scales: Option<ScalesOf<'a, B>>,
) -> Shown {
    match scales {
        Some(Scales::F32(view)) => visitor.write::<f32>(tensor, Rows::dense(view)),
        Some(Scales::E8m0(view)) => visitor.write::<u8>(tensor, Rows::dense(view)),
        None => Ok(()),
    }
}

pub(super) fn hand_source<'a, B: NormBackend + ?Sized, E: AnyElement>(
    visitor: &mut impl Visitor<'a, B>,
    [read, overwritten]: [Tensor; 2],
    source: Option<SourceOf<'a, B, E>>,
) -> Shown {
    match source {
        Some(Source::Read(rows)) => visitor.read::<E>(read, rows),
        Some(Source::Overwrite(rows)) => visitor.write::<E>(overwritten, rows),
        None => Ok(()),
    }
}
