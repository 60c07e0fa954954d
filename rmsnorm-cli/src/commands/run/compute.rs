//! The computation of `rmsnorm run`, on any backend: upload, forward, backward with the statistics of that forward,
//! download.

use rmsnorm_core::conformance::Harness;
use rmsnorm_core::quant::{CodeType, ScaleKind, ScaleType};
use rmsnorm_core::{
    Backward, Checked, Code, DType, DTypes, Element, F8E4M3, F8E5M2, Forward, HarnessTask, Norm, NormBackend,
    QuantizedForward, Stored, WithDTypes,
};

use super::quantize::Quantize;
use super::request::Request;
use crate::failure::Failure;
use crate::memory;
use crate::tensors::{OutputTensor, Tensor};

/// What the device calls itself, and what it computed.
#[derive(Debug)]
pub struct Computed {
    /// The device, in words.
    pub device: String,
    /// y, then the others in the order of their computation.
    pub outputs: Vec<OutputTensor>,
}

/// The request as work for any backend.
pub struct Compute<'a>(pub &'a Request<'a>);

impl HarnessTask for Compute<'_> {
    type Output = Result<Computed, Failure>;

    fn run<H: Harness>(self, harness: &H) -> Self::Output {
        let request = self.0;
        let dtypes =
            DTypes { activation: request.x.dtype, weight: request.weight_dtype(), residual: request.residual_dtype() };
        let outputs = dtypes.dispatch(On { harness, request })??;
        Ok(Computed { device: harness.device(), outputs })
    }
}

/// The request on a device.
struct On<'a, H> {
    harness: &'a H,
    request: &'a Request<'a>,
}

impl<H: Harness> WithDTypes for On<'_, H> {
    type Output = Result<Vec<OutputTensor>, Failure>;

    fn call<T: Element, W: Element, R: Element>(self) -> Self::Output {
        compute::<H, T, W, R>(self.harness, self.request)
    }
}

fn compute<H: Harness, T: Element, W: Element, R: Element>(
    harness: &H,
    request: &Request<'_>,
) -> Result<Vec<OutputTensor>, Failure> {
    let weight = upload(harness, request.weight.as_ref())?;
    let weight = weight.as_ref();
    let (mut outputs, saved) = match request.quantize {
        None => forward::<H, T, W, R>(harness, request, weight)?,
        Some(quantize) => match quantize.spec.codes {
            CodeType::E4m3 => quantized::<H, T, F8E4M3, W, R>(harness, request, quantize, weight)?,
            CodeType::E5m2 => quantized::<H, T, F8E5M2, W, R>(harness, request, quantize, weight)?,
            CodeType::Int8 => quantized::<H, T, i8, W, R>(harness, request, quantize, weight)?,
        },
    };
    if let Some(dy) = &request.dy {
        outputs.extend(backward::<H, T, W, R>(harness, request, dy, weight, saved)?);
    }
    Ok(outputs)
}

/// What backward needs from forward, on the device.
struct Saved<H: Harness, R: Element> {
    residual_out: Option<H::Buffer<R>>,
    mean: Option<H::Buffer<f32>>,
    rstd: H::Buffer<f32>,
}

impl<H: Harness, R: Element> Saved<H, R> {
    /// All of it, for the file.
    fn download(&self, harness: &H, request: &Request<'_>) -> Result<Vec<OutputTensor>, Failure> {
        let Request { batch_shape, x, .. } = request;
        let mut outputs = vec![download(harness, "rstd", batch_shape, &self.rstd)?];
        if let Some(mean) = &self.mean {
            outputs.push(download(harness, "mean", batch_shape, mean)?);
        }
        if let Some(residual_out) = &self.residual_out {
            outputs.push(download(harness, "residual_out", &x.shape, residual_out)?);
        }
        Ok(outputs)
    }
}

