//! A gate before or after the norm: math.md, equations (19) to (21), and its bounds in section 5.6
//! ([`Gated`](crate::judge::gate::Gated)).
//!
//! What a gated call does, in f32. A backend that lacks a line answers `Unsupported`.
//!
//! | gate | forward | backward |
//! |---|---|---|
//! | after | `y = rnd(v act(z))`, `v = x_hat w' + b` | the norm's own, of `dy act(z)`; `dgate = dy v act'(z)` |
//! | after, `BeforeWeight` | `y = rnd(rnd_w(v) act(z))`, `v = rnd(x_hat) w' + b` | the same: `v` is not rounded |
//! | before | the norm of `x act(z)`, not rounded | the norm's own `dh`; `dx = dh act(z)`, `dgate = dh x act'(z)` |
//!
//! - After: a residual before the norm, in place, codes, f32 weight and wide residual are as without
//!   a gate. Backward reads `bias` if forward did.
//! - Before: no residual, and `x` of backward is the `x` of forward, of the activations' dtype.
//! - `dgate` is optional, as are `dweight` and `dbias`. All have the same `dy act(z)`.

use rmsnorm_spec::{Activation, CastOrder, DType, DTypes, Gate, Norm, Slot, Tensor, TensorSet};

use super::math::{
    ALL_PRESENT, BackwardRow, Bug, BugList, Call, Case, Dice, Family, ForwardRow, GoodCall, Kind, Layout, Lists,
    Misuse, NormKernel, OPTIONAL, PieceMath, Refusal, Tensors, Trial, alternate, bugs, drawn, each, is_meaningful,
    round, weight_of_norm, with_norms,
};
use crate::case::dice::index_of;
use crate::case::quantized;
use crate::testing::splitmix;

bugs! {
    /// The bugs of a gate.
    GateBug:
    Missing "gate_missing" BOTH GATED_FORWARD "the gate multiplies nothing";
    NotActivated "gate_not_activated" BOTH GATED_FORWARD "the gate itself multiplies";
    OtherActivation "gate_other_activation" BOTH GATED "silu is sigmoid, and sigmoid is silu";
    ExpLow "gate_exp_low" BOTH GATED "exp is a 12-bit estimate";
    SigmoidOverflows "gate_sigmoid_overflows" BOTH GATED "sigmoid is exp(z) / (1 + exp(z))";
    ActRounded "gate_act_rounded" BOTH GATED_FORWARD "the activated gate is rounded to 16 bits";
    NormRounded "gate_norm_rounded" BOTH GATE_AFTER "the norm is rounded to 16 bits before the gate, against cast_order";
    NormNarrowed "gate_norm_narrowed" BOTH GATE_AFTER "with an f32 weight, the norm is rounded to the dtype of y before the gate";
    NormUnrounded "gate_norm_unrounded" BOTH GATE_AFTER "the norm is not rounded before the gate, against cast_order";
    BiasAfterGate "gate_bias_after" BOTH GATE_AFTER "the bias is added after the gate";
    BeforeNorm "gate_before_norm" BOTH GATE_AFTER "the gate multiplies before the norm";
    HRounded "gated_h_rounded" BOTH GATE_BEFORE "the gated x is rounded to 16 bits before the norm";

    NoSlope "dgate_no_slope" BOTH GATED_BACKWARD "dgate has the activation instead of its slope";
    SlopeShort "dgate_slope_short" BOTH GATED_BACKWARD "the slope of silu is sigmoid";
    SlopeCancels "dgate_slope_cancels" BOTH GATED_BACKWARD "1 - sigmoid(z) is a difference";
    DgateMissing "dgate_missing" BOTH GATED_BACKWARD "dgate is never written";
    DgateNoBias "dgate_no_bias" BOTH BACKWARD_AFTER "dgate misses the bias";
    DgateNoWeight "dgate_no_weight" BOTH BACKWARD_AFTER "dgate is made of x_hat";
    DgateOfRounded "dgate_of_rounded" BOTH BACKWARD_AFTER "dgate is made of a norm that is rounded to 16 bits";
    GatedDyRounded "gated_dy_rounded" BOTH BACKWARD_AFTER "the gated dy is rounded to 16 bits";
    DxOfDy "dx_without_gate" BOTH BACKWARD_AFTER "dx is that of dy without the gate";
    DweightOfDy "dweight_without_gate" BOTH BACKWARD_AFTER "dweight is that of dy without the gate";
    DbiasOfDy "dbias_without_gate" BOTH BACKWARD_AFTER "dbias is that of dy without the gate";
    DxIsDh "dx_is_dh" BOTH BACKWARD_BEFORE "dx is the gradient of the gated x";
    DgateOfH "dgate_of_h" BOTH BACKWARD_BEFORE "dgate is made of the gated x";
    DgateOfDx "dgate_of_dx" BOTH BACKWARD_BEFORE "dgate is made of dx";
    DhRounded "dh_rounded" BOTH BACKWARD_BEFORE "the gradient of the gated x is rounded to 16 bits";
    NormalizesX "backward_normalizes_x" BOTH BACKWARD_BEFORE "backward normalizes x without the gate";
}

