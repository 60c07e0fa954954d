//! The definition, in f64 and plain loops: [math](crate::math), section 1. Every backend is tested
//! against this module.
//!
//! The inputs are exact values of their storage types. Rounding happens in one place only: the sum
//! with a residual is rounded to the dtype of the residual stream before it is normalized, because
//! that is part of the definition.
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

use crate::quant::{CodeType, QuantSource, QuantSpec};
use crate::{Activation, DType, Norm, NormSpec, ResidualPlacement};

/// The inputs of a forward pass, dense: matrices (rows, cols), vectors (cols).
#[derive(Clone, Copy, Debug)]
pub struct ForwardInputs<'a> {
    /// (rows, cols)
    pub x: &'a [f64],
    /// (rows, cols), and the dtype that its sum is rounded to
    pub residual: Option<(&'a [f64], DType)>,
    /// (cols)
    pub weight: Option<&'a [f64]>,
    /// (cols)
    pub bias: Option<&'a [f64]>,
}

/// The results of a forward pass.
#[derive(Clone, Debug, Default)]
pub struct ForwardOutputs {
    /// The normalized tensor: `x`, or the rounded sum with the residual. (rows, cols)
    pub h: Vec<f64>,
    /// 0 for all but layer norm. (rows, groups)
    pub mean: Vec<f64>,
    /// The average of the squares, or L2 norm's sum of them. (rows, groups)
    pub var: Vec<f64>,
    /// (rows, groups)
    pub rstd: Vec<f64>,
    /// (rows, cols)
    pub x_hat: Vec<f64>,
    /// The unrounded norm, also if it is added to a residual after the norm. (rows, cols)
    pub y: Vec<f64>,
    /// The unrounded sum of a residual and the norm, (13); empty if there is none. (rows, cols)
    pub sum: Vec<f64>,
}

/// Equations (1) to (6) and (13). The cast order is left out: it concerns rounding, which the suite
/// handles.
pub fn forward(spec: &NormSpec, inputs: &ForwardInputs<'_>) -> ForwardOutputs {
    let mut out = ForwardOutputs::default();
    for i in 0..spec.rows * spec.cols {
        out.h.push(match (inputs.residual, spec.residual_placement) {
            (Some((residual, dtype)), ResidualPlacement::Before) => round_to(inputs.x[i] + residual[i], dtype),
            (None, ResidualPlacement::Before) | (_, ResidualPlacement::After) => inputs.x[i],
        });
    }
    let width = spec.cols / spec.groups;
    let divisor = spec.norm.divisor(width) as f64;
    for (group, h) in out.h.chunks(width).enumerate() {
        let mean = match spec.norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => 0.0,
            Norm::Layer => h.iter().sum::<f64>() / divisor,
        };
        let var = h.iter().map(|h| (h - mean) * (h - mean)).sum::<f64>() / divisor;
        let eps = f64::from(spec.eps);
        let rstd = match spec.norm {
            Norm::Rms | Norm::Layer | Norm::L2 => 1.0 / (var + eps).sqrt(),
            // NaN stays.
            Norm::L2Clamped => 1.0 / (if var < eps * eps { eps * eps } else { var }).sqrt(),
        };
        out.mean.push(mean);
        out.var.push(var);
        out.rstd.push(rstd);

        for (i, h) in h.iter().enumerate() {
            let col = group % spec.groups * width + i;
            let x_hat = (h - mean) * rstd;
            let bias = inputs.bias.map_or(0.0, |bias| bias[col]);
            out.x_hat.push(x_hat);
            out.y.push(x_hat * effective_weight(spec, inputs.weight, col) + bias);
        }
    }
    if let (Some((residual, _)), ResidualPlacement::After) = (inputs.residual, spec.residual_placement) {
        out.sum = residual.iter().zip(&out.y).map(|(residual, y)| residual + y).collect();
    }
    out
}

