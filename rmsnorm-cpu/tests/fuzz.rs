//! Random argument structs: a call never panics, a rejected call writes nothing, and an accepted one writes every element
//! of its outputs and nothing else, neither the padding between rows nor what lies around them.
//!
//! That an element was written shows in a second call, on outputs that held the inverse of every bit: both must leave
//! the same. Whether it is right is for the conformance suite.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rmsnorm_cpu::{Backward, CpuBackend, Forward};
use rmsnorm_spec::{CastOrder, Element, Error, GradReduction, Norm, NormBackend, NormSpec, Rows, bf16, f16};

/// A tensor as the fuzzer asks for it, inside a larger buffer.
#[derive(Clone, Debug)]
struct Shape {
    present: bool,
    /// Elements before the tensor, which misalign it.
    offset: usize,
    /// Added to the smallest stride.
    padding: usize,
    /// Added to the right length; mostly 0.
    length_error: isize,
}

fn shape() -> impl Strategy<Value = Shape> {
    let length_error = prop_oneof![30 => Just(0isize), 1 => -3isize..4, 1 => Just(isize::MIN / 4)];
    (any::<bool>(), 0usize..9, prop_oneof![Just(0usize), 0usize..20], length_error)
        .prop_map(|(present, offset, padding, length_error)| Shape { present, offset, padding, length_error })
}

#[derive(Clone, Debug)]
struct Call {
    norm: NormSpec,
    /// x, y, residual, residual_out (or dy, x, dx, dresidual_out in backward); x and residual in the in-place form.
    matrices: [Shape; 4],
    /// weight, bias, mean, rstd, dweight, dbias, workspace.
    vectors: [Shape; 7],
    reduction: GradReduction,
    bits: u32,
}

impl Call {
    /// The forward call that an in-place call must agree with.
    fn out_of_place(&self) -> Self {
        let [x, _, residual, _] = &self.matrices;
        Call { matrices: [x, x, residual, residual].map(Shape::clone), ..self.clone() }
    }
}

fn call() -> impl Strategy<Value = Call> {
    let eps = prop_oneof![8 => Just(1e-5f32), 1 => Just(0.0), 1 => any::<f32>()];
    let offset = prop_oneof![4 => Just(0.0f32), 3 => Just(1.0), 1 => any::<f32>()];
    let norm = (any::<bool>(), 0usize..20, 0usize..200, eps, offset, any::<bool>()).prop_map(
        |(rms, rows, cols, eps, weight_offset, at_store)| NormSpec {
            norm: if rms { Norm::Rms } else { Norm::Layer },
            rows,
            cols,
            eps,
            weight_offset,
            cast_order: if at_store { CastOrder::AtStore } else { CastOrder::BeforeWeight },
        },
    );
    let reduction = prop_oneof![
        6 => Just(GradReduction::Partials),
        1 => (0u32..3).prop_map(|groups| GradReduction::Locks { groups }),
        1 => Just(GradReduction::Atomics),
    ];
    let tensors = (prop::array::uniform4(shape()), prop::array::uniform7(shape()));
    (norm, tensors, reduction, any::<u32>(), any::<bool>()).prop_map(
        |(norm, (mut matrices, mut vectors), reduction, bits, is_complete)| {
            // Half of the calls have what the rules ask for, or few would come to a kernel.
            if is_complete {
                let [_, _, residual, residual_out] = &mut matrices;
                residual_out.present &= residual.present;
                let [_, _, mean, rstd, ..] = &mut vectors;
                (mean.present, rstd.present) = (norm.norm == Norm::Layer, true);
            }
            Call { norm, matrices, vectors, reduction, bits }
        },
    )
}

const MARGIN: usize = 16;

/// What the bits of an output are combined with before a call: two fills that differ in every bit.
const FILLS: [u32; 2] = [0, !0];