/// The gate after the norm. It has the bugs of both.
pub(crate) struct GateAfter;

/// The gate before the norm.
pub(crate) struct GateBefore;

const MISUSE: &[Misuse] = &[
    ("no_gate", Refusal::Missing("gate"), |call| call.lose(Tensor::Gate)),
    ("gate_without_activation", Refusal::Unexpected("gate"), |call| call.spec.gate = None),
    ("gate_and_a_sum_after", Refusal::Unsupported, GoodCall::add_after),
    ("dgate_without_a_gate", Refusal::Unexpected("dgate"), |call| {
        call.lose(Tensor::Gate);
        call.lose(Tensor::Bias);
        call.spec.gate = None;
    }),
];

impl PieceMath for GateAfter {
    const BUGS: &'static [Bug] = GateBug::BUGS;
    const MISUSE: &'static [Misuse] = &[
        MISUSE[0],
        MISUSE[1],
        MISUSE[2],
        MISUSE[3],
        ("gate_before_with_a_residual", Refusal::Unsupported, |call| {
            call.spec.gate = call.spec.gate.map(|gate| Gate { slot: Slot::Before, ..gate });
        }),
    ];

    fn forward(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [ForwardRow]) {
        let mut kernel = NormKernel::first(call, tensors);
        let bias = kernel.bias.clone().unwrap_or_else(|| vec![0.0; call.spec.cols]);
        let DTypes { activation, weight, .. } = call.problem.dtypes;
        let wide = if weight == DType::F32 { DType::F32 } else { activation };
        let between = match (call.bug(), call.spec.cast_order) {
            (Some(GateBug::NormRounded), CastOrder::AtStore) => call.low(),
            (Some(GateBug::NormNarrowed), CastOrder::BeforeWeight) => activation,
            (Some(GateBug::NormUnrounded), _) | (_, CastOrder::AtStore | CastOrder::WeightFirst) => DType::F32,
            (_, CastOrder::BeforeWeight | CastOrder::RstdFirst) => wide,
        };
        for (index, row) in rows.iter_mut().enumerate() {
            let factors = factors(call, tensors, index);
            if call.has(GateBug::BeforeNorm) {
                row.result = kernel.normalize(index, &product(&row.h, &factors));
                continue;
            }
            for ((y, factor), bias) in row.result.y.iter_mut().zip(factors).zip(&bias) {
                *y = match call.bug() {
                    Some(GateBug::BiasAfterGate) => (*y - bias) * factor + bias,
                    Some(_) | None => round(*y, between) * factor,
                };
            }
        }
    }

    fn pull(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [BackwardRow]) {
        let weight = call.effective_weight(weight_of_norm(call, tensors));
        let bias = tensors.values(Tensor::Bias);
        for (index, row) in rows.iter_mut().enumerate() {
            let (factors, slopes) = (factors(call, tensors, index), slopes(call, tensors, index));
            let dgate = |col: usize| {
                let group = col / call.width();
                let x_hat = (row.x[col] - row.mean[group]) * row.rstd[group];
                let scaled = if call.has(GateBug::DgateNoWeight) { x_hat } else { x_hat * weight[col] };
                let bias = bias.as_ref().filter(|_| !call.has(GateBug::DgateNoBias)).map_or(0.0, |bias| bias[col]);
                let norm = scaled + bias;
                let norm = if call.has(GateBug::DgateOfRounded) { round(norm, call.low()) } else { norm };
                row.dy[col] * norm * slopes[col]
            };
            store_dgate(call, tensors, index, &(0..call.spec.cols).map(dgate).collect::<Vec<_>>());
            row.dy = product(&row.dy, &factors);
            if call.has(GateBug::GatedDyRounded) {
                row.dy.iter_mut().for_each(|dy| *dy = round(*dy, call.low()));
            }
        }
    }
}

