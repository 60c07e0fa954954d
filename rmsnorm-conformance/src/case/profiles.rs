//! The list of cases of each profile. A list depends only on the profile and the seed, so its hash
//! identifies it. Beyond smoke, the cases at a backend's breakpoints are added to it.

use std::collections::{BTreeSet, HashSet};

use rmsnorm_spec::{CastOrder, DType, DTypes, GradReduction, Norm, Tensor, TensorSet};

use crate::case::dice::{
    COLS, Dice, Drawn, EPS, Lists, OTHER_REDUCTIONS, ROWS, WEIGHT_OFFSETS, alternate, each, is_meaningful, with_norms,
};
use crate::case::presence::{self, ALL_PRESENT, COUNTED, OPTIONAL};
use crate::case::{Case, Family, Kind, Layout, Trial, dice};
use crate::names::named_enum;
use crate::pieces;

named_enum! {
    /// The size of a run.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Profile {
        /// Seconds: every family, kind, norm and dtype once, on small shapes.
        Smoke = "smoke",
        /// Minutes: a fixed list over all axes. It defines "conformant".
        Core = "core",
        /// Twenty thousand cases, drawn from the seed.
        Full = "full",
        /// Few large cases: long rows, many rows, many repeats.
        Stress = "stress",
    }
}

impl Profile {
    /// The list of cases. Only [`Profile::Full`] depends on the seed.
    pub fn cases(self, seed: u64) -> Vec<Case> {
        let cases = match self {
            Profile::Smoke => with_lists(smoke(), |lists| (lists.smoke)()),
            Profile::Core => with_lists(core(), |lists| (lists.core)()),
            // Long rows are included because GPUs have separate kernels for them.
            Profile::Full => {
                let floats = drawn(seed, 20_000, |dice| if dice.one_in(8) { 1 << 18 } else { MOST_DRAWN });
                [with_lists(floats, |lists| (lists.drawn)(seed)), pieces::pairs(seed, 500)].concat()
            }
            Profile::Stress => stress(),
        };
        let mut seen = HashSet::new();
        cases.into_iter().map(Case::normalized).filter(|case| seen.insert(case.to_string())).collect()
    }
}

fn with_lists(mut cases: Vec<Case>, list: impl Fn(&Lists) -> Vec<Case>) -> Vec<Case> {
    cases.extend(pieces::lists().flat_map(|lists| list(&lists)));
    cases
}

/// Largest number of elements of most drawn cases. It is small because each element is compared
/// with an f64 reference.
const MOST_DRAWN: usize = 1 << 13;

/// A residual and a bias, without `residual_out`.
const SUM_NOT_KEPT: TensorSet =
    TensorSet::of(&[Tensor::Residual, Tensor::Bias, Tensor::Weight, Tensor::Rstd, Tensor::Mean]);

/// The smallest call that tests the gradients of weight and bias.
const GRADIENTS: TensorSet =
    TensorSet::of(&[Tensor::Weight, Tensor::Bias, Tensor::Mean, Tensor::Rstd, Tensor::Dweight, Tensor::Dbias]);

fn drawn(seed: u64, count: usize, most_elements: fn(&mut Dice) -> usize) -> Vec<Case> {
    dice::drawn(seed, count, |dice, _| {
        let most_elements = most_elements(dice);
        Some(dice.case(most_elements)).filter(is_meaningful)
    })
}

/// Every kind, norm and family, with the other axes drawn.
fn smoke() -> Vec<Case> {
    let mut dice = Dice { state: 1 };
    let mut cases = Vec::new();
    for (i, (kind, norm)) in with_norms(&Kind::BEFORE).enumerate() {
        for (j, family) in Family::OF_FLOATS.iter().copied().enumerate() {
            // This kind has no case of that family, so another case of the most common family is
            // used.
            let replaced = family == Family::Nonfinite && kind == Kind::END_TO_END;
            let family = if replaced { Family::Randn } else { family };
            let drawn = std::iter::repeat_with(|| {
                let size = dice.size(1 << 12);
                let drawn = dice.draw(size);
                Drawn { case: Case { kind, norm, family, ..drawn.case }, ..drawn }
            });
            let good = drawn.filter(|Drawn { case, .. }| case.rows > 1 && is_meaningful(case)).map(|drawn| {
                let dtypes = DTypes::uniform(DType::ALL[(i + j) % 3]);
                Case { dtypes: dtypes.widened(drawn.wide_weight, drawn.wide_residual), ..drawn.case }
            });
            cases.extend(good.take(1));
        }
        let dtype = DType::ALL[i % 3];
        for (rows, cols) in [(0, 33), (2, 17_389), (1, 100_003), (70_001, 1)] {
            cases.push(Case { present: GRADIENTS, ..Case::plain(kind, norm, dtype, rows, cols) });
        }
    }
    cases.retain(is_meaningful);
    cases.extend(reductions(&[(65, 33)]));
    cases.extend(determinism(&[(65, 33), (300, 7)], 3));
    cases.extend(metamorphic(&[(29, 541)]));
    let in_groups = in_groups(&[(7, 3, 45)]).into_iter();
    cases
        .extend(in_groups.filter(|case| case.trial == Trial::Bounds && case.grad_reduction == GradReduction::Partials));
    cases
}

