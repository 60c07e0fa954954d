//! Backward: the tile of a row, chunks of rows, and the workspace between the phases.

use std::ops::Range;

use rmsnorm_gpu::chain::{serial, shared};
use rmsnorm_gpu::reduction;
use rmsnorm_gpu::tuning::{Ladder, find};
use rmsnorm_spec::depth::policy_depth_rows;
use rmsnorm_spec::{DType, Gate, GradReduction, Problem, Slot};

use super::tuning::{Division, GATED_AFTER, GATED_BEFORE, Tuning};
use super::{
    Access, Dispatch, Layout, Plan, PlanError, Program, Reduction, Step, Tile, Workspace, gradients, is_split, is_wide,
    key, pairs, ranges, reduction, sharing, threads_without_idle, width,
};
use crate::caps::{Caps, F16};

/// Minimum threads of a workgroup; short rows share one.
const WORKGROUP: u32 = 128;

/// Maximum workgroup memory per thread: two sums in two buffers, and a quad of a gradient.
const THREAD_BYTES: u32 = 32;

/// The plan of a backward call.
pub(super) fn plan(problem: &Problem, layout: &Layout, caps: &Caps) -> Result<Plan, PlanError> {
    if let GradReduction::Locks { groups } = problem.grad_reduction {
        return Err(PlanError::Locks { groups });
    }
    let form = Form::of(problem, layout.access, caps);
    let most = ranges::most_rows(problem, layout, form.rows_per_workgroup(), caps)?;
    let (ranges, partials) = ranges_and_partials(problem, &form, most, caps)?;
    let gradients = gradients(problem);
    let sets = partials.sets();
    let len = partials.rows * gradients * partial_stride(problem);
    let mut steps = Vec::new();
    if problem.grad_reduction == GradReduction::Atomics && len > 0 {
        steps.push(Step::Zero { first: 0, len });
    }
    let longest = ranges.first().map_or(0, |rows| rows.end - rows.start);
    for (index, rows) in ranges.into_iter().enumerate() {
        let index = index as u64;
        let main = Dispatch {
            first_chunk: (index % sets * partials.chunks) as u32,
            chunks: partials.chunks as u32,
            accumulates: partials.is_kept && index >= sets,
            grid: ranges::grid(partials.chunks * form.tiles, caps)?,
            ..Dispatch::new(key(problem, form.main.0, form.main.1, layout, caps), rows.clone())
        };
        if let Some(tile) = form.sums {
            let key = key(problem, Program::BackwardRowSums, tile, layout, caps);
            steps.push(Step::by_rows(key, rows, (tile.groups.into(), 1), caps)?);
        }
        steps.push(Step::Dispatch(main));
    }
    if gradients > 0 {
        steps.push(second_stage(problem, partials.rows, layout, caps)?);
    }
    let row_sums = if form.sums.is_some() { row_sums_of(problem, longest) } else { 0 };
    let workspace = Workspace { row_sums: len, len: whole(len, row_sums, gradients) };
    Ok(Plan { steps, workspace, partial_rows: partials.rows as u32 })
}

/// Workspace, in f32, that suffices for every layout; 0 without a plan.
pub(super) fn workspace_len(problem: &Problem, caps: &Caps) -> u64 {
    if matches!(problem.grad_reduction, GradReduction::Locks { .. }) || caps.check().is_err() {
        return 0;
    }
    // `Words` uses the form of one of these.
    let accesses = [Access::Aligned, Access::Parts];
    let forms = accesses.map(|access| Form::of(problem, access, caps));
    let fitting =
        row_sums_len(problem, caps).and_then(|row_sums| Ok((row_sums, partial_rows_that_fit(problem, caps)?)));
    let Ok((row_sums, fit)) = fitting else { return 0 };
    let rows = forms.map(|form| match problem.grad_reduction {
        GradReduction::Atomics => form.chunks.min(1),
        GradReduction::Partials | GradReduction::Locks { .. } => form.chunks.min(fit),
    });
    let gradients = gradients(problem);
    let partials = rows.into_iter().max().unwrap_or_default() * gradients * partial_stride(problem);
    whole(partials, row_sums + sharing::most_len(problem, caps), gradients)
}

