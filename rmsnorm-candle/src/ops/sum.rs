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
    fourth: Fourth,
    /// The node that receives y.
    y: Option<Arc<Node>>,
}

/// A fourth tensor, which has no gradient from the sum.
enum Fourth {
    None,
    Bias(Tensor),
    NextWeight(Tensor),
}

/// Returns y and x + residual. In this function and the following, `x` and `residual` have regular
/// rows, weight and bias are contiguous, and kernels take their dtypes. `spec` is the spec of the
/// norms.
pub(crate) fn add_normalize(
    spec: NormParams,
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let mut inputs = [Some(x), Some(residual), Some(weight), bias].into_iter().flatten();
    let save = inputs.any(Tensor::track_op);
    let y = Node::of_sum(spec, save);
    // Detached, because the sum depends on neither, and candle panics if an argument in the graph
    // gets no gradient.
    let fourth = bias.map_or(Fourth::None, |bias| Fourth::Bias(bias.detach()));
    let residual_out =
        Sum { y: Some(y.clone()), ..Sum::new(spec, x, weight, save, fourth) }.apply(x, &weight.detach(), residual)?;
    Ok((Normalize::of(y, &residual_out, weight, bias)?, residual_out))
}

/// Returns residual + norm(x).
pub(crate) fn normalize_add(
    spec: NormParams,
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
    Sum::new(spec.residual_after(), x, weight, save, fourth).apply(x, &parameters, residual)
}

/// Returns y and residual + norm(x). `next_weight` meets the conditions of the weight.
pub(crate) fn normalize_add_normalize(
    spec: NormParams,
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    next_weight: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let save = [x, residual, weight, next_weight].into_iter().any(Tensor::track_op);
    let y = Node::of_sum(spec, save);
    // Detached, because the sum does not depend on it.
    let fourth = Fourth::NextWeight(next_weight.detach());
    let sum = Sum { y: Some(y.clone()), ..Sum::new(spec.residual_after(), x, weight, save, fourth) };
    let residual_out = sum.apply(x, weight, residual)?;
    Ok((Normalize::of(y, &residual_out, next_weight, None)?, residual_out))
}

impl Sum {
    fn new(spec: NormParams, x: &Tensor, weight: &Tensor, save: bool, fourth: Fourth) -> Self {
        let (cols, activations, statistics) = (weight.elem_count(), x.dtype(), OnceLock::new());
        Sum { spec, cols, activations, save, statistics, fourth, y: None }
    }

    fn apply(self, x: &Tensor, parameters: &Tensor, residual: &Tensor) -> Result<Tensor> {
        match self.save {
            true => x.apply_op3(parameters, residual, self),
            false => x.apply_op3_no_bwd(parameters, residual, &self),
        }
    }

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
        let call = |bias: Option<Operand<'_, S>>, next_weight: Option<Operand<'_, S>>| {
            let residual = Some(residual);
            let made = ForwardCall { spec, x, residual, weight, bias, next_weight, save: *save }.run()?;
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
        match &self.fourth {
            Fourth::None => call(bias, None)?,
            Fourth::Bias(bias) => lend(bias, |bias| call(Some(bias), None))?,
            Fourth::NextWeight(weight) => lend(weight, |weight| call(bias, Some(weight)))?,
        }
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
