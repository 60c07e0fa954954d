//! y over x.

use candle_core::{CpuStorage, InplaceOp2, InplaceOp3, Layout, Result, Tensor};

use crate::cpu::InPlaceCall;
use crate::spec::Spec;

/// An `InplaceOp2` of x and weight, and an `InplaceOp3` of x, weight and bias.
struct InPlace(Spec);

/// Overwrites `x`, which has regular rows; weight and bias are contiguous, and there are kernels for their dtypes.
pub(crate) fn apply(spec: Spec, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    match bias {
        None => x.inplace_op2(weight, &InPlace(spec)),
        Some(bias) => x.inplace_op3(weight, bias, &InPlace(spec)),
    }
}

impl InplaceOp2 for InPlace {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn cpu_fwd(&self, s1: &mut CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<()> {
        InPlaceCall { spec: &self.0, x: (s1, l1), weight: (s2, l2), bias: None }.run()
    }
}

impl InplaceOp3 for InPlace {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn cpu_fwd(
        &self,
        s1: &mut CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<()> {
        InPlaceCall { spec: &self.0, x: (s1, l1), weight: (s2, l2), bias: Some((s3, l3)) }.run()
    }
}
