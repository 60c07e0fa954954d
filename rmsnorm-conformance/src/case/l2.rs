//! Cases of the two L2 norms, whose sums over a row are not divided: math.md, section 1.

use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind};
use rmsnorm_spec::{Activation, CastOrder, DType, DTypes, Norm, Tensor, TensorSet};

use crate::case::dice::{Dice, Lists, alternate, drawn, each, is_meaningful};
use crate::case::presence::ALL_PRESENT;
use crate::case::{Case, Family, Kind, Layout, Trial, quantized};
use crate::selftest::planted::bugs;

bugs! {
    /// The bugs of the L2 norms.
    L2Bug:
    DividedByCols "l2_divided_by_cols" SUMMED ANY_FORWARD "the sum of squares is divided by cols";
    EpsOutside "l2_eps_outside" L2 ANY_FORWARD "eps is added to the root of the sum";
    BackwardAverages "l2_backward_averages" SUMMED ANY_BACKWARD "the sum of wdy * x_hat is divided by cols";
    ClampIgnored "l2_clamp_ignored" CLAMPED ANY_FORWARD "a small norm is not raised to eps";
    ClampAdds "l2_clamp_adds" CLAMPED ANY_FORWARD "the square of eps is added to the sum of squares";
    ClampOfEps "l2_clamp_of_eps" CLAMPED ANY_FORWARD "the sum of squares is raised to eps, not to its square";
    BackwardNotClamped "l2_backward_not_clamped" CLAMPED ANY_BACKWARD "backward differentiates the rstd of a clamped row";
    BackwardClampedBeyond "l2_backward_clamped_beyond" CLAMPED ANY_BACKWARD "backward takes rows of up to twice the least norm as clamped";
}

/// The norms of the cases.
const NORMS: [Norm; 2] = [Norm::L2, Norm::L2Clamped];

/// Row lengths: a few, those of heads, hidden sizes, a long one, and one that no chip holds.
const COLS: [usize; 14] = [1, 2, 3, 5, 31, 64, 128, 129, 256, 1000, 4096, 4097, 17_920, 131_073];

/// Lengths of a drawn row.
const WIDTHS: [usize; 12] = [2, 3, 5, 8, 31, 64, 100, 128, 129, 256, 1000, 1024];

/// Zeros, tiny, huge and non-finite rows, and plain ones.
const FAMILIES: [Family; 11] = [
    Family::Randn,
    Family::NearEps,
    Family::Large,
    Family::CorrDy,
    Family::PosDy,
    Family::Loguni,
    Family::Outlier,
    Family::Zeros,
    Family::Mixed,
    Family::Subnormal,
    Family::Nonfinite,
];

/// The usual tensors in training. Kinds drop those that they cannot have.
const USUAL: TensorSet = TensorSet::of(&[
    Tensor::Weight,
    Tensor::Bias,
    Tensor::Rstd,
    Tensor::Dweight,
    Tensor::Dbias,
    Tensor::Dgate,
    Tensor::Y,
    Tensor::NextWeight,
    Tensor::NextRstd,
]);

/// The tensors of queries and keys: no weight.
const BARE: TensorSet = TensorSet::of(&[Tensor::Rstd]);

/// The cases of the L2 norms.
pub(crate) const LISTS: Lists = Lists { smoke, core, drawn: |seed| drawn(seed ^ 0x12f0, 1000, draw), ..Lists::NONE };

/// The kinds of the fixed lists.
fn kinds() -> impl Iterator<Item = Kind> + Clone {
    Kind::ALL.into_iter().filter(|kind| !Kind::PAIRS.contains(kind))
}

/// Whether a case can prove something. A group is as short as a row of its columns.
fn is_good(case: &Case) -> bool {
    let of_group = Case { cols: case.width(), ..*case };
    let is_tainted = case.family == Family::Nonfinite && case.kind.first() != case.kind;
    // The gradient of one column is lost in the error of a gated x.
    let is_lost = case.width() < 3 && case.kind.has_backward() && case.kind.gate().is_some();
    is_meaningful(&of_group) && case.eps >= 1e-6 && case.family != Family::Codes && !is_tainted && !is_lost
}

