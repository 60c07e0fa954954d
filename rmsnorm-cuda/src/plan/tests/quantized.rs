//! Plans of calls to codes: descriptions of the measured shapes, and properties of every plan.

use rmsnorm_spec::Norm;
use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind, ScaleLayout, ScaleRounding};

use super::*;

const BLOCK: ScaleKind = ScaleKind::Block { cols: 128, is_power_of_two: false };
const MX: ScaleKind = ScaleKind::Mx { rounding: ScaleRounding::Up };
const KINDS: [ScaleKind; 5] = [ScaleKind::Given, ScaleKind::Current, ScaleKind::Row, BLOCK, MX];

fn problem(norm: Norm, scale: ScaleKind, (rows, cols): (usize, usize), tensors: TensorSet) -> Problem {
    Problem::quantized_forward(norm, rows, cols, DType::Bf16, QuantSpec::new(CodeType::E4m3, scale), tensors)
}

/// The description of the plan of a call with a weight and these tensors.
fn words(scale: ScaleKind, size: (usize, usize), tensors: &[Tensor]) -> String {
    let tensors = WEIGHT.union(TensorSet::of(tensors));
    plan(&problem(Norm::Rms, scale, size, tensors), 16, &Caps::h200()).to_string()
}

#[test]
fn rms_norm_to_codes_on_an_h200() {
    let size = (16384, 4096);
    for (scale, tensors, expected) in [
        (ScaleKind::Given, &[][..], "quantized_forward threads=128 packs=4x8 grid=16384"),
        (ScaleKind::Row, &[], "quantized_forward threads=128 packs=4x8 grid=16384"),
        (BLOCK, &[], "quantized_forward threads=64 packs=8x8 grid=16384"),
        (MX, &[Tensor::Y], "quantized_forward threads=64 packs=8x8 grid=16384"),
        (ScaleKind::Given, &[Tensor::Amax], "clear=4; quantized_forward threads=128 packs=4x8 grid=16384"),
        (
            ScaleKind::Given,
            &[Tensor::CodesT],
            "quantized_forward_transposed threads=128 packs=4x8 rows=4x8 ring=2 shared=192KiB grid=132",
        ),
        // First the largest magnitude, with as many blocks as are resident.
        (
            ScaleKind::Current,
            &[],
            "clear=8; quantized_forward threads=128 packs=4x8 grid=1320; \
             quantized_forward threads=128 packs=4x8 grid=16384",
        ),
    ] {
        assert_eq!(words(scale, size, tensors), expected, "{scale:?} {tensors:?}");
    }
    // Columns of the copy that do not all begin on 16 bytes.
    let ragged =
        "quantized_forward threads=128 packs=4x8 grid=16383; transpose_codes threads=256 packs=1x8 ragged grid=4096";
    assert_eq!(words(ScaleKind::Given, (16383, 4096), &[Tensor::CodesT]), ragged);
    let along = [Tensor::Rstd, Tensor::CodesColumnwise, Tensor::ScalesColumnwise];
    let expected = "quantized_forward threads=64 packs=8x8 grid=16384; columnwise threads=256 packs=1x8 grid=8192";
    assert_eq!(words(MX, size, &along), expected);
    let long = "quantized_forward_streaming threads=8x1024 packs=1x8 ragged grid=32";
    assert_eq!(words(MX, (4, 2_097_152), &[]), long);
}

