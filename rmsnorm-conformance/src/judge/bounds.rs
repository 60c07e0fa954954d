//! A-priori error bounds, derived in [math](rmsnorm_spec::math) section 5: formulas in the unit
//! roundoff, never a tuned tolerance.
//!
//! A bound is the largest absolute error that the declared f32 arithmetic can leave in an output
//! before the final rounding to a 16-bit dtype. For an f32 output, it includes the final rounding.
//! A bound is infinite where the arithmetic guarantees nothing: a sum overflows f32, or eps is lost
//! in the rounding errors of the variance. A bound is NaN where an input is not finite.
//! [`judge`](crate::judge) applies the bounds.

use rmsnorm_spec::reference::{BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs, round_to};
use rmsnorm_spec::{DType, Norm, NormSpec};

use super::{round_down, round_up};
use crate::{Arithmetic, NonFinite};

/// Factor for the products of two errors, which the formulas leave out.
pub(crate) const SECOND_ORDER: f64 = 1.0 + 1.0 / 1024.0;
/// The smallest normal f32: the largest loss of an operation by gradual underflow or a flush to
/// zero.
pub(crate) const TINY: f64 = f32::MIN_POSITIVE as f64;
/// Sums up to here cannot overflow f32, for any rounding errors.
const NO_OVERFLOW: f64 = f32::MAX as f64 / 2.0;
/// Standard deviations that [`Mode::Statistical`] allows.
const DEVIATIONS: f64 = 6.0;

/// Assumption about how the rounding errors of a long sum add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Rigorous: all rounding errors are maximal and have the same sign.
    Worst,
    /// Rounding errors are independent random variables of mean zero; the bound is six standard
    /// deviations. Tighter, but valid only for continuous, roughly centred data. If few distinct
    /// values repeat, so do their rounding errors.
    Statistical,
}

/// The assumptions of the bounds.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    /// The declared arithmetic.
    pub arithmetic: &'a Arithmetic,
    /// Assumption about the errors of sums.
    pub mode: Mode,
}

/// Absolute error bounds of a forward pass.
#[derive(Clone, Debug, Default)]
pub struct ForwardBounds {
    /// (rows, groups); zeros for all but layer norm.
    pub mean: Vec<f64>,
    /// (rows, groups)
    pub rstd: Vec<f64>,
    /// (rows, cols)
    pub y: Vec<f64>,
    /// (rows, cols); in f32, before any rounding to the dtype of `y`.
    pub x_hat: Vec<f64>,
    /// (rows, cols); of `h - mean`.
    pub(crate) deviation: Vec<f64>,
    /// (rows, groups); the errors that the backward pass inherits.
    statistics: Vec<StatisticsError>,
}

/// Absolute error bounds of a backward pass.
#[derive(Clone, Debug, Default)]
pub struct BackwardBounds {
    /// (rows, cols)
    pub dx: Vec<f64>,
    /// (cols)
    pub dweight: Vec<f64>,
    /// (cols)
    pub dbias: Vec<f64>,
    /// (rows, cols); of the result of forward before any rounding, as backward finds it again.
    pub(crate) y: Vec<f64>,
}

/// Absolute errors of a backward pass's inputs that are themselves results, each (rows, cols).
#[derive(Clone, Copy, Debug, Default)]
pub struct InputErrors<'a> {
    /// Of `dy`.
    pub dy: Option<&'a [f64]>,
    /// Of `x`.
    pub x: Option<&'a [f64]>,
    /// Whether forward adds this bias, for the error of its result.
    pub bias: Option<&'a [f64]>,
}

/// The origin of the mean and rstd that the backward pass under test used.
#[derive(Clone, Copy, Debug)]
pub enum Statistics<'a> {
    /// Exactly the mean and rstd that the reference received.
    Given,
    /// The backend's own forward pass, with these error bounds.
    Computed(&'a ForwardBounds),
}

/// The bounds of equations (2) to (6): [math](rmsnorm_spec::math), section 5.2.
///
/// `h_dtype` is the dtype of the stored `h`: that of the residual if there is one, otherwise that
/// of `x`. `h_errors` (rows, cols) are the errors of an `h` that is a result itself. `outputs` are
/// the reference's results for `inputs`; a computed value may differ from them by at most the
/// bound.
pub fn forward(
    spec: &NormSpec,
    inputs: &ForwardInputs<'_>,
    (h_dtype, h_errors): (DType, Option<&[f64]>),
    outputs: &ForwardOutputs,
    model: Model<'_>,
) -> ForwardBounds {
    let arithmetic = model.arithmetic;
    let mut bounds = ForwardBounds::default();
    let width = spec.cols / spec.groups;
    for (index, h) in outputs.h.chunks_exact(width).enumerate() {
        let errors = h_errors.map(|errors| &errors[index * width..][..width]);
        let row = Row { h, errors, mean: outputs.mean[index], var: outputs.var[index], rstd: outputs.rstd[index] };
        let statistics = statistics_error(spec, h_dtype, &row, model);
        bounds.mean.push(match spec.norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => 0.0,
            Norm::Layer => statistics.mean * SECOND_ORDER + TINY,
        });
        bounds.rstd.push(statistics.bound(statistics.rstd * row.rstd * SECOND_ORDER));

        for (i, h) in h.iter().enumerate() {
            let col = index % spec.groups * width + i;
            let x_hat = XHat::new(spec.norm, (h - row.mean, row.error(i)), row.rstd, statistics, arithmetic);
            let weight = Weight::new(spec, inputs.weight, col);
            bounds.y.push(y_error(&x_hat, weight, inputs.bias.map(|bias| bias[col]), row.rstd, statistics, arithmetic));
            bounds.x_hat.push(statistics.bound(x_hat.error() * SECOND_ORDER + underflow(row.rstd, 0.0)));
            bounds.deviation.push(deviation_error(spec.norm, h - row.mean, row.error(i), statistics.mean, arithmetic));
        }
        bounds.statistics.push(statistics);
    }
    bounds
}

