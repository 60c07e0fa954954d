//! A [`Case`] is one point on all axes of the suite. Its id is its written form.
//!
//! An id holds everything: axes, layout and seed. `rmsnorm conformance --case ID` therefore replays
//! exactly one case, on any machine and backend. [`profiles`](crate::case::profiles) has the list
//! of cases of each profile.

pub(crate) mod cast;
pub(crate) mod cast_orders;
pub(crate) mod coverage;
pub(crate) mod data;
pub(crate) mod dice;
pub(crate) mod family;
pub(crate) mod groups;
pub(crate) mod kind;
pub(crate) mod l2;
pub(crate) mod presence;
pub(crate) mod profiles;
pub(crate) mod quantized;
pub(crate) mod sums;

use std::fmt;
use std::iter::Peekable;
use std::str::FromStr;

use rmsnorm_spec::quant::QuantSpec;
use rmsnorm_spec::{
    Activation, CastOrder, DType, DTypes, Direction, GradReduction, Norm, NormSpec, Role, RowGroups, Slot, Tensor,
    TensorSet,
};

pub use self::family::Family;
use self::kind::Calls;
pub use self::kind::Kind;
use crate::run::memory::Placement;
use crate::testing::draw;

/// The property that a case checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trial {
    /// Every output lies inside its acceptance interval, and no other memory changes.
    Bounds,
    /// Repeated calls give the same bits, and a row gives the same bits in a smaller batch.
    Determinism {
        /// Number of calls.
        repeats: u32,
    },
    /// Relations that hold bit for bit and need no reference: scaling by two, negation, permutation
    /// of rows.
    Metamorphic,
}

/// The layout of a call's tensors in their buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Every tensor starts `offset` elements after an aligned address, with `pad` elements between
    /// rows.
    Uniform {
        /// Unused elements after each row.
        pad: usize,
        /// Elements between the aligned address and the first one.
        offset: usize,
    },
    /// Every tensor has a different padding and offset, drawn from this seed.
    Mixed(u32),
    /// Row stride in elements, so large that a 32-bit index overflows. The gap takes address space,
    /// but no memory if the backend supports it.
    Far(usize),
    /// Rows in groups. Every tensor has different paddings, gaps between groups and offset, drawn
    /// from the seed. In some tensors the gaps make all rows equidistant.
    Grouped {
        /// Rows per group.
        rows: usize,
        /// Seed of the paddings, gaps and offsets.
        seed: u32,
    },
}

/// Checked elements after a row and before the next, if rows are far apart.
const FAR_PAD: usize = 128;

impl Layout {
    /// Dense and aligned.
    pub const DENSE: Layout = Layout::Uniform { pad: 0, offset: 0 };

    /// The placement of a tensor whose rows have `cols` elements.
    pub(crate) fn placement(self, tensor: Tensor, cols: usize) -> Placement {
        match self {
            Layout::Uniform { pad, offset } => Placement { pad, offset, ..Placement::DENSE },
            Layout::Mixed(seed) => {
                let draw = draw(u64::from(seed), tensor, 0);
                let pad = [0, 1, 8, cols][(draw % 4) as usize];
                let (offset, reaches_stride) = ((draw >> 8) as usize % 8, (draw >> 16) % 2 == 1);
                Placement { pad, offset, reaches_stride, ..Placement::DENSE }
            }
            Layout::Far(stride) => {
                let apart = stride.saturating_sub(cols + FAR_PAD);
                Placement { pad: FAR_PAD, apart, ..Placement::DENSE }
            }
            Layout::Grouped { rows, seed } => {
                let mixed = Layout::Mixed(seed).placement(tensor, cols);
                let draw = draw(u64::from(seed), tensor, 0) >> 4;
                let gap = [0, 3, 8, 3 * cols][(draw % 4) as usize];
                let stride = (rows - 1) * (cols + mixed.pad) + cols + gap;
                Placement { groups: Some(RowGroups { rows, stride }), ..mixed }
            }
        }
    }
}

