//! Random argument structs: a call never panics, a rejected call writes nothing, and an accepted one writes exactly the
//! elements of its outputs, never the padding between rows or what lies around them.

use proptest::prelude::*;
use rmsnorm_cpu::{Backward, CpuBackend, Forward, ForwardInPlace};
use rmsnorm_spec::{CastOrder, Element, Error, GradReduction, Norm, NormBackend, NormSpec, bf16, f16};

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
    /// x, y, residual, residual_out (or dy, x, dx, dresidual_out in backward).
    matrices: [Shape; 4],
    /// weight, bias, mean, rstd, dweight, dbias, workspace.
    vectors: [Shape; 7],
    reduction: GradReduction,
    bits: u32,
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
    (norm, prop::array::uniform4(shape()), prop::array::uniform7(shape()), reduction, any::<u32>())
        .prop_map(|(norm, matrices, vectors, reduction, bits)| Call { norm, matrices, vectors, reduction, bits })
}

const MARGIN: usize = 16;

/// A buffer with a tensor inside, and which of its elements a valid call may write.
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
        let row_stride = cols + shape.padding;
        let right = if rows == 0 { 0 } else { (rows - 1) * row_stride + cols };
        let len = right.saturating_add_signed(shape.length_error);
        let start = MARGIN + shape.offset;
        // Any bit pattern: NaNs, infinities and subnormals among them.
        let element = |i: usize| E::from_bits((i as u32 ^ bits).wrapping_mul(0x9e37_79b9).rotate_left(13));
        Guarded { buffer: (0..start + len + MARGIN).map(element).collect(), start, len, rows, cols, row_stride }
    }

    fn vector(len: usize, shape: &Shape, bits: u32) -> Self {
        Guarded::new(1, len, &Shape { padding: 0, ..shape.clone() }, bits)
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

    fn may_be_written(&self, index: usize) -> bool {
        let Some(inside) = index.checked_sub(self.start) else { return false };
        inside < self.len && inside / self.row_stride.max(1) < self.rows && inside % self.row_stride.max(1) < self.cols
    }

    /// Panics if anything was written that this call may not write.
    fn check(&self, before: &[u32], result: &Result<(), Error>, name: &str) {
        for (index, (element, before)) in self.buffer.iter().zip(before).enumerate() {
            let allowed = result.is_ok() && self.may_be_written(index);
            assert!(allowed || element.bits() == *before, "{name}[{index}] was written: {result:?}");
        }
    }
}

fn forward<T: Element, W: Element, R: Element>(call: &Call) {
    let (rows, cols) = (call.norm.rows, call.norm.cols);
    let [x, y, residual, residual_out] = &call.matrices;
    let [weight, bias, mean, rstd, ..] = &call.vectors;
    let input = Guarded::<T>::new(rows, cols, x, call.bits);
    let mut output = Guarded::<T>::new(rows, cols, y, call.bits);
    let add = Guarded::<R>::new(rows, cols, residual, call.bits);
    let mut sum = Guarded::<R>::new(rows, cols, residual_out, call.bits);
    let (w, b) = (Guarded::<W>::vector(cols, weight, call.bits), Guarded::<W>::vector(cols, bias, call.bits));
    let mut means = Guarded::<f32>::vector(rows, mean, call.bits);
    let mut rstds = Guarded::<f32>::vector(rows, rstd, call.bits);
    let before = (output.snapshot(), sum.snapshot(), means.snapshot(), rstds.snapshot());

    let (y_stride, sum_stride) = (output.row_stride, sum.row_stride);
    let mut args = Forward::<T, W, R>::mixed(input.view(), output.view_mut());
    args = args.x_row_stride(input.row_stride).y_row_stride(y_stride);
    if weight.present {
        args = args.weight(w.view());
    }
    if bias.present {
        args = args.bias(b.view());
    }
    if residual.present {
        args = args.residual(add.view()).residual_row_stride(add.row_stride);
    }
    if residual_out.present {
        args = args.residual_out(sum.view_mut()).residual_out_row_stride(sum_stride);
    }
    if mean.present {
        args = args.mean(means.view_mut());
    }
    if rstd.present {
        args = args.rstd(rstds.view_mut());
    }
    let result = CpuBackend::new().forward(&call.norm, args);
    output.check(&before.0, &result, "y");
    sum.check(&before.1, &result, "residual_out");
    means.check(&before.2, &result, "mean");
    rstds.check(&before.3, &result, "rstd");
}

