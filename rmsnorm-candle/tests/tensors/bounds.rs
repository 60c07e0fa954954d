//! Results and gradients of every function, in every mix of dtypes and several layouts, against the
//! f64 reference and its derived bounds: rmsnorm-spec's math, sections 5 and 6. There are no other
//! tolerances.

use crate::kit::{Native, On, elements, f64s, loss, on_each_device};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use rmsnorm_candle::{
    Activation, Norm, add_layer_norm, add_rms_norm, gemma_rms_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm,
    layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
};
use rmsnorm_core::conformance::testing::{BackwardTruth, ForwardTruth, Passes};
use rmsnorm_core::{DTypes, Norm as Kind, NormSpec, Tensor as Name, bf16, f16};

/// Large enough to affect every result, and exact in f32.
pub const EPS: f64 = 1.0 / 16.0;

/// A normalized tensor, and the variable that it is a view of.
pub struct View {
    pub base: Var,
    pub of: fn(&Tensor) -> Tensor,
}

impl View {
    pub fn tensor(&self) -> Tensor {
        (self.of)(&self.base)
    }
}

/// Views of ranks 1 to 4: dense, narrowed in one dimension or two, heads of a fused buffer, and
/// tensors that must be copied.
pub fn views<E: Native>(on: &On) -> Vec<View> {
    let view = |shape: &[usize], of| View { base: on.var::<E>(shape, 1), of };
    vec![
        view(&[33], |base| base.clone()),
        view(&[130], |base| base.narrow(0, 3, 96).unwrap()),
        view(&[7, 130], |base| base.clone()),
        view(&[5, 3 * 32], |base| base.narrow(1, 32, 32).unwrap()),
        view(&[2, 6, 40], |base| base.narrow(1, 1, 4).unwrap().narrow(2, 4, 31).unwrap()),
        view(&[3, 9 * 16], |base| base.reshape((3, 9, 16)).unwrap().narrow(1, 2, 4).unwrap()),
        view(&[2, 3, 4, 24], |base| base.clone()),
        view(&[2, 5, 4, 24], |base| base.transpose(1, 2).unwrap()),
        view(&[64, 12], |base| base.t().unwrap()),
        view(&[1, 300, 64], |base| base.clone()),
    ]
}

/// Judges every result and every gradient of a function.
pub struct Judge<'a> {
    pub on: &'a On,
    pub spec: NormSpec,
    pub dtypes: DTypes,
    pub x: &'a Tensor,
    pub residual: Option<&'a Tensor>,
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub gate: Option<&'a Tensor>,
    pub dy: &'a Tensor,
}

impl Judge<'_> {
    /// Passes each tensor to `judge` through its own function.
    pub fn run(&self, outputs: impl Fn(&ForwardTruth<'_>, &BackwardTruth)) {
        let (x, weight, dy) = (f64s(self.x), f64s(self.weight), f64s(self.dy));
        let (residual, bias, gate) = (self.residual.map(f64s), self.bias.map(f64s), self.gate.map(f64s));
        let (residual, bias, gate) = (residual.as_deref(), bias.as_deref(), gate.as_deref());
        let passes =
            Passes { spec: self.spec, dtypes: self.dtypes, x: &x, residual, weight: &weight, bias, gate, dy: &dy };
        passes.judge(&self.on.arithmetic, outputs);
    }
}

/// Judges a tensor against the reference of a pass; the test fails with the difference.
macro_rules! judge {
    ($truth:expr, $name:expr, $type:ty, $got:expr, $case:expr) => {
        let verdict = $truth.judge($name, &elements::<$type>($got));
        assert!(verdict.is_pass() && verdict.checked > 0, "{} of {}: {verdict:?}", $name, $case);
    };
}
pub(crate) use judge;

