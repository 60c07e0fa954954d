//! Properties of every plan.

use rmsnorm_spec::{Norm, ResidualPlacement, Slot};

use rmsnorm_gpu::tuning::{rises, up_to};

use super::super::forward::MOST_KEPT;
use super::super::tuning::{Ladders, Tables};
use super::super::{COLUMN_LANES, RESERVED_BYTES, Reads, Tuning};
use super::*;

/// Bytes of shared memory that a kernel may declare without an attribute.
const STATIC_BYTES: usize = 48 << 10;

/// Bytes of shared memory that the driver reserves in every block.
const DRIVER_BYTES: usize = 1 << 10;

/// Row counts below and above the limit of split backward calls, except for the longest rows.
const SIZES: [usize; 2] = [64, 1 << 20];

/// The most packs that a thread can hold almost without spilling: two arrays in registers, one
/// array, or the row in shared memory.
const fn most_packs(program: Program) -> u32 {
    // Backward with one sum per column.
    if matches!(program, Program::ForwardCluster | Program::ForwardLong) {
        16
    } else if matches!(program, Program::Backward) {
        10
    } else {
        8
    }
}

/// Whether every column belongs to one thread; the other programs loop over columns.
fn is_on_chip(program: Program) -> bool {
    match program {
        Program::Forward
        | Program::ForwardCluster
        | Program::ForwardLong
        | Program::Backward
        | Program::BackwardSplit
        | Program::QuantizedForward
        | Program::QuantizedForwardTransposed => true,
        Program::ForwardStreaming
        | Program::BackwardRowSums
        | Program::BackwardColumns
        | Program::ReducePartials
        | Program::QuantizedForwardStreaming
        | Program::TransposeCodes
        | Program::Columnwise
        | Program::Clear
        | Program::PartialStatistics
        | Program::ForwardWithStatistics
        | Program::PartialBackwardStatistics
        | Program::BackwardWithStatistics => false,
        #[cfg(feature = "peers")]
        Program::ReduceForward
        | Program::ReduceForwardPacks
        | Program::ReduceForwardRows
        | Program::GatherNumbers
        | Program::ForwardExchange => false,
    }
}

/// Bytes of a kernel's `__shared__` arrays.
fn static_bytes(key: &KernelKey) -> usize {
    let Tile { threads_per_row, groups, cluster, unroll, .. } = key.tile;
    let senders = (threads_per_row.div_ceil(32) * cluster) as usize;
    let sums = match key.program {
        Program::Forward => unroll,
        // With scales per row, a largest magnitude is sent with every sum.
        Program::QuantizedForward => 2 * unroll,
        // The barrier, and each warp's moments of the row: three for layer norm, otherwise one.
        Program::ForwardCluster => {
            let moments = if key.call.norm == Norm::Layer { 3 } else { 1 };
            let sent = moments * senders * size_of::<f32>();
            return (size_of::<u64>() + sent).next_multiple_of(size_of::<u64>());
        }
        Program::ForwardLong | Program::ForwardStreaming | Program::QuantizedForwardStreaming => 1,
        Program::QuantizedForwardTransposed => 2,
        Program::Backward | Program::BackwardSplit => unroll * if key.call.norm == Norm::Layer { 2 } else { 1 },
        Program::BackwardRowSums => 2,
        Program::PartialStatistics | Program::PartialBackwardStatistics if key.call.norm == Norm::Layer => 2,
        Program::PartialStatistics | Program::PartialBackwardStatistics => 1,
        Program::BackwardColumns
        | Program::Clear
        | Program::ForwardWithStatistics
        | Program::BackwardWithStatistics => 0,
        #[cfg(feature = "peers")]
        Program::ReduceForward
        | Program::ReduceForwardPacks
        | Program::ReduceForwardRows
        | Program::ForwardExchange => 1,
        #[cfg(feature = "peers")]
        Program::GatherNumbers => 0,
        Program::TransposeCodes => return 128 * 128,
        // For each of 64 columns: the codes, magnitudes of eight warps, and up to four scales.
        Program::Columnwise => return 64 * (128 + (8 + 4) * size_of::<f32>()),
        // A sum for each warp and thread of a row.
        Program::ReducePartials => {
            return (threads_per_row * groups / 32 * threads_per_row) as usize * 4 * size_of::<f32>();
        }
    };
    if senders == 1 {
        // A single warp exchanges nothing, so the compiler drops the array.
        return 0;
    }
    2 * (groups * sums) as usize * senders * size_of::<f32>()
}

