//! The norm of a sum that was computed with the sum: a node without any work.

use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail};
use rmsnorm_core::UnsizedNorm;

use super::cell::Cell;
use super::differentiate::differentiate;
use super::normalize::keep;
use crate::call::{Kernels, Operand, Statistics};

/// What the operation that gives the sum leaves for [`Take`].
pub(super) struct Shared {
    /// Of the norm of the sum.
    spec: UnsizedNorm,
    y: Cell<Storage>,
    statistics: OnceLock<Statistics>,
}

impl Shared {
    pub(super) const fn new(spec: UnsizedNorm) -> Self {
        Shared { spec, y: Cell::new(), statistics: OnceLock::new() }
    }

    pub(super) const fn spec(&self) -> &UnsizedNorm {
        &self.spec
    }

    pub(super) fn leave<S: Kernels>(&self, y: S, statistics: Option<Statistics>) -> Result<()> {
        self.y.put(y.into_storage());
        keep(&self.statistics, statistics)
    }
}

/// y from the sum, weight and bias: what was left.
pub(super) struct Take(Arc<Shared>);

impl Take {
    /// Applies it; `save` says whether there will be a backward pass.
    pub(super) fn apply(
        shared: Arc<Shared>,
        save: bool,
        sum: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        match (bias, save) {
            (_, false) => sum.apply_op2_no_bwd(weight, &Take(shared)),
            (None, true) => sum.apply_op2(weight, Take(shared)),
            (Some(bias), true) => sum.apply_op3(weight, bias, Take(shared)),
        }
    }

    fn take<S: Kernels, const N: usize>(&self, operands: [Operand<'_, S>; N]) -> Result<(S, Shape)> {
        match (self.0.y.take().and_then(S::from_storage), operands.first()) {
            (Some(y), Some(sum)) => Ok((y, sum.1.shape().clone())),
            (None, _) | (_, None) => bail!("an operation is applied once"),
        }
    }
}

impl CustomOp2 for Take {
    fn name(&self) -> &'static str {
        self.0.spec.name()
    }

    on_devices!(take: s1 l1, s2 l2);

    fn bwd(&self, h: &Tensor, weight: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dh, dweight, _) = differentiate(&self.0.spec, self.0.statistics.get(), dy, h, weight, None)?;
        Ok((dh, dweight))
    }
}

impl CustomOp3 for Take {
    fn name(&self) -> &'static str {
        self.0.spec.name()
    }

    on_devices!(take: s1 l1, s2 l2, s3 l3);

    fn bwd(
        &self,
        h: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        differentiate(&self.0.spec, self.0.statistics.get(), dy, h, weight, Some(bias))
    }
}
