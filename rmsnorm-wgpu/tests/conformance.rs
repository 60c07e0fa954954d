//! The conformance suite on the first adapter. `WGPU_ADAPTER_NAME` and `WGPU_BACKEND` choose another.

mod support;

rmsnorm_conformance::conformance!(support::backend());

/// Sums through workgroup memory, which devices without subgroups of one size take, and f16 by integers.
mod with_less {
    rmsnorm_conformance::conformance!(super::support::backend_with_less());
}
