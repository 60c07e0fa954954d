//! Splits of calls over threads, at sizes that no plan would split: one task processes each unit
//! once, at its place, however the splits nest.

use std::ops::Range;
use std::sync::Mutex;

use rmsnorm_conformance::testing::values;
use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind, ScaleRounding};
use rmsnorm_spec::{CastOrder, DTypes, Element, Norm, NormSpec, RowGroups, bf16, f16};

use super::*;
use crate::Isa;
use crate::memory::no_room;
use crate::stages::Section;
use crate::stages::columnwise::ColumnwiseCols;
use crate::stages::quantized_forward::Scaling;

/// The first value of a row that was made of values.
fn value_of<E: Element>(row: &Out<'_, E>) -> E {
    // SAFETY:
    // - contents: the caller has made it of values;
    // - memory: the input ends in this line.
    unsafe { row.overwritten() }.elements()[0]
}

/// Splits matrices repeatedly, also within groups: each row stays where it is in the whole matrix.
#[test]
fn a_matrix_in_groups_is_split_anywhere() {
    let (count, groups) = (11, RowGroups { rows: 4, stride: 70 });
    let rows = Rows::grouped((), 15, groups).layout(count, 2);
    let mut data: Vec<f32> = vec![-1.0; rows.span()];
    (0..count).for_each(|row| data[row / 4 * 70 + row % 4 * 15] = row as f32);
    let first = |matrix: &Matrix<'_>, row| matrix.row::<f32>(row, 2, 0).elements.elements()[0] as usize;
    let first_mut = |matrix: &mut MatrixMut<'_, f32>, row| value_of(&matrix.row(row, 2)) as usize;
    for (a, b) in (0..=count).flat_map(|a| (a..=count).map(move |b| (a, b))) {
        let (low, rest) = Matrix { data: In::from(&data[..]).any(), rows: RowStarts::of(rows) }.split_at(a);
        let (middle, high) = rest.split_at(b - a);
        (0..a).for_each(|row| assert_eq!(first(&low, row), row, "{a}, {b}"));
        (a..b).for_each(|row| assert_eq!(first(&middle, row - a), row, "{a}, {b}"));
        (b..count).for_each(|row| assert_eq!(first(&high, row - b), row, "{a}, {b}"));
        let (mut low, rest) = MatrixMut { data: Out::from(&mut data[..]), rows: RowStarts::of(rows) }.split_at(a);
        let (mut middle, mut high) = rest.split_at(b - a);
        (0..a).for_each(|row| assert_eq!(first_mut(&mut low, row), row, "{a}, {b}"));
        (a..b).for_each(|row| assert_eq!(first_mut(&mut middle, row - a), row, "{a}, {b}"));
        (b..count).for_each(|row| assert_eq!(first_mut(&mut high, row - b), row, "{a}, {b}"));
    }
}

#[test]
fn no_room_says_how_many_bytes_for_what() {
    let message = |error: Error| error.to_string();
    let small = message(no_room::<f32>("workspace", 100, &"a reason"));
    assert_eq!(small, "cpu device error: cannot allocate 400 bytes for the workspace: a reason");
    let large = message(no_room::<bf16>("tensor", usize::MAX, &"a reason"));
    assert_eq!(large, format!("cpu device error: cannot allocate {} bytes for the tensor: a reason", usize::MAX));
}

fn pool() -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap()
}

#[test]
fn fork_gives_every_unit_to_one_task() {
    let pool = pool();
    for units in [0, 1, 2, 3, 5, 7, 64, 100, 1023, (1 << 32) + 1, (1 << 61) + 7] {
        for tasks in [0, 1, 2, 3, 4, 5, 7, 8, 13, 64] {
            let done = Mutex::new(Vec::new());
            // `at` is relative to the start of the piece.
            let split_at = |range: Range<usize>, at| (range.start..range.start + at, range.start + at..range.end);
            pool.install(|| fork(0..units, units, tasks, &split_at, &|range| done.lock().unwrap().push(range)));
            let mut done = done.into_inner().unwrap();
            done.sort_by_key(|range| (range.start, range.end));
            let mut next = 0;
            for range in &done {
                assert_eq!(range.start, next, "{units} units, {tasks} tasks: {done:?}");
                next = range.end;
            }
            assert_eq!(next, units, "{tasks} tasks: {done:?}");
            if tasks <= units {
                let (fewest, most) = (units / tasks.max(1), units.div_ceil(tasks.max(1)));
                assert_eq!(done.len(), tasks.max(1), "{units} units: {done:?}");
                // Nested halves: each split rounds down once more.
                assert!(
                    done.iter().all(|range| (fewest.saturating_sub(1)..=most + 1).contains(&range.len())),
                    "{done:?}"
                );
            }
        }
    }
}

