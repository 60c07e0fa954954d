//! Rows whose columns are divided among the ranks of a group.

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::ranks::columns::test_columns;
use rmsnorm_cuda::spec::{Error, NormSpec, bf16};
use rmsnorm_cuda::{Forward, MissingRank, PeerGroup};
use rmsnorm_dist::{Ranks, ShardedNorm};
use std::time::Duration;

use crate::machine::{Machine, on_each};

/// Room for the numbers of 100 rows: calls of more go in several launches.
const ROOM: usize = 1600;

#[test]
fn divided_columns_pass_the_suite() {
    let Some(machine) = Machine::open() else { return };
    for ranks in [1, 2, 3, 4, 8] {
        for backends in machine.places(ranks) {
            let groups = PeerGroup::in_process(&backends, ROOM).unwrap();
            let passed = test_columns(&Ranks::new(groups.into_iter().zip(backends)), false).unwrap();
            assert!(passed > 30, "{ranks} ranks: {passed} cases");
        }
    }
}

/// What a rank gives for its columns of each row.
fn call(backend: &rmsnorm_cuda::CudaBackend, group: &PeerGroup, x: &[bf16], rows: usize, cols: usize) -> Vec<bf16> {
    let ranks = group.ranks();
    let x = backend.upload(x).unwrap();
    let mut y = backend.upload(&vec![bf16::NAN; rows * cols]).unwrap();
    let spec = NormSpec::layer(rows, ranks * cols, 1e-5);
    group.forward_columns(&spec, &vec![cols; ranks], Forward::<bf16>::new(x.as_view(), y.as_view_mut())).unwrap();
    backend.stream().synchronize().unwrap();
    group.check().unwrap();
    backend.download(&y).unwrap()
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let Some(machine) = Machine::open() else { return };
    // In one kernel, and in three.
    for (backends, (rows, cols)) in
        machine.places(2).into_iter().flat_map(|place| [(place.clone(), (300, 1000)), (place, (300, 20_000))])
    {
        on_each(PeerGroup::in_process(&backends, ROOM).unwrap(), |group| {
            let backend = &backends[group.rank()];
            let x = rmsnorm_conformance::testing::values::<bf16>(group.rank() as u64, rows * cols);
            let all = call(backend, &group, &x, rows, cols);
            for row in [0, 99, 100, 299] {
                let range = row * cols..(row + 1) * cols;
                let alone = call(backend, &group, &x[range.clone()], 1, cols);
                assert!(alone == all[range], "row {row}");
            }
        });
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let Some(machine) = Machine::open() else { return };
    let backends = machine.on_one(2);
    let mut groups = PeerGroup::in_process(&backends, ROOM).unwrap();
    let group = groups.remove(0).deadline(Duration::from_millis(200));
    let x = backends[0].upload(&[bf16::ONE; 64]).unwrap();
    let mut y = backends[0].upload(&[bf16::ONE; 64]).unwrap();
    let spec = NormSpec::rms(1, 128, 1e-6);
    let mut call = || group.forward_columns(&spec, &[64, 64], Forward::<bf16>::new(x.as_view(), y.as_view_mut()));
    call().unwrap();
    backends[0].stream().synchronize().unwrap();
    for result in [group.check(), call()] {
        let Err(Error::Device { source, .. }) = result else { panic!("{result:?}") };
        assert_eq!(source.downcast_ref::<MissingRank>().map(MissingRank::missing), Some(1));
    }
}
