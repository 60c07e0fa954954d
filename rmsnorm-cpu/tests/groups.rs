//! Groups of columns: a call has the bits of one call per group, on the columns of the group.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use rmsnorm_conformance::testing::{exact, values};
use rmsnorm_cpu::{Backward, CpuBackend, Forward, Isa, QuantizedForward};
use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind, ScaleRounding};
use rmsnorm_spec::{Activation, DType, Element, F8E4M3, Norm, NormSpec, Rows, Slot, bf16, reference};

const ROWS: usize = 70;
const WIDTH: usize = 37;
const GROUPS: usize = 3;
const COLS: usize = GROUPS * WIDTH;

/// All tensors, as dense rows.
#[derive(Clone)]
struct Tensors<T> {
    x: Vec<T>,
    /// The residual, which its sum overwrites.
    residual: Vec<T>,
    gate: Vec<T>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    y: Vec<T>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
    dx: Vec<T>,
    dgate: Vec<T>,
    dweight: Vec<f32>,
    dbias: Vec<f32>,
}

impl<T: Element> Tensors<T> {
    fn new() -> Self {
        let [x, residual, gate, y] = [1, 2, 3, 4].map(|seed| values(seed, ROWS * COLS));
        let (dx, dgate) = (y.clone(), y.clone());
        let [weight, bias, dweight, dbias] = [5, 6, 7, 8].map(|seed| values(seed, COLS));
        let (mean, rstd) = (vec![0.0; ROWS * GROUPS], vec![0.0; ROWS * GROUPS]);
        Tensors { x, residual, gate, weight, bias, y, mean, rstd, dx, dgate, dweight, dbias }
    }

    /// Forward, in place, and backward of the `x` that was there, on the columns from `first` on.
    fn run(&mut self, backend: &CpuBackend, spec: &NormSpec, first: usize) {
        let (cols, slot) = (spec.cols, spec.gate.map(|gate| gate.slot));
        let (weight, bias) = (&self.weight[first..][..cols], &self.bias[first..][..cols]);
        fn at<E>(all: &[E], first: usize) -> Rows<&[E]> {
            Rows::strided(&all[first..], COLS)
        }
        fn at_mut<E>(all: &mut [E], first: usize) -> Rows<&mut [E]> {
            Rows::strided(&mut all[first..], COLS)
        }
        self.y.clone_from(&self.x);
        let args = Forward::<T>::in_place(at_mut(&mut self.y, first)).weight_dtype::<f32>();
        let mut args = args.weight(weight).bias(bias).rstd(&mut self.rstd);
        if spec.norm == Norm::Layer {
            args = args.mean(&mut self.mean);
        }
        if slot.is_some() {
            args = args.gate(at(&self.gate, first));
        }
        if slot != Some(Slot::Before) {
            args = args.residual_in_place(at_mut(&mut self.residual, first));
        }
        backend.forward(spec, args).unwrap();

        let (dweight, dbias) = (&mut self.dweight[first..][..cols], &mut self.dbias[first..][..cols]);
        let normalized = if slot == Some(Slot::Before) { &self.x } else { &self.residual };
        let (dy, h) = (at(&self.y, first), at(normalized, first));
        let args = Backward::<T, f32>::mixed(dy, h, &self.rstd, at_mut(&mut self.dx, first)).weight(weight);
        let mut args = args.dweight_sum(dweight).dbias_sum(dbias).accumulate();
        if spec.norm == Norm::Layer {
            args = args.mean(&self.mean);
        }
        if slot.is_some() {
            args = args.gate(at(&self.gate, first)).dgate(at_mut(&mut self.dgate, first));
        }
        if slot == Some(Slot::After) {
            args = args.bias(bias);
        }
        backend.backward(spec, args).unwrap();
    }
}