/// Rows with a stride of more than 32 bits are found on both sides of a split. The memory between
/// them is never accessed.
#[test]
fn a_matrix_is_split_at_rows_far_apart() {
    let row_stride = (1usize << 31) + 5;
    let mut data: Vec<u16> = bytemuck::allocation::try_zeroed_vec(4 * row_stride + 1).unwrap();
    (0..5).for_each(|row| data[row * row_stride] = row as u16 + 1);
    let first = |matrix: &Matrix<'_>, row| matrix.row::<f16>(row, 1, 0).elements.elements()[0].to_bits();
    for split in 0..=5 {
        let data = In::from(bytemuck::cast_slice::<u16, f16>(&data)).any();
        let matrix = Matrix { data, rows: RowStarts::strided(row_stride) };
        let (low, high) = matrix.split_at(split);
        (0..split).for_each(|row| assert_eq!(first(&low, row), row as u16 + 1, "split at {split}"));
        (split..5).for_each(|row| assert_eq!(first(&high, row - split), row as u16 + 1, "split at {split}"));
    }
    // Groups of two rows. The first row of each group is one of the rows above.
    let groups = RowGroups { rows: 2, stride: row_stride };
    let rows = RowStarts::of(Rows::grouped((), 7, groups).layout(9, 1));
    for split in 0..=9 {
        let (_, high) = Matrix { data: In::from(bytemuck::cast_slice::<u16, f16>(&data)).any(), rows }.split_at(split);
        (split.next_multiple_of(2)..9).step_by(2).for_each(|row| {
            assert_eq!(first(&high, row - split), row as u16 / 2 + 1, "split at {split}");
        });
    }
    let first_mut = |matrix: &mut MatrixMut<'_, f16>, row| value_of(&matrix.row(row, 1)).to_bits();
    for split in 0..=5 {
        let matrix = MatrixMut {
            data: Out::from(bytemuck::cast_slice_mut::<u16, f16>(&mut data)),
            rows: RowStarts::strided(row_stride),
        };
        let (mut low, mut high) = matrix.split_at(split);
        (0..split).for_each(|row| assert_eq!(first_mut(&mut low, row), row as u16 + 1, "split at {split}"));
        (split..5).for_each(|row| assert_eq!(first_mut(&mut high, row - split), row as u16 + 1, "split at {split}"));
    }
}

const ROWS: usize = 41;
const COLS: usize = 45;
/// Padding of each matrix: its rows are longer than COLS by this.
const PADS: [usize; 4] = [3, 0, 7, 5];

fn strided<E: Element>(seed: u64, pad: usize) -> (Vec<E>, usize) {
    (values(seed, (ROWS - 1) * (COLS + pad) + COLS), COLS + pad)
}

fn as_bits<E: Element>(values: &[E]) -> Vec<u32> {
    values.iter().map(|value| value.bits()).collect()
}

/// The optional tensors of a call.
#[derive(Clone, Copy, Debug)]
struct Has {
    residual: bool,
    residual_out: bool,
    in_place: bool,
    statistics: bool,
}

/// All outputs of a forward call in `tasks` tasks.
fn forward_by(tasks: usize, has: Has) -> [Vec<u32>; 4] {
    let [(x, x_stride), (mut y_values, y_stride)] = [strided::<bf16>(1, PADS[0]), strided::<bf16>(2, PADS[1])];
    let [(residual, residual_stride), (mut out, out_stride)] = [strided::<f32>(3, PADS[2]), strided::<f32>(4, PADS[3])];
    let (weight, bias) = (values::<f32>(5, COLS), values::<f32>(6, COLS));
    let (mut mean, mut rstd) = (vec![7.0f32; ROWS], vec![7.0f32; ROWS]);
    let spec = NormSpec::layer(ROWS, COLS, 1e-5).weight_offset(0.3).cast_order(CastOrder::BeforeWeight);
    let y = MatrixMut { data: Out::from(y_values.as_mut_slice()).any(), rows: RowStarts::strided(y_stride) };
    let x = Matrix { data: In::from(x.as_slice()).any(), rows: RowStarts::strided(x_stride) };
    let added = Matrix { data: In::from(residual.as_slice()).any(), rows: RowStarts::strided(residual_stride) };
    let sum = MatrixMut { data: Out::from(out.as_mut_slice()).any(), rows: RowStarts::strided(out_stride) };
    fn over<'a>(out: &MatrixMut<'a>) -> Matrix<'a> {
        // SAFETY:
        // - contents: they are slices of values;
        // - memory: both go into one stage.
        Matrix { data: unsafe { out.data.overwritten() }, rows: out.rows }
    }
    let before = Summed {
        x: if has.in_place { over(&y) } else { x },
        residual: has.residual.then(|| if has.in_place { over(&sum) } else { added }),
        out: (has.residual && (has.residual_out || has.in_place)).then_some(sum),
    };
    let work = ForwardRows {
        call: Call { spec, dtypes: DTypes::of::<bf16, f32, f32>(), streaming: false, column_groups: 1 },
        before,
        statistic: OfRow,
        affine: Vectors {
            weight: Some(In::from(weight.as_slice()).any()),
            bias: Some(In::from(bias.as_slice()).any()),
        },
        after: Store { y },
        saved: Saved {
            mean: has.statistics.then_some(mean.as_mut_slice().into()),
            rstd: has.statistics.then_some(rstd.as_mut_slice().into()),
        },
    };
    pool().install(|| fork(work, ROWS, tasks, &Split::split_at, &|mut work| kernel::mix(Isa::Portable, &mut work)));
    [as_bits(&y_values), as_bits(&out), as_bits(&mean), as_bits(&rstd)]
}

