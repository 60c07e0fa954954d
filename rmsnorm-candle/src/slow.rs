//! The norms as chains of candle's own operations, with candle's gradients: for devices and dtypes
//! that our kernels do not take.

use candle_core::{D, DType, Result, Tensor};
use rmsnorm_core::{Norm, NormParams};

/// The norm of `h` in `dtype`. Computed in f32, or in f64 if a tensor or the result is f64, and
/// rounded once.
pub(crate) fn normalize(
    spec: &NormParams,
    h: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    dtype: DType,
) -> Result<Tensor> {
    unrounded(spec, h, weight, bias, dtype)?.to_dtype(dtype)
}

/// The same, not rounded to `dtype`.
fn unrounded(spec: &NormParams, h: &Tensor, weight: &Tensor, bias: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
    let wide = wide([Some(dtype), Some(h.dtype()), Some(weight.dtype()), bias.map(|bias| bias.dtype())]);
    let cols = h.dim(D::Minus1)? as f64;
    let h = h.to_dtype(wide)?;
    let centred = match spec.norm {
        Norm::Rms => h,
        Norm::Layer => h.broadcast_sub(&(h.sum_keepdim(D::Minus1)? / cols)?)?,
    };
    let var = (centred.sqr()?.sum_keepdim(D::Minus1)? / cols)?;
    let x_hat = centred.broadcast_div(&(var + spec.eps)?.sqrt()?)?;
    let mut weight = weight.to_dtype(wide)?;
    if spec.weight_offset != 0.0 {
        weight = (weight + f64::from(spec.weight_offset))?;
    }
    let y = x_hat.broadcast_mul(&weight)?;
    match bias {
        None => Ok(y),
        Some(bias) => y.broadcast_add(&bias.to_dtype(wide)?),
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
    add(&unrounded(spec, x, weight, bias, residual.dtype())?, residual)
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