/// Every value of every axis alone, then random combinations of all.
fn core() -> Vec<Case> {
    let mut cases: Vec<Case> = with_norms(&Kind::BEFORE).flat_map(|(kind, norm)| extremes(kind, norm)).collect();
    cases.retain(is_meaningful);
    cases.extend(beyond_caches());
    cases.extend(DType::ALL.into_iter().flat_map(every_presence));
    cases.extend(every_mix(&[(3, 7), (5, 45), (2, 1000)]));
    cases.extend(many_partial_rows());
    cases.extend(second_steps());
    cases.extend(long_rows());
    cases.extend(reductions(&[(1, 129), (3, 4099), (64, 128), (257, 33), (777, 24), (4100, 5)]));
    cases.extend(determinism(&[(1, 1), (2, 4099), (257, 33), (300, 129), (600, 7)], 3));
    cases.extend(metamorphic(&[(3, 7), (29, 541), (64, 128), (257, 24), (2, 4099)]));
    cover(&mut cases, 3300);
    cases.extend(in_groups(&[
        (3, 2, 1),
        (7, 3, 7),
        (96, 32, 64),
        (257, 8, 128),
        (65, 4, 129),
        (777, 7, 24),
        (70, 9, 1000),
        (9, 5, 4099),
        (3, 2, 17_389),
        (300, 25, 4099),
        (5003, 12, 33),
        (70_001, 5, 3),
        (3, 2, 262_147),
    ]));
    cases
}

/// Small cases that the named tests run in addition to the smoke profile. There are few of them,
/// because some devices compile a program for each.
pub(crate) fn combinations_in_small() -> Vec<Case> {
    let mut cases = every_presence(DType::F32);
    cases.extend(every_mix(&[(5, 45)]));
    // Here `0 - mean` times rstd is infinite after the end of a row, and 0 times infinity is NaN.
    cases.extend(DType::ALL.map(|dtype| {
        let plain = Case::plain(Kind::BACKWARD, Norm::Layer, dtype, 3, 45);
        Case { present: ALL_PRESENT, family: Family::Const, ..plain }
    }));
    cases.into_iter().map(Case::normalized).collect()
}

/// Every set of optional tensors that a call may have. Offset, cast order and layout vary from case
/// to case; so do the dtypes, starting with `first`.
fn every_presence(first: DType) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for (kind, norm) in with_norms(&Kind::BEFORE).filter(|(kind, _)| *kind != Kind::END_TO_END) {
        let plain = Case::plain(kind, norm, DType::F32, 3, 37);
        let all = presence::sets(&COUNTED).map(|present| Case { present, ..plain }.normalized());
        let mut seen = HashSet::new();
        cases.extend(all.filter(|case| seen.insert(case.present)));
    }
    let mut dice = Dice { state: 4 + first as u64 };
    let varied = |(i, case): (usize, Case)| {
        let dtype = DType::ALL[(first as usize + i) % 3];
        let (cols, weight_offset) = (dice.pick(&[37, 40, 44, 131]), dice.pick(&WEIGHT_OFFSETS));
        let cast_order = dice.pick(&[CastOrder::AtStore, CastOrder::BeforeWeight]);
        let (dtypes, layout) = (DTypes::uniform(dtype), dice.layout(cols));
        Case { cols, dtypes, weight_offset, cast_order, layout, ..case }
    };
    cases.into_iter().enumerate().map(varied).collect()
}

