//! A call, its data, and its expected results.

use rmsnorm_conformance::bounds::{Mode, Model};
use rmsnorm_conformance::testing::{Bits, ForwardTruth, exact, values};
use rmsnorm_conformance::{Arithmetic, Harness};
use rmsnorm_cuda::CudaBackend;
use rmsnorm_cuda::spec::reference::{self, ForwardInputs, sum_of_parts};
use rmsnorm_cuda::spec::{DType, Element, Norm, NormSpec, RowGroups, Tensor, bf16, f16};

use crate::tensors::Output;

/// A call on `ranks` ranks.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub ranks: usize,
    pub spec: NormSpec,
    pub has_residual: bool,
    pub has_weight: bool,
    pub has_bias: bool,
    pub is_in_place: bool,
    /// Elements between two rows of every matrix.
    pub gap: usize,
    /// Elements before the first row.
    pub offset: usize,
    /// Whether each rank has a different offset.
    pub is_uneven: bool,
    /// Rows of a group, if rows are grouped.
    pub rows_per_group: Option<usize>,
    /// Bytes for the x of one rank.
    pub bytes: usize,
    pub seed: u64,
}

impl Case {
    /// Dense, with all tensors, in one launch.
    pub fn new(ranks: usize, spec: NormSpec) -> Self {
        Case {
            ranks,
            spec,
            has_residual: true,
            has_weight: true,
            has_bias: true,
            is_in_place: false,
            gap: 0,
            offset: 0,
            is_uneven: false,
            rows_per_group: None,
            bytes: spec.rows.max(1) * (4 * spec.cols).next_multiple_of(16),
            seed: 1,
        }
    }

    pub fn stride(&self) -> usize {
        self.spec.cols + self.gap
    }

    /// Elements before the first row of a rank's matrices.
    pub fn offset_of(&self, rank: usize) -> usize {
        if self.is_uneven { self.offset + rank } else { self.offset }
    }

    /// Groups have a few elements of padding between them.
    pub fn groups(&self) -> Option<RowGroups> {
        self.rows_per_group.map(|rows| RowGroups { rows, stride: rows * self.stride() + 8 })
    }
}

/// The inputs: the x of each rank, and the tensors that all ranks share.
#[derive(Clone)]
pub struct Data<T, W, R> {
    pub x: Vec<Vec<T>>,
    pub residual: Vec<R>,
    pub weight: Vec<W>,
    pub bias: Vec<W>,
}

impl<T: Element, W: Element, R: Element> Data<T, W, R> {
    pub fn new(case: &Case) -> Self {
        let Case { ranks, spec, seed, .. } = *case;
        let len = spec.rows * spec.cols;
        let vector = |seed| values::<W>(seed, spec.cols);
        Data {
            x: (0..ranks).map(|rank| values::<T>(100 * seed + rank as u64, len)).collect(),
            residual: values::<R>(100 * seed + 50, len),
            weight: vector(100 * seed + 51),
            bias: vector(100 * seed + 52),
        }
    }

    /// The same with special values, for 12 rows and 3 ranks: NaN (among them the bits of an empty
    /// slot), infinities, zeros of both signs, subnormals.
    pub fn with_specials(case: &Case) -> Self {
        let (mut data, cols) = (Data::new(case), case.spec.cols);
        let infinities = [f32::INFINITY, -f32::INFINITY, -0.0].map(|value| T::from_f32(value).bits());
        let specials = [u32::MAX, u32::MAX >> 1, 0, 1].into_iter().chain(infinities);
        for (row, special) in specials.enumerate() {
            // Two neighbours on one rank, and the last element of a row: each word of a slot, and
            // half a word.
            for element in [row * cols, row * cols + 1, row * cols + cols - 1] {
                data.x[row % 3][element] = T::from_bits(special);
            }
        }
        for x in &mut data.x {
            // One row has all bits set on all ranks, one is negative zeros.
            x[10 * cols..11 * cols].fill(T::from_bits(u32::MAX));
            x[11 * cols..12 * cols].fill(T::from_f32(-0.0));
        }
        data.residual[11 * cols..12 * cols].fill(R::from_f32(-0.0));
        data
    }

    /// The sum, equation (1').
    pub fn sum(&self, case: &Case) -> Vec<f64> {
        let x: Vec<f64> = self.x.iter().flat_map(|x| exact(x)).collect();
        let residual = case.has_residual.then(|| exact(&self.residual));
        sum_of_parts(&x, case.ranks, residual.as_deref(), R::DTYPE)
    }

