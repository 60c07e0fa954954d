//! The backward pass of one row, in f32: math.md, equations (7) to (10), and its terms of (11) and
//! (12).

use rmsnorm_spec::{DType, Norm, NormSpec, Slot, Tensor};

use super::call::Call;
use super::gradients::Gradients;
use super::norm::weight_of_norm;
use super::rows::BackwardRow;
use super::tensors::Tensors;
use crate::case::groups::GroupBug;
use crate::case::l2::L2Bug;
use crate::pieces;
use crate::pieces::gate::GateBug;
use crate::pieces::weight_first::dweight_terms;
use crate::run::memory::round;
use crate::selftest::planted::NormBug;

/// Makes a call with a workspace of `workspace_len` elements.
pub(super) fn run(call: &Call, tensors: &mut Tensors<'_, '_>, workspace_len: usize) {
    let given = tensors.values(Tensor::Workspace);
    let mut gradients = Gradients::new(call, given.unwrap_or_else(|| vec![0.0; workspace_len]));
    let mut kernel = BackwardKernel::new(call, weight_of_norm(call, tensors));
    let (means, rstds) = (tensors.values(Tensor::Mean), tensors.values(Tensor::Rstd).unwrap_or_default());
    let given = |index: usize| {
        let matrix = |tensor| tensors.row(tensor, index).unwrap_or_default();
        let groups = call.spec.groups;
        let of_row = |values: &[f32], row: usize| values[row * groups..][..groups].to_vec();
        let mean = means.as_ref().map_or_else(|| vec![0.0; groups], |means| of_row(means, index));
        let (dy, rstd) = (matrix(Tensor::Dy), of_row(&rstds, call.row_of_rstd(index)));
        let (inner, dx) = (Vec::new(), Vec::new());
        BackwardRow { given: dy.clone(), dy, x: matrix(Tensor::X), mean, rstd, inner, dx }
    };
    let mut rows: Vec<BackwardRow> = (0..call.spec.rows).map(given).collect();
    pieces::again(call, tensors, &mut rows);
    pieces::pull(Slot::After, call, tensors, &mut rows);
    for (index, given) in rows.iter_mut().enumerate() {
        let groups: Vec<Row> = (0..call.spec.groups).map(|group| kernel.row(index, group, given)).collect();
        let of_groups = |terms: &dyn Fn(&Row) -> Vec<f32>| groups.iter().flat_map(terms).collect::<Vec<f32>>();
        groups.iter().for_each(|row| kernel.dx(row, given));
        let dweight = dweight_terms(call, tensors, index, given);
        let dweight = dweight.unwrap_or_else(|| of_groups(&|row| kernel.dweight_terms(row)));
        gradients.add(index, &dweight, &of_groups(&|row| kernel.dbias_terms(row)));
    }
    pieces::pull(Slot::Before, call, tensors, &mut rows);
    for (index, row) in rows.iter().enumerate() {
        tensors.store_result(Tensor::Dx, index, &row.dx);
    }
    gradients.store(tensors);
}

/// The inputs and the intermediate values of a group of columns of one row. Vectors have the
/// group's columns.
struct Row {
    index: usize,
    first_col: usize,
    /// `dy` as the call gets it.
    given: Vec<f32>,
    dy: Vec<f32>,
    x: Vec<f32>,
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

struct BackwardKernel<'c> {
    call: &'c Call,
    weight: Vec<f32>,
    /// `mean_wdy_xhat` of the previous row, for the bugs that confuse rows.
    previous_mean_wdy_xhat: Option<f32>,
}

impl<'c> BackwardKernel<'c> {
    fn new(call: &'c Call, weight: Option<Vec<f32>>) -> Self {
        BackwardKernel { call, weight: call.effective_weight(weight), previous_mean_wdy_xhat: None }
    }

