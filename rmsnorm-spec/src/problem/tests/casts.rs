//! Calls whose y has another dtype than their x: what they are, and what is refused by which name.

use super::*;
use crate::{AnyIn, AnyOut, OutputRows, ShardedRows, Source, WithStatistics};

const MATRIX: usize = ROWS * COLS;
const SPEC: NormSpec = NormSpec::layer(ROWS, COLS, 1e-6);

fn view<E>(allocation: u64, len: usize) -> View<E> {
    View { span: Span { allocation, start: 0, len }, element: PhantomData }
}

fn forward<T: Element, R: Element>() -> Forward<'static, Numbers, T, T, R> {
    Forward::cast(view(1, MATRIX), view(2, MATRIX))
}

fn backward<T: Element, R: Element>() -> Backward<'static, Numbers, T, T, R> {
    Backward::cast(view(1, MATRIX), view(2, MATRIX), view(3, ROWS), view(4, MATRIX)).mean(view(5, ROWS))
}

fn of_forward(spec: NormSpec, args: AnyForward<'static, Numbers>) -> Result<Problem, Error> {
    Checked::forward(spec, args).map(|checked| *checked.problem())
}

fn of_backward(spec: NormSpec, args: AnyBackward<'static, Numbers>) -> Result<Problem, Error> {
    Checked::backward(&Numbers::<false>, spec, args).map(|checked| *checked.problem())
}

/// Every tensor that may be there is, and each has its dtype.
#[test]
fn a_cast_normalizes_the_stream_alone() {
    let gated = SPEC.gate_after(Activation::Silu).cast_order(CastOrder::BeforeWeight).groups(1);
    let args = forward::<f32, bf16>().weight(view(3, COLS)).bias(view(4, COLS)).gate(view(5, MATRIX));
    let problem = of_forward(gated, args.mean(view(6, ROWS)).rstd(view(7, ROWS)).erase()).unwrap();
    let tensors = [Tensor::Residual, Tensor::Weight, Tensor::Bias, Tensor::Y, Tensor::Mean, Tensor::Rstd, Tensor::Gate];
    assert_eq!(problem.tensors, TensorSet::of(&tensors));
    assert!(problem.tensors.is_cast() && !problem.tensors.is_in_place() && !problem.tensors.adds_residual());
    assert_eq!(problem.pieces(), PieceSet::of(&[Piece::GateAfter]));
    let of = |tensor| problem.storage(tensor);
    assert_eq!(of(Tensor::Residual), Some(DType::Bf16.into()));
    assert_eq!([of(Tensor::Y), of(Tensor::Weight), of(Tensor::Gate)], [Some(DType::F32.into()); 3]);
    assert_eq!((problem.arg(Tensor::Residual), problem.arg(Tensor::Y)), ("x", "y"));

    let args = backward::<bf16, f32>().f32_weight().weight(view(6, COLS)).dresidual_out(view::<f32>(7, MATRIX));
    let problem = of_backward(SPEC, args.erase()).unwrap();
    let tensors = [Tensor::X, Tensor::Weight, Tensor::Mean, Tensor::Rstd, Tensor::Dy];
    let tensors = TensorSet::of(&tensors).with(Tensor::DresidualOut).with(Tensor::Dresidual);
    assert_eq!((problem.tensors, problem.tensors.is_cast()), (tensors, true));
    let of = |tensor| problem.storage(tensor);
    assert_eq!([of(Tensor::X), of(Tensor::Dresidual)], [Some(DType::F32.into()); 2]);
    assert_eq!((of(Tensor::Dy), problem.arg(Tensor::Dresidual)), (Some(DType::Bf16.into()), "dx"));
}

#[test]
fn every_mix_of_two_dtypes_is_valid_but_two_of_sixteen_bits() {
    assert!(of_forward(SPEC, forward::<f32, f16>().erase()).is_ok());
    assert!(of_forward(SPEC, forward::<f16, f32>().erase()).is_ok());
    assert!(of_forward(SPEC, forward::<bf16, bf16>().erase()).is_ok(), "code that is generic over both");
    assert!(of_backward(SPEC, backward::<f32, bf16>().erase()).is_ok());
    assert!(of_backward(SPEC, backward::<f16, f32>().erase()).is_ok());
    for refused in
        [of_forward(SPEC, forward::<f16, bf16>().erase()), of_backward(SPEC, backward::<f16, bf16>().erase())]
    {
        let text = refused.unwrap_err().to_string();
        let rule = "x and y must have one dtype, or one of them f32, got x bf16 and y f16";
        assert_eq!(text, format!("unsupported: {rule}"));
    }
    // With a weight of the dtype of x instead of y.
    let args = forward::<f32, bf16>().weight_dtype::<bf16>().weight(view(3, COLS));
    assert!(matches!(of_forward(SPEC, args.erase()), Err(Error::Unsupported { .. })));
    // A sum keeps the mixes that it had.
    let sum = Forward::<Numbers, f32>::new(view(1, MATRIX), view(2, MATRIX)).residual_dtype::<bf16>();
    assert!(matches!(of_forward(SPEC, sum.residual(view(3, MATRIX)).erase()), Err(Error::Unsupported { .. })));
    let both =
        Backward::<Numbers, f32, f32, bf16>::mixed(view(1, MATRIX), view(2, MATRIX), view(3, ROWS), view(4, MATRIX));
    assert!(matches!(of_backward(SPEC, both.mean(view(5, ROWS)).erase()), Err(Error::Unsupported { .. })));
}

