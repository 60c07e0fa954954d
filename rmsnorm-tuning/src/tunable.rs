//! The interface between `rmsnorm tune` and a backend.

use rmsnorm_spec::{DType, Norm, Problem};

use crate::{Entry, Identity, Table};

/// The number's name in an entry that stands for a single number.
pub const VALUE: &str = "value";

/// A backend whose table can be measured. It shows its table as data, opens itself with another
/// table, and proposes candidates for each rung.
pub trait Tunable: Sized + Send + Sync {
    /// The setup that a table of this device is made for.
    fn identity(&self) -> Identity;

    /// The built-in table.
    fn built_in(&self) -> Table;

    /// The same device with another table. Compiled kernels are shared.
    ///
    /// # Errors
    /// A message that names the rung that is not legal.
    fn with_table(&self, table: &Table) -> Result<Self, String>;

    /// A description of the kernels that run for this call. Two tables with the same description
    /// need only one measurement.
    fn planned(&self, problem: &Problem) -> String;

    /// The ladders and numbers that are measured.
    fn slots(&self) -> Vec<Slot>;

    /// Entries to try instead of `best`, for lengths above `above` up to `up_to`, most promising
    /// first by the backend's model. For a number, an entry has one number, [`VALUE`]. Some entries
    /// may be refused by [`with_table`](Self::with_table), because they conflict with the rest of
    /// the table.
    fn candidates(&self, slot: &Slot, above: u32, up_to: u32, best: &Entry) -> Vec<Entry>;

    /// Variants of this backend that run other programs from the same table. They are tested too.
    fn other_forms(&self) -> Vec<Self> {
        Vec::new()
    }
}

/// A ladder or a number, and the calls that look it up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its name in the table.
    pub name: String,
    /// Columns per unit of `up_to`; 0 for a number, which does not depend on the row length.
    pub columns: usize,
    /// The calls that are measured.
    pub calls: Vec<Calls>,
    /// For a number: the shapes whose plan it decides, as (rows, columns). For a ladder: empty; its
    /// shapes follow from its rungs.
    pub shapes: Vec<(usize, usize)>,
}

/// Calls of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calls {
    /// The operation.
    pub kind: Kind,
    /// The norm. Layer norm has a bias, and its gradient in backward.
    pub norm: Norm,
    /// The dtype of all tensors.
    pub dtype: DType,
}

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// y from x and the weight.
    Forward,
    /// As `Forward`, with a residual added to x first.
    AddForward,
    /// dx and the weight's gradient.
    Backward,
    /// FP8 or int8 values, with a scale given by the caller.
    ToCodes,
    /// FP8 or int8 values, with one scale per row.
    ToCodesByRow,
    /// FP8 or int8 values, with one scale per 128 columns of a row.
    ToCodesByBlock,
}

impl Kind {
    /// All kinds, the most frequent first.
    pub const ALL: [Kind; 6] =
        [Kind::Forward, Kind::Backward, Kind::AddForward, Kind::ToCodes, Kind::ToCodesByRow, Kind::ToCodesByBlock];

    /// The kind's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Forward => "forward",
            Kind::AddForward => "add_forward",
            Kind::Backward => "backward",
            Kind::ToCodes => "to_codes",
            Kind::ToCodesByRow => "to_codes_by_row",
            Kind::ToCodesByBlock => "to_codes_by_block",
        }
    }
}