/// One case. `Display` writes its id, `FromStr` reads it back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// The property to check.
    pub trial: Trial,
    /// The calls.
    pub kind: Kind,
    /// The norm.
    pub norm: Norm,
    /// Rows of every matrix.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// The dtypes of activations, weight and residual.
    pub dtypes: DTypes,
    /// The optional tensors. An in-place call stores `residual_out` over `residual`.
    pub present: TensorSet,
    /// Added to the weight.
    pub weight_offset: f32,
    /// Where forward rounds to 16 bits on the way to `y`, and the place of the weight.
    pub cast_order: CastOrder,
    /// Added to the variance.
    pub eps: f32,
    /// How dweight and dbias are summed over rows.
    pub grad_reduction: GradReduction,
    /// The layout of the tensors.
    pub layout: Layout,
    /// The distribution of the inputs.
    pub family: Family,
    /// Seed of the inputs, canaries and paddings.
    pub seed: u32,
    /// The quantization of the result, if any.
    pub quant: Option<QuantSpec>,
    /// The number of matrices whose sum is `x`; 1 if `x` is one matrix.
    pub parts: usize,
    /// The function of the gate; silu if there is no gate.
    pub activation: Activation,
    /// The number of groups of columns, each with its own statistics.
    pub groups: usize,
    /// Whether `x` and `dx` have the dtype of the residual stream, which differs from that of `y`.
    pub casts: bool,
}

impl Case {
    /// A dense case without optional tensors; vary it with struct update syntax.
    pub const fn plain(kind: Kind, norm: Norm, dtype: DType, rows: usize, cols: usize) -> Self {
        Case {
            trial: Trial::Bounds,
            kind,
            norm,
            rows,
            cols,
            dtypes: DTypes::uniform(dtype),
            present: TensorSet::NONE,
            weight_offset: 0.0,
            cast_order: CastOrder::AtStore,
            eps: 1e-5,
            grad_reduction: GradReduction::Partials,
            layout: Layout::DENSE,
            family: Family::Randn,
            seed: 1,
            quant: None,
            parts: if kind.has_parts() { 2 } else { 1 },
            activation: Activation::Silu,
            groups: 1,
            casts: false,
        }
    }

    /// Columns of a group.
    pub(crate) const fn width(&self) -> usize {
        self.cols / self.groups
    }

    /// The dtype of `x`. In a single backward call `x` is the tensor that was normalized.
    pub(crate) const fn x_dtype(&self) -> DType {
        match self.kind.direction {
            Direction::Forward | Direction::QuantizedForward if self.casts => self.dtypes.residual,
            Direction::Forward | Direction::QuantizedForward => self.dtypes.activation,
            Direction::Backward => self.dtypes.residual,
        }
    }

    /// The `NormSpec` of its calls.
    pub fn spec(&self) -> NormSpec {
        let spec = NormSpec::new(self.norm, self.rows, self.cols, self.eps);
        let spec = spec.weight_offset(self.weight_offset).cast_order(self.cast_order).groups(self.groups);
        match self.kind.gate() {
            Some(Slot::Before) => spec.gate_before(self.activation),
            Some(Slot::After) => spec.gate_after(self.activation),
            None if self.kind.is_after() => spec.residual_after(),
            None => spec,
        }
    }

