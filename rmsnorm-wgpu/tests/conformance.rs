//! The conformance suite on the first adapter. `WGPU_ADAPTER_NAME` and `WGPU_BACKEND` select
//! another.

mod support;

rmsnorm_conformance::conformance!(support::backend());

/// Sums through workgroup memory, as on devices without subgroups of constant size, and f16 with
/// integer arithmetic. Summation does not depend on the dtype, so f16 stands for all three: CI has
/// two cores, and a GPU runs the core profile on both.
mod with_less {
    use rmsnorm_conformance::{Kind, TestFailure, test_bounds, test_determinism, test_metamorphic};
    use rmsnorm_wgpu::spec::{DType, Norm};

    use super::support::backend_with_less;

    fn of_each_norm(test: impl Fn(Norm) -> Result<(), TestFailure>) -> Result<(), TestFailure> {
        Norm::ALL.into_iter().try_for_each(test)
    }

    #[test]
    fn determinism_repeats_bits() -> Result<(), TestFailure> {
        of_each_norm(|norm| test_determinism(backend_with_less(), norm))
    }

    #[test]
    fn metamorphic_relations_hold() -> Result<(), TestFailure> {
        of_each_norm(|norm| test_metamorphic(backend_with_less(), norm))
    }

    /// Layer norm sums like RMS norm, and more. These kinds have programs with different sums; the
    /// other kinds (in place, end to end) run the same programs on other tensors.
    macro_rules! within_bounds {
        ($($name:ident $kind:ident;)*) => {
            $(
                #[test]
                fn $name() -> Result<(), TestFailure> {
                    test_bounds(backend_with_less(), Kind::$kind, Norm::Layer, DType::F16)
                }
            )*
        };
    }

    within_bounds! {
        forward_within_bounds FORWARD;
        backward_within_bounds BACKWARD;
        quantized_forward_within_bounds QUANTIZED_FORWARD;
        forward_after_within_bounds FORWARD_AFTER;
    }
}
