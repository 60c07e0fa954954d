//! The two calls that a burn backend implements, on its own tensors.
//!
//! Under burn's fusion they are operations of its stream: shapes and dtypes of results follow from
//! the arguments, and a call runs when its values are read.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType, TensorMetadata, backend_extension};
use burn::tensor::DType;
use rmsnorm_core::{DTypes, Error, NormParams, TensorSet};
#[cfg(feature = "wgpu")]
use {burn::backend::fusion::custom::TensorSpec, burn::tensor::Shape, rmsnorm_core::Tensor};

use crate::check::or_panic;
use crate::native::{mix, theirs};

/// An optional tensor. burn's macros do not support `Option` in a call under fusion.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "wgpu"))]
pub(crate) enum Maybe<B: Backend> {
    Some(FloatTensor<B>),
    None,
}

impl<B: Backend> Maybe<B> {
    pub(crate) fn of(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Maybe::None, Maybe::Some)
    }

    pub(crate) fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Maybe::Some(tensor) => Some(tensor),
            Maybe::None => None,
        }
    }
}

/// The tensors of a forward call, and its `wanted` outputs.
pub(crate) struct ForwardCall<B: Backend> {
    pub(crate) spec: NormParams,
    pub(crate) x: FloatTensor<B>,
    pub(crate) residual: Option<FloatTensor<B>>,
    /// In the dtype of y.
    pub(crate) gate: Option<FloatTensor<B>>,
    pub(crate) weight: FloatTensor<B>,
    pub(crate) bias: Option<FloatTensor<B>>,
    /// The weight of the next norm, if there is one, in the dtype of the weight.
    pub(crate) next_weight: Option<FloatTensor<B>>,
    pub(crate) next_bias: Option<FloatTensor<B>>,
    pub(crate) wanted: TensorSet,
}

/// The tensors that a forward call may lack.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "wgpu"))]
pub(crate) struct Optional<B: Backend> {
    #[extension_type]
    pub(crate) residual: Maybe<B>,
    #[extension_type]
    pub(crate) gate: Maybe<B>,
    #[extension_type]
    pub(crate) bias: Maybe<B>,
    #[extension_type]
    pub(crate) next_weight: Maybe<B>,
    #[extension_type]
    pub(crate) next_bias: Maybe<B>,
}

/// The tensors of a backward call.
pub(crate) struct BackwardCall<B: Backend> {
    pub(crate) spec: NormParams,
    pub(crate) dy: FloatTensor<B>,
    /// The tensor that forward normalized.
    pub(crate) x: FloatTensor<B>,
    pub(crate) weight: FloatTensor<B>,
    pub(crate) rstd: FloatTensor<B>,
    pub(crate) saved: Saved<B>,
    /// The wanted gradients: `Dweight`, `Dbias`, `Dgate`.
    pub(crate) wanted: TensorSet,
}

/// The tensors that a backward call may lack.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "wgpu"))]
pub(crate) struct Saved<B: Backend> {
    /// Only of layer norm.
    #[extension_type]
    pub(crate) mean: Maybe<B>,
    #[extension_type]
    pub(crate) gate: Maybe<B>,
    /// Only with a gate after the norm.
    #[extension_type]
    pub(crate) bias: Maybe<B>,
}

impl<B: Backend> ForwardCall<B> {
    pub(crate) fn new(
        spec: NormParams,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        optional: Optional<B>,
        wanted: TensorSet,
    ) -> Self {
        let Optional { residual, gate, bias, next_weight, next_bias } = optional;
        let optional = [residual, gate, bias, next_weight, next_bias].map(Maybe::into_option);
        let [residual, gate, bias, next_weight, next_bias] = optional;
        ForwardCall { spec, x, residual, gate, weight, bias, next_weight, next_bias, wanted }
    }

    /// The dtypes of its tensors, if they have kernels.
    pub(crate) fn dtypes(&self) -> Result<DTypes, Error> {
        let (y, stream) = (y_dtype(&self.spec, self.x.dtype()), self.residual.as_ref().unwrap_or(&self.x));
        dtypes([y, self.weight.dtype(), stream.dtype()], self.residual.is_some())
    }

    /// Whether y has another dtype than x.
    pub(crate) fn is_cast(&self) -> bool {
        y_dtype(&self.spec, self.x.dtype()) != self.x.dtype()
    }
}

impl<B: Backend> BackwardCall<B> {
    /// The dtypes of its tensors, if they have kernels.
    pub(crate) fn dtypes(&self) -> Result<DTypes, Error> {
        dtypes([self.dy.dtype(), self.weight.dtype(), self.x.dtype()], false)
    }
}

/// The dtype of y.
fn y_dtype(spec: &NormParams, of_x: DType) -> DType {
    spec.out_dtype.map_or(of_x, theirs)
}

/// The dtypes of activations, weight and residual stream.
fn dtypes(theirs: [DType; 3], adds_residual: bool) -> Result<DTypes, Error> {
    let rule = || format!("no kernels for activations, weight and residual of {theirs:?}");
    mix(theirs, adds_residual).ok_or_else(|| Error::Unsupported { rule: rule() })
}

/// A backend whose tensors our kernels take.
pub(crate) trait Run: Backend {
    /// # Errors
    /// If the kernels do not take these tensors, which callers have checked; and the errors of the
    /// call.
    fn run_forward(call: ForwardCall<Self>) -> Result<Forwarded<Self>, Error>;

    /// # Errors
    /// As [`run_forward`](Self::run_forward).
    fn run_backward(call: BackwardCall<Self>) -> Result<Gradients<Self>, Error>;
}