/// Equation (1'): the sum of `parts` consecutive matrices in `x`, and of a residual, rounded to
/// `dtype`. All matrices are (rows, cols).
///
/// Additions in f32 are part of the definition, as is the rounding of a sum with a residual: the
/// sum is one value, and every backend has its bits. `x` and `residual` hold values of f32. Panics
/// if `parts` is 0.
///
/// # Example
/// ```
/// # use rmsnorm_spec::{DType, reference::sum_of_parts};
/// let (small, large) = (2f64.powi(-24), [1.0, 1.0]);
/// let x = [small, 1.0, small, small, 1.0, small];
/// // In their order: small + small + 1, and 1 + small + small, which rounds twice.
/// assert_eq!(sum_of_parts(&x, 3, None, DType::F32), [1.0 + 2.0 * small, 1.0]);
/// assert_eq!(sum_of_parts(&large, 1, Some(&[small, 2.0]), DType::Bf16), [1.0, 3.0]);
/// ```
pub fn sum_of_parts(x: &[f64], parts: usize, residual: Option<&[f64]>, dtype: DType) -> Vec<f64> {
    let len = x.len() / parts;
    // The f64 sum of two f32 values, rounded to f32, equals their f32 sum: 53 bits are more than
    // twice 24, plus two.
    let add = |sum: f64, addend: f64| round_to(sum + addend, DType::F32);
    let sum = |i: usize| (1..parts).fold(x[i], |sum, part| add(sum, x[part * len + i]));
    let sum_with = |i: usize| residual.map_or_else(|| sum(i), |residual| add(sum(i), residual[i]));
    (0..len).map(|i| round_to(sum_with(i), dtype)).collect()
}

/// Equation (14): the next norm of a rounded sum (rows, cols), with its own weight and bias (cols).
///
/// # Example
/// Two norms around a residual:
/// ```
/// # use rmsnorm_spec::{DType, NormSpec, reference::{ForwardInputs, forward, next, round_to}};
/// let spec = NormSpec::rms(1, 2, 0.0).residual_after();
/// let residual = Some((&[0.0, 2.0][..], DType::F32));
/// let first = forward(&spec, &ForwardInputs { x: &[5.0, 5.0], residual, weight: None, bias: None });
/// assert_eq!((&first.y, &first.sum), (&vec![1.0, 1.0], &vec![1.0, 3.0]));
/// let sum: Vec<f64> = first.sum.iter().map(|sum| round_to(*sum, DType::F32)).collect();
/// let second = next(&spec, &sum, Some(&[5f64.sqrt(); 2]), None);
/// assert!(second.y.iter().zip([1.0, 3.0]).all(|(y, expected)| (y - expected).abs() < 1e-15));
/// ```
pub fn next(spec: &NormSpec, sum: &[f64], weight: Option<&[f64]>, bias: Option<&[f64]>) -> ForwardOutputs {
    forward(spec, &ForwardInputs { x: sum, residual: None, weight, bias })
}

/// `act(z)` of equation (19).
/// ```
/// # use rmsnorm_spec::{Activation, reference::activate};
/// assert_eq!([Activation::Sigmoid, Activation::Silu].map(|activation| activate(activation, 0.0)), [0.5, 0.0]);
/// assert!((activate(Activation::Silu, 1.0) - 1.0 / (1.0 + (-1f64).exp())).abs() < 1e-15);
/// ```
pub fn activate(activation: Activation, z: f64) -> f64 {
    match activation {
        Activation::Silu => z * sigmoid(z),
        Activation::Sigmoid => sigmoid(z),
    }
}

/// `act'(z)`, the derivative in equations (20) and (21).
pub fn activation_slope(activation: Activation, z: f64) -> f64 {
    // sigmoid(-z) is 1 - sigmoid(z) without its cancellation.
    match activation {
        Activation::Silu => sigmoid(z) * (1.0 + z * sigmoid(-z)),
        Activation::Sigmoid => sigmoid(z) * sigmoid(-z),
    }
}

fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

/// Equation (19): `values * act(gate)`. The values are `x` for a gate before the norm, or the
/// unrounded result of [`forward`] for a gate after it. All are (rows, cols).
///
/// # Example
/// ```
/// # use rmsnorm_spec::{Activation, NormSpec, reference::{ForwardInputs, forward, gated}};
/// let norm = |x: &[f64]| forward(&NormSpec::rms(1, 2, 0.0), &ForwardInputs { x, residual: None, weight: None, bias: None });
/// let (x, gate) = ([1.0, -1.0], [0.0, 0.0]);
/// let after = gated(Activation::Sigmoid, &norm(&x).y, &gate);
/// let before = norm(&gated(Activation::Sigmoid, &x, &gate)).y;
/// assert_eq!((after, before), (vec![0.5, -0.5], vec![1.0, -1.0]));
/// ```
pub fn gated(activation: Activation, values: &[f64], gate: &[f64]) -> Vec<f64> {
    values.iter().zip(gate).map(|(value, z)| value * activate(activation, *z)).collect()
}