fn forward<H: Harness, T: Element, W: Element, R: Element>(
    harness: &H,
    request: &Request<'_>,
    weight: Option<&H::Buffer<W>>,
) -> Result<(Vec<OutputTensor>, Saved<H, R>), Failure> {
    let Request { spec, x: input, .. } = request;
    let (rows, cols, all) = (spec.rows, spec.cols, spec.rows * spec.cols);
    let x = load::<H, T>(harness, input)?;
    let bias = upload::<H, W>(harness, request.bias.as_ref())?;
    let residual = upload::<H, R>(harness, request.residual.as_ref())?;
    let mut y = zeros::<H, T>(harness, "y", all)?;
    let mut residual_out = residual.is_some().then(|| zeros::<H, R>(harness, "residual_out", all)).transpose()?;
    let mut mean = (spec.norm == Norm::Layer).then(|| zeros::<H, f32>(harness, "mean", rows)).transpose()?;
    let mut rstd = zeros::<H, f32>(harness, "rstd", rows)?;

    let args = Forward::<H::Backend, T>::new(harness.view(&x, 0..all), harness.view_mut(&mut y, 0..all));
    let mut args = args.weight_dtype::<W>().residual_dtype::<R>().rstd(harness.view_mut(&mut rstd, 0..rows));
    args.weight = weight.map(|weight| harness.view(weight, 0..cols));
    args.bias = bias.as_ref().map(|bias| harness.view(bias, 0..cols));
    args.mean = mean.as_mut().map(|mean| harness.view_mut(mean, 0..rows));
    if let Some(residual) = &residual {
        args = args.residual(harness.view(residual, 0..all));
    }
    if let Some(residual_out) = &mut residual_out {
        args = args.residual_out(harness.view_mut(residual_out, 0..all));
    }
    harness.backend().forward(spec, args)?;

    let mut outputs = vec![download(harness, "y", &input.shape, &y)?];
    let saved = Saved { residual_out, mean, rstd };
    outputs.extend(saved.download(harness, request)?);
    Ok((outputs, saved))
}

