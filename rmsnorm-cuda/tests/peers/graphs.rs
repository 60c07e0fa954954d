//! Calls captured into a graph on each rank, and replayed: the epoch advances in device memory.

use std::sync::Barrier;

use rmsnorm_cuda::PeerGroup;
use rmsnorm_cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use rmsnorm_cuda::spec::{NormSpec, OutputRows, bf16};
use rmsnorm_dist::ShardedNorm;

use crate::case::{Case, Data};
use crate::machine::{Machine, on_each};
use crate::rows::whole;
use crate::tensors::Tensors;

const REPLAYS: u64 = 6;

/// Puts `calls` calls into one graph, so that replays start at either parity of the epoch. A small
/// `bytes` splits a call. With `y_rows`, the residual is divided by rows.
fn check_replays(machine: &Machine, case: &Case, calls: usize, y_rows: Option<OutputRows>) {
    let make = |tensors: &mut Tensors<bf16, bf16, bf16>, group: &PeerGroup| match y_rows {
        Some(y_rows) => tensors.call_on_rows(group, y_rows),
        None => tensors.call(group),
    };
    let data: Vec<_> =
        (0..REPLAYS).map(|seed| Data::<bf16, bf16, bf16>::new(&Case { seed: 10 + seed, ..*case })).collect();
    for backends in machine.places(case.ranks) {
        let all_there = Barrier::new(case.ranks);
        let outputs = on_each(PeerGroup::in_process(&backends, case.bytes).unwrap(), |group| {
            let backend = &backends[group.rank()];
            let stream = backend.stream();
            let mut tensors = Tensors::new(backend, case, &data[0], group.rank());
            tensors.prepare(&group).unwrap();
            tensors.prepare_rows(&group).unwrap();
            all_there.wait();
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            (0..calls).for_each(|_| make(&mut tensors, &group).unwrap());
            let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
            // Otherwise the first launch would upload the graph, while a kernel of another rank may
            // be waiting on the same device.
            graph.upload().unwrap();
            stream.synchronize().unwrap();
            let outputs: Vec<_> = data
                .iter()
                .enumerate()
                .map(|(replay, data)| {
                    tensors.fill(backend, data);
                    // Some direct calls come between replays.
                    if replay % 2 == 1 {
                        all_there.wait();
                        make(&mut tensors, &group).unwrap();
                        stream.synchronize().unwrap();
                    }
                    all_there.wait();
                    graph.launch().unwrap();
                    stream.synchronize().unwrap();
                    tensors.output(backend)
                })
                .collect();
            group.check().unwrap();
            outputs
        });
        for (replay, data) in data.iter().enumerate() {
            let mut outputs: Vec<_> = outputs.iter().map(|outputs| outputs[replay].clone()).collect();
            if let Some(y_rows) = y_rows {
                outputs = vec![whole::<bf16, bf16>(case, y_rows, &outputs, &data.x)];
            }
            data.judge(&backends[0], case, &outputs);
        }
    }
}

#[test]
fn calls_are_captured_and_replayed() {
    let Some(machine) = Machine::open() else { return };
    for (ranks, rows, cols, calls) in
        [(2, 1, 4096, 1), (2, 64, 4096, 3), (4, 20, 8192, 2), (4, 40, 8192, 3), (2, 20, 10_000, 3)]
    {
        check_replays(&machine, &Case::new(ranks, NormSpec::rms(rows, cols, 1e-6)), calls, None);
    }
}

#[test]
fn calls_in_pieces_are_captured_and_replayed() {
    let Some(machine) = Machine::open() else { return };
    let case = Case { bytes: 7 * 2 * 1024, ..Case::new(3, NormSpec::layer(20, 1024, 1e-5)) };
    check_replays(&machine, &case, 2, None);
}

#[test]
fn calls_on_rows_are_captured_and_replayed() {
    let Some(machine) = Machine::open() else { return };
    for (ranks, rows, calls, y_rows) in [
        (2, 1, 1, OutputRows::Own),
        (2, 65, 3, OutputRows::All),
        (3, 2, 1, OutputRows::All),
        (4, 9, 2, OutputRows::Own),
    ] {
        let case = Case::new(ranks, NormSpec::rms(rows, 4096, 1e-6));
        check_replays(&machine, &case, calls, Some(y_rows));
    }
}
