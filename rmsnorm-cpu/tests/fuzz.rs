//! Random arguments: a call never panics, a rejected call writes nothing, and an accepted call
//! writes every element of its outputs and nothing else, neither padding between rows nor memory
//! around the outputs.
//!
//! Each call is repeated on outputs with all bits inverted: both must leave the same. The
//! conformance suite checks the values.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rmsnorm_conformance::Kind;
use rmsnorm_conformance::testing::{self, Access, Fill, Guarded, Outputs, Placement, bits};
use rmsnorm_cpu::CpuBackend;
use rmsnorm_spec::{CastOrder, DTypes, Element, GradReduction, Norm, NormSpec, RowGroups, Tensor, bf16, f16};

/// A tensor of a random call, inside a larger buffer.
#[derive(Clone, Debug)]
struct Shape {
    present: bool,
    /// Elements before the tensor, which misalign it.
    offset: usize,
    /// Added to the smallest stride.
    padding: usize,
    /// Added to the smallest stride of groups, if rows lie in groups.
    gap: usize,
    /// Added to the right length; mostly 0.
    length_error: isize,
}

fn shape() -> impl Strategy<Value = Shape> {
    let length_error = prop_oneof![30 => Just(0isize), 1 => -3isize..4, 1 => Just(isize::MIN / 4)];
    let distance = || prop_oneof![Just(0usize), 0usize..20];
    (any::<bool>(), 0usize..9, distance(), distance(), length_error)
        .prop_map(|(present, offset, padding, gap, length_error)| Shape { present, offset, padding, gap, length_error })
}

#[derive(Clone, Debug)]
struct Call {
    norm: NormSpec,
    /// x, y, residual, residual_out (or dy, x, dx, dresidual_out, dresidual in backward); x and residual in the in-place form.
    matrices: [Shape; 5],
    /// Rows per group of the matrices, if they have groups.
    rows_per_group: Option<usize>,
    /// weight, bias, mean, rstd, dweight, dbias, workspace.
    vectors: [Shape; 7],
    reduction: GradReduction,
    bits: u32,
}

impl Call {
    /// The forward call that an in-place call must agree with.
    fn out_of_place(&self) -> Self {
        let [x, _, residual, ..] = &self.matrices;
        Call { matrices: [x, x, residual, residual, residual].map(Shape::clone), ..self.clone() }
    }
}

fn call() -> impl Strategy<Value = Call> {
    let eps = prop_oneof![8 => Just(1e-5f32), 1 => Just(0.0), 1 => any::<f32>()];
    let offset = prop_oneof![4 => Just(0.0f32), 3 => Just(1.0), 1 => any::<f32>()];
    let norm = (any::<bool>(), 0usize..20, 0usize..200, eps, offset, any::<bool>()).prop_map(
        |(rms, rows, cols, eps, weight_offset, at_store)| {
            NormSpec::new(if rms { Norm::Rms } else { Norm::Layer }, rows, cols, eps)
                .weight_offset(weight_offset)
                .cast_order(if at_store { CastOrder::AtStore } else { CastOrder::BeforeWeight })
        },
    );
    let reduction = prop_oneof![
        6 => Just(GradReduction::Partials),
        1 => (0u32..3).prop_map(|groups| GradReduction::Locks { groups }),
        1 => Just(GradReduction::Atomics),
    ];
    let rows_per_group = prop_oneof![2 => Just(None), 1 => (1usize..6).prop_map(Some)];
    let tensors = (prop::array::uniform5(shape()), prop::array::uniform7(shape()), rows_per_group);
    (norm, tensors, reduction, any::<u32>(), any::<bool>()).prop_map(
        |(norm, (mut matrices, mut vectors, rows_per_group), reduction, bits, is_complete)| {
            // Half of the calls are complete, because few random ones would reach a kernel.
            if is_complete {
                let [_, _, residual, residual_out, _] = &mut matrices;
                residual_out.present &= residual.present;
                let [_, _, mean, rstd, ..] = &mut vectors;
                (mean.present, rstd.present) = (norm.norm == Norm::Layer, true);
            }
            Call { norm, matrices, rows_per_group, vectors, reduction, bits }
        },
    )
}

