//! Plans as tables, and properties of every plan. Tests plan for three devices, and need none.

mod chains;
mod columns;
mod properties;
mod quantized;
mod table;
mod tables;
mod workspace;

use std::ops::Range;

pub(crate) use tables::drawn_devices;

use rmsnorm_gpu::plan_tests;
use rmsnorm_gpu::program;
use rmsnorm_gpu::testing::plans::{Parts, Planner, for_all};
use rmsnorm_gpu::testing::{
    self, BF16, BF16_STREAM_F32, Call, DWEIGHT, DWEIGHT_DBIAS, F32, WEIGHT, WEIGHT_BIAS, WEIGHT_RESIDUAL,
};
use rmsnorm_spec::{DType, DTypes, Direction, GradReduction, Norm, Problem, Tensor, TensorSet};

use super::{
    ColumnGroups, KernelKey, Plan, Program, Step, Tile, Workspace, group, groups_as_rows, plan, workspace_len,
    workspace_len_bound,
};
use crate::caps::Caps;

const DEVICES: [Caps; 3] = [Caps::h200(), Caps::a100(), Caps::t4()];

/// Row counts at which plans may change, and one with more rows than a grid has blocks.
const ROWS: [usize; 14] = [0, 1, 2, 15, 16, 17, 131, 132, 133, 1024, 1025, 4096, 1 << 20, 1 << 33];

/// Plans depend on sizes, not dtypes: f16 stands for both 16-bit types.
const F16: DTypes = DTypes::uniform(DType::F16);
const MIXES: [DTypes; 4] = [F32, F16, F16.widened(true, false), F16.widened(true, true)];

const WEIGHT_BIAS_RESIDUAL: TensorSet = WEIGHT_RESIDUAL.with(Tensor::Bias);

/// The plan of a call.
trait PlanCall {
    fn plan(self, rows: usize, cols: usize, caps: &Caps) -> Plan;
}

impl PlanCall for Call {
    fn plan(self, rows: usize, cols: usize, caps: &Caps) -> Plan {
        plan(&self.problem(rows, cols), 16, caps)
    }
}

/// This backend, for the tests of plans that all GPU backends share.
struct Plans;

impl Planner for Plans {
    type Caps = Caps;
    type Access = u32;
    type Plan = Plan;
    type Mapping = (Program, [u32; 4]);

    /// Access widths in bytes. Another test shows that other widths plan alike.
    const ACCESSES: &'static [u32] = &[16, 2];
    const ROWS: &'static [usize] = &ROWS;
    const SOME_ROWS: usize = 4096;
    /// At least 2^43 bytes. A cluster of `forward_cluster` has one row, and a grid limits the
    /// number of clusters.
    const MOST_ELEMENTS: usize = 1 << 41;

    fn devices() -> Vec<Caps> {
        DEVICES.to_vec()
    }

    /// Both directions and norms, with every set of optional tensors that plans distinguish.
    fn calls() -> Vec<Call> {
        [testing::calls(&MIXES), testing::calls_of_parts(&MIXES), testing::calls_with_gates(&MIXES)].concat()
    }

    /// Every short row, and the lengths around each power of two and its sixteenths, where tiles
    /// change.
    fn cols() -> Vec<usize> {
        let sixteenths = (9..=18).flat_map(|bits| (9..16).map(move |share| share << (bits - 4)));
        let powers = (9..=21).map(|bits| 1 << bits);
        let around = powers.chain(sixteenths).flat_map(|cols| [cols - 1, cols, cols + 1]);
        (1..=300).chain(around).collect()
    }

    fn backward_sizes() -> Vec<(Call, usize, usize)> {
        workspace::sizes()
    }

    fn is_sampled(_: Call, cols: usize) -> bool {
        cols > 300 || cols % 30 == 1
    }

    fn must_fit(_: &Problem, _: &Caps) -> bool {
        true
    }

    fn plan(problem: &Problem, access_bytes: u32, caps: &Caps) -> Option<Plan> {
        Some(plan(problem, access_bytes, caps))
    }

    fn workspace_len(problem: &Problem, caps: &Caps) -> usize {
        workspace_len(problem, caps)
    }

    fn programs(plan: &Plan) -> Vec<program::Program> {
        launches(plan).map(|launch| launch.key.program.info()).collect()
    }

    fn mapping(plan: &Plan) -> Vec<(Program, [u32; 4])> {
        let row_kernels = launches(plan).filter(|launch| launch.key.program != Program::ReducePartials);
        // Both programs have the same rows: `backward_rows.cuh`.
        let rows_of = |program| if program == Program::BackwardSplit { Program::Backward } else { program };
        let tiles = row_kernels.map(|Launch { key, .. }| (rows_of(key.program), key.tile));
        tiles.map(|(program, tile)| (program, [tile.pack, tile.packs, tile.threads_per_row, tile.cluster])).collect()
    }

    fn row_chains(plan: &Plan, cols: usize) -> Vec<(String, u64)> {
        let chain = |Launch { key, .. }: Launch| {
            let words = format!("{:?} {:?}", key.program, Tile { is_ragged: false, ..key.tile });
            Some((words, chains::of_row(&key, cols)?))
        };
        launches(plan).filter_map(chain).collect()
    }

    fn gradient_chain(plan: &Plan, rows: usize) -> u64 {
        chains::of_gradients(plan, rows)
    }

    fn parts(plan: &Plan, call: Call, rows: usize, cols: usize) -> Parts {
        workspace::parts(plan, call, rows, cols)
    }

    fn zeroes(plan: &Plan) -> Vec<(usize, Range<u64>)> {
        let numbered = plan.steps.into_iter().flatten().enumerate();
        let zeroes = numbered.filter_map(|(number, step)| match step {
            Step::Clear { first, bytes, .. } => Some((number, first as u64 / 4..(first + bytes) as u64 / 4)),
            Step::Launch { .. } => None,
        });
        zeroes.collect()
    }
}

plan_tests!(Plans);

/// A kernel that a plan launches.
#[derive(Clone, Copy, Debug)]
struct Launch {
    key: KernelKey,
    grid: u32,
    cluster: u32,
    threads: u32,
    shared_bytes: u32,
}

fn launches(plan: &Plan) -> impl Iterator<Item = Launch> {
    plan.steps.into_iter().flatten().filter_map(|step| match step {
        Step::Launch { key, grid, cluster, threads, shared_bytes } => {
            Some(Launch { key, grid, cluster, threads, shared_bytes })
        }
        Step::Clear { .. } => None,
    })
}

/// Columns that the threads of a row cover.
fn columns(tile: &Tile) -> usize {
    [tile.pack, tile.packs, tile.threads_per_row, tile.cluster].iter().map(|factor| *factor as usize).product()
}
