//! Plans of quantized calls: pinned plans of measured calls, and properties of all.

use rmsnorm_spec::depth::sum_depth;
use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind, ScaleLayout, ScaleRounding};

use super::super::{gathers_scales, is_split, lanes_of_set};
use super::*;

const BLOCK: ScaleKind = ScaleKind::Block { cols: 128, is_power_of_two: false };
const HALF_BLOCK: ScaleKind = ScaleKind::Block { cols: 64, is_power_of_two: true };
const MX: ScaleKind = ScaleKind::Mx { rounding: ScaleRounding::Up };
const KINDS: [ScaleKind; 6] = [ScaleKind::Given, ScaleKind::Current, ScaleKind::Row, BLOCK, HALF_BLOCK, MX];

fn problem(quant: QuantSpec, dtype: DType, (rows, cols): (usize, usize), tensors: TensorSet) -> Problem {
    Problem::quantized_forward(Norm::Rms, rows, cols, dtype, quant, tensors)
}

fn e4m3(scale: ScaleKind) -> QuantSpec {
    QuantSpec::new(CodeType::E4m3, scale)
}

#[track_caller]
fn plan_of(problem: &Problem, caps: &Caps) -> Plan {
    let planned = plan(problem, &Layout::dense(problem), caps);
    planned.unwrap_or_else(|unfit| panic!("{problem:?}, {caps:?}: {unfit}"))
}

/// The plan of a bf16 call with a weight and these tensors, as text.
fn words(scale: ScaleKind, size: (usize, usize), tensors: &[Tensor]) -> String {
    let tensors = WEIGHT.union(TensorSet::of(tensors));
    plan_of(&problem(e4m3(scale), DType::Bf16, size, tensors), &Caps::h200()).to_string()
}

#[test]
fn rms_norm_to_codes_on_an_h200() {
    let size = (16384, 4096);
    let row = "quantized_forward threads=128 packs=4x8 subgroups=32 grid=16384";
    let one = "threads=256 packs=1x8 grid=1";
    for (scale, tensors, expected) in [
        (ScaleKind::Given, &[][..], row.to_owned()),
        (ScaleKind::Row, &[], row.to_owned()),
        (BLOCK, &[], row.to_owned()),
        (MX, &[Tensor::Y], row.to_owned()),
        (ScaleKind::Given, &[Tensor::Amax], format!("clear {one}; {row}")),
        (ScaleKind::Given, &[Tensor::CodesT], format!("{row}; transpose_codes threads=256 packs=1x8 grid=16384")),
        // Two passes: for the amax, and with the scale that follows from it.
        (ScaleKind::Current, &[], format!("clear {one}; 2 of {row}; tensor_scale threads=32 packs=1x8 grid=1")),
    ] {
        assert_eq!(words(scale, size, tensors), expected, "{scale:?} {tensors:?}");
    }
    let along = [Tensor::Rstd, Tensor::CodesColumnwise, Tensor::ScalesColumnwise];
    assert_eq!(words(MX, size, &along), format!("{row}; columnwise threads=8 packs=1x8 rows=32 grid=8192"));
    let long = "quantized_forward_streaming threads=1024 packs=4x8 subgroups=32 grid=4";
    assert_eq!(words(MX, (4, 2_097_152), &[]), long);
}

