//! The candle dtypes that have kernels.

use candle_core::DType;
use rmsnorm_core::DTypes;

/// Our name of the dtype, if it has kernels.
pub(crate) fn element(dtype: DType) -> Option<rmsnorm_core::DType> {
    let known = [
        (DType::F32, rmsnorm_core::DType::F32),
        (DType::F16, rmsnorm_core::DType::F16),
        (DType::BF16, rmsnorm_core::DType::Bf16),
    ];
    known.into_iter().find(|(theirs, _)| *theirs == dtype).map(|(_, ours)| ours)
}

/// The dtypes of a call, if they have kernels: activations, weight and residual stream.
pub(crate) fn mix(activation: DType, weight: DType, residual: DType) -> Option<DTypes> {
    let (activation, weight) = (element(activation)?, element(weight)?);
    let dtypes = DTypes { activation, weight, residual: element(residual)? };
    dtypes.check().is_ok().then_some(dtypes)
}
