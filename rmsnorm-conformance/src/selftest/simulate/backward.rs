//! The backward pass of one row: math.md, equations (7) to (10), and the row's terms of (11) and (12), in f32.

use rmsnorm_spec::{DType, Element, Norm};

use super::call::Call;
use super::matrix::round;
use crate::selftest::planted::Bug;

/// The inputs of one row. Matrix rows have (cols) elements.
pub(super) struct BackwardInputs<'r> {
    pub(super) row: usize,
    pub(super) dy: &'r [f32],
    pub(super) x: &'r [f32],
    /// 0 for RMS norm.
    pub(super) mean: f32,
    pub(super) rstd: f32,
    pub(super) dresidual_out: Option<&'r [f32]>,
}

/// The results of one row, (cols) each.
pub(super) struct BackwardRow {
    /// Not yet rounded.
    pub(super) dx: Vec<f32>,
    /// `dy * x_hat`
    pub(super) dweight_terms: Vec<f32>,
    /// `dy`
    pub(super) dbias_terms: Vec<f32>,
}

impl BackwardRow {
    /// What goes on along the residual stream, not yet rounded.
    pub(super) fn dresidual(&self, call: &Call) -> Vec<f32> {
        let activation = call.problem.dtypes.activation;
        let value = |&dx: &f32| if call.has(Bug::DresidualOfDx) { round(dx, activation) } else { dx };
        self.dx.iter().map(value).collect()
    }
}

/// The intermediate values of one row.
struct Row {
    /// `x - mean`
    centred: Vec<f32>,
    x_hat: Vec<f32>,
    rstd: f32,
    wdy: Vec<f32>,
    /// `avg(wdy)`
    mean_wdy: f32,
    /// `avg(wdy * x_hat)`
    mean_wdy_xhat: f32,
}

pub(super) struct BackwardKernel<'c> {
    call: &'c Call,
    weight: Vec<f32>,
    /// `mean_wdy_xhat` of the row before, for the bugs that confuse rows.
    previous_mean_wdy_xhat: Option<f32>,
}

impl<'c> BackwardKernel<'c> {
    pub(super) fn new<W: Element>(call: &'c Call, weight: Option<&[W]>) -> Self {
        BackwardKernel { call, weight: call.effective_weight(weight), previous_mean_wdy_xhat: None }
    }

    pub(super) fn row(&mut self, inputs: &BackwardInputs<'_>) -> BackwardRow {
        let centred: Vec<f32> = inputs.x.iter().map(|x| x - inputs.mean).collect();
        let rstd = if self.call.has(Bug::BwdNoEps) { self.rstd_without_eps(&centred) } else { inputs.rstd };
        let x_hat: Vec<f32> = centred.iter().map(|centred| centred * rstd).collect();
        let wdy: Vec<f32> = inputs.dy.iter().zip(&self.weight).map(|(dy, weight)| dy * weight).collect();
        let mean_wdy = match self.call.spec.norm {
            Norm::Rms => 0.0,
            Norm::Layer => self.average(&wdy, DType::F32),
        };
        let mut row = Row { centred, x_hat, rstd, wdy, mean_wdy, mean_wdy_xhat: 0.0 };
        let mean_wdy_xhat = self.mean_wdy_xhat(inputs, &row);
        row.mean_wdy_xhat = match self.previous_mean_wdy_xhat {
            Some(previous) if self.call.has(Bug::NanLeak) => mean_wdy_xhat + 0.0 * previous,
            Some(previous) if self.call.has(Bug::CStale) && self.call.is_last_of_several(inputs.row) => previous,
            Some(_) | None => mean_wdy_xhat,
        };
        self.previous_mean_wdy_xhat = Some(row.mean_wdy_xhat);
        BackwardRow {
            dx: self.dx(inputs, &row),
            dweight_terms: self.dweight_terms(inputs, &row),
            dbias_terms: self.dbias_terms(inputs),
        }
    }

    fn rstd_without_eps(&self, centred: &[f32]) -> f32 {
        let squares: Vec<f32> = centred.iter().map(|centred| centred * centred).collect();
        1.0 / self.average(&squares, DType::F32).sqrt()
    }