impl PieceMath for GateBefore {
    const BUGS: &'static [Bug] = &[];
    const MISUSE: &'static [Misuse] = MISUSE;

    fn forward(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [ForwardRow]) {
        for (index, row) in rows.iter_mut().enumerate() {
            row.h = product(&row.x, &factors(call, tensors, index));
            if call.has(GateBug::HRounded) {
                row.h.iter_mut().for_each(|h| *h = round(*h, call.low()));
            }
        }
    }

    fn again(call: &Call, tensors: &Tensors<'_, '_>, rows: &mut [BackwardRow]) {
        for (index, row) in rows.iter_mut().enumerate().filter(|_| !call.has(GateBug::NormalizesX)) {
            row.x = product(&row.x, &factors(call, tensors, index));
        }
    }

    fn pull(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [BackwardRow]) {
        for (index, row) in rows.iter_mut().enumerate() {
            if call.has(GateBug::DhRounded) {
                row.dx.iter_mut().for_each(|dh| *dh = round(*dh, call.low()));
            }
            let x = tensors.row(Tensor::X, index).unwrap_or_default();
            let dx = product(&row.dx, &factors(call, tensors, index));
            let dh = if call.has(GateBug::DgateOfDx) { &dx } else { &row.dx };
            let of_x = product(dh, if call.has(GateBug::DgateOfH) { &row.x } else { &x });
            store_dgate(call, tensors, index, &product(&of_x, &slopes(call, tensors, index)));
            if !call.has(GateBug::DxIsDh) {
                row.dx = dx;
            }
        }
    }
}

fn product(values: &[f32], factors: &[f32]) -> Vec<f32> {
    values.iter().zip(factors).map(|(value, factor)| value * factor).collect()
}

fn store_dgate(call: &Call, tensors: &mut Tensors<'_, '_>, row: usize, values: &[f32]) {
    if !call.has(GateBug::DgateMissing) {
        tensors.store_result(Tensor::Dgate, row, values);
    }
}

/// What the gate of a row multiplies.
fn factors(call: &Call, tensors: &Tensors<'_, '_>, row: usize) -> Vec<f32> {
    let of = |z: f32| match call.bug() {
        Some(GateBug::Missing) => 1.0,
        Some(GateBug::NotActivated) => z,
        Some(GateBug::ActRounded) => round(activated(call, z), call.low()),
        Some(_) | None => activated(call, z),
    };
    tensors.row(Tensor::Gate, row).unwrap_or_default().into_iter().map(of).collect()
}

