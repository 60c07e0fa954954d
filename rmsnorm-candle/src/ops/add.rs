//! y and the sum of x and residual: one kernel, two nodes, since both have gradients and a node has one result.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use rmsnorm_core::UnsizedNorm;

use super::cell::Cell;
use super::take::{Shared, Take};
use crate::call::{ForwardCall, Kernels, Operand};

/// residual + x, from x, residual and weight.
pub(crate) struct Add {
    activations: DType,
    /// A fourth tensor, which candle has no place for.
    bias: Option<Tensor>,
    /// Whether there will be a backward pass.
    save: bool,
    shared: Arc<Shared>,
}

impl Add {
    /// Applies it: y and the sum. `x` and `residual` have regular rows, weight and bias are contiguous, and there are kernels for
    /// their dtypes.
    pub(crate) fn apply(
        spec: UnsizedNorm,
        x: &Tensor,
        residual: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let shared = Arc::new(Shared::new(spec));
        let mut inputs = [Some(x), Some(residual), Some(weight), bias].into_iter().flatten();
        let save = inputs.any(Tensor::track_op);
        // Detached: the sum depends on neither, and candle panics where an argument in the graph gets no gradient.
        let op = Add { activations: x.dtype(), bias: bias.map(Tensor::detach), save, shared: shared.clone() };
        let residual_out = match save {
            true => x.apply_op3(residual, &weight.detach(), op)?,
            false => x.apply_op3_no_bwd(residual, weight, &op)?,
        };
        Ok((Take::apply(shared, save, &residual_out, weight, bias)?, residual_out))
    }

    fn run<S: Kernels>(&self, [x, residual, weight]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        let sum = Cell::new();
        let call = |bias: Option<Operand<'_, S>>| {
            let (spec, save) = (self.shared.spec(), self.save);
            let normalized = ForwardCall { spec, x, residual: Some(residual), weight, bias, save }.run()?;
            self.shared.leave(normalized.y, normalized.statistics)?;
            if let Some(residual_out) = normalized.residual_out {
                sum.put(residual_out);
            }
            Ok(())
        };
        match &self.bias {
            None => call(None)?,
            Some(bias) => S::lend(bias, |bias| call(Some(bias)))?,
        }
        match sum.take() {
            Some(residual_out) => Ok((residual_out, x.1.shape().clone())),
            None => bail!("a call with a residual has no sum"),
        }
    }
}

impl CustomOp3 for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    on_devices!(run: s1 l1, s2 l2, s3 l3);

    /// The gradient of a sum, in the dtype of each summand.
    fn bwd(
        &self,
        x: &Tensor,
        residual: &Tensor,
        _weight: &Tensor,
        _residual_out: &Tensor,
        dresidual_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dx = x.track_op().then(|| dresidual_out.to_dtype(self.activations)).transpose()?;
        Ok((dx, residual.track_op().then(|| dresidual_out.clone()), None))
    }
}