/// As [`forward`], to codes.
fn quantized<H: Harness, T: Element, C: Code, W: Element, R: Element>(
    harness: &H,
    request: &Request<'_>,
    quantize: Quantize,
    weight: Option<&H::Buffer<W>>,
) -> Result<(Vec<OutputTensor>, Saved<H, R>), Failure> {
    let Request { spec, batch_shape, x: input, .. } = request;
    let Quantize { spec: quant, is_transposed, is_columnwise, keeps_y, .. } = quantize;
    let (rows, cols, all) = (spec.rows, spec.cols, spec.rows * spec.cols);
    let (is_given, are_bytes) = (quant.scale == ScaleKind::Given, quant.scale_type() == ScaleType::E8m0);
    // A spec whose scales cannot be counted is refused by the call, which names the rule.
    let scales_len = if is_given { 0 } else { quant.scales_len(rows, cols).unwrap_or(0) };
    let x = load::<H, T>(harness, input)?;
    let bias = upload::<H, W>(harness, request.bias.as_ref())?;
    let residual = upload::<H, R>(harness, request.residual.as_ref())?;
    let scale = upload::<H, f32>(harness, request.scale.as_ref())?;
    let mut codes = zeros::<H, C>(harness, "codes", all)?;
    let mut codes_t = is_transposed.then(|| zeros::<H, C>(harness, "codes_t", all)).transpose()?;
    let floats = (!is_given && !are_bytes).then(|| zeros::<H, f32>(harness, "scales", scales_len));
    let mut floats = floats.transpose()?;
    let mut bytes = (!is_given && are_bytes).then(|| zeros::<H, u8>(harness, "scales", scales_len)).transpose()?;
    let along = quant.columnwise();
    let (along_len, along_bytes) = (along.scales_len(cols, rows).unwrap_or(0), along.scale_type() == ScaleType::E8m0);
    let mut codes_along = is_columnwise.then(|| zeros::<H, C>(harness, "codes_columnwise", all)).transpose()?;
    let floats_along =
        (is_columnwise && !along_bytes).then(|| zeros::<H, f32>(harness, "scales_columnwise", along_len));
    let mut floats_along = floats_along.transpose()?;
    let bytes_along = (is_columnwise && along_bytes).then(|| zeros::<H, u8>(harness, "scales_columnwise", along_len));
    let mut bytes_along = bytes_along.transpose()?;
    let mut amax = is_given.then(|| zeros::<H, f32>(harness, "amax", 1)).transpose()?;
    let mut y = keeps_y.then(|| zeros::<H, T>(harness, "y", all)).transpose()?;
    let mut residual_out = residual.is_some().then(|| zeros::<H, R>(harness, "residual_out", all)).transpose()?;
    let mut mean = (spec.norm == Norm::Layer).then(|| zeros::<H, f32>(harness, "mean", rows)).transpose()?;
    let mut rstd = zeros::<H, f32>(harness, "rstd", rows)?;

    let (from, to) = (harness.view(&x, 0..all), harness.view_mut(&mut codes, 0..all));
    let args = QuantizedForward::<H::Backend, T, C>::new(quant, from, to);
    let mut args = args.weight_dtype::<W>().residual_dtype::<R>().rstd(harness.view_mut(&mut rstd, 0..rows));
    args.weight = weight.map(|weight| harness.view(weight, 0..cols));
    args.bias = bias.as_ref().map(|bias| harness.view(bias, 0..cols));
    args.mean = mean.as_mut().map(|mean| harness.view_mut(mean, 0..rows));
    args.scale = scale.as_ref().map(|scale| harness.view(scale, 0..1));
    args.amax = amax.as_mut().map(|amax| harness.view_mut(amax, 0..1));
    if let Some(scales) = &mut floats {
        args = args.scales(harness.view_mut(scales, 0..scales_len));
    }
    if let Some(scales) = &mut bytes {
        args = args.scales_e8m0(harness.view_mut(scales, 0..scales_len));
    }
    if let Some(codes_t) = &mut codes_t {
        args = args.codes_t(harness.view_mut(codes_t, 0..all));
    }
    if let Some(codes) = &mut codes_along {
        args = args.codes_columnwise(harness.view_mut(codes, 0..all));
    }
    if let Some(scales) = &mut floats_along {
        args = args.scales_columnwise(harness.view_mut(scales, 0..along_len));
    }
    if let Some(scales) = &mut bytes_along {
        args = args.scales_columnwise_e8m0(harness.view_mut(scales, 0..along_len));
    }
    if let Some(y) = &mut y {
        args = args.y(harness.view_mut(y, 0..all));
    }
    if let Some(residual) = &residual {
        args = args.residual(harness.view(residual, 0..all));
    }
    if let Some(residual_out) = &mut residual_out {
        args = args.residual_out(harness.view_mut(residual_out, 0..all));
    }
    harness.backend().quantized_forward(spec, args)?;

    let mut outputs = vec![download(harness, "codes", &input.shape, &codes)?];
    if let Some(codes_t) = &codes_t {
        outputs.push(download(harness, "codes_t", &[cols, rows], codes_t)?);
    }
    let shape = quantize.scales_shape(batch_shape, rows, cols);
    if let Some(scales) = &floats {
        outputs.push(download(harness, "scales", &shape, scales)?);
    }
    if let Some(scales) = &bytes {
        outputs.push(download(harness, "scales", &shape, scales)?);
    }
    if let Some(codes) = &codes_along {
        outputs.push(download(harness, "codes_columnwise", &[cols, rows], codes)?);
    }
    let shape = quantize.scales_columnwise_shape(rows, cols);
    if let Some(scales) = &floats_along {
        outputs.push(download(harness, "scales_columnwise", &shape, scales)?);
    }
    if let Some(scales) = &bytes_along {
        outputs.push(download(harness, "scales_columnwise", &shape, scales)?);
    }
    if let Some(amax) = &amax {
        outputs.push(download(harness, "amax", &[1], amax)?);
    }
    if let Some(y) = &y {
        outputs.push(download(harness, "y", &input.shape, y)?);
    }
    let saved = Saved { residual_out, mean, rstd };
    outputs.extend(saved.download(harness, request)?);
    Ok((outputs, saved))
}

