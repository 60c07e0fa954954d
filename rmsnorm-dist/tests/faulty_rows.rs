//! The suite of divided rows detects each of these planted bugs in a rank's rows.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::ops::Range;

use rmsnorm_conformance::Status;
use rmsnorm_conformance::ranks::rows::{cases, run_case};
use rmsnorm_cpu::{CpuBackend, Isa};
use rmsnorm_dist::{Collective, GroupCall, Ranks, RowShares, Sharded, ShardedNorm, ThreadGroup, check_reduced_rows};
use rmsnorm_spec::{AnyElement, Element, Error, Forward, NormSpec, OutputRows, ShardedRows, Source, with_types};

/// A bug in a call on divided rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bug {
    // Inputs of a row.
    ResidualOfOtherRow,
    RowsOffByOne,
    ResidualOnEveryRank,
    ResidualLeftOut,
    PartsInArrivalOrder,
    RankLeftOut,
    EpsOfRank,
    // Outputs of a row.
    LastUnevenRowsMissing,
    RstdOfOtherRow,
    /// The sum is written next to the residual, not over it.
    ResidualNotUpdated,
    /// In place, the row before or after the owned rows is overwritten as well.
    YBeyondOwnRows,
    /// The owned rows of y are written to the first rows of x.
    YOverFirstRows,
    YOfRanksExchanged,
    OwnRowsOfYMissing,
    /// One rank has a different bit in an output that all ranks share.
    RanksDiffer,
}

const BUGS: [Bug; 15] = [
    Bug::ResidualOfOtherRow,
    Bug::RowsOffByOne,
    Bug::ResidualOnEveryRank,
    Bug::ResidualLeftOut,
    Bug::PartsInArrivalOrder,
    Bug::RankLeftOut,
    Bug::EpsOfRank,
    Bug::LastUnevenRowsMissing,
    Bug::RstdOfOtherRow,
    Bug::ResidualNotUpdated,
    Bug::YBeyondOwnRows,
    Bug::YOverFirstRows,
    Bug::YOfRanksExchanged,
    Bug::OwnRowsOfYMissing,
    Bug::RanksDiffer,
];

/// A rank that receives the whole `x` of every rank and uses its own rows.
struct Faulty {
    norm: Sharded<CpuBackend, ThreadGroup>,
    bug: Option<Bug>,
}

impl ShardedNorm for Faulty {
    type Backend = CpuBackend;

    fn rank(&self) -> usize {
        self.norm.rank()
    }

    fn ranks(&self) -> usize {
        self.norm.ranks()
    }

    fn launch(&self, spec: &NormSpec, call: GroupCall<'_, '_, CpuBackend>) -> Result<(), Error> {
        let GroupCall::ReducedRows(y_rows, args) = call else { return self.norm.launch(spec, call) };
        let call = check_reduced_rows(spec, (self.rank(), self.ranks()), y_rows, args)?;
        let ShardedRows { args, own, .. } = call.into_args();
        with_types!(args.dtypes; T, W, R => self.normalize_rows(spec, y_rows, own, args.restore::<T, W, R>()?))
    }
}

