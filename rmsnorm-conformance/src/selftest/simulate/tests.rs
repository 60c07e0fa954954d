//! The correct kernel against the definition, and every bug against the correct kernel.

use rmsnorm_spec::reference::{BackwardInputs, ForwardInputs};
use rmsnorm_spec::{
    Backward, CastOrder, DType, Element, Error, Forward, GradReduction, Norm, NormBackend, NormSpec, Rows, Tensor,
    bf16, f16,
};

use super::SimulatedBackend;
use crate::Arithmetic;
use crate::case::Kind;
use crate::judge::Verdict;
use crate::judge::bounds::{Mode, Model, Statistics};
use crate::selftest::planted::Bug;
use crate::testing::{BackwardTruth, ForwardTruth, exact, values};

/// One small call: what matters for a bug to show.
#[derive(Clone, Copy)]
struct Scenario {
    rows: usize,
    cols: usize,
    /// Extra elements between rows; tensors differ in it, unless it is 0.
    pad: usize,
    weight_offset: f32,
    cast_order: CastOrder,
    /// The magnitude of x and of the residual.
    x_scale: f32,
    /// The magnitude of weight, bias, dy and dresidual_out.
    gain: f32,
    has_nan: bool,
}

const PLAIN: Scenario = Scenario {
    rows: 70,
    cols: 33,
    pad: 0,
    weight_offset: 0.0,
    cast_order: CastOrder::AtStore,
    x_scale: 1.0,
    gain: 1.0,
    has_nan: false,
};

const SCENARIOS: [Scenario; 6] = [
    Scenario { pad: 1, weight_offset: 1.0, ..PLAIN },
    // The variance is as small as eps.
    Scenario { x_scale: 1e-3, ..PLAIN },
    Scenario { cast_order: CastOrder::BeforeWeight, ..PLAIN },
    // Results are subnormal in f16.
    Scenario { gain: 1e-3, ..PLAIN },
    Scenario { has_nan: true, ..PLAIN },
    Scenario { rows: 0, ..PLAIN },
];

/// The tensors of a call in one of the three forms.
#[derive(Clone)]
struct Tensors<T, W, R> {
    spec: NormSpec,
    pad: usize,
    x: Vec<T>,
    /// Backward's `x` is of the residual stream's dtype.
    normalized: Vec<R>,
    residual: Vec<R>,
    weight: Vec<W>,
    bias: Vec<W>,
    dy: Vec<T>,
    dresidual_out: Vec<R>,
    y: Vec<T>,
    residual_out: Vec<R>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
    dx: Vec<T>,
    dweight: Vec<W>,
    dbias: Vec<W>,
    workspace: Vec<f32>,
}

/// Between -scale and scale, the same for the same seed and index.
fn uniform<E: Element>(seed: u64, len: usize, scale: f32) -> Vec<E> {
    values::<f32>(seed, len).into_iter().map(|value| E::from_f32(value / 2.0 * scale)).collect()
}

fn poisoned<E: Element>(len: usize) -> Vec<E> {
    vec![E::from_f32(f32::NAN); len]
}

impl<T: Element, W: Element, R: Element> Tensors<T, W, R> {
    fn new(norm: Norm, scenario: &Scenario) -> Self {
        let Scenario { rows, cols, pad, x_scale, gain, .. } = *scenario;
        let spec = NormSpec { norm, ..NormSpec::rms(rows, cols, 1e-6) };
        let len = |pads: usize| rows * (cols + pads * pad);
        let mut tensors = Tensors {
            spec: spec.weight_offset(scenario.weight_offset).cast_order(scenario.cast_order),
            pad,
            x: uniform(1, len(1), x_scale),
            normalized: uniform(2, len(1), x_scale),
            residual: uniform(3, len(2), x_scale),
            weight: uniform(4, cols, gain),
            bias: uniform(5, cols, gain),
            dy: uniform(6, len(2), gain),
            dresidual_out: uniform(7, len(3), gain),
            y: poisoned(len(3)),
            residual_out: poisoned(len(4)),
            mean: poisoned(rows),
            rstd: poisoned(rows),
            dx: poisoned(len(4)),
            dweight: poisoned(cols),
            dbias: poisoned(cols),
            workspace: poisoned(rows * cols * 2),
        };
        if scenario.has_nan {
            tensors.x[cols] = T::from_f32(f32::NAN);
            tensors.normalized[cols] = R::from_f32(f32::NAN);
        }
        tensors
    }

