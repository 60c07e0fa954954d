//! What `rmsnorm tune` asks of a backend.

use rmsnorm_spec::{DType, Norm, Problem};

use crate::{Entry, Identity, Table};

/// The name of a number in an entry of its own.
pub const VALUE: &str = "value";

/// A backend whose table can be measured: it shows the table as data, opens itself with another one, and says what may stand on a rung.
pub trait Tunable: Sized + Send + Sync {
    /// What a table of this device is for.
    fn identity(&self) -> Identity;

    /// The built-in table.
    fn built_in(&self) -> Table;

    /// The same device, with that table; kernels that were compiled are shared.
    ///
    /// # Errors
    /// Which rung is not legal, in words.
    fn with_table(&self, table: &Table) -> Result<Self, String>;

    /// What runs for this call, and nothing else: two tables that say the same of it need not both be measured.
    fn planned(&self, problem: &Problem) -> String;

    /// The ladders and numbers that are measured.
    fn slots(&self) -> Vec<Slot>;

    /// What may stand where `best` does (a number stands alone, as [`VALUE`]), for lengths above `above` up to `up_to`: what a model
    /// thinks best comes first. Some may not be legal beside the rest of a table, as [`with_table`](Self::with_table) says.
    fn candidates(&self, slot: &Slot, above: u32, up_to: u32, best: &Entry) -> Vec<Entry>;

    /// Forms of this backend that run other programs of the same table, which are proven too.
    fn other_forms(&self) -> Vec<Self> {
        Vec::new()
    }
}

/// A ladder, or a number, and the calls that look it up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its name in the table.
    pub name: String,
    /// Columns of one unit of a rung's length; 0 for a number, which no length has a part in.
    pub columns: usize,
    /// What is measured of it.
    pub calls: Vec<Calls>,
    /// Of a number, the shapes that it decides about, as rows and columns. A ladder's follow from its rungs.
    pub shapes: Vec<(usize, usize)>,
}

/// Calls of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calls {
    /// What is computed.
    pub kind: Kind,
    /// The norm; layer norm has a bias, and in backward its gradient.
    pub norm: Norm,
    /// The dtype of all tensors.
    pub dtype: DType,
}

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// y of x and a weight.
    Forward,
    /// The same with a residual added first.
    AddForward,
    /// dx and the gradient of the weight.
    Backward,
    /// Codes by a given scale.
    ToCodes,
    /// Codes by a scale of each row.
    ToCodesByRow,
    /// Codes by a scale of each 128 columns.
    ToCodesByBlock,
}

impl Kind {
    /// Every one, in the order of how often it is run.
    pub const ALL: [Kind; 6] =
        [Kind::Forward, Kind::Backward, Kind::AddForward, Kind::ToCodes, Kind::ToCodesByRow, Kind::ToCodesByBlock];

    /// The name on the command line.
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
