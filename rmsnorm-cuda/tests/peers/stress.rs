//! Calls back to back, on other data each time, with ranks that are early or late at random; every
//! output is compared.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use rmsnorm_conformance::testing::bits;
use rmsnorm_cuda::PeerGroup;
use rmsnorm_cuda::spec::{NormSpec, bf16};
use rmsnorm_dist::ShardedNorm;

use crate::case::{Case, Data};
use crate::machine::{Machine, on_each};
use crate::tensors::{Output, Tensors};

/// Sets of data. The number is odd, so each set meets both parities of the epoch, and so both sets
/// of slots.
const SETS: usize = 5;

/// `rounds` rounds of `batch` calls; the streams are synchronized only after each round.
fn stress(machine: &Machine, case: Case, rounds: usize, batch: usize) {
    let data: Vec<_> =
        (0..SETS).map(|set| Data::<bf16, bf16, bf16>::new(&Case { seed: 20 + set as u64, ..case })).collect();
    for backends in machine.places(case.ranks) {
        let all_there = Barrier::new(case.ranks);
        let firsts = on_each(PeerGroup::in_process(&backends, case.bytes).unwrap(), |group| {
            let (backend, rank) = (&backends[group.rank()], group.rank());
            let stream = backend.stream();
            // Each call of a batch has its own outputs.
            let mut calls: Vec<_> =
                (0..batch).map(|call| Tensors::new(backend, &case, &data[call % SETS], rank)).collect();
            // Zeroed in multiples of 512 bytes, once before the calls, so that the driver loads no
            // kernel while another kernel waits.
            let mut scratch = stream.alloc_zeros::<u8>(4 << 20).unwrap();
            stream.memset_zeros(&mut scratch.slice_mut(0..512)).unwrap();
            calls[0].prepare(&group).unwrap();
            let mut expected: Vec<(Output, [Vec<u8>; 2])> = Vec::new();
            for round in 0..rounds {
                all_there.wait();
                for (number, call) in calls.iter_mut().enumerate() {
                    let random = bits(rank as u64, round * batch + number);
                    // Late on the device, late on the host, or on time.
                    match random % 4 {
                        0 => {
                            let len = (1 + (random >> 8) as usize % (8 << 10)) * 512;
                            stream.memset_zeros(&mut scratch.slice_mut(0..len)).unwrap();
                        }
                        1 => spin(Duration::from_nanos((random >> 8) % 20_000)),
                        _ => {}
                    }
                    call.call(&group).unwrap();
                }
                stream.synchronize().unwrap();
                group.check().unwrap();
                for (number, call) in calls.iter().enumerate() {
                    let bytes = call.bytes(backend);
                    match expected.get(number % SETS) {
                        Some((_, expected)) => {
                            assert!(bytes == *expected, "{case:?}: rank {rank}, round {round}, call {number} differs");
                        }
                        None => expected.push((call.output(backend), bytes)),
                    }
                }
            }
            expected.into_iter().map(|(output, _)| output).collect::<Vec<_>>()
        });
        // Later outputs equal the first ones, which are judged here.
        for (set, data) in data.iter().enumerate() {
            let outputs: Vec<_> = firsts.iter().map(|outputs| outputs[set].clone()).collect();
            data.judge(&backends[0], &case, &outputs);
        }
    }
}

/// Busy-waits: a sleep would be too long.
fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

#[test]
fn one_row_is_right_every_time() {
    let Some(machine) = Machine::open() else { return };
    for ranks in [2, 4, 8] {
        stress(&machine, Case::new(ranks, NormSpec::rms(1, 4096, 1e-6)), 120, 50);
    }
    // On a cluster.
    stress(&machine, Case::new(2, NormSpec::rms(1, 8192, 1e-6)), 120, 50);
}

#[test]
fn some_rows_are_right_every_time() {
    let Some(machine) = Machine::open() else { return };
    stress(&machine, Case::new(2, NormSpec::rms(64, 4096, 1e-6)), 60, 25);
    stress(&machine, Case::new(4, NormSpec::layer(30, 1001, 1e-5)), 60, 25);
    stress(&machine, Case::new(4, NormSpec::rms(40, 8192, 1e-6)), 60, 25);
    stress(&machine, Case::new(8, NormSpec::layer(12, 8192, 1e-5)), 60, 25);
    // In pieces, and in shared memory.
    let case = Case::new(2, NormSpec::rms(20, 10_000, 1e-6));
    stress(&machine, Case { bytes: 7 * 20_000, ..case }, 30, 15);
}

#[test]
fn many_rows_are_right_every_time() {
    let Some(machine) = Machine::open() else { return };
    stress(&machine, Case::new(2, NormSpec::rms(600, 4096, 1e-6)), 25, 10);
    stress(&machine, Case::new(8, NormSpec::rms(300, 2048, 1e-6)), 25, 10);
}
