//! Compares the bounds and the judge with the Python study from which they were ported:
//! tests/golden/make_golden.py writes golden.json. Both sides generate the same inputs with the
//! same generator. The outputs of the study's simulated kernels are stored, so both judges see the
//! same bits.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helper functions too")]

use std::collections::BTreeMap;

use rmsnorm_conformance::bounds::{self, InputErrors, Mode, Model, Statistics};
use rmsnorm_conformance::judge::judge;
use rmsnorm_conformance::testing::splitmix;
use rmsnorm_conformance::{Arithmetic, NonFinite, StoreRounding};
use rmsnorm_spec::reference::{self, BackwardInputs, ForwardInputs, round_to};
use rmsnorm_spec::{DType, Element, Norm, NormSpec, bf16, f16};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    norm: String,
    rows: usize,
    cols: usize,
    arithmetic: String,
    mode: String,
    /// Dtype of the activations.
    dtype: String,
    /// Dtype of weight and bias; no weight if `None`.
    weight: Option<String>,
    bias: bool,
    offset: f32,
    residual: bool,
    dresidual_out: bool,
    /// Whether backward uses the reference's statistics.
    given: bool,
    shift: f64,
    scale: f64,
    eps: f32,
    bug: Option<String>,
    /// Sum and maximum of the magnitudes of each output.
    reference: BTreeMap<String, [f64; 2]>,
    /// Sum and maximum of each bound.
    bound: BTreeMap<String, [f64; 2]>,
    judged: BTreeMap<String, Judged>,
}

/// Every `step`-th element of an output of a simulated kernel, and the verdict of the Python judge.
#[derive(Deserialize)]
struct Judged {
    step: usize,
    dtype: String,
    failures: usize,
    budget: f64,
    /// Hexadecimal, without separators.
    bits: String,
}

/// Reference and bound of an output.
struct Output {
    reference: Vec<f64>,
    bound: Vec<f64>,
}

type Outputs = BTreeMap<&'static str, Output>;

fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("golden/golden.json")).unwrap()
}

fn dtype(name: &str) -> DType {
    DType::from_name(name).unwrap()
}

/// Multiples of 2^-23 in [-1, 1), as in the study: the test kit's generator with a counter as its
/// state.
fn uniform(count: usize, seed: u64) -> impl Iterator<Item = f64> {
    let states = (0..count as u64).map(move |counter| counter.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed));
    states.map(|state| (splitmix(state) >> 40) as f64 * 2f64.powi(-23) - 1.0)
}

impl Case {
    fn spec(&self) -> NormSpec {
        let norm = Norm::from_name(&self.norm).unwrap();
        let spec = NormSpec::new(norm, self.rows, self.cols, self.eps);
        spec.weight_offset(self.offset)
    }

    fn arithmetic(&self) -> Arithmetic {
        let ieee = Arithmetic::IEEE;
        let wgsl_roundoff = 2.0 * ieee.unit_roundoff;
        match self.arithmetic.as_str() {
            "cpu" => ieee,
            "cuda" => Arithmetic { rstd_error: 4.0 * ieee.unit_roundoff, ..ieee },
            "wgsl" => Arithmetic {
                unit_roundoff: wgsl_roundoff,
                rstd_error: 2.0 * wgsl_roundoff,
                mean_roundings: 1.5,
                store: StoreRounding::EitherNeighbour,
                flushes_subnormals: true,
                non_finite: NonFinite::Unspecified,
                ..ieee
            },
            other => panic!("arithmetic {other}"),
        }
    }

    fn mode(&self) -> Mode {
        match self.mode.as_str() {
            "worst" => Mode::Worst,
            "statistical" => Mode::Statistical,
            other => panic!("mode {other}"),
        }
    }

