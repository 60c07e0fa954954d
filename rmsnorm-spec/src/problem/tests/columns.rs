//! The two halves of a call whose columns are divided among ranks.

use super::*;
use crate::{PartialBackwardStatistics, PartialStatistics, WithStatistics};

const COLUMNS: [usize; 3] = [12, COLS, 7];

/// Elements at this address, in one common allocation.
fn view<E>(start: u64, len: usize) -> View<E> {
    View { span: Span { allocation: 1, start, len }, element: PhantomData }
}

/// Addresses far enough apart that nothing overlaps.
const X: u64 = 0x10000;
const RESIDUAL: u64 = 0x20000;
const WEIGHT: u64 = 0x30000;
const MEAN: u64 = 0x40000;
const RSTD: u64 = 0x50000;
const DY: u64 = 0x60000;
const Y: u64 = 0x70000;
const SUM: u64 = 0x80000;
const DWEIGHT: u64 = 0x90000;
const STATISTICS: u64 = 0xa0000;
const LEN: usize = ROWS * COLS;

fn spec(norm: Norm) -> NormSpec {
    NormSpec::new(norm, ROWS, COLS, 1e-6)
}

/// The first half of a forward call, with its statistics at this place.
fn first(spec: NormSpec, (start, len): (u64, usize)) -> Result<Problem, Error> {
    let residual = Some(Rows::dense(view(RESIDUAL, LEN)));
    let args = PartialStatistics::<Numbers, f16, f32>::mixed(view(X, LEN), residual, view(start, len));
    Checked::partial_statistics(spec, args).map(|checked| *checked.problem())
}

fn first_back(spec: NormSpec, (start, len): (u64, usize)) -> Result<Problem, Error> {
    let args = PartialBackwardStatistics::<Numbers, f16, f32, f16>::new(
        view(DY, LEN),
        view(X, LEN),
        view(RSTD, ROWS),
        view(start, len),
    );
    let args = args.weight(view(WEIGHT, COLS));
    let args = if spec.norm == Norm::Layer { args.mean(view(MEAN, ROWS)) } else { args };
    Checked::partial_backward_statistics(spec, args).map(|checked| *checked.problem())
}

/// The number of columns of all ranks, and the problem of a second half.
type Second = Result<(usize, Problem), Error>;

fn second(spec: NormSpec, (start, len): (u64, usize), columns: &[usize]) -> Second {
    let args = Forward::<Numbers, f16>::new(view(X, LEN), view(Y, LEN)).weight(view(WEIGHT, COLS));
    let args = args.residual(view(RESIDUAL, LEN)).residual_out(view(SUM, LEN)).rstd(view(RSTD, ROWS));
    let args = if spec.norm == Norm::Layer { args.mean(view(MEAN, ROWS)) } else { args };
    let checked = Checked::forward_with_statistics(spec, WithStatistics::new(args, view(start, len), columns))?;
    Ok((checked.whole_cols(), *checked.problem()))
}

fn second_back(spec: NormSpec, (start, len): (u64, usize), columns: &[usize]) -> Second {
    let args = Backward::<Numbers, f16>::new(view(DY, LEN), view(X, LEN), view(RSTD, ROWS), view(Y, LEN));
    let args = args.weight(view(WEIGHT, COLS)).dweight(view(DWEIGHT, COLS));
    let args = if spec.norm == Norm::Layer { args.mean(view(MEAN, ROWS)) } else { args };
    let checked = Checked::backward_with_statistics(
        &Numbers::<false>,
        spec,
        WithStatistics::new(args, view(start, len), columns),
    )?;
    Ok((checked.whole_cols(), *checked.problem()))
}

/// The message of a refused call; `None` if it is accepted.
fn refused<A>(answer: Result<A, Error>) -> Option<String> {
    answer.err().map(|error| error.to_string())
}

fn overlap(output: &'static str, other: &'static str) -> Option<String> {
    Some(Error::Overlap { output, other }.to_string())
}

#[test]
fn statistics_have_their_numbers_for_every_row_and_rank() {
    let is = |error: Option<Error>, len: usize, got: usize| match error {
        None => len == got,
        Some(Error::Length { arg: "statistics", min, max, got: found }) => {
            len != got && (min, max, found) == (len, len, got)
        }
        Some(_) => false,
    };
    for (norm, forward, backward) in [(Norm::Rms, 1, 1), (Norm::Layer, 3, 2)] {
        for got in 0..=3 * 3 * ROWS + 1 {
            let (spec, at) = (spec(norm), (STATISTICS, got));
            assert!(is(first(spec, at).err(), forward * ROWS, got), "{norm:?} {got}");
            assert!(is(first_back(spec, at).err(), backward * ROWS, got), "{norm:?} {got}");
            assert!(is(second(spec, at, &COLUMNS).err(), 3 * forward * ROWS, got), "{norm:?} {got}");
            assert!(is(second_back(spec, at, &COLUMNS).err(), 3 * backward * ROWS, got), "{norm:?} {got}");
        }
    }
}