    /// Checks that all ranks have the same bits, that the sum is exact, and that y and the
    /// statistics are within their bounds.
    pub fn judge(&self, backend: &CudaBackend, case: &Case, outputs: &[Output]) {
        self.judge_by(&backend.arithmetic(), case, outputs);
    }

    fn judge_by(&self, arithmetic: &Arithmetic, case: &Case, outputs: &[Output]) {
        for (rank, output) in outputs.iter().enumerate() {
            assert!(output == &outputs[0], "{case:?}: rank {rank} has other bits than rank 0");
        }
        let Output { h, y, mean, rstd } = &outputs[0];
        let sum = self.sum(case);
        if let Some(h) = h {
            assert_sum(case, h, &sum, R::DTYPE);
        }
        let (weight, bias) = (exact(&self.weight), exact(&self.bias));
        let inputs = ForwardInputs {
            x: &sum,
            residual: None,
            weight: case.has_weight.then_some(&weight[..]),
            bias: case.has_bias.then_some(&bias[..]),
        };
        let model = Model { arithmetic, mode: Mode::Worst };
        let truth = ForwardTruth::of_sum(&case.spec, inputs, (T::DTYPE, R::DTYPE), model);
        let judged = [(Tensor::Y, Some(y)), (Tensor::Mean, mean.as_ref()), (Tensor::Rstd, Some(rstd))];
        for (tensor, got) in judged.into_iter().filter_map(|(tensor, got)| Some((tensor, got?))) {
            let verdict = truth.judge_bits(tensor, got);
            // In rows with NaN or infinities, results only need to be of the same kind.
            let is_good = verdict.failures == 0 && !verdict.vacuous;
            assert!(is_good, "{case:?}: {tensor}: {verdict:?}");
        }
    }
}

/// Each value of the sum has one right bit pattern, except NaN, which may be any NaN.
fn assert_sum(case: &Case, got: &Bits, sum: &[f64], dtype: DType) {
    let expected = Bits::rounded(sum, dtype);
    assert_eq!(got.bits.len(), expected.bits.len());
    for (index, (&got_bits, &expected_bits)) in got.bits.iter().zip(&expected.bits).enumerate() {
        let is_nan = sum[index].is_nan() && got.value(index).is_nan();
        assert!(
            got_bits == expected_bits || is_nan,
            "{case:?}: element {index} of the sum is {got_bits:#x}, {expected_bits:#x} is due"
        );
    }
}

/// The reference passes in the shapes of these tests; a sum with one changed bit fails.
#[test]
fn the_judge_knows_right_from_wrong() {
    fn judged<T: Element, W: Element, R: Element>(case: Case, is_broken: bool) -> bool {
        let is_special = case.spec.rows == 12;
        let data = if is_special { Data::<T, W, R>::with_specials(&case) } else { Data::new(&case) };
        let sum = data.sum(&case);
        let (weight, bias) = (exact(&data.weight), exact(&data.bias));
        let given = ForwardInputs { x: &sum, residual: None, weight: Some(&weight), bias: Some(&bias) };
        let right = reference::forward(&case.spec, &given);
        let mut h = Bits::rounded(&sum, R::DTYPE);
        *h.bits.last_mut().unwrap() ^= u32::from(is_broken);
        let output = Output {
            h: Some(h),
            y: Bits::rounded(&right.y, T::DTYPE),
            mean: (case.spec.norm == Norm::Layer).then(|| Bits::rounded(&right.mean, DType::F32)),
            rstd: Bits::rounded(&right.rstd, DType::F32),
        };
        let judge = || data.judge_by(&Arithmetic::IEEE, &case, &[output.clone(), output.clone()]);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(judge)).is_ok()
    }
    for (spec, ranks) in [
        (NormSpec::rms(3, 1, 1e-6), 2),
        (NormSpec::layer(9, 1, 1e-5), 2),
        (NormSpec::rms(12, 1001, 1e-6), 3),
        (NormSpec::rms(12, 256, 1e-6), 3),
        (NormSpec::layer(9, 3, 1e-5), 3),
        (NormSpec::layer(9, 7, 1e-5), 8),
        (NormSpec::layer(2, 65536, 1e-5), 2),
        (NormSpec::rms(3, 16384, 1e-6), 8),
    ] {
        for is_broken in [false, true] {
            let case = Case::new(ranks, spec);
            assert_eq!(judged::<bf16, bf16, bf16>(case, is_broken), !is_broken, "{case:?}");
            assert_eq!(judged::<f16, f32, f32>(case, is_broken), !is_broken, "{case:?}");
            assert_eq!(judged::<f32, f32, f32>(case, is_broken), !is_broken, "{case:?}");
        }
    }
}
