//! Errors name the tensor that does not fit, on both paths.

use crate::kit::{On, message, on_each_device};
use candle_core::{DType, Tensor};
use rmsnorm_candle::{
    Activation, CastOrder, Norm, add_rms_norm, gemma_rms_norm, layer_norm, rms_norm, rms_norm_add,
    rms_norm_add_rms_norm,
};

fn of(on: &On, dtype: DType, shape: &[usize]) -> Tensor {
    on.tensor::<f32>(shape, 1).to_dtype(dtype).unwrap()
}

#[test]
fn wrong_shapes_are_named_and_nothing_is_broadcast() {
    on_each_device(|on| {
        for dtype in [DType::F32, DType::F64] {
            let (x, w) = (of(on, dtype, &[4, 16]), of(on, dtype, &[16]));
            for shape in [&[8usize][..], &[17], &[1], &[1, 16], &[4, 16], &[]] {
                let wrong = of(on, dtype, shape);
                let expected = format!("must have the shape [16] of x's last dimension, got {shape:?}");
                assert_eq!(message(rms_norm(&x, &wrong, 1e-6)), format!("rms_norm: weight {expected}"));
                assert_eq!(message(gemma_rms_norm(&x, &wrong, 1e-6)), format!("rms_norm: weight {expected}"));
                assert_eq!(message(layer_norm(&x, &w, Some(&wrong), 1e-6)), format!("layer_norm: bias {expected}"));
                assert_eq!(message(add_rms_norm(&x, &x, &wrong, 1e-6)), format!("rms_norm: weight {expected}"));
                assert_eq!(message(rms_norm_add(&x, &x, &wrong, 1e-6)), format!("rms_norm: weight {expected}"));
                let text = message(rms_norm_add_rms_norm(&x, &x, &w, &wrong, 1e-6));
                assert_eq!(text, format!("rms_norm: next_weight {expected}"));
                let text = message(Norm::layer(1e-6).residual_after(&x).next_norm(&w).next_bias(&wrong).apply(&x, &w));
                assert_eq!(text, format!("layer_norm: next_bias {expected}"));
            }
            for shape in [&[16usize][..], &[1, 16], &[4, 1], &[4, 8], &[2, 2, 16]] {
                let text = message(add_rms_norm(&x, &of(on, dtype, shape), &w, 1e-6));
                assert_eq!(text, format!("rms_norm: residual must have the shape [4, 16] of x, got {shape:?}"));
            }
            let text = message(rms_norm(&of(on, dtype, &[]), &w, 1e-6));
            assert_eq!(text, "rms_norm: x has no dimension to normalize over");
            // Views, because on CUDA candle casts a tensor without elements with a launch of no
            // blocks, which is an error.
            let (x, w) = (x.narrow(1, 0, 0).unwrap(), w.narrow(0, 0, 0).unwrap());
            let text = message(rms_norm(&x, &w, 1e-6));
            assert_eq!(text, "rms_norm: the last dimension of x must have at least 1 element, got the shape [4, 0]");
        }
    });
}

#[test]
fn wrong_dtypes_and_eps_are_named() {
    on_each_device(|on| {
        let (x, w) = (of(on, DType::F32, &[4, 16]), of(on, DType::F32, &[16]));
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let (ints, weight) = (x.to_dtype(dtype).unwrap(), w.to_dtype(dtype).unwrap());
            let expected = |arg| format!("rms_norm: {arg} must have a float dtype, got {dtype:?}");
            assert_eq!(message(rms_norm(&ints, &w, 1e-6)), expected("x"));
            assert_eq!(message(rms_norm(&x, &weight, 1e-6)), expected("weight"));
            assert_eq!(message(add_rms_norm(&x, &ints, &w, 1e-6)), expected("residual"));
            assert_eq!(message(rms_norm_add(&x, &ints, &w, 1e-6)), expected("residual"));
            assert_eq!(message(rms_norm_add_rms_norm(&x, &x, &w, &weight, 1e-6)), expected("next_weight"));
            let text = message(layer_norm(&x, &w, Some(&weight), 1e-6));
            assert_eq!(text, format!("layer_norm: bias must have a float dtype, got {dtype:?}"));
        }
        let wide = x.to_dtype(DType::F64).unwrap();
        for x in [&x, &wide] {
            for eps in [-1e-6, f64::NAN, f64::INFINITY, 1e300] {
                let text = message(rms_norm(x, &w, eps));
                assert_eq!(text, format!("rms_norm: eps must be finite and not negative, got {eps}"));
            }
        }
        assert!(rms_norm(&x, &w, 0.0).is_ok() && rms_norm(&wide, &w, 0.0).is_ok());
    });
}

#[test]
fn wrong_orders_and_dtypes_of_y_are_named() {
    on_each_device(|on| {
        for dtype in [DType::F32, DType::F64] {
            let (x, w) = (of(on, dtype, &[4, 16]), of(on, dtype, &[16]));
            let (rms, silu) = (Norm::rms(1e-6), Activation::Silu);
            let first = rms.cast_order(CastOrder::WeightFirst);
            for text in [
                message(first.residual(&x).apply(&x, &w)),
                message(first.residual_after(&x).apply(&x, &w)),
                message(first.gate_before(&x, silu).apply(&x, &w)),
            ] {
                assert!(text.starts_with("unsupported: no call") && text.contains("CastOrder::WeightFirst"), "{text}");
            }
            let router = rms.out_dtype(DType::F32);
            for text in [
                message(router.residual(&x).apply(&x, &w)),
                message(router.residual_after(&x).apply(&x, &w)),
                message(router.residual_after(&x).next_norm(&w).apply(&x, &w)),
                message(router.gate_before(&x, silu).apply(&x, &w)),
            ] {
                assert!(text.starts_with("unsupported: no call") && text.contains("y of another dtype"), "{text}");
            }
            let text = message(rms.out_dtype(DType::U8).apply(&x, &w));
            assert_eq!(text, "rms_norm: out_dtype must be a float dtype, got U8");
            let text = message(router.apply_in_place(&x, &w));
            let expected = "takes no out_dtype, as y has the memory of x: use the form that returns y";
            assert_eq!(text, format!("rms_norm in place {expected}"));
        }
    });
}
