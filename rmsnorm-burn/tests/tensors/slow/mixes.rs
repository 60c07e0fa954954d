//! Results and gradients in rounded dtypes, against the same functions in f64.

use burn::tensor::{DType, Tensor};
use rmsnorm_burn::{
    Activation, add_layer_norm, add_rms_norm, gemma_rms_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm,
    layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
};
use rmsnorm_core::{Norm, bf16, f16};

use super::{CLOSE, EPS, Leaves, assert_close, devices, var_on};
use crate::kit::{device, f64s, frozen, loss, tensor_on, wide};

/// The error of a dtype relative to the largest value: half a unit in the last place, plus the f32
/// error before rounding.
fn unit(dtype: DType) -> f64 {
    let of_f32 = 2f64.powi(-20);
    let units = [(DType::F32, of_f32), (DType::F16, 2f64.powi(-11) + of_f32), (DType::BF16, 2f64.powi(-8) + of_f32)];
    units.into_iter().find(|(of, _)| *of == dtype).map_or(CLOSE, |(_, unit)| unit)
}

/// Checks a gradient in its tensor's dtype against this one; `inner` is the error of earlier
/// roundings.
fn assert_grad<const D: usize>(got: Option<Tensor<D>>, of: &Tensor<D>, expected: &Tensor<D>, inner: f64, what: &str) {
    let got = got.expect("it is tracked");
    assert_eq!(got.dtype(), of.dtype(), "{what}");
    assert_close(&got, &f64s(expected), unit(of.dtype()) + inner, what);
}

/// Result and gradients of a function that rounds once equal those of the same function in f64.
fn agrees(what: &str, leaves: &Leaves, function: fn(Leaves) -> Tensor<2>, result: DType) {
    let what = format!("{what} of {}", leaves.dtypes());
    let (y, of_wide) = (function(leaves.clone()), leaves.wide());
    let expected = function(of_wide.clone());
    assert_eq!(y.dtype(), result, "{what}");
    assert_close(&y, &f64s(&expected), unit(result), &what);
    let dy = gradient_of(&y);
    let (grads, expected) = (loss(y, &dy).backward(), loss(expected, &frozen(&wide(&dy))).backward());
    for (leaf, wide) in [(&leaves.x, &of_wide.x), (&leaves.r, &of_wide.r)] {
        if let Some(expected) = wide.grad(&expected) {
            assert_grad(leaf.grad(&grads), leaf, &expected, 0.0, &what);
        }
    }
    for (leaf, wide) in [(&leaves.w, &of_wide.w), (&leaves.b, &of_wide.b)] {
        if let Some(expected) = wide.grad(&expected) {
            assert_grad(leaf.grad(&grads), leaf, &expected, 0.0, &what);
        }
    }
}

/// Values that the tensor's dtype holds.
fn gradient_of(y: &Tensor<2>) -> Tensor<2> {
    frozen(&tensor_on::<f32, 2>(&y.device(), y.dims(), 9).cast(y.dtype()))
}

impl Leaves {
    fn dtypes(&self) -> String {
        format!("{:?} {:?} {:?} {:?}", self.x.dtype(), self.r.dtype(), self.w.dtype(), self.b.dtype())
    }

    /// Mixes without kernels: computed in the widest dtype, rounded once.
    fn check(&self) {
        let (of_x, of_r) = (self.x.dtype(), self.r.dtype());
        agrees("rms_norm", self, |of| rms_norm(of.x, of.w, EPS), of_x);
        agrees("gemma_rms_norm", self, |of| gemma_rms_norm(of.x, of.w, EPS), of_x);
        agrees("layer_norm", self, |of| layer_norm(of.x, of.w, Some(of.b), EPS), of_x);
        agrees("layer_norm without bias", self, |of| layer_norm(of.x, of.w, None, EPS), of_x);
        agrees("add_rms_norm's sum", self, |of| add_rms_norm(of.x, of.r, of.w, EPS).1, of_r);
        agrees("add_layer_norm's sum", self, |of| add_layer_norm(of.x, of.r, of.w, None, EPS).1, of_r);
        agrees("rms_norm_add", self, |of| rms_norm_add(of.x, of.r, of.w, EPS), of_r);
        agrees("gemma_rms_norm_add", self, |of| gemma_rms_norm_add(of.x, of.r, of.w, EPS), of_r);
        agrees("layer_norm_add", self, |of| layer_norm_add(of.x, of.r, of.w, Some(of.b), EPS), of_r);
        agrees("layer_norm_add without bias", self, |of| layer_norm_add(of.x, of.r, of.w, None, EPS), of_r);
        agrees("the pair's sum", self, |of| rms_norm_add_rms_norm(of.x, of.r, of.w, of.b, EPS).1, of_r);
        agrees(
            "gate_after",
            self,
            |of| {
                let norm = rmsnorm_burn::Norm::rms(EPS).bias(of.b).groups(2);
                norm.gate_after(of.r, Activation::Silu).apply(of.x, of.w)
            },
            of_x,
        );
        agrees(
            "gate_before",
            self,
            |of| rmsnorm_burn::Norm::layer(EPS).bias(of.b).gate_before(of.r, Activation::Sigmoid).apply(of.x, of.w),
            of_x,
        );
        self.check_norms_of_sums();
        self.check_pairs();
    }