#[test]
fn every_column_has_one_thread() {
    every_column_has_one_thread_of::<Plans>();
}

pub(super) fn every_column_has_one_thread_of<P: Planner<Caps = Caps>>() {
    for_all::<P>(|caps, call, cols| {
        for Launch { key, .. } in launches(&call.plan(4096, cols, caps)) {
            let (owned, tile) = (columns(&key.tile), key.tile);
            if is_on_chip(key.program) {
                assert!(owned >= cols, "{cols} {tile:?}");
                // `may_pass_end` of memory.cuh: only the last pack of a thread may be partial.
                assert!(owned / tile.packs as usize * (tile.packs as usize - 1) < cols, "{cols} {tile:?}");
                assert!(tile.packs <= most_packs(key.program), "{cols} {tile:?}");
            }
            assert_eq!(tile.is_ragged, key.program == Program::ReducePartials || owned != cols, "{cols} {key:?}");
        }
    });
}

#[test]
fn keys_have_the_tensors_of_the_call() {
    for_all::<Plans>(|caps, call, cols| {
        use Tensor::{
            Amax, Bias, Dbias, Dresidual, DresidualOut, Dweight, Gate, NextBias, NextWeight, Residual, Weight, Y,
        };
        for Launch { key, .. } in launches(&call.plan(4096, cols, caps)) {
            let code: &[Tensor] = match key.program {
                Program::Forward | Program::ForwardCluster | Program::ForwardLong | Program::ForwardStreaming => {
                    &[Weight, Bias, Residual, NextWeight, NextBias, Gate]
                }
                Program::Backward
                | Program::BackwardSplit
                | Program::BackwardColumns
                | Program::BackwardWithStatistics => &[Weight, Bias, DresidualOut, Dweight, Dbias, Dresidual, Gate],
                Program::BackwardRowSums | Program::PartialBackwardStatistics => &[Weight, Gate],
                Program::PartialStatistics => &[Residual],
                Program::ReducePartials => &[Dweight, Dbias],
                Program::QuantizedForward | Program::QuantizedForwardStreaming => {
                    &[Weight, Bias, Residual, Amax, Y, Gate]
                }
                Program::QuantizedForwardTransposed => &[Weight, Bias, Amax, Y],
                Program::Columnwise | Program::ForwardWithStatistics => &[Weight, Bias, Residual, Gate],
                #[cfg(feature = "peers")]
                Program::ReduceForward
                | Program::ReduceForwardPacks
                | Program::ReduceForwardRows
                | Program::ForwardExchange => &[Weight, Bias, Residual, Gate],
                #[cfg(feature = "peers")]
                Program::GatherNumbers => &[],
                Program::TransposeCodes | Program::Clear => &[],
            };
            let expected: TensorSet = code.iter().copied().filter(|tensor| call.tensors.has(*tensor)).collect();
            assert_eq!(key.call.tensors, expected, "{cols} {call:?}");
            assert_eq!(key.call.has_parts, call.parts > 1, "{cols} {call:?}");
            let has_rows = key.program != Program::ReducePartials;
            assert_eq!(key.call.gate, call.gate.filter(|_| has_rows), "{cols} {call:?}");
        }
    });
}

