//! The computation of `rmsnorm run` on any backend: upload, forward, backward with the statistics
//! of forward, download.

use rmsnorm_core::conformance::Harness;
use rmsnorm_core::quant::{CodeType, ScaleKind, ScaleType};
use rmsnorm_core::{
    AnyBackward, AnyCall, AnyElement, AnyForward, AnyIn, AnyOut, AnyQuantizedForward, Checked, DType, DTypes, F8E4M3,
    F8E5M2, Gate, HarnessTask, Norm, NormBackend, Scales, Slot, Source, Storage, bf16, f16,
};

use super::quantize::Quantize;
use super::request::Request;
use crate::failure::Failure;
use crate::memory;
use crate::tensors::{OutputTensor, Tensor};

/// The result of a run.
#[derive(Debug)]
pub struct Computed {
    /// The description of the device.
    pub device: String,
    /// The output tensors, `y` or `codes` first.
    pub outputs: Vec<OutputTensor>,
}

/// A request, as a task for any backend.
pub struct Compute<'a>(pub &'a Request<'a>);

impl HarnessTask for Compute<'_> {
    type Output = Result<Computed, Failure>;

    fn run<H: Harness>(self, harness: &H) -> Self::Output {
        let request = self.0;
        // Of a y with another dtype, x is the residual stream.
        let dtypes =
            DTypes { activation: request.y_dtype, weight: request.weight_dtype(), residual: request.residual_dtype() };
        if request.is_cast() {
            dtypes.check_cast()?
        } else {
            dtypes.check()?
        }
        let outputs = On { harness, request, dtypes }.compute()?;
        Ok(Computed { device: harness.device(), outputs })
    }
}

/// A tensor on a device, of any element type.
trait Buffer<B: NormBackend> {
    fn view(&self) -> AnyIn<'_, B>;
    fn view_mut(&mut self) -> AnyOut<'_, B>;
    /// Copies the elements from the device.
    fn download(&self, name: &'static str, shape: &[usize]) -> Result<OutputTensor, Failure>;
}

type AnyBuffer<'h, H> = Box<dyn Buffer<<H as Harness>::Backend> + 'h>;

/// A tensor with one element type.
struct Elements<'h, H: Harness, E: AnyElement> {
    harness: &'h H,
    buffer: H::Buffer<E>,
    len: usize,
}

impl<H: Harness, E: AnyElement> Buffer<H::Backend> for Elements<'_, H, E> {
    fn view(&self) -> AnyIn<'_, H::Backend> {
        E::any_in(self.harness.view(&self.buffer, 0..self.len))
    }

    fn view_mut(&mut self) -> AnyOut<'_, H::Backend> {
        E::any_out(self.harness.view_mut(&mut self.buffer, 0..self.len))
    }

    fn download(&self, name: &'static str, shape: &[usize]) -> Result<OutputTensor, Failure> {
        memory::require(name, shape.iter().product::<usize>() * size_of::<E>())?;
        Ok(OutputTensor::new(name, shape, self.harness.download(&self.buffer)?))
    }
}

/// The request on a device.
struct On<'h, H> {
    harness: &'h H,
    request: &'h Request<'h>,
    dtypes: DTypes,
}

/// The results of forward that backward needs, on the device.
struct Saved<'h, H: Harness> {
    residual_out: Option<AnyBuffer<'h, H>>,
    mean: Option<AnyBuffer<'h, H>>,
    rstd: AnyBuffer<'h, H>,
}

impl<H: Harness> Saved<'_, H> {
    /// Copies all of them from the device.
    fn download(&self, request: &Request<'_>) -> Result<Vec<OutputTensor>, Failure> {
        let (shape, x) = (request.statistics_shape(), &request.x);
        let mut outputs = vec![self.rstd.download("rstd", &shape)?];
        if let Some(mean) = &self.mean {
            outputs.push(mean.download("mean", &shape)?);
        }
        if let Some(residual_out) = &self.residual_out {
            outputs.push(residual_out.download("residual_out", &x.shape)?);
        }
        Ok(outputs)
    }
}

