//! Gates, and the roundings beside them: results have the same bits on every instruction set, for
//! every number of threads and place in memory, and are close to the reference. Codes are those of
//! the gated norm.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use rmsnorm_conformance::testing::{exact, values};
use rmsnorm_cpu::{Backward, CpuBackend, Forward, Isa, QuantizedForward};
use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind, ScaleRounding};
use rmsnorm_spec::reference::{self, BackwardInputs, ForwardInputs};
use rmsnorm_spec::{Activation, CastOrder, DType, Element, F8E4M3, Norm, NormSpec, Rows, Slot, Tensor, bf16, f16};

/// A call without its shape.
#[derive(Clone, Copy, Debug)]
struct Setup {
    norm: Norm,
    slot: Slot,
    activation: Activation,
    cast_order: CastOrder,
    /// With a bias and, if the gate comes after the norm and the weight does, too, a residual.
    is_full: bool,
}

const SETUPS: [Setup; 7] = {
    let full = Setup {
        norm: Norm::Layer,
        slot: Slot::After,
        activation: Activation::Silu,
        cast_order: CastOrder::BeforeWeight,
        is_full: true,
    };
    let plain = Setup { norm: Norm::Rms, cast_order: CastOrder::AtStore, is_full: false, ..full };
    [
        full,
        Setup { activation: Activation::Sigmoid, ..plain },
        Setup { slot: Slot::Before, activation: Activation::Sigmoid, ..full },
        Setup { slot: Slot::Before, ..plain },
        Setup { cast_order: CastOrder::RstdFirst, ..full },
        Setup { cast_order: CastOrder::WeightFirst, ..full },
        Setup { cast_order: CastOrder::WeightFirst, ..plain },
    ]
};

impl Setup {
    fn spec(self, (rows, cols): (usize, usize)) -> NormSpec {
        let spec = NormSpec::new(self.norm, rows, cols, 1e-5).weight_offset(0.5).cast_order(self.cast_order);
        match self.slot {
            Slot::Before => spec.gate_before(self.activation),
            Slot::After => spec.gate_after(self.activation),
        }
    }

    fn has_residual(self) -> bool {
        self.is_full && self.slot == Slot::After && !self.cast_order.is_weight_first()
    }
}

/// The inputs of a call, dense.
struct Inputs<T, W> {
    x: Vec<T>,
    residual: Vec<T>,
    gate: Vec<T>,
    dy: Vec<T>,
    weight: Vec<W>,
    bias: Vec<W>,
}

impl<T: Element, W: Element> Inputs<T, W> {
    fn new((rows, cols): (usize, usize)) -> Self {
        let [x, residual, gate, dy] = [1, 2, 3, 4].map(|seed| values(seed, rows * cols));
        let gate = gate.into_iter().map(|z: T| T::from_f32(4.0 * z.to_f32())).collect();
        Inputs { x, residual, gate, dy, weight: values(5, cols), bias: values(6, cols) }
    }
}

/// The outputs of forward, in place or not, and of backward.
#[derive(Debug, PartialEq)]
struct Outputs<T, W> {
    y: Vec<T>,
    h: Vec<T>,
    statistics: [Vec<f32>; 2],
    dx: Vec<T>,
    dgate: Vec<T>,
    dweight: Vec<W>,
    dbias: Vec<W>,
}

/// Copies dense rows into a matrix with `pad` elements after each row, from `pad` on.
fn spread<E: Element>(dense: &[E], cols: usize, pad: usize) -> Vec<E> {
    let mut all = vec![E::from_f32(9.0); pad];
    for row in dense.chunks_exact(cols) {
        all.extend_from_slice(row);
        all.extend(std::iter::repeat_n(E::from_f32(9.0), pad));
    }
    all
}

fn gathered<E: Element>(all: &[E], cols: usize, pad: usize) -> Vec<E> {
    all[pad..].chunks_exact(cols + pad).flat_map(|row| &row[..cols]).copied().collect()
}

