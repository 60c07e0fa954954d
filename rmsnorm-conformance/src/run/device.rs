//! The step from the suite's untyped calls to a backend's typed ones.
//!
//! Everything else in the suite sees a [`Device`], which knows neither the backend nor its buffers: it is compiled
//! once, here, whatever the number of backends. Only this file is generic over [`Harness`] and the three dtypes.

use std::ops::Range;

use rmsnorm_spec::{
    Backward, DType, Element, Error, Forward, ForwardInPlace, GradReduction, NormBackend, NormSpec, Problem, Rows,
    Stage, bf16, f16,
};

use super::span;
use crate::case::Dtypes;
use crate::run::memory::{Call, Guarded, Slot};
use crate::{Arithmetic, Harness};

/// Test data could not be moved to or from the device: the case says nothing about the backend.
#[derive(Debug)]
pub(crate) struct TransferError(pub Error);

/// What a call answered, once its data was moved.
pub(crate) type Answer = Result<Result<(), Error>, TransferError>;

/// The dtypes of a call, valid or not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CallDtypes {
    /// A combination that validation accepts.
    Valid(Dtypes),
    /// f16 activations with a bf16 weight.
    ForeignWeight,
    /// f16 activations with a bf16 residual stream.
    ForeignResidual,
}

impl CallDtypes {
    /// The dtype of a tensor.
    pub fn of(self, slot: Slot, stage: Stage) -> DType {
        let valid = match self {
            CallDtypes::Valid(dtypes) => return slot.dtype(stage, dtypes),
            CallDtypes::ForeignWeight => Dtypes { wide_weight: true, ..Dtypes::uniform(DType::F16) },
            CallDtypes::ForeignResidual => Dtypes { wide_residual: true, ..Dtypes::uniform(DType::F16) },
        };
        // The foreign tensors are those that widening made f32; statistics are f32 anyway.
        let (narrow, wide) = (slot.dtype(stage, Dtypes::uniform(DType::F16)), slot.dtype(stage, valid));
        if narrow == wide { narrow } else { DType::Bf16 }
    }
}

/// A backend under test, without its types.
pub(crate) trait Device {
    fn name(&self) -> &'static str;
    fn describe(&self) -> String;
    fn claims(&self) -> Arithmetic;
    /// Breakpoints of cols and of rows.
    fn breakpoints(&self) -> (Vec<usize>, Vec<usize>);
    /// Shapes at which a plan for that dtype changes in neither direction alone.
    fn shape_breakpoints(&self, dtype: DType) -> Vec<(usize, usize)>;
    fn workspace_elements(&self, problem: &Problem) -> usize;
    /// Whether views lie where their spans say; else the finding, in words.
    fn check_spans(&self) -> Result<Result<(), String>, TransferError>;
    /// Uploads the tensors, makes the call, and downloads all of them, whatever it answered.
    fn make(&self, spec: &NormSpec, dtypes: CallDtypes, reduction: GradReduction, call: &mut Call) -> Answer;
}

impl<H: Harness> Device for H {
    fn name(&self) -> &'static str {
        self.backend().name()
    }

    fn describe(&self) -> String {
        self.device()
    }

    fn claims(&self) -> Arithmetic {
        self.arithmetic()
    }

    fn breakpoints(&self) -> (Vec<usize>, Vec<usize>) {
        (self.cols_breakpoints(), self.rows_breakpoints())
    }

    fn shape_breakpoints(&self, dtype: DType) -> Vec<(usize, usize)> {
        Harness::shape_breakpoints(self, dtype)
    }

    fn workspace_elements(&self, problem: &Problem) -> usize {
        self.backend().workspace_len(problem)
    }

    fn check_spans(&self) -> Result<Result<(), String>, TransferError> {
        span::check(self)
    }

    fn make(&self, spec: &NormSpec, dtypes: CallDtypes, reduction: GradReduction, call: &mut Call) -> Answer {
        let typed = Typed { harness: self, spec, reduction };
        let dtypes = match dtypes {
            CallDtypes::Valid(dtypes) => dtypes,
            CallDtypes::ForeignWeight => return typed.make::<f16, bf16, f16>(call),
            CallDtypes::ForeignResidual => return typed.make::<f16, f16, bf16>(call),
        };
        match (dtypes.activation, dtypes.wide_weight, dtypes.wide_residual) {
            (DType::F32, _, _) => typed.make::<f32, f32, f32>(call),
            (DType::F16, false, false) => typed.make::<f16, f16, f16>(call),
            (DType::F16, false, true) => typed.make::<f16, f16, f32>(call),
            (DType::F16, true, false) => typed.make::<f16, f32, f16>(call),
            (DType::F16, true, true) => typed.make::<f16, f32, f32>(call),
            (DType::Bf16, false, false) => typed.make::<bf16, bf16, bf16>(call),
            (DType::Bf16, false, true) => typed.make::<bf16, bf16, f32>(call),
            (DType::Bf16, true, false) => typed.make::<bf16, f32, bf16>(call),
            (DType::Bf16, true, true) => typed.make::<bf16, f32, f32>(call),
        }
    }
}