/// Elements of a workspace with these parts.
fn whole(partials: u64, row_sums: u64, gradients: u64) -> u64 {
    // The second phase binds the workspace even without partial rows.
    let len = (partials + row_sums).max(if gradients > 0 { 4 } else { 0 });
    if len > 0 { len + reduction::ALIGNMENT_SLACK } else { 0 }
}

/// The programs of a call and their tiles.
#[derive(Clone, Copy, Debug)]
struct Form {
    /// The first of two passes, if a row does not stay in registers.
    sums: Option<Tile>,
    /// The program that writes dx and partial sums.
    main: (Program, Tile),
    /// Workgroups on the columns of a chunk.
    tiles: u64,
    /// Chunks of rows wanted in total.
    chunks: u64,
}

impl Form {
    fn of(problem: &Problem, access: Access, caps: &Caps) -> Self {
        let rows = problem.rows as u64;
        let row_tile = match tile(problem, caps) {
            Some(tile) if tile.packs <= access.most_packs() => {
                let blocks = rows.div_ceil(tile.groups.into()).min(workgroups(problem, &tile, caps));
                let chunks = reduction::chunks(rows, blocks, most_rows(rows, tile.groups));
                return Form { sums: None, main: (Program::Backward, tile), tiles: 1, chunks };
            }
            // The same threads, hence the same bits.
            Some(tile) => Tile { packs: 1, rows_at_once: 1, reads_again: false, ..tile },
            // Not measured with wgpu; copied from rmsnorm-cuda.
            None => {
                let threads_per_row = caps.threads_with(512, THREAD_BYTES);
                Tile::new(threads_per_row, 1, 1, reduction(threads_per_row, 1, caps))
            }
        };
        // Not measured with wgpu; copied from rmsnorm-cuda.
        let threads_per_row = caps.threads_with(256, THREAD_BYTES);
        let columns = Tile::new(threads_per_row, 1, 1, Reduction::Workgroup);
        let tiles = pairs(problem).div_ceil(threads_per_row as usize) as u64;
        // Several per resident workgroup, to balance the load.
        let blocks = (4 * u64::from(caps.workgroups)).div_ceil(tiles * problem.groups as u64).min(rows);
        let chunks = reduction::chunks(rows, blocks, most_rows(rows, 1));
        Form { sums: Some(row_tile), main: (Program::BackwardColumns, columns), tiles, chunks }
    }

    /// Minimum rows of a workgroup: the rows of the first pass, since chunks have any number of
    /// rows.
    fn rows_per_workgroup(&self) -> u32 {
        self.sums.map_or(u32::MAX, |tile| tile.groups)
    }
}

/// The ranges of rows, and how they share partial rows. Ranges are as long as possible, or shorter
/// if so few partial rows fit that a chunk's rows must be summed in parts.
fn ranges_and_partials(
    problem: &Problem,
    form: &Form,
    most: u64,
    caps: &Caps,
) -> Result<(Vec<Range<u64>>, Partials), PlanError> {
    let split = |most| -> Vec<_> { ranges::even(problem.rows as u64, most).collect() };
    let ranges = split(most);
    let planned = Partials::of(problem, form, &ranges, caps);
    let Err(unfit @ PlanError::Partials { .. }) = planned else { return Ok((ranges, planned?)) };
    // As in a sum of sums, the square root of the rows in a chunk is about the best length.
    let mut shorter = most.min(problem.rows as u64) / 2;
    while shorter > 0 {
        let ranges = split(shorter);
        if let Ok(partials) = Partials::of(problem, form, &ranges, caps) {
            return Ok((ranges, partials));
        }
        shorter /= 2;
    }
    Err(unfit)
}

/// How the chunks of each range of rows use the partial rows.
#[derive(Clone, Copy, Debug)]
struct Partials {
    /// Rows of partial sums.
    rows: u64,
    /// Chunks of every range.
    chunks: u64,
    /// Whether each chunk has a partial row; with atomic sums all chunks share one.
    is_kept: bool,
}

