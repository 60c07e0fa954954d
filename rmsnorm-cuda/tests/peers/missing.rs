//! A missing rank: the other ranks report it after the deadline, and their group cannot be used any
//! more.
//!
//! The deadline uses the device's clock, and the kernels of all ranks start together, so a busy
//! host does not matter.

use std::sync::Barrier;
use std::time::Duration;

use rmsnorm_cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use rmsnorm_cuda::spec::{Error, NormSpec, bf16};
use rmsnorm_cuda::{MissingRank, PeerGroup};
use rmsnorm_dist::ShardedNorm;

use crate::case::{Case, Data};
use crate::machine::{Gate, Machine, on_each};
use crate::tensors::Tensors;

const DEADLINE: Duration = Duration::from_millis(200);

/// The rank that an error names.
fn named(result: Result<(), Error>) -> Option<usize> {
    match result {
        Err(Error::Device { source, .. }) => source.downcast_ref::<MissingRank>().map(MissingRank::missing),
        Ok(()) | Err(_) => None,
    }
}

/// All ranks except `missing` make a call on three ranks.
fn check_missing(machine: &Machine, case: &Case, missing: usize) {
    let data = Data::<bf16, bf16, bf16>::new(case);
    for backends in machine.places(case.ranks) {
        let (all_there, gate) = (Barrier::new(case.ranks), Gate::new(machine, case.ranks - 1));
        let outputs = on_each(PeerGroup::in_process(&backends, case.bytes).unwrap(), |group| {
            let backend = &backends[group.rank()];
            let stream = backend.stream();
            let mut tensors = Tensors::new(backend, case, &data, group.rank());
            tensors.prepare(&group).unwrap();
            // First a call with all ranks: the group works.
            all_there.wait();
            tensors.call(&group).unwrap();
            stream.synchronize().unwrap();
            group.check().unwrap();
            all_there.wait();
            if group.rank() != missing {
                let group = group.deadline(DEADLINE);
                gate.stop(backend);
                tensors.call(&group).unwrap();
                gate.open();
                stream.synchronize().unwrap();
                assert_eq!(named(group.check()), Some(missing));
                assert_eq!(named(tensors.call(&group)), Some(missing));
            }
            all_there.wait();
            tensors.output(backend)
        });
        // The rank without a second call still has the results of the first.
        data.judge(&backends[0], case, &outputs[missing..=missing]);
    }
}

#[test]
fn others_end_and_name_the_rank_that_did_not_come() {
    let Some(machine) = Machine::open() else { return };
    for missing in 0..3 {
        check_missing(&machine, &Case::new(3, NormSpec::rms(1, 4096, 1e-6)), missing);
    }
    // More rows than blocks, in several launches, and rows in shared memory.
    check_missing(&machine, &Case::new(3, NormSpec::rms(500, 4096, 1e-6)), 1);
    check_missing(&machine, &Case { bytes: 100 * 8192, ..Case::new(2, NormSpec::rms(500, 4096, 1e-6)) }, 1);
    check_missing(&machine, &Case::new(2, NormSpec::layer(200, 10_001, 1e-5)), 0);
}

/// Where packs have owners, a rank misses the parts of its own packs before it misses the sums of
/// other owners, which wait for the same parts.
#[test]
fn owners_of_packs_name_the_rank_that_did_not_come() {
    let Some(machine) = Machine::open() else { return };
    for (rows, cols) in [(5, 20_000), (20, 8192)] {
        let case = Case::new(8, NormSpec::rms(rows, cols, 1e-6));
        let data = Data::<bf16, bf16, bf16>::new(&case);
        for missing in [2, 6] {
            let (backends, all_there, gate) = (machine.on_one(8), Barrier::new(8), Gate::new(&machine, 7));
            let errors = on_each(PeerGroup::in_process(&backends, case.bytes).unwrap(), |group| {
                let group = group.deadline(DEADLINE);
                let backend = &backends[group.rank()];
                let mut tensors = Tensors::new(backend, &case, &data, group.rank());
                tensors.prepare(&group).unwrap();
                all_there.wait();
                if group.rank() == missing {
                    return Some(missing);
                }
                gate.stop(backend);
                tensors.call(&group).unwrap();
                gate.open();
                backend.stream().synchronize().unwrap();
                named(group.check())
            });
            assert_eq!(errors, [Some(missing); 8]);
        }
    }
}

/// A late rank finds the data that the others sent. Its next call fails, and names one of them.
#[test]
fn who_comes_late_finds_what_was_sent_and_then_nobody() {
    let Some(machine) = Machine::open() else { return };
    let case = Case::new(2, NormSpec::rms(40, 4096, 1e-6));
    let data = Data::<bf16, bf16, bf16>::new(&case);
    for backends in machine.places(2) {
        let all_there = Barrier::new(2);
        let outputs = on_each(PeerGroup::in_process(&backends, case.bytes).unwrap(), |group| {
            let group = group.deadline(DEADLINE);
            let backend = &backends[group.rank()];
            let mut tensors = Tensors::new(backend, &case, &data, group.rank());
            tensors.prepare(&group).unwrap();
            all_there.wait();
            if group.rank() == 0 {
                tensors.call(&group).unwrap();
                backend.stream().synchronize().unwrap();
                assert_eq!(named(group.check()), Some(1));
                all_there.wait();
                return None;
            }
            all_there.wait();
            tensors.call(&group).unwrap();
            backend.stream().synchronize().unwrap();
            group.check().unwrap();
            let output = tensors.output(backend);
            tensors.call(&group).unwrap();
            backend.stream().synchronize().unwrap();
            assert_eq!(named(group.check()), Some(0));
            Some(output)
        });
        data.judge(&backends[0], &case, &[outputs[1].clone().unwrap()]);
    }
}

/// Nothing checks the group before a replay: the kernels of a lost group end at once, without
/// waiting, and send nothing. The deadline of this graph is infinite.
#[test]
fn a_graph_of_a_lost_group_ends_at_once() {
    let Some(machine) = Machine::open() else { return };
    let case = Case::new(2, NormSpec::rms(300, 4096, 1e-6));
    let data = Data::<bf16, bf16, bf16>::new(&case);
    let backends = machine.on_one(2);
    let mut groups = PeerGroup::in_process(&backends, case.bytes).unwrap();
    let (group, stream) = (groups.remove(0).deadline(Duration::MAX), backends[0].stream());
    let mut tensors = Tensors::new(&backends[0], &case, &data, 0);
    tensors.prepare(&group).unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    (0..20).for_each(|_| tensors.call(&group).unwrap());
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    let group = group.deadline(DEADLINE);
    tensors.call(&group).unwrap();
    (0..20).for_each(|_| graph.launch().unwrap());
    stream.synchronize().unwrap();
    assert_eq!(named(group.check()), Some(1));
}
