//! The norms as chains of candle's own operations, with candle's gradients: for devices and dtypes
//! that our kernels do not take.

use candle_core::{D, DType, Error, Result, Tensor};
use rmsnorm_core::{Activation, CastOrder, Norm, NormParams, Slot};

/// The norm of `h` in `dtype`. Computed in f32, or in f64 if a tensor or the result is f64, and
/// rounded once, and where the cast order rounds.
pub(crate) fn normalize(
    spec: &NormParams,
    h: &Tensor,
    gate: Option<&Tensor>,
    (weight, bias): (&Tensor, Option<&Tensor>),
    dtype: DType,
) -> Result<Tensor> {
    cast(&unrounded(spec, h, gate, (weight, bias), dtype, dtype)?, dtype)
}

/// The same before its last rounding, which is to the dtype `result`. Roundings of the cast order
/// are to `dtype`.
fn unrounded(
    spec: &NormParams,
    h: &Tensor,
    gate: Option<&Tensor>,
    vectors: (&Tensor, Option<&Tensor>),
    dtype: DType,
    result: DType,
) -> Result<Tensor> {
    let made = chain(spec, h, gate, vectors, dtype, result)?;
    if !spec.cast_order.rounds_x_hat() {
        return Ok(made);
    }
    // Backward takes these roundings to have derivative 1: its gradients are those without them.
    let exact = NormParams { cast_order: CastOrder::AtStore, ..*spec };
    with_gradient(&made, &chain(&exact, h, gate, vectors, dtype, result)?)
}

/// The operations.
fn chain(
    spec: &NormParams,
    h: &Tensor,
    gate: Option<&Tensor>,
    (weight, bias): (&Tensor, Option<&Tensor>),
    dtype: DType,
    result: DType,
) -> Result<Tensor> {
    let of = |tensor: Option<&Tensor>| tensor.map(Tensor::dtype);
    let (of_h, of_weight) = (h.dtype(), weight.dtype());
    let wide = wide([Some(result), Some(of_h), of(gate), Some(of_weight), of(bias)]);
    let factor =
        spec.gate.zip(gate).map(|(gate, z)| Ok::<_, Error>((gate.slot, activate(gate.activation, &cast(z, wide)?)?)));
    let factor = factor.transpose()?;
    let times = |slot: Slot, rows: Tensor| match &factor {
        Some((place, factor)) if *place == slot => rows * factor,
        Some(_) | None => Ok(rows),
    };
    let mut weight = cast(weight, wide)?;
    if spec.weight_offset != 0.0 {
        weight = (weight + f64::from(spec.weight_offset))?;
    }
    let order = spec.cast_order;
    let (shape, groups) = (h.shape(), spec.groups);
    let width = h.dim(D::Minus1)? / groups;
    let cols = width as f64;
    let h = match order.is_weight_first() {
        true => rounded(&cast(h, wide)?.broadcast_mul(&weight)?, of_h)?,
        false => times(Slot::Before, cast(h, wide)?)?,
    };
    let h = h.reshape((h.elem_count() / (groups * width), groups, width))?;
    let centred = match spec.norm {
        Norm::Rms | Norm::L2 | Norm::L2Clamped => h,
        Norm::Layer => h.broadcast_sub(&(h.sum_keepdim(D::Minus1)? / cols)?)?,
    };
    let var = (centred.sqr()?.sum_keepdim(D::Minus1)? / spec.norm.divisor(width) as f64)?;
    let inside = match spec.norm {
        Norm::Rms | Norm::Layer | Norm::L2 => (var + spec.eps)?,
        // Its gradient is zero where the square of eps is larger.
        Norm::L2Clamped => var.maximum(spec.eps * spec.eps)?,
    };
    let root = inside.sqrt()?;
    let x_hat = match order.rounds_rstd() {
        true => centred.broadcast_mul(&rounded(&root.recip()?, dtype)?)?,
        false => centred.broadcast_div(&root)?,
    };
    let x_hat = x_hat.reshape(shape)?;
    let x_hat = if order.rounds_x_hat() { rounded(&x_hat, dtype)? } else { x_hat };
    let y = if order.is_weight_first() { x_hat } else { x_hat.broadcast_mul(&weight)? };
    let mut y = match bias {
        None => y,
        Some(bias) => y.broadcast_add(&cast(bias, wide)?)?,
    };
    if order.rounds_x_hat() && factor.as_ref().is_some_and(|(slot, _)| *slot == Slot::After) {
        y = rounded(&y, wider(dtype, of_weight))?;
    }
    times(Slot::After, y)
}

/// The values rounded to `dtype`, with the gradient of the values themselves.
fn rounded(values: &Tensor, dtype: DType) -> Result<Tensor> {
    with_gradient(&cast(&cast(values, dtype)?, values.dtype())?, values)
}

/// The values, with the gradient of `exact`: a zero is added.
fn with_gradient(values: &Tensor, exact: &Tensor) -> Result<Tensor> {
    values.detach() + (exact - exact.detach())?
}

/// `activation(z)`.
fn activate(activation: Activation, z: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::Silu => z.silu(),
        // Without an exponential function that overflows.
        Activation::Sigmoid => ((z * 0.5)?.tanh()? + 1.0)? * 0.5,
    }
}

/// `residual` plus the norm of `x`, rounded once, to the dtype of `residual`.
pub(crate) fn normalize_add(
    spec: &NormParams,
    x: &Tensor,
    residual: &Tensor,
    (weight, bias): (&Tensor, Option<&Tensor>),
) -> Result<Tensor> {
    add(&unrounded(spec, x, None, (weight, bias), x.dtype(), residual.dtype())?, residual)
}

/// `residual + x`, rounded to the dtype of `residual`.
pub(crate) fn add(x: &Tensor, residual: &Tensor) -> Result<Tensor> {
    let wide = wide([Some(x.dtype()), Some(residual.dtype())]);
    cast(&(cast(residual, wide)? + cast(x, wide)?)?, residual.dtype())
}

/// The dtype of the computation, for tensors of these dtypes.
fn wide<const N: usize>(dtypes: [Option<DType>; N]) -> DType {
    if dtypes.contains(&Some(DType::F64)) { DType::F64 } else { DType::F32 }
}

/// The dtype that holds the values of both.
fn wider(one: DType, other: DType) -> DType {
    if one == other { one } else { wide([Some(one), Some(other)]) }
}

/// The values in `dtype`. Between f64 and 16 bits by way of f32, as a direct cast drops bits of an
/// f64 near the middle of two values.
fn cast(values: &Tensor, dtype: DType) -> Result<Tensor> {
    let has_16_bits = |dtype| [DType::F16, DType::BF16].contains(&dtype);
    if has_16_bits(values.dtype()) == has_16_bits(dtype) {
        return values.to_dtype(dtype);
    }
    values.to_dtype(DType::F32)?.to_dtype(dtype)
}
