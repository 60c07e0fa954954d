//! The gradients of a norm.

use burn::backend::wgpu::CubeBackend;
use rmsnorm_core::wgpu::WgpuBackend;
use rmsnorm_core::{AnyBackward, AnyCall, Checked, Error, NormBackend, Tensor};

use super::buffers::Lent;
use super::shared_backend;
use crate::kernels::{BackwardCall, Gradients, Maybe, Saved};

pub(super) fn backward(call: BackwardCall<CubeBackend>) -> Result<Gradients<CubeBackend>, Error> {
    let (norms, dtypes) = (shared_backend(&call.x.device, &call.x.client)?, call.dtypes()?);
    let BackwardCall { spec, dy, x, weight, rstd, saved: Saved { mean, gate, bias }, wanted } = call;
    let (dy, x, weight) = (Lent::read(dy)?, Lent::read(x)?, Lent::read(weight)?);
    let [mean, gate, bias] = [mean, gate, bias].map(|saved| saved.into_option().map(Lent::read).transpose());
    let (mean, gate, bias, rstd) = (mean?, gate?, bias?, Lent::read(rstd)?);
    // In the dtype of x: the gradient of an f32 stream must not be rounded to the activations'.
    let dx = x.new_matrix(dtypes.residual)?;
    let parameter = |name| wanted.has(name).then(|| weight.new_matrix(dtypes.weight)).transpose();
    let (dweight, dbias) = (parameter(Tensor::Dweight)?, parameter(Tensor::Dbias)?);
    let dgate = wanted.has(Tensor::Dgate).then(|| x.new_matrix(dtypes.activation)).transpose()?;

    let (dy, normalized, saved) = (dy.input_rows(), x.input_rows(), rstd.input());
    let mut args = match dtypes.activation == dtypes.residual {
        true => AnyBackward::<WgpuBackend>::new(dy, normalized, saved, dx.output_rows()),
        false => AnyBackward::cast(dy, normalized, saved, dx.output_rows()),
    };
    args.dtypes = dtypes;
    args.weight = Some(weight.input());
    args.mean = mean.as_ref().map(Lent::input);
    args.gate = gate.as_ref().map(Lent::input_rows);
    args.bias = bias.as_ref().map(Lent::input);
    args.dweight = dweight.as_ref().map(Lent::output);
    args.dbias = dbias.as_ref().map(Lent::output);
    args.dgate = dgate.as_ref().map(Lent::output_rows);
    norms.launch(AnyCall::Backward(Checked::backward(&norms, spec.sized(&x.rows), args)?))?;

    let [dweight, dbias, dgate] = [dweight, dbias, dgate].map(|made| Maybe::of(made.map(Lent::into_tensor)));
    Ok(Gradients { dx: dx.into_tensor(), dweight, dbias, dgate })
}
