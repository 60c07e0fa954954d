//! Tests for the plans of every backend, on invented devices. [`plan_tests`](crate::plan_tests)
//! makes a `#[test]` of each function. A backend describes its plans with a [`Planner`].

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::ops::Range;

use rmsnorm_spec::depth::{policy_depth_rows, sum_depth};
use rmsnorm_spec::{Direction, Problem, Tensor};

use super::{Call, in_place};
use crate::program::Program;
use crate::reduction::{ALIGNMENT_SLACK, row_stride};

/// Access to a backend's plans, in terms that all backends share.
pub trait Planner {
    /// Properties of a device.
    type Caps: Debug;
    /// A way to access memory.
    type Access: Copy + Debug + 'static;
    /// The plan of a call.
    type Plan: Debug + PartialEq;
    /// The columns of each thread and the exchange between threads. The bits of a row depend on
    /// both.
    type Mapping: Debug + PartialEq;

    /// Every access, widest first.
    const ACCESSES: &'static [Self::Access];
    /// Row counts at which plans may change, including one that exceeds the blocks of any grid.
    const ROWS: &'static [usize];
    /// A row count that gives every block some rows and fits on every device.
    const SOME_ROWS: usize;
    /// The largest number of elements to plan for.
    const MOST_ELEMENTS: usize;

    /// Invented devices.
    fn devices() -> Vec<Self::Caps>;
    /// Devices that differ in the exchange between threads.
    fn devices_by_exchange() -> Vec<Self::Caps> {
        Self::devices()
    }
    /// Calls without a size, together selecting every plan.
    fn calls() -> Vec<Call>;
    /// Every short row length, and the lengths near changes of tiles.
    fn cols() -> Vec<usize>;
    /// Backward calls with row counts and row lengths, covering every form of the workspace.
    fn backward_sizes() -> Vec<(Call, usize, usize)>;
    /// Devices for `backward_sizes`.
    fn devices_of_backward() -> Vec<Self::Caps> {
        Self::devices()
    }
    /// Whether to test the sums over rows of such a call. Adjacent lengths have equal tiles.
    fn is_sampled(call: Call, cols: usize) -> bool;
    /// Whether the device must have a plan for `problem`.
    fn must_fit(problem: &Problem, caps: &Self::Caps) -> bool;

    /// The plan, if the device has one.
    fn plan(problem: &Problem, access: Self::Access, caps: &Self::Caps) -> Option<Self::Plan>;
    /// The workspace length reported to callers, in f32 elements.
    fn workspace_len(problem: &Problem, caps: &Self::Caps) -> usize;
    /// The launched programs, in order.
    fn programs(plan: &Self::Plan) -> Vec<Program>;
    /// The mapping of each program that works on rows.
    fn mapping(plan: &Self::Plan) -> Vec<Self::Mapping>;
    /// Converts the plan of an in-place call into the plan of the same call with a separate `x`.
    fn as_if_not_in_place(plan: Self::Plan) -> Self::Plan {
        plan
    }
    /// Each launched program that sums over a row, as text, with its longest chain of additions.
    fn row_chains(plan: &Self::Plan, cols: usize) -> Vec<(String, u64)>;
    /// The longest chain of additions in `dweight` and `dbias` with
    /// [`Partials`](rmsnorm_spec::GradReduction::Partials).
    fn gradient_chain(plan: &Self::Plan, rows: usize) -> u64;
    /// The ranges of the workspace's parts.
    fn parts(plan: &Self::Plan, call: Call, rows: usize, cols: usize) -> Parts;
    /// The steps that zero the workspace: the index of each among all steps, and its elements.
    fn zeroes(plan: &Self::Plan) -> Vec<(usize, Range<u64>)>;
}

/// The parts of a workspace in f32 elements, as the kernels index it. An absent part is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Partial rows of `dweight`, then of `dbias`.
    pub partials: Range<u64>,
    /// Locks of partial rows that are shared.
    pub locks: Range<u64>,
    /// Whether several chunks of rows add to one partial row.
    pub is_shared: bool,
    /// Two sums per row, for rows that take two passes over memory.
    pub row_sums: Range<u64>,
    /// The whole length, including room to align its start.
    pub len: u64,
}

/// A backward call with its size and its plan on a device.
#[expect(missing_debug_implementations, reason = "a test prints it by Display")]
pub struct Planned<'a, P: Planner> {
    /// The device.
    pub caps: &'a P::Caps,
    /// How memory is accessed.
    pub access: P::Access,
    /// The call without its size.
    pub call: Call,
    /// Rows of the call.
    pub rows: usize,
    /// Columns of the call.
    pub cols: usize,
    /// The plan.
    pub plan: P::Plan,
    /// The parts of the plan's workspace.
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

