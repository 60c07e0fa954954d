//! y from h, weight and bias. If another operation computes h as a sum, it computes y in the same
//! kernel, and this operation only takes that y.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use rmsnorm_core::NormParams;

use super::cell::Cell;
use super::differentiate::differentiate;
use crate::call::{ForwardCall, Kernels, Operand, Saved, Statistics};

/// A `CustomOp2` of h and weight, and a `CustomOp3` of h, weight and bias.
pub(crate) struct Normalize(Arc<Node>);

/// The state of its node.
pub(super) struct Node {
    pub(super) spec: NormParams,
    /// Whether there will be a backward pass.
    pub(super) save: bool,
    /// The y to take, if a sum computes it: a storage of some device.
    taken: Option<Cell<Box<dyn Any + Send>>>,
    pub(super) statistics: OnceLock<Saved>,
}

impl Node {
    /// The node of a norm that no other operation computes.
    pub(super) fn alone(spec: NormParams, save: bool) -> Arc<Node> {
        Arc::new(Node { spec, save, taken: None, statistics: OnceLock::new() })
    }

    /// The node of a norm of a sum; the sum's operation stores y here before this operation is
    /// applied.
    pub(super) fn of_sum(spec: NormParams, save: bool) -> Arc<Node> {
        Arc::new(Node { spec, save, taken: Some(Cell::new()), statistics: OnceLock::new() })
    }

    /// Stores the y and statistics that the sum's operation computed.
    pub(super) fn leave<S: Kernels>(&self, y: Option<S>, statistics: Option<Saved>) -> Result<()> {
        if let (Some(taken), Some(y)) = (&self.taken, y) {
            taken.put(Box::new(y));
        }
        keep(&self.statistics, statistics)
    }

    /// y, taken or computed. `None` if it was taken before.
    pub(super) fn y<S: Kernels>(
        &self,
        h: Operand<'_, S>,
        weight: Operand<'_, S>,
        bias: Option<Operand<'_, S>>,
        gate: Option<Operand<'_, S>>,
    ) -> Result<Option<S>> {
        let Node { spec, save, taken, statistics } = self;
        if let Some(taken) = taken {
            return Ok(taken.take().and_then(|y| y.downcast().ok()).map(|y| *y));
        }
        let (residual, next_weight, next_bias) = (None, None, None);
        let made =
            ForwardCall { spec, x: h, residual, weight, bias, gate, next_weight, next_bias, save: *save }.run()?;
        keep(statistics, Statistics::of(made.mean, made.rstd))?;
        Ok(made.y)
    }

    /// The result of the operation.
    pub(super) fn applied<S: Kernels>(y: Option<S>, h: Operand<'_, S>) -> Result<(S, Shape)> {
        match y {
            Some(y) => Ok((y, h.1.shape().clone())),
            None => bail!("this operation was applied before, and can be applied once"),
        }
    }
}

impl Normalize {
    /// y of x. Its rows are regular, weight and bias are contiguous, and kernels take their dtypes.
    pub(crate) fn apply(spec: NormParams, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let save = [Some(x), Some(weight), bias].into_iter().flatten().any(Tensor::track_op);
        Normalize::of(Node::alone(spec, save), x, weight, bias)
    }

    /// y of h.
    pub(super) fn of(node: Arc<Node>, h: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match (bias, node.save) {
            (None, true) => h.apply_op2(weight, Normalize(node)),
            (None, false) => h.apply_op2_no_bwd(weight, &Normalize(node)),
            (Some(bias), true) => h.apply_op3(weight, bias, Normalize(node)),
            (Some(bias), false) => h.apply_op3_no_bwd(weight, bias, &Normalize(node)),
        }
    }

    fn by_weight<S: Kernels>(&self, [h, weight]: [Operand<'_, S>; 2]) -> Result<(S, Shape)> {
        Node::applied(self.0.y(h, weight, None, None)?, h)
    }

    fn by_weight_and_bias<S: Kernels>(&self, [h, weight, bias]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        Node::applied(self.0.y(h, weight, Some(bias), None)?, h)
    }

    /// The gradients of h, weight and bias.
    fn differentiate(
        &self,
        dy: &Tensor,
        h: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let made = differentiate(&self.0.spec, &self.0.statistics, dy, h, weight, bias, None)?;
        Ok((made.dx, made.dweight, made.dbias))
    }
}

/// Stores the statistics for `bwd`.
pub(super) fn keep(cell: &OnceLock<Saved>, statistics: Option<Saved>) -> Result<()> {
    match statistics.map(|statistics| cell.set(statistics)) {
        Some(Err(_)) => bail!("this operation was applied before, and can be applied once"),
        Some(Ok(())) | None => Ok(()),
    }
}

impl CustomOp2 for Normalize {
    fn name(&self) -> &'static str {
        self.0.spec.name()
    }

    on_devices!(by_weight: s1 l1, s2 l2);

    fn bwd(&self, h: &Tensor, weight: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dh, dweight, _) = self.differentiate(dy, h, weight, None)?;
        Ok((dh, dweight))
    }
}

impl CustomOp3 for Normalize {
    fn name(&self) -> &'static str {
        self.0.spec.name()
    }

    on_devices!(by_weight_and_bias: s1 l1, s2 l2, s3 l3);

    fn bwd(
        &self,
        h: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        self.differentiate(dy, h, weight, Some(bias))
    }
}