/// A tile says how a row ends, and when late data is read; each choice compiles other code.
#[test]
fn tiles_say_how_rows_end_and_when_parameters_are_read() {
    const ROWS: usize = 4096;
    for_all::<Plans>(|caps, call, cols| {
        for Launch { key, .. } in launches(&call.plan(ROWS, cols, caps)) {
            let (Tile { pack, packs, cluster, .. }, weight) = (key.tile, key.call.dtypes.weight);
            let is_cut = !cols.is_multiple_of(pack as usize);
            let is_any = matches!(key.program, Program::ReducePartials | Program::TransposeCodes | Program::Clear);
            assert_eq!(key.tile.has_tail, is_cut || is_any, "{cols} {key:?}");
            let none = Tile::NONE.reads;
            // If registers are short, there is one block already.
            let has_room = key.tile.holds_parts(key.program, call.norm);
            let of_parts = if has_room { 2 } else { 1 };
            let is_on_chip_of_parts = call.parts > 1 && key.program != Program::ForwardStreaming;
            if is_on_chip_of_parts {
                assert!(key.tile.unroll == 1 && (has_room || key.tile.blocks_per_sm == 1), "{cols} {key:?}");
            }
            let of_gate = |slot| call.gate.is_some_and(|gate| gate.slot == slot);
            let waits = call.residual_placement == ResidualPlacement::After || of_gate(Slot::After);
            let reads = match key.program {
                Program::Forward if waits => Reads { loads_at_use: true, ..none },
                Program::Forward if call.parts > 1 => Reads { keeps_row: true, batch: of_parts, ..none },
                Program::Forward => {
                    let Tile { groups, unroll, blocks_per_sm, reads: Reads { keeps_row, .. }, .. } = key.tile;
                    let adds_residual = call.tensors.adds_residual();
                    let has_room = match of_gate(Slot::Before) {
                        true => key.tile.holds_gated(call.norm),
                        false => key.tile.holds_rows(call.norm, 1 + u32::from(adds_residual)),
                    };
                    let is_at_once = ROWS <= (caps.sms * blocks_per_sm * groups * unroll) as usize;
                    let is_light = packs * unroll <= MOST_KEPT;
                    assert!(
                        if adds_residual || of_gate(Slot::Before) {
                            keeps_row == has_room
                        } else {
                            !keeps_row || has_room && (is_at_once || is_light)
                        },
                        "{cols} {key:?}"
                    );
                    Reads { keeps_row, loads_at_use: packs < 3 && !keeps_row, ..none }
                }
                // What waits for the norm takes the registers of weights; with five packs it is
                // read late.
                Program::ForwardCluster if waits => {
                    let batch = match pack == 4 || weight != DType::F32 {
                        true => 4,
                        false if call.tensors.has(Tensor::NextWeight) => 1,
                        false => 2,
                    };
                    Reads { loads_at_use: packs > 4, batch, ..none }
                }
                // Weights are read early if they fill at most four registers.
                Program::ForwardCluster => {
                    let batch = if call.parts > 1 { of_parts } else { 4 };
                    Reads { prefetches_weight: pack == 4 || weight != DType::F32, batch, ..none }
                }
                Program::ForwardLong => {
                    let prefetches_weight = cluster == 1 && weight != DType::F32 && columns(&key.tile) == cols;
                    let batch = if call.norm == Norm::Layer { 4 } else { 2 };
                    Reads { prefetches_weight, batch: if call.parts > 1 { of_parts } else { batch }, ..none }
                }
                Program::ForwardStreaming
                | Program::Backward
                | Program::BackwardSplit
                | Program::BackwardRowSums
                | Program::BackwardColumns
                | Program::ReducePartials
                // Calls to codes have tests of their own.
                | Program::QuantizedForward
                | Program::QuantizedForwardStreaming
                | Program::QuantizedForwardTransposed
                | Program::TransposeCodes
                | Program::Columnwise
                | Program::Clear
                | Program::PartialStatistics
                | Program::ForwardWithStatistics
                | Program::PartialBackwardStatistics
                | Program::BackwardWithStatistics => none,
                #[cfg(feature = "peers")]
                Program::ReduceForward
                | Program::ReduceForwardPacks
                | Program::ReduceForwardRows
                | Program::GatherNumbers
                | Program::ForwardExchange => none,
            };
            assert_eq!(key.tile.reads, reads, "{cols} {key:?}");
            // Blocks that registers must suffice for, in programs without a table.
            let blocks_per_sm = match key.program {
                Program::BackwardRowSums => Some(2),
                Program::BackwardColumns => Some(if call.gate.is_some() { 2 } else { 3 }),
                Program::Forward | Program::ForwardCluster | Program::ForwardLong | Program::ForwardStreaming => None,
                Program::Backward | Program::BackwardSplit | Program::ReducePartials => None,
                Program::QuantizedForward
                | Program::QuantizedForwardStreaming
                | Program::QuantizedForwardTransposed => None,
                Program::TransposeCodes | Program::Columnwise | Program::Clear => None,
                Program::PartialStatistics | Program::ForwardWithStatistics => None,
                Program::PartialBackwardStatistics | Program::BackwardWithStatistics => None,
                #[cfg(feature = "peers")]
                Program::ReduceForward
                | Program::ReduceForwardPacks
                | Program::ReduceForwardRows
                | Program::GatherNumbers
                | Program::ForwardExchange => None,
            };
            assert!(blocks_per_sm.is_none_or(|blocks| blocks == key.tile.blocks_per_sm), "{cols} {key:?}");
            // Gradients without a weight also keep the weight's dtype. In the reduction of partial
            // sums it is the dtype of gradients.
            let parameters = [Tensor::Weight, Tensor::Bias, Tensor::NextWeight, Tensor::NextBias];
            let has_parameters = parameters.into_iter().any(|tensor| call.tensors.has(tensor));
            let is_typed = has_parameters || key.call.tensors.sums_over_rows() > 0;
            let dtype = if is_typed { call.dtypes.weight } else { call.dtypes.activation };
            assert_eq!(weight, dtype, "{cols} {key:?}");
        }
    });
}

