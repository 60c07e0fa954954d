//! y from what is normalized, h, and from weight and bias. The operation that gives a sum h computes y with it: such a y is taken, without
//! any work.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use rmsnorm_core::UnsizedNorm;

use super::cell::Cell;
use super::differentiate::differentiate;
use crate::call::{ForwardCall, Kernels, Operand, Saved, Statistics};

/// A `CustomOp2` of h and weight, and a `CustomOp3` of h, weight and bias.
pub(crate) struct Normalize(Arc<Node>);

/// What its node has.
pub(super) struct Node {
    spec: UnsizedNorm,
    /// Whether there will be a backward pass.
    save: bool,
    /// The y that is taken: a storage of some device.
    taken: Option<Cell<Box<dyn Any + Send>>>,
    statistics: OnceLock<Saved>,
}

impl Node {
    /// Of a norm of a sum: y is left here before the operation is applied.
    pub(super) fn of_sum(spec: UnsizedNorm, save: bool) -> Arc<Node> {
        Arc::new(Node { spec, save, taken: Some(Cell::new()), statistics: OnceLock::new() })
    }

    /// Leaves what the operation that gives the sum has computed.
    pub(super) fn leave<S: Kernels>(&self, y: Option<S>, statistics: Option<Saved>) -> Result<()> {
        if let (Some(taken), Some(y)) = (&self.taken, y) {
            taken.put(Box::new(y));
        }
        keep(&self.statistics, statistics)
    }
}

impl Normalize {
    /// y of x, which has regular rows; weight and bias are contiguous, and there are kernels for their dtypes.
    pub(crate) fn apply(spec: UnsizedNorm, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let save = [Some(x), Some(weight), bias].into_iter().flatten().any(Tensor::track_op);
        let node = Node { spec, save, taken: None, statistics: OnceLock::new() };
        Normalize::of(Arc::new(node), x, weight, bias)
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
        self.run(h, weight, None)
    }

    fn by_weight_and_bias<S: Kernels>(&self, [h, weight, bias]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        self.run(h, weight, Some(bias))
    }

    fn run<S: Kernels>(
        &self,
        h: Operand<'_, S>,
        weight: Operand<'_, S>,
        bias: Option<Operand<'_, S>>,
    ) -> Result<(S, Shape)> {
        let Node { spec, save, taken, statistics } = &*self.0;
        let y = if let Some(taken) = taken {
            taken.take().and_then(|y| y.downcast().ok()).map(|y| *y)
        } else {
            let call = ForwardCall { spec, x: h, residual: None, weight, bias, next_weight: None, save: *save };
            let made = call.run()?;
            keep(statistics, Statistics::of(made.mean, made.rstd))?;
            made.y
        };
        match y {
            Some(y) => Ok((y, h.1.shape().clone())),
            None => bail!("an operation is applied once"),
        }
    }

    /// Of h, weight and bias.
    fn differentiate(
        &self,
        dy: &Tensor,
        h: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        differentiate(&self.0.spec, &self.0.statistics, dy, h, weight, bias)
    }
}

/// Puts the statistics where `bwd` finds them.
pub(super) fn keep(cell: &OnceLock<Saved>, statistics: Option<Saved>) -> Result<()> {
    match statistics.map(|statistics| cell.set(statistics)) {
        Some(Err(_)) => bail!("an operation is applied once"),
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
