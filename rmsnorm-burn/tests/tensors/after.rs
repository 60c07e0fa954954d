//! Sums of a residual and a norm in graphs: used results, tracked tensors, kept tensors and
//! overwritten ones.

use burn::tensor::{DType, Device, Tensor};
use rmsnorm_burn::{
    add_layer_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm, layer_norm_add, rms_norm, rms_norm_add,
    rms_norm_add_rms_norm,
};

use crate::kit::{
    Native, assert_overwriting_keeps_gradients, assert_same, device, f64s, frozen, in_each_half, in_each_mix, loss,
    on_each_device, plain, tensor, tensor_on, var,
};

const EPS: f64 = 1e-5;

/// The gradient of an f32 residual equals the sum's; x has a gradient in its dtype.
#[test]
fn gradients_have_the_dtypes_of_their_tensors() {
    fn of<T: Native>() {
        let (x, r, w) = (var::<T, 2>([6, 40], 1), var::<f32, 2>([6, 40], 2), var::<f32, 1>([40], 3));
        let dsum = tensor::<f32, 2>([6, 40], 4);
        let grads = loss(rms_norm_add(x.clone(), r.clone(), w.clone(), EPS), &dsum).backward();
        let (dx, dr, dw) = (x.grad(&grads).unwrap(), r.grad(&grads).unwrap(), w.grad(&grads).unwrap());
        assert_eq!((dx.dtype(), dr.dtype(), dw.dtype()), (T::dtype(), DType::F32, DType::F32));
        assert_eq!(f64s(&dr), f64s(&dsum));
        // Equal to the gradients of the norm alone, whose result has the dtype of x.
        let grads = loss(rms_norm(x.clone(), w.clone(), EPS), &dsum.cast(T::dtype())).backward();
        let expected = (f64s(&x.grad(&grads).unwrap()), f64s(&w.grad(&grads).unwrap()));
        // On other devices the two forward kernels may differ in rstd's last bit; bounds.rs checks
        // both.
        if plain() == Device::flex() {
            assert_eq!((f64s(&dx), f64s(&dw)), expected);
        }
    }
    on_each_device(|| in_each_half!(of));
}

/// One kernel for both equals two calls, forward and backward.
#[test]
fn both_norms_are_those_of_two_calls() {
    on_each_device(|| {
        fn of_dtype<T: Native>() {
            let (x, r) = (var::<T, 3>([2, 3, 40], 1), var::<T, 3>([2, 3, 40], 2));
            let (w, next) = (var::<f32, 1>([40], 3), var::<f32, 1>([40], 4));
            let (dy, dsum) = (tensor::<T, 3>([2, 3, 40], 5), tensor::<T, 3>([2, 3, 40], 6));
            let run = |(y, sum): (Tensor<3>, Tensor<3>)| {
                let grads = (loss(y.clone(), &dy) + loss(sum.clone(), &dsum)).backward();
                let matrices = [&x, &r].map(|leaf| f64s(&leaf.grad(&grads).unwrap()));
                let vectors = [&w, &next].map(|leaf| f64s(&leaf.grad(&grads).unwrap()));
                [vec![f64s(&y), f64s(&sum)], matrices.into(), vectors.into()].concat()
            };
            let one = run(rms_norm_add_rms_norm(x.clone(), r.clone(), w.clone(), next.clone(), EPS));
            let sum = rms_norm_add(x.clone(), r.clone(), w.clone(), EPS);
            assert_same(&one, &run((rms_norm(sum.clone(), next.clone(), EPS), sum)), "one call and two");
        }
        of_dtype::<f32>();
        in_each_half!(of_dtype);
    });
}

/// The results that a loss uses.
const USES: [(bool, bool); 3] = [(true, false), (false, true), (true, true)];

/// A call with its four leaves, tracked by the bits of a set, and the used results; returns the
/// loss.
type Call = fn([Tensor<2>; 2], [Tensor<1>; 2], (bool, bool)) -> Tensor<1>;

