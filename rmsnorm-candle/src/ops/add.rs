//! y and the sum of x and residual: one kernel, two nodes, since both have gradients and a node has one result.

use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, bail};

use super::cell::Cell;
use super::differentiate::differentiate;
use super::normalize::keep;
use crate::call::{ForwardCall, Kernels, Operand, Statistics, Wanted};
use crate::spec::Spec;

/// What [`Add`] leaves for [`Take`].
struct Shared {
    spec: Spec,
    y: Cell<Storage>,
    statistics: OnceLock<Statistics>,
}

/// residual + x, from x, residual and weight.
pub(crate) struct Add {
    activations: DType,
    /// Whether there will be a backward pass.
    save: bool,
    shared: Arc<Shared>,
}

impl Add {
    /// Applies it: y and the sum. `x` and `residual` have regular rows, weight is contiguous, and there are kernels for their
    /// dtypes.
    pub(crate) fn apply(spec: Spec, x: &Tensor, residual: &Tensor, weight: &Tensor) -> Result<(Tensor, Tensor)> {
        let shared = Arc::new(Shared { spec, y: Cell::new(), statistics: OnceLock::new() });
        let save = x.track_op() || residual.track_op() || weight.track_op();
        let op = Add { activations: x.dtype(), save, shared: shared.clone() };
        if !save {
            let residual_out = x.apply_op3_no_bwd(residual, weight, &op)?;
            return Ok((residual_out.apply_op2_no_bwd(weight, &Take(shared))?, residual_out));
        }
        // Detached: the sum does not depend on the weight, and candle panics where an argument in the graph gets no gradient.
        let residual_out = x.apply_op3(residual, &weight.detach(), op)?;
        Ok((residual_out.apply_op2(weight, Take(shared))?, residual_out))
    }

    fn run<S: Kernels>(&self, [x, residual, weight]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        let (spec, save) = (&self.shared.spec, self.save);
        let normalized = ForwardCall { spec, x, residual: Some(residual), weight, bias: None, save }.run()?;
        keep(&self.shared.statistics, normalized.statistics)?;
        self.shared.y.put(normalized.y.into_storage());
        match normalized.residual_out {
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

/// y from the sum and weight: what [`Add`] has computed.
struct Take(Arc<Shared>);

impl Take {
    fn take<S: Kernels>(&self, [sum, _]: [Operand<'_, S>; 2]) -> Result<(S, Shape)> {
        match self.0.y.take().and_then(S::from_storage) {
            Some(y) => Ok((y, sum.1.shape().clone())),
            None => bail!("an operation is applied once"),
        }
    }
}

impl CustomOp2 for Take {
    fn name(&self) -> &'static str {
        self.0.spec.name()
    }

    on_devices!(take: s1 l1, s2 l2);

    fn bwd(&self, h: &Tensor, weight: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let wanted = Wanted { dweight: weight.track_op(), dbias: false };
        let (dh, dweight, _) = differentiate(&self.0.spec, self.0.statistics.get(), dy, h, weight, wanted)?;
        Ok((dh, dweight))
    }
}
