//! The adapter between the suite's calls and a backend. The rest of the suite uses a [`Device`],
//! which hides the backend's types, so only this file is compiled once per backend. Dtypes are
//! passed as values, so it is not compiled once per mix of dtypes.

use std::collections::BTreeMap;
use std::ops::Range;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use pollster::block_on;
use rmsnorm_spec::quant::CodeType;
use rmsnorm_spec::{
    AnyBackward, AnyCall, AnyElement, AnyForward, AnyIn, AnyOut, AnyQuantizedForward, Checked, DType, DTypes,
    Direction, Error, F8E4M3, F8E5M2, GradReduction, NormBackend, NormSpec, Parts, Problem, Role, Rows, Source,
    Storage, Tensor, bf16, f16,
};

use super::span;
use crate::case::kind::Calls;
use crate::run::harness::{Answer, TransferError};
use crate::run::memory::{Access, Call, Guarded};
use crate::{Arithmetic, Harness};

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
    fn check_spans(&self) -> LocalBoxFuture<'_, Result<Result<(), String>, TransferError>>;
    /// Uploads the tensors, makes the call, and downloads all tensors, for any answer of the call.
    fn make<'a>(
        &'a self,
        spec: &'a NormSpec,
        dtypes: DTypes,
        reduction: GradReduction,
        call: &'a mut Call,
    ) -> LocalBoxFuture<'a, Answer>;
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

    fn check_spans(&self) -> LocalBoxFuture<'_, Result<Result<(), String>, TransferError>> {
        span::check(self).boxed_local()
    }

    fn make<'a>(
        &'a self,
        spec: &'a NormSpec,
        dtypes: DTypes,
        reduction: GradReduction,
        call: &'a mut Call,
    ) -> LocalBoxFuture<'a, Answer> {
        async move { call.on_device(self, &Alone(self.backend()), spec, dtypes, reduction).await }.boxed_local()
    }
}

/// A tensor on the device, of any type.
trait Loaded<B: NormBackend> {
    fn view(&self) -> AnyIn<'_, B>;
    fn view_mut(&mut self) -> AnyOut<'_, B>;
    /// Downloads the whole buffer.
    fn unload<'a>(&'a self, tensor: &'a mut Guarded) -> LocalBoxFuture<'a, Result<(), TransferError>>;
}

/// A tensor of one type.
struct Elements<'h, H: Harness, E: AnyElement> {
    harness: &'h H,
    buffer: H::Buffer<E>,
    range: Range<usize>,
}

type AnyLoaded<'h, H> = Box<dyn Loaded<<H as Harness>::Backend> + 'h>;

impl<'h, H: Harness, E: AnyElement> Elements<'h, H, E> {
    fn load(harness: &'h H, tensor: &Guarded) -> Result<AnyLoaded<'h, H>, Error> {
        let elements: Vec<E> = tensor.before.iter().map(|&bits| E::from_bits(bits)).collect();
        let buffer = match tensor.parts().as_slice() {
            [_] => harness.upload(&elements),
            parts => {
                let parts: Vec<_> = parts.iter().map(|(there, here)| (*there, &elements[here.clone()])).collect();
                harness.upload_parts(tensor.buffer_len(), &parts)
            }
        };
        Ok(Box::new(Elements { harness, buffer: buffer?, range: tensor.view.clone() }))
    }
}

impl<H: Harness, E: AnyElement> Loaded<H::Backend> for Elements<'_, H, E> {
    fn view(&self) -> AnyIn<'_, H::Backend> {
        E::any_in(self.harness.view(&self.buffer, self.range.clone()))
    }

    fn view_mut(&mut self) -> AnyOut<'_, H::Backend> {
        E::any_out(self.harness.view_mut(&mut self.buffer, self.range.clone()))
    }

    fn unload<'a>(&'a self, tensor: &'a mut Guarded) -> LocalBoxFuture<'a, Result<(), TransferError>> {
        let unload = async {
            let parts = tensor.parts();
            tensor.after.clear();
            for (there, here) in parts {
                let part = self.harness.fetch_part(&self.buffer, there..there + here.len()).await;
                tensor.after.extend(part.map_err(TransferError::Download)?.into_iter().map(AnyElement::bits));
            }
            Ok(())
        };
        unload.boxed_local()
    }
}

