//! Converts tables to data and back.

use std::sync::OnceLock;

use rmsnorm_gpu::tuning::{Ladder, replace, revision_of, to_rungs};
use rmsnorm_tuning::{Entry, Table};

use super::{Ladders, Tuning};
use crate::plan::Tile;

/// Increase it when the meaning of tables changes, but neither kernels nor built-in rungs do.
const REVISION: &str = "1";

/// The key of [`Tuning::split_bytes`], and its largest value: more than any L2.
pub(crate) const SPLIT_BYTES: &str = "split_bytes";
pub(super) const MOST_SPLIT_BYTES: u64 = 1 << 30;

/// Where a row is kept, in the order of [`Ladders`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Cluster,
    Block,
    Long,
}

impl Place {
    const ALL: [Place; 3] = [Place::Cluster, Place::Block, Place::Long];

    const fn name(self) -> &'static str {
        match self {
            Place::Cluster => "cluster",
            Place::Block => "block",
            Place::Long => "long",
        }
    }
}

/// A ladder of [`super::Tables`], with its index there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Forward(usize, Place),
    Backward(usize, Place),
    ToCodes(usize),
    FindsScale,
}

/// A ladder of a width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) width: usize,
    pub(crate) which: Which,
}

const WIDTHS: [&str; 2] = ["16", "32"];
/// Columns of a pack, for each width.
pub(super) const PACKS: [u32; 2] = [8, 4];
const FORWARD: [&str; 4] = ["rms", "rms_residual", "layer", "layer_residual"];
const BACKWARD: [&str; 2] = ["one_sum", "two_sums"];
const TO_CODES: [&str; 4] = ["tensor", "row", "block", "layer"];

impl Name {
    /// Every ladder that plans use.
    pub(crate) fn all() -> Vec<Name> {
        let mut all = Vec::new();
        for width in 0..WIDTHS.len() {
            let forward = (0..FORWARD.len()).flat_map(|table| Place::ALL.map(|place| Which::Forward(table, place)));
            let on_chip = [Place::Cluster, Place::Block];
            let backward = (0..BACKWARD.len()).flat_map(|table| on_chip.map(|place| Which::Backward(table, place)));
            let to_codes = (0..TO_CODES.len()).map(Which::ToCodes);
            let names = forward.chain(backward).chain(to_codes).chain([Which::FindsScale]);
            all.extend(names.map(|which| Name { width, which }));
        }
        all
    }

    /// For example `16.forward.rms.block`: bits of the widest matrix, and the kind of call.
    pub(crate) fn text(self) -> String {
        let width = WIDTHS[self.width];
        match self.which {
            Which::Forward(table, place) => format!("{width}.forward.{}.{}", FORWARD[table], place.name()),
            Which::Backward(table, place) => format!("{width}.backward.{}.{}", BACKWARD[table], place.name()),
            Which::ToCodes(table) => format!("{width}.to_codes.{}", TO_CODES[table]),
            Which::FindsScale => format!("{width}.finds_scale"),
        }
    }

    /// Columns of a pack.
    pub(crate) const fn pack(self) -> u32 {
        PACKS[self.width]
    }
}

impl Ladders {
    const fn at(&self, place: Place) -> &Ladder<Tile> {
        match place {
            Place::Cluster => &self.cluster,
            Place::Block => &self.block,
            Place::Long => &self.long,
        }
    }

    const fn at_mut(&mut self, place: Place) -> &mut Ladder<Tile> {
        match place {
            Place::Cluster => &mut self.cluster,
            Place::Block => &mut self.block,
            Place::Long => &mut self.long,
        }
    }
}

impl Tuning {
    /// The ladder with this name.
    pub(crate) const fn ladder(&self, Name { width, which }: Name) -> &Ladder<Tile> {
        let tables = &self.widths[width];
        match which {
            Which::Forward(table, place) => tables.forward[table].at(place),
            Which::Backward(table, place) => tables.backward[table].at(place),
            Which::ToCodes(table) => &tables.to_codes[table],
            Which::FindsScale => &tables.finds_scale,
        }
    }

    pub(in crate::plan) const fn ladder_mut(&mut self, Name { width, which }: Name) -> &mut Ladder<Tile> {
        let tables = &mut self.widths[width];
        match which {
            Which::Forward(table, place) => tables.forward[table].at_mut(place),
            Which::Backward(table, place) => tables.backward[table].at_mut(place),
            Which::ToCodes(table) => &mut tables.to_codes[table],
            Which::FindsScale => &mut tables.finds_scale,
        }
    }

    /// The whole table as data.
    pub(crate) fn to_table(&self) -> Table {
        let rungs = |name| to_rungs(self.ladder(name), Tile::to_entry);
        Table {
            numbers: [(SPLIT_BYTES.to_owned(), self.split_bytes)].into(),
            ladders: Name::all().into_iter().map(|name| (name.text(), rungs(name))).collect(),
        }
    }

    /// The table of this data, if it is legal on every device.
    ///
    /// # Errors
    /// The first rule that it breaks, in words.
    pub(crate) fn from_table(table: &Table) -> Result<Tuning, String> {
        let mut tuning = Tuning::H200.clone();
        table.has_no_more_than(&tuning.to_table())?;
        tuning.split_bytes = table.number(SPLIT_BYTES, 0, MOST_SPLIT_BYTES)?;
        for name in Name::all() {
            replace(tuning.ladder_mut(name), table, &name.text(), Tile::from_entry)?;
        }
        tuning.check()?;
        Ok(tuning)
    }

    /// Identifies the kernels and built-in tables that a table was measured with.
    pub(crate) fn revision() -> &'static str {
        static REVISION_OF_THIS: OnceLock<String> = OnceLock::new();
        REVISION_OF_THIS.get_or_init(|| revision_of(rmsnorm_kernels::REVISION, &Tuning::H200.to_table(), REVISION))
    }
}

impl Tile {
    /// The tile as an entry of a table.
    pub(crate) fn to_entry(self) -> Entry {
        Entry::none()
            .with_unless(1, "cluster", self.cluster)
            .with("threads", self.threads_per_row)
            .with_unless(1, "groups", self.groups)
            .with_unless(1, "unroll", self.unroll)
            .with_unless(0, "stages", self.stages)
            .with_unless(0, "overlapped", self.is_overlapped.into())
            .with("blocks", self.blocks_per_sm)
    }

    /// The tile of an entry.
    ///
    /// # Errors
    /// The missing or unknown field, in words.
    pub(crate) fn from_entry(entry: &Entry) -> Result<Tile, String> {
        entry.has_only(&["cluster", "threads", "groups", "unroll", "stages", "overlapped", "blocks"])?;
        let is_overlapped = match entry.number_or(0, "overlapped")? {
            0 => false,
            1 => true,
            other => return Err(format!("overlapped must be 0 or 1, got {other}")),
        };
        Ok(Tile {
            cluster: entry.number_or(1, "cluster")?,
            threads_per_row: entry.number("threads")?,
            groups: entry.number_or(1, "groups")?,
            unroll: entry.number_or(1, "unroll")?,
            stages: entry.number_or(0, "stages")?,
            is_overlapped,
            blocks_per_sm: entry.number("blocks")?,
            ..Tile::NONE
        })
    }
}
