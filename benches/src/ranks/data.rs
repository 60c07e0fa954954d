//! The inputs of the ranks, and the check of their outputs.

use rmsnorm_core::conformance::Arithmetic;
use rmsnorm_core::conformance::bounds::{Mode, Model};
use rmsnorm_core::conformance::testing::{Bits, ForwardTruth};
use rmsnorm_core::reference::{ForwardInputs, sum_of_parts};
use rmsnorm_core::{Norm, NormSpec, Tensor};

use super::{Outputs, Promise, RanksCase};
use crate::Shape;
use crate::pattern::values;

/// Added to every variance.
const EPS: f32 = 1e-6;

/// The seeds of tensors that are equal on all ranks. The seed of x is the rank.
pub(super) const RESIDUAL: u64 = 100;
pub(super) const WEIGHT: u64 = 101;
pub(super) const BIAS: u64 = 102;

/// Checks the outputs of all ranks.
///
/// # Errors
/// The fault, in words.
pub(super) fn judge(
    case: &RanksCase,
    arithmetic: &Arithmetic,
    ranks: &[Outputs],
    promise: Promise,
) -> Result<(), &'static str> {
    let [sum, y] = &ranks[0];
    let have_one_y = || ranks.iter().all(|[_, other]| other == y);
    match promise {
        Promise::ExactRows if have_one_y() => {
            judge_sum(case, arithmetic, ranks.len(), [&whole_sum(case, ranks), y], true)
        }
        Promise::ExactSum | Promise::SomeSum if have_one_y() && ranks.iter().all(|[other, _]| other == sum) => {
            judge_sum(case, arithmetic, ranks.len(), [sum, y], promise == Promise::ExactSum)
        }
        Promise::ExactRows | Promise::ExactSum | Promise::SomeSum => Err("ranks differ"),
        Promise::WholeRows => judge_whole_rows(case, arithmetic, ranks),
        Promise::Nothing => Ok(()),
    }
}

/// Checks some rows of the sum over `ranks` and of y. If the sum may differ from its definition, y is
/// checked with the stored sum.
fn judge_sum(
    case: &RanksCase,
    arithmetic: &Arithmetic,
    ranks: usize,
    [sum, y]: [&Bits; 2],
    is_exact: bool,
) -> Result<(), &'static str> {
    let (Shape { cols, .. }, dtype) = (case.shape, case.dtype);
    let of = |seed| values(dtype, seed, sampled(case)).values();
    let x: Vec<f64> = (0..ranks as u64).flat_map(of).collect();
    let expected = sum_of_parts(&x, ranks, Some(&of(RESIDUAL)), dtype);
    let got_sum = pick(case, sum);
    let expected = if is_exact { expected } else { got_sum.values() };
    if got_sum != Bits::rounded(&expected, dtype) {
        return Err("the sum is wrong");
    }
    let [weight, bias] = [WEIGHT, BIAS].map(|seed| values(dtype, seed, 0..cols).values());
    judge_y(case, cols, [&expected, &weight, &bias], &pick(case, y), arithmetic)
}

/// Checks some rows of y, joined from all ranks.
fn judge_whole_rows(case: &RanksCase, arithmetic: &Arithmetic, ranks: &[Outputs]) -> Result<(), &'static str> {
    let (Shape { cols, .. }, dtype) = (case.shape, case.dtype);
    let join = |parts: &[Bits]| -> Bits {
        let row = |row: usize| parts.iter().flat_map(move |part| part.bits[row * cols..(row + 1) * cols].to_vec());
        Bits { storage: dtype.into(), bits: (0..SAMPLED.len()).flat_map(row).collect() }
    };
    let x: Vec<Bits> = (0..ranks.len()).map(|rank| values(dtype, rank as u64, sampled(case))).collect();
    let y: Vec<Bits> = ranks.iter().map(|[_, y]| pick(case, y)).collect();
    let of_all = |seed| values(dtype, seed, 0..cols).values().repeat(ranks.len());
    let (weight, bias) = (of_all(WEIGHT), of_all(BIAS));
    judge_y(case, cols * ranks.len(), [&join(&x).values(), &weight, &bias], &join(&y), arithmetic)
}

/// The sum, joined from the rows that the ranks own.
fn whole_sum(case: &RanksCase, ranks: &[Outputs]) -> Bits {
    let own = |(rank, [sum, _]): (usize, &Outputs)| sum.bits[case.of_stream(rank, ranks.len())].to_vec();
    Bits { storage: case.dtype.into(), bits: ranks.iter().enumerate().flat_map(own).collect() }
}

/// The indices of the elements of the sampled rows.
fn sampled(case: &RanksCase) -> impl Iterator<Item = usize> + use<> {
    let Shape { rows, cols } = case.shape;
    SAMPLED.into_iter().map(move |of| of(rows)).flat_map(move |row| row * cols..(row + 1) * cols)
}

fn pick(case: &RanksCase, matrix: &Bits) -> Bits {
    Bits { storage: matrix.storage, bits: sampled(case).map(|element| matrix.bits[element]).collect() }
}

/// The sampled rows, as functions of the number of rows.
const SAMPLED: [fn(usize) -> usize; 4] = [|_| 0, |rows| rows / 3, |rows| rows / 2, |rows| rows - 1];

/// Checks y on the sampled rows. `x`: the normalized rows, of `cols` columns.
fn judge_y(
    case: &RanksCase,
    cols: usize,
    [x, weight, bias]: [&[f64]; 3],
    y: &Bits,
    arithmetic: &Arithmetic,
) -> Result<(), &'static str> {
    let bias = (case.norm == Norm::Layer).then_some(bias);
    let inputs = ForwardInputs { x, residual: None, weight: Some(weight), bias };
    let model = Model { arithmetic, mode: Mode::Worst };
    let spec = spec(case).rows(SAMPLED.len()).cols(cols);
    let truth = ForwardTruth::of_sum(&spec, inputs, (case.dtype, case.dtype), model);
    if truth.judge_bits(Tensor::Y, y).is_pass() { Ok(()) } else { Err("y is outside its error bounds") }
}

/// The norm of a case.
pub(super) fn spec(case: &RanksCase) -> NormSpec {
    NormSpec::new(case.norm, case.shape.rows, case.shape.cols, EPS)
}
