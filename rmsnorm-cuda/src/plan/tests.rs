//! Plans as tables, and what holds for every plan. No device: three are planned for, and none is asked.

mod chains;
mod properties;
mod table;
mod workspace;

use rmsnorm_gpu::testing::{
    self, BF16, BF16_STREAM_F32, Call, DWEIGHT, DWEIGHT_DBIAS, F32, WEIGHT, WEIGHT_BIAS, WEIGHT_RESIDUAL,
};
use rmsnorm_spec::{DType, DTypes, Direction, GradReduction, Tensor, TensorSet};

use super::{KernelKey, Plan, Step, Tile, plan};
use crate::caps::Caps;

const DEVICES: [Caps; 3] = [Caps::h200(), Caps::a100(), Caps::t4()];

/// Row counts at which plans may change, and more than any grid has blocks.
const ROWS: [usize; 12] = [0, 1, 2, 15, 16, 17, 131, 132, 133, 4096, 1 << 20, 1 << 33];

/// Plans know bytes, not dtypes: f16 stands for both types of 16 bits.
const F16: DTypes = DTypes::uniform(DType::F16);
const MIXES: [DTypes; 4] = [F32, F16, F16.widened(true, false), F16.widened(true, true)];

const WEIGHT_BIAS_RESIDUAL: TensorSet = WEIGHT_RESIDUAL.with(Tensor::Bias);

/// The plan of a call.
trait Planned {
    fn plan(self, rows: usize, cols: usize, caps: &Caps) -> Plan;
}

impl Planned for Call {
    fn plan(self, rows: usize, cols: usize, caps: &Caps) -> Plan {
        plan(&self.problem(rows, cols), 16, caps)
    }
}

/// Both directions and norms, with every set of optional tensors that a plan tells apart.
fn calls() -> Vec<Call> {
    testing::calls(&MIXES)
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
