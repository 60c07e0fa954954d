//! Calls on the storages of a device, for every device. Dtypes are run-time values here; only the
//! CPU's vectors need types.

use std::any::Any;
use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{Error, Layout, Result, Storage, bail};
use rmsnorm_core::{
    AnyCall, AnyForward, AnyIn, AnyOut, Checked, DType, DTypes, Norm, NormBackend, NormParams, NormSpec,
    ResidualPlacement, Rows, Tensor, TensorSet,
};

use crate::native::{element, mix, theirs};
use crate::rows::Place;

/// Storages of a device with kernels. [`ForwardCall`] and [`BackwardCall`] make calls with `run`,
/// [`overwrite`] calls in place.
pub(crate) trait Kernels: BackendStorage + Send + Sync + 'static {
    /// The kernels.
    type Norms: NormBackend;

    /// # Errors
    /// If the device has no kernels.
    fn norms(&self) -> Result<Self::Norms>;

    /// These elements.
    ///
    /// # Errors
    /// If the storage is shorter, or kernels do not take its dtype.
    fn view(&self, range: Range<usize>) -> Result<AnyIn<'_, Self::Norms>>;

    /// These elements, for writing.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    fn view_mut(&mut self, range: Range<usize>) -> Result<AnyOut<'_, Self::Norms>>;

    /// Computes the outputs in `wanted`.
    ///
    /// # Errors
    /// If the kernels do not take these tensors, which callers have checked, or the device fails.
    fn forward(call: &ForwardCall<'_, Self>, spec: &NormSpec, wanted: TensorSet) -> Result<Forwarded<Self>>;

    /// # Errors
    /// As [`forward`](Self::forward).
    fn backward(call: &BackwardCall<'_, Self>, spec: &NormSpec) -> Result<Gradients<Self>>;

    /// An empty storage, for the result of an operation that has none.
    ///
    /// # Errors
    /// If the device fails.
    fn nothing(&self) -> Result<Self>;

    /// As candle's enum over all devices.
    fn into_storage(self) -> Storage;
}

/// A storage, and the layout of a tensor in it.
pub(crate) type Operand<'a, S> = (&'a S, &'a Layout);

/// The rows of a tensor.
pub(crate) fn rows<'a, S: Kernels>((storage, layout): Operand<'a, S>) -> Result<Rows<AnyIn<'a, S::Norms>>> {
    let place = Place::of(layout)?;
    Ok(place.rows.rows(storage.view(place.range)?))
}

/// A weight or a bias, which is contiguous.
pub(crate) fn vector<'a, S: Kernels>(operand: Operand<'a, S>) -> Result<AnyIn<'a, S::Norms>> {
    Ok(rows(operand)?.view)
}

/// Statistics for the backward pass: a [`Statistics`] of some device's storages.
pub(crate) type Saved = Box<dyn Any + Send + Sync>;

/// A forward pass's statistics: f32, (rows, groups).
pub(crate) struct Statistics<S> {
    /// Only of layer norm.
    pub(crate) mean: Option<S>,
    pub(crate) rstd: S,
}

impl<S: Kernels> Statistics<S> {
    /// The statistics of a call, if it saves them.
    pub(crate) fn of(mean: Option<S>, rstd: Option<S>) -> Option<Saved> {
        rstd.map(|rstd| Box::new(Statistics { mean, rstd }) as Saved)
    }
}

/// The tensors of a forward call.
pub(crate) struct ForwardCall<'a, S> {
    /// The norm, with a residual before or after it.
    pub(crate) spec: &'a NormParams,
    pub(crate) x: Operand<'a, S>,
    pub(crate) residual: Option<Operand<'a, S>>,
    pub(crate) weight: Operand<'a, S>,
    pub(crate) bias: Option<Operand<'a, S>>,
    pub(crate) gate: Option<Operand<'a, S>>,
    /// The weight of the next norm, if there is one after the sum.
    pub(crate) next_weight: Option<Operand<'a, S>>,
    pub(crate) next_bias: Option<Operand<'a, S>>,
    /// Whether there will be a backward pass.
    pub(crate) save: bool,
}

/// The results of a forward call.
pub(crate) struct Forwarded<S> {
    /// The norm; with a residual after the norm, the next norm.
    pub(crate) y: Option<S>,
    /// The rounded sum, if there is a residual.
    pub(crate) residual_out: Option<S>,
    /// The statistics, if they are saved.
    pub(crate) mean: Option<S>,
    pub(crate) rstd: Option<S>,
    pub(crate) next_mean: Option<S>,
    pub(crate) next_rstd: Option<S>,
}

