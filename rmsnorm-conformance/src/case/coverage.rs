//! What a backend must be able to do to be called conformant: no gap that it declares may reach this far.
//!
//! `Unsupported` is an honest answer to a rare mix of dtypes or a way of summing gradients. It is none to "backward" or
//! "bias": if no case with such a feature passed, the core profile is not passed either, whatever the other cases say. A
//! backend may not refuse an everyday call if it executes others of the same kind, norm and dtype; its dtype is that of all tensors.

use std::collections::HashSet;

use rmsnorm_spec::quant::{CodeType, ScaleKind, ScaleLayout};
use rmsnorm_spec::{CastOrder, DType, DTypes, GradReduction, Norm, Tensor, TensorSet};

use crate::case::presence::{ALL_PRESENT, OPTIONAL};
use crate::case::{Case, Kind, Layout};
use crate::report::{Check, Finding, Status};

/// A feature, and whether a case exercises it.
type Feature = (&'static str, fn(&Case) -> bool);

/// Beside every optional tensor.
const MANDATORY: [Feature; 21] = [
    ("forward", |case| case.kind == Kind::Forward),
    ("forward in place", |case| case.kind == Kind::ForwardInPlace),
    ("backward", |case| case.kind == Kind::Backward),
    ("backward after forward", |case| case.kind == Kind::EndToEnd),
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

/// Elements of a matrix that every device has room for.
const FEW_ELEMENTS: usize = 1 << 22;

/// A call that needs neither much room nor what some backends lack: other sums, other dtypes, a workspace that nobody gave, rows in
/// groups or far apart, more tensors than every device has bindings, and codes of two rows in one word or scales in another order.
fn is_everyday(case: &Case) -> bool {
    let elements = case.rows.saturating_mul(case.cols);
    let has_room = case.present.has(Tensor::Workspace) || case.present.sums_over_rows() == 0;
    case.cols <= 1 << 16
        && (1..=FEW_ELEMENTS).contains(&elements)
        && has_room
        && case.dtypes == DTypes::uniform(case.dtypes.activation)
        && case.grad_reduction == GradReduction::Partials
        && has_few_tensors(case)
        && matches!(case.layout, Layout::Uniform { .. } | Layout::Mixed(_))
        && case.quant.is_none_or(|quant| {
            case.layout == Layout::DENSE && quant.layout == ScaleLayout::RowMajor && case.cols.is_multiple_of(4)
        })
}

/// Tensors beside x that every device has bindings for.
const FEW_TENSORS: usize = 7;

/// Those that most cases draw from; around a sum after the norm, any few.
fn has_few_tensors(case: &Case) -> bool {
    match case.kind.is_after() {
        true => case.present.iter().count() <= FEW_TENSORS && !case.kind.has_backward(),
        false => case.present.difference(ALL_PRESENT).is_empty(),
    }
}

/// Calls that a backend has all of, or none: of a kind, norm and dtype; and of a format of codes and a kind of scale.
type Group = (Kind, Norm, DType, Option<(CodeType, ScaleKind)>);

/// What a backend has or has not: a refusal of all of these is a gap.
fn group(case: &Case) -> Group {
    (case.kind, case.norm, case.dtypes.activation, case.quant.map(|quant| (quant.codes, quant.scale)))
}

/// Which mandatory features a passed case had, and which everyday calls were refused.
#[derive(Default)]
pub(crate) struct Coverage {
    executed: HashSet<Group>,
    refused: Vec<(Case, String)>,
    passed: [bool; MANDATORY.len()],
    tensors: TensorSet,
}

impl Coverage {
    /// Counts a case in.
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

    /// The everyday calls that were refused though others of their kind, norm and dtype passed, and what is wrong.
    pub fn refusals(&self) -> impl Iterator<Item = (Case, &str, Finding)> {
        self.refused.iter().filter(|(case, _)| self.executed.contains(&group(case))).map(|(case, rule)| {
            let detail = format!("others of its kind, norm and dtype pass, this one is refused as unsupported: {rule}");
            (*case, rule.as_str(), Finding { check: Check::Error, output: case.kind.name(), detail })
        })
    }

    /// The features that no passed case had.
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
        let without = |case: &Case| case.kind != Kind::Backward && case.cols < 4096;
        Profile::Core.cases(0).iter().filter(|case| without(case)).for_each(|case| coverage.add(case, &Status::Pass));
        assert_eq!(coverage.missing(), ["backward", "more than 65536 columns"]);
        let mut coverage = Coverage::default();
        let without = |case: &Case| !case.present.has(Tensor::Dresidual);
        Profile::Core.cases(0).iter().filter(|case| without(case)).for_each(|case| coverage.add(case, &Status::Pass));
        assert_eq!(coverage.missing(), ["dresidual"]);
    }

    /// A feature that a backend refuses, fails or cannot run is none that it has.
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

    /// A backend may refuse what some lack. It may not refuse a few of the calls that it otherwise makes.
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
        assert_eq!(refused(|case| case.kind == Kind::ForwardInPlace), []);
        assert_eq!(refused(|case| case.rows * case.cols > FEW_ELEMENTS), []);
        // Without memory in the order of a stream a workspace must be given.
        let has_none = |case: &Case| case.present.sums_over_rows() > 0 && !case.present.has(Tensor::Workspace);
        assert_eq!(refused(has_none), []);
        // Uniform dtypes are not had by who has the mixed ones.
        assert_eq!(refused(|case| case.dtypes == DTypes::uniform(DType::F16) && case.rows > 0), []);
        assert!(!refused(|case| matches!(case.layout, Layout::Mixed(_))).is_empty());
        assert!(!refused(|case| case.weight_offset != 0.0).is_empty());

        let is_lone = |case: &Case| {
            case.kind == Kind::Backward && !case.present.has(Tensor::Dweight) && !case.present.has(Tensor::Dbias)
        };
        let found = refused(is_lone);
        assert!(found.len() > 10 && found.iter().all(is_lone), "{}", found.len());
        for dtype in DType::ALL {
            assert!(found.iter().any(|case| case.dtypes == DTypes::uniform(dtype)), "{dtype}");
        }
    }
}
