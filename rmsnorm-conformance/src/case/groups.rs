//! Cases with groups of columns, each with its own statistics: math.md, section 1.

use rmsnorm_spec::quant::{ScaleKind, ScaleLayout};
use rmsnorm_spec::{Activation, CastOrder, DType, DTypes, Norm, Tensor, TensorSet};

use crate::case::dice::{Dice, Lists, drawn, is_meaningful, with_norms};
use crate::case::presence::{ALL_PRESENT, OF_CODES};
use crate::case::{Case, Family, Kind, Layout, Trial, quantized};
use crate::selftest::planted::bugs;

bugs! {
    /// The bugs of groups of columns.
    GroupBug:
    OfRow "group_of_row" BOTH FORWARD_COLUMNS "the statistics of a group are those of the whole row";
    OfFirst "group_of_first" BOTH FORWARD_COLUMNS "every group has the statistics of the first";
    AffineOfFirst "group_affine_of_first" BOTH WITH_COLUMNS "every group has the weight and the bias of the first";
    GivenOfFirst "group_given_of_first" BOTH BACKWARD_COLUMNS "backward uses the mean and rstd of the first group";
    DividedByCols "group_divided_by_cols" BOTH BACKWARD_COLUMNS "the averages of a group are divided by the columns of the row";
}

/// The kinds of the cases: all but those with a residual after the norm, which have no groups, and
/// those with parts.
const KINDS: [Kind; 18] = [
    Kind::FORWARD,
    Kind::FORWARD_IN_PLACE,
    Kind::BACKWARD,
    Kind::END_TO_END,
    Kind::BACKWARD_SUMS,
    Kind::QUANTIZED_FORWARD,
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

/// Numbers of groups: a few of Mamba2's, and some that are no powers of two.
const COUNTS: [usize; 6] = [2, 3, 4, 5, 8, 16];

/// Columns of a group.
const WIDTHS: [usize; 10] = [3, 5, 8, 16, 33, 64, 100, 128, 257, 1024];

/// The usual tensors in training.
const USUAL: TensorSet = TensorSet::of(&[
    Tensor::Weight,
    Tensor::Bias,
    Tensor::Mean,
    Tensor::Rstd,
    Tensor::Dweight,
    Tensor::Dbias,
    Tensor::Dgate,
]);

/// The cases with groups of columns.
pub(crate) const LISTS: Lists = Lists { smoke, core, drawn: |seed| drawn(seed ^ 0x9c01, 1500, draw), ..Lists::NONE };

/// Whether a case can prove something. A group is as short as a row of its columns.
fn is_good(case: &Case) -> bool {
    let of_group = Case { cols: case.width(), ..*case };
    let is_tainted = case.family == Family::Nonfinite && case.kind.first() != case.kind;
    is_meaningful(&of_group) && case.eps >= 1e-6 && case.family != Family::Codes && case.width() > 2 && !is_tainted
}

fn plain(kind: Kind, norm: Norm, dtype: DType, rows: usize, (groups, width): (usize, usize)) -> Case {
    Case { groups, present: USUAL, ..Case::plain(kind, norm, dtype, rows, groups * width) }
}

fn draw(dice: &mut Dice, _: usize) -> Option<Case> {
    let (kind, norm) = (dice.pick(&KINDS), dice.pick(&Norm::USUAL));
    one(dice, |case| Case { kind, norm, ..case })
}

/// A drawn case, after `change`, that can prove something.
fn one(dice: &mut Dice, change: impl Fn(Case) -> Case) -> Option<Case> {
    let (groups, width, rows) = (dice.pick(&COUNTS), dice.pick(&WIDTHS), dice.pick(&[1, 2, 3, 7, 31]));
    let activation = dice.pick(&Activation::ALL);
    let draw = |dice: &mut Dice| {
        let case = dice.case_of_size((rows, groups * width));
        change(Case { groups, activation, present: case.present.with(Tensor::Dgate), ..case }).normalized()
    };
    (0..64).map(|_| draw(dice)).find(is_good)
}

/// Every kind and norm, with each of the usual numbers of groups.
fn smoke() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (kind, norm)) in with_norms(&KINDS).enumerate() {
        let (activation, dtype) = (Activation::ALL[i % 2], DType::ALL[(i + 1) % 3]);
        let first = Case { weight_offset: 1.0, ..plain(kind, norm, DType::F32, 5, (3, 11)) };
        let second = Case { activation, ..plain(kind, norm, dtype, 7, (COUNTS[i % COUNTS.len()], 16)) };
        let layout = Layout::Uniform { pad: 3, offset: 1 };
        cases.extend([first, Case { layout, cast_order: CastOrder::BeforeWeight, ..second }]);
    }
    cases.extend(determinism(&[(33, 2, 20)]));
    cases.into_iter().map(Case::normalized).filter(is_good).collect()
}

