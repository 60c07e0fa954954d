//! Validation on a backend whose views are numbers: every rule of `Problem`, the error that names
//! it, and that a rejected call never reaches the backend.
#![expect(clippy::expect_used, reason = "a test fails by panicking, in its helper functions too")]

use std::cell::Cell;
use std::marker::PhantomData;

use proptest::prelude::*;
use rmsnorm_spec::{
    AnyCall, AnyElement, Backward, DType, Element, Error, Forward, GradReduction, NormBackend, NormSpec, Problem,
    RowGroups, Rows, Span, bf16, f16,
};

/// Counts the calls that pass validation.
#[derive(Default)]
struct Numbers {
    launches: Cell<usize>,
}

/// A view of memory that does not exist.
#[derive(Clone, Copy)]
struct View<T> {
    span: Span,
    element: PhantomData<T>,
}

impl NormBackend for Numbers {
    type In<'a, T: AnyElement> = View<T>;
    type Out<'a, T: AnyElement> = View<T>;

    fn name(&self) -> &'static str {
        "numbers"
    }
    fn in_span<T: AnyElement>(view: &View<T>) -> Span {
        view.span
    }
    fn out_span<T: AnyElement>(view: &View<T>) -> Span {
        view.span
    }
    fn workspace_len(&self, problem: &Problem) -> usize {
        problem.cols * 2
    }
    fn launch(&self, _: AnyCall<'_, '_, Self>) -> Result<(), Error> {
        self.launches.set(self.launches.get() + 1);
        Ok(())
    }
}

/// `len` elements from byte `start` of an allocation.
fn at<T>(allocation: u64, start: u64, len: usize) -> View<T> {
    View { span: Span { allocation, start, len }, element: PhantomData }
}

/// `len` elements in a separate allocation.
fn own<T>(allocation: u64, len: usize) -> View<T> {
    at(allocation, 0, len)
}

const ROWS: usize = 4;
const COLS: usize = 10;
const RMS: NormSpec = NormSpec::rms(ROWS, COLS, 1e-6);
const LAYER: NormSpec = NormSpec::layer(ROWS, COLS, 1e-6);

fn forward<'a>() -> Forward<'a, Numbers, f32> {
    Forward::new(own(1, ROWS * COLS), own(2, ROWS * COLS))
}

/// Rows with these strides, for views of any length.
fn strided<'a>(x: usize, y: usize) -> Forward<'a, Numbers, f32> {
    Forward::new(Rows::strided(own(1, ROWS * COLS), x), Rows::strided(own(2, ROWS * COLS), y))
}

fn backward<'a>() -> Backward<'a, Numbers, f32> {
    Backward::new(own(1, ROWS * COLS), own(2, ROWS * COLS), own(4, ROWS), own(3, ROWS * COLS))
}

/// The text of the error of a rejected call; panics if it was accepted or reached the backend.
fn rejected(call: impl FnOnce(&Numbers) -> Result<(), Error>) -> String {
    let backend = Numbers::default();
    let error = call(&backend).expect_err("the call was accepted");
    assert_eq!(backend.launches.get(), 0, "a rejected call reached the backend");
    error.to_string()
}

#[test]
fn scalars_out_of_range_are_rejected() {
    for eps in [-1e-9, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let text = rejected(|b| b.forward(&RMS.eps(eps), forward()));
        assert_eq!(text, format!("eps must be finite and not negative, got {eps}"));
    }
    let text = rejected(|b| b.forward(&RMS.weight_offset(f32::NAN), forward()));
    assert_eq!(text, "weight_offset must be finite, got NaN");
    let text = rejected(|b| b.forward(&NormSpec::rms(ROWS, 0, 1e-6), forward()));
    assert_eq!(text, "cols must be at least 1, got 0");
}

#[test]
fn eps_of_zero_is_allowed() {
    let backend = Numbers::default();
    backend.forward(&RMS.eps(0.0), forward()).unwrap();
    assert_eq!(backend.launches.get(), 1);
}

