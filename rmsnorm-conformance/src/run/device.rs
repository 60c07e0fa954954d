//! The step from the suite's untyped calls to a backend's typed ones.
//!
//! Everything else in the suite sees a [`Device`], which knows neither the backend nor its buffers: it is compiled
//! once, here, whatever the number of backends. Only this file is generic over [`Harness`] and the three dtypes.

use std::ops::Range;

use rmsnorm_spec::quant::{CodeType, QuantSpec};
use rmsnorm_spec::{
    Backward, Code, DType, DTypes, Element, Error, F8E4M3, F8E5M2, Forward, GradReduction, NormBackend, NormSpec,
    Problem, QuantizedForward, RowGroups, Rows, Scales, Source, Storage, Stored, Tensor, WithDTypes, bf16, f16,
};

use super::span;
use crate::case::Kind;
use crate::report::{Check, Finding, Status};
use crate::run::memory::{Access, Call, Guarded};
use crate::{Arithmetic, Harness};

/// Test data could not be moved.
#[derive(Debug)]
pub enum TransferError {
    /// To the device: the call was not made, and the case says nothing about the backend.
    Upload(Error),
    /// From the device, which had memory for it: the call broke something, as a GPU says of a kernel that wrote where nothing is.
    Download(Error),
}

impl TransferError {
    /// How a case ends in which that happened to a call of this name.
    pub(crate) fn status(self, call: &'static str) -> Status {
        match self {
            TransferError::Upload(error) => Status::Skipped(error.to_string()),
            TransferError::Download(error) => {
                let detail = format!("what the call left cannot be read: {error}");
                Status::Fail(Finding { check: Check::Error, output: call, detail })
            }
        }
    }
}

/// What a call answered, once its data was moved.
pub type Answer = Result<Result<(), Error>, TransferError>;

/// f16 activations with a bf16 weight, and with a bf16 residual stream: mixes that validation refuses.
pub(crate) const FOREIGN_WEIGHT: DTypes = DTypes { weight: DType::Bf16, ..DTypes::uniform(DType::F16) };
pub(crate) const FOREIGN_RESIDUAL: DTypes = DTypes { residual: DType::Bf16, ..DTypes::uniform(DType::F16) };

/// A backend under test, without its types.
pub(crate) trait Device: Sync {
    fn name(&self) -> &'static str;
    fn describe(&self) -> String;
    fn tuning(&self) -> String;
    fn claims(&self) -> Arithmetic;
    fn is_slow(&self) -> bool;
    /// Breakpoints of cols and of rows.
    fn breakpoints(&self) -> (Vec<usize>, Vec<usize>);
    /// Shapes at which a plan for that dtype changes in neither direction alone.
    fn shape_breakpoints(&self, dtype: DType) -> Vec<(usize, usize)>;
    fn workspace_elements(&self, problem: &Problem) -> usize;
    /// Whether views lie where their spans say; else the finding, in words.
    fn check_spans(&self) -> Result<Result<(), String>, TransferError>;
    /// Uploads the tensors, makes the call, and downloads all of them, whatever it answered.
    fn make(&self, spec: &NormSpec, dtypes: DTypes, reduction: GradReduction, call: &mut Call) -> Answer;
}

impl<H: Harness> Device for H {
    fn name(&self) -> &'static str {
        self.backend().name()
    }

    fn describe(&self) -> String {
        self.device()
    }

    fn tuning(&self) -> String {
        Harness::tuning(self)
    }

    fn claims(&self) -> Arithmetic {
        self.arithmetic()
    }

    fn is_slow(&self) -> bool {
        Harness::is_slow(self)
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

    fn make(&self, spec: &NormSpec, dtypes: DTypes, reduction: GradReduction, call: &mut Call) -> Answer {
        let typed = Typed { harness: self, spec, reduction, call };
        match dtypes {
            FOREIGN_WEIGHT => typed.call::<f16, bf16, f16>(),
            FOREIGN_RESIDUAL => typed.call::<f16, f16, bf16>(),
            valid => valid.dispatch(typed).unwrap_or_else(|error| Err(TransferError::Upload(error))),
        }
    }
}

/// A tensor on the device.
struct Loaded<H: Harness, E: Stored> {
    buffer: H::Buffer<E>,
    range: Range<usize>,
    row_stride: Option<usize>,
    groups: Option<RowGroups>,
}

