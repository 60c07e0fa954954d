//! The two phases of a call with columns divided among ranks. One rank gives the bits of the whole
//! call, and no bit depends on the instruction set, the number of threads or the other rows.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::mem::MaybeUninit;

use rmsnorm_conformance::testing::values;
use rmsnorm_cpu::{Backward, CpuBackend, Forward, Isa, UninitBackend};
use rmsnorm_spec::{
    Error, Norm, NormBackend, NormSpec, PartialBackwardStatistics, PartialStatistics, Rows, WithStatistics,
};

/// Inputs and outputs of a call, forward and backward. Matrices are (rows, cols).
#[derive(Clone, Debug, PartialEq)]
struct Calls {
    spec: NormSpec,
    x: Vec<f32>,
    residual: Vec<f32>,
    dy: Vec<f32>,
    weight: Vec<f32>,
    y: Vec<f32>,
    h: Vec<f32>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
    dx: Vec<f32>,
    dweight: Vec<f32>,
}

impl Calls {
    fn new(norm: Norm, rows: usize, cols: usize) -> Self {
        let len = rows * cols;
        Calls {
            spec: NormSpec::new(norm, rows, cols, 1e-5).weight_offset(0.5),
            x: values(1, len),
            residual: values(2, len),
            dy: values(3, len),
            weight: values(4, cols),
            y: vec![f32::NAN; len],
            h: vec![f32::NAN; len],
            mean: vec![0.0; rows],
            rstd: vec![f32::NAN; rows],
            dx: vec![f32::NAN; len],
            dweight: vec![f32::NAN; cols],
        }
    }

    /// The first rows.
    fn rows(mut self, rows: usize) -> Self {
        let (spec, cols) = (self.spec.rows(rows), self.spec.cols);
        for matrix in [&mut self.x, &mut self.residual, &mut self.dy, &mut self.y, &mut self.h, &mut self.dx] {
            matrix.truncate(rows * cols);
        }
        self.mean.truncate(rows);
        self.rstd.truncate(rows);
        Calls { spec, ..self }
    }

    fn forward_args(&mut self) -> Forward<'_, f32> {
        let args = Forward::new(&self.x, &mut self.y).weight(&self.weight).residual(&self.residual[..]);
        let args = args.residual_out(&mut self.h[..]).rstd(&mut self.rstd);
        if self.spec.norm == Norm::Layer { args.mean(&mut self.mean) } else { args }
    }

    fn backward_args(&mut self) -> Backward<'_, f32> {
        let args = Backward::new(&self.dy, &self.h, &self.rstd, &mut self.dx).weight(&self.weight);
        let args = args.dweight(&mut self.dweight);
        if self.spec.norm == Norm::Layer { args.mean(&self.mean) } else { args }
    }

    fn by_whole(mut self, backend: &CpuBackend) -> Self {
        let spec = self.spec;
        backend.forward(&spec, self.forward_args()).unwrap();
        backend.backward(&spec, self.backward_args()).unwrap();
        self
    }

    /// Runs both phases for ranks with these numbers of adjacent columns.
    fn by_halves(mut self, backend: &CpuBackend, columns: &[usize]) -> Self {
        let (whole, spec) = (self.spec.cols, self.spec);
        let starts: Vec<usize> =
            columns.iter().scan(0, |next, columns| Some(std::mem::replace(next, *next + columns))).collect();
        // A rank's columns are strided rows of the whole matrix.
        let from = |matrix: &[f32], rank: usize| matrix.get(starts[rank]..).unwrap_or_default().to_vec();
        let (mut found, mut found_back) = (Vec::new(), Vec::new());
        for (rank, &here) in columns.iter().enumerate() {
            let (x, residual) = (from(&self.x, rank), from(&self.residual, rank));
            let mut numbers = vec![f32::NAN; spec.rows * spec.norm.statistics_len(rmsnorm_spec::Direction::Forward)];
            let residual = Some(Rows::strided(&residual[..], whole));
            let args =
                PartialStatistics::<_, f32, f32>::mixed(Rows::strided(&x[..], whole), residual, &mut numbers[..]);
            backend.partial_statistics(&spec.cols(here), args).unwrap();
            found.extend(numbers);
        }
        let of_rank = |calls: &Calls, rank: usize| {
            let here = columns[rank];
            let part = |matrix: &[f32]| -> Vec<f32> {
                let row = |row: usize| matrix[row * whole + starts[rank]..][..here].to_vec();
                (0..spec.rows).flat_map(row).collect()
            };
            Calls {
                spec: spec.cols(here),
                x: part(&calls.x),
                residual: part(&calls.residual),
                dy: part(&calls.dy),
                weight: calls.weight[starts[rank]..][..here].to_vec(),
                y: part(&calls.y),
                h: part(&calls.h),
                dx: part(&calls.dx),
                dweight: calls.dweight[starts[rank]..][..here].to_vec(),
                ..calls.clone()
            }
        };
        let mut ranks: Vec<Calls> = (0..columns.len()).map(|rank| of_rank(&self, rank)).collect();
        for calls in &mut ranks {
            let spec = calls.spec;
            backend
                .forward_with_statistics(&spec, WithStatistics::new(calls.forward_args(), &found[..], columns))
                .unwrap();
            let mut numbers = vec![f32::NAN; spec.rows * spec.norm.statistics_len(rmsnorm_spec::Direction::Backward)];
            let args = PartialBackwardStatistics::<CpuBackend, f32>::new(
                &calls.dy[..],
                &calls.h[..],
                &calls.rstd[..],
                &mut numbers[..],
            );
            let args = args.weight(&calls.weight);
            let args = if spec.norm == Norm::Layer { args.mean(&calls.mean) } else { args };
            backend.partial_backward_statistics(&spec, args).unwrap();
            found_back.extend(numbers);
        }
        for (rank, calls) in ranks.iter_mut().enumerate() {
            let spec = calls.spec;
            backend
                .backward_with_statistics(&spec, WithStatistics::new(calls.backward_args(), &found_back[..], columns))
                .unwrap();
            for row in 0..spec.rows {
                let (there, here) = (row * whole + starts[rank], row * spec.cols);
                for (to, from) in [(&mut self.y, &calls.y), (&mut self.h, &calls.h), (&mut self.dx, &calls.dx)] {
                    to[there..][..spec.cols].copy_from_slice(&from[here..][..spec.cols]);
                }
            }
            self.dweight[starts[rank]..][..spec.cols].copy_from_slice(&calls.dweight);
            (self.mean, self.rstd) = (calls.mean.clone(), calls.rstd.clone());
        }
        self
    }
}