/// The error of a forward call, without its reason.
fn refused(spec: NormSpec, change: impl FnOnce(&mut AnyForward<'static, Numbers>)) -> String {
    let mut args = forward::<f32, bf16>().erase();
    change(&mut args);
    match of_forward(spec, args) {
        Err(Error::Missing { arg, .. }) => format!("missing {arg}"),
        Err(Error::Unexpected { arg, .. }) => format!("unexpected {arg}"),
        Err(Error::Unsupported { rule }) => rule,
        other => format!("{other:?}"),
    }
}

#[test]
fn nothing_is_added_to_a_cast_and_nothing_overwritten() {
    let of_stream = |allocation| Rows::dense(AnyOut::Bf16(view(allocation, MATRIX)));
    assert_eq!(refused(SPEC, |args| args.y = None), "missing y");
    assert_eq!(refused(SPEC, |args| args.residual = None), "missing x");
    assert_eq!(refused(SPEC, |args| args.residual_out = Some(of_stream(8))), "unexpected residual_out");
    let overwritten = refused(SPEC, |args| args.residual = Some(Source::Overwrite(of_stream(8))));
    assert_eq!(overwritten, "unexpected residual");
    let next = refused(SPEC, |args| args.next_weight = Some(AnyIn::F32(view(8, COLS))));
    assert_eq!(next, "unexpected next_weight");
    let parts = refused(SPEC, |args| args.parts = Some(Parts { count: 2, stride: MATRIX }));
    assert!(parts.starts_with("no call adds parts and makes y of another dtype"), "{parts}");
    let after = refused(SPEC.residual_after(), |_| {});
    assert!(after.starts_with("no call makes y of another dtype than x"), "{after}");
    let before = refused(SPEC.gate_before(Activation::Silu), |args| {
        args.gate = Some(Rows::dense(AnyIn::F32(view(8, MATRIX))));
    });
    assert!(before.starts_with("no call has a gate before the norm"), "{before}");
    // A residual would take the place of x.
    for twice in
        [forward::<f32, bf16>().residual(view(8, MATRIX)), forward::<f32, bf16>().residual_in_place(view(8, MATRIX))]
    {
        let error = of_forward(SPEC, twice.erase()).unwrap_err();
        assert!(matches!(error, Error::Unexpected { arg: "residual", .. }), "{error}");
        assert!(error.to_string().contains("Forward::cast adds none"), "{error}");
    }
    let mut none = backward::<f32, bf16>().erase();
    none.dresidual = None;
    assert!(matches!(of_backward(SPEC, none), Err(Error::Missing { arg: "dx", .. })));
}

/// Messages call the tensors by their names in the call.
#[test]
fn the_stream_of_a_cast_is_called_x_and_its_gradient_dx() {
    let short = Forward::<Numbers, f32, f32, bf16>::cast(view(1, MATRIX - 1), view(2, MATRIX));
    assert!(matches!(of_forward(SPEC, short.erase()), Err(Error::Length { arg: "x", .. })));
    let over = Forward::<Numbers, f32, f32, bf16>::cast(view(1, MATRIX), view(1, MATRIX));
    assert!(matches!(of_forward(SPEC, over.erase()), Err(Error::Overlap { output: "y", other: "x" })));
    let mut short = backward::<f32, bf16>();
    short.dresidual = Some(view(4, MATRIX - 1).into());
    assert!(matches!(of_backward(SPEC, short.erase()), Err(Error::Length { arg: "dx", .. })));
    let mut over = backward::<bf16, f32>();
    over.dresidual = Some(view(2, MATRIX).into());
    assert!(matches!(of_backward(SPEC, over.erase()), Err(Error::Overlap { output: "dx", other: "x" })));
}

/// Ranks divide neither the rows nor the columns of a cast.
#[test]
fn ranks_have_no_casts() {
    let args = forward::<f32, bf16>().erase();
    let given = WithStatistics::new(args, AnyIn::F32(view(9, 2 * ROWS * 3)), &[COLS, COLS]);
    let refused = Checked::forward_with_statistics(SPEC, given).map(|_| ()).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported { rule } if rule.contains("x and y have one dtype")), "{refused}");
    let given = WithStatistics::new(backward::<f32, bf16>().erase(), AnyIn::F32(view(9, 2 * ROWS * 2)), &[COLS, COLS]);
    let refused = Checked::backward_with_statistics(&Numbers::<false>, SPEC, given).map(|_| ()).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported { rule } if rule.contains("x and y have one dtype")), "{refused}");
    let rows = ShardedRows::new(forward::<f32, bf16>().erase(), 0..1, OutputRows::Own);
    let refused = Checked::forward_rows(SPEC, rows).map(|_| ()).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported { rule } if rule.contains("x and y have one dtype")), "{refused}");
}
