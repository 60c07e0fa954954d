//! Results and gradients of every function, in every mix of dtypes and several layouts, against the
//! f64 reference and its derived bounds: rmsnorm-spec's math, sections 5 and 6. There are no other
//! tolerances.

use burn::tensor::{Device, Tensor};
use rmsnorm_burn::{
    Activation, add_layer_norm, add_rms_norm, gemma_rms_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm,
    layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
};
use rmsnorm_core::conformance::testing::{BackwardTruth, ForwardTruth, Passes};
use rmsnorm_core::{DTypes, Norm, NormSpec, Slot, Tensor as Name, bf16, f16};

use crate::kit::{Native, arithmetic, elements, f64s, has, loss, on_each_device, plain, tensor, var};

/// Large enough to affect every result, and exact in f32.
pub const EPS: f64 = 1.0 / 16.0;

/// A normalized tensor: the dimensions of a leaf, and a view of it.
pub type View<const D: usize> = ([usize; D], fn(Tensor<D>) -> Tensor<D>);

/// A check of every view, of ranks 1 to 4: dense, narrowed in one dimension or two, heads of a
/// fused buffer, and tensors that must be copied.
pub trait Check {
    fn view<const D: usize>(&self, view: View<D>);

    fn views(&self) {
        self.view::<1>(([33], |base| base));
        self.view::<2>(([5, 3 * 32], |base| base.narrow(1, 32, 32)));
        self.view::<2>(([64, 12], |base| base.transpose()));
        // Narrowed where burn does not copy on any device, and too large to share a buffer there.
        self.view::<3>(([2, 6, 384], |base| base.narrow(1, 1, 4).narrow(2, 128, 128)));
        self.view::<2>(([40, 1100], |base| base));
        if plain() != Device::flex() {
            // Each shape needs one or two kernels, which a software adapter compiles in a second.
            return;
        }
        self.view::<3>(([2, 6, 40], |base| base.narrow(1, 1, 4).narrow(2, 4, 31)));
        self.view::<4>(([2, 5, 4, 24], |base| base.swap_dims(1, 2)));
        self.view::<1>(([130], |base| base.narrow(0, 3, 96)));
        self.view::<2>(([7, 130], |base| base));
        self.view::<2>(([6, 40], |base| base.flip([0])));
        self.view::<3>(([3, 9, 16], |base| base.narrow(1, 2, 4)));
        self.view::<3>(([1, 300, 64], |base| base));
        self.view::<4>(([2, 3, 4, 24], |base| base));
        self.view::<4>(([2, 5, 4, 24], |base| base.permute([2, 0, 3, 1])));
    }
}

/// Judges every result and every gradient of a function.
pub struct Judge<'a, const D: usize> {
    pub spec: NormSpec,
    pub dtypes: DTypes,
    pub x: &'a Tensor<D>,
    pub residual: Option<&'a Tensor<D>>,
    pub weight: &'a Tensor<1>,
    pub bias: Option<&'a Tensor<1>>,
    pub gate: Option<&'a Tensor<D>>,
    pub dy: &'a Tensor<D>,
}

