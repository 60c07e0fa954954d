//! The path of candle's own operations, on the CPU with f64 and mixes without kernels, as on other
//! devices: results against the definition in f64, gradients against it and against central
//! differences.

use crate::kit::{On, f64s, loss, on_each_device, wide};
use candle_core::{DType, Tensor, Var};
use rmsnorm_candle::{
    add_layer_norm, add_rms_norm, gemma_rms_norm, gemma_rms_norm_add_rms_norm, layer_norm, layer_norm_add, rms_norm,
    rms_norm_add,
};
use rmsnorm_core::reference::{self, BackwardInputs, ForwardInputs};
use rmsnorm_core::{Norm, NormSpec, bf16, f16};

/// Exact in f32, so that the reference has the same eps.
const EPS: f64 = 1.0 / 1024.0;

/// Both sides compute in f64, with different orders of about twenty operations and of sums of up to
/// 96 terms.
const CLOSE: f64 = 256.0 * f64::EPSILON;

/// Near the median norm of 96 values that are uniform from -2 to 2, in 10 rows: half are clamped.
const LEAST: f64 = 11.5;

fn assert_close(got: &Tensor, expected: &[f64], closeness: f64, what: &str) {
    let got = f64s(got);
    assert_eq!(got.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1.0, |largest: f64, value| largest.max(value.abs()));
    let error = got.iter().zip(expected).fold(0.0, |error: f64, (got, expected)| error.max((got - expected).abs()));
    assert!(error <= closeness * largest, "{what}: {error:e} of {largest}");
}

fn var64(on: &On, shape: &[usize], seed: u64) -> Var {
    wide(&on.tensor::<f32>(shape, seed))
}

#[test]
fn f64_is_the_definition_with_its_gradients() {
    on_each_device(|on| {
        let (rows, cols) = (10, 96);
        let x = var64(on, &[2, 5, cols], 1);
        let (w, b, dy) = (var64(on, &[cols], 2), var64(on, &[cols], 3), var64(on, &[2, 5, cols], 4).detach());
        let [x64, w64, b64, dy64] = [x.as_tensor(), w.as_tensor(), b.as_tensor(), &dy].map(f64s);
        let spec = |norm| NormSpec::new(norm, rows, cols, EPS as f32);
        let clamped = NormSpec::l2_clamped(rows, cols, LEAST as f32);
        for (what, y, spec, has_bias) in [
            ("rms_norm", rms_norm(&x, &w, EPS), spec(Norm::Rms), false),
            ("gemma_rms_norm", gemma_rms_norm(&x, &w, EPS), spec(Norm::Rms).weight_offset(1.0), false),
            ("layer_norm", layer_norm(&x, &w, Some(&b), EPS), spec(Norm::Layer), true),
            ("layer_norm without bias", layer_norm(&x, &w, None, EPS), spec(Norm::Layer), false),
            ("l2", rmsnorm_candle::Norm::l2(EPS).apply(&x, &w), spec(Norm::L2), false),
            // Some rows have a smaller norm, some a larger one.
            ("l2_clamped", rmsnorm_candle::Norm::l2_clamped(LEAST).apply(&x, &w), clamped, false),
        ] {
            let y = y.unwrap();
            let grads = loss(&y, &dy).backward().unwrap();
            let bias = has_bias.then_some(&b64[..]);
            let inputs = ForwardInputs { x: &x64, residual: None, weight: Some(&w64), bias };
            let forward = reference::forward(&spec, &inputs);
            let clamped = forward.rstd.iter().filter(|rstd| reference::is_clamped(&spec, **rstd)).count();
            assert_eq!((1..rows).contains(&clamped), spec.norm == Norm::L2Clamped, "{what}: {clamped}");
            let (mean, rstd) = (&forward.mean[..], &forward.rstd[..]);
            let inputs = BackwardInputs { dy: &dy64, x: &x64, weight: Some(&w64), mean, rstd, dresidual_out: None };
            let backward = reference::backward(&spec, &inputs);
            assert_close(&y, &forward.y, CLOSE, what);
            assert_close(grads.get(&x).unwrap(), &backward.dx, CLOSE, what);
            assert_close(grads.get(&w).unwrap(), &backward.dweight, CLOSE, what);
            if has_bias {
                assert_close(grads.get(&b).unwrap(), &backward.dbias, CLOSE, what);
            }
        }
    });
}

/// A chain of all functions, in f64, along one direction for each variable. A step of 2^-17 has
/// errors of its square times a third derivative, and of 2^-53 / 2^-17 of the value from roundings.
#[test]
fn gradients_are_slopes() {
    on_each_device(|on| {
        let shape = [3, 40];
        let point = [var64(on, &shape, 1), var64(on, &shape, 2), var64(on, &[40], 3), var64(on, &[40], 4)];
        let dy = var64(on, &shape, 5).detach();
        let total = |at: &[Var; 4]| {
            let [x, r, w, b] = at;
            let (y, h) = add_rms_norm(&layer_norm(x, w, Some(b), EPS).unwrap(), r, w, EPS).unwrap();
            let (y, h) = add_layer_norm(&y, &h, w, Some(b), EPS).unwrap();
            let h = layer_norm_add(&y, &rms_norm_add(&y, &h, b, EPS).unwrap(), w, Some(b), EPS).unwrap();
            let (y, h) = gemma_rms_norm_add_rms_norm(&y, &h, b, w, EPS).unwrap();
            loss(&gemma_rms_norm(&rms_norm(&(y + h).unwrap(), b, EPS).unwrap(), w, EPS).unwrap(), &dy)
        };
        let grads = total(&point).backward().unwrap();
        let step = 2f64.powi(-17);
        for (i, name) in ["x", "residual", "weight", "bias"].into_iter().enumerate() {
            let direction = var64(on, point[i].dims(), 7).detach();
            let moved = |sign: f64| {
                let mut at = point.clone();
                at[i] =
                    Var::from_tensor(&(at[i].as_tensor() + (&direction * (sign * step)).unwrap()).unwrap()).unwrap();
                total(&at).to_scalar::<f64>().unwrap()
            };
            let slope = (moved(1.0) - moved(-1.0)) / (2.0 * step);
            let along = loss(grads.get(&point[i]).unwrap(), &direction).to_scalar::<f64>().unwrap();
            assert!((slope - along).abs() <= 1e-7 * along.abs().max(1.0), "{name}: {slope} and {along}");
        }
    });
}

