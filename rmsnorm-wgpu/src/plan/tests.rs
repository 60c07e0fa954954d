//! Plans as tables, and what holds for every plan. No device: six are planned for, and none is asked.

mod chains;
mod properties;
mod ranges;
mod table;
mod workspace;

use rmsnorm_gpu::testing::{
    self, BF16, BF16_STREAM_F32, Call, DWEIGHT, DWEIGHT_DBIAS, F32, NONE, WEIGHT, WEIGHT_BIAS, WEIGHT_RESIDUAL,
};
use rmsnorm_spec::{CastOrder, DType, DTypes, Direction, GradReduction, Norm, Problem, Tensor, TensorSet};

use super::{Access, Dispatch, Layout, PAIR, Placed, Plan, Program, Step, Tile, plan};
use crate::caps::Caps;

const DEVICES: [Caps; 6] = [
    Caps::h200(),
    Caps::laptop(),
    Caps::phone(),
    Caps::lavapipe(),
    SMALLEST,
    Caps { max_threads: 128, ..Caps::laptop() },
];

/// The least that is taken.
const SMALLEST: Caps = Caps { max_threads: 64, workgroup_bytes: 4096, ..Caps::phone() };

const ACCESSES: [Access; 3] = [Access::Aligned, Access::Words, Access::Halves];

/// Row counts at which plans may change, and more than two dimensions of workgroups have.
const ROWS: [usize; 12] = [0, 1, 2, 7, 8, 9, 528, 529, 4096, 65_536, 1 << 20, 1 << 33];

/// Rows enough for every workgroup to have several, and few enough for any device to sum gradients of any length over.
const SOME_ROWS: usize = 64;

/// Plans know bytes, and f16 by its conversions.
const MIXES: [DTypes; 5] = [F32, DTypes::uniform(DType::F16), BF16, BF16_STREAM_F32, BF16.widened(true, false)];

/// The plan of a call.
trait Planned: Copy {
    /// Rows side by side, accessed as said: what is planned does not ask whether they can be.
    fn layout(self, rows: usize, cols: usize, access: Access) -> Layout;

    fn plan(self, rows: usize, cols: usize, caps: &Caps) -> Plan {
        self.plan_by(Access::Aligned, rows, cols, caps)
    }

    fn plan_by(self, access: Access, rows: usize, cols: usize, caps: &Caps) -> Plan;
}

impl Planned for Call {
    fn layout(self, rows: usize, cols: usize, access: Access) -> Layout {
        let mut layout = Layout::dense(&self.problem(rows, cols));
        layout.access = access;
        layout
    }

    #[track_caller]
    fn plan_by(self, access: Access, rows: usize, cols: usize, caps: &Caps) -> Plan {
        let planned = plan(&self.problem(rows, cols), &self.layout(rows, cols, access), caps);
        planned.unwrap_or_else(|unfit| panic!("{rows}x{cols} by {access:?}, {self:?}, {caps:?}: {unfit}"))
    }
}

/// Both directions and norms, with every set of optional tensors that a plan tells apart.
fn calls() -> Vec<Call> {
    testing::calls(&MIXES)
}

/// Every short row, the lengths around each power of two, and some between them, whose threads are no power of two.
fn all_cols() -> Vec<usize> {
    let around_powers = (9..=21).flat_map(|bits| [(1 << bits) - 1, 1 << bits, (1 << bits) + 1]);
    let between = [1536, 2560, 3072, 3584, 5120, 6656, 7168, 9984, 10_240, 12_288, 14_336, 40_960, 49_152];
    (1..=300).chain(around_powers).chain(between).collect()
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

fn dispatches(plan: &Plan) -> impl Iterator<Item = &Dispatch> {
    plan.steps.iter().filter_map(|step| match step {
        Step::Dispatch(dispatch) => Some(dispatch),
        Step::Zero { .. } => None,
    })
}
