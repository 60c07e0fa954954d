//! Gradients of weight and bias as f32 sums: valid combinations, the resulting problem, and
//! backends without them.

use super::*;

type Summing = Numbers<true>;

fn view<E>(allocation: u64, len: usize) -> View<E> {
    View { span: Span { allocation, start: 0, len }, element: PhantomData }
}

fn args<B>() -> Backward<'static, B, bf16>
where
    B: for<'a> NormBackend<In<'a, bf16> = View<bf16>, Out<'a, bf16> = View<bf16>>,
    B: for<'a> NormBackend<In<'a, f32> = View<f32>, Out<'a, f32> = View<f32>>,
{
    Backward::new(view(1, ROWS * COLS), view(2, ROWS * COLS), view(3, ROWS), view(4, ROWS * COLS))
}

fn check(args: Backward<'static, Summing, bf16>) -> Result<Problem, String> {
    let checked = Checked::backward(&Numbers::<true>, NormSpec::rms(ROWS, COLS, 1e-6), args);
    checked.map(|checked| *checked.problem()).map_err(|error| error.to_string())
}

#[test]
fn sums_are_dweight_and_dbias_in_f32() {
    let problem = check(args().dweight_sum(view(5, COLS)).dbias_sum(view(6, COLS))).unwrap();
    assert_eq!((problem.grad_store, problem.dtypes.weight), (GradStore::Sum, DType::Bf16));
    for tensor in [Tensor::Dweight, Tensor::Dbias] {
        assert!(problem.has(tensor) && problem.storage(tensor) == Some(DType::F32.into()));
    }
    assert_eq!(problem.storage(Tensor::Dx), Some(DType::Bf16.into()));
    let args_of = |problem: &Problem| [Tensor::Dweight, Tensor::Dbias, Tensor::Dx].map(|tensor| problem.arg(tensor));
    assert_eq!(args_of(&problem), ["dweight_sum", "dbias_sum", "dx"]);
    let problem = check(args().dbias_sum(view(6, COLS)).accumulate()).unwrap();
    assert_eq!((problem.grad_store, problem.has(Tensor::Dweight)), (GradStore::Accumulated, false));
    assert_eq!(args_of(&problem), ["dweight_sum", "dbias_sum", "dx"]);
    let problem = check(args().dweight(view(5, COLS))).unwrap();
    assert_eq!((problem.grad_store, problem.storage(Tensor::Dweight)), (GradStore::Rounded, Some(DType::Bf16.into())));
    assert_eq!(args_of(&problem), ["dweight", "dbias", "dx"]);
}

#[test]
fn gradients_are_all_rounded_or_all_sums() {
    let says = |answer: Result<Problem, String>, what: &str| answer.unwrap_err().contains(what);
    assert!(says(check(args().dweight(view(5, COLS)).dweight_sum(view(6, COLS))), "dweight"));
    assert!(says(check(args().dweight(view(5, COLS)).dbias_sum(view(6, COLS))), "dweight"));
    assert!(says(check(args().dbias(view(5, COLS)).dweight_sum(view(6, COLS))), "dbias"));
    assert!(says(check(args().accumulate()), "accumulate"));
    assert!(says(check(args().dweight(view(5, COLS)).accumulate()), "accumulate"));
}

#[test]
fn sums_are_held_to_their_length_and_keep_apart() {
    assert!(check(args().dweight_sum(view(5, COLS - 1))).unwrap_err().contains("dweight_sum"));
    assert!(check(args().dbias_sum(view(5, COLS + 1))).unwrap_err().contains("dbias_sum"));
    let overlap = check(args().dweight_sum(view(5, COLS)).dbias_sum(view(5, COLS))).unwrap_err();
    assert_eq!(overlap, Error::Overlap { output: "dweight_sum", other: "dbias_sum" }.to_string());
    assert!(check(args().dweight_sum(view(4, COLS))).is_err(), "over dx");
}

/// A backend without f32 sums receives no such call: it would treat them as gradients in the
/// weight's dtype.
#[test]
fn a_backend_without_sums_is_not_asked_for_them() {
    let refused = |args: Backward<'static, Numbers, bf16>| match Checked::backward(
        &Numbers::<false>,
        NormSpec::rms(ROWS, COLS, 1e-6),
        args,
    ) {
        Err(Error::Unsupported { rule }) => rule.contains("numbers"),
        Ok(_) | Err(_) => false,
    };
    assert!(refused(args().dweight_sum(view(5, COLS))) && refused(args().dbias_sum(view(5, COLS)).accumulate()));
    assert!(!refused(args().dweight(view(5, COLS))));
}
