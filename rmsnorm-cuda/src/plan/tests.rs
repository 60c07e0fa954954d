//! Plans as tables, and what holds for every plan. No device: three are planned for, and none is asked.

mod chains;
mod properties;
mod table;
mod workspace;

use rmsnorm_spec::{DType, DTypes, Direction, GradReduction, Norm, Problem, Tensor, TensorSet};

use super::{KernelKey, Plan, Step, Tile, plan};
use crate::caps::Caps;

const DEVICES: [Caps; 3] = [Caps::h200(), Caps::a100(), Caps::t4()];

/// Row counts at which plans may change, and more than any grid has blocks.
const ROWS: [usize; 12] = [0, 1, 2, 15, 16, 17, 131, 132, 133, 4096, 1 << 20, 1 << 33];

const BF16: DTypes = DTypes::uniform(DType::Bf16);
const F32: DTypes = DTypes::uniform(DType::F32);
const BF16_STREAM_F32: DTypes = BF16.widened(false, true);
/// Plans know bytes, not dtypes: f16 stands for both types of 16 bits.
const F16: DTypes = DTypes::uniform(DType::F16);
const MIXES: [DTypes; 4] = [F32, F16, F16.widened(true, false), F16.widened(true, true)];

const NONE: TensorSet = TensorSet::of(&[Tensor::Rstd]);
const WEIGHT: TensorSet = NONE.with(Tensor::Weight);
const WEIGHT_BIAS: TensorSet = WEIGHT.with(Tensor::Bias);
const WEIGHT_RESIDUAL: TensorSet = WEIGHT.with(Tensor::Residual).with(Tensor::ResidualOut);
const WEIGHT_BIAS_RESIDUAL: TensorSet = WEIGHT_RESIDUAL.with(Tensor::Bias);
const DWEIGHT: TensorSet = WEIGHT.with(Tensor::Dweight);
const DWEIGHT_DBIAS: TensorSet = DWEIGHT.with(Tensor::Dbias);

/// A call without its size.
#[derive(Clone, Copy, Debug)]
struct Call {
    direction: Direction,
    norm: Norm,
    dtypes: DTypes,
    /// Beside those that every call has.
    tensors: TensorSet,
    grad_reduction: GradReduction,
}

impl Call {
    const fn new(direction: Direction, norm: Norm, dtypes: DTypes, tensors: TensorSet) -> Self {
        Call { direction, norm, dtypes, tensors, grad_reduction: GradReduction::Partials }
    }

    fn problem(self, rows: usize, cols: usize) -> Problem {
        let Call { direction, norm, dtypes, tensors, grad_reduction } = self;
        let tensors: Vec<Tensor> = tensors.set(Tensor::Mean, norm == Norm::Layer).iter().collect();
        let problem = match direction {
            Direction::Forward => Problem::forward(norm, rows, cols, dtypes.activation, &tensors),
            Direction::Backward => Problem::backward(norm, rows, cols, dtypes.activation, &tensors),
        };
        Problem { dtypes, grad_reduction, ..problem }
    }

    fn plan(self, rows: usize, cols: usize, caps: &Caps) -> Plan {
        plan(&self.problem(rows, cols), 16, caps)
    }

    fn gradients(&self) -> usize {
        self.tensors.sums_over_rows()
    }
}

/// Both directions and norms, with every set of optional tensors that a plan tells apart.
fn calls() -> Vec<Call> {
    let bias = NONE.with(Tensor::Bias);
    let forward = [NONE, bias, WEIGHT_BIAS, WEIGHT_RESIDUAL].map(|tensors| (Direction::Forward, tensors));
    let backward = [
        NONE,
        DWEIGHT,
        DWEIGHT_DBIAS,
        NONE.with(Tensor::Dbias),
        WEIGHT.with(Tensor::DresidualOut),
        DWEIGHT_DBIAS.with(Tensor::DresidualOut),
    ];
    let backward = backward.map(|tensors| (Direction::Backward, tensors));
    let mut calls = Vec::new();
    for (direction, tensors) in forward.into_iter().chain(backward) {
        for norm in Norm::ALL {
            calls.extend(MIXES.map(|dtypes| Call::new(direction, norm, dtypes, tensors)));
        }
    }
    calls
}

/// Every short row, the lengths around each power of two, and around sixteenths of them, where tiles change.
fn all_cols() -> Vec<usize> {
    let sixteenths = (9..=18).flat_map(|bits| (9..16).map(move |share| share << (bits - 4)));
    let powers = (9..=21).map(|bits| 1 << bits);
    let around = powers.chain(sixteenths).flat_map(|cols| [cols - 1, cols, cols + 1]);
    (1..=300).chain(around).collect()
}

/// Calls `check` for every device, call and row length.
fn for_all(mut check: impl FnMut(&Caps, Call, usize)) {
    for caps in DEVICES {
        for call in calls() {
            for cols in all_cols() {
                check(&caps, call, cols);
            }
        }
    }
}

/// A kernel that a plan launches.
#[derive(Clone, Copy, Debug)]
struct Launch {
    key: KernelKey,
    grid: u32,
    threads: u32,
    shared_bytes: u32,
}

fn launches(plan: &Plan) -> impl Iterator<Item = Launch> {
    plan.steps.into_iter().flatten().filter_map(|step| match step {
        Step::Launch { key, grid, threads, shared_bytes } => Some(Launch { key, grid, threads, shared_bytes }),
        Step::Zero { .. } => None,
    })
}

/// Columns that the threads of a row own.
fn columns(tile: &Tile) -> usize {
    [tile.pack, tile.packs, tile.threads_per_row, tile.cluster].iter().map(|factor| *factor as usize).product()
}