/// Equations (20) and (21): the gradients of the values and of the gate, from the gradient of their
/// product, (19). All are (rows, cols).
pub fn gated_backward(activation: Activation, gradient: &[f64], values: &[f64], gate: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let of_gate = |((gradient, value), z): ((&f64, &f64), &f64)| gradient * value * activation_slope(activation, *z);
    (gated(activation, gradient, gate), gradient.iter().zip(values).zip(gate).map(of_gate).collect())
}

/// Equation (24): `x * weight'`, rounded to `dtype`, for a weight before the norm
/// ([`CastOrder::WeightFirst`](crate::CastOrder::WeightFirst)). `x` and the result are (rows,
/// cols), `weight` is (cols). The norm of the result has no weight.
///
/// The offset's addition and the product in f32 are part of the definition, as the rounding is: the
/// result is one value.
///
/// # Example
/// ```
/// # use rmsnorm_spec::{DType, NormSpec, reference::{ForwardInputs, forward, weighted}};
/// let spec = NormSpec::rms(1, 2, 0.0).weight_offset(1.0);
/// let h = weighted(&spec, &[1.0, 3.0], &[0.0, 1.0 / 256.0], DType::Bf16);
/// assert_eq!(h, [1.0, 3.015625]); // 3.01171875 is half way between two values
/// let norm = forward(&spec, &ForwardInputs { x: &h, residual: None, weight: None, bias: None });
/// assert_eq!(norm.h, h);
/// ```
pub fn weighted(spec: &NormSpec, x: &[f64], weight: &[f64], dtype: DType) -> Vec<f64> {
    let product = |(i, x): (usize, &f64)| {
        let weight = round_to(effective_weight(spec, Some(weight), i % spec.cols), DType::F32);
        round_to(round_to(x * weight, DType::F32), dtype)
    };
    x.iter().enumerate().map(product).collect()
}

/// Equation (25): the gradients of `x` and of the weight of [`weighted`], from that of its result,
/// which is the `dx` of [`backward`] without a weight. `dh`, `x` and the first result are (rows,
/// cols), `weight` and the second result are (cols).
pub fn weighted_backward(spec: &NormSpec, dh: &[f64], x: &[f64], weight: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let mut dweight = vec![0.0; spec.cols];
    let mut dx = Vec::with_capacity(dh.len());
    for (i, (dh, x)) in dh.iter().zip(x).enumerate() {
        let col = i % spec.cols;
        dx.push(dh * effective_weight(spec, Some(weight), col));
        dweight[col] += dh * x;
    }
    (dx, dweight)
}

/// The inputs of a backward pass, dense: matrices (rows, cols), vectors as noted.
#[derive(Clone, Copy, Debug)]
pub struct BackwardInputs<'a> {
    /// (rows, cols)
    pub dy: &'a [f64],
    /// The tensor that forward normalized. (rows, cols)
    pub x: &'a [f64],
    /// (cols)
    pub weight: Option<&'a [f64]>,
    /// (rows, groups); all zeros for all but layer norm
    pub mean: &'a [f64],
    /// (rows, groups)
    pub rstd: &'a [f64],
    /// (rows, cols)
    pub dresidual_out: Option<&'a [f64]>,
}

/// The results of a backward pass, before the rounding to their storage types.
#[derive(Clone, Debug, Default)]
pub struct BackwardOutputs {
    /// `avg(wdy)`, 0 for all but layer norm. (rows, groups)
    pub mean_wdy: Vec<f64>,
    /// `avg(wdy * x_hat)`, or L2 norm's sum; 0 where the norm was clamped. (rows, groups)
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
    let (cols, width) = (spec.cols, spec.cols / spec.groups);
    let divisor = spec.norm.divisor(width) as f64;
    let mut out = BackwardOutputs { dweight: vec![0.0; cols], dbias: vec![0.0; cols], ..BackwardOutputs::default() };
    for group in 0..spec.rows * spec.groups {
        let (mean, rstd) = (inputs.mean[group], inputs.rstd[group]);
        let (first, first_col) = (group * width, group % spec.groups * width);
        let x_hat = |i: usize| (inputs.x[first + i] - mean) * rstd;
        let dy = |i: usize| inputs.dy[first + i];
        let wdy = |i: usize| dy(i) * effective_weight(spec, inputs.weight, first_col + i);

        let mean_wdy = match spec.norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => 0.0,
            Norm::Layer => (0..width).map(wdy).sum::<f64>() / divisor,
        };
        let mean_wdy_xhat =
            if is_clamped(spec, rstd) { 0.0 } else { (0..width).map(|i| wdy(i) * x_hat(i)).sum::<f64>() / divisor };
        out.mean_wdy.push(mean_wdy);
        out.mean_wdy_xhat.push(mean_wdy_xhat);

