//! Backward calls with so many rows that every block goes around its ring several times: all rows
//! and columns must be right.
//!
//! The rows of a call repeat a few rows, and equal rows have equal bits, so the reference needs
//! only those few. Their number is a prime that divides no number of rows in flight, so that a
//! block's wrong row differs from the right one. All terms of the gradients are small multiples of
//! one half, which f32 adds exactly in any order, so a missing or repeated row always changes the
//! sum.

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::bounds::{Mode, Model, Statistics};
use rmsnorm_conformance::testing::{BackwardTruth, exact, values};
use rmsnorm_cuda::cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use rmsnorm_cuda::{
    Backward,
    spec::{Element, GradReduction, Norm, NormSpec, Tensor, bf16, reference::BackwardInputs},
};

use crate::support::Gpu;

/// Twice around a ring of three steps, and one more step.
const STEPS: usize = 2 * 3 + 1;

/// Lengths of bf16 rows, one for each way to divide a row, and the rows that an H200 handles in one
/// step of all blocks.
const BF16: [(usize, usize); 16] = [
    (100, 8448),
    (128, 8448),
    (384, 2112),
    (512, 2112),
    (768, 1056),
    (1000, 1056),
    (2048, 528),
    (2560, 528),
    (4096, 264),
    (5120, 264),
    (7168, 132),
    (8192, 132),
    (16384, 132),
    (16385, 60),
    (40000, 30),
    (131_072, 15),
];

/// The same for f32.
const F32: [(usize, usize); 2] = [(1024, 528), (16384, 66)];

/// All steps, and a remainder that only some blocks get rows of.
fn rows(at_once: usize) -> usize {
    STEPS * at_once + at_once / 3 + 1
}

/// Whole numbers between -4 and 4, from [`values`].
fn whole<E: Element>(seed: u64, len: usize) -> Vec<E> {
    values::<f32>(seed, len).into_iter().map(|value| E::from_f32((2.0 * value).round())).collect()
}

/// The rows that repeat.
struct Period<E> {
    norm: NormSpec,
    x: Vec<E>,
    dy: Vec<E>,
    weight: Vec<f32>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
}

/// The results of a call with all rows.
struct Outputs<E> {
    dx: Vec<E>,
    dweight: Vec<f32>,
    dbias: Option<Vec<f32>>,
}

