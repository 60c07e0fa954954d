//! What ranks add up and normalize, and whether what came out is right.

use rmsnorm_core::Element;
use rmsnorm_core::conformance::Arithmetic;
use rmsnorm_core::conformance::bounds::{Mode, Model};
use rmsnorm_core::conformance::testing::{Bits, ForwardTruth, exact, values};
use rmsnorm_core::reference::{ForwardInputs, sum_of_parts};
use rmsnorm_core::{Norm, NormSpec, Tensor};

use super::{Promise, RanksCase};
use crate::Shape;

/// Added to every variance.
const EPS: f32 = 1e-6;

/// The inputs of the largest case; a smaller one has the first of these.
pub(super) struct Data<T> {
    /// By rank.
    pub(super) x: Vec<Vec<T>>,
    pub(super) residual: Vec<T>,
    pub(super) weight: Vec<T>,
    pub(super) bias: Vec<T>,
}

impl<T: Element> Data<T> {
    pub(super) fn new(ranks: usize, cases: &[RanksCase]) -> Self {
        let most = |of: fn(&Shape) -> usize| cases.iter().map(|case| of(&case.shape)).max().unwrap_or(0);
        let (len, cols) = (most(|shape| shape.rows * shape.cols), most(|shape| shape.cols));
        Data {
            x: (0..ranks).map(|rank| values(rank as u64, len)).collect(),
            residual: values(100, len),
            weight: values(101, cols),
            bias: values(102, cols),
        }
    }

    /// What is wrong with the outputs of all ranks, a sum and y of each, if anything.
    pub(super) fn judge(
        &self,
        case: &RanksCase,
        arithmetic: &Arithmetic,
        ranks: &[[Vec<T>; 2]],
        promise: Promise,
    ) -> Result<(), &'static str> {
        match promise {
            Promise::ExactRows => self.judge_sum(case, arithmetic, &with_whole_sums(case, ranks), true),
            Promise::ExactSum | Promise::SomeSum => {
                self.judge_sum(case, arithmetic, ranks, promise == Promise::ExactSum)
            }
            Promise::WholeRows => self.judge_whole_rows(case, arithmetic, ranks),
            Promise::Nothing => Ok(()),
        }
    }

    /// y on some rows, by the sum that was stored where that is not the one of the definition.
    fn judge_sum(
        &self,
        case: &RanksCase,
        arithmetic: &Arithmetic,
        ranks: &[[Vec<T>; 2]],
        is_exact: bool,
    ) -> Result<(), &'static str> {
        let [sum, y] = &ranks[0];
        if ranks.iter().any(|rank| bits(&rank[0]) != bits(sum) || bits(&rank[1]) != bits(y)) {
            return Err("ranks differ");
        }
        let cols = case.shape.cols;
        let x: Vec<f64> = self.x.iter().flat_map(|x| exact(&sampled(case, x))).collect();
        let expected = sum_of_parts(&x, self.x.len(), Some(&exact(&sampled(case, &self.residual))), T::DTYPE);
        let got_sum = sampled(case, sum);
        let expected = if is_exact { expected } else { exact(&got_sum) };
        if bits(&got_sum) != Bits::rounded(&expected, T::DTYPE).bits {
            return Err("the sum is wrong");
        }
        let (weight, bias) = (exact(&self.weight[..cols]), exact(&self.bias[..cols]));
        judge_y(case, cols, [&expected, &weight, &bias], &sampled(case, y), arithmetic)
    }

    /// y of all ranks, put together, on some rows.
    fn judge_whole_rows(
        &self,
        case: &RanksCase,
        arithmetic: &Arithmetic,
        ranks: &[[Vec<T>; 2]],
    ) -> Result<(), &'static str> {
        let cols = case.shape.cols;
        let join = |parts: &[Vec<T>]| -> Vec<T> {
            let rows = 0..parts[0].len() / cols;
            rows.flat_map(|row| parts.iter().flat_map(move |part| part[row * cols..(row + 1) * cols].to_vec()))
                .collect()
        };
        let x: Vec<Vec<T>> = self.x.iter().map(|x| sampled(case, x)).collect();
        let y: Vec<Vec<T>> = ranks.iter().map(|[_, y]| sampled(case, y)).collect();
        let of_all = |values: &[T]| exact(&values[..cols]).repeat(ranks.len());
        let (weight, bias) = (of_all(&self.weight), of_all(&self.bias));
        judge_y(case, cols * ranks.len(), [&exact(&join(&x)), &weight, &bias], &join(&y), arithmetic)
    }
}

/// Outputs of which each rank's sum has the rows that it owns, with the sum of all.
fn with_whole_sums<T: Element>(case: &RanksCase, ranks: &[[Vec<T>; 2]]) -> Vec<[Vec<T>; 2]> {
    let own = |(rank, [sum, _]): (usize, &[Vec<T>; 2])| sum[case.of_stream(rank, ranks.len())].to_vec();
    let sum = ranks.iter().enumerate().map(own).collect::<Vec<_>>().concat();
    ranks.iter().map(|[_, y]| [sum.clone(), y.clone()]).collect()
}

/// Some rows of a matrix of the case.
fn sampled<T: Element>(case: &RanksCase, values: &[T]) -> Vec<T> {
    let Shape { rows, cols } = case.shape;
    SAMPLED.map(|of| of(rows)).map(|row| values[row * cols..(row + 1) * cols].to_vec()).concat()
}

/// Which rows are looked at, of so many.
const SAMPLED: [fn(usize) -> usize; 4] = [|_| 0, |rows| rows / 3, |rows| rows / 2, |rows| rows - 1];

/// y of rows of so many columns, of what is normalized, weight and bias.
fn judge_y<T: Element>(
    case: &RanksCase,
    cols: usize,
    [x, weight, bias]: [&[f64]; 3],
    y: &[T],
    arithmetic: &Arithmetic,
) -> Result<(), &'static str> {
    let bias = (case.norm == Norm::Layer).then_some(bias);
    let inputs = ForwardInputs { x, residual: None, weight: Some(weight), bias };
    let model = Model { arithmetic, mode: Mode::Worst };
    let spec = spec(case).rows(SAMPLED.len()).cols(cols);
    let truth = ForwardTruth::of_sum(&spec, inputs, (T::DTYPE, T::DTYPE), model);
    if truth.judge(Tensor::Y, y).is_pass() { Ok(()) } else { Err("y is out of its bounds") }
}

/// The norm of a case.
pub(super) fn spec(case: &RanksCase) -> NormSpec {
    let Shape { rows, cols } = case.shape;
    match case.norm {
        Norm::Rms => NormSpec::rms(rows, cols, EPS),
        Norm::Layer => NormSpec::layer(rows, cols, EPS),
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    Bits::of(values).bits
}