#[test]
fn wrong_lengths_name_the_tensor_and_both_lengths() {
    let cases = [
        (rejected(|b| b.forward(&RMS, forward().weight(own(5, 9)))), "weight: expected 10 elements, got 9"),
        (rejected(|b| b.forward(&RMS, forward().bias(own(5, 11)))), "bias: expected 10 elements, got 11"),
        (rejected(|b| b.forward(&RMS, forward().rstd(own(5, 5)))), "rstd: expected 4 elements, got 5"),
        (rejected(|b| b.forward(&LAYER, forward().mean(own(5, 3)))), "mean: expected 4 elements, got 3"),
        (rejected(|b| b.forward(&RMS, forward().residual(own(5, 39)))), "residual: expected 40 elements, got 39"),
        (rejected(|b| b.backward(&RMS, backward().dweight(own(5, 0)))), "dweight: expected 10 elements, got 0"),
        (rejected(|b| b.backward(&RMS, backward().dbias(own(5, 1)))), "dbias: expected 10 elements, got 1"),
        (
            rejected(|b| b.backward(&RMS, backward().workspace(own(5, 19)))),
            "workspace: expected at least 20 elements, got 19",
        ),
    ];
    for (got, expected) in cases {
        assert_eq!(got, expected);
    }
}

#[test]
fn strided_rows_may_leave_out_the_last_padding_only() {
    // 4 rows at a stride of 12: 46 elements to the end of the last row, 48 with its padding.
    for (len, accepted) in [(45, false), (46, true), (47, true), (48, true), (49, false)] {
        let call = Forward::<Numbers, f32>::new(Rows::strided(own(1, len), 12), own(2, ROWS * COLS));
        let result = Numbers::default().forward(&RMS, call);
        assert_eq!(result.is_ok(), accepted, "{len} elements: {result:?}");
    }
    let text = rejected(|b| b.forward(&RMS, strided(COLS, 9)));
    assert_eq!(text, "y: row stride must be at least cols = 10, got 9");
    // No stride means dense rows; 0 is a stride.
    let text = rejected(|b| b.forward(&RMS, strided(0, COLS)));
    assert_eq!(text, "x: row stride must be at least cols = 10, got 0");
}

#[test]
fn sizes_that_overflow_are_rejected_before_any_multiplication_wraps() {
    for (rows, cols) in [(usize::MAX, 2), (2, usize::MAX), (1 << 40, 1 << 40), (isize::MAX as usize / 4 + 1, 1)] {
        let text = rejected(|b| b.forward(&NormSpec::rms(rows, cols, 1e-6), forward()));
        assert!(text.contains("exceed the largest size"), "{rows}x{cols}: {text}");
    }
    let text = rejected(|b| b.forward(&RMS, strided(usize::MAX, COLS)));
    assert!(text.starts_with("x: 4 rows at a stride of"), "{text}");
}

#[test]
fn tensors_without_a_use_and_missing_ones_are_named() {
    let cases = [
        (rejected(|b| b.forward(&RMS, forward().mean(own(5, ROWS)))), "mean must not be given"),
        (rejected(|b| b.backward(&RMS, backward().mean(own(5, ROWS)))), "mean must not be given"),
        (rejected(|b| b.forward(&RMS, forward().residual_out(own(5, 40)))), "residual_out must not be given"),
        (rejected(|b| b.backward(&LAYER, backward())), "mean is missing"),
    ];
    for (got, expected) in cases {
        assert!(got.starts_with(expected), "{got}");
    }
}

#[test]
fn dtype_mixes_outside_the_rule_are_unsupported() {
    fn mix<T: Element, W: Element, R: Element>() -> Result<(), Error> {
        let x = Forward::<Numbers, T>::new(own(1, ROWS * COLS), own(2, ROWS * COLS));
        Numbers::default().forward(&RMS, x.weight_dtype::<W>().residual_dtype::<R>())
    }
    assert!(mix::<bf16, f32, f32>().is_ok() && mix::<f16, f16, f32>().is_ok() && mix::<f32, f32, f32>().is_ok());
    for result in [mix::<f32, bf16, f32>(), mix::<bf16, f16, bf16>(), mix::<f16, f32, bf16>(), mix::<f32, f32, f16>()] {
        assert!(matches!(result, Err(Error::Unsupported { .. })), "{result:?}");
    }
}

