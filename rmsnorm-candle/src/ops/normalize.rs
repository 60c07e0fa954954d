//! y from x, weight and bias.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use rmsnorm_core::UnsizedNorm;

use super::differentiate::differentiate;
use crate::call::{ForwardCall, Kernels, Operand, Statistics};

/// A `CustomOp2` of x and weight, and a `CustomOp3` of x, weight and bias.
pub(crate) struct Normalize {
    spec: UnsizedNorm,
    /// Whether there will be a backward pass.
    save: bool,
    statistics: OnceLock<Statistics>,
}

impl Normalize {
    /// Applies it: `x` has regular rows, weight and bias are contiguous, and there are kernels for their dtypes.
    pub(crate) fn apply(spec: UnsizedNorm, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let save = x.track_op() || weight.track_op() || bias.is_some_and(|bias| bias.track_op());
        let op = Normalize { spec, save, statistics: OnceLock::new() };
        match (bias, save) {
            (None, true) => x.apply_op2(weight, op),
            (None, false) => x.apply_op2_no_bwd(weight, &op),
            (Some(bias), true) => x.apply_op3(weight, bias, op),
            (Some(bias), false) => x.apply_op3_no_bwd(weight, bias, &op),
        }
    }

    fn by_weight<S: Kernels>(&self, [x, weight]: [Operand<'_, S>; 2]) -> Result<(S, Shape)> {
        self.run(x, weight, None)
    }

    fn by_weight_and_bias<S: Kernels>(&self, [x, weight, bias]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        self.run(x, weight, Some(bias))
    }

    fn run<S: Kernels>(
        &self,
        x: Operand<'_, S>,
        weight: Operand<'_, S>,
        bias: Option<Operand<'_, S>>,
    ) -> Result<(S, Shape)> {
        let call = ForwardCall { spec: &self.spec, x, residual: None, weight, bias, save: self.save };
        let normalized = call.run()?;
        keep(&self.statistics, normalized.statistics)?;
        Ok((normalized.y, x.1.shape().clone()))
    }
}

/// Puts the statistics where `bwd` finds them.
pub(super) fn keep(cell: &OnceLock<Statistics>, statistics: Option<Statistics>) -> Result<()> {
    match statistics.map(|statistics| cell.set(statistics)) {
        Some(Err(_)) => bail!("an operation is applied once"),
        Some(Ok(())) | None => Ok(()),
    }
}

impl CustomOp2 for Normalize {
    fn name(&self) -> &'static str {
        self.spec.name()
    }

    on_devices!(by_weight: s1 l1, s2 l2);

    fn bwd(&self, x: &Tensor, weight: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dx, dweight, _) = differentiate(&self.spec, self.statistics.get(), dy, x, weight, None)?;
        Ok((dx, dweight))
    }
}

impl CustomOp3 for Normalize {
    fn name(&self) -> &'static str {
        self.spec.name()
    }

    on_devices!(by_weight_and_bias: s1 l1, s2 l2, s3 l3);

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        differentiate(&self.spec, self.statistics.get(), dy, x, weight, Some(bias))
    }
}
