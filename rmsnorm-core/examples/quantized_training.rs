//! Trains a linear layer after an RMS norm with MXFP8 output, on the CPU: the matrix products read
//! codes and scales only.
//!
//!     cargo run -p rmsnorm-core --example quantized_training
//!
//! One call quantizes twice: along rows for the forward product, and along columns for the product
//! of the layer's gradient, which sums over rows. Gradients pass straight through the rounding: the
//! norm's backward call reads x and the rstd of the quantized call, and no codes.

use rmsnorm_core::cpu::{Backward, CpuBackend, Forward, QuantizedForward};
use rmsnorm_core::quant::{CodeType, QuantSpec, ScaleKind, ScaleRounding, e8m0_value};
use rmsnorm_core::{Error, F8E4M3, NormSpec};

const ROWS: usize = 64;
const COLS: usize = 96;
const OUT: usize = 8;
const STEPS: usize = 120;
const LEARNING_RATE: f32 = 0.1;

/// The number of columns, or rows, that share a scale.
const SET: usize = ScaleKind::MX_COLS;

/// The values of codes with row-major scales.
fn values(codes: &[F8E4M3], scales: &[u8], cols: usize) -> Vec<f32> {
    let groups = cols.div_ceil(SET);
    let value = |(i, code): (usize, &F8E4M3)| code.to_f32() * e8m0_value(scales[i / cols * groups + i % cols / SET]);
    codes.iter().enumerate().map(value).collect()
}

/// The product of a (rows, inner) and b (inner, cols), each given by a function.
fn product(
    rows: usize,
    inner: usize,
    cols: usize,
    a: impl Fn(usize, usize) -> f32,
    b: impl Fn(usize, usize) -> f32,
) -> Vec<f32> {
    let element = |row: usize, col: usize| (0..inner).map(|i| a(row, i) * b(i, col)).sum();
    (0..rows * cols).map(|i| element(i / cols, i % cols)).collect()
}

fn main() -> Result<(), Error> {
    let (backend, norm) = (CpuBackend::new(), NormSpec::rms(ROWS, COLS, 1e-6));
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Mx { rounding: ScaleRounding::Up });
    let x: Vec<f32> = (0..ROWS * COLS).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 300.0).collect();
    let wanted: Vec<f32> = (0..COLS * OUT).map(|i| ((i * 31 % 17) as f32 - 8.0) / 40.0).collect();

    let (mut weight, mut layer) = (vec![1.0f32; COLS], vec![0.0f32; COLS * OUT]);
    let (mut codes, mut scales) = (vec![F8E4M3::ZERO; ROWS * COLS], vec![0; ROWS * COLS.div_ceil(SET)]);
    let (mut codes_t, mut scales_t) = (vec![F8E4M3::ZERO; COLS * ROWS], vec![0; COLS * ROWS.div_ceil(SET)]);
    let (mut y, mut rstd, mut rstd_of_y) = (vec![0.0f32; ROWS * COLS], vec![0.0f32; ROWS], vec![0.0f32; ROWS]);
    let (mut dx, mut dweight) = (vec![0.0f32; ROWS * COLS], vec![0.0f32; COLS]);

    // The target: a layer after the norm without weights, in f32.
    backend.forward(&norm, Forward::new(&x, &mut y).rstd(&mut rstd_of_y))?;
    let target = product(ROWS, COLS, OUT, |row, i| y[row * COLS + i], |i, col| wanted[i * OUT + col]);

    let mut first_loss = None;
    for step in 0..STEPS {
        let args = QuantizedForward::<_, F8E4M3>::new(quant, &x, &mut codes).scales_e8m0(&mut scales).weight(&weight);
        let args = args.codes_columnwise(&mut codes_t).scales_columnwise_e8m0(&mut scales_t).rstd(&mut rstd);
        backend.quantized_forward(&norm, args)?;
        // The statistics equal those of the float call bit for bit, so backward gets the same
        // inputs.
        assert_eq!(rstd, rstd_of_y);
        let (rows, columns) = (values(&codes, &scales, COLS), values(&codes_t, &scales_t, ROWS));

        let out = product(ROWS, COLS, OUT, |row, i| rows[row * COLS + i], |i, col| layer[i * OUT + col]);
        let error: Vec<f32> = out.iter().zip(&target).map(|(out, target)| (out - target) / ROWS as f32).collect();
        let loss = error.iter().map(|error| error * error).sum::<f32>() * ROWS as f32;

        let dy = product(ROWS, OUT, COLS, |row, o| error[row * OUT + o], |o, col| layer[col * OUT + o]);
        let dlayer = product(COLS, ROWS, OUT, |col, row| columns[col * ROWS + row], |row, o| error[row * OUT + o]);
        backend.backward(&norm, Backward::new(&dy, &x, &rstd, &mut dx).weight(&weight).dweight(&mut dweight))?;

        for (parameter, gradient) in layer.iter_mut().zip(&dlayer).chain(weight.iter_mut().zip(&dweight)) {
            *parameter -= LEARNING_RATE * gradient;
        }
        let first = *first_loss.get_or_insert(loss);
        if step % 40 == 0 || step + 1 == STEPS {
            println!("step {step:>2}: loss {loss:.3e}");
        }
        assert!(step + 1 < STEPS || loss < first / 5.0, "the loss has not fallen: {first} to {loss}");
    }
    Ok(())
}
