//! y of x, or of x + residual; and residual + norm(x), with the next norm of that sum.

use burn::backend::wgpu::{CubeBackend, CubeTensor};
use rmsnorm_core::wgpu::WgpuBackend;
use rmsnorm_core::{AnyCall, AnyForward, Checked, Error, NormBackend, Source, Tensor};

use super::buffers::Lent;
use super::shared_backend;
use crate::kernels::{ForwardCall, Forwarded, Maybe};

pub(super) fn forward(call: ForwardCall<CubeBackend>) -> Result<Forwarded<CubeBackend>, Error> {
    let (norms, dtypes) = (shared_backend(&call.x.device, &call.x.client)?, call.dtypes()?);
    let is_cast = call.is_cast();
    let ForwardCall { spec, x, residual, gate, weight, bias, next_weight, next_bias, wanted } = call;
    let read = |tensor: Option<CubeTensor>| tensor.map(Lent::read).transpose();
    let (x, residual, weight) = (Lent::read(x)?, read(residual)?, Lent::read(weight)?);
    let (gate, bias, next_weight, next_bias) = (read(gate)?, read(bias)?, read(next_weight)?, read(next_bias)?);
    let matrix = |name, dtype| wanted.has(name).then(|| x.new_matrix(dtype)).transpose();
    let statistic = |name| wanted.has(name).then(|| x.new_statistic(spec.groups)).transpose();
    let y = matrix(Tensor::Y, dtypes.activation)?;
    let residual_out = matrix(Tensor::ResidualOut, dtypes.residual)?;
    let (mean, rstd) = (statistic(Tensor::Mean)?, statistic(Tensor::Rstd)?);
    let (next_mean, next_rstd) = (statistic(Tensor::NextMean)?, statistic(Tensor::NextRstd)?);

    let mut args = AnyForward::<WgpuBackend>::added_to_residual(x.input_rows());
    args.dtypes = dtypes;
    args.weight = Some(weight.input());
    args.bias = bias.as_ref().map(Lent::input);
    args.residual = match is_cast {
        true => args.x.take(),
        false => residual.as_ref().map(|residual| Source::Read(residual.input_rows())),
    };
    args.gate = gate.as_ref().map(Lent::input_rows);
    args.next_weight = next_weight.as_ref().map(Lent::input);
    args.next_bias = next_bias.as_ref().map(Lent::input);
    args.y = y.as_ref().map(Lent::output_rows);
    args.residual_out = residual_out.as_ref().map(Lent::output_rows);
    args.mean = mean.as_ref().map(Lent::output);
    args.rstd = rstd.as_ref().map(Lent::output);
    args.next_mean = next_mean.as_ref().map(Lent::output);
    args.next_rstd = next_rstd.as_ref().map(Lent::output);
    norms.launch(AnyCall::Forward(Checked::forward(spec.sized(&x.rows), args)?))?;

    let made = [y, residual_out, mean, rstd, next_mean, next_rstd];
    let [y, residual_out, mean, rstd, next_mean, next_rstd] = made.map(|made| Maybe::of(made.map(Lent::into_tensor)));
    Ok(Forwarded { y, residual_out, mean, rstd, next_mean, next_rstd })
}