#[test]
fn forward_has_the_same_bits_in_any_number_of_tasks() {
    for bits in 0..16u32 {
        let [residual, residual_out, in_place, statistics] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
        let has = Has { residual, residual_out, in_place, statistics };
        let expected = forward_by(1, has);
        for tasks in [2, 3, 4, 7, ROWS] {
            assert!(forward_by(tasks, has) == expected, "{has:?} in {tasks} tasks");
        }
    }
}

/// All outputs of a backward call, including partial sums, with both stages in `tasks` tasks.
fn backward_by(tasks: usize, is_layer: bool, [dweight, dbias, dresidual_out, dresidual]: [bool; 4]) -> [Vec<u32>; 6] {
    let [(dy, dy_stride), (mut dx, dx_stride)] = [strided::<f16>(1, PADS[0]), strided::<f16>(2, PADS[1])];
    let [(x, x_stride), (arriving, arriving_stride)] = [strided::<f32>(3, PADS[2]), strided::<f32>(4, PADS[3])];
    let (mut stream, stream_stride) = strided::<f32>(10, PADS[1]);
    let weight = values::<f16>(5, COLS);
    let (mean, rstd) = (values::<f32>(6, ROWS), values::<f32>(7, ROWS));
    let block_rows = 3;
    let blocks = ROWS.div_ceil(block_rows);
    let [mut of_dweight, mut of_dbias] = [8, 9].map(|seed| values::<f32>(seed, blocks * COLS));
    let spec = NormSpec::new(if is_layer { Norm::Layer } else { Norm::Rms }, ROWS, COLS, 1e-5);
    let rows = BackwardRows {
        call: Call {
            spec: spec.weight_offset(-0.5),
            dtypes: DTypes::of::<f16, f16, f32>(),
            streaming: false,
            column_groups: 1,
        },
        dy: Matrix { data: In::from(dy.as_slice()).any(), rows: RowStarts::strided(dy_stride) },
        affine: Vectors { weight: Some(In::from(weight.as_slice()).any()), bias: None },
        x: Matrix { data: In::from(x.as_slice()).any(), rows: RowStarts::strided(x_stride) },
        given: Given { mean: is_layer.then_some(mean.as_slice()), rstd: &rstd },
        found: None,
    };
    let arriving = Matrix { data: In::from(arriving.as_slice()).any(), rows: RowStarts::strided(arriving_stride) };
    let of_stream = Out::from(stream.as_mut_slice()).any();
    let work = BackwardBlocks {
        rows,
        block_rows,
        stream: Gradients {
            dresidual_out: dresidual_out.then_some(arriving),
            dx: MatrixMut { data: Out::from(dx.as_mut_slice()).any(), rows: RowStarts::strided(dx_stride) },
            dresidual: dresidual.then_some(MatrixMut { data: of_stream, rows: RowStarts::strided(stream_stride) }),
        },
        partials: Partials {
            dweight: dweight.then_some(Sums { sums: of_dweight.as_mut_slice(), cols: COLS }),
            dbias: dbias.then_some(Sums { sums: of_dbias.as_mut_slice(), cols: COLS }),
        },
    };
    pool().install(|| fork(work, blocks, tasks, &Split::split_at, &|mut work| kernel::mix(Isa::Portable, &mut work)));
    let sums = |partials: &[f32]| {
        let mut gradient = vec![f16::NAN; COLS];
        let mut work =
            PartialRows { partials, cols: COLS, first: 0, gradient: Out::from(&mut gradient[..]).any(), held: None };
        kernel::any(Isa::Portable, &mut work);
        as_bits(&gradient)
    };
    let gradients = [sums(&of_dweight), sums(&of_dbias)];
    let [of_dweight, of_dbias] = [as_bits(&of_dweight), as_bits(&of_dbias)];
    let [dweight, dbias] = gradients;
    [as_bits(&dx), as_bits(&stream), of_dweight, of_dbias, dweight, dbias]
}