impl<E: Element + DeviceRepr + ValidAsZeroBits> Period<E> {
    fn new(norm: Norm, cols: usize) -> Self {
        // The reference is slow.
        let rows = match cols {
            0..=8192 => 61,
            8193..=65536 => 13,
            _ => 7,
        };
        let (spec, mean) = match norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => (NormSpec::new(norm, rows, cols, 1e-6), vec![0.0; rows]),
            Norm::Layer => (NormSpec::layer(rows, cols, 1e-5), whole(4, rows)),
        };
        let rstd = (0..rows).map(|row| [0.5, 1.0, 2.0][row % 3]).collect();
        let (x, dy) = (whole(1, rows * cols), whole(2, rows * cols));
        Period { norm: spec, x, dy, weight: values(3, cols), mean, rstd }
    }

    /// A backward call with `rows` rows. Layer norm also sums dbias.
    fn backward(&self, gpu: &Gpu, rows: usize) -> Outputs<E> {
        let (stream, cols) = (gpu.stream(), self.norm.cols);
        let repeated = |period: &[E]| {
            let mut all = period.repeat(rows.div_ceil(self.norm.rows));
            all.truncate(rows * cols);
            stream.clone_htod(&all).unwrap()
        };
        let statistics = |period: &[f32]| {
            let all: Vec<f32> = period.iter().copied().cycle().take(rows).collect();
            stream.clone_htod(&all).unwrap()
        };
        let (x, dy, weight) = (repeated(&self.x), repeated(&self.dy), stream.clone_htod(&self.weight).unwrap());
        let (mean, rstd) = (statistics(&self.mean), statistics(&self.rstd));
        let mut dx = stream.alloc_zeros::<E>(rows * cols).unwrap();
        let mut gradients = [0; 2].map(|_| stream.alloc_zeros::<f32>(cols).unwrap());
        let [dweight, dbias] = &mut gradients;
        let args = Backward::<E, f32, E>::mixed(dy.as_view(), x.as_view(), rstd.as_view(), dx.as_view_mut())
            .weight(weight.as_view());
        let args = args.dweight(dweight.as_view_mut());
        let is_layer = self.norm.norm == Norm::Layer;
        let args = if is_layer { args.mean(mean.as_view()).dbias(dbias.as_view_mut()) } else { args };
        gpu.backward(&self.norm.rows(rows), args).unwrap();
        Outputs {
            dx: stream.clone_dtoh(&dx).unwrap(),
            dweight: stream.clone_dtoh(dweight).unwrap(),
            dbias: is_layer.then(|| stream.clone_dtoh(dbias).unwrap()),
        }
    }

    /// Judges the first rows of dx; the other rows must be copies of them.
    fn check_dx(&self, gpu: &Gpu, dx: &[E], case: &str) {
        let (x, dy, weight) = (exact(&self.x), exact(&self.dy), exact(&self.weight));
        let (mean, rstd) = (exact(&self.mean), exact(&self.rstd));
        let inputs =
            BackwardInputs { dy: &dy, x: &x, weight: Some(&weight), mean: &mean, rstd: &rstd, dresidual_out: None };
        let arithmetic = gpu.arithmetic();
        let model = Model { arithmetic: &arithmetic, mode: Mode::Worst };
        let truth = BackwardTruth::new(&self.norm, &inputs, Statistics::Given, GradReduction::Partials, model);
        let (period, _) = dx.split_at(self.x.len());
        let verdict = truth.judge(Tensor::Dx, period);
        assert!(verdict.is_pass(), "dx of {case}: {verdict:?}");

        let bytes = |row: &'_ [E]| bytemuck::cast_slice::<E, u8>(row).to_vec();
        let period: Vec<_> = period.chunks_exact(self.norm.cols).map(bytes).collect();
        let rows = dx.chunks_exact(self.norm.cols).zip(period.iter().cycle()).enumerate();
        let wrong: Vec<_> = rows
            .filter(|(_, (got, expected))| bytemuck::cast_slice::<E, u8>(got) != expected.as_slice())
            .map(|(row, _)| row)
            .collect();
        assert!(
            wrong.is_empty(),
            "dx of {case}: {} rows, the first are {:?}",
            wrong.len(),
            &wrong[..wrong.len().min(9)]
        );
    }

    /// The sums over `rows` rows, which are exact.
    fn gradients(&self, rows: usize) -> (Vec<f64>, Vec<f64>) {
        let cols = self.norm.cols;
        let (mut dweight, mut dbias) = (vec![0.0; cols], vec![0.0; cols]);
        for row in 0..self.norm.rows {
            let times = (rows - row).div_ceil(self.norm.rows) as f64;
            let (mean, rstd) = (f64::from(self.mean[row]), f64::from(self.rstd[row]));
            for col in 0..cols {
                let [x, dy] = [&self.x, &self.dy].map(|matrix| f64::from(matrix[row * cols + col].to_f32()));
                dweight[col] += times * dy * ((x - mean) * rstd);
                dbias[col] += times * dy;
            }
        }
        (dweight, dbias)
    }
}

fn check<E: Element + DeviceRepr + ValidAsZeroBits>(gpu: &Gpu, norm: Norm, rows: usize, cols: usize) {
    let case = format!("{} {rows}x{cols} {}", norm.name(), E::DTYPE);
    let period = Period::<E>::new(norm, cols);
    let outputs = period.backward(gpu, rows);
    period.check_dx(gpu, &outputs.dx, &case);
    let (dweight, dbias) = period.gradients(rows);
    let wrong = |got: &[f32], expected: &[f64]| exact(got).iter().zip(expected).position(|(got, want)| got != want);
    assert_eq!(wrong(&outputs.dweight, &dweight), None, "dweight of {case}: the first wrong column");
    if let Some(got) = outputs.dbias {
        assert_eq!(wrong(&got, &dbias), None, "dbias of {case}: the first wrong column");
    }
}

#[test]
fn every_row_of_rms_norm_is_right_in_every_round() {
    let Some(gpu) = Gpu::open() else { return };
    BF16.into_iter().for_each(|(cols, at_once)| check::<bf16>(&gpu, Norm::Rms, rows(at_once), cols));
}

#[test]
fn every_row_of_layer_norm_is_right_in_every_round() {
    let Some(gpu) = Gpu::open() else { return };
    BF16.into_iter().for_each(|(cols, at_once)| check::<bf16>(&gpu, Norm::Layer, rows(at_once), cols));
}

#[test]
fn every_row_of_f32_is_right_in_every_round() {
    let Some(gpu) = Gpu::open() else { return };
    for norm in Norm::USUAL {
        F32.into_iter().for_each(|(cols, at_once)| check::<f32>(&gpu, norm, rows(at_once), cols));
    }
}

/// In the last step only some blocks have rows, and only some of their groups. Blocks that
/// disagreed on the number of steps would wait for each other for ever.
#[test]
fn short_rows_that_leave_blocks_an_unequal_rest_are_right() {
    let Some(gpu) = Gpu::open() else { return };
    for norm in Norm::USUAL {
        check::<bf16>(&gpu, norm, 19801, 128);
    }
}
