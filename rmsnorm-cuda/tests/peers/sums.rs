//! Sums and norms of every kind: the sum bit for bit, other results within their bounds, and the
//! same on every rank.

use std::sync::Barrier;

use rmsnorm_conformance::testing::Bits;
use rmsnorm_cuda::cudarc::driver::DeviceRepr;
use rmsnorm_cuda::spec::{CastOrder, Element, Norm, NormSpec, bf16, f16};
use rmsnorm_cuda::{CudaBackend, PeerGroup};
use rmsnorm_dist::ShardedNorm;

use crate::case::{Case, Data};
use crate::machine::{Machine, on_each};
use crate::tensors::{Output, Tensors};

/// Runs the call on a new group.
fn run<T: Element + DeviceRepr, W: Element, R: Element + DeviceRepr>(
    backends: &[CudaBackend],
    case: &Case,
    data: &Data<T, W, R>,
) -> Vec<Output> {
    let groups = PeerGroup::in_process(backends, case.bytes).unwrap();
    let all_there = Barrier::new(backends.len());
    on_each(groups, |group| {
        let backend = &backends[group.rank()];
        let mut tensors = Tensors::new(backend, case, data, group.rank());
        tensors.prepare(&group).unwrap();
        all_there.wait();
        tensors.call(&group).unwrap();
        backend.stream().synchronize().unwrap();
        group.check().unwrap();
        tensors.output(backend)
    })
}

fn check<T: Element + DeviceRepr, W: Element, R: Element + DeviceRepr>(machine: &Machine, case: Case) {
    let data = Data::<T, W, R>::new(&case);
    for backends in machine.places(case.ranks) {
        data.judge(&backends[0], &case, &run(&backends, &case, &data));
    }
}

/// Every mix of dtypes.
fn check_mixes(machine: &Machine, case: Case) {
    check::<bf16, bf16, bf16>(machine, case);
    check::<f16, f16, f16>(machine, case);
    check::<f32, f32, f32>(machine, case);
    check::<bf16, f32, bf16>(machine, case);
    check::<bf16, bf16, f32>(machine, case);
    check::<f16, f32, f32>(machine, case);
}

pub fn spec(norm: Norm, rows: usize, cols: usize) -> NormSpec {
    match norm {
        Norm::Rms | Norm::L2 | Norm::L2Clamped => NormSpec::new(norm, rows, cols, 1e-6),
        Norm::Layer => NormSpec::layer(rows, cols, 1e-5),
    }
}

#[test]
fn sums_of_every_number_of_ranks_in_every_mix_are_right() {
    let Some(machine) = Machine::open() else { return };
    for ranks in [1, 2, 3, 4, 8] {
        for norm in Norm::USUAL {
            check_mixes(&machine, Case::new(ranks, spec(norm, 5, 1024)));
        }
    }
}

/// One pack per thread, two, and rows in shared memory; fewer rows than blocks, and more.
#[test]
fn rows_of_every_length_are_right() {
    let Some(machine) = Machine::open() else { return };
    for (ranks, rows, cols) in [
        (2, 1, 4096),
        (2, 300, 4096),
        (2, 3, 8192),
        (2, 150, 8192),
        (4, 150, 4096),
        (8, 70, 4096),
        (8, 5, 8192),
        (8, 40, 8192),
        // Packs have owners, some ranks none in some rows.
        (3, 300, 1000),
        (8, 400, 100),
        (2, 3, 16384),
        (2, 140, 12288),
        (4, 40, 20_000),
        (8, 3, 16384),
        (2, 2, 65536),
    ] {
        for norm in Norm::USUAL {
            check::<bf16, bf16, bf16>(&machine, Case::new(ranks, spec(norm, rows, cols)));
        }
        if cols <= 32768 {
            check::<bf16, f32, f32>(&machine, Case::new(ranks, spec(Norm::Layer, rows, cols)));
        }
    }
    check::<f32, f32, f32>(&machine, Case::new(2, spec(Norm::Layer, 5, 32768)));
}

#[test]
fn odd_lengths_gaps_and_offsets_are_right() {
    let Some(machine) = Machine::open() else { return };
    for (cols, gap, offset) in [
        (1, 0, 0),
        (3, 2, 1),
        (7, 0, 0),
        (100, 4, 4),
        (1001, 0, 1),
        (1000, 24, 8),
        (4097, 7, 3),
        (6002, 2, 2),
        (9001, 1, 0),
    ] {
        for ranks in [2, 3, 8] {
            let case = Case { gap, offset, ..Case::new(ranks, spec(Norm::USUAL[cols % 2], 9, cols)) };
            check_mixes(&machine, case);
        }
    }
}