#[test]
fn backward_has_the_same_bits_in_any_number_of_tasks() {
    for bits in 0..32u32 {
        let [dweight, dbias, dresidual_out, dresidual, is_layer] = [1, 2, 4, 8, 16].map(|bit| bits & bit != 0);
        let has = [dweight, dbias, dresidual_out, dresidual];
        let expected = backward_by(1, is_layer, has);
        for tasks in [2, 3, 4, 7, 14] {
            assert!(backward_by(tasks, is_layer, has) == expected, "{has:?} in {tasks} tasks, layer norm: {is_layer}");
        }
    }
}

/// Columns at every depth of nested splits, also beyond 16 bits, where a wrong offset reads the
/// sums of another column. The sums are exact.
#[test]
fn the_second_stage_has_the_same_sums_in_any_number_of_tasks() {
    let pool = pool();
    for cols in [1, 31, 32, 33, 64, 7 * 32 + 5, 16 * 32, 131_075] {
        for blocks in [1, 2, 5] {
            // The sum of a column identifies the column.
            let partials: Vec<f32> = (0..blocks * cols).map(|i| (i % cols) as f32 + (i / cols) as f32 / 8.0).collect();
            let more = (0..blocks).sum::<usize>() as f32 / 8.0;
            let expected: Vec<f32> = (0..cols).map(|col| (col * blocks) as f32 + more).collect();
            for tasks in [1, 2, 3, 4, 5, 7] {
                let mut gradient = vec![f32::NAN; cols];
                let work = PartialRows {
                    partials: &partials,
                    cols,
                    first: 0,
                    gradient: Out::from(&mut gradient[..]).any(),
                    held: None,
                };
                let run = |mut work: PartialRows<'_>| kernel::any(Isa::detect(), &mut work);
                pool.install(|| fork(work, cols / LANES, tasks, &Split::split_at, &run));
                assert_eq!(gradient, expected, "{blocks}x{cols} in {tasks} tasks");
            }
        }
    }
}

/// The columnwise copy in `tasks` tasks: 45 columns, where only the first task's columns begin a
/// piece.
fn columnwise_by(tasks: usize, codes: CodeType) -> [Vec<u8>; 2] {
    let (x, x_stride) = strided::<bf16>(1, PADS[0]);
    let (weight, rstd) = (values::<f32>(5, COLS), values::<f32>(6, ROWS));
    let quant = QuantSpec::new(codes, ScaleKind::Mx { rounding: ScaleRounding::Up });
    let groups = ROWS.div_ceil(ScaleKind::MX_COLS);
    let (mut out, mut scales) = (vec![0x55; COLS * (ROWS + 3)], vec![0x55; COLS * groups]);
    let x = Matrix { data: In::from(x.as_slice()).any(), rows: RowStarts::strided(x_stride) };
    let work = ColumnwiseCols {
        call: Call {
            spec: NormSpec::rms(ROWS, COLS, 1e-5),
            dtypes: DTypes::of::<bf16, f32, f32>(),
            streaming: false,
            column_groups: 1,
        },
        x,
        residual: None,
        affine: Vectors { weight: Some(In::from(weight.as_slice()).any()), bias: None },
        gate: (),
        mean: None,
        rstd: In::from(rstd.as_slice()),
        cols: Section { first: 0, len: COLS },
        quant,
        codes: MatrixMut { data: Out::from(&mut out[..]), rows: RowStarts::strided(ROWS + 3) },
        scaling: Scaling::E8m0(MatrixMut { data: Out::from(&mut scales[..]), rows: RowStarts::strided(groups) }),
    };
    pool().install(|| fork(work, COLS, tasks, &Split::split_at, &|mut work| kernel::any(Isa::Portable, &mut work)));
    [out, scales]
}

#[test]
fn columns_have_the_same_codes_in_any_number_of_tasks() {
    for codes in [CodeType::E4m3, CodeType::E5m2] {
        let expected = columnwise_by(1, codes);
        assert!(expected[1].iter().all(|scale| *scale != 0x55), "{codes}");
        for tasks in [2, 3, 7, COLS] {
            assert!(columnwise_by(tasks, codes) == expected, "{codes} in {tasks} tasks");
        }
    }
}
