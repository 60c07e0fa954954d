//! Calls that are refused before anything is sent, and calls after a failure of NCCL.

use rmsnorm_cuda::cudarc::driver::CudaContext;
use rmsnorm_cuda::dist::{Collective, RowShares};
use rmsnorm_cuda::spec::Error;
use rmsnorm_cuda::{NcclComm, NcclFailure};

use crate::calls::{comm, counting, stream};
use crate::{transcript, whole};

const SHARES: RowShares = RowShares { units: 5, unit: 2, ranks: 3 };

/// Runs in the child process.
pub fn answer(what: &str) -> Option<()> {
    match what {
        "misuse" => misuse(),
        "no such rank" => no_such_rank(),
        "failing" => failing(),
        "panic" => panicking(),
        "give up" => comm(0, 3).abort(),
        _ => return None,
    }
    Some(())
}

fn misuse() {
    let comm = comm(1, 3);
    let from = counting(comm.stream(), 40);
    let mut to = counting(comm.stream(), 40);
    let mut all_to_all = |shares: &RowShares, from_len: usize, to_len: usize| {
        comm.all_to_all(shares, from.slice(..from_len), to.slice_mut(..to_len)).unwrap_err().to_string()
    };
    println!("answer: {}", all_to_all(&SHARES, 9, 12));
    println!("answer: {}", all_to_all(&SHARES, 11, 12));
    println!("answer: {}", all_to_all(&SHARES, 10, 11));
    println!("answer: {}", all_to_all(&SHARES, 10, 13));
    println!("answer: {}", all_to_all(&RowShares { ranks: 2, ..SHARES }, 10, 12));
    println!("answer: {}", all_to_all(&RowShares { units: usize::MAX, ..SHARES }, 10, 12));
    let mut all_gather =
        |shares: &RowShares, len: usize| comm.all_gather_in_place(shares, to.slice_mut(..len)).unwrap_err().to_string();
    println!("answer: {}", all_gather(&SHARES, 9));
    println!("answer: {}", all_gather(&RowShares { ranks: 0, ..SHARES }, 10));
    println!("answer: {}", all_gather(&RowShares { units: 0, ..SHARES }, 1));
    // The refused calls have changed nothing.
    println!("answer: {:?}", comm.all_gather_in_place(&RowShares { units: 3, ..SHARES }, to.slice_mut(..6)));
}

#[test]
fn nothing_is_sent_of_a_call_that_does_not_fit() {
    let Some(machine) = whole() else { return };
    let expected = [
        "init 1 of 3 on device 0",
        "answer: from: expected 10 elements, got 9",
        "answer: from: expected 10 elements, got 11",
        "answer: to: expected 12 elements, got 11",
        "answer: to: expected 12 elements, got 13",
        "answer: shares: RowShares::ranks must be 3, the ranks of the communicator, got 2",
        "answer: from: expected 18446744073709551615 elements, got 10",
        "answer: tensor: expected 10 elements, got 9",
        "answer: shares: RowShares::ranks must be 3, the ranks of the communicator, got 0",
        "answer: tensor: expected 0 elements, got 1",
        "all_gather 2 type 1 from 2",
        "answer: Ok(())",
        "finalize",
        "destroy",
    ];
    assert_eq!(transcript(&machine, "misuse", &[]), expected);
}

fn no_such_rank() {
    let id = NcclComm::unique_id().unwrap();
    for (rank, ranks) in [(3, 3), (0, 0), (0, 1 << 31)] {
        println!("answer: {}", NcclComm::from_rank(stream(0), rank, ranks, id).unwrap_err());
    }
    let ours = stream(0).context().clone();
    // SAFETY:
    // - context: the stand-in's, which is not destroyed;
    // - ownership: never taken: only the last drop would release the context, and the clone below
    //   is never dropped.
    let other = unsafe { CudaContext::from_raw_context(0, ours.cu_device(), ours.cu_ctx()) }.unwrap();
    std::mem::forget(other.clone());
    println!("answer: {}", NcclComm::from_rank(other.default_stream(), 0, 1, id).unwrap_err());
}

#[test]
fn there_is_no_communicator_without_a_rank() {
    let Some(machine) = whole() else { return };
    let expected = [
        "answer: rank: must be less than 3, the number of ranks, got 3",
        "answer: ranks: a communicator has 1 to 2147483647 ranks, got 0",
        "answer: ranks: a communicator has 1 to 2147483647 ranks, got 2147483648",
        "answer: stream: NCCL needs a stream of the device's primary context, got a stream of a context of device 0",
    ];
    assert_eq!(transcript(&machine, "no such rank", &[]), expected);
}

/// Two uneven calls, an equal one and a sum; prints the result of each.
fn failing() {
    let comm = match NcclComm::from_rank(stream(0), 1, 3, NcclComm::unique_id().unwrap()) {
        Ok(comm) => comm,
        Err(error) => return println!("answer: {}", short(&error)),
    };
    let mut tensor = counting(comm.stream(), SHARES.len());
    let mut sums = comm.stream().alloc_zeros::<f32>(2).unwrap();
    for _ in 0..2 {
        let gathered = comm.all_gather_in_place(&SHARES, tensor.as_view_mut());
        println!("answer: {}", gathered.map_or_else(|error| short(&error), |()| "gathered".into()));
    }
    let equal = comm.all_gather_in_place(&RowShares { units: 3, ..SHARES }, tensor.slice_mut(..6));
    println!("answer: {}", equal.map_or_else(|error| short(&error), |()| "gathered".into()));
    let summed = comm.all_reduce_sum_in_place(sums.as_view_mut());
    println!("answer: {}", summed.map_or_else(|error| short(&error), |()| "summed".into()));
}

