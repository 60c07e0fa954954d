//! The norms as chains of candle's own operations, with candle's gradients: for devices and dtypes
//! that our kernels do not take.

use candle_core::{D, DType, Error, Result, Tensor};
use rmsnorm_core::{Activation, Norm, NormParams, Slot};

/// The norm of `h` in `dtype`. Computed in f32, or in f64 if a tensor or the result is f64, and
/// rounded once.
pub(crate) fn normalize(
    spec: &NormParams,
    h: &Tensor,
    gate: Option<&Tensor>,
    weight: &Tensor,
    bias: Option<&Tensor>,
    dtype: DType,
) -> Result<Tensor> {
    unrounded(spec, h, gate, weight, bias, dtype)?.to_dtype(dtype)
}

/// The same, not rounded to `dtype`.
fn unrounded(
    spec: &NormParams,
    h: &Tensor,
    gate: Option<&Tensor>,
    weight: &Tensor,
    bias: Option<&Tensor>,
    dtype: DType,
) -> Result<Tensor> {
    let of = |tensor: Option<&Tensor>| tensor.map(Tensor::dtype);
    let wide = wide([Some(dtype), Some(h.dtype()), of(gate), Some(weight.dtype()), of(bias)]);
    let factor = spec
        .gate
        .zip(gate)
        .map(|(gate, z)| Ok::<_, Error>((gate.slot, activate(gate.activation, &z.to_dtype(wide)?)?)));
    let factor = factor.transpose()?;
    let times = |slot: Slot, rows: Tensor| match &factor {
        Some((place, factor)) if *place == slot => rows * factor,
        Some(_) | None => Ok(rows),
    };
    let (shape, groups) = (h.shape(), spec.groups);
    let width = h.dim(D::Minus1)? / groups;
    let cols = width as f64;
    let h = times(Slot::Before, h.to_dtype(wide)?)?.reshape((h.elem_count() / (groups * width), groups, width))?;
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
    let x_hat = centred.broadcast_div(&inside.sqrt()?)?.reshape(shape)?;
    let mut weight = weight.to_dtype(wide)?;
    if spec.weight_offset != 0.0 {
        weight = (weight + f64::from(spec.weight_offset))?;
    }
    let y = x_hat.broadcast_mul(&weight)?;
    let y = match bias {
        None => y,
        Some(bias) => y.broadcast_add(&bias.to_dtype(wide)?)?,
    };
    times(Slot::After, y)
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
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    add(&unrounded(spec, x, None, weight, bias, residual.dtype())?, residual)
}

/// `residual + x`, rounded to the dtype of `residual`.
pub(crate) fn add(x: &Tensor, residual: &Tensor) -> Result<Tensor> {
    let wide = wide([Some(x.dtype()), Some(residual.dtype())]);
    (residual.to_dtype(wide)? + x.to_dtype(wide)?)?.to_dtype(residual.dtype())
}

/// The dtype of the computation, for tensors of these dtypes.
fn wide<const N: usize>(dtypes: [Option<DType>; N]) -> DType {
    if dtypes.contains(&Some(DType::F64)) { DType::F64 } else { DType::F32 }
}