    fn row(&mut self, index: usize, group: usize, row: &BackwardRow) -> Row {
        let width = self.call.width();
        let first_col = group * width;
        let [given, dy, x] = [&row.given, &row.dy, &row.x].map(|values| values[first_col..][..width].to_vec());
        let of = if self.call.has(GroupBug::GivenOfFirst) { 0 } else { group };
        let (mean, rstd) = (row.mean[of], row.rstd[of]);
        let centred: Vec<f32> = x.iter().map(|x| x - mean).collect();
        let rstd = if self.call.has(NormBug::BwdNoEps) { self.rstd_without_eps(&centred) } else { rstd };
        let x_hat: Vec<f32> = centred.iter().map(|centred| centred * rstd).collect();
        let of_dx = if self.call.has(GateBug::DxOfDy) { &given } else { &dy };
        let weight = |col: usize| self.weight[self.call.affine_col(first_col + col)];
        let wdy: Vec<f32> = of_dx.iter().enumerate().map(|(col, dy)| dy * weight(col)).collect();
        let mean_wdy = match self.call.spec.norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => 0.0,
            Norm::Layer => self.average(&wdy, DType::F32),
        };
        let mut row = Row { index, first_col, given, dy, x, centred, x_hat, rstd, wdy, mean_wdy, mean_wdy_xhat: 0.0 };
        let mean_wdy_xhat = self.mean_wdy_xhat(&row);
        row.mean_wdy_xhat = match self.previous_mean_wdy_xhat {
            Some(previous) if self.call.has(NormBug::NanLeak) => mean_wdy_xhat + 0.0 * previous,
            Some(previous) if self.call.has(NormBug::CStale) && self.call.is_last_of_several(index) => previous,
            Some(_) | None => mean_wdy_xhat,
        };
        self.previous_mean_wdy_xhat = Some(row.mean_wdy_xhat);
        row
    }

    fn rstd_without_eps(&self, centred: &[f32]) -> f32 {
        let squares: Vec<f32> = centred.iter().map(|centred| centred * centred).collect();
        1.0 / self.average(&squares, DType::F32).sqrt()
    }

    fn average(&self, terms: &[f32], accumulator: DType) -> f32 {
        let cols = if self.call.has(GroupBug::DividedByCols) { self.call.spec.cols } else { self.call.width() };
        let divisor = match self.call.bug() {
            Some(NormBug::BwdNPadded8) => cols.next_multiple_of(8),
            Some(_) | None if self.call.has(L2Bug::BackwardAverages) => cols,
            Some(_) | None => self.call.spec.norm.divisor(cols),
        };
        self.call.sum(terms, accumulator) * (1.0 / divisor as f64) as f32
    }

    /// Whether rstd is a constant, because the norm was clamped.
    fn is_clamped(&self, rstd: f32) -> bool {
        let NormSpec { norm, eps, .. } = self.call.spec;
        match self.call.bug() {
            Some(L2Bug::BackwardNotClamped) => false,
            Some(L2Bug::BackwardClampedBeyond) => norm.is_clamped(2.0 * rstd, eps),
            Some(_) | None => norm.is_clamped(rstd, eps),
        }
    }

    fn mean_wdy_xhat(&self, row: &Row) -> f32 {
        let call = self.call;
        let wdy = |col: usize| {
            if call.has(NormBug::CWithoutW) {
                row.dy[col]
            } else {
                round(row.wdy[col], call.accumulator(NormBug::CLow))
            }
        };
        let x_hat = |col: usize| if call.has(NormBug::CUncentered) { row.x[col] * row.rstd } else { row.x_hat[col] };
        let mut products: Vec<f32> = (0..row.wdy.len()).map(|col| wdy(col) * x_hat(col)).collect();
        if call.has(NormBug::CDropLast) {
            products.truncate(products.len() - 1);
        }
        if call.has(NormBug::CWarpLost) && row.index == 0 {
            products.truncate(products.len().saturating_sub(32));
        }
        if self.is_clamped(row.rstd) {
            return 0.0;
        }
        if call.has(NormBug::CSumNotMean) {
            return call.sum(&products, DType::F32);
        }
        self.average(&products, call.accumulator(NormBug::CLowacc))
    }

    fn dx(&self, row: &Row, result: &mut BackwardRow) {
        let call = self.call;
        let inner = |col: usize| {
            let direct = if call.has(NormBug::DxDirectNoW) { row.dy[col] } else { row.wdy[col] };
            let first = if call.has(NormBug::NoFirst) { 0.0 } else { row.mean_wdy };
            direct - first - self.second_term(row, col)
        };
        let inner: Vec<f32> = (0..row.wdy.len()).map(inner).collect();
        result.dx.extend(inner.iter().map(|inner| inner * row.rstd));
        result.inner.extend(inner);
        result.rstd[row.first_col / call.width()] = row.rstd;
    }

    /// `x_hat * mean_wdy_xhat`
    fn second_term(&self, row: &Row, col: usize) -> f32 {
        let second = row.x_hat[col] * row.mean_wdy_xhat;
        match self.call.bug() {
            Some(NormBug::NoSecond) => 0.0,
            Some(NormBug::SecondNoR) => row.centred[col] * row.mean_wdy_xhat,
            Some(NormBug::SecondSign) => -second,
            Some(NormBug::SecondWTwice) => second * self.weight[row.first_col + col],
            Some(_) | None => second,
        }
    }

    fn dweight_terms(&self, row: &Row) -> Vec<f32> {
        let call = self.call;
        let (rows, cols) = (call.spec.rows, call.width());
        let dropped = (call.has(NormBug::DwDropLastRow) && row.index + 1 == rows)
            || (call.has(NormBug::DwDropTailRows) && row.index >= rows - rows % 8);
        if dropped {
            return vec![0.0; cols];
        }
        let factor = |col: usize| match call.bug() {
            Some(NormBug::DwRowNoR) if row.index == rows / 3 => row.centred[col],
            Some(NormBug::DwUncentered) => row.x[col] * row.rstd,
            Some(_) | None => round(row.x_hat[col], call.accumulator(NormBug::DwLowXhat)),
        };
        let dy = if call.has(GateBug::DweightOfDy) { &row.given } else { &row.dy };
        let mut terms: Vec<f32> = (0..cols).map(|col| dy[col] * factor(col)).collect();
        if call.has(NormBug::DwLostOne) && row.index == rows / 2 {
            terms[cols / 2] = 0.0;
        }
        terms
    }

    fn dbias_terms(&self, row: &Row) -> Vec<f32> {
        if self.call.has(NormBug::DbDropLastRow) && row.index + 1 == self.call.spec.rows {
            return vec![0.0; row.dy.len()];
        }
        if self.call.has(GateBug::DbiasOfDy) { row.given.clone() } else { row.dy.clone() }
    }
}
