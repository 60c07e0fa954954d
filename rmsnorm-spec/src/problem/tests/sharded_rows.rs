//! A residual stream sharded over ranks by rows: the tensors with own rows, their overlaps, and
//! refused calls.

use std::ops::Range;

use super::*;
use crate::{OutputRows, ShardedRows};

/// Rows of the call; this rank owns the middle ones.
const ALL: usize = 5;
const OWN: Range<usize> = 2..4;
const LEN: usize = ALL * COLS;
const OWN_LEN: usize = (OWN.end - OWN.start) * COLS;

/// Addresses far enough apart that nothing overlaps.
const X: u64 = 0x10000;
const RESIDUAL: u64 = 0x20000;
const WEIGHT: u64 = 0x30000;
const MEAN: u64 = 0x40000;
const RSTD: u64 = 0x50000;
const Y: u64 = 0x60000;
const SUM: u64 = 0x70000;

/// The places of a call's tensors, and its rows.
#[derive(Clone)]
struct Sharded {
    spec: NormSpec,
    own: Range<usize>,
    y_rows: OutputRows,
    in_place: bool,
    parts: Option<Parts>,
    tensors: Vec<(&'static str, Place)>,
}

type Args = Forward<'static, Numbers, f16, f16, f32>;

impl Sharded {
    /// A layer norm with every tensor, each dense and at its address.
    fn full(y_rows: OutputRows, in_place: bool) -> Self {
        let y_len = if y_rows == OutputRows::Own { OWN_LEN } else { LEN };
        let tensors = [
            ("x", X, LEN),
            ("residual", RESIDUAL, OWN_LEN),
            ("weight", WEIGHT, COLS),
            ("mean", MEAN, OWN.len()),
            ("rstd", RSTD, OWN.len()),
            ("y", Y, y_len),
            ("residual_out", SUM, OWN_LEN),
        ];
        let is_there = |name: &str| !in_place || !matches!(name, "y" | "residual_out");
        let place = |(name, start, len): (&'static str, u64, usize)| {
            (name, Place { span: Span { allocation: 1, start, len }, row_stride: None, groups: None })
        };
        let tensors = tensors.into_iter().filter(|(name, ..)| is_there(name)).map(place).collect();
        Sharded { spec: NormSpec::layer(ALL, COLS, 1e-5), own: OWN, y_rows, in_place, parts: None, tensors }
    }

    /// The four forms of y.
    fn all() -> impl Iterator<Item = Sharded> {
        [OutputRows::All, OutputRows::Own]
            .into_iter()
            .flat_map(|y_rows| [false, true].map(|it| Sharded::full(y_rows, it)))
    }

    fn with(mut self, name: &str, change: impl FnOnce(&mut Place)) -> Self {
        let tensor = self.tensors.iter_mut().find(|(known, _)| *known == name);
        change(&mut tensor.expect("the call has that tensor").1);
        self
    }

    fn rows<E>(&self, name: &str) -> Option<Rows<View<E>>> {
        let Place { span, row_stride, groups } = self.tensors.iter().find(|(known, _)| *known == name)?.1;
        Some(Rows { view: View { span, element: PhantomData }, row_stride, groups })
    }

    fn check(&self) -> Result<Checked<ShardedRows<Args>>, Error> {
        let x = self.rows("x").expect("a call has an x");
        let (args, residual) = match self.rows("y") {
            Some(y) => (Forward::<Numbers, f16>::new(x, y), self.rows("residual").map(Source::Read)),
            None => (Forward::<Numbers, f16>::in_place(x), self.rows("residual").map(Source::Overwrite)),
        };
        let mut args = args.f32_residual();
        (args.residual, args.residual_out) = (residual, self.rows("residual_out"));
        args.weight = self.rows("weight").map(|rows| rows.view);
        (args.mean, args.rstd) = (self.rows("mean").map(|rows| rows.view), self.rows("rstd").map(|rows| rows.view));
        args.parts = self.parts;
        Checked::forward_rows(self.spec, ShardedRows::new(args, self.own.clone(), self.y_rows))
    }