    /// The same case without the settings that its kind cannot have, so that a call has only one
    /// id.
    pub fn normalized(mut self) -> Self {
        let layer = self.norm == Norm::Layer;
        self.casts = self.casts && cast::KINDS.contains(&self.kind) && self.dtypes.residual != self.dtypes.activation;
        if !self.casts && self.dtypes.activation == DType::F32 {
            self.dtypes.residual = DType::F32;
        }
        // A backward call after a sum of parts needs the sum, which only a call with a residual
        // stores.
        let has_sum = self.kind.is_after() || self.kind.has_parts() && self.kind.has_backward();
        let sum = TensorSet::of(&[Tensor::Residual, Tensor::ResidualOut]);
        let given = if has_sum { self.present.union(sum) } else { self.present };
        // A gate before the norm has no residual, and the statistics are of the activations.
        let of_residual = sum.with(Tensor::DresidualOut).with(Tensor::Dresidual);
        let is_gated_before = self.kind.gate() == Some(Slot::Before);
        if is_gated_before || has_sum || self.kind.has_parts() || self.casts {
            // These make what is normalized, and so does a weight before the norm.
            self.cast_order = if self.cast_order.is_weight_first() { CastOrder::AtStore } else { self.cast_order };
        }
        let is_weight_first = self.cast_order.is_weight_first();
        let has_no_residual = is_gated_before || is_weight_first;
        let given = if has_no_residual { given.difference(of_residual) } else { given };
        let given = if is_weight_first { given.with(Tensor::Weight) } else { given };
        let given = if self.casts { given.difference(sum).with(Tensor::Dresidual) } else { given };
        let mut present = TensorSet::NONE;
        let ends = self.kind.has_backward();
        if self.kind.has_forward() {
            let statistics = |present: TensorSet, mean, rstd| {
                let present = present.set(mean, layer && (given.has(mean) || ends));
                present.set(rstd, given.has(rstd) || ends)
            };
            let may_be_lost = self.kind.calls == Calls::One && !self.kind.is_after();
            let sum_is_kept = given.has(Tensor::ResidualOut) || !may_be_lost;
            present = given.intersection(presence::of_norm(self.kind.direction, self.kind.pieces));
            present = present.set(Tensor::ResidualOut, given.has(Tensor::Residual) && sum_is_kept);
            present = statistics(present, Tensor::Mean, Tensor::Rstd);
            if !given.has(Tensor::Residual) && !self.casts {
                self.dtypes.residual = self.dtypes.activation;
            }
            if self.kind.is_after() && given.has(Tensor::Y) {
                let next = given.intersection(presence::NEXT).with(Tensor::Y);
                present = present.union(statistics(next, Tensor::NextMean, Tensor::NextRstd));
            }
        } else if !is_weight_first {
            self.cast_order = CastOrder::AtStore;
        }
        if has_no_residual {
            self.dtypes.residual = self.dtypes.activation;
        }
        if self.kind.gate().is_none() {
            self.activation = Activation::Silu;
        }
        if self.kind.is_after() || self.groups == 0 || !self.cols.is_multiple_of(self.groups) {
            self.groups = 1;
        }
        if ends {
            let mut gradients = given.intersection(presence::of_norm(Direction::Backward, self.kind.pieces));
            if self.kind.is_after() && !present.has(Tensor::Y) {
                // dy is both the gradient of the sum and the residual's gradient.
                gradients = gradients.without(Tensor::DresidualOut).without(Tensor::Dresidual);
            }
            if self.kind.calls == Calls::Sums && !given.has(Tensor::Dbias) {
                gradients = gradients.with(Tensor::Dweight);
            }
            present = present.union(gradients);
            present = present.set(Tensor::Mean, layer).with(Tensor::Rstd);
        } else {
            self.grad_reduction = GradReduction::Partials;
            if !present.iter().any(|tensor| tensor.role(self.kind.direction) == Role::Weight) {
                self.dtypes.weight = self.dtypes.activation;
            }
        }
        self.parts = if self.kind.has_parts() { self.parts.max(2) } else { 1 };
        self.quant = self.kind.is_quantized().then(|| {
            let quant = self.quant.unwrap_or(quantized::PLAIN);
            present = present.union(quantized::present(&quant, given));
            // A columnwise copy is made from the statistics that the call stores.
            if present.has(Tensor::CodesColumnwise) {
                present = present.with(Tensor::Rstd).set(Tensor::Mean, layer);
            }
            quantized::normalized(quant, (self.rows, self.cols), present)
        });
        // Parts have one common stride, which grouped rows do not allow.
        if self.kind.has_parts() {
            self.layout = match self.layout {
                Layout::Grouped { seed, .. } => Layout::Mixed(seed),
                Layout::Far(_) => Layout::DENSE,
                Layout::Uniform { .. } | Layout::Mixed(_) => self.layout,
            };
        }
        self.present = present;
        self
    }