/// The cases of the core profile.
fn core() -> Vec<Case> {
    let mut dice = Dice { state: 81 };
    let mut cases = Vec::new();
    for (i, (kind, norm)) in with_norms(&KINDS).enumerate() {
        for (_, &family) in Family::OF_FLOATS.iter().enumerate().filter(|(j, _)| (i + j) % 3 == 0) {
            cases.extend(one(&mut dice, |case| Case { kind, norm, family, ..case }));
        }
        for (j, (rows, groups, width)) in
            [(5, 8, 512), (3, 4, 1024), (9, 3, 1365), (300, 2, 64), (2, 2, 32_771), (70, 16, 8)].into_iter().enumerate()
        {
            let activation = Activation::ALL[(i + j) % 2];
            let case = Case { activation, ..plain(kind, norm, DType::ALL[(i + j) % 3], rows, (groups, width)) };
            let present = if j % 2 == 0 { USUAL } else { ALL_PRESENT.with(Tensor::Dgate) };
            cases.push(Case { present, layout: Layout::Mixed((i + j) as u32), ..case });
        }
        let dtypes = DTypes::uniform(DType::ALL[1 + i % 2]).widened(i % 4 < 2, true);
        let wide = plain(kind, norm, dtypes.activation, 9, (5, 37));
        let layout = Layout::Grouped { rows: 4, seed: i as u32 };
        cases.push(Case { dtypes, layout, present: ALL_PRESENT.with(Tensor::Dgate), ..wide });
        cases.push(plain(kind, norm, DType::ALL[i % 3], 0, (3, 11)));
    }
    cases.extend(to_codes());
    cases.extend(determinism(&[(65, 3, 11), (257, 8, 16)]));
    cases.into_iter().map(Case::normalized).filter(is_good).collect()
}

/// Codes with scales of the tensor, or of columns of one group, in every layout and with every copy.
fn to_codes() -> Vec<Case> {
    const KINDS: [Kind; 3] =
        [Kind::QUANTIZED_FORWARD, Kind::QUANTIZED_FORWARD_GATE_AFTER, Kind::QUANTIZED_FORWARD_GATE_BEFORE];
    const LAYOUTS: [ScaleLayout; 4] = [
        ScaleLayout::RowMajor,
        ScaleLayout::ColumnMajor { ld: 0 },
        ScaleLayout::PackedUe8m0 { ld: 0 },
        ScaleLayout::Swizzled128x4,
    ];
    let mut cases = Vec::new();
    for (i, (kind, norm)) in with_norms(&KINDS).enumerate() {
        let quants = (0..18).filter_map(quantized::at).filter(|quant| quant.scale != ScaleKind::Row);
        for (j, quant) in quants.enumerate() {
            let quant = quant.layout(LAYOUTS[(i + j) % 4]).columnwise_layout(LAYOUTS[(i + j / 4) % 4]);
            let (rows, groups) = [(5, (3, 128)), (130, (8, 128)), (33, (2, 1024)), (3, (2, 33_024))][(i + j) % 4];
            let (activation, layout) = (Activation::ALL[j % 2], Layout::Mixed((i + j) as u32));
            let copies = OF_CODES.with(Tensor::CodesColumnwise);
            let present = [USUAL, ALL_PRESENT.union(copies), USUAL.union(copies).without(Tensor::Y)][j % 3];
            let case = plain(kind, norm, DType::ALL[j % 3], rows, groups);
            cases.push(Case { quant: Some(quant), activation, layout, present, ..case });
        }
    }
    cases
}

fn determinism(shapes: &[(usize, usize, usize)]) -> Vec<Case> {
    let mut cases = Vec::new();
    for &(rows, groups, width) in shapes {
        for (i, (kind, norm)) in with_norms(&[Kind::END_TO_END, Kind::GATE_BEFORE_END_TO_END]).enumerate() {
            let trial = Trial::Determinism { repeats: 3 };
            cases.push(Case { trial, ..plain(kind, norm, DType::ALL[i % 3], rows, (groups, width)) });
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::Arithmetic;
    use crate::finding::Status;
    use crate::run::calls::Context;
    use crate::run::execute::execute_case;
    use crate::selftest::simulate::SimulatedBackend;

    /// The correct kernel passes drawn cases, which read back.
    #[test]
    fn drawn_cases_pass() {
        let context = Context { device: &SimulatedBackend::new(None), arithmetic: &Arithmetic::IEEE };
        let cases = drawn(5, 100, draw);
        for case in &cases {
            assert_eq!(case.to_string().parse(), Ok(*case));
            assert_eq!(execute_case(context, case).status, Status::Pass, "{case}");
        }
        assert!(cases.iter().all(|case| case.groups > 1));
        assert!((250..700).contains(&core().len()), "{}", core().len());
    }
}