#[test]
fn the_scale_of_a_tensor_is_looked_for_by_blocks_that_stay() {
    for (size, expected) in [
        ((65536, 1024), "clear=8; threads=32 packs=4x8 rows=8 grid=528; threads=32 packs=4x8 grid=65536"),
        // A step for each block: they wait for each other, and then write the codes.
        ((4224, 1024), "clear=1056; threads=32 packs=4x8 rows=16 cooperative grid=264"),
        ((4225, 1024), "clear=8; threads=32 packs=4x8 rows=8 grid=528; threads=32 packs=4x8 grid=4225"),
        // With fewer threads in a block, the device holds more rows.
        ((528, 8192), "clear=528; threads=128 packs=8x8 rows=4 cooperative grid=132"),
        ((529, 8192), "clear=1072; threads=128 packs=8x8 rows=2 cooperative grid=265"),
        ((3, 4096), "clear=16; threads=128 packs=4x8 rows=2 cooperative grid=2"),
        ((1, 4096), "threads=128 packs=4x8 rows=2 cooperative grid=1"),
    ] {
        assert_eq!(words(ScaleKind::Current, size, &[]), expected.replace("threads", "quantized_forward threads"));
    }
    let alone = Caps { cooperates: false, ..Caps::h200() };
    let two = plan(&problem(Norm::Rms, ScaleKind::Current, (1, 4096), WEIGHT), 16, &alone);
    assert_eq!(launches(&two).count(), 2, "{two}");
    let mut cooperative = 0;
    for (caps, norm) in DEVICES.into_iter().flat_map(|caps| Norm::USUAL.map(|norm| (caps, norm))) {
        for (cols, tensors) in Plans::cols().into_iter().flat_map(|cols| [(cols, WEIGHT), (cols, WEIGHT_RESIDUAL)]) {
            let call = problem(norm, ScaleKind::Current, (1 << 20, cols), tensors.with(Tensor::CodesT));
            let plan = plan(&call, 16, &caps);
            let [_, find, write, _] = plan.steps.map(|step| match step {
                Some(Step::Launch { key, grid, threads, .. }) => Some((key, grid, threads)),
                Some(Step::Clear { .. }) | None => None,
            });
            let (Some((find, grid, threads)), Some((write, ..))) = (find, write) else { panic!("{plan:?}") };
            assert!(grid * threads <= caps.sms * caps.threads_per_sm, "{cols}: {plan:?}");
            // Both kernels compute the same rstd.
            let streams = |key: KernelKey| key.program == Program::QuantizedForwardStreaming;
            let lanes = |key: KernelKey| (streams(key), key.tile.threads_per_row, key.tile.packs, key.tile.cluster);
            assert_eq!(lanes(find), lanes(write), "{cols}: {plan:?}");
            assert!(write.call.tensors.has(Tensor::CodesT) && !find.call.tensors.has(Tensor::CodesT), "{plan:?}");
            // Blocks that wait for each other are all resident, and compute that rstd too.
            for rows in [1, 40, 520, 1200] {
                let few = self::plan(&Problem { rows, ..call }, 16, &caps);
                cooperative += usize::from(few.keys().any(|key| key.tile.is_cooperative));
                for Launch { key, threads, grid, .. } in launches(&few).filter(|launch| launch.key.tile.is_cooperative)
                {
                    // Every architecture holds 16 blocks on a multiprocessor. A bound of more threads than it
                    // has would not limit registers.
                    let blocks_per_sm = key.tile.blocks_per_sm;
                    assert!(blocks_per_sm <= 16 && threads * blocks_per_sm <= caps.threads_per_sm, "{few:?}");
                    assert!(grid <= caps.sms * blocks_per_sm && threads * blocks_per_sm * 32 <= 1 << 16, "{few:?}");
                    // With a barrier for each row of several warps, a multiprocessor holds four blocks.
                    let has_barriers = key.tile.groups > 1 && key.tile.threads_per_row > 32;
                    assert!(!has_barriers || grid <= caps.sms * blocks_per_sm.min(4), "{few:?}");
                    assert!(!has_barriers || key.tile.groups <= 15, "{few:?}");
                    // The words of several blocks are zero, and read four at a time.
                    let words = (grid > 1) as usize * grid.next_multiple_of(4) as usize;
                    let cleared: usize = few
                        .steps
                        .iter()
                        .flatten()
                        .map(|step| match step {
                            Step::Clear { tensor: Tensor::Workspace, first: 0, bytes, .. } => *bytes,
                            Step::Clear { .. } | Step::Launch { .. } => 0,
                        })
                        .sum();
                    assert!(cleared == words * 4 && few.workspace.len >= words, "{few:?}");
                    assert!(grid as usize * key.tile.groups as usize >= rows && lanes(key) == lanes(write), "{few:?}");
                }
            }
        }
    }
    assert!(cooperative > 0);
}

