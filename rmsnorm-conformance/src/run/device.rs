//! The adapter between the suite's calls and a backend. The rest of the suite uses a [`Device`],
//! which hides the backend's types, so only this file is compiled once per backend. Dtypes are
//! passed as values, so it is not compiled once per mix of dtypes.

use std::ops::Range;

use rmsnorm_spec::quant::CodeType;
use rmsnorm_spec::{
    AnyBackward, AnyCall, AnyElement, AnyForward, AnyIn, AnyOut, AnyQuantizedForward, Checked, DType, DTypes,
    Direction, Error, F8E4M3, F8E5M2, GradReduction, NormBackend, NormSpec, Problem, RowGroups, Rows, Scales, Source,
    Storage, Tensor, bf16, f16,
};

use super::span;
use crate::case::kind::Calls;
use crate::run::harness::{Answer, TransferError};
use crate::run::memory::{Access, Call, Guarded};
use crate::{Arithmetic, Harness};

/// f16 activations with a bf16 weight, or with a bf16 residual: mixes that validation refuses.
pub(crate) const FOREIGN_WEIGHT: DTypes = DTypes { weight: DType::Bf16, ..DTypes::uniform(DType::F16) };
pub(crate) const FOREIGN_RESIDUAL: DTypes = DTypes { residual: DType::Bf16, ..DTypes::uniform(DType::F16) };

/// The properties that a [`Harness`] states.
pub(crate) struct About {
    pub name: &'static str,
    pub device: String,
    pub tuning: String,
    pub arithmetic: Arithmetic,
    pub is_slow: bool,
    /// For cols and for rows.
    pub breakpoints: (Vec<usize>, Vec<usize>),
}

/// A backend under test, without its types.
pub(crate) trait Device: Sync {
    fn about(&self) -> About;
    /// As [`Harness::shape_breakpoints`].
    fn shape_breakpoints(&self, dtype: DType) -> Vec<(usize, usize)>;
    fn workspace_elements(&self, problem: &Problem) -> usize;
    /// Checks that views lie where their spans say. The inner error is the finding, in words.
    fn check_spans(&self) -> Result<Result<(), String>, TransferError>;
    /// Uploads the tensors, makes the call, and downloads all tensors, for any answer of the call.
    fn make(&self, spec: &NormSpec, dtypes: DTypes, reduction: GradReduction, call: &mut Call) -> Answer;
}

impl<H: Harness> Device for H {
    fn about(&self) -> About {
        About {
            name: self.backend().name(),
            device: self.device(),
            tuning: self.tuning(),
            arithmetic: self.arithmetic(),
            is_slow: self.is_slow(),
            breakpoints: (self.cols_breakpoints(), self.rows_breakpoints()),
        }
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
        call.make(self, spec, dtypes, reduction)
    }
}

/// A tensor on the device, of any type.
trait Loaded<B: NormBackend> {
    fn view(&self) -> AnyIn<'_, B>;
    fn view_mut(&mut self) -> AnyOut<'_, B>;
    /// Downloads the whole buffer.
    fn unload(&self, tensor: &mut Guarded) -> Result<(), TransferError>;
}

/// A tensor of one type.
struct Elements<'h, H: Harness, E: AnyElement> {
    harness: &'h H,
    buffer: H::Buffer<E>,
    range: Range<usize>,
}

type AnyLoaded<'h, H> = Box<dyn Loaded<<H as Harness>::Backend> + 'h>;

impl<'h, H: Harness, E: AnyElement> Elements<'h, H, E> {
    fn load(harness: &'h H, tensor: &Guarded) -> Result<AnyLoaded<'h, H>, TransferError> {
        let elements: Vec<E> = tensor.before.iter().map(|&bits| E::from_bits(bits)).collect();
        let buffer = match tensor.parts().as_slice() {
            [_] => harness.upload(&elements),
            parts => {
                let parts: Vec<_> = parts.iter().map(|(there, here)| (*there, &elements[here.clone()])).collect();
                harness.upload_parts(tensor.buffer_len(), &parts)
            }
        };
        let buffer = buffer.map_err(TransferError::Upload)?;
        Ok(Box::new(Elements { harness, buffer, range: tensor.view.clone() }))
    }
}

impl<H: Harness, E: AnyElement> Loaded<H::Backend> for Elements<'_, H, E> {
    fn view(&self) -> AnyIn<'_, H::Backend> {
        E::any_in(self.harness.view(&self.buffer, self.range.clone()))
    }

    fn view_mut(&mut self) -> AnyOut<'_, H::Backend> {
        E::any_out(self.harness.view_mut(&mut self.buffer, self.range.clone()))
    }

    fn unload(&self, tensor: &mut Guarded) -> Result<(), TransferError> {
        let elements = match tensor.parts().as_slice() {
            [_] => self.harness.download(&self.buffer),
            parts => {
                let part = |(there, here): &(usize, Range<usize>)| {
                    self.harness.download_part(&self.buffer, *there..there + here.len())
                };
                parts.iter().map(part).collect::<Result<Vec<_>, _>>().map(|parts| parts.concat())
            }
        };
        tensor.after = elements.map_err(TransferError::Download)?.into_iter().map(AnyElement::bits).collect();
        Ok(())
    }
}

