//! y of x, or of x + residual; and residual + norm(x), with the next norm of that sum.

use burn::backend::Flex;
use burn::tensor::Shape;
use rmsnorm_core::cpu::{CpuBackend, ForwardInputs};
use rmsnorm_core::{
    AnyCall, AnyForward, AnyOut, Checked, Error, NormBackend, ResidualPlacement, RowLayout, Rows, Source, Tensor,
    with_types,
};

use super::rows::{Owned, Regular, wrap};
use crate::kernels::{ForwardCall, Forwarded, Maybe};

pub(super) fn forward(call: ForwardCall<Flex>) -> Result<Forwarded<Flex>, Error> {
    let is_owned = call.residual.as_ref().map(Owned::is);
    match call.spec.residual_placement {
        ResidualPlacement::Before if !call.is_cast() && Owned::is(&call.x) && is_owned != Some(false) => {
            overwrite(call)
        }
        // With a next norm, y would have to be zeroed first, which is unnecessary only if all
        // results are new.
        ResidualPlacement::After if call.next_weight.is_none() && is_owned == Some(true) => overwrite(call),
        ResidualPlacement::Before | ResidualPlacement::After => forward_new(call),
    }
}

/// Overwrites x with y, and the residual with the sum; with a residual after the norm, x is only
/// read.
fn overwrite(call: ForwardCall<Flex>) -> Result<Forwarded<Flex>, Error> {
    let dtypes = call.dtypes()?;
    let ForwardCall { spec, x, residual, gate, weight, bias, wanted, .. } = call;
    let Some(rows) = RowLayout::dense(x.layout().shape()) else {
        return Err(Error::Unsupported { rule: "x has no dimension to normalize over".to_owned() });
    };
    let (weight, bias) = (Regular::new(weight)?, bias.map(Regular::new).transpose()?);
    let gate = gate.map(Regular::new).transpose()?;
    let statistics = rows.rows * spec.groups;
    let mut residual = residual.map(Owned::new);
    let statistic = |name: Tensor| wanted.has(name).then(|| vec![0f32; statistics]);
    let (mut mean, mut rstd) = (statistic(Tensor::Mean), statistic(Tensor::Rstd));
    let (mut overwritten, mut read) = (None, None);
    let mut args = match spec.residual_placement {
        ResidualPlacement::Before => {
            AnyForward::<CpuBackend>::in_place(Owned::elements(overwritten.insert(Owned::new(x)))?)
        }
        ResidualPlacement::After => AnyForward::added_to_residual(read.insert(Regular::new(x)?).view()?),
    };
    args.dtypes = dtypes;
    args.weight = Some(weight.view()?.view);
    args.bias = bias.as_ref().map(Regular::view).transpose()?.map(|bias| bias.view);
    args.gate = gate.as_ref().map(Regular::view).transpose()?;
    let over = residual.as_mut().map(Owned::elements).transpose()?;
    args.residual = over.map(|residual| Source::Overwrite(Rows::dense(residual)));
    args.mean = mean.as_deref_mut().map(AnyOut::F32);
    args.rstd = rstd.as_deref_mut().map(AnyOut::F32);
    CpuBackend::new().launch(AnyCall::Forward(Checked::forward(spec.sized(&rows), args)?))?;
    let statistic = |values: Option<Vec<f32>>| Maybe::of(values.map(|values| wrap(values, Shape::from([statistics]))));
    let made = Forwarded::of(overwritten.map(Owned::into_tensor), residual.map(Owned::into_tensor));
    Ok(Forwarded { mean: statistic(mean), rstd: statistic(rstd), ..made })
}

/// Results in new vectors.
fn forward_new(call: ForwardCall<Flex>) -> Result<Forwarded<Flex>, Error> {
    let (dtypes, is_cast) = (call.dtypes()?, call.is_cast());
    let ForwardCall { spec, x, residual, gate, weight, bias, next_weight, next_bias, wanted } = call;
    let shape = x.layout().shape().clone();
    let (x, weight) = (Regular::new(x)?, Regular::new(weight)?);
    let optional = [residual, gate, bias, next_weight, next_bias];
    let [residual, gate, bias, next_weight, next_bias] = optional.map(|tensor| tensor.map(Regular::new).transpose());
    let (residual, gate, bias, next_weight, next_bias) = (residual?, gate?, bias?, next_weight?, next_bias?);
    let rows = Shape::from([x.rows.rows * spec.groups]);
    let statistic = |name: Tensor, values| Maybe::of(wanted.has(name).then(|| wrap(values, rows.clone())));
    with_types!(dtypes; T, W, R => {
        let mut inputs = match is_cast {
            true => ForwardInputs::<T, W, R>::cast(x.read()?),
            false => ForwardInputs::mixed(x.read()?),
        };
        inputs = inputs.weight(weight.vector()?);
        if let Some(bias) = &bias {
            inputs = inputs.bias(bias.vector()?);
        }
        if let Some(residual) = &residual {
            inputs = inputs.residual(residual.read()?);
        }
        if let Some(gate) = &gate {
            inputs = inputs.gate(gate.read()?);
        }
        if let Some(next_weight) = &next_weight {
            inputs = inputs.next_weight(next_weight.vector()?);
        }
        if let Some(next_bias) = &next_bias {
            inputs = inputs.next_bias(next_bias.vector()?);
        }
        let made = CpuBackend::new().forward_vec(&spec.sized(&x.rows), inputs, wanted)?;
        let y = wanted.has(Tensor::Y).then(|| wrap(made.y, shape.clone()));
        let residual_out = wanted.has(Tensor::ResidualOut).then(|| wrap(made.residual_out, shape));
        Ok(Forwarded {
            mean: statistic(Tensor::Mean, made.mean),
            rstd: statistic(Tensor::Rstd, made.rstd),
            next_mean: statistic(Tensor::NextMean, made.next_mean),
            next_rstd: statistic(Tensor::NextRstd, made.next_rstd),
            ..Forwarded::of(y, residual_out)
        })
    })
}
