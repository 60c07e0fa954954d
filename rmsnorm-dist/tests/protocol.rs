//! Model check of the fused kernels' protocol: all interleavings of its steps.
//!
//! A rank writes its part into an empty slot of every other rank, waits until its own slots are
//! filled, reads each slot and empties it. The blocks of a call run concurrently; a call begins
//! when all blocks of the previous call have ended. Slots alternate between calls. If rows have
//! owners, a rank writes its part of a block's rows into the owner's slot. When the owner has all
//! parts, it writes the result into the slots of the other ranks. A block may have several rows, send
//! parts some rows ahead and receive results one row behind. Memory is sequentially consistent in
//! this model, which covers slots and epochs, not fences.

use std::collections::HashSet;

/// Variants of the protocol; all except `Right` are wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Variant {
    Right,
    /// The reader does not empty its slot.
    NotEmptied,
    /// The next call that uses the slot empties it, before reading it.
    EmptiedByNextCall,
    /// A rank that waits for one other rank assumes that all have arrived.
    WaitsForOne,
    /// All blocks share one slot, instead of one slot per block.
    SlotOfGroup,
}

/// The data that ranks send in a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Every rank sends its part to all.
    Parts,
    /// Every rank sends its part to the owner of a block's rows, and the owner sends the result to
    /// all. Rank r owns block r modulo the number of ranks.
    Owners,
    /// The same, but the owner keeps the result.
    OwnersKeep,
    /// One block has all rows, in the slots of the blocks, and an owner for each: it sends its parts
    /// so many rows ahead of the row that it adds, and receives the results of the row before.
    OwnersAhead(usize),
}

#[derive(Clone, Copy)]
struct Group {
    ranks: usize,
    blocks: usize,
    calls: u8,
    slots: usize,
    variant: Variant,
    /// The kinds of consecutive calls, repeated.
    kinds: &'static [Kind],
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    /// Writes this call's part into a slot, which must be empty.
    Fill(usize),
    /// Waits until the slot is filled, and reads it.
    Read(usize),
    Empty(usize),
}

/// The state of all ranks and slots.
#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    /// The current call of each rank.
    calls: Vec<u8>,
    /// The next step of each rank's blocks in the current call.
    positions: Vec<u8>,
    /// The call whose part the slot holds; 0 if empty.
    slots: Vec<u8>,
}

impl Group {
    fn cell(&self, receiver: usize, slot: usize, sender: usize, block: usize) -> usize {
        let block = if self.variant == Variant::SlotOfGroup { 0 } else { block };
        ((receiver * self.slots + slot) * self.ranks + sender) * self.blocks + block
    }

    /// The steps of a block in a call. Calls are numbered from 1.
    fn steps(&self, rank: usize, block: usize, call: u8) -> Vec<Step> {
        match self.kinds[usize::from(call - 1) % self.kinds.len()] {
            Kind::Parts => self.steps_of_parts(rank, block, call),
            Kind::Owners => self.steps_of_owners(rank, block, call, true),
            Kind::OwnersKeep => self.steps_of_owners(rank, block, call, false),
            Kind::OwnersAhead(ahead) if block == 0 => self.steps_ahead(rank, call, ahead),
            Kind::OwnersAhead(_) => Vec::new(),
        }
    }

    fn steps_of_owners(&self, rank: usize, block: usize, call: u8, sends: bool) -> Vec<Step> {
        let take = if sends { self.take(rank, block, call) } else { Vec::new() };
        [self.part(rank, block, call), self.add(rank, block, call, sends), take].concat()
    }

    fn steps_ahead(&self, rank: usize, call: u8, ahead: usize) -> Vec<Step> {
        let rows = 0..self.blocks;
        let part = |row: usize| if rows.contains(&row) { self.part(rank, row, call) } else { Vec::new() };
        let step = |now: usize| {
            let add = if rows.contains(&now) { self.add(rank, now, call, true) } else { Vec::new() };
            let take = if now > 0 { self.take(rank, now - 1, call) } else { Vec::new() };
            [part(now + ahead), add, take].concat()
        };
        (0..ahead).flat_map(part).chain((0..=self.blocks).flat_map(step)).collect()
    }

    /// Sends this rank's part of a row to the owner, if that is another rank.
    fn part(&self, rank: usize, row: usize, call: u8) -> Vec<Step> {
        let owner = row % self.ranks;
        let to = Step::Fill(self.cell(owner, usize::from(call) % self.slots, rank, row));
        if rank == owner { Vec::new() } else { vec![to] }
    }

