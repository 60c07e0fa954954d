//! An `x` of several parts: its length, its overlap with other tensors, and calls that refuse it.

use super::*;

const MIX: Mix = MIXES[0];

fn with(form: Form, count: usize, stride: usize) -> Call {
    Call { parts: Some(Parts { count, stride }), ..Call::full(form) }
}

fn with_len(mut call: Call, len: usize) -> Call {
    call.set("x", |x| x.span.len = len);
    call
}

/// `x` reaches to the end of the last part: dense parts, parts side by side in strided rows,
/// overlapping parts.
#[test]
fn x_reaches_to_the_end_of_the_last_part() {
    let dense = ROWS * COLS;
    for (count, stride, row_stride, len) in [
        (4, dense, None, 4 * dense),
        (4, COLS, Some(4 * COLS), (ROWS - 1) * 4 * COLS + 4 * COLS),
        (2, 1, None, dense + 1),
        (3, dense + 5, None, 2 * (dense + 5) + dense),
        (1, 12345, None, dense),
    ] {
        let mut call = with(Form::Forward, count, stride);
        call.set("x", |x| x.row_stride = row_stride);
        let padded = row_stride.map_or(0, |row_stride| row_stride - COLS);
        for (got, is_right) in [(len, true), (len + padded, true), (len - 1, false), (len + padded + 1, false)] {
            let answer = with_len(call.clone(), got).check(MIX);
            match is_right {
                true => assert_eq!(answer.expect("a good call").problem.parts, count),
                false => {
                    let error = Error::Length { arg: "x", min: len, max: len + padded, got };
                    assert_eq!(answer.map(|_| ()).unwrap_err().to_string(), error.to_string());
                }
            }
        }
    }
}

/// Without rows, parts have no elements.
#[test]
fn without_rows_there_is_nothing_of_any_part() {
    // Dense parts have a stride of 0 then.
    for stride in [1000, 0] {
        let mut call = with(Form::Forward, 4, stride);
        call.spec.rows = 0;
        for entry in table(Form::Forward) {
            if matches!(entry.shape, Shape::Matrix | Shape::OfRows) {
                call.set(entry.name, |place| place.span.len = 0);
            }
        }
        assert_eq!(call.check(MIX).expect("a good call").problem.parts, 4);
    }
}

#[test]
fn calls_that_have_no_parts_say_so() {
    let rule = |call: Call| call.check(MIX).map(|_| ()).unwrap_err().to_string();
    assert_eq!(rule(with(Form::Forward, 0, COLS)), "x: the number of parts must be at least 1, got 0");
    assert_eq!(rule(with(Form::InPlace, 2, ROWS * COLS)), "x: a sum of parts cannot overwrite x: use Forward::new");
    let apart = "x: the stride of parts must be at least 1, got 0";
    assert_eq!([2, usize::MAX].map(|count| rule(with(Form::Forward, count, 0))), [apart; 2]);
    let after = "unsupported: no call combines parts with a residual after the norm";
    for form in [Form::After, Form::AfterInPlace] {
        assert_eq!(rule(with(form, 2, ROWS * COLS)), after);
    }
}

/// A product that would wrap is refused as too large.
#[test]
fn sizes_that_overflow_are_refused() {
    for (count, stride) in
        [(usize::MAX, 2), (3, usize::MAX / 2), (2, isize::MAX as usize / 4), (usize::MAX, usize::MAX)]
    {
        let error = with(Form::Forward, count, stride).check(MIX).map(|_| ()).unwrap_err().to_string();
        let expected = format!("x: {count} parts at a stride of {stride} f32 elements exceed the largest size of");
        assert!(error.starts_with(&expected), "{error}");
    }
}

/// An output must not overlap any part of x, which the call would read after the write.
#[test]
fn outputs_overlap_no_part() {
    let len = 3 * ROWS * COLS;
    for part in 0..3 {
        let mut call = with_len(with(Form::Forward, 3, ROWS * COLS), len);
        let mut x = None;
        call.set("x", |place| x = Some(place.span));
        let x = x.expect("an x");
        call.set("y", |y| {
            y.span = Span { start: x.start + (4 * part * ROWS * COLS) as u64, ..Span { len: y.span.len, ..x } }
        });
        let error = call.check(MIX).map(|_| ()).unwrap_err().to_string();
        assert_eq!(error, Error::Overlap { output: "y", other: "x" }.to_string());
    }
}

/// A change of dtype after `parts` keeps the parts.
#[test]
fn parts_survive_a_change_of_dtype() {
    let view = |allocation, len| View { span: Span { allocation, start: 0, len }, element: PhantomData::<bf16> };
    let found = |count, stride| {
        let args =
            Forward::<Numbers, bf16>::new(view(1, count * ROWS * COLS), view(2, ROWS * COLS)).parts(count, stride);
        let args = args.f32_weight().f32_residual();
        let checked = Checked::forward(NormSpec::rms(ROWS, COLS, 1e-6), args).expect("a good call");
        (checked.problem().parts, checked.part_stride())
    };
    assert_eq!(found(2, ROWS * COLS), (2, ROWS * COLS));
    assert_eq!(found(1, 7), (1, 0), "one part is at no distance from another");
}