/// Each rank's tensors have another alignment, and so another kernel; the data sent is the same.
#[test]
fn ranks_need_not_be_aligned_alike() {
    let Some(machine) = Machine::open() else { return };
    for (cols, gap) in [(1024, 0), (1001, 3), (9000, 8)] {
        let case = Case { gap, is_uneven: true, ..Case::new(4, spec(Norm::Rms, 40, cols)) };
        check_mixes(&machine, case);
    }
    // Packs have owners.
    check_mixes(&machine, Case { gap: 3, is_uneven: true, ..Case::new(4, spec(Norm::Rms, 150, 1021)) });
}

#[test]
fn rows_in_groups_are_right() {
    let Some(machine) = Machine::open() else { return };
    let case = Case { rows_per_group: Some(3), ..Case::new(2, spec(Norm::Layer, 20, 512)) };
    check_mixes(&machine, case);
    // In several launches, which start in the middle of a group.
    check_mixes(&machine, Case { bytes: 4 * 4 * 512, ..case });
}

#[test]
fn every_set_of_tensors_is_right() {
    let Some(machine) = Machine::open() else { return };
    for number in 0..16_u64 {
        let has = |bit: u64| number & bit != 0;
        let case = Case::new(2 + number as usize % 3, spec(Norm::USUAL[number as usize % 2], 6, 768));
        let case = Case { has_residual: has(1), has_weight: has(2), has_bias: has(4), is_in_place: has(8), ..case };
        check_mixes(&machine, case);
        // Few long rows, on clusters, and more, whose packs have owners.
        for rows in [2, 40] {
            let case = Case { ranks: 4, spec: spec(Norm::USUAL[number as usize % 2], rows, 8192), ..case };
            let bytes = Case::new(case.ranks, case.spec).bytes;
            check::<bf16, bf16, bf16>(&machine, Case { bytes, ..case });
        }
    }
}

#[test]
fn casts_and_offsets_of_the_weight_are_right() {
    let Some(machine) = Machine::open() else { return };
    for norm in Norm::USUAL {
        let spec = spec(norm, 6, 1024).weight_offset(1.0).cast_order(CastOrder::BeforeWeight);
        check_mixes(&machine, Case::new(3, spec));
    }
}

#[test]
fn in_place_is_right_in_every_regime() {
    let Some(machine) = Machine::open() else { return };
    for (ranks, rows, cols) in [(2, 300, 4096), (4, 150, 8192), (2, 150, 10_000), (1, 40, 100), (8, 40, 4096)] {
        for has_residual in [true, false] {
            let case = Case { is_in_place: true, has_residual, ..Case::new(ranks, spec(Norm::Rms, rows, cols)) };
            check::<bf16, bf16, bf16>(&machine, case);
            check::<f16, f32, f32>(&machine, case);
        }
    }
}

#[test]
fn no_rows_are_no_call() {
    let Some(machine) = Machine::open() else { return };
    check_mixes(&machine, Case::new(2, spec(Norm::Rms, 0, 4096)));
}

/// NaN (among them the bits of an empty slot), infinities, zeros of both signs, subnormals.
#[test]
fn values_that_are_no_numbers_come_through() {
    fn with_specials<T: Element + DeviceRepr, R: Element + DeviceRepr>(machine: &Machine, cols: usize) {
        let case = Case::new(3, spec(Norm::Rms, 12, cols));
        let data = Data::<T, T, R>::with_specials(&case);
        for backends in machine.places(3) {
            data.judge(&backends[0], &case, &run(&backends, &case, &data));
        }
    }
    let Some(machine) = Machine::open() else { return };
    for cols in [256, 1001, 10_001] {
        with_specials::<bf16, bf16>(&machine, cols);
        with_specials::<f16, f32>(&machine, cols);
        with_specials::<f32, f32>(&machine, cols);
    }
    // Rows so long that packs have owners.
    with_specials::<bf16, bf16>(&machine, 40_961);
    with_specials::<f32, f32>(&machine, 20_481);
}

#[test]
fn calls_that_exceed_the_memory_go_in_pieces() {
    let Some(machine) = Machine::open() else { return };
    for (ranks, rows, cols, rows_at_once) in
        // In the last case packs have owners.
        [(2, 50, 4096, 3), (4, 33, 1001, 1), (2, 10, 9000, 4), (3, 7, 8192, 6_usize), (4, 60, 8192, 9)]
    {
        let row_bytes = (size_of::<bf16>() * cols).next_multiple_of(16);
        let case = Case::new(ranks, spec(Norm::Layer, rows, cols));
        check::<bf16, bf16, bf16>(&machine, Case { bytes: rows_at_once * row_bytes, ..case });
        check::<bf16, bf16, bf16>(&machine, Case { bytes: rows_at_once * row_bytes, is_in_place: true, ..case });
    }
}