/// The call that failed, and NCCL's code.
fn short(error: &Error) -> String {
    let Error::Device { backend: "nccl", source } = error else { return format!("another error: {error}") };
    let code = source.downcast_ref().map(NcclFailure::code);
    format!("{} {code:?}", source.to_string().split(':').next().unwrap_or_default())
}

/// The calls of `failing`, without sends and receives, if the call `at` fails.
fn failing_at(at: &str) -> Vec<String> {
    let Some(machine) = whole() else { return Vec::new() };
    let lines = transcript(&machine, "failing", &[("FAIL_AT", at)]);
    let is_data = |line: &str| line.starts_with("send ") || line.starts_with("receive ");
    lines.into_iter().filter(|line| !is_data(line)).collect()
}

#[track_caller]
fn fails(at: &str, expected: &[&str]) {
    let lines = failing_at(at);
    assert!(lines.is_empty() || lines == expected, "{at}: {lines:#?}");
}

#[test]
fn without_a_failure_all_is_called() {
    let init = "init 1 of 3 on device 0";
    let group = ["group {", "}", "answer: gathered"];
    let rest = [
        "all_gather 2 type 1 from 2",
        "answer: gathered",
        "all_reduce 2 type 7 op 0 in place",
        "answer: summed",
        "finalize",
        "destroy",
    ];
    fails("nothing", &[&[init][..], &group, &group, &rest].concat());
}

/// Every later call returns the first error, nothing more is sent, and the communicator is aborted.
#[test]
fn after_a_failure_nothing_is_sent() {
    let init = "init 1 of 3 on device 0";
    for (at, reason) in [
        // The group is always ended.
        ("ncclSend 1", "answer: ncclSend Some(6)"),
        ("ncclSend 2", "answer: ncclSend Some(6)"),
        ("ncclRecv 1", "answer: ncclRecv Some(6)"),
        ("ncclGroupEnd 1", "answer: ncclGroupEnd Some(6)"),
    ] {
        fails(at, &[&[init, "group {", "}"][..], &[reason; 4], &["abort"]].concat());
    }
    let group = ["group {", "}", "answer: gathered"];
    let reason = "answer: ncclGroupStart Some(6)";
    fails("ncclGroupStart 1", &[&[init][..], &[reason; 4], &["abort"]].concat());
    fails("ncclGroupStart 2", &[&[init][..], &group, &[reason; 3], &["abort"]].concat());
    let reason = "answer: ncclAllGather Some(6)";
    fails("ncclAllGather 1", &[&[init][..], &group, &group, &[reason; 2], &["abort"]].concat());
    let gathered = ["all_gather 2 type 1 from 2", "answer: gathered"];
    let reason = "answer: ncclAllReduce Some(6)";
    fails("ncclAllReduce 1", &[&[init][..], &group, &group, &gathered, &[reason, "abort"]].concat());
}

/// An error on the device is reported by the next call, or found when the communicator is dropped.
#[test]
fn asynchronous_errors_are_seen() {
    let init = "init 1 of 3 on device 0";
    let group = ["group {", "}", "answer: gathered"];
    let reason = "answer: an earlier call Some(6)";
    fails("async 1", &[&[init][..], &[reason; 4], &["abort"]].concat());
    fails("async 2", &[&[init][..], &group, &[reason; 3], &["abort"]].concat());
    let rest =
        ["all_gather 2 type 1 from 2", "answer: gathered", "all_reduce 2 type 7 op 0 in place", "answer: summed"];
    fails("async 5", &[&[init][..], &group, &group, &rest, &["abort"]].concat());
}

#[test]
fn a_communicator_that_cannot_be_made_is_an_error() {
    fails("ncclCommInitRank 1", &["answer: ncclCommInitRank Some(6)"]);
    // A non-blocking communicator fails later.
    let Some(machine) = whole() else { return };
    let lines = transcript(&machine, "failing", &[("FAIL_AT", "async 2"), ("SLOW", "1")]);
    assert_eq!(lines, ["init 1 of 3 on device 0", "abort", "answer: ncclCommInitRank Some(6)"]);
}

/// Dropping never fails: a communicator that cannot be finalized is aborted; one that cannot be
/// destroyed is leaked.
#[test]
fn a_communicator_that_cannot_be_given_back_is_no_panic() {
    for (at, end) in [("ncclCommFinalize 1", &["abort"][..]), ("ncclCommDestroy 1", &["finalize"])] {
        let lines = failing_at(at);
        let after = lines.iter().skip_while(|line| *line != "answer: summed").skip(1);
        assert!(lines.is_empty() || after.eq(end), "{at}: {lines:#?}");
    }
}

fn panicking() {
    let caught = std::panic::catch_unwind(|| {
        let _comm = comm(0, 3);
        panic!("the rank is lost");
    });
    println!("answer: {}", caught.is_err());
}

#[test]
fn a_rank_that_is_lost_does_not_wait() {
    let Some(machine) = whole() else { return };
    assert_eq!(transcript(&machine, "panic", &[]), ["init 0 of 3 on device 0", "abort", "answer: true"]);
    assert_eq!(transcript(&machine, "give up", &[]), ["init 0 of 3 on device 0", "abort"]);
}
