//! Graphs: for every use of the results, gradients equal those of the same graph in f64, also if
//! only some results are used.

use crate::kit::{elements, f64s, loss, on_each_device};
use candle_core::{DType, Tensor, Var};
use rmsnorm_candle::{
    add_layer_norm, add_rms_norm, gemma_rms_norm, layer_norm, layer_norm_add, rms_norm, rms_norm_add,
    rms_norm_add_rms_norm, rms_norm_in_place,
};
use rmsnorm_core::bf16;

const EPS: f64 = 1e-5;

/// Both results are used, as in a transformer block: the gradients of the sum are added in its
/// dtype.
#[test]
fn gradients_of_both_results_add_up() {
    on_each_device(|on| {
        let (x, r, w) = (on.var::<f32>(&[6, 40], 1), on.var::<f32>(&[6, 40], 2), on.var::<f32>(&[40], 3));
        let (dy, dh) = (on.tensor::<f32>(&[6, 40], 4), on.tensor::<f32>(&[6, 40], 5));
        let (y, h) = add_rms_norm(&x, &r, &w, EPS).unwrap();
        let of_y = loss(&y, &dy).backward().unwrap();
        let of_h = loss(&h, &dh).backward().unwrap();
        assert!(of_h.get(&w).is_none(), "the sum does not depend on the weight");
        let of_both = (loss(&y, &dy) + loss(&h, &dh)).unwrap().backward().unwrap();
        let sum = (of_y.get(&x).unwrap() + of_h.get(&x).unwrap()).unwrap();
        for variable in [&x, &r] {
            assert_eq!(elements::<f32>(of_both.get(variable).unwrap()), elements::<f32>(&sum));
        }
        assert_eq!(elements::<f32>(of_both.get(&w).unwrap()), elements::<f32>(of_y.get(&w).unwrap()));
        assert_eq!(elements::<f32>(of_h.get(&x).unwrap()), elements::<f32>(&dh));
    });
}

/// The same for a norm that is added to a residual, and for the next norm.
#[test]
fn gradients_of_both_results_add_up_after_the_norm() {
    on_each_device(|on| {
        let (x, r, w) = (on.var::<f32>(&[6, 40], 1), on.var::<f32>(&[6, 40], 2), on.var::<f32>(&[40], 3));
        let next = on.var::<f32>(&[40], 6);
        let (dy, dh) = (on.tensor::<f32>(&[6, 40], 4), on.tensor::<f32>(&[6, 40], 5));
        let (y, h) = rms_norm_add_rms_norm(&x, &r, &w, &next, EPS).unwrap();
        let of_y = loss(&y, &dy).backward().unwrap();
        let of_h = loss(&h, &dh).backward().unwrap();
        assert!(of_h.get(&next).is_none(), "the sum does not depend on the next weight");
        let of_both = (loss(&y, &dy) + loss(&h, &dh)).unwrap().backward().unwrap();
        let sum = (of_y.get(&r).unwrap() + of_h.get(&r).unwrap()).unwrap();
        assert_eq!(elements::<f32>(of_both.get(&r).unwrap()), elements::<f32>(&sum));
        assert_eq!(elements::<f32>(of_h.get(&r).unwrap()), elements::<f32>(&dh));
        assert_eq!(elements::<f32>(of_both.get(&next).unwrap()), elements::<f32>(of_y.get(&next).unwrap()));
        // On a GPU each form of the call adds its rows in a different order.
        if on.device().is_cuda() {
            return;
        }
        // x and its weight have the gradients of norm(x), whose dy is the gradient of the sum.
        let alone = loss(&rms_norm(&x, &w, EPS).unwrap(), &sum).backward().unwrap();
        for variable in [&x, &w] {
            let got = elements::<f32>(of_both.get(variable).unwrap());
            assert_eq!(got, elements::<f32>(alone.get(variable).unwrap()));
        }
        // The sum and its norm from separate calls have the bits of the one call.
        let apart = rms_norm_add(&x, &r, &w, EPS).unwrap();
        assert_eq!(elements::<f32>(&apart), elements::<f32>(&h));
        assert_eq!(elements::<f32>(&rms_norm(&apart, &next, EPS).unwrap()), elements::<f32>(&y));
    });
}