/// The bounds of equations (7) to (12): [math](rmsnorm_spec::math), section 5.3.
///
/// `outputs` are the reference's results for `inputs`. `statistics` is the origin of the `mean` and
/// `rstd` in `inputs`; `errors` are those of other inputs.
pub fn backward(
    spec: &NormSpec,
    inputs: &BackwardInputs<'_>,
    errors: InputErrors<'_>,
    outputs: &BackwardOutputs,
    statistics: Statistics<'_>,
    model: Model<'_>,
) -> BackwardBounds {
    let pass = Pass { spec, inputs, errors, outputs, model };
    let (mut dx, mut y) = (Vec::with_capacity(outputs.dx.len()), Vec::with_capacity(outputs.dx.len()));
    let mut columns = vec![Column::default(); spec.cols];
    let width = spec.cols / spec.groups;
    for index in 0..spec.rows * spec.groups {
        let statistics = match statistics {
            Statistics::Given => StatisticsError { mean: 0.0, rstd: 0.0 },
            Statistics::Computed(forward) => forward.statistics[index],
        };
        let row = BackwardRow::new(pass, index, statistics);
        let means = row.means_error();
        let first_col = index % spec.groups * width;
        for (i, element) in row.elements.iter().enumerate() {
            let BackwardElement { x_hat, weight, .. } = element;
            columns[first_col + i].add(element, statistics, model.arithmetic);
            let underflow = underflow(row.rstd, weight.value) * (1.0 + row.rstd);
            dx.push(statistics.bound(row.dx_error(element, means) * SECOND_ORDER + underflow));
            let bias = errors.bias.map(|bias| bias[first_col + i]);
            y.push(y_error(x_hat, *weight, bias, row.rstd, statistics, model.arithmetic));
        }
    }
    let depth = (model.arithmetic.depth_rows)(spec.rows);
    // In each row, dy and the running sum may be flushed; the product of dweight may underflow.
    let row_loss = TINY + model.arithmetic.flush_loss(2.0);
    let finish = |error: f64| error * SECOND_ORDER + row_loss * spec.rows as f64;
    BackwardBounds {
        dx,
        dweight: columns.iter().map(|column| finish(column.dweight_error(depth, model))).collect(),
        dbias: columns.iter().map(|column| finish(column.dbias.error(depth, model) + column.of_dy)).collect(),
        y,
    }
}

/// Properties of a sum's terms that its error bound needs.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    value: f64,
    of_abs: f64,
    of_squares: f64,
}

impl Sum {
    fn of(terms: impl Iterator<Item = f64>) -> Sum {
        let mut sum = Sum::default();
        terms.for_each(|term| sum.add(term));
        sum
    }

    fn add(&mut self, term: f64) {
        self.value += term;
        self.of_abs += term.abs();
        self.of_squares += term * term;
    }

    /// Error bound of adding exact terms, if each term passes through at most `depth` additions.
    fn error(&self, depth: usize, model: Model<'_>) -> f64 {
        let u = model.arithmetic.unit_roundoff;
        if !self.of_abs.is_finite() {
            return f64::NAN;
        }
        let depth = depth as f64;
        if overflows(self.of_abs) || depth * u >= 1.0 {
            return f64::INFINITY;
        }
        let worst = self.of_abs * depth * u / (1.0 - depth * u);
        match model.mode {
            Mode::Worst => worst,
            Mode::Statistical => {
                worst.min(DEVIATIONS * u * (depth / 3.0).sqrt() * (self.value.abs() + self.of_squares.sqrt()))
            }
        }
    }
}

/// The error of a sum of terms that were computed, beside the errors of the terms, if each passes
/// through at most `depth` additions.
pub(crate) fn sum_error(terms: Vec<f64>, depth: usize, model: Model<'_>) -> f64 {
    Sum::of(terms.into_iter()).error(depth, model) * SECOND_ORDER + TINY
}

/// A row of the forward pass, or a group of its columns.
struct Row<'a> {
    h: &'a [f64],
    /// Absolute errors of `h`.
    errors: Option<&'a [f64]>,
    mean: f64,
    var: f64,
    rstd: f64,
}

impl Row<'_> {
    fn error(&self, index: usize) -> f64 {
        self.errors.map_or(0.0, |errors| errors[index])
    }

    /// The sum of a function of each element and its error; 0 if there are no errors.
    fn sum_of_errors(&self, of: impl Fn(f64, f64) -> f64) -> f64 {
        let sum = |errors: &[f64]| self.h.iter().zip(errors).map(|(h, error)| of(*h, *error)).sum::<f64>();
        self.errors.map_or(0.0, sum)
    }
}

