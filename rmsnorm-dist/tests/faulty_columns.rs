//! The suite of divided columns detects each of these planted bugs in the statistics of whole rows.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::sync::{Arc, Mutex};

use rmsnorm_conformance::Status;
use rmsnorm_conformance::ranks::columns::{cases, run_case};
use rmsnorm_cpu::{CpuBackend, Isa};
use rmsnorm_dist::{Collective, GroupCall, Ranks, RowShares, Sharded, ShardedNorm, ThreadGroup};
use rmsnorm_spec::{AnyElement, Direction, Error, Norm, NormSpec, bf16};

/// A bug in the statistics.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bug {
    /// Every rank normalizes with the statistics of its own columns.
    OwnColumnsOnly,
    /// Sums are divided by the rank's number of columns.
    DividedByOwnColumns,
    /// Chan's formula: assumes that deviations from a rounded mean add up to zero.
    NoDeviations,
    /// The variance as the mean square without the square of the mean.
    SquareOfMeanSubtracted,
    RankLeftOut,
    RankTwice,
    NumbersOfCallBefore,
    NumbersOfOtherRow,
    LastRowMissing,
    OwnNumbersFirst,
    RoundedToBf16,
    NumbersOfRowExchanged,
    RanksDiffer,
    EpsOfRank,
    WeightOffsetTwice,
}

/// The bugs, and whether forward and backward can have them.
const BUGS: [(Bug, bool, bool); 15] = [
    (Bug::OwnColumnsOnly, true, true),
    (Bug::DividedByOwnColumns, true, true),
    (Bug::NoDeviations, true, false),
    (Bug::SquareOfMeanSubtracted, true, false),
    (Bug::RankLeftOut, true, true),
    (Bug::RankTwice, true, true),
    (Bug::NumbersOfCallBefore, true, true),
    (Bug::NumbersOfOtherRow, true, true),
    (Bug::LastRowMissing, true, true),
    // No two ranks share a result of backward.
    (Bug::OwnNumbersFirst, true, false),
    (Bug::RoundedToBf16, true, true),
    (Bug::NumbersOfRowExchanged, true, true),
    (Bug::RanksDiffer, true, true),
    (Bug::EpsOfRank, true, false),
    (Bug::WeightOffsetTwice, true, true),
];

/// The kind of call whose numbers are exchanged.
#[derive(Clone, Default)]
struct Now {
    /// f32 numbers per row.
    numbers: usize,
    is_forward: bool,
    columns: Vec<usize>,
}

/// Exchanges numbers and corrupts them.
struct Spoiler {
    group: ThreadGroup,
    bug: Option<Bug>,
    now: Arc<Mutex<Now>>,
    before: Mutex<Vec<f32>>,
}

impl Spoiler {
    /// (ranks, rows, numbers)
    fn spoil(&self, found: &mut [f32], rank: usize, ranks: usize) {
        let Now { numbers, is_forward, columns } = self.now.lock().unwrap().clone();
        let len = found.len() / ranks;
        if len == 0 {
            return;
        }
        let whole = columns.iter().sum::<usize>() as f32;
        let own = found[rank * len..][..len].to_vec();
        let is_merged = is_forward && numbers == 3;
        match self.bug {
            Some(Bug::OwnColumnsOnly) => {
                for (found, &columns_there) in found.chunks_exact_mut(len).zip(&columns) {
                    let share = columns_there as f32 / columns[rank] as f32;
                    found.iter_mut().zip(&own).for_each(|(found, own)| *found = own * share);
                }
            }
            Some(Bug::DividedByOwnColumns) => {
                found.iter_mut().for_each(|number| *number *= whole / columns[rank] as f32);
            }
            Some(Bug::NoDeviations) if is_merged => found.chunks_exact_mut(3).for_each(|row| row[1] = 0.0),
            Some(Bug::SquareOfMeanSubtracted) if is_merged => {
                for (found, &columns) in found.chunks_exact_mut(len).zip(&columns) {
                    for row in found.chunks_exact_mut(3) {
                        let of_mean = row[0] * row[0] / columns as f32;
                        row[2] = (row[2] + of_mean) - of_mean;
                    }
                }
            }
            Some(Bug::RankLeftOut) => found[(ranks - 1) * len..].fill(0.0),
            Some(Bug::RankTwice) => found.copy_within(..len, len),
            Some(Bug::NumbersOfCallBefore) => {
                let now = found.to_vec();
                let before = std::mem::replace(&mut *self.before.lock().unwrap(), now);
                found.iter_mut().zip(before).for_each(|(number, before)| *number = before);
            }
            Some(Bug::NumbersOfOtherRow) => {
                found.chunks_exact_mut(len).for_each(|found| found.rotate_left(numbers));
            }
            Some(Bug::LastRowMissing) => {
                found.chunks_exact_mut(len).for_each(|found| found[len - numbers..].fill(0.0));
            }
            Some(Bug::OwnNumbersFirst) => found[..(rank + 1) * len].rotate_right(len),
            Some(Bug::RoundedToBf16) => found.iter_mut().for_each(|number| *number = bf16::from_f32(*number).to_f32()),
            Some(Bug::NumbersOfRowExchanged) => {
                found.chunks_exact_mut(numbers).for_each(|row| row.rotate_left(1));
            }
            Some(Bug::RanksDiffer) if rank == 1 => {
                found.iter_mut().for_each(|number| *number = f32::from_bits(number.to_bits() ^ 8));
            }
            Some(_) | None => {}
        }
    }
}