/// A norm that is added to a residual: each gradient alone, and none for frozen tensors.
#[test]
fn norms_added_to_a_residual_with_frozen_tensors() {
    on_each_device(|on| {
        let (x, r) = (on.var::<f32>(&[4, 16], 1), on.var::<f32>(&[4, 16], 2));
        let (w, b) = (on.var::<f32>(&[16], 3), on.var::<f32>(&[16], 4));
        let summed = |y: Tensor| y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let (all, frozen) = ([&x, &r, &w, &b], [&x, &r, &w, &b].map(|var| var.detach()));
        let expected = summed(layer_norm_add(&x, &r, &w, Some(&b), EPS).unwrap());
        for (i, var) in all.into_iter().enumerate() {
            let at = |j: usize| if i == j { all[j].as_tensor() } else { &frozen[j] };
            let grads = summed(layer_norm_add(at(0), at(1), at(2), Some(at(3)), EPS).unwrap());
            assert_eq!(elements::<f32>(grads.get(var).unwrap()), elements::<f32>(expected.get(var).unwrap()));
            // If the bias has a gradient, so does the weight, which is in one tensor with it.
            let is_given = |j: usize| grads.get(&frozen[j]).is_some();
            assert!((0..4).all(|j| i == j || is_given(j) == (i == 3 && j == 2)));
            // The next norm's weight instead of the bias.
            let (y, sum) = rms_norm_add_rms_norm(at(0), at(1), at(2), at(3), EPS).unwrap();
            assert_eq!(sum.track_op(), i < 3);
            assert!(summed(y).get(var).is_some());
        }
        assert!(!layer_norm_add(&frozen[0], &frozen[1], &frozen[2], Some(&frozen[3]), EPS).unwrap().track_op());
        // One tensor as x and residual.
        let (twice, of_x) = (summed(rms_norm_add(&x, &x, &w, EPS).unwrap()), on.var::<f32>(&[4, 16], 1));
        let apart = summed(rms_norm_add(&x, &of_x, &w, EPS).unwrap());
        let sum = (apart.get(&x).unwrap() + apart.get(&of_x).unwrap()).unwrap();
        assert_eq!(elements::<f32>(twice.get(&x).unwrap()), elements::<f32>(&sum));
        // No rows.
        let none = x.narrow(0, 0, 0).unwrap();
        let (y, sum) = rms_norm_add_rms_norm(&none, &none, &w, &b, EPS).unwrap();
        assert_eq!((y.dims(), sum.dims()), (none.dims(), none.dims()));
    });
}

/// The gradient of an f32 stream is not rounded, and the gradient of 16-bit activations has their
/// dtype.
#[test]
fn gradients_have_the_dtypes_of_their_tensors() {
    on_each_device(|on| {
        let (x, r, w) = (on.var::<bf16>(&[6, 40], 1), on.var::<f32>(&[6, 40], 2), on.var::<f32>(&[40], 3));
        let (y, h) = add_rms_norm(&x, &r, &w, EPS).unwrap();
        let total = (y.to_dtype(DType::F32).unwrap() + h).unwrap().sqr().unwrap().sum_all().unwrap();
        let grads = total.backward().unwrap();
        let dtype = |variable: &Var| grads.get(variable).unwrap().dtype();
        assert_eq!((dtype(&x), dtype(&r), dtype(&w)), (DType::BF16, DType::F32, DType::F32));
        let rounded = grads.get(&r).unwrap().to_dtype(DType::BF16).unwrap();
        assert_eq!(elements::<bf16>(grads.get(&x).unwrap()), elements::<bf16>(&rounded));
        assert_ne!(f64s(grads.get(&r).unwrap()), f64s(&rounded));
    });
}

