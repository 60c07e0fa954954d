//! Proves changed rungs: runs cases of the conformance suite for their row lengths.

use std::time::Instant;

use rmsnorm_core::conformance::{self, Case, Family, Kind, Layout, Options, Summary, Trial};
use rmsnorm_core::{DType, DTypes, Norm, Tensor, TensorSet};
use rmsnorm_tuning::Table;

use super::search::Found;
use super::task::Subject;
use super::{Ending, Search, measured_cols};
use crate::{BenchError, Measurable, Op, Quant, Shape};

/// The largest number of elements of a case: each is compared with a reference in f64.
const MOST_ELEMENTS: usize = 1 << 19;

/// All optional tensors of a call.
const ALL: TensorSet = TensorSet::of(&[
    Tensor::Weight,
    Tensor::Bias,
    Tensor::Residual,
    Tensor::ResidualOut,
    Tensor::Mean,
    Tensor::Rstd,
    Tensor::DresidualOut,
    Tensor::Dweight,
    Tensor::Dbias,
]);

/// All optional tensors except the residual's: calls with a residual have other ladders.
const WITHOUT_RESIDUAL: TensorSet =
    ALL.without(Tensor::Residual).without(Tensor::ResidualOut).without(Tensor::DresidualOut);

/// The tensors of the next norm of a sum, in training.
const NEXT: TensorSet =
    TensorSet::of(&[Tensor::Y, Tensor::NextWeight, Tensor::NextBias, Tensor::NextMean, Tensor::NextRstd]);

/// A weight and its gradient: a call with one sum over the rows.
const ONE_GRADIENT: TensorSet = TensorSet::of(&[Tensor::Weight, Tensor::Rstd, Tensor::Dweight]);

/// Runs the cases of a changed rung, with a table of the earlier changes and this one. If a case
/// fails, or the budget ends, the rung is put back. Returns the number of cases that were run.
pub(super) fn prove<D: Measurable>(
    search: &Search<'_, D>,
    before: &Table,
    changed: &mut Found,
) -> Result<usize, BenchError> {
    let mut table = before.clone();
    changed.put(&mut table);
    let device = match search.base.with_table(&table) {
        Ok(device) => device,
        Err(reason) => {
            changed.tuned.ending = Ending::PutBack(reason);
            return Ok(0);
        }
    };
    let others = device.other_forms();
    let (ids, mut cases) = (ids(changed), 0);
    for form in std::iter::once(&device).chain(&others) {
        // In parts, to check the budget between them.
        for ids in ids.chunks(4 * search.jobs.max(1)) {
            if Instant::now() > search.until {
                changed.tuned.ending = Ending::PutBack("the budget ended before its proof".into());
                return Ok(cases);
            }
            let summary = match run(form, ids, search.jobs) {
                Ok(summary) => summary,
                // Earlier changes stay.
                Err(error) => {
                    changed.tuned.ending = Ending::PutBack(format!("its proof could not be run: {error}"));
                    return Ok(cases);
                }
            };
            cases += summary.counts.passed + summary.counts.failed;
            if let Some((id, finding)) = summary.failures.first() {
                changed.tuned.ending = Ending::PutBack(format!("{finding} ({id})"));
                return Ok(cases);
            }
        }
    }
    if cases == 0 {
        changed.tuned.ending = Ending::PutBack("no case of the suite could be run for its lengths".into());
    }
    Ok(cases)
}

fn run<D: Measurable>(device: &D, ids: &[String], jobs: usize) -> Result<Summary, BenchError> {
    let (cases, fail_fast, self_test) = (ids.to_vec(), true, false);
    let options = Options { cases, fail_fast, self_test, jobs, ..Options::default() };
    conformance::run(device, &options, &mut |_, _| {}, None).map_err(|error| BenchError::Input(error.to_string()))
}

