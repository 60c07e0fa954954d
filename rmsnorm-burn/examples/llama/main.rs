//! A small Llama-style model, in inference and training, with our norms and with burn's.
//!
//!     cargo run --release -p rmsnorm-burn --example llama
//!     cargo run -p rmsnorm-burn --example llama -- --steps 24
//!     cargo run --release -p rmsnorm-burn --features wgpu --example llama -- --wgpu   # on burn's default wgpu device
//!
//! The models start from one record, and must give the same logits and losses, up to differences
//! from the order of roundings.

mod model;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use model::{Model, RmsNorm, TOKENS, VOCABULARY};

const BATCH: usize = 4;
const LEARNING_RATE: f64 = 3e-3;

type Ours = rmsnorm_burn::nn::RmsNorm;
type Theirs = burn::nn::RmsNorm;
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let (mut steps, mut device) = (200, Device::flex());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match (arg.as_str(), &mut args) {
            ("--steps", args) => steps = args.next().ok_or("--steps COUNT")?.parse()?,
            ("--wgpu", _) => device = wgpu()?,
            _ => return Err(format!("--steps COUNT and --wgpu are all that there is, got {arg}").into()),
        }
    }
    let device = device.autodiff();
    device.seed(7);
    let theirs = Model::<Theirs>::new(&device);
    // Our model loads the record of burn's model.
    let ours = Model::<Ours>::new(&device).load_record(theirs.clone().into_record());
    inference(&ours, &theirs, &device)?;
    training(Training::new(ours), Training::new(theirs), steps, &device)
}

/// burn's default wgpu device, shared, so that its norms run as our kernels.
#[cfg(feature = "wgpu")]
fn wgpu() -> Result<Device> {
    let (device, setup) = Device::wgpu_options().init_with_setup()?;
    rmsnorm_burn::wgpu::share(&device, &setup)?;
    println!("on {}", setup.adapter.get_info().name);
    Ok(device)
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Result<Device> {
    Err("--wgpu needs the feature wgpu".into())
}

/// Sequences in which each token determines the next: tokens, and the next token of each.
fn sequences(step: usize, device: &Device) -> [Tensor<2, Int>; 2] {
    let next = |token: usize| (token * 5 + 3) % VOCABULARY;
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    for sequence in 0..BATCH {
        let mut token = (step * 7 + sequence * 11) % VOCABULARY;
        for _ in 0..TOKENS {
            tokens.push(token as i32);
            token = next(token);
            targets.push(token as i32);
        }
    }
    [tokens, targets].map(|values| Tensor::from_data(TensorData::new(values, [BATCH, TOKENS]), device))
}

fn scalar(tensor: Tensor<1>) -> Result<f32> {
    let values = tensor.into_data().try_to_vec::<f32>()?;
    values.first().copied().ok_or_else(|| "no value".into())
}

/// Compares the logits of both, after about forty operations of a few f32 roundings each.
fn inference(ours: &Model<Ours>, theirs: &Model<Theirs>, device: &Device) -> Result<()> {
    let [tokens, _] = sequences(0, device);
    let (ours, theirs) = (ours.forward(tokens.clone()), theirs.forward(tokens));
    let (largest, difference) = (scalar(theirs.clone().abs().max())?, scalar((ours - theirs).abs().max())?);
    println!("inference: logits up to {largest:.3}, ours and burn's differ by {difference:.2e}");
    // False for NaN.
    let is_close = difference <= 256.0 * f32::EPSILON * largest;
    if is_close { Ok(()) } else { Err("logits differ".into()) }
}

/// A model and its optimizer.
struct Training<N: RmsNorm> {
    model: Model<N>,
    optimizer: ModuleOptimizer,
}

impl<N: RmsNorm> Training<N> {
    fn new(model: Model<N>) -> Self {
        Training { model, optimizer: AdamWConfig::new().init() }
    }

    /// The model after the step, and the loss before it.
    fn step(mut self, step: usize, device: &Device) -> Result<(Self, f32)> {
        let [tokens, targets] = sequences(step, device);
        let logits = self.model.forward(tokens).reshape([BATCH * TOKENS, VOCABULARY]);
        let loss = CrossEntropyLossConfig::new().init(device).forward(logits, targets.reshape([BATCH * TOKENS]));
        let gradients = GradientsParams::from_grads(loss.backward(), &self.model);
        self.model = self.optimizer.step(LEARNING_RATE, self.model, gradients);
        Ok((self, scalar(loss)?))
    }
}

fn training(mut ours: Training<Ours>, mut theirs: Training<Theirs>, steps: usize, device: &Device) -> Result<()> {
    println!("step      ours     burn's");
    let (mut first, mut last) = (None, (0.0, 0.0));
    for step in 0..steps {
        ours = {
            let (ours, loss) = ours.step(step, device)?;
            last.0 = loss;
            ours
        };
        theirs = {
            let (theirs, loss) = theirs.step(step, device)?;
            last.1 = loss;
            theirs
        };
        let (a, b) = last;
        let first = *first.get_or_insert(b);
        if step % 8 == 0 || step + 1 == steps {
            println!("{step:>4}  {a:>8.5}  {b:>8.5}");
        }
        // Roundings of 2^-24 grow from step to step; a wrong gradient shows after a few steps.
        let is_close = (a - b).abs() <= 1e-3 * first;
        if !is_close {
            return Err(format!("step {step}: losses {a} and {b}").into());
        }
        if step + 1 == steps && a > first / 2.0 {
            return Err(format!("the loss has not fallen: {first} to {a}").into());
        }
    }
    Ok(())
}