#[test]
fn unused_results_shared_inputs_and_frozen_tensors() {
    on_each_device(|on| {
        let (x, w) = (on.var::<f32>(&[4, 16], 1), on.var::<f32>(&[16], 3));
        let summed = |y: Tensor| y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        // The same tensor as x and residual has twice the gradient of either.
        let (y, _) = add_rms_norm(&x, &x, &w, EPS).unwrap();
        let twin = on.var::<f32>(&[4, 16], 1);
        let (apart, _) = add_rms_norm(&x, &twin, &w, EPS).unwrap();
        let (together, apart) = (summed(y), summed(apart));
        let twice = (apart.get(&x).unwrap() + apart.get(&twin).unwrap()).unwrap();
        assert_eq!(elements::<f32>(together.get(&x).unwrap()), elements::<f32>(&twice));
        // A computed weight, if only the sum is used: it gets no gradient, and nothing panics.
        let computed = (w.as_tensor() * 2.0).unwrap();
        let (_, h) = add_rms_norm(&x, &twin, &computed, EPS).unwrap();
        assert!(summed(h).get(&w).is_none());
        let (y, _) = add_rms_norm(&x, &twin, &computed, EPS).unwrap();
        assert!(summed(y).get(&w).is_some());
        // A frozen tensor has no gradient, and does not affect the others.
        let frozen = w.detach();
        let grads = summed(rms_norm(&x, &frozen, EPS).unwrap());
        assert!(grads.get(&x).is_some() && grads.get(&frozen).is_none());
        let grads = summed(layer_norm(&x.detach(), &w, Some(&frozen), EPS).unwrap());
        assert!(grads.get(&w).is_some() && grads.get(&frozen).is_none());
        // A sum and its layer norm: a gradient of only the bias; and if only the sum is used, none
        // of the parameters.
        let (x_frozen, twin_frozen) = (x.detach(), twin.detach());
        let (y, h) = add_layer_norm(&x_frozen, &twin_frozen, &frozen, Some(&w), EPS).unwrap();
        assert!(!h.track_op() && summed(y).get(&w).is_some());
        let (_, h) = add_layer_norm(&x, &twin, &computed, Some(&computed), EPS).unwrap();
        assert!(summed(h).get(&w).is_none());
        let (y, _) = add_layer_norm(&x, &twin, &computed, Some(&computed), EPS).unwrap();
        assert!(summed(y).get(&w).is_some());
        let (y, h) = add_rms_norm(&x.detach(), &twin.detach(), &w, EPS).unwrap();
        assert!(!h.track_op() && summed(y).get(&w).is_some());
        let (y, _) = add_rms_norm(&x.detach(), &twin, &frozen, EPS).unwrap();
        assert!(summed(y).get(&twin).is_some());
        let (y, _) = add_rms_norm(&x, &twin.detach(), &frozen, EPS).unwrap();
        assert!(summed(y).get(&x).is_some());
        // Without tracked tensors there is no graph.
        assert!(!rms_norm(&x.detach(), &frozen, EPS).unwrap().track_op());
        let (y, h) = add_rms_norm(&x.detach(), &x.detach(), &frozen, EPS).unwrap();
        assert!(!y.track_op() && !h.track_op());
    });
}

/// Parameters that are views, with an offset or a stride: values and gradients of their base
/// tensors.
#[test]
fn parameters_may_be_views() {
    on_each_device(|on| {
        let x = on.var::<f32>(&[4, 16], 1);
        let (flat, columns) = (on.var::<f32>(&[3 * 16], 2), on.var::<f32>(&[16, 3], 3));
        let w = flat.narrow(0, 16, 16).unwrap();
        let b = columns.narrow(1, 1, 1).unwrap().squeeze(1).unwrap();
        let dense = [&w, &b].map(|view| Var::from_tensor(&view.contiguous().unwrap()).unwrap());
        let dy = on.tensor::<f32>(&[4, 16], 4);
        let y = layer_norm(&x, &w, Some(&b), EPS).unwrap();
        let expected = layer_norm(&x, &dense[0], Some(&dense[1]), EPS).unwrap();
        assert_eq!(elements::<f32>(&y), elements::<f32>(&expected));
        let (grads, expected) = (loss(&y, &dy).backward().unwrap(), loss(&expected, &dy).backward().unwrap());
        let of_flat = grads.get(&flat).unwrap().narrow(0, 16, 16).unwrap();
        let of_columns = grads.get(&columns).unwrap().narrow(1, 1, 1).unwrap();
        assert_eq!(elements::<f32>(&of_flat), elements::<f32>(expected.get(&dense[0]).unwrap()));
        assert_eq!(elements::<f32>(&of_columns), elements::<f32>(expected.get(&dense[1]).unwrap()));
        // In place, too, with one tensor as both parameters.
        let (over, b) = (x.copy().unwrap().detach(), b.detach());
        let expected = layer_norm(&over, &b, Some(&b), EPS).unwrap();
        rmsnorm_candle::layer_norm_in_place(&over, &b, Some(&b), EPS).unwrap();
        assert_eq!(elements::<f32>(&over), elements::<f32>(&expected));
    });
}