/// Every mix of dtypes with every tensor, in rows that end within a register, with an offset that
/// 16 bits cannot represent.
fn every_mix(shapes: &[(usize, usize)]) -> Vec<Case> {
    let mut cases = Vec::new();
    let wide: Vec<_> = each(DType::ALL, 0..4).filter(|&(dtype, wide)| dtype != DType::F32 || wide == 0).collect();
    for ((kind, norm), &(rows, cols)) in each(with_norms(&Kind::BEFORE), shapes) {
        for &(activation, wide) in &wide {
            let dtypes = DTypes::uniform(activation).widened(wide & 1 == 1, wide & 2 == 2);
            let layout = Layout::Mixed(cases.len() as u32);
            let plain = Case::plain(kind, norm, activation, rows, cols);
            let case = Case { dtypes, present: ALL_PRESENT, weight_offset: 0.3, layout, ..plain };
            cases.push(case);
            cases.extend(kind.has_backward().then_some(Case { present: OPTIONAL, ..case }));
        }
    }
    cases
}

/// Cases with grouped rows, for shapes (rows, rows of a group, cols). The last group is complete or
/// not, and groups end inside and at the ends of the rows of a thread, block or task. Some cases
/// have every tensor and mixed dtypes. Others have the gradients only, with every way to sum them.
/// Others repeat the call with fewer rows, also with fewer than a group.
fn in_groups(shapes: &[(usize, usize, usize)]) -> Vec<Case> {
    let mut cases = Vec::new();
    for &(rows, group, cols) in shapes {
        for (i, (kind, norm)) in with_norms(&Kind::BEFORE).enumerate() {
            let (dtype, seed) = (DType::ALL[(i + rows) % 3], (i + cols) as u32);
            let plain = Case { seed, ..Case::plain(kind, norm, dtype, rows, cols) };
            let layout = Layout::Grouped { rows: group, seed };
            let dtypes = DTypes::uniform(dtype).widened(i % 2 == 0, i % 4 < 2);
            cases.push(Case { present: OPTIONAL, dtypes, layout, weight_offset: 0.3, ..plain });
            let layout = Layout::Grouped { rows: group, seed: seed + 1 };
            let gradients = Case { present: GRADIENTS, layout, ..plain };
            cases.push(gradients);
            if rows * cols > MOST_DRAWN {
                continue;
            }
            let trial = Trial::Determinism { repeats: 3 };
            cases.push(Case { trial, present: ALL_PRESENT, ..gradients });
            let others = OTHER_REDUCTIONS.map(|grad_reduction| Case { grad_reduction, ..gradients });
            cases.extend(others.into_iter().filter(|_| kind.has_backward()));
        }
    }
    cases.retain(is_meaningful);
    cases
}

/// Rows so long or so many that a large device is occupied more than once. Each thread or block
/// then starts a second row while its pipeline and sums are in use, and skips the short end of the
/// first. Also rows shorter than a cache line, in a matrix larger than the cache.
fn second_steps() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, norm) in Norm::USUAL.into_iter().enumerate() {
        let backward = [(40, 65_539, DType::F32), (300, 17_389, DType::ALL[i]), (1025, 4099, DType::ALL[i + 1])];
        for (j, (rows, cols, dtype)) in backward.into_iter().enumerate() {
            let present = if (i + j) % 2 == 0 { ALL_PRESENT } else { GRADIENTS };
            cases.push(Case { present, weight_offset: 0.3, ..Case::plain(Kind::BACKWARD, norm, dtype, rows, cols) });
        }
        // A thread with two rows at once gets its second row only if there are more rows than
        // workgroups. A kernel with fewer sums over rows does so at more row lengths.
        let (rows, cols) = if norm == Norm::Rms { (2100, 1536) } else { (700, 8192) };
        let present = GRADIENTS.set(Tensor::Dbias, norm == Norm::Layer);
        let plain = Case::plain(Kind::BACKWARD, norm, DType::Bf16, rows, cols);
        cases.push(Case { present, family: Family::Mixed, ..plain });
        let long = Case { weight_offset: -0.5, ..Case::plain(Kind::FORWARD, norm, DType::F32, 20, 262_147) };
        cases.extend([SUM_NOT_KEPT, ALL_PRESENT].map(|present| Case { present, ..long }));
        let many = |kind| Case::plain(kind, norm, DType::Bf16, 1_500_007, 3);
        let (present, layout) = (GRADIENTS, Layout::Uniform { pad: 1, offset: 1 });
        cases.extend([Kind::FORWARD, Kind::BACKWARD].map(|kind| Case { present, layout, ..many(kind) }));
    }
    cases
}

