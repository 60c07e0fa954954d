//! Grouped rows: equal group sizes, places of groups, and interleaved groups.

use super::*;

/// Two groups of three rows, and one of a single row.
const GROUPED_ROWS: usize = 7;

/// A call of [`GROUPED_ROWS`] rows, each tensor dense in its own allocation.
fn call(form: Form) -> Call {
    let mut call = Call::full(form);
    call.spec.rows = GROUPED_ROWS;
    for entry in table(form) {
        call.set(entry.name, |place| match entry.shape {
            Shape::Matrix | Shape::Transposed => place.span.len = GROUPED_ROWS * COLS,
            Shape::OfRows => place.span.len = GROUPED_ROWS,
            Shape::OfCols | Shape::Workspace | Shape::One => {}
        });
    }
    call
}

fn matrices(form: Form) -> impl Iterator<Item = &'static Entry> {
    table(form).iter().filter(|entry| entry.shape == Shape::Matrix)
}

/// The first element of a row, as defined by [`Rows::grouped`].
fn start(row: usize, row_stride: usize, groups: RowGroups) -> usize {
    row / groups.rows * groups.stride + row % groups.rows * row_stride
}

/// Elements from the first to one past the last.
fn span(row_stride: usize, groups: RowGroups) -> usize {
    start(GROUPED_ROWS - 1, row_stride, groups) + COLS
}

fn place(start: u64, row_stride: usize, groups: RowGroups) -> Place {
    let span = Span { allocation: 77, start, len: span(row_stride, groups) };
    Place { span, row_stride: Some(row_stride), groups: Some(groups) }
}

fn grouped_bytes(place: Place, size: usize) -> BTreeSet<u64> {
    let (row_stride, groups) = (place.row_stride.expect("strided"), place.groups.expect("grouped"));
    let row = |row: usize| {
        let first = place.span.start + (start(row, row_stride, groups) * size) as u64;
        first..first + (COLS * size) as u64
    };
    (0..GROUPED_ROWS).flat_map(row).collect()
}

/// Two matrices with groups at the same strides are accepted if they share no byte, with
/// interleaved groups or interleaved rows. Before the first and after the last group some valid
/// places are refused; none of them is here.
#[test]
fn groups_of_two_matrices_may_take_turns_if_no_byte_is_shared() {
    // (row stride, group stride) in bytes, for rows of 20 or 40 bytes: the gaps hold rows of the
    // other matrix, or whole groups.
    for (row_bytes, group_bytes) in [(96, 260), (96, 288 + 40), (48, 520)] {
        for form in Form::ALL {
            for mix in MIXES {
                let both_matrices = |(a, b): &(&Entry, &Entry)| a.shape == Shape::Matrix && b.shape == Shape::Matrix;
                for (a, b) in pairs(form).filter(both_matrices) {
                    let sizes = [size(a, mix), size(b, mix)];
                    for first in (4096 - 600..4096 + 600u64).step_by(4) {
                        let places = [(4096, sizes[0]), (first, sizes[1])].map(|(start, size)| {
                            place(start, row_bytes / size, RowGroups { rows: 3, stride: group_bytes / size })
                        });
                        let mut call = call(form);
                        call.set(a.name, |place| *place = places[0]);
                        call.set(b.name, |place| *place = places[1]);
                        let [of_a, of_b] = [0, 1].map(|i| grouped_bytes(places[i], sizes[i]));
                        let shares = of_a.intersection(&of_b).next().is_some();
                        expect(&call, mix, (a, b), shares, &format!("{first}, {row_bytes}, {group_bytes}"));
                    }
                }
            }
        }
    }
}

/// Groups at different row strides are accepted if whole groups do not overlap, and so are rows
/// whose one stride equals the groups' stride; shared bytes are refused.
#[test]
fn groups_at_other_distances_are_apart_only_as_a_whole() {
    let groups = RowGroups { rows: 3, stride: 100 };
    for (first, is_good) in [(0, false), (30, false), (40, false), (53, false), (54, true), (70, true), (71, false)] {
        let mut call = call(Form::Forward);
        // A group of x has 54 elements, a group of y 30.
        call.set("x", |place| *place = self::place(4096, 22, groups));
        call.set("y", |place| *place = self::place(4096 + 4 * first, 10, groups));
        assert_eq!(overlap(call.check(MIXES[0])).is_none(), is_good, "{first}");
    }
    // Each group of x has 50 elements; the rows of y lie in the gaps of the first seven periods of
    // 100.
    for (first, is_good) in [(49, false), (50, true), (90, true), (91, false)] {
        let mut call = call(Form::Forward);
        call.set("x", |place| *place = self::place(4096, 20, groups));
        call.set("y", |place| {
            let span = Span { allocation: 77, start: 4096 + 4 * first, len: 6 * 100 + COLS };
            *place = Place { span, row_stride: Some(100), groups: None };
        });
        assert_eq!(overlap(call.check(MIXES[0])).is_none(), is_good, "{first}");
    }
    // Different group strides are not analyzed.
    let mut call = call(Form::Forward);
    call.set("x", |place| *place = self::place(4096, 10, groups));
    call.set("y", |place| *place = self::place(4096 + 4 * 50, 10, RowGroups { stride: 102, ..groups }));
    assert_eq!(overlap(call.check(MIXES[0])), Some(("y", "x")));
}