impl<'h, H: Harness> On<'h, H> {
    fn compute(&self) -> Result<Vec<OutputTensor>, Failure> {
        let weight = self.upload(self.request.weight.as_ref())?;
        let weight = weight.as_deref();
        let (mut outputs, saved) = match self.request.quantize {
            None => self.forward(weight)?,
            Some(quantize) => self.quantized(quantize, weight)?,
        };
        if let Some(dy) = &self.request.dy {
            outputs.extend(self.backward(dy, weight, saved)?);
        }
        Ok(outputs)
    }

    fn forward(
        &self,
        weight: Option<&(dyn Buffer<H::Backend> + 'h)>,
    ) -> Result<(Vec<OutputTensor>, Saved<'h, H>), Failure> {
        let Request { spec, x: input, .. } = self.request;
        let x = self.load(input)?;
        let bias = self.upload(self.request.bias.as_ref())?;
        let residual = self.upload(self.request.residual.as_ref())?;
        let gate = self.upload(self.request.gate.as_ref())?;
        let mut y = self.zeros("y", self.dtypes.activation, spec.rows * spec.cols)?;
        let mut saved = self.saved(residual.is_some())?;

        let mut args = match self.request.is_cast() {
            true => AnyForward::<H::Backend>::cast(x.view(), y.view_mut()),
            false => AnyForward::<H::Backend>::new(x.view(), y.view_mut()),
        };
        args.rstd = Some(saved.rstd.view_mut());
        args.dtypes = self.dtypes;
        args.weight = weight.map(Buffer::view);
        args.bias = bias.as_ref().map(|bias| bias.view());
        args.mean = saved.mean.as_mut().map(|mean| mean.view_mut());
        args.residual = residual.as_ref().map(|residual| Source::Read(residual.view().into())).or(args.residual);
        args.residual_out = saved.residual_out.as_mut().map(|residual_out| residual_out.view_mut().into());
        args.gate = gate.as_ref().map(|gate| gate.view().into());
        self.harness.backend().launch(AnyCall::Forward(Checked::forward(*spec, args)?))?;

        let mut outputs = vec![y.download("y", &input.shape)?];
        outputs.extend(saved.download(self.request)?);
        Ok((outputs, saved))
    }

    /// As [`forward`](Self::forward), with a quantized result.
    fn quantized(
        &self,
        quantize: Quantize,
        weight: Option<&(dyn Buffer<H::Backend> + 'h)>,
    ) -> Result<(Vec<OutputTensor>, Saved<'h, H>), Failure> {
        let Request { spec, batch_shape, x: input, .. } = self.request;
        let Quantize { spec: quant, is_transposed, is_columnwise, keeps_y, .. } = quantize;
        let (rows, cols, all) = (spec.rows, spec.cols, spec.rows * spec.cols);
        let (is_given, along, codes_type) =
            (quant.scale == ScaleKind::Given, quant.columnwise(), Storage::Code(quant.codes));
        // If the number of scales overflows, the call below returns an error that names the rule.
        let scales =
            |name, of_type, len: Option<usize>| self.zeros(name, Storage::of_scales(of_type), len.unwrap_or(0));
        let x = self.load(input)?;
        let bias = self.upload(self.request.bias.as_ref())?;
        let residual = self.upload(self.request.residual.as_ref())?;
        let gate = self.upload(self.request.gate.as_ref())?;
        let scale = self.upload(self.request.scale.as_ref())?;
        let mut codes = self.zeros("codes", codes_type, all)?;
        let mut codes_t = is_transposed.then(|| self.zeros("codes_t", codes_type, all)).transpose()?;
        let found = || scales("scales", quant.scale_type(), quant.scales_len(rows, cols));
        let mut found = (!is_given).then(found).transpose()?;
        let mut codes_along = is_columnwise.then(|| self.zeros("codes_columnwise", codes_type, all)).transpose()?;
        let found_along = || scales("scales_columnwise", along.scale_type(), along.scales_len(cols, rows));
        let mut found_along = is_columnwise.then(found_along).transpose()?;
        let mut amax = is_given.then(|| self.zeros("amax", DType::F32, 1)).transpose()?;
        let mut y = keeps_y.then(|| self.zeros("y", self.dtypes.activation, all)).transpose()?;
        let mut saved = self.saved(residual.is_some())?;

        let mut args = AnyQuantizedForward::<H::Backend>::new(quant, x.view(), codes.view_mut());
        args.dtypes = self.dtypes;
        args.rstd = Some(saved.rstd.view_mut());
        args.weight = weight.map(Buffer::view);
        args.bias = bias.as_ref().map(|bias| bias.view());
        args.mean = saved.mean.as_mut().map(|mean| mean.view_mut());
        args.scale = scale.as_ref().map(|scale| scale.view());
        args.amax = amax.as_mut().map(|amax| amax.view_mut());
        args.scales = found.as_mut().map(|scales| of_type(quant.scale_type(), scales.view_mut()));
        args.codes_t = codes_t.as_mut().map(|codes| codes.view_mut().into());
        args.codes_columnwise = codes_along.as_mut().map(|codes| codes.view_mut().into());
        args.scales_columnwise = found_along.as_mut().map(|scales| of_type(along.scale_type(), scales.view_mut()));
        args.y = y.as_mut().map(|y| y.view_mut().into());
        args.residual = residual.as_ref().map(|residual| residual.view().into());
        args.residual_out = saved.residual_out.as_mut().map(|residual_out| residual_out.view_mut().into());
        args.gate = gate.as_ref().map(|gate| gate.view().into());
        self.harness.backend().launch(AnyCall::QuantizedForward(Checked::quantized_forward(*spec, args)?))?;

        let scales_shape = quantize.scales_shape(batch_shape, rows, cols);
        let along_shape = quantize.scales_columnwise_shape(rows, cols);
        let mut outputs = vec![codes.download("codes", &input.shape)?];
        for (name, shape, buffer) in [
            ("codes_t", &[cols, rows][..], codes_t),
            ("scales", &scales_shape, found),
            ("codes_columnwise", &[cols, rows], codes_along),
            ("scales_columnwise", &along_shape, found_along),
            ("amax", &[1], amax),
            ("y", &input.shape, y),
        ] {
            outputs.extend(buffer.map(|buffer| buffer.download(name, shape)).transpose()?);
        }
        outputs.extend(saved.download(self.request)?);
        Ok((outputs, saved))
    }

    fn backward(
        &self,
        dy: &Tensor<'_>,
        weight: Option<&(dyn Buffer<H::Backend> + 'h)>,
        saved: Saved<'h, H>,
    ) -> Result<Vec<OutputTensor>, Failure> {
        let Request { spec, norm_shape, x, .. } = self.request;
        let dy = self.load(dy)?;
        let dresidual_out = self.upload(self.request.dresidual_out.as_ref())?;
        let gate = self.upload(self.request.gate.as_ref())?;
        // Only a gate after the norm makes backward need the bias.
        let is_after = matches!(spec.gate, Some(Gate { slot: Slot::After, .. }));
        let bias = self.upload(self.request.bias.as_ref().filter(|_| is_after))?;
        let mut dx = self.zeros("dx", x.dtype, spec.rows * spec.cols)?;
        let dgate = || self.zeros("dgate", self.dtypes.activation, spec.rows * spec.cols);
        let mut dgate = gate.is_some().then(dgate).transpose()?;
        let gradient = |name| self.zeros(name, self.dtypes.weight, spec.cols);
        let mut dweight = weight.is_some().then(|| gradient("dweight")).transpose()?;
        let mut dbias = self.request.bias.is_some().then(|| gradient("dbias")).transpose()?;
        let normalized = match saved.residual_out {
            Some(residual_out) => residual_out,
            None => self.load(x)?,
        };

        let rstd = saved.rstd.view();
        let (of_dy, of_x) = (dy.view(), normalized.view());
        let mut args = match self.request.is_cast() {
            true => AnyBackward::<H::Backend>::cast(of_dy, of_x, rstd, dx.view_mut()),
            false => AnyBackward::<H::Backend>::new(of_dy, of_x, rstd, dx.view_mut()),
        };
        args.dtypes = self.dtypes;
        args.weight = weight.map(Buffer::view);
        args.mean = saved.mean.as_ref().map(|mean| mean.view());
        args.dweight = dweight.as_mut().map(|dweight| dweight.view_mut());
        args.dbias = dbias.as_mut().map(|dbias| dbias.view_mut());
        args.bias = bias.as_ref().map(|bias| bias.view());
        args.gate = gate.as_ref().map(|gate| gate.view().into());
        args.dgate = dgate.as_mut().map(|dgate| dgate.view_mut().into());
        args.dresidual_out = dresidual_out.as_ref().map(|dresidual_out| dresidual_out.view().into());
        let call = Checked::backward(self.harness.backend(), *spec, args)?;
        let workspace = self.harness.backend().workspace_len(call.problem());
        memory::require("the sum over the rows", workspace.saturating_mul(DType::F32.size()))?;
        self.harness.backend().launch(AnyCall::Backward(call))?;

        let mut outputs = vec![dx.download("dx", &x.shape)?];
        for (name, gradient, shape) in
            [("dgate", dgate, &x.shape), ("dweight", dweight, norm_shape), ("dbias", dbias, norm_shape)]
        {
            outputs.extend(gradient.map(|gradient| gradient.download(name, shape)).transpose()?);
        }
        Ok(outputs)
    }

    /// Buffers for the results of forward that backward needs.
    fn saved(&self, has_residual: bool) -> Result<Saved<'h, H>, Failure> {
        let spec = &self.request.spec;
        let residual_out = || self.zeros("residual_out", self.dtypes.residual, spec.rows * spec.cols);
        let statistics = spec.rows * spec.groups;
        Ok(Saved {
            residual_out: has_residual.then(residual_out).transpose()?,
            mean: (spec.norm == Norm::Layer).then(|| self.zeros("mean", DType::F32, statistics)).transpose()?,
            rstd: self.zeros("rstd", DType::F32, statistics)?,
        })
    }

    fn upload(&self, tensor: Option<&Tensor<'_>>) -> Result<Option<AnyBuffer<'h, H>>, Failure> {
        tensor.map(|tensor| self.load(tensor)).transpose()
    }

    fn load(&self, tensor: &Tensor<'_>) -> Result<AnyBuffer<'h, H>, Failure> {
        match tensor.dtype {
            DType::F32 => self.store(tensor.name, &tensor.elements::<f32>()?),
            DType::F16 => self.store(tensor.name, &tensor.elements::<f16>()?),
            DType::Bf16 => self.store(tensor.name, &tensor.elements::<bf16>()?),
        }
    }

    /// A zeroed buffer for an output.
    fn zeros(&self, name: &str, storage: impl Into<Storage>, len: usize) -> Result<AnyBuffer<'h, H>, Failure> {
        match storage.into() {
            Storage::Float(DType::F32) => self.zeros_of::<f32>(name, len),
            Storage::Float(DType::F16) => self.zeros_of::<f16>(name, len),
            Storage::Float(DType::Bf16) => self.zeros_of::<bf16>(name, len),
            Storage::Code(CodeType::E4m3) => self.zeros_of::<F8E4M3>(name, len),
            Storage::Code(CodeType::E5m2) => self.zeros_of::<F8E5M2>(name, len),
            Storage::Code(CodeType::Int8) => self.zeros_of::<i8>(name, len),
            Storage::E8m0 => self.zeros_of::<u8>(name, len),
        }
    }

    fn zeros_of<E: AnyElement>(&self, name: &str, len: usize) -> Result<AnyBuffer<'h, H>, Failure> {
        self.store(name, &memory::filled(name, E::from_bits(0), len)?)
    }

    /// Copies elements to the device.
    fn store<E: AnyElement>(&self, name: &str, elements: &[E]) -> Result<AnyBuffer<'h, H>, Failure> {
        memory::require(name, size_of_val(elements))?;
        let buffer = self.harness.upload(elements)?;
        Ok(Box::new(Elements { harness: self.harness, buffer, len: elements.len() }))
    }
}

fn of_type<V>(scale_type: ScaleType, view: V) -> Scales<V, V> {
    match scale_type {
        ScaleType::F32 => Scales::F32(view),
        ScaleType::E8m0 => Scales::E8m0(view),
    }
}