/// Long rows, for which devices have separate kernels, with data that such kernels may get wrong:
/// far from zero, so large that only x - mean matters, rows unlike their neighbours, a weight
/// offset, another stride for dresidual_out.
fn long_rows() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DType::ALL {
        let with = |kind, norm, rows, cols| Case { present: ALL_PRESENT, ..Case::plain(kind, norm, dtype, rows, cols) };
        for norm in Norm::USUAL {
            for (weight_offset, cols) in [(WEIGHT_OFFSETS[2], 32_768), (WEIGHT_OFFSETS[3], 65_536)] {
                cases.push(Case { present: GRADIENTS, weight_offset, ..with(Kind::FORWARD, norm, 2, cols) });
            }
            cases.push(Case { family: Family::Mixed, ..with(Kind::BACKWARD, norm, 40, 65_539) });
            let layout = Layout::Mixed(7);
            cases.push(Case { layout, ..with(Kind::BACKWARD, norm, 3, 262_147) });
            cases.push(Case { layout, present: OPTIONAL, ..with(Kind::BACKWARD, norm, 3, 262_149) });
        }
        for family in [Family::Shifted, Family::Const] {
            let long = |kind| Case { family, ..with(kind, Norm::Layer, 2, 262_147) };
            cases.extend([SUM_NOT_KEPT, ALL_PRESENT].map(|present| Case { present, ..long(Kind::FORWARD) }));
            cases.push(long(Kind::BACKWARD));
        }
    }
    cases.retain(is_meaningful);
    cases
}

/// Few very long rows, and very many rows: the second stage, which adds partial rows, then has work
/// for several threads, or more partial rows than an 8-bit index can count.
fn many_partial_rows() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, norm) in Norm::USUAL.into_iter().enumerate() {
        let mut push = |dtype, family, (rows, cols)| {
            cases.push(Case { present: ALL_PRESENT, family, ..Case::plain(Kind::BACKWARD, norm, dtype, rows, cols) });
        };
        for (j, size) in [(65, 70_003), (70_001, 5), (140_001, 1)].into_iter().enumerate() {
            push(DType::ALL[(i + j) % 3], [Family::Randn, Family::PosDy][(i + j) % 2], size);
        }
        // Sums beyond twice the largest f16.
        push(DType::F16, Family::PosDy, (400_003, 1));
    }
    cases
}

/// Adds cases up to `count`: first every size for every kind and norm, then drawn sizes. From
/// several drawn cases it takes the one that has the most new combinations of three values.
fn cover(cases: &mut Vec<Case>, count: usize) {
    let mut dice = Dice { state: 2 };
    let mut sizes: Vec<(usize, usize)> = Vec::new();
    sizes.extend(COLS.map(|cols| (if cols > 1 << 14 { 1 } else { 3 }, cols)));
    sizes.extend(ROWS.map(|rows| (rows, if rows > 20_000 { 2 } else { 5 })));
    let mut fixed =
        with_norms(&Kind::BEFORE).flat_map(|(kind, norm)| sizes.iter().map(move |&size| (kind, norm, size)));
    let mut seen: HashSet<u64> = cases.iter().flat_map(|case| combinations::<3>(&case.normalized())).collect();
    while cases.len() < count {
        let fixed = fixed.next();
        let draw = || match fixed {
            Some((kind, norm, size)) => Case { kind, norm, ..dice.case_of_size(size) },
            None => dice.case(1 << 16),
        };
        let drawn = std::iter::repeat_with(draw).filter(is_meaningful).take(32);
        let news = |case: &Case| combinations::<3>(&case.normalized()).filter(|key| !seen.contains(key)).count();
        let Some(best) = drawn.max_by_key(news) else { return };
        seen.extend(combinations::<3>(&best.normalized()));
        cases.push(best);
    }
}