/// A tensor on the device.
struct Loaded<H: Harness, E: Element> {
    buffer: H::Buffer<E>,
    range: Range<usize>,
    row_stride: Option<usize>,
}

type In<'a, H, E> = <<H as Harness>::Backend as NormBackend>::In<'a, E>;
type Out<'a, H, E> = <<H as Harness>::Backend as NormBackend>::Out<'a, E>;

impl<H: Harness, E: Element> Loaded<H, E> {
    fn load(harness: &H, tensor: &Guarded) -> Result<Self, TransferError> {
        let elements: Vec<E> = tensor.before.iter().map(|&bits| E::from_bits(bits)).collect();
        let buffer = match tensor.parts().as_slice() {
            [_] => harness.upload(&elements),
            parts => {
                let parts: Vec<_> = parts.iter().map(|(there, here)| (*there, &elements[here.clone()])).collect();
                harness.upload_parts(tensor.buffer_len(), &parts)
            }
        };
        let buffer = buffer.map_err(TransferError)?;
        Ok(Loaded { buffer, range: tensor.view.clone(), row_stride: tensor.row_stride })
    }

    fn view(&self, harness: &H) -> In<'_, H, E> {
        harness.view(&self.buffer, self.range.clone())
    }

    fn rows(&self, harness: &H) -> Rows<In<'_, H, E>> {
        Rows { view: self.view(harness), row_stride: self.row_stride }
    }

    fn view_mut(&mut self, harness: &H) -> Out<'_, H, E> {
        harness.view_mut(&mut self.buffer, self.range.clone())
    }

    fn rows_mut(&mut self, harness: &H) -> Rows<Out<'_, H, E>> {
        let row_stride = self.row_stride;
        Rows { view: self.view_mut(harness), row_stride }
    }

    fn unload(self, harness: &H, tensor: Option<&mut Guarded>) -> Result<(), TransferError> {
        let Some(tensor) = tensor else { return Ok(()) };
        let elements = match tensor.parts().as_slice() {
            [_] => harness.download(&self.buffer),
            parts => {
                let part = |(there, here): &(usize, Range<usize>)| {
                    harness.download_part(&self.buffer, *there..there + here.len())
                };
                parts.iter().map(part).collect::<Result<Vec<_>, _>>().map(|parts| parts.concat())
            }
        };
        tensor.after = elements.map_err(TransferError)?.into_iter().map(Element::bits).collect();
        Ok(())
    }
}

/// A call on its way to the backend.
struct Typed<'a, H> {
    harness: &'a H,
    spec: &'a NormSpec,
    reduction: GradReduction,
}

/// Downloads a list of tensors that differ in type.
macro_rules! unload {
    ($self:ident, $call:ident: $($slot:ident = $tensor:expr),* $(,)?) => {
        $(if let Some(tensor) = $tensor {
            tensor.unload($self.harness, $call.get_mut(Slot::$slot))?;
        })*
    };
}

