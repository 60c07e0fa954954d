//! Pieces in both slots of backward: gates, whose gradients are compared with differences of forward.

use rmsnorm_spec::{Activation, CastOrder, DTypes, Norm, NormSpec, reference};

use super::*;
use crate::stages::backward::{BackwardBlocks, BackwardRows, Given, Gradients, Partials, Sums};
use crate::stages::forward::affine::Vectors;
use crate::stages::{RowStarts, Split};
use crate::{Isa, kernel};

const ROWS: usize = 3;
const COLS: usize = 37;

/// Values between -2 and 2.
fn values(seed: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 252.0 - 2.0).collect()
}

/// x, both gates, weight and bias.
type Inputs = [Vec<f32>; 5];

fn inputs() -> Inputs {
    [ROWS * COLS, ROWS * COLS, ROWS * COLS, COLS, COLS].map(|len| values(len + 1, len))
}

/// Mean and rstd of h, and the sum of dy times y, in f64.
fn forward(
    (spec, activation): (&NormSpec, Activation),
    [x, before, after, weight, bias]: &[Vec<f64>; 5],
    dy: &[f32],
    r: usize,
) -> (f64, f64, f64) {
    let act = |z: f64| reference::activate(activation, z);
    let row = r * COLS..(r + 1) * COLS;
    let h: Vec<f64> = row.clone().map(|i| x[i] * act(before[i])).collect();
    let average = |of: &mut dyn Iterator<Item = f64>| of.sum::<f64>() / COLS as f64;
    let mean = if spec.norm == Norm::Layer { average(&mut h.iter().copied()) } else { 0.0 };
    let var = average(&mut h.iter().map(|h| (h - mean).powi(2)));
    let rstd = 1.0 / (var + f64::from(spec.eps)).sqrt();
    let y = |c: usize| ((h[c] - mean) * rstd * weight[c] + bias[c]) * act(after[row.start + c]);
    (mean, rstd, (0..COLS).map(|c| y(c) * f64::from(dy[row.start + c])).sum())
}

fn of(values: &[f32]) -> Matrix<'_> {
    Matrix { data: In::from(values).any(), rows: RowStarts::strided(COLS) }
}

fn to(values: &mut [f32]) -> MatrixMut<'_> {
    MatrixMut { data: Out::from(values).any(), rows: RowStarts::strided(COLS) }
}

/// Gradients of x, both gates, weight and bias, by backward.
fn backward(
    isa: Isa,
    (spec, activation): (&NormSpec, Activation),
    inputs: &Inputs,
    dy: &[f32],
    is_split: bool,
) -> Inputs {
    let [x, before, after, weight, bias] = inputs;
    let exact = inputs.clone().map(|values| values.into_iter().map(f64::from).collect());
    let (mean, rstd): (Vec<f32>, Vec<f32>) = (0..ROWS)
        .map(|r| forward((spec, activation), &exact, dy, r))
        .map(|(mean, rstd, _)| (mean as f32, rstd as f32))
        .unzip();
    let mut gradients = inputs.clone().map(|values| vec![f32::NAN; values.len()]);
    let [dx, dbefore, dafter, dweight, dbias] = &mut gradients;
    let (mut of_dweight, mut of_dbias) = (vec![0.0; ROWS * COLS], vec![0.0; ROWS * COLS]);
    let pull =
        |of, z, dgate| Pull { of: Scaled { of, gate: Some(Gate { z, activation }), weight: None }, dgate: Some(dgate) };
    let mut work = BackwardBlocks {
        rows: BackwardRows {
            call: Call { spec: *spec, dtypes: DTypes::uniform(DType::F32), streaming: false, column_groups: 1 },
            dy: pull(of(dy), of(after), to(dafter)),
            affine: Vectors {
                weight: Some(In::from(weight.as_slice()).any()),
                bias: Some(In::from(bias.as_slice()).any()),
            },
            x: pull(of(x), of(before), to(dbefore)),
            given: Given { mean: Some(&mean), rstd: &rstd },
            found: None,
        },
        block_rows: 1,
        stream: Gradients { dresidual_out: None, dx: to(dx), dresidual: None },
        partials: Partials {
            dweight: Some(Sums { sums: &mut of_dweight, cols: COLS }),
            dbias: Some(Sums { sums: &mut of_dbias, cols: COLS }),
        },
    };
    match is_split {
        true => {
            let (mut low, mut high) = work.split_at(2);
            kernel::any(isa, &mut high);
            kernel::any(isa, &mut low);
        }
        false => kernel::any(isa, &mut work),
    }
    for (sum, partials) in [(dweight, of_dweight), (dbias, of_dbias)] {
        *sum = (0..COLS).map(|c| (0..ROWS).map(|r| partials[r * COLS + c]).sum()).collect();
    }
    gradients
}

#[test]
fn gates_in_both_slots_have_the_gradients_of_their_forward() {
    let (inputs, dy) = (inputs(), values(9, ROWS * COLS));
    // The cast order does not matter to backward.
    let specs = [
        (NormSpec::rms(ROWS, COLS, 1e-5), Activation::Silu),
        (NormSpec::layer(ROWS, COLS, 1e-5).cast_order(CastOrder::BeforeWeight), Activation::Sigmoid),
    ];
    for (spec, activation) in specs {
        let call = (&spec, activation);
        let gradients = backward(Isa::Portable, call, &inputs, &dy, false);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            assert!(gradients == backward(isa, call, &inputs, &dy, true), "{isa}");
        }
        let exact = inputs.clone().map(|values| values.into_iter().map(f64::from).collect::<Vec<_>>());
        let loss = |inputs: &[Vec<f64>; 5]| (0..ROWS).map(|r| forward(call, inputs, &dy, r).2).sum::<f64>();
        for (which, gradient) in gradients.iter().enumerate() {
            for (i, &got) in gradient.iter().enumerate() {
                let moved = |by: f64| {
                    let mut moved = exact.clone();
                    moved[which][i] += by;
                    loss(&moved)
                };
                let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let is_near = (f64::from(got) - expected).abs() < 1e-5 * (1.0 + expected.abs());
                assert!(is_near, "gradient {which}, element {i}, {:?}: {got}, not {expected}", spec.norm);
            }
        }
    }
}