/// The values of a case on all axes except sizes, as small numbers. `grad_reduction` is not an
/// axis, because [`reductions`] covers it.
fn axes(case: &Case) -> [u8; 11] {
    let (present, dtypes) = (case.present, case.dtypes);
    let flags = |flags: &[bool]| flags.iter().fold(0, |bits, &flag| 2 * bits + u8::from(flag));
    let (pad, offset) = match case.layout {
        Layout::Mixed(_) => (4, 8),
        Layout::Far(_) => (5, 9),
        Layout::Grouped { .. } => (6, 10),
        Layout::Uniform { pad, offset } => ([0, 1, 8].iter().position(|&known| known == pad).unwrap_or(3), offset),
    };
    [
        case.kind.index() as u8,
        case.norm as u8,
        4 * dtypes.activation as u8
            + flags(&[dtypes.weight != dtypes.activation, dtypes.residual != dtypes.activation]),
        case.family as u8,
        EPS.iter().position(|&eps| eps == case.eps).unwrap_or(EPS.len()) as u8,
        flags(&[present.has(Tensor::Weight), present.has(Tensor::Bias)]),
        2 * WEIGHT_OFFSETS.iter().position(|&known| known == case.weight_offset).unwrap_or(WEIGHT_OFFSETS.len()) as u8
            + flags(&[case.cast_order == CastOrder::BeforeWeight]),
        flags(&[present.has(Tensor::Residual), present.has(Tensor::ResidualOut), present.has(Tensor::DresidualOut)]),
        flags(&[present.has(Tensor::Dweight), present.has(Tensor::Dbias), present.has(Tensor::Workspace)]),
        pad as u8,
        offset as u8,
    ]
}

/// A key for every combination of `N` values of a case on different axes.
fn combinations<const N: u32>(case: &Case) -> impl Iterator<Item = u64> + use<N> {
    let axes = axes(case);
    let chosen = (0u32..1 << axes.len()).filter(|chosen| chosen.count_ones() == N);
    chosen.map(move |chosen| {
        let values = axes.iter().enumerate().filter(|(axis, _)| chosen >> axis & 1 == 1);
        values.fold(u64::from(chosen), |key, (_, &value)| key << 8 | u64::from(value))
    })
}

/// Cases that differ from a medium case with all optional tensors on one axis; [`cover`] adds the
/// sizes.
fn extremes(kind: Kind, norm: Norm) -> Vec<Case> {
    let with = |dtype, rows, cols| Case { present: ALL_PRESENT, ..Case::plain(kind, norm, dtype, rows, cols) };
    let middle = |i: usize| with(DType::ALL[i % 3], 29, 129);
    let mut cases = Vec::new();
    let families = Family::OF_FLOATS.iter().copied();
    cases.extend(each(families, DType::ALL).map(|(family, dtype)| Case { family, ..with(dtype, 31, 65) }));
    for offset in 0..8 {
        cases.push(Case { layout: Layout::Uniform { pad: 0, offset }, ..middle(offset) });
        cases.push(Case { layout: Layout::Mixed(offset as u32), ..middle(offset + 1) });
    }
    for (i, pad) in [1, 8, 129].into_iter().enumerate() {
        cases.push(Case { layout: Layout::Uniform { pad, offset: 0 }, ..middle(i) });
    }
    for (i, eps) in EPS.into_iter().enumerate() {
        cases.push(Case { eps, ..middle(i) });
        cases.push(Case { eps, family: Family::NearEps, ..middle(i + 1) });
    }
    for (dtype, (weight, residual)) in each([DType::F16, DType::Bf16], [(false, true), (true, false), (true, true)]) {
        cases.push(Case { dtypes: DTypes::uniform(dtype).widened(weight, residual), ..middle(0) });
    }
    cases.extend((0..3).map(|i| Case { cast_order: CastOrder::BeforeWeight, ..middle(i) }));
    cases.extend((0..3).map(|i| Case { present: TensorSet::NONE, ..middle(i) }));
    cases
}

/// Every other way to sum gradients, with the other axes drawn.
fn reductions(shapes: &[(usize, usize)]) -> Vec<Case> {
    let mut dice = Dice { state: 3 };
    let mut cases = Vec::new();
    for &shape in shapes {
        let kinds: Vec<_> = with_norms(&[Kind::BACKWARD, Kind::END_TO_END]).collect();
        for ((kind, norm), grad_reduction) in each(kinds, OTHER_REDUCTIONS) {
            let draw = || {
                let case = dice.case_of_size(shape);
                Case { kind, norm, grad_reduction, present: case.present.with(Tensor::Dweight), ..case }
            };
            cases.extend(std::iter::repeat_with(draw).find(is_meaningful));
        }
    }
    cases
}

