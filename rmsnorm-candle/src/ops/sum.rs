//! The sum of residual and x, or of residual and the norm of x, and y, the norm of that sum: one
//! kernel but two nodes, because both have gradients and a node has one result.

use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use rmsnorm_core::{NormParams, ResidualPlacement};

use super::cell::Cell;
use super::differentiate::differentiate;
use super::lend::lend;
use super::normalize::{Node, Normalize, keep};
use crate::call::{ForwardCall, Kernels, Operand, Saved, Statistics};
use crate::check::Args;

/// The sum, from x, the norm's parameters and residual. The parameters are the weight or, if the
/// sum has a gradient of the bias, weight and bias in one tensor: candle takes no fourth tensor
/// with a gradient.
struct Sum {
    /// The norm, with the residual before or after it.
    spec: NormParams,
    cols: usize,
    activations: DType,
    /// Whether there will be a backward pass.
    save: bool,
    /// The statistics of the norm of x.
    statistics: OnceLock<Saved>,
    /// Tensors that have no gradient from the sum: the bias if it is not in the parameters, and those of the next norm.
    bias: Option<Tensor>,
    next: [Option<Tensor>; 2],
    /// The node that receives y.
    y: Option<Arc<Node>>,
}

/// Returns y, if the call has one, and the sum. `args` has this `residual`; `x` and `residual` have
/// regular rows, the vectors are contiguous, and kernels take their dtypes.
pub(crate) fn apply(spec: NormParams, args: &Args<'_>, residual: &Tensor) -> Result<(Option<Tensor>, Tensor)> {
    let &Args { x, weight, bias, next_weight, next_bias, .. } = args;
    let save = args.all().any(|(_, tensor)| tensor.track_op());
    // Detached are tensors on which the sum does not depend: candle panics if an argument in the
    // graph gets no gradient.
    let detached = |tensor: Option<&Tensor>| tensor.map(Tensor::detach);
    let (parameters, lent, of_y) = match (spec.residual_placement, bias) {
        (ResidualPlacement::Before, _) => (weight.detach(), detached(bias), Some((weight, bias))),
        (ResidualPlacement::After, Some(bias)) if bias.track_op() => {
            (Tensor::cat(&[weight, bias], 0)?, None, next_weight.map(|weight| (weight, next_bias)))
        }
        (ResidualPlacement::After, _) => (weight.clone(), bias.cloned(), next_weight.map(|weight| (weight, next_bias))),
    };
    // The norm of the sum has no residual.
    let alone = NormParams { residual_placement: ResidualPlacement::default(), ..spec };
    let y = of_y.map(|_| Node::of_sum(alone, save));
    let sum = Sum {
        spec,
        cols: weight.elem_count(),
        activations: x.dtype(),
        save,
        statistics: OnceLock::new(),
        bias: lent,
        next: [next_weight, next_bias].map(detached),
        y: y.clone(),
    };
    let residual_out = match save {
        true => x.apply_op3(&parameters, residual, sum)?,
        false => x.apply_op3_no_bwd(&parameters, residual, &sum)?,
    };
    let y = y.zip(of_y).map(|(node, (weight, bias))| Normalize::of(node, &residual_out, weight, bias)).transpose()?;
    Ok((y, residual_out))
}

impl Sum {
    /// Whether the parameters contain a bias.
    fn has_bias(&self, parameters: &Shape) -> bool {
        parameters.elem_count() > self.cols
    }

    fn run<S: Kernels>(&self, [x, parameters, residual]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        let Sum { spec, cols, save, .. } = self;
        let part = |first| parameters.1.narrow(0, first, *cols);
        let weight = part(0)?;
        let bias = self.has_bias(parameters.1.shape()).then(|| part(*cols)).transpose()?;
        let (weight, bias) = ((parameters.0, &weight), bias.as_ref().map(|bias| (parameters.0, bias)));
        let sum = Cell::new();
        let call = |bias: Option<Operand<'_, S>>, [next_weight, next_bias]: [Option<Operand<'_, S>>; 2]| {
            let (residual, save) = (Some(residual), *save);
            let made = ForwardCall { spec, x, residual, weight, bias, next_weight, next_bias, save }.run()?;
            let mut of_y = Statistics::of(made.mean, made.rstd);
            if spec.residual_placement == ResidualPlacement::After {
                keep(&self.statistics, of_y)?;
                of_y = Statistics::of(made.next_mean, made.next_rstd);
            }
            if let Some(y) = &self.y {
                y.leave(made.y, of_y)?;
            }
            if let Some(residual_out) = made.residual_out {
                sum.put(residual_out);
            }
            Ok(())
        };
        let [next_weight, next_bias] = self.next.each_ref().map(Option::as_ref);
        lend(self.bias.as_ref(), |lent| {
            lend(next_weight, |next_weight| lend(next_bias, |next_bias| call(lent.or(bias), [next_weight, next_bias])))
        })?;
        match sum.take() {
            Some(residual_out) => Ok((residual_out, x.1.shape().clone())),
            None => bail!("{}: forward computed no sum with the residual", spec.name()),
        }
    }
}

impl CustomOp3 for Sum {
    fn name(&self) -> &'static str {
        match self.spec.residual_placement {
            ResidualPlacement::Before => "add",
            ResidualPlacement::After => self.spec.name(),
        }
    }

    on_devices!(run: s1 l1, s2 l2, s3 l3);

    /// The gradients of the sum: unchanged for the residual; in the dtype of x for x, or as dy of
    /// the norm.
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
        if self.spec.residual_placement == ResidualPlacement::Before {
            return Ok((Some(dy), None, dresidual));
        }
        if !self.has_bias(parameters.shape()) {
            let (dx, dweight, _) = differentiate(&self.spec, &self.statistics, &dy, x, parameters, None)?;
            return Ok((dx, dweight, dresidual));
        }
        let weight = parameters.narrow(0, 0, self.cols)?;
        let bias = parameters.narrow(0, self.cols, self.cols)?;
        let (dx, dweight, dbias) = differentiate(&self.spec, &self.statistics, &dy, x, &weight, Some(&bias))?;
        match (dweight, dbias) {
            (Some(dweight), Some(dbias)) => Ok((dx, Some(Tensor::cat(&[dweight, dbias], 0)?), dresidual)),
            (None, _) | (_, None) => bail!("backward computed no gradient of the weight or of the bias"),
        }
    }
}