/// Patterns combined with an output's bits before a call: two fills that differ in every bit.
const FILLS: [u32; 2] = [0, !0];

/// The tensors of a random call.
struct Builder<'a> {
    fuzzed: &'a Call,
    fill: u32,
    call: testing::Call,
}

impl<'a> Builder<'a> {
    fn new(fuzzed: &'a Call, kind: Kind, fill: u32) -> Self {
        Builder { fuzzed, fill, call: testing::Call { kind, quant: None, parts: 1, tensors: Vec::new() } }
    }

    /// Any bit pattern, including NaNs, infinities and subnormals.
    fn push<E: Element>(
        &mut self,
        name: Tensor,
        access: Access,
        (rows, cols): (usize, usize),
        shape: &Shape,
        groups: Option<RowGroups>,
    ) {
        let seed = u64::from(self.fuzzed.bits) << 8 | name as u64;
        let fill = if matches!(access, Access::Write | Access::Scratch) { self.fill } else { 0 };
        let place = Placement { pad: shape.padding, groups, offset: shape.offset, ..Placement::DENSE };
        let fill = Fill::Bits(&|index| bits(seed, index) as u32 ^ fill);
        let mut tensor = Guarded::new((name, E::DTYPE, access), (rows, cols), place, &fill, self.fuzzed.bits);
        tensor.view.end = tensor.view.start + tensor.view.len().saturating_add_signed(shape.length_error);
        tensor.row_stride = Some(cols + shape.padding);
        self.call.tensors.push(tensor);
    }

    fn matrix<E: Element>(&mut self, name: Tensor, access: Access, shape: &Shape) {
        let NormSpec { rows, cols, .. } = self.fuzzed.norm;
        let smallest = |rows: usize| (rows - 1) * (cols + shape.padding) + cols;
        let groups = |rows| RowGroups { rows, stride: smallest(rows) + shape.gap };
        self.push::<E>(name, access, (rows, cols), shape, self.fuzzed.rows_per_group.map(groups));
    }

    fn vector<E: Element>(&mut self, name: Tensor, access: Access, len: usize, shape: &Shape) {
        if shape.present {
            self.push::<E>(name, access, (1, len), &Shape { padding: 0, ..shape.clone() }, None);
        }
    }

    /// Makes the call. Returns its outputs, or `None` if it was rejected. Panics on a forbidden
    /// write.
    fn outcome<T: Element, W: Element, R: Element>(mut self) -> Option<Outputs> {
        let Call { norm, reduction, .. } = self.fuzzed;
        let answer = self.call.make(&CpuBackend::new(), norm, DTypes::of::<T, W, R>(), *reduction).unwrap();
        if answer.is_err() {
            let written: Vec<Tensor> =
                self.call.tensors.iter().filter(|tensor| !tensor.is_untouched()).map(|tensor| tensor.name).collect();
            assert!(written.is_empty(), "{written:?} written: {answer:?}");
            return None;
        }
        assert_eq!(self.call.breach(), None);
        Some(self.call.outputs())
    }
}

/// Panics if the two outcomes differ; all NaNs are equal. Returns whether the calls were accepted.
fn agree(first: Option<Outputs>, second: Option<Outputs>) -> bool {
    assert_eq!(first.is_some(), second.is_some(), "one was accepted");
    let (first, second) = (first.unwrap_or_default().tensors, second.unwrap_or_default().tensors);
    assert_eq!(first.len(), second.len());
    for ((name, first), (twin, second)) in first.iter().zip(&second) {
        let is_unlike =
            |&i: &usize| first.bits[i] != second.bits[i] && !(first.value(i).is_nan() && second.value(i).is_nan());
        assert_eq!((name, first.bits.len()), (twin, second.bits.len()));
        let unlike = (0..first.bits.len()).find(is_unlike);
        assert!(unlike.is_none(), "element {unlike:?} of {name} differs");
    }
    !first.is_empty()
}

