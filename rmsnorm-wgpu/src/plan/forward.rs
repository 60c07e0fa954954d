//! Forward: the tile of a row, or how it streams.

use rmsnorm_gpu::tuning::{Ladder, find};
use rmsnorm_spec::{Norm, Problem};

use super::{
    Access, KernelKey, Layout, MOST_PACKS, Plan, PlanError, Program, Step, Tile, Tuning, is_wide, key, pairs, ranges,
    reduction, threads_without_idle,
};
use crate::caps::Caps;

/// Maximum workgroup memory per thread: two sums in two buffers.
const THREAD_BYTES: u32 = 16;

/// Packs that a thread has in flight when it reads a row several times.
const STREAMING_PACKS: u32 = 4;

/// The plan of a forward call.
pub(super) fn plan(problem: &Problem, layout: &Layout, caps: &Caps) -> Result<Plan, PlanError> {
    let (program, tile) = match tile(problem, caps) {
        Some(tile) if tile.packs <= layout.access.most_packs() => (Program::Forward, tile),
        Some(tile) => (Program::ForwardStreaming, Tile { packs: 1, ..tile }),
        None => (Program::ForwardStreaming, streaming_tile(problem, layout.access, caps)),
    };
    let key = KernelKey { visits_once: visits_once(problem, caps), ..key(problem, program, tile, layout, caps) };
    Ok(Plan { steps: rows(problem, key, layout, caps)?, ..Plan::default() })
}

/// A kernel on all rows.
pub(super) fn rows(problem: &Problem, key: KernelKey, layout: &Layout, caps: &Caps) -> Result<Vec<Step>, PlanError> {
    let groups = key.tile.groups;
    let most = ranges::most_rows(problem, layout, groups, caps)?;
    let ranges = ranges::even(problem.rows as u64, most);
    ranges.map(|rows| Step::by_rows(key, rows, (groups.into(), 1), caps)).collect()
}

/// The table of a call.
fn ladder<'a>(problem: &Problem, tuning: &'a Tuning) -> &'a Ladder<u32> {
    let [rms, layer, layer_add, wide] = &tuning.forward;
    match problem.norm {
        _ if is_wide(problem) => wide,
        _ if problem.quant.is_some() => &tuning.to_codes,
        Norm::Rms | Norm::L2 | Norm::L2Clamped => rms,
        Norm::Layer if problem.tensors.adds_residual() => layer_add,
        Norm::Layer => layer,
    }
}

/// How threads share a row in registers; `None` if it is too long.
///
/// Times: see `tuning.rs`.
pub(super) fn tile(problem: &Problem, caps: &Caps) -> Option<Tile> {
    let pairs = pairs(problem);
    let is_wide = is_wide(problem);
    let wanted = find(ladder(problem, caps.tuning), pairs)? as usize;
    let threads = pairs.div_ceil(wanted).next_power_of_two().min(1024) as u32;
    let is_long = pairs >= 1024;
    let threads = match (is_wide, is_long) {
        (true, _) => threads,
        (false, true) => threads_without_idle(pairs, &[8, 7, 6, 5], 1024).unwrap_or(threads),
        (false, false) => with_fewer_idle(pairs, threads),
    };
    let threads_per_row = caps.threads_with(threads, THREAD_BYTES);
    let packs = u32::try_from(pairs.div_ceil(threads_per_row as usize)).ok()?;
    // Rows shorter than a subgroup share a workgroup, and so do rows that would give a
    // multiprocessor too few threads. us by two rows and by one: 768 columns on 32 threads 131.8 /
    // 133.5 and 130.8 / 138.7; 1024 columns, four packs, 36.4 / 37.5 and 36.3 / 37.2.
    let side_by_side = match (threads, packs) {
        (0..32, _) => 128,
        (32, 0..=3) if !is_wide => 64,
        (64, 0..=2) if !is_wide => 128,
        _ => threads,
    };
    let groups = (caps.threads_with(side_by_side, THREAD_BYTES) / threads_per_row).max(1);
    // 32 registers hold a row.
    let most_packs = if is_wide { 4 } else { MOST_PACKS };
    let reduction = reduction(threads_per_row, groups, caps);
    (packs <= most_packs).then_some(Tile::new(threads_per_row, groups, packs, reduction))
}

/// `threads`, or half of them with up to seven packs each if otherwise an eighth or more would be
/// idle. Threads that own exactly the existing columns need no bounds checks. Not for short rows,
/// where a thread's packs would be far apart.
fn with_fewer_idle(pairs: usize, threads: u32) -> u32 {
    let all = threads as usize;
    let is_idle = 8 * pairs <= 7 * all * pairs.div_ceil(all);
    if is_idle && 2 * pairs <= 7 * all && pairs > 64 { threads / 2 } else { threads }
}

/// Whether both sums of a row are made in one pass: for layer norms that stream in every layout.
/// Other calls stream only in some layouts and must keep the bits of calls that do not.
pub(super) fn visits_once(problem: &Problem, caps: &Caps) -> bool {
    problem.norm == Norm::Layer && tile(problem, caps).is_none()
}

/// The workgroup that reads a row several times. us for RMS norm of 32768 bf16 columns, H200
/// through wgpu: 512 threads with 4 packs in flight 147.7, with one pack 172, with 8 packs 204;
/// 1024 or 256 threads 178. 131072 columns: 1024 threads 186, 512 threads 191.
pub(super) fn streaming_tile(problem: &Problem, access: Access, caps: &Caps) -> Tile {
    // For the longest rows fewer rows at a time, so that the L2 cache still has them for the second
    // pass, as far as arithmetic can hide the latency.
    let threads = if problem.norm != Norm::Layer && pairs(problem) > 8192 { 1024 } else { 512 };
    let threads_per_row = caps.threads_with(threads, THREAD_BYTES);
    let packs = access.most_packs().min(STREAMING_PACKS);
    Tile::new(threads_per_row, 1, packs, reduction(threads_per_row, 1, caps))
}
