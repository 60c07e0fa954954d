//! Cases of the cast orders that round something other than `x_hat` and `y`: math.md, section 3.

use rmsnorm_spec::{Activation, CastOrder, DType, DTypes, Norm, Tensor, TensorSet};

use crate::case::dice::{Dice, Lists, drawn, is_meaningful, with_norms};
use crate::case::presence::{ALL_PRESENT, NEXT};
use crate::case::{Case, Family, Kind, Layout, Trial, quantized};
use crate::selftest::planted::bugs;

bugs! {
    /// The bugs of these cast orders.
    CastOrderBug:
    RstdUnrounded "rstd_unrounded" BOTH RSTD_FIRST "rstd_first does not round rstd";
    XHatUnrounded "x_hat_unrounded" BOTH RSTD_FIRST "rstd_first does not round x_hat";
    RstdStored "rounded_rstd_stored" BOTH RSTD_FIRST "the saved rstd is the rounded one";
}

bugs! {
    /// The bugs of a weight before the norm.
    WeightBug:
    After "weight_after" BOTH WEIGHT_FIRST "the weight multiplies the normalized row";
    HUnrounded "weighted_h_unrounded" BOTH WEIGHT_FIRST "x times the weight is not rounded";
    NormalizesX "backward_normalizes_unweighted_x" BOTH WEIGHT_FIRST_BACKWARD "backward normalizes x without the weight";
    AgainUnrounded "backward_h_unrounded" BOTH WEIGHT_FIRST_BACKWARD "backward does not round x times the weight";
    DweightOfDy "dweight_of_dy" BOTH WEIGHT_FIRST_BACKWARD "dweight is made of dy and x_hat";
    DweightOfH "dweight_of_h" BOTH WEIGHT_FIRST_BACKWARD "dweight is made of x times the weight";
    DxOfH "dx_without_weight" BOTH WEIGHT_FIRST_BACKWARD "dx is the gradient of x times the weight";
}

/// The kinds of cases that round rstd: each that has forward. Backward does not depend on it.
const RSTD_FIRST: [Kind; 15] = [
    Kind::FORWARD,
    Kind::FORWARD_IN_PLACE,
    Kind::END_TO_END,
    Kind::QUANTIZED_FORWARD,
    Kind::FORWARD_AFTER,
    Kind::FORWARD_AFTER_IN_PLACE,
    Kind::AFTER_END_TO_END,
    Kind::FORWARD_PARTS,
    Kind::FORWARD_GATE_AFTER,
    Kind::FORWARD_GATE_AFTER_IN_PLACE,
    Kind::GATE_AFTER_END_TO_END,
    Kind::QUANTIZED_FORWARD_GATE_AFTER,
    Kind::FORWARD_GATE_BEFORE,
    Kind::FORWARD_GATE_BEFORE_IN_PLACE,
    Kind::QUANTIZED_FORWARD_GATE_BEFORE,
];

/// The kinds of cases with a weight before the norm, which backward depends on.
const WEIGHT_FIRST: [Kind; 12] = [
    Kind::FORWARD,
    Kind::FORWARD_IN_PLACE,
    Kind::END_TO_END,
    Kind::BACKWARD,
    Kind::BACKWARD_SUMS,
    Kind::QUANTIZED_FORWARD,
    Kind::FORWARD_GATE_AFTER,
    Kind::FORWARD_GATE_AFTER_IN_PLACE,
    Kind::GATE_AFTER_END_TO_END,
    Kind::BACKWARD_GATE_AFTER,
    Kind::BACKWARD_GATE_AFTER_SUMS,
    Kind::QUANTIZED_FORWARD_GATE_AFTER,
];

/// The kinds of a cast order.
const ORDERS: [(CastOrder, &[Kind]); 2] =
    [(CastOrder::RstdFirst, &RSTD_FIRST), (CastOrder::WeightFirst, &WEIGHT_FIRST)];

