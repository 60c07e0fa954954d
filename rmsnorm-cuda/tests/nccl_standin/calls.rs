//! The order of calls to NCCL, and the contents of memory after them.

use std::sync::Arc;

use rmsnorm_cuda::NcclComm;
use rmsnorm_cuda::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use rmsnorm_cuda::cudarc::nccl::sys::ncclComm_t;
use rmsnorm_cuda::dist::{Collective, RowShares};
use rmsnorm_cuda::spec::{bf16, f16};

use crate::{transcript, whole};

/// Five units of two on three ranks: shares of 4, 4 and 2.
const UNEVEN: RowShares = RowShares { units: 5, unit: 2, ranks: 3 };
const EVEN: RowShares = RowShares { units: 3, unit: 2, ranks: 3 };
/// The last two ranks have no units.
const ONE: RowShares = RowShares { units: 1, unit: 2, ranks: 3 };
const NONE: RowShares = RowShares { units: 0, unit: 2, ranks: 3 };

pub fn stream(device: usize) -> Arc<CudaStream> {
    CudaContext::new(device).unwrap().default_stream()
}

/// A rank on device 0.
pub fn comm(rank: usize, ranks: usize) -> NcclComm {
    NcclComm::from_rank(stream(0), rank, ranks, NcclComm::unique_id().unwrap()).unwrap()
}

/// Bytes 0, 1, 2, ...
pub fn counting(stream: &Arc<CudaStream>, len: usize) -> CudaSlice<u8> {
    stream.clone_htod(&(0..len as u8).collect::<Vec<_>>()).unwrap()
}

fn show(comm: &NcclComm, tensor: &CudaSlice<u8>) {
    println!("answer: {:?}", comm.stream().clone_dtoh(tensor).unwrap());
}

fn all_to_all(rank: usize, shares: RowShares) {
    let comm = comm(rank, shares.ranks);
    let from = counting(comm.stream(), shares.len().max(1));
    let len = shares.elements(rank).len() * shares.ranks;
    let mut to = comm.stream().alloc_zeros(len.max(1)).unwrap();
    comm.all_to_all(&shares, from.slice(..shares.len()), to.slice_mut(..len)).unwrap();
    show(&comm, &to);
}

fn all_gather(rank: usize, shares: RowShares) {
    let comm = comm(rank, shares.ranks);
    let mut tensor = counting(comm.stream(), shares.len().max(1));
    comm.all_gather_in_place(&shares, tensor.slice_mut(..shares.len())).unwrap();
    show(&comm, &tensor);
}

/// Runs in the child process.
pub fn answer(what: &str) -> Option<()> {
    match what {
        "all_to_all" => all_to_all(1, UNEVEN),
        "all_to_all, last rank" => all_to_all(2, UNEVEN),
        "all_to_all, no share" => all_to_all(2, ONE),
        "all_to_all, nothing" => all_to_all(1, NONE),
        "all_to_all, alone" => all_to_all(0, RowShares { ranks: 1, ..EVEN }),
        "all_gather" => all_gather(1, UNEVEN),
        "all_gather, no share" => all_gather(1, ONE),
        "all_gather, equal" => all_gather(1, EVEN),
        "all_gather, nothing" => all_gather(1, NONE),
        "all_gather, alone" => all_gather(0, RowShares { ranks: 1, ..EVEN }),
        "wider elements" => wider_elements(),
        "all_reduce" => all_reduce(),
        "other stream" => other_stream(),
        "current device" => current_device(),
        "borrowed" => borrowed(),
        _ => return None,
    }
    Some(())
}

/// Checks the calls between init and drop, which are the same in all cases.
#[track_caller]
fn calls(what: &str, expected: &[&str]) {
    let Some(machine) = whole() else { return };
    for variables in [&[][..], &[("SLOW", "1")]] {
        let lines = transcript(&machine, what, variables);
        assert!(lines[0].starts_with("init "), "{lines:#?}");
        assert_eq!(lines[1..lines.len() - 2], *expected, "{what}, {variables:?}");
        assert_eq!(lines[lines.len() - 2..], ["finalize", "destroy"], "{what}, {variables:?}");
    }
}

