//! The division of a problem into work: a pure function of the problem and the caps.
//!
//! `block_rows` decides the bits of a result and depends only on the number of rows, never on the
//! number of threads or the instruction set. Everything else may be tuned freely.

use rmsnorm_spec::depth::ceil_root;
#[cfg(any(test, feature = "conformance"))]
use rmsnorm_spec::{DType, Norm};
use rmsnorm_spec::{Direction, Problem, Tensor};

use crate::caps::Caps;
#[cfg(any(test, feature = "conformance"))]
use crate::lanes::BLOCK;
use crate::lanes::LANES;

/// How one call is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Contiguous ranges of rows (forward) or of blocks (backward) that may run on different threads; at least 1.
    pub(crate) tasks: usize,
    /// Ranges of columns of one gradient that the second stage may add on different threads; at least 1.
    pub(crate) reduce_tasks: usize,
    /// Rows with weight gradients that are summed, in order, into one partial row.
    pub(crate) block_rows: usize,
    /// Number of blocks. The second stage adds their partial rows in order.
    pub(crate) blocks: usize,
    /// Whether outputs bypass the cache.
    pub(crate) streaming: bool,
}

/// The fewest rows of a block. With fewer rows, partial rows would cost more traffic than the rows.
const MIN_BLOCK_ROWS: usize = 8;

/// Row counts at which the plan changes, for the conformance suite: one block, two blocks, blocks
/// that grow with the square root.
#[cfg(any(test, feature = "conformance"))]
pub(crate) const ROWS_BREAKPOINTS: [usize; 3] = [MIN_BLOCK_ROWS, 2 * MIN_BLOCK_ROWS, MIN_BLOCK_ROWS * MIN_BLOCK_ROWS];

/// Row lengths at which the code path changes, for the conformance suite: one group of lanes, two
/// groups, one block.
#[cfg(any(test, feature = "conformance"))]
pub(crate) const COLS_BREAKPOINTS: [usize; 3] = [LANES, 2 * LANES, BLOCK];

/// Shapes at which the plan changes with the size of a matrix, for the conformance suite: the
/// smallest row counts at which a call is split, bypasses the cache, and splits its second stage.
/// Found by calling `plan`.
#[cfg(any(test, feature = "conformance"))]
pub(crate) fn shape_breakpoints(dtype: DType, caps: &Caps) -> Vec<(usize, usize)> {
    let gradients = [Tensor::Dweight, Tensor::Dbias];
    let first = |cols, has_changed: fn(&Plan) -> bool| {
        let of_rows = |rows| plan(&Problem::backward(Norm::Rms, rows, cols, dtype, &gradients), caps);
        (1..1 << 14).find(|&rows| has_changed(&of_rows(rows))).map(|rows| (rows, cols))
    };
    let shapes = [
        first(1021, |plan| plan.tasks > 1),
        first(1021, |plan| plan.streaming),
        first(70_003, |plan| plan.reduce_tasks > 1),
    ];
    shapes.into_iter().flatten().collect()
}

/// Rows per block: about the square root of the rows, so that neither chain of additions is long.
pub(crate) fn block_rows(rows: usize) -> usize {
    ceil_root(rows).max(MIN_BLOCK_ROWS)
}

/// Longest chain of additions in `dweight` and `dbias`: within a block, then over the blocks.
#[cfg(any(test, feature = "conformance"))]
pub(crate) fn depth_rows(rows: usize) -> usize {
    let block_rows = block_rows(rows);
    (block_rows.min(rows) + rows.div_ceil(block_rows)).saturating_sub(2)
}

/// Longest chain of additions in a sum over a row: within a lane of a block, the sum of lanes, then
/// pairs of blocks.
#[cfg(any(test, feature = "conformance"))]
pub(crate) fn depth_cols(cols: usize) -> usize {
    let of_lane = cols.min(BLOCK).div_ceil(LANES).saturating_sub(1);
    let of_blocks = cols.div_ceil(BLOCK).next_power_of_two().ilog2();
    cols.saturating_sub(1).min(of_lane + (LANES.ilog2() + of_blocks) as usize)
}

/// f32 elements of workspace: one partial row of `dweight` and one of `dbias` per block.
pub(crate) fn workspace_len(problem: &Problem) -> usize {
    problem.rows.div_ceil(block_rows(problem.rows)) * problem.cols * problem.tensors.sums_over_rows()
}

/// The number of tasks for `units` units that move `bytes` bytes.
pub(crate) fn tasks(bytes: usize, units: usize, caps: &Caps) -> usize {
    let most = if caps.threads == 1 { 1 } else { caps.threads * caps.tuning.tasks_per_thread };
    (bytes / caps.tuning.min_task_bytes).clamp(1, most).min(units.max(1))
}

