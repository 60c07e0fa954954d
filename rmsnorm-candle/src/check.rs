//! Checks of every call, on both paths.

use candle_core::{DType, Error, Result, Tensor, bail};

use rmsnorm_core::{NormParams, ResidualPlacement, Slot};

/// The tensors of a call.
pub(crate) struct Args<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) residual: Option<&'a Tensor>,
    pub(crate) gate: Option<&'a Tensor>,
    pub(crate) weight: &'a Tensor,
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) next_weight: Option<&'a Tensor>,
    pub(crate) next_bias: Option<&'a Tensor>,
}

impl<'a> Args<'a> {
    /// All tensors with their names.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> + use<'a> {
        [("x", Some(self.x)), ("residual", self.residual), ("gate", self.gate)]
            .into_iter()
            .filter_map(|(name, tensor)| Some((name, tensor?)))
            .chain(self.vectors())
    }

    /// The parameters with their names.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> + use<'a> {
        let next = [("next_weight", self.next_weight), ("next_bias", self.next_bias)];
        [("weight", Some(self.weight)), ("bias", self.bias)]
            .into_iter()
            .chain(next)
            .filter_map(|(name, tensor)| Some((name, tensor?)))
    }

    /// `eps`, pieces, shapes, dtypes and devices. Nothing is broadcast. `out_dtype` is that of y,
    /// if it was given.
    pub(crate) fn check(&self, spec: &NormParams, out_dtype: Option<DType>) -> Result<()> {
        let (name, x) = (spec.name(), self.x);
        if !spec.has_valid_eps() {
            bail!("{name}: eps must be {}, got {}", spec.norm.eps_rule(), spec.eps);
        }
        let Some(&cols) = x.dims().last() else { bail!("{name}: x has no dimension to normalize over") };
        if cols == 0 {
            bail!("{name}: the last dimension of x must have at least 1 element, got the shape {:?}", x.shape());
        }
        for (arg, tensor) in [("residual", self.residual), ("gate", self.gate)] {
            if let Some(tensor) = tensor
                && tensor.dims() != x.dims()
            {
                bail!("{name}: {arg} must have the shape {:?} of x, got {:?}", x.shape(), tensor.shape());
            }
        }
        if spec.groups == 0 || !cols.is_multiple_of(spec.groups) {
            bail!("{name}: groups must divide the {cols} columns of a row, got {}", spec.groups);
        }
        let is_after = spec.residual_placement == ResidualPlacement::After;
        if is_after && (spec.gate.is_some() || spec.groups > 1) {
            bail!("{name}: a residual after the norm goes with no gate and with one group: add it to the result");
        }
        if self.residual.is_some() && spec.gate.is_some_and(|gate| gate.slot == Slot::Before) {
            bail!("{name}: a gate before the norm goes with no residual: add it to x, or use gate_after");
        }
        spec.check_pieces(self.residual.is_some(), out_dtype.is_some()).map_err(Error::wrap)?;
        if let Some(dtype) = out_dtype.filter(|dtype| !dtype.is_float()) {
            bail!("{name}: out_dtype must be a float dtype, got {dtype:?}");
        }
        for (vector, tensor) in self.vectors() {
            if tensor.dims() != [cols] {
                bail!("{name}: {vector} must have the shape [{cols}] of x's last dimension, got {:?}", tensor.shape());
            }
        }
        for (arg, tensor) in self.all() {
            if !tensor.dtype().is_float() {
                bail!("{name}: {arg} must have a float dtype, got {:?}", tensor.dtype());
            }
            if !tensor.device().same_device(x.device()) {
                let (expected, got) = (x.device().location(), tensor.device().location());
                bail!("{name}: {arg} must be on the same Device as x, {expected:?}, got {got:?}");
            }
        }
        Ok(())
    }
}