/// One kernel writes codes and their transposed copy if its blocks are busy to the end, and x alone is read.
#[test]
fn codes_are_transposed_on_chip_where_blocks_stay_busy() {
    let transposed = TensorSet::of(&[Tensor::CodesT]);
    let is_one = |norm, size, tensors: TensorSet, caps: &Caps| {
        let plan = plan(&problem(norm, ScaleKind::Given, size, tensors.union(transposed)), 16, caps);
        let programs: Vec<_> = plan.keys().map(|key| key.program).collect();
        match programs[..] {
            [Program::QuantizedForwardTransposed] => true,
            [Program::QuantizedForward, Program::TransposeCodes] => false,
            _ => panic!("{plan:?}"),
        }
    };
    let h200 = Caps::h200();
    // 132 multiprocessors with 32 rows each, with 64 rows, with two times 64.
    for (cols, tile, turns) in [(4096, 32, 132), (2048, 64, 132), (1024, 64, 264)] {
        let least = tile * (turns * 7_usize).div_ceil(8);
        for (rows, expected) in [
            (tile * turns, true),
            (tile * turns + 1, false),
            (tile * turns + 16, false),
            (least, true),
            (least - 16, true),
            (least - tile, false),
            (tile * turns * 3 / 2, false),
            (tile * turns * 20 + 16, true),
        ] {
            assert_eq!(is_one(Norm::Rms, (rows, cols), WEIGHT, &h200), expected, "{rows}x{cols}");
            assert!(!is_one(Norm::Rms, (rows, cols), WEIGHT_RESIDUAL, &h200), "{rows}x{cols}");
            assert!(!is_one(Norm::Rms, (rows, cols), WEIGHT, &Caps::a100()), "{rows}x{cols}");
        }
        let large = Caps { tuning: crate::plan::Tuning::H200.with_large_plans(), ..h200 };
        assert!(is_one(Norm::Rms, (16, cols), WEIGHT, &large) && !is_one(Norm::Rms, (17, cols), WEIGHT, &large));
    }
    // For f32, at most a sixteenth of the turns may be empty.
    for (tiles, expected) in [(123, false), (124, true)] {
        let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Given);
        let call = Problem::quantized_forward(Norm::Rms, 32 * tiles, 4096, DType::F32, quant, transposed);
        let is_one = plan(&call, 16, &h200).keys().any(|key| key.program == Program::QuantizedForwardTransposed);
        assert_eq!(is_one, expected, "{tiles}");
    }
    // No rows, no launch.
    let none = plan(&problem(Norm::Rms, ScaleKind::Given, (0, 4096), transposed), 16, &h200);
    assert_eq!(none.keys().count(), 0, "{none:?}");
    // Rows of less than a warp.
    assert!(!is_one(Norm::Rms, (132 * 64 * 16, 64), WEIGHT, &h200));
    // Groups of columns, with rows that fill the device.
    let groups = Problem { groups: 8, ..problem(Norm::Rms, ScaleKind::Given, (67_584, 8 * 256), transposed) };
    assert!(plan(&groups, 16, &h200).keys().all(|key| key.program != Program::QuantizedForwardTransposed));
    assert!(!is_one(Norm::Rms, (16384, 4104), WEIGHT, &h200));
    // The suite's cases.
    let many =
        [(3728, 2056, DType::F16), (3968, 2056, DType::Bf16), (7936, 1032, DType::F32), (29_584, 250, DType::F16)];
    for (i, (rows, cols, dtype)) in many.into_iter().enumerate() {
        let quant = QuantSpec::new(CodeType::E4m3, KINDS[i / 2]);
        let tensors = WEIGHT.union(transposed);
        let call = Problem::quantized_forward(Norm::USUAL[usize::from(i == 1)], rows, cols, dtype, quant, tensors);
        let plan = plan(&call, 16, &h200);
        assert!(plan.keys().any(|key| key.program == Program::QuantizedForwardTransposed), "{plan:?}");
    }
    let mut count = 0;
    for (caps, norm) in DEVICES.into_iter().flat_map(|caps| Norm::USUAL.map(|norm| (caps, norm))) {
        for (cols, dtype) in Plans::cols().into_iter().flat_map(|cols| DType::ALL.map(|dtype| (cols, dtype))) {
            let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Given);
            let call = |tensors| Problem::quantized_forward(norm, 1 << 20, cols, dtype, quant, tensors);
            let (two, one) = (plan(&call(WEIGHT), 16, &caps), plan(&call(WEIGHT.union(transposed)), 16, &caps));
            for Launch { key: KernelKey { tile, program, .. }, threads, shared_bytes, grid, .. } in launches(&one) {
                if program != Program::QuantizedForwardTransposed {
                    continue;
                }
                count += 1;
                // A row has the bits that it has without the copy.
                let lanes = |tile: Tile| (tile.pack, tile.packs, tile.threads_per_row, tile.cluster);
                assert!(two.keys().all(|key| lanes(key.tile) == lanes(tile)), "{one:?}");
                assert!(threads * tile.blocks_per_sm <= 512 && grid == caps.sms * tile.blocks_per_sm, "{one:?}");
                assert!(threads == tile.threads_per_row || tile.threads_per_row == 32 || tile.groups <= 15, "{one:?}");
                let [tile_rows, stride] = [tile.groups * tile.unroll, tile.threads_per_row * tile.pack * tile.packs];
                assert!([32, 64].contains(&tile_rows) && stride as usize >= cols && stride.is_multiple_of(128));
                let of_x = tile.stages * tile.groups * dtype.size() as u32;
                assert_eq!(shared_bytes, stride * (tile_rows + of_x), "{one:?}");
                // An exchange of two sums for each warp, twice.
                let exchange = 16 * tile.groups * tile.threads_per_row.div_ceil(32);
                assert!(shared_bytes + exchange <= caps.shared_per_block_optin, "{one:?}");
                assert!((shared_bytes + exchange + 1024) * tile.blocks_per_sm <= caps.shared_per_sm, "{one:?}");
            }
        }
    }
    assert!(count > 0);
}

