//! The forms of a norm that are measured.

use rmsnorm_core::{Activation, CastOrder, DType, DTypes, NormSpec};

/// A form of the norm: what is computed besides the statistics and the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The norm alone.
    Plain,
    /// The result multiplied by silu of a gate, as in Qwen3-Next.
    GateAfter,
    /// `x` multiplied by silu of a gate.
    GateBefore,
    /// Groups of columns.
    Groups,
    /// `GateBefore` and `Groups`, as in Mamba2.
    GateBeforeGroups,
    /// x_hat rounded before the weight, as in Llama. Backward is that of `Plain`.
    BeforeWeight,
    /// rstd rounded first, as in DeepSeek-V4. Backward is that of `Plain`.
    RstdFirst,
    /// The weight multiplied with x before the norm, as in Muse Spark.
    WeightFirst,
    /// Neither weight nor bias, as in OLMo, nor their gradients.
    NoWeight,
    /// f32 y and parameters of x in the dtype of the row, as in a norm before a router.
    ToF32,
    /// y in the dtype of the row of f32 x and parameters, as in an f32 residual stream.
    FromF32,
}

/// The number of groups of columns, as in Mamba2.
const GROUPS: usize = 8;

impl Form {
    /// All forms, in the order of reports.
    pub const ALL: [Form; 11] = [
        Form::Plain,
        Form::GateAfter,
        Form::GateBefore,
        Form::Groups,
        Form::GateBeforeGroups,
        Form::BeforeWeight,
        Form::RstdFirst,
        Form::WeightFirst,
        Form::NoWeight,
        Form::ToF32,
        Form::FromF32,
    ];

    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Form::Plain => "plain",
            Form::GateAfter => "gate_after",
            Form::GateBefore => "gate_before",
            Form::Groups => "groups8",
            Form::GateBeforeGroups => "gate_before_groups8",
            Form::BeforeWeight => CastOrder::BeforeWeight.name(),
            Form::RstdFirst => CastOrder::RstdFirst.name(),
            Form::WeightFirst => CastOrder::WeightFirst.name(),
            Form::NoWeight => "no_weight",
            Form::ToF32 => "to_f32",
            Form::FromF32 => "from_f32",
        }
    }

    /// The norm in this form.
    pub(crate) const fn of(self, spec: NormSpec) -> NormSpec {
        match self {
            Form::Plain | Form::NoWeight | Form::ToF32 | Form::FromF32 => spec,
            Form::GateAfter => spec.gate_after(Activation::Silu),
            Form::GateBefore => spec.gate_before(Activation::Silu),
            Form::Groups => spec.groups(GROUPS),
            Form::GateBeforeGroups => spec.gate_before(Activation::Silu).groups(GROUPS),
            Form::BeforeWeight => spec.cast_order(CastOrder::BeforeWeight),
            Form::RstdFirst => spec.cast_order(CastOrder::RstdFirst),
            Form::WeightFirst => spec.cast_order(CastOrder::WeightFirst),
        }
    }

    /// The dtypes of a call in a row of this dtype.
    pub(crate) const fn dtypes(self, dtype: DType) -> DTypes {
        match self {
            Form::ToF32 => DTypes { residual: dtype, ..DTypes::uniform(DType::F32) },
            Form::FromF32 => DTypes { activation: dtype, ..DTypes::uniform(DType::F32) },
            Form::Plain
            | Form::GateAfter
            | Form::GateBefore
            | Form::Groups
            | Form::GateBeforeGroups
            | Form::BeforeWeight
            | Form::RstdFirst
            | Form::WeightFirst
            | Form::NoWeight => DTypes::uniform(dtype),
        }
    }

    /// Whether y and x differ in dtype, unless both are f32. x is then the tensor of the residual
    /// stream.
    pub(crate) const fn is_cast(self) -> bool {
        matches!(self, Form::ToF32 | Form::FromF32)
    }

    /// Whether the call has a weight (and a bias, for layer norm).
    pub(crate) const fn has_weight(self) -> bool {
        !matches!(self, Form::NoWeight)
    }

    /// Whether the call has a gate.
    pub(crate) const fn has_gate(self) -> bool {
        self.of(NormSpec::rms(1, GROUPS, 0.0)).gate.is_some()
    }
}
