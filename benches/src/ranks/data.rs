//! What ranks add up and normalize, and whether what came out is right.

use rmsnorm_core::Element;
use rmsnorm_core::conformance::Arithmetic;
use rmsnorm_core::conformance::bounds::{Mode, Model};
use rmsnorm_core::conformance::testing::{Bits, ForwardTruth, exact, values};
use rmsnorm_core::reference::{ForwardInputs, sum_of_parts};
use rmsnorm_core::{Norm, NormSpec, Tensor};

use super::RanksCase;
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

    /// What is wrong with a sum and y, if anything: y on some rows, by the sum that was stored where that is not the one of the definition.
    pub(super) fn judge(
        &self,
        case: &RanksCase,
        arithmetic: &Arithmetic,
        [sum, y]: [&[T]; 2],
        is_exact: bool,
    ) -> Result<(), &'static str> {
        let Shape { rows, cols } = case.shape;
        let sampled = [0, rows / 3, rows / 2, rows - 1];
        let of_rows = |values: &[T]| sampled.map(|row| values[row * cols..(row + 1) * cols].to_vec()).concat();
        let x: Vec<f64> = self.x.iter().flat_map(|x| exact(&of_rows(x))).collect();
        let expected = sum_of_parts(&x, self.x.len(), Some(&exact(&of_rows(&self.residual))), T::DTYPE);
        let (got_sum, got_y) = (of_rows(sum), of_rows(y));
        let expected = if is_exact { expected } else { exact(&got_sum) };
        if bits(&got_sum) != Bits::rounded(&expected, T::DTYPE).bits {
            return Err("the sum is wrong");
        }
        let (weight, bias) = (exact(&self.weight[..cols]), exact(&self.bias[..cols]));
        let bias = (case.norm == Norm::Layer).then_some(&bias[..]);
        let inputs = ForwardInputs { x: &expected, residual: None, weight: Some(&weight), bias };
        let model = Model { arithmetic, mode: Mode::Worst };
        let truth = ForwardTruth::of_sum(&spec(case).rows(sampled.len()), inputs, (T::DTYPE, T::DTYPE), model);
        if truth.judge(Tensor::Y, &got_y).is_pass() { Ok(()) } else { Err("y is out of its bounds") }
    }
}

/// The norm of a case.
pub(super) fn spec(case: &RanksCase) -> NormSpec {
    let Shape { rows, cols } = case.shape;
    match case.norm {
        Norm::Rms => NormSpec::rms(rows, cols, EPS),
        Norm::Layer => NormSpec::layer(rows, cols, EPS),
    }
}

pub(super) fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    Bits::of(values).bits
}

/// That all ranks have the same.
pub(super) fn same_on_ranks(ranks: &[[Vec<u32>; 2]]) -> Result<(), &'static str> {
    if ranks.iter().all(|rank| rank == &ranks[0]) { Ok(()) } else { Err("ranks differ") }
}