/// Row lengths: one element, less than a vector, vectors, and rows of one warp, a block and
/// several.
const COLS: [usize; 12] = [1, 3, 8, 31, 64, 128, 129, 256, 1000, 4096, 4097, 17_920];

/// Numbers of groups of columns and columns of a group.
const GROUPS: [(usize, usize); 4] = [(2, 64), (3, 33), (4, 128), (8, 40)];

/// The usual tensors in training.
const USUAL: TensorSet =
    TensorSet::of(&[Tensor::Weight, Tensor::Mean, Tensor::Rstd, Tensor::Dweight, Tensor::Dbias, Tensor::Dgate]);
/// Every tensor.
const EVERY: TensorSet = ALL_PRESENT.union(NEXT).with(Tensor::Dgate).with(Tensor::Y);

/// The cases of these cast orders.
pub(crate) const LISTS: Lists = Lists { smoke, core, drawn: |seed| drawn(seed ^ 0xca57, 800, draw), ..Lists::NONE };

/// Whether a case can prove something. A group is as short as a row of its columns.
fn is_good(case: &Case) -> bool {
    let of_group = Case { cols: case.width(), ..*case };
    let is_tainted = case.family == Family::Nonfinite && case.kind.first() != case.kind;
    let is_flat = case.groups > 1 && (case.width() < 3 || case.eps < 1e-6);
    // dy is constant, too, so that dx of layer norm consists of rounding errors.
    let is_constant = case.family == Family::Const && case.cast_order.is_weight_first() && case.kind.has_backward();
    is_meaningful(&of_group) && case.family != Family::Codes && !is_tainted && !is_flat && !is_constant
}

fn plain(kind: Kind, norm: Norm, cast_order: CastOrder, dtype: DType, (rows, cols): (usize, usize)) -> Case {
    Case { cast_order, present: USUAL, quant: quantized::at(cols), ..Case::plain(kind, norm, dtype, rows, cols) }
}

fn draw(dice: &mut Dice, turn: usize) -> Option<Case> {
    let (cast_order, kinds) = dice.pick(&ORDERS);
    let (kind, norm) = (dice.pick(kinds), dice.pick(&Norm::USUAL));
    one(dice, turn, |case| Case { kind, norm, cast_order, ..case })
}

/// A drawn case, after `change`, that can prove something: one in four has groups of columns.
fn one(dice: &mut Dice, turn: usize, change: impl Fn(Case) -> Case) -> Option<Case> {
    let (activation, groups) = (dice.pick(&Activation::ALL), dice.pick(&GROUPS));
    let more = [TensorSet::NONE, NEXT.with(Tensor::Y)][turn % 2].with(Tensor::Dgate);
    let draw = |dice: &mut Dice| {
        let case = match turn % 4 {
            0 => Case { groups: groups.0, ..dice.case_of_size((5, groups.0 * groups.1)) },
            _ => dice.case(1 << 13),
        };
        change(Case { activation, present: case.present.union(more), quant: quantized::at(turn), ..case }).normalized()
    };
    (0..64).map(|_| draw(dice)).find(is_good)
}

/// Every kind and norm of each order, every row length, and weights of both dtypes and none.
fn smoke() -> Vec<Case> {
    let mut cases = Vec::new();
    for (cast_order, kinds) in ORDERS {
        for (i, (kind, norm)) in with_norms(kinds).enumerate() {
            let dtype = [DType::Bf16, DType::F16][i / 2 % 2];
            let first = plain(kind, norm, cast_order, dtype, (9, 129));
            let layout = Layout::Uniform { pad: 3, offset: 1 };
            let groups = Case { groups: 3, layout, present: EVERY, ..plain(kind, norm, cast_order, dtype, (5, 99)) };
            cases.extend([Case { activation: Activation::ALL[i % 2], ..first }, groups]);
        }
        for (i, cols) in COLS.into_iter().chain([65_537]).enumerate() {
            let norm = if cols < 8 { Norm::Rms } else { Norm::USUAL[i % 2] };
            let case = plain(kinds[0], norm, cast_order, [DType::F16, DType::Bf16][i / 2 % 2], (3, cols));
            cases.push(Case { dtypes: case.dtypes.widened(i % 3 == 0, false), ..with_tensors(case, i) });
        }
        let wide = plain(kinds[0], Norm::Layer, cast_order, DType::F32, (5, 65));
        cases.push(Case { present: EVERY, weight_offset: 0.3, ..wide });
        cases.extend(determinism(cast_order, kinds, (65, 33)));
    }
    cases.into_iter().map(Case::normalized).filter(is_good).collect()
}