impl<const D: usize> Judge<'_, D> {
    /// Passes the references of both passes to `judge`.
    pub fn run(&self, judge: impl Fn(&ForwardTruth<'_>, &BackwardTruth)) {
        self.passes(|passes| passes.judge(&arithmetic(), &judge));
    }

    /// The same for the next norm, of the stored sum.
    fn run_next(
        &self,
        sum: &Tensor<D>,
        weight: &Tensor<1>,
        bias: Option<&Tensor<1>>,
        dy: &Tensor<D>,
        judge: impl Fn(&ForwardTruth<'_>, &BackwardTruth),
    ) {
        let (sum, weight, bias, dy) = (f64s(sum), f64s(weight), bias.map(f64s), f64s(dy));
        self.passes(|passes| {
            Passes::next(passes, &sum, &weight, bias.as_deref(), &dy).judge(&arithmetic(), &judge);
        });
    }

    fn passes(&self, then: impl FnOnce(&Passes<'_>)) {
        let (x, weight, dy) = (f64s(self.x), f64s(self.weight), f64s(self.dy));
        let (residual, bias, gate) = (self.residual.map(f64s), self.bias.map(f64s), self.gate.map(f64s));
        let (residual, bias, gate) = (residual.as_deref(), bias.as_deref(), gate.as_deref());
        let (spec, dtypes) = (self.spec, self.dtypes);
        then(&Passes { spec, dtypes, x: &x, residual, weight: &weight, bias, gate, dy: &dy });
    }
}

/// Judges a tensor against the reference of a pass; the test fails with the difference.
macro_rules! judge {
    ($truth:expr, $name:expr, $type:ty, $got:expr, $case:expr) => {
        let verdict = $truth.judge($name, &elements::<$type, _>($got));
        assert!(verdict.is_pass() && verdict.checked > 0, "{} of {}: {verdict:?}", $name, $case);
    };
}
pub(crate) use judge;

/// Norms of activations `T` with a weight of `W`.
struct Norms<T, W>(std::marker::PhantomData<(T, W)>);

impl<T: Native, W: Native> Check for Norms<T, W> {
    fn view<const D: usize>(&self, (dims, of): View<D>) {
        let dtypes = DTypes::of::<T, W, T>();
        let base = var::<T, D>(dims, 1);
        let x = of(base.clone());
        let cols = x.dims()[D - 1];
        let rows = x.shape().num_elements() / cols;
        let (weight, bias) = (var::<W, 1>([cols], 2), var::<W, 1>([cols], 3));
        let dy = tensor::<T, D>(x.dims(), 4);
        let spec = |norm| NormSpec::new(norm, rows, cols, EPS as f32);
        for (name, spec, bias) in [
            ("rms_norm", spec(Norm::Rms), None),
            ("gemma_rms_norm", spec(Norm::Rms).weight_offset(1.0), None),
            ("layer_norm without bias", spec(Norm::Layer), None),
            ("layer_norm", spec(Norm::Layer), Some(&bias)),
            ("Norm::l2", spec(Norm::L2), None),
            ("Norm::l2_clamped", spec(Norm::L2Clamped), None),
        ] {
            let case = format!("{name} of {dtypes} {dims:?} as {:?}", x.dims());
            // A separate view, because burn differentiates a graph once.
            let (x_in, weight_in) = (of(base.clone()), weight.clone());
            let y = match (spec.norm, spec.weight_offset == 0.0) {
                (Norm::Rms, true) => rms_norm(x_in, weight_in, EPS),
                (Norm::Rms, false) => gemma_rms_norm(x_in, weight_in, EPS),
                (Norm::L2, _) => rmsnorm_burn::Norm::l2(EPS).apply(x_in, weight_in),
                (Norm::L2Clamped, _) => rmsnorm_burn::Norm::l2_clamped(EPS).apply(x_in, weight_in),
                (Norm::Layer, _) => layer_norm(x_in, weight_in, bias.cloned(), EPS),
            };
            assert_eq!((y.dims(), y.dtype()), (x.dims(), x.dtype()), "{case}");
            // Layer norm's y through a transpose, as after attention: its gradient is not a dense
            // matrix.
            let last = D - 1;
            let loss = match spec.norm {
                Norm::Rms | Norm::L2 | Norm::L2Clamped => loss(y.clone(), &dy),
                Norm::Layer => loss(y.clone().swap_dims(0, last), &dy.clone().swap_dims(0, last)),
            };
            let grads = loss.backward();
            let dx = of(base.grad(&grads).unwrap());
            let judge = Judge { spec, dtypes, x: &x, residual: None, weight: &weight, bias, gate: None, dy: &dy };
            judge.run(|forward, backward| {
                judge!(forward, Name::Y, T, &y, case);
                judge!(backward, Name::Dx, T, &dx, case);
                judge!(backward, Name::Dweight, W, &weight.grad(&grads).unwrap(), case);
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, &bias.grad(&grads).unwrap(), case);
                }
            });
        }
    }
}

/// Sums of activations `T` and a residual of `R`, and their norms with a weight of `W`.
struct Adds<T, W, R>(std::marker::PhantomData<(T, W, R)>);