#[test]
fn all_to_all_sends_every_other_rank_its_share() {
    let expected = [
        "copy 4",
        "group {",
        "send to 0 type 1: 0 1 2 3",
        "receive 4 from 0 type 1",
        "send to 2 type 1: 8 9",
        "receive 4 from 2 type 1",
        "}",
        "answer: [100, 100, 100, 100, 4, 5, 6, 7, 102, 102, 102, 102]",
    ];
    calls("all_to_all", &expected);
    let expected = [
        "copy 2",
        "group {",
        "send to 0 type 1: 0 1 2 3",
        "receive 2 from 0 type 1",
        "send to 1 type 1: 4 5 6 7",
        "receive 2 from 1 type 1",
        "}",
        "answer: [100, 100, 101, 101, 8, 9]",
    ];
    calls("all_to_all, last rank", &expected);
}

#[test]
fn what_is_empty_is_not_sent() {
    calls("all_to_all, no share", &["group {", "send to 0 type 1: 0 1", "}", "answer: [0]"]);
    calls("all_to_all, nothing", &["answer: [0]"]);
    calls("all_gather, no share", &["group {", "receive 2 from 0 type 1", "}", "answer: [100, 100]"]);
    calls("all_gather, nothing", &["answer: [0]"]);
}

#[test]
fn a_rank_alone_sends_nothing() {
    calls("all_to_all, alone", &["copy 6", "answer: [0, 1, 2, 3, 4, 5]"]);
    calls("all_gather, alone", &["answer: [0, 1, 2, 3, 4, 5]"]);
}

#[test]
fn all_gather_sends_every_other_rank_what_this_one_has() {
    let expected = [
        "group {",
        "send to 0 type 1: 4 5 6 7",
        "receive 4 from 0 type 1",
        "send to 2 type 1: 4 5 6 7",
        "receive 2 from 2 type 1",
        "}",
        "answer: [100, 100, 100, 100, 4, 5, 6, 7, 102, 102]",
    ];
    calls("all_gather", &expected);
}

#[test]
fn equal_shares_are_gathered_in_one_call() {
    calls("all_gather, equal", &["all_gather 2 type 1 from 2", "answer: [100, 100, 2, 3, 102, 102]"]);
}

fn wider_elements() {
    let comm = comm(0, 2);
    let shares = RowShares { units: 3, unit: 1, ranks: 2 };
    let from = comm.stream().clone_htod(&[1, 2, 3].map(bf16::from_bits)).unwrap();
    let mut to = comm.stream().alloc_zeros::<bf16>(4).unwrap();
    comm.all_to_all(&shares, from.as_view(), to.as_view_mut()).unwrap();
    println!("answer: {:x?}", comm.stream().clone_dtoh(&to).unwrap().iter().map(|it| it.to_bits()).collect::<Vec<_>>());
}

#[test]
fn elements_travel_as_bytes() {
    let expected =
        ["copy 4", "group {", "send to 1 type 1: 3 0", "receive 4 from 1 type 1", "}", "answer: [1, 2, 6565, 6565]"];
    calls("wider elements", &expected);
}

fn all_reduce() {
    let comm = comm(0, 2);
    let from = comm.stream().alloc_zeros::<f32>(3).unwrap();
    let mut to = comm.stream().alloc_zeros::<f32>(3).unwrap();
    comm.all_reduce_sum(from.as_view(), to.as_view_mut()).unwrap();
    comm.all_reduce_sum_in_place(to.as_view_mut()).unwrap();
    comm.all_reduce_sum_in_place(to.slice_mut(..0)).unwrap();
    let mut half = comm.stream().alloc_zeros::<f16>(5).unwrap();
    comm.all_reduce_sum_in_place(half.as_view_mut()).unwrap();
    let mut brain = comm.stream().alloc_zeros::<bf16>(7).unwrap();
    comm.all_reduce_sum_in_place(brain.as_view_mut()).unwrap();
    let short = comm.all_reduce_sum(from.slice(..2), to.as_view_mut()).unwrap_err();
    println!("answer: {short}");
}

/// `ncclFloat32`, `ncclFloat16` and `ncclBfloat16` are 7, 6 and 9, `ncclSum` is 0.
#[test]
fn sums_are_nccls_own() {
    let expected = [
        "all_reduce 3 type 7 op 0",
        "all_reduce 3 type 7 op 0 in place",
        "all_reduce 5 type 6 op 0 in place",
        "all_reduce 7 type 9 op 0 in place",
        "answer: to: expected 2 elements, got 3",
    ];
    calls("all_reduce", &expected);
}

