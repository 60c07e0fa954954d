//! [`Passes`]: a norm forward and backward, for tests of libraries that give gradients.

use rmsnorm_spec::reference::{BackwardInputs, ForwardInputs};
use rmsnorm_spec::{DTypes, GradReduction, NormSpec};

use crate::Arithmetic;
use crate::bounds::{Mode, Model, Statistics};
use crate::testing::{BackwardTruth, ForwardTruth};

/// The tensors of a forward pass, and of the backward pass by the statistics that it has saved: what a library's function and its
/// gradients are judged by. Dense and row-major; each has the values that its dtype holds.
#[derive(Clone, Copy, Debug)]
pub struct Passes<'a> {
    /// What is computed.
    pub spec: NormSpec,
    /// Of the tensors.
    pub dtypes: DTypes,
    /// (rows, cols), of the activations' dtype.
    pub x: &'a [f64],
    /// (rows, cols), of the residual's dtype.
    pub residual: Option<&'a [f64]>,
    /// (cols), of the weight's dtype.
    pub weight: &'a [f64],
    /// (cols), of the weight's dtype.
    pub bias: Option<&'a [f64]>,
    /// (rows, cols), of the activations' dtype.
    pub dy: &'a [f64],
}

impl Passes<'_> {
    /// Hands the truths of both passes to `judge`: the most that this arithmetic may be off, by bounds that are derived.
    pub fn judge(&self, arithmetic: &Arithmetic, judge: impl FnOnce(&ForwardTruth<'_>, &BackwardTruth)) {
        let model = Model { arithmetic, mode: Mode::Worst };
        let inputs = ForwardInputs {
            x: self.x,
            residual: self.residual.map(|residual| (residual, self.dtypes.residual)),
            weight: Some(self.weight),
            bias: self.bias,
        };
        let forward = ForwardTruth::new(&self.spec, inputs, self.dtypes.activation, None, model);
        let out = &forward.outputs;
        let inputs = BackwardInputs {
            dy: self.dy,
            x: &out.h,
            weight: Some(self.weight),
            mean: &out.mean,
            rstd: &out.rstd,
            dresidual_out: None,
        };
        let statistics = Statistics::Computed(&forward.bounds);
        let backward = BackwardTruth::new(&self.spec, &inputs, statistics, GradReduction::Partials, model);
        judge(&forward, &backward);
    }
}
