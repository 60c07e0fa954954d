//! Calls of a group of ranks. In a reduced call, x is the sum of one part per rank; every rank must
//! get the same result, within the bounds of one device. In [`rows`], each rank owns some rows of
//! the residual stream. In [`columns`], each rank has some columns.
//!
//! The cases of reduced calls are those of a sum of parts, with one part per rank. [`test_ranks`]
//! proves for a group: every output is in its interval; the sum with the residual is exact; all
//! ranks have the same bits; nothing around the tensors changed; and no result depends on the old
//! content of outputs.

pub mod columns;
pub mod rows;

use std::fmt;

use rmsnorm_spec::{DTypes, NormSpec, OutputRows, Tensor};

use crate::Arithmetic;
use crate::case::data::{self, Inputs};
use crate::case::{Case, Kind, Layout, Trial};
use crate::finding::{Check, Finding, Status};
use crate::judge::trial::judge_stored;
use crate::pieces::parts;
use crate::run::calls::{call, checked};
use crate::run::harness::Answer;
use crate::run::memory::{Bits, Call, Outputs, Poison, poison_difference};
use crate::testing::TestFailure;

pub use crate::run::device::Normalize;

/// A group of ranks under test.
pub trait Group: Sync {
    /// The number of ranks.
    fn ranks(&self) -> usize;

    /// The declared arithmetic of its backend.
    fn arithmetic(&self) -> Arithmetic;

    /// Makes a call on all ranks at once, each rank on its own thread by [`Call::make_by`]. `calls`
    /// and the answers are in rank order.
    fn make(&self, spec: &NormSpec, dtypes: DTypes, calls: &mut [Call]) -> Vec<Answer>;

    /// As [`make`](Self::make), with the residual stream divided by rows. `spec` is that of all
    /// rows.
    fn make_on_rows(&self, spec: &NormSpec, y_rows: OutputRows, dtypes: DTypes, calls: &mut [Call]) -> Vec<Answer>;

    /// As [`make`](Self::make), for forward or backward calls in which rank i has `columns[i]`
    /// columns. `spec` is that of whole rows.
    fn make_on_columns(&self, spec: &NormSpec, columns: &[usize], dtypes: DTypes, calls: &mut [Call]) -> Vec<Answer>;
}

/// A case of a group: x is the sum of one part per rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RanksCase {
    /// The case; its `parts` is the number of ranks.
    pub case: Case,
    /// Whether y overwrites x, and the sum overwrites the residual.
    pub in_place: bool,
}

impl RanksCase {
    /// The case of one rank's call.
    fn of_rank(&self) -> Case {
        let kind = if self.in_place { Kind::FORWARD_IN_PLACE } else { Kind::FORWARD };
        Case { kind, parts: 1, ..self.case }
    }
}

impl fmt::Display for RanksCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RanksCase { case, in_place } = self;
        write!(f, "{} ranks{}, {case}", case.parts, if *in_place { " in place" } else { "" })
    }
}

/// The cases of a group with `ranks` ranks: a third of them in place, the others out of place.
pub fn cases(ranks: usize, is_whole: bool) -> Vec<RanksCase> {
    let list = if is_whole { parts::core() } else { parts::smoke() };
    let bounds = list.into_iter().filter(|case| case.trial == Trial::Bounds);
    let of_ranks = |(i, case): (usize, Case)| {
        let case = Case { parts: ranks, ..case.normalized() };
        RanksCase { case, in_place: i % 3 == 2 }
    };
    bounds.enumerate().map(of_ranks).collect()
}

/// Makes a case's calls from both poisons, and judges the outputs of all ranks.
pub fn run_case(group: &dyn Group, case: &RanksCase) -> Status {
    let inputs = data::inputs(&case.case);
    outcome(
        |poison| stored(group, case, &inputs, poison),
        |stored| Ok(judge_stored(&case.case, &inputs, stored, &group.arithmetic())),
    )
}

/// The status of a case: the outputs must not depend on the poison, and `judge` must accept them.
fn outcome(
    stored: impl Fn(Poison) -> Result<Outputs, Status>,
    judge: impl FnOnce(&Outputs) -> Result<Status, Status>,
) -> Status {
    let judged = stored(Poison::Nan).and_then(|nan| {
        let huge = stored(Poison::Huge)?;
        poison_difference(&nan, &huge, |_| false).map_or_else(|| judge(&nan), |finding| Err(Status::Fail(finding)))
    });
    judged.unwrap_or_else(|status| status)
}

/// The outputs of the ranks, if all ranks stored the same.
fn stored(group: &dyn Group, ranks_case: &RanksCase, inputs: &Inputs, poison: Poison) -> Result<Outputs, Status> {
    let (case, of_rank) = (&ranks_case.case, ranks_case.of_rank());
    let len = case.rows * case.cols;
    let call = |rank: usize| rank_call(&of_rank, &of_part(inputs, rank, len), poison);
    let mut calls: Vec<Call> = (0..group.ranks()).map(call).collect();
    let answers = group.make(&case.spec(), case.dtypes, &mut calls);
    let mut outputs = stored_by_ranks(answers, &calls)?.into_iter();
    let first = outputs.next().unwrap_or_default();
    for (rank, other) in outputs.enumerate() {
        for ((tensor, here), (_, there)) in first.tensors.iter().zip(&other.tensors) {
            same_on_ranks(*tensor, here, there, rank + 1)?;
        }
    }
    Ok(first)
}

