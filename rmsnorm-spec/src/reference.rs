//! The definition, in f64 and plain loops: [math](crate::math), section 1. Every backend is judged against this page.
//!
//! The inputs are exact values of their storage types. Rounding happens in one place only: where a residual is added,
//! `h` is rounded to the dtype of the residual stream before it is normalized, because that is part of the definition.
//!
//! # Example
//! ```
//! # use rmsnorm_spec::{NormSpec, reference::{ForwardInputs, forward}};
//! let inputs = ForwardInputs { x: &[3.0, 4.0, 5.0, 0.0], residual: None, weight: Some(&[1.0, 2.0]), bias: None };
//! let out = forward(&NormSpec::rms(2, 2, 0.0), &inputs);
//! let root = 12.5f64.sqrt();
//! assert_eq!(out.var, [12.5, 12.5]);
//! assert!(out.y.iter().zip([3.0, 8.0, 5.0, 0.0]).all(|(y, expected)| (y - expected / root).abs() < 1e-15));
//! ```

use crate::{DType, Norm, NormSpec};

/// The inputs of a forward pass, dense: matrices (rows, cols), vectors (cols).
#[derive(Clone, Copy, Debug)]
pub struct ForwardInputs<'a> {
    /// (rows, cols)
    pub x: &'a [f64],
    /// (rows, cols); with the dtype its sum is rounded to
    pub residual: Option<(&'a [f64], DType)>,
    /// (cols)
    pub weight: Option<&'a [f64]>,
    /// (cols)
    pub bias: Option<&'a [f64]>,
}

/// The results of a forward pass.
#[derive(Clone, Debug, Default)]
pub struct ForwardOutputs {
    /// What was normalized: `x`, or the rounded sum with the residual. (rows, cols)
    pub h: Vec<f64>,
    /// 0 for RMS norm. (rows)
    pub mean: Vec<f64>,
    /// (rows)
    pub var: Vec<f64>,
    /// (rows)
    pub rstd: Vec<f64>,
    /// (rows, cols)
    pub x_hat: Vec<f64>,
    /// Before the rounding to its storage type. (rows, cols)
    pub y: Vec<f64>,
}

/// Equations (1) to (6). The cast order does not appear: it is a matter of rounding, and the judge applies it.
pub fn forward(spec: &NormSpec, inputs: &ForwardInputs<'_>) -> ForwardOutputs {
    let cols = spec.cols;
    let mut out = ForwardOutputs::default();
    for row in 0..spec.rows {
        let start = out.h.len();
        for col in 0..cols {
            let i = row * cols + col;
            out.h.push(match inputs.residual {
                Some((residual, dtype)) => round_to(inputs.x[i] + residual[i], dtype),
                None => inputs.x[i],
            });
        }
        let h = &out.h[start..];

        let mean = match spec.norm {
            Norm::Rms => 0.0,
            Norm::Layer => average(h.iter().copied()),
        };
        let var = average(h.iter().map(|h| (h - mean) * (h - mean)));
        let rstd = 1.0 / (var + f64::from(spec.eps)).sqrt();
        out.mean.push(mean);
        out.var.push(var);
        out.rstd.push(rstd);

        for (col, h) in h.iter().enumerate() {
            let x_hat = (h - mean) * rstd;
            let bias = inputs.bias.map_or(0.0, |bias| bias[col]);
            out.x_hat.push(x_hat);
            out.y.push(x_hat * effective_weight(spec, inputs.weight, col) + bias);
        }
    }
    out
}

/// The inputs of a backward pass, dense: matrices (rows, cols), vectors as noted.
#[derive(Clone, Copy, Debug)]
pub struct BackwardInputs<'a> {
    /// (rows, cols)
    pub dy: &'a [f64],
    /// The tensor that was normalized. (rows, cols)
    pub x: &'a [f64],
    /// (cols)
    pub weight: Option<&'a [f64]>,
    /// (rows); all zeros for RMS norm
    pub mean: &'a [f64],
    /// (rows)
    pub rstd: &'a [f64],
    /// (rows, cols)
    pub dresidual_out: Option<&'a [f64]>,
}

/// The results of a backward pass, before the rounding to their storage types.
#[derive(Clone, Debug, Default)]
pub struct BackwardOutputs {
    /// `avg(wdy)`, 0 for RMS norm. (rows)
    pub mean_wdy: Vec<f64>,
    /// `avg(wdy * x_hat)`. (rows)
    pub mean_wdy_xhat: Vec<f64>,
    /// (rows, cols)
    pub dx: Vec<f64>,
    /// (cols)
    pub dweight: Vec<f64>,
    /// (cols)
    pub dbias: Vec<f64>,
}

/// Equations (7) to (12).
pub fn backward(spec: &NormSpec, inputs: &BackwardInputs<'_>) -> BackwardOutputs {
    let cols = spec.cols;
    let mut out = BackwardOutputs { dweight: vec![0.0; cols], dbias: vec![0.0; cols], ..BackwardOutputs::default() };
    for row in 0..spec.rows {
        let (mean, rstd) = (inputs.mean[row], inputs.rstd[row]);
        let x_hat = |col: usize| (inputs.x[row * cols + col] - mean) * rstd;
        let dy = |col: usize| inputs.dy[row * cols + col];
        let wdy = |col: usize| dy(col) * effective_weight(spec, inputs.weight, col);

        let mean_wdy = match spec.norm {
            Norm::Rms => 0.0,
            Norm::Layer => average((0..cols).map(wdy)),
        };
        let mean_wdy_xhat = average((0..cols).map(|col| wdy(col) * x_hat(col)));
        out.mean_wdy.push(mean_wdy);
        out.mean_wdy_xhat.push(mean_wdy_xhat);

        for col in 0..cols {
            let dresidual_out = inputs.dresidual_out.map_or(0.0, |d| d[row * cols + col]);
            out.dx.push(rstd * (wdy(col) - mean_wdy - x_hat(col) * mean_wdy_xhat) + dresidual_out);
            out.dweight[col] += dy(col) * x_hat(col);
            out.dbias[col] += dy(col);
        }
    }
    out
}

/// What a normalized column is multiplied with: `weight + weight_offset`, or 1 without a weight.
pub fn effective_weight(spec: &NormSpec, weight: Option<&[f64]>, col: usize) -> f64 {
    weight.map_or(1.0, |weight| weight[col] + f64::from(spec.weight_offset))
}

fn average(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}

/// The value of `dtype` nearest to `value`, ties to even, without double rounding. Overflow gives an infinity.
pub fn round_to(value: f64, dtype: DType) -> f64 {
    let (precision, min_exponent, max_exponent) = match dtype {
        DType::F32 => (24, -126, 127),
        DType::F16 => (11, -14, 15),
        DType::Bf16 => (8, -126, 127),
    };
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    // The exponent of the leading bit, from the f64's own exponent field; f64 subnormals are far below every dtype.
    let exponent = (((value.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(min_exponent);
    let unit = exp2(exponent - (precision - 1));
    let rounded = (value / unit).round_ties_even() * unit;
    let largest = (2.0 - exp2(1 - precision)) * exp2(max_exponent);
    if rounded.abs() > largest { f64::INFINITY.copysign(value) } else { rounded }
}

/// 2 to an integer power within the range of normal f64, exactly.
fn exp2(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}