    /// Elements of the largest buffer that a tensor may need, without its canaries.
    fn largest_tensor(&self) -> u128 {
        let rows = self.rows.max(1);
        let (rows, pad, offset) = match self.layout {
            Layout::Uniform { pad, offset } => (rows as u128, pad, offset),
            Layout::Mixed(_) => (rows as u128, self.cols, 0),
            Layout::Far(stride) if stride as u128 * self.rows as u128 > MAX_DISTANCE => return u128::MAX,
            Layout::Far(_) => (rows as u128, FAR_PAD, 0),
            // At most one padding and one gap per row, and the last group counts as whole.
            Layout::Grouped { rows: group, .. } => {
                (rows.div_ceil(group) as u128 * group as u128, self.cols.saturating_mul(4).saturating_add(8), 0)
            }
        };
        let row = self.cols.max(1) as u128 + pad as u128;
        row.saturating_mul(rows).saturating_mul(self.parts as u128).saturating_add(offset as u128)
    }
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trial::Bounds => f.write_str("bounds"),
            Trial::Determinism { repeats } => write!(f, "determinism{repeats}"),
            Trial::Metamorphic => f.write_str("metamorphic"),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layout::Uniform { pad, offset } => write!(f, "p{pad}o{offset}"),
            Layout::Mixed(seed) => write!(f, "mixed{seed}"),
            Layout::Far(stride) => write!(f, "far{stride}"),
            Layout::Grouped { rows, seed } => write!(f, "groups{rows}s{seed}"),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { trial, kind, norm, rows, cols, dtypes, weight_offset, eps, layout, family, seed, .. } = self;
        let (kind, norm, family, present) = (kind.name(), norm.name(), family.name(), presence::letters(self.present));
        write!(f, "{trial}:{kind}:{norm}:{dtypes}:{rows}x{cols}:{family}:eps{eps:e}:{present}:offset{weight_offset}:")?;
        write!(f, "{}:", self.cast_order.name())?;
        match self.grad_reduction {
            GradReduction::Partials => f.write_str("partials")?,
            GradReduction::Locks { groups } => write!(f, "locks{groups}")?,
            GradReduction::Atomics => f.write_str("atomics")?,
        }
        write!(f, ":{layout}:seed{seed}")?;
        if self.parts > 1 {
            write!(f, ":parts{}", self.parts)?;
        }
        if self.kind.gate().is_some() {
            write!(f, ":{}", self.activation.name())?;
        }
        if self.groups > 1 {
            write!(f, ":{OF_COLUMNS}{}", self.groups)?;
        }
        if self.casts {
            write!(f, ":{CASTS}")?;
        }
        self.quant.map_or(Ok(()), |quant| write!(f, ":{}", quantized::Id(quant)))
    }
}

/// What is before the number of groups of columns in an id.
const OF_COLUMNS: &str = "colgroups";

/// What an id of a case that [`casts`](Case::casts) has.
const CASTS: &str = "cast";

/// The error for a string that is not the id of a case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{id:?} is not the id of a conformance case: {what} {why}")]
pub struct ParseCaseError {
    /// The string.
    pub id: String,
    /// The first part that cannot be parsed.
    pub what: &'static str,
    /// The reason.
    pub why: &'static str,
}

/// Largest number of elements of a tensor, including its padding. The reference and its bounds are
/// whole f64 tensors, so this limit means tens of gigabytes. All profiles are far below it.
const MAX_ELEMENTS: u128 = 1 << 28;

/// Largest distance from the first row to the last, in elements, if rows are far apart.
const MAX_DISTANCE: u128 = 1 << 36;

impl FromStr for Case {
    type Err = ParseCaseError;

