//! Rows with columns divided among ranks: math.md, equations (15) and (17). Sums over one rank's columns.

use rmsnorm_spec::{Direction, Norm};

use super::backward::BackwardRows;
use super::forward::before::{Before, Summed};
use super::forward::statistics::{sum_of, sums_about_mean};
use super::{Call, Matrix, MatrixMut, Stage, split};
use crate::lanes::{Mix, Simd};

/// The rows of the first phase of a forward call, or some of them.
pub(crate) struct SumsRows<'a> {
    pub(crate) call: Call,
    pub(crate) before: Summed<'a, Matrix<'a>>,
    /// (rows, numbers)
    pub(crate) sums: MatrixMut<'a, f32>,
}

split!(['a] SumsRows<'a> { call, before, sums; });

/// Computes the numbers of every row.
impl Stage for SumsRows<'_> {
    #[inline(always)]
    fn run<S: Simd, M: Mix>(&mut self) {
        let SumsRows { call, before, sums } = self;
        let (norm, cols) = (call.spec.norm, call.spec.cols);
        for r in 0..call.spec.rows {
            let mut row = before.row::<M, true>(r, 0, call);
            let mut sums = sums.row(r, norm.statistics_len(Direction::Forward));
            match norm {
                Norm::Rms | Norm::L2 | Norm::L2Clamped => sums.set(0, sum_of::<S, _>(&mut row, cols, true)),
                Norm::Layer => {
                    let sum = sum_of::<S, _>(&mut row, cols, false);
                    sums.copy_from_slice(&sums_about_mean::<S>(&row, cols, sum));
                }
            }
        }
    }
}

/// The rows of the first phase of a backward call, or some of them.
pub(crate) struct BackwardSumsRows<'a> {
    pub(crate) rows: BackwardRows<'a>,
    /// (rows, numbers)
    pub(crate) sums: MatrixMut<'a, f32>,
}

split!(['a] BackwardSumsRows<'a> { rows, sums; });

/// Computes the sums of every row.
impl Stage for BackwardSumsRows<'_> {
    #[inline(always)]
    fn run<S: Simd, M: Mix>(&mut self) {
        let norm = self.rows.call.spec.norm;
        for r in 0..self.rows.call.spec.rows {
            let [wdy, products] = self.rows.row::<M>(r, [None, None]).sums::<S>();
            let mut sums = self.sums.row(r, norm.statistics_len(Direction::Backward));
            match norm {
                Norm::Rms | Norm::L2 | Norm::L2Clamped => sums.set(0, products),
                Norm::Layer => sums.copy_from_slice(&[wdy, products]),
            }
        }
    }
}