/// The plan of a problem.
pub(crate) fn plan(problem: &Problem, caps: &Caps) -> Plan {
    let (rows, cols) = (problem.rows, problem.cols);
    let activation_bytes = rows * cols * problem.dtypes.activation.size();
    let output_bytes = match problem.direction {
        Direction::Forward | Direction::Backward => activation_bytes,
        // The transposed copy reads the codes next, so the cache should keep them.
        Direction::QuantizedForward if problem.has(Tensor::CodesT) => 0,
        Direction::QuantizedForward => rows * cols,
    };
    let block_rows = block_rows(rows);
    let blocks = rows.div_ceil(block_rows);
    let units = match problem.direction {
        Direction::Forward | Direction::QuantizedForward => rows,
        Direction::Backward => blocks,
    };
    Plan {
        tasks: tasks(activation_bytes + output_bytes.max(rows * cols), units, caps),
        reduce_tasks: tasks(blocks * cols * size_of::<f32>(), cols / LANES, caps),
        block_rows,
        blocks,
        streaming: output_bytes >= caps.tuning.streaming_bytes && !problem.tensors.is_in_place(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::tuning::Tuning;

    fn forward(rows: usize, cols: usize, dtype: DType) -> Problem {
        Problem::forward(Norm::Rms, rows, cols, dtype, &[Tensor::Weight])
    }

    fn in_place(rows: usize, cols: usize, dtype: DType) -> Problem {
        let forward = forward(rows, cols, dtype);
        Problem { tensors: forward.tensors.without(Tensor::X), ..forward }
    }

    fn backward(rows: usize, cols: usize, dtype: DType) -> Problem {
        Problem::backward(Norm::Rms, rows, cols, dtype, &[Tensor::Weight, Tensor::Dweight, Tensor::Dbias])
    }

    fn with_threads(threads: usize) -> Caps {
        Caps { isa: Isa::Portable, threads, tuning: Tuning::ZEN5 }
    }

    #[test]
    fn small_calls_stay_on_the_calling_thread() {
        for (rows, cols) in [(0, 4096), (1, 4096), (1, 131072), (128, 1024), (1024, 128)] {
            let plan = plan(&forward(rows, cols, DType::F32), &with_threads(8));
            assert_eq!(plan.tasks, 1, "{rows}x{cols}");
        }
    }

    #[test]
    fn outputs_beyond_the_cache_bypass_it_unless_in_place() {
        // 4096x1024 bf16 is 8 MiB.
        for (problem, expected) in [
            (forward(4095, 1024, DType::Bf16), false),
            (forward(4096, 1024, DType::Bf16), true),
            (backward(4095, 1024, DType::Bf16), false),
            (backward(4096, 1024, DType::Bf16), true),
            (in_place(1 << 20, 1024, DType::Bf16), false),
        ] {
            let plan = plan(&problem, &with_threads(2));
            assert_eq!(plan.streaming, expected, "{problem:?}");
        }
    }

    #[test]
    fn a_second_thread_starts_at_the_bytes_that_are_worth_it() {
        // 1 MiB read and 1 MiB written.
        for (rows, expected) in [(255, 1), (256, 2), (257, 2)] {
            let plan = plan(&forward(rows, 1024, DType::F32), &with_threads(2));
            assert_eq!(plan.tasks, expected, "{rows} rows");
        }
    }

    #[test]
    fn the_second_stage_is_split_by_its_own_size() {
        let reduce_tasks = |rows, cols| plan(&backward(rows, cols, DType::F32), &with_threads(2)).reduce_tasks;
        assert_eq!((reduce_tasks(4096, 1024), reduce_tasks(4096, 65536)), (1, 8));
    }

    /// Checks both sides of each change. Changes at other shapes are not found here.
    #[test]
    fn shape_breakpoints_are_where_the_plan_changes() {
        for (dtype, expected) in [
            (DType::F32, [(257, 1021), (2055, 1021), (57, 70_003)]),
            (DType::Bf16, [(514, 1021), (4109, 1021), (57, 70_003)]),
        ] {
            assert_eq!(shape_breakpoints(dtype, &with_threads(2)), expected);
            // One thread has nothing to split.
            assert_eq!(shape_breakpoints(dtype, &with_threads(1)), expected[1..2]);
        }
    }

    /// A second stage of several MiB of partial sums. A range of columns has at least one group of
    /// lanes.
    #[test]
    fn the_second_stage_has_a_task_for_each_mebibyte() {
        let reduce_tasks =
            |rows, cols, threads| plan(&backward(rows, cols, DType::F32), &with_threads(threads)).reduce_tasks;
        // 8 partial rows of 2^15 columns are 1 MiB.
        assert_eq!([(1 << 16) - 1, 1 << 16, 3 << 15, 1 << 17].map(|cols| reduce_tasks(64, cols, 4)), [1, 2, 3, 4]);
        assert_eq!([1, 2, 1000].map(|threads| reduce_tasks(64, 1 << 22, threads)), [1, 8, 128]);
        // 2^16 partial rows of 32 columns: 8 MiB, but only one group of lanes.
        assert_eq!(reduce_tasks(1 << 32, 32, 4), 1);
        assert_eq!(reduce_tasks(1 << 32, 95, 4), 2);
    }

    /// No product overflows up to the largest call that validation admits: rows times cols in bytes
    /// up to isize::MAX.
    #[test]
    fn the_largest_calls_have_a_plan() {
        let most = isize::MAX as usize / size_of::<f32>();
        for (rows, cols) in [(most, 1), (1, most), (1 << 30, most >> 30), (most >> 30, 1 << 30)] {
            for problem in [forward, in_place, backward].map(|problem| problem(rows, cols, DType::F32)) {
                let plan = plan(&problem, &with_threads(1000));
                let most_tasks = if problem.direction == Direction::Backward { plan.blocks } else { rows };
                assert_eq!(plan.tasks, 4000.min(most_tasks), "{problem:?}");
                assert_eq!(plan.streaming, !problem.tensors.is_in_place());
                assert!(plan.blocks as u128 * plan.block_rows as u128 >= rows as u128);
                assert!((plan.blocks as u128 - 1) * (plan.block_rows as u128) < rows as u128);
                let gradients = problem.tensors.sums_over_rows() as u128;
                assert_eq!(workspace_len(&problem) as u128, plan.blocks as u128 * cols as u128 * gradients);
            }
        }
    }

    /// The number of blocks is close to the rows of a block, without overflow.
    #[test]
    fn blocks_are_about_the_square_root_of_the_rows() {
        for rows in
            (64usize..5000).chain([65_535, 65_536, 65_537, 70_001, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 40])
        {
            let root = (rows as f64).sqrt();
            let blocks = rows.div_ceil(block_rows(rows));
            assert!((block_rows(rows) as f64 - root).abs() <= 1.0, "{rows} rows");
            assert!((blocks as f64 - root).abs() <= 1.5, "{rows} rows: {blocks} blocks");
        }
        assert_eq!([0, 1, 7, 8, 9, 63, 64].map(block_rows), [8; 7]);
        assert_eq!([65, 81, 82, 100, 101].map(block_rows), [9, 9, 10, 10, 11]);
    }

    #[test]
    fn workspace_has_a_row_for_each_block_of_each_gradient() {
        for gradients in [&[][..], &[Tensor::Dweight], &[Tensor::Dbias], &[Tensor::Dweight, Tensor::Dbias]] {
            let problem = Problem::backward(Norm::Layer, 100, 7, DType::F16, gradients);
            assert_eq!(workspace_len(&problem), 10 * 7 * gradients.len());
        }
    }

    #[test]
    fn one_row_is_never_split() {
        let plan = plan(&forward(1, 1 << 24, DType::F32), &with_threads(8));
        assert_eq!(plan.tasks, 1);
    }

    #[test]
    fn large_calls_use_every_thread() {
        for threads in [2, 3, 16] {
            let forward = plan(&forward(4096, 1024, DType::F32), &with_threads(threads));
            assert!(forward.tasks >= threads && forward.tasks <= 4096, "{forward:?}");
            let backward = plan(&backward(4096, 1024, DType::F32), &with_threads(threads));
            assert!(backward.tasks >= threads && backward.tasks <= backward.blocks, "{backward:?}");
        }
    }

    #[test]
    fn what_decides_the_bits_depends_on_rows_only() {
        for rows in [1, 7, 8, 9, 64, 65, 4096, 1 << 20] {
            let reference = plan(&backward(rows, 64, DType::F32), &with_threads(1));
            for (threads, cols, dtype) in [(2, 64, DType::F32), (16, 65537, DType::Bf16), (3, 1, DType::F16)] {
                let other = plan(&backward(rows, cols, dtype), &with_threads(threads));
                assert_eq!((reference.block_rows, reference.blocks), (other.block_rows, other.blocks));
            }
        }
    }

    #[test]
    fn blocks_cover_all_rows_and_fit_the_workspace() {
        for rows in (0..200).chain([4095, 4096, 4097, 65537, 1 << 20]) {
            let problem = backward(rows, 3, DType::F32);
            let plan = plan(&problem, &with_threads(2));
            assert!(plan.blocks * plan.block_rows >= rows);
            assert!(rows == 0 || (plan.blocks - 1) * plan.block_rows < rows, "an empty block for {rows} rows");
            assert_eq!(workspace_len(&problem), plan.blocks * 3 * 2);
        }
    }

    /// Error bounds use the claimed chains, so these must be at least as long as the plan's: the
    /// rows of a block one after the other, then the blocks.
    #[test]
    fn claimed_chains_are_as_long_as_those_of_the_plan() {
        for rows in (1..5000).chain([65_537, 1 << 20, 1 << 32]) {
            let plan = plan(&backward(rows, 3, DType::F32), &with_threads(2));
            let additions = plan.block_rows.min(rows) - 1 + plan.blocks - 1;
            assert!(depth_rows(rows) >= additions, "{rows} rows: {additions}");
        }
    }

    #[test]
    fn chains_of_additions_stay_within_policy() {
        for n in (0..5000).chain([17389, 65537, 1 << 20, 1 << 24]) {
            let root = (n as f64).sqrt().ceil() as usize;
            assert!(depth_rows(n) <= n.saturating_sub(1).min(2 * root + 64), "{n} rows: {}", depth_rows(n));
            assert!(depth_cols(n) <= n.saturating_sub(1).min(n.div_ceil(32) + 16), "{n} cols: {}", depth_cols(n));
        }
    }
}