/// An accumulated amax is not cleared, and neither are scales without gaps.
#[test]
fn cells_are_cleared_and_padding_zeroed_where_nothing_else_writes_them() {
    let steps = |quant: QuantSpec, tensors: &[Tensor], rows| {
        let plan = plan_of(&problem(quant, DType::F32, (rows, 96), TensorSet::of(tensors)), &Caps::laptop());
        let stem = |dispatch: &Dispatch| match (dispatch.key.program, dispatch.rows.end) {
            (Program::Clear, bytes) => format!("clear {bytes}"),
            (program, _) => program.info().stem.to_owned(),
        };
        dispatches(&plan).map(stem).collect::<Vec<_>>()
    };
    let amax = &[Tensor::Amax];
    assert_eq!(steps(e4m3(ScaleKind::Given), amax, 5), ["clear 4", "quantized_forward"]);
    assert_eq!(steps(e4m3(ScaleKind::Given).folds_amax(), amax, 5), ["quantized_forward"]);
    assert_eq!(steps(e4m3(ScaleKind::Given), amax, 0), ["clear 4"]);
    let laid_out = |layout| steps(e4m3(MX).layout(layout), &[], 5);
    assert_eq!(laid_out(ScaleLayout::RowMajor), ["quantized_forward"]);
    assert_eq!(laid_out(ScaleLayout::PackedUe8m0 { ld: 7 }), ["clear 28", "quantized_forward"]);
    assert_eq!(laid_out(ScaleLayout::Swizzled128x4), ["clear 512", "quantized_forward"]);
    // In the layout without gaps these scales would have four times the bytes.
    let bytes = e4m3(HALF_BLOCK).layout(ScaleLayout::PackedUe8m0 { ld: 8 });
    assert_eq!(steps(bytes, &[], 5), ["clear 32", "quantized_forward"]);
    let column_major = |ld| steps(e4m3(BLOCK).layout(ScaleLayout::ColumnMajor { ld }), &[], 5);
    assert_eq!(column_major(8), ["clear 32", "quantized_forward"]);
    assert_eq!(column_major(5), ["quantized_forward"]);
    // A tensor without rows still has a scale.
    assert_eq!(steps(e4m3(ScaleKind::Current), &[], 0), ["clear 4", "tensor_scale"]);
}

#[test]
fn kernels_are_such_as_a_device_takes_and_a_row_depends_on_nothing_else() {
    for caps in Plans::devices_by_exchange() {
        for (scale, dtype) in KINDS.into_iter().flat_map(|scale| [(scale, DType::Bf16), (scale, DType::F32)]) {
            for cols in Plans::cols() {
                let problem = |rows| problem(e4m3(scale), dtype, (rows, cols), WEIGHT);
                let here = plan_of(&problem(SOME_ROWS), &caps);
                for Dispatch { key, .. } in dispatches(&here) {
                    let KernelKey { program, tile, .. } = key;
                    assert!((32..=caps.max_threads).contains(&tile.threads()), "{cols} {here}");
                    assert!(crate::source::workgroup_bytes(key) <= caps.workgroup_bytes, "{cols} {key:?} {caps:?}");
                    if *program == Program::QuantizedForward {
                        assert!(tile.columns() >= cols && (1..=8).contains(&tile.packs), "{cols} {here}");
                    }
                    // Threads without columns add zeros.
                    let threads_per_row = tile.threads_per_row.min(cols.div_ceil(PAIR) as u32);
                    let added = KernelKey { tile: Tile { threads_per_row, ..*tile }, ..*key };
                    let chain = chains::of_row(&added, cols).unwrap_or(0);
                    assert!(chain <= sum_depth(cols) as u64, "{cols} {here}");
                    // Lanes that share a scale belong to one row, in each of its packs.
                    let lanes = lanes_of_set(scale, is_split(&problem(1))).unwrap_or(1);
                    let is_whole = tile.threads_per_row.is_multiple_of(lanes);
                    assert!(is_whole || !program.writes_codes(), "{cols} {here}");
                }
                for access in ACCESSES {
                    let layout = layout(&problem(1), access);
                    let one = plan(&problem(1), &layout, &caps).expect("a plan");
                    assert_eq!(mapping(&one), mapping(&here), "{cols} {scale:?} {access:?} {caps:?}");
                }
            }
        }
    }
}

/// The division of rows in quantized calls.
fn mapping(plan: &Plan) -> Vec<(u32, u32, Reduction)> {
    let mut tiles: Vec<_> = dispatches(plan)
        .filter(|dispatch| dispatch.key.program.writes_codes())
        .map(|Dispatch { key: KernelKey { tile, .. }, .. }| (tile.threads_per_row, tile.groups, tile.reduction))
        .collect();
    tiles.dedup();
    assert_eq!(tiles.len(), 1, "{plan}");
    tiles
}

