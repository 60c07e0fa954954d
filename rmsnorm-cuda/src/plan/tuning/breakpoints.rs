//! Row lengths at which plans change, for the conformance suite.

use std::collections::BTreeSet;

use rmsnorm_gpu::tuning::{Ladder, find};

use super::data::PACKS;
use super::{Ladders, Tables, Tuning};
use crate::plan::Tile;

impl Tuning {
    /// Lengths, in columns, after which the threads of at least three kinds of calls of one width
    /// change their number of packs, or stop having a row alone. Rows of more than 32768 columns
    /// belong to the stress profile.
    pub(crate) fn cols_breakpoints(&self) -> Vec<usize> {
        let widths = self.widths.iter().zip(PACKS);
        let all: BTreeSet<usize> = widths.flat_map(|(tables, pack)| tables.breakpoints(pack as usize)).collect();
        all.into_iter().collect()
    }
}

impl Tables {
    /// The same for one width; a pack has `pack` columns.
    fn breakpoints(&self, pack: usize) -> impl Iterator<Item = usize> {
        let Tables { forward, backward, to_codes: _, finds_scale: _ } = self;
        let kinds = move || forward.iter().chain(backward);
        let limits = kinds().flat_map(Ladders::all).flat_map(|ladder| ladder.iter().map(|rung| rung.up_to as usize));
        let limits: BTreeSet<usize> = limits.filter(|packs| pack * packs <= 1 << 15).collect();
        let changes = move |packs: &usize| kinds().filter(|kind| kind.changes_after(*packs)).count() >= 3;
        limits.into_iter().filter(changes).map(move |packs| pack * packs)
    }
}

impl Ladders {
    fn all(&self) -> [&Ladder<Tile>; 3] {
        [&self.cluster, &self.block, &self.long]
    }

    /// Whether a thread's packs, or whether it has a row alone, change from one rung to the next.
    fn changes_after(&self, packs: usize) -> bool {
        let tile = |packs| self.all().into_iter().find_map(|ladder| find(ladder, packs));
        let thread = |packs: usize, tile: Tile| {
            let threads = (tile.cluster * tile.threads_per_row) as usize;
            (packs.div_ceil(threads), threads == 1)
        };
        match (tile(packs), tile(packs + 1)) {
            (Some(before), Some(after)) => thread(packs, before) != thread(packs + 1, after),
            (before, after) => before != after,
        }
    }
}
