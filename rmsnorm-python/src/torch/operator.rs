//! The operators as data: their schemas, and the parameters and results parsed from them.

use rmsnorm_core::{DType, Direction, Norm, Tensor};

/// The schemas of all operators. The `_inference` operators return no statistics, for calls without
/// gradients. The `_norm_add` operators add the norm to the residual; with `need_y`, `y` is the next
/// norm. `norm` and `norm_backward` are norms of every kind, with a gate, groups of columns, each cast
/// order, and a `y` of another dtype than `x`: backward then has `dresidual` in place of `dx`.
pub(super) const SCHEMAS: [&str; 13] = [
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_before_weight) \
     -> (Tensor y, Tensor rstd)",
    "rms_norm_inference(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_before_weight) -> Tensor y",
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    "layer_norm_inference(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor y",
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, bool cast_before_weight) \
     -> (Tensor y, Tensor residual_out, Tensor rstd)",
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) \
     -> (Tensor y, Tensor residual_out, Tensor mean, Tensor rstd)",
    "rms_norm_add(Tensor x, Tensor residual, Tensor? weight, Tensor? next_weight, float eps, float weight_offset, \
     bool cast_before_weight, bool need_y) -> (Tensor y, Tensor residual_out, Tensor rstd, Tensor next_rstd)",
    "layer_norm_add(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? next_weight, Tensor? next_bias, \
     float eps, bool need_y) \
     -> (Tensor y, Tensor residual_out, Tensor mean, Tensor rstd, Tensor next_mean, Tensor next_rstd)",
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? dresidual_out, float weight_offset, \
     bool need_dweight, bool need_dresidual) -> (Tensor dx, Tensor dweight, Tensor dresidual)",
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? dresidual_out, \
     bool need_dweight, bool need_dbias, bool need_dresidual) \
     -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual)",
    "quantized_rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset, \
     bool cast_before_weight, Tensor? scale, int codes_type, int scale_kind) \
     -> (Tensor codes, Tensor scales, Tensor residual_out)",
    "norm(Tensor x, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias, float eps, float weight_offset, \
     int kind, int cast_order, bool is_sigmoid, bool gate_before, int groups, int y_dtype) \
     -> (Tensor y, Tensor residual_out, Tensor mean, Tensor rstd)",
    "norm_backward(Tensor dy, Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, \
     Tensor? dresidual_out, float eps, float weight_offset, int kind, int cast_order, bool is_sigmoid, \
     bool gate_before, int groups, bool need_dx, bool need_dgate, bool need_dweight, bool need_dbias, \
     bool need_dresidual) \
     -> (Tensor dx, Tensor dgate, Tensor dweight, Tensor dbias, Tensor dresidual)",
];

/// What `y_dtype` counts: the dtype of `x`, and the others.
pub(super) const Y_DTYPES: [Option<DType>; 4] = [None, Some(DType::F32), Some(DType::F16), Some(DType::Bf16)];

/// A parameter of an operator, in the order of its schema.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Parameter {
    Tensor(Tensor),
    Optional(Tensor),
    Eps,
    WeightOffset,
    CastBeforeWeight,
    /// The number of a `Norm`, in an operator of all kinds.
    Kind,
    /// The number of a `CastOrder`.
    CastOrder,
    /// Whether the gate's activation is sigmoid and not silu. No effect without a gate.
    IsSigmoid,
    /// Whether the gate is before the norm. No effect without a gate.
    GateBefore,
    Groups,
    /// The number of the dtype of `y` in [`Y_DTYPES`].
    YDtype,
    /// Whether a result is needed. A result that is not needed has no elements.
    Need(Tensor),
    /// The number of a `CodeType`.
    CodeType,
    /// The number of a `ScaleKind`, as `quantized.rs` counts them.
    ScaleKind,
}

impl Parameter {
    /// The parameter with a schema's text, "type name".
    fn of(text: &str) -> Option<Self> {
        Some(match text.split_once(' ')? {
            ("Tensor", name) => Parameter::Tensor(Tensor::from_name(name)?),
            ("Tensor?", name) => Parameter::Optional(Tensor::from_name(name)?),
            ("float", "eps") => Parameter::Eps,
            ("float", "weight_offset") => Parameter::WeightOffset,
            ("bool", "cast_before_weight") => Parameter::CastBeforeWeight,
            ("int", "kind") => Parameter::Kind,
            ("int", "cast_order") => Parameter::CastOrder,
            ("int", "y_dtype") => Parameter::YDtype,
            ("bool", "is_sigmoid") => Parameter::IsSigmoid,
            ("bool", "gate_before") => Parameter::GateBefore,
            ("int", "groups") => Parameter::Groups,
            ("bool", name) => Parameter::Need(Tensor::from_name(name.strip_prefix("need_")?)?),
            ("int", "codes_type") => Parameter::CodeType,
            ("int", "scale_kind") => Parameter::ScaleKind,
            _ => return None,
        })
    }
}

/// An operator of the namespace `rmsnorm`.
pub(super) struct Operator {
    pub(super) name: &'static str,
    /// The kind of norm, unless a parameter says it.
    pub(super) norm: Norm,
    pub(super) direction: Direction,
    /// Whether the norm is added to the residual.
    pub(super) adds_to_residual: bool,
    pub(super) parameters: Vec<Parameter>,
    pub(super) results: Vec<Tensor>,
}

impl Operator {
    /// The operator of a schema; `None` if a name or type in it is unknown.
    pub(super) fn of(schema: &'static str) -> Option<Self> {
        let (name, rest) = schema.split_once('(')?;
        let (parameters, results) = rest.split_once(") -> ")?;
        let results = results.trim_matches(['(', ')']).split(", ");
        Some(Operator {
            name,
            norm: if name.contains("layer") { Norm::Layer } else { Norm::Rms },
            direction: match name {
                _ if name.ends_with("_backward") => Direction::Backward,
                _ if name.starts_with("quantized_") => Direction::QuantizedForward,
                _ => Direction::Forward,
            },
            adds_to_residual: name.ends_with("_norm_add"),
            parameters: parameters.split(", ").map(Parameter::of).collect::<Option<_>>()?,
            results: results.map(|text| Tensor::from_name(text.strip_prefix("Tensor ")?)).collect::<Option<_>>()?,
        })
    }
}
