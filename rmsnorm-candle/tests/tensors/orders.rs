//! Orders of roundings, and y of another dtype than x: results and gradients of the kernels and of
//! candle's own operations, against the bounds of [`bounds`](crate::bounds). A weight of f64 takes
//! candle's operations, in f64, whose errors are below those that the bounds admit.

use candle_core::{DType, Tensor, Var, WithDType};
use rmsnorm_candle::{Activation, CastOrder, Norm};
use rmsnorm_core::{DTypes, Norm as Kind, NormSpec, Tensor as Name, bf16, f16};

use crate::bounds::{EPS, Judge, judge, views};
use crate::kit::{Native, On, elements, f64s, loss, on_each_device, wide};

/// The tensor that stands beside x.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Beside {
    Nothing,
    Gate,
    Residual,
    ResidualAfter,
}

fn norm_of<'a>(spec: &NormSpec, bias: Option<&'a Tensor>) -> Norm<'a> {
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
fn parameter<E: Native>(on: &On, cols: usize, seed: u64, is_slow: bool) -> Var {
    let given = on.var::<E>(&[cols], seed);
    if is_slow { wide(&given) } else { given }
}

/// A gradient in the dtype that judges it.
fn gradient<E: Native>(gradient: Option<&Tensor>) -> Tensor {
    gradient.unwrap().to_dtype(<E as WithDType>::DTYPE).unwrap()
}

/// Every third view only, as other rows make no difference. `G` has the values of the parameters;
/// they are judged as `W`.
fn orders<T: Native, G: Native, W: Native>(on: &On, is_slow: bool) {
    let dtypes = DTypes::of::<T, W, T>();
    for view in views::<T>(on).into_iter().step_by(3) {
        let x = view.tensor();
        let cols = *x.dims().last().unwrap();
        let [weight, bias] = [2, 3].map(|seed| parameter::<G>(on, cols, seed, is_slow));
        let (z, r, dy) = (on.var::<T>(x.dims(), 6), on.var::<T>(x.dims(), 5), on.tensor::<T>(x.dims(), 4));
        let spec = |norm| NormSpec::new(norm, x.elem_count() / cols, cols, EPS as f32);
        // An f64 sum of weight and offset is not rounded to f32, as the definition rounds it.
        let gemma = if is_slow { spec(Kind::Rms) } else { spec(Kind::Rms).weight_offset(1.0) };
        let l2 = spec(Kind::L2).groups(if cols.is_multiple_of(3) { 3 } else { 1 });
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
            let case = format!("{order:?} of {} beside {beside:?}, {dtypes} {:?}", spec.norm.name(), x.layout());
            let bias = (spec.norm == Kind::Layer).then_some(bias.as_tensor());
            let norm = norm_of(&spec, bias);
            let (result, spec) = match beside {
                Beside::Nothing => (norm.apply(&x, &weight), spec),
                Beside::Gate => {
                    let gated = norm.gate_after(&z, Activation::Silu);
                    (gated.apply(&x, &weight), spec.gate_after(Activation::Silu))
                }
                Beside::Residual => (norm.residual(&r).apply(&x, &weight).map(|(y, _)| y), spec),
                Beside::ResidualAfter => (norm.residual_after(&r).apply(&x, &weight), spec.residual_after()),
            };
            let result = result.unwrap();
            assert_eq!((result.dims(), result.dtype()), (x.dims(), x.dtype()), "{case}");
            let grads = loss(&result, &dy).backward().unwrap();
            let dx = (view.of)(grads.get(&view.base).unwrap());
            let has_residual = [Beside::Residual, Beside::ResidualAfter].contains(&beside);
            let residual = has_residual.then_some(r.as_tensor());
            let gate = (beside == Beside::Gate).then_some(z.as_tensor());
            let name = if beside == Beside::ResidualAfter { Name::ResidualOut } else { Name::Y };
            Judge { on, spec, dtypes, x: &x, residual, weight: &weight, bias, gate, dy: &dy }.run(
                |forward, backward| {
                    judge!(forward, name, T, &result, case);
                    judge!(backward, Name::Dx, T, &dx, case);
                    judge!(backward, Name::Dweight, W, &gradient::<W>(grads.get(&weight)), case);
                    if gate.is_some() {
                        judge!(backward, Name::Dgate, T, grads.get(&z).unwrap(), case);
                    }
                    if let Some(bias) = bias {
                        judge!(backward, Name::Dbias, W, &gradient::<W>(grads.get(bias)), case);
                    }
                },
            );
        }
    }
}

