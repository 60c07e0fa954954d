//! What holds for the plans of every backend, over devices that are invented: [`plan_tests`](crate::plan_tests) makes a test of
//! each. A backend tells its plans' parts by a [`Planner`].

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::ops::Range;

use rmsnorm_spec::depth::{policy_depth_cols, policy_depth_rows};
use rmsnorm_spec::{Direction, Problem, Tensor};

use super::{Call, in_place};
use crate::program::Program;
use crate::reduction::{ALIGNMENT_SLACK, row_stride};

/// A backend's plans, in words that all backends share.
pub trait Planner {
    /// What is known of a device.
    type Caps: Debug;
    /// How memory can be accessed.
    type Access: Copy + Debug + 'static;
    /// How a call is executed.
    type Plan: Debug + PartialEq;
    /// Which thread owns which columns, and how threads exchange: what the bits of a row depend on.
    type Mapping: Debug + PartialEq;

    /// Every access, the widest first.
    const ACCESSES: &'static [Self::Access];
    /// Row counts at which plans may change, and more than any grid has blocks.
    const ROWS: &'static [usize];
    /// So many rows that every block has some, and that every device has room for.
    const SOME_ROWS: usize;
    /// Larger matrices are not planned for.
    const MOST_ELEMENTS: usize;

    /// Invented devices.
    fn devices() -> Vec<Self::Caps>;
    /// Devices that differ in how threads exchange.
    fn devices_by_exchange() -> Vec<Self::Caps> {
        Self::devices()
    }
    /// Calls of every plan, without a size.
    fn calls() -> Vec<Call>;
    /// Every short row, and the lengths around those at which tiles change.
    fn cols() -> Vec<usize>;
    /// Backward calls, row counts and row lengths of every regime of the workspace.
    fn backward_sizes() -> Vec<(Call, usize, usize)>;
    /// Devices that these are planned for.
    fn devices_of_backward() -> Vec<Self::Caps> {
        Self::devices()
    }
    /// Whether sums over the rows of such a call are looked at. Neighbouring lengths have equal tiles.
    fn is_sampled(call: Call, cols: usize) -> bool;
    /// Whether the device must have a plan for so many rows of that length.
    fn must_fit(problem: &Problem, caps: &Self::Caps) -> bool;

    /// The plan, if the device has one.
    fn plan(problem: &Problem, access: Self::Access, caps: &Self::Caps) -> Option<Self::Plan>;
    /// What callers are told: f32 elements.
    fn workspace_len(problem: &Problem, caps: &Self::Caps) -> usize;
    /// What is launched, in order.
    fn programs(plan: &Self::Plan) -> Vec<Program>;
    /// The mapping of each program that works on rows.
    fn mapping(plan: &Self::Plan) -> Vec<Self::Mapping>;
    /// The plan of an in-place call as that of a call with an `x` of its own.
    fn as_if_not_in_place(plan: Self::Plan) -> Self::Plan {
        plan
    }
    /// What is launched that sums over a row, in words, and its longest chain of additions.
    fn row_chains(plan: &Self::Plan, cols: usize) -> Vec<(String, u64)>;
    /// The longest chain in `dweight` and `dbias` by [`Partials`](rmsnorm_spec::GradReduction::Partials).
    fn gradient_chain(plan: &Self::Plan, rows: usize) -> u64;
    /// Where the parts of the workspace lie.
    fn parts(plan: &Self::Plan, call: Call, rows: usize, cols: usize) -> Parts;
    /// The steps that zero the workspace: the number of each among all steps, and its elements.
    fn zeroes(plan: &Self::Plan) -> Vec<(usize, Range<u64>)>;
}

/// The parts of a workspace, as the kernels index it, in f32 elements; empty where there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Partial rows of `dweight`, then of `dbias`.
    pub partials: Range<u64>,
    /// Locks of partial rows that are shared.
    pub locks: Range<u64>,
    /// Whether several chunks of rows add to one partial row.
    pub is_shared: bool,
    /// Two sums of each row, where a row takes two passes over memory.
    pub row_sums: Range<u64>,
    /// All of it, with room for the rounding of its begin.
    pub len: u64,
}

/// A backward call with its size, and how a device executes it.
#[expect(missing_debug_implementations, reason = "a test prints it by Display")]
pub struct Planned<'a, P: Planner> {
    /// The device.
    pub caps: &'a P::Caps,
    /// How memory is accessed.
    pub access: P::Access,
    /// Without its size.
    pub call: Call,
    /// Its size.
    pub rows: usize,
    /// Its size.
    pub cols: usize,
    /// The plan.
    pub plan: P::Plan,
    /// Of the plan.
    pub parts: Parts,
}

impl<P: Planner> fmt::Display for Planned<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Planned { caps, access, call, rows, cols, plan, parts } = self;
        write!(f, "{rows}x{cols} by {access:?}, {call:?}, {caps:?}: {parts:?} {plan:?}")
    }
}

/// Elements of the partial rows of a call.
pub fn partials_len(call: Call, partial_rows: u64, cols: usize) -> u64 {
    call.gradients() as u64 * partial_rows * row_stride(cols)
}