fn forward_in_place<T: Element, W: Element, R: Element>(call: &Call) {
    let (rows, cols) = (call.norm.rows, call.norm.cols);
    let [x, _, residual, _] = &call.matrices;
    let mut matrix = Guarded::<T>::new(rows, cols, x, call.bits);
    let mut sum = Guarded::<R>::new(rows, cols, residual, call.bits);
    let weight = Guarded::<W>::vector(cols, &call.vectors[0], call.bits);
    let before = (matrix.snapshot(), sum.snapshot());
    let (x_stride, sum_stride) = (matrix.row_stride, sum.row_stride);
    let mut args = ForwardInPlace::<T, W, R>::mixed(matrix.view_mut()).x_row_stride(x_stride);
    if call.vectors[0].present {
        args = args.weight(weight.view());
    }
    if residual.present {
        args = args.residual(sum.view_mut()).residual_row_stride(sum_stride);
    }
    let result = CpuBackend::new().forward_in_place(&call.norm, args);
    matrix.check(&before.0, &result, "x");
    sum.check(&before.1, &result, "residual");
}

fn backward<T: Element, W: Element, R: Element>(call: &Call) {
    let (rows, cols) = (call.norm.rows, call.norm.cols);
    let [dy, x, dx, dresidual_out] = &call.matrices;
    let [weight, _, mean, rstd, dweight, dbias, workspace] = &call.vectors;
    let gradient = Guarded::<T>::new(rows, cols, dy, call.bits);
    let input = Guarded::<R>::new(rows, cols, x, call.bits);
    let mut output = Guarded::<T>::new(rows, cols, dx, call.bits);
    let arriving = Guarded::<R>::new(rows, cols, dresidual_out, call.bits);
    let w = Guarded::<W>::vector(cols, weight, call.bits);
    let means = Guarded::<f32>::vector(rows, mean, call.bits);
    let rstds = Guarded::<f32>::vector(rows, rstd, call.bits);
    let mut dw = Guarded::<W>::vector(cols, dweight, call.bits);
    let mut db = Guarded::<W>::vector(cols, dbias, call.bits);
    let mut scratch = Guarded::<f32>::vector(6 * cols, workspace, call.bits);
    let before = (output.snapshot(), dw.snapshot(), db.snapshot(), scratch.snapshot());

    let dx_stride = output.row_stride;
    let mut args = Backward::<T, W, R>::mixed(gradient.view(), input.view(), output.view_mut());
    args = args.dy_row_stride(gradient.row_stride).x_row_stride(input.row_stride).dx_row_stride(dx_stride);
    args = args.grad_reduction(call.reduction);
    if weight.present {
        args = args.weight(w.view());
    }
    if mean.present {
        args = args.mean(means.view());
    }
    if rstd.present {
        args = args.rstd(rstds.view());
    }
    if dresidual_out.present {
        args = args.dresidual_out(arriving.view()).dresidual_out_row_stride(arriving.row_stride);
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
    output.check(&before.0, &result, "dx");
    dw.check(&before.1, &result, "dweight");
    db.check(&before.2, &result, "dbias");
    scratch.check(&before.3, &result, "workspace");
}

/// Every stage on one choice of dtypes, valid mixes and invalid ones.
fn every_stage(call: &Call) {
    macro_rules! stages {
        ($($t:ty, $w:ty, $r:ty;)*) => {
            $(forward::<$t, $w, $r>(call); forward_in_place::<$t, $w, $r>(call); backward::<$t, $w, $r>(call);)*
        };
    }
    match call.bits % 4 {
        0 => {
            stages! { f32, f32, f32; f32, bf16, f32; }
        }
        1 => {
            stages! { f16, f16, f16; f16, f32, f32; f16, bf16, f16; }
        }
        2 => {
            stages! { bf16, bf16, bf16; bf16, f32, bf16; }
        }
        _ => {
            stages! { bf16, bf16, f32; bf16, f32, f32; f32, f32, f16; }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn no_argument_struct_panics_or_writes_outside_its_outputs(call in call()) {
        every_stage(&call);
    }
}