impl Partials {
    /// Uses as many chunks as possible, and gives partial rows to as many ranges as possible.
    /// Further ranges add to the partial rows of the first ones.
    fn of(problem: &Problem, form: &Form, ranges: &[Range<u64>], caps: &Caps) -> Result<Self, PlanError> {
        let (rows, count) = (problem.rows as u64, ranges.len() as u64);
        let wanted = form.chunks.min(caps.most_groups() / form.tiles).max(form.chunks.min(1));
        if gradients(problem) == 0 {
            return Ok(Partials { rows: 0, chunks: wanted, is_kept: false });
        }
        let fit = partial_rows_that_fit(problem, caps)?;
        if problem.grad_reduction == GradReduction::Atomics {
            return Ok(Partials { rows: wanted.min(1), chunks: wanted, is_kept: false });
        }
        let in_all = wanted.min(fit);
        let longest = ranges.first().map_or(0, |rows| rows.end - rows.start);
        let most = most_additions(rows);
        let mut fewest = u64::MAX;
        let mut chunks = in_all;
        loop {
            // With fewer chunks more ranges have partial rows, and fewer sums are continued by a
            // later range.
            let sets = count.min(in_all.checked_div(chunks).unwrap_or(0));
            let partials = Partials { rows: sets * chunks, chunks, is_kept: true };
            let additions = partials.additions(form, longest, count, caps).min(rows.saturating_sub(1));
            if additions <= most {
                return Ok(partials);
            }
            fewest = fewest.min(additions);
            if chunks <= 1 {
                return Err(PlanError::Partials { rows, additions: fewest, most });
            }
            chunks /= 2;
        }
    }

    /// Ranges that have partial rows.
    fn sets(&self) -> u64 {
        if self.is_kept { self.rows.checked_div(self.chunks).unwrap_or(1) } else { 1 }
    }

    /// The longest chain of additions in a gradient, over `count` ranges of at most `longest` rows.
    fn additions(&self, form: &Form, longest: u64, count: u64, caps: &Caps) -> u64 {
        if self.chunks == 0 {
            return 0;
        }
        let groups = u64::from(form.main.1.groups);
        let visits = count.div_ceil(self.sets());
        let chunk = shared(longest.div_ceil(self.chunks), groups);
        visits * chunk + serial(visits) + shared(self.rows, reduce_groups(self.rows, caps).into())
    }
}

/// The chain of additions that math.md section 4 allows in a sum over `rows` rows.
pub(super) fn most_additions(rows: u64) -> u64 {
    policy_depth_rows(rows as usize) as u64
}

/// Elements for two sums per row, or per group of its columns, rounded up to 16 bytes, the unit in
/// which the binding is read.
fn row_sums_of(problem: &Problem, rows: u64) -> u64 {
    (2 * rows * problem.groups as u64).next_multiple_of(4)
}

/// Elements from one partial row of a gradient to the next. Groups of columns are padded alike.
fn partial_stride(problem: &Problem) -> u64 {
    problem.groups as u64 * reduction::row_stride(width(problem))
}

/// Elements for the row sums of one range in any layout; 0 if no layout has row sums.
fn row_sums_len(problem: &Problem, caps: &Caps) -> Result<u64, PlanError> {
    // If any layout has row sums, unaligned ones do.
    let Some(tile) = Form::of(problem, Access::Parts, caps).sums else { return Ok(0) };
    let most = ranges::most_rows(problem, &Layout::dense(problem), tile.groups, caps)?;
    Ok(row_sums_of(problem, most.min(problem.rows as u64)))
}

/// Partial rows (of all gradients) that fit a binding together with row sums and shared tensors.
fn partial_rows_that_fit(problem: &Problem, caps: &Caps) -> Result<u64, PlanError> {
    let bytes = gradients(problem) * partial_stride(problem) * 4;
    let others = row_sums_len(problem, caps)? + sharing::most_len(problem, caps);
    let most = caps.available_bytes().saturating_sub(reduction::ALIGNMENT + 4 * others);
    if bytes > most {
        return Err(PlanError::Workspace { bytes, most });
    }
    Ok(most.checked_div(bytes).unwrap_or(0))
}

