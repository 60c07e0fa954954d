//! Calls on the storages of a device, once for every device: their tensors, and the way to their types.

use candle_core::backend::BackendStorage;
use candle_core::{DType, Layout, Result, Storage, Tensor};
use rmsnorm_core::{TensorSet, UnsizedNorm};

use crate::native::{Native, Work, dispatch};

/// Storages of a device that there are kernels on. The calls are made by the `run` of [`ForwardCall`], [`AfterCall`], [`BackwardCall`]
/// and [`InPlaceCall`], which find the types.
pub(crate) trait Kernels: BackendStorage {
    /// # Errors
    /// Where the kernels take no such tensors, which callers have made sure of, or the device fails.
    fn forward<T: Native, W: Native, R: Native>(call: ForwardCall<'_, Self>) -> Result<Normalized<Self>>;

    /// # Errors
    /// As [`forward`](Self::forward).
    fn forward_after<T: Native, W: Native, R: Native>(call: AfterCall<'_, Self>) -> Result<Added<Self>>;

    /// # Errors
    /// As [`forward`](Self::forward).
    fn backward<T: Native, W: Native, R: Native>(call: BackwardCall<'_, Self>) -> Result<Gradients<Self>>;

    /// # Errors
    /// As [`forward`](Self::forward).
    fn overwrite<T: Native, W: Native>(call: InPlaceCall<'_, Self>) -> Result<()>;

    /// Calls `f` with the storage of one more tensor of the device: an operation of candle is lent three.
    ///
    /// # Errors
    /// That of `f`.
    fn lend(tensor: &Tensor, f: impl Fn(Operand<'_, Self>) -> Result<()>) -> Result<()>;

    /// As one of all devices.
    fn into_storage(self) -> Storage;

    /// `None` if that is of another device.
    fn from_storage(storage: Storage) -> Option<Self>;
}

/// A storage, and which of its elements a tensor has.
pub(crate) type Operand<'a, S> = (&'a S, &'a Layout);

/// A forward pass's statistics, for backward: where its tensors are.
#[derive(Debug)]
pub(crate) enum Statistics {
    Cpu(crate::cpu::Statistics),
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::Statistics),
}

/// The tensors of a forward call.
pub(crate) struct ForwardCall<'a, S> {
    pub(crate) spec: &'a UnsizedNorm,
    pub(crate) x: Operand<'a, S>,
    pub(crate) residual: Option<Operand<'a, S>>,
    pub(crate) weight: Operand<'a, S>,
    pub(crate) bias: Option<Operand<'a, S>>,
    /// Whether there will be a backward pass.
    pub(crate) save: bool,
}

/// What a forward call gives.
pub(crate) struct Normalized<S> {
    pub(crate) y: S,
    /// The rounded sum, if there is a residual.
    pub(crate) residual_out: Option<S>,
    /// If they are saved.
    pub(crate) statistics: Option<Statistics>,
}

impl<S: Kernels> ForwardCall<'_, S> {
    /// # Errors
    /// As [`Kernels::forward`].
    pub(crate) fn run(self) -> Result<Normalized<S>> {
        let residual = self.residual.unwrap_or(self.x);
        dispatch(dtypes([self.x, self.weight, residual]), self)
    }
}

impl<S: Kernels> Work for ForwardCall<'_, S> {
    type Output = Normalized<S>;

    fn call<T: Native, W: Native, R: Native>(self) -> Result<Normalized<S>> {
        S::forward::<T, W, R>(self)
    }
}

/// The tensors of a forward call whose result is added to a residual.
pub(crate) struct AfterCall<'a, S> {
    /// With the residual after the norm.
    pub(crate) spec: &'a UnsizedNorm,
    pub(crate) x: Operand<'a, S>,
    pub(crate) weight: Operand<'a, S>,
    pub(crate) bias: Option<Operand<'a, S>>,
    pub(crate) residual: Operand<'a, S>,
    /// Of the next norm, of the sum, if it is wanted.
    pub(crate) next_weight: Option<Operand<'a, S>>,
    /// Whether there will be a backward pass.
    pub(crate) save: bool,
}

/// What such a call gives.
pub(crate) struct Added<S> {
    /// The rounded sum.
    pub(crate) residual_out: S,
    /// If they are saved.
    pub(crate) statistics: Option<Statistics>,
    /// The next norm, and its statistics if they are saved.
    pub(crate) next: Option<(S, Option<Statistics>)>,
}

impl<S: Kernels> AfterCall<'_, S> {
    /// # Errors
    /// As [`Kernels::forward`].
    pub(crate) fn run(self) -> Result<Added<S>> {
        dispatch(dtypes([self.x, self.weight, self.residual]), self)
    }
}

impl<S: Kernels> Work for AfterCall<'_, S> {
    type Output = Added<S>;

    fn call<T: Native, W: Native, R: Native>(self) -> Result<Added<S>> {
        S::forward_after::<T, W, R>(self)
    }
}

/// The tensors of a backward call.
pub(crate) struct BackwardCall<'a, S> {
    pub(crate) spec: &'a UnsizedNorm,
    pub(crate) dy: Operand<'a, S>,
    /// What was normalized.
    pub(crate) x: Operand<'a, S>,
    pub(crate) weight: Operand<'a, S>,
    pub(crate) statistics: &'a Statistics,
    /// Which gradients of parameters are wanted: `Dweight`, `Dbias`.
    pub(crate) wanted: TensorSet,
}

/// What a backward call gives.
pub(crate) struct Gradients<S> {
    /// In the dtype of x.
    pub(crate) dx: S,
    pub(crate) dweight: Option<S>,
    pub(crate) dbias: Option<S>,
}

impl<S: Kernels> BackwardCall<'_, S> {
    /// # Errors
    /// As [`Kernels::backward`].
    pub(crate) fn run(self) -> Result<Gradients<S>> {
        dispatch(dtypes([self.dy, self.weight, self.x]), self)
    }
}

impl<S: Kernels> Work for BackwardCall<'_, S> {
    type Output = Gradients<S>;

    fn call<T: Native, W: Native, R: Native>(self) -> Result<Gradients<S>> {
        S::backward::<T, W, R>(self)
    }
}

/// A forward call whose result takes the place of x.
pub(crate) struct InPlaceCall<'a, S> {
    pub(crate) spec: &'a UnsizedNorm,
    pub(crate) x: (&'a mut S, &'a Layout),
    pub(crate) weight: Operand<'a, S>,
    pub(crate) bias: Option<Operand<'a, S>>,
}

impl<S: Kernels> InPlaceCall<'_, S> {
    /// # Errors
    /// As [`Kernels::overwrite`].
    pub(crate) fn run(self) -> Result<()> {
        let x = (&*self.x.0, self.x.1);
        dispatch(dtypes([x, self.weight, x]), self)
    }
}

impl<S: Kernels> Work for InPlaceCall<'_, S> {
    type Output = ();

    fn call<T: Native, W: Native, R: Native>(self) -> Result<()> {
        S::overwrite::<T, W>(self)
    }
}

fn dtypes<S: Kernels>(operands: [Operand<'_, S>; 3]) -> [DType; 3] {
    operands.map(|(storage, _)| storage.dtype())
}
