//! burn's own path, which f64 and mixes without kernels take on the CPU as every other device does: results against the
//! definition in f64, gradients against it and against central differences.

use burn::tensor::{DType, Tensor};
use rmsnorm_burn::{add_rms_norm, gemma_rms_norm, layer_norm, rms_norm};
use rmsnorm_core::reference::{self, BackwardInputs, ForwardInputs};
use rmsnorm_core::{Norm, NormSpec, bf16, f16};

use crate::kit::{f64s, frozen, loss, tensor, var, wide};

/// An f32, so that the reference's is the same.
const EPS: f64 = 1.0 / 1024.0;

/// Both sides compute in f64 by different orders of some twenty operations and sums of up to 96 terms.
const CLOSE: f64 = 256.0 * f64::EPSILON;

fn assert_close<const D: usize>(got: &Tensor<D>, expected: &[f64], closeness: f64, what: &str) {
    let got = f64s(got);
    assert_eq!(got.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1.0, |largest: f64, value| largest.max(value.abs()));
    let error = got.iter().zip(expected).fold(0.0, |error: f64, (got, expected)| error.max((got - expected).abs()));
    assert!(error <= closeness * largest, "{what}: {error:e} of {largest}");
}

fn var64<const D: usize>(dims: [usize; D], seed: u64) -> Tensor<D> {
    wide(&tensor::<f32, D>(dims, seed))
}

fn scalar(tensor: Tensor<1>) -> f64 {
    f64s(&tensor)[0]
}

#[test]
fn f64_is_the_definition_with_its_gradients() {
    let (rows, cols) = (10, 96);
    let x = var64([2, 5, cols], 1);
    let (w, b, dy) = (var64([cols], 2), var64([cols], 3), frozen(&var64([2, 5, cols], 4)));
    let (x64, w64, b64, dy64) = (f64s(&x), f64s(&w), f64s(&b), f64s(&dy));
    let spec = |norm| NormSpec::new(norm, rows, cols, EPS as f32);
    let (x_in, w_in) = (|| x.clone(), || w.clone());
    for (what, y, spec, has_bias) in [
        ("rms_norm", rms_norm(x_in(), w_in(), EPS), spec(Norm::Rms), false),
        ("gemma_rms_norm", gemma_rms_norm(x_in(), w_in(), EPS), spec(Norm::Rms).weight_offset(1.0), false),
        ("layer_norm", layer_norm(x_in(), w_in(), Some(b.clone()), EPS), spec(Norm::Layer), true),
        ("layer_norm without bias", layer_norm(x_in(), w_in(), None, EPS), spec(Norm::Layer), false),
    ] {
        let grads = loss(y.clone(), &dy).backward();
        let bias = has_bias.then_some(&b64[..]);
        let inputs = ForwardInputs { x: &x64, residual: None, weight: Some(&w64), bias };
        let forward = reference::forward(&spec, &inputs);
        let (mean, rstd) = (&forward.mean[..], &forward.rstd[..]);
        let inputs = BackwardInputs { dy: &dy64, x: &x64, weight: Some(&w64), mean, rstd, dresidual_out: None };
        let backward = reference::backward(&spec, &inputs);
        assert_close(&y, &forward.y, CLOSE, what);
        assert_close(&x.grad(&grads).unwrap(), &backward.dx, CLOSE, what);
        assert_close(&w.grad(&grads).unwrap(), &backward.dweight, CLOSE, what);
        if has_bias {
            assert_close(&b.grad(&grads).unwrap(), &backward.dbias, CLOSE, what);
        }
    }
}

/// The leaves of a chain.
#[derive(Clone)]
struct Leaves {
    x: Tensor<2>,
    r: Tensor<2>,
    w: Tensor<1>,
    b: Tensor<1>,
}

impl Leaves {
    fn wide(&self) -> Leaves {
        Leaves { x: wide(&self.x), r: wide(&self.r), w: wide(&self.w), b: wide(&self.b) }
    }

    /// A chain of all functions.
    fn total(&self, dy: &Tensor<2>) -> Tensor<1> {
        let Leaves { x, r, w, b } = self.clone();
        let y = layer_norm(x, w.clone(), Some(b.clone()), EPS);
        let (y, h) = add_rms_norm(y, r, w.clone(), EPS);
        loss(gemma_rms_norm(rms_norm(y + h, b, EPS), w, EPS), dy)
    }
}