/// The slopes of the activation at the gates of a row.
fn slopes(call: &Call, tensors: &Tensors<'_, '_>, row: usize) -> Vec<f32> {
    let of = |z: f32| {
        let rest = if call.has(GateBug::SlopeCancels) { 1.0 - sigmoid(call, z) } else { sigmoid(call, -z) };
        match (activation(call), call.bug()) {
            (_, Some(GateBug::NoSlope)) => activated(call, z),
            (Activation::Silu, Some(GateBug::SlopeShort)) => sigmoid(call, z),
            (Activation::Silu, _) => sigmoid(call, z) * (1.0 + z * rest),
            (Activation::Sigmoid, _) => sigmoid(call, z) * rest,
        }
    };
    tensors.row(Tensor::Gate, row).unwrap_or_default().into_iter().map(of).collect()
}

fn activation(call: &Call) -> Activation {
    match (call.problem.gate.map(|gate| gate.activation), call.has(GateBug::OtherActivation)) {
        (Some(Activation::Silu), false) | (Some(Activation::Sigmoid), true) => Activation::Silu,
        (Some(Activation::Sigmoid), false) | (Some(Activation::Silu), true) | (None, _) => Activation::Sigmoid,
    }
}

fn activated(call: &Call, z: f32) -> f32 {
    match activation(call) {
        Activation::Silu => z * sigmoid(call, z),
        Activation::Sigmoid => sigmoid(call, z),
    }
}

fn sigmoid(call: &Call, z: f32) -> f32 {
    let exp = |z: f32| {
        let exp = f64::from(z).exp() as f32;
        if call.has(GateBug::ExpLow) { f32::from_bits(exp.to_bits() & !0xfff) } else { exp }
    };
    if call.has(GateBug::SigmoidOverflows) {
        return exp(z) / (1.0 + exp(z));
    }
    let t = exp(-z.abs());
    if z < 0.0 { t / (1.0 + t) } else { 1.0 / (1.0 + t) }
}

/// Every kind with a gate.
const KINDS: [Kind; 12] = [
    Kind::FORWARD_GATE_AFTER,
    Kind::FORWARD_GATE_AFTER_IN_PLACE,
    Kind::BACKWARD_GATE_AFTER,
    Kind::GATE_AFTER_END_TO_END,
    Kind::BACKWARD_GATE_AFTER_SUMS,
    Kind::QUANTIZED_FORWARD_GATE_AFTER,
    Kind::FORWARD_GATE_BEFORE,
    Kind::FORWARD_GATE_BEFORE_IN_PLACE,
    Kind::BACKWARD_GATE_BEFORE,
    Kind::GATE_BEFORE_END_TO_END,
    Kind::BACKWARD_GATE_BEFORE_SUMS,
    Kind::QUANTIZED_FORWARD_GATE_BEFORE,
];

/// All optional tensors, except those that devices with few buffer bindings may not support.
const ALL: TensorSet = ALL_PRESENT.with(Tensor::Dgate);

/// All optional tensors.
const EVERY: TensorSet = OPTIONAL.with(Tensor::Dgate);

/// The tensors of the models that have a gate, in training.
const USUAL: TensorSet = TensorSet::of(&[Tensor::Weight, Tensor::Rstd, Tensor::Mean, Tensor::Dweight, Tensor::Dgate]);

/// The same with a bias and its gradient.
const BIASED: TensorSet = USUAL.with(Tensor::Bias).with(Tensor::Dbias);

/// The kinds that are a single call, with all optional tensors.
const CALLS: &[(Kind, TensorSet)] = &[
    (Kind::FORWARD_GATE_AFTER, ALL),
    (Kind::FORWARD_GATE_AFTER_IN_PLACE, ALL),
    (Kind::BACKWARD_GATE_AFTER, ALL),
    (Kind::FORWARD_GATE_BEFORE, ALL),
    (Kind::FORWARD_GATE_BEFORE_IN_PLACE, ALL),
    (Kind::BACKWARD_GATE_BEFORE, ALL),
];

