//! Panics name the tensor that does not fit, on both paths.

use burn::tensor::{DType, Tensor};
use rmsnorm_burn::{
    Activation, CastOrder, Norm, add_layer_norm, add_rms_norm, gemma_rms_norm, layer_norm, layer_norm_add, rms_norm,
    rms_norm_add, rms_norm_add_rms_norm,
};

use crate::kit::{message, tensor};

fn of<const D: usize>(dtype: DType, dims: [usize; D]) -> Tensor<D> {
    tensor::<f32, D>(dims, 1).cast(dtype)
}

#[test]
fn wrong_shapes_are_named_and_nothing_is_broadcast() {
    for dtype in [DType::F32, DType::F64] {
        let (x, w) = (of(dtype, [4, 16]), of(dtype, [16]));
        for len in [8, 17, 1] {
            let wrong = || of(dtype, [len]);
            let expected = format!("must have the shape [16] of x's last dimension, got [{len}]");
            assert_eq!(message(|| rms_norm(x.clone(), wrong(), 1e-6)), format!("rms_norm: weight {expected}"));
            assert_eq!(message(|| gemma_rms_norm(x.clone(), wrong(), 1e-6)), format!("rms_norm: weight {expected}"));
            let text = message(|| layer_norm(x.clone(), w.clone(), Some(wrong()), 1e-6));
            assert_eq!(text, format!("layer_norm: bias {expected}"));
            let text = message(|| add_rms_norm(x.clone(), x.clone(), wrong(), 1e-6));
            assert_eq!(text, format!("rms_norm: weight {expected}"));
        }
        for len in [8, 17, 1] {
            let (wrong, x) = (|| of(dtype, [len]), || x.clone());
            let expected = format!("must have the shape [16] of x's last dimension, got [{len}]");
            let text = message(|| add_layer_norm(x(), x(), w.clone(), Some(wrong()), 1e-6));
            assert_eq!(text, format!("layer_norm: bias {expected}"));
            let text = message(|| layer_norm_add(x(), x(), w.clone(), Some(wrong()), 1e-6));
            assert_eq!(text, format!("layer_norm: bias {expected}"));
            let text = message(|| rms_norm_add(x(), x(), wrong(), 1e-6));
            assert_eq!(text, format!("rms_norm: weight {expected}"));
            let text = message(|| rms_norm_add_rms_norm(x(), x(), w.clone(), wrong(), 1e-6));
            assert_eq!(text, format!("rms_norm: next_weight {expected}"));
            let norm = || Norm::layer(1e-6).residual_after(x()).next_norm(w.clone()).next_bias(wrong());
            let text = message(|| norm().apply(x(), w.clone()));
            assert_eq!(text, format!("layer_norm: next_bias {expected}"));
        }
        for dims in [[1, 16], [4, 1], [4, 8]] {
            let text = message(|| add_rms_norm(x.clone(), of(dtype, dims), w.clone(), 1e-6));
            assert_eq!(text, format!("rms_norm: residual must have the shape [4, 16] of x, got {dims:?}"));
            let text = message(|| layer_norm_add(x.clone(), of(dtype, dims), w.clone(), None, 1e-6));
            assert_eq!(text, format!("layer_norm: residual must have the shape [4, 16] of x, got {dims:?}"));
            let text = message(|| rms_norm_add_rms_norm(x.clone(), of(dtype, dims), w.clone(), w.clone(), 1e-6));
            assert_eq!(text, format!("rms_norm: residual must have the shape [4, 16] of x, got {dims:?}"));
        }
        let text = message(|| rms_norm(of(dtype, [4, 0]), of(dtype, [0]), 1e-6));
        assert_eq!(text, "rms_norm: the last dimension of x must have at least 1 element, got the shape [4, 0]");
    }
}

#[test]
fn wrong_gates_and_groups_are_named() {
    for dtype in [DType::F32, DType::F64] {
        let (x, w) = (|| of(dtype, [4, 16]), || of(dtype, [16]));
        let silu = Activation::Silu;
        for dims in [[1, 16], [4, 1], [4, 8]] {
            let text = message(|| Norm::rms(1e-6).gate_after(of(dtype, dims), silu).apply(x(), w()));
            assert_eq!(text, format!("rms_norm: gate must have the shape [4, 16] of x, got {dims:?}"));
            let text = message(|| Norm::layer(1e-6).gate_before(of(dtype, dims), silu).apply(x(), w()));
            assert_eq!(text, format!("layer_norm: gate must have the shape [4, 16] of x, got {dims:?}"));
        }
        for groups in [0, 3, 32] {
            let text = message(|| Norm::rms(1e-6).groups(groups).apply(x(), w()));
            assert_eq!(text, format!("rms_norm: groups must divide the 16 columns of a row, got {groups}"));
        }
        let text = message(|| Norm::rms(1e-6).groups(2).residual_after(x()).apply(x(), w()));
        assert_eq!(text, "rms_norm: a residual after the norm goes with one group: add it to the result");
        let text = message(|| Norm::rms(1e-6).gate_before(x(), silu).residual(x()).apply(x(), w()));
        assert_eq!(text, "rms_norm: a gate before the norm goes with no residual: add it to x, or use gate_after");
    }
}

#[test]
fn wrong_eps_is_named() {
    for dtype in [DType::F32, DType::F64] {
        let (x, w) = (of(dtype, [4, 16]), of(dtype, [16]));
        for eps in [-1e-6, f64::NAN, f64::INFINITY, 1e300] {
            let text = message(|| rms_norm(x.clone(), w.clone(), eps));
            assert_eq!(text, format!("rms_norm: eps must be finite and not negative, got {eps}"));
            let text = message(|| layer_norm_add(x.clone(), x.clone(), w.clone(), None, eps));
            assert_eq!(text, format!("layer_norm: eps must be finite and not negative, got {eps}"));
        }
        assert_eq!(rms_norm(x.clone(), w, 0.0).dims(), x.dims());
    }
}

#[test]
fn wrong_orders_and_dtypes_of_y_are_named() {
    for dtype in [DType::F32, DType::F64] {
        let (x, w, silu) = (|| of(dtype, [4, 16]), || of(dtype, [16]), Activation::Silu);
        let first = || Norm::rms(1e-6).cast_order(CastOrder::WeightFirst);
        for text in [
            message(|| first().residual(x()).apply(x(), w())),
            message(|| first().residual_after(x()).apply(x(), w())),
            message(|| first().gate_before(x(), silu).apply(x(), w())),
        ] {
            assert!(text.starts_with("unsupported: no call") && text.contains("CastOrder::WeightFirst"), "{text}");
        }
        let router = || Norm::rms(1e-6).out_dtype(DType::F32);
        for text in [
            message(|| router().residual(x()).apply(x(), w())),
            message(|| router().residual_after(x()).apply(x(), w())),
            message(|| router().residual_after(x()).next_norm(w()).apply(x(), w())),
            message(|| router().gate_before(x(), silu).apply(x(), w())),
        ] {
            assert!(text.starts_with("unsupported: no call") && text.contains("y of another dtype"), "{text}");
        }
        let text = message(|| Norm::rms(1e-6).out_dtype(DType::I32).apply(x(), w()));
        assert_eq!(text, "rms_norm: out_dtype must be a float dtype, got I32");
        let text = message(|| Norm::l2_clamped(1e-30).apply(x(), w()));
        let expected =
            "eps must be 0 or from 2^-63 to 2^63, as f32 holds its square, got 0.000000000000000000000000000001";
        assert_eq!(text, format!("l2_norm_clamped: {expected}"));
    }
}
