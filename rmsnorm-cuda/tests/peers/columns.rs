//! Column-divided rows in a group.

use std::sync::Barrier;
use std::time::Duration;

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::bounds::{Mode, Model};
use rmsnorm_conformance::ranks::columns::test_columns;
use rmsnorm_conformance::testing::{Bits, ForwardTruth, exact, values};
use rmsnorm_cuda::spec::reference::ForwardInputs;
use rmsnorm_cuda::spec::{DType, Error, Norm, NormSpec, Problem, Tensor, bf16};
use rmsnorm_cuda::{CudaBackend, Forward, MissingRank, PeerGroup};
use rmsnorm_dist::{Ranks, ShardedNorm};

use crate::machine::{Machine, on_each};

/// Bytes for the statistics of 100 rows: calls with more rows take several launches.
const ROOM: usize = 1600;

const EPS: f32 = 1e-5;

/// Kernels are loaded case by case, which needs a GPU for each rank.
#[test]
fn divided_columns_pass_the_suite() {
    let Some(machine) = Machine::open() else { return };
    let own_gpus = |ranks| machine.places(ranks).into_iter().skip(usize::from(ranks > 1));
    for (ranks, backends) in [1, 2, 3, 4, 8].into_iter().flat_map(|ranks| own_gpus(ranks).map(move |it| (ranks, it))) {
        let groups = PeerGroup::in_process(&backends, ROOM).unwrap();
        let passed = test_columns(&Ranks::new(groups.into_iter().zip(backends)), false).unwrap();
        assert!(passed > 30, "{ranks} ranks: {passed} cases");
    }
}

/// A call, with the columns of each rank.
#[derive(Clone, Debug)]
struct Case {
    norm: Norm,
    rows: usize,
    columns: Vec<usize>,
    /// The bytes of the group's memory.
    room: usize,
}

/// The results of a rank: its columns of y, and the statistics of whole rows.
struct Output {
    y: Vec<bf16>,
    mean: Vec<u32>,
    rstd: Vec<u32>,
}

impl Case {
    /// 100 rows fit one launch.
    fn new(norm: Norm, rows: usize, columns: Vec<usize>) -> Self {
        Case { norm, rows, columns, room: ROOM }
    }

    fn whole(&self) -> NormSpec {
        let cols = self.columns.iter().sum();
        NormSpec::new(self.norm, self.rows, cols, EPS)
    }

    /// A rank's x. Each rank has a different mean.
    fn x(&self, rank: usize) -> Vec<bf16> {
        let values: Vec<bf16> = values(rank as u64, self.rows * self.columns[rank]);
        values.into_iter().map(|value| bf16::from_f32(value.to_f32() + rank as f32)).collect()
    }

    fn weight(&self, rank: usize) -> Vec<bf16> {
        values(50 + rank as u64, self.columns[rank])
    }

    /// Compiles the kernels, before any rank waits for another.
    fn prepare(&self, group: &PeerGroup) {
        let tensors = [Tensor::Weight, Tensor::Rstd];
        let problem = Problem::forward(self.norm, self.rows, self.columns[group.rank()], DType::Bf16, &tensors);
        // All columns here allow the widest access.
        group.prepare_columns(&problem, 16).unwrap();
    }

    /// Normalizes these rows of a rank's x. Nothing is allocated or copied between the two
    /// barriers.
    fn call(&self, (backend, group): (&CudaBackend, &PeerGroup), all_there: &Barrier, x: &[bf16]) -> Output {
        let rows = x.len() / self.columns[group.rank()];
        let cols = self.columns[group.rank()];
        let (x, weight) = (backend.upload(x).unwrap(), backend.upload(&self.weight(group.rank())).unwrap());
        let mut y = backend.upload(&vec![bf16::NAN; rows * cols]).unwrap();
        let [mut mean, mut rstd] = [(); 2].map(|()| backend.upload(&vec![f32::NAN; rows]).unwrap());
        let mut args = Forward::<bf16>::new(x.as_view(), y.as_view_mut()).weight(weight.as_view());
        args = args.rstd(rstd.as_view_mut());
        if self.norm == Norm::Layer {
            args = args.mean(mean.as_view_mut());
        }
        backend.stream().synchronize().unwrap();
        all_there.wait();
        group.forward_columns(&self.whole().rows(rows), &self.columns, args).unwrap();
        backend.stream().synchronize().unwrap();
        group.check().unwrap();
        all_there.wait();
        let bits = |statistic| Bits::of(&backend.download::<f32>(statistic).unwrap()).bits;
        Output { y: backend.download(&y).unwrap(), mean: bits(&mean), rstd: bits(&rstd) }
    }

