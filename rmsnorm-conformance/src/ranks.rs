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
    judged(group, case)
}

/// How the calls of a case are divided among ranks.
trait Divided: fmt::Display {
    /// The case of whole tensors.
    fn whole(&self) -> &Case;

    fn inputs(&self) -> Inputs {
        data::inputs(self.whole())
    }

    /// The arithmetic of a correct group.
    fn arithmetic(&self, of_backend: Arithmetic) -> Arithmetic {
        of_backend
    }

    /// The call of a rank.
    fn call(&self, rank: usize, inputs: &Inputs, poison: Poison) -> Call;

    fn make(&self, group: &dyn Group, calls: &mut [Call]) -> Vec<Answer>;

    /// The whole tensor, from the tensors of all ranks.
    fn join(&self, tensor: Tensor, of_ranks: &[&Bits], calls: &[Call]) -> Result<Vec<u32>, Status>;

    /// Checks a result that was accepted.
    fn check(&self, _: &dyn Group, _: &Inputs, _: &Outputs) -> Result<(), Status> {
        Ok(())
    }

    /// Whether a group may refuse the case: strided rows, and rows longer than a chip can hold.
    fn may_be_refused(&self) -> bool {
        self.whole().layout != Layout::DENSE || self.whole().cols > LONG
    }
}

/// The longest row that every group must support, in columns.
const LONG: usize = 1 << 15;

impl Divided for RanksCase {
    fn whole(&self) -> &Case {
        &self.case
    }

    fn call(&self, rank: usize, inputs: &Inputs, poison: Poison) -> Call {
        rank_call(&self.of_rank(), &of_part(inputs, rank, self.case.rows * self.case.cols), poison)
    }

    fn make(&self, group: &dyn Group, calls: &mut [Call]) -> Vec<Answer> {
        group.make(&self.case.spec(), self.case.dtypes, calls)
    }

    fn join(&self, tensor: Tensor, of_ranks: &[&Bits], _: &[Call]) -> Result<Vec<u32>, Status> {
        same_on_ranks(tensor, of_ranks)
    }
}

/// The status of a case: the outputs must not depend on the poison, and be accepted.
fn judged(group: &dyn Group, case: &impl Divided) -> Status {
    let inputs = case.inputs();
    let judged = stored(group, case, &inputs, Poison::Nan).and_then(|nan| {
        let huge = stored(group, case, &inputs, Poison::Huge)?;
        if let Some(finding) = poison_difference(&nan, &huge, |_| false) {
            return Err(Status::Fail(finding));
        }
        judge_stored(case.whole(), &inputs, &nan, &case.arithmetic(group.arithmetic()))?;
        case.check(group, &inputs, &nan)
    });
    judged.err().unwrap_or(Status::Pass)
}

/// The outputs of the ranks, joined to whole tensors, if each call succeeded and changed nothing
/// else.
fn stored(group: &dyn Group, case: &impl Divided, inputs: &Inputs, poison: Poison) -> Result<Outputs, Status> {
    let mut calls: Vec<Call> = (0..group.ranks()).map(|rank| case.call(rank, inputs, poison)).collect();
    let answers = case.make(group, &mut calls).into_iter().zip(&calls).enumerate();
    let of_ranks = answers.map(|(rank, (answer, call))| checked(call, answer, &format!("rank {rank}: ")));
    let of_ranks = of_ranks.collect::<Result<Vec<Outputs>, _>>()?;
    let mut whole = of_ranks.first().cloned().unwrap_or_default();
    for (i, (tensor, bits)) in whole.tensors.iter_mut().enumerate() {
        let of_ranks: Vec<&Bits> = of_ranks.iter().map(|outputs| &outputs.tensors[i].1).collect();
        bits.bits = case.join(*tensor, &of_ranks, &calls)?;
    }
    Ok(whole)
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

/// The bits of a tensor that must be the same on all ranks.
fn same_on_ranks(tensor: Tensor, of_ranks: &[&Bits]) -> Result<Vec<u32>, Status> {
    let here = &of_ranks[0].bits;
    for (rank, there) in of_ranks.iter().enumerate() {
        if let Some(i) = (0..here.len()).find(|&i| here[i] != there.bits[i]) {
            let detail = format!("element {i} is {:#x} on rank 0, {:#x} on rank {rank}", here[i], there.bits[i]);
            return Err(Status::Fail(Finding { check: Check::Repeat, output: tensor.name(), detail }));
        }
    }
    Ok(here.clone())
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
    fn of(group: &dyn Group, cases: &[impl Divided], progress: &mut dyn FnMut(usize, usize)) -> Self {
        let mut summary = RanksSummary { ranks: group.ranks(), ..RanksSummary::default() };
        progress(0, cases.len());
        for (i, case) in cases.iter().enumerate() {
            match judged(group, case) {
                Status::Pass => summary.passed += 1,
                Status::Unsupported(_) if case.may_be_refused() => summary.unsupported += 1,
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

/// Runs the cases of a group: all sums of parts of the core profile, or those of the smoke profile.
/// `progress` is called with the number of finished cases and the total, before the first case and
/// after each one.
pub fn run(group: &dyn Group, is_whole: bool, progress: &mut dyn FnMut(usize, usize)) -> RanksSummary {
    RanksSummary::of(group, &cases(group.ranks(), is_whole), progress)
}

/// [`run`] as a test; returns the number of passed cases.
///
/// # Errors
/// All failed cases; or if no case passed.
pub fn test_ranks(group: &dyn Group, is_whole: bool) -> Result<usize, TestFailure> {
    run(group, is_whole, &mut |_, _| {}).tested()
}