    fn run(&mut self, backend: &SimulatedBackend, kind: Kind) -> Result<(), Error> {
        match kind {
            Kind::Forward | Kind::EndToEnd => self.forward(backend),
            Kind::ForwardInPlace => self.forward_in_place(backend),
            Kind::Backward => self.backward(backend),
        }
    }

    fn forward(&mut self, backend: &SimulatedBackend) -> Result<(), Error> {
        let stride = |pads| self.spec.cols + pads * self.pad;
        let (x, y) = (Rows::strided(&self.x[..], stride(1)), Rows::strided(&mut self.y[..], stride(3)));
        let args = Forward::<SimulatedBackend, T>::new(x, y).weight_dtype::<W>().residual_dtype::<R>();
        let args = args.weight(&self.weight).bias(&self.bias).rstd(&mut self.rstd);
        let args = args.residual(Rows::strided(&self.residual[..], stride(2)));
        let mut args = args.residual_out(Rows::strided(&mut self.residual_out[..], stride(4)));
        args.mean = (self.spec.norm == Norm::Layer).then_some(self.mean.as_mut_slice());
        backend.forward(&self.spec, args)
    }

    fn forward_in_place(&mut self, backend: &SimulatedBackend) -> Result<(), Error> {
        let stride = |pads| self.spec.cols + pads * self.pad;
        let args = Forward::<SimulatedBackend, T>::in_place(Rows::strided(&mut self.x[..], stride(1)));
        let args = args.weight_dtype::<W>().residual_dtype::<R>();
        let args = args.weight(&self.weight).bias(&self.bias).rstd(&mut self.rstd);
        let mut args = args.residual_in_place(Rows::strided(&mut self.residual[..], stride(2)));
        args.mean = (self.spec.norm == Norm::Layer).then_some(self.mean.as_mut_slice());
        backend.forward(&self.spec, args)
    }

    /// From statistics that fit the data roughly: the backward pass takes them as they are.
    fn backward(&mut self, backend: &SimulatedBackend) -> Result<(), Error> {
        let stride = |pads| self.spec.cols + pads * self.pad;
        self.mean = uniform(8, self.spec.rows, 0.1);
        self.rstd = uniform::<f32>(9, self.spec.rows, 0.1).iter().map(|delta| 1.7 + delta).collect();
        let (dy, x) = (Rows::strided(&self.dy[..], stride(2)), Rows::strided(&self.normalized[..], stride(1)));
        let dx = Rows::strided(&mut self.dx[..], stride(4));
        let args = Backward::<SimulatedBackend, T, W, R>::mixed(dy, x, &self.rstd, dx);
        let args = args.weight(&self.weight).dresidual_out(Rows::strided(&self.dresidual_out[..], stride(3)));
        let mut args = args.dweight(&mut self.dweight).dbias(&mut self.dbias).workspace(&mut self.workspace);
        args.mean = (self.spec.norm == Norm::Layer).then_some(self.mean.as_slice());
        backend.backward(&self.spec, args)
    }

    /// Everything a call may have written, gaps between rows included, but the workspace.
    fn bits(&self) -> Vec<u32> {
        fn of<E: Element>(elements: &[E]) -> impl Iterator<Item = u32> {
            elements.iter().map(|element| element.bits())
        }
        let activations = of(&self.x).chain(of(&self.y)).chain(of(&self.dx));
        let stream = of(&self.residual).chain(of(&self.residual_out));
        let vectors = of(&self.mean).chain(of(&self.rstd)).chain(of(&self.dweight)).chain(of(&self.dbias));
        activations.chain(stream).chain(vectors).collect()
    }
}