/// Each gradient has a block for each tile of its columns.
#[test]
fn the_second_stage_has_a_block_for_every_tile_of_every_gradient() {
    for_all::<Plans>(|caps, call, cols| {
        for launch in launches(&call.plan(4096, cols, caps)) {
            if launch.key.program == Program::ReducePartials {
                let tiles = cols.div_ceil(4 * launch.key.tile.threads_per_row as usize);
                assert_eq!(launch.grid as usize, call.gradients() * tiles, "{cols} {call:?}");
            }
        }
    });
}

/// The rows that a block keeps in shared memory: x, the gate and the residual of a long row; dy,
/// x, the gate and dresidual_out of all rows of all steps. At the end, the groups of `backward` exchange the sums
/// of the upper half of a block in the same place, which never needs more.
#[test]
fn shared_memory_has_room_for_the_rows_and_the_exchange() {
    for_all::<Plans>(|caps, call, cols| {
        let (activation, residual) = (call.dtypes.activation.size(), call.dtypes.residual.size());
        let gate = call.gate.map_or(0, |_| activation);
        for launch in SIZES.into_iter().flat_map(|rows| launches(&call.plan(rows, cols, caps)).collect::<Vec<_>>()) {
            let tile = launch.key.tile;
            let owned = columns(&tile) / tile.cluster as usize;
            let needed = match launch.key.program {
                // For several parts, only their sum.
                Program::ForwardLong if call.parts > 1 => owned * residual,
                Program::ForwardLong => {
                    owned * (activation + gate + if call.tensors.has(Tensor::Residual) { residual } else { 0 })
                }
                Program::Backward | Program::BackwardSplit => {
                    let rows = (tile.groups * tile.unroll * tile.stages) as usize;
                    let streams =
                        activation + gate + residual * (1 + usize::from(call.tensors.has(Tensor::DresidualOut)));
                    // `sum_groups` of backward_rows.cuh: groups of one warp add in registers.
                    let width = tile.threads_per_row.max(32);
                    let upper_half = launch.threads / width / 2 * width;
                    let sums = (tile.pack * tile.packs * upper_half) as usize * call.gradients();
                    let sums = if launch.key.program == Program::Backward {
                        sums
                    } else {
                        // `run_columns` of backward_split.cu: the sums of every warp, and of the
                        // block.
                        let columns = (COLUMN_LANES * tile.pack) as usize * call.gradients();
                        sums.max((launch.threads as usize / 32 + 1) * columns)
                    };
                    (rows * owned * streams).max(4 * sums)
                }
                Program::Forward
                | Program::ForwardCluster
                | Program::ForwardStreaming
                | Program::BackwardRowSums
                | Program::BackwardColumns
                | Program::ReducePartials
                | Program::QuantizedForward
                | Program::QuantizedForwardStreaming
                | Program::QuantizedForwardTransposed
                | Program::TransposeCodes
                | Program::Columnwise
                | Program::Clear
                | Program::PartialStatistics
                | Program::ForwardWithStatistics
                | Program::PartialBackwardStatistics
                | Program::BackwardWithStatistics => 0,
                #[cfg(feature = "peers")]
                Program::ReduceForward
                | Program::ReduceForwardPacks
                | Program::ReduceForwardRows
                | Program::GatherNumbers
                | Program::ForwardExchange => 0,
            };
            assert_eq!(launch.shared_bytes as usize, needed, "{cols} {launch:?} of {call:?}");
        }
    });
}