/// Makes a `#[test]` for a `Planner` of each thing that holds for every backend's plans: of every function below.
#[macro_export]
macro_rules! plan_tests {
    ($planner:ty) => {
        $crate::plan_tests!(@each $planner: a_row_is_summed_alike_in_any_batch_and_wherever_it_lies
            the_workspace_does_not_depend_on_itself in_place_is_planned_as_forward_is without_rows_only_gradients_are_written
            sums_over_a_row_keep_to_the_policy sums_over_the_rows_keep_to_the_policy parts_do_not_overlap_and_end_within
            what_is_added_to_is_zeroed_first a_call_that_keeps_nothing_needs_no_workspace);
    };
    (@each $planner:ty: $($name:ident)*) => {
        $(#[test]
        fn $name() {
            $crate::testing::plans::$name::<$planner>();
        })*
    };
}

/// Calls `check` for every device, call and row length.
pub fn for_all<P: Planner>(mut check: impl FnMut(&P::Caps, Call, usize)) {
    for caps in P::devices() {
        for call in P::calls() {
            for cols in P::cols() {
                check(&caps, call, cols);
            }
        }
    }
}

/// The plan of a call in the widest access.
fn plan<P: Planner>(call: Call, rows: usize, cols: usize, caps: &P::Caps) -> P::Plan {
    let Some(planned) = P::plan(&call.problem(rows, cols), P::ACCESSES[0], caps) else {
        unreachable!("no plan for {rows}x{cols} {call:?} on {caps:?}")
    };
    planned
}

/// Whatever the number of rows and the access, the mapping is that of one row.
pub fn a_row_is_summed_alike_in_any_batch_and_wherever_it_lies<P: Planner>() {
    for_all::<P>(|caps, call, cols| {
        let one_row = P::mapping(&plan::<P>(call, 1, cols, caps));
        assert!(!one_row.is_empty(), "{cols} {call:?}");
        for &rows in P::ROWS.iter().filter(|rows| **rows > 0 && **rows * cols <= P::MOST_ELEMENTS) {
            let problem = call.problem(rows, cols);
            match P::plan(&problem, P::ACCESSES[0], caps) {
                Some(plan) => assert_eq!(P::mapping(&plan), one_row, "{rows}x{cols} {call:?}"),
                None => assert!(!P::must_fit(&problem, caps), "no plan for {rows}x{cols} {call:?} on {caps:?}"),
            }
        }
        for &access in P::ACCESSES {
            let planned = P::plan(&call.problem(P::SOME_ROWS, cols), access, caps);
            assert_eq!(planned.as_ref().map(P::mapping).as_ref(), Some(&one_row), "{cols} by {access:?}, {call:?}");
        }
    });
}

/// A call with a workspace of the caller's is planned as one without, and asks for what callers are told.
pub fn the_workspace_does_not_depend_on_itself<P: Planner>() {
    for_all::<P>(|caps, call, cols| {
        let with = Call { tensors: call.tensors.with(Tensor::Workspace), ..call };
        let (planned, rows) = (plan::<P>(call, P::SOME_ROWS, cols, caps), P::SOME_ROWS);
        assert_eq!(plan::<P>(with, rows, cols, caps), planned, "{cols} {call:?}");
        let told = [call, with].map(|call| P::workspace_len(&call.problem(rows, cols), caps));
        assert_eq!(told[0], told[1], "{cols} {call:?}");
        let needs = P::parts(&planned, call, rows, cols).len;
        assert!(needs <= told[0] as u64, "{cols} {call:?}: needs {needs}, told {}", told[0]);
    });
}

/// What overwrites its input is planned as what does not. A sum of parts overwrites none of them.
pub fn in_place_is_planned_as_forward_is<P: Planner>() {
    for_all::<P>(|caps, call, cols| {
        if call.direction == Direction::Forward && call.parts == 1 {
            let problem = in_place(&call.problem(P::SOME_ROWS, cols));
            let planned = P::plan(&problem, P::ACCESSES[0], caps).map(P::as_if_not_in_place);
            assert_eq!(planned, Some(plan::<P>(call, P::SOME_ROWS, cols, caps)), "{cols} {call:?}");
        }
    });
}

/// The gradients of no rows are zeros, which the second stage writes.
pub fn without_rows_only_gradients_are_written<P: Planner>() {
    for_all::<P>(|caps, call, cols| {
        let planned = plan::<P>(call, 0, cols, caps);
        let is_reduction: Vec<bool> = P::programs(&planned).iter().map(|program| program.is_reduction).collect();
        assert_eq!(is_reduction, if call.gradients() > 0 { vec![true] } else { vec![] }, "{cols} {call:?}");
        assert!(P::parts(&planned, call, 0, cols).partials.is_empty(), "{cols} {call:?}");
    });
}