/// The kernels' f32 gradients equal those of the same chain in f64. bounds.rs derives the error of
/// single calls; this chain of eight calls may differ by 32 units of f32 roundoff of the largest
/// value.
#[test]
fn fused_and_slow_agree_on_a_chain() {
    on_each_device(|on| {
        let shape = [6, 80];
        let (x, r) = (on.var::<f32>(&shape, 1), on.var::<f32>(&shape, 2));
        let (w, b, dy) = (on.var::<f32>(&[80], 3), on.var::<f32>(&[80], 4), on.tensor::<f32>(&shape, 5));
        let total = |[x, r, w, b]: [&Var; 4], dy: &Tensor| {
            let (y, h) = add_rms_norm(&layer_norm(x, w, Some(b), EPS).unwrap(), r, w, EPS).unwrap();
            let (y, h) = add_layer_norm(&y, &h, w, Some(b), EPS).unwrap();
            let h = layer_norm_add(&y, &rms_norm_add(&y, &h, b, EPS).unwrap(), w, Some(b), EPS).unwrap();
            let (y, h) = gemma_rms_norm_add_rms_norm(&y, &h, b, w, EPS).unwrap();
            loss(&gemma_rms_norm(&(y + h).unwrap(), w, EPS).unwrap(), dy)
        };
        let fused = total([&x, &r, &w, &b], &dy).backward().unwrap();
        let wides = [&x, &r, &w, &b].map(|var| wide(var));
        let slow = total([&wides[0], &wides[1], &wides[2], &wides[3]], &wide(&dy).detach()).backward().unwrap();
        for (i, var) in [&x, &r, &w, &b].into_iter().enumerate() {
            let expected = f64s(slow.get(&wides[i]).unwrap());
            assert_close(fused.get(var).unwrap(), &expected, 32.0 * f64::from(f32::EPSILON), "a chain");
        }
    });
}

/// Mixes without kernels: computed in the widest dtype, rounded once, with each gradient in its
/// tensor's dtype.
#[test]
fn mixes_without_kernels_take_candles_path() {
    on_each_device(|on| {
        let shape = [5, 24];
        let check = |x: Var, r: Var, w: Var, b: Var, unit: f64| {
            let what = format!("{:?} {:?} {:?} {:?}", x.dtype(), r.dtype(), w.dtype(), b.dtype());
            let y = layer_norm(&x, &w, Some(&b), EPS).unwrap();
            let (normed, h) = add_rms_norm(&x, &r, &w, EPS).unwrap();
            assert_eq!((y.dtype(), normed.dtype(), h.dtype()), (x.dtype(), x.dtype(), r.dtype()), "{what}");
            let wides = [&x, &r, &w, &b].map(|var| wide(var));
            let expected = layer_norm(&wides[0], &wides[2], Some(&wides[3]), EPS).unwrap();
            assert_close(&y, &f64s(&expected), unit, &what);
            // From the rounded sum, which the norm reads.
            let expected = rms_norm(&wide(&h), &wides[2], EPS).unwrap();
            assert_close(&normed, &f64s(&expected), unit, &what);
            let total = (y.to_dtype(DType::F64).unwrap() + normed.to_dtype(DType::F64).unwrap()).unwrap();
            let total = (total + h.to_dtype(DType::F64).unwrap()).unwrap().sqr().unwrap().sum_all().unwrap();
            let grads = total.backward().unwrap();
            for var in [&x, &r, &w, &b] {
                assert_eq!(grads.get(var).unwrap().dtype(), var.dtype(), "{what}");
            }
        };
        let f32s = |shape: &[usize]| on.var::<f32>(shape, 1);
        let f64 = |shape: &[usize]| wide(&f32s(shape));
        let (f16, bf16) = (|shape: &[usize]| on.var::<f16>(shape, 2), |shape: &[usize]| on.var::<bf16>(shape, 3));
        // Half a unit in the last place of y, plus the f32 error before rounding.
        let (of_f32, of_f16, of_bf16) = (2f64.powi(-20), 2f64.powi(-10), 2f64.powi(-7));
        check(f32s(&shape), f32s(&shape), f64(&[24]), f32s(&[24]), of_f32);
        check(f16(&shape), f16(&shape), bf16(&[24]), bf16(&[24]), of_f16);
        check(bf16(&shape), f16(&shape), bf16(&[24]), f32s(&[24]), of_bf16);
        check(f32s(&shape), bf16(&shape), bf16(&[24]), bf16(&[24]), of_f32);
        check(f64(&shape), f32s(&shape), f32s(&[24]), f16(&[24]), CLOSE);
    });
}