impl<T: Element, W: Element> Outputs<T, W> {
    fn of(
        backend: &CpuBackend,
        inputs: &Inputs<T, W>,
        setup: Setup,
        (rows, cols): (usize, usize),
        (pad, in_place): (usize, bool),
    ) -> Self {
        let spec = setup.spec((rows, cols));
        let [x, gate, dy] = [&inputs.x, &inputs.gate, &inputs.dy].map(|dense| spread(dense, cols, pad));
        let [mut h, mut y] = [&inputs.residual, &inputs.x].map(|dense| spread(dense, cols, pad));
        let residual = h.clone();
        let (mut mean, mut rstd) = (vec![0.0; rows], vec![0.0; rows]);
        fn at<E>(all: &[E], cols: usize, pad: usize) -> Rows<&[E]> {
            Rows::strided(&all[pad..], cols + pad)
        }
        fn at_mut<E>(all: &mut [E], cols: usize, pad: usize) -> Rows<&mut [E]> {
            Rows::strided(&mut all[pad..], cols + pad)
        }
        let args = match in_place {
            true => Forward::in_place(at_mut(&mut y, cols, pad)),
            false => Forward::new(at(&x, cols, pad), at_mut(&mut y, cols, pad)),
        };
        let mut args = args.weight_dtype::<W>().weight(&inputs.weight).gate(at(&gate, cols, pad)).rstd(&mut rstd);
        if setup.norm == Norm::Layer {
            args = args.mean(&mut mean);
        }
        if setup.is_full {
            args = args.bias(&inputs.bias);
        }
        if setup.has_residual() {
            args = match in_place {
                true => args.residual_in_place(at_mut(&mut h, cols, pad)),
                false => args.residual(at(&residual, cols, pad)).residual_out(at_mut(&mut h, cols, pad)),
            };
        }
        backend.forward(&spec, args).unwrap();

        let [mut dx, mut dgate] = [(); 2].map(|()| vec![T::from_f32(9.0); x.len()]);
        let (mut dweight, mut dbias) = (vec![W::from_f32(9.0); cols], vec![W::from_f32(9.0); cols]);
        let normalized = if setup.has_residual() { &h } else { &x };
        let (dy, normalized) = (at(&dy, cols, pad), at(normalized, cols, pad));
        let args = Backward::<T, W>::mixed(dy, normalized, &rstd, at_mut(&mut dx, cols, pad));
        let args = args.weight(&inputs.weight).gate(at(&gate, cols, pad)).dgate(at_mut(&mut dgate, cols, pad));
        let mut args = args.dweight(&mut dweight).dbias(&mut dbias);
        if setup.norm == Norm::Layer {
            args = args.mean(&mean);
        }
        if setup.is_full && setup.slot == Slot::After {
            args = args.bias(&inputs.bias);
        }
        backend.backward(&spec, args).unwrap();
        let [y, h, dx, dgate] = [y, h, dx, dgate].map(|all| gathered(&all, cols, pad));
        Outputs { y, h, statistics: [mean, rstd], dx, dgate, dweight, dbias }
    }