impl<T: Native, W: Native, R: Native> Check for Adds<T, W, R> {
    fn view<const D: usize>(&self, (dims, of): View<D>) {
        let dtypes = DTypes::of::<T, W, R>();
        let (base, stream) = (var::<T, D>(dims, 1), var::<R, D>(dims, 5));
        let (x, residual) = (of(base.clone()), of(stream.clone()));
        let cols = x.dims()[D - 1];
        let rows = x.shape().num_elements() / cols;
        let (weight, bias, dy) = (var::<W, 1>([cols], 2), var::<W, 1>([cols], 3), tensor::<T, D>(x.dims(), 4));
        for (name, norm, bias) in [
            ("add_rms_norm", Norm::Rms, None),
            ("add_layer_norm without bias", Norm::Layer, None),
            ("add_layer_norm", Norm::Layer, Some(&bias)),
            ("Norm::l2 of a sum", Norm::L2, None),
        ] {
            let case = format!("{name} of {dtypes} {dims:?} as {:?}", x.dims());
            let (x_in, residual_in, weight_in) = (of(base.clone()), of(stream.clone()), weight.clone());
            let (y, sum) = match norm {
                Norm::Rms => add_rms_norm(x_in, residual_in, weight_in, EPS),
                Norm::L2 => rmsnorm_burn::Norm::l2(EPS).residual(residual_in).apply(x_in, weight_in),
                Norm::L2Clamped => rmsnorm_burn::Norm::l2_clamped(EPS).residual(residual_in).apply(x_in, weight_in),
                Norm::Layer => add_layer_norm(x_in, residual_in, weight_in, bias.cloned(), EPS),
            };
            assert_eq!((y.dtype(), sum.dtype()), (x.dtype(), residual.dtype()), "{case}");
            let grads = loss(y.clone(), &dy).backward();
            let (dx, dresidual) = (of(base.grad(&grads).unwrap()), of(stream.grad(&grads).unwrap()));
            let spec = NormSpec::new(norm, rows, cols, EPS as f32);
            let judge =
                Judge { spec, dtypes, x: &x, residual: Some(&residual), weight: &weight, bias, gate: None, dy: &dy };
            judge.run(|forward, backward| {
                judge!(forward, Name::Y, T, &y, case);
                judge!(forward, Name::ResidualOut, R, &sum, case);
                judge!(backward, Name::Dx, T, &dx, case);
                judge!(backward, Name::Dresidual, R, &dresidual, case);
                judge!(backward, Name::Dweight, W, &weight.grad(&grads).unwrap(), case);
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, &bias.grad(&grads).unwrap(), case);
                }
            });
        }
    }
}

/// Sums of a residual of `R` and norms of activations `T` with a weight of `W`.
struct AddsAfter<T, W, R>(std::marker::PhantomData<(T, W, R)>);