fn used((y, sum): (Tensor<2>, Tensor<2>), (is_y, is_sum): (bool, bool)) -> Tensor<1> {
    let (dy, dsum) = (tensor::<f32, 2>([6, 40], 5), tensor::<f32, 2>([6, 40], 6));
    match (is_y, is_sum) {
        (true, true) => loss(y, &dy) + loss(sum, &dsum),
        (true, false) => loss(y, &dy),
        (false, _) => loss(sum, &dsum),
    }
}

/// For every set of tracked tensors and used results, a tracked tensor has the gradient that it has
/// if all four are tracked, and an untracked one has none.
#[test]
fn gradients_do_not_depend_on_what_else_is_tracked() {
    on_each_device(|| {
        let calls: [(&str, Call); 3] = [
            ("gemma_rms_norm_add_rms_norm", |[x, r], [w, next], uses| {
                used(gemma_rms_norm_add_rms_norm(x, r, w, next, EPS), uses)
            }),
            ("layer_norm_add", |[x, r], [w, b], uses| {
                let sum = layer_norm_add(x, r, w, Some(b), EPS);
                used((sum.clone(), sum), uses)
            }),
            ("add_layer_norm", |[x, r], [w, b], uses| used(add_layer_norm(x, r, w, Some(b), EPS), uses)),
        ];
        for (name, call) in calls {
            for uses in USES {
                let gradients = |tracked: usize| {
                    let is = |bit: usize| tracked & 1 << bit != 0;
                    let matrix = |bit: usize| var::<f32, 2>([6, 40], bit as u64).set_require_grad(is(bit));
                    let vector = |bit: usize| var::<f32, 1>([40], bit as u64).set_require_grad(is(bit));
                    let (matrices, vectors) = ([matrix(0), matrix(1)], [vector(2), vector(3)]);
                    let loss = call(matrices.clone(), vectors.clone(), uses);
                    if !loss.is_tracked() {
                        return None;
                    }
                    let grads = loss.backward();
                    let matrices = matrices.iter().map(|leaf| leaf.grad(&grads).map(|grad| f64s(&grad)));
                    let vectors = vectors.iter().map(|leaf| leaf.grad(&grads).map(|grad| f64s(&grad)));
                    Some(matrices.chain(vectors).collect::<Vec<_>>())
                };
                let all = gradients(15).unwrap();
                assert!(all[0].is_some() && all[1].is_some(), "{name}, {uses:?}");
                for tracked in 0..15 {
                    let expected =
                        all.iter().enumerate().map(|(bit, all)| all.clone().filter(|_| tracked & 1 << bit != 0));
                    let expected: Vec<_> = expected.collect();
                    match gradients(tracked) {
                        Some(got) => {
                            // No gradient becomes an empty vector.
                            let [got, expected] = [got, expected]
                                .map(|all| all.into_iter().map(Option::unwrap_or_default).collect::<Vec<_>>());
                            assert_same(&got, &expected, &format!("{name}, {uses:?}, tracked {tracked:b}"));
                        }
                        None => assert!(expected.iter().all(Option::is_none), "{name}, {uses:?}, tracked {tracked:b}"),
                    }
                }
            }
        }
    });
}

