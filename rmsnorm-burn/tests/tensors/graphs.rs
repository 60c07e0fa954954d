//! Graphs: for every use of the results, gradients are the sum of those of each use alone.

use burn::tensor::{DType, Device, Tensor};
use rmsnorm_burn::{Activation, Norm, add_rms_norm, gemma_rms_norm, layer_norm, rms_norm};

use crate::kit::{
    Native, assert_overwriting_keeps_gradients, assert_same, device, elements, f64s, frozen, in_each_half, in_each_mix,
    loss, on_each_device, plain, tensor, tensor_on, var,
};

const EPS: f64 = 1e-5;

/// Both results are used, as in a transformer block: the gradients of the sum are added in its
/// dtype.
#[test]
fn gradients_of_both_results_add_up() {
    on_each_device(|| {
        let (x, r, w) = (var::<f32, 2>([6, 40], 1), var::<f32, 2>([6, 40], 2), var::<f32, 1>([40], 3));
        let (dy, dh) = (tensor::<f32, 2>([6, 40], 4), tensor::<f32, 2>([6, 40], 5));
        let results = || add_rms_norm(x.clone(), r.clone(), w.clone(), EPS);
        let of_y = loss(results().0, &dy).backward();
        let of_h = loss(results().1, &dh).backward();
        assert!(w.grad(&of_h).is_none(), "the sum does not depend on the weight");
        let (y, h) = results();
        let of_both = (loss(y, &dy) + loss(h, &dh)).backward();
        let sum = x.grad(&of_y).unwrap() + x.grad(&of_h).unwrap();
        for variable in [&x, &r] {
            assert_eq!(f64s(&variable.grad(&of_both).unwrap()), f64s(&sum));
        }
        assert_eq!(f64s(&w.grad(&of_both).unwrap()), f64s(&w.grad(&of_y).unwrap()));
        assert_eq!(f64s(&x.grad(&of_h).unwrap()), f64s(&dh));
    });
}

/// The gradient of an f32 stream is not rounded, and the gradient of 16-bit activations has their
/// dtype.
#[test]
fn gradients_have_the_dtypes_of_their_tensors() {
    fn of<T: Native>() {
        let (x, r, w) = (var::<T, 2>([6, 40], 1), var::<f32, 2>([6, 40], 2), var::<f32, 1>([40], 3));
        let (y, h) = add_rms_norm(x.clone(), r.clone(), w.clone(), EPS);
        let grads = (y.cast(DType::F32) + h).square().sum().backward();
        let (dx, dr, dw) = (x.grad(&grads).unwrap(), r.grad(&grads).unwrap(), w.grad(&grads).unwrap());
        assert_eq!((dx.dtype(), dr.dtype(), dw.dtype()), (T::dtype(), DType::F32, DType::F32));
        let rounded = dr.clone().cast(T::dtype());
        assert_eq!(elements::<T, 2>(&dx), elements::<T, 2>(&rounded));
        assert_ne!(f64s(&dr), f64s(&rounded));
    }
    on_each_device(|| in_each_half!(of));
}

