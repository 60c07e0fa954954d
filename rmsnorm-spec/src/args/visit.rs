//! The tensors of the argument structs, one after the other: by value for launches, by their spans for validation.

use std::fmt;

use super::{Backward, Forward, RowGroups, RowLayout, Rows, Source};
use crate::{DType, Element, Error, NormBackend, Span, Tensor};

/// What a backend does with each tensor of a call, whatever its element type.
pub trait Visitor<'a, B: NormBackend + ?Sized> {
    /// A tensor that is read. A vector is one row.
    ///
    /// # Errors
    /// Ends the visit.
    fn read<E: Element>(&mut self, tensor: Tensor, rows: Rows<B::In<'a, E>>) -> Result<(), Error>;

    /// A tensor that is written. A vector is one row.
    ///
    /// # Errors
    /// Ends the visit.
    fn write<E: Element>(&mut self, tensor: Tensor, rows: Rows<B::Out<'a, E>>) -> Result<(), Error>;
}

/// A tensor's view without its type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    /// The argument, which in place is another than the tensor.
    pub arg: &'static str,
    pub dtype: DType,
    /// A vector is one row.
    pub rows: Rows<Span>,
}

impl View {
    /// Elements to the end of the last group's stride, in the groups that it was given with.
    pub(crate) fn padded_span(&self, rows: usize) -> Option<usize> {
        self.rows.groups.filter(|given| given.rows > 0)?.padded_span(rows)
    }

    /// Of a matrix with these rows, the groups that it was given with if all rows lie in the first, cut to them, and a next one
    /// would begin behind.
    pub(crate) fn single_group(&self, rows: &RowLayout) -> Option<RowGroups> {
        let given = self.rows.groups.filter(|given| given.rows >= rows.rows && rows.rows > 0)?;
        (rows.span() <= given.stride).then_some(RowGroups { rows: rows.rows, ..given })
    }
}

/// Takes note of each tensor.
pub(crate) trait SpanVisitor {
    fn visit(&mut self, tensor: Tensor, view: View) -> Result<(), Error>;
}

