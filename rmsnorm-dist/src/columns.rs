//! Rows whose columns are divided among ranks: two kernels of the backend with one exchange between
//! them (math.md, equations (15) to (18)).

use rmsnorm_spec::{
    AnyBackward, AnyCall, AnyElement, AnyForward, AnyIn, AnyPartialBackwardStatistics, AnyPartialStatistics, Checked,
    Direction, Error, GradReduction, Memory, NormSpec, Source, WithStatistics, check_columns_form,
};

use crate::untyped::forward;
use crate::{Collective, RowShares, Sharded};

/// A rank that holds some columns of every row. The first kernel sums over this rank's columns, an
/// exchange gives all ranks all partial sums, and the second kernel normalizes. For implementations
/// of [`ShardedNorm`](crate::ShardedNorm).
///
/// The exchanged buffer is f32 and described by [`RowShares`] with one unit per rank; this rank's unit
/// is already in its place.
#[derive(Debug)]
pub struct DividedColumns<'a, B> {
    backend: &'a B,
    rank: usize,
    columns: &'a [usize],
}

impl<'a, B: Memory> DividedColumns<'a, B> {
    /// Rank `rank` of `ranks`. `columns[i]` is the number of columns of rank i.
    ///
    /// # Errors
    /// `InvalidArgument` if `columns` has another length than `ranks` or a zero, or if `rank` is
    /// not below `ranks`.
    pub fn new(backend: &'a B, (rank, ranks): (usize, usize), columns: &'a [usize]) -> Result<Self, Error> {
        if columns.len() != ranks || columns.contains(&0) || rank >= ranks {
            let rule = format!("expected {ranks} numbers of columns, each at least 1, got {columns:?} on rank {rank}");
            return Err(Error::InvalidArgument { arg: "columns", rule });
        }
        Ok(DividedColumns { backend, rank, columns })
    }