/// Four where registers suffice for the values of as many packs.
#[test]
fn scales_of_packs_are_found_together() {
    for (cols, tensors, expected) in [(1024, WEIGHT, 2), (4096, WEIGHT, 4), (4096, WEIGHT_RESIDUAL, 2)] {
        let plan = plan(&problem(Norm::Rms, BLOCK, (4096, cols), tensors), 16, &Caps::h200());
        let batches: Vec<u32> = plan.keys().map(|key| key.tile.reads.batch).collect();
        assert_eq!(batches, [expected], "{cols} {tensors:?}");
    }
}

/// A folded amax is not cleared, and scales without gaps are not zeroed.
#[test]
fn cells_are_cleared_and_padding_zeroed_where_nothing_else_writes_them() {
    let steps = |quant: QuantSpec, tensors: TensorSet, rows| {
        let problem = Problem::quantized_forward(Norm::Rms, rows, 96, DType::F32, quant, tensors);
        let steps = plan(&problem, 16, &Caps::t4()).steps.into_iter().flatten();
        let stem = |step| match step {
            Step::Clear { tensor, bytes, .. } => format!("clear {} {bytes}", tensor.name()),
            Step::Launch { key, .. } => key.program.info().stem.to_owned(),
        };
        steps.map(stem).collect::<Vec<_>>()
    };
    let quant = |scale| QuantSpec::new(CodeType::E4m3, scale);
    let amax = TensorSet::of(&[Tensor::Amax]);
    assert_eq!(steps(quant(ScaleKind::Given), amax, 5), ["clear amax 4", "quantized_forward"]);
    assert_eq!(steps(quant(ScaleKind::Given).folds_amax(), amax, 5), ["quantized_forward"]);
    assert_eq!(steps(quant(ScaleKind::Given), amax, 0), ["clear amax 4"]);
    let laid_out = |layout| steps(quant(MX).layout(layout), TensorSet::of(&[]), 5);
    assert_eq!(laid_out(ScaleLayout::RowMajor), ["quantized_forward"]);
    assert_eq!(laid_out(ScaleLayout::PackedUe8m0 { ld: 7 }), ["clear scales 28", "quantized_forward"]);
    assert_eq!(laid_out(ScaleLayout::Swizzled128x4), ["clear scales 512", "quantized_forward"]);
    // Columnwise scales have their own gaps.
    let along = [Tensor::Rstd, Tensor::CodesColumnwise, Tensor::ScalesColumnwise];
    let swizzled = quant(MX).columnwise_layout(ScaleLayout::Swizzled128x4);
    let expected = ["clear scales_columnwise 512", "quantized_forward", "columnwise"];
    assert_eq!(steps(swizzled, TensorSet::of(&along), 5), expected);
    assert_eq!(steps(quant(MX), TensorSet::of(&along), 5), ["quantized_forward", "columnwise"]);
    // As f32, without gaps, these scales would take four times the bytes.
    let power = quant(ScaleKind::Block { cols: 64, is_power_of_two: true });
    let bytes = power.layout(ScaleLayout::PackedUe8m0 { ld: 8 });
    assert_eq!(steps(bytes, TensorSet::of(&[]), 5), ["clear scales 32", "quantized_forward"]);
    let column_major = quant(BLOCK).layout(ScaleLayout::ColumnMajor { ld: 8 });
    assert_eq!(steps(column_major, TensorSet::of(&[]), 5), ["clear scales 32", "quantized_forward"]);
    let full = quant(BLOCK).layout(ScaleLayout::ColumnMajor { ld: 5 });
    assert_eq!(steps(full, TensorSet::of(&[]), 5), ["quantized_forward"]);
    // A tensor without rows also gets a scale.
    assert_eq!(steps(quant(ScaleKind::Current), TensorSet::of(&[]), 0), ["clear workspace 8", "quantized_forward"]);
}

