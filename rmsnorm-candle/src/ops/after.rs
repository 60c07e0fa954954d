//! The sum of residual and the norm of x, and y, the next norm of the sum: one kernel, two nodes.

use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use rmsnorm_core::UnsizedNorm;

use super::cell::Cell;
use super::differentiate::differentiate;
use super::normalize::keep;
use super::take::{Shared, Take};
use crate::call::{AfterCall, Kernels, Operand, Statistics};

/// residual + norm(x), from x, the norm's parameters and residual. The parameters are the weight or, where the bias has a gradient,
/// both in one: candle has no place for a fourth tensor that has one.
pub(crate) struct After {
    spec: UnsizedNorm,
    cols: usize,
    activations: DType,
    /// Whether there will be a backward pass.
    save: bool,
    statistics: OnceLock<Statistics>,
    fourth: Fourth,
}

/// A tensor whose gradient is none of the sum's.
enum Fourth {
    None,
    Bias(Tensor),
    /// The next norm's weight, and what is left for its node.
    NextWeight(Tensor, Arc<Shared>),
}

impl After {
    /// The sum. `x` and `residual` have regular rows, weight and bias are contiguous, and there are kernels for their dtypes.
    pub(crate) fn apply(
        spec: UnsizedNorm,
        x: &Tensor,
        residual: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (parameters, fourth) = match bias {
            None => (weight.clone(), Fourth::None),
            Some(bias) if bias.track_op() => (Tensor::cat(&[weight, bias], 0)?, Fourth::None),
            Some(bias) => (weight.clone(), Fourth::Bias(bias.clone())),
        };
        let save = [x, residual, &parameters].into_iter().any(Tensor::track_op);
        After::new(spec, x, weight, save, fourth).sum(x, residual, &parameters)
    }

    /// y and the sum: as [`apply`](Self::apply), and `next_weight` is as the weight is.
    pub(crate) fn apply_with_next(
        spec: UnsizedNorm,
        x: &Tensor,
        residual: &Tensor,
        weight: &Tensor,
        next_weight: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let save = [x, residual, weight, next_weight].into_iter().any(Tensor::track_op);
        let shared = Arc::new(Shared::new(UnsizedNorm { residual_placement: Default::default(), ..spec }));
        // Detached: the sum does not depend on it.
        let fourth = Fourth::NextWeight(next_weight.detach(), shared.clone());
        let residual_out = After::new(spec, x, weight, save, fourth).sum(x, residual, weight)?;
        Ok((Take::apply(shared, save, &residual_out, next_weight, None)?, residual_out))
    }

    fn new(spec: UnsizedNorm, x: &Tensor, weight: &Tensor, save: bool, fourth: Fourth) -> Self {
        After { spec, cols: weight.elem_count(), activations: x.dtype(), save, statistics: OnceLock::new(), fourth }
    }

    fn sum(self, x: &Tensor, residual: &Tensor, parameters: &Tensor) -> Result<Tensor> {
        match self.save {
            true => x.apply_op3(parameters, residual, self),
            false => x.apply_op3_no_bwd(parameters, residual, &self),
        }
    }

    /// Whether a bias is among the parameters.
    fn has_bias(&self, parameters: &Shape) -> bool {
        parameters.elem_count() > self.cols
    }

    fn run<S: Kernels>(&self, [x, parameters, residual]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        let After { spec, cols, save, .. } = self;
        let part = |first| parameters.1.narrow(0, first, *cols);
        let weight = part(0)?;
        let bias = self.has_bias(parameters.1.shape()).then(|| part(*cols)).transpose()?;
        let (weight, bias) = ((parameters.0, &weight), bias.as_ref().map(|bias| (parameters.0, bias)));
        let sum = Cell::new();
        let call = |bias: Option<Operand<'_, S>>, next: Option<(Operand<'_, S>, &Shared)>| {
            let next_weight = next.map(|(weight, _)| weight);
            let added = AfterCall { spec, x, weight, bias, residual, next_weight, save: *save }.run()?;
            keep(&self.statistics, added.statistics)?;
            if let (Some((_, shared)), Some((y, statistics))) = (next, added.next) {
                shared.leave(y, statistics)?;
            }
            sum.put(added.residual_out);
            Ok(())
        };
        match &self.fourth {
            Fourth::None => call(bias, None)?,
            Fourth::Bias(bias) => S::lend(bias, |bias| call(Some(bias), None))?,
            Fourth::NextWeight(weight, shared) => S::lend(weight, |weight| call(bias, Some((weight, shared))))?,
        }
        match sum.take() {
            Some(residual_out) => Ok((residual_out, x.1.shape().clone())),
            None => bail!("a call has not run"),
        }
    }
}

impl CustomOp3 for After {
    fn name(&self) -> &'static str {
        self.spec.name()
    }

    on_devices!(run: s1 l1, s2 l2, s3 l3);

    /// The residual's gradient is the sum's; the norm's dy is that, in the dtype of x.
    fn bwd(
        &self,
        x: &Tensor,
        parameters: &Tensor,
        residual: &Tensor,
        _residual_out: &Tensor,
        dresidual_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dresidual = residual.track_op().then(|| dresidual_out.clone());
        if !x.track_op() && !parameters.track_op() {
            return Ok((None, None, dresidual));
        }
        let dy = dresidual_out.to_dtype(self.activations)?;
        if !self.has_bias(parameters.shape()) {
            let (dx, dweight, _) = differentiate(&self.spec, self.statistics.get(), &dy, x, parameters, None)?;
            return Ok((dx, dweight, dresidual));
        }
        let weight = parameters.narrow(0, 0, self.cols)?;
        let bias = parameters.narrow(0, self.cols, self.cols)?;
        let (dx, dweight, dbias) = differentiate(&self.spec, self.statistics.get(), &dy, x, &weight, Some(&bias))?;
        match (dweight, dbias) {
            (Some(dweight), Some(dbias)) => Ok((dx, Some(Tensor::cat(&[dweight, dbias], 0)?), dresidual)),
            (None, _) | (_, None) => bail!("parts of a tracked tensor are tracked"),
        }
    }
}