/// Calls in sequence on one group, without waiting: each epoch must find empty slots that another
/// layout had filled.
#[test]
fn calls_of_all_kinds_follow_each_other() {
    fn call<T: Element + DeviceRepr, R: Element + DeviceRepr>(
        group: &PeerGroup,
        backend: &CudaBackend,
        all_there: &Barrier,
        (rows, cols): (usize, usize),
    ) -> (Case, Vec<u32>) {
        let case = Case {
            bytes: 1 << 18,
            seed: (rows * cols) as u64,
            ..Case::new(group.ranks(), spec(Norm::Rms, rows, cols))
        };
        let mut tensors = Tensors::new(backend, &case, &Data::<T, T, R>::new(&case), group.rank());
        tensors.prepare(group).unwrap();
        all_there.wait();
        tensors.call(group).unwrap();
        backend.stream().synchronize().unwrap();
        let output = tensors.output(backend);
        (case, output.h.unwrap().bits)
    }
    let Some(machine) = Machine::open() else { return };
    for backends in [2, 4].into_iter().flat_map(|ranks| machine.places(ranks)) {
        let all_there = Barrier::new(backends.len());
        let groups = PeerGroup::in_process(&backends, 1 << 18).unwrap();
        let results = on_each(groups, |group| {
            let backend = &backends[group.rank()];
            let shapes = [(1, 4096), (40, 4096), (3, 1001), (0, 64), (100, 100), (2, 12288), (64, 2048), (1, 1)];
            let calls = shapes.map(|shape| {
                let one = call::<bf16, bf16>(&group, backend, &all_there, shape);
                let two = call::<f32, f32>(&group, backend, &all_there, shape);
                [one, two, call::<f16, f32>(&group, backend, &all_there, shape)]
            });
            group.check().unwrap();
            calls
        });
        for calls in &results {
            for (calls, firsts) in calls.iter().zip(&results[0]) {
                let sums = |(case, _): &(Case, Vec<u32>)| {
                    [
                        Bits::rounded(&Data::<bf16, bf16, bf16>::new(case).sum(case), bf16::DTYPE),
                        Bits::rounded(&Data::<f32, f32, f32>::new(case).sum(case), f32::DTYPE),
                        Bits::rounded(&Data::<f16, f16, f32>::new(case).sum(case), f32::DTYPE),
                    ]
                };
                for ((call, first), sum) in calls.iter().zip(firsts).zip(sums(&calls[0])) {
                    assert!(call.1 == first.1 && call.1 == sum.bits, "{:?}", call.0);
                }
            }
        }
    }
}

/// The bits of a row depend neither on other rows, nor on its launch, nor on other ranks on the
/// device.
#[test]
fn a_row_alone_has_the_bits_that_it_has_among_others() {
    let Some(machine) = Machine::open() else { return };
    for (ranks, norm, cols) in [
        (2, Norm::Rms, 4096),
        (2, Norm::Layer, 8192),
        (2, Norm::Layer, 1001),
        (2, Norm::Rms, 12_288),
        (4, Norm::Rms, 8192),
        (8, Norm::Layer, 8192),
        (8, Norm::Rms, 5120),
    ] {
        let case = Case::new(ranks, spec(norm, 300, cols));
        let data = Data::<bf16, bf16, bf16>::new(&case);
        for backends in machine.places(ranks) {
            let all = run(&backends, &case, &data);
            for row in [0, 131, 299] {
                let alone = Case::new(ranks, spec(norm, 1, cols));
                let of_row = |values: &Vec<bf16>| values[row * cols..(row + 1) * cols].to_vec();
                let data =
                    Data { x: data.x.iter().map(of_row).collect(), residual: of_row(&data.residual), ..data.clone() };
                let got = run(&backends, &alone, &data);
                let Output { h, y, mean, rstd } = &all[0];
                let range = row * cols..(row + 1) * cols;
                assert_eq!(got[0].y.bits, y.bits[range.clone()], "{alone:?}");
                assert_eq!(got[0].h.as_ref().unwrap().bits, h.as_ref().unwrap().bits[range], "{alone:?}");
                assert_eq!(got[0].rstd.bits, rstd.bits[row..=row]);
                assert_eq!(got[0].mean.as_ref().map(|mean| mean.bits[0]), mean.as_ref().map(|mean| mean.bits[row]));
            }
        }
    }
}
