//! `x` as the sum of several parts: math.md, equation (1').

use rmsnorm_spec::{CastOrder, DType, DTypes, Norm, Tensor, TensorSet};

use super::math::{
    ALL_PRESENT, Bug, BugList, Call, Case, Dice, Family, ForwardRow, GoodCall, Kind, Layout, Lists, Misuse, PieceMath,
    Refusal, Tensors, Trial, bugs, drawn, each, is_meaningful, round,
};

bugs! {
    /// The bugs of a sum of parts.
    PartsBug:
    PartMissing "part_missing" BOTH PARTS "the last part is not added";
    PartTwice "part_twice" BOTH PARTS "the first part is added twice";
    PartsReversed "parts_reversed" BOTH PARTS "parts are added from the last to the first";
    PartsByTree "parts_by_tree" BOTH PARTS "the two halves of the parts are summed separately, then added";
    PartsRounded "parts_rounded" BOTH PARTS "the sum of parts is rounded to the activations' dtype before the residual is added";
    PartsEachRounded "parts_each_rounded" BOTH PARTS "the sum is rounded after every part";
    PartsInF64 "parts_in_f64" BOTH PARTS "parts are added in f64";
    ResidualFirst "residual_first" BOTH PARTS "parts are added to the residual";
    ResidualPerPart "residual_per_part" BOTH PARTS "the residual is added with every part";
    ResidualOfLastPart "residual_of_last_part" BOTH PARTS "the residual is not added if there are more than two parts";
    PartsUnrounded "parts_unrounded" BOTH PARTS "the norm works on the sum before its rounding";
    PartsDense "parts_dense" BOTH PARTS "the distance of parts does not include the gaps between rows";
}

/// The piece.
pub(crate) struct Parts;

impl PieceMath for Parts {
    const BUGS: &'static [Bug] = PartsBug::BUGS;
    const LISTS: Lists = Lists { smoke, core, drawn: |seed| drawn(seed ^ 0x9a27, 1000, draw), ..Lists::NONE };
    const MISUSE: &'static [Misuse] = &[
        ("no_parts", Refusal::Invalid("x"), |call| call.call.parts = 0),
        ("more_parts_than_x_has", Refusal::Length("x"), |call| call.call.parts = 3),
        ("parts_beyond_memory", Refusal::Invalid("x"), |call| call.call.parts = usize::MAX),
        ("parts_and_a_sum_after", Refusal::Unsupported, GoodCall::add_after),
    ];

    fn forward(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [ForwardRow]) {
        for (index, row) in rows.iter_mut().enumerate() {
            let residual = tensors.row(Tensor::Residual, index);
            (row.h, row.sum) = sum(call, tensors, index, residual.as_deref());
        }
    }
}

/// The values to normalize, and `residual_out`: in a correct kernel, both are the same sum of the
/// parts of a row.
fn sum(call: &Call, tensors: &Tensors<'_, '_>, row: usize, residual: Option<&[f32]>) -> (Vec<f32>, Vec<f32>) {
    let count = call.problem.parts;
    let is_dense = call.has(PartsBug::PartsDense);
    let stride = if is_dense { call.spec.rows * call.spec.cols } else { call.part_stride };
    let part = |part: usize| tensors.get(Tensor::X).map(|x| x.row_from(part * stride, row));
    let mut parts: Vec<Vec<f32>> = (0..count).filter_map(part).collect();
    match call.bug() {
        Some(PartsBug::PartMissing) => parts.truncate(count - 1),
        Some(PartsBug::PartTwice) => parts.push(parts[0].clone()),
        Some(PartsBug::PartsReversed) => parts.reverse(),
        Some(_) | None => {}
    }
    let residual = residual.filter(|_| !(call.has(PartsBug::ResidualOfLastPart) && count > 2));
    let activation = call.problem.dtypes.activation;
    let sum_of = |col: usize| {
        let values: Vec<f32> = parts.iter().map(|part| part[col]).collect();
        let addend = residual.map(|residual| residual[col]);
        let step = if call.has(PartsBug::PartsEachRounded) { activation } else { DType::F32 };
        let add = |sum: f32, value: f32| {
            let again = addend.filter(|_| call.has(PartsBug::ResidualPerPart)).unwrap_or(0.0);
            round(sum + value + again, step)
        };
        let serial = |values: &[f32]| values.iter().copied().reduce(add).unwrap_or(0.0);
        let sum = match call.bug() {
            Some(PartsBug::PartsInF64) => {
                let sum: f64 = values.iter().chain(&addend).map(|value| f64::from(*value)).sum();
                return sum as f32;
            }
            Some(PartsBug::ResidualFirst) => {
                return addend.iter().chain(&values).copied().reduce(|sum, value| sum + value).unwrap_or(0.0);
            }
            Some(PartsBug::PartsByTree) => {
                let (first, second) = values.split_at(values.len().div_ceil(2));
                serial(first) + serial(second)
            }
            Some(PartsBug::PartsRounded) => round(serial(&values), activation),
            Some(_) | None => serial(&values),
        };
        addend.map_or(sum, |addend| sum + addend)
    };
    let sums: Vec<f32> = (0..call.spec.cols).map(sum_of).collect();
    let rounded: Vec<f32> = sums.iter().map(|&sum| round(sum, call.problem.dtypes.residual)).collect();
    (if call.has(PartsBug::PartsUnrounded) { sums } else { rounded.clone() }, rounded)
}

