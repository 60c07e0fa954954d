//! `dweight` and `dbias`: math.md, equations (11) and (12). f32 partial sums of blocks of rows in
//! the workspace, then a serial sum over the blocks.

use rmsnorm_spec::{DType, GradStore, Problem, Tensor};

use super::call::Call;
use super::tensors::Tensors;
use crate::run::memory::round;
use crate::selftest::planted::NormBug;

/// Length of the workspace: one partial sum per block and column, for each requested gradient.
pub(super) fn workspace_len(problem: &Problem, block_rows: usize) -> usize {
    problem.tensors.sums_over_rows() * problem.rows.div_ceil(block_rows) * problem.cols
}

pub(super) struct Gradients<'c> {
    call: &'c Call,
    dweight: Option<ColumnSums>,
    dbias: Option<ColumnSums>,
}

impl<'c> Gradients<'c> {
    /// `workspace` must have at least [`workspace_len`] elements, of any value.
    pub(super) fn new(call: &'c Call, workspace: Vec<f32>) -> Self {
        let each = call.spec.rows.div_ceil(call.block_rows) * call.spec.cols;
        let mut rest = workspace.into_iter();
        let mut sums = |gradient, accumulator, partial_dtype| {
            let mut partials = || rest.by_ref().take(each).collect();
            call.problem.has(gradient).then(|| ColumnSums { partials: partials(), accumulator, partial_dtype })
        };
        let (low_sums, low_partials) = (call.accumulator(NormBug::DwLowacc), call.accumulator(NormBug::DwLowPartials));
        let dweight = sums(Tensor::Dweight, low_sums, low_partials);
        let dbias = sums(Tensor::Dbias, call.accumulator(NormBug::DbLowacc), DType::F32);
        Gradients { call, dweight, dbias }
    }

    /// Adds the terms of a row, (cols) each. Rows must be added in order.
    pub(super) fn add(&mut self, row: usize, dweight_terms: &[f32], dbias_terms: &[f32]) {
        if let Some(dweight) = &mut self.dweight {
            dweight.add(self.call, row, dweight_terms);
            if self.call.has(NormBug::DwDupRow) && row == 0 {
                dweight.add_terms(0, dweight_terms);
            }
        }
        if let Some(dbias) = &mut self.dbias {
            dbias.add(self.call, row, dbias_terms);
        }
    }

    /// Sums over the blocks and writes the requested gradients: rounded, as f32, or added to the
    /// old content.
    pub(super) fn store(self, tensors: &mut Tensors<'_, '_>) {
        let call = self.call;
        if call.has(NormBug::EmptyNotZeroed) && call.spec.rows == 0 {
            return;
        }
        let has_both = self.dweight.is_some() && self.dbias.is_some();
        let [dweight, dbias] = match call.bug() {
            Some(NormBug::DwDbSwapped) if has_both => [Tensor::Dbias, Tensor::Dweight],
            Some(_) | None => [Tensor::Dweight, Tensor::Dbias],
        };
        for (sums, tensor, is_dbias) in [(self.dweight, dweight, false), (self.dbias, dbias, true)] {
            let Some((sums, to)) = sums.zip(tensors.get_mut(tensor)) else { continue };
            let has = |of_both, of_dbias| call.has(of_both) || is_dbias && call.has(of_dbias);
            let is_rounded = has(NormBug::SumRounded, NormBug::SumOfDbiasRounded);
            let overwrites = has(NormBug::SumOverwrites, NormBug::SumOfDbiasOverwrites);
            let accumulates = call.problem.grad_store == GradStore::Accumulated && !overwrites;
            let adds = accumulates || call.has(NormBug::SumAddedAlways) || call.has(NormBug::DwAccumulate) && !is_dbias;
            let held: Vec<f32> = (0..to.len()).map(|col| to.value(col)).collect();
            let lost = usize::from(call.has(NormBug::DwBlockLost) && !is_dbias);
            for (col, total) in sums.totals(call.spec.cols, lost).into_iter().enumerate() {
                let total = if call.has(NormBug::SumAveraged) { total / call.spec.rows as f32 } else { total };
                let total = if is_rounded { round(total, call.problem.dtypes.weight) } else { total };
                let held = match call.bug() {
                    Some(NormBug::SumHeldOfNext) => held[(col + 1) % held.len()],
                    Some(NormBug::SumHeldTwice) => 2.0 * held[col],
                    Some(NormBug::SumHeldRounded) => round(held[col], DType::Bf16),
                    Some(_) | None => held[col],
                };
                to.store(col, if adds { held + total } else { total });
            }
        }
    }
}

struct ColumnSums {
    /// (blocks, cols)
    partials: Vec<f32>,
    accumulator: DType,
    /// The dtype to which partial sums are rounded for the second stage.
    partial_dtype: DType,
}

impl ColumnSums {
    fn add(&mut self, call: &Call, row: usize, terms: &[f32]) {
        let block_start = row / call.block_rows * terms.len();
        let opens_block = row.is_multiple_of(call.block_rows);
        if opens_block && !call.has(NormBug::WorkspaceNotCleared) {
            self.partials[block_start..block_start + terms.len()].fill(0.0);
        }
        self.add_terms(block_start, terms);
    }

    fn add_terms(&mut self, block_start: usize, terms: &[f32]) {
        for (partial, term) in self.partials[block_start..].iter_mut().zip(terms) {
            *partial = round(*partial + term, self.accumulator);
        }
    }

    /// The sums over all blocks, or over all except the last `lost` if there are several.
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
