//! The data that all rows of a call share: the problem, the bug if it applies to this call, the
//! order of summation.

use std::ops::Range;

use rmsnorm_spec::depth::ceil_root;
use rmsnorm_spec::{DType, DTypes, NormSpec, Problem, Tensor};

use crate::case::Kind;
use crate::case::cast::CastBug;
use crate::case::groups::GroupBug;
use crate::run::memory::round;
use crate::selftest::planted::{Bug, BugList, NormBug};

/// Rows per block. It grows with the square root of `rows`, so that no stage has a longer chain of
/// additions.
pub(crate) fn rows_per_block(at_least: usize, rows: usize) -> usize {
    at_least.max(ceil_root(rows)).max(1)
}

pub(crate) struct Call {
    pub(crate) spec: NormSpec,
    pub(crate) problem: Problem,
    pub(crate) block_rows: usize,
    /// The distance of the parts of x in elements.
    pub(crate) part_stride: usize,
    /// The planted bug.
    bug: Option<Bug>,
    lanes: usize,
    /// The column at which a sum over a row starts: 0 in a correct kernel.
    first_col: usize,
}

impl Call {
    /// Rounds values of a cast to the other dtype, if that is the planted bug.
    pub(crate) fn spoil_cast(&self, bug: CastBug, values: &mut [f32]) {
        let DTypes { activation, residual, .. } = self.problem.dtypes;
        let dtype = match bug {
            CastBug::YOfX => residual,
            CastBug::XOfY | CastBug::DxOfDy => activation,
        };
        if self.has(bug) && self.problem.tensors.is_cast() {
            values.iter_mut().for_each(|value| *value = round(*value, dtype));
        }
    }

    /// `lanes` and `block_rows` are the backend's.
    pub(crate) fn new(
        bug: Option<Bug>,
        (lanes, block_rows): (usize, usize),
        (spec, problem, part_stride): (&NormSpec, &Problem, usize),
        calls_before: usize,
    ) -> Self {
        let bug = bug.filter(|bug| bug.applies_to(problem.norm, Kind::of(problem)));
        let width = problem.cols / problem.groups;
        let mut call = Call {
            spec: *spec,
            problem: *problem,
            part_stride,
            block_rows: rows_per_block(block_rows, problem.rows),
            bug,
            // More lanes for long rows, so that no lane adds more than 64 columns.
            lanes: lanes.max(width.div_ceil(64)).clamp(1, width.next_power_of_two()),
            first_col: 0,
        };
        let first_col = match call.bug() {
            Some(NormBug::Nondeterministic) => calls_before,
            Some(NormBug::BatchVariant) => problem.rows,
            Some(_) | None => 0,
        };
        call.first_col = first_col % width;
        call
    }

    /// Columns of a group.
    pub(crate) fn width(&self) -> usize {
        self.spec.cols / self.spec.groups
    }

    /// The columns whose statistics a group has.
    pub(crate) fn columns(&self, group: usize) -> Range<usize> {
        match self.bug() {
            Some(GroupBug::OfRow) => 0..self.spec.cols,
            Some(GroupBug::OfFirst) => 0..self.width(),
            Some(_) | None => group * self.width()..(group + 1) * self.width(),
        }
    }

    /// The column whose weight and bias a column has.
    pub(crate) fn affine_col(&self, col: usize) -> usize {
        if self.has(GroupBug::AffineOfFirst) { col % self.width() } else { col }
    }

    /// The planted bug, if it is of this list.
    pub(crate) fn bug<L: BugList>(&self) -> Option<L> {
        let (list, index) = self.bug?.place;
        (list == L::LIST).then(|| L::EACH[index])
    }

    /// Whether this bug is planted.
    pub(crate) fn has<L: BugList>(&self, bug: L) -> bool {
        self.bug.is_some_and(|planted| planted.place == (L::LIST, bug.index()))
    }

    /// Whether this bug of each tensor is planted for that tensor.
    pub(crate) fn has_on(&self, bug: impl BugList, tensor: Tensor) -> bool {
        self.has(bug) && self.bug.is_some_and(|planted| planted.tensor == Some(tensor))
    }

    /// Whether the row is the last of several rows. Some bugs confuse it with the previous row.
    pub(crate) fn is_last_of_several(&self, row: usize) -> bool {
        row > 0 && row + 1 == self.spec.rows
    }

    /// The row whose rstd backward uses for this row.
    pub(crate) fn row_of_rstd(&self, row: usize) -> usize {
        let off_by_one = self.has(NormBug::BwdRowOff) && self.is_last_of_several(row);
        if off_by_one { row - 1 } else { row }
    }

    /// The dtype of values that a bug keeps in 16 bits: that of the activations, or bf16 if that is
    /// f32.
    pub(crate) fn low(&self) -> DType {
        match self.problem.dtypes.activation {
            DType::F32 => DType::Bf16,
            DType::F16 | DType::Bf16 => self.problem.dtypes.activation,
        }
    }

    /// The dtype of an accumulator: f32, or a 16-bit dtype with the bug `low_with`.
    pub(crate) fn accumulator(&self, low_with: impl BugList) -> DType {
        if self.has(low_with) { self.low() } else { DType::F32 }
    }

    /// A sum over a row: strided serial accumulators, then a tree.
    pub(crate) fn sum(&self, terms: &[f32], accumulator: DType) -> f32 {
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
    pub(crate) fn effective_weight(&self, weight: Option<Vec<f32>>) -> Vec<f32> {
        let cols = self.spec.cols;
        let Some(mut weight) = weight else { return vec![1.0; cols] };
        let (offset, dtype) = (self.spec.weight_offset, self.problem.dtypes.weight);
        weight.iter_mut().for_each(|weight| match self.bug() {
            Some(NormBug::OffsetMissing | NormBug::BwdNoOffset) => {}
            Some(NormBug::OffsetDtype) => *weight = round(*weight + round(offset, dtype), dtype),
            Some(_) | None => *weight += offset,
        });
        if self.has(NormBug::WShift) {
            weight.rotate_right(1);
        }
        if self.has(NormBug::WTail) {
            weight.copy_within(0..cols % 8, cols - cols % 8);
        }
        weight
    }
}