/// Trivial groups are dropped for every tensor; others are reported.
#[test]
fn the_problem_says_how_many_rows_a_group_has() {
    let groups = |rows, stride| Some(RowGroups { rows, stride });
    for form in Form::ALL {
        for entry in matrices(form) {
            for (row_stride, groups, len, expected) in [
                (None, None, 70, None),
                (None, groups(3, 50), 110, Some(3)),
                (Some(12), groups(2, 50), 160, Some(2)),
                (Some(12), groups(6, 100), 110, Some(6)),
                // One row in each group, one group, and a group stride that continues the row
                // stride.
                (Some(12), groups(1, 50), 310, None),
                (Some(12), groups(7, 3), 82, None),
                (Some(12), groups(7, 300), 82, None),
                (Some(12), groups(7, 300), 300, None),
                (Some(12), groups(8, 300), 299, None),
                (Some(12), groups(usize::MAX, 3), 82, None),
                (Some(12), groups(3, 36), 82, None),
            ] {
                let mut call = call(form);
                call.set(entry.name, |place| {
                    *place = Place { span: Span { len, ..place.span }, row_stride, groups };
                });
                let problem = call.check(MIXES[2]).expect("a good call").problem;
                assert_eq!(problem.rows_per_group, expected, "{} {row_stride:?} {groups:?}", entry.name);
            }
        }
    }
}

/// A view may extend to the end of a buffer whose tokens are longer than their heads, for one token
/// or many, and no further.
#[test]
fn one_group_is_no_other_than_many() {
    let (heads, dim, token) = (4, COLS, 3 * 4 * COLS);
    let groups = RowGroups { rows: heads, stride: token };
    for tokens in 1..4 {
        for form in Form::ALL {
            for (len, is_good) in
                [((tokens - 1) * token + heads * dim, true), (tokens * token, true), (tokens * token + 1, false)]
            {
                let mut call = call(form);
                call.spec.rows = tokens * heads;
                for entry in table(form) {
                    call.set(entry.name, |place| match entry.shape {
                        Shape::Matrix => {
                            *place =
                                Place { span: Span { len, ..place.span }, row_stride: Some(dim), groups: Some(groups) };
                        }
                        Shape::Transposed => place.span.len = tokens * heads * COLS,
                        Shape::OfRows => place.span.len = tokens * heads,
                        Shape::OfCols | Shape::Workspace | Shape::One => {}
                    });
                }
                let result = call.check(MIXES[0]).map(|validated| validated.problem.rows_per_group);
                match result {
                    Ok(rows) => assert!(is_good && rows == (tokens > 1).then_some(heads), "{tokens} tokens, {len}"),
                    Err(Error::Length { min, max, .. }) => {
                        assert!(!is_good);
                        assert_eq!((min, max), ((tokens - 1) * token + heads * dim, tokens * token));
                    }
                    Err(error) => panic!("{tokens} tokens, {len}: {error}"),
                }
            }
        }
        // Queries and keys of one buffer, with views to its end.
        let mut call = call(Form::Forward);
        call.spec.rows = tokens * heads;
        call.set("mean", |place| place.span.len = tokens * heads);
        call.set("rstd", |place| place.span.len = tokens * heads);
        for name in ["residual", "residual_out"] {
            call.set(name, |place| place.span.len = tokens * heads * dim);
        }
        for (name, first) in [("x", 0), ("y", heads * dim)] {
            call.set(name, |place| {
                let span = Span { allocation: 77, start: 4096 + 4 * first as u64, len: tokens * token - first };
                *place = Place { span, row_stride: Some(dim), groups: Some(groups) };
            });
        }
        assert_eq!(overlap(call.check(MIXES[0])), None, "{tokens} tokens");
    }
}