/// A forward call, in place or not.
fn forward<T: Element, W: Element, R: Element>(call: &Call, kind: Kind, fill: u32) -> Option<Outputs> {
    let NormSpec { rows, cols, .. } = call.norm;
    let [x, y, residual, residual_out, _] = &call.matrices;
    let [weight, bias, mean, rstd, ..] = &call.vectors;
    let (is_in_place, mut builder) = (kind == Kind::FORWARD_IN_PLACE, Builder::new(call, kind, fill));
    let input = if is_in_place { Access::Overwrite } else { Access::Read };
    builder.matrix::<T>(Tensor::X, input, x);
    if !is_in_place {
        builder.matrix::<T>(Tensor::Y, Access::Write, y);
    }
    if residual.present {
        builder.matrix::<R>(Tensor::Residual, input, residual);
    }
    if residual_out.present && !is_in_place {
        builder.matrix::<R>(Tensor::ResidualOut, Access::Write, residual_out);
    }
    builder.vector::<W>(Tensor::Weight, Access::Read, cols, weight);
    builder.vector::<W>(Tensor::Bias, Access::Read, cols, bias);
    builder.vector::<f32>(Tensor::Mean, Access::Write, rows, mean);
    builder.vector::<f32>(Tensor::Rstd, Access::Write, rows, rstd);
    builder.outcome::<T, W, R>()
}

fn backward<T: Element, W: Element, R: Element>(call: &Call, fill: u32) -> Option<Outputs> {
    let NormSpec { rows, cols, .. } = call.norm;
    let [dy, x, dx, dresidual_out, dresidual] = &call.matrices;
    let [weight, _, mean, rstd, dweight, dbias, workspace] = &call.vectors;
    let mut builder = Builder::new(call, Kind::BACKWARD, fill);
    builder.matrix::<T>(Tensor::Dy, Access::Read, dy);
    builder.matrix::<R>(Tensor::X, Access::Read, x);
    builder.matrix::<T>(Tensor::Dx, Access::Write, dx);
    if dresidual_out.present {
        builder.matrix::<R>(Tensor::DresidualOut, Access::Read, dresidual_out);
    }
    if dresidual.present {
        builder.matrix::<R>(Tensor::Dresidual, Access::Write, dresidual);
    }
    builder.vector::<f32>(Tensor::Rstd, Access::Read, rows, &Shape { present: true, ..rstd.clone() });
    builder.vector::<W>(Tensor::Weight, Access::Read, cols, weight);
    builder.vector::<f32>(Tensor::Mean, Access::Read, rows, mean);
    builder.vector::<W>(Tensor::Dweight, Access::Write, cols, dweight);
    builder.vector::<W>(Tensor::Dbias, Access::Write, cols, dbias);
    // The workspace may hold anything, but nothing may be written around it.
    builder.vector::<f32>(Tensor::Workspace, Access::Scratch, 6 * cols, workspace);
    builder.outcome::<T, W, R>()
}

/// Every stage with one choice of dtypes, and whether each call was accepted.
fn stages<T: Element, W: Element, R: Element>(call: &Call) -> [bool; 3] {
    let apart = |call, fill| forward::<T, W, R>(call, Kind::FORWARD, fill);
    let in_place = forward::<T, W, R>(call, Kind::FORWARD_IN_PLACE, FILLS[1]);
    [
        agree(apart(call, FILLS[0]), apart(call, FILLS[1])),
        agree(apart(&call.out_of_place(), FILLS[0]), in_place),
        agree(backward::<T, W, R>(call, FILLS[0]), backward::<T, W, R>(call, FILLS[1])),
    ]
}

/// Every stage with one valid choice of dtypes, and whether each call was accepted. Some calls are
/// repeated with an invalid choice.
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
    // Enough calls must have been accepted.
    let [forward, in_place, backward] = accepted.get();
    println!("accepted of {CALLS}: {forward} forward, {in_place} in place, {backward} backward");
    assert!(accepted.get().iter().all(|&count| count >= CALLS / 10), "{accepted:?}");
}
