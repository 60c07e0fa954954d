//! Cases whose y has another dtype than their x: math.md, section 3.
//!
//! Forward normalizes the residual stream alone, backward stores the gradient in its dtype. The
//! data of x are [`Tensor::X`] in both directions.

use rmsnorm_spec::{Activation, CastOrder, DType, DTypes, Norm, Tensor, TensorSet};

use crate::case::dice::{Dice, Lists, drawn, each, index_of, is_meaningful, with_norms};
use crate::case::presence::ALL_PRESENT;
use crate::case::{Case, Family, Kind, Layout, Trial};
use crate::selftest::planted::bugs;
use crate::testing::splitmix;

bugs! {
    /// The bugs of casts.
    CastBug:
    YOfX "cast_y_of_x" BOTH FORWARD_CAST "y is rounded to the dtype of x before its own";
    XOfY "cast_x_of_y" BOTH FORWARD_CAST "x is rounded to the dtype of y before the statistics";
    DxOfDy "cast_dx_of_dy" BOTH BACKWARD_CAST "the gradient of x is rounded to the dtype of dy first";
}

/// The kinds that may have another dtype of y: nothing is added, overwritten or quantized.
pub(crate) const KINDS: [Kind; 8] = [
    Kind::FORWARD,
    Kind::BACKWARD,
    Kind::END_TO_END,
    Kind::BACKWARD_SUMS,
    Kind::FORWARD_GATE_AFTER,
    Kind::BACKWARD_GATE_AFTER,
    Kind::GATE_AFTER_END_TO_END,
    Kind::BACKWARD_GATE_AFTER_SUMS,
];

/// Row lengths: around vectors, warps and tiles of both widths; the last is streamed.
const COLS: [usize; 13] = [1, 3, 8, 31, 64, 128, 129, 256, 1000, 4096, 4097, 17_920, 262_147];

/// The usual tensors in training.
const USUAL: TensorSet = TensorSet::of(&[Tensor::Weight, Tensor::Mean, Tensor::Rstd, Tensor::Dweight, Tensor::Dgate]);

/// The same with a bias.
const BIASED: TensorSet = USUAL.union(TensorSet::of(&[Tensor::Bias, Tensor::Dbias]));

const ALL: TensorSet = ALL_PRESENT.with(Tensor::Dgate);

/// The cases whose y has another dtype than their x.
pub(crate) const LISTS: Lists =
    Lists { smoke, core, drawn: |seed| drawn(seed ^ 0xca57, 1500, draw), breakpoints, calls: &[] };

/// Whether a case can prove something. Backward cannot be tested with the statistics that forward
/// computed from non-finite rows.
fn is_good(case: &Case) -> bool {
    let is_tainted = case.family == Family::Nonfinite && case.kind.first() != case.kind;
    let of_group = Case { cols: case.width(), ..*case };
    is_meaningful(&of_group) && case.eps >= 1e-6 && !is_tainted && case.casts
}

fn plain(kind: Kind, norm: Norm, dtypes: DTypes, (rows, cols): (usize, usize)) -> Case {
    Case { dtypes, casts: true, present: USUAL, ..Case::plain(kind, norm, dtypes.activation, rows, cols) }
}

fn draw(dice: &mut Dice, turn: usize) -> Option<Case> {
    let (kind, norm, dtypes) = (dice.pick(&KINDS), dice.pick(&Norm::USUAL), dice.pick(&DTypes::CASTS));
    one(dice, 1 << 13, turn, |case| Case { kind, norm, dtypes, ..case })
}

/// A drawn case, after `change`, that can prove something.
fn one(dice: &mut Dice, most: usize, turn: usize, change: impl Fn(Case) -> Case) -> Option<Case> {
    let activation = Activation::ALL[turn % 2];
    let change = |case: Case| {
        let groups = if turn.is_multiple_of(5) && case.cols.is_multiple_of(4) { 4 } else { 1 };
        let present = case.present.set(Tensor::Dgate, !turn.is_multiple_of(3));
        change(Case { casts: true, activation, groups, present, ..case })
    };
    dice.one(most, change, is_good)
}

/// The settings that a list varies from case to case.
fn varied(i: u64, case: Case) -> Case {
    let cast_order = if i.is_multiple_of(3) { CastOrder::BeforeWeight } else { CastOrder::AtStore };
    let layout = match i % 4 {
        0 => Layout::DENSE,
        1 => Layout::Uniform { pad: 8, offset: 0 },
        2 => Layout::Mixed(i as u32),
        _ => Layout::Grouped { rows: 2, seed: i as u32 },
    };
    let present = [USUAL, BIASED, TensorSet::NONE, ALL, USUAL.without(Tensor::Weight)][index_of(i, 5)];
    let weight_offset = [0.0, 1.0, 0.3][index_of(i, 3)];
    Case { cast_order, layout, present, weight_offset, activation: Activation::ALL[index_of(i / 2, 2)], ..case }
}

/// Results of `x` in f32 that f16 cannot hold.
fn overflowing(kind: Kind, norm: Norm) -> Case {
    let dtypes = DTypes::uniform(DType::F16).widened(true, true);
    Case { weight_offset: 4e4, family: Family::Outlier, ..plain(kind, norm, dtypes, (3, 129)) }
}