/// The cases of a rung: row lengths at both ends of it and the measured ones, for every kind of
/// call that looks it up.
fn ids(found: &Found) -> Vec<String> {
    let task = &found.task;
    let mut cols = measured_cols(task);
    if let Some(columns) = std::num::NonZero::new(task.slot.columns) {
        let (above, up_to) = (task.lengths.0 as usize * columns.get(), task.lengths.1 as usize * columns.get());
        // Also half a vector less, and one element less than the longest row.
        let inside =
            [above + 1, above + columns.get(), up_to.saturating_sub(columns.get() / 2), up_to.saturating_sub(1), up_to];
        cols.extend(inside.into_iter().filter(|cols| (above + 1..=up_to).contains(cols) && *cols <= 1 << 18));
    }
    let mut ids: Vec<String> = Vec::new();
    for subject in &task.subjects {
        let cases = cols.iter().enumerate().flat_map(|(number, cols)| cases(subject, *cols, number));
        ids.extend(cases.map(|case| case.normalized().to_string()));
    }
    ids.sort();
    ids.dedup();
    ids
}

/// The cases of one row length: several numbers of rows, dense and strided, in every dtype that
/// shares the rung.
fn cases(subject: &Subject, cols: usize, number: usize) -> Vec<Case> {
    let norm = subject.operation.norm;
    let dtypes: &[DType] = match subject.dtype {
        DType::F32 => &[DType::F32],
        DType::Bf16 | DType::F16 => &[DType::Bf16, DType::F16],
    };
    // Numbers of the table are proven on the shapes that they decide about, with as many rows as
    // can be checked.
    let most_rows = (MOST_ELEMENTS / cols).max(1);
    let rows = [3, 33, subject.shape.rows].into_iter().map(|rows| rows.min(most_rows));
    let (kind, present) = kind_and_tensors(subject.operation.op, norm);
    let quant = subject.operation.op.quant();
    let mut cases = Vec::new();
    for (index, rows) in rows.enumerate() {
        for (&dtype, layout) in dtypes.iter().zip([Layout::DENSE, Layout::Mixed((number + index) as u32)]) {
            let plain = Case { present, layout, ..Case::plain(kind, norm, dtype, rows, cols) };
            let quant = quant.map(|quant: Quant| quant.spec(Shape { rows, cols }));
            let dtypes = DTypes::uniform(dtype);
            cases.push(Case { quant, dtypes, ..plain });
            if index == 0 && quant.is_none() {
                cases.push(Case { family: Family::Outlier, weight_offset: 0.3, ..plain });
            }
            if index == 1 && quant.is_none() {
                cases.push(Case { trial: Trial::Determinism { repeats: 3 }, ..plain });
            }
            // Sums after the norm use the same ladders, with and without a next norm, and keep more
            // of a row.
            if subject.operation.op == Op::AddForward {
                let present = if index % 2 == 0 { ALL.union(NEXT) } else { ALL };
                cases.push(Case { kind: Kind::FORWARD_AFTER, present, ..plain });
            }
            // Quantized calls without separate ladders, and all with a residual, use forward's
            // ladders of blocks.
            if matches!(subject.operation.op, Op::Forward | Op::AddForward) {
                let quant = [Quant::Tensor, Quant::Block128][index % 2].spec(Shape { rows, cols });
                cases.push(Case { kind: Kind::QUANTIZED_FORWARD, quant: Some(quant), ..plain });
            }
        }
    }
    cases
}

fn kind_and_tensors(op: Op, norm: Norm) -> (Kind, TensorSet) {
    match op {
        Op::Forward => (Kind::FORWARD, WITHOUT_RESIDUAL),
        // Sums after the norm have no ladders: they use the ladders of sums before it.
        Op::AddForward | Op::AddQuantizedForward(_) | Op::ForwardAdd | Op::ForwardAddForward => (Kind::FORWARD, ALL),
        Op::Backward if norm == Norm::Rms => (Kind::BACKWARD, ONE_GRADIENT),
        Op::Backward => (Kind::BACKWARD, ALL),
        Op::QuantizedForward(_) => (Kind::QUANTIZED_FORWARD, WITHOUT_RESIDUAL),
    }
}