/// The errors of a row's statistics: absolute for the mean, relative for rstd.
#[derive(Clone, Copy, Debug)]
struct StatisticsError {
    mean: f64,
    rstd: f64,
}

impl StatisticsError {
    /// `bound`, or infinity if rstd has no bound. Otherwise `inf * 0` would give NaN and hide this.
    fn bound(self, bound: f64) -> f64 {
        if self.rstd == f64::INFINITY { f64::INFINITY } else { bound }
    }
}

fn statistics_error(spec: &NormSpec, h_dtype: DType, row: &Row<'_>, model: Model<'_>) -> StatisticsError {
    let arithmetic = model.arithmetic;
    let u = arithmetic.unit_roundoff;
    let (cols, eps) = (row.h.len(), f64::from(spec.eps));
    let divisor = spec.norm.divisor(cols) as f64;
    let depth = (arithmetic.depth_cols)(cols);
    let division = division_roundings(spec.norm.divisor(cols), arithmetic);
    let mean = match spec.norm {
        Norm::Rms | Norm::L2 | Norm::L2Clamped => MeanError::default(),
        Norm::Layer => MeanError::new(row, depth, division, model),
    };
    // What forward takes the root of.
    let inside = |var: f64| match spec.norm {
        Norm::Rms | Norm::Layer | Norm::L2 => var + eps,
        Norm::L2Clamped if var < eps * eps => eps * eps,
        Norm::L2Clamped => var,
    };
    let shifted = inside(row.var);
    if !shifted.is_finite() || shifted == 0.0 {
        // Under IEEE, 1/sqrt(inf) = 0, 1/sqrt(0) = inf and NaN are exact, except for a zero
        // variance if the mean has an error: a computed variance need not be 0 then.
        let exact = arithmetic.non_finite == NonFinite::Ieee && (mean.first == 0.0 || !shifted.is_finite());
        return StatisticsError { mean: mean.corrected, rstd: if exact { 0.0 } else { f64::INFINITY } };
    }

    let squares = Sum::of(row.h.iter().map(|h| (h - row.mean) * (h - row.mean)));
    let square_roundings = match (spec.norm, h_dtype) {
        // The square of 11 or 8 significant bits fits the 24 bits of an f32.
        (Norm::Rms | Norm::L2 | Norm::L2Clamped, DType::F16 | DType::Bf16) => 0.0,
        (Norm::Rms | Norm::L2 | Norm::L2Clamped, DType::F32) => 1.0,
        // The rounding of the difference counts twice, the square's once, the correction by the
        // first mean's error once.
        (Norm::Layer, DType::F32 | DType::F16 | DType::Bf16) => 4.0,
    };
    // Each term and running sum, and eps.
    let underflow = (TINY + arithmetic.flush_loss(2.0)) * cols as f64 / divisor + arithmetic.flush_loss(1.0);
    // The mean of the computed h.
    let shift = match spec.norm {
        Norm::Rms | Norm::L2 | Norm::L2Clamped => 0.0,
        Norm::Layer => row.sum_of_errors(|_, error| error) / divisor,
    };
    let of_h = row.sum_of_errors(|h, error| (2.0 * (h - row.mean).abs() + error + shift) * (error + shift)) / divisor;
    let var = squares.error(depth, model) / divisor
        + row.var * (square_roundings + division) * u
        + mean.of_squares(depth, division, u)
        + of_h
        + underflow;
    let mean = mean.corrected;
    if !var.is_finite() {
        return StatisticsError { mean, rstd: f64::INFINITY };
    }
    // A computed sum of squares is never negative, so the computed variance is not below 0.
    let least = if arithmetic.flushes_subnormals && eps < TINY { 0.0 } else { eps };
    let (low, high) = match spec.norm {
        Norm::Rms | Norm::Layer | Norm::L2 => ((shifted - var).max(least), shifted + var),
        Norm::L2Clamped => (inside(row.var - var), inside(row.var + var)),
    };
    // The addition of eps, or the square of it, is rounded.
    let (low, high) = (low * (1.0 - u), high * (1.0 + u));
    let rstd_high = (1.0 + arithmetic.rstd_error) / low.sqrt();
    let rstd_low = (1.0 - arithmetic.rstd_error) / high.sqrt();
    StatisticsError { mean, rstd: (rstd_high / row.rstd - 1.0).max(1.0 - rstd_low / row.rstd) }
}

/// The errors of layer norm's mean. The first mean is a plain sum; the average of the deviations
/// from it corrects it.
#[derive(Clone, Copy, Default)]
struct MeanError {
    first: f64,
    /// Error of the average of the deviations from the first mean.
    deviations: f64,
    corrected: f64,
}

impl MeanError {
    fn new(row: &Row<'_>, depth: usize, division: f64, model: Model<'_>) -> MeanError {
        let (u, cols) = (model.arithmetic.unit_roundoff, row.h.len() as f64);
        // h, the running sum and the mean may be flushed.
        let loss = model.arithmetic.flush_loss(3.0);
        let first = Sum::of(row.h.iter().copied()).error(depth, model) / cols + division * u * row.mean.abs() + loss;
        // A deviation is rounded before it is added, and so are the partial sums. These roundings
        // repeat in many 16-bit elements, so they are not a random walk. Each deviation also
        // contains the error of the first mean.
        let sum = Sum::of(row.h.iter().map(|h| h - row.mean));
        let worst = sum.error(depth, Model { mode: Mode::Worst, ..model }) / cols;
        let added = match model.mode {
            Mode::Worst => worst,
            Mode::Statistical => {
                worst.min(sum.error(depth, model) / cols + u * (depth as f64).sqrt() * (sum.of_squares / cols).sqrt())
            }
        };
        let deviations = added + u * sum.of_abs / cols + (depth + 1) as f64 * u * first + loss;
        let before = deviations + division * u * (first + deviations);
        let of_h = row.sum_of_errors(|_, error| error) / cols;
        let corrected = rounded_apart(row.mean, before + of_h, model.arithmetic);
        MeanError { first, deviations, corrected }
    }