fn draw(dice: &mut Dice, _: usize) -> Option<Case> {
    let (norm, parts) = (dice.pick(&Norm::USUAL), dice.pick(&COUNTS));
    one(dice, 1 << 13, |case| Case { norm, parts, ..case })
}

/// Numbers of parts: 2, the smallest group of ranks; 4 and 8, a node; 3 and 5, not powers of two;
/// 17, a token's experts.
pub(crate) const COUNTS: [usize; 6] = [2, 3, 4, 5, 8, 17];

/// The tensors of a layer between two all-reduces.
const USUAL: TensorSet =
    TensorSet::of(&[Tensor::Weight, Tensor::Residual, Tensor::ResidualOut, Tensor::Rstd, Tensor::Mean]);

/// A dense case with the tensors of such a layer.
pub(crate) fn plain(norm: Norm, parts: usize, dtype: DType, (rows, cols): (usize, usize)) -> Case {
    Case { parts, present: USUAL, ..Case::plain(Kind::FORWARD_PARTS, norm, dtype, rows, cols) }
}

/// Whether a case can prove something: [`is_meaningful`], and no tiny eps for families with few
/// values, whose sums are often zero.
pub(crate) fn is_good(case: &Case) -> bool {
    let cancels = matches!(case.family, Family::Exact | Family::Mixed | Family::Codes) && case.eps < 1e-6;
    is_meaningful(case) && !cancels
}

/// Every norm, family and count with the other axes drawn, and every dtype.
pub(crate) fn smoke() -> Vec<Case> {
    let mut dice = Dice { state: 31 };
    let mut cases = Vec::new();
    for (i, norm) in Norm::USUAL.into_iter().enumerate() {
        for (j, &family) in Family::OF_FLOATS.iter().enumerate() {
            let parts = COUNTS[(i + j) % COUNTS.len()];
            cases.extend(one(&mut dice, 1 << 12, |case| Case { norm, family, parts, ..case }));
        }
        for (j, dtype) in DType::ALL.into_iter().enumerate() {
            let parts = COUNTS[j];
            cases.push(plain(norm, parts, dtype, (3, 129)));
            // More rows than a small call has, and an f32 residual, for which sums are not exact.
            cases.push(plain(norm, parts, dtype, (70, 64)));
            cases.push(Case { dtypes: DTypes::uniform(dtype).widened(true, true), ..plain(norm, 8, dtype, (5, 45)) });
            cases.push(Case { layout: Layout::Uniform { pad: 3, offset: 1 }, ..plain(norm, 3, dtype, (5, 40)) });
        }
        cases.push(plain(norm, 4, DType::Bf16, (0, 33)));
        cases.push(plain(norm, 2, DType::F16, (2, 17_389)));
        cases.push(Case { present: TensorSet::NONE, ..plain(norm, 2, DType::Bf16, (9, 257)) });
    }
    cases.extend(determinism(&[(65, 33)]));
    cases.into_iter().map(Case::normalized).collect()
}