#[test]
fn results_are_tracked_where_something_is() {
    on_each_device(|| {
        let (x, r, w) = (var::<f32, 2>([4, 16], 1), var::<f32, 2>([4, 16], 2), var::<f32, 1>([16], 3));
        let (still, still_w) = (frozen(&x), frozen(&w));
        let (y, sum) = rms_norm_add_rms_norm(still.clone(), still.clone(), still_w.clone(), w.clone(), EPS);
        assert!(y.is_tracked() && !sum.is_tracked());
        let (y, sum) = rms_norm_add_rms_norm(still.clone(), r.clone(), still_w.clone(), still_w.clone(), EPS);
        assert!(y.is_tracked() && sum.is_tracked());
        let (y, sum) = rms_norm_add_rms_norm(still.clone(), still.clone(), still_w.clone(), still_w.clone(), EPS);
        assert!(!y.is_tracked() && !sum.is_tracked());
        assert!(!layer_norm_add(still.clone(), still, still_w.clone(), Some(still_w), EPS).is_tracked());
        // The same tensor as x and residual has the sum of both gradients.
        let twin = var::<f32, 2>([4, 16], 1);
        let summed = |sum: Tensor<2>| sum.square().sum().backward();
        let together = summed(rms_norm_add(x.clone(), x.clone(), w.clone(), EPS));
        let apart = summed(rms_norm_add(x.clone(), twin.clone(), w, EPS));
        let both = x.grad(&apart).unwrap() + twin.grad(&apart).unwrap();
        assert_eq!(f64s(&x.grad(&together).unwrap()), f64s(&both));
    });
}

/// A residual without another owner is overwritten, with the same bits; one with another owner is
/// unchanged, and so is x.
#[test]
fn residual_that_nobody_else_has_is_overwritten() {
    on_each_device(|| {
        fn of_mix<T: Native, R: Native>() {
            let plain = plain();
            let (x, r) = (|| tensor_on::<T, 3>(&plain, [2, 3, 40], 1), || tensor_on::<R, 3>(&plain, [2, 3, 40], 2));
            let (w, b) = (tensor_on::<f32, 1>(&plain, [40], 3), tensor_on::<f32, 1>(&plain, [40], 4));
            let (kept_x, kept_r) = (x(), r());
            let same = |over: Tensor<3>, beside: Tensor<3>| assert_eq!(f64s(&over), f64s(&beside));
            let layer = |x, r| layer_norm_add(x, r, w.clone(), Some(b.clone()), EPS);
            let gemma = |x, r| gemma_rms_norm_add(x, r, w.clone(), EPS);
            let pair = |x, r| rms_norm_add_rms_norm(x, r, w.clone(), b.clone(), EPS);
            let beside = pair(kept_x.clone(), kept_r.clone());
            for (x, r) in [(x(), r()), (x(), kept_r.clone()), (kept_x.clone(), r())] {
                same(layer(x.clone(), r.clone()), layer(kept_x.clone(), kept_r.clone()));
                same(gemma(x.clone(), r.clone()), gemma(kept_x.clone(), kept_r.clone()));
                let (y, sum) = pair(x, r);
                same(y, beside.0.clone());
                same(sum, beside.1.clone());
            }
            same(layer(x(), r()), layer(kept_x.clone(), kept_r.clone()));
            same(gemma(kept_x.clone(), r()), gemma(kept_x.clone(), kept_r.clone()));
            // A view of a tensor with another owner.
            let half = |x: Tensor<3>, r: Tensor<3>| gemma(x.narrow(1, 0, 1), r.narrow(1, 0, 1));
            same(half(x(), kept_r.clone()), half(kept_x.clone(), r()));
            same(kept_x, x());
            same(kept_r, r());
            // The same tensor twice.
            let both = rms_norm_add(x(), x(), w.clone(), EPS);
            let one = x();
            same(rms_norm_add(one.clone(), one, w.clone(), EPS), both);
        }
        in_each_mix!(of_mix);
        // In a graph, which does not need the residual.
        assert_overwriting_keeps_gradients(|x, r, w| {
            let sum = layer_norm_add(x, r, w.clone(), Some(w.clone()), EPS);
            rms_norm(sum, w, EPS).square().sum()
        });
    });
}