/// The inputs with one part of x.
fn of_part(inputs: &Inputs, part: usize, len: usize) -> Inputs {
    let x = inputs.of(Tensor::X)[part * len..][..len].to_vec();
    let mut inputs = inputs.clone().with(Tensor::X, Some(x));
    inputs.sum = None;
    inputs
}

/// A rank's call. No case of a group has a workspace.
fn rank_call(case: &Case, inputs: &Inputs, poison: Poison) -> Call {
    call(case, case.kind.direction, inputs, |_| 0, poison)
}

/// The outputs of each rank, if each call succeeded and changed nothing else.
fn stored_by_ranks(answers: Vec<Answer>, calls: &[Call]) -> Result<Vec<Outputs>, Status> {
    let of_rank = |(rank, (answer, call)): (usize, (Answer, &Call))| checked(call, answer, &format!("rank {rank}: "));
    answers.into_iter().zip(calls).enumerate().map(of_rank).collect()
}

/// Checks that a tensor of rank 0 has the same bits as that of `rank`.
fn same_on_ranks(tensor: Tensor, here: &Bits, there: &Bits, rank: usize) -> Result<(), Status> {
    let Some(i) = (0..here.bits.len()).find(|&i| here.bits[i] != there.bits[i]) else { return Ok(()) };
    let detail = format!("element {i} is {:#x} on rank 0, {:#x} on rank {rank}", here.bits[i], there.bits[i]);
    Err(Status::Fail(Finding { check: Check::Repeat, output: tensor.name(), detail }))
}

/// The results of a group's cases. `Display` prints a few lines.
#[derive(Clone, Debug, Default)]
pub struct RanksSummary {
    /// The number of ranks of the group.
    pub ranks: usize,
    /// Cases in which all ranks gave the same result, within the bounds.
    pub passed: usize,
    /// Cases that the group does not support.
    pub unsupported: usize,
    /// Failed cases, each with its status.
    pub failures: Vec<(String, Status)>,
}

impl RanksSummary {
    /// Runs `cases` one after the other.
    fn of<C: fmt::Display>(
        ranks: usize,
        cases: &[C],
        run_case: impl Fn(&C) -> Status,
        may_be_lacking: impl Fn(&C) -> bool,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Self {
        let mut summary = RanksSummary { ranks, ..RanksSummary::default() };
        progress(0, cases.len());
        for (i, case) in cases.iter().enumerate() {
            match run_case(case) {
                Status::Pass => summary.passed += 1,
                Status::Unsupported(_) if may_be_lacking(case) => summary.unsupported += 1,
                status @ (Status::Unsupported(_) | Status::Fail(_) | Status::Vacuous(_) | Status::Skipped(_)) => {
                    summary.failures.push((case.to_string(), status));
                }
            }
            progress(i + 1, cases.len());
        }
        summary
    }

    /// Whether cases passed and none failed.
    pub fn is_success(&self) -> bool {
        self.passed > 0 && self.failures.is_empty()
    }

    fn tested(self) -> Result<usize, TestFailure> {
        if self.is_success() { Ok(self.passed) } else { Err(TestFailure(self.to_string())) }
    }
}

impl fmt::Display for RanksSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (case, status) in &self.failures {
            writeln!(f, "FAILED {case}: {status:?}")?;
        }
        let RanksSummary { ranks, passed, unsupported, failures } = self;
        write!(f, "{ranks} ranks: {passed} passed, {} failed, {unsupported} unsupported", failures.len())
    }
}

/// The longest row that every group must support, in columns.
const LONG: usize = 1 << 15;

/// Whether a group may refuse the case: strided rows, and rows longer than a chip can hold.
fn is_beyond(case: &Case) -> bool {
    case.layout != Layout::DENSE || case.cols > LONG
}

/// Runs the cases of a group: all sums of parts of the core profile, or those of the smoke profile.
/// `progress` is called with the number of finished cases and the total, before the first case and
/// after each one.
pub fn run(group: &dyn Group, is_whole: bool, progress: &mut dyn FnMut(usize, usize)) -> RanksSummary {
    let may_be_lacking = |case: &RanksCase| is_beyond(&case.case);
    let ranks = group.ranks();
    RanksSummary::of(ranks, &cases(ranks, is_whole), |case| run_case(group, case), may_be_lacking, progress)
}

/// [`run`] as a test; returns the number of passed cases.
///
/// # Errors
/// All failed cases; or if no case passed.
pub fn test_ranks(group: &dyn Group, is_whole: bool) -> Result<usize, TestFailure> {
    run(group, is_whole, &mut |_, _| {}).tested()
}