/// The cases of the core profile.
pub(crate) fn core() -> Vec<Case> {
    let mut dice = Dice { state: 32 };
    let mut cases = Vec::new();
    for (i, norm) in Norm::USUAL.into_iter().enumerate() {
        for (j, &family) in Family::OF_FLOATS.iter().enumerate() {
            for parts in COUNTS {
                cases.extend(one(&mut dice, 1 << 12, |case| Case { norm, family, parts, ..case }));
            }
            let dtype = DType::ALL[(i + j) % 3];
            cases.push(Case { family, ..plain(norm, COUNTS[j % COUNTS.len()], dtype, (31, 65)) });
        }
        let presents = [(ALL_PRESENT, 37), (USUAL, 40), (TensorSet::of(&[Tensor::Bias]), 131)];
        for ((j, dtypes), (present, cols)) in each(DTypes::ALL.into_iter().enumerate(), presents) {
            let cast_order = if j % 2 == 0 { CastOrder::AtStore } else { CastOrder::BeforeWeight };
            let layout = Layout::Mixed((i * 9 + j) as u32);
            let case = plain(norm, COUNTS[(i + j) % COUNTS.len()], dtypes.activation, (5, cols));
            cases.push(Case { dtypes, present, cast_order, layout, weight_offset: 0.3, ..case });
        }
        for (j, size) in [(1, 1), (3, 2), (2, 4096), (3, 4099), (2, 8192), (1, 65_537), (4100, 33), (1, 262_147)]
            .into_iter()
            .enumerate()
        {
            cases.extend(DType::ALL.map(|dtype| plain(norm, COUNTS[(i + j) % 5], dtype, size)));
        }
        // A matrix larger than the caches.
        cases.push(plain(norm, 3, DType::ALL[i], (1025, 4099)));
    }
    cases.extend(determinism(&[(1, 1), (257, 33), (300, 129), (600, 7)]));
    cases.retain(is_good);
    cases
}

/// A drawn case, after `change`, that can prove something.
fn one(dice: &mut Dice, most: usize, change: impl Fn(Case) -> Case) -> Option<Case> {
    dice.one(most, |case| change(Case { kind: Kind::FORWARD_PARTS, ..case }), is_good)
}

fn determinism(shapes: &[(usize, usize)]) -> Vec<Case> {
    let mut cases = Vec::new();
    for ((i, &shape), (j, norm)) in each(shapes.iter().enumerate(), Norm::USUAL.into_iter().enumerate()) {
        let case = plain(norm, COUNTS[(i + j) % COUNTS.len()], DType::ALL[(i + j) % 3], shape);
        cases.push(Case { trial: Trial::Determinism { repeats: 3 }, layout: Layout::Mixed(i as u32), ..case });
        cases.push(Case { trial: Trial::Metamorphic, ..case });
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn core_has_every_count_norm_and_mix_of_dtypes_with_and_without_each_tensor() {
        let cases: Vec<Case> = core().into_iter().map(Case::normalized).collect();
        let counts: HashSet<_> = cases.iter().map(|case| (case.parts, case.norm, case.dtypes.activation)).collect();
        assert_eq!(counts.len(), COUNTS.len() * Norm::USUAL.len() * DType::ALL.len());
        let mixes: HashSet<_> = cases.iter().map(|case| case.dtypes).collect();
        assert_eq!(mixes.len(), DTypes::ALL.len());
        for tensor in [Tensor::Weight, Tensor::Bias, Tensor::Residual, Tensor::ResidualOut, Tensor::Mean, Tensor::Rstd]
        {
            let with = |is_there| cases.iter().filter(|case| case.present.has(tensor) == is_there).count();
            assert!(with(true) > 30 && with(false) > 30, "{tensor}: {} and {}", with(true), with(false));
        }
        for case in &cases {
            assert_eq!(case.to_string().parse(), Ok(*case));
        }
        assert!((200..400).contains(&cases.len()), "{}", cases.len());
    }
}