/// Arguments whose tensors can be gone through.
pub(crate) trait Views<'a, B: NormBackend + ?Sized> {
    /// Shows each tensor's view.
    fn spans(&self, visitor: &mut impl SpanVisitor) -> Result<(), Error>;

    /// Hands each tensor over.
    fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<(), Error>;
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Views<'a, B> for Forward<'a, B, T, W, R> {
    fn spans(&self, visitor: &mut impl SpanVisitor) -> Result<(), Error> {
        source::<B, T>(visitor, (Tensor::X, Tensor::Y), Some(&self.x))?;
        source::<B, R>(visitor, (Tensor::Residual, Tensor::ResidualOut), self.residual.as_ref())?;
        vector_in::<B, W>(visitor, Tensor::Weight, self.weight.as_ref())?;
        vector_in::<B, W>(visitor, Tensor::Bias, self.bias.as_ref())?;
        matrix_out::<B, T>(visitor, Tensor::Y, self.y.as_ref())?;
        matrix_out::<B, R>(visitor, Tensor::ResidualOut, self.residual_out.as_ref())?;
        vector_out::<B, f32>(visitor, Tensor::Mean, self.mean.as_ref())?;
        vector_out::<B, f32>(visitor, Tensor::Rstd, self.rstd.as_ref())
    }

    fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<(), Error> {
        match self.x {
            Source::Read(rows) => visitor.read::<T>(Tensor::X, rows)?,
            Source::Overwrite(rows) => visitor.write::<T>(Tensor::Y, rows)?,
        }
        match self.residual {
            Some(Source::Read(rows)) => visitor.read::<R>(Tensor::Residual, rows)?,
            Some(Source::Overwrite(rows)) => visitor.write::<R>(Tensor::ResidualOut, rows)?,
            None => {}
        }
        hand_in::<B, W>(visitor, Tensor::Weight, self.weight)?;
        hand_in::<B, W>(visitor, Tensor::Bias, self.bias)?;
        hand_out::<B, T>(visitor, Tensor::Y, self.y)?;
        hand_out::<B, R>(visitor, Tensor::ResidualOut, self.residual_out)?;
        hand_out::<B, f32>(visitor, Tensor::Mean, self.mean)?;
        hand_out::<B, f32>(visitor, Tensor::Rstd, self.rstd)
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Views<'a, B> for Backward<'a, B, T, W, R> {
    fn spans(&self, visitor: &mut impl SpanVisitor) -> Result<(), Error> {
        matrix_in::<B, R>(visitor, Tensor::X, Some(&self.x))?;
        vector_in::<B, W>(visitor, Tensor::Weight, self.weight.as_ref())?;
        vector_in::<B, f32>(visitor, Tensor::Mean, self.mean.as_ref())?;
        vector_in::<B, f32>(visitor, Tensor::Rstd, Some(&self.rstd))?;
        matrix_in::<B, T>(visitor, Tensor::Dy, Some(&self.dy))?;
        matrix_in::<B, R>(visitor, Tensor::DresidualOut, self.dresidual_out.as_ref())?;
        matrix_out::<B, T>(visitor, Tensor::Dx, Some(&self.dx))?;
        vector_out::<B, W>(visitor, Tensor::Dweight, self.dweight.as_ref())?;
        vector_out::<B, W>(visitor, Tensor::Dbias, self.dbias.as_ref())?;
        vector_out::<B, f32>(visitor, Tensor::Workspace, self.workspace.as_ref())?;
        matrix_out::<B, R>(visitor, Tensor::Dresidual, self.dresidual.as_ref())
    }

    fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<(), Error> {
        hand_in::<B, R>(visitor, Tensor::X, Some(self.x))?;
        hand_in::<B, W>(visitor, Tensor::Weight, self.weight)?;
        hand_in::<B, f32>(visitor, Tensor::Mean, self.mean)?;
        hand_in::<B, f32>(visitor, Tensor::Rstd, Some(self.rstd))?;
        hand_in::<B, T>(visitor, Tensor::Dy, Some(self.dy))?;
        hand_in::<B, R>(visitor, Tensor::DresidualOut, self.dresidual_out)?;
        hand_out::<B, T>(visitor, Tensor::Dx, Some(self.dx))?;
        hand_out::<B, W>(visitor, Tensor::Dweight, self.dweight)?;
        hand_out::<B, W>(visitor, Tensor::Dbias, self.dbias)?;
        hand_out::<B, f32>(visitor, Tensor::Workspace, self.workspace)?;
        hand_out::<B, R>(visitor, Tensor::Dresidual, self.dresidual)
    }
}

/// The tensors that there are, and their dtypes, lengths and strides: `Forward { x: f32[8] by 4, y: f32[6], .. }`. What
/// they hold may be on a device.
impl<B: NormBackend + ?Sized, T: Element, W: Element, R: Element> fmt::Debug for Forward<'_, B, T, W, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe::<B>(self, &mut f.debug_struct("Forward"))
    }
}

/// As [`Forward`]'s, and how weight gradients are summed.
impl<B: NormBackend + ?Sized, T: Element, W: Element, R: Element> fmt::Debug for Backward<'_, B, T, W, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe::<B>(self, f.debug_struct("Backward").field("grad_reduction", &self.grad_reduction))
    }
}