#[test]
fn kernels_are_such_as_a_device_takes_and_a_row_depends_on_nothing_else() {
    let residual = WEIGHT_RESIDUAL;
    for caps in DEVICES {
        for (norm, scale) in Norm::USUAL.into_iter().flat_map(|norm| KINDS.map(|scale| (norm, scale))) {
            for (cols, tensors) in Plans::cols().into_iter().flat_map(|cols| [(cols, WEIGHT), (cols, residual)]) {
                let plan_of = |rows, access| plan(&problem(norm, scale, (rows, cols), tensors), access, &caps);
                let here = plan_of(4096, 16);
                for Launch { key: KernelKey { tile, program, .. }, threads, shared_bytes, grid, .. } in launches(&here)
                {
                    assert!(threads.is_multiple_of(32) && threads <= 1024 && grid > 0 && shared_bytes == 0, "{here:?}");
                    assert!(tile.cluster <= caps.max_cluster && grid.is_multiple_of(tile.cluster), "{here:?}");
                    assert_eq!(tile.unroll, 1, "{here:?}");
                    // Registers suffice for the blocks, with at least 32 per thread.
                    assert!(threads * tile.blocks_per_sm * 32 <= 1 << 16, "{here:?}");
                    if program == Program::QuantizedForward {
                        assert!(columns(&tile) >= cols && tile.packs <= 8, "{cols} {here:?}");
                        // The threads of a set are neighbours in a warp, or have all packs of a
                        // chunk.
                        let threads = tile.threads_per_row;
                        assert!(threads.is_power_of_two() || threads.is_multiple_of(32), "{here:?}");
                    }
                }
                // A tensor's scale is looked for by a kernel that may also write the codes.
                let mut mappings = [Plans::mapping(&here), Plans::mapping(&plan_of(1, 2))];
                mappings.iter_mut().for_each(Vec::dedup);
                assert_eq!(mappings[0], mappings[1], "{cols} {norm:?} {scale:?}");
            }
        }
    }
}