/// The cases of both. They follow those of the other pieces, whose lists stay as they are.
pub(crate) const LISTS: Lists =
    Lists { smoke, core, drawn: |seed| drawn(seed ^ 0x6a7e, 3000, draw), breakpoints, calls: CALLS };

/// Whether a case can prove something: [`is_meaningful`], and an eps far above the squares of a
/// gated x that is almost zero.
fn is_good(case: &Case) -> bool {
    let is_tainted = case.family == Family::Nonfinite && case.kind.first() != case.kind;
    // The gradient of one column is lost in the error of the gated x, and so is that of two in
    // layer norm.
    let is_lost = case.cols < 3 && case.kind.gate() == Some(Slot::Before) && case.kind.has_backward();
    is_meaningful(case) && case.eps >= 1e-6 && case.family != Family::Codes && !is_tainted && !is_lost
}

/// A dense case with the usual tensors.
fn plain(kind: Kind, norm: Norm, activation: Activation, dtype: DType, (rows, cols): (usize, usize)) -> Case {
    Case { activation, present: USUAL, ..Case::plain(kind, norm, dtype, rows, cols) }
}

fn draw(dice: &mut Dice, turn: usize) -> Option<Case> {
    let (kind, norm) = (dice.pick(&KINDS), dice.pick(&Norm::USUAL));
    one(dice, 1 << 13, turn, |case| Case { kind, norm, ..case })
}

/// A drawn case, after `change`, that can prove something.
fn one(dice: &mut Dice, most: usize, turn: usize, change: impl Fn(Case) -> Case) -> Option<Case> {
    let activation = dice.pick(&Activation::ALL);
    let dgate = if dice.one_in(4) { TensorSet::NONE } else { TensorSet::of(&[Tensor::Dgate]) };
    let with = |case: Case| Case { activation, present: case.present.union(dgate), quant: quantized::at(turn), ..case };
    dice.one(most, |case| change(with(case)), is_good)
}

/// Every kind and norm with both activations, in every dtype, in both cast orders, with a bias and
/// a residual, with and without strides; and families that reach the ends of exp.
fn smoke() -> Vec<Case> {
    let mut dice = Dice { state: 71 };
    let mut cases = Vec::new();
    for (i, (kind, norm)) in with_norms(&KINDS).enumerate() {
        let first = Activation::ALL[i % 2];
        let other = Activation::ALL[1 - i % 2];
        let of =
            |activation, dtype, size| Case { quant: quantized::at(i), ..plain(kind, norm, activation, dtype, size) };
        let late = CastOrder::BeforeWeight;
        let of_kind = [
            Case { present: BIASED, weight_offset: 1.0, ..of(first, DType::F32, (5, 33)) },
            Case { present: BIASED, ..of(other, DType::F32, (4, 40)) },
            Case { family: Family::Exact, eps: 1e-6, ..of(other, DType::F32, (3, 65)) },
            Case { cast_order: late, present: BIASED, ..of(first, DType::Bf16, (9, 129)) },
            Case {
                cast_order: late,
                present: EVERY,
                dtypes: DTypes::uniform(DType::F16).widened(true, true),
                layout: Layout::Uniform { pad: 3, offset: 1 },
                ..of(other, DType::F16, (7, 131))
            },
            Case { layout: Layout::Grouped { rows: 2, seed: 1 }, present: ALL, ..of(first, DType::Bf16, (5, 45)) },
            Case { layout: Layout::Grouped { rows: 3, seed: 2 }, present: EVERY, ..of(other, DType::F32, (7, 13)) },
        ];
        cases.extend(of_kind);
        if kind.first() == kind {
            cases.push(Case { family: Family::Nonfinite, ..of(first, DType::F32, (11, 13)) });
        }
        let family = Family::OF_FLOATS[i % Family::OF_FLOATS.len()];
        cases.extend(one(&mut dice, 1 << 12, i, |case| Case { kind, norm, family, ..case }));
        let family = if norm == Norm::Rms { Family::Large } else { Family::Loguni };
        cases.push(Case { family, ..of(first, DType::F16, (3, 129)) });
    }
    cases.extend(determinism(&[(65, 33)]));
    cases.into_iter().map(Case::normalized).filter(is_good).collect()
}