/// With and without a weight (if the order allows it), a bias and an offset, in turn.
fn with_tensors(case: Case, turn: usize) -> Case {
    let present = [USUAL, USUAL.with(Tensor::Bias), USUAL.without(Tensor::Weight), EVERY][turn % 4];
    Case { present, weight_offset: [0.0, 1.0, 0.3][turn % 3], ..case }
}

/// The cases of the core profile.
fn core() -> Vec<Case> {
    let mut dice = Dice { state: 91 };
    let mut cases = Vec::new();
    for (cast_order, kinds) in ORDERS {
        for (i, (kind, norm)) in with_norms(kinds).enumerate() {
            for (j, &family) in Family::OF_FLOATS.iter().enumerate().filter(|(j, _)| (i + j) % 4 == 0) {
                cases.extend(one(&mut dice, i + j, |case| Case { kind, norm, family, cast_order, ..case }));
            }
            let dtypes = DTypes::uniform([DType::F16, DType::Bf16][i % 2]).widened(i / 2 % 2 == 0, true);
            let layout = Layout::Grouped { rows: 4, seed: i as u32 };
            let wide = plain(kind, norm, cast_order, dtypes.activation, (9, 45));
            cases.push(Case { dtypes, layout, present: EVERY, weight_offset: 1.0, ..wide });
            cases.push(plain(kind, norm, cast_order, [DType::F16, DType::Bf16][i % 2], (0, 33)));
        }
        for (i, cols) in COLS.into_iter().chain([65_537, 262_147]).enumerate() {
            for (j, dtype) in [DType::F16, DType::Bf16].into_iter().enumerate() {
                let case = plain(kinds[(i + j) % 4], Norm::USUAL[(i / 2 + j) % 2], cast_order, dtype, (4, cols));
                cases.push(Case { layout: Layout::Mixed((i + j) as u32), ..with_tensors(case, i + j) });
            }
        }
        cases.extend([(257, 33), (600, 7)].into_iter().flat_map(|size| determinism(cast_order, kinds, size)));
    }
    cases.into_iter().map(Case::normalized).filter(is_good).collect()
}

fn determinism(cast_order: CastOrder, kinds: &[Kind], size: (usize, usize)) -> Vec<Case> {
    let trial = Trial::Determinism { repeats: 3 };
    let case = |(i, (kind, norm))| Case { trial, ..plain(kind, norm, cast_order, DType::ALL[1 + i % 2], size) };
    with_norms(kinds).filter(|(kind, _)| kind.first() != *kind).enumerate().map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::Arithmetic;
    use crate::finding::Status;
    use crate::run::calls::Context;
    use crate::run::execute::execute_case;
    use crate::selftest::simulate::SimulatedBackend;

    /// The correct kernel passes drawn cases and those of the lists, which read back.
    #[test]
    fn cases_pass() {
        let context = Context { device: &SimulatedBackend::new(None), arithmetic: &Arithmetic::IEEE };
        let cases = [drawn(5, 200, draw), smoke()].concat();
        for case in &cases {
            assert_eq!(case.to_string().parse(), Ok(*case));
            assert_eq!(execute_case(context, case).status, Status::Pass, "{case}");
        }
        for (cast_order, _) in ORDERS {
            let of_order = |cases: &[Case]| cases.iter().filter(|case| case.cast_order == cast_order).count();
            assert!(of_order(&cases) > 50 && of_order(&core()) > 120, "{cast_order:?}");
        }
    }
}
