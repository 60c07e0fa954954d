//! The suite of ranks detects each of these planted bugs, which real groups had.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::sync::Mutex;

use rmsnorm_conformance::Status;
use rmsnorm_conformance::ranks::{cases, run_case};
use rmsnorm_cpu::{CpuBackend, Isa};
use rmsnorm_dist::{Collective, GroupCall, Ranks, RowShares, Sharded, ShardedNorm, ThreadGroup};
use rmsnorm_spec::{AnyCall, AnyElement, Checked, DType, Error, NormBackend, NormSpec, Storage, bf16};

/// A bug in an exchange.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bug {
    // Parts that are sent to be added.
    OwnPartFirst,
    RankLeftOut,
    RankTwice,
    PartsInArrivalOrder,
    PartsOfOtherRows,
    PartsOfCallBefore,
    PartsRounded,
    LastRowOfShareMissing,
    OneElementLost,
    // Results that are sent back.
    ShareMissing,
    SharesExchanged,
    OwnShareMissing,
    LastShareIsFirst,
    ResultOfCallBefore,
    RanksDiffer,
    LastUnevenRowsMissing,
}

const BUGS: [Bug; 16] = [
    Bug::OwnPartFirst,
    Bug::RankLeftOut,
    Bug::RankTwice,
    Bug::PartsInArrivalOrder,
    Bug::PartsOfOtherRows,
    Bug::PartsOfCallBefore,
    Bug::PartsRounded,
    Bug::LastRowOfShareMissing,
    Bug::OneElementLost,
    Bug::ShareMissing,
    Bug::SharesExchanged,
    Bug::OwnShareMissing,
    Bug::LastShareIsFirst,
    Bug::ResultOfCallBefore,
    Bug::RanksDiffer,
    Bug::LastUnevenRowsMissing,
];

struct Faulty {
    group: ThreadGroup,
    bug: Option<Bug>,
    /// The bytes of the previous call's exchanges: parts, and results.
    before: Mutex<[Vec<u32>; 2]>,
}

impl Faulty {
    fn rank_of_ranks(&self) -> (usize, usize) {
        (Collective::<CpuBackend>::rank(&self.group), Collective::<CpuBackend>::ranks(&self.group))
    }

    /// Swaps these elements with the elements of the previous call, up to the shorter length.
    fn give_before<T: AnyElement>(&self, which: usize, elements: &mut [T]) {
        let now: Vec<u32> = elements.iter().map(|element| element.bits()).collect();
        let before = std::mem::replace(&mut self.before.lock().unwrap()[which], now);
        for (element, bits) in elements.iter_mut().zip(before) {
            *element = T::from_bits(bits);
        }
    }

    /// The shares of all ranks with the bug; `held` is the previous content.
    fn spoil<T: AnyElement>(&self, shares: &RowShares, held: &[T], to: &mut [T]) {
        let (rank, ranks) = self.rank_of_ranks();
        let keep = |to: &mut [T], rank: usize| {
            to[shares.elements(rank)].copy_from_slice(&held[shares.elements(rank)]);
        };
        match self.bug {
            Some(Bug::ShareMissing) => keep(to, 1),
            Some(Bug::OwnShareMissing) => keep(to, rank),
            Some(Bug::SharesExchanged) => {
                let (first, second) = (shares.elements(0), shares.elements(1));
                (0..second.len()).for_each(|i| to.swap(first.start + i, second.start + i));
            }
            Some(Bug::LastShareIsFirst) => {
                let last = shares.elements(ranks - 1);
                to.copy_within(..last.len(), last.start);
            }
            Some(Bug::ResultOfCallBefore) => self.give_before(1, to),
            Some(Bug::RanksDiffer) if rank == 1 => {
                for element in to.iter_mut().take(1) {
                    *element = T::from_bits(element.bits() ^ 1);
                }
            }
            Some(Bug::LastUnevenRowsMissing) => {
                let even = shares.units / ranks * ranks * shares.unit;
                to[even..].copy_from_slice(&held[even..]);
            }
            Some(_) | None => {}
        }
    }
}

impl Collective<CpuBackend> for Faulty {
    fn rank(&self) -> usize {
        self.rank_of_ranks().0
    }

    fn ranks(&self) -> usize {
        self.rank_of_ranks().1
    }