/// Matrices of more than 8 MiB in every dtype: from about this size, kernels use streaming stores.
/// Half of the cases have only the gradients; the other half have every tensor and an f32 residual.
fn beyond_caches() -> Vec<Case> {
    let case = |(i, (kind, norm)): (usize, (Kind, Norm))| {
        // The order alternates from kind to kind, so that each norm and each layout gets both
        // halves.
        let has_all = (i + i / 2) % 2 == 1;
        let dtypes = DTypes::uniform(DType::ALL[i / 2 % 3]).widened(false, has_all);
        let present = if has_all { ALL_PRESENT } else { GRADIENTS };
        Case { present, dtypes, layout: alternate(i), ..Case::plain(kind, norm, dtypes.activation, 1025, 4099) }
    };
    with_norms(&Kind::BEFORE).enumerate().map(case).collect()
}

/// Shapes around common block sizes. An end-to-end case repeats both calls.
fn determinism(shapes: &[(usize, usize)], repeats: u32) -> Vec<Case> {
    let kinds = [Kind::END_TO_END, Kind::FORWARD_IN_PLACE];
    let misaligned = |case: Case| Case { layout: Layout::Mixed(case.rows as u32 % 16), ..case };
    trials(Trial::Determinism { repeats }, &kinds, shapes).map(misaligned).collect()
}

/// A trial with all tensors, in every norm and dtype.
fn trials(trial: Trial, kinds: &[Kind], shapes: &[(usize, usize)]) -> impl Iterator<Item = Case> {
    let norms_and_dtypes = each(Norm::USUAL, DType::ALL).collect::<Vec<_>>();
    let all = each(each(shapes.iter().copied(), norms_and_dtypes), kinds.to_vec());
    let plain = |(((rows, cols), (norm, dtype)), kind)| Case::plain(kind, norm, dtype, rows, cols);
    all.map(move |of_call| Case { trial, present: ALL_PRESENT, ..plain(of_call) })
}

fn metamorphic(shapes: &[(usize, usize)]) -> impl Iterator<Item = Case> {
    trials(Trial::Metamorphic, &[Kind::END_TO_END], shapes)
}

/// Sizes beyond 16 bits in rows or columns, and many repeats of calls whose rows share words or
/// partial sums.
fn stress() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes = [(65_536, 5), (65_537, 3), (131_073, 1), (5, 65_537), (40, 17_389), (3, 262_144), (1 << 20, 2)];
    for (i, (kind, norm)) in with_norms(&Kind::BEFORE).enumerate() {
        cases.extend(shapes.into_iter().enumerate().map(|(j, (rows, cols))| {
            let plain = Case::plain(kind, norm, DType::ALL[(i + j) % 3], rows, cols);
            Case { present: GRADIENTS, family: [Family::PosDy, Family::Randn][j % 2], ..plain }
        }));
    }
    cases.extend(determinism(&[(4099, 1), (1000, 3), (500, 33)], 200));
    cases.extend(far_apart());
    for (norm, kind) in each(Norm::USUAL, [Kind::FORWARD, Kind::BACKWARD]) {
        let plain = Case::plain(kind, norm, DType::Bf16, 40, 262_147);
        cases.push(Case { present: ALL_PRESENT, weight_offset: 0.3, ..plain });
    }
    cases
}

/// Few rows, so far apart that the index of an element exceeds 32 bits, either by the stride or
/// only by row times stride. All mixes of 16-bit and f32 tensors, because a byte offset may
/// overflow where an element index does not.
pub(crate) fn far_apart() -> Vec<Case> {
    let mut cases = Vec::new();
    let before = Kind::BEFORE.map(|kind| (kind, ALL_PRESENT)).into_iter();
    let calls = before.chain(pieces::lists().flat_map(|lists| lists.calls.iter().copied()));
    for (i, ((kind, present), norm)) in each(calls, Norm::USUAL).enumerate() {
        for (j, (rows, stride)) in [(2_u64, (1 << 32) + 37), (3, (1 << 31) + 1029)].into_iter().enumerate() {
            if usize::try_from(rows * stride).is_err() {
                continue; // memory with 32-bit addresses has no such rows
            }
            let (rows, stride) = (rows as usize, stride as usize);
            let activation = if (i + j) % 2 == 0 { DType::Bf16 } else { DType::F16 };
            let dtypes = DTypes::uniform(activation).widened(true, j == 1);
            let plain = Case::plain(kind, norm, activation, rows, 45);
            cases.push(Case { dtypes, present, layout: Layout::Far(stride), ..plain });
        }
    }
    cases
}