    /// Compares with the reference. An output of 16 bits may be one rounding off. With two or three
    /// roundings before it, `y` may be four off.
    fn assert_near(&self, inputs: &Inputs<T, W>, setup: Setup, shape: (usize, usize)) {
        let spec = setup.spec(shape);
        let [x, residual, gate, dy] = [&inputs.x, &inputs.residual, &inputs.gate, &inputs.dy].map(|of| exact(of));
        let (weight, bias) = (exact(&inputs.weight), exact(&inputs.bias));
        let (activation, is_before) = (setup.activation, setup.slot == Slot::Before);
        let is_first = setup.cast_order.is_weight_first();
        let weights = (!is_first).then_some(&weight[..]);
        let h = match (is_before, is_first) {
            (true, _) => reference::gated(activation, &x, &gate),
            (false, true) => reference::weighted(&spec, &x, &weight, T::DTYPE),
            (false, false) => x.clone(),
        };
        let out = reference::forward(
            &spec,
            &ForwardInputs {
                x: &h,
                residual: setup.has_residual().then_some((&residual, T::DTYPE)),
                weight: weights,
                bias: setup.is_full.then_some(&bias),
            },
        );
        let (gradient, of_gate) = match is_before {
            true => (dy, None),
            false => {
                let (gradient, of_gate) = reference::gated_backward(activation, &dy, &out.y, &gate);
                (gradient, Some(of_gate))
            }
        };
        let (mean, rstd) = (&out.mean[..], &out.rstd[..]);
        let given = BackwardInputs { dy: &gradient, x: &out.h, weight: weights, mean, rstd, dresidual_out: None };
        let norm = reference::backward(&spec, &given);
        let (dx, dgate) = match of_gate {
            Some(of_gate) => (norm.dx, of_gate),
            None => reference::gated_backward(activation, &norm.dx, &x, &gate),
        };
        let (dx, dweight) = match is_first {
            true => reference::weighted_backward(&spec, &dx, &x, &weight),
            false => (dx, norm.dweight),
        };
        // The sum with the bias may cancel what was rounded before it.
        let sizes = out.y.iter().enumerate().map(|(i, v)| {
            let bias = if setup.is_full { 2.0 * bias[i % shape.1].abs() } else { 0.0 };
            (v.abs() + bias) * if is_before { 1.0 } else { reference::activate(activation, gate[i]).abs() }
        });
        let sizes: Vec<f64> = sizes.collect();
        let y = if is_before { out.y } else { reference::gated(activation, &out.y, &gate) };
        fn unit(dtype: DType) -> f64 {
            match dtype {
                DType::F32 => 0.0,
                DType::F16 => 2f64.powi(-11),
                DType::Bf16 => 2f64.powi(-8),
            }
        }
        fn near<E: Element>(name: &str, got: &[E], expected: &[f64], sizes: &[f64], slack: f64) {
            for (i, ((got, expected), size)) in got.iter().zip(expected).zip(sizes).enumerate() {
                let got = f64::from(got.to_f32());
                let most = unit(E::DTYPE) * size.abs() + slack * (1.0 + expected.abs());
                assert!((got - expected).abs() <= most, "{name} {i}: {got}, not {expected}");
            }
        }
        let (slack, of_sums) = (2e-5, 2e-5 * (shape.0 as f64).sqrt());
        match setup.cast_order {
            CastOrder::AtStore | CastOrder::WeightFirst => near("y", &self.y, &y, &y, slack),
            CastOrder::BeforeWeight | CastOrder::RstdFirst => {
                let sizes: Vec<f64> = sizes.iter().map(|size| 4.0 * size).collect();
                near("y", &self.y, &y, &sizes, slack);
            }
        }
        near("dx", &self.dx, &dx, &dx, slack);
        near("dgate", &self.dgate, &dgate, &dgate, slack);
        near("dweight", &self.dweight, &dweight, &dweight, of_sums);
        near("dbias", &self.dbias, &norm.dbias, &norm.dbias, of_sums);
    }
}

/// Rows that fit the stack and rows that do not, with whole groups of lanes and short ends, and a
/// matrix that outgrows the cache.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (9, 33), (20, 128), (3, 4096), (3, 4097), (2, 9001), (70, 300), (2100, 1021)];

fn same_bits<T: Element, W: Element>() {
    for shape in SHAPES {
        let inputs = Inputs::<T, W>::new(shape);
        for setup in SETUPS {
            let portable = CpuBackend::with_isa_and_threads(Isa::Portable, 1).unwrap();
            let expected = Outputs::of(&portable, &inputs, setup, shape, (0, false));
            expected.assert_near(&inputs, setup, shape);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                for (threads, pad, in_place) in [(1, 3, true), (3, 0, false), (2, 5, false)] {
                    let backend = CpuBackend::with_isa_and_threads(isa, threads).unwrap();
                    let got = Outputs::of(&backend, &inputs, setup, shape, (pad, in_place));
                    assert!(got == expected, "{isa}, {threads} threads, {shape:?}, {setup:?}, pad {pad}, {in_place}");
                }
            }
        }
    }
}

#[test]
fn bits_are_those_of_every_instruction_set_and_place_in_f32() {
    same_bits::<f32, f32>();
}