    /// The error that the variance gets from the mean: squares are summed about the first mean, and
    /// then corrected by its error.
    fn of_squares(self, depth: usize, division: f64, u: f64) -> f64 {
        let MeanError { first, deviations, .. } = self;
        (depth as f64 + 8.0 + 2.0 * division) * u * (first + deviations).powi(2)
            + (2.0 * first + deviations) * deviations
    }
}

/// How far from `value` the f32 sum may be, if it is within `error` of `value` before its rounding.
fn rounded_apart(value: f64, error: f64, arithmetic: &Arithmetic) -> f64 {
    let (low, high) = (value - error, value + error);
    let (low, high) = if arithmetic.adds_to_nearest() {
        (round_to(low, DType::F32), round_to(high, DType::F32))
    } else {
        (round_down(low, DType::F32), round_up(high, DType::F32))
    };
    if error.is_finite() { (value - low).max(high - value) } else { error }
}

/// Number of roundings of the division by `divisor`: none for a power of two, such as L2 norm's 1.
fn division_roundings(divisor: usize, arithmetic: &Arithmetic) -> f64 {
    if divisor.is_power_of_two() { 0.0 } else { arithmetic.mean_roundings }
}

/// Whether an intermediate may overflow f32 although the result is finite. False for infinite
/// inputs: these propagate.
pub(crate) fn overflows(magnitude: f64) -> bool {
    magnitude.is_finite() && magnitude > NO_OVERFLOW
}

/// The loss of an output by underflow: one loss in `h - mean`, scaled by rstd and the weight, and
/// one per operation.
fn underflow(rstd: f64, weight: f64) -> f64 {
    TINY * (1.0 + (1.0 + rstd) * (1.0 + weight.abs()))
}

/// `weight + weight_offset` of a column.
#[derive(Clone, Copy)]
struct Weight {
    value: f64,
    /// Number of roundings of a product with it: the multiplication, and the addition of an offset.
    roundings: f64,
    /// Number of values that may be flushed to zero in computing it: the weight, the offset, their
    /// sum.
    flushes: f64,
}

impl Weight {
    fn new(spec: &NormSpec, weight: Option<&[f64]>, col: usize) -> Weight {
        match weight {
            None => Weight { value: 1.0, roundings: 1.0, flushes: 0.0 },
            Some(weight) => {
                let (roundings, flushes) = if spec.weight_offset == 0.0 { (1.0, 1.0) } else { (2.0, 3.0) };
                Weight { value: weight[col] + f64::from(spec.weight_offset), roundings, flushes }
            }
        }
    }
}

/// The error of `x_hat * weight + bias` before any store: [math](rmsnorm_spec::math), section 5.2.
fn y_error(
    x_hat: &XHat,
    weight: Weight,
    bias: Option<f64>,
    rstd: f64,
    statistics: StatisticsError,
    arithmetic: &Arithmetic,
) -> f64 {
    let u = arithmetic.unit_roundoff;
    let product = x_hat.value * weight.value;
    let of_bias = match bias {
        None => 0.0,
        Some(_) if overflows(product.abs()) => f64::INFINITY,
        Some(bias) => u * (product + bias).abs() + arithmetic.flush_loss(1.0),
    };
    let flushed = arithmetic.flush_loss(x_hat.value) * weight.flushes;
    let y = weight.value.abs() * x_hat.error() + product.abs() * weight.roundings * u + flushed + of_bias;
    statistics.bound(y * SECOND_ORDER + underflow(rstd, weight.value))
}

/// `x_hat` of an element and its errors.
#[derive(Clone, Copy)]
struct XHat {
    value: f64,
    /// From the error of the mean; the same for the whole row.
    common: f64,
    /// From the roundings of this element.
    local: f64,
    /// Sum of `common`, `local` and the error from rstd.
    rounded: f64,
    /// From flushing `h`, the mean and `x_hat` to zero, and from the error of `h`. Separate, because
    /// it does not average out.
    lost: f64,
}

impl XHat {
    /// `deviation` is `h - mean`, beside the error of `h`.
    fn new(
        norm: Norm,
        (deviation, error): (f64, f64),
        rstd: f64,
        statistics: StatisticsError,
        arithmetic: &Arithmetic,
    ) -> XHat {
        let u = arithmetic.unit_roundoff;
        let value = deviation * rstd;
        let rstd_high = rstd * (1.0 + statistics.rstd);
        // The operands of the difference (layer norm), or h.
        let (subtraction, operands) = match norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => (0.0, 1.0),
            Norm::Layer => (rstd_high * u * deviation.abs(), 2.0),
        };
        let common = rstd_high * statistics.mean;
        let local = subtraction + value.abs() * u;
        let rounded = common + value.abs() * statistics.rstd + local;
        let lost = arithmetic.flush_loss(1.0 + operands * rstd_high) + rstd_high * error;
        XHat { value, common, local, rounded, lost }
    }

    /// The total error.
    fn error(&self) -> f64 {
        self.rounded + self.lost
    }
}

