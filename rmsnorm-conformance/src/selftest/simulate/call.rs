//! The data that all rows of a call share: the problem, the bug if it applies to this call, the
//! order of summation.

use rmsnorm_spec::depth::ceil_root;
use rmsnorm_spec::{DType, NormSpec, Problem};

use crate::case::Kind;
use crate::run::memory::round;
use crate::selftest::planted::Bug;

/// Rows per block. It grows with the square root of `rows`, so that no stage has a longer chain of
/// additions.
pub(super) fn rows_per_block(at_least: usize, rows: usize) -> usize {
    at_least.max(ceil_root(rows)).max(1)
}

pub(super) struct Call {
    pub(super) spec: NormSpec,
    pub(super) problem: Problem,
    pub(super) block_rows: usize,
    /// The planted bug.
    pub(super) bug: Option<Bug>,
    lanes: usize,
    /// The column at which a sum over a row starts: 0 in a correct kernel.
    first_col: usize,
}

impl Call {
    /// `lanes` and `block_rows` are the backend's.
    pub(super) fn new(
        bug: Option<Bug>,
        (lanes, block_rows): (usize, usize),
        spec: &NormSpec,
        problem: &Problem,
        calls_before: usize,
    ) -> Self {
        let bug = bug.filter(|bug| bug.applies_to(problem.norm, Kind::of(problem)));
        let first_col = match bug {
            Some(Bug::Nondeterministic) => calls_before,
            Some(Bug::BatchVariant) => problem.rows,
            Some(_) | None => 0,
        };
        Call {
            spec: *spec,
            problem: *problem,
            block_rows: rows_per_block(block_rows, problem.rows),
            bug,
            // More lanes for long rows, so that no lane adds more than 64 columns.
            lanes: lanes.max(problem.cols.div_ceil(64)).clamp(1, problem.cols.next_power_of_two()),
            first_col: first_col % problem.cols,
        }
    }

    /// Whether this bug is planted.
    pub(super) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Whether the row is the last of several rows. Some bugs confuse it with the previous row.
    pub(super) fn is_last_of_several(&self, row: usize) -> bool {
        row > 0 && row + 1 == self.spec.rows
    }

    /// The row whose rstd backward uses for this row.
    pub(super) fn row_of_rstd(&self, row: usize) -> usize {
        let off_by_one = self.has(Bug::BwdRowOff) && self.is_last_of_several(row);
        if off_by_one { row - 1 } else { row }
    }

    /// The dtype of values that a bug keeps in 16 bits: that of the activations, or bf16 if that is
    /// f32.
    pub(super) fn low(&self) -> DType {
        match self.problem.dtypes.activation {
            DType::F32 => DType::Bf16,
            DType::F16 | DType::Bf16 => self.problem.dtypes.activation,
        }
    }

    /// The dtype of an accumulator: f32, or a 16-bit dtype with the bug `low_with`.
    pub(super) fn accumulator(&self, low_with: Bug) -> DType {
        if self.has(low_with) { self.low() } else { DType::F32 }
    }

    /// A sum over a row: strided serial accumulators, then a tree.
    pub(super) fn sum(&self, terms: &[f32], accumulator: DType) -> f32 {
        let mut lanes = vec![0.0; self.lanes];
        // If the sum starts at another column, the lanes are used in two runs: the order differs,
        // the depth hardly.
        let (last, first) = terms.split_at(self.first_col.min(terms.len()));
        for chunk in first.chunks(self.lanes).chain(last.chunks(self.lanes)) {
            for (lane, term) in lanes.iter_mut().zip(chunk) {
                *lane = round(*lane + term, accumulator);
            }
        }
        while lanes.len() > 1 {
            let upper = lanes.split_off(lanes.len().div_ceil(2));
            for (lane, other) in lanes.iter_mut().zip(upper) {
                *lane = round(*lane + other, accumulator);
            }
        }
        lanes[0]
    }

    /// `weight + weight_offset` for every column; ones if there is no weight.
    pub(super) fn effective_weight(&self, weight: Option<Vec<f32>>) -> Vec<f32> {
        let cols = self.spec.cols;
        let Some(mut weight) = weight else { return vec![1.0; cols] };
        let (offset, dtype) = (self.spec.weight_offset, self.problem.dtypes.weight);
        weight.iter_mut().for_each(|weight| match self.bug {
            Some(Bug::OffsetMissing | Bug::BwdNoOffset) => {}
            Some(Bug::OffsetDtype) => *weight = round(*weight + round(offset, dtype), dtype),
            Some(_) | None => *weight += offset,
        });
        if self.has(Bug::WShift) {
            weight.rotate_right(1);
        }
        if self.has(Bug::WTail) {
            weight.copy_within(0..cols % 8, cols - cols % 8);
        }
        weight
    }
}
