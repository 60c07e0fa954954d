//! The inputs of a case: one distribution per family, from a counter-based generator.
//!
//! An element depends only on (seed, tensor, index), so any element can be recomputed alone. Values
//! are rounded to their storage dtype here. The reference, the bounds and the backend all use the
//! rounded value.

use rmsnorm_spec::quant::QuantSpec;
use rmsnorm_spec::reference::{self, ForwardInputs, round_to};
use rmsnorm_spec::{DType, Norm, Tensor};

use crate::case::{Case, Family, Kind};
use crate::testing::draw;

/// Uniform in (0, 1).
fn uniform(bits: u64) -> f64 {
    ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// The inputs of a case as dense tensors. Values are exact in their storage dtype.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    /// (rows, cols); in a backward case the tensor that was normalized. Several parts follow one
    /// after the other.
    pub x: Vec<f64>,
    /// (rows, cols); the rounded sum of several parts and the residual
    pub sum: Option<Vec<f64>>,
    /// (rows, cols)
    pub residual: Option<Vec<f64>>,
    /// (cols)
    pub weight: Option<Vec<f64>>,
    /// (cols)
    pub bias: Option<Vec<f64>>,
    /// (cols); weight of the next norm
    pub next_weight: Option<Vec<f64>>,
    /// (cols); bias of the next norm
    pub next_bias: Option<Vec<f64>>,
    /// (rows, cols); empty without a backward call
    pub dy: Vec<f64>,
    /// (rows, cols)
    pub dresidual_out: Option<Vec<f64>>,
    /// The given scales of a quantized call.
    pub given: Option<Given>,
}

impl Inputs {
    /// The same inputs with only `rows`, in this order.
    pub fn with_rows(&self, rows: &[usize], case: &Case) -> Inputs {
        let cols = case.cols;
        let of_parts: Vec<usize> =
            (0..case.parts).flat_map(|part| rows.iter().map(move |row| part * case.rows + row)).collect();
        let picked = |matrix: &Option<Vec<f64>>| matrix.as_ref().map(|matrix| pick_rows(matrix, rows, cols));
        Inputs {
            x: pick_rows(&self.x, &of_parts, cols),
            sum: picked(&self.sum),
            residual: picked(&self.residual),
            dy: if self.dy.is_empty() { Vec::new() } else { pick_rows(&self.dy, rows, cols) },
            dresidual_out: picked(&self.dresidual_out),
            ..self.clone()
        }
    }
}

/// The caller's scale, and the initial `amax` if the call folds into it.
#[derive(Clone, Copy, Debug)]
pub struct Given {
    /// The scale, for `ScaleKind::Given`.
    pub scale: f64,
    /// The value of `amax` before the call.
    pub amax: f64,
}

impl Given {
    /// Chosen relative to the largest result: a scale that just fits, saturates many elements, or
    /// leaves almost no bits; an amax that is larger than the result's or is not.
    fn new(case: &Case, quant: &QuantSpec, inputs: &Inputs) -> Given {
        let residual = inputs.residual.as_deref().map(|residual| (residual, case.dtypes.residual));
        let given =
            ForwardInputs { x: &inputs.x, residual, weight: inputs.weight.as_deref(), bias: inputs.bias.as_deref() };
        let y = reference::forward(&case.spec(), &given).y;
        let largest = y.iter().map(|y| y.abs()).filter(|y| y.is_finite()).fold(0.0, f64::max);
        let choice = draw(u64::from(case.seed), Tensor::Scale, 0) >> 20;
        let factor = [1.0, 1.0, 0.2, 0.01, 60.0, 3000.0][(choice % 6) as usize];
        let scale = (largest / f64::from(quant.codes.largest()) * factor) as f32;
        // Values on ties and steps of the format must stay on them.
        let is_exact = case.family == Family::Codes;
        let scale = if is_exact || !scale.is_normal() { 0.5 } else { scale };
        Given { scale: f64::from(scale), amax: f64::from((largest * [0.5, 2.0][(choice >> 8) as usize % 2]) as f32) }
    }
}

/// Some rows of a dense matrix, in the order given.
pub(crate) fn pick_rows<T: Copy>(matrix: &[T], rows: &[usize], cols: usize) -> Vec<T> {
    rows.iter().flat_map(|row| matrix[row * cols..(row + 1) * cols].iter().copied()).collect()
}