/// Tensors of a stream that is ordered with the communicator's stream only by cudarc's events.
fn other_stream() {
    let comm = comm(0, 2);
    let other = comm.stream().context().new_stream().unwrap();
    println!("answer: written");
    let mut tensor = counting(&other, UNEVEN.len());
    comm.all_gather_in_place(&RowShares { ranks: 2, ..UNEVEN }, tensor.as_view_mut()).unwrap();
    println!("answer: read");
    other.clone_dtoh(&tensor).unwrap();
    println!("answer: dropped");
}

#[test]
fn other_streams_are_waited_for_and_wait() {
    let expected = [
        "answer: written",
        "record on the other stream",
        "the default stream waits",
        "group {",
        "send to 1 type 1: 0 1 2 3 4 5",
        "receive 4 from 1 type 1",
        "}",
        "record on the default stream",
        "answer: read",
        "the other stream waits",
        "record on the other stream",
        "answer: dropped",
        "the other stream waits",
    ];
    calls("other stream", &expected);
}

/// The thread last worked on another device.
fn current_device() {
    let (first, last) = (stream(0), stream(1));
    last.context().bind_to_thread().unwrap();
    let comm = NcclComm::from_rank(first, 2, 3, NcclComm::unique_id().unwrap()).unwrap();
    println!("answer: {}, {} of {}, {comm:?}", comm.stream().context().ordinal(), comm.rank(), comm.ranks());
    // The call binds the thread to its own device again; a tensor of another device is refused.
    let mut tensor = counting(&last, UNEVEN.len());
    println!("answer: {}", comm.all_gather_in_place(&UNEVEN, tensor.as_view_mut()).unwrap_err());
}

#[test]
fn the_device_is_the_streams() {
    let Some(machine) = whole() else { return };
    let lines = transcript(&machine, "current device", &[]);
    assert_eq!(lines[0], "init 2 of 3 on device 0");
    assert!(lines[1].starts_with("answer: 0, 2 of 3, NcclComm { rank: 2, ranks: 3, "), "{lines:#?}");
    let refused = "answer: tensor: tensors must be in the context of the communicator's stream, the primary context of \
                   device 0, got one in the primary context of device 1";
    assert_eq!(lines[2..], [refused, "finalize", "destroy"]);
}

/// A communicator of another owner.
fn borrowed() {
    type Make = unsafe extern "C" fn(i32, i32, i32) -> ncclComm_t;
    // SAFETY:
    // - initializers: the stand-in has none;
    // - type: as nccl.c has it.
    let make = unsafe {
        let library = Box::leak(Box::new(libloading::Library::new("libnccl.so.2").unwrap()));
        library.get::<Make>("standin_comm").unwrap()
    };
    // SAFETY:
    // - library, life, sharing: the stand-in's one communicator is never destroyed, and used here
    //   only.
    let comm = unsafe { NcclComm::from_raw(make(1, 3, 1), stream(0)) };
    println!("answer: {}", comm.unwrap_err());
    // SAFETY:
    // - as above.
    let comm = unsafe { NcclComm::from_raw(make(1, 3, 0), stream(0)) }.unwrap();
    let mut tensor = counting(comm.stream(), UNEVEN.len());
    comm.all_gather_in_place(&UNEVEN, tensor.as_view_mut()).unwrap();
    println!("answer: {} of {}, {}", comm.rank(), comm.ranks(), !comm.as_raw().is_null());
}

#[test]
fn a_communicator_of_anothers_is_read_and_left_alone() {
    let Some(machine) = whole() else { return };
    for variables in [&[][..], &[("SLOW", "1")]] {
        let lines = transcript(&machine, "borrowed", variables);
        let refused = "answer: stream: a communicator on device 1 needs a stream of that device, got one of device 0";
        assert_eq!((lines[0].as_str(), lines[1].as_str()), (refused, "group {"));
        assert_eq!(lines[lines.len() - 2..], ["}", "answer: 1 of 3, true"], "{lines:#?}");
    }
}