fn load<'h, H: Harness>(harness: &'h H, tensor: &Guarded) -> Result<AnyLoaded<'h, H>, TransferError> {
    match tensor.storage {
        Storage::Float(DType::F32) => Elements::<H, f32>::load(harness, tensor),
        Storage::Float(DType::F16) => Elements::<H, f16>::load(harness, tensor),
        Storage::Float(DType::Bf16) => Elements::<H, bf16>::load(harness, tensor),
        Storage::Code(CodeType::E4m3) => Elements::<H, F8E4M3>::load(harness, tensor),
        Storage::Code(CodeType::E5m2) => Elements::<H, F8E5M2>::load(harness, tensor),
        Storage::Code(CodeType::Int8) => Elements::<H, i8>::load(harness, tensor),
        Storage::E8m0 => Elements::<H, u8>::load(harness, tensor),
    }
}

/// The tensors of a call on the device. Each is passed to the call once.
struct Slots<'a, 'h, H: Harness> {
    tensors: [Option<(&'a mut AnyLoaded<'h, H>, Distances)>; Tensor::COUNT],
}

/// The scales of a call, f32 or E8M0.
type AnyScales<'a, B> = Scales<AnyOut<'a, B>, AnyOut<'a, B>>;

/// Row stride and groups of a matrix.
type Distances = (Option<usize>, Option<RowGroups>);

impl<'a, 'h, H: Harness> Slots<'a, 'h, H> {
    fn new(call: &Call, loaded: &'a mut [AnyLoaded<'h, H>]) -> Self {
        let mut tensors = [const { None }; Tensor::COUNT];
        for (tensor, loaded) in call.tensors.iter().zip(loaded) {
            tensors[tensor.name as usize] = Some((loaded, (tensor.row_stride, tensor.groups)));
        }
        Slots { tensors }
    }

    fn rows(&mut self, tensor: Tensor) -> Option<Rows<AnyIn<'a, H::Backend>>> {
        let (loaded, distances) = self.tensors[tensor as usize].take()?;
        let loaded: &'a AnyLoaded<'h, H> = loaded;
        Some(at(loaded.view(), distances))
    }

    fn rows_mut(&mut self, tensor: Tensor) -> Option<Rows<AnyOut<'a, H::Backend>>> {
        let (loaded, distances) = self.tensors[tensor as usize].take()?;
        Some(at(loaded.view_mut(), distances))
    }

    fn view(&mut self, tensor: Tensor) -> Option<AnyIn<'a, H::Backend>> {
        self.rows(tensor).map(|rows| rows.view)
    }

    fn view_mut(&mut self, tensor: Tensor) -> Option<AnyOut<'a, H::Backend>> {
        self.rows_mut(tensor).map(|rows| rows.view)
    }

    /// The scales as f32, or as E8M0 bytes.
    fn scales(&mut self, tensor: Tensor) -> Option<AnyScales<'a, H::Backend>> {
        let view = self.view_mut(tensor)?;
        Some(if view.storage() == Storage::E8m0 { Scales::E8m0(view) } else { Scales::F32(view) })
    }
}

fn at<V>(view: V, (row_stride, groups): Distances) -> Rows<V> {
    let mut rows = Rows::dense(view);
    (rows.row_stride, rows.groups) = (row_stride, groups);
    rows
}

/// A tensor that every call of the kind has.
fn required<V>(tensor: Tensor, given: Option<V>) -> Result<V, TransferError> {
    let missing = Error::Missing { arg: tensor.name(), why: "every call of this kind needs it" };
    given.ok_or(TransferError::Upload(missing))
}

