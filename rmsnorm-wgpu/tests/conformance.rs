//! The conformance suite on the first adapter. `WGPU_ADAPTER_NAME` and `WGPU_BACKEND` choose another.

mod support;

rmsnorm_conformance::conformance!(support::backend());

/// Sums through workgroup memory, which devices without subgroups of one size take, and f16 by integers. How values are summed does
/// not depend on their dtype, so f16 stands for all three.
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

    macro_rules! within_bounds {
        ($($name:ident $kind:ident;)*) => {
            const LISTED: &[Kind] = &[$(Kind::$kind),*];
            $(
                #[test]
                fn $name() -> Result<(), TestFailure> {
                    of_each_norm(|norm| test_bounds(backend_with_less(), Kind::$kind, norm, DType::F16))
                }
            )*
        };
    }

    within_bounds! {
        forward_within_bounds Forward;
        forward_in_place_within_bounds ForwardInPlace;
        backward_within_bounds Backward;
        end_to_end_within_bounds EndToEnd;
        quantized_forward_within_bounds QuantizedForward;
        forward_after_within_bounds ForwardAfter;
        forward_after_in_place_within_bounds ForwardAfterInPlace;
        after_end_to_end_within_bounds AfterEndToEnd;
        forward_parts_within_bounds ForwardParts;
    }

    #[test]
    fn every_kind_is_listed() {
        assert_eq!(LISTED, Kind::ALL);
    }
}
