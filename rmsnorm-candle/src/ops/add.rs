//! y and the sum of x and residual: one kernel, two nodes, since both have gradients and a node has one result.

use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};

use super::cell::Cell;
use super::differentiate::differentiate;
use super::normalize::keep;
use crate::cpu::{ForwardCall, Statistics, Wanted};
use crate::spec::Spec;

/// What [`Add`] leaves for [`Take`].
struct Shared {
    spec: Spec,
    y: Cell<CpuStorage>,
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
}

impl CustomOp3 for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (spec, save) = (&self.shared.spec, self.save);
        let call = ForwardCall { spec, x: (s1, l1), residual: Some((s2, l2)), weight: (s3, l3), bias: None, save };
        let normalized = call.run()?;
        keep(&self.shared.statistics, normalized.statistics)?;
        self.shared.y.put(normalized.y);
        Ok((normalized.residual_out, l1.shape().clone()))
    }

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

impl CustomOp2 for Take {
    fn name(&self) -> &'static str {
        self.0.spec.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, l1: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.0.y.take() {
            Some(y) => Ok((y, l1.shape().clone())),
            None => bail!("an operation is applied once"),
        }
    }

    fn bwd(&self, h: &Tensor, weight: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let wanted = Wanted { dweight: weight.track_op(), dbias: false };
        let (dh, dweight, _) = differentiate(&self.0.spec, self.0.statistics.get(), dy, h, weight, wanted)?;
        Ok((dh, dweight))
    }
}