/// Each group is a row where a kernel has nothing but rows; with a copy along columns, or rows of
/// too many elements for a block, each has blocks of its own. Scales are those of the whole matrix.
#[test]
fn groups_of_columns_are_rows_unless_columns_are_visited() {
    const GROUPS: usize = 8;
    let caps = Caps::h200();
    let (rows, cols) = (300, 128);
    let in_groups =
        |scale, cols, tensors| Problem { groups: GROUPS, ..problem(Norm::Rms, scale, (rows, cols), tensors) };
    let along = TensorSet::of(&[Tensor::Rstd, Tensor::CodesColumnwise, Tensor::ScalesColumnwise]);
    for (scale, cols, tensors, expected) in [
        (ScaleKind::Given, GROUPS * cols, WEIGHT, ColumnGroups::Rows),
        (ScaleKind::Given, GROUPS * cols, WEIGHT.with(Tensor::Amax), ColumnGroups::Rows),
        (ScaleKind::Current, GROUPS * cols, WEIGHT, ColumnGroups::Rows),
        (BLOCK, GROUPS * cols, WEIGHT, ColumnGroups::Rows),
        (MX, GROUPS * cols, WEIGHT, ColumnGroups::Rows),
        (ScaleKind::Given, GROUPS * cols, WEIGHT.with(Tensor::CodesT), ColumnGroups::Blocks),
        (ScaleKind::Current, GROUPS * cols, WEIGHT.with(Tensor::CodesT), ColumnGroups::Blocks),
        (MX, GROUPS * cols, WEIGHT.union(along), ColumnGroups::Blocks),
        (MX, GROUPS * 2_097_152, WEIGHT, ColumnGroups::Blocks),
    ] {
        let problem = in_groups(scale, cols, tensors);
        let planned = plan(&problem, 16, &caps);
        let launches = || planned.keys().filter(|key| key.program != Program::Clear);
        assert!(launches().count() > 0 && launches().all(|key| key.column_groups == expected), "{scale:?} {planned:?}");
        let of_rows = expected == ColumnGroups::Rows;
        assert_eq!(planned.groups as usize, if of_rows { 1 } else { GROUPS }, "{scale:?} {planned:?}");
        let Problem { rows, cols, .. } = groups_as_rows(&problem).filter(|_| of_rows).unwrap_or(group(&problem));
        let alone = plan(
            &Problem { quant: problem.quant, ..self::problem(Norm::Rms, scale, (rows, cols), tensors) },
            16,
            &caps,
        );
        // Blocks of several grids do not wait for each other.
        assert!(of_rows || !launches().any(|key| key.tile.is_cooperative), "{scale:?} {planned:?}");
        if !of_rows && alone.keys().any(|key| key.tile.is_cooperative) {
            continue;
        }
        let threads = |plan: &Plan| plan.keys().map(|key| (key.program, key.tile.threads())).collect::<Vec<_>>();
        assert_eq!(threads(&planned), threads(&alone), "{scale:?}");
    }
    // 300 rows of 32 scales, in tiles of 128 rows and 4 scales.
    let quant = QuantSpec::new(CodeType::E4m3, MX).layout(ScaleLayout::Swizzled128x4);
    let problem = Problem { quant: Some(quant), ..in_groups(MX, GROUPS * cols, WEIGHT) };
    let [Some(Step::Clear { tensor, bytes, .. }), ..] = plan(&problem, 16, &caps).steps else { panic!("{problem:?}") };
    assert_eq!((tensor, bytes), (Tensor::Scales, 384 * 32));
}
