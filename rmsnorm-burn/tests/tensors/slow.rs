//! burn's own path, which f64, mixes without kernels and other devices take: results and gradients against the definition in f64,
//! central differences and the kernels.

use burn::tensor::{DType, Device, Tensor};
use rmsnorm_burn::{
    add_layer_norm, add_rms_norm, gemma_rms_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm, layer_norm,
    layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
};
use rmsnorm_core::reference::{self, BackwardInputs, ForwardInputs, ForwardOutputs};
use rmsnorm_core::{Norm, NormSpec, bf16, f16};

use crate::kit::{Native, device, f64s, frozen, loss, tensor, tensor_on, wide};

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

/// Both that there are here: ours without its kernels, and one that has none.
fn devices() -> [Device; 2] {
    #[expect(deprecated, reason = "burn would have Flex instead, which is the other one")]
    let other = Device::ndarray();
    [device(), other.autodiff()]
}

fn var_on<E: Native, const D: usize>(device: &Device, dims: [usize; D], seed: u64) -> Tensor<D> {
    tensor_on::<E, D>(device, dims, seed).require_grad()
}

fn var64<const D: usize>(device: &Device, dims: [usize; D], seed: u64) -> Tensor<D> {
    wide(&tensor_on::<f32, D>(device, dims, seed))
}

fn scalar(tensor: Tensor<1>) -> f64 {
    f64s(&tensor)[0]
}

/// The gradients of the norm that has given `out`, from that of its result.
fn back(spec: &NormSpec, out: &ForwardOutputs, weight: &[f64], dy: &[f64]) -> reference::BackwardOutputs {
    let (mean, rstd) = (&out.mean[..], &out.rstd[..]);
    reference::backward(spec, &BackwardInputs { dy, x: &out.h, weight: Some(weight), mean, rstd, dresidual_out: None })
}

