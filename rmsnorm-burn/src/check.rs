//! Checks of every call, on both paths.

use std::fmt::Display;

use burn::tensor::{DType, Tensor};

use rmsnorm_core::{Error, NormParams, ResidualPlacement, Slot};

/// The tensors of a call.
pub(crate) struct Args<const D: usize> {
    pub(crate) x: Tensor<D>,
    pub(crate) residual: Option<Tensor<D>>,
    pub(crate) gate: Option<Tensor<D>>,
    pub(crate) weight: Tensor<1>,
    pub(crate) bias: Option<Tensor<1>>,
    /// The weight of the next norm.
    pub(crate) next_weight: Option<Tensor<1>>,
    pub(crate) next_bias: Option<Tensor<1>>,
}

impl<const D: usize> Args<D> {
    /// The tensors of a norm without a residual and a gate.
    pub(crate) const fn of(x: Tensor<D>, weight: Tensor<1>, bias: Option<Tensor<1>>) -> Self {
        Args { x, residual: None, gate: None, weight, bias, next_weight: None, next_bias: None }
    }

    /// The vectors with their names.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = (&'static str, &Tensor<1>)> {
        let next = [("next_weight", self.next_weight.as_ref()), ("next_bias", self.next_bias.as_ref())];
        [("weight", Some(&self.weight)), ("bias", self.bias.as_ref())]
            .into_iter()
            .chain(next)
            .filter_map(|(name, tensor)| Some((name, tensor?)))
    }

    /// A property of each tensor, with its name.
    fn of_each<T>(
        &self,
        of_matrix: fn(&Tensor<D>) -> T,
        of_vector: fn(&Tensor<1>) -> T,
    ) -> impl Iterator<Item = (&'static str, T)> {
        let optional = [("residual", self.residual.as_ref()), ("gate", self.gate.as_ref())];
        let matrices = [("x", Some(&self.x))].into_iter().chain(optional);
        let matrices = matrices.filter_map(move |(name, tensor)| Some((name, of_matrix(tensor?))));
        matrices.chain(self.vectors().map(move |(name, tensor)| (name, of_vector(tensor))))
    }

    /// Checks that all tensors are on x's device, with or without autodiff.
    #[cfg(feature = "wgpu")]
    pub(crate) fn check_devices(&self, spec: &NormParams) -> Result<(), String> {
        let device = self.x.device();
        match self.of_each(Tensor::device, Tensor::device).find(|(_, other)| *other != device) {
            Some((arg, other)) => {
                Err(format!("{}: {arg} must be on the device {device:?} of x, got {other:?}", spec.name()))
            }
            None => Ok(()),
        }
    }

    /// `eps`, pieces, shapes and dtypes. Nothing is broadcast. `out_dtype` is that of y, if it was
    /// given.
    pub(crate) fn check(&self, spec: &NormParams, out_dtype: Option<DType>) -> Result<(), String> {
        let (name, dims) = (spec.name(), self.x.dims());
        if !spec.has_valid_eps() {
            return Err(format!("{name}: eps must be {}, got {}", spec.norm.eps_rule(), spec.eps));
        }
        let Some(&cols) = dims.last() else { return Err(format!("{name}: x has no dimension to normalize over")) };
        if cols == 0 {
            return Err(format!(
                "{name}: the last dimension of x must have at least 1 element, got the shape {dims:?}"
            ));
        }
        for (arg, tensor) in [("residual", &self.residual), ("gate", &self.gate)] {
            if let Some(tensor) = tensor
                && tensor.dims() != dims
            {
                return Err(format!("{name}: {arg} must have the shape {dims:?} of x, got {:?}", tensor.dims()));
            }
        }
        if spec.groups == 0 || !cols.is_multiple_of(spec.groups) {
            return Err(format!("{name}: groups must divide the {cols} columns of a row, got {}", spec.groups));
        }
        if spec.groups > 1 && spec.residual_placement == ResidualPlacement::After {
            return Err(format!("{name}: a residual after the norm goes with one group: add it to the result"));
        }
        if self.residual.is_some() && spec.gate.is_some_and(|gate| gate.slot == Slot::Before) {
            return Err(format!(
                "{name}: a gate before the norm goes with no residual: add it to x, or use gate_after"
            ));
        }
        spec.check_pieces(self.residual.is_some(), out_dtype.is_some()).map_err(|error| error.to_string())?;
        if let Some(dtype) = out_dtype.filter(|dtype| !dtype.is_float()) {
            return Err(format!("{name}: out_dtype must be a float dtype, got {dtype:?}"));
        }
        for (vector, tensor) in self.vectors() {
            let got = tensor.dims();
            if got != [cols] {
                return Err(format!(
                    "{name}: {vector} must have the shape [{cols}] of x's last dimension, got {got:?}"
                ));
            }
        }
        match self.of_each(Tensor::dtype, Tensor::dtype).find(|(_, dtype)| !dtype.is_float()) {
            Some((arg, dtype)) => Err(format!("{name}: {arg} must have a float dtype, got {dtype:?}")),
            None => Ok(()),
        }
    }
}

/// The result of a call, or a panic with its message: burn's operations report a wrong argument by
/// panics.
#[expect(clippy::panic, reason = "the signatures are those of burn, whose operations panic")]
#[track_caller]
pub(crate) fn or_panic<T, E: Display>(result: Result<T, E>) -> T {
    match result {
        Ok(made) => made,
        Err(error) => panic!("{error}"),
    }
}

/// An output that the call was asked for. A missing one is a bug.
pub(crate) fn given<T>(arg: &'static str, made: Option<T>) -> T {
    or_panic(made.ok_or(Error::Missing { arg, why: "the call did not compute it, which is a bug" }))
}