    /// The message of a refused call; `None` if it is accepted.
    fn refused(&self) -> Option<String> {
        self.check().err().map(|error| error.to_string())
    }
}

fn is_matrix(name: &str) -> bool {
    Tensor::from_name(name).is_some_and(Tensor::is_matrix)
}

fn overlap(output: &'static str, other: &'static str) -> Option<String> {
    Some(Error::Overlap { output, other }.to_string())
}

#[test]
fn a_good_call_has_the_problem_of_all_rows() {
    for call in Sharded::all() {
        let checked = call.check().expect("a good call");
        let problem = checked.problem();
        assert_eq!((problem.direction, problem.rows, problem.cols), (Direction::Forward, ALL, COLS));
        assert_eq!(
            (problem.parts, problem.dtypes),
            (1, DTypes { residual: DType::F32, ..DTypes::uniform(DType::F16) })
        );
        assert_eq!(checked.own_rows(), (OWN, call.y_rows));
        let expected = [Tensor::Residual, Tensor::ResidualOut, Tensor::X, Tensor::Y, Tensor::Mean, Tensor::Rstd];
        for tensor in expected.into_iter().chain([Tensor::Weight]) {
            let is_overwritten = call.in_place && matches!(tensor, Tensor::X | Tensor::Residual);
            assert_eq!(problem.tensors.has(tensor), !is_overwritten, "{tensor}");
        }
    }
}

/// Other lengths are refused with the name of the tensor, also all rows instead of the own rows and
/// the reverse.
#[test]
fn tensors_have_all_rows_or_the_own_ones() {
    for call in Sharded::all() {
        for (name, place) in call.tensors.clone() {
            let len = place.span.len;
            for got in [0, COLS, OWN.len(), ALL, OWN_LEN, LEN, len - 1, len + 1] {
                let refused = call.clone().with(name, |place| place.span.len = got).refused();
                let expected = Error::Length { arg: name, min: len, max: len, got }.to_string();
                assert_eq!(refused, (got != len).then_some(expected), "{name} of {got}, {:?}", call.y_rows);
            }
        }
    }
}

/// A view may end before or after the padding of the last own row.
#[test]
fn rows_that_lie_apart_are_counted_likewise() {
    let stride = COLS + 3;
    for call in Sharded::all() {
        for (name, place) in call.tensors.clone().into_iter().filter(|(name, _)| is_matrix(name)) {
            let rows = place.span.len / COLS;
            let (min, max) = ((rows - 1) * stride + COLS, rows * stride);
            for (got, is_right) in [(min - 1, false), (min, true), (max, true), (max + 1, false)] {
                let apart = call.clone().with(name, |place| {
                    (place.span.len, place.row_stride) = (got, Some(stride));
                });
                let expected = Error::Length { arg: name, min, max, got }.to_string();
                assert_eq!(apart.refused(), (!is_right).then_some(expected), "{name}");
            }
        }
        let expected = Error::Stride { arg: "residual", cols: COLS, got: COLS - 1 }.to_string();
        assert_eq!(call.with("residual", |place| place.row_stride = Some(COLS - 1)).refused(), Some(expected));
    }
}

/// Every rank reads all rows of x, so outputs must not overlap the rows of other ranks.
#[test]
fn outputs_share_memory_with_no_row_of_x() {
    // Rows of f16.
    for row in 0..ALL {
        let at = X + (2 * row * COLS) as u64;
        let sum = |y_rows| Sharded::full(y_rows, false).with("residual_out", |place| place.span.start = at);
        assert_eq!(sum(OutputRows::All).refused(), overlap("residual_out", "x"), "row {row}");
        assert_eq!(sum(OutputRows::Own).refused(), overlap("residual_out", "x"), "row {row}");
        let own_y = Sharded::full(OutputRows::Own, false).with("y", |place| place.span.start = at);
        assert_eq!(own_y.refused(), overlap("y", "x"), "row {row}");
        // Inside one row, also if y overwrites the own rows.
        for (in_place, expected) in [(false, overlap("rstd", "x")), (true, overlap("x", "rstd"))] {
            let rstd = Sharded::full(OutputRows::Own, in_place).with("rstd", |place| place.span.start = at);
            assert_eq!(rstd.refused(), expected, "row {row}");
        }
    }
    // The end of x overlaps nothing.
    let behind =
        Sharded::full(OutputRows::Own, false).with("residual_out", |place| place.span.start = X + 2 * LEN as u64);
    assert_eq!(behind.refused(), None);
}

/// A residual of the own rows ends with them.
#[test]
fn outputs_begin_where_the_own_rows_of_another_end() {
    let end = RESIDUAL + 4 * OWN_LEN as u64;
    for (start, expected) in [(end, None), (end - 4, overlap("y", "residual"))] {
        for y_rows in [OutputRows::All, OutputRows::Own] {
            assert_eq!(Sharded::full(y_rows, false).with("y", |place| place.span.start = start).refused(), expected);
        }
    }
    let end = SUM + 4 * OWN_LEN as u64;
    for (start, expected) in [(end, None), (end - 4, overlap("residual_out", "mean"))] {
        assert_eq!(
            Sharded::full(OutputRows::Own, false).with("mean", |place| place.span.start = start).refused(),
            expected
        );
    }
}

#[test]
fn a_rank_may_own_no_row_and_none_but_those_that_there_are() {
    for mut call in Sharded::all() {
        for own in [0..0, ALL..ALL] {
            let mut idle = call.clone();
            idle.own = own;
            for (name, place) in &mut idle.tensors {
                let is_own = *name != "x" && *name != "weight" && (*name != "y" || idle.y_rows == OutputRows::Own);
                place.span.len *= usize::from(!is_own);
            }
            assert_eq!(idle.refused(), None);
            assert_eq!(idle.check().expect("a good call").problem().rows, ALL);
        }
        for own in [4..6, 6..6, Range { start: 4, end: 2 }, 0..usize::MAX] {
            call.own = own.clone();
            let expected = format!("own: it must be a range within the {ALL} rows, got {own:?}");
            assert_eq!(call.refused(), Some(expected));
        }
    }
}

#[test]
fn what_has_no_form_is_refused() {
    for call in Sharded::all() {
        let parts = Sharded { parts: Some(Parts { count: 2, stride: LEN }), ..call.clone() };
        assert!(parts.refused().is_some_and(|rule| rule.ends_with("x is one matrix on every rank, no sum of parts")));
        let after = Sharded { spec: call.spec.residual_after(), ..call.clone() };
        assert!(after.refused().is_some_and(|rule| rule.ends_with("a residual is added before the norm")));
        let of_rms = Sharded { spec: NormSpec::rms(ALL, COLS, 1e-5), ..call.clone() };
        let why = "rms norm does not remove the mean";
        assert_eq!(of_rms.refused(), Some(Error::Unexpected { arg: "mean", why }.to_string()));
        let bad = Sharded { spec: call.spec.eps(-1.0), ..call.clone() };
        assert!(bad.refused().is_some_and(|rule| rule.starts_with("eps")), "{:?}", bad.refused());
        for (name, _) in call.tensors.iter().filter(|(name, _)| is_matrix(name)) {
            let grouped = call.clone().with(name, |place| {
                (place.row_stride, place.groups) = (Some(COLS), Some(RowGroups { rows: 2, stride: 3 * COLS }));
                // To the end of the last group, for all rows or the own rows.
                place.span.len = if place.span.len == LEN { 7 * COLS } else { OWN_LEN };
            });
            let expected = format!("unsupported: {name} cannot be grouped");
            assert!(grouped.refused().is_some_and(|rule| rule.starts_with(&expected)), "{:?}", grouped.refused());
        }
    }
}