/// The bits after a first call, then those of a second one with the same inputs on the same backend.
fn bits_of_two_calls<T: Element, W: Element, R: Element>(
    bug: Option<Bug>,
    norm: Norm,
    kind: Kind,
    scenario: &Scenario,
) -> Vec<u32> {
    let backend = SimulatedBackend::new(bug);
    let mut bits = Vec::new();
    for _ in 0..2 {
        let mut tensors = Tensors::<T, W, R>::new(norm, scenario);
        tensors.run(&backend, kind).unwrap();
        bits.extend(tensors.bits());
    }
    bits
}

fn changes_a_bit<T: Element, W: Element, R: Element>(bug: Bug, norm: Norm, kind: Kind) -> bool {
    SCENARIOS.iter().any(|scenario| {
        bits_of_two_calls::<T, W, R>(Some(bug), norm, kind, scenario)
            != bits_of_two_calls::<T, W, R>(None, norm, kind, scenario)
    })
}

fn shows(bug: Bug, norm: Norm, kind: Kind) -> bool {
    changes_a_bit::<f32, f32, f32>(bug, norm, kind)
        || changes_a_bit::<f16, f16, f16>(bug, norm, kind)
        || changes_a_bit::<bf16, f32, f32>(bug, norm, kind)
}

#[test]
fn every_bug_changes_a_result_wherever_it_applies() {
    let mut silent = Vec::new();
    for &bug in Bug::ALL {
        for norm in Norm::ALL {
            for kind in Kind::CALLS {
                if bug.applies_to(norm, kind) && !shows(bug, norm, kind) {
                    silent.push((bug.name(), norm, kind));
                }
            }
        }
    }
    assert!(silent.is_empty(), "planted without effect: {silent:?}");
}

#[test]
fn bugs_outside_their_scope_change_nothing() {
    for &bug in Bug::ALL {
        for norm in Norm::ALL {
            for kind in Kind::CALLS {
                let shows = changes_a_bit::<bf16, bf16, bf16>(bug, norm, kind);
                assert!(bug.applies_to(norm, kind) || !shows, "{bug} shows in {} {}", norm.name(), kind.name());
            }
        }
    }
}

#[test]
fn bug_names_are_unique_and_every_bug_applies_somewhere() {
    let mut names: Vec<&str> = Bug::ALL.iter().map(|bug| bug.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Bug::ALL.len());
    assert!(names.len() >= 90, "bugs were lost: {}", names.len());
    for bug in Bug::ALL {
        assert!(Norm::ALL.iter().any(|&norm| Kind::CALLS.iter().any(|&kind| bug.applies_to(norm, kind))), "{bug}");
    }
}

const MODEL: Model<'static> = Model { arithmetic: &Arithmetic::IEEE, mode: Mode::Worst };

fn assert_pass(tensor: Tensor, verdict: &Verdict) {
    assert!(verdict.is_pass(), "{tensor}: {verdict:?}");
}

/// Shapes that leave lanes and blocks empty, fill them exactly, and overfill them.
const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 7), (64, 32), (65, 33), (200, 96), (5000, 5)];

#[test]
fn correct_forward_matches_reference() {
    for norm in Norm::ALL {
        for (rows, cols) in SHAPES {
            let scenario = Scenario { rows, cols, weight_offset: 1.0, ..PLAIN };
            let mut t = Tensors::<f32, f32, f32>::new(norm, &scenario);
            t.forward(&SimulatedBackend::new(None)).unwrap();
            let (x, residual, weight, bias) = (exact(&t.x), exact(&t.residual), exact(&t.weight), exact(&t.bias));
            let inputs = ForwardInputs {
                x: &x,
                residual: Some((&residual, DType::F32)),
                weight: Some(&weight),
                bias: Some(&bias),
            };
            let truth = ForwardTruth::new(&t.spec, inputs, DType::F32, None, MODEL);
            let outputs = [
                (Tensor::Y, &t.y),
                (Tensor::Rstd, &t.rstd),
                (Tensor::ResidualOut, &t.residual_out),
                (Tensor::Mean, &t.mean),
            ];
            // The last is layer norm's.
            for (tensor, got) in &outputs[..if norm == Norm::Layer { 4 } else { 3 }] {
                assert_pass(*tensor, &truth.judge(*tensor, got));
            }
        }
    }
}