fn norms<T: Native, W: Native>(on: &On) {
    let dtypes = DTypes::of::<T, W, T>();
    for view in views::<T>(on) {
        let x = view.tensor();
        let cols = *x.dims().last().unwrap();
        let rows = x.elem_count() / cols;
        let (weight, bias) = (on.var::<W>(&[cols], 2), on.var::<W>(&[cols], 3));
        let dy = on.tensor::<T>(x.dims(), 4);
        let spec = |norm| NormSpec::new(norm, rows, cols, EPS as f32);
        for (name, spec, bias) in [
            ("rms_norm", spec(Kind::Rms), None),
            ("gemma_rms_norm", spec(Kind::Rms).weight_offset(1.0), None),
            ("layer_norm without bias", spec(Kind::Layer), None),
            ("layer_norm", spec(Kind::Layer), Some(&bias)),
            ("Norm::l2", spec(Kind::L2), None),
            ("Norm::l2_clamped", spec(Kind::L2Clamped), None),
        ] {
            let case = format!("{name} of {dtypes} {:?}", x.layout());
            let bias = bias.map(Var::as_tensor);
            let y = match (spec.norm, spec.weight_offset == 0.0) {
                (Kind::Rms, true) => rms_norm(&x, &weight, EPS),
                (Kind::Rms, false) => gemma_rms_norm(&x, &weight, EPS),
                (Kind::Layer, _) => layer_norm(&x, &weight, bias, EPS),
                (Kind::L2, _) => Norm::l2(EPS).apply(&x, &weight),
                (Kind::L2Clamped, _) => Norm::l2_clamped(EPS).apply(&x, &weight),
            }
            .unwrap();
            assert_eq!((y.dims(), y.dtype()), (x.dims(), x.dtype()), "{case}");
            let grads = loss(&y, &dy).backward().unwrap();
            let dx = (view.of)(grads.get(&view.base).unwrap());
            let judge = Judge { on, spec, dtypes, x: &x, residual: None, weight: &weight, bias, gate: None, dy: &dy };
            judge.run(|forward, backward| {
                judge!(forward, Name::Y, T, &y, case);
                judge!(backward, Name::Dx, T, &dx, case);
                judge!(backward, Name::Dweight, W, grads.get(&weight).unwrap(), case);
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, grads.get(bias).unwrap(), case);
                }
            });
        }
    }
}

fn adds<T: Native, W: Native, R: Native>(on: &On) {
    let dtypes = DTypes::of::<T, W, R>();
    for (view, stream) in views::<T>(on).iter().zip(views::<R>(on)) {
        let (x, residual) = (view.tensor(), (stream.of)(&on.var::<R>(stream.base.dims(), 5)));
        let r = Var::from_tensor(&residual).unwrap();
        let cols = *x.dims().last().unwrap();
        let (weight, bias) = (on.var::<W>(&[cols], 2), on.var::<W>(&[cols], 3));
        let dy = on.tensor::<T>(x.dims(), 4);
        for (name, norm, bias) in [
            ("add_rms_norm", Kind::Rms, None),
            ("add_layer_norm without bias", Kind::Layer, None),
            ("add_layer_norm", Kind::Layer, Some(&bias)),
            ("Norm::l2 of a sum", Kind::L2, None),
            ("Norm::l2_clamped of a sum", Kind::L2Clamped, None),
        ] {
            let spec = NormSpec::new(norm, x.elem_count() / cols, cols, EPS as f32);
            let bias = bias.map(Var::as_tensor);
            let sum_and_norm = |residual: &Tensor| match norm {
                Kind::Rms => add_rms_norm(&x, residual, &weight, EPS).unwrap(),
                Kind::Layer => add_layer_norm(&x, residual, &weight, bias, EPS).unwrap(),
                Kind::L2 => Norm::l2(EPS).residual(residual).apply(&x, &weight).unwrap(),
                Kind::L2Clamped => Norm::l2_clamped(EPS).residual(residual).apply(&x, &weight).unwrap(),
            };
            let (y, sum) = sum_and_norm(&r);
            let case = format!("{name} of {dtypes} {:?}", x.layout());
            assert_eq!((y.dtype(), sum.dtype()), (x.dtype(), r.dtype()), "{case}");
            let grads = loss(&y, &dy).backward().unwrap();
            let dx = (view.of)(grads.get(&view.base).unwrap());
            let judge =
                Judge { on, spec, dtypes, x: &x, residual: Some(&r), weight: &weight, bias, gate: None, dy: &dy };
            judge.run(|forward, backward| {
                judge!(forward, Name::Y, T, &y, case);
                judge!(forward, Name::ResidualOut, R, &sum, case);
                judge!(backward, Name::Dx, T, &dx, case);
                judge!(backward, Name::Dresidual, R, grads.get(&r).unwrap(), case);
                judge!(backward, Name::Dweight, W, grads.get(&weight).unwrap(), case);
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, grads.get(bias).unwrap(), case);
                }
            });
            // The strided residual, read without a copy, gives the same bits.
            let (again, _) = sum_and_norm(&residual);
            assert_eq!(elements::<T>(&again), elements::<T>(&y), "{case}");
        }
    }
}

