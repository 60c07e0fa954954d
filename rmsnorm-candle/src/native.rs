//! Dtypes: which of candle's there are kernels for, and from those of a call to types.

use candle_core::{CpuStorage, DType, Result, WithDType, bail};
#[cfg(feature = "cuda")]
use rmsnorm_core::cuda::cudarc::driver::DeviceRepr;
use rmsnorm_core::{DTypes, Element, bf16, f16};

/// What CUDA's storages ask of an element type.
#[cfg(feature = "cuda")]
pub(crate) trait OnCuda: candle_core::cuda_backend::CudaDType + DeviceRepr {}
#[cfg(feature = "cuda")]
impl<T: candle_core::cuda_backend::CudaDType + DeviceRepr> OnCuda for T {}

/// Nothing, where there are none.
#[cfg(not(feature = "cuda"))]
pub(crate) trait OnCuda {}
#[cfg(not(feature = "cuda"))]
impl<T> OnCuda for T {}

/// An element type of both libraries. `DTypes::dispatch` knows ours only, and candle's storages ask for candle's.
pub(crate) trait Native: Element + WithDType + OnCuda {
    /// The elements of a storage of this type.
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! native {
    ($($type:ty: $variant:ident;)*) => {
        $(impl Native for $type {
            fn values_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                if let CpuStorage::$variant(values) = storage { Some(values) } else { None }
            }
        })*
    };
}
native! {
    f32: F32;
    f16: F16;
    bf16: BF16;
}

/// Ours of that dtype, if there are kernels for it.
fn element(dtype: DType) -> Option<rmsnorm_core::DType> {
    let known = [
        (DType::F32, rmsnorm_core::DType::F32),
        (DType::F16, rmsnorm_core::DType::F16),
        (DType::BF16, rmsnorm_core::DType::Bf16),
    ];
    known.into_iter().find(|(theirs, _)| *theirs == dtype).map(|(_, ours)| ours)
}

/// The dtypes of a call, if there are kernels for them: activations, weight and residual stream.
pub(crate) fn mix(activation: DType, weight: DType, residual: DType) -> Option<DTypes> {
    let (activation, weight) = (element(activation)?, element(weight)?);
    let dtypes = DTypes { activation, weight, residual: element(residual)? };
    dtypes.check().is_ok().then_some(dtypes)
}

/// Code that is generic over the element types of a call.
pub(crate) trait Work {
    /// What it answers.
    type Output;

    /// Runs with `T`, `W` and `R`: of activations, weight and residual stream.
    fn call<T: Native, W: Native, R: Native>(self) -> Result<Self::Output>;
}

/// Runs it with the types of these dtypes: of activations, weight and residual stream. Fails where there are no kernels for them.
pub(crate) fn dispatch<F: Work>([activation, weight, residual]: [DType; 3], work: F) -> Result<F::Output> {
    use rmsnorm_core::DType::{Bf16, F16, F32};
    let Some(dtypes) = mix(activation, weight, residual) else {
        bail!("no kernels for {activation:?} with a weight of {weight:?} and a residual of {residual:?}")
    };
    match (dtypes.activation, dtypes.weight == F32, dtypes.residual == F32) {
        (F32, _, _) => work.call::<f32, f32, f32>(),
        (F16, false, false) => work.call::<f16, f16, f16>(),
        (F16, false, true) => work.call::<f16, f16, f32>(),
        (F16, true, false) => work.call::<f16, f32, f16>(),
        (F16, true, true) => work.call::<f16, f32, f32>(),
        (Bf16, false, false) => work.call::<bf16, bf16, bf16>(),
        (Bf16, false, true) => work.call::<bf16, bf16, f32>(),
        (Bf16, true, false) => work.call::<bf16, f32, bf16>(),
        (Bf16, true, true) => work.call::<bf16, f32, f32>(),
    }
}