    /// Reference and bound of every output.
    fn outputs(&self, index: usize) -> Outputs {
        let matrix = self.rows * self.cols;
        let activations = dtype(&self.dtype);
        let parameters = self.weight.as_deref().map_or(activations, dtype);
        let tensor = |tensor: u64, count: usize, dtype: DType, scale: f64, shift: f64| -> Vec<f64> {
            let values = uniform(count, 1000 * index as u64 + tensor);
            values.map(|value| round_to(round_to(value * scale + shift, DType::F32), dtype)).collect()
        };
        let x = tensor(0, matrix, activations, self.scale, self.shift);
        let residual = self.residual.then(|| tensor(1, matrix, activations, 1.0, 0.0));
        let weight = self.weight.is_some().then(|| tensor(2, self.cols, parameters, 1.0, 0.0));
        let bias = self.bias.then(|| tensor(3, self.cols, parameters, 1.0, 0.0));
        let dy = tensor(4, matrix, activations, 1.0, 0.0);
        let dresidual_out = self.dresidual_out.then(|| tensor(5, matrix, activations, 1.0, 0.0));

        let (spec, arithmetic) = (self.spec(), self.arithmetic());
        let model = Model { arithmetic: &arithmetic, mode: self.mode() };
        let inputs = ForwardInputs {
            x: &x,
            residual: residual.as_deref().map(|residual| (residual, activations)),
            weight: weight.as_deref(),
            bias: bias.as_deref(),
        };
        let forward = reference::forward(&spec, &inputs);
        let forward_bounds = bounds::forward(&spec, &inputs, (activations, None), &forward, model);

        let stored = |values: &[f64]| -> Vec<f64> {
            values.iter().map(|&value| if self.given { round_to(value, DType::F32) } else { value }).collect()
        };
        let inputs = BackwardInputs {
            dy: &dy,
            x: &forward.h,
            weight: weight.as_deref(),
            mean: &stored(&forward.mean),
            rstd: &stored(&forward.rstd),
            dresidual_out: dresidual_out.as_deref(),
        };
        let statistics = if self.given { Statistics::Given } else { Statistics::Computed(&forward_bounds) };
        let backward = reference::backward(&spec, &inputs);
        let backward_bounds = bounds::backward(&spec, &inputs, InputErrors::default(), &backward, statistics, model);
        BTreeMap::from([
            ("mean", Output { reference: forward.mean, bound: forward_bounds.mean }),
            ("rstd", Output { reference: forward.rstd, bound: forward_bounds.rstd }),
            ("y", Output { reference: forward.y, bound: forward_bounds.y }),
            ("dx", Output { reference: backward.dx, bound: backward_bounds.dx }),
            ("dweight", Output { reference: backward.dweight, bound: backward_bounds.dweight }),
            ("dbias", Output { reference: backward.dbias, bound: backward_bounds.dbias }),
        ])
    }

    fn describe(&self, index: usize, output: &str) -> String {
        let bug = self.bug.as_deref().unwrap_or("no bug");
        format!("case {index} ({} {}x{} {}, {bug}), {output}", self.norm, self.rows, self.cols, self.dtype)
    }
}

fn assert_summary(values: &[f64], golden: [f64; 2], what: &str) {
    let sum: f64 = values.iter().map(|value| value.abs()).sum();
    let largest = values.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    for (name, ours, golden) in [("sum", sum, golden[0]), ("maximum", largest, golden[1])] {
        assert!((ours - golden).abs() <= 1e-6 * golden, "{what}: {name} {ours:e}, Python {golden:e}");
    }
}

fn assert_verdict<E: Element>(output: &Output, judged: &Judged, arithmetic: &Arithmetic, what: &str) {
    let digits = 2 * E::DTYPE.size();
    let bits = |chunk: &[u8]| u32::from_str_radix(std::str::from_utf8(chunk).unwrap(), 16).unwrap();
    let got: Vec<E> = judged.bits.as_bytes().chunks(digits).map(|chunk| E::from_bits(bits(chunk))).collect();
    let sample = |values: &[f64]| -> Vec<f64> { values.iter().copied().step_by(judged.step).collect() };
    let verdict = judge(&got, &sample(&output.reference), &sample(&output.bound), arithmetic);
    assert_eq!(verdict.checked, got.len(), "{what}");
    assert_eq!(verdict.failures, judged.failures, "{what}: {:?}", verdict.worst);
    // The absolute term is for budgets of zero, where f64 and extended precision differ by rounding
    // errors.
    let tolerance = 0.01 * judged.budget + 1e-6;
    let (ours, golden) = (verdict.budget, judged.budget);
    assert!((ours - golden).abs() <= tolerance, "{what}: budget {ours}, Python {golden}");
}

#[test]
fn bounds_match_the_python_study() {
    for (index, case) in cases().iter().enumerate() {
        let outputs = case.outputs(index);
        for (name, &golden) in &case.reference {
            assert_summary(&outputs[name.as_str()].reference, golden, &case.describe(index, name));
        }
        for (name, &golden) in &case.bound {
            assert_summary(&outputs[name.as_str()].bound, golden, &format!("bound of {}", case.describe(index, name)));
        }
    }
}

#[test]
fn verdicts_match_the_python_study() {
    for (index, case) in cases().iter().enumerate() {
        let (outputs, arithmetic) = (case.outputs(index), case.arithmetic());
        for (name, judged) in &case.judged {
            let (output, what) = (&outputs[name.as_str()], case.describe(index, name));
            match dtype(&judged.dtype) {
                DType::F32 => assert_verdict::<f32>(output, judged, &arithmetic, &what),
                DType::F16 => assert_verdict::<f16>(output, judged, &arithmetic, &what),
                DType::Bf16 => assert_verdict::<bf16>(output, judged, &arithmetic, &what),
            }
        }
    }
}

#[test]
fn verdicts_condemn_exactly_the_kernels_with_a_bug() {
    for (index, case) in cases().iter().enumerate() {
        let failures: usize = case.judged.values().map(|judged| judged.failures).sum();
        assert_eq!(failures > 0, case.bug.is_some(), "{}", case.describe(index, "all outputs"));
    }
}
