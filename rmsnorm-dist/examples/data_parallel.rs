//! Data-parallel training: every rank has different rows, and one exchange sums the gradients of
//! weight and bias over all ranks.
//!
//! Micro-batches accumulate f32 gradients in one bucket per rank. The buckets are gathered and
//! added in rank order, so every rank makes the same step, bit for bit. The sum is complete before
//! anything is rounded to bf16.
//!
//!     cargo run -p rmsnorm-dist --example data_parallel

use std::thread;

use rmsnorm_cpu::{Backward, CpuBackend, Forward, Isa};
use rmsnorm_dist::{Collective, RowShares, ThreadGroup};
use rmsnorm_spec::{Error, NormSpec, bf16};

const RANKS: usize = 4;
const MICRO_BATCHES: usize = 2;
/// Rows of a micro-batch.
const ROWS: usize = 64;
const COLS: usize = 96;
const STEPS: usize = 30;
const RATE: f32 = 12.0;

/// Deterministic noise between -1 and 1 for index `i`.
fn noise(seed: usize, i: usize) -> f32 {
    let mixed =
        (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (i as u64 + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// The weight and bias to learn.
fn target(col: usize) -> (f32, f32) {
    (1.0 + 0.5 * noise(100, col), 0.3 * noise(200, col))
}

/// The result of a rank.
struct Trained {
    losses: Vec<f32>,
    weight: Vec<bf16>,
    /// Gradient of the last step, and the same with each rank's gradient rounded to bf16 before the
    /// sum.
    gradient: Vec<f32>,
    rounded_first: Vec<f32>,
}

fn train(group: &ThreadGroup, backend: &CpuBackend) -> Result<Trained, Error> {
    let rank = Collective::<CpuBackend>::rank(group);
    let spec = NormSpec::layer(ROWS, COLS, 1e-5);
    // The parameters (weight, then bias) in f32, and in bf16 for the norm.
    let mut parameters = [vec![1.0; COLS], vec![0.0; COLS]].concat();
    let mut in_bf16: Vec<bf16> = parameters.iter().map(|&value| bf16::from_f32(value)).collect();
    let mut trained =
        Trained { losses: Vec::new(), weight: Vec::new(), gradient: Vec::new(), rounded_first: Vec::new() };
    for _ in 0..STEPS {
        let mut bucket = vec![0.0; 2 * COLS];
        let mut loss = 0.0;
        for micro_batch in 0..MICRO_BATCHES {
            let seed = rank * MICRO_BATCHES + micro_batch;
            let x: Vec<bf16> = (0..ROWS * COLS).map(|i| bf16::from_f32(noise(seed, i))).collect();
            let (mut y, mut mean, mut rstd) = (vec![bf16::ZERO; x.len()], vec![0.0; ROWS], vec![0.0; ROWS]);
            let (weight, bias) = in_bf16.split_at(COLS);
            let args = Forward::new(&x, &mut y).weight(weight).bias(bias);
            backend.forward(&spec, args.mean(&mut mean).rstd(&mut rstd))?;

            let elements = (RANKS * MICRO_BATCHES * ROWS * COLS) as f32;
            let mut dy = Vec::with_capacity(y.len());
            for (i, y) in y.iter().enumerate() {
                let (row, (scale, shift)) = (i / COLS, target(i % COLS));
                let off = y.to_f32() - ((x[i].to_f32() - mean[row]) * rstd[row] * scale + shift);
                loss += off * off / elements;
                dy.push(bf16::from_f32(2.0 * off / elements));
            }
            let mut dx = vec![bf16::ZERO; x.len()];
            let (dweight, dbias) = bucket.split_at_mut(COLS);
            let args = Backward::new(&dy, &x, &rstd, &mut dx).weight(weight).mean(&mean);
            backend.backward(&spec, args.dweight_sum(dweight).dbias_sum(dbias).accumulate())?;
        }
        bucket.push(loss);

        // One exchange for weight, bias and loss.
        let shares = RowShares { units: RANKS, unit: bucket.len(), ranks: RANKS };
        let mut of_all = vec![0.0; shares.len()];
        Collective::<CpuBackend>::all_gather(group, &shares, &bucket, &mut of_all)?;
        let sum = |i: usize, of_rank: fn(f32) -> f32| {
            of_all.chunks_exact(bucket.len()).map(|bucket| of_rank(bucket[i])).fold(0.0, |sum, term| sum + term)
        };
        trained.losses.push(sum(2 * COLS, |loss| loss));
        trained.gradient = (0..2 * COLS).map(|i| sum(i, |gradient| gradient)).collect();
        trained.rounded_first = (0..2 * COLS).map(|i| sum(i, |gradient| bf16::from_f32(gradient).to_f32())).collect();

        for (value, gradient) in parameters.iter_mut().zip(&trained.gradient) {
            *value -= RATE * gradient;
        }
        in_bf16 = parameters.iter().map(|&value| bf16::from_f32(value)).collect();
    }
    trained.weight = in_bf16;
    Ok(trained)
}

fn main() -> Result<(), Error> {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 1)?;
    let ranks: Vec<Trained> = thread::scope(|scope| {
        let threads: Vec<_> = ThreadGroup::new(RANKS)
            .into_iter()
            .map(|group| {
                let backend = &backend;
                scope.spawn(move || train(&group, backend))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect::<Result<_, _>>()
    })?;
    let first = &ranks[0];
    let (begin, end) = (first.losses[0], first.losses[STEPS - 1]);
    println!(
        "{RANKS} ranks, {MICRO_BATCHES} micro-batches each: loss {begin:.4} at first, {end:.6} after {STEPS} steps"
    );
    assert!(end < begin / 20.0, "the loss falls to a twentieth");
    assert!(ranks.iter().all(|rank| rank.weight == first.weight), "every rank has the same parameters, bit for bit");
    println!("parameters are the same bits on every rank");

    let size = |of: &mut dyn Iterator<Item = f32>| of.map(|value| value * value).sum::<f32>().sqrt();
    let whole = size(&mut first.gradient.iter().copied());
    let off = size(&mut first.gradient.iter().zip(&first.rounded_first).map(|(whole, rounded)| whole - rounded));
    println!("had every rank rounded its gradient to bf16 first, the sum would be off by {:.2} %", 100.0 * off / whole);
    Ok(())
}