/// A buffer with a tensor inside.
struct Guarded<E> {
    buffer: Vec<E>,
    start: usize,
    len: usize,
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<E: Element> Guarded<E> {
    fn new(rows: usize, cols: usize, shape: &Shape, bits: u32) -> Self {
        Guarded::filled(rows, cols, shape, bits, FILLS[0])
    }

    fn filled(rows: usize, cols: usize, shape: &Shape, bits: u32, fill: u32) -> Self {
        let row_stride = cols + shape.padding;
        let right = if rows == 0 { 0 } else { (rows - 1) * row_stride + cols };
        let len = right.saturating_add_signed(shape.length_error);
        let start = MARGIN + shape.offset;
        // Any bit pattern: NaNs, infinities and subnormals among them.
        let element = |i: usize| E::from_bits(fill ^ (i as u32 ^ bits).wrapping_mul(0x9e37_79b9).rotate_left(13));
        Guarded { buffer: (0..start + len + MARGIN).map(element).collect(), start, len, rows, cols, row_stride }
    }

    fn vector(len: usize, shape: &Shape, bits: u32) -> Self {
        Guarded::vector_filled(len, shape, bits, FILLS[0])
    }

    fn vector_filled(len: usize, shape: &Shape, bits: u32, fill: u32) -> Self {
        Guarded::filled(1, len, &Shape { padding: 0, ..shape.clone() }, bits, fill)
    }

    fn rows(&self) -> Rows<&[E]> {
        Rows::strided(self.view(), self.row_stride)
    }

    fn rows_mut(&mut self) -> Rows<&mut [E]> {
        let row_stride = self.row_stride;
        Rows::strided(self.view_mut(), row_stride)
    }

    fn view(&self) -> &[E] {
        &self.buffer[self.start..][..self.len]
    }

    fn view_mut(&mut self) -> &mut [E] {
        &mut self.buffer[self.start..][..self.len]
    }

    fn snapshot(&self) -> Vec<u32> {
        self.buffer.iter().map(|element| element.bits()).collect()
    }

    fn is_element(&self, index: usize) -> bool {
        let Some(inside) = index.checked_sub(self.start) else { return false };
        inside < self.len && inside / self.row_stride.max(1) < self.rows && inside % self.row_stride.max(1) < self.cols
    }

    /// The elements of the output after a call that was accepted; all NaNs are one. Panics if anything was written that
    /// such a call may not write.
    fn written(&self, before: &[u32], result: &Result<(), Error>, name: &'static str) -> Output {
        let mut elements = Vec::new();
        for (index, (element, before)) in self.buffer.iter().zip(before).enumerate() {
            if result.is_ok() && self.is_element(index) {
                elements.push(if element.to_f32().is_nan() { u32::MAX } else { element.bits() });
            } else {
                assert!(element.bits() == *before, "{name}[{index}] was written: {result:?}");
            }
        }
        (name, elements)
    }
}

/// The name and the elements of an output.
type Output = (&'static str, Vec<u32>);

/// What a call left, or `None` if it was rejected.
type Outcome = Option<Vec<Output>>;

/// The outputs that the call had.
fn outcome<const N: usize>(result: Result<(), Error>, outputs: [(bool, Output); N]) -> Outcome {
    let present = outputs.into_iter().filter(|(present, _)| *present).map(|(_, output)| output);
    result.is_ok().then(|| present.collect())
}

/// Panics if the two differ. Gives whether they are of accepted calls.
fn agree(first: Outcome, second: Outcome) -> bool {
    assert_eq!(first.is_some(), second.is_some(), "one was accepted");
    let (first, second) = (first.unwrap_or_default(), second.unwrap_or_default());
    for ((first_name, first), (second_name, second)) in first.iter().zip(&second) {
        let unlike = first.iter().zip(second).position(|(first, second)| first != second);
        assert!(unlike.is_none(), "element {unlike:?} of {first_name} and {second_name} differs");
    }
    assert_eq!(first.len(), second.len());
    !first.is_empty()
}

fn forward<T: Element, W: Element, R: Element>(call: &Call, fill: u32) -> Outcome {
    let (rows, cols) = (call.norm.rows, call.norm.cols);
    let [x, y, residual, residual_out] = &call.matrices;
    let [weight, bias, mean, rstd, ..] = &call.vectors;
    let input = Guarded::<T>::new(rows, cols, x, call.bits);
    let mut output = Guarded::<T>::filled(rows, cols, y, call.bits, fill);
    let add = Guarded::<R>::new(rows, cols, residual, call.bits);
    let mut sum = Guarded::<R>::filled(rows, cols, residual_out, call.bits, fill);
    let (w, b) = (Guarded::<W>::vector(cols, weight, call.bits), Guarded::<W>::vector(cols, bias, call.bits));
    let mut means = Guarded::<f32>::vector_filled(rows, mean, call.bits, fill);
    let mut rstds = Guarded::<f32>::vector_filled(rows, rstd, call.bits, fill);
    let before = (output.snapshot(), sum.snapshot(), means.snapshot(), rstds.snapshot());

    let args = Forward::<T>::new(input.rows(), output.rows_mut());
    let mut args = args.weight_dtype::<W>().residual_dtype::<R>();
    if weight.present {
        args = args.weight(w.view());
    }
    if bias.present {
        args = args.bias(b.view());
    }
    if residual.present {
        args = args.residual(add.rows());
    }
    if residual_out.present {
        args = args.residual_out(sum.rows_mut());
    }
    if mean.present {
        args = args.mean(means.view_mut());
    }
    if rstd.present {
        args = args.rstd(rstds.view_mut());
    }
    let result = CpuBackend::new().forward(&call.norm, args);
    let outputs = [
        (true, output.written(&before.0, &result, "y")),
        (residual_out.present, sum.written(&before.1, &result, "residual_out")),
        (mean.present, means.written(&before.2, &result, "mean")),
        (rstd.present, rstds.written(&before.3, &result, "rstd")),
    ];
    outcome(result, outputs)
}

fn forward_in_place<T: Element, W: Element, R: Element>(call: &Call, fill: u32) -> Outcome {
    let (rows, cols) = (call.norm.rows, call.norm.cols);
    let [x, _, residual, _] = &call.matrices;
    let [weight, bias, mean, rstd, ..] = &call.vectors;
    let mut matrix = Guarded::<T>::new(rows, cols, x, call.bits);
    let mut sum = Guarded::<R>::new(rows, cols, residual, call.bits);
    let (w, b) = (Guarded::<W>::vector(cols, weight, call.bits), Guarded::<W>::vector(cols, bias, call.bits));
    let mut means = Guarded::<f32>::vector_filled(rows, mean, call.bits, fill);
    let mut rstds = Guarded::<f32>::vector_filled(rows, rstd, call.bits, fill);
    let before = (matrix.snapshot(), sum.snapshot(), means.snapshot(), rstds.snapshot());

    let args = Forward::<T>::in_place(matrix.rows_mut());
    let mut args = args.weight_dtype::<W>().residual_dtype::<R>();
    if weight.present {
        args = args.weight(w.view());
    }
    if bias.present {
        args = args.bias(b.view());
    }
    if residual.present {
        args = args.residual_in_place(sum.rows_mut());
    }
    if mean.present {
        args = args.mean(means.view_mut());
    }
    if rstd.present {
        args = args.rstd(rstds.view_mut());
    }
    let result = CpuBackend::new().forward(&call.norm, args);
    let outputs = [
        (true, matrix.written(&before.0, &result, "x")),
        (residual.present, sum.written(&before.1, &result, "residual")),
        (mean.present, means.written(&before.2, &result, "mean")),
        (rstd.present, rstds.written(&before.3, &result, "rstd")),
    ];
    outcome(result, outputs)
}

fn backward<T: Element, W: Element, R: Element>(call: &Call, fill: u32) -> Outcome {
    let (rows, cols) = (call.norm.rows, call.norm.cols);
    let [dy, x, dx, dresidual_out] = &call.matrices;
    let [weight, _, mean, rstd, dweight, dbias, workspace] = &call.vectors;
    let gradient = Guarded::<T>::new(rows, cols, dy, call.bits);
    let input = Guarded::<R>::new(rows, cols, x, call.bits);
    let mut output = Guarded::<T>::filled(rows, cols, dx, call.bits, fill);
    let arriving = Guarded::<R>::new(rows, cols, dresidual_out, call.bits);
    let w = Guarded::<W>::vector(cols, weight, call.bits);
    let means = Guarded::<f32>::vector(rows, mean, call.bits);
    let rstds = Guarded::<f32>::vector(rows, rstd, call.bits);
    let mut dw = Guarded::<W>::vector_filled(cols, dweight, call.bits, fill);
    let mut db = Guarded::<W>::vector_filled(cols, dbias, call.bits, fill);
    let mut scratch = Guarded::<f32>::vector_filled(6 * cols, workspace, call.bits, fill);
    let before = (output.snapshot(), dw.snapshot(), db.snapshot(), scratch.snapshot());

    let args = Backward::<T, W, R>::mixed(gradient.rows(), input.rows(), rstds.view(), output.rows_mut());
    let mut args = args.grad_reduction(call.reduction);
    if weight.present {
        args = args.weight(w.view());
    }
    if mean.present {
        args = args.mean(means.view());
    }
    if dresidual_out.present {
        args = args.dresidual_out(arriving.rows());
    }
    if dweight.present {
        args = args.dweight(dw.view_mut());
    }
    if dbias.present {
        args = args.dbias(db.view_mut());
    }
    if workspace.present {
        args = args.workspace(scratch.view_mut());
    }
    let result = CpuBackend::new().backward(&call.norm, args);
    // What is left in the workspace is nobody's business, but nothing may be written around it.
    scratch.written(&before.3, &result, "workspace");
    let outputs = [
        (true, output.written(&before.0, &result, "dx")),
        (dweight.present, dw.written(&before.1, &result, "dweight")),
        (dbias.present, db.written(&before.2, &result, "dbias")),
    ];
    outcome(result, outputs)
}

/// Every stage on one choice of dtypes, and whether each was accepted.
fn stages<T: Element, W: Element, R: Element>(call: &Call) -> [bool; 3] {
    let twin = forward::<T, W, R>(&call.out_of_place(), FILLS[0]);
    [
        agree(forward::<T, W, R>(call, FILLS[0]), forward::<T, W, R>(call, FILLS[1])),
        agree(twin, forward_in_place::<T, W, R>(call, FILLS[1])),
        agree(backward::<T, W, R>(call, FILLS[0]), backward::<T, W, R>(call, FILLS[1])),
    ]
}

/// Every stage on one valid choice of dtypes, and whether each was accepted. Some calls are also made on an invalid one.
fn every_stage(call: &Call) -> [bool; 3] {
    match call.bits % 8 {
        0 => {
            stages::<f32, bf16, f32>(call);
            stages::<f32, f32, f32>(call)
        }
        1 => {
            stages::<f16, bf16, f16>(call);
            stages::<f16, f16, f16>(call)
        }
        2 => stages::<f16, f32, f16>(call),
        3 => stages::<f16, f32, f32>(call),
        4 => {
            stages::<f32, f32, f16>(call);
            stages::<bf16, bf16, bf16>(call)
        }
        5 => stages::<bf16, bf16, f32>(call),
        6 => stages::<bf16, f32, bf16>(call),
        _ => stages::<bf16, f32, f32>(call),
    }
}

const CALLS: u32 = 2000;

#[test]
fn no_argument_struct_panics_and_outputs_are_written_and_nothing_else() {
    let accepted = Cell::new([0u32; 3]);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CALLS) };
    let mut runner = TestRunner::new(config);
    let outcome = runner.run(&call(), |call| {
        let (answers, counts) = (every_stage(&call), accepted.get());
        accepted.set(std::array::from_fn(|stage| counts[stage] + u32::from(answers[stage])));
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}\n{runner}");
    }
    // Rejected calls alone would prove little.
    let [forward, in_place, backward] = accepted.get();
    println!("accepted of {CALLS}: {forward} forward, {in_place} in place, {backward} backward");
    assert!(accepted.get().iter().all(|&count| count >= CALLS / 10), "{accepted:?}");
}
