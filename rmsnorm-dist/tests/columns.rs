//! Columns divided among the ranks of a group: which calls are refused before anything is sent, and
//! that the group can be used after a refusal.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

mod common;

use rmsnorm_cpu::{Backward, CpuBackend, Forward};
use rmsnorm_dist::{GroupCall, ShardedNorm};
use rmsnorm_spec::{AnyCall, Checked, Error, GradReduction, NormBackend, NormSpec};

use common::{Rank, on_ranks};

/// Three ranks with 3, 1 and 2 columns of two rows.
const COLUMNS: [usize; 3] = [3, 1, 2];
const WHOLE: [f32; 12] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0];

fn of_rank(rank: usize) -> Vec<f32> {
    let start: usize = COLUMNS[..rank].iter().sum();
    WHOLE.chunks_exact(6).flat_map(|row| row[start..][..COLUMNS[rank]].to_vec()).collect()
}

#[test]
fn rows_are_normalized_by_the_statistics_of_all_their_columns() {
    let rows = on_ranks(3, |norm| {
        let x = of_rank(norm.rank());
        let (mut y, mut rstd) = (vec![f32::NAN; x.len()], [f32::NAN; 2]);
        let args = Forward::new(&x, &mut y).rstd(&mut rstd);
        norm.forward_columns(&NormSpec::rms(2, 6, 0.0), &COLUMNS, args).unwrap();
        (y, rstd)
    });
    let expected = [1.0 / (91.0f32 / 6.0).sqrt(), 1.0];
    for (rank, (y, rstd)) in rows.into_iter().enumerate() {
        assert_eq!(rstd, expected);
        let by_hand: Vec<f32> = of_rank(rank)
            .chunks_exact(COLUMNS[rank])
            .zip(rstd)
            .flat_map(|(row, rstd)| row.iter().map(move |x| x * rstd))
            .collect();
        assert_eq!(y, by_hand);
    }
}

/// A rank that is refused sends nothing, and makes the next call with the others.
#[test]
fn what_is_refused_is_refused_before_anything_is_sent() {
    let good = |norm: &Rank| {
        let x = of_rank(norm.rank());
        let mut y = vec![f32::NAN; x.len()];
        norm.forward_columns(&NormSpec::rms(2, 6, 0.0), &COLUMNS, Forward::new(&x, &mut y)).map(|()| y)
    };
    let answers = on_ranks(3, |norm| {
        let (rank, x) = (norm.rank(), of_rank(norm.rank()));
        let spec = NormSpec::rms(2, 6, 0.0);
        let mut refused = Vec::new();
        let mut y = vec![f32::NAN; x.len()];
        for columns in [&[6][..], &[3, 1, 1], &[3, 3, 0], &[usize::MAX, 1, 6], &[3, 1, 2, 0]] {
            refused.push(norm.forward_columns(&spec, columns, Forward::new(&x, &mut y)));
        }
        let twice = [&x[..], &x[..]].concat();
        refused.push(norm.forward_columns(&spec, &COLUMNS, Forward::new(&twice, &mut y).parts(2, x.len())));
        refused.push(norm.forward_columns(&spec, &COLUMNS, Forward::new(&x, &mut y[1..])));
        let (mut sum, weight) = (vec![0.0; x.len()], vec![1.0; 6]);
        refused.push(norm.forward_columns(&spec, &COLUMNS, Forward::new(&x, &mut y).weight(&weight)));
        let after = Forward::added_to_residual(&x[..]).residual_in_place(&mut sum[..]);
        refused.push(norm.forward_columns(&spec.residual_after(), &COLUMNS, after));
        let (rstd, mut dx) = ([1.0; 2], vec![f32::NAN; x.len()]);
        let no_mean = Backward::new(&x, &x, &rstd, &mut dx);
        refused.push(norm.backward_columns(&NormSpec::layer(2, 6, 0.0), &COLUMNS, no_mean));
        let by_atomics = Backward::new(&x, &x, &rstd, &mut dx).grad_reduction(GradReduction::Atomics);
        refused.push(norm.backward_columns(&spec, &COLUMNS, by_atomics));
        let refused: Vec<&str> = refused
            .into_iter()
            .map(|answer| match answer {
                Err(Error::InvalidArgument { arg, .. } | Error::Length { arg, .. } | Error::Missing { arg, .. }) => arg,
                Err(Error::Unsupported { .. }) => "unsupported",
                Ok(()) | Err(_) => "something else",
            })
            .collect();
        (rank, refused, good(norm).unwrap())
    });
    for (rank, refused, y) in answers {
        let expected = [
            "columns",
            "columns",
            "columns",
            "columns",
            "columns",
            "unsupported",
            "y",
            "weight",
            "unsupported",
            "mean",
            "unsupported",
        ];
        assert_eq!(refused, expected, "rank {rank}");
        assert!(y.iter().all(|y| y.is_finite()), "rank {rank}");
    }
}

/// An implementation that supports sums only.
struct SumsOnly;

impl ShardedNorm for SumsOnly {
    type Backend = CpuBackend;

    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        1
    }

    fn launch(&self, spec: &NormSpec, call: GroupCall<'_, '_, CpuBackend>) -> Result<(), Error> {
        let GroupCall::Reduced(args) = call else { return call.unsupported() };
        CpuBackend::new().launch(AnyCall::Forward(Checked::forward(*spec, args)?))
    }
}

#[test]
fn a_form_without_columns_says_so() {
    let (x, rstd, mut y) = ([1.0f32, 2.0], [1.0], [f32::NAN; 2]);
    let spec = NormSpec::rms(1, 2, 0.0);
    let answer = SumsOnly.forward_columns(&spec, &[2], Forward::new(&x, &mut y));
    assert!(matches!(answer, Err(Error::Unsupported { .. })));
    let answer = SumsOnly.backward_columns(&spec, &[2], Backward::new(&x, &x, &rstd, &mut y));
    assert!(matches!(answer, Err(Error::Unsupported { .. })));
}

/// One rank refuses the same calls as two.
#[test]
fn one_rank_refuses_what_several_do() {
    on_ranks(1, |norm| {
        let (x, mut sum) = ([1.0f32, 2.0], [1.0, 2.0]);
        let args = Forward::added_to_residual(&x[..]).residual_in_place(&mut sum[..]);
        let answer = norm.forward_columns(&NormSpec::rms(1, 2, 0.0).residual_after(), &[2], args);
        assert!(matches!(answer, Err(Error::Unsupported { .. })));
    });
}

/// A row has the same bits alone and among other rows, for every division of its columns.
#[test]
fn bits_of_a_row_do_not_depend_on_the_others() {
    let of_rows = |rows: usize| {
        on_ranks(3, move |norm| {
            let x: Vec<f32> = (0..rows).flat_map(|_| of_rank(norm.rank())[..COLUMNS[norm.rank()]].to_vec()).collect();
            let (mut y, mut mean) = (vec![f32::NAN; x.len()], vec![f32::NAN; rows]);
            let args = Forward::new(&x, &mut y).mean(&mut mean);
            norm.forward_columns(&NormSpec::layer(rows, 6, 1e-5), &COLUMNS, args).unwrap();
            (y[..COLUMNS[norm.rank()]].to_vec(), mean[0])
        })
    };
    assert_eq!(of_rows(1), of_rows(257));
}
