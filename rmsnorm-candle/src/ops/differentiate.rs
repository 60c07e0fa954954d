//! dx, dweight and dbias from one fused call inside a `bwd`.

use std::sync::OnceLock;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail};
use rmsnorm_core::{NormParams, Tensor as Name, TensorSet};

use super::cell::Cell;
use crate::call::{BackwardCall, Kernels, Operand, Saved};
use crate::rows::regular;

/// The gradients of x (in its dtype), weight and bias, each only if it is tracked.
pub(super) fn differentiate(
    spec: &NormParams,
    statistics: &OnceLock<Saved>,
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
    let Some(statistics) = statistics.get() else { bail!("{}: forward saved no statistics for backward", spec.name()) };
    let is_wanted = bias.is_some_and(Tensor::track_op);
    let wanted = TensorSet::NONE.set(Name::Dweight, weight.track_op()).set(Name::Dbias, is_wanted);
    let op = Differentiate { spec, statistics, wanted, parameters: Cell::new() };
    let dx = regular(dy)?.apply_op3_no_bwd(x, weight, &op)?;
    let Some((dweight, dbias)) = op.parameters.take() else {
        bail!("{}: backward computed no gradients of parameters", spec.name())
    };
    let vector = |storage| Tensor::from_storage(storage, weight.shape().clone(), BackpropOp::none(), false);
    Ok((x.track_op().then_some(dx), dweight.map(vector), dbias.map(vector)))
}

/// dx from dy, x and weight. It is a custom operation because candle passes storages to these under
/// a lock that can be taken twice.
struct Differentiate<'a> {
    spec: &'a NormParams,
    statistics: &'a Saved,
    wanted: TensorSet,
    /// dweight and dbias.
    parameters: Cell<(Option<Storage>, Option<Storage>)>,
}

impl Differentiate<'_> {
    fn run<S: Kernels>(&self, [dy, x, weight]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        let Differentiate { spec, statistics, wanted, .. } = *self;
        let Some(statistics) = statistics.downcast_ref() else {
            bail!("backward must run on the device of the forward pass")
        };
        let gradients = BackwardCall { spec, dy, x, weight, statistics, wanted }.run()?;
        self.parameters.put((gradients.dweight.map(S::into_storage), gradients.dbias.map(S::into_storage)));
        Ok((gradients.dx, x.1.shape().clone()))
    }
}

impl CustomOp3 for Differentiate<'_> {
    fn name(&self) -> &'static str {
        self.spec.name()
    }

    on_devices!(run: s1 l1, s2 l2, s3 l3);
}