#[test]
fn unused_results_shared_inputs_and_frozen_tensors() {
    on_each_device(|| {
        let (x, w) = (var::<f32, 2>([4, 16], 1), var::<f32, 1>([16], 3));
        let summed = |y: Tensor<2>| y.square().sum().backward();
        // The same tensor as x and residual has twice the gradient of either.
        let together = summed(add_rms_norm(x.clone(), x.clone(), w.clone(), EPS).0);
        let twin = var::<f32, 2>([4, 16], 1);
        let apart = summed(add_rms_norm(x.clone(), twin.clone(), w.clone(), EPS).0);
        let twice = x.grad(&apart).unwrap() + twin.grad(&apart).unwrap();
        assert_eq!(f64s(&x.grad(&together).unwrap()), f64s(&twice));
        // The same tensor as both parameters.
        let grads = summed(layer_norm(x.clone(), w.clone(), Some(w.clone()), EPS));
        let (weight, bias) = (var::<f32, 1>([16], 3), var::<f32, 1>([16], 3));
        let apart = summed(layer_norm(x.clone(), weight.clone(), Some(bias.clone()), EPS));
        let both = weight.grad(&apart).unwrap() + bias.grad(&apart).unwrap();
        assert_eq!(f64s(&w.grad(&grads).unwrap()), f64s(&both));
        // A computed weight, if only one result is used.
        let computed = w.clone() * 2.0;
        let h = add_rms_norm(x.clone(), twin.clone(), computed.clone(), EPS).1;
        assert!(w.grad(&summed(h)).is_none());
        let y = add_rms_norm(x.clone(), twin.clone(), computed, EPS).0;
        assert!(w.grad(&summed(y)).is_some());
        // An untracked tensor has no gradient, and does not affect the others.
        let (still_w, still) = (frozen(&w), frozen(&x));
        let grads = summed(rms_norm(x.clone(), still_w.clone(), EPS));
        assert!(x.grad(&grads).is_some() && still_w.grad(&grads).is_none());
        let grads = summed(layer_norm(still.clone(), w.clone(), Some(still_w.clone()), EPS));
        assert!(w.grad(&grads).is_some() && still_w.grad(&grads).is_none());
        let grads = summed(layer_norm(still.clone(), still_w.clone(), Some(w.clone()), EPS));
        assert!(w.grad(&grads).is_some());
        let (y, h) = add_rms_norm(still.clone(), frozen(&twin), w.clone(), EPS);
        assert!(!h.is_tracked() && w.grad(&summed(y)).is_some());
        let y = add_rms_norm(still.clone(), twin.clone(), still_w.clone(), EPS).0;
        assert!(twin.grad(&summed(y)).is_some());
        let y = add_rms_norm(x.clone(), frozen(&twin), still_w.clone(), EPS).0;
        assert!(x.grad(&summed(y)).is_some());
        // Each of x, gate, weight and bias alone.
        let gated = |x: &Tensor<2>, z: &Tensor<2>, w: &Tensor<1>, b: &Tensor<1>| {
            let norm = Norm::rms(EPS).bias(b.clone());
            let y = norm.clone().gate_after(z.clone(), Activation::Silu).apply(x.clone(), w.clone());
            summed(y + norm.gate_before(z.clone(), Activation::Silu).apply(x.clone(), w.clone()))
        };
        assert!(x.grad(&gated(&x, &still, &still_w, &still_w)).is_some());
        assert!(twin.grad(&gated(&still, &twin, &still_w, &still_w)).is_some());
        assert!(w.grad(&gated(&still, &still, &w, &still_w)).is_some());
        assert!(w.grad(&gated(&still, &still, &still_w, &w)).is_some());
        // The same tensor as x and gate has the sum of both gradients.
        let gated = |z: &Tensor<2>| Norm::rms(EPS).gate_after(z.clone(), Activation::Silu).apply(x.clone(), w.clone());
        let (together, apart) = (summed(gated(&x)), summed(gated(&twin)));
        let sum = x.grad(&apart).unwrap() + twin.grad(&apart).unwrap();
        assert_eq!(f64s(&x.grad(&together).unwrap()), f64s(&sum));
        let y = Norm::rms(EPS).residual(still.clone()).gate_after(twin.clone(), Activation::Silu);
        let (y, h) = y.apply(still.clone(), still_w.clone());
        assert!(!h.is_tracked() && twin.grad(&summed(y)).is_some());
        // Without tracked tensors there is no graph.
        assert!(!rms_norm(still.clone(), still_w.clone(), EPS).is_tracked());
        let (y, h) = add_rms_norm(still.clone(), still, still_w, EPS);
        assert!(!y.is_tracked() && !h.is_tracked());
    });
}

/// Results are equal without autodiff; constants without it can be mixed with tracked tensors.
#[test]
fn devices_without_autodiff_give_the_same() {
    on_each_device(|| {
        let plain = plain();
        let (x, w) = (tensor_on::<f32, 2>(&plain, [4, 16], 1), tensor_on::<f32, 1>(&plain, [16], 3));
        let (vx, vw) = (var::<f32, 2>([4, 16], 1), var::<f32, 1>([16], 3));
        let y = layer_norm(x.clone(), w.clone(), Some(w.clone()), EPS);
        assert!(!y.is_tracked());
        let tracked = layer_norm(vx.clone(), vw.clone(), Some(vw.clone()), EPS);
        assert_same(&[f64s(&y)], &[f64s(&tracked)], "layer_norm");
        let (y, h) = add_rms_norm(x.clone(), x.clone(), w.clone(), EPS);
        let (tracked, sum) = add_rms_norm(vx.clone(), vx.clone(), vw.clone(), EPS);
        assert_same(&[f64s(&y), f64s(&h)], &[f64s(&tracked), f64s(&sum)], "add_rms_norm");
        let grads = add_rms_norm(vx.clone(), x.clone(), w.clone(), EPS).0.square().sum().backward();
        assert!(vx.grad(&grads).is_some());
        // A bias without autodiff with tracked tensors, and the reverse.
        let grads = layer_norm(vx.clone(), vw.clone(), Some(w.clone()), EPS).square().sum().backward();
        assert!(vx.grad(&grads).is_some() && vw.grad(&grads).is_some());
        let grads = layer_norm(x, w, Some(vw.clone()), EPS).square().sum().backward();
        assert!(vw.grad(&grads).is_some());
    });
}

