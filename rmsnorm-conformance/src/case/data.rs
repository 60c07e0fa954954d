//! The inputs of a case: one distribution per family, from a counter-based generator.
//!
//! An element depends only on (seed, tensor, index), so any element can be recomputed alone. Values
//! are rounded to their storage dtype here. The reference, the bounds and the backend all use the
//! rounded value.

use std::collections::BTreeMap;
use std::ops::Range;

use rmsnorm_spec::quant::{QuantSpec, ScaleKind};
use rmsnorm_spec::reference::{self, BackwardInputs, ForwardInputs, round_to};
use rmsnorm_spec::{DType, DTypes, Direction, Norm, Slot, Tensor, TensorShape};

use crate::case::{Case, Family, Kind};
use crate::judge::gate::Gated;
use crate::testing::draw;

/// Uniform in (0, 1).
fn uniform(bits: u64) -> f64 {
    ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// The inputs of a case as dense tensors. Values are exact in their storage dtype.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inputs {
    /// Several parts of x follow one after the other. In a backward call, x is the tensor that was
    /// normalized, and mean is zero for RMS norm. An output has the values that the call adds to.
    values: BTreeMap<Tensor, Vec<f64>>,
    /// (rows, cols); the rounded sum of several parts and the residual
    pub sum: Option<Vec<f64>>,
    /// The given scales of a quantized call.
    pub given: Option<Given>,
}

impl Inputs {
    /// The values of a tensor, if the case has it.
    pub fn get(&self, tensor: Tensor) -> Option<&[f64]> {
        self.values.get(&tensor).map(Vec::as_slice)
    }

    /// The values of a tensor that every such case has.
    pub fn of(&self, tensor: Tensor) -> &[f64] {
        self.get(tensor).unwrap_or_default()
    }

    /// The same inputs with other values of a tensor, or without it.
    pub fn with(mut self, tensor: Tensor, values: Option<Vec<f64>>) -> Inputs {
        match values {
            Some(values) => self.values.insert(tensor, values),
            None => self.values.remove(&tensor),
        };
        self
    }

    /// The same inputs with other values of all tensors of some shapes.
    pub fn map(mut self, change: impl Fn(Tensor, &[f64]) -> Option<Vec<f64>>) -> Inputs {
        for (tensor, values) in &mut self.values {
            *values = change(*tensor, values).unwrap_or_else(|| std::mem::take(values));
        }
        self
    }

    /// The same inputs with only `rows`, in this order.
    pub fn with_rows(&self, rows: &[usize], case: &Case) -> Inputs {
        let of_parts: Vec<usize> =
            (0..case.parts).flat_map(|part| rows.iter().map(move |row| part * case.rows + row)).collect();
        let picked = |tensor: Tensor, values: &[f64]| {
            let width = if tensor.is_matrix() { case.cols } else { case.groups };
            let has_rows = tensor.is_matrix() || tensor.shape() == TensorShape::Rows;
            has_rows.then(|| pick_rows(values, if tensor == Tensor::X { &of_parts } else { rows }, width))
        };
        let sum = self.sum.as_ref().map(|sum| pick_rows(sum, rows, case.cols));
        Inputs { sum, ..self.clone().map(picked) }
    }

    /// The same inputs with only `groups` of columns.
    pub fn with_groups(&self, groups: &Range<usize>, case: &Case) -> Inputs {
        self.clone().map(|tensor, values| pick_groups(values, tensor, groups, case))
    }

