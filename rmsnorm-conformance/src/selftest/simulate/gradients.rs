//! `dweight` and `dbias`: math.md, equations (11) and (12). f32 partial sums of blocks of rows, kept in the
//! workspace, then a serial sum over the blocks.

use rmsnorm_spec::depth::ceil_root;
use rmsnorm_spec::{DType, Element, Problem, Tensor};

use super::backward::BackwardRow;
use super::call::Call;
use super::matrix::round;
use crate::selftest::planted::Bug;

/// Blocks grow with the root of `rows`, so that neither stage has a chain of additions longer than that.
pub(super) fn rows_per_block(at_least: usize, rows: usize) -> usize {
    at_least.max(ceil_root(rows)).max(1)
}

/// One partial sum a column and block, for each gradient asked for.
pub(super) fn workspace_len(problem: &Problem, block_rows: usize) -> usize {
    problem.tensors.sums_over_rows() * problem.rows.div_ceil(block_rows) * problem.cols
}

pub(super) struct Gradients<'c> {
    call: &'c Call,
    dweight: Option<ColumnSums<'c>>,
    dbias: Option<ColumnSums<'c>>,
}

impl<'c> Gradients<'c> {
    /// `workspace` has at least [`workspace_len`] elements of any value.
    pub(super) fn new(call: &'c Call, workspace: &'c mut [f32]) -> Self {
        let present = call.problem.tensors;
        let each = call.spec.rows.div_ceil(call.block_rows) * call.spec.cols;
        let (for_dweight, rest) = workspace.split_at_mut(if present.has(Tensor::Dweight) { each } else { 0 });
        let (for_dbias, _) = rest.split_at_mut(if present.has(Tensor::Dbias) { each } else { 0 });
        let sums = |partials, low_accumulator| ColumnSums {
            partials,
            accumulator: call.accumulator(low_accumulator),
            partial_dtype: DType::F32,
        };
        let dweight = present.has(Tensor::Dweight).then(|| ColumnSums {
            partial_dtype: call.accumulator(Bug::DwLowPartials),
            ..sums(for_dweight, Bug::DwLowacc)
        });
        let dbias = present.has(Tensor::Dbias).then(|| sums(for_dbias, Bug::DbLowacc));
        Gradients { call, dweight, dbias }
    }

    /// Adds the terms of a row. Rows come in order.
    pub(super) fn add(&mut self, row: usize, result: &BackwardRow) {
        if let Some(dweight) = &mut self.dweight {
            dweight.add(self.call, row, &result.dweight_terms);
            if self.call.has(Bug::DwDupRow) && row == 0 {
                dweight.add_terms(0, &result.dweight_terms);
            }
        }
        if let Some(dbias) = &mut self.dbias {
            dbias.add(self.call, row, &result.dbias_terms);
        }
    }

    /// Sums over the blocks and writes what was asked for.
    pub(super) fn store<W: Element>(self, dweight: Option<&mut [W]>, dbias: Option<&mut [W]>) {
        if self.call.has(Bug::EmptyNotZeroed) && self.call.spec.rows == 0 {
            return;
        }
        let (dweight, dbias) = match (dweight, dbias) {
            (Some(dweight), Some(dbias)) if self.call.has(Bug::DwDbSwapped) => (Some(dbias), Some(dweight)),
            as_given => as_given,
        };
        if let (Some(sums), Some(dweight)) = (self.dweight, dweight) {
            let lost = usize::from(self.call.has(Bug::DwBlockLost));
            for (element, total) in dweight.iter_mut().zip(sums.totals(self.call.spec.cols, lost)) {
                let before = if self.call.has(Bug::DwAccumulate) { element.to_f32() } else { 0.0 };
                *element = W::from_f32(before + total);
            }
        }
        if let (Some(sums), Some(dbias)) = (self.dbias, dbias) {
            for (element, total) in dbias.iter_mut().zip(sums.totals(self.call.spec.cols, 0)) {
                *element = W::from_f32(total);
            }
        }
    }
}

impl Gradients<'_> {
    /// As f32, or added to what is there; `W` is the weight's dtype, which only a bug asks for.
    pub(super) fn store_sums<W: Element>(
        self,
        dweight: Option<&mut [f32]>,
        dbias: Option<&mut [f32]>,
        accumulate: bool,
    ) {
        let call = self.call;
        let store = |sums: ColumnSums<'_>, to: &mut [f32], [is_rounded, overwrites]: [bool; 2]| {
            let held = to.to_vec();
            for (col, (element, mut total)) in to.iter_mut().zip(sums.totals(call.spec.cols, 0)).enumerate() {
                if call.has(Bug::SumAveraged) {
                    total /= call.spec.rows as f32;
                }
                if is_rounded {
                    total = W::from_f32(total).to_f32();
                }
                let held = match () {
                    () if call.has(Bug::SumHeldOfNext) => held[(col + 1) % held.len()],
                    () if call.has(Bug::SumHeldTwice) => 2.0 * held[col],
                    () if call.has(Bug::SumHeldRounded) => round(held[col], DType::Bf16),
                    () => held[col],
                };
                let adds = accumulate && !overwrites || call.has(Bug::SumAddedAlways);
                *element = if adds { held + total } else { total };
            }
        };
        let (rounds, overwrites) = (call.has(Bug::SumRounded), call.has(Bug::SumOverwrites));
        if let (Some(sums), Some(to)) = (self.dweight, dweight) {
            store(sums, to, [rounds, overwrites]);
        }
        if let (Some(sums), Some(to)) = (self.dbias, dbias) {
            let of_dbias = [Bug::SumOfDbiasRounded, Bug::SumOfDbiasOverwrites].map(|bug| call.has(bug));
            store(sums, to, [rounds || of_dbias[0], overwrites || of_dbias[1]]);
        }
    }
}

struct ColumnSums<'w> {
    /// (blocks, cols)
    partials: &'w mut [f32],
    accumulator: DType,
    /// The precision in which partial sums reach the second stage.
    partial_dtype: DType,
}

impl ColumnSums<'_> {
    fn add(&mut self, call: &Call, row: usize, terms: &[f32]) {
        let block_start = row / call.block_rows * terms.len();
        let opens_block = row.is_multiple_of(call.block_rows);
        if opens_block && !call.has(Bug::WorkspaceNotCleared) {
            self.partials[block_start..block_start + terms.len()].fill(0.0);
        }
        self.add_terms(block_start, terms);
    }

    fn add_terms(&mut self, block_start: usize, terms: &[f32]) {
        for (partial, term) in self.partials[block_start..].iter_mut().zip(terms) {
            *partial = round(*partial + term, self.accumulator);
        }
    }

    /// The sums over all blocks, or over all but the last `lost` where there are several.
    fn totals(&self, cols: usize, lost: usize) -> Vec<f32> {
        let blocks = self.partials.len() / cols;
        let counted = blocks.saturating_sub(lost).max(blocks.min(1));
        let mut totals = vec![0.0; cols];
        for block in self.partials.chunks(cols).take(counted) {
            for (total, &partial) in totals.iter_mut().zip(block) {
                *total = round(*total + round(partial, self.partial_dtype), self.accumulator);
            }
        }
        totals
    }
}
