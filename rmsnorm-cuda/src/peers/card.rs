//! [`PeerCard`]: the data that a rank in its own process sends to the others.

use std::fmt;

use rmsnorm_spec::Error;

use super::users::Id;

/// The data that each rank of a group in several processes sends to the others: its memory and its
/// properties. The program sends the bytes to all ranks, for example through a file, a socket, MPI
/// or NCCL.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerCard([u8; PeerCard::BYTES]);

impl PeerCard {
    /// Bytes of a card.
    pub const BYTES: usize = 176;

    /// The bytes, for sending.
    pub const fn as_bytes(&self) -> &[u8; PeerCard::BYTES] {
        &self.0
    }

    /// A card from received bytes.
    pub const fn from_bytes(bytes: [u8; PeerCard::BYTES]) -> Self {
        PeerCard(bytes)
    }

    /// The contents of the card; `None` if the bytes are not a card.
    pub(super) fn facts(&self) -> Option<Facts> {
        let mut left = self.0.as_slice();
        (take::<8>(&mut left)? == *MAGIC).then_some(())?;
        let facts = Facts {
            version: take(&mut left)?,
            kernels: u64::from_le_bytes(take(&mut left)?),
            rank: u64::from_le_bytes(take(&mut left)?),
            ranks: u64::from_le_bytes(take(&mut left)?),
            bytes: u64::from_le_bytes(take(&mut left)?),
            arch: u32::from_le_bytes(take(&mut left)?),
            shared_per_block: u32::from_le_bytes(take(&mut left)?),
            process: take(&mut left)?,
            device: take(&mut left)?,
            memory: take(&mut left)?,
            handle: take(&mut left)?,
        };
        left.is_empty().then_some(facts)
    }
}

/// Shows the few fields that a reader can use.
impl fmt::Debug for PeerCard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.facts() {
            Some(Facts { rank, ranks, bytes, .. }) => {
                write!(f, "PeerCard(rank {rank} of {ranks}, {bytes} bytes)")
            }
            None => f.write_str("PeerCard(of no rank)"),
        }
    }
}

/// The first bytes of a card.
const MAGIC: &[u8; 8] = b"rmspeer1";

/// The contents of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// The version of this crate, padded with zeros.
    pub(super) version: [u8; 16],
    /// A hash of the kernels' sources.
    pub(super) kernels: u64,
    pub(super) rank: u64,
    pub(super) ranks: u64,
    /// The size of one rank's x in bytes.
    pub(super) bytes: u64,
    pub(super) arch: u32,
    pub(super) shared_per_block: u32,
    pub(super) process: Id,
    /// The device's UUID.
    pub(super) device: Id,
    pub(super) memory: Id,
    /// CUDA's handle of the memory.
    pub(super) handle: [u8; 64],
}

impl Facts {
    /// The contents as bytes.
    pub(super) fn card(&self) -> PeerCard {
        let fields: [&[u8]; 12] = [
            MAGIC,
            &self.version,
            &self.kernels.to_le_bytes(),
            &self.rank.to_le_bytes(),
            &self.ranks.to_le_bytes(),
            &self.bytes.to_le_bytes(),
            &self.arch.to_le_bytes(),
            &self.shared_per_block.to_le_bytes(),
            &self.process,
            &self.device,
            &self.memory,
            &self.handle,
        ];
        let mut card = [0; PeerCard::BYTES];
        for (to, from) in card.iter_mut().zip(fields.into_iter().flatten()) {
            *to = *from;
        }
        PeerCard(card)
    }

    /// The contents of all cards, if their ranks can form a group with this one.
    ///
    /// # Errors
    /// `InvalidArgument`, with the first rank that does not fit.
    pub(super) fn of_group(&self, cards: &[PeerCard]) -> Result<Vec<Facts>, Error> {
        let refuse = |rule: String| Err(Error::InvalidArgument { arg: "cards", rule });
        if cards.len() as u64 != self.ranks {
            return refuse(format!("expected {} cards, one per rank, got {}", self.ranks, cards.len()));
        }
        let mut group: Vec<Facts> = Vec::with_capacity(cards.len());
        for (rank, card) in cards.iter().enumerate() {
            let Some(facts) = card.facts() else {
                return refuse(format!("card {rank} was not made by a PeerSeat: pass the cards of all ranks, by rank"));
            };
            if let Some(differs) = self.differs(&facts, rank as u64) {
                return refuse(format!("all ranks must be alike, but rank {rank} has {differs}"));
            }
            if let Some(other) = group.iter().position(|other| other.process == facts.process) {
                return refuse(format!(
                    "each rank needs its own process, but ranks {other} and {rank} share one: use PeerGroup::in_process"
                ));
            }
            group.push(facts);
        }
        Ok(group)
    }

