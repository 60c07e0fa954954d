//! Results have the same bits on every instruction set, for any number of threads, in any
//! floating-point mode of the caller, and the result of a row does not depend on other rows.
//!
//! The portable code on one thread is the reference. It is itself compared with the f64 reference,
//! so that not all can be wrong in the same way. Calls are split over threads from 2 MiB moved, and
//! outputs bypass the cache from 8 MiB.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use bytemuck::cast_slice;
use rmsnorm_conformance::Arithmetic;
use rmsnorm_conformance::bounds::{Mode, Model, Statistics};
use rmsnorm_conformance::judge::Verdict;
use rmsnorm_conformance::testing::{BackwardTruth, ForwardTruth, exact, value, values};
use rmsnorm_cpu::{Backward, CpuBackend, Forward, Isa};
use rmsnorm_spec::reference::{BackwardInputs, ForwardInputs};
use rmsnorm_spec::{CastOrder, Element, GradReduction, Norm, NormSpec, Rows, Tensor, bf16, f16};

/// The value between rows, and of outputs before a call. No norm of this data gives it.
const UNTOUCHED: f32 = -12345.0;

/// Rows with padding after each row, including the last.
#[derive(Clone)]
struct Matrix<E> {
    data: Vec<E>,
    cols: usize,
    row_stride: usize,
}

impl<E: Element> Matrix<E> {
    fn untouched(rows: usize, cols: usize, padding: usize) -> Self {
        let row_stride = cols + padding;
        Matrix { data: vec![E::from_f32(UNTOUCHED); rows * row_stride], cols, row_stride }
    }

    fn rows(&self) -> Rows<&[E]> {
        Rows::strided(&self.data, self.row_stride)
    }

    fn rows_mut(&mut self) -> Rows<&mut [E]> {
        Rows::strided(&mut self.data, self.row_stride)
    }

    fn random(seed: u64, rows: usize, cols: usize, padding: usize) -> Self {
        let mut matrix = Matrix::untouched(rows, cols, padding);
        for (r, row) in matrix.data.chunks_exact_mut(cols + padding).enumerate() {
            row[..cols].iter_mut().enumerate().for_each(|(col, element)| *element = value(seed, r * cols + col));
        }
        matrix
    }

    fn row(&self, row: usize) -> &[E] {
        &self.data[row * self.row_stride..][..self.cols]
    }

    /// Only these rows, dense.
    fn pick(&self, rows: &[usize]) -> Self {
        let data = rows.iter().flat_map(|&row| self.row(row)).copied().collect();
        Matrix { data, cols: self.cols, row_stride: self.cols }
    }

    /// Only these columns, dense.
    fn cols(&self, cols: &[usize]) -> Self {
        let rows = self.data.chunks_exact(self.row_stride);
        let data = rows.flat_map(|row| cols.iter().map(|&col| row[col])).collect();
        Matrix { data, cols: cols.len(), row_stride: cols.len() }
    }

    fn padding_is_untouched(&self) -> bool {
        let mut padding = self.data.chunks_exact(self.row_stride).flat_map(|row| &row[self.cols..]);
        padding.all(|value| *value == E::from_f32(UNTOUCHED))
    }
}

/// The properties of a call, other than its shape, that select a path through the kernels.
#[derive(Clone, Copy, Debug)]
struct Setup {
    norm: Norm,
    /// residual and residual_out in forward, dresidual_out in backward.
    residual: bool,
    bias: bool,
    cast_order: CastOrder,
}

/// Both norms with and without a residual, on the kernels' short path (no bias, one rounding) and
/// the long one.
const SETUPS: [Setup; 6] = [
    Setup { norm: Norm::Rms, residual: false, bias: false, cast_order: CastOrder::AtStore },
    Setup { norm: Norm::Layer, residual: false, bias: true, cast_order: CastOrder::AtStore },
    Setup { norm: Norm::Rms, residual: true, bias: false, cast_order: CastOrder::AtStore },
    Setup { norm: Norm::Layer, residual: true, bias: true, cast_order: CastOrder::AtStore },
    Setup { norm: Norm::Rms, residual: true, bias: true, cast_order: CastOrder::BeforeWeight },
    Setup { norm: Norm::Layer, residual: false, bias: true, cast_order: CastOrder::RstdFirst },
];

#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    cols: usize,
    /// Whether rows are strided, with a different stride per matrix.
    strided: bool,
}

impl Shape {
    const fn new(rows: usize, cols: usize, strided: bool) -> Self {
        Shape { rows, cols, strided }
    }

