//! Gradients as f32 sums: stored or accumulated without rounding to the weight's dtype.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::mem::MaybeUninit;
use std::ops::Range;

use rmsnorm_conformance::testing::values;
use rmsnorm_cpu::{Backward, CpuBackend, UninitBackend};
use rmsnorm_spec::{Error, NormSpec, bf16};

const ROWS: usize = 70;
const COLS: usize = 45;

struct Data {
    dy: Vec<bf16>,
    x: Vec<bf16>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
    dx: Vec<bf16>,
}

impl Data {
    fn new() -> Self {
        let (dy, x, dx) = (values(1, ROWS * COLS), values(2, ROWS * COLS), vec![bf16::NAN; ROWS * COLS]);
        Data { dy, x, mean: values(3, ROWS), rstd: vec![0.75; ROWS], dx }
    }

    /// The call on a range of rows.
    fn call(&mut self, rows: Range<usize>) -> Backward<'_, bf16> {
        let of = rows.start * COLS..rows.end * COLS;
        let (mean, rstd) = (&self.mean[rows.clone()], &self.rstd[rows]);
        Backward::new(&self.dy[of.clone()], &self.x[of.clone()], rstd, &mut self.dx[of]).mean(mean)
    }
}

fn run(rows: usize, args: Backward<'_, bf16>) {
    CpuBackend::new().backward(&NormSpec::layer(rows, COLS, 1e-5), args).unwrap();
}

fn rounded(sums: &[f32]) -> Vec<bf16> {
    sums.iter().map(|&sum| bf16::from_f32(sum)).collect()
}

#[test]
fn sums_are_what_is_rounded_elsewhere() {
    let mut data = Data::new();
    let (mut dweight, mut dbias) = ([bf16::NAN; COLS], [bf16::NAN; COLS]);
    run(ROWS, data.call(0..ROWS).dweight(&mut dweight).dbias(&mut dbias));
    let (mut dweight_sum, mut dbias_sum) = ([f32::NAN; COLS], [f32::NAN; COLS]);
    run(ROWS, data.call(0..ROWS).dweight_sum(&mut dweight_sum).dbias_sum(&mut dbias_sum));
    assert_eq!((rounded(&dweight_sum), rounded(&dbias_sum)), (dweight.to_vec(), dbias.to_vec()));
    assert_ne!(dweight_sum.map(|sum| bf16::from_f32(sum).to_f32()), dweight_sum, "they are not rounded");
}

#[test]
fn accumulated_sums_are_added_to_what_is_there() {
    let mut data = Data::new();
    let (mut first, mut second, mut dbias) = ([f32::NAN; COLS], [f32::NAN; COLS], [f32::NAN; COLS]);
    run(40, data.call(0..40).dweight_sum(&mut first));
    run(ROWS - 40, data.call(40..ROWS).dweight_sum(&mut second).dbias_sum(&mut dbias));
    let mut bucket = [0.0; 2 * COLS];
    for rows in [0..40, 40..ROWS] {
        let (of_weight, _) = bucket.split_at_mut(COLS);
        run(rows.len(), data.call(rows.clone()).dweight_sum(of_weight).accumulate());
    }
    let (of_weight, of_bias) = bucket.split_at_mut(COLS);
    assert_eq!(of_weight, std::array::from_fn::<f32, COLS, _>(|col| first[col] + second[col]));
    of_bias.fill(100.0);
    run(ROWS - 40, data.call(40..ROWS).dbias_sum(of_bias).accumulate());
    assert_eq!(of_bias, dbias.map(|dbias| 100.0 + dbias));
}

#[test]
fn without_rows_a_sum_is_zero_and_adds_nothing() {
    let (mut sum, mut held) = ([f32::NAN; COLS], [7.0; COLS]);
    run(0, Data::new().call(0..0).dweight_sum(&mut sum));
    run(0, Data::new().call(0..0).dweight_sum(&mut held).accumulate());
    assert_eq!((sum, held), ([0.0; COLS], [7.0; COLS]));
}

/// A call of two columns with uninitialized outputs.
fn uninit<'a>(
    dx: &'a mut [MaybeUninit<f32>],
    sum: &'a mut [MaybeUninit<f32>],
) -> rmsnorm_spec::Backward<'a, UninitBackend, f32> {
    rmsnorm_spec::Backward::new(&[1.0f32, 2.0][..], &[1.0f32, -1.0][..], &[1.0f32][..], dx).dweight_sum(sum)
}

#[test]
fn what_need_not_hold_values_is_not_added_to() {
    let (backend, spec) = (CpuBackend::new().uninit(), NormSpec::rms(1, 2, 0.0));
    let (mut dx, mut sum) = ([MaybeUninit::new(f32::NAN); 2], [MaybeUninit::uninit(); 2]);
    let answer = backend.backward(&spec, uninit(&mut dx, &mut sum).accumulate());
    assert!(matches!(answer, Err(Error::Unsupported { .. })));
    // SAFETY:
    // - contents: it was made of a value, and a call that is refused has written nothing.
    assert!(unsafe { dx[0].assume_init() }.is_nan());
    backend.backward(&spec, uninit(&mut dx, &mut sum)).unwrap();
    // SAFETY:
    // - contents: the call has succeeded, so it has written every element.
    assert_eq!(sum.map(|sum| unsafe { sum.assume_init() }), [1.0, -2.0]);
}