/// The inputs of `case`.
pub(crate) fn inputs(case: &Case) -> Inputs {
    let painter = Painter { case, part: 0 };
    let present = case.present;
    let weight_dtype = case.dtypes.weight;
    let x_dtype = case.x_dtype();
    let matrix = |value: &dyn Fn(usize, usize) -> f64, dtype| -> Vec<f64> {
        (0..case.rows * case.cols).map(|i| round_to(value(i / case.cols, i % case.cols), dtype)).collect()
    };
    let vector = |value: &dyn Fn(usize) -> f64| -> Vec<f64> {
        (0..case.cols).map(|col| round_to(value(col), weight_dtype)).collect()
    };

    let x: Vec<f64> =
        (0..case.parts).flat_map(|part| matrix(&|row, col| Painter { case, part }.x(row, col), x_dtype)).collect();
    let residual =
        present.has(Tensor::Residual).then(|| matrix(&|row, col| painter.residual(row, col), case.dtypes.residual));
    let weights = |tensor| present.has(tensor).then(|| vector(&|col| painter.weight(tensor, col)));
    let biases = |tensor| present.has(tensor).then(|| vector(&|col| painter.bias(tensor, col)));
    let (weight, bias) = (weights(Tensor::Weight), biases(Tensor::Bias));
    let (next_weight, next_bias) = (weights(Tensor::NextWeight), biases(Tensor::NextBias));
    let sum =
        (case.parts > 1).then(|| reference::sum_of_parts(&x, case.parts, residual.as_deref(), case.dtypes.residual));
    let dy = if case.kind.has_backward() {
        // The input and the weight of the last norm.
        let (h, weight) = match (case.kind.is_after(), present.has(Tensor::Y)) {
            (false, _) => {
                let residual = |i: usize| residual.as_ref().map_or(0.0, |residual| residual[i]);
                let added = || x.iter().enumerate().map(|(i, x)| x + residual(i)).collect();
                (sum.clone().unwrap_or_else(added), &weight)
            }
            (true, false) => (x.clone(), &weight),
            (true, true) => {
                let residual = residual.as_deref().map(|residual| (residual, case.dtypes.residual));
                let inputs = ForwardInputs { x: &x, residual, weight: weight.as_deref(), bias: bias.as_deref() };
                (reference::forward(&case.spec(), &inputs).sum, &next_weight)
            }
        };
        let weight = |col: usize| weight.as_ref().map_or(1.0, |w| w[col] + f64::from(case.weight_offset));
        matrix(&|row, col| painter.dy(row, col, h[row * case.cols + col], weight(col)), case.dtypes.activation)
    } else {
        Vec::new()
    };
    let dresidual_out = present
        .has(Tensor::DresidualOut)
        .then(|| matrix(&|row, col| painter.dresidual_out(row, col), case.dtypes.residual));
    let inputs = Inputs { x, sum, residual, weight, bias, next_weight, next_bias, dy, dresidual_out, given: None };
    Inputs { given: case.quant.map(|quant| Given::new(case, &quant, &inputs)), ..inputs }
}

/// Computes single elements of the inputs.
struct Painter<'a> {
    case: &'a Case,
    /// The part of x.
    part: usize,
}