impl Faulty {
    fn normalize_rows<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        y_rows: OutputRows,
        own: Range<usize>,
        args: Forward<'_, CpuBackend, T, W, R>,
    ) -> Result<(), Error> {
        if !is_dense(&args) {
            return Err(Error::Unsupported { rule: "rows lie side by side".into() });
        }
        let Forward { x, y, residual, residual_out, weight, bias, mean, rstd, .. } = args;
        let is_over_x = matches!(x, Some(Source::Overwrite(_)));
        let (x, y) = match (x, y) {
            (Some(Source::Overwrite(x)), _) => (x.view.to_vec(), x.view),
            (Some(Source::Read(x)), Some(y)) => (x.view.to_vec(), y.view),
            (Some(Source::Read(_)), None) | (None, _) => return Ok(()),
        };
        let (residual, sum) = match (residual, residual_out) {
            (Some(Source::Overwrite(sum)), _) => (Some(sum.view.to_vec()), Some(sum.view)),
            (Some(Source::Read(residual)), sum) => (Some(residual.view.to_vec()), sum.map(|sum| sum.view)),
            (None, _) => (None, None),
        };

        let parts = self.own_parts(spec, &own, &x)?;
        let residual = residual.map(|residual| self.spoil_residual(residual, spec.cols));
        let len = own.len() * spec.cols;
        let (mut of_y, mut of_sum) = (vec![T::default(); len], vec![R::default(); len]);
        let (mut of_mean, mut of_rstd) = (vec![0.0; own.len()], vec![0.0; own.len()]);
        {
            let local = Forward::<CpuBackend, T>::new(&parts[..], &mut of_y[..]).parts(self.ranks(), len);
            let mut local = local.weight_dtype::<W>().residual_dtype::<R>();
            (local.weight, local.bias) = (weight, bias);
            local.residual = residual.as_deref().map(|residual| Source::Read(residual.into()));
            local.residual_out = residual.is_some().then(|| (&mut of_sum[..]).into());
            local.mean = mean.is_some().then_some(&mut of_mean[..]);
            local.rstd = Some(&mut of_rstd);
            let eps = if self.bug == Some(Bug::EpsOfRank) { 1.0 + self.rank() as f32 } else { 1.0 };
            self.norm.backend().forward(&spec.rows(own.len()).eps(spec.eps * eps), local)?;
        }
        if self.bug == Some(Bug::RstdOfOtherRow) && !of_rstd.is_empty() {
            of_rstd.rotate_left(1);
        }

        let there = self.kept(spec, &own);
        let elements = there * spec.cols;
        if let Some(sum) = sum.filter(|_| !(is_over_x && self.bug == Some(Bug::ResidualNotUpdated))) {
            sum[..elements].copy_from_slice(&of_sum[..elements]);
        }
        for (to, from) in [(mean, of_mean), (rstd, of_rstd)] {
            to.into_iter().for_each(|to| to[..there].copy_from_slice(&from[..there]));
        }
        match y_rows {
            OutputRows::All => self.gather(spec, &of_y, y),
            OutputRows::Own => {
                let own = if is_over_x { own } else { 0..own.len() };
                self.put(&own, spec.cols, &of_y[..elements], y);
                Ok(())
            }
        }
    }

    /// This rank's rows of every part.
    fn own_parts<T: AnyElement>(&self, spec: &NormSpec, own: &Range<usize>, x: &[T]) -> Result<Vec<T>, Error> {
        let (ranks, len, cols) = (self.ranks(), spec.rows * spec.cols, spec.cols);
        let mut all = vec![T::from_bits(0); ranks * len];
        let whole = RowShares { units: ranks, unit: len, ranks };
        Collective::<CpuBackend>::all_gather(self.norm.collective(), &whole, x, &mut all)?;
        let row = |row: usize| if self.bug == Some(Bug::RowsOffByOne) { (row + 1) % spec.rows } else { row };
        let of_part =
            |part: usize| own.clone().flat_map(move |it| (0..cols).map(move |i| part * len + row(it) * cols + i));
        let mut parts: Vec<T> = (0..ranks).flat_map(of_part).map(|i| all[i]).collect();
        let share = own.len() * cols;
        match self.bug {
            Some(Bug::PartsInArrivalOrder) => parts.rotate_left((self.rank() + 1) % ranks * share),
            Some(Bug::RankLeftOut) => parts[(ranks - 1) * share..].fill(T::from_bits(0)),
            Some(_) | None => {}
        }
        Ok(parts)
    }

    fn spoil_residual<R: Element>(&self, mut residual: Vec<R>, cols: usize) -> Vec<R> {
        match self.bug {
            Some(Bug::ResidualOfOtherRow) if residual.len() > cols => residual.rotate_left(cols),
            Some(Bug::ResidualOnEveryRank) => {
                let ranks = self.ranks() as f32;
                residual.iter_mut().for_each(|element| *element = R::from_f32(element.to_f32() * ranks));
            }
            Some(Bug::ResidualLeftOut) => residual.fill(R::default()),
            Some(_) | None => {}
        }
        residual
    }

    /// Number of owned rows that are kept.
    fn kept(&self, spec: &NormSpec, own: &Range<usize>) -> usize {
        match self.bug {
            Some(Bug::LastUnevenRowsMissing) => {
                let even = spec.rows / self.ranks() * self.ranks();
                even.clamp(own.start, own.end) - own.start
            }
            Some(_) | None => own.len(),
        }
    }

    /// The owned rows of y in the given output.
    fn put<T: AnyElement>(&self, own: &Range<usize>, cols: usize, of_y: &[T], y: &mut [T]) {
        let start = if self.bug == Some(Bug::YOverFirstRows) { 0 } else { own.start * cols };
        if self.bug != Some(Bug::OwnRowsOfYMissing) {
            y[start..][..of_y.len()].copy_from_slice(of_y);
        }
        if self.bug == Some(Bug::YBeyondOwnRows) && !of_y.is_empty() {
            let beyond = if y.len() > own.end * cols { own.end } else { own.start.saturating_sub(1) };
            y[beyond * cols..][..cols].copy_from_slice(&of_y[..cols]);
        }
    }

    /// y of all rows.
    fn gather<T: AnyElement>(&self, spec: &NormSpec, of_y: &[T], y: &mut [T]) -> Result<(), Error> {
        let shares = RowShares { units: spec.rows, unit: spec.cols, ranks: self.ranks() };
        let held = y.to_vec();
        Collective::<CpuBackend>::all_gather(self.norm.collective(), &shares, of_y, &mut *y)?;
        match self.bug {
            Some(Bug::YOfRanksExchanged) => {
                let (first, second) = (shares.elements(0), shares.elements(1));
                (0..second.len()).for_each(|i| y.swap(first.start + i, second.start + i));
            }
            Some(Bug::OwnRowsOfYMissing) => {
                let own = shares.elements(self.rank());
                y[own.clone()].copy_from_slice(&held[own]);
            }
            Some(Bug::RanksDiffer) if self.rank() == 1 => {
                y.iter_mut().take(1).for_each(|element| *element = T::from_bits(element.bits() ^ 1));
            }
            Some(_) | None => {}
        }
        Ok(())
    }
}

