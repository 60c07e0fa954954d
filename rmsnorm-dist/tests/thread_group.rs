//! `ThreadGroup` when ranks are late, leave, or make different calls.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::thread;
use std::time::Duration;

use rmsnorm_cpu::{CpuBackend, Forward};
use rmsnorm_dist::{Collective, RowShares, Sharded, ShardedNorm, ThreadGroup};
use rmsnorm_spec::{Error, NormSpec, RowGroups, Rows, bf16};

/// The answer of each rank, run on a thread each. A rank leaves the group after its answer.
fn each(groups: Vec<ThreadGroup>, ranks: &[impl Fn(&ThreadGroup) -> Result<Vec<f32>, Error> + Sync]) -> Vec<String> {
    thread::scope(|scope| {
        let spawned: Vec<_> =
            groups.into_iter().zip(ranks).map(|(group, rank)| scope.spawn(move || rank(&group))).collect();
        let answer =
            |answer: Result<Vec<f32>, Error>| answer.map_or_else(|error| error.to_string(), |to| format!("{to:?}"));
        spawned.into_iter().map(|thread| answer(thread.join().unwrap())).collect()
    })
}

const SHARES: RowShares = RowShares { units: 5, unit: 1, ranks: 3 };

fn all_to_all(group: &ThreadGroup, shares: &RowShares, from: &[f32], len: usize) -> Result<Vec<f32>, Error> {
    let mut to = vec![-1.0; len];
    Collective::<CpuBackend>::all_to_all(group, shares, from, &mut to)?;
    Ok(to)
}

fn all_gather(group: &ThreadGroup, shares: &RowShares, from: &[f32]) -> Result<Vec<f32>, Error> {
    let mut to = vec![-1.0; shares.len()];
    Collective::<CpuBackend>::all_gather(group, shares, from, &mut to)?;
    Ok(to)
}

#[test]
fn shares_arrive_in_the_order_of_the_ranks() {
    let rank = |group: &ThreadGroup| {
        let rank = Collective::<CpuBackend>::rank(group);
        let from: Vec<f32> = (0..5).map(|i| (10 * rank + i) as f32).collect();
        let parts = all_to_all(group, &SHARES, &from, 3 * SHARES.elements(rank).len())?;
        let gathered = all_gather(group, &SHARES, &from[SHARES.elements(rank)])?;
        assert_eq!(gathered, [0.0, 1.0, 12.0, 13.0, 24.0]);
        Ok(parts)
    };
    let expected = ["[0.0, 1.0, 10.0, 11.0, 20.0, 21.0]", "[2.0, 3.0, 12.0, 13.0, 22.0, 23.0]", "[4.0, 14.0, 24.0]"];
    assert_eq!(each(ThreadGroup::new(3), &[rank, rank, rank]), expected);
}

/// More ranks than rows, and no rows at all.
#[test]
fn ranks_without_a_share_take_part() {
    for units in [0, 1, 2] {
        let shares = RowShares { units, unit: 2, ranks: 3 };
        let rank = |group: &ThreadGroup| {
            let rank = Collective::<CpuBackend>::rank(group);
            let from = vec![rank as f32; 2 * units];
            all_to_all(group, &shares, &from, 3 * shares.elements(rank).len())?;
            all_gather(group, &shares, &from[shares.elements(rank)])
        };
        let expected: Vec<f32> = (0..units).flat_map(|rank| [rank as f32; 2]).collect();
        assert_eq!(each(ThreadGroup::new(3), &[rank, rank, rank]), [(); 3].map(|()| format!("{expected:?}")));
    }
}

#[test]
fn a_rank_that_panics_is_named() {
    let stays = |group: &ThreadGroup| all_gather(group, &RowShares { units: 2, unit: 1, ranks: 2 }, &[1.0]);
    let mut groups = ThreadGroup::new(2);
    let leaving = groups.pop().unwrap();
    let panicked = thread::spawn(move || {
        let _leaving = leaving;
        std::panic::resume_unwind(Box::new("gone"));
    });
    assert!(panicked.join().is_err());
    let group = groups.pop().unwrap();
    assert_eq!(stays(&group).unwrap_err().to_string(), "thread group device error: rank 1 has left the group");
}