        for i in 0..width {
            let dresidual_out = inputs.dresidual_out.map_or(0.0, |d| d[first + i]);
            out.dx.push(rstd * (wdy(i) - mean_wdy - x_hat(i) * mean_wdy_xhat) + dresidual_out);
            out.dweight[first_col + i] += dy(i) * x_hat(i);
            out.dbias[first_col + i] += dy(i);
        }
    }
    out
}

/// The quantization of a matrix. The sets of elements that share a scale are ordered by row, then
/// by column: one set for a tensor, one for each row, or one for each block.
#[derive(Clone, Debug, Default)]
pub struct QuantizedOutputs {
    /// The values that were quantized. (rows, cols)
    pub v: Vec<f64>,
    /// The largest magnitude of each set.
    pub amax: Vec<f64>,
    /// The scale of each set.
    pub scale: Vec<f64>,
    /// (rows, cols)
    pub codes: Vec<u8>,
}

/// (Q1) to (Q5), for an unrounded `y` with rows of `cols` elements and activations of `dtype`. A
/// `given` scale applies to all elements; without one each set has its own, also with
/// [`ScaleKind::Given`](crate::quant::ScaleKind::Given). Panics if `cols` is 0.
///
/// # Example
/// ```
/// # use rmsnorm_spec::{DType, quant::{CodeType, QuantSpec, ScaleKind}, reference::quantize};
/// let spec = QuantSpec::new(CodeType::Int8, ScaleKind::Row);
/// let out = quantize(&spec, 2, &[1.0, -127.0, 0.0, 0.0], DType::F32, None);
/// assert_eq!((out.amax, out.scale, out.codes), (vec![127.0, 0.0], vec![1.0, 1.0], vec![1, 129, 0, 0]));
/// ```
pub fn quantize(spec: &QuantSpec, cols: usize, y: &[f64], dtype: DType, given: Option<f32>) -> QuantizedOutputs {
    let source = |y: f64| match spec.source {
        QuantSource::F32 => y,
        QuantSource::Rounded => round_to(y, dtype),
    };
    let v: Vec<f64> = y.iter().copied().map(source).collect();
    let of_row = spec.scale.set_cols(cols);
    let mut out = QuantizedOutputs::default();
    let sets: Vec<&[f64]> = match of_row {
        Some(of_row) => v.chunks(cols).flat_map(|row| row.chunks(of_row)).collect(),
        // One set even without elements.
        None => vec![&v],
    };
    for set in sets {
        // A comparison would drop a NaN.
        let larger = |amax: f64, v: &f64| if amax.is_nan() || v.is_nan() { f64::NAN } else { amax.max(v.abs()) };
        let amax = set.iter().fold(0.0, larger);
        let scale = f64::from(given.unwrap_or_else(|| spec.scale(amax as f32)));
        out.amax.push(amax);
        out.scale.push(scale);
        // f32 holds every value of the format.
        out.codes.extend(set.iter().map(|v| spec.codes.encode(round_to_code(v / scale, spec.codes) as f32)));
    }
    QuantizedOutputs { v, ..out }
}

/// The code value nearest to `value`, ties to even. Values beyond the largest become the largest.
/// NaN stays NaN, also for int8.
pub fn round_to_code(value: f64, codes: CodeType) -> f64 {
    let (precision, min_exponent) = match codes {
        CodeType::E4m3 => (4, -6),
        CodeType::E5m2 => (3, -14),
        CodeType::Int8 => return value.round_ties_even().clamp(-128.0, 127.0),
    };
    let largest = f64::from(codes.largest());
    round_to_precision(value, precision, min_exponent).clamp(-largest, largest)
}

/// [`Norm::is_clamped`], from the exact product.
pub fn is_clamped(spec: &NormSpec, rstd: f64) -> bool {
    spec.norm == Norm::L2Clamped && rstd * f64::from(spec.eps) >= f64::from(Norm::CLAMPED_FROM)
}