type In<'a, H, E> = <<H as Harness>::Backend as NormBackend>::In<'a, E>;
type Out<'a, H, E> = <<H as Harness>::Backend as NormBackend>::Out<'a, E>;

impl<H: Harness, E: Stored> Loaded<H, E> {
    fn load(harness: &H, tensor: &Guarded) -> Result<Self, TransferError> {
        let elements: Vec<E> = tensor.before.iter().map(|&bits| E::from_bits(bits)).collect();
        let buffer = match tensor.parts().as_slice() {
            [_] => harness.upload(&elements),
            parts => {
                let parts: Vec<_> = parts.iter().map(|(there, here)| (*there, &elements[here.clone()])).collect();
                harness.upload_parts(tensor.buffer_len(), &parts)
            }
        };
        let buffer = buffer.map_err(TransferError::Upload)?;
        Ok(Loaded { buffer, range: tensor.view.clone(), row_stride: tensor.row_stride, groups: tensor.groups })
    }

    fn view(&self, harness: &H) -> In<'_, H, E> {
        harness.view(&self.buffer, self.range.clone())
    }

    fn rows(&self, harness: &H) -> Rows<In<'_, H, E>> {
        let mut rows = Rows::dense(self.view(harness));
        (rows.row_stride, rows.groups) = (self.row_stride, self.groups);
        rows
    }

    fn view_mut(&mut self, harness: &H) -> Out<'_, H, E> {
        harness.view_mut(&mut self.buffer, self.range.clone())
    }

    fn rows_mut(&mut self, harness: &H) -> Rows<Out<'_, H, E>> {
        let (row_stride, groups) = (self.row_stride, self.groups);
        let mut rows = Rows::dense(self.view_mut(harness));
        (rows.row_stride, rows.groups) = (row_stride, groups);
        rows
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
        tensor.after = elements.map_err(TransferError::Download)?.into_iter().map(Stored::bits).collect();
        Ok(())
    }
}

/// A call on its way to the backend.
struct Typed<'a, H> {
    harness: &'a H,
    spec: &'a NormSpec,
    reduction: GradReduction,
    call: &'a mut Call,
}

impl Call {
    /// Makes the call in these dtypes, whether a norm has them or not, and downloads all of its tensors.
    ///
    /// # Errors
    /// If data cannot be moved, or a tensor is missing that every such call has. Inside is what the backend says.
    pub fn make<T: Element, W: Element, R: Element>(
        &mut self,
        harness: &impl Harness,
        spec: &NormSpec,
        reduction: GradReduction,
    ) -> Answer {
        Typed { harness, spec, reduction, call: self }.call::<T, W, R>()
    }
}

/// What makes calls on a backend's tensors: the backend, or what is built on it.
pub trait Normalize<B: NormBackend> {
    /// As [`NormBackend::forward`].
    ///
    /// # Errors
    /// As there.
    fn forward<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Forward<'_, B, T, W, R>,
    ) -> Result<(), Error>;

    /// As [`NormBackend::backward`].
    ///
    /// # Errors
    /// As there; `Unsupported` where it is not overridden.
    fn backward<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Backward<'_, B, T, W, R>,
    ) -> Result<(), Error> {
        let _ = (spec, args);
        Err(Error::Unsupported { rule: "there is no backward call of this kind".into() })
    }
}

/// A backend by itself.
struct Alone<'b, B>(&'b B);

impl<B: NormBackend> Normalize<B> for Alone<'_, B> {
    fn forward<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Forward<'_, B, T, W, R>,
    ) -> Result<(), Error> {
        self.0.forward(spec, args)
    }

    fn backward<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Backward<'_, B, T, W, R>,
    ) -> Result<(), Error> {
        self.0.backward(spec, args)
    }
}

/// A call on its way to what makes it.
struct By<'a, H, N> {
    typed: Typed<'a, H>,
    norm: &'a N,
}

impl<H: Harness, N: Normalize<H::Backend>> WithDTypes for By<'_, H, N> {
    type Output = Answer;

    fn call<T: Element, W: Element, R: Element>(self) -> Answer {
        if !self.typed.call.kind.has_forward() {
            self.typed.backward::<T, W, R>(self.norm)
        } else {
            self.typed.forward::<T, W, R>(self.norm)
        }
    }
}

