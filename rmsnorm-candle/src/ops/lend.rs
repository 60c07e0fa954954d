//! The storages of more tensors, for an operation that gets three from candle.

use std::any::Any;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use crate::call::{Kernels, Operand};

/// Calls `f` with the storage of a tensor of the device, or with none for none.
pub(super) fn lend<S: Kernels>(
    tensor: Option<&Tensor>,
    f: impl Fn(Option<Operand<'_, S>>) -> Result<()>,
) -> Result<()> {
    let Some(tensor) = tensor else { return f(None) };
    let lent = |storage: &dyn Any, layout: &Layout| match storage.downcast_ref::<S>() {
        Some(storage) => f(Some((storage, layout))),
        None => bail!("all tensors of a call must be on one device"),
    };
    tensor.apply_op1_no_bwd(&Lend(lent)).map(|_| ())
}

/// An operation that only receives a storage, and has an empty result.
struct Lend<F>(F);

impl<F: Fn(&dyn Any, &Layout) -> Result<()>> Lend<F> {
    fn run<S: Kernels>(&self, [(storage, layout)]: [Operand<'_, S>; 1]) -> Result<(S, Shape)> {
        (self.0)(storage, layout)?;
        Ok((storage.nothing()?, Shape::from(0)))
    }
}

impl<F: Fn(&dyn Any, &Layout) -> Result<()>> CustomOp1 for Lend<F> {
    fn name(&self) -> &'static str {
        "lend"
    }

    on_devices!(run: s1 l1);
}