/// The second phase adds the partial rows.
fn second_stage(problem: &Problem, partial_rows: u64, layout: &Layout, caps: &Caps) -> Result<Step, PlanError> {
    let tile = Tile::new(reduction::LANES, reduce_groups(partial_rows, caps), 1, Reduction::Workgroup);
    let blocks = reduction::blocks(width(problem), problem.tensors.sums_over_rows());
    Step::dispatch(key(problem, Program::ReducePartials, tile, layout, caps), 0..0, blocks, caps)
}

/// Threads that share the partial rows of a column. Not measured with wgpu; copied from
/// rmsnorm-cuda.
fn reduce_groups(partial_rows: u64, caps: &Caps) -> u32 {
    let most = caps.threads_with(128 * reduction::LANES, 16) / reduction::LANES;
    reduction::groups(partial_rows, most)
}

/// Maximum rows of a chunk: half of the `2 sqrt(rows) + 64` additions that math.md section 4
/// allows. The second phase and each further range need the rest.
fn most_rows(rows: u64, groups: u32) -> u64 {
    (rows.isqrt() + 32) * u64::from(groups)
}

/// The table of a call.
fn ladder<'a>(problem: &Problem, tuning: &'a Tuning) -> &'a Ladder<Division> {
    let [one_gradient, two_gradients, f16, wide] = &tuning.backward;
    match problem.dtypes.activation {
        _ if has_gated_tiles(problem) => match problem.gate {
            Some(Gate { slot: Slot::Before, .. }) => &GATED_BEFORE,
            Some(Gate { slot: Slot::After, .. }) | None => &GATED_AFTER,
        },
        _ if is_wide(problem) => wide,
        DType::F16 => f16,
        DType::F32 | DType::Bf16 if gradients(problem) == 2 => two_gradients,
        DType::F32 | DType::Bf16 => one_gradient,
    }
}

/// Whether [`GATED_AFTER`] and [`GATED_BEFORE`] were measured for such calls.
fn has_gated_tiles(tuned: &Problem) -> bool {
    let is_f16 = tuned.dtypes.activation == DType::F16;
    tuned.gate.is_some() && gradients(tuned) < 2 && !is_f16 && !is_split(tuned)
}

/// How threads share a row that they keep in registers together with the sums; `None` if it is too
/// long.
///
/// Times: see `tuning.rs`.
fn tile(problem: &Problem, caps: &Caps) -> Option<Tile> {
    let pairs = pairs(problem);
    let is_wide = is_wide(problem);
    let has_two_sums = gradients(problem) == 2;
    let tuned = as_tuned(problem, caps);
    let Division { without_idle: (packs, most), most: wanted, reads_again } = find(ladder(&tuned, caps.tuning), pairs)?;
    let threads = threads_without_idle(pairs, packs, most).unwrap_or_else(|| {
        let threads = pairs.div_ceil(wanted as usize).next_power_of_two().min(512);
        // As without idle threads, if there are enough threads for fewer packs.
        let is_crowded = has_two_sums && !is_wide && threads < 512 && pairs.div_ceil(threads) == 4;
        threads as u32 * if is_crowded { 2 } else { 1 }
    });
    let threads_per_row = caps.threads_with(threads, THREAD_BYTES);
    let groups = (caps.threads_with(threads.max(WORKGROUP), THREAD_BYTES) / threads_per_row).max(1);
    let packs = u32::try_from(pairs.div_ceil(threads_per_row as usize)).ok()?;
    let reduction = reduction(threads_per_row, groups, caps);
    // A second row hides the latency of the first, if there are registers for it. us with and
    // without. One sum, three packs: 1536 columns 205 and 211, 12288 columns 212 and 240. One sum,
    // four packs: 4096 columns 219 and 202. Two sums, two packs on the most threads: 8192 columns
    // 246 and 301, 4096 columns 229.6 and 228.
    let is_paired = match (has_two_sums, packs) {
        (false, 3) => threads_per_row >= 64,
        (true, 2) => threads_per_row == 512,
        _ => false,
    };
    let tile = Tile::new(threads_per_row, groups, packs, reduction);
    // 512 threads have 128 registers each, as many as four packs need.
    let most_packs = if threads_per_row <= 128 && !is_wide { 5 } else { 4 };
    let rows_at_once = if is_paired && !is_wide { 2 } else { 1 };
    // A thread has no registers for four packs of three matrices: see `GATED_AFTER`. Not measured for
    // two gradients, f16 and f32, which have no ladder for gates.
    let reads_again = reads_again || problem.gate.is_some() && pairs > 1024;
    let held = (packs <= most_packs).then_some(Tile { rows_at_once, reads_again, ..tile });
    held.or_else(|| tile_that_reads_again(problem, caps))
}

