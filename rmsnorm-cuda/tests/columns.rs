//! Column-divided rows on one GPU: each rank is a stream with its own thread, and ranks exchange
//! data through host memory.
//!
//! Without a GPU every test prints why it is skipped and passes, unless `RMSNORM_REQUIRE` names
//! `cuda`.
#![cfg(feature = "conformance")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rmsnorm_conformance::ranks::columns::{ColumnsCase, Split, run_case, test_columns};
use rmsnorm_conformance::testing::{available, values};
use rmsnorm_conformance::{Case, Kind, Status};
use rmsnorm_cuda::cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DeviceRepr};
use rmsnorm_cuda::spec::{
    AnyElement, DType, Element, Error, GradReduction, Norm, NormBackend, NormSpec, PartialBackwardStatistics,
    PartialStatistics, Problem, Tensor, TensorSet, WithStatistics, bf16,
};
use rmsnorm_cuda::{Backward, CudaBackend, Forward};
use rmsnorm_dist::{Collective, Ranks, RowShares, Sharded, check_len};

/// The device, locked against other tests; `None`, with the reason on stdout, if it is missing and
/// not required.
fn gpu() -> Option<(CudaBackend, MutexGuard<'static, ()>)> {
    static ALONE: Mutex<()> = Mutex::new(());
    // The mutex guards no data, so a failed test leaves nothing inconsistent.
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Some((available(CudaBackend::new(0)).unwrap()?, alone))
}

/// The backend on a new stream, so that cudarc's events are in use.
fn stream_of(backend: &CudaBackend) -> CudaBackend {
    backend.on(backend.stream().context().new_stream().unwrap()).unwrap()
}

/// A rank whose exchanges go through host memory.
struct InProcess {
    rank: usize,
    ranks: usize,
    backend: CudaBackend,
    meeting: Arc<Meeting>,
}

/// The data that ranks have sent.
#[derive(Default)]
struct Meeting {
    calls: Mutex<Calls>,
    changed: Condvar,
}

#[derive(Default)]
struct Calls {
    sent: Vec<Option<Arc<Vec<u8>>>>,
    /// The number of ranks that have read the data.
    read: usize,
    /// The number of finished calls.
    done: u64,
}

impl InProcess {
    fn group(backends: &[CudaBackend]) -> Vec<InProcess> {
        let ranks = backends.len();
        let meeting = Arc::new(Meeting::default());
        meeting.calls.lock().unwrap().sent.resize(ranks, None);
        let rank = |(rank, backend): (usize, &CudaBackend)| InProcess {
            rank,
            ranks,
            backend: backend.clone(),
            meeting: meeting.clone(),
        };
        backends.iter().enumerate().map(rank).collect()
    }

    /// The bytes of all ranks, by rank.
    fn exchange(&self, bytes: Vec<u8>) -> Result<Vec<Arc<Vec<u8>>>, Error> {
        let Meeting { calls, changed } = &*self.meeting;
        let mut call = calls.lock().unwrap();
        let turn = call.done;
        call.sent[self.rank] = Some(Arc::new(bytes));
        changed.notify_all();
        call = self.wait(call, |call| call.sent.iter().any(Option::is_none))?;
        let sent = call.sent.iter().flatten().cloned().collect();
        call.read += 1;
        if call.read == self.ranks {
            call.read = 0;
            call.done += 1;
            call.sent.fill(None);
            changed.notify_all();
        }
        // A rank sends again only after all ranks have read.
        self.wait(call, |call| call.done == turn).map(|_| sent)
    }

    fn wait<'c>(
        &self,
        calls: MutexGuard<'c, Calls>,
        is_early: impl Fn(&Calls) -> bool,
    ) -> Result<MutexGuard<'c, Calls>, Error> {
        let deadline = Duration::from_secs(60);
        let (calls, waited) =
            self.meeting.changed.wait_timeout_while(calls, deadline, |calls| is_early(calls)).unwrap();
        if waited.timed_out() {
            return Err(Error::Device { backend: "in process", source: "a rank did not come".into() });
        }
        Ok(calls)
    }
}

fn device_error(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Device { backend: "in process", source: Box::new(error) }
}