/// The error of the computed `h - mean`, from those of h and of the mean. RMS norm has no
/// difference.
fn deviation_error(norm: Norm, deviation: f64, h: f64, mean: f64, arithmetic: &Arithmetic) -> f64 {
    match norm {
        Norm::Rms | Norm::L2 | Norm::L2Clamped => h + arithmetic.flush_loss(1.0),
        Norm::Layer => {
            let inherited = h + mean + arithmetic.flush_loss(2.0);
            inherited + (deviation.abs() + inherited) * arithmetic.unit_roundoff + TINY
        }
    }
}

/// The arguments of [`backward`].
#[derive(Clone, Copy)]
struct Pass<'a> {
    spec: &'a NormSpec,
    inputs: &'a BackwardInputs<'a>,
    errors: InputErrors<'a>,
    outputs: &'a BackwardOutputs,
    model: Model<'a>,
}

/// An element of the backward pass.
struct BackwardElement {
    dy: f64,
    /// The error of dy.
    dy_error: f64,
    wdy: f64,
    /// Loss of wdy if dy and the weight are flushed to zero, and by the error of dy.
    wdy_loss: f64,
    weight: Weight,
    x_hat: XHat,
    /// The reference's dx.
    dx: f64,
}

/// A row of the backward pass, or a group of its columns.
struct BackwardRow<'a> {
    pass: Pass<'a>,
    elements: Vec<BackwardElement>,
    rstd: f64,
    mean_wdy: f64,
    mean_wdy_xhat: f64,
    statistics: StatisticsError,
    clamp: Clamp,
}

/// Whether the norm of a row was clamped, as backward finds it from rstd.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clamp {
    No,
    Yes,
    /// Its product with eps is so near the limit that it may be on either side.
    Open,
}

impl Clamp {
    fn of(spec: &NormSpec, rstd: f64, error: f64, u: f64) -> Clamp {
        if spec.norm != Norm::L2Clamped {
            return Clamp::No;
        }
        // The product is rounded; its error is counted twice.
        let (product, error) = (rstd * f64::from(spec.eps), error + 2.0 * u);
        let is_from = |product: f64| product >= f64::from(Norm::CLAMPED_FROM);
        match (is_from(product * (1.0 - error)), is_from(product * (1.0 + error))) {
            (false, false) => Clamp::No,
            (true, true) => Clamp::Yes,
            (false, true) | (true, false) => Clamp::Open,
        }
    }
}

impl<'a> BackwardRow<'a> {
    fn new(pass: Pass<'a>, row: usize, statistics: StatisticsError) -> Self {
        let Pass { spec, inputs, errors, outputs, model } = pass;
        let (mean, rstd, width) = (inputs.mean[row], inputs.rstd[row], spec.cols / spec.groups);
        let element = |col| {
            let i = row * width + col;
            let [dy_error, x_error] = [errors.dy, errors.x].map(|errors| errors.map_or(0.0, |errors| errors[i]));
            let weight = Weight::new(spec, inputs.weight, i % spec.cols);
            let x_hat = XHat::new(spec.norm, (inputs.x[i] - mean, x_error), rstd, statistics, model.arithmetic);
            let (dy, arithmetic) = (inputs.dy[i], model.arithmetic);
            let flushed = arithmetic.flush_loss(weight.value) + arithmetic.flush_loss(dy) * weight.flushes;
            let wdy_loss = flushed + weight.value.abs() * dy_error;
            BackwardElement { dy, dy_error, wdy: dy * weight.value, wdy_loss, weight, x_hat, dx: outputs.dx[i] }
        };
        let elements = (0..width).map(element).collect();
        BackwardRow {
            pass,
            elements,
            rstd,
            mean_wdy: outputs.mean_wdy[row],
            mean_wdy_xhat: outputs.mean_wdy_xhat[row],
            statistics,
            clamp: Clamp::of(spec, rstd, statistics.rstd, model.arithmetic.unit_roundoff),
        }
    }

