//! Calls through the real NCCL, on one GPU and on two, each driven by a thread of this process.
//!
//! Without the GPUs or NCCL, every test prints why it is skipped and passes, unless
//! `RMSNORM_REQUIRE` names `nccl` or `nccl-2`.
#![cfg(feature = "nccl")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::cast_slice;
use rmsnorm_conformance::ranks::rows::test_rows;
use rmsnorm_conformance::ranks::test_ranks;
use rmsnorm_conformance::testing::{available, skip_or_fail, values};
use rmsnorm_cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use rmsnorm_cuda::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr};
use rmsnorm_cuda::dist::{Collective, RowShares};
use rmsnorm_cuda::spec::{Element, Error, NormSpec, bf16, f16};
use rmsnorm_cuda::{CudaBackend, Forward, NcclComm};
use rmsnorm_dist::{Order, Ranks, Sharded, ShardedNorm};

/// Elements before and after a tensor, which must not change. The number is odd, so that only
/// single elements are aligned.
const GUARD: usize = 33;

/// Locks out other tests: NCCL's kernels of two tests on one device may wait for each other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `run` with the ranks of a group, each with a device and a new stream; `None`, with the
/// reason on stdout, if they are missing.
fn with_ranks<R>(ranks: usize, run: impl FnOnce(Vec<NcclComm>) -> R) -> Option<R> {
    let _alone = alone();
    let devices = available(CudaBackend::device_count()).unwrap()?;
    let version = available(NcclComm::version()).unwrap()?;
    if devices < ranks {
        skip_or_fail("nccl-2", format!("needs {ranks} GPUs, there are {devices}")).unwrap();
        return None;
    }
    println!("NCCL {version:?}");
    let id = NcclComm::unique_id().unwrap();
    let rank = |rank: usize| {
        let context = CudaContext::new(rank).unwrap();
        // With a second stream, cudarc's events are in use.
        let _other = context.new_stream().unwrap();
        NcclComm::from_rank(context.new_stream().unwrap(), rank, ranks, id).unwrap()
    };
    let comms = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|index| scope.spawn(move || rank(index))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    Some(run(comms))
}