    fn average(&self, terms: &[f32], accumulator: DType) -> f32 {
        let cols = self.call.spec.cols;
        let divisor = if self.call.has(Bug::BwdNPadded8) { cols.next_multiple_of(8) } else { cols };
        self.call.sum(terms, accumulator) * (1.0 / divisor as f64) as f32
    }

    fn mean_wdy_xhat(&self, inputs: &BackwardInputs<'_>, row: &Row) -> f32 {
        let call = self.call;
        let wdy = |col: usize| {
            if call.has(Bug::CWithoutW) { inputs.dy[col] } else { round(row.wdy[col], call.accumulator(Bug::CLow)) }
        };
        let x_hat = |col: usize| if call.has(Bug::CUncentered) { inputs.x[col] * row.rstd } else { row.x_hat[col] };
        let mut products: Vec<f32> = (0..row.wdy.len()).map(|col| wdy(col) * x_hat(col)).collect();
        if call.has(Bug::CDropLast) {
            products.truncate(products.len() - 1);
        }
        if call.has(Bug::CWarpLost) && inputs.row == 0 {
            products.truncate(products.len().saturating_sub(32));
        }
        if call.has(Bug::CSumNotMean) {
            return call.sum(&products, DType::F32);
        }
        self.average(&products, call.accumulator(Bug::CLowacc))
    }

    fn dx(&self, inputs: &BackwardInputs<'_>, row: &Row) -> Vec<f32> {
        let call = self.call;
        let dx_one = |col: usize| {
            let direct = if call.has(Bug::DxDirectNoW) { inputs.dy[col] } else { row.wdy[col] };
            let first = if call.has(Bug::NoFirst) { 0.0 } else { row.mean_wdy };
            let inner = direct - first - self.second_term(row, col);
            let dx = inner * row.rstd;
            match inputs.dresidual_out {
                None => dx,
                Some(_) if call.has(Bug::DresMissing) => dx,
                Some(dresidual_out) if call.has(Bug::DresBeforeR) => (inner + dresidual_out[col]) * row.rstd,
                Some(dresidual_out) if call.has(Bug::DresAfterStore) => {
                    round(dx, call.problem.dtypes.activation) + dresidual_out[col]
                }
                Some(dresidual_out) => dx + dresidual_out[col],
            }
        };
        (0..row.wdy.len()).map(dx_one).collect()
    }

    /// `x_hat * mean_wdy_xhat`
    fn second_term(&self, row: &Row, col: usize) -> f32 {
        let second = row.x_hat[col] * row.mean_wdy_xhat;
        if self.call.has(Bug::NoSecond) {
            0.0
        } else if self.call.has(Bug::SecondNoR) {
            row.centred[col] * row.mean_wdy_xhat
        } else if self.call.has(Bug::SecondSign) {
            -second
        } else if self.call.has(Bug::SecondWTwice) {
            second * self.weight[col]
        } else {
            second
        }
    }

    fn dweight_terms(&self, inputs: &BackwardInputs<'_>, row: &Row) -> Vec<f32> {
        let call = self.call;
        let (rows, cols) = (call.spec.rows, call.spec.cols);
        let dropped = (call.has(Bug::DwDropLastRow) && inputs.row + 1 == rows)
            || (call.has(Bug::DwDropTailRows) && inputs.row >= rows - rows % 8);
        if dropped {
            return vec![0.0; cols];
        }
        let unscaled = call.has(Bug::DwRowNoR) && inputs.row == rows / 3;
        let factor = |col: usize| {
            if unscaled {
                row.centred[col]
            } else if call.has(Bug::DwUncentered) {
                inputs.x[col] * row.rstd
            } else {
                round(row.x_hat[col], call.accumulator(Bug::DwLowXhat))
            }
        };
        let mut terms: Vec<f32> = (0..cols).map(|col| inputs.dy[col] * factor(col)).collect();
        if call.has(Bug::DwLostOne) && inputs.row == rows / 2 {
            terms[cols / 2] = 0.0;
        }
        terms
    }

    fn dbias_terms(&self, inputs: &BackwardInputs<'_>) -> Vec<f32> {
        if self.call.has(Bug::DbDropLastRow) && inputs.row + 1 == self.call.spec.rows {
            return vec![0.0; inputs.dy.len()];
        }
        inputs.dy.to_vec()
    }
}