    /// A shape with the fewest rows for which outputs bypass the cache.
    fn streaming<T: Element>(cols: usize, strided: bool) -> Self {
        Shape::new((8usize << 20).div_ceil(cols * T::DTYPE.size()), cols, strided)
    }

    fn padding(self, padding: usize) -> usize {
        if self.strided { padding } else { 0 }
    }
}

/// The inputs of all stages. Backward's inputs do not come from forward, so that each is tested
/// separately.
struct Inputs<T, W, R> {
    shape: Shape,
    x: Matrix<T>,
    residual: Matrix<R>,
    dy: Matrix<T>,
    /// Backward's x.
    h: Matrix<R>,
    dresidual_out: Matrix<R>,
    weight: Vec<W>,
    bias: Vec<W>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
}

impl<T: Element, W: Element, R: Element> Inputs<T, W, R> {
    fn new(shape: Shape) -> Self {
        let Shape { rows, cols, .. } = shape;
        Inputs {
            shape,
            x: Matrix::random(1, rows, cols, shape.padding(3)),
            residual: Matrix::random(2, rows, cols, shape.padding(1)),
            dy: Matrix::random(3, rows, cols, shape.padding(2)),
            h: Matrix::random(4, rows, cols, shape.padding(6)),
            dresidual_out: Matrix::random(5, rows, cols, shape.padding(9)),
            weight: values(6, cols),
            bias: values(7, cols),
            mean: values(8, rows),
            rstd: values::<f32>(9, rows).iter().map(|value| value.abs() + 0.5).collect(),
        }
    }

    /// The inputs of only these rows, dense.
    fn pick(&self, rows: &[usize]) -> Self {
        Inputs {
            shape: Shape::new(rows.len(), self.shape.cols, false),
            x: self.x.pick(rows),
            residual: self.residual.pick(rows),
            dy: self.dy.pick(rows),
            h: self.h.pick(rows),
            dresidual_out: self.dresidual_out.pick(rows),
            weight: self.weight.clone(),
            bias: self.bias.clone(),
            mean: rows.iter().map(|&row| self.mean[row]).collect(),
            rstd: rows.iter().map(|&row| self.rstd[row]).collect(),
        }
    }

    fn spec(&self, setup: Setup) -> NormSpec {
        let Shape { rows, cols, .. } = self.shape;
        let Setup { norm, cast_order, .. } = setup;
        NormSpec::new(norm, rows, cols, 1e-5).weight_offset(1.0).cast_order(cast_order)
    }
}

/// The outputs of all stages. Outputs that a setup lacks stay untouched.
struct Outputs<T, W, R> {
    y: Matrix<T>,
    residual_out: Matrix<R>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
    /// x and residual of the in-place form.
    in_place: (Matrix<T>, Matrix<R>),
    dx: Matrix<T>,
    dweight: Vec<W>,
    dbias: Vec<W>,
}

impl<T: Element, W: Element, R: Element> Outputs<T, W, R> {
    fn of(backend: &CpuBackend, inputs: &Inputs<T, W, R>, setup: Setup) -> Self {
        let shape @ Shape { rows, cols, .. } = inputs.shape;
        let mut outputs = Outputs {
            y: Matrix::untouched(rows, cols, shape.padding(5)),
            residual_out: Matrix::untouched(rows, cols, shape.padding(7)),
            mean: vec![UNTOUCHED; rows],
            rstd: vec![UNTOUCHED; rows],
            in_place: (inputs.x.clone(), inputs.residual.clone()),
            dx: Matrix::untouched(rows, cols, shape.padding(4)),
            dweight: vec![W::from_f32(UNTOUCHED); cols],
            dbias: vec![W::from_f32(UNTOUCHED); cols],
        };
        outputs.forward(backend, inputs, setup);
        outputs.forward_in_place(backend, inputs, setup);
        outputs.backward(backend, inputs, setup);
        outputs
    }

    fn forward(&mut self, backend: &CpuBackend, inputs: &Inputs<T, W, R>, setup: Setup) {
        let args = Forward::<T>::new(inputs.x.rows(), self.y.rows_mut());
        let args = args.weight_dtype::<W>().residual_dtype::<R>();
        let mut args = args.weight(&inputs.weight).rstd(&mut self.rstd);
        if setup.norm == Norm::Layer {
            args = args.mean(&mut self.mean);
        }
        if setup.bias {
            args = args.bias(&inputs.bias);
        }
        if setup.residual {
            args = args.residual(inputs.residual.rows()).residual_out(self.residual_out.rows_mut());
        }
        backend.forward(&inputs.spec(setup), args).unwrap();
    }

