//! Overwrites x with y.

use candle_core::{CpuStorage, InplaceOp2, InplaceOp3, Layout, Result, Tensor};
use rmsnorm_core::NormParams;

use crate::call::{Kernels, Operand, overwrite};

/// An `InplaceOp2` of x and weight, and an `InplaceOp3` of x, weight and bias.
struct InPlace(NormParams);

/// Overwrites `x`. Its rows are regular, weight and bias are contiguous, and kernels take their
/// dtypes.
pub(crate) fn apply(spec: NormParams, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    match bias {
        None => x.inplace_op2(weight, &InPlace(spec)),
        Some(bias) => x.inplace_op3(weight, bias, &InPlace(spec)),
    }
}

impl InPlace {
    fn by_weight<S: Kernels>(&self, x: (&mut S, &Layout), [weight]: [Operand<'_, S>; 1]) -> Result<()> {
        overwrite(&self.0, x, weight, None)
    }

    fn by_weight_and_bias<S: Kernels>(&self, x: (&mut S, &Layout), [weight, bias]: [Operand<'_, S>; 2]) -> Result<()> {
        overwrite(&self.0, x, weight, Some(bias))
    }
}

impl InplaceOp2 for InPlace {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    on_devices!(by_weight over s1 l1: s2 l2);
}

impl InplaceOp3 for InPlace {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    on_devices!(by_weight_and_bias over s1 l1: s2 l2, s3 l3);
}
