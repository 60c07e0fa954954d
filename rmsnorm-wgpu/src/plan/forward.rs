//! Forward: tiles by the length of a row.

use rmsnorm_spec::Problem;

use super::{
    Access, Dispatch, Layout, Plan, Program, Step, Tile, UNALIGNED_PACKS, Unfit, flavour, is_split, key, pairs, ranges,
};
use crate::caps::Caps;

/// Bytes of workgroup memory that a thread takes at most: a sum in each of two buffers.
const THREAD_BYTES: u32 = 8;

/// The plan of a forward call.
pub(super) fn plan(problem: &Problem, layout: &Layout, caps: &Caps) -> Result<Plan, Unfit> {
    let (program, tile) = match tile(problem, caps) {
        Some(tile) if layout.access == Access::Aligned || tile.packs <= UNALIGNED_PACKS => (Program::Forward, tile),
        Some(tile) => (Program::ForwardStreaming, Tile { packs: 1, ..tile }),
        None => (Program::ForwardStreaming, streaming_tile(caps)),
    };
    let key = key(problem, program, tile, layout);
    let most = ranges::most_rows(problem, layout, tile.groups, caps)?;
    let steps = ranges::even(problem.rows as u64, most).map(|rows| {
        let grid = ranges::grid((rows.end - rows.start).div_ceil(tile.groups.into()), caps)?;
        Ok(Step::Dispatch(Dispatch { key, rows, first_chunk: 0, chunks: 0, accumulates: false, grid }))
    });
    Ok(Plan { steps: steps.collect::<Result<_, _>>()?, ..Plan::default() })
}

/// How threads share a row that lies in their registers; `None` if it is too long for them.
///
/// The figures are GB/s of a bf16 RMS norm through wgpu on an H200, whose copy reaches 4010 to 4168, with wgpu's checks
/// and arrays in loops (2026-11, 256 MB / 1 GB). What has none is not measured through wgpu: it follows its neighbours
/// or rmsnorm-cuda.
fn tile(problem: &Problem, caps: &Caps) -> Option<Tile> {
    let pairs = pairs(problem.cols);
    // A pair of f32 takes twice the registers.
    let is_wide = is_split(problem);
    let (threads, groups) = match (pairs, is_wide) {
        // Not measured through wgpu.
        (0..=32, _) => {
            let threads = pairs.next_power_of_two() as u32;
            (threads, 256 / threads)
        }
        // Not measured through wgpu.
        (33..=64, _) => (64, 4),
        // 1024 columns: 3364 / 3550; 128 threads with one pack 3486 / -, 32 with four 2989 / 3129.
        (65..=128, _) => (64, 1),
        // Not measured through wgpu.
        (129..=256, _) => (128, 1),
        // 4096 columns: 3109 / 3334; 256 threads with two packs 3047 / 3178, 64 with eight 1589 / 1584.
        (257..=512, false) => (128, 1),
        // 8192 columns: 3037 / -; 128 threads with eight packs 1576.
        (513..=1024, false) => (256, 1),
        // 16384 columns: 2933.
        (1025..=2048, false) => (512, 1),
        // Not measured through wgpu: as many bytes a thread.
        (257..=512, true) => (256, 1),
        (513..=1024, true) => (512, 1),
        // 32768 columns: 2648 with four packs. What needs more packs, or is f32, is not measured through wgpu.
        (_, _) => (1024, 1),
    };
    let threads_per_row = caps.threads_with(threads, THREAD_BYTES);
    let groups = (caps.threads_with(threads * groups, THREAD_BYTES) / threads_per_row).max(1);
    let packs = u32::try_from(pairs.div_ceil(threads_per_row as usize)).ok()?;
    // 32 registers for a row. Not measured through wgpu.
    let most_packs = if is_wide { 4 } else { 8 };
    let flavour = flavour(threads_per_row, groups, caps);
    (packs <= most_packs).then_some(Tile { threads_per_row, groups, packs, flavour })
}

/// The workgroup that visits a row several times: as many loads in flight as there can be. Not measured through wgpu.
fn streaming_tile(caps: &Caps) -> Tile {
    let threads_per_row = caps.threads_with(1024, THREAD_BYTES);
    Tile { threads_per_row, groups: 1, packs: 1, flavour: flavour(threads_per_row, 1, caps) }
}
