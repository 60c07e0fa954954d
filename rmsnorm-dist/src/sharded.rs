//! [`Sharded`]: a norm over a group, composed of calls of a backend and of a collective.

use std::ops::Range;
use std::sync::OnceLock;

use rmsnorm_spec::{AnyForward, AnyIn, AnyOut, DType, Error, Forward, Memory, NormSpec, RowLayout, Rows, Source};

use crate::deal::{check_dense, distances, written};
use crate::sharded_norm::check_reduced;
use crate::untyped::{Room, forward};
use crate::{Collective, GroupCall, RowShares, ShardedNorm, two_ranks};

/// The order in which the parts of `x` are added in [`ShardedNorm::forward_reduced`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// In rank order, in f32: [math](rmsnorm_spec::math), (1').
    #[default]
    ByRank,
    /// The order and precision of the collective's [`all_reduce`](Collective::all_reduce). Bits
    /// depend on the implementation.
    Engine,
}

/// A rank of a group, for any backend and any collective.
///
/// Each rank receives its rows from all ranks, adds and normalizes them in one call of the backend,
/// and sends the results to all ranks. A rank sends `2 (ranks - 1) / ranks` times the size of `x`,
/// like a ring all-reduce. With `residual_out` in the dtype of `x`, ranks exchange the sum and each
/// normalizes all rows; in another dtype, ranks exchange both the sum and `y`. Two ranks exchange
/// the whole `x` if it has at most 32 MiB (the same number of bytes), and each computes all rows.
///
/// With a residual stream divided by rows, only `y` is sent back, and only for `OutputRows::All`: a rank
/// sends `(ranks - 1) / ranks` times the size of `x`, or twice as much.
///
/// A backend that does not support [`Forward::parts`] returns `Unsupported` after the parts are
/// sent. Rows of all matrices except the residual must be contiguous. With divided rows only `x`,
/// `y` of all rows and a residual that is overwritten must be. After a call that fails between two
/// exchanges, ranks may be out of step: every later call of this rank returns an error.
#[derive(Debug)]
pub struct Sharded<B, C> {
    backend: B,
    collective: C,
    order: Order,
    /// The error of the failed call, if there was one.
    failure: OnceLock<String>,
}

impl<B, C> Sharded<B, C> {
    /// This rank of `collective`, with `backend` for its calls.
    pub const fn new(backend: B, collective: C) -> Self {
        Sharded { backend, collective, order: Order::ByRank, failure: OnceLock::new() }
    }

    /// Sets the order of additions; it must be the same on every rank. With [`Order::Engine`]
    /// `forward_reduced` is the collective's all-reduce (in place where `y` overwrites `x`) and one
    /// call of the backend. The sum is rounded to the dtype of `x` before the residual is added.
    /// The bits of `residual_out` may then depend on the number of rows, and only `x` must be
    /// contiguous. `forward_reduced_rows` always adds in rank order, so test divided rows with
    /// [`Order::ByRank`].
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// The backend that makes this rank's calls.
    pub const fn backend(&self) -> &B {
        &self.backend
    }

    /// The collective that exchanges data with the other ranks.
    pub const fn collective(&self) -> &C {
        &self.collective
    }
}

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// Makes a call, which reports through its argument whether an exchange is pending. A call that
    /// fails while one is pending is this rank's last.
    pub(crate) fn in_step(&self, call: impl FnOnce(&mut bool) -> Result<(), Error>) -> Result<(), Error> {
        if let Some(reason) = self.failure.get() {
            let reason =
                format!("this rank failed between two exchanges of an earlier call, make a new group: {reason}");
            return Err(Error::Device { backend: "sharded norm", source: reason.into() });
        }
        let mut is_sent = false;
        let outcome = call(&mut is_sent);
        if let (true, Err(error)) = (is_sent, &outcome) {
            // Keep the first failure.
            self.failure.get_or_init(|| error.to_string());
        }
        outcome
    }

    /// Gathers an output on all ranks: this rank's share `from` is sent, and `to` receives all
    /// shares.
    fn gather(&self, shares: &RowShares, from: Option<Room<B>>, to: Option<AnyOut<'_, B>>) -> Result<(), Error> {
        let Some((from, to)) = from.zip(to) else { return Ok(()) };
        let own = shares.elements(self.collective.rank()).len();
        self.all_gather(shares, from.view(0..own), to)
    }
}