#[test]
fn ranks_that_call_something_else_are_named() {
    const TWO: RowShares = RowShares { units: 4, unit: 1, ranks: 2 };
    fn gather<T: rmsnorm_spec::Element>(group: &ThreadGroup) -> Error {
        let (from, mut to) = ([T::default(); 2], [T::default(); 4]);
        Collective::<CpuBackend>::all_gather(group, &TWO, &from, &mut to).unwrap_err()
    }
    let sends = |group: &ThreadGroup| all_to_all(group, &TWO, &[1.0; 4], 4).unwrap_err();
    type Other<'o> = &'o dyn Fn(&ThreadGroup) -> Error;
    let others: [Other<'_>; 2] = [&sends, &gather::<bf16>];
    for (other, name) in others.into_iter().zip(["all_to_all of 4 units of 1 f32", "all_gather of 4 units of 1 bf16"]) {
        let mut groups = ThreadGroup::new(2).into_iter();
        let (first, second) = (groups.next().unwrap(), groups.next().unwrap());
        let answers = thread::scope(|scope| {
            let first = scope.spawn(move || gather::<f32>(&first));
            [other(&second), first.join().unwrap()]
        });
        for answer in answers.map(|error| error.to_string()) {
            assert!(answer.contains("all_gather of 4 units of 1 f32 on 2 ranks") && answer.contains(name), "{answer}");
        }
    }
}

/// Before anything is sent: the other rank need not take part.
#[test]
fn views_of_a_wrong_length_are_refused() {
    let group = ThreadGroup::new(3).remove(1);
    let message = |answer: Result<Vec<f32>, Error>| answer.unwrap_err().to_string();
    assert_eq!(message(all_to_all(&group, &SHARES, &[0.0; 4], 6)), "from: expected 5 elements, got 4");
    assert_eq!(message(all_to_all(&group, &SHARES, &[0.0; 5], 7)), "to: expected 6 elements, got 7");
    assert_eq!(message(all_gather(&group, &SHARES, &[0.0; 5])), "from: expected 2 elements, got 5");
    let rule = "shares: `ranks` must be 3, the size of this group, got 4";
    let four = RowShares { ranks: 4, ..SHARES };
    assert_eq!(message(all_gather(&group, &four, &[0.0; 2])), rule);
    assert_eq!(message(all_to_all(&group, &four, &[0.0; 5], 6)), rule);
}

/// A deadline that the clock cannot represent is no deadline.
#[test]
fn the_longest_deadline_is_none() {
    let groups = ThreadGroup::new(2).into_iter().map(|group| group.deadline(Duration::MAX)).collect();
    let two = RowShares { units: 2, unit: 1, ranks: 2 };
    let rank = |group: &ThreadGroup| all_gather(group, &two, &[Collective::<CpuBackend>::rank(group) as f32]);
    assert_eq!(each(groups, &[rank, rank]), ["[0.0, 1.0]"; 2]);
}

/// A strided residual on ranks that own different numbers of rows, or none.
#[test]
fn a_strided_residual_is_dealt_out() {
    for (rows, ranks) in [(1, 2), (4, 3), (5, 4), (7, 2)] {
        let (cols, stride) = (3, 5);
        let spec = NormSpec::rms(rows, cols, 1e-6);
        let residual: Vec<f32> = (0..(rows - 1) * stride + cols).map(|i| i as f32).collect();
        let sums = thread::scope(|scope| {
            let rank = |group: ThreadGroup| {
                let residual = &residual;
                scope.spawn(move || {
                    let (x, mut y, mut sum) = (vec![1.0; rows * cols], vec![0.0; rows * cols], vec![0.0; rows * cols]);
                    let args = Forward::new(&x, &mut y).residual(Rows::strided(&residual[..], stride));
                    let rank = Sharded::new(CpuBackend::new(), group);
                    rank.forward_reduced(&spec, args.residual_out(&mut sum)).unwrap();
                    sum
                })
            };
            let threads: Vec<_> = ThreadGroup::new(ranks).into_iter().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let expected: Vec<f32> =
            (0..rows * cols).map(|i| residual[i / cols * stride + i % cols] + ranks as f32).collect();
        assert!(sums.iter().all(|sum| *sum == expected), "{rows} rows on {ranks} ranks: {sums:?}");
    }
}

/// A rank that fails in an exchange leaves the others waiting. It makes no further call, which
/// could be matched with another call of theirs.
#[test]
fn a_call_that_fails_between_exchanges_is_the_last() {
    let deadline = Duration::from_millis(100);
    let groups = ThreadGroup::new(2).into_iter().map(|group| group.deadline(deadline));
    let mut ranks = groups.map(|group| Sharded::new(CpuBackend::new(), group));
    let (rank, _absent) = (ranks.next().unwrap(), ranks.next().unwrap());
    let spec = NormSpec::rms(2, 3, 1e-6);
    let (x, mut y) = ([1.0f32; 6], [0.0f32; 6]);
    let mut message = || rank.forward_reduced(&spec, Forward::new(&x, &mut y)).unwrap_err().to_string();
    let first = message();
    assert_eq!(first, "thread group device error: rank 1 did not come within 100ms");
    let later = format!(
        "sharded norm device error: this rank failed between two exchanges of an earlier call, make a new group: {first}"
    );
    assert_eq!([message(), message()], [later.clone(), later]);
}

/// Calls that `Sharded` cannot send are refused with a reason, and so are invalid calls.
#[test]
fn calls_that_cannot_be_composed_are_refused_before_anything_is_sent() {
    let rank = Sharded::new(CpuBackend::new(), ThreadGroup::new(2).remove(0));
    let spec = NormSpec::rms(2, 3, 1e-6);
    let (x, residual, mut y, mut sum) = ([1.0f32; 8], [1.0f32; 6], [0.0f32; 8], [0.0f32; 8]);
    let message = |spec: &NormSpec, args: Forward<'_, f32>| rank.forward_reduced(spec, args).unwrap_err().to_string();
    let sends = |name: &str| {
        format!(
            "unsupported: Sharded sends {name}, whose rows must be contiguous, got strided or grouped rows: pass a contiguous copy"
        )
    };
    assert_eq!(message(&spec, Forward::new(Rows::strided(&x[..], 4), &mut y[..6])), sends("x"));
    assert_eq!(message(&spec, Forward::new(&x[..6], Rows::strided(&mut y[..], 4))), sends("y"));
    let args = Forward::new(&x[..6], &mut y[..6]).residual(&residual).residual_out(Rows::strided(&mut sum[..], 4));
    assert_eq!(message(&spec, args), sends("residual_out"));
    // Contiguous rows in groups that end with a gap.
    let mut long = [0.0f32; 20];
    let groups = RowGroups { rows: 2, stride: 20 };
    assert_eq!(message(&spec, Forward::new(&x[..6], Rows::grouped(&mut long[..], 3, groups))), sends("y"));
    assert_eq!(message(&spec, Forward::new(&x[..5], &mut y[..6])), "x: expected 6 elements, got 5");
    let parts = "unsupported: forward_reduced takes one matrix x on each rank, got a sum of parts: add the parts first";
    assert_eq!(message(&spec, Forward::new(&x[..6], &mut y[..6]).parts(1, 6)), parts);
    let after =
        "unsupported: forward_reduced needs ResidualPlacement::Before, got After: add the residual before the norm";
    let args = Forward::new(&x[..6], &mut y[..6]).residual(&residual).residual_out(&mut sum[..6]);
    assert_eq!(message(&spec.residual_after(), args), after);
}