/// In f64, along one direction for each variable: a step of 2^-17 leaves its square times a third derivative, and 2^-53 / 2^-17
/// of the value in roundings.
#[test]
fn gradients_are_slopes() {
    let point = Leaves { x: var64([3, 40], 1), r: var64([3, 40], 2), w: var64([40], 3), b: var64([40], 4) };
    let dy = frozen(&var64([3, 40], 5));
    let grads = point.total(&dy).backward();
    let step = 2f64.powi(-17);
    let is_slope = |name: &str, along: f64, moved: &dyn Fn(f64) -> Leaves| {
        let at = |sign: f64| scalar(moved(sign * step).total(&dy));
        let slope = (at(1.0) - at(-1.0)) / (2.0 * step);
        assert!((slope - along).abs() <= 1e-7 * along.abs().max(1.0), "{name}: {slope} and {along}");
    };
    let (matrix, vector) = (frozen(&var64([3, 40], 7)), frozen(&var64([40], 7)));
    let along = scalar(loss(point.x.grad(&grads).unwrap(), &matrix));
    is_slope("x", along, &|by| Leaves { x: point.x.clone() + matrix.clone() * by, ..point.clone() });
    let along = scalar(loss(point.r.grad(&grads).unwrap(), &matrix));
    is_slope("residual", along, &|by| Leaves { r: point.r.clone() + matrix.clone() * by, ..point.clone() });
    let along = scalar(loss(point.w.grad(&grads).unwrap(), &vector));
    is_slope("weight", along, &|by| Leaves { w: point.w.clone() + vector.clone() * by, ..point.clone() });
    let along = scalar(loss(point.b.grad(&grads).unwrap(), &vector));
    is_slope("bias", along, &|by| Leaves { b: point.b.clone() + vector.clone() * by, ..point.clone() });
}

/// The kernels' gradients in f32 are those of the same chain in f64. What single calls may differ by is derived in bounds.rs; a
/// chain of four calls is given 64 times the unit roundoff of f32, of the largest value.
#[test]
fn fused_and_slow_agree_on_a_chain() {
    let leaves = Leaves {
        x: var::<f32, 2>([6, 80], 1),
        r: var::<f32, 2>([6, 80], 2),
        w: var::<f32, 1>([80], 3),
        b: var::<f32, 1>([80], 4),
    };
    let (slow, dy) = (leaves.wide(), tensor::<f32, 2>([6, 80], 5));
    let fused_grads = leaves.total(&dy).backward();
    let slow_grads = slow.total(&frozen(&wide(&dy))).backward();
    let closeness = 32.0 * f64::from(f32::EPSILON);
    for (fused, slow) in [(&leaves.x, &slow.x), (&leaves.r, &slow.r)] {
        let expected = f64s(&slow.grad(&slow_grads).unwrap());
        assert_close(&fused.grad(&fused_grads).unwrap(), &expected, closeness, "a chain");
    }
    for (fused, slow) in [(&leaves.w, &slow.w), (&leaves.b, &slow.b)] {
        let expected = f64s(&slow.grad(&slow_grads).unwrap());
        assert_close(&fused.grad(&fused_grads).unwrap(), &expected, closeness, "a chain");
    }
}

/// Mixes without kernels: computed as wide as the widest needs, rounded once, and each gradient in its tensor's own dtype.
#[test]
fn mixes_without_kernels_take_burns_path() {
    // Half a unit in the last place of a result, and what f32 leaves before it is rounded.
    let (of_f32, of_f16, of_bf16) = (2f64.powi(-20), 2f64.powi(-10), 2f64.powi(-7));
    let units = [(DType::F32, of_f32), (DType::F16, of_f16), (DType::BF16, of_bf16), (DType::F64, CLOSE)];
    let check = |x: Tensor<2>, r: Tensor<2>, w: Tensor<1>, b: Tensor<1>, unit: f64| {
        let what = format!("{:?} {:?} {:?} {:?}", x.dtype(), r.dtype(), w.dtype(), b.dtype());
        let y = layer_norm(x.clone(), w.clone(), Some(b.clone()), EPS);
        let (normed, h) = add_rms_norm(x.clone(), r.clone(), w.clone(), EPS);
        assert_eq!((y.dtype(), normed.dtype(), h.dtype()), (x.dtype(), x.dtype(), r.dtype()), "{what}");
        let expected = layer_norm(wide(&x), wide(&w), Some(wide(&b)), EPS);
        assert_close(&y, &f64s(&expected), unit, &what);
        let (_, of_sum) = units.into_iter().find(|(dtype, _)| *dtype == h.dtype()).unwrap();
        assert_close(&h, &f64s(&(wide(&r) + wide(&x))), of_sum, &what);
        // From the rounded sum, which is what is normalized.
        let expected = rms_norm(wide(&h), wide(&w), EPS);
        assert_close(&normed, &f64s(&expected), unit, &what);
        let total = y.cast(DType::F64) + normed.cast(DType::F64) + h.cast(DType::F64);
        let grads = total.square().sum().backward();
        for matrix in [&x, &r] {
            assert_eq!(matrix.grad(&grads).unwrap().dtype(), matrix.dtype(), "{what}");
        }
        for vector in [&w, &b] {
            assert_eq!(vector.grad(&grads).unwrap().dtype(), vector.dtype(), "{what}");
        }
    };
    let (m, v) = ([5, 24], [24]);
    let (f32m, f32v) = (|| var::<f32, 2>(m, 1), || var::<f32, 1>(v, 1));
    let (bf16m, bf16v) = (|| var::<bf16, 2>(m, 3), || var::<bf16, 1>(v, 3));
    let f16m = || var::<f16, 2>(m, 2);
    check(f32m(), f32m(), wide(&f32v()), f32v(), of_f32);
    check(f16m(), f16m(), bf16v(), bf16v(), of_f16);
    check(bf16m(), f16m(), bf16v(), f32v(), of_bf16);
    check(f32m(), bf16m(), bf16v(), bf16v(), of_f32);
    check(wide(&f32m()), f32m(), f32v(), var::<f16, 1>(v, 2), CLOSE);
}