impl Collective<CudaBackend> for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_to_all<T: AnyElement>(&self, _: &RowShares, _: CudaView<'_, T>, _: CudaViewMut<'_, T>) -> Result<(), Error> {
        Err(Error::Unsupported { rule: "ranks of this test only gather".into() })
    }

    fn all_gather<T: AnyElement>(&self, _: &RowShares, _: CudaView<'_, T>, _: CudaViewMut<'_, T>) -> Result<(), Error> {
        Err(Error::Unsupported { rule: "ranks of this test gather in place".into() })
    }

    fn all_gather_in_place<T: AnyElement>(&self, shares: &RowShares, mut to: CudaViewMut<'_, T>) -> Result<(), Error> {
        let stream = self.backend.stream();
        check_len("tensor", shares.len(), CudaBackend::out_span(&to).len)?;
        let own = to.slice(shares.elements(self.rank));
        let len = own.len() * size_of::<T>();
        // SAFETY:
        // - contents: bytes may have any value.
        let own = unsafe { own.transmute::<u8>(len) }.unwrap();
        // A device cannot copy 0 bytes.
        let own = if len == 0 { Vec::new() } else { stream.clone_dtoh(&own).map_err(device_error)? };
        stream.synchronize().map_err(device_error)?;
        let all: Vec<u8> = self.exchange(own)?.iter().flat_map(|bytes| bytes.to_vec()).collect();
        if all.is_empty() {
            return Ok(());
        }
        // SAFETY:
        // - contents: any bytes are valid elements.
        let mut to = unsafe { to.transmute_mut::<u8>(all.len()) }.unwrap();
        stream.memcpy_htod(&all, &mut to).map_err(device_error)?;
        // `all` must live until the copy is done.
        stream.synchronize().map_err(device_error)
    }
}

type Group = Ranks<Sharded<CudaBackend, InProcess>, CudaBackend>;

fn group(backend: &CudaBackend, ranks: usize) -> Group {
    let backends: Vec<_> = (0..ranks).map(|_| stream_of(backend)).collect();
    Ranks::new(
        InProcess::group(&backends)
            .into_iter()
            .map(|rank| (Sharded::new(rank.backend.clone(), rank), stream_of(backend))),
    )
}

#[test]
fn divided_columns_are_within_the_bounds_of_whole_rows() {
    let Some((backend, _alone)) = gpu() else { return };
    for ranks in [1, 2, 3, 4, 8] {
        let passed = test_columns(&group(&backend, ranks), ranks == 3).unwrap();
        assert!(passed >= if ranks == 3 { 300 } else { 80 }, "{ranks} ranks: {passed}");
    }
}

/// Rows that one block visits many times, and rows of the blocks of a cluster.
#[test]
fn long_rows_of_a_rank_are_within_the_bounds() {
    let Some((backend, _alone)) = gpu() else { return };
    let group = group(&backend, 2);
    let present =
        TensorSet::of(&[Tensor::Weight, Tensor::Bias, Tensor::Mean, Tensor::Rstd, Tensor::Dweight, Tensor::Dbias]);
    for kind in [Kind::FORWARD, Kind::FORWARD_IN_PLACE, Kind::BACKWARD] {
        for (norm, dtype, cols) in [
            (Norm::Layer, DType::Bf16, 600_000),
            (Norm::Rms, DType::F32, 600_001),
            (Norm::Layer, DType::F32, 40_002),
            (Norm::Rms, DType::F16, 40_000),
        ] {
            let case = Case { present, ..Case::plain(kind, norm, dtype, 3, cols) }.normalized();
            let case = ColumnsCase { case, ranks: 2, split: Split::Even, apart: false };
            let status = run_case(&group, &case);
            assert!(matches!(status, Status::Pass), "{case}: {status:?}");
        }
    }
}

/// The tensors of one rank's calls.
struct Rank<T> {
    backend: CudaBackend,
    spec: NormSpec,
    x: CudaSlice<T>,
    residual: CudaSlice<T>,
    dy: CudaSlice<T>,
    weight: CudaSlice<T>,
    y: CudaSlice<T>,
    residual_out: CudaSlice<T>,
    dx: CudaSlice<T>,
    dweight: CudaSlice<T>,
    mean: CudaSlice<f32>,
    rstd: CudaSlice<f32>,
    found: CudaSlice<f32>,
    found_back: CudaSlice<f32>,
}

impl<T: Element + DeviceRepr> Rank<T> {
    /// Takes these rows of the values that every rank and every call generates alike.
    fn new(backend: &CudaBackend, seed: u64, norm: Norm, rows: std::ops::Range<usize>, cols: usize) -> Self {
        let stream = backend.stream();
        let matrix = |seed| stream.clone_htod(&values::<T>(seed, rows.end * cols)[rows.start * cols..]).unwrap();
        let count = rows.len();
        let out = |len: usize| stream.clone_htod(&vec![T::from_f32(f32::NAN); len]).unwrap();
        let numbers = |len: usize| stream.clone_htod(&vec![f32::NAN; len]).unwrap();
        let spec = NormSpec::new(norm, count, cols, 1e-6);
        Rank {
            backend: backend.clone(),
            spec,
            x: matrix(seed),
            residual: matrix(seed + 1),
            dy: matrix(seed + 2),
            weight: stream.clone_htod(&values::<T>(seed + 3, cols)).unwrap(),
            y: out(count * cols),
            residual_out: out(count * cols),
            dx: out(count * cols),
            dweight: out(cols),
            mean: numbers(count),
            rstd: numbers(count),
            found: numbers(3 * count),
            found_back: numbers(2 * count),
        }
    }

