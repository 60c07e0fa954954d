//! Calls with run-time dtypes: each view carries its type, which must match the call's dtypes, and
//! conversions both ways are exact.

use super::*;
use crate::{AnyIn, AnyOut, Source};

/// A change of a call, and the name of the changed argument.
type Changes<A, const N: usize> = [(&'static str, fn(&mut A)); N];

fn view<E>(allocation: u64, len: usize) -> View<E> {
    View { span: Span { allocation, start: 0, len }, element: PhantomData }
}

fn forward() -> AnyForward<'static, Numbers> {
    let args = Forward::<Numbers, bf16>::new(view(1, ROWS * COLS), view(2, ROWS * COLS)).f32_weight().f32_residual();
    let args = args.weight(view(3, COLS)).bias(view(4, COLS)).residual(view::<f32>(5, ROWS * COLS));
    args.residual_out(view::<f32>(6, ROWS * COLS)).rstd(view(7, ROWS)).erase()
}

fn backward() -> AnyBackward<'static, Numbers> {
    let (matrix, vector) = (ROWS * COLS, COLS);
    let args = Backward::<Numbers, bf16>::new(view(1, matrix), view(2, matrix), view(3, ROWS), view(4, matrix));
    args.weight(view(5, vector)).dweight(view(6, vector)).erase()
}

fn quantized() -> AnyQuantizedForward<'static, Numbers> {
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
    let args = QuantizedForward::<Numbers, bf16, F8E4M3>::new(quant, view(1, ROWS * COLS), view(2, ROWS * COLS));
    args.scales(view(3, ROWS)).erase()
}

fn of_forward(args: AnyForward<'static, Numbers>) -> Result<Problem, Error> {
    Checked::forward(NormSpec::rms(ROWS, COLS, 1e-6), args).map(|checked| *checked.problem())
}

fn of_backward(args: AnyBackward<'static, Numbers>) -> Result<Problem, Error> {
    Checked::backward(&Numbers::<false>, NormSpec::rms(ROWS, COLS, 1e-6), args).map(|checked| *checked.problem())
}

fn of_quantized(args: AnyQuantizedForward<'static, Numbers>) -> Result<Problem, Error> {
    Checked::quantized_forward(NormSpec::rms(ROWS, COLS, 1e-6), args).map(|checked| *checked.problem())
}

fn refused(answer: Result<Problem, Error>) -> (&'static str, String) {
    match answer {
        Err(Error::InvalidArgument { arg, rule }) => (arg, rule),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_call_without_types_has_the_problem_of_the_one_with_types() {
    let dtypes = DTypes::uniform(DType::Bf16);
    assert_eq!(of_forward(forward()).unwrap().dtypes, dtypes.widened(true, true));
    assert_eq!(of_backward(backward()).unwrap().dtypes, dtypes);
    let problem = of_quantized(quantized()).unwrap();
    assert_eq!((problem.dtypes, problem.storage(Tensor::Codes)), (dtypes, Some(Storage::Code(CodeType::E4m3))));
    assert!(forward().restore::<bf16, f32, f32>().is_ok() && backward().restore::<bf16, bf16, bf16>().is_ok());
    assert!(quantized().restore::<bf16, F8E4M3, bf16, bf16>().is_ok());
}

#[test]
fn a_view_of_another_type_is_refused_and_named() {
    let mut args = forward();
    args.x = Some(Source::Read(Rows::dense(AnyIn::F16(view(1, ROWS * COLS)))));
    assert_eq!(refused(of_forward(args)), ("x", "its elements are bf16 by the dtypes of the call, got f16".into()));
    let changes: Changes<AnyForward<'static, Numbers>, 5> = [
        ("weight", |args| args.weight = Some(AnyIn::Bf16(view(3, COLS)))),
        ("bias", |args| args.bias = Some(AnyIn::E8m0(view(4, COLS)))),
        ("residual", |args| args.residual = Some(Source::Read(Rows::dense(AnyIn::Bf16(view(5, ROWS * COLS)))))),
        ("residual_out", |args| args.residual_out = Some(Rows::dense(AnyOut::Bf16(view(6, ROWS * COLS))))),
        ("rstd", |args| args.rstd = Some(AnyOut::Bf16(view(7, ROWS)))),
    ];
    for (name, change) in changes {
        let mut args = forward();
        change(&mut args);
        assert_eq!(refused(of_forward(args)).0, name);
    }
    let changes: Changes<AnyBackward<'static, Numbers>, 3> = [
        ("dy", |args| args.dy = Rows::dense(AnyIn::F32(view(1, ROWS * COLS)))),
        ("dx", |args| args.dx = Some(Rows::dense(AnyOut::Int8(view(4, ROWS * COLS))))),
        ("dweight", |args| args.dweight = Some(AnyOut::F32(view(6, COLS)))),
    ];
    for (name, change) in changes {
        let mut args = backward();
        change(&mut args);
        assert_eq!(refused(of_backward(args)).0, name);
    }
    let mut args = backward();
    (args.dweight, args.dweight_sum) = (None, Some(AnyOut::Bf16(view(6, COLS))));
    let answer = Checked::backward(&Numbers::<true>, NormSpec::rms(ROWS, COLS, 1e-6), args);
    let (name, rule) = refused(answer.map(|checked| *checked.problem()));
    assert_eq!((name, &*rule), ("dweight_sum", "its elements are f32 by the dtypes of the call, got bf16"));
    let changes: Changes<AnyQuantizedForward<'static, Numbers>, 3> = [
        ("codes", |args| args.codes = Rows::dense(AnyOut::E5m2(view(2, ROWS * COLS)))),
        ("codes", |args| args.codes = Rows::dense(AnyOut::E8m0(view(2, ROWS * COLS)))),
        ("scales", |args| args.scales = Some(Scales::F32(AnyOut::E8m0(view(3, ROWS))))),
    ];
    for (name, change) in changes {
        let mut args = quantized();
        change(&mut args);
        assert_eq!(refused(of_quantized(args)).0, name);
    }
}

#[test]
fn types_come_back_only_as_they_were() {
    for refused in [
        forward().restore::<f16, f32, f32>().err(),
        forward().restore::<bf16, bf16, f32>().err(),
        forward().restore::<bf16, f32, bf16>().err(),
        backward().restore::<bf16, f32, bf16>().err(),
        quantized().restore::<bf16, F8E5M2, bf16, bf16>().err(),
    ] {
        assert!(matches!(refused, Some(Error::InvalidArgument { arg: "dtypes", .. })), "{refused:?}");
    }
}

#[test]
fn statistics_of_another_type_are_refused() {
    let args = crate::PartialStatistics::<Numbers, bf16>::new(view(1, ROWS * COLS), view(2, ROWS));
    let check =
        |args| Checked::partial_statistics(NormSpec::rms(ROWS, COLS, 1e-6), args).map(|checked| *checked.problem());
    let mut args = args.erase();
    args.statistics = AnyOut::Bf16(view(2, ROWS));
    assert_eq!(refused(check(args)), ("statistics", "its elements are f32, got bf16".into()));
}
