//! Columns divided among ranks, composed of a backend's two halves and one exchange: math.md, equations (15) to (18).

use rmsnorm_spec::{
    AnyBackward, AnyBackwardStatistics, AnyCall, AnyColumnStatistics, AnyForward, AnyIn, Checked, Direction, Error,
    Given, GradReduction, Memory, NormSpec, Source, Stored, check_columns_form,
};

use crate::untyped::forward;
use crate::{Collective, Sharded, Shares};

/// A rank that has some of the columns of every row: a backend's two halves of a call, between which every rank gets what all have found.
/// For who implements [`ShardedNorm`](crate::ShardedNorm).
///
/// What is exchanged is [`Shares`] of one unit for each rank, of f32: this rank's lies in its place.
#[derive(Debug)]
pub struct DividedColumns<'a, B> {
    backend: &'a B,
    rank: usize,
    columns: &'a [usize],
}

impl<'a, B: Memory> DividedColumns<'a, B> {
    /// Rank `rank` of as many as there are numbers of columns, if it is one.
    ///
    /// # Errors
    /// `InvalidArgument` where there are other than `ranks` of them, or none on a rank.
    pub fn new(backend: &'a B, (rank, ranks): (usize, usize), columns: &'a [usize]) -> Result<Self, Error> {
        if columns.len() != ranks || columns.contains(&0) || rank >= ranks {
            let rule = format!("each of the {ranks} ranks has some, got {columns:?}");
            return Err(Error::InvalidArgument { arg: "columns", rule });
        }
        Ok(DividedColumns { backend, rank, columns })
    }

    /// The call on this rank's columns, if nothing is wrong with it: `spec` is that of whole rows.
    ///
    /// # Errors
    /// As [`ShardedNorm::forward_columns`](crate::ShardedNorm::forward_columns), before anything is sent.
    pub fn check_forward<'v>(
        &self,
        spec: &NormSpec,
        args: AnyForward<'v, B>,
    ) -> Result<Checked<AnyForward<'v, B>>, Error> {
        check_columns_form(spec, args.parts)?;
        Checked::forward(self.here(spec)?, args)
    }

    /// [`ShardedNorm::forward_columns`](crate::ShardedNorm::forward_columns) by an exchange that hands every rank the shares of all.
    ///
    /// # Errors
    /// As there.
    pub fn forward(
        &self,
        call: Checked<AnyForward<'_, B>>,
        exchange: impl FnOnce(&Shares, B::Out<'_, f32>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let here = *call.spec();
        let args = call.into_args();
        if self.columns.len() == 1 {
            return forward(self.backend, &here, args);
        }
        let mut found = self.room_for(&here, Direction::Forward)?;
        let x = match &args.x {
            Source::Read(x) => x.with(x.view.whole()),
            Source::Overwrite(x) => x.with(x.view.read()),
        };
        let residual = args.residual.as_ref().map(|residual| match residual {
            Source::Read(residual) => residual.with(residual.view.whole()),
            Source::Overwrite(residual) => residual.with(residual.view.read()),
        });
        let mut first = AnyColumnStatistics::<B>::mixed(x, residual, f32::any_out(found.own()));
        first.dtypes = args.dtypes;
        self.backend.launch(AnyCall::ColumnStatistics(Checked::column_statistics(here, first)?))?;
        exchange(&found.shares, B::buffer_out(&mut found.all, 0..found.shares.len()))?;
        let given = Given::new(args, found.all(), self.columns);
        self.backend.launch(AnyCall::ForwardGiven(Checked::forward_given(here, given)?))
    }

    /// [`ShardedNorm::backward_columns`](crate::ShardedNorm::backward_columns), as [`forward`](Self::forward). What is wrong with a call is found
    /// out before anything is sent.
    ///
    /// # Errors
    /// As there.
    pub fn backward(
        &self,
        spec: &NormSpec,
        args: AnyBackward<'_, B>,
        exchange: impl FnOnce(&Shares, B::Out<'_, f32>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        check_columns_form(spec, None)?;
        let here = self.here(spec)?;
        // A first half does not sum over rows, so that a backend would refuse another way in the second.
        if args.grad_reduction != GradReduction::Partials {
            let rule = "where columns are divided among ranks, gradients are summed by GradReduction::Partials".into();
            return Err(Error::Unsupported { rule });
        }
        let call = Checked::backward(self.backend, here, args)?;
        if self.columns.len() == 1 {
            return self.backend.launch(AnyCall::Backward(call));
        }
        let args = call.into_args();
        let mut found = self.room_for(&here, Direction::Backward)?;
        let (dy, x) = (args.dy.with(args.dy.view.whole()), args.x.with(args.x.view.whole()));
        let mut first = AnyBackwardStatistics::<B>::new(dy, x, args.rstd.whole(), f32::any_out(found.own()));
        first.dtypes = args.dtypes;
        first.weight = args.weight.as_ref().map(AnyIn::whole);
        first.mean = args.mean.as_ref().map(AnyIn::whole);
        self.backend.launch(AnyCall::BackwardStatistics(Checked::backward_statistics(here, first)?))?;
        exchange(&found.shares, B::buffer_out(&mut found.all, 0..found.shares.len()))?;
        let given = Given::new(args, found.all(), self.columns);
        self.backend.launch(AnyCall::BackwardGiven(Checked::backward_given(self.backend, here, given)?))
    }

    /// The spec of this rank's columns.
    fn here(&self, spec: &NormSpec) -> Result<NormSpec, Error> {
        let whole = self.columns.iter().try_fold(0usize, |sum, &columns| sum.checked_add(columns));
        match self.columns.get(self.rank) {
            Some(&here) if whole == Some(spec.cols) => Ok(spec.cols(here)),
            Some(_) | None => {
                let rule = format!("together they are the {} of a row, got {:?}", spec.cols, self.columns);
                Err(Error::InvalidArgument { arg: "columns", rule })
            }
        }
    }

    /// Room for what is found, all of it before anything is sent: a rank that had none afterwards would leave the others waiting.
    fn room_for(&self, here: &NormSpec, direction: Direction) -> Result<Found<B>, Error> {
        let (numbers, ranks) = (here.norm.statistics_len(direction), self.columns.len());
        let Some(len) = here.rows.checked_mul(numbers).filter(|len| len.checked_mul(ranks).is_some()) else {
            let rule = format!("the statistics of {} rows can be counted", here.rows);
            return Err(Error::InvalidArgument { arg: "statistics", rule });
        };
        let shares = Shares { units: ranks, unit: len, ranks };
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

    /// Sends what this rank has found to all.
    fn exchange(&self, shares: &Shares, all: B::Out<'_, f32>, is_sent: &mut bool) -> Result<(), Error> {
        *is_sent = true;
        self.collective().all_gather_in_place(shares, all)?;
        // It was the only exchange: whatever happens now leaves no rank out of step.
        *is_sent = false;
        Ok(())
    }
}

/// What the ranks find of their columns.
struct Found<B: Memory> {
    /// A unit for each rank.
    shares: Shares,
    rank: usize,
    /// (ranks, rows, numbers)
    all: B::Buffer<f32>,
}

impl<B: Memory> Found<B> {
    /// This rank's.
    fn own(&mut self) -> B::Out<'_, f32> {
        B::buffer_out(&mut self.all, self.shares.elements(self.rank))
    }

    fn all(&self) -> AnyIn<'_, B> {
        f32::any_in(B::buffer_in(&self.all, 0..self.shares.len()))
    }
}