    /// Statistics of all rows, with `norm_numbers` per row.
    fn numbers(&self, norm_numbers: usize) -> usize {
        self.spec.rows * norm_numbers
    }

    fn partial_statistics(&mut self) -> Vec<f32> {
        let len = self.numbers(if self.spec.norm == Norm::Layer { 3 } else { 1 });
        let residual = Some(self.residual.as_view().into());
        let args =
            PartialStatistics::<CudaBackend, T, T>::mixed(self.x.as_view(), residual, self.found.slice_mut(0..len));
        self.backend.partial_statistics(&self.spec, args).unwrap();
        self.backend.stream().clone_dtoh(&self.found.slice(0..len)).unwrap()
    }

    fn forward_with_statistics(&mut self, found: &[f32], columns: &[usize]) {
        let found = self.backend.stream().clone_htod(found).unwrap();
        let args = Forward::<T>::new(self.x.as_view(), self.y.as_view_mut())
            .residual(self.residual.as_view())
            .residual_out(self.residual_out.as_view_mut())
            .weight(self.weight.as_view())
            .rstd(self.rstd.as_view_mut());
        let args = if self.spec.norm == Norm::Layer { args.mean(self.mean.as_view_mut()) } else { args };
        self.backend.forward_with_statistics(&self.spec, WithStatistics::new(args, found.as_view(), columns)).unwrap();
    }

    fn partial_backward_statistics(&mut self) -> Vec<f32> {
        let len = self.numbers(if self.spec.norm == Norm::Layer { 2 } else { 1 });
        let args = PartialBackwardStatistics::<CudaBackend, T, T, T>::new(
            self.dy.as_view(),
            self.residual_out.as_view(),
            self.rstd.as_view(),
            self.found_back.slice_mut(0..len),
        );
        let args = args.weight(self.weight.as_view());
        let args = if self.spec.norm == Norm::Layer { args.mean(self.mean.as_view()) } else { args };
        self.backend.partial_backward_statistics(&self.spec, args).unwrap();
        self.backend.stream().clone_dtoh(&self.found_back.slice(0..len)).unwrap()
    }

    fn backward_with_statistics(&mut self, found: &[f32], columns: &[usize], workspace: Option<&mut CudaSlice<f32>>) {
        let found = self.backend.stream().clone_htod(found).unwrap();
        let args = Backward::<T>::new(
            self.dy.as_view(),
            self.residual_out.as_view(),
            self.rstd.as_view(),
            self.dx.as_view_mut(),
        );
        let args = args.weight(self.weight.as_view()).dweight(self.dweight.as_view_mut());
        let args = if self.spec.norm == Norm::Layer { args.mean(self.mean.as_view()) } else { args };
        let args = match workspace {
            Some(workspace) => args.workspace(workspace.as_view_mut()),
            None => args,
        };
        self.backend.backward_with_statistics(&self.spec, WithStatistics::new(args, found.as_view(), columns)).unwrap();
    }

    /// Runs both phases of both directions, for this rank alone.
    fn alone(mut self) -> Self {
        let columns = [self.spec.cols];
        let found = self.partial_statistics();
        self.forward_with_statistics(&found, &columns);
        let found = self.partial_backward_statistics();
        self.backward_with_statistics(&found, &columns, None);
        self
    }

    fn row(&self, tensor: &CudaSlice<T>, row: usize) -> Vec<u32> {
        let cols = self.spec.cols;
        let row = self.backend.stream().clone_dtoh(&tensor.slice(row * cols..(row + 1) * cols)).unwrap();
        row.into_iter().map(T::bits).collect()
    }

    fn number(&self, tensor: &CudaSlice<f32>, at: usize) -> u32 {
        self.backend.stream().clone_dtoh(&tensor.slice(at..at + 1)).unwrap()[0].to_bits()
    }
}