impl Call {
    /// Makes a forward or backward call by `norm` in place of the backend, and downloads all of its tensors.
    ///
    /// # Errors
    /// If data cannot be moved. Inside is what `norm` says.
    pub fn make_by<H: Harness>(
        &mut self,
        harness: &H,
        norm: &impl Normalize<H::Backend>,
        spec: &NormSpec,
        dtypes: DTypes,
    ) -> Answer {
        let typed = Typed { harness, spec, reduction: GradReduction::Partials, call: self };
        dtypes.dispatch(By { typed, norm }).unwrap_or_else(|error| Err(TransferError::Upload(error)))
    }
}

/// Downloads a list of tensors that differ in type.
macro_rules! unload {
    ($self:ident: $($name:ident = $tensor:expr),* $(,)?) => {
        $(if let Some(tensor) = $tensor {
            tensor.unload($self.harness, $self.call.get_mut(Tensor::$name))?;
        })*
    };
}

impl<H: Harness> WithDTypes for Typed<'_, H> {
    type Output = Answer;

    fn call<T: Element, W: Element, R: Element>(self) -> Answer {
        match self.call.kind {
            Kind::Forward | Kind::ForwardInPlace | Kind::EndToEnd | Kind::ForwardParts => {
                self.forward_alone::<T, W, R>()
            }
            Kind::ForwardAfter | Kind::ForwardAfterInPlace | Kind::AfterEndToEnd => self.forward_alone::<T, W, R>(),
            Kind::Backward | Kind::BackwardSums => {
                let backend = self.harness.backend();
                self.backward::<T, W, R>(&Alone(backend))
            }
            Kind::QuantizedForward => {
                let missing = Error::Missing { arg: "quant", why: "codes are made by it" };
                let quant = self.call.quant.ok_or(TransferError::Upload(missing))?;
                match quant.codes {
                    CodeType::E4m3 => self.quantized_forward::<T, F8E4M3, W, R>(quant),
                    CodeType::E5m2 => self.quantized_forward::<T, F8E5M2, W, R>(quant),
                    CodeType::Int8 => self.quantized_forward::<T, i8, W, R>(quant),
                }
            }
        }
    }
}

type LoadedGradient<H, W> = (Option<Loaded<H, W>>, Option<Loaded<H, f32>>);
type LoadedScales<H> = (Option<Loaded<H, f32>>, Option<Loaded<H, u8>>);
type ScalesOut<'a, B> = Scales<<B as NormBackend>::Out<'a, f32>, <B as NormBackend>::Out<'a, u8>>;

fn scales_view<'a, H: Harness>(
    harness: &H,
    scales: &'a mut Option<Loaded<H, f32>>,
    bytes: &'a mut Option<Loaded<H, u8>>,
) -> Option<ScalesOut<'a, H::Backend>> {
    match (scales, bytes) {
        (Some(scales), _) => Some(Scales::F32(scales.view_mut(harness))),
        (None, Some(scales)) => Some(Scales::E8m0(scales.view_mut(harness))),
        (None, None) => None,
    }
}

