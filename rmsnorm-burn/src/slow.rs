//! The norms as chains of burn's own operations, with burn's gradients: for devices and dtypes that
//! our kernels do not take.

use burn::tensor::{DType, Tensor};
use rmsnorm_core::{Activation, CastOrder, Norm, NormParams, Slot};

/// The norm of `h` in `dtype`. Computed in f32, or in f64 if a tensor or the result is f64, and
/// rounded once, and where the cast order rounds.
pub(crate) fn normalize<const D: usize>(
    spec: &NormParams,
    h: Tensor<D>,
    gate: Option<Tensor<D>>,
    (weight, bias): (Tensor<1>, Option<Tensor<1>>),
    dtype: DType,
) -> Tensor<D> {
    cast(unrounded(spec, h, gate, (weight, bias), dtype, dtype), dtype)
}

/// The same before its last rounding, which is to the dtype `result`. Roundings of the cast order
/// are to `dtype`.
fn unrounded<const D: usize>(
    spec: &NormParams,
    h: Tensor<D>,
    gate: Option<Tensor<D>>,
    vectors: (Tensor<1>, Option<Tensor<1>>),
    dtype: DType,
    result: DType,
) -> Tensor<D> {
    if !spec.cast_order.rounds_x_hat() {
        return chain(spec, h, gate, vectors, dtype, result);
    }
    let made = chain(spec, h.clone(), gate.clone(), vectors.clone(), dtype, result);
    // Backward takes these roundings to have derivative 1: its gradients are those without them.
    let exact = NormParams { cast_order: CastOrder::AtStore, ..*spec };
    with_gradient(made, chain(&exact, h, gate, vectors, dtype, result))
}

/// The operations.
fn chain<const D: usize>(
    spec: &NormParams,
    h: Tensor<D>,
    gate: Option<Tensor<D>>,
    (weight, bias): (Tensor<1>, Option<Tensor<1>>),
    dtype: DType,
    result: DType,
) -> Tensor<D> {
    let bias_dtype = bias.as_ref().map_or(result, |bias| bias.dtype());
    let gate_dtype = gate.as_ref().map_or(result, |gate| gate.dtype());
    let (of_h, of_weight) = (h.dtype(), weight.dtype());
    let wide = wide(&[result, of_h, of_weight, bias_dtype, gate_dtype]);
    let factor = spec.gate.zip(gate).map(|(gate, z)| (gate.slot, activate(gate.activation, cast(z, wide))));
    let times = |slot: Slot, rows: Tensor<D>| match &factor {
        Some((place, factor)) if *place == slot => rows * factor.clone(),
        Some(_) | None => rows,
    };
    let mut weight = cast(weight, wide);
    if spec.weight_offset != 0.0 {
        weight = weight + f64::from(spec.weight_offset);
    }
    let (order, weight) = (spec.cast_order, weight.unsqueeze::<D>());
    let h = match order.is_weight_first() {
        true => rounded(cast(h, wide) * weight.clone(), of_h),
        false => times(Slot::Before, cast(h, wide)),
    };
    let x_hat = match (spec.groups, h.dims()) {
        (1, _) => normalized(spec, h, dtype),
        (groups, shape) => {
            let width = shape[D - 1] / groups;
            let rows = shape.iter().take(D - 1).product();
            normalized::<3>(spec, h.reshape([rows, groups, width]), dtype).reshape(shape)
        }
    };
    let x_hat = if order.rounds_x_hat() { rounded(x_hat, dtype) } else { x_hat };
    let mut y = if order.is_weight_first() { x_hat } else { x_hat * weight };
    if let Some(bias) = bias {
        y = y + cast(bias, wide).unsqueeze();
    }
    if order.rounds_x_hat() && factor.as_ref().is_some_and(|(slot, _)| *slot == Slot::After) {
        y = rounded(y, wider(dtype, of_weight));
    }
    times(Slot::After, y)
}

/// The rows of h, each by its own statistics. `dtype` is that of y.
fn normalized<const D: usize>(spec: &NormParams, h: Tensor<D>, dtype: DType) -> Tensor<D> {
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
    match spec.cast_order.rounds_rstd() {
        true => centred * rounded(inside.sqrt().recip(), dtype),
        false => centred / inside.sqrt(),
    }
}

/// The values rounded to `dtype`, with the gradient of the values themselves.
fn rounded<const D: usize>(values: Tensor<D>, dtype: DType) -> Tensor<D> {
    let wide = values.dtype();
    with_gradient(cast(cast(values.clone(), dtype), wide), values)
}

/// The values, with the gradient of `exact`: a zero is added.
fn with_gradient<const D: usize>(values: Tensor<D>, exact: Tensor<D>) -> Tensor<D> {
    let zero = exact.clone() - exact.detach();
    values.detach() + zero
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
    cast(cast(residual, wide) + cast(x, wide), dtype)
}

/// `residual` plus the norm of `x`, rounded once, to the dtype of `residual`.
pub(crate) fn normalize_add<const D: usize>(
    spec: &NormParams,
    x: Tensor<D>,
    residual: Tensor<D>,
    vectors: (Tensor<1>, Option<Tensor<1>>),
) -> Tensor<D> {
    let (of_x, dtype) = (x.dtype(), residual.dtype());
    let norm = unrounded(spec, x, None, vectors, of_x, dtype);
    cast(cast(residual, norm.dtype()) + norm, dtype)
}

/// The dtype of the computation, for tensors of these dtypes.
fn wide(dtypes: &[DType]) -> DType {
    if dtypes.contains(&DType::F64) { DType::F64 } else { DType::F32 }
}

/// The dtype that holds the values of both.
fn wider(one: DType, other: DType) -> DType {
    if one == other { one } else { wide(&[one, other]) }
}

/// The values in `dtype`. Between f64 and 16 bits by way of f32, as a direct cast drops bits of an
/// f64 near the middle of two values.
fn cast<const D: usize>(values: Tensor<D>, dtype: DType) -> Tensor<D> {
    let has_16_bits = |dtype| [DType::F16, DType::BF16].contains(&dtype);
    if has_16_bits(values.dtype()) == has_16_bits(dtype) {
        return values.cast(dtype);
    }
    values.cast(DType::F32).cast(dtype)
}