    fn forward_in_place(&mut self, backend: &CpuBackend, inputs: &Inputs<T, W, R>, setup: Setup) {
        let (x, residual) = (&mut self.in_place.0, &mut self.in_place.1);
        let args = Forward::<T>::in_place(x.rows_mut()).weight_dtype::<W>().residual_dtype::<R>();
        let mut args = args.weight(&inputs.weight);
        if setup.bias {
            args = args.bias(&inputs.bias);
        }
        if setup.residual {
            args = args.residual_in_place(residual.rows_mut());
        }
        backend.forward(&inputs.spec(setup), args).unwrap();
    }

    fn backward(&mut self, backend: &CpuBackend, inputs: &Inputs<T, W, R>, setup: Setup) {
        let (dy, x) = (inputs.dy.rows(), inputs.h.rows());
        let args = Backward::<T, W, R>::mixed(dy, x, &inputs.rstd, self.dx.rows_mut());
        let mut args = args.weight(&inputs.weight).dweight(&mut self.dweight);
        if setup.norm == Norm::Layer {
            args = args.mean(&inputs.mean);
        }
        if setup.bias {
            args = args.dbias(&mut self.dbias);
        }
        if setup.residual {
            args = args.dresidual_out(inputs.dresidual_out.rows());
        }
        backend.backward(&inputs.spec(setup), args).unwrap();
    }

    /// All outputs including padding, as bytes.
    fn bytes(&self) -> [(&'static str, &[u8]); 9] {
        [
            ("y", cast_slice(&self.y.data)),
            ("residual_out", cast_slice(&self.residual_out.data)),
            ("mean", cast_slice(&self.mean)),
            ("rstd", cast_slice(&self.rstd)),
            ("x in place", cast_slice(&self.in_place.0.data)),
            ("residual in place", cast_slice(&self.in_place.1.data)),
            ("dx", cast_slice(&self.dx.data)),
            ("dweight", cast_slice(&self.dweight)),
            ("dbias", cast_slice(&self.dbias)),
        ]
    }

    fn padding_is_untouched(&self) -> bool {
        let Outputs { y, residual_out, in_place: (x, residual), dx, .. } = self;
        let of_activations = [y, x, dx].into_iter().all(Matrix::padding_is_untouched);
        of_activations && [residual_out, residual].into_iter().all(Matrix::padding_is_untouched)
    }
}

/// Selected outputs, and their bounds from the f64 reference. Panics if an output is outside.
struct Judge<'a, T, W, R> {
    inputs: &'a Inputs<T, W, R>,
    outputs: &'a Outputs<T, W, R>,
    setup: Setup,
}

const MODEL: Model<'static> = Model { arithmetic: &Arithmetic::IEEE, mode: Mode::Worst };

fn assert_pass(output: Tensor, verdict: &Verdict) {
    assert!(verdict.is_pass(), "{output}: {verdict:?}");
}

/// The first, a middle and the last row or column.
fn some_of(count: usize) -> [usize; 3] {
    [0, count / 2, count - 1]
}

