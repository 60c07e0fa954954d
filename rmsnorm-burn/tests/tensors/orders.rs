//! Orders of roundings, and y of another dtype than x: results and gradients of the kernels and of
//! burn's own operations, against the bounds of [`bounds`](crate::bounds). A weight of f64 takes
//! burn's operations, in f64, whose errors are below those that the bounds admit.

use std::marker::PhantomData;

use burn::tensor::{DType, Device, Tensor};
use rmsnorm_burn::{Activation, CastOrder, Norm};
use rmsnorm_core::{DTypes, Norm as Kind, NormSpec, Tensor as Name, bf16, f16};

use crate::bounds::{Check, EPS, Judge, View, judge};
use crate::kit::{Native, elements, f64s, frozen, has, loss, on_each_device, plain, tensor, var, wide};

/// The tensor that stands beside x.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Beside {
    Nothing,
    Gate,
    Residual,
    ResidualAfter,
}

fn norm_of(spec: &NormSpec, bias: Option<Tensor<1>>) -> Norm {
    let norm = match (spec.norm, spec.weight_offset == 0.0) {
        (Kind::Rms, true) => Norm::rms(EPS),
        (Kind::Rms, false) => Norm::gemma(EPS),
        (Kind::Layer, _) => Norm::layer(EPS),
        (Kind::L2, _) => Norm::l2(EPS),
        (Kind::L2Clamped, _) => Norm::l2_clamped(EPS),
    };
    norm.cast_order(spec.cast_order).groups(spec.groups).bias(bias)
}

/// The parameters of a norm: those of kernels, or of f64.
fn parameter<E: Native>(cols: usize, seed: u64, is_slow: bool) -> Tensor<1> {
    let given = var::<E, 1>([cols], seed);
    if is_slow { wide(&given) } else { given }
}

/// A gradient in the dtype that judges it.
fn gradient<E: Native>(of: &Tensor<1>, grads: &burn::tensor::Gradients) -> Tensor<1> {
    of.grad(grads).unwrap().cast(E::dtype())
}

/// A few views, where each needs kernels that a software adapter compiles in seconds.
fn check(check: &impl Check) {
    if plain() == Device::flex() {
        return check.views();
    }
    check.view::<2>(([5, 3 * 32], |base| base.narrow(1, 32, 32)));
    check.view::<3>(([2, 6, 384], |base| base.narrow(1, 1, 4).narrow(2, 128, 128)));
}

/// Norms of activations `T`. `G` has the values of the parameters; they are judged as `W`.
struct Orders<T, G, W> {
    is_slow: bool,
    types: PhantomData<(T, G, W)>,
}

impl<T: Native, G: Native, W: Native> Check for Orders<T, G, W> {
    fn view<const D: usize>(&self, (dims, of): View<D>) {
        let (dtypes, is_slow) = (DTypes::of::<T, W, T>(), self.is_slow);
        let (base, stream, gates) = (var::<T, D>(dims, 1), var::<T, D>(dims, 5), var::<T, D>(dims, 6));
        let (x, r, z) = (of(base.clone()), of(stream.clone()), of(gates.clone()));
        let cols = x.dims()[D - 1];
        let [weight, bias] = [2, 3].map(|seed| parameter::<G>(cols, seed, is_slow));
        let dy = tensor::<T, D>(x.dims(), 4);
        let spec = |norm| NormSpec::new(norm, x.shape().num_elements() / cols, cols, EPS as f32);
        // An f64 sum of weight and offset is not rounded to f32, as the definition rounds it.
        let gemma = if is_slow { spec(Kind::Rms) } else { spec(Kind::Rms).weight_offset(1.0) };
        let l2 = spec(Kind::L2).groups([4, 3, 1].into_iter().find(|groups| cols.is_multiple_of(*groups)).unwrap());
        for (spec, order, beside) in [
            (gemma, CastOrder::BeforeWeight, Beside::Nothing),
            (spec(Kind::Layer), CastOrder::BeforeWeight, Beside::Gate),
            (spec(Kind::Rms), CastOrder::BeforeWeight, Beside::ResidualAfter),
            (gemma, CastOrder::RstdFirst, Beside::Nothing),
            (spec(Kind::Layer), CastOrder::RstdFirst, Beside::Residual),
            (l2, CastOrder::RstdFirst, Beside::Gate),
            (gemma, CastOrder::WeightFirst, Beside::Nothing),
            (spec(Kind::Layer), CastOrder::WeightFirst, Beside::Gate),
            (l2, CastOrder::WeightFirst, Beside::Nothing),
        ] {
            let spec = spec.cast_order(order);
            let case = format!("{order:?} of {} beside {beside:?}, {dtypes} {dims:?}", spec.norm.name());
            let bias = (spec.norm == Kind::Layer).then_some(&bias);
            let norm = norm_of(&spec, bias.cloned());
            // Separate views, because burn differentiates a graph once.
            let (x_in, w_in) = (of(base.clone()), weight.clone());
            let (result, spec) = match beside {
                Beside::Nothing => (norm.apply(x_in, w_in), spec),
                Beside::Gate => {
                    let gated = norm.gate_after(of(gates.clone()), Activation::Silu);
                    (gated.apply(x_in, w_in), spec.gate_after(Activation::Silu))
                }
                Beside::Residual => (norm.residual(of(stream.clone())).apply(x_in, w_in).0, spec),
                Beside::ResidualAfter => {
                    (norm.residual_after(of(stream.clone())).apply(x_in, w_in), spec.residual_after())
                }
            };
            assert_eq!((result.dims(), result.dtype()), (x.dims(), x.dtype()), "{case}");
            let grads = loss(result.clone(), &dy).backward();
            let dx = of(base.grad(&grads).unwrap());
            let has_residual = [Beside::Residual, Beside::ResidualAfter].contains(&beside);
            let (residual, gate) = (has_residual.then_some(&r), (beside == Beside::Gate).then_some(&z));
            let name = if beside == Beside::ResidualAfter { Name::ResidualOut } else { Name::Y };
            let judge = Judge { spec, dtypes, x: &x, residual, weight: &weight, bias, gate, dy: &dy };
            judge.run(|forward, backward| {
                judge!(forward, name, T, &result, case);
                judge!(backward, Name::Dx, T, &dx, case);
                judge!(backward, Name::Dweight, W, &gradient::<W>(&weight, &grads), case);
                if gate.is_some() {
                    judge!(backward, Name::Dgate, T, &of(gates.grad(&grads).unwrap()), case);
                }
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, &gradient::<W>(bias, &grads), case);
                }
            });
        }
    }
}