    /// The inputs of a forward call of the reference.
    pub fn forward(&self, case: &Case) -> ForwardInputs<'_> {
        ForwardInputs {
            x: self.of(Tensor::X),
            residual: self.get(Tensor::Residual).map(|residual| (residual, case.dtypes.residual)),
            weight: self.get(Tensor::Weight),
            bias: self.get(Tensor::Bias),
        }
    }

    /// The inputs of a backward call of the reference.
    pub fn backward(&self) -> BackwardInputs<'_> {
        BackwardInputs {
            dy: self.of(Tensor::Dy),
            x: self.of(Tensor::X),
            weight: self.get(Tensor::Weight),
            mean: self.of(Tensor::Mean),
            rstd: self.of(Tensor::Rstd),
            dresidual_out: self.get(Tensor::DresidualOut),
        }
    }

    /// The gate of a call, if it has one.
    pub fn gated(&self, case: &Case) -> Option<Gated<'_>> {
        let DTypes { activation, weight, .. } = case.dtypes;
        let wide = if weight == DType::F32 { DType::F32 } else { activation };
        Some(Gated { gate: case.spec().gate?, z: self.of(Tensor::Gate), wide })
    }

    /// `values`, multiplied with the activated gate or the weight if the call has one in that slot.
    fn through(&self, slot: Slot, case: &Case, values: Vec<f64>) -> Vec<f64> {
        if let Some(gated) = self.gated(case).filter(|gated| gated.gate.slot == slot) {
            return reference::gated(gated.gate.activation, &values, gated.z);
        }
        match self.get(Tensor::Weight).filter(|_| slot == Slot::Before && case.cast_order.is_weight_first()) {
            Some(weight) => reference::weighted(&case.spec(), &values, weight, case.dtypes.activation),
            None => values,
        }
    }

    /// The unrounded result of a forward call.
    fn y(&self, case: &Case) -> Vec<f64> {
        let x = self.through(Slot::Before, case, self.of(Tensor::X).to_vec());
        let weight = self.get(Tensor::Weight).filter(|_| !case.cast_order.is_weight_first());
        let norm = reference::forward(&case.spec(), &ForwardInputs { x: &x, weight, ..self.forward(case) });
        self.through(Slot::After, case, norm.y)
    }

    /// With the statistics of the f64 reference, rounded to f32 as a forward pass stores them.
    pub fn with_statistics(self, case: &Case) -> Inputs {
        let x = self.through(Slot::Before, case, self.of(Tensor::X).to_vec());
        let given = ForwardInputs { x: &x, residual: None, weight: None, bias: None };
        let forward = reference::forward(&case.spec(), &given);
        let stored = |values: &[f64]| Some(values.iter().map(|&value| round_to(value, DType::F32)).collect());
        self.with(Tensor::Mean, stored(&forward.mean)).with(Tensor::Rstd, stored(&forward.rstd))
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
        let y = inputs.y(case);
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

/// The elements that belong to some of the groups of columns of a case, in a tensor whose elements
/// all belong to one.
pub(crate) fn pick_groups<T: Copy>(values: &[T], tensor: Tensor, groups: &Range<usize>, case: &Case) -> Option<Vec<T>> {
    let of_group = match tensor.shape() {
        TensorShape::Matrix | TensorShape::Cols => case.width(),
        TensorShape::Rows => 1,
        TensorShape::Transposed
        | TensorShape::Workspace
        | TensorShape::One
        | TensorShape::Scales
        | TensorShape::ScalesColumnwise => return None,
    };
    let picked = groups.start * of_group..groups.end * of_group;
    Some(values.chunks(case.groups * of_group).flat_map(|row| row[picked.clone()].iter().copied()).collect())
}

/// The inputs of `case`.
pub(crate) fn inputs(case: &Case) -> Inputs {
    let (rows, cols, present) = (case.rows, case.cols, case.present);
    let matrix = |value: &dyn Fn(usize, usize) -> f64, dtype| -> Vec<f64> {
        (0..rows * cols).map(|i| round_to(value(i / cols, i % cols), dtype)).collect()
    };
    // Mean and rstd are results of forward.
    let read = Direction::Forward.reads().union(Direction::Backward.reads()).intersection(present);
    let read = read.with(Tensor::X).set(Tensor::Gate, case.kind.gate().is_some());
    let drawn = read.iter().filter(|tensor| tensor.shape() != TensorShape::Rows);
    let mut inputs = Inputs::default();
    let dtype = |tensor: Tensor| {
        if tensor == Tensor::X { Some(case.x_dtype()) } else { tensor.dtype(case.kind.direction, case.dtypes) }
    };
    for (tensor, dtype) in drawn.filter_map(|tensor| Some((tensor, dtype(tensor)?))) {
        let parts = if tensor == Tensor::X { case.parts } else { 1 };
        let of_part = |part: usize| {
            let value = |row, col| Painter { case, part }.value(tensor, row, col);
            if tensor.is_matrix() {
                matrix(&value, dtype)
            } else {
                (0..cols).map(|col| round_to(value(0, col), dtype)).collect()
            }
        };
        inputs = inputs.with(tensor, Some((0..parts).flat_map(of_part).collect()));
    }
    let (x, residual) = (inputs.of(Tensor::X), inputs.get(Tensor::Residual));
    inputs.sum = (case.parts > 1).then(|| reference::sum_of_parts(x, case.parts, residual, case.dtypes.residual));
    if case.kind.has_backward() {
        // The input and the weight of the last norm.
        let (h, weight) = match (case.kind.is_after(), present.has(Tensor::Y)) {
            (false, _) => {
                let (x, residual) = (inputs.of(Tensor::X), inputs.get(Tensor::Residual));
                let residual = |i: usize| residual.map_or(0.0, |residual| residual[i]);
                let added = || x.iter().enumerate().map(|(i, x)| x + residual(i)).collect();
                let added = || inputs.through(Slot::Before, case, added());
                (inputs.sum.clone().unwrap_or_else(added), Tensor::Weight)
            }
            (true, false) => (inputs.of(Tensor::X).to_vec(), Tensor::Weight),
            (true, true) => (reference::forward(&case.spec(), &inputs.forward(case)).sum, Tensor::NextWeight),
        };
        let weight = inputs.get(weight).filter(|_| !case.cast_order.is_weight_first());
        let weight = |col: usize| weight.map_or(1.0, |weight| weight[col] + f64::from(case.weight_offset));
        let painter = Painter { case, part: 0 };
        let dy = |row: usize, col: usize| painter.dy(row, col, h[row * cols + col], weight(col));
        let dy = matrix(&dy, case.dtypes.activation);
        inputs = inputs.with(Tensor::Dy, Some(dy));
    }
    inputs.given = case.quant.map(|quant| Given::new(case, &quant, &inputs));
    let Some((quant, given)) = case.quant.zip(inputs.given) else { return inputs };
    let scale = (quant.scale == ScaleKind::Given).then(|| vec![given.scale]);
    inputs.with(Tensor::Scale, scale).with(Tensor::Amax, quant.folds_amax.then(|| vec![given.amax]))
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

    /// An element of a tensor that depends on no other tensor.
    fn value(&self, tensor: Tensor, row: usize, col: usize) -> f64 {
        if tensor == Tensor::X {
            self.x(row, col)
        } else if tensor == Tensor::Residual {
            self.residual(row, col)
        } else if [Tensor::Weight, Tensor::NextWeight].contains(&tensor) {
            self.weight(tensor, col)
        } else if [Tensor::Bias, Tensor::NextBias].contains(&tensor) {
            self.bias(tensor, col)
        } else if tensor == Tensor::Gate {
            self.gate(row, col)
        } else {
            self.normal(tensor, self.at(row, col))
        }
    }

    fn x(&self, row: usize, col: usize) -> f64 {
        let (case, i) = (self.case, self.at(row, col));
        let z = self.normal(Tensor::X, i);
        let dtype = if case.casts { case.x_dtype() } else { case.dtypes.activation };
        match case.family {
            Family::Randn | Family::CorrDy => z,
            Family::NearEps => z * self.near_eps(row),
            Family::Large => z * self.large(),
            Family::Shifted => z + if dtype == DType::F32 { 300.0 } else { 16.0 },
            Family::ShiftedHi => z + [3000.0, 500.0, 64.0][dtype as usize],
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

    /// The deviation of an element where the term that eps is added to is about eps. For the clamped
    /// L2 norm, one where the norm is below eps, or above it.
    fn near_eps(&self, row: usize) -> f64 {
        let &Case { norm, eps, .. } = self.case;
        if norm == Norm::L2Clamped {
            return f64::from(eps) / (self.case.width() as f64).sqrt() * [0.25, 1.25, 0.8, 4.0][row % 4];
        }
        (f64::from(eps) / (self.case.width() / norm.divisor(self.case.width())) as f64).sqrt()
    }

    /// A deviation far from overflow. L2 norm has no average to bring its sum of squares down: where
    /// no gate multiplies x, that is about 2^-4 of the sum that is still judged.
    fn large(&self) -> f64 {
        let case = self.case;
        let is_huge = !Norm::USUAL.contains(&case.norm) && case.kind.gate() != Some(Slot::Before);
        match case.dtypes.activation {
            DType::F16 => 1.5e3,
            DType::F32 | DType::Bf16 if is_huge => 3e18 / (case.width() as f64).sqrt(),
            DType::F32 | DType::Bf16 => 3e6,
        }
    }

    /// Mostly where an activation bends; in some families beyond the ends of exp, or so large that
    /// it is the identity or one.
    fn gate(&self, row: usize, col: usize) -> f64 {
        let (i, dtype) = (self.at(row, col), self.case.dtypes.activation);
        let z = self.normal(Tensor::Gate, i);
        match self.case.family {
            Family::Randn | Family::NearEps | Family::CorrDy | Family::Zeros | Family::Outlier => 2.0 * z,
            Family::Large => 40.0 * z,
            Family::Shifted => z - 1.25,
            Family::ShiftedHi => z + 16.0,
            Family::PosDy => z.abs() + 0.25,
            Family::Loguni => z * (16.0 * uniform(self.bits(Tensor::Dgate, i)) - 8.0).exp2(),
            Family::Exact | Family::Codes => self.pick(Tensor::Gate, i, [32.0, 64.0, 128.0]),
            // A gated x that is constant is nothing but error, less its mean.
            Family::Const if self.case.kind.gate() == Some(Slot::Before) => 2.0 * z,
            Family::Const => 0.75,
            Family::Mixed => match row % 5 {
                0 => z,
                1 => 0.0,
                2 => 3.140_625,
                3 => 64.0 * z,
                _ => z / 1024.0,
            },
            Family::Subnormal if col % 5 == 1 => self.subnormal(dtype, z, 1),
            Family::Subnormal => 2.0 * z,
            // In the row whose x is finite, and whose neighbours' are.
            Family::Nonfinite if row % 5 == 4 => match col {
                0 => f64::NAN,
                1 => f64::INFINITY,
                2 => f64::NEG_INFINITY,
                _ => z,
            },
            Family::Nonfinite => z,
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
            Family::NearEps => z * self.near_eps(row),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_has_the_moments_of_a_normal() {
        let case = Case::plain(Kind::FORWARD, Norm::Rms, DType::F32, 100, 1000);
        let inputs = inputs(&case);
        let x = inputs.of(Tensor::X);
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
                for value in inputs.of(Tensor::X).iter().chain(inputs.of(Tensor::Dy)) {
                    assert!(value.is_nan() || round_to(*value, dtype) == *value, "{family:?} {dtype} {value}");
                }
            }
        }
    }
}