    /// The errors of `mean_wdy` and `mean_wdy_xhat`. An error of rstd scales `mean_wdy_xhat` as a
    /// whole, and an error of the mean shifts all `x_hat` equally. Both are bounded outside of the
    /// sum: bounded per term, they would be wider by a factor of sqrt(cols).
    fn means_error(&self) -> [f64; 2] {
        if self.clamp == Clamp::Yes {
            return [0.0; 2];
        }
        let Pass { spec, model, .. } = self.pass;
        let u = model.arithmetic.unit_roundoff;
        let cols = self.elements.len();
        let depth = (model.arithmetic.depth_cols)(cols);
        let division = division_roundings(spec.norm.divisor(cols), model.arithmetic);
        // Of L2 norm these are sums.
        let divisor = spec.norm.divisor(cols) as f64;
        let average = |term: &dyn Fn(&BackwardElement) -> f64| self.elements.iter().map(term).sum::<f64>() / divisor;
        let sum_error = |term: &dyn Fn(&BackwardElement) -> f64| {
            Sum::of(self.elements.iter().map(term)).error(depth, model) / divisor
        };
        // Each term and running sum, and the average, may be flushed.
        let sum_loss = model.arithmetic.flush_loss(2.0) * cols as f64 / divisor + model.arithmetic.flush_loss(1.0);
        let mean_wdy = match spec.norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => 0.0,
            Norm::Layer => {
                let terms = average(&|e| e.wdy.abs() * e.weight.roundings * u + e.wdy_loss);
                sum_error(&|e| e.wdy) + terms + division * u * self.mean_wdy.abs() + sum_loss
            }
        };
        let common = self.elements.first().map_or(0.0, |e| e.x_hat.common);
        let terms = average(&|e| {
            let product = (e.wdy * e.x_hat.value).abs();
            e.wdy.abs() * ((1.0 + self.statistics.rstd) * e.x_hat.local + e.x_hat.lost)
                + product * (1.0 + e.weight.roundings) * u
                + e.x_hat.value.abs() * e.wdy_loss
        });
        let mean_wdy_xhat = self.mean_wdy_xhat.abs() * self.statistics.rstd
            + average(&|e| e.wdy).abs() * common
            + sum_error(&|e| e.wdy * e.x_hat.value)
            + terms
            + division * u * self.mean_wdy_xhat.abs()
            + sum_loss;
        [mean_wdy, mean_wdy_xhat]
    }

    /// The error of dx, equation (10).
    fn dx_error(&self, element: &BackwardElement, [mean_wdy, mean_wdy_xhat]: [f64; 2]) -> f64 {
        let u = self.pass.model.arithmetic.unit_roundoff;
        let BackwardElement { wdy, wdy_loss, weight, x_hat, dx, .. } = element;
        let projection = x_hat.value * self.mean_wdy_xhat;
        let inner = wdy - self.mean_wdy - projection;
        let scaled = (self.rstd * inner).abs();
        let dresidual_out = match self.pass.inputs.dresidual_out {
            None => 0.0,
            Some(_) if overflows(scaled) => f64::INFINITY,
            Some(_) => u * dx.abs() + self.pass.model.arithmetic.flush_loss(1.0),
        };
        if self.clamp == Clamp::Open || overflows(wdy.abs() + self.mean_wdy.abs() + projection.abs()) {
            return f64::INFINITY;
        }
        let first_subtraction = match self.pass.spec.norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => 0.0,
            Norm::Layer => u * (wdy.abs() + self.mean_wdy.abs()),
        };
        let inner_error = wdy.abs() * weight.roundings * u
            + wdy_loss
            + mean_wdy
            + x_hat.value.abs() * mean_wdy_xhat
            + self.mean_wdy_xhat.abs() * x_hat.error()
            // Second order, but the main error of a row whose variance consists of rounding errors.
            + x_hat.error() * mean_wdy_xhat
            + u * projection.abs()
            + first_subtraction
            + u * inner.abs();
        let rstd_high = self.rstd * (1.0 + self.statistics.rstd);
        rstd_high * inner_error + scaled * (self.statistics.rstd + u) + dresidual_out
    }
}

/// The sums over the rows for one column.
#[derive(Clone, Copy, Default)]
struct Column {
    dweight: Sum,
    dbias: Sum,
    /// Sum of the errors that `x_hat` brings into the terms of `dweight`.
    x_hat: Sum,
    /// Loss in these terms if values are flushed to zero, and by the errors of dy and x.
    lost: f64,
    /// Sum of the errors of dy.
    of_dy: f64,
    /// Whether rstd has no bound in some row.
    unbounded: bool,
}

impl Column {
    fn add(&mut self, element: &BackwardElement, statistics: StatisticsError, arithmetic: &Arithmetic) {
        self.dweight.add(element.dy * element.x_hat.value);
        self.dbias.add(element.dy);
        self.x_hat.add(element.dy.abs() * element.x_hat.rounded);
        let BackwardElement { x_hat, dy_error, .. } = element;
        let of_x_hat = (element.dy.abs() + dy_error) * x_hat.lost;
        self.lost += of_x_hat + (dy_error * x_hat.value).abs() + arithmetic.flush_loss(x_hat.value);
        self.of_dy += dy_error;
        self.unbounded |= statistics.rstd == f64::INFINITY;
    }

