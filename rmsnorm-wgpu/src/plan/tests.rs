//! Tests of plans: pinned plans as tables, and properties of all plans. Six devices are planned
//! for; none is needed.

mod chains;
mod properties;
mod quantized;
mod ranges;
mod sharing;
mod table;
mod tables;
mod workspace;

use std::ops::Range;

use rmsnorm_gpu::plan_tests;
use rmsnorm_gpu::program;
use rmsnorm_gpu::testing::plans::{Parts, Planner, for_all};
use rmsnorm_gpu::testing::{
    self, BF16, BF16_STREAM_F32, Call, DWEIGHT, DWEIGHT_DBIAS, F32, NONE, WEIGHT, WEIGHT_BIAS, WEIGHT_RESIDUAL,
};
use rmsnorm_spec::{
    CastOrder, DType, DTypes, Direction, GradReduction, Norm, Problem, ResidualPlacement, Tensor, TensorSet,
    TensorShape,
};

use super::{
    Access, Dispatch, KernelKey, Layout, PAIR, Placed, Plan, Program, Reduction, Step, Tile, plan, workspace_len,
};
use crate::caps::{Caps, F16};

const DEVICES: [Caps; 6] =
    [Caps::h200(), LAPTOP, PHONE, Caps::lavapipe(), SMALLEST, Caps { max_threads: 128, ..LAPTOP }];

/// Every call of these has a binding for each tensor; `sharing` tests devices with fewer.
const LAPTOP: Caps = Caps { storage_buffers: 16, ..Caps::laptop() };
const PHONE: Caps = Caps { storage_buffers: 16, ..Caps::phone() };

/// The smallest supported limits.
const SMALLEST: Caps = Caps { max_threads: 64, workgroup_bytes: 4096, ..PHONE };

/// Rows that fit a binding together with their partial sums.
const MOST_ROWS_OF_A_BINDING: usize = 8;

const ACCESSES: [Access; 3] = [Access::Aligned, Access::Words, Access::Parts];

/// Row counts at which plans may change, and counts that exceed a grid of two dimensions.
const ROWS: [usize; 12] = [0, 1, 2, 7, 8, 9, 528, 529, 4096, 65_536, 1 << 20, 1 << 33];

/// Enough rows that every workgroup has several, and few enough that every device can sum gradients
/// of any length.
const SOME_ROWS: usize = 64;

/// Plans depend on element sizes, and for f16 on its conversions.
const MIXES: [DTypes; 5] = [F32, DTypes::uniform(DType::F16), BF16, BF16_STREAM_F32, BF16.widened(true, false)];

/// Contiguous rows with this access.
fn layout(problem: &Problem, access: Access) -> Layout {
    Layout { access, ..Layout::dense(problem) }
}

/// The plan of a call.
trait PlanCall: Copy {
    /// Contiguous rows with the given access; the plan does not check that the access is possible.
    fn layout(self, rows: usize, cols: usize, access: Access) -> Layout;

    fn plan(self, rows: usize, cols: usize, caps: &Caps) -> Plan {
        self.plan_by(Access::Aligned, rows, cols, caps)
    }

    fn plan_by(self, access: Access, rows: usize, cols: usize, caps: &Caps) -> Plan;
}

impl PlanCall for Call {
    fn layout(self, rows: usize, cols: usize, access: Access) -> Layout {
        layout(&self.problem(rows, cols), access)
    }

    #[track_caller]
    fn plan_by(self, access: Access, rows: usize, cols: usize, caps: &Caps) -> Plan {
        let planned = plan(&self.problem(rows, cols), &self.layout(rows, cols, access), caps);
        planned.unwrap_or_else(|unfit| panic!("{rows}x{cols} by {access:?}, {self:?}, {caps:?}: {unfit}"))
    }
}

/// The backend's plans, for tests shared by all backends.
struct Plans;

impl Planner for Plans {
    type Caps = Caps;
    type Access = Access;
    type Plan = Plan;
    type Mapping = (u32, u32, Reduction);

    const ACCESSES: &'static [Access] = &ACCESSES;
    const ROWS: &'static [usize] = &ROWS;
    const SOME_ROWS: usize = SOME_ROWS;
    const MOST_ELEMENTS: usize = 1 << 32;

    fn devices() -> Vec<Caps> {
        DEVICES.to_vec()
    }

    fn devices_by_exchange() -> Vec<Caps> {
        let subgroups = [8, 16, 32, 64, 128].map(Some).into_iter().chain([None]);
        subgroups.flat_map(|subgroup| DEVICES.map(|device| Caps { subgroup, ..device })).collect()
    }