    /// The difference, in words, that keeps `other` from being card `rank` of this group.
    fn differs(&self, other: &Facts, rank: u64) -> Option<String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
        if other.version != self.version || other.kernels != self.kernels {
            return Some(format!(
                "version {} of rmsnorm-cuda, this rank has {}, or other kernels",
                text(&other.version),
                text(&self.version)
            ));
        }
        if (other.rank, other.ranks) != (rank, self.ranks) {
            return Some(format!("the card of rank {} of {}: pass the cards by rank", other.rank, other.ranks));
        }
        if other.bytes != self.bytes {
            return Some(format!("bytes = {}, this rank has {}: pass the same on all", other.bytes, self.bytes));
        }
        if (other.arch, other.shared_per_block) != (self.arch, self.shared_per_block) {
            return Some(format!("a device of sm_{}, this rank sm_{}, or other shared memory", other.arch, self.arch));
        }
        (rank == self.rank && other.memory != self.memory).then(|| "a card that this seat did not make".into())
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, left) = bytes.split_first_chunk()?;
    *bytes = left;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(rank: u64, ranks: u64) -> Facts {
        let own = |of: u8| [of + rank as u8; 16];
        Facts {
            version: *b"0.1.0\0\0\0\0\0\0\0\0\0\0\0",
            kernels: 7,
            rank,
            ranks,
            bytes: 1 << 20,
            arch: 90,
            shared_per_block: 232_448,
            process: own(10),
            device: own(20),
            memory: own(30),
            handle: std::array::from_fn(|byte| byte as u8 * 3 + rank as u8),
        }
    }

    #[test]
    fn a_card_says_what_was_put_on_it() {
        let card = facts(3, 8).card();
        assert_eq!(PeerCard::from_bytes(*card.as_bytes()).facts(), Some(facts(3, 8)));
        assert_eq!(format!("{card:?}"), "PeerCard(rank 3 of 8, 1048576 bytes)");
        assert_eq!(PeerCard::from_bytes([0; PeerCard::BYTES]).facts(), None);
    }

    /// The last field ends at the last byte of the card: none is cut off.
    #[test]
    fn cards_have_room_for_all() {
        let mut last = facts(0, 1);
        last.handle = [0xab; 64];
        assert_eq!(last.card().as_bytes().last(), Some(&0xab));
        assert_eq!(last.card().facts(), Some(last));
    }

    #[test]
    fn ranks_that_are_no_group_are_refused_by_name() {
        let own = facts(0, 3);
        let cards = [0, 1, 2].map(|rank| facts(rank, 3).card());
        assert_eq!(own.of_group(&cards).ok().map(|group| group.len()), Some(3));
        let with = |rank: usize, change: fn(&mut Facts)| {
            let mut facts = facts(rank as u64, 3);
            change(&mut facts);
            let mut cards = cards;
            cards[rank] = facts.card();
            match own.of_group(&cards) {
                Err(Error::InvalidArgument { arg: "cards", rule }) => rule,
                other => panic!("{other:?}"),
            }
        };
        for (rank, change, part) in [
            (
                1,
                (|facts| facts.version[2] = b'2') as fn(&mut Facts),
                "rank 1 has version 0.2.0 of rmsnorm-cuda, this rank has 0.1.0",
            ),
            (2, |facts| facts.kernels = 8, "rank 2 has version 0.1.0"),
            (2, |facts| facts.rank = 1, "rank 2 has the card of rank 1 of 3"),
            (2, |facts| facts.ranks = 4, "rank 2 has the card of rank 2 of 4"),
            (1, |facts| facts.bytes = 16, "rank 1 has bytes = 16, this rank has 1048576"),
            (1, |facts| facts.arch = 80, "rank 1 has a device of sm_80, this rank sm_90"),
            (2, |facts| facts.shared_per_block = 1, "rank 2 has a device of sm_90"),
            (2, |facts| facts.process = [11; 16], "ranks 1 and 2 share one"),
            (0, |facts| facts.memory = [9; 16], "rank 0 has a card that this seat did not make"),
        ] {
            let rule = with(rank, change);
            assert!(rule.contains(part), "{part:?} is not in {rule:?}");
        }
        for cards in [&cards[..2], &[cards[0], cards[1], PeerCard::from_bytes([1; PeerCard::BYTES])]] {
            assert!(matches!(own.of_group(cards), Err(Error::InvalidArgument { arg: "cards", .. })), "{cards:?}");
        }
    }
}