fn groups_are_calls<T: Element>() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with_isa_and_threads(isa, 2).unwrap();
        for norm in Norm::ALL {
            let plain = NormSpec::new(norm, ROWS, COLS, 1e-5).weight_offset(0.5);
            for spec in [plain, plain.gate_after(Activation::Silu), plain.gate_before(Activation::Sigmoid)] {
                let given = Tensors::<T>::new();
                let mut whole = given.clone();
                whole.run(&backend, &spec.groups(GROUPS), 0);
                for group in 0..GROUPS {
                    let first = group * WIDTH;
                    let mut alone = given.clone();
                    (alone.mean, alone.rstd) = (vec![0.0; ROWS], vec![0.0; ROWS]);
                    alone.run(&backend, &spec.cols(WIDTH), first);
                    let matrices = |t: &Tensors<T>| {
                        let all = [&t.y, &t.residual, &t.dx, &t.dgate];
                        all.map(|all| {
                            all.chunks(COLS).flat_map(|row| row[first..][..WIDTH].to_vec()).collect::<Vec<_>>()
                        })
                    };
                    assert!(matrices(&whole) == matrices(&alone), "group {group}: {isa} {spec:?}");
                    let of_group = |all: &[f32]| all.chunks(GROUPS).map(|row| row[group]).collect::<Vec<_>>();
                    assert_eq!((of_group(&whole.mean), of_group(&whole.rstd)), (alone.mean, alone.rstd));
                    for (all, alone) in [(&whole.dweight, &alone.dweight), (&whole.dbias, &alone.dbias)] {
                        assert_eq!(all[first..][..WIDTH], alone[first..][..WIDTH], "group {group}: {isa} {spec:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_call_has_the_bits_of_a_call_per_group() {
    groups_are_calls::<f32>();
    groups_are_calls::<bf16>();
}

/// So many rows that several threads share them, at rows of the call and not within one.
#[test]
fn bits_do_not_depend_on_threads() {
    const MANY: usize = 10_001;
    let (x, weight): (Vec<f32>, Vec<f32>) = (values(1, MANY * COLS), values(2, COLS));
    for spec in [NormSpec::rms(MANY, COLS, 1e-5), NormSpec::layer(MANY, COLS, 1e-5).gate_after(Activation::Silu)] {
        let results = [1, 2, 5].map(|threads| {
            let backend = CpuBackend::with_isa_and_threads(Isa::Portable, threads).unwrap();
            let (mut y, mut dx, mut dgate) = (x.clone(), x.clone(), x.clone());
            let (mut mean, mut rstd, mut dweight) =
                (vec![0.0; MANY * GROUPS], vec![0.0; MANY * GROUPS], weight.clone());
            let args = Forward::new(&x, &mut y).weight(&weight).rstd(&mut rstd);
            let args = if spec.norm == Norm::Layer { args.mean(&mut mean).gate(&x) } else { args };
            backend.forward(&spec.groups(GROUPS), args).unwrap();
            let args = Backward::new(&y, &x, &rstd, &mut dx).weight(&weight).dweight(&mut dweight);
            let args = if spec.norm == Norm::Layer { args.mean(&mean).gate(&x).dgate(&mut dgate) } else { args };
            backend.backward(&spec.groups(GROUPS), args).unwrap();
            [y, mean, rstd, dx, dgate, dweight]
        });
        assert!(results[1..].iter().all(|result| *result == results[0]), "{spec:?}");
    }
}

/// Codes of both copies, whose blocks lie across groups, are those of the y that forward stores.
#[test]
fn codes_are_those_of_all_groups() {
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Mx { rounding: ScaleRounding::Up });
    let given = Tensors::<f32>::new();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with_isa_and_threads(isa, 2).unwrap();
        for norm in Norm::ALL {
            let plain = NormSpec::new(norm, ROWS, COLS, 1e-5).weight_offset(0.5).groups(GROUPS);
            for spec in [plain, plain.gate_after(Activation::Silu), plain.gate_before(Activation::Sigmoid)] {
                let (is_layer, is_gated) = (norm == Norm::Layer, spec.gate.is_some());
                let mut expected = given.clone();
                let args = Forward::new(&given.x, &mut expected.y).weight(&given.weight).bias(&given.bias);
                let args = if is_gated { args.gate(&given.gate) } else { args }.rstd(&mut expected.rstd);
                backend.forward(&spec, if is_layer { args.mean(&mut expected.mean) } else { args }).unwrap();

                let mut got = given.clone();
                let mut codes = [(); 2].map(|()| vec![F8E4M3::from_bits(0); ROWS * COLS]);
                let mut scales = vec![0u8; quant.scales_len(ROWS, COLS).unwrap()];
                let mut of_columns = vec![0u8; quant.columnwise().scales_len(COLS, ROWS).unwrap()];
                let [rowwise, columnwise] = &mut codes;
                let args = QuantizedForward::new(quant, &given.x, rowwise).scales_e8m0(&mut scales);
                let args = args.codes_columnwise(columnwise).scales_columnwise_e8m0(&mut of_columns);
                let args = args.weight(&given.weight).bias(&given.bias).y(&mut got.y);
                let args = if is_gated { args.gate(&given.gate) } else { args }.rstd(&mut got.rstd);
                backend.quantized_forward(&spec, if is_layer { args.mean(&mut got.mean) } else { args }).unwrap();

                assert!(got.y == expected.y, "{isa} {spec:?}");
                assert_eq!((got.mean, got.rstd), (expected.mean, expected.rstd));
                let v = exact(&got.y);
                let transposed: Vec<f64> = (0..ROWS * COLS).map(|i| v[i % ROWS * COLS + i / ROWS]).collect();
                for (codes, (v, cols)) in codes.iter().zip([(v, COLS), (transposed, ROWS)]) {
                    let expected = reference::quantize(&quant, cols, &v, DType::F32, None).codes;
                    assert!(codes.iter().map(F8E4M3::to_bits).eq(expected), "{isa} {spec:?}");
                }
            }
        }
    }
}