    /// Checks that all ranks have the same statistics, and that y is the norm of whole rows.
    fn judge(&self, backend: &CudaBackend, outputs: &[Output]) {
        for (rank, output) in outputs.iter().enumerate() {
            assert!(output.rstd == outputs[0].rstd, "{self:?}: rstd of rank {rank} is another");
            assert!(self.norm != Norm::Layer || output.mean == outputs[0].mean, "{self:?}: mean of rank {rank}");
        }
        let join = |parts: &[Vec<bf16>]| -> Vec<bf16> {
            let row = |row: usize| {
                let part = move |(part, cols): (&Vec<bf16>, &usize)| part[row * cols..(row + 1) * cols].to_vec();
                parts.iter().zip(&self.columns).flat_map(part).collect::<Vec<_>>()
            };
            (0..self.rows).flat_map(row).collect()
        };
        let of_ranks = |of: &dyn Fn(usize) -> Vec<bf16>| (0..self.columns.len()).map(of).collect::<Vec<_>>();
        let x = exact(&join(&of_ranks(&|rank| self.x(rank))));
        let weight: Vec<f64> = exact(&of_ranks(&|rank| self.weight(rank)).concat());
        let y: Vec<Vec<bf16>> = outputs.iter().map(|output| output.y.clone()).collect();
        let inputs = ForwardInputs { x: &x, residual: None, weight: Some(&weight), bias: None };
        let model = Model { arithmetic: &backend.arithmetic(), mode: Mode::Worst };
        let truth = ForwardTruth::new(&self.whole(), inputs, DType::Bf16, None, model);
        let verdict = truth.judge(Tensor::Y, &join(&y));
        assert!(verdict.is_pass(), "{self:?}: {verdict:?}");
    }

    fn run(&self, machine: &Machine) {
        let ranks = self.columns.len();
        for backends in machine.places(ranks) {
            let all_there = Barrier::new(ranks);
            let outputs = on_each(PeerGroup::in_process(&backends, self.room).unwrap(), |group| {
                let backend = &backends[group.rank()];
                let (rank, x) = ((backend, &group), self.x(group.rank()));
                self.prepare(&group);
                let output = self.call(rank, &all_there, &x);
                let cols = self.columns[group.rank()];
                // Single rows, the same on all ranks.
                for row in [0, self.rows / 3, self.rows - 1] {
                    let range = row * cols..(row + 1) * cols;
                    let alone = self.call(rank, &all_there, &x[range.clone()]);
                    assert!(alone.y == output.y[range], "{self:?}: row {row} alone");
                    assert_eq!(alone.rstd[0], output.rstd[row], "{self:?}: row {row} alone");
                }
                output
            });
            self.judge(&backends[0], &outputs);
        }
    }
}

/// Ranks as streams of one GPU, and each on its own GPU; one kernel, or three for long rows. More
/// rows than slots, and than blocks.
#[test]
fn whole_rows_are_normalized_by_all_ranks_alike() {
    let Some(machine) = Machine::open() else { return };
    for norm in Norm::ALL {
        for ranks in [2, 3, 4, 8] {
            Case::new(norm, 300, vec![1024; ranks]).run(&machine);
        }
        // A block has several rows of a launch, three of them in its registers.
        Case { room: 16 * 700, ..Case::new(norm, 700, vec![4096; 2]) }.run(&machine);
        Case::new(norm, 120, vec![20_000; 2]).run(&machine);
        // One rank runs three kernels, the other one.
        Case::new(norm, 120, vec![20_000, 4096]).run(&machine);
        Case::new(norm, 3, vec![16384, 8, 8192]).run(&machine);
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
