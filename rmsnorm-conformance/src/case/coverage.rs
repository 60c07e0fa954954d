//! The features that a backend must have to be called conformant. A declared gap must not include
//! any of them.
//!
//! `Unsupported` is an acceptable answer for a rare mix of dtypes or a way of summing gradients,
//! but not for "backward" or "bias". If no case with such a feature passed, the core profile fails.
//! A backend must not refuse a common call if it executes other calls of the same kind, norm and
//! dtype. A common call has one dtype for all tensors.

use std::collections::HashSet;

use rmsnorm_spec::quant::{CodeType, ScaleKind, ScaleLayout};
use rmsnorm_spec::{CastOrder, DType, DTypes, GradReduction, Norm, Tensor, TensorSet};

use crate::case::presence::{ALL_PRESENT, OPTIONAL};
use crate::case::{Case, Kind, Layout};
use crate::finding::{Check, Finding, Status};

/// A feature, and a test whether a case has it.
type Feature = (&'static str, fn(&Case) -> bool);

/// Mandatory features, in addition to every optional tensor.
const MANDATORY: [Feature; 21] = [
    ("forward", |case| case.kind == Kind::FORWARD),
    ("forward in place", |case| case.kind == Kind::FORWARD_IN_PLACE),
    ("backward", |case| case.kind == Kind::BACKWARD),
    ("backward after forward", |case| case.kind == Kind::END_TO_END),
    ("RMS norm", |case| case.norm == Norm::Rms),
    ("layer norm", |case| case.norm == Norm::Layer),
    ("f32", |case| case.dtypes.activation == DType::F32),
    ("f16 or bf16", |case| case.dtypes.activation != DType::F32),
    ("no weight", |case| !case.present.has(Tensor::Weight)),
    ("weight_offset", |case| case.weight_offset != 0.0),
    ("bias without weight", |case| case.present.has(Tensor::Bias) && !case.present.has(Tensor::Weight)),
    ("residual and residual_out", |case| case.present.has(Tensor::Residual) && case.present.has(Tensor::ResidualOut)),
    ("dweight from partials", |case| {
        case.present.has(Tensor::Dweight) && case.grad_reduction == GradReduction::Partials
    }),
    ("dbias from partials", |case| case.present.has(Tensor::Dbias) && case.grad_reduction == GradReduction::Partials),
    ("the cast order before_weight", |case| case.cast_order == CastOrder::BeforeWeight),
    ("row strides", |case| matches!(case.layout, Layout::Uniform { pad: 1.., .. } | Layout::Mixed(_))),
    ("rows in groups", |case| matches!(case.layout, Layout::Grouped { .. })),
    ("misaligned tensors", |case| matches!(case.layout, Layout::Uniform { offset: 1.., .. } | Layout::Mixed(_))),
    ("no rows", |case| case.rows == 0),
    ("more than 65535 rows", |case| case.rows > 65_535),
    ("more than 65536 columns", |case| case.cols > 65_536),
];

/// Largest matrix of a common call, in elements. Every device has memory for it.
const FEW_ELEMENTS: usize = 1 << 22;

/// Whether a case is a common call: one that needs little memory and no feature that some backends
/// lack: other gradient reductions, mixed dtypes, a workspace that the backend must allocate, rows
/// in groups or far apart, groups of columns, rare cast orders, many tensors, quantized rows that
/// share a word, other orders of scales.
fn is_everyday(case: &Case) -> bool {
    let elements = case.rows.saturating_mul(case.cols);
    let has_room = case.present.has(Tensor::Workspace) || case.present.sums_over_rows() == 0;
    case.cols <= 1 << 16
        && (1..=FEW_ELEMENTS).contains(&elements)
        && has_room
        && case.groups == 1
        && matches!(case.cast_order, CastOrder::AtStore | CastOrder::BeforeWeight)
        && case.dtypes == DTypes::uniform(case.dtypes.activation)
        && case.grad_reduction == GradReduction::Partials
        && has_few_tensors(case)
        && matches!(case.layout, Layout::Uniform { .. } | Layout::Mixed(_))
        && case.quant.is_none_or(|quant| {
            case.layout == Layout::DENSE && quant.layout == ScaleLayout::RowMajor && case.cols.is_multiple_of(4)
        })
}

/// Tensors besides x for which every device has bindings.
const FEW_TENSORS: usize = 7;

/// Whether a case has only the tensors that most cases draw from; for a sum after the norm or a
/// gate, any few tensors.
fn has_few_tensors(case: &Case) -> bool {
    match case.kind.is_after() || case.kind.gate().is_some() {
        true => case.present.iter().count() <= FEW_TENSORS && !case.kind.has_backward(),
        false => case.present.difference(ALL_PRESENT).is_empty(),
    }
}

/// A set of calls that a backend supports or refuses as a whole: kind, norm and dtype; for
/// quantized calls also the format and the kind of scale.
type Group = (Kind, Norm, DType, Option<(CodeType, ScaleKind)>);

/// The group of a case. Refusing a whole group is a declared gap.
fn group(case: &Case) -> Group {
    (case.kind, case.norm, case.dtypes.activation, case.quant.map(|quant| (quant.codes, quant.scale)))
}

/// The mandatory features of passed cases, and the common calls that were refused.
#[derive(Default)]
pub(crate) struct Coverage {
    executed: HashSet<Group>,
    refused: Vec<(Case, String)>,
    passed: [bool; MANDATORY.len()],
    tensors: TensorSet,
}

impl Coverage {
    /// Records a case.
    pub fn add(&mut self, case: &Case, status: &Status) {
        match status {
            Status::Pass => {}
            Status::Unsupported(rule) if is_everyday(case) => return self.refused.push((*case, rule.clone())),
            Status::Fail(_) | Status::Unsupported(_) | Status::Vacuous(_) | Status::Skipped(_) => return,
        }
        if is_everyday(case) {
            self.executed.insert(group(case));
        }
        self.tensors = self.tensors.union(case.present);
        for (passed, (_, has_feature)) in self.passed.iter_mut().zip(MANDATORY) {
            *passed |= has_feature(case);
        }
    }

    /// The common calls that were refused although others of their group passed, each with its rule
    /// and finding.
    pub fn refusals(&self) -> impl Iterator<Item = (Case, &str, Finding)> {
        self.refused.iter().filter(|(case, _)| self.executed.contains(&group(case))).map(|(case, rule)| {
            let detail =
                format!("refused as unsupported, although other cases of this kind, norm and dtype pass: {rule}");
            (*case, rule.as_str(), Finding { check: Check::Error, output: case.kind.name(), detail })
        })
    }

    /// The features that no passed case has.
    pub fn missing(&self) -> Vec<&'static str> {
        let features = self.passed.iter().zip(MANDATORY).filter(|(passed, _)| !**passed).map(|(_, (name, _))| name);
        features.chain(OPTIONAL.difference(self.tensors).iter().map(Tensor::name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::profiles::Profile;

    #[test]
    fn core_profile_has_every_mandatory_feature() {
        let mut coverage = Coverage::default();
        Profile::Core.cases(0).iter().for_each(|case| coverage.add(case, &Status::Pass));
        assert_eq!(coverage.missing(), Vec::<&str>::new());
    }

    #[test]
    fn features_without_a_passed_case_are_missing() {
        let mut coverage = Coverage::default();
        let without = |case: &Case| case.kind != Kind::BACKWARD && case.cols < 4096;
        Profile::Core.cases(0).iter().filter(|case| without(case)).for_each(|case| coverage.add(case, &Status::Pass));
        assert_eq!(coverage.missing(), ["backward", "more than 65536 columns"]);
        let mut coverage = Coverage::default();
        let without = |case: &Case| !case.present.has(Tensor::Dresidual);
        Profile::Core.cases(0).iter().filter(|case| without(case)).for_each(|case| coverage.add(case, &Status::Pass));
        assert_eq!(coverage.missing(), ["dresidual"]);
    }

    /// A feature that a backend refuses, fails or cannot run is missing.
    #[test]
    fn only_cases_that_passed_cover_a_feature() {
        let finding = Finding { check: Check::Bounds, output: "y", detail: String::new() };
        let others = [
            Status::Fail(finding),
            Status::Unsupported(String::new()),
            Status::Vacuous("y"),
            Status::Skipped(String::new()),
        ];
        let mut coverage = Coverage::default();
        for case in &Profile::Core.cases(0) {
            others.iter().for_each(|status| coverage.add(case, status));
        }
        assert_eq!(coverage.refusals().count(), 0, "nothing is executed");
        assert_eq!(coverage.missing().len(), MANDATORY.len() + OPTIONAL.iter().count());
    }

    /// A backend may refuse features that some backends lack, but not single calls of a group that
    /// it supports.
    #[test]
    fn everyday_calls_are_refused_with_all_of_their_norm_and_dtype_or_not_at_all() {
        let refused = |is_refused: fn(&Case) -> bool| {
            let mut coverage = Coverage::default();
            for case in &Profile::Core.cases(0) {
                let status = if is_refused(case) { Status::Unsupported("a rule".into()) } else { Status::Pass };
                coverage.add(case, &status);
            }
            coverage.refusals().map(|(case, ..)| case).collect::<Vec<Case>>()
        };
        assert_eq!(refused(|case| case.dtypes.activation == DType::F16), []);
        assert_eq!(refused(|case| case.grad_reduction != GradReduction::Partials || case.cols > 1 << 16), []);
        assert_eq!(refused(|case| case.dtypes.weight != case.dtypes.activation), []);
        assert_eq!(refused(|case| matches!(case.layout, Layout::Grouped { .. } | Layout::Far(_))), []);
        assert_eq!(refused(|case| case.present.has(Tensor::Dresidual)), []);
        assert_eq!(refused(|case| case.norm == Norm::Layer), []);
        assert_eq!(refused(|case| case.kind == Kind::FORWARD_IN_PLACE), []);
        assert_eq!(refused(|case| case.rows * case.cols > FEW_ELEMENTS), []);
        // Without stream-ordered memory, a workspace must be given.
        let has_none = |case: &Case| case.present.sums_over_rows() > 0 && !case.present.has(Tensor::Workspace);
        assert_eq!(refused(has_none), []);
        // A backend with mixed dtypes may lack uniform ones.
        assert_eq!(refused(|case| case.dtypes == DTypes::uniform(DType::F16) && case.rows > 0), []);
        assert!(!refused(|case| matches!(case.layout, Layout::Mixed(_))).is_empty());
        assert!(!refused(|case| case.weight_offset != 0.0).is_empty());

        let is_lone = |case: &Case| {
            case.kind == Kind::BACKWARD && !case.present.has(Tensor::Dweight) && !case.present.has(Tensor::Dbias)
        };
        let found = refused(is_lone);
        assert!(found.len() > 10 && found.iter().all(is_lone), "{}", found.len());
        for dtype in DType::ALL {
            assert!(found.iter().any(|case| case.dtypes == DTypes::uniform(dtype)), "{dtype}");
        }
    }
}
