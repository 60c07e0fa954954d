//! A small Llama-style model, in inference and fine-tuning, with our norms and with candle's slow
//! ones.
//!
//!     cargo run --release -p rmsnorm-candle --example llama
//!     cargo run -p rmsnorm-candle --example llama -- --steps 40   # fewer, for a debug build
//!     cargo run --release -p rmsnorm-candle --features cuda --example llama -- --device cuda
//!
//! Both must give the same logits and losses, up to differences from the order of roundings.

mod model;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, loss};
use model::{Model, Norms, VOCABULARY};

const BATCH: usize = 4;
const TOKENS: usize = 16;
/// The number of training steps, unless the command line sets it.
const STEPS: usize = 400;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let device = match value("--device").map(String::as_str) {
        None | Some("cpu") => Device::Cpu,
        Some("cuda") => Device::new_cuda(0)?,
        Some(other) => bail!("--device is cpu or cuda, got {other}"),
    };
    let steps = match value("--steps").map(|steps| steps.parse()) {
        None => STEPS,
        Some(Ok(steps)) if steps > 0 => steps,
        Some(_) => bail!("--steps is a number above 0"),
    };
    println!("on {:?}", device.location());
    // f32: about forty operations of a few roundings each. bf16: candle also rounds x_hat before
    // the weight.
    for (dtype, closeness) in [(DType::F32, 256.0 * f32::EPSILON), (DType::BF16, 8.0 / 256.0)] {
        inference(&device, dtype, closeness)?;
    }
    training(&device, steps)
}

/// Sequences in which each token determines the next: tokens, and the next token of each.
fn sequences(device: &Device, step: usize) -> Result<(Tensor, Tensor)> {
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
    Ok((Tensor::from_vec(tokens, shape, device)?, Tensor::from_vec(targets, shape, device)?))
}

/// Compares the logits of both, which may differ by `closeness` times the largest.
fn inference(device: &Device, dtype: DType, closeness: f32) -> Result<()> {
    let (tokens, _) = sequences(device, 0)?;
    let logits = |norms| {
        let (model, _) = Model::new(norms, dtype, device, false)?;
        model.forward(&tokens)?.to_dtype(DType::F32)
    };
    let (ours, slow) = (logits(Norms::Ours)?, logits(Norms::Slow)?);
    let most = |values: Tensor| values.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    let (largest, difference) = (most(slow.clone())?, most((&ours - &slow)?)?);
    println!("inference {dtype:?}: logits up to {largest:.3}, ours and candle's differ by {difference:.2e}");
    // False for NaN.
    let is_close = difference <= closeness * largest;
    if !is_close {
        bail!("logits differ by more than {closeness} of the largest");
    }
    Ok(())
}

/// A model and its optimizer.
struct Training {
    device: Device,
    model: Model,
    optimizer: AdamW,
}

impl Training {
    fn new(norms: Norms, device: &Device) -> Result<Self> {
        let (model, variables) = Model::new(norms, DType::F32, device, true)?;
        let params = ParamsAdamW { lr: 3e-3, ..ParamsAdamW::default() };
        Ok(Training { device: device.clone(), model, optimizer: AdamW::new(variables, params)? })
    }

    /// The loss before the step.
    fn step(&mut self, step: usize) -> Result<f32> {
        let (tokens, targets) = sequences(&self.device, step)?;
        let logits = self.model.forward(&tokens)?.flatten_to(1)?;
        let loss = loss::cross_entropy(&logits, &targets.flatten_all()?)?;
        self.optimizer.backward_step(&loss)?;
        loss.to_scalar()
    }
}

fn training(device: &Device, steps: usize) -> Result<()> {
    let (mut ours, mut slow) = (Training::new(Norms::Ours, device)?, Training::new(Norms::Slow, device)?);
    println!("step      ours    candle's");
    let mut first = None;
    for step in 0..steps {
        let (a, b) = (ours.step(step)?, slow.step(step)?);
        let first = *first.get_or_insert(b);
        if step % (steps / 20).max(1) == 0 || step + 1 == steps {
            println!("{step:>4}  {a:>8.5}  {b:>8.5}");
        }
        // Roundings of 2^-24 grow from step to step; a wrong gradient shows after a few steps.
        let is_close = (a - b).abs() <= 1e-3 * first;
        if !is_close {
            bail!("step {step}: losses {a} and {b}");
        }
        if step + 1 == steps && a > first / 4.0 {
            bail!("the loss has not fallen: {first} to {a}");
        }
    }
    Ok(())
}
