//! The gradients from one fused call inside a `bwd`.

use std::sync::OnceLock;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail};
use rmsnorm_core::{NormParams, Slot, Tensor as Name, TensorSet};

use super::cell::Cell;
use super::lend::lend;
use crate::call::{BackwardCall, Kernels, Operand, Saved};
use crate::rows::regular;

/// The gradients of x (in its dtype), weight, bias and gate, each only if it is tracked.
pub(super) struct Made {
    pub(super) dx: Option<Tensor>,
    pub(super) dweight: Option<Tensor>,
    pub(super) dbias: Option<Tensor>,
    pub(super) dgate: Option<Tensor>,
}

/// Runs backward.
pub(super) fn differentiate(
    spec: &NormParams,
    statistics: &OnceLock<Saved>,
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    gate: Option<&Tensor>,
) -> Result<Made> {
    let Some(statistics) = statistics.get() else { bail!("{}: forward saved no statistics for backward", spec.name()) };
    let is_tracked = |tensor: Option<&Tensor>| tensor.is_some_and(Tensor::track_op);
    let wanted = TensorSet::NONE.set(Name::Dweight, weight.track_op()).set(Name::Dbias, is_tracked(bias));
    let wanted = wanted.set(Name::Dgate, is_tracked(gate));
    // Only a gate after the norm makes backward need the bias.
    let is_after = spec.gate.is_some_and(|gate| gate.slot == Slot::After);
    let op = Differentiate { spec, statistics, wanted, bias: bias.filter(|_| is_after), gate, others: Cell::new() };
    let dx = regular(dy)?.apply_op3_no_bwd(x, weight, &op)?;
    let Some([dweight, dbias, dgate]) = op.others.take() else {
        bail!("{}: backward computed no gradients of parameters", spec.name())
    };
    let tensor = |like: &Tensor, storage: Option<Storage>| {
        storage.map(|storage| Tensor::from_storage(storage, like.shape().clone(), BackpropOp::none(), false))
    };
    let (dweight, dbias, dgate) = (tensor(weight, dweight), tensor(weight, dbias), tensor(x, dgate));
    Ok(Made { dx: x.track_op().then_some(dx), dweight, dbias, dgate })
}

/// dx from dy, x and weight. It is a custom operation because candle passes storages to these under
/// a lock that can be taken twice.
struct Differentiate<'a> {
    spec: &'a NormParams,
    statistics: &'a Saved,
    wanted: TensorSet,
    bias: Option<&'a Tensor>,
    gate: Option<&'a Tensor>,
    /// dweight, dbias and dgate.
    others: Cell<[Option<Storage>; 3]>,
}

impl Differentiate<'_> {
    fn run<S: Kernels>(&self, [dy, x, weight]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        let Differentiate { spec, statistics, wanted, .. } = *self;
        let Some(statistics) = statistics.downcast_ref() else {
            bail!("backward must run on the device of the forward pass")
        };
        let dx = Cell::new();
        lend(self.bias, |bias| {
            lend(self.gate, |gate| {
                let made = BackwardCall { spec, dy, x, weight, bias, gate, statistics, wanted }.run()?;
                self.others.put([made.dweight, made.dbias, made.dgate].map(|made| made.map(S::into_storage)));
                dx.put(made.dx);
                Ok(())
            })
        })?;
        match dx.take() {
            Some(dx) => Ok((dx, x.1.shape().clone())),
            None => bail!("{}: backward computed no gradient of x", spec.name()),
        }
    }
}

impl CustomOp3 for Differentiate<'_> {
    fn name(&self) -> &'static str {
        self.spec.name()
    }

    on_devices!(run: s1 l1, s2 l2, s3 l3);
}