    fn from_str(id: &str) -> Result<Self, Self::Err> {
        let mut fields = id.split(':').peekable();
        let error = |what, why| ParseCaseError { id: id.into(), what, why };
        let case = parse_fields(&mut fields).map_err(|what| error(what, "cannot be read"))?;
        if case.largest_tensor() > MAX_ELEMENTS {
            return Err(error("the size", "exceeds 2^28 elements per tensor"));
        }
        // Ids are canonical. If the case prints as another id, a part of this id was ignored.
        if case.normalized().to_string() == id { Ok(case) } else { Err(error("a setting", "cannot be read")) }
    }
}

fn parse_fields<'a>(fields: &mut Peekable<impl Iterator<Item = &'a str>>) -> Result<Case, &'static str> {
    fn field<'a, T>(
        fields: &mut impl Iterator<Item = &'a str>,
        what: &'static str,
        parse: impl FnOnce(&'a str) -> Option<T>,
    ) -> Result<T, &'static str> {
        fields.next().and_then(parse).ok_or(what)
    }
    let trial = field(fields, "the trial", parse_trial)?;
    let kind = field(fields, "the kind", Kind::from_name)?;
    let norm = field(fields, "the norm", Norm::from_name)?;
    let dtypes = field(fields, "the dtypes", parse_dtypes)?;
    let (rows, cols) = field(fields, "the shape", parse_shape)?;
    let plain = Case::plain(kind, norm, dtypes.activation, rows, cols);
    Ok(Case {
        trial,
        dtypes,
        family: field(fields, "the family", Family::from_name)?,
        eps: field(fields, "eps", |field| parse_after("eps", field))?,
        present: field(fields, "the optional tensors", presence::parse)?,
        weight_offset: field(fields, "the weight offset", |field| parse_after("offset", field))?,
        cast_order: field(fields, "the cast order", CastOrder::from_name)?,
        grad_reduction: field(fields, "the reduction", parse_reduction)?,
        layout: field(fields, "the layout", parse_layout)?,
        seed: field(fields, "the seed", |field| parse_after("seed", field))?,
        parts: if kind.has_parts() { field(fields, "the parts", |field| parse_after("parts", field))? } else { 1 },
        activation: match kind.gate() {
            Some(_) => field(fields, "the activation", Activation::from_name)?,
            None => Activation::Silu,
        },
        groups: match fields.next_if(|field| field.starts_with(OF_COLUMNS)) {
            Some(groups) => parse_after(OF_COLUMNS, groups).ok_or("the groups of columns")?,
            None => 1,
        },
        casts: fields.next_if_eq(&CASTS).is_some(),
        quant: kind.is_quantized().then(|| field(fields, "the quantization", quantized::parse)).transpose()?,
        ..plain
    })
}

fn parse_after<T: FromStr>(prefix: &str, field: &str) -> Option<T> {
    field.strip_prefix(prefix)?.parse().ok()
}

fn parse_trial(field: &str) -> Option<Trial> {
    match field {
        "bounds" => Some(Trial::Bounds),
        "metamorphic" => Some(Trial::Metamorphic),
        _ => parse_after("determinism", field).map(|repeats| Trial::Determinism { repeats }),
    }
}

fn parse_shape(field: &str) -> Option<(usize, usize)> {
    let (rows, cols) = field.split_once('x')?;
    Some((rows.parse().ok()?, cols.parse().ok()?))
}

fn parse_dtypes(field: &str) -> Option<DTypes> {
    DTypes::ALL.into_iter().chain(DTypes::CASTS).find(|dtypes| dtypes.to_string() == field)
}

fn parse_reduction(field: &str) -> Option<GradReduction> {
    match field {
        "partials" => Some(GradReduction::Partials),
        "atomics" => Some(GradReduction::Atomics),
        _ => parse_after("locks", field).map(|groups| GradReduction::Locks { groups }),
    }
}

