//! [`Passes`]: a norm forward and backward, for tests of libraries that give gradients.

use rmsnorm_spec::reference::{BackwardInputs, ForwardInputs};
use rmsnorm_spec::{DType, DTypes, GradReduction, NormSpec, ResidualPlacement, Slot};

use crate::Arithmetic;
use crate::bounds::{Mode, Model, Statistics};
use crate::testing::{BackwardTruth, ForwardTruth, Gated};

/// The tensors of a forward pass, and of the backward pass that uses its statistics: the data to
/// judge a library's function and its gradients. All tensors are dense and row-major, with values
/// that their dtypes represent exactly.
///
/// With `dtypes` of a cast ([`DTypes::CASTS`]) and no residual, `x` has the residual's dtype and
/// `dy` that of y.
///
/// If the residual is added after the norm, these passes cover the sum (`residual_out`) and the
/// gradients of x, weight and bias. [`next`](Self::next) has the passes of the next norm, which
/// normalizes the sum.
#[derive(Clone, Copy, Debug)]
pub struct Passes<'a> {
    /// The norm.
    pub spec: NormSpec,
    /// The dtypes of the tensors.
    pub dtypes: DTypes,
    /// (rows, cols), of the activations' dtype, or in a cast of the residual's.
    pub x: &'a [f64],
    /// (rows, cols), of the residual's dtype.
    pub residual: Option<&'a [f64]>,
    /// (cols), of the weight's dtype.
    pub weight: &'a [f64],
    /// (cols), of the weight's dtype.
    pub bias: Option<&'a [f64]>,
    /// (rows, cols), of the activations' dtype: the gate, if the norm has one.
    pub gate: Option<&'a [f64]>,
    /// (rows, cols), of the activations' dtype. If the residual is added after the norm: the
    /// gradient of the sum, in the activations' dtype.
    pub dy: &'a [f64],
}

impl<'a> Passes<'a> {
    /// The passes of the next norm. `sum` (rows, cols) is the sum as a call stored it; `weight` and
    /// `bias` (cols) are those of the next norm, and `dy` is the gradient of its result. `Dx` is
    /// then the gradient of the sum, in the sum's dtype.
    #[must_use]
    pub fn next(&self, sum: &'a [f64], weight: &'a [f64], bias: Option<&'a [f64]>, dy: &'a [f64]) -> Passes<'a> {
        let mut spec = self.spec;
        spec.residual_placement = ResidualPlacement::Before;
        let dtypes = DTypes { activation: self.dtypes.residual, ..self.dtypes };
        Passes { spec, dtypes, x: sum, residual: None, weight, bias, gate: None, dy }
    }

    /// Passes the truths of both passes to `judge`, with derived worst-case bounds for this
    /// arithmetic.
    pub fn judge(&self, arithmetic: &Arithmetic, judge: impl FnOnce(&ForwardTruth<'_>, &BackwardTruth)) {
        let model = Model { arithmetic, mode: Mode::Worst };
        let inputs = ForwardInputs {
            x: self.x,
            residual: self.residual.map(|residual| (residual, self.dtypes.residual)),
            weight: Some(self.weight),
            bias: self.bias,
        };
        let DTypes { activation, weight, residual } = self.dtypes;
        // In a cast, x is of the residual stream. In other calls without a residual both are one.
        let x_dtype = if self.residual.is_some() { activation } else { residual };
        let wide = if weight == DType::F32 { weight } else { activation };
        let gated = self.spec.gate.zip(self.gate).map(|(gate, z)| Gated { gate, z, wide });
        let forward = ForwardTruth::gated(&self.spec, inputs, gated, x_dtype, None, model);
        let out = &forward.outputs;
        let is_gated = self.spec.gate.is_some_and(|gate| gate.slot == Slot::Before);
        let is_made_again = is_gated || self.spec.cast_order.is_weight_first();
        let inputs = BackwardInputs {
            dy: self.dy,
            x: if is_made_again { self.x } else { &out.h },
            weight: Some(self.weight),
            mean: &out.mean,
            rstd: &out.rstd,
            dresidual_out: None,
        };
        let statistics = Statistics::Computed(&forward.bounds);
        let gated = gated.map(|gated| (gated, self.bias));
        let reduction = GradReduction::Partials;
        let backward = BackwardTruth::gated(&self.spec, &inputs, gated, x_dtype, statistics, reduction, model);
        judge(&forward, &backward);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmsnorm_spec::{Tensor, reference};

    fn float(values: &[f64]) -> Vec<f32> {
        values.iter().map(|&value| value as f32).collect()
    }

    /// A sum after the norm, then the norm of that sum: correct results pass, results of the other
    /// placement fail.
    #[test]
    fn sums_after_the_norm_and_their_norms_are_judged() {
        let (x, residual) = ([3.0, 4.0, 5.0, 0.0, -2.0, 1.0], [1.0, 2.0, -1.0, 0.5, 1.0, 1.0]);
        let (weight, bias, dy) = ([1.0, 2.0, 0.5], [0.5, 0.0, -0.5], [1.0, -1.0, 0.5, 2.0, 0.0, 1.0]);
        let dtypes = DTypes { activation: DType::F32, weight: DType::F32, residual: DType::F32 };
        let bias = Some(&bias[..]);
        let spec = NormSpec::layer(2, 3, 1e-6).residual_after();
        let passes =
            Passes { spec, dtypes, x: &x, residual: Some(&residual), weight: &weight, bias, gate: None, dy: &dy };
        let is_pass =
            |forward: &ForwardTruth<'_>, tensor, values: &[f64]| forward.judge(tensor, &float(values)).is_pass();
        let before = reference::forward(
            &NormSpec::layer(2, 3, 1e-6),
            &ForwardInputs { x: &x, residual: Some((&residual, DType::F32)), weight: Some(&weight), bias },
        );
        let mut stored = Vec::new();
        passes.judge(&Arithmetic::IEEE, |forward, backward| {
            let out = &forward.outputs;
            assert!(is_pass(forward, Tensor::ResidualOut, &out.sum) && is_pass(forward, Tensor::Rstd, &out.rstd));
            assert!(!is_pass(forward, Tensor::ResidualOut, &before.h));
            assert!(backward.judge(Tensor::Dx, &float(&backward.outputs.dx)).is_pass());
            assert!(backward.judge(Tensor::Dbias, &[3f32, -1.0, 1.5]).is_pass(), "the sums of dy");
            stored = float(&out.sum).into_iter().map(f64::from).collect();
        });
        passes.next(&stored, &weight, bias, &dy).judge(&Arithmetic::IEEE, |forward, backward| {
            let expected = reference::next(&spec, &stored, Some(&weight), bias);
            assert_eq!((&forward.outputs.h, &forward.outputs.y), (&stored, &expected.y));
            assert!(is_pass(forward, Tensor::Y, &expected.y) && is_pass(forward, Tensor::Rstd, &expected.rstd));
            assert!(backward.judge(Tensor::Dx, &float(&backward.outputs.dx)).is_pass());
            assert!(!backward.judge(Tensor::Dx, &float(&dy)).is_pass());
        });
    }
}