impl<B: Memory, C: Collective<B>> ShardedNorm for Sharded<B, C> {
    type Backend = B;

    fn rank(&self) -> usize {
        self.collective.rank()
    }

    fn ranks(&self) -> usize {
        self.collective.ranks()
    }

    fn launch(&self, spec: &NormSpec, call: GroupCall<'_, '_, B>) -> Result<(), Error> {
        match call {
            GroupCall::Reduced(args) => self.add_and_normalize(spec, args),
            GroupCall::ReducedRows(y_rows, args) => self.normalize_rows(spec, y_rows, args),
            GroupCall::ForwardColumns(columns, args) => self.normalize_columns(spec, columns, args),
            GroupCall::BackwardColumns(columns, args) => self.differentiate_columns(spec, columns, args),
        }
    }
}

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// [`ShardedNorm::forward_reduced`].
    fn add_and_normalize(&self, spec: &NormSpec, args: AnyForward<'_, B>) -> Result<(), Error> {
        let args = check_reduced(spec, args)?.into_args();
        if self.ranks() == 1 {
            return forward(&self.backend, spec, args);
        }
        if self.order == Order::Engine {
            return self.normalize_sum(spec, args);
        }
        check_form(spec, &args)?;
        self.in_step(|is_sent| {
            if two_ranks::is_sooner(self.ranks(), spec, args.dtypes.activation) {
                self.add_everywhere(spec, args, is_sent)
            } else {
                self.reduce(spec, args, is_sent)
            }
        })
    }

    /// The steps of a validated call that this form supports. `is_sent` is set at the first
    /// exchange.
    fn reduce(&self, spec: &NormSpec, args: AnyForward<'_, B>, is_sent: &mut bool) -> Result<(), Error> {
        let Forward { x, y, residual, residual_out, weight, bias, mut mean, mut rstd, dtypes, .. } = args;
        let (residual, overwritten, mut separate) = match (residual, residual_out) {
            (Some(Source::Overwrite(sum)), _) => (None, Some(sum.view), None),
            (Some(Source::Read(residual)), sum) => (Some(residual), None, sum.map(|sum| sum.view)),
            (None, sum) => (None, None, sum.map(|sum| sum.view)),
        };
        let shares = RowShares { units: spec.rows, unit: spec.cols, ranks: self.ranks() };
        let of_rows = RowShares { unit: 1, ..shares };
        let (own, rows) = (shares.elements(self.rank()), shares.units(self.rank()));
        let own_spec = spec.rows(rows.len());
        let has_sum = overwritten.is_some() || separate.is_some();
        // If all ranks get the sum, each computes y from it: that is faster than sending y.
        let is_sum_sent = has_sum && dtypes.activation == dtypes.residual;

        // Allocate before anything is sent: a rank that fails later leaves the others waiting.
        let mut parts = self.room(dtypes.activation, self.len_of_parts(&shares))?;
        let mut of_y = self.room(dtypes.activation, own.len())?;
        // A sum that overwrites nothing is written directly to its output.
        let is_sum_apart = has_sum && !(is_sum_sent && separate.is_some());
        let mut of_sum = self.room_if(is_sum_apart, dtypes.residual, own.len())?;
        let statistic = |is_there| self.room_if(is_there && !is_sum_sent, DType::F32, rows.len());
        let (mut of_mean, mut of_rstd) = (statistic(mean.is_some())?, statistic(rstd.is_some())?);

        let Some(x) = x else { return Ok(()) };
        self.deal(&shares, &x, &mut parts, is_sent)?;
        let mut y = written(x, y).map(|y| y.view);
        {
            let overwritten = overwritten.as_ref().map(|sum| Rows::dense(sum.read()));
            let of_y = of_y.view_mut(0..own.len());
            let mut local = self.of_parts((&own_spec, dtypes), &parts, of_y, weight.as_ref(), bias.as_ref());
            local.residual = match (&residual, &overwritten) {
                (Some(all), _) => Some(Source::Read(rows_of(all, spec, rows.clone()))),
                (None, Some(all)) => Some(Source::Read(rows_of(all, spec, rows.clone()))),
                (None, None) => None,
            };
            local.residual_out = match (&mut of_sum, &mut separate) {
                (Some(of_sum), _) => Some(of_sum.view_mut(0..own.len()).into()),
                (None, Some(sum)) => Some(sum.part(own.clone()).into()),
                (None, None) => None,
            };
            local.mean = of_mean.as_mut().map(|mean| mean.view_mut(0..rows.len()));
            local.rstd = of_rstd.as_mut().map(|rstd| rstd.view_mut(0..rows.len()));
            forward(&self.backend, &own_spec, local)?;
        }

        // The same order on every rank.
        let mut sum = overwritten.or(separate);
        if !is_sum_sent {
            self.gather(&shares, Some(of_y), y)?;
            self.gather(&shares, of_sum, sum)?;
            self.gather(&of_rows, of_mean, mean)?;
            return self.gather(&of_rows, of_rstd, rstd);
        }
        let (Some(sum), Some(y)) = (&mut sum, &mut y) else { return Ok(()) };
        let all = sum.part(0..shares.len());
        match of_sum {
            Some(of_sum) => self.gather(&shares, Some(of_sum), Some(all))?,
            None => self.all_gather_in_place(&shares, all)?,
        }
        let mut args = AnyForward::<B>::new(sum.read(), y.part(0..shares.len()));
        args.dtypes = dtypes;
        (args.weight, args.bias) = (weight.as_ref().map(AnyIn::whole), bias.as_ref().map(AnyIn::whole));
        (args.mean, args.rstd) = (mean.as_mut().map(AnyOut::whole), rstd.as_mut().map(AnyOut::whole));
        forward(&self.backend, spec, args)
    }
}

