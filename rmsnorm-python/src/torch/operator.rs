//! The operators as data: what each takes and gives, and so its schema.

use std::fmt::Write as _;

use rmsnorm_core::Tensor::{
    self, Bias, Codes, Dbias, Dresidual, DresidualOut, Dweight, Dx, Dy, Mean, Residual, ResidualOut, Rstd, Scale,
    Scales, Weight, X, Y,
};
use rmsnorm_core::{Direction, Norm};

/// A parameter of an operator, in the order of its schema.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Parameter {
    Tensor(Tensor),
    Optional(Tensor),
    Eps,
    WeightOffset,
    CastBeforeWeight,
    /// Whether a result is asked for. One that is not has no elements.
    Need(Tensor),
    /// The number of a `CodeType`.
    CodeType,
    /// The number of a `ScaleKind`, as `quantized.rs` counts them.
    ScaleKind,
}

use Parameter::{CastBeforeWeight, Eps, Need, Optional, WeightOffset};

/// An operator of the namespace `rmsnorm`.
pub(super) struct Operator {
    pub(super) name: &'static str,
    pub(super) norm: Norm,
    pub(super) direction: Direction,
    pub(super) parameters: &'static [Parameter],
    pub(super) results: &'static [Tensor],
}

const fn operator(
    name: &'static str,
    norm: Norm,
    direction: Direction,
    parameters: &'static [Parameter],
    results: &'static [Tensor],
) -> Operator {
    Operator { name, norm, direction, parameters, results }
}

/// Shorthand for a tensor that every call has.
const fn given(tensor: Tensor) -> Parameter {
    Parameter::Tensor(tensor)
}

/// All operators. Those without statistics are for calls that nobody differentiates.
pub(super) static OPERATORS: [Operator; 9] = {
    use Direction::{Backward, Forward, QuantizedForward};
    use Norm::{Layer, Rms};
    const RMS: &[Parameter] = &[given(X), Optional(Weight), Eps, WeightOffset, CastBeforeWeight];
    const LAYER: &[Parameter] = &[given(X), Optional(Weight), Optional(Bias), Eps];
    const ADD_RMS: &[Parameter] = &[given(X), given(Residual), Optional(Weight), Eps, WeightOffset, CastBeforeWeight];
    const ADD_LAYER: &[Parameter] = &[given(X), given(Residual), Optional(Weight), Optional(Bias), Eps];
    const RMS_BACKWARD: &[Parameter] = &[
        given(Dy),
        given(X),
        Optional(Weight),
        given(Rstd),
        Optional(DresidualOut),
        WeightOffset,
        Need(Dweight),
        Need(Dresidual),
    ];
    const LAYER_BACKWARD: &[Parameter] = &[
        given(Dy),
        given(X),
        Optional(Weight),
        given(Mean),
        given(Rstd),
        Optional(DresidualOut),
        Need(Dweight),
        Need(Dbias),
        Need(Dresidual),
    ];
    const QUANTIZED: &[Parameter] = &[
        given(X),
        Optional(Residual),
        Optional(Weight),
        Eps,
        WeightOffset,
        CastBeforeWeight,
        Optional(Scale),
        Parameter::CodeType,
        Parameter::ScaleKind,
    ];
    [
        operator("rms_norm", Rms, Forward, RMS, &[Y, Rstd]),
        operator("rms_norm_inference", Rms, Forward, RMS, &[Y]),
        operator("layer_norm", Layer, Forward, LAYER, &[Y, Mean, Rstd]),
        operator("layer_norm_inference", Layer, Forward, LAYER, &[Y]),
        operator("add_rms_norm", Rms, Forward, ADD_RMS, &[Y, ResidualOut, Rstd]),
        operator("add_layer_norm", Layer, Forward, ADD_LAYER, &[Y, ResidualOut, Mean, Rstd]),
        operator("rms_norm_backward", Rms, Backward, RMS_BACKWARD, &[Dx, Dweight, Dresidual]),
        operator("layer_norm_backward", Layer, Backward, LAYER_BACKWARD, &[Dx, Dweight, Dbias, Dresidual]),
        operator("quantized_rms_norm", Rms, QuantizedForward, QUANTIZED, &[Codes, Scales, ResidualOut]),
    ]
};

impl Operator {
    /// `rms_norm(Tensor x, Tensor? weight, float eps, ..) -> (Tensor y, Tensor rstd)`.
    pub(super) fn schema(&self) -> String {
        let parameter = |parameter: &Parameter| match parameter {
            Parameter::Tensor(tensor) => format!("Tensor {tensor}"),
            Optional(tensor) => format!("Tensor? {tensor}"),
            Eps => "float eps".into(),
            WeightOffset => "float weight_offset".into(),
            CastBeforeWeight => "bool cast_before_weight".into(),
            Need(tensor) => format!("bool need_{tensor}"),
            Parameter::CodeType => "int codes_type".into(),
            Parameter::ScaleKind => "int scale_kind".into(),
        };
        let parameters: Vec<String> = self.parameters.iter().map(parameter).collect();
        let results: Vec<String> = self.results.iter().map(|tensor| format!("Tensor {tensor}")).collect();
        let mut schema = format!("{}({}) -> ", self.name, parameters.join(", "));
        let _ = match &results[..] {
            [one] => write!(schema, "{one}"),
            several => write!(schema, "({})", several.join(", ")),
        };
        schema
    }
}