/// y of `T` from x of `R`.
fn casts<T: Native, G: Native, W: Native, R: Native>(on: &On, is_slow: bool) {
    let (dtypes, y_dtype) = (DTypes::of::<T, W, R>(), <T as WithDType>::DTYPE);
    for view in views::<R>(on).into_iter().step_by(3) {
        let x = view.tensor();
        let cols = *x.dims().last().unwrap();
        let [weight, bias] = [2, 3].map(|seed| parameter::<G>(on, cols, seed, is_slow));
        let (z, dy) = (on.var::<T>(x.dims(), 6), on.tensor::<T>(x.dims(), 4));
        let spec = |norm| NormSpec::new(norm, x.elem_count() / cols, cols, EPS as f32);
        let l2 = spec(Kind::L2).groups(if cols.is_multiple_of(3) { 3 } else { 1 });
        for (spec, has_gate) in [
            (spec(Kind::Rms), false),
            (spec(Kind::Layer), true),
            (l2, false),
            (spec(Kind::Rms).cast_order(CastOrder::BeforeWeight), true),
            (spec(Kind::Rms).cast_order(CastOrder::RstdFirst), false),
        ] {
            let case = format!("a cast of {} {dtypes}, gate: {has_gate}, {:?}", spec.norm.name(), x.layout());
            let bias = (spec.norm == Kind::Layer).then_some(bias.as_tensor());
            let norm = norm_of(&spec, bias).out_dtype(y_dtype);
            let gated = if has_gate { norm.gate_after(&z, Activation::Sigmoid) } else { norm };
            let y = gated.apply(&x, &weight).unwrap();
            assert_eq!((y.dims(), y.dtype()), (x.dims(), y_dtype), "{case}");
            let grads = loss(&y, &dy).backward().unwrap();
            let dx = (view.of)(grads.get(&view.base).unwrap());
            assert_eq!(dx.dtype(), x.dtype(), "{case}");
            let (spec, gate) = match has_gate {
                true => (spec.gate_after(Activation::Sigmoid), Some(z.as_tensor())),
                false => (spec, None),
            };
            let judge = Judge { on, spec, dtypes, x: &x, residual: None, weight: &weight, bias, gate, dy: &dy };
            judge.run(|forward, backward| {
                judge!(forward, Name::Y, T, &y, case);
                judge!(backward, Name::Dx, R, &dx, case);
                judge!(backward, Name::Dweight, W, &gradient::<W>(grads.get(&weight)), case);
                if has_gate {
                    judge!(backward, Name::Dgate, T, grads.get(&z).unwrap(), case);
                }
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, &gradient::<W>(grads.get(bias)), case);
                }
            });
        }
    }
}

#[test]
fn orders_of_roundings_are_within_their_bounds() {
    on_each_device(|on| {
        orders::<f32, f32, f32>(on, false);
        orders::<f16, f32, f32>(on, false);
        orders::<bf16, bf16, bf16>(on, false);
    });
}

#[test]
fn orders_of_roundings_of_candles_operations_are_within_the_same_bounds() {
    on_each_device(|on| {
        orders::<f32, f32, f32>(on, true);
        orders::<f16, f16, f32>(on, true);
        orders::<bf16, bf16, f32>(on, true);
    });
}