#[test]
fn blocks_are_what_a_device_takes() {
    blocks_are_what_a_device_takes_of::<Plans>();
}

pub(super) fn blocks_are_what_a_device_takes_of<P: Planner<Caps = Caps>>() {
    for_all::<P>(|caps, call, cols| {
        for launch in launches(&call.plan(4096, cols, caps)) {
            let Launch { key: KernelKey { program, tile, .. }, threads, .. } = launch;
            assert_eq!(threads, tile.threads());
            assert!(threads.is_multiple_of(32) && (32..=1024).contains(&threads), "{cols} {launch:?}");
            // The threads of a row are whole warps, or lanes of one warp.
            let is_warps = tile.threads_per_row.is_multiple_of(32);
            assert!(is_warps || tile.threads_per_row.is_power_of_two(), "{cols} {launch:?}");
            // Sums over lanes, groups and partial sums are trees.
            assert!(tile.groups.is_power_of_two(), "{cols} {launch:?}");
            // A group of several warps needs its own barrier; there are 15 besides __syncthreads.
            let has_barriers = program != Program::ReducePartials && tile.threads_per_row > 32;
            assert!(!has_barriers || tile.groups <= 8, "{cols} {launch:?}");
            assert!(tile.cluster.is_power_of_two() && tile.cluster <= caps.max_cluster, "{cols} {launch:?}");
            // All groups of a cluster meet at one barrier, and only those of backward advance
            // together.
            assert!(tile.cluster == 1 || tile.groups == 1 || program == Program::Backward, "{cols} {launch:?}");
            // The row ahead needs its own slot.
            assert!(!tile.is_overlapped || tile.stages >= 2, "{cols} {launch:?}");
            let has_ring = matches!(program, Program::Backward | Program::BackwardSplit);
            assert_eq!(tile.stages > 0, has_ring, "{cols} {launch:?}");
        }
    });
}

#[test]
fn shared_memory_suffices() {
    shared_memory_suffices_of::<Plans>();
}

pub(super) fn shared_memory_suffices_of<P: Planner<Caps = Caps>>() {
    for_all::<P>(|caps, call, cols| {
        for launch in SIZES.into_iter().flat_map(|rows| launches(&call.plan(rows, cols, caps)).collect::<Vec<_>>()) {
            let (fixed, dynamic) = (static_bytes(&launch.key), launch.shared_bytes as usize);
            assert!(fixed <= STATIC_BYTES, "{cols} {launch:?}");
            assert!(fixed + dynamic <= caps.shared_per_block_optin as usize, "{cols} {fixed} {launch:?}");
            // The ring of backward is cut so that all blocks of the plan fit a multiprocessor.
            if launch.key.program == Program::Backward {
                let blocks = launch.key.tile.blocks_per_sm;
                let bytes = blocks as usize * (fixed + dynamic + DRIVER_BYTES);
                assert!(bytes <= caps.shared_per_sm as usize, "{cols} {bytes} {launch:?}");
                assert!(blocks * launch.threads <= caps.threads_per_sm, "{cols} {launch:?}");
            }
        }
    });
}