    /// Receives the parts of a row that this rank owns, and sends the result.
    fn add(&self, rank: usize, row: usize, call: u8, sends: bool) -> Vec<Step> {
        if rank != row % self.ranks {
            return Vec::new();
        }
        let slot = usize::from(call) % self.slots;
        let peers = || (0..self.ranks).filter(|peer| *peer != rank);
        let from = |peer| self.cell(rank, slot, peer, row);
        let parts = peers().flat_map(|peer| [Step::Read(from(peer)), Step::Empty(from(peer))]);
        parts.chain(peers().filter(|_| sends).map(|peer| Step::Fill(self.cell(peer, slot, rank, row)))).collect()
    }

    /// Receives the result of a row that another rank owns.
    fn take(&self, rank: usize, row: usize, call: u8) -> Vec<Step> {
        let owner = row % self.ranks;
        let from = self.cell(rank, usize::from(call) % self.slots, owner, row);
        if rank == owner { Vec::new() } else { vec![Step::Read(from), Step::Empty(from)] }
    }

    fn steps_of_parts(&self, rank: usize, block: usize, call: u8) -> Vec<Step> {
        let slot = usize::from(call) % self.slots;
        let peers = || (0..self.ranks).filter(|peer| *peer != rank);
        let own = |peer| self.cell(rank, slot, peer, block);
        let mut steps = Vec::new();
        if self.variant == Variant::EmptiedByNextCall {
            steps.extend(peers().map(|peer| Step::Empty(own(peer))));
        }
        steps.extend(peers().map(|peer| Step::Fill(self.cell(peer, slot, rank, block))));
        for (i, peer) in peers().enumerate() {
            if i == 0 || self.variant != Variant::WaitsForOne {
                steps.push(Step::Read(own(peer)));
            }
            if !matches!(self.variant, Variant::NotEmptied | Variant::EmptiedByNextCall) {
                steps.push(Step::Empty(own(peer)));
            }
        }
        steps
    }

    /// Explores all interleavings. `Err` describes a failure in one of them.
    fn explore(&self) -> Result<usize, String> {
        let cells = self.ranks * self.slots * self.ranks * self.blocks;
        let start =
            State { calls: vec![1; self.ranks], positions: vec![0; self.ranks * self.blocks], slots: vec![0; cells] };
        let (mut seen, mut todo) = (HashSet::from([start.clone()]), vec![start]);
        while let Some(state) = todo.pop() {
            let mut has_moved = false;
            for rank in 0..self.ranks {
                for block in 0..self.blocks {
                    let Some(next) = self.advance(&state, rank, block)? else { continue };
                    has_moved = true;
                    if seen.insert(next.clone()) {
                        todo.push(next);
                    }
                }
            }
            if !has_moved && state.calls.iter().any(|call| *call <= self.calls) {
                return Err(format!("nobody can go on: ranks are in calls {:?}", state.calls));
            }
        }
        Ok(seen.len())
    }

    /// A block's next step, if it is not blocked.
    fn advance(&self, state: &State, rank: usize, block: usize) -> Result<Option<State>, String> {
        let call = state.calls[rank];
        let position = rank * self.blocks + block;
        let steps = self.steps(rank, block, call);
        let Some(step) = steps.get(usize::from(state.positions[position])).filter(|_| call <= self.calls) else {
            return Ok(None);
        };
        let mut next = state.clone();
        match *step {
            Step::Fill(cell) if state.slots[cell] != 0 => {
                return Err(format!("rank {rank} in call {call}: a slot still holds call {}", state.slots[cell]));
            }
            Step::Fill(cell) => next.slots[cell] = call,
            Step::Read(cell) if state.slots[cell] == 0 => return Ok(None),
            Step::Read(cell) if state.slots[cell] != call => {
                return Err(format!("rank {rank} in call {call} reads call {}", state.slots[cell]));
            }
            Step::Read(_) => {}
            Step::Empty(cell) => next.slots[cell] = 0,
        }
        next.positions[position] += 1;
        let of_rank = rank * self.blocks..(rank + 1) * self.blocks;
        let has_ended = |(block, position): (usize, &u8)| usize::from(*position) == self.steps(rank, block, call).len();
        if next.positions[of_rank.clone()].iter().enumerate().all(has_ended) {
            next.calls[rank] += 1;
            next.positions[of_rank].fill(0);
        }
        Ok(Some(next))
    }
}

/// Several blocks on two ranks, and groups of more ranks.
const GROUPS: [(usize, usize, u8); 4] = [(2, 2, 4), (2, 3, 4), (3, 1, 4), (4, 1, 3)];