impl<T: Element, W: Element, R: Element> Judge<'_, T, W, R> {
    /// Judges some rows of the outputs per row, and some columns of the outputs per column.
    fn judge(&self) {
        let rows = some_of(self.inputs.shape.rows);
        let inputs = self.inputs.pick(&rows);
        self.judge_forward(&inputs, &rows);
        self.judge_dx(&inputs, &rows);
        self.judge_weight_gradients(&some_of(self.inputs.shape.cols));
    }

    fn judge_forward(&self, inputs: &Inputs<T, W, R>, rows: &[usize]) {
        let (outputs, setup, spec) = (self.outputs, self.setup, inputs.spec(self.setup));
        let (x, residual) = (exact(&inputs.x.data), exact(&inputs.residual.data));
        let (weight, bias) = (exact(&inputs.weight), exact(&inputs.bias));
        let given = ForwardInputs {
            x: &x,
            residual: setup.residual.then_some((&residual, R::DTYPE)),
            weight: Some(&weight),
            bias: setup.bias.then_some(&bias),
        };
        let truth = ForwardTruth::new(&spec, given, T::DTYPE, None, MODEL);
        let of_rows = |statistic: &[f32]| rows.iter().map(|&row| statistic[row]).collect::<Vec<_>>();
        assert_pass(Tensor::Rstd, &truth.judge(Tensor::Rstd, &of_rows(&outputs.rstd)));
        if setup.norm == Norm::Layer {
            assert_pass(Tensor::Mean, &truth.judge(Tensor::Mean, &of_rows(&outputs.mean)));
        }
        if setup.residual {
            let residual_out = outputs.residual_out.pick(rows).data;
            assert_pass(Tensor::ResidualOut, &truth.judge(Tensor::ResidualOut, &residual_out));
        }
        let y = outputs.y.pick(rows).data;
        assert_pass(Tensor::Y, &truth.judge(Tensor::Y, &y));
        assert!(outputs.in_place.0.pick(rows).data == y, "x in place");
        if setup.residual {
            assert!(outputs.in_place.1.pick(rows).data == outputs.residual_out.pick(rows).data, "residual in place");
        }
    }

    fn judge_dx(&self, inputs: &Inputs<T, W, R>, rows: &[usize]) {
        let (dy, h, weight) = (exact(&inputs.dy.data), exact(&inputs.h.data), exact(&inputs.weight));
        let dresidual_out = exact(&inputs.dresidual_out.data);
        let given = BackwardInputs {
            dy: &dy,
            x: &h,
            weight: Some(&weight),
            mean: &self.mean(&inputs.mean),
            rstd: &exact(&inputs.rstd),
            dresidual_out: self.setup.residual.then_some(&dresidual_out),
        };
        let spec = inputs.spec(self.setup);
        let truth = BackwardTruth::new(&spec, &given, Statistics::Given, GradReduction::Partials, MODEL);
        assert_pass(Tensor::Dx, &truth.judge(Tensor::Dx, &self.outputs.dx.pick(rows).data));
    }

    fn judge_weight_gradients(&self, cols: &[usize]) {
        let (inputs, outputs) = (self.inputs, self.outputs);
        let (dy, h) = (exact(&inputs.dy.cols(cols).data), exact(&inputs.h.cols(cols).data));
        let given = BackwardInputs {
            dy: &dy,
            x: &h,
            weight: None,
            mean: &self.mean(&inputs.mean),
            rstd: &exact(&inputs.rstd),
            dresidual_out: None,
        };
        let spec = inputs.spec(self.setup).cols(cols.len());
        let truth = BackwardTruth::new(&spec, &given, Statistics::Given, GradReduction::Partials, MODEL);
        let of_cols = |gradient: &[W]| cols.iter().map(|&col| gradient[col]).collect::<Vec<_>>();
        assert_pass(Tensor::Dweight, &truth.judge(Tensor::Dweight, &of_cols(&outputs.dweight)));
        if self.setup.bias {
            assert_pass(Tensor::Dbias, &truth.judge(Tensor::Dbias, &of_cols(&outputs.dbias)));
        }
    }

    /// RMS norm has no mean.
    fn mean(&self, mean: &[f32]) -> Vec<f64> {
        match self.setup.norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => vec![0.0; mean.len()],
            Norm::Layer => exact(mean),
        }
    }
}

/// Every available instruction set with each of these numbers of threads.
fn backends(threads: &[usize]) -> Vec<CpuBackend> {
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    available
        .flat_map(|isa| threads.iter().map(move |&threads| CpuBackend::with_isa_and_threads(isa, threads).unwrap()))
        .collect()
}

fn assert_same_bits<T: Element, W: Element, R: Element>(backends: &[CpuBackend], shape: Shape, setups: &[Setup]) {
    let inputs = Inputs::<T, W, R>::new(shape);
    let portable = CpuBackend::with_isa_and_threads(Isa::Portable, 1).unwrap();
    for &setup in setups {
        let expected = Outputs::of(&portable, &inputs, setup);
        Judge { inputs: &inputs, outputs: &expected, setup }.judge();
        for backend in backends {
            let got = Outputs::of(backend, &inputs, setup);
            let dtypes = [T::DTYPE, W::DTYPE, R::DTYPE];
            assert!(got.padding_is_untouched(), "{shape:?} {setup:?} {dtypes:?} on {backend}");
            for ((name, got), (_, expected)) in got.bytes().into_iter().zip(expected.bytes()) {
                assert!(got == expected, "{name}: {shape:?} {setup:?} {dtypes:?} on {backend}");
            }
        }
    }
}

/// Short and odd rows and some longer than a group of lanes, on one thread; then calls that are
/// split, with 4099 columns in f32 only.
const SHAPES: [Shape; 9] = [
    Shape::new(1, 1, true),
    Shape::new(3, 7, false),
    Shape::new(5, 33, true),
    Shape::new(67, 1000, false),
    // 16-bit rows: batches, with the last one not full.
    Shape::new(39, 64, true),
    Shape::new(300, 129, true),
    Shape::new(600, 1025, true),
    Shape::new(64, 4099, false),
    Shape::new(9, 65_537, true),
];