/// Gates before and after the norm, alone and after a residual, with groups of columns. Every third
/// view only: the views are those of `norms`.
fn gated<T: Native, W: Native>(on: &On) {
    let dtypes = DTypes::of::<T, W, T>();
    for view in views::<T>(on).into_iter().step_by(3) {
        let x = view.tensor();
        let cols = *x.dims().last().unwrap();
        let (weight, bias) = (on.var::<W>(&[cols], 2), on.var::<W>(&[cols], 3));
        let (z, r, dy) = (on.var::<T>(x.dims(), 6), on.var::<T>(x.dims(), 5), on.tensor::<T>(x.dims(), 4));
        let groups = if cols.is_multiple_of(3) { 3 } else { 1 };
        let spec = NormSpec::layer(x.elem_count() / cols, cols, EPS as f32).groups(groups);
        let norm = Norm::layer(EPS).bias(bias.as_tensor()).groups(groups);
        for activation in [Activation::Silu, Activation::Sigmoid] {
            let of_sum = norm.residual(&r).gate_after(&z, activation).apply(&x, &weight).map(|(y, _)| y);
            for (name, spec, y, residual) in [
                ("gate_after", spec.gate_after(activation), norm.gate_after(&z, activation).apply(&x, &weight), None),
                (
                    "gate_before",
                    spec.gate_before(activation),
                    norm.gate_before(&z, activation).apply(&x, &weight),
                    None,
                ),
                ("residual, gate_after", spec.gate_after(activation), of_sum, Some(r.as_tensor())),
            ] {
                let (y, case) = (y.unwrap(), format!("{name} {activation:?} of {dtypes} {:?}", x.layout()));
                let grads = loss(&y, &dy).backward().unwrap();
                let dx = (view.of)(grads.get(&view.base).unwrap());
                let (gate, bias) = (Some(z.as_tensor()), Some(bias.as_tensor()));
                let judge = Judge { on, spec, dtypes, x: &x, residual, weight: &weight, bias, gate, dy: &dy };
                judge.run(|forward, backward| {
                    judge!(forward, Name::Y, T, &y, case);
                    judge!(backward, Name::Dx, T, &dx, case);
                    judge!(backward, Name::Dgate, T, grads.get(&z).unwrap(), case);
                    judge!(backward, Name::Dweight, W, grads.get(&weight).unwrap(), case);
                    judge!(backward, Name::Dbias, W, grads.get(bias.unwrap()).unwrap(), case);
                });
            }
        }
    }
}