fn explore(slots: usize, variant: Variant, (ranks, blocks, calls): (usize, usize, u8)) -> Result<usize, String> {
    Group { ranks, blocks, calls, slots, variant, kinds: &[Kind::Parts] }.explore()
}

#[test]
fn two_slots_are_right_in_every_order() {
    for group in GROUPS {
        let states = explore(2, Variant::Right, group).unwrap_or_else(|error| panic!("{group:?}: {error}"));
        assert!(states > 500, "{group:?}: {states} states are no exploration");
    }
}

/// A rank one call ahead would write into the slot that another rank is reading.
#[test]
fn one_slot_is_not_enough() {
    for group in GROUPS {
        let error = explore(1, Variant::Right, group).expect_err("a slot that is written too early");
        assert!(error.contains("still holds call"), "{group:?}: {error}");
    }
}

#[test]
fn other_protocols_fail() {
    for variant in [Variant::NotEmptied, Variant::EmptiedByNextCall] {
        for group in GROUPS {
            assert!(explore(2, variant, group).is_err(), "{variant:?} {group:?}");
        }
    }
    assert!(explore(2, Variant::WaitsForOne, (3, 1, 4)).is_err());
    assert!(explore(2, Variant::SlotOfGroup, (2, 2, 4)).is_err());
}

/// Calls of these kinds, repeated, with two slots.
fn explore_kinds(kinds: &'static [Kind], (ranks, blocks, calls): (usize, usize, u8)) -> Result<usize, String> {
    Group { ranks, blocks, calls, slots: 2, variant: Variant::Right, kinds }.explore()
}

/// With rows for all ranks and for some of them, for all kinds of neighbouring calls.
#[test]
fn owners_are_right_in_every_order() {
    use Kind::{Owners, OwnersKeep, Parts};

    for group in [(2, 1, 5), (2, 2, 5), (2, 3, 4), (3, 1, 5), (3, 2, 4), (4, 1, 4)] {
        for kinds in [&[Owners] as &[Kind], &[Owners, Parts], &[Owners, Owners, Parts, Parts]] {
            let states = explore_kinds(kinds, group).unwrap_or_else(|error| panic!("{kinds:?} {group:?}: {error}"));
            assert!(states > 25, "{kinds:?} {group:?}: {states} states are no exploration");
        }
    }
    for kinds in [&[OwnersKeep] as &[Kind], &[OwnersKeep, Owners], &[Parts, OwnersKeep]] {
        explore_kinds(kinds, (2, 2, 5)).unwrap_or_else(|error| panic!("{kinds:?}: {error}"));
    }
    // Each set of slots is next filled by a call of another kind.
    for kinds in [&[OwnersKeep, OwnersKeep, Owners, Owners] as &[Kind], &[OwnersKeep, OwnersKeep, Parts, Parts]] {
        explore_kinds(kinds, (2, 2, 6)).unwrap_or_else(|error| panic!("{kinds:?}: {error}"));
    }
    // One rank for each of three blocks.
    explore_kinds(&[OwnersKeep, Owners], (3, 3, 2)).unwrap_or_else(|error| panic!("{error}"));
}

/// Blocks with several rows, whose parts are sent one row ahead, or two.
#[test]
fn owners_of_several_rows_are_right_in_every_order() {
    use Kind::{OwnersAhead, Parts};

    let check = |kinds: &'static [Kind], group| {
        let states = explore_kinds(kinds, group).unwrap_or_else(|error| panic!("{kinds:?} {group:?}: {error}"));
        assert!(states > 25, "{kinds:?} {group:?}: {states} states are no exploration");
    };
    for kinds in [&[OwnersAhead(1)] as &'static [Kind], &[OwnersAhead(2)], &[OwnersAhead(2), OwnersAhead(1)]] {
        for group in [(2, 1, 5), (2, 2, 5), (2, 7, 5), (3, 1, 5), (3, 4, 4), (3, 7, 3)] {
            check(kinds, group);
        }
    }
    for kinds in [&[OwnersAhead(1), Parts] as &'static [Kind], &[OwnersAhead(2), OwnersAhead(2), Parts, Parts]] {
        for group in [(2, 1, 5), (2, 2, 5), (3, 1, 4)] {
            check(kinds, group);
        }
    }
}

/// A rank without rows receives nothing and gets two calls ahead. This is why missing rows have
/// owners, too.
#[test]
fn a_rank_must_own_something_where_owners_send_nothing() {
    for group in [(2, 1, 4), (3, 2, 4)] {
        let error = explore_kinds(&[Kind::OwnersKeep], group).expect_err("a slot that is written too early");
        assert!(error.contains("still holds call"), "{group:?}: {error}");
    }
}