/// With less shared memory, backward first drops stages, then blocks per multiprocessor. One stage
/// is the minimum; below it the row streams.
#[test]
fn the_ring_of_backward_is_cut_to_what_there_is() {
    let call = Call::new(Direction::Backward, Norm::Rms, BF16, DWEIGHT);
    let backward = |caps: &Caps| {
        let launched = launches(&call.plan(4096, 65_536, caps)).next().expect("a kernel");
        (launched.key.program == Program::Backward).then_some(launched)
    };
    let whole = backward(&Caps::h200()).expect("the row stays on chip");
    let stage = whole.shared_bytes / whole.key.tile.stages;
    assert_eq!((whole.key.tile.stages, whole.key.tile.blocks_per_sm), (3, 2));
    let with = |stages: u32, blocks: u32| {
        let bytes = stages * stage + RESERVED_BYTES as u32;
        backward(&Caps { shared_per_block_optin: bytes, shared_per_sm: blocks * bytes, ..Caps::h200() })
    };
    let cut = |launched: Option<Launch>| launched.map(|launch| (launch.key.tile.stages, launch.key.tile.blocks_per_sm));
    assert_eq!(cut(with(2, 4)), Some((2, 2)));
    assert_eq!(cut(with(3, 1)), Some((3, 1)));
    assert_eq!(cut(with(1, 4)), Some((1, 1)));
    assert!(!with(1, 1).expect("a kernel").key.tile.is_overlapped);
    assert_eq!(cut(with(0, 4)), None);
    // Two blocks share the memory that one block can use alone.
    let bytes = 2 * (2 * stage + RESERVED_BYTES as u32);
    let shared = backward(&Caps { shared_per_block_optin: bytes, shared_per_sm: bytes, ..Caps::h200() });
    assert_eq!(cut(shared), Some((2, 2)));
    // Also limited by the threads of a multiprocessor.
    let few = |threads_per_sm| cut(backward(&Caps { threads_per_sm, ..Caps::h200() }));
    assert_eq!([2 * whole.threads, 2 * whole.threads - 1].map(few), [Some((3, 2)), Some((3, 1))]);
}

#[test]
fn grids_are_whole_clusters() {
    for_all::<Plans>(|caps, call, cols| {
        for rows in ROWS {
            for launch in launches(&call.plan(rows, cols, caps)) {
                assert!((1..=i32::MAX as u32).contains(&launch.grid), "{rows}x{cols} {launch:?}");
                assert!(launch.grid.is_multiple_of(launch.cluster), "{rows}x{cols} {launch:?}");
                assert!(launch.cluster.is_multiple_of(launch.key.tile.cluster), "{rows}x{cols} {launch:?}");
                // The one program whose clusters handle a single row.
                if launch.key.program == Program::ForwardCluster {
                    assert_eq!((launch.grid / launch.key.tile.cluster) as usize, rows, "{rows}x{cols} {launch:?}");
                }
            }
        }
    });
}

#[test]
fn alignment_changes_the_access_and_nothing_else() {
    for_all::<Plans>(|caps, call, cols| {
        let aligned = call.plan(4096, cols, caps);
        for access_bytes in [1, 2, 4, 8] {
            let mut unaligned = plan(&call.problem(4096, cols), access_bytes, caps);
            for step in unaligned.steps.iter_mut().flatten() {
                match step {
                    Step::Launch { key, .. } if key.program == Program::ReducePartials => {}
                    Step::Launch { key, .. } => {
                        assert_eq!(std::mem::replace(&mut key.tile.access_bytes, 16), access_bytes)
                    }
                    Step::Clear { .. } => {}
                }
            }
            assert_eq!(unaligned, aligned, "{cols} by {access_bytes} bytes, {call:?}");
        }
    });
}

#[test]
fn without_rows_there_is_no_chunk() {
    for_all::<Plans>(|caps, call, cols| {
        let plan = call.plan(0, cols, caps);
        assert_eq!((plan.chunks, plan.partial_rows), (0, 0), "{cols} {call:?}");
    });
}

#[test]
fn every_chunk_has_a_row_and_is_counted_in_32_bits() {
    for_all::<Plans>(|caps, call, cols| {
        for rows in ROWS.into_iter().filter(|rows| *rows > 0 && call.direction == Direction::Backward) {
            let plan = call.plan(rows, cols, caps);
            assert!((1..=rows as u64).contains(&plan.chunks), "{rows}x{cols}: {} chunks, {call:?}", plan.chunks);
            // backward.cu multiplies these in 32 bits.
            for Launch { key, .. } in launches(&plan).filter(|launch| launch.key.program == Program::Backward) {
                assert!(u64::from(key.tile.groups) * plan.chunks <= u32::MAX.into(), "{rows}x{cols} {plan:?}");
                // With few rows, there are no more blocks than steps.
                let rows_of_a_step = (key.tile.groups * key.tile.unroll) as usize;
                let steps = rows.div_ceil(rows_of_a_step) as u64;
                assert!(rows > 4096 || plan.chunks <= steps, "{rows}x{cols} {plan:?}");
            }
        }
    });
}

