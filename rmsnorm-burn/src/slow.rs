//! The norms as chains of burn's own operations, with burn's gradients: for devices and dtypes that
//! our kernels do not take.

use burn::tensor::{DType, Tensor};
use rmsnorm_core::{Activation, Norm, NormParams, Slot};

/// The norm of `h` in `dtype`. Computed in f32, or in f64 if a tensor or the result is f64, and
/// rounded once.
pub(crate) fn normalize<const D: usize>(
    spec: &NormParams,
    h: Tensor<D>,
    gate: Option<Tensor<D>>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    dtype: DType,
) -> Tensor<D> {
    let bias_dtype = bias.as_ref().map_or(dtype, |bias| bias.dtype());
    let gate_dtype = gate.as_ref().map_or(dtype, |gate| gate.dtype());
    let wide = wide(&[dtype, h.dtype(), weight.dtype(), bias_dtype, gate_dtype]);
    let factor = spec.gate.zip(gate).map(|(gate, z)| (gate.slot, activate(gate.activation, z.cast(wide))));
    let times = |slot: Slot, rows: Tensor<D>| match &factor {
        Some((place, factor)) if *place == slot => rows * factor.clone(),
        Some(_) | None => rows,
    };
    let h = times(Slot::Before, h.cast(wide));
    let x_hat = match (spec.groups, h.dims()) {
        (1, _) => normalized(spec, h),
        (groups, shape) => {
            let width = shape[D - 1] / groups;
            let rows = shape.iter().take(D - 1).product();
            normalized::<3>(spec, h.reshape([rows, groups, width])).reshape(shape)
        }
    };
    let mut weight = weight.cast(wide);
    if spec.weight_offset != 0.0 {
        weight = weight + f64::from(spec.weight_offset);
    }
    let mut y = x_hat * weight.unsqueeze();
    if let Some(bias) = bias {
        y = y + bias.cast(wide).unsqueeze();
    }
    times(Slot::After, y).cast(dtype)
}

/// The rows of h, each by its own statistics.
fn normalized<const D: usize>(spec: &NormParams, h: Tensor<D>) -> Tensor<D> {
    let centred = match spec.norm {
        Norm::Rms | Norm::L2 | Norm::L2Clamped => h,
        Norm::Layer => h.clone() - h.mean_dim(D - 1),
    };
    let squares = centred.clone().square();
    let var = match spec.norm {
        Norm::Rms | Norm::Layer => squares.mean_dim(D - 1),
        Norm::L2 | Norm::L2Clamped => squares.sum_dim(D - 1),
    };
    let inside = match spec.norm {
        Norm::Rms | Norm::Layer | Norm::L2 => var + spec.eps,
        Norm::L2Clamped => var.clamp_min(spec.eps * spec.eps),
    };
    centred / inside.sqrt()
}

/// `activation(z)`. burn's own sigmoid computes in f32 on most backends.
fn activate<const D: usize>(activation: Activation, z: Tensor<D>) -> Tensor<D> {
    // Below, the exponential would overflow, and its gradient be NaN. A NaN stays one.
    let least = if z.dtype() == DType::F64 { -700.0 } else { -80.0 };
    let bounded = z.clone().mask_fill(z.clone().lower_elem(least), least);
    let sigmoid = ((-bounded).exp() + 1.0).recip();
    match activation {
        Activation::Silu => z * sigmoid,
        Activation::Sigmoid => sigmoid,
    }
}

/// `residual + x`, rounded to the dtype of `residual`.
pub(crate) fn add<const D: usize>(x: Tensor<D>, residual: Tensor<D>) -> Tensor<D> {
    let dtype = residual.dtype();
    let wide = wide(&[x.dtype(), dtype]);
    (residual.cast(wide) + x.cast(wide)).cast(dtype)
}

/// `residual` plus the norm of `x`, rounded once, to the dtype of `residual`.
pub(crate) fn normalize_add<const D: usize>(
    spec: &NormParams,
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let dtype = residual.dtype();
    let bias_dtype = bias.as_ref().map_or(dtype, |bias| bias.dtype());
    let wide = wide(&[dtype, x.dtype(), weight.dtype(), bias_dtype]);
    (residual.cast(wide) + normalize(spec, x, None, weight, bias, wide)).cast(dtype)
}

/// The dtype of the computation, for tensors of these dtypes.
fn wide(dtypes: &[DType]) -> DType {
    if dtypes.contains(&DType::F64) { DType::F64 } else { DType::F32 }
}