/// math.md, section 4: bounds follow from chains of that length.
pub fn sums_over_a_row_keep_to_the_policy<P: Planner>() {
    // The first for every tile.
    let mut too_long = BTreeMap::new();
    for caps in P::devices_by_exchange() {
        for (call, cols) in P::calls().into_iter().flat_map(|call| P::cols().into_iter().map(move |cols| (call, cols)))
        {
            let allowed = policy_depth_cols(cols) as u64;
            for &access in P::ACCESSES {
                let planned = P::plan(&call.problem(1, cols), access, &caps);
                assert!(planned.is_some(), "no plan for 1x{cols} {call:?} on {caps:?}");
                let chains = planned.into_iter().flat_map(|planned| P::row_chains(&planned, cols));
                for (tile, got) in chains.filter(|(_, got)| *got > allowed) {
                    too_long.entry(tile).or_insert_with(|| format!("{cols} cols: {got} additions, allowed {allowed}"));
                }
            }
        }
    }
    assert!(too_long.is_empty(), "{too_long:#?}");
}

/// The same of the gradients, through both stages, of up to 2^33 rows.
pub fn sums_over_the_rows_keep_to_the_policy<P: Planner>() {
    let around_powers = (0..=33).flat_map(|bits| [(1usize << bits) - 1, 1 << bits, (1 << bits) + 1]);
    let many_rows: Vec<usize> = around_powers.chain([300, 1000, 3_000_000]).filter(|rows| *rows > 0).collect();
    for_all::<P>(|caps, call, cols| {
        let is_sampled = call.gradients() > 0 && P::is_sampled(call, cols);
        let sizes = many_rows.iter().filter(|_| is_sampled).map(|&rows| (rows, call.problem(rows, cols)));
        for (rows, problem) in sizes.filter(|(_, problem)| P::must_fit(problem, caps)) {
            let allowed = policy_depth_rows(rows) as u64;
            for &access in P::ACCESSES {
                let got = P::plan(&problem, access, caps).map(|planned| P::gradient_chain(&planned, rows));
                let is_kept = got.is_some_and(|got| got <= allowed);
                assert!(is_kept, "{rows}x{cols}: {got:?} additions, allowed {allowed}: {call:?} on {caps:?}");
            }
        }
    });
}

/// Calls `check` for every backward call of every size, in every access, on every device that has a plan for it.
pub fn for_all_backward<P: Planner>(mut check: impl FnMut(&Planned<'_, P>)) {
    for caps in &P::devices_of_backward() {
        for (call, rows, cols) in P::backward_sizes() {
            for &access in P::ACCESSES {
                let problem = call.problem(rows, cols);
                let Some(plan) = P::plan(&problem, access, caps) else {
                    assert!(!P::must_fit(&problem, caps), "no plan for {rows}x{cols} {call:?} on {caps:?}");
                    continue;
                };
                let parts = P::parts(&plan, call, rows, cols);
                check(&Planned { caps, access, call, rows, cols, plan, parts });
            }
        }
    }
}

/// Whatever the address of the workspace, its parts fit behind each other when they begin on 16 bytes.
pub fn parts_do_not_overlap_and_end_within<P: Planner>() {
    for_all_backward::<P>(|planned| {
        let (parts, mut end) = (&planned.parts, 0);
        for part in [&parts.partials, &parts.locks, &parts.row_sums].into_iter().filter(|part| !part.is_empty()) {
            assert!(part.start >= end && part.start.is_multiple_of(4), "{planned}");
            // The partial rows' own room for rounding at the most.
            assert!(part.start <= end.next_multiple_of(4) + 4, "{planned}");
            end = part.end;
        }
        assert!(end == 0 || end + ALIGNMENT_SLACK <= parts.len, "{planned}");
        // Nothing is asked for that nobody uses, but that a program may bind 16 bytes where it has nothing to read.
        assert!(parts.len <= end.max(1).next_multiple_of(4) + ALIGNMENT_SLACK, "{planned}");
    });
}

/// Locks and what atomics add to begin at zero, and nothing else does.
pub fn what_is_added_to_is_zeroed_first<P: Planner>() {
    for_all_backward::<P>(|planned| {
        let Parts { partials, locks, is_shared, .. } = &planned.parts;
        // Behind a lock, the first to come stores.
        let zeroed = if locks.is_empty() { partials } else { locks };
        let first: Vec<_> = is_shared.then(|| (0, zeroed.clone())).into_iter().collect();
        assert_eq!(P::zeroes(&planned.plan), first, "{planned}");
        assert!(locks.is_empty() || locks.start == partials.end, "{planned}");
    });
}

/// A workspace is there where something lies in it.
pub fn a_call_that_keeps_nothing_needs_no_workspace<P: Planner>() {
    for_all_backward::<P>(|planned| {
        let parts = &planned.parts;
        if planned.call.gradients() == 0 && parts.row_sums.is_empty() {
            assert_eq!(parts.len, 0, "{planned}");
        }
        // The columns' pass reads them.
        let needs_sums = P::programs(&planned.plan).iter().any(|program| program.stem == "backward_columns");
        assert_eq!(parts.row_sums.is_empty(), !needs_sums, "{planned}");
    });
}
