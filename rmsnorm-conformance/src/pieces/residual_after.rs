//! A residual that is added after the norm: math.md, equation (13).

use rmsnorm_spec::{CastOrder, DType, DTypes, Norm, ResidualPlacement, Tensor, TensorSet};

use super::math::{
    ALL_PRESENT, Arithmetic, Bug, BugList, Call, Case, Dice, Expected, Family, ForwardRow, Kind, Layout, Lists, Misuse,
    NEXT, NormKernel, OPTIONAL, PieceMath, Refusal, Tensors, Trial, alternate, bugs, drawn, each, is_meaningful,
    presence, round, with_norms,
};
use crate::case::dice::index_of;
use crate::testing::splitmix;

bugs! {
    /// The bugs of a residual that is added after the norm.
    SumBug:
    WithoutNorm "sum_without_norm" BOTH AFTER "residual_out is the unchanged residual";
    WithoutResidual "sum_without_residual" BOTH AFTER "residual_out is the norm alone";
    OfX "sum_of_x" BOTH AFTER "x is added to the norm instead of the residual";
    BeforeNorm "sum_before_norm" BOTH AFTER "the sum of x and the residual is normalized instead of x";
    OfRounded "sum_of_rounded" BOTH AFTER "the norm is rounded to 16 bits before it is added";
    WithoutBias "sum_without_bias" BOTH AFTER "the bias is not in the sum";
    BiasTwice "sum_bias_twice" BOTH AFTER "the bias is in the sum twice";
}

/// The piece.
pub(crate) struct ResidualAfter;

impl PieceMath for ResidualAfter {
    const BUGS: &'static [Bug] = SumBug::BUGS;
    const LISTS: Lists =
        Lists { smoke, core, drawn: |seed| drawn(seed ^ 0xaf7e, 2000, draw), breakpoints, calls: CALLS };
    const MISUSE: &'static [Misuse] = &[
        ("no_residual", Refusal::Missing("residual"), |call| call.lose(Tensor::Residual)),
        ("no_residual_out", Refusal::Missing("residual_out"), |call| call.lose(Tensor::ResidualOut)),
        ("next_norm_without_y", Refusal::Unexpected("next_weight"), |call| call.lose(Tensor::Y)),
        ("next_mean_for_rms_norm", Refusal::Unexpected("next_mean"), |call| {
            call.lose(Tensor::Mean);
            call.spec.norm = Norm::Rms;
        }),
        ("next_norm_of_a_sum_before", Refusal::Unexpected("next_weight"), |call| {
            call.spec.residual_placement = ResidualPlacement::Before;
        }),
    ];

    fn forward(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [ForwardRow]) {
        let mut kernel = NormKernel::first(call, tensors);
        for (index, row) in rows.iter_mut().enumerate() {
            // Validation guarantees that there is a residual.
            let Some(addend) = tensors.row(Tensor::Residual, index) else { return };
            if call.has(SumBug::BeforeNorm) {
                let h: Vec<f32> = row.x.iter().zip(&addend).map(|(x, addend)| x + addend).collect();
                row.result = kernel.normalize(index, &h);
            }
            row.h = sum(call, &row.result.y, (&row.x, &addend), kernel.bias.as_deref());
            row.sum = row.h.iter().map(|&sum| round(sum, call.problem.dtypes.residual)).collect();
        }
    }

    /// The range after the residual is added in f32. There is no bound if an end exceeds half of
    /// the largest f32, because the sum may overflow.
    fn bound(value: Expected, operand: f64, arithmetic: &Arithmetic) -> Expected {
        let reference = value.reference + operand;
        let largest = value.low.abs().max(value.high.abs());
        if value.is_unbounded() || (value.reference.is_finite() && largest > f64::from(f32::MAX) / 2.0) {
            return Expected::unbounded(reference);
        }
        // Either addend may be flushed to zero.
        let flushed = arithmetic.flush_loss(2.0);
        let sum = Expected { reference, low: value.low + operand - flushed, high: value.high + operand + flushed };
        if reference.is_finite() { sum.rounded(arithmetic.unit_roundoff) } else { sum }
    }
}