#[test]
fn statistics_that_are_written_share_memory_with_nothing() {
    for (at, len, other) in [(X, 2 * LEN, "x"), (RESIDUAL, 4 * LEN, "residual")] {
        // Four bytes before the end, one element behind it, and one before the beginning.
        let overlap = overlap("statistics", other);
        let (last, len) = (at + len as u64 - 4, ROWS);
        assert_eq!(refused(first(spec(Norm::Rms), (last, len))), overlap);
        assert!(first(spec(Norm::Rms), (last + 4, len)).is_ok() && first(spec(Norm::Rms), (at - 12, len)).is_ok());
        assert_eq!(refused(first(spec(Norm::Rms), (at - 8, len))), overlap);
    }
    for (at, other) in [(X, "x"), (WEIGHT, "weight"), (MEAN, "mean"), (RSTD, "rstd"), (DY, "dy")] {
        assert_eq!(refused(first_back(spec(Norm::Layer), (at, 2 * ROWS))), overlap("statistics", other));
    }
}

#[test]
fn statistics_that_are_read_share_memory_with_no_output() {
    let forward = [(Y, Some("y")), (SUM, Some("residual_out")), (MEAN, Some("mean")), (RSTD, Some("rstd"))];
    for (at, output) in forward.into_iter().chain([(X, None), (RESIDUAL, None), (WEIGHT, None)]) {
        let expected = output.and_then(|output| overlap(output, "statistics"));
        assert_eq!(refused(second(spec(Norm::Layer), (at, 9 * ROWS), &COLUMNS)), expected);
    }
    let backward = [(Y, Some("dx")), (DWEIGHT, Some("dweight"))];
    for (at, output) in backward.into_iter().chain([(X, None), (DY, None), (MEAN, None), (RSTD, None)]) {
        let expected = output.and_then(|output| overlap(output, "statistics"));
        assert_eq!(refused(second_back(spec(Norm::Layer), (at, 6 * ROWS), &COLUMNS)), expected);
    }
    let args = Forward::<Numbers, f32>::in_place(view::<f32>(X, LEN));
    let given = WithStatistics::new(args, view(X, 3 * ROWS), &COLUMNS);
    assert_eq!(refused(Checked::forward_with_statistics(spec(Norm::Rms), given)), overlap("x", "statistics"));
}

#[test]
fn every_rank_has_columns_and_one_of_them_those_that_are_here() {
    for (columns, is_good) in [
        (&[COLS][..], true),
        (&[1, COLS], true),
        (&[], false),
        (&[COLS, 0], false),
        (&[COLS + 1, COLS - 1], false),
        (&[usize::MAX, COLS], false),
    ] {
        let at = (STATISTICS, columns.len() * ROWS);
        for answer in [second(spec(Norm::Rms), at, columns), second_back(spec(Norm::Rms), at, columns)] {
            match answer {
                Ok((whole, problem)) => {
                    assert!(is_good && whole == columns.iter().sum() && problem.cols == COLS, "{columns:?}");
                }
                Err(Error::InvalidArgument { arg: "columns", .. }) => assert!(!is_good, "{columns:?}"),
                Err(error) => panic!("{columns:?}: {error}"),
            }
        }
    }
}

