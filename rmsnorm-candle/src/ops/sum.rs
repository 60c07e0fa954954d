//! The sum of residual and x, or of residual and the norm of x, and y, the norm of that sum: one
//! kernel but two nodes, because both have gradients and a node has one result.

use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use rmsnorm_core::{NormParams, ResidualPlacement};

use super::cell::Cell;
use super::differentiate::differentiate;
use super::gated::Gated;
use super::lend::lend;
use super::normalize::{Node, Normalize, keep};
use super::parameters::Parameters;
use crate::call::{ForwardCall, Kernels, Operand, Saved, Statistics};
use crate::check::Args;

/// The sum, from x, the norm's parameters and residual. The parameters are the weight or, if the
/// sum has a gradient of the bias, weight and bias in one tensor: candle takes no fourth tensor
/// with a gradient.
struct Sum {
    /// The norm, with the residual before or after it.
    spec: NormParams,
    parameters: Parameters,
    activations: DType,
    /// Whether there will be a backward pass.
    save: bool,
    /// The statistics of the norm of x.
    statistics: OnceLock<Saved>,
    /// Tensors that have no gradient from the sum: those of the next norm, and the gate.
    lent: [Option<Tensor>; 3],
    /// The node that receives y.
    y: Option<Arc<Node>>,
}

/// Returns y, if the call has one, and the sum. `args` has this `residual`; `x` and `residual` have
/// regular rows, the vectors are contiguous, and kernels take their dtypes.
pub(crate) fn apply(spec: NormParams, args: &Args<'_>, residual: &Tensor) -> Result<(Option<Tensor>, Tensor)> {
    let &Args { x, gate, weight, bias, next_weight, next_bias, .. } = args;
    let save = args.all().any(|(_, tensor)| tensor.track_op());
    // Detached are tensors on which the sum does not depend: candle panics if an argument in the
    // graph gets no gradient.
    let detached = |tensor: Option<&Tensor>| tensor.map(Tensor::detach);
    let ((tensor, parameters), of_y) = match spec.residual_placement {
        ResidualPlacement::Before => {
            (Parameters::join(&weight.detach(), detached(bias).as_ref())?, Some((weight, bias)))
        }
        ResidualPlacement::After => (Parameters::join(weight, bias)?, next_weight.map(|weight| (weight, next_bias))),
    };
    // The norm of the sum has no residual.
    let alone = NormParams { residual_placement: ResidualPlacement::default(), ..spec };
    let y = of_y.map(|_| Node::of_sum(alone, save));
    let sum = Sum {
        spec,
        parameters,
        activations: x.dtype(),
        save,
        statistics: OnceLock::new(),
        lent: [next_weight, next_bias, gate].map(detached),
        y: y.clone(),
    };
    let residual_out = match save {
        true => x.apply_op3(&tensor, residual, sum)?,
        false => x.apply_op3_no_bwd(&tensor, residual, &sum)?,
    };
    let y = y.zip(of_y).map(|(node, (weight, bias))| match gate {
        Some(gate) => Gated::of(node, &residual_out, (weight, bias), gate),
        None => Normalize::of(node, &residual_out, weight, bias),
    });
    Ok((y.transpose()?, residual_out))
}

impl Sum {
    fn run<S: Kernels>(&self, [x, parameters, residual]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        let Sum { spec, save, .. } = self;
        let sum = Cell::new();
        let call = |weight: Operand<'_, S>, bias: Option<Operand<'_, S>>, lent: [Option<Operand<'_, S>>; 3]| {
            let (residual, save, [next_weight, next_bias, gate]) = (Some(residual), *save, lent);
            let made = ForwardCall { spec, x, residual, weight, bias, gate, next_weight, next_bias, save }.run()?;
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
        let [next_weight, next_bias, gate] = self.lent.each_ref().map(Option::as_ref);
        self.parameters.lend(parameters, |weight, bias| {
            lend(next_weight, |next_weight| {
                lend(next_bias, |next_bias| lend(gate, |gate| call(weight, bias, [next_weight, next_bias, gate])))
            })
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
        let (weight, bias) = self.parameters.split(parameters)?;
        let made = differentiate(&self.spec, &self.statistics, &dy, x, &weight, bias.as_ref(), None)?;
        Ok((made.dx, self.parameters.gradient(parameters, (made.dweight, made.dbias))?, dresidual))
    }
}
