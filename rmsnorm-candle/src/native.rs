//! The candle dtypes that have kernels.

use candle_core::DType;
use rmsnorm_core::DTypes;

/// Our name of the dtype, if it has kernels.
pub(crate) fn element(dtype: DType) -> Option<rmsnorm_core::DType> {
    rmsnorm_core::DType::ALL.into_iter().find(|ours| theirs(*ours) == dtype)
}

/// candle's name of a dtype.
pub(crate) const fn theirs(dtype: rmsnorm_core::DType) -> DType {
    match dtype {
        rmsnorm_core::DType::F32 => DType::F32,
        rmsnorm_core::DType::F16 => DType::F16,
        rmsnorm_core::DType::Bf16 => DType::BF16,
    }
}

/// The dtypes of a call, if they have kernels: activations, weight and residual stream. A call that
/// adds no residual may be a cast, which normalizes the stream to the activations' dtype.
pub(crate) fn mix([activation, weight, residual]: [DType; 3], adds_residual: bool) -> Option<DTypes> {
    let (activation, weight) = (element(activation)?, element(weight)?);
    let dtypes = DTypes { activation, weight, residual: element(residual)? };
    let checked = if adds_residual { dtypes.check() } else { dtypes.check_cast() };
    checked.is_ok().then_some(dtypes)
}