/// The factor of a normalized column: `weight + weight_offset`, or 1 without a weight.
pub fn effective_weight(spec: &NormSpec, weight: Option<&[f64]>, col: usize) -> f64 {
    weight.map_or(1.0, |weight| weight[col] + f64::from(spec.weight_offset))
}

/// The value of `dtype` nearest to `value`, ties to even, without double rounding. Overflow gives
/// an infinity.
pub fn round_to(value: f64, dtype: DType) -> f64 {
    let (precision, min_exponent, max_exponent) = match dtype {
        DType::F32 => (24, -126, 127),
        DType::F16 => (11, -14, 15),
        DType::Bf16 => (8, -126, 127),
    };
    let rounded = round_to_precision(value, precision, min_exponent);
    let largest = (2.0 - exp2(1 - precision)) * exp2(max_exponent);
    if rounded.abs() > largest { f64::INFINITY.copysign(value) } else { rounded }
}

/// Rounds to `precision` significant bits, fewer below 2^`min_exponent`. Infinities and NaN stay.
fn round_to_precision(value: f64, precision: i32, min_exponent: i32) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    // The exponent of the leading bit, from the f64's own exponent field; f64 subnormals are far
    // below every dtype.
    let exponent = (((value.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(min_exponent);
    let unit = exp2(exponent - (precision - 1));
    (value / unit).round_ties_even() * unit
}

/// 2 to an integer power within the range of normal f64, exactly.
fn exp2(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{ScaleKind, ScaleRounding};

    const MX: ScaleKind = ScaleKind::Mx { rounding: ScaleRounding::Up };

    /// Each set has the scale of its own largest element, at any position.
    #[test]
    fn sets_are_those_of_their_kind() {
        // Rows of 130 columns: two blocks of 128, three of 64, five of 32.
        let (rows, cols) = (3, 130);
        let y: Vec<f64> =
            (0..rows * cols).map(|index| -(1.0 + (index % 67) as f64) * 2f64.powi(index as i32 / 32)).collect();
        let largest = |set: &[f64]| set.iter().fold(0.0, |amax: f64, y| amax.max(y.abs()));
        let block = |cols| ScaleKind::Block { cols, is_power_of_two: false };
        for (kind, len) in [(ScaleKind::Row, cols), (block(128), 128), (block(64), 64), (MX, 32)] {
            let out = quantize(&QuantSpec::new(CodeType::E4m3, kind), cols, &y, DType::F32, None);
            let expected: Vec<f64> = y.chunks(cols).flat_map(|row| row.chunks(len)).map(largest).collect();
            assert_eq!(out.amax, expected, "{kind:?}");
            assert_eq!(out.scale.len(), rows * kind.groups(cols).unwrap_or(0), "{kind:?}");
            assert_eq!((out.v.len(), out.codes.len()), (y.len(), y.len()), "{kind:?}");
            // The largest element of a set has the largest code, except with larger powers of two.
            if kind != MX {
                let codes: Vec<&[u8]> = out.codes.chunks(cols).flat_map(|row| row.chunks(len)).collect();
                assert!(codes.iter().all(|set| set.contains(&0xfe)), "{kind:?}");
            }
        }
        let out = quantize(&QuantSpec::new(CodeType::E5m2, ScaleKind::Current), cols, &y, DType::F32, None);
        assert_eq!((out.amax, out.scale.len()), (vec![largest(&y)], 1));
        let out = quantize(&QuantSpec::new(CodeType::E5m2, ScaleKind::Given), cols, &y, DType::F32, Some(0.5));
        assert_eq!((out.amax, out.scale), (vec![largest(&y)], vec![0.5]));
    }

    /// Two backward calls give the gradients of both norms around a residual. The test compares
    /// with central differences of a loss of y and the sum, in x, the residual and both weights.
    #[test]
    fn gradients_of_two_norms_around_a_residual_are_those_of_the_whole() {
        let (rows, cols) = (2, 5);
        let values = |seed: usize, len: usize| -> Vec<f64> {
            (0..len).map(|i| ((seed * 37 + i * i * 11 + i * 5) % 23) as f64 / 7.0 - 1.4).collect()
        };
        let (dy, dsum) = (values(1, rows * cols), values(2, rows * cols));
        for spec in Norm::ALL.map(|norm| NormSpec::new(norm, rows, cols, 0.01)) {
            let alone = spec.weight_offset(0.5);
            let spec = alone.residual_after();
            let given = [3, 4, 5, 6].map(|seed| values(seed, if seed < 5 { rows * cols } else { cols }));
            let passes = |[x, residual, weight, next_weight]: &[Vec<f64>; 4]| {
                // Not rounded: the derivative of a rounding counts as 1.
                let residual = Some((&residual[..], DType::F32));
                let first = forward(&spec, &ForwardInputs { x, residual, weight: Some(weight), bias: None });
                let last = next(&spec, &first.sum, Some(next_weight), None);
                (first, last)
            };
            let loss = |given: &[Vec<f64>; 4]| {
                let (first, last) = passes(given);
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                dot(&dy, &last.y) + dot(&dsum, &first.sum)
            };
            let (first, last) = passes(&given);
            let last = backward(
                &alone,
                &BackwardInputs {
                    dy: &dy,
                    x: &first.sum,
                    weight: Some(&given[3]),
                    mean: &last.mean,
                    rstd: &last.rstd,
                    dresidual_out: Some(&dsum),
                },
            );
            let (mean, rstd) = (&first.mean, &first.rstd);
            let inputs =
                BackwardInputs { dy: &last.dx, x: &given[0], weight: Some(&given[2]), mean, rstd, dresidual_out: None };
            let first = backward(&spec, &inputs);
            let gradients = [&first.dx, &last.dx, &first.dweight, &last.dweight];
            are_central_differences(gradients, &given, loss);
        }
    }

    /// Gradients are the central differences of the loss, in each of the first `given`.
    fn are_central_differences<const G: usize, const N: usize>(
        gradients: [&Vec<f64>; G],
        given: &[Vec<f64>; N],
        loss: impl Fn(&[Vec<f64>; N]) -> f64,
    ) {
        for (which, gradient) in gradients.into_iter().enumerate() {
            for (i, gradient) in gradient.iter().enumerate() {
                let moved = |by: f64| {
                    let mut moved = given.clone();
                    moved[which][i] += by;
                    loss(&moved)
                };
                // The error of a difference: a step squared, times a third derivative of some hundreds.
                let step = 1e-5;
                let difference = (moved(step) - moved(-step)) / (2.0 * step);
                assert!((gradient - difference).abs() < 1e-6, "{which} {i}: {gradient} and {difference}");
            }
        }
    }

    /// A norm of groups without a weight is the norm of as many shorter rows, and each group takes
    /// its own part of the weight and the bias.
    #[test]
    fn groups_of_columns_are_rows_with_their_own_weights() {
        let (rows, width, groups) = (3, 4, 2);
        let cols = width * groups;
        let values = |seed: usize, len: usize| -> Vec<f64> {
            (0..len).map(|i| ((seed * 37 + i * i * 11 + i * 5) % 23) as f64 / 7.0 - 1.4).collect()
        };
        let (x, dy, weight, bias) = (values(1, rows * cols), values(2, rows * cols), values(3, cols), values(4, cols));
        for norm in Norm::ALL {
            let whole = NormSpec::new(norm, rows, cols, 0.01).groups(groups).weight_offset(0.5);
            let (weights, biases) = (Some(&weight[..]), Some(&bias[..]));
            let out = forward(&whole, &ForwardInputs { x: &x, residual: None, weight: weights, bias: biases });
            assert_eq!(out.rstd.len(), rows * groups);
            let (mean, rstd) = (&out.mean[..], &out.rstd[..]);
            let inputs = BackwardInputs { dy: &dy, x: &x, weight: weights, mean, rstd, dresidual_out: None };
            let gradients = backward(&whole, &inputs);
            for group in 0..groups {
                let part = |all: &[f64]| -> Vec<f64> {
                    all.chunks(cols).flat_map(|row| row[group * width..][..width].to_vec()).collect()
                };
                let of_rows = |all: &[f64]| -> Vec<f64> { all.chunks(groups).map(|row| row[group]).collect() };
                let [x, dy, weight, bias] = [&x, &dy, &weight, &bias].map(|all| part(all));
                let spec = NormSpec { groups: 1, ..whole.cols(width) };
                let inputs = ForwardInputs { x: &x, residual: None, weight: Some(&weight), bias: Some(&bias) };
                let alone = forward(&spec, &inputs);
                assert_eq!(
                    (part(&out.y), of_rows(&out.mean), of_rows(&out.rstd)),
                    (alone.y, alone.mean.clone(), alone.rstd.clone())
                );
                let (mean, rstd) = (&alone.mean[..], &alone.rstd[..]);
                let inputs = BackwardInputs { dy: &dy, x: &x, weight: Some(&weight), mean, rstd, dresidual_out: None };
                let alone = backward(&spec, &inputs);
                assert_eq!(part(&gradients.dx), alone.dx);
                assert_eq!((part(&gradients.dweight), part(&gradients.dbias)), (alone.dweight, alone.dbias));
            }
        }
    }

    /// The gradients of gated norms are those of the whole: the test compares with central
    /// differences of a loss, in x, the gate, the weight and the bias.
    #[test]
    fn gradients_of_gated_norms_are_those_of_the_whole() {
        let (rows, cols) = (2, 5);
        let values = |seed: usize, len: usize| -> Vec<f64> {
            (0..len).map(|i| ((seed * 37 + i * i * 11 + i * 5) % 23) as f64 / 7.0 - 1.4).collect()
        };
        let dy = values(1, rows * cols);
        for spec in Norm::ALL.map(|norm| NormSpec::new(norm, rows, cols, 0.01)) {
            for (activation, is_before) in Activation::ALL.into_iter().flat_map(|each| [(each, false), (each, true)]) {
                let spec = spec.weight_offset(0.5);
                let given = [3, 4, 5, 6].map(|seed| values(seed, if seed < 5 { rows * cols } else { cols }));
                let pass = |[x, gate, weight, bias]: &[Vec<f64>; 4]| {
                    let h = if is_before { gated(activation, x, gate) } else { x.clone() };
                    let (weight, bias) = (Some(&weight[..]), Some(&bias[..]));
                    let out = forward(&spec, &ForwardInputs { x: &h, residual: None, weight, bias });
                    let y = if is_before { out.y.clone() } else { gated(activation, &out.y, gate) };
                    (out, y)
                };
                let loss = |given: &[Vec<f64>; 4]| pass(given).1.iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>();
                let [x, gate, weight, _] = &given;
                let out = pass(&given).0;
                let through = |dy: &[f64]| {
                    let (weight, mean, rstd) = (Some(&weight[..]), &out.mean[..], &out.rstd[..]);
                    backward(&spec, &BackwardInputs { dy, x: &out.h, weight, mean, rstd, dresidual_out: None })
                };
                let gradients = if is_before {
                    let norm = through(&dy);
                    let (dx, dgate) = gated_backward(activation, &norm.dx, x, gate);
                    [dx, dgate, norm.dweight, norm.dbias]
                } else {
                    let (dy, dgate) = gated_backward(activation, &dy, &out.y, gate);
                    let norm = through(&dy);
                    [norm.dx, dgate, norm.dweight, norm.dbias]
                };
                for (which, gradient) in gradients.iter().enumerate() {
                    for (i, gradient) in gradient.iter().enumerate() {
                        let moved = |by: f64| {
                            let mut moved = given.clone();
                            moved[which][i] += by;
                            loss(&moved)
                        };
                        let step = 1e-5;
                        let difference = (moved(step) - moved(-step)) / (2.0 * step);
                        assert!((gradient - difference).abs() < 1e-6, "{which} {i}: {gradient} and {difference}");
                    }
                }
            }
        }
    }

    /// Rows of the norms 10, 5, 5/8 and 0, with a least norm of 5: where it is reached, rstd is a
    /// constant.
    #[test]
    fn small_rows_of_the_clamped_norm_are_divided_by_eps() {
        let (spec, x) = (NormSpec::l2_clamped(4, 2, 5.0), [6.0, 8.0, 3.0, 4.0, 0.375, 0.5, 0.0, 0.0]);
        let out = forward(&spec, &ForwardInputs { x: &x, residual: None, weight: None, bias: None });
        assert_eq!((out.rstd.clone(), out.var.clone()), (vec![0.1, 0.2, 0.2, 0.2], vec![100.0, 25.0, 0.390_625, 0.0]));
        let (dy, mean, rstd) = (&[1.0; 8], &out.mean[..], &out.rstd[..]);
        let inputs = BackwardInputs { dy, x: &x, weight: None, mean, rstd, dresidual_out: None };
        let dx = backward(&spec, &inputs).dx;
        let expected = [0.1 * (1.0 - 0.6 * 1.4), 0.1 * (1.0 - 0.8 * 1.4), 0.2, 0.2, 0.2, 0.2, 0.2, 0.2];
        assert!(dx.iter().zip(expected).all(|(dx, expected)| (dx - expected).abs() < 1e-15), "{dx:?}");
        let other = backward(&NormSpec::l2(4, 2, 5.0), &inputs).dx;
        assert!(dx[..2] == other[..2] && dx[2] != other[2] && dx[6..] == other[6..]);
    }

    /// The gradients of a weight before the norm are those of the whole: the test compares with
    /// central differences of a loss, in x, the weight and the bias.
    #[test]
    fn gradients_of_a_weight_before_the_norm_are_those_of_the_whole() {
        let (rows, cols) = (3, 6);
        let values = |seed: usize, len: usize| -> Vec<f64> {
            (0..len).map(|i| ((seed * 37 + i * i * 11 + i * 5) % 23) as f64 / 7.0 - 1.4).collect()
        };
        let dy = values(1, rows * cols);
        for (norm, groups) in [(Norm::Rms, 1), (Norm::Layer, 1), (Norm::Rms, 2), (Norm::Layer, 2)] {
            let spec = NormSpec::new(norm, rows, cols, 0.01).weight_offset(0.5).groups(groups);
            let given = [3, 4, 5].map(|seed| values(seed, if seed < 4 { rows * cols } else { cols }));
            let pass = |[x, weight, bias]: &[Vec<f64>; 3]| {
                // Not rounded: the derivative of a rounding counts as 1.
                let of_x = |(i, x): (usize, &f64)| x * effective_weight(&spec, Some(weight), i % cols);
                let h: Vec<f64> = x.iter().enumerate().map(of_x).collect();
                forward(&spec, &ForwardInputs { x: &h, residual: None, weight: None, bias: Some(bias) })
            };
            let loss = |given: &[Vec<f64>; 3]| pass(given).y.iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>();
            let out = pass(&given);
            let (mean, rstd) = (&out.mean[..], &out.rstd[..]);
            let inputs = BackwardInputs { dy: &dy, x: &out.h, weight: None, mean, rstd, dresidual_out: None };
            let of_norm = backward(&spec, &inputs);
            let (dx, dweight) = weighted_backward(&spec, &of_norm.dx, &given[0], &given[1]);
            are_central_differences([&dx, &dweight, &of_norm.dbias], &given, loss);
        }
    }

    /// Rounding to bf16 first gives a tie between the codes 16 and 18; the exact value is 1/256
    /// above it.
    #[test]
    fn what_is_rounded_first_may_have_another_code() {
        let y = [17.0 + 1.0 / 256.0];
        let codes = |source| {
            let spec = QuantSpec::new(CodeType::E4m3, ScaleKind::Given).source(source);
            let out = quantize(&spec, 1, &y, DType::Bf16, Some(1.0));
            out.codes.iter().map(|code| CodeType::E4m3.decode(*code)).collect::<Vec<_>>()
        };
        assert_eq!((codes(QuantSource::F32), codes(QuantSource::Rounded)), (vec![18.0], vec![16.0]));
    }

    #[test]
    fn nan_spoils_its_set_alone() {
        let y = [[1.0, f64::NAN], [2.0, 3.0]].concat();
        let out = quantize(&QuantSpec::new(CodeType::E4m3, ScaleKind::Row), 2, &y, DType::F32, None);
        assert!(out.amax[0].is_nan() && out.scale[0].is_nan() && out.codes[1] & 0x7f == 0x7f);
        assert_eq!((out.amax[1], CodeType::E4m3.decode(out.codes[3])), (3.0, 448.0));
        let given = quantize(&QuantSpec::new(CodeType::E4m3, ScaleKind::Given), 2, &y, DType::F32, Some(1.0));
        let values: Vec<f32> = given.codes.iter().map(|code| CodeType::E4m3.decode(*code)).collect();
        assert!(values[1].is_nan() && given.amax[0].is_nan());
        assert_eq!([values[0], values[2], values[3]], [1.0, 2.0, 3.0]);
    }

    #[test]
    fn no_rows_have_no_codes() {
        for kind in [ScaleKind::Row, MX] {
            let out = quantize(&QuantSpec::new(CodeType::E4m3, kind), 8, &[], DType::F32, None);
            assert!(out.amax.is_empty() && out.codes.is_empty(), "{kind:?}");
        }
        let out = quantize(&QuantSpec::new(CodeType::E4m3, ScaleKind::Current), 8, &[], DType::F32, None);
        assert_eq!((out.amax, out.scale), (vec![0.0], vec![1.0]));
    }
}
