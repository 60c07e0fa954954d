//! Plans as tables, and what holds for every plan. No device: three are planned for, and none is asked.

mod chains;
mod properties;
mod table;
mod workspace;

use rmsnorm_spec::{CastOrder, DType, GradReduction, Norm, Present, Problem, Stage};

use super::{KernelKey, Plan, Step, Tile, plan};
use crate::caps::Caps;

const DEVICES: [Caps; 3] = [Caps::h200(), Caps::a100(), Caps::t4()];

/// Row counts at which plans may change, and more than any grid has blocks.
const ROWS: [usize; 12] = [0, 1, 2, 15, 16, 17, 131, 132, 133, 4096, 1 << 20, 1 << 33];

/// The dtypes of activations, weight and residual stream.
type DTypes = [DType; 3];

const BF16: DTypes = [DType::Bf16; 3];
const F32: DTypes = [DType::F32; 3];
const BF16_STREAM_F32: DTypes = [DType::Bf16, DType::Bf16, DType::F32];
/// Plans know bytes, not dtypes: f16 stands for both types of 16 bits.
const MIXES: [DTypes; 4] =
    [F32, [DType::F16; 3], [DType::F16, DType::F32, DType::F16], [DType::F16, DType::F32, DType::F32]];

const NONE: Present = Present { rstd: true, ..Present::NONE };
const WEIGHT: Present = Present { weight: true, ..NONE };
const WEIGHT_BIAS: Present = Present { bias: true, ..WEIGHT };
const WEIGHT_RESIDUAL: Present = Present { residual: true, residual_out: true, ..WEIGHT };
const WEIGHT_BIAS_RESIDUAL: Present = Present { bias: true, ..WEIGHT_RESIDUAL };
const DWEIGHT: Present = Present { dweight: true, ..WEIGHT };
const DWEIGHT_DBIAS: Present = Present { dbias: true, ..DWEIGHT };

/// A call without its size.
#[derive(Clone, Copy, Debug)]
struct Call {
    stage: Stage,
    norm: Norm,
    dtypes: DTypes,
    present: Present,
    grad_reduction: GradReduction,
}

impl Call {
    const fn new(stage: Stage, norm: Norm, dtypes: DTypes, present: Present) -> Self {
        Call { stage, norm, dtypes, present, grad_reduction: GradReduction::Partials }
    }

    fn problem(self, rows: usize, cols: usize) -> Problem {
        let Call { stage, norm, dtypes: [activation, weight, residual], present, grad_reduction } = self;
        Problem {
            stage,
            norm,
            rows,
            cols,
            activation,
            weight,
            residual,
            has_weight_offset: false,
            cast_order: CastOrder::AtStore,
            grad_reduction,
            present: Present { mean: norm == Norm::Layer, ..present },
        }
    }

    fn plan(self, rows: usize, cols: usize, caps: &Caps) -> Plan {
        plan(&self.problem(rows, cols), 16, caps)
    }

    fn gradients(&self) -> usize {
        usize::from(self.present.dweight) + usize::from(self.present.dbias)
    }
}

/// Both stages and norms, with every set of optional tensors that a plan tells apart.
fn calls() -> Vec<Call> {
    let bias = Present { bias: true, ..NONE };
    let forward = [NONE, bias, WEIGHT_BIAS, WEIGHT_RESIDUAL].map(|present| (Stage::Forward, present));
    let backward = [
        NONE,
        DWEIGHT,
        DWEIGHT_DBIAS,
        Present { dbias: true, ..NONE },
        Present { dresidual_out: true, ..WEIGHT },
        Present { dresidual_out: true, ..DWEIGHT_DBIAS },
    ];
    let backward = backward.map(|present| (Stage::Backward, present));
    let mut calls = Vec::new();
    for (stage, present) in forward.into_iter().chain(backward) {
        for norm in Norm::ALL {
            calls.extend(MIXES.map(|dtypes| Call::new(stage, norm, dtypes, present)));
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
