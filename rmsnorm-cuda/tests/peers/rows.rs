//! Calls whose residual is divided by rows: every value has the bits of a call of whole rows, each
//! rank writes only its own rows, and calls of all kinds follow each other.

use std::sync::Barrier;
use std::time::Duration;

use rmsnorm_conformance::testing::{Bits, bits};
use rmsnorm_cuda::cudarc::driver::DeviceRepr;
use rmsnorm_cuda::spec::{Element, Error, Norm, OutputRows, bf16, f16};
use rmsnorm_cuda::{CudaBackend, MissingRank, PeerGroup};
use rmsnorm_dist::ShardedNorm;

use crate::case::{Case, Data};
use crate::machine::{Gate, Machine, on_each};
use crate::sums::spec;
use crate::tensors::{Output, POISON, Tensors};

/// Combines the rows of all ranks; `outputs` are matrices with room for all rows.
pub fn whole<T: Element, R: Element>(case: &Case, y_rows: OutputRows, outputs: &[Output], x: &[Vec<T>]) -> Output {
    let (rows, cols) = (case.spec.rows, case.spec.cols);
    let owner = |row: usize| row / rows.div_ceil(case.ranks).max(1);
    let collect = |of: fn(&Output) -> Option<&Bits>, width: usize| {
        let first = of(&outputs[0])?.clone();
        let bits = (0..rows * width).map(|i| of(&outputs[owner(i / width)]).unwrap().bits[i]).collect();
        Some(Bits { bits, ..first })
    };
    for (rank, output) in outputs.iter().enumerate() {
        // The first changed element in a row of another rank.
        let stray = |tensor: &Bits, width: usize, before: &dyn Fn(usize) -> u32| {
            let is_others = |i: usize| owner(i / width) != rank;
            (0..tensor.bits.len()).find(|&i| is_others(i) && tensor.bits[i] != before(i))
        };
        for statistic in output.mean.iter().chain([&output.rstd]) {
            let stray = stray(statistic, 1, &|_| POISON);
            assert_eq!(stray, None, "{case:?}: rank {rank} has written statistics of another's row");
        }
        // In place, the residual of all rows was there; otherwise poison.
        if let Some(h) = output.h.as_ref().filter(|_| !case.is_in_place) {
            let stray = stray(h, cols, &|_| R::from_bits(POISON).bits());
            assert_eq!(stray, None, "{case:?}: rank {rank} has written the sum of another's row");
        }
        match y_rows {
            OutputRows::All => assert!(output.y.bits == outputs[0].y.bits, "{case:?}: y of rank {rank} differs"),
            OutputRows::Own => {
                let before = |i: usize| if case.is_in_place { x[rank][i].bits() } else { T::from_bits(POISON).bits() };
                let stray = stray(&output.y, cols, &before);
                assert_eq!(stray, None, "{case:?}: rank {rank} has written y of another's row");
            }
        }
    }
    Output {
        h: collect(|output| output.h.as_ref(), cols),
        y: collect(|output| Some(&output.y), cols).unwrap(),
        mean: collect(|output| output.mean.as_ref(), 1),
        rstd: collect(|output| Some(&output.rstd), 1).unwrap(),
    }
}

/// Both kinds of y on a new group, and a call of whole rows.
fn check<T: Element + DeviceRepr, W: Element, R: Element + DeviceRepr>(machine: &Machine, case: Case) {
    let data = &Data::<T, W, R>::new(&case);
    for backends in machine.places(case.ranks) {
        let groups = PeerGroup::in_process(&backends, case.bytes).unwrap();
        let all_there = Barrier::new(backends.len());
        let outputs = on_each(groups, |group| {
            let backend = &backends[group.rank()];
            let tensors = || Tensors::new(backend, &case, data, group.rank());
            let (mut of_whole, mut all, mut own) = (tensors(), tensors(), tensors());
            of_whole.prepare(&group).unwrap();
            all.prepare_rows(&group).unwrap();
            all_there.wait();
            own.call_on_rows(&group, OutputRows::Own).unwrap();
            of_whole.call(&group).unwrap();
            all.call_on_rows(&group, OutputRows::All).unwrap();
            backend.stream().synchronize().unwrap();
            group.check().unwrap();
            [of_whole.output(backend), all.output(backend), own.output(backend)]
        });
        let [of_whole, all, own] =
            [0, 1, 2].map(|call| outputs.iter().map(|calls| calls[call].clone()).collect::<Vec<_>>());
        data.judge(&backends[0], &case, &of_whole);
        assert!(
            whole::<T, R>(&case, OutputRows::All, &all, &data.x) == of_whole[0],
            "{case:?}: other bits with all of y"
        );
        assert!(
            whole::<T, R>(&case, OutputRows::Own, &own, &data.x) == of_whole[0],
            "{case:?}: other bits with the own y"
        );
    }
}

/// Every mix of dtypes.
fn check_mixes(machine: &Machine, case: Case) {
    check::<bf16, bf16, bf16>(machine, case);
    check::<f16, f16, f16>(machine, case);
    check::<f32, f32, f32>(machine, case);
    check::<bf16, f32, bf16>(machine, case);
    check::<bf16, bf16, f32>(machine, case);
}