/// The sum with the residual, before its rounding.
fn sum(call: &Call, norm: &[f32], (x, residual): (&[f32], &[f32]), bias: Option<&[f32]>) -> Vec<f32> {
    let bias = |col: usize| bias.map_or(0.0, |bias| bias[col]);
    let of = |(col, &norm): (usize, &f32)| match call.bug() {
        Some(SumBug::WithoutNorm) => residual[col],
        Some(SumBug::WithoutResidual) => norm,
        Some(SumBug::OfX) => x[col] + norm,
        Some(SumBug::OfRounded) => residual[col] + round(norm, call.low()),
        Some(SumBug::WithoutBias) => residual[col] + (norm - bias(col)),
        Some(SumBug::BiasTwice) => residual[col] + (norm + bias(col)),
        Some(_) | None => residual[col] + norm,
    };
    norm.iter().enumerate().map(of).collect()
}

fn draw(dice: &mut Dice, turn: usize) -> Option<Case> {
    let (kind, norm) = (dice.pick(&KINDS), dice.pick(&Norm::USUAL));
    one(dice, 1 << 13, |case| Case { kind, norm, ..case }, turn)
}

/// The two forms of the call, and both norms with their gradients.
const KINDS: [Kind; 3] = [Kind::FORWARD_AFTER, Kind::FORWARD_AFTER_IN_PLACE, Kind::AFTER_END_TO_END];

/// All optional tensors of a call without a next norm.
const ALONE: TensorSet = ALL_PRESENT;

/// All optional tensors of a call with a next norm.
const PAIRED: TensorSet = OPTIONAL.union(NEXT).with(Tensor::Y);

/// The tensors of Gemma's layers in training.
const USUAL: TensorSet = NEXT.without(Tensor::NextBias).union(TensorSet::of(&[
    Tensor::Weight,
    Tensor::Rstd,
    Tensor::Mean,
    Tensor::Y,
    Tensor::Dweight,
]));

/// The kinds that are a single call, with all optional tensors.
const CALLS: &[(Kind, TensorSet)] = &[(Kind::FORWARD_AFTER, PAIRED), (Kind::FORWARD_AFTER_IN_PLACE, PAIRED)];

/// Whether a case can prove something: [`is_meaningful`], and the sum has a variance.
fn is_good(case: &Case) -> bool {
    let is_tiny = case.eps < 1e-6;
    let of_exact = case.family == Family::Exact;
    // With few columns a sum may have almost no variance. The result of layer norm has mean zero,
    // and so has the sum without a bias and with a zero residual (`Family::Subnormal`).
    let is_flat = is_tiny && case.cols < 64 || case.cols < 3 && case.norm == Norm::Layer;
    let has_no_mean = case.norm == Norm::Layer && case.family == Family::Subnormal && !case.present.has(Tensor::Bias);
    let may_cancel = case.present.has(Tensor::Y) && (is_flat || has_no_mean);
    is_meaningful(case) && !may_cancel && !(of_exact && is_tiny)
}

/// Every kind, norm and family with the other axes drawn, and every kind, norm and dtype.
fn smoke() -> Vec<Case> {
    let mut dice = Dice { state: 21 };
    let mut cases = Vec::new();
    for (i, (kind, norm)) in with_norms(&KINDS).enumerate() {
        for (j, &family) in Family::OF_FLOATS.iter().enumerate().filter(|(j, _)| (i + j) % 3 == 0) {
            cases.extend(one(&mut dice, 1 << 12, |case| Case { kind, norm, family, ..case }, j));
        }
        for (rows, cols) in [(0, 33), (2, 17_389)] {
            cases.push(Case { present: USUAL, ..Case::plain(kind, norm, DType::ALL[i % 3], rows, cols) });
        }
        cases.extend(DType::ALL.map(|dtype| Case { present: USUAL, ..Case::plain(kind, norm, dtype, 3, 129) }));
    }
    cases.extend(determinism(&[(65, 33)]));
    cases
}