/// y of `T` from x of `R`.
struct Casts<T, G, W, R> {
    is_slow: bool,
    types: PhantomData<(T, G, W, R)>,
}

impl<T: Native, G: Native, W: Native, R: Native> Check for Casts<T, G, W, R> {
    fn view<const D: usize>(&self, (dims, of): View<D>) {
        let (dtypes, y_dtype) = (DTypes::of::<T, W, R>(), T::dtype());
        let (base, gates) = (var::<R, D>(dims, 1), var::<T, D>(dims, 6));
        let (x, z) = (of(base.clone()), of(gates.clone()));
        let cols = x.dims()[D - 1];
        let [weight, bias] = [2, 3].map(|seed| parameter::<G>(cols, seed, self.is_slow));
        let dy = tensor::<T, D>(x.dims(), 4);
        let spec = |norm| NormSpec::new(norm, x.shape().num_elements() / cols, cols, EPS as f32);
        let l2 = spec(Kind::L2).groups([4, 3, 1].into_iter().find(|groups| cols.is_multiple_of(*groups)).unwrap());
        for (spec, has_gate) in [
            (spec(Kind::Rms), false),
            (spec(Kind::Layer), true),
            (l2, false),
            (spec(Kind::Rms).cast_order(CastOrder::BeforeWeight), true),
            (spec(Kind::Rms).cast_order(CastOrder::RstdFirst), false),
        ] {
            let case = format!("a cast of {} {dtypes}, gate: {has_gate}, {dims:?}", spec.norm.name());
            let bias = (spec.norm == Kind::Layer).then_some(&bias);
            let norm = norm_of(&spec, bias.cloned()).out_dtype(y_dtype);
            let (x_in, w_in) = (of(base.clone()), weight.clone());
            let (y, spec) = match has_gate {
                true => {
                    let gated = norm.gate_after(of(gates.clone()), Activation::Sigmoid);
                    (gated.apply(x_in, w_in), spec.gate_after(Activation::Sigmoid))
                }
                false => (norm.apply(x_in, w_in), spec),
            };
            assert_eq!((y.dims(), y.dtype()), (x.dims(), y_dtype), "{case}");
            let grads = loss(y.clone(), &dy).backward();
            let dx = of(base.grad(&grads).unwrap());
            assert_eq!(dx.dtype(), x.dtype(), "{case}");
            let gate = has_gate.then_some(&z);
            let judge = Judge { spec, dtypes, x: &x, residual: None, weight: &weight, bias, gate, dy: &dy };
            judge.run(|forward, backward| {
                judge!(forward, Name::Y, T, &y, case);
                judge!(backward, Name::Dx, R, &dx, case);
                judge!(backward, Name::Dweight, W, &gradient::<W>(&weight, &grads), case);
                if gate.is_some() {
                    judge!(backward, Name::Dgate, T, &of(gates.grad(&grads).unwrap()), case);
                }
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, &gradient::<W>(bias, &grads), case);
                }
            });
        }
    }
}