/// The residual added after the norm, and the next norm of the sum. Every third view only: other
/// rows make no difference.
fn afters<T: Native, W: Native, R: Native>(on: &On) {
    let dtypes = DTypes::of::<T, W, R>();
    for (view, stream) in views::<T>(on).iter().zip(views::<R>(on)).step_by(3) {
        let (x, residual) = (view.tensor(), (stream.of)(&on.var::<R>(stream.base.dims(), 5)));
        let r = Var::from_tensor(&residual).unwrap();
        let cols = *x.dims().last().unwrap();
        let [w, bias, next, next_bias] = [2, 3, 6, 7].map(|seed| on.var::<W>(&[cols], seed));
        let dy = on.tensor::<T>(x.dims(), 4);
        let spec = |norm| NormSpec::new(norm, x.elem_count() / cols, cols, EPS as f32);
        let gemma = spec(Kind::Rms).weight_offset(1.0);
        // Judges the norm of x, whose dy is the gradient of the sum.
        let judge_first = |spec: NormSpec,
                           bias: Option<&Var>,
                           sum: &Tensor,
                           dy: &Tensor,
                           grads: &GradStore,
                           case: &str| {
            assert_eq!((sum.dims(), sum.dtype()), (x.dims(), r.dtype()), "{case}");
            let dx = (view.of)(grads.get(&view.base).unwrap());
            let (spec, bias_tensor) = (spec.residual_after(), bias.map(Var::as_tensor));
            let judge =
                Judge { on, spec, dtypes, x: &x, residual: Some(&r), weight: &w, bias: bias_tensor, gate: None, dy };
            judge.run(|forward, backward| {
                judge!(forward, Name::ResidualOut, R, sum, case);
                judge!(backward, Name::Dx, T, &dx, case);
                judge!(backward, Name::Dweight, W, grads.get(&w).unwrap(), case);
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, grads.get(bias).unwrap(), case);
                }
            });
        };
        for (name, spec, bias) in [
            ("rms_norm_add", spec(Kind::Rms), None),
            ("gemma_rms_norm_add", gemma, None),
            ("layer_norm_add without bias", spec(Kind::Layer), None),
            ("layer_norm_add", spec(Kind::Layer), Some(&bias)),
            ("Norm::l2 to a sum", spec(Kind::L2), None),
            ("Norm::l2_clamped to a sum", spec(Kind::L2Clamped), None),
        ] {
            let case = format!("{name} of {dtypes} {:?}", x.layout());
            let sum = |residual: &Tensor| match (spec.norm, spec.weight_offset == 0.0) {
                (Kind::Rms, true) => rms_norm_add(&x, residual, &w, EPS).unwrap(),
                (Kind::Rms, false) => gemma_rms_norm_add(&x, residual, &w, EPS).unwrap(),
                (Kind::Layer, _) => layer_norm_add(&x, residual, &w, bias.map(Var::as_tensor), EPS).unwrap(),
                (Kind::L2, _) => Norm::l2(EPS).residual_after(residual).apply(&x, &w).unwrap(),
                (Kind::L2Clamped, _) => Norm::l2_clamped(EPS).residual_after(residual).apply(&x, &w).unwrap(),
            };
            let residual_out = sum(&r);
            let dsum = dy.to_dtype(r.dtype()).unwrap();
            let grads = loss(&residual_out, &dsum).backward().unwrap();
            judge_first(spec, bias, &residual_out, &dy, &grads, &case);
            assert_eq!(elements::<R>(grads.get(&r).unwrap()), elements::<R>(&dsum), "{case}");
            // The strided residual, read without a copy, gives the same bits.
            assert_eq!(elements::<R>(&sum(&residual)), elements::<R>(&residual_out), "{case}");
        }
        let layer = spec(Kind::Layer);
        for (name, spec, bias, next_bias) in [
            ("rms_norm_add_rms_norm", spec(Kind::Rms), None, None),
            ("gemma_rms_norm_add_rms_norm", gemma, None, None),
            ("two layer norms without bias", layer, None, None),
            ("two layer norms", layer, Some(&bias), Some(&next_bias)),
            ("two layer norms, the second with a bias", layer, None, Some(&next_bias)),
            ("two L2 norms", spec(Kind::L2), None, None),
            ("two clamped L2 norms", spec(Kind::L2Clamped), None, None),
        ] {
            let case = format!("{name} of {dtypes} {:?}", x.layout());
            let [of_bias, of_next_bias] = [bias, next_bias].map(|bias| bias.map(Var::as_tensor));
            let both = |residual: &Tensor| match (spec.norm, spec.weight_offset == 0.0) {
                (Kind::Rms, true) => rms_norm_add_rms_norm(&x, residual, &w, &next, EPS).unwrap(),
                (Kind::Rms, false) => gemma_rms_norm_add_rms_norm(&x, residual, &w, &next, EPS).unwrap(),
                (Kind::Layer, _) => {
                    let norm = Norm::layer(EPS).bias(of_bias).residual_after(residual);
                    norm.next_norm(&next).next_bias(of_next_bias).apply(&x, &w).unwrap()
                }
                (Kind::L2, _) => Norm::l2(EPS).residual_after(residual).next_norm(&next).apply(&x, &w).unwrap(),
                (Kind::L2Clamped, _) => {
                    Norm::l2_clamped(EPS).residual_after(residual).next_norm(&next).apply(&x, &w).unwrap()
                }
            };
            let (y, sum) = both(&r);
            assert_eq!((y.dims(), y.dtype()), (x.dims(), x.dtype()), "{case}");
            let grads = loss(&y, &dy).backward().unwrap();
            let dsum = grads.get(&r).unwrap();
            judge_first(spec, bias, &sum, &dsum.to_dtype(x.dtype()).unwrap(), &grads, &case);
            // The norm of the stored sum: judged as the norm of that sum plus an x of zeros.
            let zeros = x.zeros_like().unwrap();
            let (residual_of_next, bias) = (Some(&sum), of_next_bias);
            let judge = Judge {
                on,
                spec,
                dtypes,
                x: &zeros,
                residual: residual_of_next,
                weight: &next,
                bias,
                gate: None,
                dy: &dy,
            };
            judge.run(|forward, backward| {
                judge!(forward, Name::Y, T, &y, case);
                judge!(backward, Name::Dresidual, R, dsum, case);
                judge!(backward, Name::Dweight, W, grads.get(&next).unwrap(), case);
                if let Some(next_bias) = next_bias {
                    judge!(backward, Name::Dbias, W, grads.get(next_bias).unwrap(), case);
                }
            });
            let (again, sum_again) = both(&residual);
            assert_eq!((elements::<T>(&again), elements::<R>(&sum_again)), (elements(&y), elements(&sum)), "{case}");
        }
    }
}

