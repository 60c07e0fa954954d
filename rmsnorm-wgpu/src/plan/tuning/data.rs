//! Tables as data, and their validation.

use std::sync::OnceLock;

use rmsnorm_gpu::tuning::{Ladder, replace, revision_of, rises, to_rungs};
use rmsnorm_tuning::{Entry, Kept, Table};

use super::{Division, MOST_PACKS, Tuning, division};

/// Increased when tables change their meaning although shaders and built-in rungs do not change.
const REVISION: &str = "1";

/// Maximum packs per thread: in backward, and if a pack takes twice the registers.
const MOST_BACKWARD_PACKS: u32 = 5;
const MOST_WIDE_PACKS: u32 = 4;

/// The shortest rows that may stream. In shorter rows most threads would add zeros only, in chains
/// that are too long.
const LEAST_STREAMING: u32 = 1024;

/// Threads of a workgroup.
const MOST_THREADS: u32 = 1024;

/// A ladder of [`Tuning`], by its index there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Forward(usize),
    ToCodes,
    Backward(usize),
}

const FORWARD: [&str; 4] = ["rms", "layer", "layer_add", "wide"];
const BACKWARD: [&str; 4] = ["one_gradient", "two_gradients", "f16", "wide"];

impl Name {
    /// Every ladder.
    pub(crate) fn all() -> Vec<Name> {
        let (forward, backward) = ((0..FORWARD.len()).map(Name::Forward), (0..BACKWARD.len()).map(Name::Backward));
        forward.chain([Name::ToCodes]).chain(backward).collect()
    }

    /// Maximum packs per thread in a rung.
    const fn most_packs(self) -> u32 {
        match self {
            // The last ones are for f32.
            Name::Forward(3) | Name::Backward(3) => MOST_WIDE_PACKS,
            Name::Forward(_) | Name::ToCodes => MOST_PACKS,
            Name::Backward(_) => MOST_BACKWARD_PACKS,
        }
    }

    /// `forward.rms`.
    pub(crate) fn text(self) -> String {
        match self {
            Name::Forward(table) => format!("forward.{}", FORWARD[table]),
            Name::ToCodes => "to_codes".into(),
            Name::Backward(table) => format!("backward.{}", BACKWARD[table]),
        }
    }
}

impl Tuning {
    /// The whole table as data.
    pub(crate) fn to_table(&self) -> Table {
        let packs = |packs| Entry::none().with("packs", packs);
        let rungs = |name| match name {
            Name::Forward(table) => to_rungs(&self.forward[table], packs),
            Name::ToCodes => to_rungs(&self.to_codes, packs),
            Name::Backward(table) => to_rungs(&self.backward[table], Division::to_entry),
        };
        let ladders = Name::all().into_iter().map(|name| (name.text(), rungs(name))).collect();
        Table { numbers: Default::default(), ladders }
    }

    /// The table of this data, if plans can use it on any device.
    ///
    /// # Errors
    /// A message that says which entry is invalid and why.
    pub(crate) fn from_table(table: &Table) -> Result<Tuning, String> {
        let mut tuning = Tuning::H200.clone();
        table.has_no_more_than(&tuning.to_table())?;
        for name in Name::all() {
            match name {
                Name::Forward(index) => read(table, name, &mut tuning.forward[index], |entry| packs(entry, name))?,
                Name::ToCodes => read(table, name, &mut tuning.to_codes, |entry| packs(entry, name))?,
                Name::Backward(index) => {
                    read(table, name, &mut tuning.backward[index], |entry| Division::from_entry(entry, name))?;
                }
            }
        }
        Ok(tuning)
    }

    /// A hash of the shaders and the built-in table that a measured table is valid for.
    pub(crate) fn revision() -> &'static str {
        static REVISION_OF_THIS: OnceLock<String> = OnceLock::new();
        REVISION_OF_THIS.get_or_init(|| revision_of(rmsnorm_shaders::REVISION, &Tuning::H200.to_table(), REVISION))
    }
}

/// Replaces a ladder with the one of a table, if valid.
fn read<T: Clone + PartialEq>(
    table: &Table,
    name: Name,
    ladder: &mut Ladder<T>,
    best: impl Fn(&Entry) -> Result<T, String>,
) -> Result<(), String> {
    let text = name.text();
    replace(ladder, table, &text, best)?;
    if !rises(ladder) {
        return Err(format!("{text}: its limits do not rise"));
    }
    // The start of each rung, and of the rest after the last.
    let begins = std::iter::once(0).chain(ladder.iter().map(|rung| rung.up_to));
    let bests = ladder.iter().map(|rung| rung.best.is_some()).chain([false]);
    if begins.zip(bests).any(|(above, is_on_chip)| !is_on_chip && above < LEAST_STREAMING - 1) {
        return Err(format!("{text}: some rows of less than {LEAST_STREAMING} pairs of quads have no packs"));
    }
    Ok(())
}

/// Packs per thread of forward.
fn packs(entry: &Entry, name: Name) -> Result<u32, String> {
    entry.has_only(&["packs"])?;
    within("packs", entry.number("packs")?, name.most_packs())
}

fn within(name: &str, number: u32, most: u32) -> Result<u32, String> {
    if (1..=most).contains(&number) {
        return Ok(number);
    }
    Err(format!("{name} is {number}, which is not from 1 to {most}"))
}

impl Division {
    /// The table entry of this division.
    pub(crate) fn to_entry(self) -> Entry {
        let Division { without_idle: (packs, threads), most, .. } = self;
        Entry::none().with_list("whole", packs).with("threads", threads).with("most", most)
    }

    /// Reads a table entry.
    ///
    /// # Errors
    /// A message that says what is missing, unexpected or invalid.
    fn from_entry(entry: &Entry, name: Name) -> Result<Division, String> {
        /// Lists in use; few and short, never freed.
        static LISTS: Kept<Vec<u32>> = Kept::new();
        entry.has_only(&["whole", "threads", "most"])?;
        let whole = entry.list("whole")?;
        if whole.len() > MOST_BACKWARD_PACKS as usize {
            return Err(format!("whole has {} numbers, which are more than {MOST_BACKWARD_PACKS}", whole.len()));
        }
        whole.iter().try_for_each(|packs| within("whole", *packs, MOST_BACKWARD_PACKS).map(|_| ()))?;
        let threads = within("threads", entry.number("threads")?, MOST_THREADS)?;
        let most = within("most", entry.number("most")?, name.most_packs())?;
        Ok(division(LISTS.keep(whole.to_vec()), threads, most))
    }
}