#[test]
fn locks_without_a_group_are_invalid() {
    let call = backward().grad_reduction(GradReduction::Locks { groups: 0 });
    assert!(
        rejected(|b| b.backward(&RMS, call)).starts_with("grad_reduction: GradReduction::Locks needs at least 1 group")
    );
}

#[test]
fn outputs_that_overlap_another_tensor_are_rejected() {
    let matrix = |start| at::<f32>(7, start, ROWS * COLS);
    let bytes = (ROWS * COLS * 4) as u64;
    // The same place, and one byte before its end.
    for start in [0, 4, bytes - 1] {
        let text = rejected(|b| b.forward(&RMS, Forward::<_, f32>::new(matrix(0), matrix(start))));
        assert!(text.starts_with("y overlaps x"), "{text}");
    }
    assert!(Numbers::default().forward(&RMS, Forward::<_, f32>::new(matrix(0), matrix(bytes))).is_ok());

    let text = rejected(|b| b.forward(&RMS, forward().weight(own(2, COLS))));
    assert!(text.starts_with("y overlaps weight"), "{text}");
    let text = rejected(|b| b.backward(&RMS, backward().dweight(own(9, COLS)).dbias(own(9, COLS))));
    assert!(text.starts_with("dweight overlaps dbias"), "{text}");
    let text = rejected(|b| b.backward(&RMS, backward().workspace(own(3, 20))));
    assert!(text.starts_with("dx overlaps workspace"), "{text}");
}

#[test]
fn inputs_may_share_memory() {
    let x = own::<f32>(1, ROWS * COLS);
    let call = Backward::<Numbers, f32>::new(x, x, own(4, ROWS), own(3, ROWS * COLS));
    assert!(Numbers::default().backward(&RMS, call).is_ok());
}

#[test]
fn slices_of_one_fused_buffer_do_not_overlap() {
    // A row of 30 elements holds x, another slice, and y.
    let part = |column: u64| at::<f32>(7, column * 4, 3 * 30 + COLS);
    let call = |x, y| Forward::<Numbers, f32>::new(Rows::strided(part(x), 30), Rows::strided(part(y), 30));
    assert!(Numbers::default().forward(&RMS, call(0, 20)).is_ok());
    assert!(Numbers::default().forward(&RMS, call(20, 0)).is_ok());
    assert!(Numbers::default().forward(&RMS, call(0, 10)).is_ok());
    for y in [0, 9, 21] {
        // From column 21, y reaches into column 0 of the next row.
        assert!(rejected(|b| b.forward(&RMS, call(0, y))).starts_with("y overlaps x"), "column {y}");
    }
}

#[test]
fn zero_rows_need_no_memory() {
    let norm = NormSpec::layer(0, COLS, 1e-6);
    let call = Backward::<Numbers, f32>::new(own(1, 0), own(1, 0), own(1, 0), own(1, 0)).mean(own(1, 0));
    assert!(Numbers::default().backward(&norm, call.dweight(own(2, COLS))).is_ok());
}

/// The expected result, in arithmetic that cannot overflow.
fn fits(rows: usize, cols: usize, stride: usize, len: usize, dtype: DType) -> bool {
    let (rows, cols, stride, len) = (rows as u128, cols as u128, stride as u128, len as u128);
    let max = rows * stride;
    let min = if rows == 0 { 0 } else { max - stride + cols };
    cols > 0
        && stride >= cols
        && max.saturating_mul(dtype.size() as u128) <= isize::MAX as u128
        && (min..=max).contains(&len)
}

