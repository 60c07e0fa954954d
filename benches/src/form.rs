//! The forms of a norm that are measured.

use rmsnorm_core::{Activation, CastOrder, NormSpec};

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
}

/// The number of groups of columns, as in Mamba2.
const GROUPS: usize = 8;

impl Form {
    /// All forms, in the order of reports.
    pub const ALL: [Form; 7] = [
        Form::Plain,
        Form::GateAfter,
        Form::GateBefore,
        Form::Groups,
        Form::GateBeforeGroups,
        Form::BeforeWeight,
        Form::RstdFirst,
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
        }
    }

    /// The norm in this form.
    pub(crate) const fn of(self, spec: NormSpec) -> NormSpec {
        match self {
            Form::Plain => spec,
            Form::GateAfter => spec.gate_after(Activation::Silu),
            Form::GateBefore => spec.gate_before(Activation::Silu),
            Form::Groups => spec.groups(GROUPS),
            Form::GateBeforeGroups => spec.gate_before(Activation::Silu).groups(GROUPS),
            Form::BeforeWeight => spec.cast_order(CastOrder::BeforeWeight),
            Form::RstdFirst => spec.cast_order(CastOrder::RstdFirst),
        }
    }

    /// Whether the call has a gate.
    pub(crate) const fn has_gate(self) -> bool {
        self.of(NormSpec::rms(1, GROUPS, 0.0)).gate.is_some()
    }
}