impl Painter<'_> {
    fn bits(&self, tensor: Tensor, index: usize) -> u64 {
        draw(u64::from(self.case.seed), tensor, index)
    }

    fn at(&self, row: usize, col: usize) -> usize {
        (self.part * self.case.rows + row) * self.case.cols + col
    }

    /// Standard normal, by the Box-Muller transform.
    fn normal(&self, tensor: Tensor, index: usize) -> f64 {
        let radius = (-2.0 * uniform(self.bits(tensor, 2 * index)).ln()).sqrt();
        radius * (std::f64::consts::TAU * uniform(self.bits(tensor, 2 * index + 1))).cos()
    }

    fn pick<const N: usize>(&self, tensor: Tensor, index: usize, choices: [f64; N]) -> f64 {
        choices[(self.bits(tensor, index) >> 32) as usize % N]
    }

    fn x(&self, row: usize, col: usize) -> f64 {
        let (case, i) = (self.case, self.at(row, col));
        let z = self.normal(Tensor::X, i);
        let dtype = case.dtypes.activation;
        match case.family {
            Family::Randn | Family::CorrDy => z,
            Family::NearEps => z * f64::from(case.eps).sqrt(),
            Family::Large => z * if dtype == DType::F16 { 1.5e3 } else { 3e6 },
            Family::Shifted => z + if dtype == DType::F32 { 300.0 } else { 16.0 },
            Family::ShiftedHi => z + by_dtype(dtype, 3000.0, 500.0, 64.0),
            Family::PosDy => z.abs() + 0.25,
            Family::Loguni => z * (16.0 * uniform(self.bits(Tensor::Workspace, i)) - 8.0).exp2(),
            Family::Outlier => {
                let column = if col + 1 == case.cols { 40.0 } else { 1.0 };
                let line = if row + 1 == case.rows { 3.0 } else { 1.0 };
                z * column * line
            }
            Family::Exact => self.pick(Tensor::X, i, [-2.0, 2.0]),
            Family::Codes => self.pick(Tensor::X, i, [-1.0, 1.0]),
            Family::Const => self.constant(),
            Family::Zeros => 0.0,
            Family::Mixed => match row % 5 {
                0 => z,
                1 => 0.0,
                2 => 3.140_625,
                3 => z * 1024.0,
                _ => z / 1024.0,
            },
            Family::Subnormal => self.subnormal(dtype, z, col),
            Family::Nonfinite => self.nonfinite(dtype, z, row, col),
        }
    }

    /// The gradient of layer norm starts from x - mean, which is zero here for any x. So x may be
    /// so large that mean * rstd overflows: an element after the end of the row, taken as zero, has
    /// an infinite x_hat, and zero times infinity must not get into a sum. f16 has no values so
    /// large.
    fn constant(&self) -> f64 {
        let case = self.case;
        let is_given = case.kind == Kind::BACKWARD && case.norm == Norm::Layer;
        let is_wide = case.x_dtype() != DType::F16;
        if is_given && is_wide { 124f64.exp2() } else { 3.140_625 }
    }

    /// In f16 all elements are subnormal. In f32 and bf16 one in three is: the results of a fully
    /// subnormal row would be below the flush terms of the bounds and prove nothing.
    fn subnormal(&self, dtype: DType, z: f64, col: usize) -> f64 {
        match dtype {
            DType::F16 => z * (-17f64).exp2(),
            DType::F32 | DType::Bf16 if col % 3 == 1 => z * (-130f64).exp2(),
            DType::F32 | DType::Bf16 => z * (-90f64).exp2(),
        }
    }

    /// In every five rows, the first and the last stay finite. The others get one NaN, one
    /// infinity, or squares that overflow f32 (in f16, which has no such values, the negative
    /// infinity).
    fn nonfinite(&self, dtype: DType, z: f64, row: usize, col: usize) -> f64 {
        let hit = col == (row * 7 + 3) % self.case.cols;
        match row % 5 {
            1 if hit => f64::NAN,
            2 if hit => f64::INFINITY,
            3 if dtype == DType::F16 && hit => f64::NEG_INFINITY,
            3 if dtype != DType::F16 => z * 1e25,
            _ => z,
        }
    }

    fn residual(&self, row: usize, col: usize) -> f64 {
        let z = self.normal(Tensor::Residual, self.at(row, col));
        match self.case.family {
            Family::NearEps => z * f64::from(self.case.eps).sqrt(),
            // After the norm, the sum does not enter h; with zeros all values would be zero.
            Family::Const | Family::Zeros if self.case.kind.is_after() => z,
            // These families need exact values of h.
            Family::Exact | Family::Const | Family::Zeros | Family::Subnormal | Family::Codes => 0.0,
            Family::Randn | Family::Large | Family::Shifted | Family::ShiftedHi | Family::CorrDy => z,
            Family::PosDy | Family::Loguni | Family::Outlier | Family::Mixed | Family::Nonfinite => z,
        }
    }

    fn weight(&self, tensor: Tensor, col: usize) -> f64 {
        let offset = f64::from(self.case.weight_offset);
        if self.case.family == Family::Exact {
            return self.pick(tensor, col, [0.25, 0.5, 1.0, 2.0, 4.0]) - offset;
        }
        if self.case.family == Family::Codes {
            return hard_weight(self.bits(tensor, col), self.case.dtypes.weight) - offset;
        }
        let center = if offset == 1.0 { 0.0 } else { 1.0 };
        center + 0.3 * self.normal(tensor, col)
    }

    fn bias(&self, tensor: Tensor, col: usize) -> f64 {
        if self.case.family == Family::Exact {
            return self.pick(tensor, col, [-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0]);
        }
        0.5 * self.normal(tensor, col)
    }

    fn dy(&self, row: usize, col: usize, h: f64, weight: f64) -> f64 {
        let (case, i) = (self.case, self.at(row, col));
        let z = self.normal(Tensor::Dy, i);
        match case.family {
            Family::CorrDy => (h + 0.05 * z) / if weight.abs() < 0.05 { 0.05 } else { weight },
            Family::PosDy => z.abs() + 0.25,
            Family::Outlier => {
                let column = if col + 1 == case.cols { 8.0 } else { 1.0 };
                let line = if row + 1 == case.rows { 8.0 } else { 1.0 };
                z * column * line
            }
            Family::Exact => self.pick(Tensor::Dy, i, [-1.0, 1.0, 2.0, -2.0]),
            Family::Const => 1.0,
            // Rows differ from the rows one and two blocks or clusters before them, so using the
            // sums of a wrong row is detected.
            Family::Mixed => z + (row % 7) as f64,
            Family::Nonfinite if row % 5 == 4 && row % 2 == 1 && col == 0 => f64::NAN,
            Family::Randn | Family::NearEps | Family::Large | Family::Shifted | Family::ShiftedHi => z,
            Family::Loguni | Family::Zeros | Family::Subnormal | Family::Nonfinite | Family::Codes => z,
        }
    }

    fn dresidual_out(&self, row: usize, col: usize) -> f64 {
        self.normal(Tensor::DresidualOut, self.at(row, col))
    }
}