/// Makes calls on a backend's tensors: a backend, or code on top of one.
pub trait Normalize<B: NormBackend> {
    /// As [`NormBackend::forward`].
    ///
    /// # Errors
    /// As [`NormBackend::forward`].
    fn forward(&self, spec: &NormSpec, args: AnyForward<'_, B>) -> Result<(), Error>;

    /// As [`NormBackend::backward`].
    ///
    /// # Errors
    /// As [`NormBackend::backward`]; `Unsupported` if the method is not overridden.
    fn backward(&self, spec: &NormSpec, args: AnyBackward<'_, B>) -> Result<(), Error> {
        let _ = (spec, args);
        Err(Error::Unsupported { rule: "this `Normalize` has no backward call".into() })
    }
}

/// The backend alone.
struct Alone<'b, B>(&'b B);

impl<B: NormBackend> Normalize<B> for Alone<'_, B> {
    fn forward(&self, spec: &NormSpec, args: AnyForward<'_, B>) -> Result<(), Error> {
        self.0.launch(AnyCall::Forward(Checked::forward(*spec, args)?))
    }

    fn backward(&self, spec: &NormSpec, args: AnyBackward<'_, B>) -> Result<(), Error> {
        self.0.launch(AnyCall::Backward(Checked::backward(self.0, *spec, args)?))
    }
}

impl Call {
    /// Makes the call in these dtypes, valid or not, and downloads all of its tensors.
    ///
    /// # Errors
    /// The outer error: data cannot be copied, or a tensor is missing that every such call has. The
    /// inner error is the backend's.
    pub fn make<H: Harness>(
        &mut self,
        harness: &H,
        spec: &NormSpec,
        dtypes: DTypes,
        reduction: GradReduction,
    ) -> Answer {
        self.on_device(harness, |call, slots| match call.kind.direction {
            Direction::QuantizedForward => call.quantized_forward::<H>(slots, harness.backend(), spec, dtypes),
            Direction::Backward => call.backward::<H>(slots, &Alone(harness.backend()), spec, dtypes, reduction),
            Direction::Forward => call.forward::<H>(slots, &Alone(harness.backend()), spec, dtypes),
        })
    }

    /// Makes a forward or backward call through `norm` instead of the backend, and downloads all of
    /// its tensors.
    ///
    /// # Errors
    /// The outer error: data cannot be copied. The inner error comes from `norm`.
    pub fn make_by<H: Harness>(
        &mut self,
        harness: &H,
        norm: &impl Normalize<H::Backend>,
        spec: &NormSpec,
        dtypes: DTypes,
    ) -> Answer {
        self.on_device(harness, |call, slots| match call.kind.has_forward() {
            true => call.forward::<H>(slots, norm, spec, dtypes),
            false => call.backward::<H>(slots, norm, spec, dtypes, GradReduction::Partials),
        })
    }

    /// Uploads the tensors, makes the call, and downloads all tensors.
    fn on_device<H: Harness>(&mut self, harness: &H, make: impl FnOnce(&Call, Slots<'_, '_, H>) -> Answer) -> Answer {
        let loaded: Result<Vec<_>, _> = self.tensors.iter().map(|tensor| load(harness, tensor)).collect();
        let mut loaded = loaded?;
        let answer = make(self, Slots::new(self, &mut loaded))?;
        for (tensor, loaded) in self.tensors.iter_mut().zip(loaded) {
            loaded.unload(tensor)?;
        }
        Ok(answer)
    }