    /// Uses the rounded sum, which the norm reads, and whose gradient is rounded too.
    fn check_norms_of_sums(&self) {
        let Leaves { x, r, w, b } = self;
        for norm in Norm::ALL {
            let what = format!("{norm:?} of a sum of {}", self.dtypes());
            let (y, sum) = match norm {
                Norm::Rms => add_rms_norm(x.clone(), r.clone(), w.clone(), EPS),
                Norm::L2 => rmsnorm_burn::Norm::l2(EPS).residual(r.clone()).apply(x.clone(), w.clone()),
                Norm::L2Clamped => rmsnorm_burn::Norm::l2_clamped(EPS).residual(r.clone()).apply(x.clone(), w.clone()),
                Norm::Layer => add_layer_norm(x.clone(), r.clone(), w.clone(), Some(b.clone()), EPS),
            };
            assert_eq!((y.dtype(), sum.dtype()), (x.dtype(), r.dtype()), "{what}");
            let (dy, h, wide_w, wide_b) = (gradient_of(&y), wide(&sum), wide(w), wide(b));
            let expected = match norm {
                Norm::Rms => rms_norm(h.clone(), wide_w.clone(), EPS),
                Norm::L2 => rmsnorm_burn::Norm::l2(EPS).apply(h.clone(), wide_w.clone()),
                Norm::L2Clamped => rmsnorm_burn::Norm::l2_clamped(EPS).apply(h.clone(), wide_w.clone()),
                Norm::Layer => layer_norm(h.clone(), wide_w.clone(), Some(wide_b.clone()), EPS),
            };
            assert_close(&y, &f64s(&expected), unit(y.dtype()), &what);
            let (grads, expected) = (loss(y, &dy).backward(), loss(expected, &frozen(&wide(&dy))).backward());
            let dh = h.grad(&expected).unwrap();
            assert_grad(r.grad(&grads), r, &dh, 0.0, &what);
            assert_grad(x.grad(&grads), x, &dh, unit(r.dtype()), &what);
            assert_grad(w.grad(&grads), w, &wide_w.grad(&expected).unwrap(), 0.0, &what);
            if norm == Norm::Layer {
                assert_grad(b.grad(&grads), b, &wide_b.grad(&expected).unwrap(), 0.0, &what);
            }
        }
    }

    /// Uses the rounded sum, and its gradient, which is the residual's.
    fn check_pairs(&self) {
        let Leaves { x, r, w, b } = self;
        let what = format!("both norms of {}", self.dtypes());
        let (y, sum) = gemma_rms_norm_add_rms_norm(x.clone(), r.clone(), w.clone(), b.clone(), EPS);
        assert_eq!((y.dtype(), sum.dtype()), (x.dtype(), r.dtype()), "{what}");
        let (dy, h, wide_b) = (gradient_of(&y), wide(&sum), wide(b));
        let expected = gemma_rms_norm(h.clone(), wide_b.clone(), EPS);
        assert_close(&y, &f64s(&expected), unit(y.dtype()), &what);
        let (grads, expected) = (loss(y, &dy).backward(), loss(expected, &frozen(&wide(&dy))).backward());
        assert_grad(b.grad(&grads), b, &wide_b.grad(&expected).unwrap(), 0.0, &what);
        let dsum = r.grad(&grads);
        assert_grad(dsum.clone(), r, &h.grad(&expected).unwrap(), 0.0, &what);
        let of_wide = self.wide();
        let first = gemma_rms_norm_add(of_wide.x.clone(), of_wide.r, of_wide.w.clone(), EPS);
        let expected = loss(first, &frozen(&wide(&dsum.unwrap().autodiff()))).backward();
        assert_grad(x.grad(&grads), x, &of_wide.x.grad(&expected).unwrap(), 0.0, &what);
        assert_grad(w.grad(&grads), w, &of_wide.w.grad(&expected).unwrap(), 0.0, &what);
    }
}

#[test]
fn mixes_without_kernels_take_burns_path() {
    let (m, v) = ([5, 24], [24]);
    let ours = device();
    let (f32m, f32v) = (|| var_on::<f32, 2>(&ours, m, 1), || var_on::<f32, 1>(&ours, v, 1));
    let (bf16m, bf16v) = (|| var_on::<bf16, 2>(&ours, m, 3), || var_on::<bf16, 1>(&ours, v, 3));
    let f16m = || var_on::<f16, 2>(&ours, m, 2);
    let check = |x, r, w, b| Leaves { x, r, w, b }.check();
    check(f32m(), f32m(), wide(&f32v()), f32v());
    check(f16m(), f16m(), bf16v(), bf16v());
    check(bf16m(), f16m(), bf16v(), f32v());
    check(f32m(), bf16m(), bf16v(), bf16v());
    // Kernels exist, except for the second vector: a bias or the next weight.
    check(bf16m(), bf16m(), bf16v(), f32v());
    check(wide(&f32m()), f32m(), f32v(), var_on::<f16, 1>(&ours, v, 2));
}

/// On a device without kernels, dtypes with kernels take burn's path as well.
#[test]
fn devices_without_kernels_take_burns_path() {
    let [_, other] = devices();
    let (matrix, vector) =
        (|seed| var_on::<f32, 2>(&other, [5, 24], seed), |seed| var_on::<f32, 1>(&other, [24], seed));
    Leaves { x: matrix(1), r: matrix(2), w: vector(3), b: vector(4) }.check();
    Leaves { x: matrix(1), r: wide(&matrix(2)), w: vector(3), b: wide(&vector(4)) }.check();
}