/// The cases of the core profile.
fn core() -> Vec<Case> {
    let mut dice = Dice { state: 72 };
    let mut cases = Vec::new();
    for (i, (kind, norm)) in with_norms(&KINDS).enumerate() {
        for (j, &family) in Family::OF_FLOATS.iter().enumerate() {
            if (i + j) % 3 == 0 {
                cases.extend(one(&mut dice, 1 << 13, i + j, |case| Case { kind, norm, family, ..case }));
            }
            if (i + j) % 2 == 0 {
                continue;
            }
            let (activation, dtype) = (Activation::ALL[(i / 2 + j) % 2], DType::ALL[(i + j) % 3]);
            let present = [USUAL, BIASED, ALL][(i + j) % 3];
            cases.push(Case {
                family,
                present,
                quant: quantized::at(j),
                ..plain(kind, norm, activation, dtype, (31, 65))
            });
        }
        for (j, dtypes) in DTypes::ALL.into_iter().enumerate() {
            let (rows, cols) = [(3, 7), (5, 45), (2, 1000)][(i + j) % 3];
            let case = plain(kind, norm, Activation::ALL[(i + j) % 2], dtypes.activation, (rows, cols));
            let cast_order = if (i + j) % 2 == 0 { CastOrder::BeforeWeight } else { CastOrder::AtStore };
            let layout = Layout::Mixed((i * 9 + j) as u32);
            let (present, quant) = ([ALL, BIASED][j % 2], quantized::at(i + j));
            cases.push(Case { dtypes, present, quant, cast_order, layout, weight_offset: 0.3, ..case });
        }
        // Heads, hidden sizes, rows longer than a chip can hold, and many rows.
        let sizes = [(300, 64), (129, 128), (70, 256), (9, 4099), (3, 8192), (2, 65_537), (2, 262_147), (4100, 5)];
        for (j, size) in sizes.into_iter().enumerate().filter(|(j, _)| (i / 2 + j) % 2 == 0) {
            let case = plain(kind, norm, Activation::ALL[(i + j) % 2], DType::ALL[(i / 2 + j) % 3], size);
            let present = [USUAL, BIASED, TensorSet::of(&[Tensor::Dgate])][(i + j) % 3];
            cases.push(Case { present, quant: quantized::at(i + j), layout: alternate(i + j), ..case });
        }
        for (j, (rows, group, cols)) in
            [(7, 3, 7), (96, 32, 64), (9, 5, 4099)].into_iter().enumerate().skip(i % 3).take(1)
        {
            let layout = Layout::Grouped { rows: group, seed: (i + j) as u32 };
            let case = plain(kind, norm, Activation::ALL[j % 2], DType::ALL[(i + j) % 3], (rows, cols));
            cases.push(Case { present: ALL, quant: quantized::at(j), layout, ..case });
        }
        cases.push(plain(kind, norm, Activation::Silu, DType::ALL[i % 3], (0, 33)));
        cases.push(plain(kind, norm, Activation::ALL[i / 2 % 2], DType::Bf16, (1025, 4099)));
    }
    cases.extend(determinism(&[(1, 1), (257, 33), (600, 7)]));
    cases.into_iter().map(Case::normalized).filter(is_good).collect()
}