fn parse_layout(field: &str) -> Option<Layout> {
    if let Some(seed) = parse_after("mixed", field) {
        return Some(Layout::Mixed(seed));
    }
    if let Some(stride) = parse_after("far", field) {
        return Some(Layout::Far(stride));
    }
    if let Some((rows, seed)) = field.strip_prefix("groups").and_then(|field| field.split_once('s')) {
        let rows = rows.parse().ok().filter(|&rows| rows > 0)?;
        return Some(Layout::Grouped { rows, seed: seed.parse().ok()? });
    }
    let (pad, offset) = field.strip_prefix('p')?.split_once('o')?;
    Some(Layout::Uniform { pad: pad.parse().ok()?, offset: offset.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_of_a_full_case_reads_back() {
        let present = presence::OPTIONAL;
        let case = Case {
            trial: Trial::Determinism { repeats: 200 },
            dtypes: DTypes::uniform(DType::Bf16).widened(true, false),
            present,
            weight_offset: -0.5,
            cast_order: CastOrder::BeforeWeight,
            eps: 1.0e-12,
            grad_reduction: GradReduction::Locks { groups: 4 },
            layout: Layout::Uniform { pad: 8, offset: 3 },
            family: Family::ShiftedHi,
            ..Case::plain(Kind::END_TO_END, Norm::Layer, DType::Bf16, 3, 17)
        };
        let id = case.to_string();
        assert_eq!(
            id,
            "determinism200:end_to_end:layer_norm:bf16,f32,bf16:3x17:shifted_hi:eps1e-12:wbromsdWBkR:offset-0.5:\
             before_weight:locks4:p8o3:seed1"
        );
        assert_eq!(id.parse(), Ok(case));
    }

    #[test]
    fn id_with_a_damaged_part_names_that_part() {
        let id = Case::plain(Kind::FORWARD, Norm::Rms, DType::F32, 3, 17).to_string();
        for (from, to, what) in [
            ("bounds", "bound", "the trial"),
            ("forward", "onward", "the kind"),
            ("f32,f32,f32", "f32,bf16,f32", "the dtypes"),
            ("3x17", "3by17", "the shape"),
            ("randn", "random", "the family"),
            (":-:", ":q:", "the optional tensors"),
            (":-:", ":W:", "a setting"),
            (":seed1", "", "the seed"),
            (":seed1", ":seed1:more", "a setting"),
        ] {
            let parsed: Result<Case, _> = id.replacen(from, to, 1).parse();
            assert_eq!(
                parsed.map_err(|error| (error.what, error.why)),
                Err((what, "cannot be read")),
                "{from} -> {to}"
            );
        }
    }

    #[test]
    fn id_of_a_case_beyond_memory_is_refused() {
        let id = Case::plain(Kind::FORWARD, Norm::Rms, DType::F32, 3, 17).to_string();
        for (from, to) in [
            ("3x17", "18446744073709551615x18446744073709551615"),
            ("3x17", "16777217x16"),
            ("3x17", "0x268435457"),
            ("3x17", "268435457x0"),
            ("p0o0", "p18446744073709551615o0"),
            ("p0o0", "p0o18446744073709551615"),
            ("p0o0", "far18446744073709551615"),
            ("p0o0", "far22906492246"),
        ] {
            let parsed: Result<Case, _> = id.replacen(from, to, 1).parse();
            let text = parsed.map_err(|error| error.to_string()).expect_err("it is too large");
            assert!(text.ends_with(": the size exceeds 2^28 elements per tensor"), "{text}");
        }
        assert!(id.replacen("3x17", "16777216x16", 1).parse::<Case>().is_ok());
        assert!(id.replacen("p0o0", "far4294967333", 1).parse::<Case>().is_ok());
        assert!(id.replacen("p0o0", "groups4s7", 1).parse::<Case>().is_ok());
        let largest = id.replacen("p0o0", "groups4s7", 1).replacen("3x17", "16777216x2", 1);
        assert!(largest.parse::<Case>().is_err(), "with its gaps it exceeds memory");
        for rows in ["18446744073709551615", "4194304"] {
            let huge = id.replacen("p0o0", &format!("groups{rows}s7"), 1);
            assert!(huge.parse::<Case>().is_err(), "a group of {rows} rows exceeds memory, however many are there");
        }
        assert!(id.replacen("p0o0", "groups0s7", 1).parse::<Case>().is_err(), "groups of no rows");
    }
}