/// Rows for all ranks, for some of them, and for one.
#[test]
fn rows_of_every_number_of_ranks_in_every_mix_are_right() {
    let Some(machine) = Machine::open() else { return };
    for (ranks, rows) in [(1, 3), (2, 1), (2, 6), (3, 5), (4, 5), (4, 1), (8, 3), (8, 20)] {
        for norm in Norm::USUAL {
            check_mixes(&machine, Case { bytes: 2 * rows * 4096, ..Case::new(ranks, spec(norm, rows, 1024)) });
        }
    }
}

/// One pack per thread, two, and rows in shared memory; fewer rows than blocks, and more; odd
/// lengths, gaps and offsets.
#[test]
fn rows_of_every_length_and_place_are_right() {
    let Some(machine) = Machine::open() else { return };
    for (ranks, rows, cols, gap, offset) in [
        (2, 300, 4096, 0, 0),
        (2, 301, 8192, 8, 8),
        (4, 150, 4096, 0, 0),
        (8, 70, 4096, 0, 0),
        (8, 41, 8192, 0, 0),
        (2, 141, 12_288, 0, 0),
        (4, 40, 20_000, 0, 0),
        (2, 5, 65_536, 0, 0),
        (3, 9, 1001, 3, 1),
        (2, 9, 1, 0, 0),
        (2, 9, 67, 0, 0),
        (3, 7, 100, 4, 4),
        (2, 9, 9001, 1, 0),
    ] {
        let norm = Norm::USUAL[(rows + ranks) % 2];
        let case = Case { gap, offset, ..Case::new(ranks, spec(norm, rows, cols)) };
        check::<bf16, bf16, bf16>(&machine, case);
        check::<bf16, bf16, bf16>(&machine, Case { is_in_place: true, ..case });
        if cols <= 9001 {
            check::<f16, f32, f32>(&machine, Case { is_uneven: true, ..case });
            check::<f32, f32, f32>(&machine, case);
        }
    }
}

#[test]
fn every_set_of_tensors_is_right() {
    let Some(machine) = Machine::open() else { return };
    for number in 0..16_u64 {
        let has = |bit: u64| number & bit != 0;
        let case = Case::new(2 + number as usize % 3, spec(Norm::USUAL[number as usize % 2], 7, 768));
        let case = Case { has_residual: has(1), has_weight: has(2), has_bias: has(4), is_in_place: has(8), ..case };
        check_mixes(&machine, case);
    }
}

#[test]
fn rows_that_exceed_the_memory_go_in_pieces() {
    let Some(machine) = Machine::open() else { return };
    for (ranks, rows, cols, rows_at_once) in
        [(2, 50, 4096, 4), (4, 33, 1001, 2), (2, 11, 9000, 6), (3, 7, 8192, 3_usize)]
    {
        let row_bytes = (size_of::<bf16>() * cols).next_multiple_of(16);
        let case = Case { bytes: rows_at_once * row_bytes, ..Case::new(ranks, spec(Norm::Layer, rows, cols)) };
        check::<bf16, bf16, bf16>(&machine, case);
        check::<bf16, bf16, bf16>(&machine, Case { is_in_place: true, ..case });
    }
}

/// NaN (among them the bits of an empty slot), infinities, zeros of both signs. NaN payloads are
/// not kept.
#[test]
fn values_that_are_no_numbers_come_through() {
    fn with_specials<T: Element + DeviceRepr, R: Element + DeviceRepr>(machine: &Machine, cols: usize) {
        let case = Case::new(3, spec(Norm::Rms, 12, cols));
        let data = Data::<T, T, R>::with_specials(&case);
        for backends in machine.places(3) {
            let groups = PeerGroup::in_process(&backends, case.bytes).unwrap();
            let all_there = Barrier::new(3);
            let outputs = on_each(groups, |group| {
                let backend = &backends[group.rank()];
                let mut tensors = Tensors::new(backend, &case, &data, group.rank());
                tensors.prepare_rows(&group).unwrap();
                all_there.wait();
                tensors.call_on_rows(&group, OutputRows::All).unwrap();
                backend.stream().synchronize().unwrap();
                group.check().unwrap();
                tensors.output(backend)
            });
            data.judge(&backends[0], &case, &[whole::<T, R>(&case, OutputRows::All, &outputs, &data.x)]);
        }
    }
    let Some(machine) = Machine::open() else { return };
    for cols in [256, 1001, 10_001] {
        with_specials::<bf16, bf16>(&machine, cols);
        with_specials::<f16, f32>(&machine, cols);
        with_specials::<f32, f32>(&machine, cols);
    }
}