/// Small sizes, and sizes near powers of two up to the end of the range.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        0usize..20,
        (0u32..64).prop_map(|bit| 1 << bit),
        (0u32..64).prop_map(|bit| (1usize << bit) - 1),
        any::<usize>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4096) })]

    /// Accepted exactly if the tensors hold their rows; never a panic or a wrapped product.
    #[test]
    fn layout_is_accepted_exactly_when_it_fits(
        rows in size(), cols in size(), x_stride in size(), y_stride in size(), x_len in size(), y_len in size(),
        exact in any::<bool>(),
    ) {
        let exact_len = |stride: usize| rows.checked_mul(stride).unwrap_or(0);
        let (x_len, y_len) = if exact { (exact_len(x_stride), exact_len(y_stride)) } else { (x_len, y_len) };
        let (x, y) = (Rows::strided(own(1, x_len), x_stride), Rows::strided(own(2, y_len), y_stride));
        let call = Forward::<Numbers, f16>::new(x, y);
        let expected = fits(rows, cols, x_stride, x_len, DType::F16) && fits(rows, cols, y_stride, y_len, DType::F16);
        let result = Numbers::default().forward(&NormSpec::rms(rows, cols, 1e-6), call);
        prop_assert_eq!(result.is_ok(), expected, "{:?}", result);
    }

    /// Two matrices overlap exactly if they share a byte of an element.
    #[test]
    fn overlap_is_found_exactly(
        rows in 1usize..4, cols in 1usize..5, x_pad in 0usize..8, y_pad in 0usize..8, y_start in 0u64..120,
    ) {
        let (x_stride, y_stride) = (cols + x_pad, cols + y_pad);
        let (x_len, y_len) = ((rows - 1) * x_stride + cols, (rows - 1) * y_stride + cols);
        let bytes = |start: usize, stride: usize| {
            (0..rows * cols).flat_map(move |i| {
                let element = start + 2 * (i / cols * stride + i % cols);
                [element, element + 1]
            })
        };
        let x: Vec<usize> = bytes(40, x_stride).collect();
        let shares = bytes(y_start as usize, y_stride).any(|byte| x.contains(&byte));
        let (x, y) = (Rows::strided(at(7, 40, x_len), x_stride), Rows::strided(at(7, y_start, y_len), y_stride));
        let call = Forward::<Numbers, f16>::new(x, y);
        let rejected = Numbers::default().forward(&NormSpec::rms(rows, cols, 1e-6), call).is_err();
        // Disjoint rows of different strides may be rejected; a shared byte must be rejected.
        prop_assert!(rejected || !shares);
        if x_stride == y_stride && rows > 1 {
            prop_assert_eq!(rejected, shares);
        }
    }
}

/// Debug output of a refused call: its tensors with dtypes, lengths and strides.
#[test]
fn arguments_are_described_without_what_they_hold() {
    let args = Forward::<Numbers, bf16>::new(Rows::strided(own(1, 37), 12), own(2, 30)).f32_weight();
    let text = format!("{:?}", args.weight(own(3, 10)).rstd(own(4, 3)));
    assert_eq!(text, "Forward { x: bf16[37] by 12, weight: f32[10], y: bf16[30], rstd: f32[3] }");
    let heads = RowGroups { rows: 2, stride: 60 };
    let args = Forward::<Numbers, bf16>::new(Rows::grouped(own(1, 80), 10, heads), own(2, 40));
    assert_eq!(format!("{args:?}"), "Forward { x: bf16[80] by 10 in groups of 2 by 60, y: bf16[40] }");
    let args = Forward::<Numbers, f16>::in_place(own(1, 30)).residual_in_place(own(2, 30));
    assert_eq!(format!("{args:?}"), "Forward { x: f16[30], residual: f16[30] }");
    let text = format!("{:?}", backward().dweight(own(5, COLS)));
    let tensors = "x: f32[40], rstd: f32[4], dy: f32[40], dx: f32[40], dweight: f32[10]";
    assert_eq!(text, format!("Backward {{ grad_reduction: Partials, {tensors} }}"));
}
