//! Gradients of chains of functions.

use burn::tensor::Tensor;
use rmsnorm_burn::{
    Activation, Norm, add_layer_norm, add_rms_norm, gemma_rms_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm,
    layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
};

use super::{EPS, Leaves, assert_close, var_on, var64};
use crate::kit::{device, f64s, frozen, loss, tensor, wide};

fn scalar(tensor: Tensor<1>) -> f64 {
    f64s(&tensor)[0]
}

/// A chain of functions, and its scalar result.
type Chain = fn(&Leaves, &Tensor<2>) -> Tensor<1>;

/// Chains of all functions.
const CHAINS: [(&str, Chain); 3] =
    [("norms", Leaves::norms), ("sums with norms", Leaves::sums), ("gated norms", Leaves::gates)];

impl Leaves {
    fn norms(&self, dy: &Tensor<2>) -> Tensor<1> {
        let Leaves { x, r, w, b } = self.clone();
        let y = layer_norm(x, w.clone(), Some(b.clone()), EPS);
        let (y, h) = add_rms_norm(y, r, w.clone(), EPS);
        loss(gemma_rms_norm(rms_norm(y + h, b, EPS), w, EPS), dy)
    }

    fn sums(&self, dy: &Tensor<2>) -> Tensor<1> {
        let Leaves { x, r, w, b } = self.clone();
        let sum = layer_norm_add(x.clone(), r, w.clone(), Some(b.clone()), EPS);
        let (y, sum) = rms_norm_add_rms_norm(x, sum, w.clone(), b.clone(), EPS);
        let (y, sum) = gemma_rms_norm_add_rms_norm(y, sum, b.clone(), w.clone(), EPS);
        let (y, sum) = add_layer_norm(y, sum, w.clone(), Some(b.clone()), EPS);
        loss(gemma_rms_norm_add(y.clone(), rms_norm_add(y, sum, b, EPS), w, EPS), dy)
    }
}

impl Leaves {
    fn gates(&self, dy: &Tensor<2>) -> Tensor<1> {
        let Leaves { x, r, w, b } = self.clone();
        let (silu, sigmoid) = (Activation::Silu, Activation::Sigmoid);
        let y = Norm::rms(EPS).bias(b.clone()).groups(4).gate_before(r.clone(), silu).apply(x.clone(), w.clone());
        let y = Norm::layer(EPS).bias(b.clone()).gate_after(x.clone(), sigmoid).apply(y, w.clone());
        let (y, h) = Norm::layer(EPS).residual(r).gate_after(x, silu).bias(b.clone()).apply(y, w.clone());
        loss(Norm::rms(EPS).groups(2).gate_after(y, sigmoid).apply(h, b), dy)
    }
}

/// In f64, along one direction for each variable. A step of 2^-17 has errors of its square times a
/// third derivative, and of 2^-53 / 2^-17 of the value from roundings.
#[test]
fn gradients_are_slopes() {
    let (matrix, vector) = (|seed| var64(&device(), [3, 40], seed), |seed| var64(&device(), [40], seed));
    let point = Leaves { x: matrix(1), r: matrix(2), w: vector(3), b: vector(4) };
    let (dy, step) = (frozen(&matrix(5)), 2f64.powi(-17));
    let (matrix, vector) = (frozen(&matrix(7)), frozen(&vector(7)));
    for (chain, total) in CHAINS {
        let grads = total(&point, &dy).backward();
        let is_slope = |name: &str, along: f64, moved: &dyn Fn(f64) -> Leaves| {
            let at = |sign: f64| scalar(total(&moved(sign * step), &dy));
            let slope = (at(1.0) - at(-1.0)) / (2.0 * step);
            let is_close = (slope - along).abs() <= 1e-7 * along.abs().max(1.0);
            assert!(is_close, "{name} of {chain}: {slope} and {along}");
        };
        let along = scalar(loss(point.x.grad(&grads).unwrap(), &matrix));
        is_slope("x", along, &|by| Leaves { x: point.x.clone() + matrix.clone() * by, ..point.clone() });
        let along = scalar(loss(point.r.grad(&grads).unwrap(), &matrix));
        is_slope("residual", along, &|by| Leaves { r: point.r.clone() + matrix.clone() * by, ..point.clone() });
        let along = scalar(loss(point.w.grad(&grads).unwrap(), &vector));
        is_slope("weight", along, &|by| Leaves { w: point.w.clone() + vector.clone() * by, ..point.clone() });
        let along = scalar(loss(point.b.grad(&grads).unwrap(), &vector));
        is_slope("bias", along, &|by| Leaves { b: point.b.clone() + vector.clone() * by, ..point.clone() });
    }
}

/// The kernels' f32 gradients equal those of the same chain in f64. bounds.rs derives the error of
/// single calls; these chains of four or six calls may differ by 64 units of f32 roundoff of the
/// largest value.
#[test]
fn fused_and_slow_agree_on_a_chain() {
    let (matrix, vector) =
        (|seed| var_on::<f32, 2>(&device(), [6, 80], seed), |seed| var_on::<f32, 1>(&device(), [80], seed));
    let leaves = Leaves { x: matrix(1), r: matrix(2), w: vector(3), b: vector(4) };
    let (slow, dy) = (leaves.wide(), tensor::<f32, 2>([6, 80], 5));
    for (chain, total) in CHAINS {
        let fused_grads = total(&leaves, &dy).backward();
        let slow_grads = total(&slow, &frozen(&wide(&dy))).backward();
        let closeness = 32.0 * f64::from(f32::EPSILON);
        for (fused, slow) in [(&leaves.x, &slow.x), (&leaves.r, &slow.r)] {
            let expected = f64s(&slow.grad(&slow_grads).unwrap());
            assert_close(&fused.grad(&fused_grads).unwrap(), &expected, closeness, chain);
        }
        for (fused, slow) in [(&leaves.w, &slow.w), (&leaves.b, &slow.b)] {
            let expected = f64s(&slow.grad(&slow_grads).unwrap());
            assert_close(&fused.grad(&fused_grads).unwrap(), &expected, closeness, chain);
        }
    }
}