#[test]
fn all_groups_of_a_call_have_as_many_rows() {
    for form in Form::ALL {
        let names: Vec<_> = matrices(form).map(|entry| entry.name).collect();
        for (i, &a) in names.iter().enumerate() {
            for &b in &names[i + 1..] {
                for (rows, is_good) in [(3, true), (2, false), (4, false)] {
                    let mut call = call(form);
                    for (name, rows) in [(a, 3), (b, rows)] {
                        let groups = RowGroups { rows, stride: 60 };
                        call.set(name, |place| {
                            let span = Span { len: span(COLS, groups), ..place.span };
                            *place = Place { span, row_stride: None, groups: Some(groups) };
                        });
                    }
                    match call.check(MIXES[0]) {
                        Ok(Validated { problem, .. }) => assert!(is_good && problem.rows_per_group == Some(3)),
                        Err(Error::InvalidArgument { arg, rule }) => {
                            assert!(!is_good && [a, b].contains(&arg), "{a}, {b}: {arg}");
                            assert!(
                                rule.starts_with("all matrices of a call must have the same number of rows in a group")
                            );
                        }
                        Err(error) => panic!("{a}, {b}: {error}"),
                    }
                }
            }
        }
    }
}

/// A group has rows, and begins after the end of the previous group.
#[test]
fn groups_that_lie_in_one_another_are_refused() {
    for form in Form::ALL {
        for entry in matrices(form) {
            for (rows, row_stride, stride, is_good) in [
                (3, 12, 34, true),
                (3, 12, 33, false),
                (3, 12, 0, false),
                (0, 12, 50, false),
                (0, 12, 0, false),
                (6, usize::MAX / 4, 5, false),
            ] {
                let groups = RowGroups { rows, stride };
                let mut call = call(form);
                call.set(entry.name, |place| {
                    let span = Span { len: 2 * 34 + COLS, ..place.span };
                    *place = Place { span, row_stride: Some(row_stride), groups: Some(groups) };
                });
                match call.check(MIXES[0]) {
                    Ok(_) => assert!(is_good, "{groups:?}"),
                    Err(Error::InvalidArgument { arg, rule }) => {
                        assert!(!is_good && arg == entry.name, "{groups:?}: {arg}");
                        assert!(rule.ends_with(&format!("{stride} elements from group to group")), "{rule}");
                    }
                    Err(error) => panic!("{groups:?}: {error}"),
                }
            }
            let mut call = call(form);
            call.set(entry.name, |place| {
                (place.row_stride, place.groups) = (Some(COLS - 1), Some(RowGroups { rows: 3, stride: 50 }));
            });
            let error = call.check(MIXES[0]).map(|_| ()).expect_err("rows that overlap");
            assert!(matches!(error, Error::Stride { cols: COLS, got: 9, .. }), "{error}");
        }
    }
}

/// A view ends between the last element and the end of the last group's stride, and within the
/// address space.
#[test]
fn a_grouped_matrix_may_end_with_its_last_element_or_its_stride() {
    for form in Form::ALL {
        for entry in matrices(form) {
            let groups = RowGroups { rows: 3, stride: 50 };
            let (least, most) = (2 * 50 + COLS, 3 * 50);
            for len in least - 1..=most + 1 {
                let mut call = call(form);
                call.set(entry.name, |place| {
                    *place = Place { span: Span { len, ..place.span }, row_stride: Some(12), groups: Some(groups) };
                });
                expect_length(&call, (entry.name, len), (least, most));
            }
            for stride in [usize::MAX, isize::MAX as usize / 2] {
                let mut call = call(form);
                call.set(entry.name, |place| place.groups = Some(RowGroups { rows: 3, stride }));
                let error = call.check(MIXES[0]).map(|_| ()).expect_err("no memory is that large");
                let element = if entry.dtype == Type::Byte { form.codes().name() } else { "f32" };
                let text =
                    format!("{}: 7 rows in groups at a stride of {stride} {element} elements exceed", entry.name);
                assert!(error.to_string().starts_with(&text), "{error}");
            }
        }
    }
}

#[test]
fn groups_come_out_as_they_went_in() {
    for form in Form::ALL {
        let mut call = call(form);
        let groups = RowGroups { rows: 3, stride: 60 };
        for entry in matrices(form) {
            call.set(entry.name, |place| (place.groups, place.span.len) = (Some(groups), 2 * 60 + COLS));
        }
        let matrices = call
            .check(MIXES[0])
            .expect("a good call")
            .visited
            .into_iter()
            .filter(|(tensor, _)| tensor.shape() == TensorShape::Matrix);
        assert!(matrices.into_iter().all(|(_, place)| place.groups == Some(groups)), "{form:?}");
    }
}