fn determinism(shapes: &[(usize, usize)]) -> Vec<Case> {
    let kinds = [
        Kind::GATE_AFTER_END_TO_END,
        Kind::FORWARD_GATE_AFTER_IN_PLACE,
        Kind::GATE_BEFORE_END_TO_END,
        Kind::FORWARD_GATE_BEFORE_IN_PLACE,
    ];
    let mut cases = Vec::new();
    let calls: Vec<_> = with_norms(&kinds).enumerate().collect();
    for ((i, &size), (j, (kind, norm))) in each(shapes.iter().enumerate(), calls) {
        let plain = plain(kind, norm, Activation::ALL[(i + j) % 2], DType::ALL[(i + j / 2) % 3], size);
        let (trial, layout) = (Trial::Determinism { repeats: 3 }, Layout::Mixed(size.0 as u32));
        cases.push(Case { trial, present: ALL, layout, ..plain });
    }
    cases
}

/// Cases at the row lengths, row counts and shapes at which a backend's plan changes, in every
/// dtype. Kind, activation, layout, dtypes and tensors are drawn.
fn breakpoints(sizes: &[(usize, usize)]) -> Vec<Case> {
    let kinds = CALLS.iter().map(|(kind, _)| *kind).collect::<Vec<_>>();
    let mut cases = Vec::new();
    for ((i, &size), (j, dtype)) in each(sizes.iter().enumerate(), DType::ALL.into_iter().enumerate()) {
        let drawn = splitmix((3 * i + j) as u64 ^ 0x6a7e);
        let pick = |place: u32, count: usize| index_of(drawn >> place, count);
        let layout = if pick(0, 2) == 0 { Layout::DENSE } else { Layout::Mixed((i + j) as u32) };
        let dtypes = DTypes::uniform(dtype).widened(pick(1, 2) == 0, pick(2, 2) == 0);
        let activation = Activation::ALL[pick(3, 2)];
        let cast_order = if pick(4, 2) == 0 { CastOrder::AtStore } else { CastOrder::BeforeWeight };
        let plain = plain(kinds[pick(8, kinds.len())], Norm::USUAL[(i + j) % 2], activation, dtype, size);
        cases.push(Case { layout, dtypes, cast_order, present: [USUAL, BIASED, ALL][pick(16, 3)], ..plain });
    }
    cases.into_iter().map(Case::normalized).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    use crate::Arithmetic;
    use crate::finding::Status;
    use crate::run::calls::Context;
    use crate::run::execute::execute_case;
    use crate::selftest::simulate::SimulatedBackend;

    /// The correct kernel passes drawn cases, which read back.
    #[test]
    fn drawn_cases_pass() {
        let context = Context { device: &SimulatedBackend::new(None), arithmetic: &Arithmetic::IEEE };
        for case in drawn(5, 150, draw) {
            assert_eq!(case.to_string().parse(), Ok(case));
            assert_eq!(execute_case(context, &case).status, Status::Pass, "{case}");
        }
    }

    /// The core list has every kind, norm, dtype, activation and cast order, and each optional
    /// tensor both present and missing.
    #[test]
    fn core_has_every_form_with_and_without_each_tensor() {
        let cases = core();
        let of = |case: &Case| (case.kind.name(), case.norm, case.dtypes.activation, case.activation.name());
        assert_eq!(cases.iter().map(of).collect::<HashSet<_>>().len(), KINDS.len() * 2 * 3 * 2);
        for kind in KINDS.into_iter().filter(|kind| kind.has_forward()) {
            let of_kind = cases.iter().filter(|case| case.kind == kind);
            assert!(of_kind.clone().any(|case| case.cast_order == CastOrder::BeforeWeight), "{kind:?}");
            assert!(of_kind.clone().any(|case| case.cast_order == CastOrder::AtStore), "{kind:?}");
        }
        for tensor in EVERY.without(Tensor::Dresidual).iter() {
            let with = |is_there| cases.iter().filter(|case| case.present.has(tensor) == is_there).count();
            assert!(with(true) > 20 && with(false) > 20, "{tensor}: {} and {}", with(true), with(false));
        }
        assert!((500..1000).contains(&cases.len()), "{}", cases.len());
    }
}
