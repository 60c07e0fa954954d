//! Calls whose residual stream is divided by rows among ranks. The joined rows of all ranks are
//! judged as those of a reduced call. If the group makes reduced calls, the sum must have the same
//! bits as there. Other memory must not change.

use std::fmt;
use std::ops::Range;

use rmsnorm_spec::{DType, Norm, OutputRows, Tensor};

use super::{Divided, Group, RanksCase, RanksSummary, judged, of_part, rank_call, same_on_ranks};
use crate::case::data::Inputs;
use crate::case::dice::each;
use crate::case::{Case, Layout};
use crate::finding::{Check, Finding, Status};
use crate::pieces::parts;
use crate::run::harness::Answer;
use crate::run::memory::{Bits, Call, Guarded, Outputs, Poison};
use crate::testing::TestFailure;

/// A case of a group in which each rank owns some of the rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowsCase {
    /// The same case as a reduced call, with all rows.
    pub reduced: RanksCase,
    /// The rows of y that a rank gets.
    pub y_rows: OutputRows,
}

impl RowsCase {
    /// The rows that a rank owns: the same number for all ranks, fewer or none for the last ones.
    fn own(&self, rank: usize) -> Range<usize> {
        let Case { rows, parts: ranks, .. } = self.reduced.case;
        let most = rows.div_ceil(ranks);
        (rank * most).min(rows)..((rank + 1) * most).min(rows)
    }
}

impl fmt::Display for RowsCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let y = if self.y_rows == OutputRows::All { "all" } else { "own" };
        write!(f, "rows of {}, y of {y} rows", self.reduced)
    }
}

/// The cases of a group with `ranks` ranks: those of reduced calls, alternately with all rows of y
/// and with the rank's own; and row counts that leave some ranks with fewer rows or none.
pub fn cases(ranks: usize, is_whole: bool) -> Vec<RowsCase> {
    let in_turn = |(i, reduced): (usize, RanksCase)| {
        let y_rows = if i % 2 == 0 { OutputRows::All } else { OutputRows::Own };
        RowsCase { reduced, y_rows }
    };
    let mut cases: Vec<RowsCase> = super::cases(ranks, is_whole).into_iter().enumerate().map(in_turn).collect();
    let rows = [1, ranks - 1, ranks + 1, 2 * ranks - 1, 3 * ranks];
    let (norms, rows) = (Norm::USUAL.into_iter().enumerate(), rows.into_iter().enumerate());
    let y_rows = [OutputRows::All, OutputRows::Own].into_iter().enumerate();
    let forms: Vec<_> = each(y_rows, [false, true]).collect();
    for (((i, norm), (j, rows)), ((k, y_rows), in_place)) in each(each(norms, rows), forms) {
        let dtype = DType::ALL[(i + j + k) % 3];
        let case = Case { parts: ranks, ..parts::plain(norm, 2, dtype, (rows, 67)).normalized() };
        cases.push(RowsCase { reduced: RanksCase { case, in_place }, y_rows });
    }
    cases
}

/// Makes a case's calls from both poisons, and judges the outputs of all ranks.
pub fn run_case(group: &dyn Group, case: &RowsCase) -> Status {
    judged(group, case)
}

impl Divided for RowsCase {
    fn whole(&self) -> &Case {
        &self.reduced.case
    }

    fn call(&self, rank: usize, inputs: &Inputs, poison: Poison) -> Call {
        let (case, of_rank) = (&self.reduced.case, self.reduced.of_rank());
        let len = case.rows * case.cols;
        let inputs = of_part(inputs, rank, len);
        let own: Vec<usize> = self.own(rank).collect();
        let of_own = Case { rows: own.len(), ..of_rank };
        // The rows of the residual stream may be strided while the exchanged rows are dense.
        let layout = if self.y_rows == OutputRows::Own { Layout::DENSE } else { case.layout };
        let all = rank_call(&Case { layout, ..of_rank }, &inputs, poison);
        let mut call = rank_call(&of_own, &inputs.with_rows(&own, &of_rank), poison);
        for whole in all.tensors {
            let has_all = whole.name == Tensor::X || whole.name == Tensor::Y && self.y_rows == OutputRows::All;
            if let Some(tensor) = call.get_mut(whole.name).filter(|_| has_all) {
                *tensor = whole;
            }
        }
        call
    }

    fn make(&self, group: &dyn Group, calls: &mut [Call]) -> Vec<Answer> {
        group.make_on_rows(&self.whole().spec(), self.y_rows, self.whole().dtypes, calls)
    }