fn describe<'a, B: NormBackend + ?Sized>(args: &impl Views<'a, B>, to: &mut fmt::DebugStruct<'_, '_>) -> fmt::Result {
    /// Appends each tensor.
    struct Fields<'t, 'f, 'w>(&'t mut fmt::DebugStruct<'f, 'w>);
    impl SpanVisitor for Fields<'_, '_, '_> {
        fn visit(&mut self, _: Tensor, view: View) -> Result<(), Error> {
            let View { arg, dtype, rows: Rows { view: Span { len, .. }, row_stride, groups } } = view;
            let by = |stride: usize| format!(" by {stride}");
            let of = |RowGroups { rows, stride }| format!(" in groups of {rows} by {stride}");
            let (by, of) = (row_stride.map_or(String::new(), by), groups.map_or(String::new(), of));
            self.0.field(arg, &format_args!("{dtype}[{len}]{by}{of}"));
            Ok(())
        }
    }
    args.spans(&mut Fields(to)).map_err(|_| fmt::Error)?;
    to.finish()
}

/// What a backend's matrix is read from.
type SourceOf<'a, B, E> = Source<<B as NormBackend>::In<'a, E>, <B as NormBackend>::Out<'a, E>>;

/// The visitor's answer.
type Shown = Result<(), Error>;

fn source<B: NormBackend + ?Sized, E: Element>(
    visitor: &mut impl SpanVisitor,
    (read, overwritten): (Tensor, Tensor),
    source: Option<&SourceOf<'_, B, E>>,
) -> Shown {
    let (tensor, rows) = match source {
        Some(Source::Read(rows)) => (read, rows.with(B::in_span(&rows.view))),
        Some(Source::Overwrite(rows)) => (overwritten, rows.with(B::out_span(&rows.view))),
        None => return Ok(()),
    };
    visitor.visit(tensor, View { arg: read.name(), dtype: E::DTYPE, rows })
}

fn matrix_in<B: NormBackend + ?Sized, E: Element>(
    visitor: &mut impl SpanVisitor,
    tensor: Tensor,
    rows: Option<&Rows<B::In<'_, E>>>,
) -> Shown {
    show::<E>(visitor, tensor, rows.map(|rows| rows.with(B::in_span(&rows.view))))
}

fn matrix_out<B: NormBackend + ?Sized, E: Element>(
    visitor: &mut impl SpanVisitor,
    tensor: Tensor,
    rows: Option<&Rows<B::Out<'_, E>>>,
) -> Shown {
    show::<E>(visitor, tensor, rows.map(|rows| rows.with(B::out_span(&rows.view))))
}

fn vector_in<B: NormBackend + ?Sized, E: Element>(
    visitor: &mut impl SpanVisitor,
    tensor: Tensor,
    view: Option<&B::In<'_, E>>,
) -> Shown {
    show::<E>(visitor, tensor, view.map(|view| Rows::dense(B::in_span(view))))
}

fn vector_out<B: NormBackend + ?Sized, E: Element>(
    visitor: &mut impl SpanVisitor,
    tensor: Tensor,
    view: Option<&B::Out<'_, E>>,
) -> Shown {
    show::<E>(visitor, tensor, view.map(|view| Rows::dense(B::out_span(view))))
}

fn show<E: Element>(visitor: &mut impl SpanVisitor, tensor: Tensor, rows: Option<Rows<Span>>) -> Shown {
    let Some(rows) = rows else { return Ok(()) };
    visitor.visit(tensor, View { arg: tensor.name(), dtype: E::DTYPE, rows })
}

fn hand_in<'a, B: NormBackend + ?Sized, E: Element>(
    visitor: &mut impl Visitor<'a, B>,
    tensor: Tensor,
    rows: Option<impl Into<Rows<B::In<'a, E>>>>,
) -> Shown {
    rows.map_or(Ok(()), |rows| visitor.read::<E>(tensor, rows.into()))
}

fn hand_out<'a, B: NormBackend + ?Sized, E: Element>(
    visitor: &mut impl Visitor<'a, B>,
    tensor: Tensor,
    rows: Option<impl Into<Rows<B::Out<'a, E>>>>,
) -> Shown {
    rows.map_or(Ok(()), |rows| visitor.write::<E>(tensor, rows.into()))
}