    fn forward<H: Harness>(
        &self,
        mut slots: Slots<'_, '_, H>,
        norm: &impl Normalize<H::Backend>,
        spec: &NormSpec,
        dtypes: DTypes,
    ) -> Answer {
        let is_after = self.kind.is_after();
        let y = slots.rows_mut(Tensor::Y);
        let overwrites_residual = if is_after { self.kind.calls == Calls::InPlace } else { y.is_none() };
        let mut args = match y {
            Some(y) => AnyForward::<H::Backend>::new(required(Tensor::X, slots.rows(Tensor::X))?, y),
            None if is_after => {
                AnyForward::<H::Backend>::added_to_residual(required(Tensor::X, slots.rows(Tensor::X))?)
            }
            None => AnyForward::<H::Backend>::in_place(required(Tensor::X, slots.rows_mut(Tensor::X))?),
        };
        args.dtypes = dtypes;
        if self.kind.has_parts() {
            let x_stride = self.get(Tensor::X).and_then(|x| x.row_stride);
            args = args.parts(self.parts, spec.rows.saturating_mul(x_stride.unwrap_or(spec.cols)));
        }
        args.weight = slots.view(Tensor::Weight);
        args.bias = slots.view(Tensor::Bias);
        args.residual = match overwrites_residual {
            true => slots.rows_mut(Tensor::Residual).map(Source::Overwrite),
            false => slots.rows(Tensor::Residual).map(Source::Read),
        };
        args.residual_out = slots.rows_mut(Tensor::ResidualOut);
        args.mean = slots.view_mut(Tensor::Mean);
        args.rstd = slots.view_mut(Tensor::Rstd);
        args.next_weight = slots.view(Tensor::NextWeight);
        args.next_bias = slots.view(Tensor::NextBias);
        args.next_mean = slots.view_mut(Tensor::NextMean);
        args.next_rstd = slots.view_mut(Tensor::NextRstd);
        Ok(norm.forward(spec, args))
    }

    fn quantized_forward<H: Harness>(
        &self,
        mut slots: Slots<'_, '_, H>,
        backend: &H::Backend,
        spec: &NormSpec,
        dtypes: DTypes,
    ) -> Answer {
        let missing = Error::Missing { arg: "quant", why: "a quantized call needs it" };
        let quant = self.quant.ok_or(TransferError::Upload(missing))?;
        let x = required(Tensor::X, slots.rows(Tensor::X))?;
        let codes = required(Tensor::Codes, slots.rows_mut(Tensor::Codes))?;
        let mut args = AnyQuantizedForward::<H::Backend>::new(quant, x, codes);
        args.dtypes = dtypes;
        args.weight = slots.view(Tensor::Weight);
        args.bias = slots.view(Tensor::Bias);
        args.residual = slots.rows(Tensor::Residual);
        args.residual_out = slots.rows_mut(Tensor::ResidualOut);
        args.y = slots.rows_mut(Tensor::Y);
        args.mean = slots.view_mut(Tensor::Mean);
        args.rstd = slots.view_mut(Tensor::Rstd);
        args.codes_t = slots.rows_mut(Tensor::CodesT);
        args.scale = slots.view(Tensor::Scale);
        args.scales = slots.scales(Tensor::Scales);
        args.codes_columnwise = slots.rows_mut(Tensor::CodesColumnwise);
        args.scales_columnwise = slots.scales(Tensor::ScalesColumnwise);
        args.amax = slots.view_mut(Tensor::Amax);
        Ok(Checked::quantized_forward(*spec, args).and_then(|call| backend.launch(AnyCall::QuantizedForward(call))))
    }

    fn backward<H: Harness>(
        &self,
        mut slots: Slots<'_, '_, H>,
        norm: &impl Normalize<H::Backend>,
        spec: &NormSpec,
        dtypes: DTypes,
        reduction: GradReduction,
    ) -> Answer {
        let dy = required(Tensor::Dy, slots.rows(Tensor::Dy))?;
        let x = required(Tensor::X, slots.rows(Tensor::X))?;
        let rstd = required(Tensor::Rstd, slots.view(Tensor::Rstd))?;
        let dx = required(Tensor::Dx, slots.rows_mut(Tensor::Dx))?;
        let mut args = AnyBackward::<H::Backend>::mixed(dy, x, rstd, dx).grad_reduction(reduction);
        args.dtypes = dtypes;
        args.weight = slots.view(Tensor::Weight);
        args.mean = slots.view(Tensor::Mean);
        args.dresidual_out = slots.rows(Tensor::DresidualOut);
        args.dresidual = slots.rows_mut(Tensor::Dresidual);
        let (dweight, dbias) = (slots.view_mut(Tensor::Dweight), slots.view_mut(Tensor::Dbias));
        let held = |tensor| self.get(tensor).is_some_and(|tensor| tensor.access == Access::Overwrite);
        if self.kind.calls == Calls::Sums {
            args.accumulate = held(Tensor::Dweight) || held(Tensor::Dbias);
            (args.dweight_sum, args.dbias_sum) = (dweight, dbias);
        } else {
            (args.dweight, args.dbias) = (dweight, dbias);
        }
        args.workspace = slots.view_mut(Tensor::Workspace);
        Ok(norm.backward(spec, args))
    }
}