#[test]
fn the_suite_is_told_where_plans_change() {
    let (caps, calls) = (Caps::h200(), Plans::calls());
    let breakpoints = caps.tuning.cols_breakpoints();
    for &cols in &breakpoints {
        let changes =
            |call: &Call| Plans::mapping(&call.plan(1, cols, &caps)) != Plans::mapping(&call.plan(1, cols + 1, &caps));
        assert!(calls.iter().any(changes), "no plan changes after {cols} columns");
    }
    // One thread, one warp, several warps, one block, a cluster, and three, five or seven packs.
    let chosen = [8, 128, 192, 256, 384, 512, 640, 1024, 1280, 2048, 2560, 4096, 5120, 8192, 10240, 16384, 32768];
    for cols in chosen {
        assert!(breakpoints.contains(&cols), "{cols}: {breakpoints:?}");
    }
}

fn ladders(tuning: &Tuning) -> impl Iterator<Item = &Ladders> {
    tuning
        .widths
        .iter()
        .flat_map(|Tables { forward, backward, to_codes: _, finds_scale: _ }| forward.iter().chain(backward))
}

/// Backward with two sums over a row, or two over the rows, takes twice the registers.
#[test]
fn calls_find_their_tables() {
    let Tables { forward, backward: [one, two], to_codes: _, finds_scale: _ } = &Tuning::H200.widths[0];
    let ladders_of = |call: Call| Tuning::H200.ladders(&call.problem(4096, 4096), 8);
    let ladders = |direction, norm, tensors| ladders_of(Call::new(direction, norm, BF16, tensors));
    for (norm, tensors, table) in [
        (Norm::Rms, WEIGHT, &forward[0]),
        (Norm::Rms, WEIGHT_RESIDUAL, &forward[1]),
        (Norm::Layer, WEIGHT, &forward[2]),
        (Norm::Layer, WEIGHT_RESIDUAL, &forward[3]),
    ] {
        assert!(std::ptr::eq(ladders(Direction::Forward, norm, tensors), table), "{norm:?} {tensors:?}");
        // Several parts are read like a row and its residual.
        let sum = if norm == Norm::Layer { &forward[3] } else { &forward[1] };
        let of_parts = ladders_of(Call::new(Direction::Forward, norm, BF16, tensors).of_parts(2));
        assert!(std::ptr::eq(of_parts, sum), "{norm:?} {tensors:?}");
    }
    for (norm, tensors, table) in [
        (Norm::Rms, WEIGHT, one),
        (Norm::Rms, DWEIGHT, one),
        (Norm::Rms, DWEIGHT_DBIAS, two),
        (Norm::Layer, WEIGHT, two),
        (Norm::Layer, DWEIGHT, two),
        (Norm::Layer, DWEIGHT_DBIAS, two),
    ] {
        assert!(std::ptr::eq(ladders(Direction::Backward, norm, tensors), table), "{norm:?} {tensors:?}");
    }
}

#[test]
fn limits_of_tables_rise() {
    for Ladders { cluster, block, long } in ladders(Tuning::H200) {
        assert!([cluster, block, long].into_iter().all(|ladder| rises(ladder)), "{cluster:?} {block:?} {long:?}");
    }
}

/// A loaded table replaces the built-in one, for the calls that it covers.
#[test]
fn plans_follow_the_table_of_their_device() {
    let mut tuning = Tuning::H200.clone();
    tuning.widths[0].forward[0].block = vec![up_to(512, Tile { threads_per_row: 32, groups: 1, ..Tile::NONE })].into();
    let caps = Caps { tuning: Box::leak(Box::new(tuning)), ..Caps::h200() };
    let threads = |dtypes, norm, cols| {
        let call = Call::new(Direction::Forward, norm, dtypes, WEIGHT);
        launches(&call.plan(4096, cols, &caps))
            .map(|launch| (launch.key.program, launch.key.tile.threads_per_row))
            .collect()
    };
    let launched: Vec<Vec<(Program, u32)>> =
        vec![threads(BF16, Norm::Rms, 4096), threads(F32, Norm::Rms, 4096), threads(BF16, Norm::Layer, 4096)];
    let expected = [32, 256, 128].map(|threads| vec![(Program::Forward, threads)]);
    assert_eq!(launched, expected);
}