impl<T: Native, W: Native, R: Native> Check for AddsAfter<T, W, R> {
    fn view<const D: usize>(&self, (dims, of): View<D>) {
        let dtypes = DTypes::of::<T, W, R>();
        let (base, stream) = (var::<T, D>(dims, 1), var::<R, D>(dims, 5));
        let (x, residual) = (of(base.clone()), of(stream.clone()));
        let cols = x.dims()[D - 1];
        let (weight, bias, dsum) = (var::<W, 1>([cols], 2), var::<W, 1>([cols], 3), tensor::<R, D>(x.dims(), 4));
        // The sum's gradient as the norm receives it.
        let dy = dsum.clone().cast(x.dtype());
        let spec = |norm| NormSpec::new(norm, x.shape().num_elements() / cols, cols, EPS as f32).residual_after();
        for (name, spec, bias) in [
            ("rms_norm_add", spec(Norm::Rms), None),
            ("gemma_rms_norm_add", spec(Norm::Rms).weight_offset(1.0), None),
            ("layer_norm_add without bias", spec(Norm::Layer), None),
            ("layer_norm_add", spec(Norm::Layer), Some(&bias)),
            ("Norm::l2_clamped to a sum", spec(Norm::L2Clamped), None),
        ] {
            let case = format!("{name} of {dtypes} {dims:?} as {:?}", x.dims());
            let (x_in, residual_in, weight_in) = (of(base.clone()), of(stream.clone()), weight.clone());
            let sum = match (spec.norm, spec.weight_offset == 0.0) {
                (Norm::Rms, true) => rms_norm_add(x_in, residual_in, weight_in, EPS),
                (Norm::Rms, false) => gemma_rms_norm_add(x_in, residual_in, weight_in, EPS),
                (Norm::L2, _) => rmsnorm_burn::Norm::l2(EPS).residual_after(residual_in).apply(x_in, weight_in),
                (Norm::L2Clamped, _) => {
                    rmsnorm_burn::Norm::l2_clamped(EPS).residual_after(residual_in).apply(x_in, weight_in)
                }
                (Norm::Layer, _) => layer_norm_add(x_in, residual_in, weight_in, bias.cloned(), EPS),
            };
            assert_eq!((sum.dims(), sum.dtype()), (x.dims(), residual.dtype()), "{case}");
            let grads = loss(sum.clone(), &dsum).backward();
            let (dx, dresidual) = (of(base.grad(&grads).unwrap()), of(stream.grad(&grads).unwrap()));
            assert_eq!(elements::<R, D>(&dresidual), elements::<R, D>(&dsum), "{case}");
            let judge =
                Judge { spec, dtypes, x: &x, residual: Some(&residual), weight: &weight, bias, gate: None, dy: &dy };
            judge.run(|forward, backward| {
                judge!(forward, Name::ResidualOut, R, &sum, case);
                judge!(backward, Name::Dx, T, &dx, case);
                judge!(backward, Name::Dweight, W, &weight.grad(&grads).unwrap(), case);
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, &bias.grad(&grads).unwrap(), case);
                }
            });
        }
    }
}

/// These sums and their norms with a second weight of `W`; all gradients come from those norms
/// alone.
struct Pairs<T, W, R>(std::marker::PhantomData<(T, W, R)>);

impl<T: Native, W: Native, R: Native> Check for Pairs<T, W, R> {
    fn view<const D: usize>(&self, (dims, of): View<D>) {
        let dtypes = DTypes::of::<T, W, R>();
        let (base, stream) = (var::<T, D>(dims, 1), var::<R, D>(dims, 5));
        let (x, residual) = (of(base.clone()), of(stream.clone()));
        let cols = x.dims()[D - 1];
        let [weight, next_weight, bias, next_bias] = [2, 3, 6, 7].map(|seed| var::<W, 1>([cols], seed));
        let dy = tensor::<T, D>(x.dims(), 4);
        let spec = |norm| NormSpec::new(norm, x.shape().num_elements() / cols, cols, EPS as f32).residual_after();
        let (rms, layer) = (spec(Norm::Rms), spec(Norm::Layer));
        for (name, spec, bias, next_bias) in [
            ("rms_norm_add_rms_norm", rms, None, None),
            ("gemma_rms_norm_add_rms_norm", rms.weight_offset(1.0), None, None),
            ("two layer norms", layer, Some(&bias), Some(&next_bias)),
            ("two layer norms, the first with a bias", layer, Some(&bias), None),
            ("two L2 norms", spec(Norm::L2), None, None),
        ] {
            let case = format!("{name} of {dtypes} {dims:?} as {:?}", x.dims());
            let (x_of, r_of, w, next) = (of(base.clone()), of(stream.clone()), weight.clone(), next_weight.clone());
            let (y, sum) = match (spec.norm, spec.weight_offset == 0.0) {
                (Norm::Rms, true) => rms_norm_add_rms_norm(x_of, r_of, w, next, EPS),
                (Norm::Rms, false) => gemma_rms_norm_add_rms_norm(x_of, r_of, w, next, EPS),
                (Norm::L2, _) => rmsnorm_burn::Norm::l2(EPS).residual_after(r_of).next_norm(next).apply(x_of, w),
                (Norm::L2Clamped, _) => {
                    rmsnorm_burn::Norm::l2_clamped(EPS).residual_after(r_of).next_norm(next).apply(x_of, w)
                }
                (Norm::Layer, _) => {
                    let norm = rmsnorm_burn::Norm::layer(EPS).bias(bias.cloned()).residual_after(r_of);
                    norm.next_norm(next).next_bias(next_bias.cloned()).apply(x_of, w)
                }
            };
            assert_eq!((y.dtype(), sum.dtype()), (x.dtype(), residual.dtype()), "{case}");
            let grads = loss(y.clone(), &dy).backward();
            let (dx, dsum) = (of(base.grad(&grads).unwrap()), of(stream.grad(&grads).unwrap()));
            let (residual, of_first) = (Some(&residual), dsum.clone().cast(x.dtype()));
            let judge = Judge { spec, dtypes, x: &x, residual, weight: &weight, bias, gate: None, dy: &of_first };
            judge.run(|forward, backward| {
                judge!(forward, Name::ResidualOut, R, &sum, case);
                judge!(backward, Name::Dx, T, &dx, case);
                judge!(backward, Name::Dweight, W, &weight.grad(&grads).unwrap(), case);
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, &bias.grad(&grads).unwrap(), case);
                }
            });
            judge.run_next(&sum, &next_weight, next_bias, &dy, |forward, backward| {
                judge!(forward, Name::Y, T, &y, case);
                judge!(backward, Name::Dx, R, &dsum, case);
                judge!(backward, Name::Dweight, W, &next_weight.grad(&grads).unwrap(), case);
                if let Some(next_bias) = next_bias {
                    judge!(backward, Name::Dbias, W, &next_bias.grad(&grads).unwrap(), case);
                }
            });
        }
    }
}