fn is_dense<T: Element, W: Element, R: Element>(args: &Forward<'_, CpuBackend, T, W, R>) -> bool {
    fn of<I, O>(source: &Source<I, O>) -> Option<usize> {
        match source {
            Source::Read(rows) => rows.row_stride,
            Source::Overwrite(rows) => rows.row_stride,
        }
    }
    let outputs =
        [args.y.as_ref().and_then(|y| y.row_stride), args.residual_out.as_ref().and_then(|sum| sum.row_stride)];
    let inputs = [args.x.as_ref().and_then(of), args.residual.as_ref().and_then(of)];
    outputs.into_iter().chain(inputs).all(|row_stride| row_stride.is_none())
}

fn backend() -> CpuBackend {
    CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap()
}

/// Whether a group of three ranks fails a case.
fn is_caught(bug: Option<Bug>) -> bool {
    let rank = |group| (Faulty { norm: Sharded::new(backend(), group), bug }, backend());
    let group = Ranks::new(ThreadGroup::new(3).into_iter().map(rank));
    cases(3, false).iter().any(|case| matches!(run_case(&group, case), Status::Fail(_)))
}

#[test]
fn every_bug_of_divided_rows_is_caught() {
    assert!(!is_caught(None), "a correct group passes");
    for bug in BUGS {
        assert!(is_caught(Some(bug)), "{bug:?}");
    }
}