#[test]
fn one_rank_has_the_bits_of_the_whole_call() {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap();
    for norm in Norm::ALL {
        for (rows, cols) in [(1, 1), (3, 33), (20, 1000), (9, 64)] {
            let calls = Calls::new(norm, rows, cols);
            assert_eq!(calls.clone().by_halves(&backend, &[cols]), calls.by_whole(&backend), "{norm:?} {rows}x{cols}");
        }
    }
}

#[test]
fn bits_depend_on_neither_threads_nor_instruction_set_nor_other_rows() {
    // Large enough that both phases are split among threads.
    let (rows, cols, columns) = (700, 1021, [400, 1, 620]);
    for norm in Norm::ALL {
        let calls = Calls::new(norm, rows, cols);
        let one = CpuBackend::with_isa_and_threads(Isa::Portable, 1).unwrap();
        let expected = calls.clone().by_halves(&one, &columns);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let backend = CpuBackend::with_isa_and_threads(isa, 3).unwrap();
            assert_eq!(calls.clone().by_halves(&backend, &columns), expected, "{norm:?} {isa}");
        }
        let few = calls.rows(2).by_halves(&one, &columns);
        let of_few = expected.rows(2);
        assert_eq!((few.y, few.mean, few.rstd, few.dx), (of_few.y, of_few.mean, of_few.rstd, of_few.dx), "{norm:?}");
    }
}

/// Two ranks with means far from zero and from each other: their numbers, and the resulting
/// variance.
#[test]
fn layer_norm_finds_sum_deviations_and_squares() {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap();
    let spec = NormSpec::layer(1, 4, 0.0);
    let mut found = [f32::NAN; 6];
    let (of_first, of_second) = found.split_at_mut(3);
    for (x, found) in [([9.0f32, 11.0, 9.0, 11.0], of_first), ([20.0, 20.0, 20.0, 24.0], of_second)] {
        backend.partial_statistics(&spec, PartialStatistics::<_, f32>::new(&x[..], found)).unwrap();
    }
    assert_eq!(found, [40.0, 0.0, 4.0, 84.0, 0.0, 12.0]);
    // Mean 15.5; deviations of 6.5, 4.5, 6.5, 4.5, 4.5, 4.5, 4.5 and 8.5: squares add up to 258.
    let (x, mut y, mut mean, mut rstd) = ([9.0f32, 11.0, 9.0, 11.0], [f32::NAN; 4], [f32::NAN], [f32::NAN]);
    let args = Forward::new(&x, &mut y).mean(&mut mean).rstd(&mut rstd);
    backend.forward_with_statistics(&spec, WithStatistics::new(args, &found[..], &[4, 4])).unwrap();
    assert_eq!((mean, rstd), ([15.5], [1.0 / (258.0f32 / 8.0).sqrt()]));
    assert_eq!(y, x.map(|x| (x - mean[0]) * rstd[0]));
}

#[test]
fn outputs_need_not_hold_values_before() {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap();
    let (spec, x) = (NormSpec::rms(1, 2, 0.0), [3.0f32, 4.0]);
    let mut found = [MaybeUninit::uninit()];
    let uninit = backend.uninit();
    uninit.partial_statistics(&spec, PartialStatistics::<_, f32>::new(&x[..], &mut found[..])).unwrap();
    let mut known = [f32::NAN];
    backend.partial_statistics(&spec, PartialStatistics::<_, f32>::new(&x[..], &mut known[..])).unwrap();
    assert_eq!(known, [25.0]);
    let mut y = [MaybeUninit::new(f32::NAN); 2];
    let args = rmsnorm_spec::Forward::<UninitBackend, f32>::in_place(&mut y[..]);
    let answer = uninit.forward_with_statistics(&spec, WithStatistics::new(args, &known[..], &[2]));
    assert!(matches!(answer, Err(Error::Unsupported { .. })));
}
