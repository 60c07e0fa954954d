//! Plans as tables, and what holds for every plan. No device: six are planned for, and none is asked.

mod chains;
mod properties;
mod ranges;
mod table;
mod workspace;

use rmsnorm_spec::{CastOrder, DType, GradReduction, Norm, Present, Problem, Stage};

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

/// The dtypes of activations, weight and residual stream.
type DTypes = [DType; 3];

const BF16: DTypes = [DType::Bf16; 3];
const F32: DTypes = [DType::F32; 3];
const BF16_STREAM_F32: DTypes = [DType::Bf16, DType::Bf16, DType::F32];
/// Plans know bytes, and f16 by its conversions.
const MIXES: [DTypes; 5] = [F32, [DType::F16; 3], BF16, BF16_STREAM_F32, [DType::Bf16, DType::F32, DType::Bf16]];

const NONE: Present = Present { rstd: true, ..Present::NONE };
const WEIGHT: Present = Present { weight: true, ..NONE };
const WEIGHT_BIAS: Present = Present { bias: true, ..WEIGHT };
const WEIGHT_RESIDUAL: Present = Present { residual: true, residual_out: true, ..WEIGHT };
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

    /// Rows side by side, accessed as said: what is planned does not ask whether they can be.
    fn layout(self, rows: usize, cols: usize, access: Access) -> Layout {
        let mut layout = Layout::dense(&self.problem(rows, cols));
        layout.access = access;
        layout
    }

    fn plan(self, rows: usize, cols: usize, caps: &Caps) -> Plan {
        self.plan_by(Access::Aligned, rows, cols, caps)
    }

    #[track_caller]
    fn plan_by(self, access: Access, rows: usize, cols: usize, caps: &Caps) -> Plan {
        let planned = plan(&self.problem(rows, cols), &self.layout(rows, cols, access), caps);
        planned.unwrap_or_else(|unfit| panic!("{rows}x{cols} by {access:?}, {self:?}, {caps:?}: {unfit}"))
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
