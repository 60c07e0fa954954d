//! `Sharded` with a residual stream divided by rows: layouts of the owned rows, which calls are
//! refused before anything is sent, and that the group can be used after a refusal.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

mod common;

use std::ops::Range;
use std::time::Duration;

use rmsnorm_cpu::{CpuBackend, Forward, Isa};
use rmsnorm_dist::{GroupCall, RowShares, Sharded, ShardedNorm, ThreadGroup};
use rmsnorm_spec::{Error, NormSpec, OutputRows, RowGroups, Rows};

use common::{Rank, on_ranks};

/// With three ranks, the first two own two rows and the last owns one.
const RANKS: usize = 3;
const ROWS: usize = 5;
const COLS: usize = 3;
const LEN: usize = ROWS * COLS;
/// The row stride of strided matrices.
const STRIDE: usize = 5;
const SPEC: NormSpec = NormSpec::rms(ROWS, COLS, 1e-6);

/// A rank's partial sum.
fn part(rank: usize) -> Vec<f32> {
    (0..LEN).map(|i| ((i * 7 + rank * 5) % 11) as f32 - 4.5).collect()
}

fn residual() -> Vec<f32> {
    (0..LEN).map(|i| (i % 4) as f32 * 0.75).collect()
}

/// The rows that a rank owns, and their elements.
fn own(norm: &Rank) -> (Range<usize>, Range<usize>) {
    let shares = RowShares { units: ROWS, unit: COLS, ranks: RANKS };
    (shares.units(norm.rank()), shares.elements(norm.rank()))
}

/// y, the sum and rstd of all rows, on one device.
fn whole() -> [Vec<f32>; 3] {
    let (x, residual) = ([part(0), part(1), part(2)].concat(), residual());
    let (mut y, mut sum, mut rstd) = (vec![0.0; LEN], vec![0.0; LEN], vec![0.0; ROWS]);
    let args = Forward::new(&x, &mut y).parts(RANKS, LEN).residual(&residual).residual_out(&mut sum).rstd(&mut rstd);
    CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap().forward(&SPEC, args).unwrap();
    [y, sum, rstd]
}

/// A dense matrix copied to strided rows, with this value in the gaps.
fn apart(rows: &[f32], between: f32) -> Vec<f32> {
    let row = |row: &[f32]| row.iter().copied().chain([between; STRIDE - COLS]).collect::<Vec<_>>();
    rows.chunks_exact(COLS).flat_map(row).collect()
}

#[test]
fn own_rows_of_the_residual_stream_and_of_y_may_lie_apart() {
    let [y, sum, rstd] = whole();
    on_ranks(RANKS, |norm| {
        let (rows, elements) = own(norm);
        let (x, residual) = (part(norm.rank()), apart(&residual()[elements.clone()], f32::NAN));
        let (mut own_y, mut own_sum) = (vec![-1.0; rows.len() * STRIDE], vec![-2.0; rows.len() * STRIDE]);
        let mut own_rstd = vec![f32::NAN; rows.len()];
        let args = Forward::new(&x, Rows::strided(&mut own_y[..], STRIDE)).rstd(&mut own_rstd);
        let args = args.residual(Rows::strided(&residual[..], STRIDE));
        let args = args.residual_out(Rows::strided(&mut own_sum[..], STRIDE));
        norm.forward_reduced_rows(&SPEC, OutputRows::Own, args).unwrap();
        assert_eq!(own_y, apart(&y[elements.clone()], -1.0));
        assert_eq!(own_sum, apart(&sum[elements], -2.0));
        assert_eq!(own_rstd, rstd[rows]);
    });
}

/// With `OutputRows::Own`, only the owned rows of x are overwritten.
#[test]
fn in_place_the_residual_is_updated_and_x_holds_what_y_has() {
    let [y, sum, _] = whole();
    on_ranks(RANKS, |norm| {
        let elements = own(norm).1;
        for y_rows in [OutputRows::All, OutputRows::Own] {
            let (mut x, mut residual) = (part(norm.rank()), residual()[elements.clone()].to_vec());
            let args = Forward::<f32>::in_place(&mut x).residual_in_place(&mut residual);
            norm.forward_reduced_rows(&SPEC, y_rows, args).unwrap();
            let mut expected = if y_rows == OutputRows::All { y.clone() } else { part(norm.rank()) };
            expected[elements.clone()].copy_from_slice(&y[elements.clone()]);
            assert_eq!((x, &residual[..]), (expected, &sum[elements.clone()]), "{y_rows:?}");
        }
    });
}