fn same_bits<T: Element, W: Element, R: Element>() {
    let backends_of_many = backends(&[1, 2, 3, 16]);
    for shape in SHAPES {
        assert_same_bits::<T, W, R>(&backends_of_many, shape, &SETUPS);
    }
    // Split calls with a residual and stores past the cache, in aligned rows and in rows with
    // varying alignment.
    let backends = backends(&[1, 2, 3]);
    assert_same_bits::<T, W, R>(&backends, Shape::streaming::<T>(1024, false), &SETUPS[4..]);
    assert_same_bits::<T, W, R>(&backends, Shape::streaming::<T>(1025, true), &SETUPS[2..4]);
}

#[test]
fn f32_bits_do_not_depend_on_isa_or_threads() {
    same_bits::<f32, f32, f32>();
}

#[test]
fn f16_bits_do_not_depend_on_isa_or_threads() {
    same_bits::<f16, f16, f16>();
}

#[test]
fn bf16_bits_do_not_depend_on_isa_or_threads() {
    same_bits::<bf16, bf16, bf16>();
}

#[test]
fn bf16_bits_with_f32_weight_and_residual_stream_do_not_depend_on_isa_or_threads() {
    same_bits::<bf16, f32, f32>();
}

/// Three rows of a call that is split and bypasses the cache, compared with a call of only these
/// rows, which does neither.
#[test]
fn a_row_has_the_same_bits_in_any_batch() {
    has_the_same_bits_in_any_batch::<bf16, f32, f32>(1025);
    // The large call processes several rows at a time, the call of three rows one.
    has_the_same_bits_in_any_batch::<bf16, bf16, bf16>(1000);
}

fn has_the_same_bits_in_any_batch<T: Element, W: Element, R: Element>(cols: usize) {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 2).unwrap();
    let inputs = Inputs::<T, W, R>::new(Shape::streaming::<T>(cols, true));
    let rows = some_of(inputs.shape.rows);
    for setup in SETUPS {
        let batch = Outputs::of(&backend, &inputs, setup);
        let alone = Outputs::of(&backend, &inputs.pick(&rows), setup);
        assert!(batch.y.pick(&rows).data == alone.y.data, "y: {setup:?}");
        assert!(batch.residual_out.pick(&rows).data == alone.residual_out.data, "residual_out: {setup:?}");
        assert!(batch.dx.pick(&rows).data == alone.dx.data, "dx: {setup:?}");
        assert_eq!(rows.map(|row| batch.mean[row]), *alone.mean, "mean: {setup:?}");
        assert_eq!(rows.map(|row| batch.rstd[row]), *alone.rstd, "rstd: {setup:?}");
    }
}

/// A caller that flushes subnormals, as audio code does, or rounds in another direction, gets the
/// same bits and keeps its mode.
#[cfg(target_arch = "x86_64")]
#[test]
fn results_do_not_depend_on_the_callers_floating_point_mode() {
    /// Flush to zero and denormals as zero; round up, down and towards zero. All exceptions are masked.
    const MODES: [u32; 4] = [0x9fc0, 0x5f80, 0x3f80, 0x7f80];
    fn mode() -> u32 {
        let mut mode = 0u32;
        // SAFETY:
        // - feature: SSE is part of x86-64;
        // - memory: writes the one u32 given.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack, preserves_flags)) };
        mode
    }
    fn set_mode(mode: u32) {
        // SAFETY:
        // - feature: SSE is part of x86-64;
        // - memory: reads the one u32 given;
        // - state: the test sets the mode back, and does no arithmetic in between but the call under test.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &mode, options(nostack, preserves_flags)) };
    }
    let (rows, cols) = (3, 40);
    let tiny: Vec<f32> = values::<f32>(1, rows * cols).iter().map(|x| x * 1e-38).collect();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with_isa_and_threads(isa, 1).unwrap();
        let norm = NormSpec::rms(rows, cols, 1.0);
        let (mut expected, mut got) = (vec![0.0f32; rows * cols], vec![0.0f32; rows * cols]);
        backend.forward(&norm, Forward::new(&tiny, &mut expected)).unwrap();
        let default = mode();
        for theirs in MODES {
            set_mode(theirs);
            let result = backend.forward(&norm, Forward::new(&tiny, &mut got));
            let (after, _) = (mode() & 0xffc0, set_mode(default));
            assert!(result.is_ok());
            assert_eq!(after, theirs, "the caller's mode was not restored on {isa}");
            assert_eq!(cast_slice::<f32, u32>(&got), cast_slice::<f32, u32>(&expected), "{theirs:#x} on {isa}");
        }
        assert!(expected.iter().any(|y| y.is_subnormal()), "the data does not reach the subnormals");
    }
}