/// How threads share a row if their registers hold only the sums of dweight; `None` if they do not
/// fit.
///
/// us for RMS norm, H200 through wgpu: 305 (20480 columns), 318 (28672) and 301 (32768), in two
/// passes 344, 347 and 349: a row is in the L1 cache when it is read again. Dividing the columns
/// among workgroups that each read the whole row: RMS norm of 65536 columns 365 and in two passes
/// 348, layer norm of 32768 columns 392 and 350.
fn tile_that_reads_again(problem: &Problem, caps: &Caps) -> Option<Tile> {
    const THREADS: u32 = 1024;
    let packs = pairs(problem).div_ceil(THREADS as usize);
    let fits = gradients(problem) < 2 && !is_wide(problem) && packs <= 4;
    (fits && caps.threads_with(THREADS, THREAD_BYTES) == THREADS)
        .then(|| Tile { reads_again: true, ..Tile::new(THREADS, 1, packs as u32, reduction(THREADS, 1, caps)) })
}

/// The call whose measurements apply: f16 takes no extra registers if the device converts it.
fn as_tuned(problem: &Problem, caps: &Caps) -> Problem {
    let mut tuned = *problem;
    if caps.f16 == F16::Converts && tuned.dtypes.activation == DType::F16 {
        tuned.dtypes.activation = DType::Bf16;
    }
    tuned
}

/// Workgroups with a chunk of rows each, for each group of columns: as many threads as fit the registers of the device, since
/// a second wave would leave most of it idle.
///
/// us on an H200 by number of workgroups. RMS norm:
/// - 4096 columns, 128 threads: 528 workgroups 202.8, 264 265, 1056 209.7
/// - 8192 columns, 256 threads: 264 workgroups 206, 528 212
/// - 16384 columns, 512 threads: 132 workgroups 224, 264 230
/// - 128 columns, 256 threads, one pack: 528 workgroups 212.5, 264 278
/// - 1536 columns, 128 threads, three packs by two rows: 396 workgroups 205, 528 268
/// - 2560 columns, 160 threads, two packs: 792 workgroups 204, 528 225
///
/// Layer norm, two packs:
/// - 4096 columns, 256 threads: 396 workgroups 228, 528 282, 264 268
/// - 2560 columns, 160 threads: 528 workgroups 236, 660 307
/// - 1024 columns, 128 threads: 792 workgroups 62.9, 924 79
/// - 7168 columns, 448 threads: 264 workgroups 242, 132 347
fn workgroups(problem: &Problem, tile: &Tile, caps: &Caps) -> u64 {
    let is_wide = is_wide(problem);
    // Threads per multiprocessor, and its minimum of workgroups.
    let (threads, least) = match (tile.packs, tile.rows_at_once, gradients(problem)) {
        (1, ..) => (1024, 1),
        (2, ..) if tile.reads_again => (768, if tile.threads() <= 512 { 2 } else { 1 }),
        (2, ..) if has_gated_tiles(&as_tuned(problem, caps)) => (384, 1),
        (2, 1, 0 | 1) if !is_wide => (1024, 1),
        (2, 1, _) if !is_wide && tile.threads() <= 512 => (768, 2),
        (3, 2, _) | (5.., _, 0 | 1) => (384, 1),
        (5.., ..) => (256, 1),
        _ => (512, 1),
    };
    let each = (threads / tile.threads()).max(least);
    // `caps.workgroups` assumes four per multiprocessor.
    u64::from((caps.workgroups / 4).max(1) * each).div_ceil(problem.groups as u64)
}