impl<H: Harness> Typed<'_, H> {
    fn make<T: Element, W: Element, R: Element>(&self, call: &mut Call) -> Answer {
        match call.stage {
            Stage::Forward => self.forward::<T, W, R>(call),
            Stage::ForwardInPlace => self.forward_in_place::<T, W, R>(call),
            Stage::Backward => self.backward::<T, W, R>(call),
        }
    }

    fn optional<E: Element>(&self, call: &Call, slot: Slot) -> Result<Option<Loaded<H, E>>, TransferError> {
        call.get(slot).map(|tensor| Loaded::load(self.harness, tensor)).transpose()
    }

    fn required<E: Element>(&self, call: &Call, slot: Slot) -> Result<Loaded<H, E>, TransferError> {
        let missing = Error::Missing { arg: slot.name(), why: "the argument struct has it always" };
        self.optional(call, slot)?.ok_or(TransferError(missing))
    }

    fn forward<T: Element, W: Element, R: Element>(&self, call: &mut Call) -> Answer {
        let h = self.harness;
        let x = self.required::<T>(call, Slot::X)?;
        let residual = self.optional::<R>(call, Slot::Residual)?;
        let weight = self.optional::<W>(call, Slot::Weight)?;
        let bias = self.optional::<W>(call, Slot::Bias)?;
        let mut y = self.required::<T>(call, Slot::Y)?;
        let mut residual_out = self.optional::<R>(call, Slot::ResidualOut)?;
        let mut mean = self.optional::<f32>(call, Slot::Mean)?;
        let mut rstd = self.optional::<f32>(call, Slot::Rstd)?;
        let Rows { view: x_view, row_stride: x_stride } = x.rows(h);
        let Rows { view: y_view, row_stride: y_stride } = y.rows_mut(h);
        let mut args = Forward::<H::Backend, T, W, R>::mixed(x_view, y_view);
        args.x.row_stride = x_stride;
        args.weight = weight.as_ref().map(|t| t.view(h));
        args.bias = bias.as_ref().map(|t| t.view(h));
        args.residual = residual.as_ref().map(|t| t.rows(h));
        args.residual_out = residual_out.as_mut().map(|t| t.rows_mut(h));
        args.y.row_stride = y_stride;
        args.mean = mean.as_mut().map(|t| t.view_mut(h));
        args.rstd = rstd.as_mut().map(|t| t.view_mut(h));
        let answer = h.backend().forward(self.spec, args);
        unload!(self, call: X = Some(x), Residual = residual, Weight = weight, Bias = bias, Y = Some(y),
            ResidualOut = residual_out, Mean = mean, Rstd = rstd);
        Ok(answer)
    }

    fn forward_in_place<T: Element, W: Element, R: Element>(&self, call: &mut Call) -> Answer {
        let h = self.harness;
        let mut x = self.required::<T>(call, Slot::X)?;
        let mut residual = self.optional::<R>(call, Slot::Residual)?;
        let weight = self.optional::<W>(call, Slot::Weight)?;
        let bias = self.optional::<W>(call, Slot::Bias)?;
        let mut mean = self.optional::<f32>(call, Slot::Mean)?;
        let mut rstd = self.optional::<f32>(call, Slot::Rstd)?;
        let Rows { view: x_view, row_stride: x_stride } = x.rows_mut(h);
        let mut args = ForwardInPlace::<H::Backend, T, W, R>::mixed(x_view);
        args.x.row_stride = x_stride;
        args.weight = weight.as_ref().map(|t| t.view(h));
        args.bias = bias.as_ref().map(|t| t.view(h));
        args.residual = residual.as_mut().map(|t| t.rows_mut(h));
        args.mean = mean.as_mut().map(|t| t.view_mut(h));
        args.rstd = rstd.as_mut().map(|t| t.view_mut(h));
        let answer = h.backend().forward_in_place(self.spec, args);
        unload!(self, call: X = Some(x), Residual = residual, Weight = weight, Bias = bias, Mean = mean, Rstd = rstd);
        Ok(answer)
    }

    fn backward<T: Element, W: Element, R: Element>(&self, call: &mut Call) -> Answer {
        let h = self.harness;
        let dy = self.required::<T>(call, Slot::Dy)?;
        let x = self.required::<R>(call, Slot::X)?;
        let weight = self.optional::<W>(call, Slot::Weight)?;
        let mean = self.optional::<f32>(call, Slot::Mean)?;
        let rstd = self.optional::<f32>(call, Slot::Rstd)?;
        let dresidual_out = self.optional::<R>(call, Slot::DresidualOut)?;
        let mut dx = self.required::<T>(call, Slot::Dx)?;
        let mut dweight = self.optional::<W>(call, Slot::Dweight)?;
        let mut dbias = self.optional::<W>(call, Slot::Dbias)?;
        let mut workspace = self.optional::<f32>(call, Slot::Workspace)?;
        let Rows { view: dy_view, row_stride: dy_stride } = dy.rows(h);
        let Rows { view: x_view, row_stride: x_stride } = x.rows(h);
        let Rows { view: dx_view, row_stride: dx_stride } = dx.rows_mut(h);
        let mut args = Backward::<H::Backend, T, W, R>::mixed(dy_view, x_view, dx_view);
        args.dy.row_stride = dy_stride;
        args.x.row_stride = x_stride;
        args.weight = weight.as_ref().map(|t| t.view(h));
        args.mean = mean.as_ref().map(|t| t.view(h));
        args.rstd = rstd.as_ref().map(|t| t.view(h));
        args.dresidual_out = dresidual_out.as_ref().map(|t| t.rows(h));
        args.dx.row_stride = dx_stride;
        args.dweight = dweight.as_mut().map(|t| t.view_mut(h));
        args.dbias = dbias.as_mut().map(|t| t.view_mut(h));
        args.workspace = workspace.as_mut().map(|t| t.view_mut(h));
        args.grad_reduction = self.reduction;
        let answer = h.backend().backward(self.spec, args);
        unload!(self, call: Dy = Some(dy), X = Some(x), Weight = weight, Mean = mean, Rstd = rstd,
            DresidualOut = dresidual_out, Dx = Some(dx), Dweight = dweight, Dbias = dbias, Workspace = workspace);
        Ok(answer)
    }
}