/// A word of four byte scales is written at once if shuffles can combine them and no word has
/// scales of two rows.
#[test]
fn scales_that_are_bytes_are_gathered_where_they_can_be() {
    let gathers = |quant: QuantSpec, dtype, cols, caps: &Caps| {
        let plan = plan_of(&problem(quant, dtype, (SOME_ROWS, cols), WEIGHT), caps);
        let mut keys = dispatches(&plan).filter(|dispatch| dispatch.key.program.writes_codes());
        keys.next().expect("a kernel").key.gathers_scales
    };
    let (h200, lavapipe) = (Caps::h200(), Caps::lavapipe());
    assert!(gathers(e4m3(MX), DType::Bf16, 4096, &h200) && gathers(e4m3(MX), DType::F32, 4096, &h200));
    // A word belongs to sixteen lanes, and a subgroup has eight.
    assert!(!gathers(e4m3(MX), DType::Bf16, 4096, &lavapipe));
    assert!(!gathers(e4m3(MX), DType::Bf16, 4096, &Caps::phone()));
    // 33 scales per row.
    assert!(!gathers(e4m3(MX), DType::Bf16, 1056, &h200));
    assert!(gathers(e4m3(MX).layout(ScaleLayout::Swizzled128x4), DType::Bf16, 1056, &h200));
    assert!(!gathers(e4m3(BLOCK), DType::Bf16, 4096, &h200));
    let packed = e4m3(HALF_BLOCK).layout(ScaleLayout::PackedUe8m0 { ld: SOME_ROWS });
    assert!(gathers(packed, DType::Bf16, 4096, &h200) && !gathers(packed, DType::F32, 4096, &h200));
    let tile = Tile::new(8, 4, 1, Reduction::Subgroup(32));
    assert!(!gathers_scales(&e4m3(MX), &tile, false), "half a word's lanes are of another row");
}

/// Codes and transposed codes that are aligned to words are moved by word.
#[test]
fn codes_are_accessed_as_they_lie() {
    let call = problem(e4m3(ScaleKind::Given), DType::Bf16, (8, 64), TensorSet::of(&[Tensor::CodesT]));
    let placed = |offset, row_stride| Placed {
        storage: call.storage(Tensor::Codes).expect("codes"),
        offset,
        row_stride,
        group_stride: 0,
    };
    let access = |codes: Placed| Layout::new(&call, [codes], [], false, false).access;
    assert_eq!(access(placed(8, 64)), Access::Aligned);
    assert_eq!([access(placed(4, 64)), access(placed(8, 68))], [Access::Words; 2]);
    assert_eq!([access(placed(2, 64)), access(placed(8, 65))], [Access::Parts; 2]);
    let transposed =
        |codes, codes_t| Layout::dense(&call).with_codes(&call, None, [Some(codes), Some(codes_t)]).transpose_access;
    assert_eq!(transposed(placed(4, 68), placed(8, 12)), Access::Words);
    for (codes, codes_t) in [((2, 64), (0, 8)), ((0, 65), (0, 8)), ((0, 64), (1, 8)), ((0, 64), (0, 9))] {
        assert_eq!(transposed(placed(codes.0, codes.1), placed(codes_t.0, codes_t.1)), Access::Parts);
    }
    let scales = |offset, cols| {
        let problem = problem(e4m3(MX), DType::Bf16, (8, cols), WEIGHT);
        let placed = Placed::vector(problem.storage(Tensor::Scales).expect("scales"), offset);
        Layout::dense(&problem).with_codes(&problem, Some(placed), [None; 2]).scales_access
    };
    assert_eq!([scales(4, 128), scales(2, 128), scales(4, 96)], [Access::Words, Access::Parts, Access::Parts]);
}