    fn all_to_all<T: AnyElement>(&self, shares: &RowShares, from: &[T], to: &mut [T]) -> Result<(), Error> {
        let (rank, ranks) = self.rank_of_ranks();
        Collective::<CpuBackend>::all_to_all(&self.group, shares, from, to)?;
        let (len, zero) = (to.len() / ranks, T::from_bits(0));
        if len == 0 {
            return Ok(());
        }
        match self.bug {
            Some(Bug::OwnPartFirst) => to[..(rank + 1) * len].rotate_right(len),
            Some(Bug::PartsInArrivalOrder) => to.rotate_left((rank + 1) % ranks * len),
            Some(Bug::RankLeftOut) => to[(ranks - 1) * len..].fill(zero),
            Some(Bug::RankTwice) => to.copy_within(..len, len),
            Some(Bug::PartsOfOtherRows) => {
                to.chunks_exact_mut(len).for_each(|part| part.rotate_left(shares.unit % len))
            }
            Some(Bug::PartsOfCallBefore) => self.give_before(0, to),
            Some(Bug::PartsRounded) if T::STORAGE == Storage::Float(DType::F32) => {
                for element in to.iter_mut() {
                    *element = T::from_bits(bf16::from_f32(f32::from_bits(element.bits())).to_f32().to_bits());
                }
            }
            Some(Bug::LastRowOfShareMissing) => to[len - shares.unit..len].fill(zero),
            Some(Bug::OneElementLost) => to[len / 2] = zero,
            Some(_) | None => {}
        }
        Ok(())
    }

    fn all_gather<T: AnyElement>(&self, shares: &RowShares, from: &[T], to: &mut [T]) -> Result<(), Error> {
        let held = to.to_vec();
        Collective::<CpuBackend>::all_gather(&self.group, shares, from, to)?;
        self.spoil(shares, &held, to);
        Ok(())
    }

    fn all_gather_in_place<T: AnyElement>(&self, shares: &RowShares, tensor: &mut [T]) -> Result<(), Error> {
        let held = tensor.to_vec();
        Collective::<CpuBackend>::all_gather_in_place(&self.group, shares, &mut *tensor)?;
        self.spoil(shares, &held, tensor);
        Ok(())
    }
}

fn backend() -> CpuBackend {
    CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap()
}

/// Whether a group of three ranks fails a case.
fn is_caught<N: ShardedNorm<Backend = CpuBackend> + Send>(rank: impl Fn(ThreadGroup) -> N) -> bool {
    let group = Ranks::new(ThreadGroup::new(3).into_iter().map(|group| (rank(group), backend())));
    cases(3, false).iter().any(|case| matches!(run_case(&group, case), Status::Fail(_)))
}

#[test]
fn every_bug_of_an_exchange_is_caught() {
    let rank = |bug| move |group| Sharded::new(backend(), Faulty { group, bug, before: Mutex::default() });
    assert!(!is_caught(rank(None)), "a correct group passes");
    for bug in BUGS {
        assert!(is_caught(rank(Some(bug))), "{bug:?}");
    }
}

/// A bug in the composition.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    /// Nothing is exchanged.
    OwnPartOnly,
    /// Every rank except the first omits the residual.
    ResidualOfFirstRankOnly,
    /// Every rank has a different eps.
    EpsOfRank,
    /// The norm has fewer columns.
    WeightOfNone,
    /// The mean square covers all ranks' columns.
    OffsetTwice,
}

struct WrongRank {
    norm: Sharded<CpuBackend, ThreadGroup>,
    wrong: Wrong,
}

impl ShardedNorm for WrongRank {
    type Backend = CpuBackend;

    fn rank(&self) -> usize {
        self.norm.rank()
    }

    fn ranks(&self) -> usize {
        self.norm.ranks()
    }

    fn launch(&self, spec: &NormSpec, call: GroupCall<'_, '_, CpuBackend>) -> Result<(), Error> {
        let GroupCall::Reduced(mut args) = call else { return call.unsupported() };
        let mut spec = *spec;
        match self.wrong {
            Wrong::OwnPartOnly => return self.norm.backend().launch(AnyCall::Forward(Checked::forward(spec, args)?)),
            Wrong::ResidualOfFirstRankOnly if self.rank() > 0 => (args.residual, args.residual_out) = (None, None),
            Wrong::ResidualOfFirstRankOnly => {}
            Wrong::EpsOfRank => spec.eps *= 1.0 + self.rank() as f32,
            Wrong::WeightOfNone if self.rank() == 2 => args.weight = None,
            Wrong::WeightOfNone => {}
            Wrong::OffsetTwice => spec.weight_offset *= 2.0,
        }
        self.norm.launch(&spec, GroupCall::Reduced(args))
    }
}

#[test]
fn every_wrong_composition_is_caught() {
    for wrong in [Wrong::OwnPartOnly, Wrong::EpsOfRank, Wrong::WeightOfNone, Wrong::OffsetTwice] {
        let is_caught = is_caught(|group| WrongRank { norm: Sharded::new(backend(), group), wrong });
        assert!(is_caught, "{wrong:?}");
    }
    // Ranks send different tensors: the group detects it, or waits until the deadline.
    let deadline = std::time::Duration::from_millis(200);
    let rank = |group: ThreadGroup| WrongRank {
        norm: Sharded::new(backend(), group.deadline(deadline)),
        wrong: Wrong::ResidualOfFirstRankOnly,
    };
    assert!(is_caught(rank));
}