/// The cases of the core profile.
fn core() -> Vec<Case> {
    let mut dice = Dice { state: 22 };
    let mut cases = presences();
    cases.extend(mixes(&[(3, 7), (5, 45), (2, 1000)]));
    for (i, (kind, norm)) in with_norms(&KINDS).enumerate() {
        for (j, &family) in Family::OF_FLOATS.iter().enumerate() {
            cases.extend(one(&mut dice, 1 << 13, |case| Case { kind, norm, family, ..case }, i + j));
            let dtype = DType::ALL[(i + j) % 3];
            let present = if j % 3 == 0 { ALONE } else { USUAL };
            cases.push(Case { family, present, ..Case::plain(kind, norm, dtype, 31, 65) });
        }
        for (j, size) in sizes().enumerate().filter(|(j, _)| (i + j) % 2 == 0) {
            let drawn = |dice: &mut Dice| Case { kind, norm, ..dice.case_of_size(size) };
            cases.extend(with_tensors(&mut dice, j, drawn));
        }
        for (j, (rows, group, cols)) in
            [(7, 3, 7), (96, 32, 64), (65, 4, 129), (70, 9, 1000), (9, 5, 4099)].into_iter().enumerate()
        {
            let layout = Layout::Grouped { rows: group, seed: (i + j) as u32 };
            let present = if j % 2 == 0 { USUAL } else { PAIRED };
            let dtypes = DTypes::uniform(DType::ALL[(i + j) % 3]).widened(j % 2 == 0, i % 2 == 0);
            let plain = Case::plain(kind, norm, dtypes.activation, rows, cols);
            cases.push(Case { present, dtypes, layout, weight_offset: 1.0, ..plain });
        }
        // A matrix larger than the caches, and rows longer than a chip can hold.
        let (dtype, mixed) = (DType::ALL[(i + 1) % 3], Layout::Mixed(i as u32));
        for (present, layout, rows, cols) in
            [(USUAL, Layout::DENSE, 1025, 4099), (ALONE, mixed, 3, 262_147), (PAIRED, mixed, 2, 262_149)]
        {
            cases.push(Case { present, layout, ..Case::plain(kind, norm, dtype, rows, cols) });
        }
    }
    cases.extend(determinism(&[(1, 1), (257, 33), (300, 129), (600, 7)]));
    cases.retain(is_good);
    cases
}

/// A drawn case, after `change`, that can prove something.
fn one(dice: &mut Dice, most: usize, change: impl Fn(Case) -> Case, turn: usize) -> Option<Case> {
    (0..64).find_map(|_| with_tensors(dice, turn, |dice| change(dice.case(most))))
}

/// A case that has tensors of a next norm three times in four.
fn with_tensors(dice: &mut Dice, turn: usize, case: impl Fn(&mut Dice) -> Case) -> Option<Case> {
    let case = case(dice);
    let next: TensorSet = NEXT.iter().filter(|_| !dice.one_in(3)).collect();
    let present = if turn.is_multiple_of(4) { case.present } else { case.present.union(next).with(Tensor::Y) };
    Some(Case { present, ..case }.normalized()).filter(is_good)
}

fn sizes() -> impl Iterator<Item = (usize, usize)> {
    let cols = [
        1, 2, 3, 8, 12, 17, 33, 64, 129, 252, 257, 512, 1000, 1024, 1284, 2880, 4096, 4099, 5120, 8192, 16_385, 65_537,
        131_072,
    ];
    let rows = [0, 1, 2, 31, 65, 257, 777, 4100, 65_537];
    let of_cols = cols.into_iter().map(|cols| (if cols > 1 << 14 { 1 } else { 3 }, cols));
    of_cols.chain(rows.into_iter().map(|rows| (rows, if rows > 20_000 { 3 } else { 40 })))
}

/// Every set of tensors of a sum without a next norm, and every fifth set of a sum with a next
/// norm.
fn presences() -> Vec<Case> {
    const COUNTED: [Tensor; 4] = [Tensor::Weight, Tensor::Bias, Tensor::Mean, Tensor::Rstd];
    let paired: Vec<Tensor> = COUNTED.into_iter().chain(NEXT.iter()).collect();
    let mut cases: Vec<Case> = Vec::new();
    for ((kind, _), norm) in each(CALLS.iter().copied(), Norm::USUAL) {
        let plain = Case::plain(kind, norm, DType::F32, 3, 37);
        let with_y = presence::sets(&paired).map(|present| present.with(Tensor::Y)).step_by(5);
        let sets = presence::sets(&COUNTED).chain(with_y);
        let mut of_kind: Vec<Case> = sets.map(|present| Case { present, ..plain }.normalized()).collect();
        of_kind.dedup_by_key(|case| case.present);
        cases.extend(of_kind);
    }
    let varied = |(i, case): (usize, Case)| Case {
        cols: [37, 40, 44, 131][i % 4],
        dtypes: DTypes::uniform(DType::ALL[i % 3]),
        weight_offset: [0.0, 1.0, -0.5, 0.3][i / 2 % 4],
        cast_order: if i % 5 < 3 { CastOrder::AtStore } else { CastOrder::BeforeWeight },
        layout: alternate(i),
        ..case
    };
    cases.into_iter().enumerate().map(varied).collect()
}