#[test]
fn bits_are_those_of_every_instruction_set_and_place_in_mixed_dtypes() {
    same_bits::<bf16, f32>();
    same_bits::<f16, f16>();
}

/// Results in new vectors have the bits of the calls that they replace.
#[test]
fn vectors_are_those_of_the_calls() {
    let shape @ (rows, cols) = (9, 33);
    let (backend, inputs) =
        (CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap(), Inputs::<f32, f32>::new(shape));
    for setup in SETUPS.into_iter().filter(|setup| !setup.has_residual()) {
        let expected = Outputs::of(&backend, &inputs, setup, shape, (0, false));
        let spec = setup.spec((rows, cols));
        let given = rmsnorm_cpu::ForwardInputs::new(&inputs.x).weight(&inputs.weight).gate(&inputs.gate);
        let given = if setup.is_full { given.bias(&inputs.bias) } else { given };
        let made = backend.forward_vec(&spec, given, &[Tensor::Rstd]).unwrap();
        assert_eq!((made.y, &made.rstd), (expected.y, &expected.statistics[1]));
        let given = rmsnorm_cpu::BackwardInputs::new(&inputs.dy, &inputs.x, &made.rstd).weight(&inputs.weight);
        let given = if setup.norm == Norm::Layer { given.mean(&expected.statistics[0]) } else { given };
        // dgate of a gate after the norm reads the bias.
        let given = if setup.is_full && setup.slot == Slot::After { given.bias(&inputs.bias) } else { given };
        let made = backend.backward_vec(&spec, given.gate(&inputs.gate), &[Tensor::Dgate, Tensor::Dweight]).unwrap();
        assert_eq!((made.dx, made.dgate, made.dweight), (expected.dx, expected.dgate, expected.dweight));
    }
}

/// Codes of both copies, by scales that are powers of two, are those of the y that forward stores.
#[test]
fn codes_are_those_of_the_gated_norm() {
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Mx { rounding: ScaleRounding::Up });
    for (rows, cols) in [(3, 37), (70, 300), (40, 4100)] {
        let inputs = Inputs::<f32, f32>::new((rows, cols));
        for setup in SETUPS {
            let spec = setup.spec((rows, cols));
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                let backend = CpuBackend::with_isa_and_threads(isa, 2).unwrap();
                let y = Outputs::of(&backend, &inputs, setup, (rows, cols), (0, false)).y;
                let zeros = || vec![F8E4M3::from_bits(0); rows * cols];
                let (mut codes, mut columnwise, mut stored) = (zeros(), zeros(), vec![0.0f32; rows * cols]);
                let (mut mean, mut rstd) = (vec![0.0; rows], vec![0.0; rows]);
                let mut scales = vec![0u8; quant.scales_len(rows, cols).unwrap()];
                let mut of_columns = vec![0u8; quant.columnwise().scales_len(cols, rows).unwrap()];
                let args = QuantizedForward::new(quant, &inputs.x, &mut codes).scales_e8m0(&mut scales);
                let args = args.codes_columnwise(&mut columnwise).scales_columnwise_e8m0(&mut of_columns);
                let args = args.weight(&inputs.weight).gate(&inputs.gate).y(&mut stored).rstd(&mut rstd);
                let args = if setup.norm == Norm::Layer { args.mean(&mut mean) } else { args };
                let args = if setup.is_full { args.bias(&inputs.bias) } else { args };
                let args = if setup.has_residual() { args.residual(&inputs.residual) } else { args };
                backend.quantized_forward(&spec, args).unwrap();
                assert!(stored == y, "{isa} {setup:?}");
                let v = exact(&y);
                let transposed: Vec<f64> = (0..rows * cols).map(|i| v[i % rows * cols + i / rows]).collect();
                for (what, got, v, cols) in [("rows", codes, v, cols), ("columns", columnwise, transposed, rows)] {
                    let expected = reference::quantize(&quant, cols, &v, DType::F32, None).codes;
                    let got: Vec<u8> = got.iter().map(F8E4M3::to_bits).collect();
                    assert!(got == expected, "{what}: {isa} {setup:?}");
                }
            }
        }
    }
}
