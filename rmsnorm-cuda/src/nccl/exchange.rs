//! The bytes that ranks exchange, as a pure function of the shares and the rank.

use std::ffi::c_int;
use std::ops::Range;

use rmsnorm_dist::RowShares;

/// The bytes that a rank sends to and receives from `peer`; either range may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Exchange {
    pub(super) peer: c_int,
    pub(super) send: Range<usize>,
    pub(super) receive: Range<usize>,
}

/// Share `r` goes to rank `r`. Part `r`, as long as this rank's share, comes from rank `r`. The
/// rank itself is included.
pub(super) fn all_to_all(shares: &RowShares, rank: usize, size: usize) -> impl Iterator<Item = Exchange> {
    let own = bytes(shares.elements(rank), size).len();
    each(*shares, move |shares, peer| (bytes(shares.elements(peer), size), peer * own..(peer + 1) * own))
}

/// This rank's share goes to every rank, and every share goes to its place in the tensor.
pub(super) fn all_gather(shares: &RowShares, rank: usize, size: usize) -> impl Iterator<Item = Exchange> {
    let own = bytes(shares.elements(rank), size);
    each(*shares, move |shares, peer| (own.clone(), bytes(shares.elements(peer), size)))
}

/// The size of a share in bytes, if all shares have the same size.
pub(super) fn equal(shares: &RowShares, size: usize) -> Option<usize> {
    let first = bytes(shares.elements(0), size).len();
    shares.units.is_multiple_of(shares.ranks).then_some(first)
}

/// The bytes of a range of elements.
pub(super) fn bytes(elements: Range<usize>, size: usize) -> Range<usize> {
    elements.start * size..elements.end * size
}

/// An exchange with every rank, in rank order.
fn each(
    shares: RowShares,
    ranges: impl Fn(&RowShares, usize) -> (Range<usize>, Range<usize>),
) -> impl Iterator<Item = Exchange> {
    (0..shares.ranks).zip(0..).map(move |(index, peer)| {
        let (send, receive) = ranges(&shares, index);
        Exchange { peer, send, receive }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes per element.
    const SIZE: usize = 2;

    /// Numbers of units: none, few, many, and near the number of ranks. Units are empty, or have
    /// one or three elements.
    fn all() -> impl Iterator<Item = RowShares> {
        let units = |ranks: usize| [0, 1, ranks - 1, ranks, ranks + 1, 2 * ranks, 3 * ranks + 1, 17];
        let shares =
            move |ranks| units(ranks).into_iter().flat_map(move |units| [0, 1, 3].map(|unit| (units, unit, ranks)));
        [1, 2, 3, 4, 8].into_iter().flat_map(shares).map(|(units, unit, ranks)| RowShares { units, unit, ranks })
    }

    /// Every byte of every rank's tensor is different.
    fn tensor(rank: usize, len: usize) -> Vec<usize> {
        (0..len).map(|index| 1_000_000 * (rank + 1) + index).collect()
    }

    /// Runs the exchanges of all ranks; every send must match a receive.
    fn run(ranks: usize, from: &[Vec<usize>], to: &mut [Vec<usize>], exchanges: impl Fn(usize) -> Vec<Exchange>) {
        let all: Vec<Vec<Exchange>> = (0..ranks).map(exchanges).collect();
        for (receiver, exchanges) in all.iter().enumerate() {
            assert_eq!(exchanges.iter().map(|it| it.peer as usize).collect::<Vec<_>>(), Vec::from_iter(0..ranks));
            for Exchange { peer, receive, .. } in exchanges {
                let sent = &all[*peer as usize][receiver].send;
                assert_eq!(sent.len(), receive.len(), "{peer} to {receiver}");
                to[receiver][receive.clone()].copy_from_slice(&from[*peer as usize][sent.clone()]);
            }
        }
    }

    #[test]
    fn all_to_all_gives_every_rank_its_share_of_all() {
        for shares in all() {
            let own = |rank| shares.elements(rank).len() * SIZE;
            let from = Vec::from_iter((0..shares.ranks).map(|rank| tensor(rank, shares.len() * SIZE)));
            let mut to = Vec::from_iter((0..shares.ranks).map(|rank| vec![0; own(rank) * shares.ranks]));
            run(shares.ranks, &from, &mut to, |rank| all_to_all(&shares, rank, SIZE).collect());
            for (rank, to) in to.iter().enumerate() {
                let expected = from.iter().flat_map(|from| &from[bytes(shares.elements(rank), SIZE)]);
                assert!(to.iter().eq(expected), "{shares:?}, rank {rank}");
            }
        }
    }

    #[test]
    fn all_gather_gives_every_rank_all_shares() {
        for shares in all() {
            let from = Vec::from_iter((0..shares.ranks).map(|rank| tensor(rank, shares.len() * SIZE)));
            let mut to = from.clone();
            run(shares.ranks, &from, &mut to, |rank| all_gather(&shares, rank, SIZE).collect());
            let own = |rank: usize| from[rank][bytes(shares.elements(rank), SIZE)].iter();
            for to in to {
                assert!(to.iter().eq((0..shares.ranks).flat_map(own)), "{shares:?}");
            }
        }
    }

    /// With equal shares, a rank's share starts at its rank times their length, as NCCL requires.
    #[test]
    fn equal_shares_are_found() {
        for shares in all() {
            let lens = Vec::from_iter((0..shares.ranks).map(|rank| bytes(shares.elements(rank), SIZE)));
            let expected =
                lens.iter().enumerate().all(|(rank, it)| it.len() == lens[0].len() && it.start == rank * it.len());
            let found = equal(&shares, SIZE);
            // Shares of empty units always have equal sizes; `equal` is not called for them.
            assert!(found.is_some() == expected || shares.is_empty(), "{shares:?}");
            assert!(found.is_none_or(|len| len == lens[0].len()), "{shares:?}");
        }
    }

    /// A rank that takes part in a call always sends or receives: no empty group is started.
    #[test]
    fn every_rank_has_something_to_do_if_any_has() {
        for shares in all().filter(|shares| shares.ranks > 1 && !shares.is_empty()) {
            for rank in 0..shares.ranks {
                let is_work =
                    |it: &Exchange| it.peer as usize != rank && !(it.send.is_empty() && it.receive.is_empty());
                assert!(all_to_all(&shares, rank, SIZE).any(|it| is_work(&it)), "{shares:?}, rank {rank}");
                assert!(all_gather(&shares, rank, SIZE).any(|it| is_work(&it)), "{shares:?}, rank {rank}");
            }
        }
    }
}