/// Every mix of dtypes, in rows that end within a register, with an offset that 16 bits cannot
/// represent.
fn mixes(shapes: &[(usize, usize)]) -> Vec<Case> {
    let mut cases = Vec::new();
    let kinds = with_norms(&KINDS).enumerate();
    for ((i, (kind, norm)), (j, dtypes)) in each(kinds, DTypes::ALL.into_iter().enumerate()) {
        let (rows, cols) = shapes[(i + j) % shapes.len()];
        let layout = Layout::Mixed((i * 9 + j) as u32);
        let plain = Case { dtypes, layout, ..Case::plain(kind, norm, dtypes.activation, rows, cols) };
        let cast_order = if (i + j) % 3 == 0 { CastOrder::BeforeWeight } else { CastOrder::AtStore };
        cases.extend([PAIRED, ALONE].map(|present| Case { present, weight_offset: 0.3, cast_order, ..plain }));
    }
    cases
}

fn determinism(shapes: &[(usize, usize)]) -> Vec<Case> {
    let mut cases = Vec::new();
    let calls: Vec<_> = each(CALLS.iter().copied(), Norm::USUAL).enumerate().collect();
    for ((i, &(rows, cols)), (j, ((kind, all), norm))) in each(shapes.iter().enumerate(), calls) {
        let plain = Case::plain(kind, norm, DType::ALL[(i + j) % 3], rows, cols);
        let present = if (i + j) % 3 == 0 { ALONE } else { all };
        let layout = Layout::Mixed(rows as u32 % 16);
        cases.push(Case { trial: Trial::Determinism { repeats: 3 }, present, layout, ..plain });
    }
    cases
}

/// Cases at the row lengths, row counts and shapes at which a backend's plan changes, in every
/// dtype, for both norms alternately. Form, layout, dtypes and tensors are drawn.
fn breakpoints(sizes: &[(usize, usize)]) -> Vec<Case> {
    let presents = [USUAL, ALONE, PAIRED, USUAL.without(Tensor::Y)];
    let mut cases = Vec::new();
    for ((i, &(rows, cols)), (j, dtype)) in each(sizes.iter().enumerate(), DType::ALL.into_iter().enumerate()) {
        let drawn = splitmix((3 * i + j) as u64);
        let bit = |place: u32| drawn >> place & 1 == 1;
        let kind = if bit(0) { Kind::FORWARD_AFTER } else { Kind::FORWARD_AFTER_IN_PLACE };
        let layout = if bit(1) { Layout::DENSE } else { Layout::Mixed((i + j) as u32) };
        let dtypes = DTypes::uniform(dtype).widened(bit(2), bit(3));
        let present = presents[index_of(drawn >> 4, presents.len())];
        let plain = Case::plain(kind, Norm::USUAL[(i + j) % 2], dtype, rows, cols);
        cases.push(Case { layout, dtypes, present, ..plain });
    }
    cases.into_iter().map(Case::normalized).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// The list has both forms of every kind, norm and dtype, and each tensor both present and
    /// missing.
    #[test]
    fn core_has_every_form_with_and_without_each_tensor() {
        let cases: Vec<Case> = core().into_iter().map(Case::normalized).collect();
        let of = |case: &Case| (case.kind.name(), case.norm, case.dtypes.activation, case.present.has(Tensor::Y));
        let seen: HashSet<_> = cases.iter().map(of).collect();
        assert_eq!(seen.len(), KINDS.len() * Norm::USUAL.len() * DType::ALL.len() * 2);
        for tensor in NEXT.iter().chain([Tensor::Weight, Tensor::Bias, Tensor::Mean, Tensor::Rstd]) {
            let with = |is_there| cases.iter().filter(|case| case.present.has(tensor) == is_there).count();
            assert!(with(true) > 40 && with(false) > 40, "{tensor}: {} and {}", with(true), with(false));
        }
        for case in &cases {
            assert!(case.present.has(Tensor::Residual) && case.present.has(Tensor::ResidualOut), "{case}");
            assert!(case.present.has(Tensor::Y) || case.present.intersection(NEXT).is_empty(), "{case}");
            assert_eq!(case.to_string().parse(), Ok(*case));
        }
        assert!((300..800).contains(&cases.len()), "{}", cases.len());
    }
}