/// Gates before and after norms of activations `T` with a weight of `W`, alone and after a residual of
/// `R`, in groups of columns where the columns allow it.
struct Gates<T, W, R>(std::marker::PhantomData<(T, W, R)>);

impl<T: Native, W: Native, R: Native> Check for Gates<T, W, R> {
    fn view<const D: usize>(&self, (dims, of): View<D>) {
        let (base, stream, gates) = (var::<T, D>(dims, 1), var::<R, D>(dims, 5), var::<T, D>(dims, 6));
        let (x, residual, gate) = (of(base.clone()), of(stream.clone()), of(gates.clone()));
        let cols = x.dims()[D - 1];
        let groups = [4, 3, 1].into_iter().find(|groups| cols.is_multiple_of(*groups)).unwrap();
        let (weight, bias, dy) = (var::<W, 1>([cols], 2), var::<W, 1>([cols], 3), tensor::<T, D>(x.dims(), 4));
        let rows = x.shape().num_elements() / cols;
        let layer = NormSpec::layer(rows, cols, EPS as f32);
        let rms = NormSpec::rms(rows, cols, EPS as f32).groups(groups);
        let l2 = NormSpec::l2(rows, cols, EPS as f32).groups(groups);
        let (silu, sigmoid) = (Activation::Silu, Activation::Sigmoid);
        for (name, spec, bias, has_residual) in [
            ("gate_after", rms.gate_after(silu), None, false),
            ("gate_after of a layer norm", layer.gate_after(sigmoid), Some(&bias), false),
            ("gate_before", rms.gate_before(silu), Some(&bias), false),
            ("gate_before of a layer norm", layer.gate_before(sigmoid), None, false),
            ("residual, gate_after", layer.gate_after(silu), Some(&bias), true),
            ("residual, gate_after in groups", rms.gate_after(sigmoid), None, true),
            ("groups", rms, None, false),
            ("groups of an L2 norm", l2, None, false),
        ] {
            let dtypes = if has_residual { DTypes::of::<T, W, R>() } else { DTypes::of::<T, W, T>() };
            let case = format!("{name} of {dtypes} {dims:?} as {:?}", x.dims());
            let norm = match spec.norm {
                Norm::Rms => rmsnorm_burn::Norm::rms(EPS),
                Norm::Layer => rmsnorm_burn::Norm::layer(EPS),
                Norm::L2 => rmsnorm_burn::Norm::l2(EPS),
                Norm::L2Clamped => rmsnorm_burn::Norm::l2_clamped(EPS),
            };
            let (norm, x_in, z_in, w_in) =
                (norm.groups(spec.groups).bias(bias.cloned()), of(base.clone()), of(gates.clone()), weight.clone());
            let y = match (spec.gate, has_residual) {
                (None, _) => norm.apply(x_in, w_in),
                (Some(gate), true) => {
                    norm.residual(of(stream.clone())).gate_after(z_in, gate.activation).apply(x_in, w_in).0
                }
                (Some(gate), false) => match gate.slot {
                    Slot::Before => norm.gate_before(z_in, gate.activation).apply(x_in, w_in),
                    Slot::After => norm.gate_after(z_in, gate.activation).apply(x_in, w_in),
                },
            };
            assert_eq!((y.dims(), y.dtype()), (x.dims(), x.dtype()), "{case}");
            let grads = loss(y.clone(), &dy).backward();
            let (dx, residual) = (of(base.grad(&grads).unwrap()), has_residual.then_some(&residual));
            let gate = spec.gate.map(|_| &gate);
            let judge = Judge { spec, dtypes, x: &x, residual, weight: &weight, bias, gate, dy: &dy };
            judge.run(|forward, backward| {
                judge!(forward, Name::Y, T, &y, case);
                judge!(backward, Name::Dx, T, &dx, case);
                judge!(backward, Name::Dweight, W, &weight.grad(&grads).unwrap(), case);
                if gate.is_some() {
                    judge!(backward, Name::Dgate, T, &of(gates.grad(&grads).unwrap()), case);
                }
                if has_residual {
                    judge!(backward, Name::Dresidual, R, &of(stream.grad(&grads).unwrap()), case);
                }
                if let Some(bias) = bias {
                    judge!(backward, Name::Dbias, W, &bias.grad(&grads).unwrap(), case);
                }
            });
        }
    }
}