/// Cases at the shapes at which a backend's plan changes, and at the same shapes with one row less.
pub(crate) fn shape_breakpoints(shapes: impl Fn(DType) -> Vec<(usize, usize)>) -> Vec<Case> {
    let mut cases = Vec::new();
    let around = |(rows, cols): (usize, usize)| [(rows.saturating_sub(1), cols), (rows, cols)];
    let sizes: BTreeSet<_> = DType::ALL.into_iter().flat_map(&shapes).flat_map(around).collect();
    for (kind, norm) in with_norms(&Kind::BEFORE).filter(|(kind, _)| *kind != Kind::END_TO_END) {
        for (i, dtype) in DType::ALL.into_iter().enumerate() {
            for (j, shape) in shapes(dtype).into_iter().enumerate() {
                let layout = alternate(i + j);
                let of_size = |(rows, cols)| Case { layout, ..Case::plain(kind, norm, dtype, rows, cols) };
                cases.extend(around(shape).map(|size| Case { present: GRADIENTS, ..of_size(size) }));
            }
        }
    }
    cases.extend(of_pieces(&sizes.into_iter().collect::<Vec<_>>()));
    cases.into_iter().map(Case::normalized).collect()
}

/// Cases around the sizes at which a backend's plan changes, in every dtype, alternately dense and
/// misaligned with strides.
pub fn breakpoints(cols: &[usize], rows: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    let around =
        |sizes: &[usize]| -> BTreeSet<usize> { sizes.iter().flat_map(|&n| [n.saturating_sub(1), n, n + 1]).collect() };
    // Also a length that ends in half a vector of 16-bit elements.
    let halves = cols.iter().map(|&cols| cols + 4);
    let of_cols = around(cols).into_iter().chain(halves).filter(|&cols| cols > 0).map(|cols| (3, cols));
    let of_rows = around(rows).into_iter().map(|rows| (rows, if rows > 4096 { 3 } else { 33 }));
    let sizes: Vec<(usize, usize)> = of_cols.chain(of_rows).collect();
    for (kind, norm) in with_norms(&Kind::BEFORE) {
        for ((i, &(rows, cols)), (j, dtype)) in each(sizes.iter().enumerate(), DType::ALL.into_iter().enumerate()) {
            // Every second case has no offset; each other offset is combined with every layout and
            // dtype.
            let weight_offset = if i % 2 == 0 { WEIGHT_OFFSETS[1 + (i / 2 + j) % 3] } else { 0.0 };
            let plain = Case { weight_offset, ..Case::plain(kind, norm, dtype, rows, cols) };
            cases.push(Case { present: GRADIENTS, layout: alternate(i + j), ..plain });
        }
    }
    cases.extend(of_pieces(&sizes));
    cases.into_iter().map(Case::normalized).collect()
}

fn of_pieces(sizes: &[(usize, usize)]) -> impl Iterator<Item = Case> {
    pieces::lists().flat_map(|lists| (lists.breakpoints)(sizes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_their_sizes_and_every_id_reads_back() {
        for (profile, sizes) in [(Profile::Smoke, 520..1700), (Profile::Core, 4700..9501), (Profile::Stress, 100..150)]
        {
            let cases = profile.cases(0);
            assert!(sizes.contains(&cases.len()), "{}: {}", profile.name(), cases.len());
            for case in cases {
                assert_eq!(case.to_string().parse(), Ok(case));
            }
        }
    }

    #[test]
    fn core_covers_combinations_of_values_on_different_axes() {
        // The possible combinations are taken from a long list of drawn cases.
        let possible = drawn(7, 20_000, |_| MOST_DRAWN).into_iter().map(Case::normalized).collect::<Vec<_>>();
        let core = Profile::Core.cases(0);
        let keys = |cases: &[Case], of: fn(&Case) -> Vec<u64>| cases.iter().flat_map(of).collect::<HashSet<u64>>();
        let share = |of: fn(&Case) -> Vec<u64>| {
            let (core, possible) = (keys(&core, of), keys(&possible, of));
            possible.intersection(&core).count() as f64 / possible.len() as f64
        };
        let (pairs, triples) =
            (share(|case| combinations::<2>(case).collect()), share(|case| combinations::<3>(case).collect()));
        assert_eq!(pairs, 1.0);
        assert!(triples > 0.95, "{triples}");
    }
}