/// The results of all ranks, each from its own thread. Ranks do not assert: a rank that panicked
/// would leave the others waiting.
fn group<R: Send>(ranks: usize, run: impl Fn(NcclComm) -> R + Sync) -> Option<Vec<R>> {
    let run = &run;
    with_ranks(ranks, |comms| {
        std::thread::scope(|scope| {
            let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    })
}

/// The suite's cases of sums over ranks, with whole rows, and with the residual divided by rows:
/// every rank gets the same bits, and h is exact.
fn composed(ranks: usize) {
    let passed = with_ranks(ranks, |comms| {
        let rank = |comm: NcclComm| {
            let backend = CudaBackend::from_stream(comm.stream().clone()).unwrap();
            (Sharded::new(backend.clone(), comm), backend)
        };
        let ranks = Ranks::new(comms.into_iter().map(rank));
        [test_ranks(&ranks, false).unwrap(), test_rows(&ranks, false).unwrap()]
    });
    assert!(passed.is_none_or(|passed| passed.iter().all(|passed| *passed > 30)), "{passed:?}");
}

/// NCCL's all-reduce, in any order, and a call of the backend on its result. Also in place.
fn in_any_order(ranks: usize) {
    let (spec, len) = (NormSpec::rms(7, 1000, 1e-6), 7000);
    let results = group(ranks, |comm| {
        let stream = comm.stream().clone();
        let backend = CudaBackend::from_stream(stream.clone()).unwrap();
        let (x, residual) = (data::<bf16>(0, comm.rank(), len), data::<bf16>(1, 0, len));
        let tensor = || upload(&stream, &vec![bf16::ZERO; len]);
        let (from, of_residual) = (upload(&stream, &x), upload(&stream, &residual));
        let range = GUARD..GUARD + len;
        let (mut reduced, mut y, mut sum) = (tensor(), tensor(), tensor());
        comm.all_reduce_sum(from.slice(range.clone()), reduced.slice_mut(range.clone())).unwrap();
        let args = Forward::new(reduced.slice(range.clone()), y.slice_mut(range.clone()));
        let args = args.residual(of_residual.slice(range.clone())).residual_out(sum.slice_mut(range.clone()));
        backend.forward(&spec, args).unwrap();
        let expected = [&y, &sum].map(|tensor| stream.clone_dtoh(tensor).unwrap());

        let norm = Sharded::new(backend, comm).order(Order::Engine);
        let (mut y, mut sum) = (tensor(), tensor());
        let args = Forward::new(from.slice(range.clone()), y.slice_mut(range.clone()));
        let args = args.residual(of_residual.slice(range.clone())).residual_out(sum.slice_mut(range.clone()));
        norm.forward_reduced(&spec, args).unwrap();
        let (mut x_and_y, mut residual_and_sum) = (from, of_residual);
        let args = Forward::in_place(x_and_y.slice_mut(range.clone()));
        norm.forward_reduced(&spec, args.residual_in_place(residual_and_sum.slice_mut(range))).unwrap();
        let got = [&y, &sum].map(|tensor| stream.clone_dtoh(tensor).unwrap());
        let in_place = [&x_and_y, &residual_and_sum].map(|tensor| stream.clone_dtoh(tensor).unwrap());
        [expected, got, in_place]
    });
    let results = results.into_iter().flatten().collect::<Vec<_>>();
    let all = results.iter().flatten().flatten().map(|tensor| &tensor[GUARD..GUARD + len]);
    for (index, tensor) in all.enumerate() {
        let first = &results[0][0][index % 2][GUARD..GUARD + len];
        assert!(tensor == first && first.iter().any(|value| *value != bf16::ZERO), "{ranks} ranks, {index}");
    }
}

#[test]
fn a_sum_in_any_order_is_that_of_nccl() {
    in_any_order(1);
    in_any_order(2);
}

#[test]
fn composed_norms_pass_the_suite() {
    composed(1);
    composed(2);
}

/// The data of rank `rank` in call number `call`.
fn data<T: Element>(call: usize, rank: usize, len: usize) -> Vec<T> {
    values((1000 * call + rank) as u64, len)
}

/// A tensor between guards, which are zeros.
fn upload<T: Element + DeviceRepr>(stream: &Arc<CudaStream>, tensor: &[T]) -> CudaSlice<T> {
    let guard = vec![T::from_f32(0.0); GUARD];
    stream.clone_htod(&[&guard, tensor, &guard].concat()).unwrap()
}

/// Compares bits, signs of zero included.
fn assert_bits<T: Element>(what: &str, got: &[T], expected: impl IntoIterator<Item = T>) {
    let guard = || std::iter::repeat_n(T::from_f32(0.0), GUARD);
    let expected: Vec<T> = guard().chain(expected).chain(guard()).collect();
    assert!(cast_slice::<T, u8>(got) == cast_slice::<T, u8>(&expected), "{what}");
}

fn shares(ranks: usize) -> Vec<RowShares> {
    let units = [0, 1, 2, 3, 7, 64, 257];
    let shares = |units| [1, 3, 4096].map(|unit| RowShares { units, unit, ranks });
    units.into_iter().flat_map(shares).collect()
}

fn all_to_all<T: Element + DeviceRepr>(ranks: usize) {
    let shares = shares(ranks);
    let results = group(ranks, |comm| {
        let call = |(call, shares): (usize, &RowShares)| {
            let from = upload(comm.stream(), &data::<T>(call, comm.rank(), shares.len()));
            let len = shares.elements(comm.rank()).len() * ranks;
            let mut to = upload(comm.stream(), &vec![T::from_f32(1.0); len]);
            let (begin, end) = (GUARD, GUARD + shares.len());
            comm.all_to_all(shares, from.slice(begin..end), to.slice_mut(GUARD..GUARD + len)).unwrap();
            comm.stream().clone_dtoh(&to).unwrap()
        };
        shares.iter().enumerate().map(call).collect::<Vec<_>>()
    });
    for (rank, results) in results.into_iter().flatten().enumerate() {
        for (call, (shares, got)) in shares.iter().zip(&results).enumerate() {
            let from = |peer| data::<T>(call, peer, shares.len())[shares.elements(rank)].to_vec();
            assert_bits(&format!("{shares:?}, rank {rank}"), got, (0..ranks).flat_map(from));
        }
    }
}

fn all_gather<T: Element + DeviceRepr>(ranks: usize) {
    let shares = shares(ranks);
    let results = group(ranks, |comm| {
        let call = |(call, shares): (usize, &RowShares)| {
            let mut tensor = upload(comm.stream(), &data::<T>(call, comm.rank(), shares.len()));
            // From another tensor over other values, and in place.
            let mut apart = upload(comm.stream(), &vec![T::from_f32(1.0); shares.len()]);
            let own = shares.elements(comm.rank());
            let from = tensor.slice(GUARD + own.start..GUARD + own.end);
            comm.all_gather(shares, from, apart.slice_mut(GUARD..GUARD + shares.len())).unwrap();
            comm.all_gather_in_place(shares, tensor.slice_mut(GUARD..GUARD + shares.len())).unwrap();
            [apart, tensor].map(|tensor| comm.stream().clone_dtoh(&tensor).unwrap())
        };
        shares.iter().enumerate().map(call).collect::<Vec<_>>()
    });
    for (rank, results) in results.into_iter().flatten().enumerate() {
        for (call, (shares, got)) in shares.iter().zip(&results).enumerate() {
            let share = |peer| data::<T>(call, peer, shares.len())[shares.elements(peer)].to_vec();
            for got in got {
                assert_bits(&format!("{shares:?}, rank {rank}"), got, (0..ranks).flat_map(share));
            }
        }
    }
}

#[test]
fn one_rank_has_what_it_had() {
    all_to_all::<bf16>(1);
    all_gather::<bf16>(1);
}

#[test]
fn two_ranks_exchange_their_shares() {
    all_to_all::<bf16>(2);
    all_to_all::<f32>(2);
}

#[test]
fn two_ranks_gather_all_shares() {
    all_gather::<bf16>(2);
    all_gather::<f32>(2);
}

/// Sums of small integers, which do not depend on the order.
fn sums<T: Element + DeviceRepr>(ranks: usize) {
    let len = 5000;
    let addend = |rank: usize| move |index: usize| ((index * (rank + 3)) % 17) as f32;
    let results = group(ranks, |comm| {
        let own: Vec<T> = (0..len).map(addend(comm.rank())).map(T::from_f32).collect();
        let from = upload(comm.stream(), &own);
        let mut to = upload(comm.stream(), &own);
        let range = GUARD..GUARD + len;
        comm.all_reduce_sum(from.slice(range.clone()), to.slice_mut(range.clone())).unwrap();
        let first = comm.stream().clone_dtoh(&to).unwrap();
        let mut tensor = from;
        comm.all_reduce_sum_in_place(tensor.slice_mut(range)).unwrap();
        [first, comm.stream().clone_dtoh(&tensor).unwrap()]
    });
    for got in results.into_iter().flatten().flatten() {
        let expected = (0..len).map(|index| T::from_f32((0..ranks).map(|rank| addend(rank)(index)).sum()));
        assert_bits("sums", &got, expected);
    }
}

#[test]
fn sums_are_of_all_ranks() {
    for ranks in [1, 2] {
        sums::<f32>(ranks);
        sums::<f16>(ranks);
        sums::<bf16>(ranks);
    }
}

/// Tensors are written and read on a stream that is ordered with the communicator's stream only by
/// cudarc's events.
fn other_streams(ranks: usize) {
    let shares = RowShares { units: 601, unit: 1024, ranks };
    let results = group(ranks, |comm| {
        let other = comm.stream().context().new_stream().unwrap();
        let mut tensor = other.alloc_zeros::<bf16>(shares.len()).unwrap();
        let mut call = |call: usize| {
            other.memcpy_htod(&data::<bf16>(call % 3, comm.rank(), shares.len()), &mut tensor).unwrap();
            comm.all_gather_in_place(&shares, tensor.as_view_mut()).unwrap();
            other.clone_dtoh(&tensor).unwrap()
        };
        (0..12).map(&mut call).collect::<Vec<_>>()
    });
    for (call, got) in results.into_iter().flatten().flat_map(|results| results.into_iter().enumerate()) {
        let share = |peer| data::<bf16>(call % 3, peer, shares.len())[shares.elements(peer)].to_vec();
        let expected: Vec<bf16> = (0..ranks).flat_map(share).collect();
        assert!(got == expected, "call {call}");
    }
}

#[test]
fn accesses_on_other_streams_are_in_order() {
    other_streams(1);
    other_streams(2);
}

/// A borrowed communicator, whose owner uses it afterwards.
fn borrowed(ranks: usize) {
    let shares = RowShares { units: 7, unit: 3, ranks };
    let results = group(ranks, |owner| {
        // SAFETY:
        // - library: the one that made it;
        // - life: its owner is dropped last;
        // - sharing: the owner makes its call after this one's.
        let comm = unsafe { NcclComm::from_raw(owner.as_raw(), owner.stream().clone()) }.unwrap();
        let place = (comm.rank() == owner.rank(), comm.ranks());
        let mut tensor = upload(comm.stream(), &data::<f32>(0, comm.rank(), shares.len()));
        let range = GUARD..GUARD + shares.len();
        comm.all_gather_in_place(&shares, tensor.slice_mut(range.clone())).unwrap();
        drop(comm);
        owner.all_gather_in_place(&shares, tensor.slice_mut(range)).unwrap();
        (place, owner.stream().clone_dtoh(&tensor).unwrap())
    });
    for (place, got) in results.into_iter().flatten() {
        assert_eq!(place, (true, ranks));
        let share = |peer| data::<f32>(0, peer, shares.len())[shares.elements(peer)].to_vec();
        assert_bits("borrowed", &got, (0..ranks).flat_map(share));
    }
}

#[test]
fn a_communicator_of_anothers_is_used_and_left_alone() {
    borrowed(1);
    borrowed(2);
}

/// A graph of both calls, replayed on new data; each call was made once before.
fn graphs(ranks: usize) {
    let shares = RowShares { units: 9, unit: 512, ranks };
    let results = group(ranks, |comm| {
        let stream = comm.stream();
        // SAFETY:
        // - order: everything here is on one stream.
        unsafe { stream.context().disable_event_tracking() };
        let own = shares.elements(comm.rank());
        let mut from = stream.alloc_zeros::<bf16>(shares.len()).unwrap();
        let mut to = stream.alloc_zeros::<bf16>(own.len() * ranks).unwrap();
        let mut tensor = stream.alloc_zeros::<bf16>(shares.len()).unwrap();
        let mut calls = |from: &CudaSlice<bf16>| {
            comm.all_to_all(&shares, from.as_view(), to.as_view_mut())?;
            comm.all_gather_in_place(&shares, tensor.as_view_mut())
        };
        let direct: Result<(), Error> = calls(&from);
        stream.synchronize().unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        let captured = calls(&from);
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
        let replay = |call: usize| {
            let data = data::<bf16>(call, comm.rank(), shares.len());
            stream.memcpy_htod(&data, &mut from).unwrap();
            stream.memcpy_htod(&data, &mut tensor).unwrap();
            graph.launch().unwrap();
            (stream.clone_dtoh(&to).unwrap(), stream.clone_dtoh(&tensor).unwrap())
        };
        let replays: Vec<_> = (0..3).map(replay).collect();
        (direct.is_ok() && captured.is_ok(), replays)
    });
    for (rank, (is_ok, replays)) in results.into_iter().flatten().enumerate() {
        assert!(is_ok);
        for (call, (to, tensor)) in replays.into_iter().enumerate() {
            let from = |peer| data::<bf16>(call, peer, shares.len());
            let exchanged: Vec<bf16> = (0..ranks).flat_map(|peer| from(peer)[shares.elements(rank)].to_vec()).collect();
            let gathered: Vec<bf16> = (0..ranks).flat_map(|peer| from(peer)[shares.elements(peer)].to_vec()).collect();
            assert!(to == exchanged && tensor == gathered, "rank {rank}, replay {call}");
        }
    }
}

#[test]
fn calls_are_captured() {
    graphs(1);
    graphs(2);
}
