//! The burn dtypes that have kernels.

use rmsnorm_core::{DType, DTypes};

/// burn's name of a dtype.
pub(crate) const fn theirs(dtype: DType) -> burn::tensor::DType {
    match dtype {
        DType::F32 => burn::tensor::DType::F32,
        DType::F16 => burn::tensor::DType::F16,
        DType::Bf16 => burn::tensor::DType::BF16,
    }
}

/// Our name of the dtype, if it has kernels.
pub(crate) fn element(dtype: burn::tensor::DType) -> Option<DType> {
    DType::ALL.into_iter().find(|ours| theirs(*ours) == dtype)
}

/// The dtypes of a call, if they have kernels: activations, weight and residual stream. A call that
/// adds no residual may be a cast, which normalizes the stream to the activations' dtype.
pub(crate) fn mix([activation, weight, residual]: [burn::tensor::DType; 3], adds_residual: bool) -> Option<DTypes> {
    let (activation, weight) = (element(activation)?, element(weight)?);
    let dtypes = DTypes { activation, weight, residual: element(residual)? };
    let checked = if adds_residual { dtypes.check() } else { dtypes.check_cast() };
    checked.is_ok().then_some(dtypes)
}