fn backward<H: Harness, T: Element, W: Element, R: Element>(
    harness: &H,
    request: &Request<'_>,
    dy: &Tensor<'_>,
    weight: Option<&H::Buffer<W>>,
    saved: Saved<H, R>,
) -> Result<Vec<OutputTensor>, Failure> {
    let Request { spec, norm_shape, x, .. } = request;
    let (rows, cols, all) = (spec.rows, spec.cols, spec.rows * spec.cols);
    let dy = load::<H, T>(harness, dy)?;
    let dresidual_out = upload::<H, R>(harness, request.dresidual_out.as_ref())?;
    let mut dx = zeros::<H, T>(harness, "dx", all)?;
    let mut dweight = weight.is_some().then(|| zeros::<H, W>(harness, "dweight", cols)).transpose()?;
    let mut dbias = request.bias.is_some().then(|| zeros::<H, W>(harness, "dbias", cols)).transpose()?;
    let normalized = match saved.residual_out {
        Some(residual_out) => residual_out,
        // Without a residual `R` is the dtype of x, though the compiler cannot know.
        None => load(harness, x)?,
    };

    let (dy, normalized) = (harness.view(&dy, 0..all), harness.view(&normalized, 0..all));
    let mut args = Backward::<H::Backend, T, W, R>::mixed(
        dy,
        normalized,
        harness.view(&saved.rstd, 0..rows),
        harness.view_mut(&mut dx, 0..all),
    );
    args.weight = weight.map(|weight| harness.view(weight, 0..cols));
    args.mean = saved.mean.as_ref().map(|mean| harness.view(mean, 0..rows));
    args.dweight = dweight.as_mut().map(|dweight| harness.view_mut(dweight, 0..cols));
    args.dbias = dbias.as_mut().map(|dbias| harness.view_mut(dbias, 0..cols));
    if let Some(dresidual_out) = &dresidual_out {
        args = args.dresidual_out(harness.view(dresidual_out, 0..all));
    }
    let call = Checked::backward(harness.backend(), *spec, args)?;
    let workspace = harness.backend().workspace_len(call.problem());
    memory::require("the sum over the rows", workspace.saturating_mul(DType::F32.size()))?;
    harness.backend().launch_backward(call)?;

    let mut outputs = vec![download(harness, "dx", &x.shape, &dx)?];
    if let Some(dweight) = &dweight {
        outputs.push(download(harness, "dweight", norm_shape, dweight)?);
    }
    if let Some(dbias) = &dbias {
        outputs.push(download(harness, "dbias", norm_shape, dbias)?);
    }
    Ok(outputs)
}

fn upload<H: Harness, E: Element>(harness: &H, tensor: Option<&Tensor<'_>>) -> Result<Option<H::Buffer<E>>, Failure> {
    tensor.map(|tensor| load(harness, tensor)).transpose()
}

fn load<H: Harness, E: Element>(harness: &H, tensor: &Tensor<'_>) -> Result<H::Buffer<E>, Failure> {
    store(harness, tensor.name, &tensor.elements::<E>()?)
}

/// Room for an output.
fn zeros<H: Harness, E: Stored>(harness: &H, name: &str, len: usize) -> Result<H::Buffer<E>, Failure> {
    store(harness, name, &memory::filled(name, E::from_bits(0), len)?)
}

/// A copy on the device, which may be this machine.
fn store<H: Harness, E: Stored>(harness: &H, name: &str, elements: &[E]) -> Result<H::Buffer<E>, Failure> {
    memory::require(name, size_of_val(elements))?;
    Ok(harness.upload(elements)?)
}

fn download<H: Harness, E: Stored>(
    harness: &H,
    name: &'static str,
    shape: &[usize],
    buffer: &H::Buffer<E>,
) -> Result<OutputTensor, Failure> {
    memory::require(name, shape.iter().product::<usize>() * size_of::<E>())?;
    Ok(OutputTensor::new(name, shape, harness.download(buffer)?))
}