fn orders<T: Native, G: Native, W: Native>(is_slow: bool) {
    if has::<T>() {
        check(&Orders::<T, G, W> { is_slow, types: PhantomData });
    }
}

fn casts<T: Native, G: Native, W: Native, R: Native>(is_slow: bool) {
    if has::<T>() && has::<R>() {
        check(&Casts::<T, G, W, R> { is_slow, types: PhantomData });
    }
}

#[test]
fn orders_of_roundings_are_within_their_bounds() {
    on_each_device(|| {
        orders::<f16, f32, f32>(false);
        orders::<bf16, bf16, bf16>(false);
        if plain() == Device::flex() {
            orders::<f32, f32, f32>(false);
        }
    });
}

#[test]
fn results_of_another_dtype_are_within_their_bounds() {
    on_each_device(|| {
        casts::<f32, f32, f32, bf16>(false);
        casts::<f32, f32, f32, f16>(false);
        casts::<bf16, bf16, bf16, f32>(false);
        casts::<f16, f32, f32, f32>(false);
    });
}

/// On burn's CPU backend, which computes in f64.
#[test]
fn orders_of_roundings_of_burns_operations_are_within_the_same_bounds() {
    orders::<f32, f32, f32>(true);
    orders::<f16, f16, f32>(true);
    orders::<bf16, bf16, f32>(true);
}

#[test]
fn results_of_another_dtype_by_burns_operations_are_within_the_same_bounds() {
    casts::<f32, f32, f32, bf16>(true);
    casts::<f16, f16, f32, f32>(true);
    // No kernel has two dtypes of 16 bits.
    casts::<f16, f16, f32, bf16>(true);
}

/// In 16 bits each order gives a few percent of other values.
#[test]
fn orders_of_roundings_differ() {
    let (x, w) = (frozen(&tensor::<bf16, 2>([64, 512], 1)), frozen(&tensor::<bf16, 1>([512], 2)));
    for weight in [w.clone(), w.cast(DType::F64)] {
        let of = |order| elements::<bf16, 2>(&Norm::rms(EPS).cast_order(order).apply(x.clone(), weight.clone()));
        let all = CastOrder::ALL.map(of);
        for (i, one) in all.iter().enumerate() {
            for (other, order) in all.iter().zip(CastOrder::ALL).skip(i + 1) {
                let count = one.iter().zip(other).filter(|(one, other)| one != other).count();
                assert!(count > one.len() / 50, "{:?} and {order:?}: {count} differ", CastOrder::ALL[i]);
            }
        }
    }
}

/// Pairs of dtypes, weights and orders without kernels, and what is no cast.
#[test]
fn every_pair_of_dtypes_has_a_path() {
    let (x, w) = (var::<bf16, 2>([3, 64], 1), var::<bf16, 1>([64], 2));
    let plain = Norm::rms(EPS).apply(x.clone(), w.clone());
    let same = Norm::rms(EPS).out_dtype(DType::BF16).apply(x.clone(), w.clone());
    assert_eq!(elements::<bf16, 2>(&same), elements::<bf16, 2>(&plain));
    for (dtype, order) in [
        (DType::F32, CastOrder::AtStore),
        (DType::F64, CastOrder::AtStore),
        (DType::F16, CastOrder::AtStore),
        (DType::F32, CastOrder::WeightFirst),
    ] {
        let y = Norm::rms(EPS).cast_order(order).out_dtype(dtype).apply(x.clone(), w.clone());
        let found = y.dtype();
        let grads = y.sum().backward();
        let found = (found, x.grad(&grads).unwrap().dtype(), w.grad(&grads).unwrap().dtype());
        assert_eq!(found, (dtype, DType::BF16, DType::BF16));
    }
    // A weight in the dtype of x is that weight in f32, except that y is made by burn's operations.
    let router = |weight| f64s(&Norm::rms(EPS).out_dtype(DType::F32).apply(x.clone(), weight));
    let (ours, theirs) = (router(w.clone().cast(DType::F32)), router(w.clone()));
    let largest = ours.iter().fold(0f64, |largest, value| largest.max(value.abs()));
    // Sums of 64 squares and five operations, in f32, on both sides.
    let bound = 128.0 * f64::from(f32::EPSILON) * largest;
    assert!(ours.iter().zip(&theirs).all(|(ours, theirs)| (ours - theirs).abs() <= bound));
}