/// The wanted results of a forward call. Matrices have the shape of x, statistics (rows * groups).
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "wgpu"))]
pub(crate) struct Forwarded<B: Backend> {
    /// In the dtype of x, or the `out_dtype` of the norm.
    #[extension_type]
    pub(crate) y: Maybe<B>,
    /// In the dtype of the residual.
    #[extension_type]
    pub(crate) residual_out: Maybe<B>,
    #[extension_type]
    pub(crate) mean: Maybe<B>,
    #[extension_type]
    pub(crate) rstd: Maybe<B>,
    #[extension_type]
    pub(crate) next_mean: Maybe<B>,
    #[extension_type]
    pub(crate) next_rstd: Maybe<B>,
}

impl<B: Backend> Forwarded<B> {
    /// Results without statistics.
    pub(crate) fn of(y: Option<FloatTensor<B>>, residual_out: Option<FloatTensor<B>>) -> Self {
        let [mean, rstd, next_mean, next_rstd] = [const { Maybe::None }; 4];
        Forwarded { y: Maybe::of(y), residual_out: Maybe::of(residual_out), mean, rstd, next_mean, next_rstd }
    }
}

/// The results of a backward call.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "wgpu"))]
pub(crate) struct Gradients<B: Backend> {
    /// In the dtype of the normalized tensor.
    pub(crate) dx: FloatTensor<B>,
    /// `dweight` and `dbias` have the dtype of the weight, if wanted.
    #[extension_type]
    pub(crate) dweight: Maybe<B>,
    #[extension_type]
    pub(crate) dbias: Maybe<B>,
    /// In the dtype of the gate, if wanted.
    #[extension_type]
    pub(crate) dgate: Maybe<B>,
}

/// The calls of rmsnorm's trait. Callers have checked the arguments and that kernels exist;
/// otherwise a call panics.
#[backend_extension(Flex, Cube: cfg(feature = "wgpu"), Fusion: cfg(feature = "wgpu"))]
pub(crate) trait Kernels: Backend {
    /// Computes the wanted outputs of a norm. Without a residual, or with one before the norm, y is always
    /// wanted; with one after the norm, the sum.
    #[fusion(id = "rmsnorm_forward", meta = forwarded)]
    fn forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] optional: Optional<Self>,
        spec: NormParams,
        wanted: TensorSet,
    ) -> Forwarded<Self>;

    /// Computes dx, and dweight, dbias and dgate if `wanted`. `x` is the tensor that forward
    /// normalized.
    #[fusion(id = "rmsnorm_backward", meta = gradients)]
    fn backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        #[extension_type] saved: Saved<Self>,
        spec: NormParams,
        wanted: TensorSet,
    ) -> Gradients<Self>;
}

impl<B: Run> Kernels for B {
    fn forward(
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        optional: Optional<B>,
        spec: NormParams,
        wanted: TensorSet,
    ) -> Forwarded<B> {
        or_panic(B::run_forward(ForwardCall::new(spec, x, weight, optional, wanted)))
    }

    fn backward(
        dy: FloatTensor<B>,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        rstd: FloatTensor<B>,
        saved: Saved<B>,
        spec: NormParams,
        wanted: TensorSet,
    ) -> Gradients<B> {
        or_panic(B::run_backward(BackwardCall { spec, dy, x, weight, rstd, saved, wanted }))
    }
}

/// Shapes and dtypes of the results of [`Kernels::forward`].
#[cfg(feature = "wgpu")]
fn forwarded(
    x: &TensorSpec,
    _: &TensorSpec,
    optional: &OptionalMetadata,
    spec: &NormParams,
    wanted: &TensorSet,
) -> ForwardedMetadata {
    let give = |name: Tensor, spec: TensorSpec| {
        if wanted.has(name) { MaybeMetadata::Some(spec) } else { MaybeMetadata::None }
    };
    let stream = match &optional.residual {
        MaybeMetadata::Some(residual) => residual.clone(),
        MaybeMetadata::None => x.clone(),
    };
    let rows: usize = x.shape.as_slice().split_last().map_or(0, |(_, batch)| batch.iter().product());
    let statistic = TensorSpec::new(Shape::from([rows * spec.groups]), DType::F32);
    ForwardedMetadata {
        y: give(Tensor::Y, TensorSpec::new(x.shape.clone(), y_dtype(spec, x.dtype))),
        residual_out: give(Tensor::ResidualOut, stream),
        mean: give(Tensor::Mean, statistic.clone()),
        rstd: give(Tensor::Rstd, statistic.clone()),
        next_mean: give(Tensor::NextMean, statistic.clone()),
        next_rstd: give(Tensor::NextRstd, statistic),
    }
}

/// Shapes and dtypes of the results of [`Kernels::backward`].
#[cfg(feature = "wgpu")]
fn gradients(
    dy: &TensorSpec,
    x: &TensorSpec,
    weight: &TensorSpec,
    _: &TensorSpec,
    _: &SavedMetadata,
    _: &NormParams,
    wanted: &TensorSet,
) -> GradientsMetadata {
    let give = |name: Tensor, spec: &TensorSpec| {
        if wanted.has(name) { MaybeMetadata::Some(spec.clone()) } else { MaybeMetadata::None }
    };
    GradientsMetadata {
        dx: x.clone(),
        dweight: give(Tensor::Dweight, weight),
        dbias: give(Tensor::Dbias, weight),
        dgate: give(Tensor::Dgate, dy),
    }
}