fn gates<T: Native, W: Native, R: Native>() {
    if !has::<T>() {
        return;
    }
    Gates::<T, W, R>(std::marker::PhantomData).views();
}

fn norms<T: Native, W: Native>() {
    if !has::<T>() {
        return;
    }
    Norms::<T, W>(std::marker::PhantomData).views();
}

fn adds<T: Native, W: Native, R: Native>() {
    if !has::<T>() {
        return;
    }
    Adds::<T, W, R>(std::marker::PhantomData).views();
}

fn adds_after<T: Native, W: Native, R: Native>() {
    if !has::<T>() {
        return;
    }
    AddsAfter::<T, W, R>(std::marker::PhantomData).views();
}

fn pairs<T: Native, W: Native, R: Native>() {
    if !has::<T>() {
        return;
    }
    Pairs::<T, W, R>(std::marker::PhantomData).views();
}

#[test]
fn norms_are_within_their_bounds() {
    on_each_device(|| {
        norms::<f32, f32>();
        norms::<f16, f16>();
        norms::<f16, f32>();
        norms::<bf16, bf16>();
        norms::<bf16, f32>();
    });
}

/// In every mix of activations, weight and residual.
macro_rules! in_every_mix {
    ($check:ident) => {
        $check::<f32, f32, f32>();
        $check::<f16, f16, f16>();
        $check::<f16, f16, f32>();
        $check::<f16, f32, f16>();
        $check::<f16, f32, f32>();
        $check::<bf16, bf16, bf16>();
        $check::<bf16, bf16, f32>();
        $check::<bf16, f32, bf16>();
        $check::<bf16, f32, f32>();
    };
}

#[test]
fn gated_norms_are_within_their_bounds() {
    on_each_device(|| {
        gates::<f32, f32, f32>();
        gates::<f16, f32, f16>();
        gates::<bf16, bf16, f32>();
    });
}

#[test]
fn sums_and_their_norms_are_within_their_bounds() {
    on_each_device(|| {
        in_every_mix!(adds);
    });
}

#[test]
fn sums_with_norms_are_within_their_bounds() {
    on_each_device(|| {
        in_every_mix!(adds_after);
    });
}

#[test]
fn sums_with_norms_and_their_norms_are_within_their_bounds() {
    on_each_device(|| {
        in_every_mix!(pairs);
    });
}