    fn join(&self, tensor: Tensor, of_ranks: &[&Bits], calls: &[Call]) -> Result<Vec<u32>, Status> {
        match (tensor == Tensor::Y, self.y_rows) {
            (true, OutputRows::All) => same_on_ranks(tensor, of_ranks),
            (true, OutputRows::Own) if self.reduced.in_place => {
                let of_rank = |(rank, (there, call)): (usize, (&&Bits, &Call))| {
                    let own = elements(&self.own(rank), self.whole().cols);
                    let others = call.get(Tensor::X).map(|x| others_are_as_they_were(x, there, &own, rank));
                    others.unwrap_or(Ok(())).map(|()| there.bits[own].to_vec())
                };
                let of_ranks = of_ranks.iter().zip(calls).enumerate().map(of_rank);
                Ok(of_ranks.collect::<Result<Vec<_>, _>>()?.concat())
            }
            (true, OutputRows::Own) | (false, _) => {
                Ok(of_ranks.iter().flat_map(|there| there.bits.iter().copied()).collect())
            }
        }
    }

    /// Checks that the sum has the same bits as in the reduced call, if the group makes it.
    fn check(&self, group: &dyn Group, inputs: &Inputs, divided: &Outputs) -> Result<(), Status> {
        let reduced = match super::stored(group, &self.reduced, inputs, Poison::Nan) {
            Err(Status::Unsupported(_)) => return Ok(()),
            reduced => reduced?,
        };
        let sum = Tensor::ResidualOut;
        let Some((here, there)) = divided.get(sum).zip(reduced.get(sum)) else { return Ok(()) };
        let Some(i) = (0..here.bits.len()).find(|&i| here.bits[i] != there.bits[i]) else { return Ok(()) };
        let (here, there) = (here.bits[i], there.bits[i]);
        let detail = format!("element {i} is {here:#x}, but {there:#x} in the reduced call");
        Err(Status::Fail(Finding { check: Check::Metamorphic, output: sum.name(), detail }))
    }
}

fn elements(rows: &Range<usize>, cols: usize) -> Range<usize> {
    rows.start * cols..rows.end * cols
}

/// If y overwrites x, it may overwrite only the rank's own rows.
fn others_are_as_they_were(x: &Guarded, after: &Bits, own: &Range<usize>, rank: usize) -> Result<(), Status> {
    let before = x.given();
    let changed = |&i: &usize| !own.contains(&i) && before.bits[i] != after.bits[i];
    let Some(i) = (0..before.bits.len()).find(changed) else { return Ok(()) };
    let (was, is) = (before.bits[i], after.bits[i]);
    let detail = format!("element {i}, which rank {rank} does not own, changed from {was:#x} to {is:#x}");
    Err(Status::Fail(Finding { check: Check::Input, output: "x", detail }))
}

/// Runs the cases of a group: all, or some. `progress` is as in [`ranks::run`](super::run).
pub fn run(group: &dyn Group, is_whole: bool, progress: &mut dyn FnMut(usize, usize)) -> RanksSummary {
    RanksSummary::of(group, &cases(group.ranks(), is_whole), progress)
}

/// [`run`] as a test; returns the number of passed cases.
///
/// # Errors
/// All failed cases; or if no case passed.
pub fn test_rows(group: &dyn Group, is_whole: bool) -> Result<usize, TestFailure> {
    run(group, is_whole, &mut |_, _| {}).tested()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In each form some ranks have fewer rows than others, and some have none.
    #[test]
    fn every_form_has_rows_that_do_not_go_evenly() {
        for ranks in [2, 3, 4, 8] {
            for (y_rows, in_place) in
                [OutputRows::All, OutputRows::Own].into_iter().flat_map(|it| [(it, false), (it, true)])
            {
                let mut cases = cases(ranks, false);
                cases.retain(|case| case.y_rows == y_rows && case.reduced.in_place == in_place);
                let last = |case: &RowsCase| (case.own(0).len(), case.own(ranks - 1).len());
                let has = |is: &dyn Fn((usize, usize)) -> bool| {
                    cases.iter().filter(|case| is(last(case))).count() >= Norm::USUAL.len()
                };
                assert!(has(&|(first, last)| last == first && first > 1), "{ranks} {y_rows:?} {in_place}");
                assert!(has(&|(first, last)| first > 0 && last == 0), "{ranks} {y_rows:?} {in_place}");
                assert!(has(&|(first, last)| 0 < last && last < first), "{ranks} {y_rows:?} {in_place}");
            }
        }
    }
}