impl<S: Kernels> ForwardCall<'_, S> {
    /// # Errors
    /// As [`Kernels::forward`].
    pub(crate) fn run(self) -> Result<Forwarded<S>> {
        let ForwardCall { spec, save, .. } = self;
        let (has_next, is_layer) = (self.next_weight.is_some(), spec.norm == Norm::Layer);
        let has_y = spec.residual_placement == ResidualPlacement::Before || has_next;
        let wanted = TensorSet::NONE.set(Tensor::Y, has_y).set(Tensor::ResidualOut, self.residual.is_some());
        let wanted = wanted.set(Tensor::Rstd, save).set(Tensor::Mean, save && is_layer);
        let wanted = wanted.set(Tensor::NextRstd, save && has_next).set(Tensor::NextMean, save && has_next && is_layer);
        S::forward(&self, &spec.sized(&Place::of(self.x.1)?.rows), wanted)
    }

    /// The dtypes of its tensors.
    pub(crate) fn dtypes(&self) -> Result<DTypes> {
        let [x, weight, residual] = [self.x, self.weight, self.residual.unwrap_or(self.x)].map(|each| each.0.dtype());
        dtypes([self.spec.out_dtype.map_or(x, theirs), weight, residual], self.residual.is_some())
    }

    /// Whether y has another dtype than x.
    pub(crate) fn is_cast(&self) -> bool {
        self.spec.out_dtype.is_some_and(|dtype| theirs(dtype) != self.x.0.dtype())
    }
}

/// The tensors of a backward call.
pub(crate) struct BackwardCall<'a, S> {
    pub(crate) spec: &'a NormParams,
    pub(crate) dy: Operand<'a, S>,
    /// The tensor that forward normalized. Its dtype may differ from that of dy.
    pub(crate) x: Operand<'a, S>,
    pub(crate) weight: Operand<'a, S>,
    /// Only with a gate after the norm.
    pub(crate) bias: Option<Operand<'a, S>>,
    pub(crate) gate: Option<Operand<'a, S>>,
    pub(crate) statistics: &'a Statistics<S>,
    /// The wanted gradients: `Dweight`, `Dbias`, `Dgate`.
    pub(crate) wanted: TensorSet,
}

/// The results of a backward call.
pub(crate) struct Gradients<S> {
    /// In the dtype of x.
    pub(crate) dx: S,
    pub(crate) dweight: Option<S>,
    pub(crate) dbias: Option<S>,
    pub(crate) dgate: Option<S>,
}

impl<S: Kernels> BackwardCall<'_, S> {
    /// # Errors
    /// As [`Kernels::backward`].
    pub(crate) fn run(self) -> Result<Gradients<S>> {
        S::backward(&self, &self.spec.sized(&Place::of(self.x.1)?.rows))
    }

    /// The dtypes of its tensors.
    pub(crate) fn dtypes(&self) -> Result<DTypes> {
        dtypes([self.dy, self.weight, self.x].map(|each| each.0.dtype()), false)
    }
}

/// A forward call that overwrites x.
///
/// # Errors
/// As [`Kernels::forward`].
pub(crate) fn overwrite<S: Kernels>(
    spec: &NormParams,
    (x, layout): (&mut S, &Layout),
    weight: Operand<'_, S>,
    bias: Option<Operand<'_, S>>,
) -> Result<()> {
    let place = Place::of(layout)?;
    let dtype = x.dtype();
    let (norms, dtypes) = (x.norms()?, dtypes([dtype, weight.0.dtype(), dtype], false)?);
    let mut args = AnyForward::<S::Norms>::in_place(place.rows.rows(x.view_mut(place.range)?));
    args.dtypes = dtypes;
    args.weight = Some(vector(weight)?);
    args.bias = bias.map(vector).transpose()?;
    let call = Checked::forward(spec.sized(&place.rows), args).map_err(Error::wrap)?;
    norms.launch(AnyCall::Forward(call)).map_err(Error::wrap)
}

/// The dtype of a storage, if kernels take it.
///
/// # Errors
/// If no kernel takes the dtype.
pub(crate) fn kernels_dtype(storage: &impl BackendStorage) -> Result<DType> {
    match element(storage.dtype()) {
        Some(dtype) => Ok(dtype),
        None => bail!("no kernels for {:?}", storage.dtype()),
    }
}

/// The dtypes of activations, weight and residual stream.
fn dtypes([activation, weight, residual]: [candle_core::DType; 3], adds_residual: bool) -> Result<DTypes> {
    match mix([activation, weight, residual], adds_residual) {
        Some(dtypes) => Ok(dtypes),
        None => bail!("no kernels for {activation:?} with a weight of {weight:?} and a residual of {residual:?}"),
    }
}
