//! Plans as tables, and what holds for every plan. No device: six are planned for, and none is asked.

mod chains;
mod properties;
mod ranges;
mod table;
mod workspace;

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

const BF16: DTypes = DTypes::uniform(DType::Bf16);
const F32: DTypes = DTypes::uniform(DType::F32);
const BF16_STREAM_F32: DTypes = BF16.widened(false, true);
/// Plans know bytes, and f16 by its conversions.
const MIXES: [DTypes; 5] = [F32, DTypes::uniform(DType::F16), BF16, BF16_STREAM_F32, BF16.widened(true, false)];

const NONE: TensorSet = TensorSet::of(&[Tensor::Rstd]);
const WEIGHT: TensorSet = NONE.with(Tensor::Weight);
const WEIGHT_BIAS: TensorSet = WEIGHT.with(Tensor::Bias);
const WEIGHT_RESIDUAL: TensorSet = WEIGHT.with(Tensor::Residual).with(Tensor::ResidualOut);
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