#[test]
fn graph_is_walked_twice_with_the_same_result() {
    on_each_device(|on| {
        let (x, r, w) = (on.var::<f32>(&[4, 16], 1), on.var::<f32>(&[4, 16], 2), on.var::<f32>(&[16], 3));
        let (y, h) = add_rms_norm(&x, &r, &w, EPS).unwrap();
        let y = layer_norm(&(y + h).unwrap(), &w, Some(&w), EPS).unwrap().sqr().unwrap().sum_all().unwrap();
        let [first, second] = [y.backward().unwrap(), y.backward().unwrap()];
        for variable in [&x, &r, &w] {
            assert_eq!(f64s(first.get(variable).unwrap()), f64s(second.get(variable).unwrap()));
        }
    });
}

/// No rows: empty results, and gradients of zeros for the parameters. candle's CUDA has no tensors
/// without elements, only views.
#[test]
fn no_rows_have_no_results_and_zero_gradients() {
    on_each_device(|on| {
        let (base, w) = (on.var::<f32>(&[1, 16], 1), on.var::<f32>(&[16], 3));
        let none = base.narrow(0, 0, 0).unwrap();
        let (y, h) = add_rms_norm(&none, &none, &w, EPS).unwrap();
        assert_eq!((y.dims(), h.dims()), (none.dims(), none.dims()));
        assert_eq!(elements::<f32>(&layer_norm(&none, &w, Some(&w), EPS).unwrap()), [0.0; 0]);
        rms_norm_in_place(&none.detach(), &w.detach(), EPS).unwrap();
        if on.device().is_cuda() {
            return;
        }
        let (x, w) = (on.var::<f32>(&[2, 0, 16], 1), on.var::<f32>(&[16], 3));
        let y = layer_norm(&x, &w, Some(&w), EPS).unwrap();
        assert_eq!(y.dims(), [2, 0, 16]);
        let grads = y.sum_all().unwrap().backward().unwrap();
        assert_eq!(elements::<f32>(grads.get(&w).unwrap()), [0.0; 16]);
        let (y, h) = add_rms_norm(&x, &x, &w, EPS).unwrap();
        assert_eq!((y.dims(), h.dims()), (x.dims(), x.dims()));
    });
}

/// Many threads, each with its graphs over the same variables.
#[test]
fn threads_share_variables() {
    on_each_device(|on| {
        let (x, r, w) = (on.var::<bf16>(&[300, 256], 1), on.var::<f32>(&[300, 256], 2), on.var::<f32>(&[256], 3));
        let step = || {
            let (y, h) = add_rms_norm(&x, &r, &w, EPS).unwrap();
            let y = gemma_rms_norm(&(y.to_dtype(DType::F32).unwrap() + h).unwrap(), &w, EPS).unwrap();
            let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            [&x, &r, &w].map(|variable| f64s(grads.get(variable).unwrap()))
        };
        let expected = step();
        on.settle();
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(|| (0..4).map(|_| step()).collect::<Vec<_>>())).collect();
            for thread in all {
                assert!(thread.join().unwrap().iter().all(|got| *got == expected));
            }
        });
    });
}

/// The reason for this crate: candle's own fused forms have no gradient, and return no error.
#[test]
fn candles_fused_norms_still_lose_their_gradients() {
    on_each_device(|on| {
        let (x, w) = (on.var::<f32>(&[4, 16], 1), on.var::<f32>(&[16], 3));
        for y in [
            candle_nn::ops::rms_norm(&x, &w, EPS as f32).unwrap(),
            candle_nn::ops::layer_norm(&x, &w, &w, EPS as f32).unwrap(),
            candle_nn::Module::forward(&candle_nn::RmsNorm::new(w.as_tensor().clone(), EPS), &x).unwrap(),
        ] {
            assert!(!y.track_op());
        }
        let far = Tensor::new(&[[1e4f32, 1e4 + 1.0, 1e4 + 2.0, 1e4 - 3.0]], on.device()).unwrap();
        let (one, zero) = (far.ones_like().unwrap().get(0).unwrap(), far.zeros_like().unwrap().get(0).unwrap());
        let y = layer_norm(&far, &one, Some(&zero), 0.0).unwrap();
        let root = 3.5f64.sqrt();
        let expected = [0.0, 1.0, 2.0, -3.0].map(|deviation| deviation / root);
        // Deviations from the mean are integers here; a few f32 roundings remain.
        assert!(f64s(&y).iter().zip(expected).all(|(y, expected)| (y - expected).abs() <= 1e-6), "{y}");
    });
}