#[test]
fn results_of_another_dtype_are_within_their_bounds() {
    on_each_device(|on| {
        casts::<f32, f32, f32, bf16>(on, false);
        casts::<f32, f32, f32, f16>(on, false);
        casts::<bf16, bf16, bf16, f32>(on, false);
        casts::<f16, f32, f32, f32>(on, false);
    });
}

#[test]
fn results_of_another_dtype_by_candles_operations_are_within_the_same_bounds() {
    on_each_device(|on| {
        casts::<f32, f32, f32, bf16>(on, true);
        casts::<f16, f16, f32, f32>(on, true);
        // No kernel has two dtypes of 16 bits.
        casts::<f16, f16, f32, bf16>(on, true);
    });
}

/// In 16 bits each order gives a few percent of other values.
#[test]
fn orders_of_roundings_differ() {
    on_each_device(|on| {
        let (x, w) = (on.tensor::<bf16>(&[64, 512], 1), on.tensor::<bf16>(&[512], 2));
        for weight in [&w, wide(&w).as_tensor()] {
            let of = |order| elements::<bf16>(&Norm::rms(EPS).cast_order(order).apply(&x, weight).unwrap());
            let all = CastOrder::ALL.map(of);
            for (i, one) in all.iter().enumerate() {
                for (other, order) in all.iter().zip(CastOrder::ALL).skip(i + 1) {
                    let count = one.iter().zip(other).filter(|(one, other)| one != other).count();
                    assert!(count > one.len() / 50, "{:?} and {order:?}: {count} differ", CastOrder::ALL[i]);
                }
            }
        }
    });
}

/// Pairs of dtypes, weights and orders without kernels, and what is no cast.
#[test]
fn every_pair_of_dtypes_has_a_path() {
    on_each_device(|on| {
        let (x, w) = (on.var::<bf16>(&[3, 64], 1), on.var::<bf16>(&[64], 2));
        let norm = Norm::rms(EPS);
        let plain = norm.apply(&x, &w).unwrap();
        assert_eq!(elements::<bf16>(&norm.out_dtype(DType::BF16).apply(&x, &w).unwrap()), elements::<bf16>(&plain));
        for (dtype, order) in [
            (DType::F32, CastOrder::AtStore),
            (DType::F64, CastOrder::AtStore),
            (DType::F16, CastOrder::AtStore),
            (DType::F32, CastOrder::WeightFirst),
        ] {
            let y = norm.cast_order(order).out_dtype(dtype).apply(&x, &w).unwrap();
            let grads = y.sum_all().unwrap().backward().unwrap();
            let found = (y.dtype(), grads.get(&x).unwrap().dtype(), grads.get(&w).unwrap().dtype());
            assert_eq!(found, (dtype, DType::BF16, DType::BF16));
        }
        // A weight in the dtype of x is that weight in f32, except that y is made by candle's operations.
        let router = norm.out_dtype(DType::F32);
        let (ours, theirs) =
            (router.apply(&x, &w.to_dtype(DType::F32).unwrap()).unwrap(), router.apply(&x, &w).unwrap());
        let (ours, theirs) = (f64s(&ours), f64s(&theirs));
        let largest = ours.iter().fold(0f64, |largest, value| largest.max(value.abs()));
        // Sums of 64 squares and five operations, in f32, on both sides.
        let bound = 128.0 * f64::from(f32::EPSILON) * largest;
        assert!(ours.iter().zip(&theirs).all(|(ours, theirs)| (ours - theirs).abs() <= bound));
    });
}

/// A cast order in place gives the bits of a new y.
#[test]
fn orders_of_roundings_in_place() {
    on_each_device(|on| {
        let w = on.tensor::<bf16>(&[64], 2);
        for order in CastOrder::ALL {
            let (norm, x) = (Norm::rms(EPS).cast_order(order), on.tensor::<bf16>(&[5, 64], 1));
            let expected = elements::<bf16>(&norm.apply(&x, &w).unwrap());
            norm.apply_in_place(&x, &w).unwrap();
            assert_eq!(elements::<bf16>(&x), expected, "{order:?}");
        }
    });
}