impl Collective<CpuBackend> for Spoiler {
    fn rank(&self) -> usize {
        Collective::<CpuBackend>::rank(&self.group)
    }

    fn ranks(&self) -> usize {
        Collective::<CpuBackend>::ranks(&self.group)
    }

    fn all_to_all<T: AnyElement>(&self, shares: &RowShares, from: &[T], to: &mut [T]) -> Result<(), Error> {
        Collective::<CpuBackend>::all_to_all(&self.group, shares, from, to)
    }

    fn all_gather<T: AnyElement>(&self, shares: &RowShares, from: &[T], to: &mut [T]) -> Result<(), Error> {
        Collective::<CpuBackend>::all_gather(&self.group, shares, from, to)
    }

    fn all_gather_in_place<T: AnyElement>(&self, shares: &RowShares, tensor: &mut [T]) -> Result<(), Error> {
        Collective::<CpuBackend>::all_gather_in_place(&self.group, shares, &mut *tensor)?;
        let mut found: Vec<f32> = tensor.iter().map(|number| f32::from_bits(number.bits())).collect();
        self.spoil(&mut found, Collective::rank(self), Collective::ranks(self));
        tensor.iter_mut().zip(found).for_each(|(to, found)| *to = T::from_bits(found.to_bits()));
        Ok(())
    }
}

/// A rank of a group with a bug.
struct Faulty {
    norm: Sharded<CpuBackend, Spoiler>,
    bug: Option<Bug>,
    now: Arc<Mutex<Now>>,
}

impl Faulty {
    fn new(group: ThreadGroup, bug: Option<Bug>) -> Self {
        let now = Arc::<Mutex<Now>>::default();
        let spoiler = Spoiler { group, bug, now: now.clone(), before: Mutex::default() };
        Faulty { norm: Sharded::new(backend(), spoiler), bug, now }
    }

    fn spec(&self, spec: &NormSpec, columns: &[usize], direction: Direction) -> NormSpec {
        let numbers = spec.norm.statistics_len(direction);
        *self.now.lock().unwrap() =
            Now { numbers, is_forward: direction == Direction::Forward, columns: columns.to_vec() };
        match self.bug {
            Some(Bug::EpsOfRank) => spec.eps(spec.eps * (1.0 + self.norm.rank() as f32)),
            Some(Bug::WeightOffsetTwice) => spec.weight_offset(2.0 * spec.weight_offset),
            Some(_) | None => *spec,
        }
    }
}

impl ShardedNorm for Faulty {
    type Backend = CpuBackend;

    fn rank(&self) -> usize {
        self.norm.rank()
    }

    fn ranks(&self) -> usize {
        self.norm.ranks()
    }

    fn launch(&self, spec: &NormSpec, call: GroupCall<'_, '_, CpuBackend>) -> Result<(), Error> {
        let spec = match &call {
            GroupCall::ForwardColumns(columns, _) => self.spec(spec, columns, Direction::Forward),
            GroupCall::BackwardColumns(columns, _) => self.spec(spec, columns, Direction::Backward),
            GroupCall::Reduced(_) | GroupCall::ReducedRows(..) => *spec,
        };
        self.norm.launch(&spec, call)
    }
}

fn backend() -> CpuBackend {
    CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap()
}

/// Whether a group of `ranks` fails a case, forward or backward.
fn is_caught(ranks: usize, bug: Option<Bug>, is_forward: bool) -> bool {
    let group = Ranks::new(ThreadGroup::new(ranks).into_iter().map(|group| (Faulty::new(group, bug), backend())));
    let mut cases = cases(ranks, false).into_iter().filter(|case| (case.case.kind.name() != "backward") == is_forward);
    cases.any(|case| matches!(run_case(&group, &case), Status::Fail(_)))
}

#[test]
fn every_bug_of_divided_columns_is_caught() {
    for ranks in [2, 3, 8] {
        for is_forward in [true, false] {
            assert!(!is_caught(ranks, None, is_forward), "a correct group of {ranks} ranks passes");
        }
    }
    for (bug, in_forward, in_backward) in BUGS {
        assert!(!in_forward || is_caught(3, Some(bug), true), "{bug:?} forward");
        assert!(!in_backward || is_caught(3, Some(bug), false), "{bug:?} backward");
    }
}

/// The third number detects this bug, with two ranks and with eight.
#[test]
fn variance_merged_of_means_that_are_taken_as_exact_is_caught() {
    for ranks in [2, 4, 8] {
        assert!(is_caught(ranks, Some(Bug::NoDeviations), true), "{ranks} ranks");
    }
    let of_layer = |case: &rmsnorm_conformance::ranks::columns::ColumnsCase| case.case.norm == Norm::Layer;
    assert!(cases(2, false).iter().any(|case| case.apart && of_layer(case)));
}