/// Every kind and norm with each pair of dtypes, and families.
fn smoke() -> Vec<Case> {
    let mut dice = Dice { state: 91 };
    let mut cases = Vec::new();
    for (i, (kind, norm)) in with_norms(&KINDS).enumerate() {
        // Two mixes have their turn in another size.
        for (j, dtypes) in DTypes::CASTS.into_iter().enumerate().filter(|(j, _)| *j != i % 6) {
            let cols = COLS[(5 * i + 3 * j + i / 6) % 9];
            cases.push(varied((5 * i + j) as u64, plain(kind, norm, dtypes, ([3, 5, 9][(i + j) % 3], cols))));
        }
        if kind.first() == kind {
            cases.push(Case { family: Family::Nonfinite, ..plain(kind, norm, DTypes::CASTS[i % 6], (11, 13)) });
        }
        let family = [Family::Large, Family::Loguni, Family::ShiftedHi, Family::Subnormal][i % 4];
        cases.extend(one(&mut dice, 1 << 12, i, |case| Case {
            kind,
            norm,
            family,
            dtypes: DTypes::CASTS[(i + 3) % 6],
            ..case
        }));
        let groups = Case { groups: 4, ..plain(kind, norm, DTypes::CASTS[(i + 4) % 6], (5, 64)) };
        cases.extend((i % 2 == i / 2 % 2).then_some(groups));
    }
    for norm in Norm::USUAL {
        cases.push(overflowing(Kind::FORWARD, norm));
        cases.push(plain(Kind::END_TO_END, norm, DTypes::CASTS[norm as usize], (2, 17_920)));
        cases.push(plain(Kind::END_TO_END, norm, DTypes::CASTS[4 + norm as usize], (2, 4097)));
    }
    cases.into_iter().map(Case::normalized).filter(is_good).collect()
}

/// The cases of the core profile.
fn core() -> Vec<Case> {
    let mut dice = Dice { state: 92 };
    let mut cases = Vec::new();
    for (i, (kind, norm)) in with_norms(&KINDS).enumerate() {
        for (j, cols) in COLS.into_iter().enumerate() {
            let rows = if cols > 10_000 { 2 } else { [3, 9, 33][(i + j) % 3] };
            cases.push(varied((i + j) as u64, plain(kind, norm, DTypes::CASTS[(i + j) % 6], (rows, cols))));
        }
        for (j, &family) in Family::OF_FLOATS.iter().enumerate().filter(|(j, _)| (i + j) % 3 == 0) {
            let dtypes = DTypes::CASTS[(i + j) % 6];
            cases.extend(one(&mut dice, 1 << 13, i + j, |case| Case { kind, norm, family, dtypes, ..case }));
        }
        let groups = Case { groups: 8, ..plain(kind, norm, DTypes::CASTS[(i + 1) % 6], (9, 1024)) };
        cases.push(varied(i as u64, groups));
        cases.push(plain(kind, norm, DTypes::CASTS[i % 6], (0, 33)));
        cases.push(plain(kind, norm, DTypes::CASTS[(i + 2) % 6], (1025, 129)));
        cases.push(overflowing(kind, norm));
    }
    // Beyond the caches, and more rows than one block of partial sums has.
    for (i, norm) in Norm::USUAL.into_iter().enumerate() {
        cases.push(Case { present: ALL, ..plain(Kind::END_TO_END, norm, DTypes::CASTS[2 * i + 1], (1025, 4099)) });
        cases.push(Case { present: BIASED, ..plain(Kind::BACKWARD, norm, DTypes::CASTS[4 + i], (4100, 33)) });
    }
    for ((i, size), (kind, norm)) in
        each([(257, 33), (65, 129)].into_iter().enumerate(), with_norms(&[Kind::END_TO_END]).collect::<Vec<_>>())
    {
        let trial = Trial::Determinism { repeats: 3 };
        cases.push(Case { trial, ..plain(kind, norm, DTypes::CASTS[2 + 2 * i], size) });
    }
    cases.into_iter().map(Case::normalized).filter(is_good).collect()
}

/// A case at each size at which a backend's plan changes. Kind, dtypes and settings are drawn.
fn breakpoints(sizes: &[(usize, usize)]) -> Vec<Case> {
    let case = |(i, &size): (usize, &(usize, usize))| {
        let drawn = splitmix(i as u64 ^ 0xca57);
        let kind = [Kind::FORWARD, Kind::BACKWARD][index_of(drawn, 2)];
        varied(drawn >> 8, plain(kind, Norm::USUAL[i % 2], DTypes::CASTS[i / 2 % 6], size))
    };
    sizes.iter().enumerate().map(case).map(Case::normalized).filter(is_good).collect()
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
        for case in drawn(5, 150, draw).into_iter().chain(smoke().into_iter().filter(|case| case.cols < 5000)) {
            assert_eq!(case.to_string().parse(), Ok(case));
            assert_eq!(execute_case(context, &case).status, Status::Pass, "{case}");
        }
    }

    /// Both lists have every kind and norm with each mix of dtypes.
    #[test]
    fn lists_have_every_form() {
        let of = |case: &Case| (case.kind.name(), case.norm, case.dtypes);
        for (cases, sizes, most) in [(smoke(), 90..160, 96), (core(), 300..420, 96)] {
            assert!(sizes.contains(&cases.len()), "{}", cases.len());
            let forms = cases.iter().map(of).collect::<HashSet<_>>().len();
            assert!(forms > most * 4 / 5, "{forms} of {most}");
            for tensor in [Tensor::Weight, Tensor::Bias, Tensor::Dweight, Tensor::DresidualOut] {
                let with = |is_there| cases.iter().filter(|case| case.present.has(tensor) == is_there).count();
                assert!(with(true) > 5 && with(false) > 5, "{tensor}: {} and {}", with(true), with(false));
            }
        }
    }
}