/// With and without gradient checkpointing, which recomputes x, residual and y.
#[test]
fn checkpointing_gives_the_same() {
    on_each_device(|| {
        fn of_mix<T: Native, R: Native>() {
            let run = |device: &Device| {
                let x = tensor_on::<T, 2>(device, [6, 40], 1).require_grad();
                let r = tensor_on::<R, 2>(device, [6, 40], 2).require_grad();
                let w = tensor_on::<f32, 1>(device, [40], 3).require_grad();
                let b = tensor_on::<f32, 1>(device, [40], 4).require_grad();
                let (dtype, of_stream) = (x.dtype(), r.dtype());
                // The normalized tensor and the residual are recomputed, and so is y, which a
                // product needs.
                let sum = layer_norm_add((x.clone() * 0.5).exp(), r.clone() * 2.0, w.clone(), Some(b.clone()), EPS);
                let y = (sum.clone() * 0.25).cast(dtype).exp();
                let (y, sum) = rms_norm_add_rms_norm(y, sum, w.clone() * 2.0, b.clone(), EPS);
                let (y, sum) = add_layer_norm(y.clone() * y, sum, w.clone(), Some(b.clone()), EPS);
                // One parameter is not a leaf, and one is not tracked.
                let sum = gemma_rms_norm_add(y.clone() * y, sum, frozen(&w), EPS);
                let (y, sum) = gemma_rms_norm_add_rms_norm(x.clone(), sum, b.clone(), frozen(&w), EPS);
                let grads = (y.clone() * y).cast(of_stream).mul(sum).sum().backward();
                let matrices = [&x, &r].map(|leaf| f64s(&leaf.grad(&grads).unwrap()));
                let vectors = [&w, &b].map(|leaf| f64s(&leaf.grad(&grads).unwrap()));
                [Vec::from(matrices), vectors.into()].concat()
            };
            let (kept, recomputed) = (device(), device().gradient_checkpointing());
            assert_same(&run(&recomputed), &run(&kept), "recomputed");
        }
        in_each_mix!(of_mix);
    });
}

/// Results are equal without autodiff. Without rows, results are empty and gradients are zeros.
#[test]
fn devices_without_autodiff_and_no_rows() {
    on_each_device(|| {
        let plain = plain();
        let (x, w) = (tensor_on::<f32, 2>(&plain, [4, 16], 1), tensor_on::<f32, 1>(&plain, [16], 3));
        let (vx, vw) = (var::<f32, 2>([4, 16], 1), var::<f32, 1>([16], 3));
        let (y, sum) = rms_norm_add_rms_norm(x.clone(), x.clone(), w.clone(), w.clone(), EPS);
        let (tracked, tracked_sum) = rms_norm_add_rms_norm(vx.clone(), vx.clone(), vw.clone(), vw.clone(), EPS);
        assert_same(&[f64s(&y), f64s(&sum)], &[f64s(&tracked), f64s(&tracked_sum)], "both norms");
        let sum = layer_norm_add(x.clone(), x.clone(), w.clone(), Some(w.clone()), EPS);
        let tracked = layer_norm_add(vx.clone(), vx.clone(), vw.clone(), Some(vw.clone()), EPS);
        assert_same(&[f64s(&sum)], &[f64s(&tracked)], "layer_norm_add");
        let (y, sum) = add_layer_norm(x.clone(), x, w.clone(), Some(w), EPS);
        let (tracked, tracked_sum) = add_layer_norm(vx.clone(), vx, vw.clone(), Some(vw.clone()), EPS);
        assert_same(&[f64s(&y), f64s(&sum)], &[f64s(&tracked), f64s(&tracked_sum)], "add_layer_norm");

        let none = var::<f32, 3>([2, 0, 16], 1);
        let (y, sum) = rms_norm_add_rms_norm(none.clone(), none.clone(), vw.clone(), vw.clone(), EPS);
        assert_eq!((y.dims(), sum.dims()), ([2, 0, 16], [2, 0, 16]));
        let sum = layer_norm_add(none.clone(), sum, vw.clone(), Some(vw.clone()), EPS);
        let grads = (y + sum).sum().backward();
        assert_eq!(f64s(&vw.grad(&grads).unwrap()), [0.0; 16]);
    });
}