#[test]
fn correct_backward_matches_reference() {
    for norm in Norm::ALL {
        for (rows, cols) in SHAPES {
            let scenario = Scenario { rows, cols, weight_offset: 1.0, ..PLAIN };
            let mut t = Tensors::<f32, f32, f32>::new(norm, &scenario);
            t.backward(&SimulatedBackend::new(None)).unwrap();
            let mean = if norm == Norm::Rms { vec![0.0; rows] } else { exact(&t.mean) };
            let (dy, x, weight) = (exact(&t.dy), exact(&t.normalized), exact(&t.weight));
            let (rstd, dresidual_out) = (exact(&t.rstd), exact(&t.dresidual_out));
            let inputs = BackwardInputs {
                dy: &dy,
                x: &x,
                weight: Some(&weight),
                mean: &mean,
                rstd: &rstd,
                dresidual_out: Some(&dresidual_out),
            };
            let truth = BackwardTruth::new(&t.spec, &inputs, Statistics::Given, GradReduction::Partials, MODEL);
            for (tensor, got) in [(Tensor::Dx, &t.dx), (Tensor::Dweight, &t.dweight), (Tensor::Dbias, &t.dbias)] {
                assert_pass(tensor, &truth.judge(tensor, got));
            }
        }
    }
}

#[test]
fn in_place_form_has_the_bits_of_the_other_one() {
    for norm in Norm::ALL {
        let backend = SimulatedBackend::new(None);
        let mut apart = Tensors::<bf16, f32, f32>::new(norm, &PLAIN);
        let mut over = apart.clone();
        apart.forward(&backend).unwrap();
        over.forward_in_place(&backend).unwrap();
        assert_eq!(apart.y, over.x);
        assert_eq!(apart.residual_out, over.residual);
        assert_eq!(apart.rstd, over.rstd);
    }
}

#[test]
fn correct_kernel_writes_every_result_and_no_gap() {
    for scenario in [Scenario { pad: 1, ..PLAIN }, Scenario { rows: 0, ..PLAIN }] {
        let mut t = Tensors::<f16, f16, f32>::new(Norm::Layer, &scenario);
        let backend = SimulatedBackend::new(None);
        t.forward(&backend).unwrap();
        t.backward(&backend).unwrap();
        for (matrix, stride) in [(exact(&t.y), 36), (exact(&t.residual_out), 37), (exact(&t.dx), 37)] {
            let is_poison = |(index, value): (usize, &f64)| value.is_nan() == (index % stride >= scenario.cols);
            assert!(matrix.iter().enumerate().all(is_poison));
        }
        assert!(exact(&t.dweight).iter().chain(&exact(&t.dbias)).all(|value| !value.is_nan()));
    }
}

#[test]
fn workspace_of_the_callers_changes_no_bit() {
    let backend = SimulatedBackend::new(None);
    let mut given = Tensors::<f32, f32, f32>::new(Norm::Rms, &PLAIN);
    let mut absent = given.clone();
    given.backward(&backend).unwrap();
    let args = Backward::<SimulatedBackend, f32>::new(&absent.dy, &absent.normalized, &given.rstd, &mut absent.dx);
    let args = args.weight(&absent.weight).dweight(&mut absent.dweight).dresidual_out(&absent.dresidual_out);
    backend.backward(&absent.spec, args).unwrap();
    assert_eq!(given.dweight, absent.dweight);
    assert_eq!(given.dx, absent.dx);
}