fn load<'h, H: Harness>(harness: &'h H, tensor: &Guarded) -> Result<AnyLoaded<'h, H>, Error> {
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

    /// As [`NormBackend::quantized_forward`].
    ///
    /// # Errors
    /// As [`NormBackend::quantized_forward`]; `Unsupported` if the method is not overridden.
    fn quantized_forward(&self, spec: &NormSpec, args: AnyQuantizedForward<'_, B>) -> Result<(), Error> {
        let _ = (spec, args);
        Err(Error::Unsupported { rule: "this `Normalize` has no quantized results".into() })
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

    fn quantized_forward(&self, spec: &NormSpec, args: AnyQuantizedForward<'_, B>) -> Result<(), Error> {
        self.0.launch(AnyCall::QuantizedForward(Checked::quantized_forward(*spec, args)?))
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
        block_on(self.on_device(harness, &Alone(harness.backend()), spec, dtypes, reduction))
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
        block_on(self.on_device(harness, norm, spec, dtypes, GradReduction::Partials))
    }

    /// Uploads the tensors, makes the call, and downloads all tensors.
    async fn on_device<H: Harness>(
        &mut self,
        harness: &H,
        norm: &impl Normalize<H::Backend>,
        spec: &NormSpec,
        dtypes: DTypes,
        reduction: GradReduction,
    ) -> Answer {
        let load = || self.tensors.iter().map(|tensor| load(harness, tensor)).collect::<Result<Vec<_>, _>>();
        let mut loaded = harness.caught(load).await.map_err(TransferError::Upload)?;
        let launch = || Ok(self.launch::<H>(&mut loaded, norm, spec, dtypes, reduction));
        let answer = match harness.caught(launch).await {
            Ok(answer) => answer.map_err(TransferError::Upload)?,
            Err(error) => Err(error),
        };
        for (tensor, loaded) in self.tensors.iter_mut().zip(loaded) {
            loaded.unload(tensor).await?;
        }
        Ok(answer)
    }

    /// Makes the call. The outer error is that of a call without a tensor that it needs.
    fn launch<H: Harness>(
        &self,
        loaded: &mut [AnyLoaded<'_, H>],
        norm: &impl Normalize<H::Backend>,
        spec: &NormSpec,
        dtypes: DTypes,
        reduction: GradReduction,
    ) -> Result<Result<(), Error>, Error> {
        let direction = self.kind.direction;
        let is_gradient = |tensor: Tensor| tensor.role(direction) == Role::Gradient;
        let mut slots: BTreeMap<Tensor, _> =
            self.tensors.iter().zip(loaded).map(|(tensor, loaded)| (tensor.name, (tensor, loaded))).collect();
        let take = |tensor, name: &str| {
            // Sums have other names than the gradients that they replace.
            let is_asked_for = !is_gradient(tensor) || (name != tensor.name()) == (self.kind.calls == Calls::Sums);
            let (tensor, loaded) = if is_asked_for { slots.remove(&tensor)? } else { return None };
            let mut rows = Rows::dense(());
            (rows.row_stride, rows.groups) = (tensor.row_stride, tensor.groups);
            Some(match tensor.access {
                Access::Read => Source::Read(rows.with(loaded.view())),
                Access::Write | Access::Overwrite | Access::Scratch => Source::Overwrite(rows.with(loaded.view_mut())),
            })
        };
        Ok(match direction {
            Direction::Forward => {
                let x_stride = self.get(Tensor::X).and_then(|x| x.row_stride).unwrap_or(spec.cols);
                let parts = Parts { count: self.parts, stride: spec.rows.saturating_mul(x_stride) };
                norm.forward(spec, AnyForward::of_tensors(dtypes, self.kind.has_parts().then_some(parts), take)?)
            }
            Direction::Backward => {
                let held = |tensor: &Guarded| is_gradient(tensor.name) && tensor.access == Access::Overwrite;
                let accumulate = self.tensors.iter().any(held);
                norm.backward(spec, AnyBackward::of_tensors(dtypes, accumulate, reduction, take)?)
            }
            Direction::QuantizedForward => {
                let quant = self.quant.ok_or(Error::Missing { arg: "quant", why: "a quantized call needs it" })?;
                norm.quantized_forward(spec, AnyQuantizedForward::of_tensors(dtypes, quant, take)?)
            }
        })
    }
}