    /// Validates a call on this rank's columns. `spec` describes whole rows.
    ///
    /// # Errors
    /// As [`ShardedNorm::forward_columns`](crate::ShardedNorm::forward_columns), before anything is
    /// sent.
    pub fn check_forward<'v>(
        &self,
        spec: &NormSpec,
        args: AnyForward<'v, B>,
    ) -> Result<Checked<AnyForward<'v, B>>, Error> {
        check_columns_form(spec, args.parts)?;
        check_one_dtype(args.x.is_some())?;
        Checked::forward(self.here(spec)?, args)
    }

    /// [`ShardedNorm::forward_columns`](crate::ShardedNorm::forward_columns), with `exchange` as
    /// the in-place all-gather.
    ///
    /// # Errors
    /// As [`ShardedNorm::forward_columns`](crate::ShardedNorm::forward_columns).
    pub fn forward(
        &self,
        call: Checked<AnyForward<'_, B>>,
        exchange: impl FnOnce(&RowShares, B::Out<'_, f32>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let here = *call.spec();
        let args = call.into_args();
        if self.columns.len() == 1 {
            return forward(self.backend, &here, args);
        }
        let mut found = self.room_for(&here, Direction::Forward)?;
        let x = match &args.x {
            Some(Source::Read(x)) => x.with(x.view.whole()),
            Some(Source::Overwrite(x)) => x.with(x.view.read()),
            // `check_forward` refuses it; the type system needs the error.
            None => return check_one_dtype(false),
        };
        let residual = args.residual.as_ref().map(|residual| match residual {
            Source::Read(residual) => residual.with(residual.view.whole()),
            Source::Overwrite(residual) => residual.with(residual.view.read()),
        });
        let mut first = AnyPartialStatistics::<B>::mixed(x, residual, f32::any_out(found.own()));
        first.dtypes = args.dtypes;
        self.backend.launch(AnyCall::PartialStatistics(Checked::partial_statistics(here, first)?))?;
        exchange(&found.shares, B::buffer_out(&mut found.all, 0..found.shares.len()))?;
        let given = WithStatistics::new(args, found.all(), self.columns);
        self.backend.launch(AnyCall::ForwardWithStatistics(Checked::forward_with_statistics(here, given)?))
    }

    /// [`ShardedNorm::backward_columns`](crate::ShardedNorm::backward_columns), with `exchange` as
    /// the in-place all-gather. The call is validated before anything is sent.
    ///
    /// # Errors
    /// As [`ShardedNorm::backward_columns`](crate::ShardedNorm::backward_columns).
    pub fn backward(
        &self,
        spec: &NormSpec,
        args: AnyBackward<'_, B>,
        exchange: impl FnOnce(&RowShares, B::Out<'_, f32>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        check_columns_form(spec, None)?;
        check_one_dtype(args.dx.is_some())?;
        let here = self.here(spec)?;
        // The first kernel sums over no rows, so a backend would refuse another reduction only
        // after the exchange.
        if args.grad_reduction != GradReduction::Partials {
            let rule =
                "gradients of divided columns are summed with GradReduction::Partials: pass no other grad_reduction"
                    .into();
            return Err(Error::Unsupported { rule });
        }
        let call = Checked::backward(self.backend, here, args)?;
        if self.columns.len() == 1 {
            return self.backend.launch(AnyCall::Backward(call));
        }
        let args = call.into_args();
        let mut found = self.room_for(&here, Direction::Backward)?;
        let (dy, x) = (args.dy.with(args.dy.view.whole()), args.x.with(args.x.view.whole()));
        let mut first = AnyPartialBackwardStatistics::<B>::new(dy, x, args.rstd.whole(), f32::any_out(found.own()));
        first.dtypes = args.dtypes;
        first.weight = args.weight.as_ref().map(AnyIn::whole);
        first.mean = args.mean.as_ref().map(AnyIn::whole);
        self.backend.launch(AnyCall::PartialBackwardStatistics(Checked::partial_backward_statistics(here, first)?))?;
        exchange(&found.shares, B::buffer_out(&mut found.all, 0..found.shares.len()))?;
        let given = WithStatistics::new(args, found.all(), self.columns);
        self.backend.launch(AnyCall::BackwardWithStatistics(Checked::backward_with_statistics(
            self.backend,
            here,
            given,
        )?))
    }

    /// The spec of this rank's columns.
    fn here(&self, spec: &NormSpec) -> Result<NormSpec, Error> {
        let whole = self.columns.iter().try_fold(0usize, |sum, &columns| sum.checked_add(columns));
        match self.columns.get(self.rank) {
            Some(&here) if whole == Some(spec.cols) => Ok(spec.cols(here)),
            Some(_) | None => {
                let rule = format!("expected the sum {} (spec.cols), got {:?}", spec.cols, self.columns);
                Err(Error::InvalidArgument { arg: "columns", rule })
            }
        }
    }

    /// Allocates the partial sums. This comes before the exchange: a rank that fails after it
    /// leaves the others waiting.
    fn room_for(&self, here: &NormSpec, direction: Direction) -> Result<Found<B>, Error> {
        let (numbers, ranks) = (here.norm.statistics_len(direction), self.columns.len());
        let Some(len) = here.rows.checked_mul(numbers).filter(|len| len.checked_mul(ranks).is_some()) else {
            let rule =
                format!("{numbers} f32 for each of {} rows and {ranks} ranks exceed usize: pass fewer rows", here.rows);
            return Err(Error::InvalidArgument { arg: "statistics", rule });
        };
        let shares = RowShares { units: ranks, unit: len, ranks };
        Ok(Found { shares, rank: self.rank, all: self.backend.buffer(shares.len())? })
    }
}

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// [`ShardedNorm::forward_columns`](crate::ShardedNorm::forward_columns).
    pub(crate) fn normalize_columns(
        &self,
        spec: &NormSpec,
        columns: &[usize],
        args: AnyForward<'_, B>,
    ) -> Result<(), Error> {
        let divided = self.divided(columns)?;
        self.in_step(|is_sent| {
            let call = divided.check_forward(spec, args)?;
            divided.forward(call, |shares, all| self.exchange(shares, all, is_sent))
        })
    }

    /// [`ShardedNorm::backward_columns`](crate::ShardedNorm::backward_columns).
    pub(crate) fn differentiate_columns(
        &self,
        spec: &NormSpec,
        columns: &[usize],
        args: AnyBackward<'_, B>,
    ) -> Result<(), Error> {
        let divided = self.divided(columns)?;
        self.in_step(|is_sent| divided.backward(spec, args, |shares, all| self.exchange(shares, all, is_sent)))
    }

    fn divided<'a>(&'a self, columns: &'a [usize]) -> Result<DividedColumns<'a, B>, Error> {
        DividedColumns::new(self.backend(), (self.collective().rank(), self.collective().ranks()), columns)
    }

    /// Sends this rank's partial sums to all ranks.
    fn exchange(&self, shares: &RowShares, all: B::Out<'_, f32>, is_sent: &mut bool) -> Result<(), Error> {
        *is_sent = true;
        self.collective().all_gather_in_place(shares, all)?;
        // It was the only exchange: a later error leaves all ranks in step.
        *is_sent = false;
        Ok(())
    }
}

/// The partial sums of all ranks.
struct Found<B: Memory> {
    /// One unit per rank.
    shares: RowShares,
    rank: usize,
    /// (ranks, rows, numbers)
    all: B::Buffer<f32>,
}

impl<B: Memory> Found<B> {
    /// This rank's partial sums.
    fn own(&mut self) -> B::Out<'_, f32> {
        B::buffer_out(&mut self.all, self.shares.elements(self.rank))
    }

    fn all(&self) -> AnyIn<'_, B> {
        f32::any_in(B::buffer_in(&self.all, 0..self.shares.len()))
    }
}

/// Refuses a call whose y has another dtype than its x, which the first half cannot read.
fn check_one_dtype(has_one: bool) -> Result<(), Error> {
    if has_one {
        return Ok(());
    }
    Err(Error::Unsupported { rule: "where columns are divided among ranks, x and y have one dtype".into() })
}
