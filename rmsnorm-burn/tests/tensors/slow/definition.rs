//! Results and gradients in f64, against the definition.

use burn::tensor::{Device, Tensor};
use rmsnorm_burn::{
    Activation, add_layer_norm, add_rms_norm, gemma_rms_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm,
    layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
};
use rmsnorm_core::reference::{self, BackwardInputs, ForwardInputs, ForwardOutputs};
use rmsnorm_core::{Norm, NormSpec};

use super::{CLOSE, EPS, assert_close, devices, var64};
use crate::kit::{f64s, frozen, loss};

/// The gradients of the norm with the result `out`, from the gradient of the result.
fn back(spec: &NormSpec, out: &ForwardOutputs, weight: &[f64], dy: &[f64]) -> reference::BackwardOutputs {
    let (mean, rstd) = (&out.mean[..], &out.rstd[..]);
    reference::backward(spec, &BackwardInputs { dy, x: &out.h, weight: Some(weight), mean, rstd, dresidual_out: None })
}

fn plus(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

const ROWS: usize = 10;
const COLS: usize = 96;

/// Near the median norm of 96 values that are uniform from -2 to 2, in 10 rows: half are clamped.
const LEAST: f64 = 11.5;

/// The inputs of the definition and of burn's path, and gradients of the results.
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
fn gates_and_groups_in_f64_are_the_definition_with_their_gradients() {
    for given in devices().map(|device| Given::on(&device)) {
        let Given { x, r: z, w, b, dy, .. } = &given;
        let (x64, z64, w64, b64, dy64) = (f64s(x), f64s(z), f64s(w), f64s(b), f64s(dy));
        for (kind, activation, is_before, groups) in [
            (Norm::Rms, Activation::Silu, false, 1),
            (Norm::Layer, Activation::Sigmoid, false, 3),
            (Norm::Rms, Activation::Sigmoid, true, 4),
            (Norm::Layer, Activation::Silu, true, 1),
            (Norm::L2, Activation::Silu, false, 4),
            (Norm::L2Clamped, Activation::Sigmoid, true, 1),
        ] {
            let what = format!("{kind:?} {activation:?}, before: {is_before}, {groups} groups");
            let norm = match kind {
                Norm::Rms => rmsnorm_burn::Norm::rms(EPS),
                Norm::Layer => rmsnorm_burn::Norm::layer(EPS),
                Norm::L2 => rmsnorm_burn::Norm::l2(EPS),
                Norm::L2Clamped => rmsnorm_burn::Norm::l2_clamped(EPS),
            };
            let norm = norm.bias(b.clone()).groups(groups);
            let norm = match is_before {
                true => norm.gate_before(z.clone(), activation),
                false => norm.gate_after(z.clone(), activation),
            };
            let y = norm.apply(x.clone(), w.clone());
            let grads = loss(y.clone(), dy).backward();
            let rows = if is_before { reference::gated(activation, &x64, &z64) } else { x64.clone() };
            let inputs = ForwardInputs { x: &rows, residual: None, weight: Some(&w64), bias: Some(&b64) };
            let spec = spec(kind).groups(groups);
            let out = reference::forward(&spec, &inputs);
            let (expected, dv) = match is_before {
                true => (out.y.clone(), dy64.clone()),
                false => {
                    let y = reference::gated(activation, &out.y, &z64);
                    (y, reference::gated_backward(activation, &dy64, &out.y, &z64).0)
                }
            };
            let backward = back(&spec, &out, &w64, &dv);
            let (dx, dz) = match is_before {
                true => reference::gated_backward(activation, &backward.dx, &x64, &z64),
                false => (backward.dx, reference::gated_backward(activation, &dy64, &out.y, &z64).1),
            };
            assert_close(&y, &expected, CLOSE, &what);
            assert_close(&x.grad(&grads).unwrap(), &dx, CLOSE, &what);
            assert_close(&z.grad(&grads).unwrap(), &dz, CLOSE, &what);
            assert_close(&w.grad(&grads).unwrap(), &backward.dweight, CLOSE, &what);
            assert_close(&b.grad(&grads).unwrap(), &backward.dbias, CLOSE, &what);
        }
    }
}

/// A gate far below zero, where an exponential overflows, has small results and gradients, and NaN stays
/// NaN.
#[test]
fn extreme_gates_are_finite() {
    for device in devices() {
        let gate = || Tensor::<2>::from_floats([[-1000.0, -90.0, 1000.0, f32::NAN]], &device).require_grad();
        for activation in [Activation::Silu, Activation::Sigmoid] {
            let z = gate();
            let norm = rmsnorm_burn::Norm::rms(EPS).gate_after(z.clone(), activation);
            let y = norm.apply(Tensor::<2>::ones([1, 4], &device), Tensor::ones([4], &device));
            let (values, gradient) = (f64s(&y), f64s(&z.grad(&y.sum().backward()).unwrap()));
            assert!(values[..3].iter().chain(&gradient[..3]).all(|value| value.is_finite()), "{values:?} {gradient:?}");
            assert!(
                values[0].abs() < 1e-30 && gradient[0].abs() < 1e-30 && values[3].is_nan(),
                "{values:?} {gradient:?}"
            );
        }
    }
}

#[test]
fn f64_is_the_definition_with_its_gradients() {
    for given in devices().map(|device| Given::on(&device)) {
        let Given { x, w, b, dy, .. } = &given;
        let (x64, w64, b64, dy64) = (f64s(x), f64s(w), f64s(b), f64s(dy));
        let (x_in, w_in) = (|| x.clone(), || w.clone());
        let clamped = NormSpec::l2_clamped(ROWS, COLS, LEAST as f32);
        for (what, y, spec, has_bias) in [
            ("rms_norm", rms_norm(x_in(), w_in(), EPS), spec(Norm::Rms), false),
            ("gemma_rms_norm", gemma_rms_norm(x_in(), w_in(), EPS), spec(Norm::Rms).weight_offset(1.0), false),
            ("layer_norm", layer_norm(x_in(), w_in(), Some(b.clone()), EPS), spec(Norm::Layer), true),
            ("layer_norm without bias", layer_norm(x_in(), w_in(), None, EPS), spec(Norm::Layer), false),
            ("l2", rmsnorm_burn::Norm::l2(EPS).apply(x_in(), w_in()), spec(Norm::L2), false),
            // Some rows have a smaller norm, some a larger one.
            ("l2_clamped", rmsnorm_burn::Norm::l2_clamped(LEAST).apply(x_in(), w_in()), clamped, false),
        ] {
            let grads = loss(y.clone(), dy).backward();
            let bias = has_bias.then_some(&b64[..]);
            let out = reference::forward(&spec, &ForwardInputs { x: &x64, residual: None, weight: Some(&w64), bias });
            let clamped = out.rstd.iter().filter(|rstd| reference::is_clamped(&spec, **rstd)).count();
            assert_eq!((1..ROWS).contains(&clamped), spec.norm == Norm::L2Clamped, "{what}: {clamped}");
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
        for (what, norm, has_bias) in [
            ("add_rms_norm", Norm::Rms, false),
            ("add_layer_norm", Norm::Layer, true),
            ("no bias", Norm::Layer, false),
            ("Norm::l2 of a sum", Norm::L2, false),
            ("Norm::l2_clamped of a sum", Norm::L2Clamped, false),
        ] {
            let ((x_in, r_in, w_in), bias) = (leaves(), has_bias.then(|| b.clone()));
            let (y, sum) = match norm {
                Norm::Rms => add_rms_norm(x_in, r_in, w_in, EPS),
                Norm::L2 => rmsnorm_burn::Norm::l2(EPS).residual(r_in).apply(x_in, w_in),
                Norm::L2Clamped => rmsnorm_burn::Norm::l2_clamped(EPS).residual(r_in).apply(x_in, w_in),
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
        // The residual's dtype determines a rounding, which does not occur here.
        let residual = Some((&r64[..], rmsnorm_core::DType::F32));
        let gemma = spec(Norm::Rms).weight_offset(1.0);
        for (what, spec, has_bias) in [
            ("rms_norm_add", spec(Norm::Rms), false),
            ("gemma_rms_norm_add", gemma, false),
            ("layer_norm_add", spec(Norm::Layer), true),
            ("layer_norm_add without bias", spec(Norm::Layer), false),
            ("Norm::l2 to a sum", spec(Norm::L2), false),
            ("Norm::l2_clamped to a sum", spec(Norm::L2Clamped), false),
        ] {
            let ((x_in, r_in, w_in), bias) = (leaves(), has_bias.then(|| b.clone()));
            let sum = match (spec.norm, spec.weight_offset == 0.0) {
                (Norm::Rms, true) => rms_norm_add(x_in, r_in, w_in, EPS),
                (Norm::Rms, false) => gemma_rms_norm_add(x_in, r_in, w_in, EPS),
                (Norm::L2, _) => rmsnorm_burn::Norm::l2(EPS).residual_after(r_in).apply(x_in, w_in),
                (Norm::L2Clamped, _) => rmsnorm_burn::Norm::l2_clamped(EPS).residual_after(r_in).apply(x_in, w_in),
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