    fn dweight_error(&self, depth: usize, model: Model<'_>) -> f64 {
        let Arithmetic { unit_roundoff: u, rstd_error, .. } = *model.arithmetic;
        if self.unbounded {
            return f64::INFINITY;
        }
        let worst = self.x_hat.of_abs + u * self.dweight.of_abs;
        let terms = match model.mode {
            Mode::Worst => worst,
            // Rows are independent. Only a bias of rstd that all rows share adds up coherently.
            Mode::Statistical => worst.min(
                rstd_error * self.dweight.value.abs()
                    + DEVIATIONS * self.x_hat.of_squares.sqrt()
                    + DEVIATIONS * u * self.dweight.of_squares.sqrt(),
            ),
        };
        self.dweight.error(depth, model) + terms + self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmsnorm_spec::reference;

    const WORST: Model<'static> = Model { arithmetic: &Arithmetic::IEEE, mode: Mode::Worst };
    const STATISTICAL: Model<'static> = Model { arithmetic: &Arithmetic::IEEE, mode: Mode::Statistical };
    const U: f64 = Arithmetic::IEEE.unit_roundoff;

    fn bounds_of(spec: &NormSpec, x: &[f64], model: Model<'_>) -> (ForwardOutputs, ForwardBounds) {
        let inputs = ForwardInputs { x, residual: None, weight: None, bias: None };
        let outputs = reference::forward(spec, &inputs);
        let bounds = forward(spec, &inputs, (DType::F32, None), &outputs, model);
        (outputs, bounds)
    }

    fn gradient_bounds_of(spec: &NormSpec, x: &[f64], dy: &[f64]) -> (BackwardOutputs, BackwardBounds) {
        let (forward, forward_bounds) = bounds_of(spec, x, WORST);
        let (mean, rstd) = (&forward.mean[..], &forward.rstd[..]);
        let inputs = BackwardInputs { dy, x, weight: None, mean, rstd, dresidual_out: None };
        let outputs = reference::backward(spec, &inputs);
        let statistics = Statistics::Computed(&forward_bounds);
        let bounds = backward(spec, &inputs, InputErrors::default(), &outputs, statistics, WORST);
        (outputs, bounds)
    }

    #[test]
    fn sum_of_one_chain_follows_the_depth() {
        let sum = Sum::of([1.0, -2.0, 4.0].into_iter());
        assert!((sum.error(2, WORST) / (7.0 * 2.0 * U) - 1.0).abs() < 1e-6);
        assert_eq!(sum.error(0, WORST), 0.0);
        assert_eq!(sum.error(1 << 24, WORST), f64::INFINITY);
    }

    #[test]
    fn statistical_bounds_are_never_wider_than_worst() {
        let x: Vec<f64> = (0..512).map(|i| f64::from((i * 37 % 101) as f32) - 50.0).collect();
        for spec in [NormSpec::rms(2, 256, 1e-6), NormSpec::layer(2, 256, 1e-6)] {
            let ((_, worst), (_, statistical)) = (bounds_of(&spec, &x, WORST), bounds_of(&spec, &x, STATISTICAL));
            assert!(worst.y.iter().zip(&statistical.y).all(|(worst, statistical)| worst >= statistical));
            assert!(worst.rstd.iter().zip(&statistical.rstd).all(|(worst, statistical)| worst > statistical));
        }
    }

    #[test]
    fn bf16_row_of_4096_matches_the_order_of_magnitude_in_the_docs() {
        let x: Vec<f64> = (0..4096).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        let arithmetic = Arithmetic { rstd_error: 4.0 * U, ..Arithmetic::IEEE };
        let inputs = ForwardInputs { x: &x, residual: None, weight: None, bias: None };
        let spec = NormSpec::rms(1, 4096, 1e-6);
        let outputs = reference::forward(&spec, &inputs);
        let model = Model { arithmetic: &arithmetic, mode: Mode::Worst };
        let bounds = forward(&spec, &inputs, (DType::Bf16, None), &outputs, model);
        assert!((bounds.rstd[0] / outputs.rstd[0] / U - 56.6).abs() < 0.2);
        assert!((bounds.y[0] / outputs.y[0].abs() / U - 58.6).abs() < 0.2);
    }

    #[test]
    fn zero_row_without_eps_has_no_value_but_no_freedom_either() {
        let (outputs, bounds) = bounds_of(&NormSpec::rms(1, 3, 0.0), &[0.0; 3], WORST);
        assert!(outputs.rstd[0].is_infinite() && outputs.y[0].is_nan());
        assert!(bounds.rstd[0].is_nan() && bounds.y[0].is_nan());
    }

    #[test]
    fn constant_row_without_eps_is_unbounded_for_layer_norm() {
        let spec = NormSpec::layer(1, 3, 0.0);
        let (_, bounds) = bounds_of(&spec, &[0.1, 0.1, 0.1], WORST);
        assert_eq!((bounds.rstd[0], bounds.y[0], bounds.x_hat[0]), (f64::INFINITY, f64::INFINITY, f64::INFINITY));
        let (_, bounds) = gradient_bounds_of(&spec, &[0.1, 0.1, 0.1], &[0.0, 1.0, 2.0]);
        assert!(bounds.dx.iter().chain(&bounds.dweight).all(|&bound| bound == f64::INFINITY));
        assert_eq!(bounds.dbias[0], TINY);
    }

    #[test]
    fn row_that_overflows_f32_is_unbounded_and_leaves_its_neighbour_alone() {
        let spec = NormSpec::rms(2, 2, 1e-6);
        let (_, bounds) = bounds_of(&spec, &[1e30, 1.0, 2.0, 1.0], WORST);
        assert_eq!((bounds.rstd[0], bounds.y[1]), (f64::INFINITY, f64::INFINITY));
        assert!(bounds.rstd[1] < 1e-6 && bounds.y[3] < 1e-6);
    }

    #[test]
    fn infinite_element_makes_the_rest_of_its_row_exactly_zero() {
        let spec = NormSpec::rms(1, 2, 1e-6);
        let (outputs, bounds) = bounds_of(&spec, &[f64::INFINITY, 1.0], WORST);
        assert_eq!((outputs.rstd[0], bounds.rstd[0]), (0.0, 0.0));
        assert!(outputs.y[0].is_nan() && bounds.y[0].is_nan());
        assert_eq!((outputs.y[1], bounds.y[1] < 1e-37), (0.0, true));
        let unspecified = Arithmetic { non_finite: NonFinite::Unspecified, ..Arithmetic::IEEE };
        let model = Model { arithmetic: &unspecified, mode: Mode::Worst };
        assert_eq!(bounds_of(&spec, &[f64::INFINITY, 1.0], model).1.y[1], f64::INFINITY);
    }

    #[test]
    fn nan_in_a_gradient_stays_in_its_column() {
        let (outputs, bounds) =
            gradient_bounds_of(&NormSpec::rms(2, 2, 1e-6), &[1.0, 2.0, 3.0, 4.0], &[f64::NAN, 1.0, 1.0, 1.0]);
        assert!(outputs.dbias[0].is_nan() && bounds.dbias[0].is_nan() && bounds.dweight[0].is_nan());
        assert!(bounds.dbias[1] < 1e-6 && bounds.dweight[1] < 1e-5);
        assert!(bounds.dx[0].is_nan() && bounds.dx[1].is_nan() && bounds.dx[2] < 1e-5);
    }

    #[test]
    fn zero_gradient_leaves_nothing_but_underflow() {
        let spec = NormSpec::rms(1, 2, 0.0);
        let (_, bounds) = gradient_bounds_of(&spec, &[0.25, 0.25], &[0.0, 0.0]);
        let rstd = 4.0;
        assert_eq!(bounds.dx[0], TINY * (1.0 + (1.0 + rstd) * 2.0) * (1.0 + rstd));
        assert_eq!((bounds.dweight[0], bounds.dbias[0]), (TINY, TINY));
    }

    #[test]
    fn flushed_operands_cost_what_they_are_multiplied_with() {
        // Found on an H200 through Vulkan: rstd multiplies the loss in x by 1e3, and dy multiplies
        // it by 8.
        let flushing = Arithmetic { flushes_subnormals: true, ..Arithmetic::IEEE };
        let spec = NormSpec::rms(1, 1, 1e-6);
        let (x, dy) = ([f64::from(f32::MIN_POSITIVE) / 2.0], [8.0]);
        let forward = reference::forward(&spec, &ForwardInputs { x: &x, residual: None, weight: None, bias: None });
        let (mean, rstd) = (&forward.mean[..], &forward.rstd[..]);
        let inputs = BackwardInputs { dy: &dy, x: &x, weight: None, mean, rstd, dresidual_out: None };
        let outputs = reference::backward(&spec, &inputs);
        let bound = |arithmetic: &Arithmetic| {
            let model = Model { arithmetic, mode: Mode::Worst };
            backward(&spec, &inputs, InputErrors::default(), &outputs, Statistics::Given, model).dweight[0]
        };
        let lost = outputs.dweight[0];
        assert!(bound(&Arithmetic::IEEE) < lost && lost < bound(&flushing) && bound(&flushing) < 3.0 * lost);
    }

    #[test]
    fn flushed_mean_costs_as_much_as_a_flushed_element() {
        let flushing = Arithmetic { flushes_subnormals: true, ..Arithmetic::IEEE };
        let spec = NormSpec::layer(1, 4, 1e-6);
        // x and its mean have opposite signs and are both flushed: x_hat is 0.
        let (x, dy) = ([0.9, -0.9, -0.9, -0.9].map(|x| x * TINY), [8.0, 0.0, 0.0, 0.0]);
        let (mean, rstd) = (&[-0.45 * TINY][..], &[1000.0][..]);
        let inputs = BackwardInputs { dy: &dy, x: &x, weight: None, mean, rstd, dresidual_out: None };
        let outputs = reference::backward(&spec, &inputs);
        let model = Model { arithmetic: &flushing, mode: Mode::Worst };
        let bound = backward(&spec, &inputs, InputErrors::default(), &outputs, Statistics::Given, model).dweight[0];
        assert!(outputs.dweight[0].abs() < bound && bound < 2.0 * outputs.dweight[0].abs());
    }

    /// Backward of the clamped L2 norm may take either side at the kink, and nowhere else.
    #[test]
    fn rows_beside_the_kink_are_open() {
        let kink = f64::from(Norm::CLAMPED_FROM);
        let bound = |norm: f64| {
            let spec = NormSpec::l2_clamped(1, 2, 0.5);
            let (outputs, bounds) = gradient_bounds_of(&spec, &[norm, 0.0], &[1.0, 1.0]);
            // The derivative along x is 0 beyond the kink.
            (outputs.dx[0].abs() < 1e-15, bounds.dx[0])
        };
        assert!(bound(0.25) == (false, bound(0.25).1) && bound(0.25).1 < 1e-5);
        assert!(!bound(0.5).0 && bound(0.5).1 < 1e-5, "{:?}", bound(0.5));
        assert_eq!(bound(0.5 / kink).1, f64::INFINITY);
        assert!(bound(0.5 * 1.001).0 && bound(0.5 * 1.001).1 < 1e-5, "{:?}", bound(0.5 * 1.001));
    }

    #[test]
    fn no_rows_leave_zero_gradients_without_error() {
        let (outputs, bounds) = gradient_bounds_of(&NormSpec::layer(0, 2, 1e-6), &[], &[]);
        assert_eq!((outputs.dweight, bounds.dweight, bounds.dbias), (vec![0.0; 2], vec![0.0; 2], vec![0.0; 2]));
    }
}