/// Calls of both kinds and of whole rows, back to back, with early and late ranks; in some calls a
/// rank owns no row.
#[test]
fn calls_follow_each_other_however_ranks_are_apart() {
    let Some(machine) = Machine::open() else { return };
    for (ranks, rows, cols) in [(2, 1, 4096), (2, 65, 2048), (4, 3, 1000), (8, 5, 1024), (4, 170, 4096)] {
        let case = Case::new(ranks, spec(Norm::Rms, rows, cols));
        let data: Vec<_> =
            (0..3).map(|seed| Data::<bf16, bf16, bf16>::new(&Case { seed: 40 + seed, ..case })).collect();
        for backends in machine.places(ranks) {
            let all_there = Barrier::new(ranks);
            on_each(PeerGroup::in_process(&backends, case.bytes).unwrap(), |group| {
                let (backend, rank) = (&backends[group.rank()], group.rank());
                let mut calls: Vec<_> =
                    (0..30).map(|call| Tensors::new(backend, &case, &data[call % 3], rank)).collect();
                calls[0].prepare(&group).unwrap();
                calls[0].prepare_rows(&group).unwrap();
                let mut expected: Vec<Option<[Vec<u8>; 2]>> = vec![None; 9];
                for round in 0..40 {
                    all_there.wait();
                    for (number, call) in calls.iter_mut().enumerate() {
                        let random = bits(rank as u64, round * 30 + number);
                        if random.is_multiple_of(3) {
                            std::thread::sleep(Duration::from_nanos((random >> 8) % 30_000));
                        }
                        // Each of three sets of data in each of three kinds.
                        match number / 3 % 3 {
                            0 => call.call_on_rows(&group, OutputRows::Own).unwrap(),
                            1 => call.call_on_rows(&group, OutputRows::All).unwrap(),
                            _ => call.call(&group).unwrap(),
                        }
                    }
                    backend.stream().synchronize().unwrap();
                    group.check().unwrap();
                    for (number, call) in calls.iter().enumerate() {
                        let got = call.bytes(backend);
                        let expected = expected[number % 9].get_or_insert_with(|| got.clone());
                        assert!(got == *expected, "{case:?}: rank {rank}, round {round}, call {number} differs");
                    }
                }
            });
        }
    }
}

/// A rank that owns rows names the missing rank; one without rows names the owner that it waits
/// for, which may itself be waiting. No rank gets a result from missing data.
#[test]
fn others_end_where_a_rank_does_not_come() {
    const DEADLINE: Duration = Duration::from_millis(200);
    let Some(machine) = Machine::open() else { return };
    for (rows, y_rows, missing) in [
        (9, OutputRows::All, 1),
        (9, OutputRows::Own, 2),
        (1, OutputRows::All, 0),
        (1, OutputRows::All, 2),
        (400, OutputRows::All, 1),
    ] {
        let case = Case::new(3, spec(Norm::Rms, rows, 4096));
        let data = Data::<bf16, bf16, bf16>::new(&case);
        for backends in machine.places(3) {
            let (all_there, gate) = (Barrier::new(3), Gate::new(&machine, 2));
            on_each(PeerGroup::in_process(&backends, case.bytes).unwrap(), |group| {
                let group = group.deadline(DEADLINE);
                let mut tensors = Tensors::new(&backends[group.rank()], &case, &data, group.rank());
                tensors.prepare_rows(&group).unwrap();
                all_there.wait();
                if group.rank() != missing {
                    gate.stop(&backends[group.rank()]);
                    tensors.call_on_rows(&group, y_rows).unwrap();
                    gate.open();
                    backends[group.rank()].stream().synchronize().unwrap();
                    let lost = |result: Result<(), Error>| match result {
                        Err(Error::Device { source, .. }) => {
                            source.downcast_ref::<MissingRank>().map(MissingRank::missing)
                        }
                        Ok(()) | Err(_) => None,
                    };
                    let owns_none = tensors.own_rows(&group).is_empty();
                    let named = lost(group.check());
                    assert!(
                        named == Some(missing) || owns_none && named.is_some(),
                        "{rows} rows, {y_rows:?}: {named:?}"
                    );
                    assert!(lost(tensors.call_on_rows(&group, y_rows)).is_some());
                }
                all_there.wait();
            });
        }
    }
}

/// Rows in groups, and a memory that has room for one row.
#[test]
fn what_has_no_form_is_refused_before_anything_is_sent() {
    let Some(machine) = Machine::open() else { return };
    let backends: Vec<CudaBackend> = machine.on_one(2);
    let case = Case::new(2, spec(Norm::Rms, 6, 512));
    let data = Data::<bf16, bf16, bf16>::new(&case);
    let small = PeerGroup::in_process(&backends, 1024).unwrap();
    let mut tensors = Tensors::new(&backends[0], &case, &data, 0);
    let refused = tensors.call_on_rows(&small[0], OutputRows::All);
    assert!(matches!(refused, Err(Error::Unsupported { rule }) if rule.contains("room for two rows")));
    let groups = PeerGroup::in_process(&backends, case.bytes).unwrap();
    let grouped = Case { rows_per_group: Some(2), ..case };
    let mut tensors = Tensors::new(&backends[0], &grouped, &data, 0);
    let refused = tensors.call_on_rows(&groups[0], OutputRows::Own);
    assert!(matches!(refused, Err(Error::Unsupported { rule }) if rule.contains("cannot be grouped")));
}