impl<H: Harness> Typed<'_, H> {
    fn optional<E: Stored>(&self, name: Tensor) -> Result<Option<Loaded<H, E>>, TransferError> {
        self.call.get(name).map(|tensor| Loaded::load(self.harness, tensor)).transpose()
    }

    fn required<E: Stored>(&self, name: Tensor) -> Result<Loaded<H, E>, TransferError> {
        let missing = Error::Missing { arg: name.name(), why: "the argument struct has it always" };
        self.optional(name)?.ok_or(TransferError::Upload(missing))
    }

    /// As f32, or as bytes.
    fn scales(&self, name: Tensor) -> Result<LoadedScales<H>, TransferError> {
        let are_bytes = self.call.get(name).is_some_and(|scales| scales.storage == Storage::E8m0);
        Ok(if are_bytes { (None, self.optional(name)?) } else { (self.optional(name)?, None) })
    }

    /// In the weight's dtype, or as a sum.
    fn gradient<W: Element>(&self, name: Tensor, is_sum: bool) -> Result<LoadedGradient<H, W>, TransferError> {
        Ok(if is_sum { (None, self.optional(name)?) } else { (self.optional(name)?, None) })
    }

    fn forward_alone<T: Element, W: Element, R: Element>(self) -> Answer {
        let backend = self.harness.backend();
        self.forward::<T, W, R>(&Alone(backend))
    }

    fn forward<T: Element, W: Element, R: Element>(self, norm: &impl Normalize<H::Backend>) -> Answer {
        let h = self.harness;
        let mut x = self.required::<T>(Tensor::X)?;
        let x_stride = x.row_stride;
        let mut residual = self.optional::<R>(Tensor::Residual)?;
        let weight = self.optional::<W>(Tensor::Weight)?;
        let bias = self.optional::<W>(Tensor::Bias)?;
        let mut y = self.optional::<T>(Tensor::Y)?;
        let mut residual_out = self.optional::<R>(Tensor::ResidualOut)?;
        let mut mean = self.optional::<f32>(Tensor::Mean)?;
        let mut rstd = self.optional::<f32>(Tensor::Rstd)?;
        let next_weight = self.optional::<W>(Tensor::NextWeight)?;
        let next_bias = self.optional::<W>(Tensor::NextBias)?;
        let mut next_mean = self.optional::<f32>(Tensor::NextMean)?;
        let mut next_rstd = self.optional::<f32>(Tensor::NextRstd)?;
        let is_after = self.call.kind.is_after();
        let overwrites_residual = if is_after { self.call.kind == Kind::ForwardAfterInPlace } else { y.is_none() };
        let args = match &mut y {
            Some(y) => Forward::<H::Backend, T>::new(x.rows(h), y.rows_mut(h)),
            None if is_after => Forward::<H::Backend, T>::onto_residual(x.rows(h)),
            None => Forward::<H::Backend, T>::in_place(x.rows_mut(h)),
        };
        let mut args = args.weight_dtype::<W>().residual_dtype::<R>();
        if self.call.kind == Kind::ForwardParts {
            let stride = self.spec.rows.saturating_mul(x_stride.unwrap_or(self.spec.cols));
            args = args.parts(self.call.parts, stride);
        }
        args.weight = weight.as_ref().map(|t| t.view(h));
        args.bias = bias.as_ref().map(|t| t.view(h));
        args.residual = residual.as_mut().map(|t| match overwrites_residual {
            true => Source::Overwrite(t.rows_mut(h)),
            false => Source::Read(t.rows(h)),
        });
        args.residual_out = residual_out.as_mut().map(|t| t.rows_mut(h));
        args.mean = mean.as_mut().map(|t| t.view_mut(h));
        args.rstd = rstd.as_mut().map(|t| t.view_mut(h));
        args.next_weight = next_weight.as_ref().map(|t| t.view(h));
        args.next_bias = next_bias.as_ref().map(|t| t.view(h));
        args.next_mean = next_mean.as_mut().map(|t| t.view_mut(h));
        args.next_rstd = next_rstd.as_mut().map(|t| t.view_mut(h));
        let answer = norm.forward(self.spec, args);
        unload!(self: X = Some(x), Residual = residual, Weight = weight, Bias = bias, Y = y, ResidualOut = residual_out,
            Mean = mean, Rstd = rstd, NextWeight = next_weight, NextBias = next_bias, NextMean = next_mean,
            NextRstd = next_rstd);
        Ok(answer)
    }

    fn quantized_forward<T: Element, C: Code, W: Element, R: Element>(self, quant: QuantSpec) -> Answer {
        let h = self.harness;
        let x = self.required::<T>(Tensor::X)?;
        let residual = self.optional::<R>(Tensor::Residual)?;
        let weight = self.optional::<W>(Tensor::Weight)?;
        let bias = self.optional::<W>(Tensor::Bias)?;
        let mut y = self.optional::<T>(Tensor::Y)?;
        let mut residual_out = self.optional::<R>(Tensor::ResidualOut)?;
        let mut mean = self.optional::<f32>(Tensor::Mean)?;
        let mut rstd = self.optional::<f32>(Tensor::Rstd)?;
        let mut codes = self.required::<C>(Tensor::Codes)?;
        let mut codes_t = self.optional::<C>(Tensor::CodesT)?;
        let scale = self.optional::<f32>(Tensor::Scale)?;
        let (mut scales, mut bytes) = self.scales(Tensor::Scales)?;
        let mut codes_columnwise = self.optional::<C>(Tensor::CodesColumnwise)?;
        let (mut scales_columnwise, mut bytes_columnwise) = self.scales(Tensor::ScalesColumnwise)?;
        let mut amax = self.optional::<f32>(Tensor::Amax)?;
        let args = QuantizedForward::<H::Backend, T, C>::new(quant, x.rows(h), codes.rows_mut(h));
        let mut args = args.weight_dtype::<W>().residual_dtype::<R>();
        args.weight = weight.as_ref().map(|t| t.view(h));
        args.bias = bias.as_ref().map(|t| t.view(h));
        args.residual = residual.as_ref().map(|t| t.rows(h));
        args.residual_out = residual_out.as_mut().map(|t| t.rows_mut(h));
        args.y = y.as_mut().map(|t| t.rows_mut(h));
        args.mean = mean.as_mut().map(|t| t.view_mut(h));
        args.rstd = rstd.as_mut().map(|t| t.view_mut(h));
        args.codes_t = codes_t.as_mut().map(|t| t.rows_mut(h));
        args.scale = scale.as_ref().map(|t| t.view(h));
        args.scales = scales_view(h, &mut scales, &mut bytes);
        args.codes_columnwise = codes_columnwise.as_mut().map(|t| t.rows_mut(h));
        args.scales_columnwise = scales_view(h, &mut scales_columnwise, &mut bytes_columnwise);
        args.amax = amax.as_mut().map(|t| t.view_mut(h));
        let answer = h.backend().quantized_forward(self.spec, args);
        unload!(self: X = Some(x), Residual = residual, Weight = weight, Bias = bias, Y = y, ResidualOut = residual_out,
            Mean = mean, Rstd = rstd, Codes = Some(codes), CodesT = codes_t, Scale = scale, Scales = scales,
            Scales = bytes, Amax = amax, CodesColumnwise = codes_columnwise, ScalesColumnwise = scales_columnwise,
            ScalesColumnwise = bytes_columnwise);
        Ok(answer)
    }

    fn backward<T: Element, W: Element, R: Element>(self, norm: &impl Normalize<H::Backend>) -> Answer {
        let h = self.harness;
        let dy = self.required::<T>(Tensor::Dy)?;
        let x = self.required::<R>(Tensor::X)?;
        let weight = self.optional::<W>(Tensor::Weight)?;
        let mean = self.optional::<f32>(Tensor::Mean)?;
        let rstd = self.required::<f32>(Tensor::Rstd)?;
        let dresidual_out = self.optional::<R>(Tensor::DresidualOut)?;
        let mut dx = self.required::<T>(Tensor::Dx)?;
        let mut dresidual = self.optional::<R>(Tensor::Dresidual)?;
        let are_sums = self.call.kind == Kind::BackwardSums;
        let (mut dweight, mut dweight_sum) = self.gradient::<W>(Tensor::Dweight, are_sums)?;
        let (mut dbias, mut dbias_sum) = self.gradient::<W>(Tensor::Dbias, are_sums)?;
        let mut workspace = self.optional::<f32>(Tensor::Workspace)?;
        let args = Backward::<H::Backend, T, W, R>::mixed(dy.rows(h), x.rows(h), rstd.view(h), dx.rows_mut(h));
        let mut args = args.grad_reduction(self.reduction);
        args.weight = weight.as_ref().map(|t| t.view(h));
        args.mean = mean.as_ref().map(|t| t.view(h));
        args.dresidual_out = dresidual_out.as_ref().map(|t| t.rows(h));
        args.dresidual = dresidual.as_mut().map(|t| t.rows_mut(h));
        args.dweight = dweight.as_mut().map(|t| t.view_mut(h));
        args.dbias = dbias.as_mut().map(|t| t.view_mut(h));
        args.dweight_sum = dweight_sum.as_mut().map(|t| t.view_mut(h));
        args.dbias_sum = dbias_sum.as_mut().map(|t| t.view_mut(h));
        let held = |tensor| self.call.get(tensor).is_some_and(|tensor| tensor.access == Access::Overwrite);
        args.accumulate = are_sums && (held(Tensor::Dweight) || held(Tensor::Dbias));
        args.workspace = workspace.as_mut().map(|t| t.view_mut(h));
        let answer = norm.backward(self.spec, args);
        unload!(self: Dy = Some(dy), X = Some(x), Weight = weight, Mean = mean, Rstd = Some(rstd),
            DresidualOut = dresidual_out, Dx = Some(dx), Dweight = dweight, Dweight = dweight_sum, Dbias = dbias,
            Dbias = dbias_sum, Workspace = workspace, Dresidual = dresidual);
        Ok(answer)
    }
}