/// A row alone and among 4096 rows, aligned.
#[test]
fn bits_of_a_row_do_not_depend_on_the_others() {
    let Some((backend, _alone)) = gpu() else { return };
    let backend = stream_of(&backend);
    const ROWS: usize = 4096;
    for norm in Norm::ALL {
        for cols in [8, 128, 1000, 4096, 9001] {
            let all = Rank::<bf16>::new(&backend, 1, norm, 0..ROWS, cols).alone();
            for row in [0, 1, 1234, ROWS - 1] {
                let one = Rank::<bf16>::new(&backend, 1, norm, row..row + 1, cols).alone();
                let numbers = if norm == Norm::Layer { [3, 2] } else { [1, 1] };
                for i in 0..numbers[0] {
                    let of_all = all.number(&all.found, row * numbers[0] + i);
                    assert_eq!(one.number(&one.found, i), of_all, "{norm:?} {cols} {row}");
                }
                for i in 0..numbers[1] {
                    let of_all = all.number(&all.found_back, row * numbers[1] + i);
                    assert_eq!(one.number(&one.found_back, i), of_all, "{norm:?} {cols} {row}");
                }
                assert_eq!(one.number(&one.rstd, 0), all.number(&all.rstd, row), "{norm:?} {cols} {row}");
                for tensors in [(&one.y, &all.y), (&one.residual_out, &all.residual_out), (&one.dx, &all.dx)] {
                    assert!(one.row(tensors.0, 0) == all.row(tensors.1, row), "{norm:?} {cols} {row}");
                }
            }
        }
    }
}

/// Equation (16) in rank order, without contracted operations: mean and variance match the host's
/// bit for bit.
#[test]
fn whole_rows_are_made_of_what_ranks_have_found_as_on_the_host() {
    let Some((backend, _alone)) = gpu() else { return };
    let backend = stream_of(&backend);
    let columns = [300, 5, 695];
    let (rows, whole) = (64, 1000);
    let mut ranks: Vec<_> =
        (0..3).map(|rank| Rank::<f32>::new(&backend, 10 * rank as u64, Norm::Layer, 0..rows, columns[rank])).collect();
    let found: Vec<Vec<f32>> = ranks.iter_mut().map(Rank::partial_statistics).collect();
    let all = found.concat();
    ranks.iter_mut().for_each(|rank| rank.forward_with_statistics(&all, &columns));
    let share = (1.0 / whole as f64) as f32;
    for row in 0..rows {
        let of_rank = |rank: usize| [0, 1, 2].map(|i| found[rank][3 * row + i]);
        let sum = |number: &dyn Fn(usize) -> f32| (1..3).fold(number(0), |sum, rank| sum + number(rank));
        let first = sum(&|rank| of_rank(rank)[0]) * share;
        let apart = |rank: usize| of_rank(rank)[0] / columns[rank] as f32 - first;
        let deviations = sum(&|rank| of_rank(rank)[1] + columns[rank] as f32 * apart(rank));
        let squares = sum(&|rank| {
            let ([_, deviations, squares], columns, apart) = (of_rank(rank), columns[rank] as f32, apart(rank));
            (squares + (2.0 * apart) * deviations) + columns * (apart * apart)
        });
        let missed = deviations * share;
        let (mean, var) = (first + missed, (squares - (deviations * missed).min(squares)) * share);
        let root = 1.0 / (f64::from(var + 1e-6)).sqrt();
        for rank in &ranks {
            assert_eq!(rank.number(&rank.mean, row), mean.to_bits(), "{row}");
            // The root is within two units in the last place, and the same on every rank.
            let rstd = f32::from_bits(rank.number(&rank.rstd, row));
            assert!((f64::from(rstd) / root - 1.0).abs() <= 2.0 * f64::from(f32::EPSILON), "{row}: {rstd} {root}");
            assert_eq!(rstd.to_bits(), ranks[0].number(&ranks[0].rstd, row), "{row}");
        }
    }
}

/// A variance that rounding made negative is 0, and NaN stays NaN.
#[test]
fn a_variance_below_zero_is_zero() {
    let Some((backend, _alone)) = gpu() else { return };
    let backend = stream_of(&backend);
    let mut rank = Rank::<f32>::new(&backend, 1, Norm::Layer, 0..3, 8);
    // From two ranks with means 1 below and 1 above the row's mean.
    let first = [8.0, 0.0, 0.0].repeat(3);
    let second = [24.0, -8.0, 0.0, 24.0, -9.0, 0.0, 24.0, f32::NAN, 0.0];
    rank.forward_with_statistics(&[&first[..], &second[..]].concat(), &[8, 8]);
    let rstd = [0, 1, 2].map(|row| f32::from_bits(rank.number(&rank.rstd, row)));
    let most = 1.0 / (1e-6f32).sqrt();
    assert!(
        (rstd[0] / most - 1.0).abs() < 1e-6 && rstd[1].to_bits() == rstd[0].to_bits() && rstd[2].is_nan(),
        "{rstd:?}"
    );
}