fn plain(kind: Kind, norm: Norm, dtype: DType, (rows, cols): (usize, usize)) -> Case {
    of_family(Family::Randn, Case { present: USUAL, ..Case::plain(kind, norm, dtype, rows, cols) })
}

/// The case with another family, and with an eps for it: one that clamps small rows and no others.
fn of_family(family: Family, case: Case) -> Case {
    let is_small = matches!(family, Family::NearEps | Family::Zeros | Family::Mixed | Family::Subnormal);
    let is_clamped = is_small && case.norm == Norm::L2Clamped;
    let eps = if is_clamped || family == Family::Subnormal { 0.1 } else { 1e-6 };
    Case { family, eps, ..case }
}

fn draw(dice: &mut Dice, turn: usize) -> Option<Case> {
    let kinds: Vec<Kind> = kinds().collect();
    let (kind, norm) = (dice.pick(&kinds), dice.pick(&NORMS));
    one(dice, turn, |case| Case { kind, norm, ..case })
}

/// A drawn case, after `change`, that can prove something.
fn one(dice: &mut Dice, turn: usize, change: impl Fn(Case) -> Case) -> Option<Case> {
    let (groups, width, rows) = (dice.pick(&[1, 1, 2, 4]), dice.pick(&WIDTHS), dice.pick(&[1, 2, 3, 7, 31]));
    let activation = dice.pick(&Activation::ALL);
    let draw = |dice: &mut Dice| {
        let case = dice.case_of_size((rows, groups * width));
        let present = case.present.with(Tensor::Dgate);
        change(Case { groups, activation, present, quant: quantized::at(turn), ..case }).normalized()
    };
    (0..64).map(|_| draw(dice)).find(is_good)
}

/// Every length forward and backward, every family that matters, and every kind with and without a
/// weight, groups of columns and strides.
fn smoke() -> Vec<Case> {
    let mut cases = Vec::new();
    for norm in NORMS {
        for ((i, cols), (j, kind)) in
            each(COLS.into_iter().enumerate(), [Kind::FORWARD, Kind::BACKWARD].into_iter().enumerate())
                .filter(|((i, _), (j, _))| norm == Norm::L2 || (i + j) % 2 == 0)
        {
            let present = if (i + j) % 3 == 2 { BARE } else { USUAL };
            let case = plain(kind, norm, DType::ALL[(i + j) % 3], (if cols > 4097 { 2 } else { 5 }, cols));
            cases.push(Case { present, layout: alternate(i + j), ..case });
        }
        for ((i, family), (j, kind)) in
            each(FAMILIES.into_iter().enumerate(), [Kind::FORWARD, Kind::BACKWARD].into_iter().enumerate())
        {
            cases.push(of_family(family, plain(kind, norm, DType::ALL[(i + 2 * j) % 3], (7, 45))));
        }
        for (i, kind) in kinds().enumerate() {
            let (activation, dtype) = (Activation::ALL[i % 2], DType::ALL[(i + 1) % 3]);
            let of = |dtype, size| Case { activation, quant: quantized::at(i), ..plain(kind, norm, dtype, size) };
            let first = Case { weight_offset: 1.0, groups: if i % 2 == 0 { 1 } else { 3 }, ..of(DType::F32, (5, 33)) };
            let dtypes = DTypes::uniform(dtype).widened(i % 2 == 0, true);
            let layout = if i % 3 == 0 { Layout::Grouped { rows: 2, seed: 1 } } else { Layout::Mixed(i as u32) };
            let second = Case { dtypes, layout, present: ALL_PRESENT.union(USUAL), ..of(dtype, (7, 40)) };
            let near = of_family(Family::NearEps, Case { cast_order: CastOrder::BeforeWeight, ..second });
            cases.extend((norm == Norm::L2).then_some(first).into_iter().chain([near]));
        }
        cases.extend(trials(norm, &[(33, 40)]));
    }
    // Rows whose norm is eps: 8 elements of 2 and -2.
    let kink =
        |kind| Case { family: Family::Exact, eps: 32f32.sqrt(), ..plain(kind, Norm::L2Clamped, DType::F32, (5, 8)) };
    let exact = |kind| Case { eps: 16.0, cols: 64, ..kink(kind) };
    cases.extend([Kind::FORWARD, Kind::BACKWARD].into_iter().flat_map(|kind| [kink(kind), exact(kind)]));
    cases.into_iter().map(Case::normalized).filter(is_good).collect()
}