// A test for each dtype of activations: concurrent on a GPU, since compilation takes nearly all of
// their time.

#[test]
fn gated_norms_are_within_their_bounds() {
    on_each_device(|on| {
        gated::<f32, f32>(on);
        gated::<f16, f32>(on);
        gated::<bf16, bf16>(on);
    });
}

#[test]
fn norms_of_f32_are_within_their_bounds() {
    on_each_device(norms::<f32, f32>);
}

#[test]
fn norms_of_f16_are_within_their_bounds() {
    on_each_device(|on| {
        norms::<f16, f16>(on);
        norms::<f16, f32>(on);
    });
}

#[test]
fn norms_of_bf16_are_within_their_bounds() {
    on_each_device(|on| {
        norms::<bf16, bf16>(on);
        norms::<bf16, f32>(on);
    });
}

#[test]
fn sums_of_f32_and_their_norms_are_within_their_bounds() {
    on_each_device(adds::<f32, f32, f32>);
}

#[test]
fn sums_of_f16_and_their_norms_are_within_their_bounds() {
    on_each_device(|on| {
        adds::<f16, f16, f16>(on);
        adds::<f16, f16, f32>(on);
        adds::<f16, f32, f16>(on);
        adds::<f16, f32, f32>(on);
    });
}

#[test]
fn sums_of_bf16_and_their_norms_are_within_their_bounds() {
    on_each_device(|on| {
        adds::<bf16, bf16, bf16>(on);
        adds::<bf16, bf16, f32>(on);
        adds::<bf16, f32, bf16>(on);
        adds::<bf16, f32, f32>(on);
    });
}

#[test]
fn norms_of_f32_added_to_a_residual_are_within_their_bounds() {
    on_each_device(afters::<f32, f32, f32>);
}

#[test]
fn norms_of_f16_added_to_a_residual_are_within_their_bounds() {
    on_each_device(|on| {
        afters::<f16, f16, f16>(on);
        afters::<f16, f32, f32>(on);
    });
}

#[test]
fn norms_of_bf16_added_to_a_residual_are_within_their_bounds() {
    on_each_device(|on| {
        afters::<bf16, bf16, bf16>(on);
        afters::<bf16, bf16, f32>(on);
        afters::<bf16, f32, bf16>(on);
        afters::<bf16, f32, f32>(on);
    });
}
