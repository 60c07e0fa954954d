//! Learns the weight of an RMS norm with gradient descent, on the CPU: forward, loss, backward,
//! update.
//!
//!     cargo run -p rmsnorm-core --example training_step
//!
//! Activations are bf16 and the weight is f32, as in most training code. `x` is the middle third of
//! every row of a fused buffer. The workspace of the weight gradient is allocated once.

use rmsnorm_core::cpu::{Backward, CpuBackend, Forward};
use rmsnorm_core::{DType, DTypes, Error, Norm, NormSpec, Problem, Rows, Tensor, bf16};

const ROWS: usize = 256;
const COLS: usize = 64;
const STEPS: usize = 60;
const LEARNING_RATE: f32 = 0.5;

fn main() -> Result<(), Error> {
    let (backend, norm) = (CpuBackend::new(), NormSpec::rms(ROWS, COLS, 1e-6));

    // Three matrices side by side; only the second is normalized, with a row stride of 3 * COLS
    // elements.
    let fused: Vec<bf16> =
        (0..ROWS * 3 * COLS).map(|i| bf16::from_f32(((i * 37 % 101) as f32 - 50.0) / 25.0)).collect();
    let x = || Rows::strided(&fused[COLS..fused.len() - COLS], 3 * COLS);

    let wanted: Vec<f32> = (0..COLS).map(|col| 0.5 + col as f32 / COLS as f32).collect();
    let mut target = vec![bf16::ZERO; ROWS * COLS];
    backend.forward(&norm, Forward::new(x(), &mut target).f32_weight().weight(&wanted))?;

    let dtypes = DTypes::uniform(DType::Bf16).widened(true, false);
    let problem = Problem::backward(Norm::Rms, ROWS, COLS, DType::Bf16, &[Tensor::Weight, Tensor::Dweight]);
    let mut workspace = vec![0.0; backend.workspace_len(&Problem { dtypes, ..problem })];

    let mut weight = vec![1.0f32; COLS];
    let (mut y, mut rstd) = (vec![bf16::ZERO; ROWS * COLS], vec![0.0f32; ROWS]);
    let (mut dx, mut dweight) = (vec![bf16::ZERO; ROWS * COLS], vec![0.0f32; COLS]);
    let mut first_loss = None;
    for step in 0..STEPS {
        backend.forward(&norm, Forward::new(x(), &mut y).f32_weight().weight(&weight).rstd(&mut rstd))?;

        // The loss is half of the mean square error; its gradient is the error.
        let error = || y.iter().zip(&target).map(|(y, target)| y.to_f32() - target.to_f32());
        let loss = error().map(|error| error * error).sum::<f32>() / (2 * ROWS * COLS) as f32;
        let dy: Vec<bf16> = error().map(bf16::from_f32).collect();

        let args = Backward::new(&dy, x(), &rstd, &mut dx).f32_weight().weight(&weight);
        backend.backward(&norm, args.dweight(&mut dweight).workspace(&mut workspace))?;
        for (weight, gradient) in weight.iter_mut().zip(&dweight) {
            *weight -= LEARNING_RATE * gradient / ROWS as f32;
        }

        let first = *first_loss.get_or_insert(loss);
        if step % 20 == 0 || step + 1 == STEPS {
            println!("step {step:>2}: loss {loss:.3e}");
        }
        assert!(step + 1 < STEPS || loss < first / 1000.0, "the loss has not fallen: {first} to {loss}");
    }
    Ok(())
}