#[test]
fn halves_are_held_to_the_rules_of_the_whole() {
    let statistics = |numbers: usize| (STATISTICS, numbers * ROWS);
    let after = spec(Norm::Rms).residual_after();
    for answer in [
        first(after, statistics(1)).map(|_| ()),
        first_back(after, statistics(1)).map(|_| ()),
        second(after, statistics(3), &COLUMNS).map(|_| ()),
        second_back(after, statistics(3), &COLUMNS).map(|_| ()),
    ] {
        assert!(matches!(answer, Err(Error::Unsupported { .. })), "{answer:?}");
    }
    let bad = spec(Norm::Rms).eps(-1.0);
    for answer in [first(bad, statistics(1)), first_back(bad, statistics(1))] {
        assert_eq!(refused(answer), refused::<()>(Err(Error::InvalidEps { got: -1.0 })));
    }
    let parts = Forward::<Numbers, f32>::new(view(X, 2 * LEN), view(Y, LEN)).parts(2, LEN);
    let answer = Checked::forward_with_statistics(
        spec(Norm::Rms),
        WithStatistics::new(parts, view(STATISTICS, 3 * ROWS), &COLUMNS),
    );
    assert!(matches!(answer.map(|_| ()), Err(Error::Unsupported { .. })));

    let back = |spec, mean: Option<View<f32>>| {
        let args = PartialBackwardStatistics::<Numbers, f32>::new(
            view(DY, LEN),
            view(X, LEN),
            view(RSTD, ROWS),
            view(STATISTICS, 2 * ROWS),
        );
        Checked::partial_backward_statistics(spec, PartialBackwardStatistics { mean, ..args }).map(|_| ())
    };
    assert!(matches!(back(spec(Norm::Layer), None), Err(Error::Missing { arg: "mean", .. })));
    assert!(matches!(back(spec(Norm::Rms), Some(view(MEAN, ROWS))), Err(Error::Unexpected { arg: "mean", .. })));
    let short = PartialStatistics::<Numbers, f32>::new(view(X, LEN - 1), view(STATISTICS, ROWS));
    assert!(matches!(
        Checked::partial_statistics(spec(Norm::Rms), short).map(|_| ()),
        Err(Error::Length { arg: "x", .. })
    ));
}

#[test]
fn the_problem_of_a_half_is_that_of_its_tensors() {
    let problem = first(spec(Norm::Rms), (STATISTICS, ROWS)).unwrap();
    let expected = TensorSet::of(&[Tensor::X, Tensor::Residual]);
    assert_eq!(
        (problem.direction, problem.tensors, problem.dtypes.residual),
        (Direction::Forward, expected, DType::F32)
    );
    let problem = first_back(spec(Norm::Layer), (STATISTICS, 2 * ROWS)).unwrap();
    let expected = TensorSet::of(&[Tensor::Dy, Tensor::X, Tensor::Weight, Tensor::Mean, Tensor::Rstd]);
    assert_eq!(
        (problem.direction, problem.tensors, problem.dtypes.weight),
        (Direction::Backward, expected, DType::F32)
    );
}

/// A backend without halves needs no code for them.
#[test]
fn a_backend_without_halves_says_so() {
    let is_refused = |answer: Result<(), Error>| match answer {
        Err(Error::Unsupported { rule }) => rule.contains("numbers"),
        Ok(()) | Err(_) => false,
    };
    let (spec, statistics) = (spec(Norm::Rms), || view(STATISTICS, ROWS));
    let found = || view(STATISTICS, 3 * ROWS);
    assert!(is_refused(
        Numbers::<false>.partial_statistics(&spec, PartialStatistics::<_, f32>::new(view(X, LEN), statistics()))
    ));
    let args = Forward::<Numbers, f32>::new(view(X, LEN), view(Y, LEN));
    assert!(is_refused(Numbers::<false>.forward_with_statistics(&spec, WithStatistics::new(args, found(), &COLUMNS))));
    let args =
        PartialBackwardStatistics::<Numbers, f32>::new(view(DY, LEN), view(X, LEN), view(RSTD, ROWS), statistics());
    assert!(is_refused(Numbers::<false>.partial_backward_statistics(&spec, args)));
    let args = Backward::<Numbers, f32>::new(view(DY, LEN), view(X, LEN), view(RSTD, ROWS), view(Y, LEN));
    assert!(is_refused(Numbers::<false>.backward_with_statistics(&spec, WithStatistics::new(args, found(), &COLUMNS))));
}

#[test]
fn arguments_are_described_by_their_tensors() {
    let args = PartialStatistics::<Numbers, f16, f32>::mixed(
        view(X, LEN),
        Some(Rows::strided(view(RESIDUAL, 4 * COLS), COLS + 2)),
        view(STATISTICS, ROWS),
    );
    assert_eq!(format!("{args:?}"), "PartialStatistics { x: f16[30], residual: f32[40] by 12 }");
    let args = Forward::<Numbers, f32>::new(view(X, LEN), view(Y, LEN));
    let expected =
        "WithStatistics { args: Forward { x: f32[30], y: f32[30] }, statistics: f32[9], columns: [12, 10, 7] }";
    assert_eq!(
        format!("{:?}", WithStatistics::<Numbers, _>::new(args, view(STATISTICS, 3 * ROWS), &COLUMNS)),
        expected
    );
}