/// Difficult weights: values of a format, ties and their neighbours, ends of the range; block
/// maxima on powers of two, on 448 2^k and next to them.
fn hard_weight(bits: u64, dtype: DType) -> f64 {
    let exponent = ((bits >> 8) % 19) as i32 - 11;
    let significand = 16 + (bits >> 16 & 15);
    // Four bits after the leading one: every E4M3 value and every tie.
    let value = significand as f64 * 2f64.powi(exponent);
    let special = [0.0, 448.0, 464.0, 465.0, 2f64.powi(-10), 2f64.powi(-6), 57344.0, 61440.0, 1.0, 127.5, 0.875, 1e-30];
    let value = if bits & 7 == 0 { special[(bits >> 32) as usize % special.len()] } else { value };
    // In f32 also the direct neighbours. 16 bits represent few of them and round the others.
    let beside = match (dtype, bits >> 40 & 3) {
        (DType::F32, 0) => f64::from((value as f32).next_up()),
        (DType::F32, 1) => f64::from((value as f32).next_down()),
        _ => value,
    };
    if bits >> 50 & 1 == 1 { -beside } else { beside }
}

fn by_dtype(dtype: DType, f32: f64, f16: f64, bf16: f64) -> f64 {
    match dtype {
        DType::F32 => f32,
        DType::F16 => f16,
        DType::Bf16 => bf16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_has_the_moments_of_a_normal() {
        let case = Case::plain(Kind::FORWARD, Norm::Rms, DType::F32, 100, 1000);
        let x = inputs(&case).x;
        let count = x.len() as f64;
        let mean = x.iter().sum::<f64>() / count;
        let var = x.iter().map(|x| x * x).sum::<f64>() / count;
        let fourth = x.iter().map(|x| x.powi(4)).sum::<f64>() / count;
        // Five standard deviations of each estimate: 1, sqrt(2) and sqrt(96) over sqrt(count).
        assert!(mean.abs() < 5.0 / count.sqrt(), "{mean}");
        assert!((var - 1.0).abs() < 5.0 * 2f64.sqrt() / count.sqrt(), "{var}");
        assert!((fourth - 3.0).abs() < 5.0 * 96f64.sqrt() / count.sqrt(), "{fourth}");
    }

    #[test]
    fn every_value_is_one_of_its_dtype() {
        for family in Family::ALL {
            for dtype in DType::ALL {
                let case = Case { family, ..Case::plain(Kind::BACKWARD, Norm::Layer, dtype, 5, 9) };
                let inputs = inputs(&case);
                for value in inputs.x.iter().chain(&inputs.dy) {
                    assert!(value.is_nan() || round_to(*value, dtype) == *value, "{family:?} {dtype} {value}");
                }
            }
        }
    }
}