/// The cases of the core profile.
fn core() -> Vec<Case> {
    let mut dice = Dice { state: 91 };
    let mut cases = Vec::new();
    for norm in NORMS {
        for (i, kind) in kinds().enumerate() {
            for (j, family) in FAMILIES.into_iter().enumerate().filter(|(j, _)| (i + j) % 2 == 0) {
                cases.extend(one(&mut dice, i + j, |case| Case { kind, norm, family, ..case }));
            }
            let sizes = [(300, 64), (129, 128), (70, 256), (9, 4099), (3, 17_920), (2, 131_073), (4100, 5)];
            for (j, size) in sizes.into_iter().enumerate().filter(|(j, _)| (i + j) % 3 == 0) {
                let case = plain(kind, norm, DType::ALL[(i / 2 + j) % 3], size);
                let (present, layout) = (if j % 2 == 0 { USUAL } else { ALL_PRESENT.union(USUAL) }, alternate(i + j));
                cases.push(Case { present, layout, quant: quantized::at(i + j), ..case });
            }
            let layout = Layout::Grouped { rows: 4, seed: i as u32 };
            let wide = plain(kind, norm, DType::ALL[1 + i % 2], (9, 5 * 37));
            let dtypes = DTypes::uniform(wide.dtypes.activation).widened(i % 4 < 2, true);
            cases.push(Case {
                dtypes,
                layout,
                groups: 5,
                quant: quantized::at(i),
                present: ALL_PRESENT.union(USUAL),
                ..wide
            });
            cases.push(Case { quant: quantized::at(i), ..plain(kind, norm, DType::ALL[i % 3], (0, 33)) });
        }
        for ((i, cols), (j, kind)) in
            each(COLS.into_iter().enumerate(), [Kind::END_TO_END, Kind::BACKWARD_SUMS].into_iter().enumerate())
        {
            cases.push(plain(kind, norm, DType::ALL[(i + j) % 3], (3, cols)));
        }
        // Columns of the transposed copy begin within a vector, and may end in a further tile.
        for scale in [ScaleKind::Given, ScaleKind::Current] {
            let quant = Some(QuantSpec::new(CodeType::E4m3, scale));
            let case = plain(Kind::QUANTIZED_FORWARD, norm, DType::Bf16, (121, 200));
            cases.push(Case { quant, present: USUAL.with(Tensor::CodesT), ..case });
        }
        cases.extend(trials(norm, &[(65, 33), (257, 128), (2, 4099)]));
    }
    cases.into_iter().map(Case::normalized).filter(is_good).collect()
}

/// Repeated calls and relations between calls.
fn trials(norm: Norm, shapes: &[(usize, usize)]) -> impl Iterator<Item = Case> {
    let of = move |(i, &size): (usize, &(usize, usize))| {
        let plain = plain(Kind::END_TO_END, norm, DType::ALL[i % 3], size);
        [Trial::Determinism { repeats: 3 }, Trial::Metamorphic].map(|trial| Case { trial, ..plain })
    };
    shapes.iter().enumerate().flat_map(of).collect::<Vec<_>>().into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::Arithmetic;
    use crate::finding::Status;
    use crate::run::calls::Context;
    use crate::run::execute::execute_case;
    use crate::selftest::simulate::SimulatedBackend;

    /// The correct kernel passes all cases, none proves nothing, and drawn cases read back.
    #[test]
    fn cases_pass_and_prove_something() {
        let context = Context { device: &SimulatedBackend::new(None), arithmetic: &Arithmetic::IEEE };
        let (smoke, core) = (smoke(), core());
        assert!((60..200).contains(&smoke.len()) && (250..900).contains(&core.len()), "{} {}", smoke.len(), core.len());
        for case in smoke.into_iter().chain(core).chain(drawn(5, 100, draw)) {
            assert_eq!(case.to_string().parse(), Ok(case));
            assert_eq!(execute_case(context, &case).status, Status::Pass, "{case}");
        }
    }
}