/// A rank that is refused sends nothing and can make the next call with the others.
#[test]
fn what_is_refused_is_refused_before_anything_is_sent() {
    let y_of_all = on_ranks(RANKS, |norm| {
        let len = own(norm).1.len();
        let (x, residual) = (part(norm.rank()), residual());
        let (mut y, mut sum, mut long) = (vec![0.0; LEN], vec![0.0; LEN], vec![0.0; 2 * ROWS * STRIDE]);
        let refused = |y_rows, args: Forward<'_, f32>| match norm.forward_reduced_rows(&SPEC, y_rows, args) {
            Err(Error::Unsupported { rule }) => rule,
            Err(error) => error.to_string(),
            Ok(()) => "nothing".into(),
        };
        let sends = |name: &str| {
            format!(
                "Sharded sends {name}, whose rows must be contiguous, got strided or grouped rows: pass a contiguous copy"
            )
        };
        let strided = apart(&x, 0.0);
        let args = Forward::new(Rows::strided(&strided[..], STRIDE), &mut y[..len]);
        assert_eq!(refused(OutputRows::Own, args), sends("x"));
        let args = Forward::new(&x, Rows::strided(&mut long[..ROWS * STRIDE], STRIDE));
        assert_eq!(refused(OutputRows::All, args), sends("y"));
        let mut over = x.clone();
        let held = &mut long[..len / COLS * STRIDE];
        let args = Forward::<f32>::in_place(&mut over).residual_in_place(Rows::strided(held, STRIDE));
        let copies = "Sharded needs contiguous rows in a residual that is overwritten: pass a contiguous residual";
        assert_eq!(refused(OutputRows::Own, args), copies);
        // A residual of all rows, as in `forward_reduced`; and y of other rows than `OutputRows` says.
        let args = Forward::new(&x, &mut y).residual(&residual);
        assert_eq!(refused(OutputRows::All, args), format!("residual: expected {len} elements, got {LEN}"));
        assert_eq!(
            refused(OutputRows::Own, Forward::new(&x, &mut y)),
            format!("y: expected {len} elements, got {LEN}")
        );
        let args = Forward::new(&x, &mut y[..len]);
        assert_eq!(refused(OutputRows::All, args), format!("y: expected {LEN} elements, got {len}"));
        let groups = RowGroups { rows: 2, stride: 2 * STRIDE };
        let args = Forward::new(&x, Rows::grouped(&mut long[..len], COLS, groups));
        assert!(refused(OutputRows::Own, args).contains("y cannot be grouped"));
        let parts = "where rows are divided among ranks, x is one matrix on every rank, no sum of parts";
        assert_eq!(refused(OutputRows::All, Forward::new(&x, &mut y).parts(1, LEN)), parts);
        let args = Forward::new(&x, &mut y).residual(&residual[..len]).residual_out(&mut sum[..len]);
        let after = norm.forward_reduced_rows(&SPEC.residual_after(), OutputRows::All, args).unwrap_err().to_string();
        assert!(after.ends_with("a residual is added before the norm"), "{after}");

        let own_residual = &residual[own(norm).1];
        norm.forward_reduced_rows(&SPEC, OutputRows::All, Forward::new(&x, &mut y).residual(own_residual)).unwrap();
        y
    });
    assert_eq!(y_of_all, vec![whole()[0].clone(); RANKS]);
}

/// A rank that has sent its rows and received none makes no further call: it could be matched with
/// another call of the other ranks.
#[test]
fn a_call_that_fails_in_its_exchange_is_the_last() {
    let rank = ThreadGroup::new(2).remove(0).deadline(Duration::from_millis(50));
    let rank = Sharded::new(CpuBackend::new(), rank);
    let (x, mut y) = ([1.0f32; 6], [0.0f32; 3]);
    let mut message = || {
        let args = Forward::new(&x, &mut y);
        rank.forward_reduced_rows(&NormSpec::rms(2, 3, 1e-6), OutputRows::Own, args).unwrap_err().to_string()
    };
    let first = message();
    let later = format!(
        "sharded norm device error: this rank failed between two exchanges of an earlier call, make a new group: {first}"
    );
    assert_eq!(message(), later);
}

/// An implementation that supports whole rows only.
struct WholeOnly;

impl ShardedNorm for WholeOnly {
    type Backend = CpuBackend;

    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        2
    }

    fn launch(&self, _: &NormSpec, call: GroupCall<'_, '_, CpuBackend>) -> Result<(), Error> {
        call.unsupported()
    }
}

#[test]
fn a_form_without_divided_rows_says_so() {
    let (x, mut y) = ([1.0f32; LEN], [0.0f32; LEN]);
    let answer = WholeOnly.forward_reduced_rows(&SPEC, OutputRows::All, Forward::new(&x, &mut y));
    assert!(matches!(answer, Err(Error::Unsupported { rule }) if rule.contains("by rows")));
}