/// A caller's workspace, as long as for whole rows, gives the same gradients as the backend's
/// workspace.
#[test]
fn gradients_do_not_depend_on_whose_workspace_it_is() {
    let Some((backend, _alone)) = gpu() else { return };
    let backend = stream_of(&backend);
    for (rows, cols) in [(3, 128), (4096, 128), (20_000, 64), (1000, 5000)] {
        let mut rank = Rank::<bf16>::new(&backend, 1, Norm::Rms, 0..rows, cols).alone();
        let stream = backend.stream();
        let own: Vec<u32> = stream.clone_dtoh(&rank.dweight).unwrap().into_iter().map(bf16::bits).collect();
        let problem = Problem::backward(Norm::Rms, rows, cols, DType::Bf16, &[Tensor::Weight, Tensor::Dweight]);
        let mut workspace = stream.clone_htod(&vec![f32::NAN; backend.workspace_len(&problem).max(1)]).unwrap();
        let found = rank.partial_backward_statistics();
        rank.backward_with_statistics(&found, &[cols], Some(&mut workspace));
        let theirs: Vec<u32> = stream.clone_dtoh(&rank.dweight).unwrap().into_iter().map(bf16::bits).collect();
        assert!(own == theirs, "{rows}x{cols}");
    }
}

#[test]
fn what_a_half_has_no_form_of_is_refused_and_writes_nothing() {
    let Some((backend, _alone)) = gpu() else { return };
    let mut rank = Rank::<f32>::new(&backend, 1, Norm::Rms, 0..2, 1);
    let stream = backend.stream().clone();
    let found = stream.clone_htod(&vec![1.0f32; 2 * 65]).unwrap();
    let args = Forward::<f32>::new(rank.x.as_view(), rank.y.as_view_mut());
    let refused = backend.forward_with_statistics(&rank.spec, WithStatistics::new(args, found.as_view(), &[1; 65]));
    assert!(matches!(&refused, Err(Error::Unsupported { rule }) if rule.contains("64 ranks, got 65")), "{refused:?}");
    let args = Backward::<f32>::new(rank.dy.as_view(), rank.x.as_view(), rank.rstd.as_view(), rank.dx.as_view_mut())
        .dweight(rank.dweight.as_view_mut())
        .grad_reduction(GradReduction::Atomics);
    let found = found.slice(0..4);
    let refused = backend.backward_with_statistics(&rank.spec, WithStatistics::new(args, found, &[1, 1]));
    assert!(matches!(&refused, Err(Error::Unsupported { rule }) if rule.contains("Partials")), "{refused:?}");
    for tensor in [&rank.y, &rank.dx, &rank.dweight] {
        assert!(stream.clone_dtoh(tensor).unwrap().iter().all(|value| value.is_nan()));
    }
}

/// Statistics of the first phase are read on another stream, and those of the second phase
/// overwritten there, each after the phase is done.
#[test]
fn statistics_are_ordered_among_streams() {
    let Some((backend, _alone)) = gpu() else { return };
    let (backend, other) = (stream_of(&backend), stream_of(&backend));
    let (rows, cols) = (8192, 4096);
    let mut rank = Rank::<bf16>::new(&backend, 1, Norm::Rms, 0..rows, cols);
    let expected = rank.partial_statistics();
    rank.forward_with_statistics(&expected, &[cols]);
    let rstd = backend.stream().clone_dtoh(&rank.rstd).unwrap();
    backend.stream().synchronize().unwrap();
    for _ in 0..8 {
        backend.stream().memset_zeros(&mut rank.found).unwrap();
        backend.stream().memset_zeros(&mut rank.rstd).unwrap();
        let args = PartialStatistics::<CudaBackend, bf16, bf16>::mixed(
            rank.x.as_view(),
            Some(rank.residual.as_view().into()),
            rank.found.slice_mut(0..rows),
        );
        backend.partial_statistics(&rank.spec, args).unwrap();
        assert!(other.stream().clone_dtoh(&rank.found.slice(0..rows)).unwrap() == expected);
        let args = Forward::<bf16>::new(rank.x.as_view(), rank.y.as_view_mut())
            .residual(rank.residual.as_view())
            .rstd(rank.rstd.as_view_mut());
        backend
            .forward_with_statistics(&rank.spec, WithStatistics::new(args, rank.found.slice(0..rows), &[cols]))
            .unwrap();
        other.stream().memset_zeros(&mut rank.found).unwrap();
        assert!(backend.stream().clone_dtoh(&rank.rstd).unwrap() == rstd);
    }
}