fn plus(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

const ROWS: usize = 10;
const COLS: usize = 96;

/// What the definition is computed from, with what burn's path is, and gradients of the results.
struct Given {
    x: Tensor<3>,
    r: Tensor<3>,
    w: Tensor<1>,
    b: Tensor<1>,
    dy: Tensor<3>,
    dsum: Tensor<3>,
}

impl Given {
    fn on(device: &Device) -> Self {
        let matrix = |seed| var64(device, [2, 5, COLS], seed);
        let vector = |seed| var64(device, [COLS], seed);
        let (dy, dsum) = (frozen(&matrix(4)), frozen(&matrix(6)));
        Given { x: matrix(1), r: matrix(5), w: vector(2), b: vector(3), dy, dsum }
    }
}

fn spec(norm: Norm) -> NormSpec {
    NormSpec::new(norm, ROWS, COLS, EPS as f32)
}

#[test]
fn f64_is_the_definition_with_its_gradients() {
    for given in devices().map(|device| Given::on(&device)) {
        let Given { x, w, b, dy, .. } = &given;
        let (x64, w64, b64, dy64) = (f64s(x), f64s(w), f64s(b), f64s(dy));
        let (x_in, w_in) = (|| x.clone(), || w.clone());
        for (what, y, spec, has_bias) in [
            ("rms_norm", rms_norm(x_in(), w_in(), EPS), spec(Norm::Rms), false),
            ("gemma_rms_norm", gemma_rms_norm(x_in(), w_in(), EPS), spec(Norm::Rms).weight_offset(1.0), false),
            ("layer_norm", layer_norm(x_in(), w_in(), Some(b.clone()), EPS), spec(Norm::Layer), true),
            ("layer_norm without bias", layer_norm(x_in(), w_in(), None, EPS), spec(Norm::Layer), false),
        ] {
            let grads = loss(y.clone(), dy).backward();
            let bias = has_bias.then_some(&b64[..]);
            let out = reference::forward(&spec, &ForwardInputs { x: &x64, residual: None, weight: Some(&w64), bias });
            let backward = back(&spec, &out, &w64, &dy64);
            assert_close(&y, &out.y, CLOSE, what);
            assert_close(&x.grad(&grads).unwrap(), &backward.dx, CLOSE, what);
            assert_close(&w.grad(&grads).unwrap(), &backward.dweight, CLOSE, what);
            if has_bias {
                assert_close(&b.grad(&grads).unwrap(), &backward.dbias, CLOSE, what);
            }
        }
    }
}

/// Norms of sums, and sums with norms, from the gradients of all results.
#[test]
fn f64_with_a_residual_is_the_definition_with_its_gradients() {
    for given in devices().map(|device| Given::on(&device)) {
        let Given { x, r, w, b, dy, dsum } = &given;
        let (x64, r64, w64, b64, dy64, dsum64) = (f64s(x), f64s(r), f64s(w), f64s(b), f64s(dy), f64s(dsum));
        let leaves = || (x.clone(), r.clone(), w.clone());
        for (what, norm, has_bias) in
            [("add_rms_norm", Norm::Rms, false), ("add_layer_norm", Norm::Layer, true), ("no bias", Norm::Layer, false)]
        {
            let ((x_in, r_in, w_in), bias) = (leaves(), has_bias.then(|| b.clone()));
            let (y, sum) = match norm {
                Norm::Rms => add_rms_norm(x_in, r_in, w_in, EPS),
                Norm::Layer => add_layer_norm(x_in, r_in, w_in, bias, EPS),
            };
            let grads = (loss(y.clone(), dy) + loss(sum.clone(), dsum)).backward();
            let (h, bias) = (plus(&x64, &r64), has_bias.then_some(&b64[..]));
            let inputs = ForwardInputs { x: &h, residual: None, weight: Some(&w64), bias };
            let out = reference::forward(&spec(norm), &inputs);
            let backward = back(&spec(norm), &out, &w64, &dy64);
            assert_eq!(f64s(&sum), h, "{what}");
            assert_close(&y, &out.y, CLOSE, what);
            for leaf in [x, r] {
                assert_close(&leaf.grad(&grads).unwrap(), &plus(&backward.dx, &dsum64), CLOSE, what);
            }
            assert_close(&w.grad(&grads).unwrap(), &backward.dweight, CLOSE, what);
            if has_bias {
                assert_close(&b.grad(&grads).unwrap(), &backward.dbias, CLOSE, what);
            }
        }
        // The residual's dtype is that of a rounding that there is none of here.
        let residual = Some((&r64[..], rmsnorm_core::DType::F32));
        let gemma = spec(Norm::Rms).weight_offset(1.0);
        for (what, spec, has_bias) in [
            ("rms_norm_add", spec(Norm::Rms), false),
            ("gemma_rms_norm_add", gemma, false),
            ("layer_norm_add", spec(Norm::Layer), true),
            ("layer_norm_add without bias", spec(Norm::Layer), false),
        ] {
            let ((x_in, r_in, w_in), bias) = (leaves(), has_bias.then(|| b.clone()));
            let sum = match (spec.norm, spec.weight_offset == 0.0) {
                (Norm::Rms, true) => rms_norm_add(x_in, r_in, w_in, EPS),
                (Norm::Rms, false) => gemma_rms_norm_add(x_in, r_in, w_in, EPS),
                (Norm::Layer, _) => layer_norm_add(x_in, r_in, w_in, bias, EPS),
            };
            let grads = loss(sum.clone(), dsum).backward();
            let (spec, bias) = (spec.residual_after(), has_bias.then_some(&b64[..]));
            let out = reference::forward(&spec, &ForwardInputs { x: &x64, residual, weight: Some(&w64), bias });
            let backward = back(&spec, &out, &w64, &dsum64);
            assert_close(&sum, &out.sum, CLOSE, what);
            assert_close(&x.grad(&grads).unwrap(), &backward.dx, CLOSE, what);
            assert_eq!(f64s(&r.grad(&grads).unwrap()), dsum64, "{what}");
            assert_close(&w.grad(&grads).unwrap(), &backward.dweight, CLOSE, what);
            if has_bias {
                assert_close(&b.grad(&grads).unwrap(), &backward.dbias, CLOSE, what);
            }
        }
        for (what, spec) in [("rms_norm_add_rms_norm", spec(Norm::Rms)), ("gemma_rms_norm_add_rms_norm", gemma)] {
            let ((x_in, r_in, w_in), next) = (leaves(), b.clone());
            let (y, sum) = match spec.weight_offset == 0.0 {
                true => rms_norm_add_rms_norm(x_in, r_in, w_in, next, EPS),
                false => gemma_rms_norm_add_rms_norm(x_in, r_in, w_in, next, EPS),
            };
            let grads = (loss(y.clone(), dy) + loss(sum.clone(), dsum)).backward();
            let spec = spec.residual_after();
            let first = reference::forward(&spec, &ForwardInputs { x: &x64, residual, weight: Some(&w64), bias: None });
            let second = reference::next(&spec, &first.sum, Some(&b64), None);
            let of_second = back(&spec, &second, &b64, &dy64);
            let of_sum = plus(&of_second.dx, &dsum64);
            let of_first = back(&spec, &first, &w64, &of_sum);
            assert_close(&sum, &first.sum, CLOSE, what);
            assert_close(&y, &second.y, CLOSE, what);
            assert_close(&x.grad(&grads).unwrap(), &of_first.dx, CLOSE, what);
            assert_close(&r.grad(&grads).unwrap(), &of_sum, CLOSE, what);
            assert_close(&w.grad(&grads).unwrap(), &of_first.dweight, CLOSE, what);
            assert_close(&b.grad(&grads).unwrap(), &of_second.dweight, CLOSE, what);
        }
    }
}

/// The leaves of a chain, or of a mix.
#[derive(Clone)]
struct Leaves {
    x: Tensor<2>,
    r: Tensor<2>,
    w: Tensor<1>,
    b: Tensor<1>,
}

/// What a chain comes to.
type Chain = fn(&Leaves, &Tensor<2>) -> Tensor<1>;

/// Of all functions.
const CHAINS: [(&str, Chain); 2] = [("norms", Leaves::norms), ("sums with norms", Leaves::sums)];

impl Leaves {
    fn wide(&self) -> Leaves {
        Leaves { x: wide(&self.x), r: wide(&self.r), w: wide(&self.w), b: wide(&self.b) }
    }

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

/// In f64, along one direction for each variable: a step of 2^-17 leaves its square times a third derivative, and 2^-53 / 2^-17
/// of the value in roundings.
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

/// The kernels' gradients in f32 are those of the same chain in f64. What single calls may differ by is derived in bounds.rs; a
/// chain of four calls, or of six, is given 64 times the unit roundoff of f32, of the largest value.
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

/// Of a dtype, in parts of the largest value: half a unit in the last place, and what f32 leaves before it is rounded.
fn unit(dtype: DType) -> f64 {
    let of_f32 = 2f64.powi(-20);
    let units = [(DType::F32, of_f32), (DType::F16, 2f64.powi(-11) + of_f32), (DType::BF16, 2f64.powi(-8) + of_f32)];
    units.into_iter().find(|(of, _)| *of == dtype).map_or(CLOSE, |(_, unit)| unit)
}

/// A gradient in its tensor's own dtype, close to this one; `inner` for what was rounded on the way.
fn assert_grad<const D: usize>(got: Option<Tensor<D>>, of: &Tensor<D>, expected: &Tensor<D>, inner: f64, what: &str) {
    let got = got.expect("it is tracked");
    assert_eq!(got.dtype(), of.dtype(), "{what}");
    assert_close(&got, &f64s(expected), unit(of.dtype()) + inner, what);
}

/// Result and gradients of a function that rounds once are those of the same function in f64.
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

    /// Mixes without kernels: computed as wide as the widest needs, rounded once.
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
        self.check_norms_of_sums();
        self.check_pairs();
    }

    /// By the sum as it was rounded, which is what is normalized, and of which the gradient is rounded too.
    fn check_norms_of_sums(&self) {
        let Leaves { x, r, w, b } = self;
        for norm in Norm::ALL {
            let what = format!("{norm:?} of a sum of {}", self.dtypes());
            let (y, sum) = match norm {
                Norm::Rms => add_rms_norm(x.clone(), r.clone(), w.clone(), EPS),
                Norm::Layer => add_layer_norm(x.clone(), r.clone(), w.clone(), Some(b.clone()), EPS),
            };
            assert_eq!((y.dtype(), sum.dtype()), (x.dtype(), r.dtype()), "{what}");
            let (dy, h, wide_w, wide_b) = (gradient_of(&y), wide(&sum), wide(w), wide(b));
            let expected = match norm {
                Norm::Rms => rms_norm(h.clone(), wide_w.clone(), EPS),
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

    /// By the sum as it was rounded, and by its gradient, which is the residual's.
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
    // Kernels but for the second vector, be it a bias or the next weight.
    check(bf16m(), bf16m(), bf16v(), f32v());
    check(wide(&f32m()), f32m(), f32v(), var_on::<f16, 1>(&ours, v, 2));
}

/// Where there are no kernels, the dtypes that have some take burn's path as well.
#[test]
fn devices_without_kernels_take_burns_path() {
    let [_, other] = devices();
    let (matrix, vector) =
        (|seed| var_on::<f32, 2>(&other, [5, 24], seed), |seed| var_on::<f32, 1>(&other, [24], seed));
    Leaves { x: matrix(1), r: matrix(2), w: vector(3), b: vector(4) }.check();
    Leaves { x: matrix(1), r: wide(&matrix(2)), w: vector(3), b: wide(&vector(4)) }.check();
}
