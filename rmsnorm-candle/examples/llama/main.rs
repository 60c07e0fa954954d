//! A small Llama-style model, for inference and then fine-tuned, with our norms and with candle's slow ones side by side.
//!
//!     cargo run -p rmsnorm-candle --example llama
//!
//! Both must give the same logits and the same losses, up to what their orders of roundings differ by.

mod model;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, loss};
use model::{Model, Norms, VOCABULARY};

const BATCH: usize = 4;
const TOKENS: usize = 16;
const STEPS: usize = 48;

fn main() -> Result<()> {
    // f32: a chain of some forty operations, of a few roundings each. bf16: candle rounds x_hat before the weight, too.
    for (dtype, closeness) in [(DType::F32, 256.0 * f32::EPSILON), (DType::BF16, 8.0 / 256.0)] {
        inference(dtype, closeness)?;
    }
    training()
}

/// Sequences in which each token follows from the one before: tokens, and the next of each.
fn sequences(step: usize) -> Result<(Tensor, Tensor)> {
    let next = |token: usize| (token * 5 + 3) % VOCABULARY;
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    for sequence in 0..BATCH {
        let mut token = (step * 7 + sequence * 11) % VOCABULARY;
        for _ in 0..TOKENS {
            tokens.push(token as u32);
            token = next(token);
            targets.push(token as u32);
        }
    }
    let shape = (BATCH, TOKENS);
    Ok((Tensor::from_vec(tokens, shape, &Device::Cpu)?, Tensor::from_vec(targets, shape, &Device::Cpu)?))
}

/// Logits of both, which differ by at most so much of the largest.
fn inference(dtype: DType, closeness: f32) -> Result<()> {
    let (tokens, _) = sequences(0)?;
    let logits = |norms| {
        let (model, _) = Model::new(norms, dtype, false)?;
        model.forward(&tokens)?.to_dtype(DType::F32)
    };
    let (ours, slow) = (logits(Norms::Ours)?, logits(Norms::Slow)?);
    let most = |values: Tensor| values.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    let (largest, difference) = (most(slow.clone())?, most((&ours - &slow)?)?);
    println!("inference {dtype:?}: logits up to {largest:.3}, ours and candle's differ by {difference:.2e}");
    // NaN is not close.
    let is_close = difference <= closeness * largest;
    if !is_close {
        bail!("logits differ by more than {closeness} of the largest");
    }
    Ok(())
}

/// A model and what trains it.
struct Training {
    model: Model,
    optimizer: AdamW,
}

impl Training {
    fn new(norms: Norms) -> Result<Self> {
        let (model, variables) = Model::new(norms, DType::F32, true)?;
        let params = ParamsAdamW { lr: 3e-3, ..ParamsAdamW::default() };
        Ok(Training { model, optimizer: AdamW::new(variables, params)? })
    }

    /// The loss before the step.
    fn step(&mut self, step: usize) -> Result<f32> {
        let (tokens, targets) = sequences(step)?;
        let logits = self.model.forward(&tokens)?.flatten_to(1)?;
        let loss = loss::cross_entropy(&logits, &targets.flatten_all()?)?;
        self.optimizer.backward_step(&loss)?;
        loss.to_scalar()
    }
}

fn training() -> Result<()> {
    let (mut ours, mut slow) = (Training::new(Norms::Ours)?, Training::new(Norms::Slow)?);
    println!("step      ours    candle's");
    let mut first = None;
    for step in 0..STEPS {
        let (a, b) = (ours.step(step)?, slow.step(step)?);
        let first = *first.get_or_insert(b);
        if step % 8 == 0 || step + 1 == STEPS {
            println!("{step:>4}  {a:>8.5}  {b:>8.5}");
        }
        // Roundings of 2^-24 grow from step to step; a wrong gradient shows within a few.
        let is_close = (a - b).abs() <= 1e-3 * first;
        if !is_close {
            bail!("step {step}: losses {a} and {b}");
        }
        if step + 1 == STEPS && a > first / 4.0 {
            bail!("the loss has not fallen: {first} to {a}");
        }
    }
    Ok(())
}