/// A tensor without another owner is overwritten, with the same bits; one with another owner is
/// unchanged.
#[test]
fn what_nobody_else_has_is_overwritten() {
    on_each_device(|| {
        fn of_mix<T: Native, R: Native>() {
            let plain = plain();
            let (x, r) = (|| tensor_on::<T, 3>(&plain, [2, 3, 40], 1), || tensor_on::<R, 3>(&plain, [2, 3, 40], 2));
            let (w, b) = (tensor_on::<f32, 1>(&plain, [40], 3), tensor_on::<f32, 1>(&plain, [40], 4));
            let (kept_x, kept_r) = (x(), r());
            let same = |over: Tensor<3>, beside: Tensor<3>| assert_eq!(f64s(&over), f64s(&beside));
            same(rms_norm(x(), w.clone(), EPS), rms_norm(kept_x.clone(), w.clone(), EPS));
            let layer = |x| layer_norm(x, w.clone(), Some(b.clone()), EPS);
            same(layer(x()), layer(kept_x.clone()));
            let add = |x, r| add_rms_norm(x, r, w.clone(), EPS);
            let (y, h) = add(kept_x.clone(), kept_r.clone());
            for (y_over, h_over) in [add(x(), r()), add(x(), kept_r.clone()), add(kept_x.clone(), r())] {
                same(y_over, y.clone());
                same(h_over, h.clone());
            }
            let gate = || tensor_on::<T, 3>(&plain, [2, 3, 40], 5);
            let gated = |x| Norm::rms(EPS).groups(2).gate_after(gate(), Activation::Silu).apply(x, w.clone());
            same(gated(x()), gated(kept_x.clone()));
            let gated = |x| Norm::layer(EPS).gate_before(gate(), Activation::Silu).apply(x, w.clone());
            same(gated(x()), gated(kept_x.clone()));
            // Also views of tensors with another owner.
            let half = rms_norm(kept_x.clone().narrow(1, 0, 1), w.clone(), EPS);
            same(half, rms_norm(x().narrow(1, 0, 1), w.clone(), EPS));
            same(kept_x, x());
            same(kept_r, r());
        }
        in_each_mix!(of_mix);
        // The same in a graph, which does not need the addends.
        assert_overwriting_keeps_gradients(|x, r, w| {
            let (y, h) = add_rms_norm(x, r, w.clone(), EPS);
            (rms_norm(y, w, EPS) * h).sum()
        });
    });
}

/// Parameters that are views, with an offset or a stride: values and gradients of their base
/// tensors.
#[test]
fn parameters_may_be_views() {
    on_each_device(|| {
        let x = var::<f32, 2>([4, 16], 1);
        let (flat, columns) = (var::<f32, 1>([3 * 16], 2), var::<f32, 2>([16, 3], 3));
        let w = flat.clone().narrow(0, 16, 16);
        let b = columns.clone().narrow(1, 1, 1).squeeze_dim::<1>(1);
        let dense = |view: &Tensor<1>| Tensor::<1>::from_data(view.to_data(), &view.device()).require_grad();
        let (dense_w, dense_b) = (dense(&w), dense(&b));
        let dy = tensor::<f32, 2>([4, 16], 4);
        let y = layer_norm(x.clone(), w, Some(b), EPS);
        let expected = layer_norm(x, dense_w.clone(), Some(dense_b.clone()), EPS);
        assert_eq!(f64s(&y), f64s(&expected));
        let (grads, expected) = (loss(y, &dy).backward(), loss(expected, &dy).backward());
        let of_flat = flat.grad(&grads).unwrap().narrow(0, 16, 16);
        let of_columns = columns.grad(&grads).unwrap().narrow(1, 1, 1);
        assert_eq!(f64s(&of_flat), f64s(&dense_w.grad(&expected).unwrap()));
        assert_eq!(f64s(&of_columns), f64s(&dense_b.grad(&expected).unwrap()));
    });
}