/// Some rows of a whole matrix.
fn rows_of<'a, B: Memory>(matrix: &'a Rows<AnyIn<'_, B>>, spec: &NormSpec, rows: Range<usize>) -> Rows<AnyIn<'a, B>> {
    let RowLayout { row_stride, .. } = matrix.layout(spec.rows, spec.cols);
    // The last row may end before its stride does.
    let elements =
        if rows.is_empty() { 0..0 } else { rows.start * row_stride..(rows.end - 1) * row_stride + spec.cols };
    Rows::strided(matrix.view.part(elements), row_stride)
}

/// Rejects calls that are valid but that this form does not support.
fn check_form<B: Memory>(spec: &NormSpec, args: &AnyForward<'_, B>) -> Result<(), Error> {
    let residual = args.residual.as_ref().map(distances);
    let (residual, overwritten) = match &args.residual {
        Some(Source::Overwrite(_)) => (None, residual),
        Some(Source::Read(_)) | None => (residual, None),
    };
    check_dense(spec, "x", args.x.as_ref().map(distances))?;
    check_dense(spec, "y", args.y.as_ref().map(|y| y.with(())))?;
    check_dense(spec, "residual_out", args.residual_out.as_ref().map(|sum| sum.with(())).or(overwritten))?;
    match residual.map(|residual| residual.layout(spec.rows, spec.cols)) {
        Some(RowLayout { groups: Some(_), .. }) => {
            let rule =
                "Sharded needs a residual with one row stride, got rows in groups: pass a contiguous copy".into();
            Err(Error::Unsupported { rule })
        }
        Some(RowLayout { groups: None, .. }) | None => Ok(()),
    }
}