/// Makes a `#[test]` of each function below for a `Planner`.
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

/// The plan of a call with the widest access.
fn plan<P: Planner>(call: Call, rows: usize, cols: usize, caps: &P::Caps) -> P::Plan {
    let Some(planned) = P::plan(&call.problem(rows, cols), P::ACCESSES[0], caps) else {
        unreachable!("no plan for {rows}x{cols} {call:?} on {caps:?}")
    };
    planned
}

/// For every number of rows and every access, the mapping equals the mapping of one row.
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

/// A call with the caller's workspace has the same plan as one without, and needs no more than
/// callers are told.
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

/// In-place calls have the same plan as other calls. A sum of parts overwrites none of them.
pub fn in_place_is_planned_as_forward_is<P: Planner>() {
    for_all::<P>(|caps, call, cols| {
        if call.direction == Direction::Forward && call.parts == 1 {
            let problem = in_place(&call.problem(P::SOME_ROWS, cols));
            let planned = P::plan(&problem, P::ACCESSES[0], caps).map(P::as_if_not_in_place);
            assert_eq!(planned, Some(plan::<P>(call, P::SOME_ROWS, cols, caps)), "{cols} {call:?}");
        }
    });
}

/// Gradients of zero rows are zeros, written by the second stage.
pub fn without_rows_only_gradients_are_written<P: Planner>() {
    for_all::<P>(|caps, call, cols| {
        let planned = plan::<P>(call, 0, cols, caps);
        let is_reduction: Vec<bool> = P::programs(&planned).iter().map(|program| program.is_reduction).collect();
        assert_eq!(is_reduction, if call.gradients() > 0 { vec![true] } else { vec![] }, "{cols} {call:?}");
        assert!(P::parts(&planned, call, 0, cols).partials.is_empty(), "{cols} {call:?}");
    });
}

/// math.md, section 4: error bounds assume chains of at most this length.
pub fn sums_over_a_row_keep_to_the_policy<P: Planner>() {
    // The first violation of each tile.
    let mut too_long = BTreeMap::new();
    for caps in P::devices_by_exchange() {
        for (call, cols) in P::calls().into_iter().flat_map(|call| P::cols().into_iter().map(move |cols| (call, cols)))
        {
            let allowed = sum_depth(cols) as u64;
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

/// The same limit for gradients, through both stages, for up to 2^33 rows.
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

/// Calls `check` for every backward call, size, access and device with a plan for it.
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

/// At every address of the workspace, its aligned parts fit one after the other.
pub fn parts_do_not_overlap_and_end_within<P: Planner>() {
    for_all_backward::<P>(|planned| {
        let (parts, mut end) = (&planned.parts, 0);
        for part in [&parts.partials, &parts.locks, &parts.row_sums].into_iter().filter(|part| !part.is_empty()) {
            assert!(part.start >= end && part.start.is_multiple_of(4), "{planned}");
            // At most the partial rows' room for rounding lies between them.
            assert!(part.start <= end.next_multiple_of(4) + 4, "{planned}");
            end = part.end;
        }
        assert!(end == 0 || end + ALIGNMENT_SLACK <= parts.len, "{planned}");
        // No more is asked for than is used, except for 16 bytes that a program may bind when it
        // has nothing to read.
        assert!(parts.len <= end.max(1).next_multiple_of(4) + ALIGNMENT_SLACK, "{planned}");
    });
}

/// Only locks, and partial rows updated with atomics, are zeroed first.
pub fn what_is_added_to_is_zeroed_first<P: Planner>() {
    for_all_backward::<P>(|planned| {
        let Parts { partials, locks, is_shared, .. } = &planned.parts;
        // With locks, the first block to arrive stores instead of adding.
        let zeroed = if locks.is_empty() { partials } else { locks };
        let first: Vec<_> = is_shared.then(|| (0, zeroed.clone())).into_iter().collect();
        assert_eq!(P::zeroes(&planned.plan), first, "{planned}");
        assert!(locks.is_empty() || locks.start == partials.end, "{planned}");
    });
}

/// A call has a workspace only if it stores something there.
pub fn a_call_that_keeps_nothing_needs_no_workspace<P: Planner>() {
    for_all_backward::<P>(|planned| {
        let parts = &planned.parts;
        if planned.call.gradients() == 0 && parts.row_sums.is_empty() {
            assert_eq!(parts.len, 0, "{planned}");
        }
        // The pass over columns reads the row sums.
        let needs_sums = P::programs(&planned.plan).iter().any(|program| program.stem == "backward_columns");
        assert_eq!(parts.row_sums.is_empty(), !needs_sums, "{planned}");
    });
}
