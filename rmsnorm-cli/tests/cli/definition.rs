//! The expected output of `rmsnorm run`: the name, dtype and shape of each tensor, and an interval
//! for each value, from the f64 definition and the error bounds of the backend.
//!
//! The intervals are those of the suite. These tests check that the program passes all inputs and
//! settings on; wider intervals would hide a lost setting.

use std::collections::BTreeMap;

use rmsnorm_core::conformance::Arithmetic;
use rmsnorm_core::conformance::bounds::{Mode, Model, Statistics};
use rmsnorm_core::conformance::testing::{BackwardTruth, Bits, ForwardTruth, Gated};
use rmsnorm_core::reference::{BackwardInputs, ForwardInputs, round_to};
use rmsnorm_core::{CastOrder, DType, Gate, GradReduction, Norm, NormSpec, Tensor as Role};

use crate::support::{Tensor, Tensors};

/// The inputs of a run.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub norm: Norm,
    pub eps: f32,
    pub weight_offset: f32,
    pub cast_order: CastOrder,
    pub gate: Option<Gate>,
    pub groups: usize,
    /// The dtype of `y`, if it is not that of `x`.
    pub out_dtype: Option<DType>,
    pub tensors: Tensors,
}

/// Panics unless the outputs are the expected tensors for these inputs, no fewer and no more.
pub fn check(inputs: &Inputs, outputs: &BTreeMap<String, Tensor>, arithmetic: &Arithmetic, context: &str) {
    let input = |role: Role| inputs.tensors.get(role.name());
    let (x, residual, weight, bias) =
        (&inputs.tensors["x"], input(Role::Residual), input(Role::Weight), input(Role::Bias));
    let norm_shape = weight.or(bias).map_or(&x.shape[x.shape.len() - 1..], |tensor| &tensor.shape);
    let batch_shape = &x.shape[..x.shape.len() - norm_shape.len()];
    let mut spec = NormSpec::new(inputs.norm, batch_shape.iter().product(), norm_shape.iter().product(), inputs.eps)
        .weight_offset(inputs.weight_offset)
        .cast_order(inputs.cast_order)
        .groups(inputs.groups);
    spec.gate = inputs.gate;
    let groups = (spec.groups > 1).then_some(spec.groups);
    let statistics_shape = &batch_shape.iter().copied().chain(groups).collect::<Vec<_>>()[..];
    let y_dtype = inputs.out_dtype.unwrap_or(x.dtype);
    let mut expected = vec![(Role::Y, y_dtype, &x.shape[..]), (Role::Rstd, DType::F32, statistics_shape)];
    if inputs.norm == Norm::Layer {
        expected.push((Role::Mean, DType::F32, statistics_shape));
    }
    expected.extend(residual.map(|residual| (Role::ResidualOut, residual.dtype, &x.shape[..])));
    let dy = input(Role::Dy);
    if dy.is_some() {
        expected.push((Role::Dx, x.dtype, &x.shape));
        expected.extend(inputs.gate.map(|_| (Role::Dgate, y_dtype, &x.shape[..])));
        expected.extend(weight.map(|weight| (Role::Dweight, weight.dtype, norm_shape)));
        expected.extend(bias.map(|bias| (Role::Dbias, bias.dtype, norm_shape)));
    }
    for (role, dtype, shape) in &expected {
        let got = outputs.get(role.name()).unwrap_or_else(|| panic!("no {role} of {context}"));
        assert_eq!((&got.dtype, &got.shape[..]), (dtype, *shape), "{role} of {context}");
    }
    assert_eq!(outputs.len(), expected.len(), "{context}: {:?}", outputs.keys());

    let output = |role: Role| outputs.get(role.name()).map(|tensor| &tensor.values[..]);
    let wide = weight.or(bias).map_or(y_dtype, |vector| if vector.dtype == DType::F32 { DType::F32 } else { y_dtype });
    let (weight, bias) = (weight.map(|weight| &weight.values[..]), bias.map(|bias| &bias.values[..]));
    let gated = inputs.gate.zip(input(Role::Gate)).map(|(gate, z)| Gated { gate, z: &z.values, wide });
    let given = residual.map(|residual| (&residual.values[..], residual.dtype));
    let given = ForwardInputs { x: &x.values, residual: given, weight, bias };
    let model = Model { arithmetic, mode: Mode::Worst };
    let forward = ForwardTruth::gated(&spec, given, gated, x.dtype, output(Role::ResidualOut), model);
    let no_mean = vec![0.0; spec.rows * spec.groups];
    // From the statistics that the run wrote, which are checked too.
    let backward = dy.zip(output(Role::Rstd)).map(|(dy, rstd)| {
        let given = BackwardInputs {
            dy: &dy.values,
            x: output(Role::ResidualOut).unwrap_or(&x.values),
            weight,
            mean: output(Role::Mean).unwrap_or(&no_mean),
            rstd,
            dresidual_out: input(Role::DresidualOut).map(|tensor| &tensor.values[..]),
        };
        let gated = gated.map(|gated| (gated, bias));
        BackwardTruth::gated(&spec, &given, gated, x.dtype, Statistics::Given, GradReduction::Partials, model)
    });
    for (role, dtype, _) in expected {
        let got = Bits::rounded(output(role).unwrap(), dtype);
        let verdict = match &backward {
            Some(truth) if matches!(role, Role::Dx | Role::Dgate | Role::Dweight | Role::Dbias) => {
                truth.judge_bits(role, &got)
            }
            Some(_) | None => forward.judge_bits(role, &got),
        };
        assert!(verdict.is_pass(), "{role} of {context}: {verdict:?}");
    }
    // WGSL allows other roundings of a sum, but all known devices round to nearest.
    if let (Some(residual), Some(h)) = (residual, output(Role::ResidualOut)) {
        let sums = x.values.iter().zip(&residual.values).map(|(x, r)| round_to(x + r, residual.dtype));
        assert!(sums.eq(h.iter().copied()), "residual_out of {context}");
    }
}