/// Arguments from every kind of operation, with and without gradient checkpointing, which
/// recomputes cheap ones.
#[test]
fn checkpointing_gives_the_same() {
    on_each_device(|| {
        let run = |device: &Device| {
            let leaf = |dims, seed| tensor_on::<f32, 2>(device, dims, seed).require_grad();
            let (x, r, m) = (leaf([6, 40], 1), leaf([6, 40], 2), leaf([40, 40], 5));
            let w = tensor_on::<f32, 1>(device, [40], 3).require_grad();
            let b = tensor_on::<f32, 1>(device, [40], 4).require_grad();
            // The normalized tensor is recomputed, and so are the norms, which other operations
            // need.
            let y = layer_norm((x.clone() * 0.5).exp(), w.clone(), Some(b.clone()), EPS).square();
            let (y, h) = add_rms_norm(y, r.clone(), w.clone() * 2.0, EPS);
            let y = rms_norm((y * h.clone()).matmul(m.clone()), w.clone(), EPS);
            // One parameter is not a leaf, and one is not tracked.
            let y = gemma_rms_norm(y.clone() * y, frozen(&w), EPS) * h.clone();
            // A gate is recomputed, and so are the gated norms.
            let gated = Norm::layer(EPS).bias(b.clone()).gate_after((x.clone() * 0.5).exp(), Activation::Silu);
            let y = gated.groups(2).apply(y, w.clone()).square();
            let (y, h) =
                Norm::rms(EPS).residual(h).gate_after(y.clone() * 0.5, Activation::Sigmoid).apply(y, w.clone());
            let y = Norm::rms(EPS).gate_before(h, Activation::Silu).apply(y.clone() * y, frozen(&w)).square();
            let grads = y.sum().backward();
            let all = [&x, &r, &m].map(|leaf| f64s(&leaf.grad(&grads).unwrap()));
            let vectors = [&w, &b].map(|leaf| f64s(&leaf.grad(&grads).unwrap()));
            [Vec::from(all), vectors.into()].concat()
        };
        let (kept, recomputed) = (device(), device().gradient_checkpointing());
        assert_same(&run(&recomputed), &run(&kept), "recomputed");
    });
}

/// The same for a wider stream, whose norm has another dtype and is kept.
#[test]
fn checkpointing_takes_mixed_dtypes() {
    fn of<T: Native>() {
        let run = |device: &Device| {
            let x = tensor_on::<T, 2>(device, [6, 40], 1).require_grad();
            let r = tensor_on::<f32, 2>(device, [6, 40], 2).require_grad();
            let w = tensor_on::<f32, 1>(device, [40], 3).require_grad();
            let (y, h) = add_rms_norm(x.clone() * 2.0, r.clone() * 2.0, w.clone(), EPS);
            let y = rms_norm(y.clone() * y, w.clone(), EPS);
            // Recomputed in its own dtype.
            let y = Norm::rms(EPS).out_dtype(DType::F32).apply(y, w.clone());
            let grads = (y.square() * h).sum().backward();
            let [dx, dr] = [&x, &r].map(|leaf| f64s(&leaf.grad(&grads).unwrap()));
            [dx, dr, f64s(&w.grad(&grads).unwrap())]
        };
        let (kept, recomputed) = (device(), device().gradient_checkpointing());
        assert_same(&run(&recomputed), &run(&kept), "recomputed");
    }
    on_each_device(|| in_each_half!(of));
}

/// No rows: empty results, and gradients of zeros for the parameters.
#[test]
fn no_rows_have_no_results_and_zero_gradients() {
    on_each_device(|| {
        let (x, w) = (var::<f32, 3>([2, 0, 16], 1), var::<f32, 1>([16], 3));
        let y = layer_norm(x.clone(), w.clone(), Some(w.clone()), EPS);
        assert_eq!(y.dims(), [2, 0, 16]);
        let grads = y.sum().backward();
        assert_eq!(f64s(&w.grad(&grads).unwrap()), [0.0; 16]);
        let (y, h) = add_rms_norm(x.clone(), x.clone(), w, EPS);
        assert_eq!((y.dims(), h.dims()), (x.dims(), x.dims()));
    });
}

/// Many threads, each with its graphs over the same variables.
#[test]
fn threads_share_variables() {
    fn of<T: Native>() {
        let (x, r, w) = (var::<T, 2>([300, 256], 1), var::<f32, 2>([300, 256], 2), var::<f32, 1>([256], 3));
        let step = || {
            let (y, h) = add_rms_norm(x.clone(), r.clone(), w.clone(), EPS);
            let y = gemma_rms_norm(y.cast(DType::F32) + h, w.clone(), EPS);
            let grads = y.square().sum().backward();
            let [dx, dr] = [&x, &r].map(|leaf| f64s(&leaf.grad(&grads).unwrap()));
            [dx, dr, f64s(&w.grad(&grads).unwrap())]
        };
        let expected = step();
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(|| (0..4).map(|_| step()).collect::<Vec<_>>())).collect();
            for thread in all {
                thread.join().unwrap().iter().for_each(|got| assert_same(got, &expected, "in a thread"));
            }
        });
    }
    on_each_device(|| in_each_half!(of));
}