    /// Both directions and norms, with every set of optional tensors that plans distinguish.
    fn calls() -> Vec<Call> {
        testing::calls(&MIXES).into_iter().chain(testing::calls_with_gates(&[F32, BF16_STREAM_F32])).collect()
    }

    /// All short rows, the lengths around each power of two, and some between whose number of
    /// threads is not a power of two.
    fn cols() -> Vec<usize> {
        let around_powers = (9..=21).flat_map(|bits| [(1 << bits) - 1, 1 << bits, (1 << bits) + 1]);
        let between = [1536, 2560, 3072, 3584, 5120, 6656, 7168, 9984, 10_240, 12_288, 14_336, 40_960, 49_152];
        (1..=300).chain(around_powers).chain(between).collect()
    }

    fn backward_sizes() -> Vec<(Call, usize, usize)> {
        workspace::sizes()
    }

    fn devices_of_backward() -> Vec<Caps> {
        workspace::devices()
    }

    /// All norms have the same sums over rows.
    fn is_sampled(call: Call, cols: usize) -> bool {
        let is_sampled = (cols > 300 && cols.is_multiple_of(2) || cols % 60 == 1) && call.norm == Norm::Rms;
        is_sampled && (call.dtypes == MIXES[0] || call.dtypes == MIXES[1])
    }

    /// Matrices that exceed bindings take many ranges, each added to the previous one, so some
    /// calls with long rows are refused.
    fn must_fit(problem: &Problem, caps: &Caps) -> bool {
        let row = problem.cols * problem.dtypes.activation.size();
        let most = (16 * caps.binding_bytes).min(1 << 38) as usize;
        problem.rows * row <= most && MOST_ROWS_OF_A_BINDING * row <= caps.binding_bytes as usize
    }

    fn plan(problem: &Problem, access: Access, caps: &Caps) -> Option<Plan> {
        plan(problem, &layout(problem, access), caps).ok()
    }

    fn workspace_len(problem: &Problem, caps: &Caps) -> usize {
        workspace_len(problem, caps)
    }

    fn programs(plan: &Plan) -> Vec<program::Program> {
        dispatches(plan).map(|dispatch| dispatch.key.program.info()).collect()
    }

    /// The same for both programs that a row may use.
    fn mapping(plan: &Plan) -> Vec<(u32, u32, Reduction)> {
        let row_programs = dispatches(plan).filter(|dispatch| match dispatch.key.program {
            Program::Forward
            | Program::ForwardStreaming
            | Program::QuantizedForward
            | Program::QuantizedForwardStreaming
            | Program::Backward
            | Program::BackwardRowSums => true,
            Program::BackwardColumns
            | Program::ReducePartials
            | Program::TransposeCodes
            | Program::Columnwise
            | Program::TensorScale
            | Program::Clear
            | Program::Copy => false,
        });
        let mut tiles: Vec<_> = row_programs
            .map(|Dispatch { key: KernelKey { tile, .. }, .. }| (tile.threads_per_row, tile.groups, tile.reduction))
            .collect();
        tiles.dedup();
        assert!(tiles.len() <= 1, "{plan:?}");
        tiles
    }

    fn as_if_not_in_place(mut plan: Plan) -> Plan {
        for step in &mut plan.steps {
            if let Step::Dispatch(Dispatch { key, .. }) = step {
                assert!(key.call.tensors.is_in_place() || key.call.form.is_residual_after());
                let adds_residual = key.call.tensors.has(Tensor::ResidualOut);
                key.call.tensors = key.call.tensors.with(Tensor::X).set(Tensor::Residual, adds_residual);
            }
        }
        plan
    }

    fn row_chains(plan: &Plan, cols: usize) -> Vec<(String, u64)> {
        let chain = |Dispatch { key, .. }: &Dispatch| {
            Some((format!("{:?} {:?}", key.program, key.tile), chains::of_row(key, cols)?))
        };
        dispatches(plan).filter_map(chain).collect()
    }

    fn gradient_chain(plan: &Plan, rows: usize) -> u64 {
        chains::of_gradients(plan, rows)
    }

    fn parts(plan: &Plan, call: Call, _: usize, cols: usize) -> Parts {
        workspace::parts(plan, call, cols)
    }

    fn zeroes(plan: &Plan) -> Vec<(usize, Range<u64>)> {
        let zeroes = plan.steps.iter().enumerate().filter_map(|(number, step)| match step {
            Step::Zero { first, len } => Some((number, *first..first + len)),
            Step::Dispatch(_) => None,
        });
        zeroes.collect()
    }
}

plan_tests!(Plans);

fn dispatches(plan: &Plan) -> impl Iterator<Item = &Dispatch> {
    plan.steps.iter().filter_map(|step| match step {
        Step::Dispatch(dispatch) => Some(dispatch),
        Step::Zero { .. } => None,
    })
}
