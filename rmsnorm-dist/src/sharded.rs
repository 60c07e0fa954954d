//! [`Sharded`]: a norm over a group, composed of a backend's calls and those of a collective.

use std::ops::Range;
use std::sync::OnceLock;

use rmsnorm_spec::{Backward, Element, Error, Forward, Memory, NormSpec, RowGroups, RowLayout, Rows, Source, Stored};

use crate::sharded_norm::check_reduced;
use crate::{Collective, ShardedNorm, Shares};

/// A rank of a group, of any backend and any collective.
///
/// Rows are dealt out: each rank gets its rows' parts of all ranks, adds and normalizes them in one call of its backend, and sends the
/// results to the others. A rank sends `2 (ranks - 1) / ranks` times the size of `x`, as a ring's all-reduce does.
///
/// A backend that adds no parts ([`Forward::parts`]) answers `Unsupported`, once the parts are sent. Matrices that are sent, which are all
/// but the residual, have rows side by side. After a call that fails between two exchanges, ranks may be out of step: every later one of this
/// rank is an error.
#[derive(Debug)]
pub struct Sharded<B, C> {
    backend: B,
    collective: C,
    /// Why there will be no further call.
    failure: OnceLock<String>,
}

impl<B, C> Sharded<B, C> {
    /// The rank that the collective is of, with this backend for its calls.
    pub const fn new(backend: B, collective: C) -> Self {
        Sharded { backend, collective, failure: OnceLock::new() }
    }

    /// What makes this rank's calls.
    pub const fn backend(&self) -> &B {
        &self.backend
    }

    /// What it exchanges with the others by.
    pub const fn collective(&self) -> &C {
        &self.collective
    }
}

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// Makes a call, which says when it has sent something. One that fails after that is this rank's last.
    pub(crate) fn in_step(&self, call: impl FnOnce(&mut bool) -> Result<(), Error>) -> Result<(), Error> {
        if let Some(reason) = self.failure.get() {
            let reason = format!("a call of this rank has failed between two exchanges: {reason}");
            return Err(Error::Device { backend: "sharded norm", source: reason.into() });
        }
        let mut is_sent = false;
        let outcome = call(&mut is_sent);
        if let (true, Err(error)) = (is_sent, &outcome) {
            // The first of them stays.
            self.failure.get_or_init(|| error.to_string());
        }
        outcome
    }

    /// Sends every rank's share of an output, which this rank made in a buffer, to all.
    fn gather<T: Stored>(
        &self,
        shares: &Shares,
        from: Option<B::Buffer<T>>,
        to: Option<B::Out<'_, T>>,
    ) -> Result<(), Error> {
        let Some((from, to)) = from.zip(to) else { return Ok(()) };
        let own = shares.elements(self.collective.rank()).len();
        self.collective.all_gather(shares, B::buffer_in(&from, 0..own), to)
    }

    /// Room for this rank's share of an output, if the call has it.
    fn room<T: Stored>(&self, shares: &Shares, is_there: bool) -> Result<Option<B::Buffer<T>>, Error> {
        let own = shares.elements(self.collective.rank()).len();
        is_there.then(|| self.backend.buffer(own)).transpose()
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

    fn forward_reduced<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Forward<'_, B, T, W, R>,
    ) -> Result<(), Error> {
        let args = check_reduced(spec, args)?.into_args();
        if self.ranks() == 1 {
            return self.backend.forward(spec, args);
        }
        check_form(spec, &args)?;
        self.in_step(|is_sent| self.reduce(spec, args, is_sent))
    }

    fn forward_columns<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        columns: &[usize],
        args: Forward<'_, B, T, W, R>,
    ) -> Result<(), Error> {
        self.normalize_columns(spec, columns, args)
    }

    fn backward_columns<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        columns: &[usize],
        args: Backward<'_, B, T, W, R>,
    ) -> Result<(), Error> {
        self.differentiate_columns(spec, columns, args)
    }
}

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// The steps of a call that is valid and has a composed form; `is_sent` from the first exchange on.
    fn reduce<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Forward<'_, B, T, W, R>,
        is_sent: &mut bool,
    ) -> Result<(), Error> {
        let (rows, cols, ranks) = (spec.rows, spec.cols, self.ranks());
        let shares = Shares { units: rows, unit: cols, ranks };
        let of_rows = Shares { unit: 1, ..shares };
        let own = shares.units(self.rank());

        // All memory before anything is sent: a rank that had none afterwards would leave the others waiting.
        let len = own.len() * cols;
        let mut parts = self.backend.buffer::<T>(len * ranks)?;
        let overwrites_residual = matches!(args.residual, Some(Source::Overwrite(_)));
        let mut of_y = self.backend.buffer::<T>(len)?;
        let mut of_sum = self.room::<R>(&shares, overwrites_residual || args.residual_out.is_some())?;
        let mut of_mean = self.room::<f32>(&of_rows, args.mean.is_some())?;
        let mut of_rstd = self.room::<f32>(&of_rows, args.rstd.is_some())?;
        let x = match &args.x {
            Source::Read(x) => B::part_in(&x.view, 0..shares.len()),
            Source::Overwrite(x) => B::read_out(&x.view),
        };
        *is_sent = true;
        self.collective.all_to_all(&shares, x, B::buffer_out(&mut parts, 0..len * ranks))?;
        {
            let overwritten = match &args.residual {
                Some(Source::Overwrite(residual)) => Some(Rows::dense(B::read_out(&residual.view))),
                Some(Source::Read(_)) | None => None,
            };
            let x = B::buffer_in(&parts, 0..len * ranks);
            let local = Forward::<B, T>::new(x, B::buffer_out(&mut of_y, 0..len)).parts(ranks, len);
            let mut local = local.weight_dtype::<W>().residual_dtype::<R>();
            local.weight = args.weight.as_ref().map(|weight| B::part_in(weight, 0..cols));
            local.bias = args.bias.as_ref().map(|bias| B::part_in(bias, 0..cols));
            local.residual = match &args.residual {
                Some(Source::Read(residual)) => Some(Source::Read(rows_of::<B, R>(residual, spec, own.clone()))),
                Some(Source::Overwrite(_)) => {
                    overwritten.as_ref().map(|residual| Source::Read(rows_of::<B, R>(residual, spec, own.clone())))
                }
                None => None,
            };
            local.residual_out = of_sum.as_mut().map(|sum| B::buffer_out(sum, 0..len).into());
            local.mean = of_mean.as_mut().map(|mean| B::buffer_out(mean, 0..own.len()));
            local.rstd = of_rstd.as_mut().map(|rstd| B::buffer_out(rstd, 0..own.len()));
            self.backend.forward(&spec.rows(own.len()), local)?;
        }

        // In one order on every rank.
        let y = match (args.x, args.y) {
            (Source::Overwrite(y), _) => Some(y.view),
            (Source::Read(_), y) => y.map(|y| y.view),
        };
        let sum = match (args.residual, args.residual_out) {
            (Some(Source::Overwrite(sum)), _) => Some(sum.view),
            (Some(Source::Read(_)) | None, sum) => sum.map(|sum| sum.view),
        };
        self.gather(&shares, Some(of_y), y)?;
        self.gather(&shares, of_sum, sum)?;
        self.gather(&of_rows, of_mean, args.mean)?;
        self.gather(&of_rows, of_rstd, args.rstd)
    }
}

/// These rows of a matrix that has all of them.
fn rows_of<'a, B: Memory, E: Stored>(
    matrix: &'a Rows<B::In<'_, E>>,
    spec: &NormSpec,
    rows: Range<usize>,
) -> Rows<B::In<'a, E>> {
    let RowLayout { row_stride, .. } = matrix.layout(spec.rows, spec.cols);
    // Behind the last row there may be no stride.
    let elements =
        if rows.is_empty() { 0..0 } else { rows.start * row_stride..(rows.end - 1) * row_stride + spec.cols };
    Rows::strided(B::part_in(&matrix.view, elements), row_stride)
}

/// What the composed form cannot do, of what validation lets pass.
fn check_form<B: Memory, T: Element, W: Element, R: Element>(
    spec: &NormSpec,
    args: &Forward<'_, B, T, W, R>,
) -> Result<(), Error> {
    let layout = |row_stride: Option<usize>, groups: Option<RowGroups>| {
        let mut rows = Rows::dense(());
        (rows.row_stride, rows.groups) = (row_stride, groups);
        rows.layout(spec.rows, spec.cols)
    };
    // Groups that lie as if there were none may have a gap behind the last, which the view may reach into.
    let is_dense = |row_stride: Option<usize>, groups: Option<RowGroups>| {
        groups.is_none() && layout(row_stride, None).row_stride == spec.cols
    };
    let unsupported = |rule: String| Err(Error::Unsupported { rule });
    let (x, y) = (source(&args.x), args.y.as_ref().map(|y| (y.row_stride, y.groups)));
    let residual = args.residual.as_ref().map(source);
    let (residual, overwritten) = match &args.residual {
        Some(Source::Overwrite(_)) => (None, residual),
        Some(Source::Read(_)) | None => (residual, None),
    };
    let sum = args.residual_out.as_ref().map(|sum| (sum.row_stride, sum.groups)).or(overwritten);
    for (name, matrix) in [("x", Some(x)), ("y", y), ("residual_out", sum)] {
        if matrix.is_some_and(|(row_stride, groups)| !is_dense(row_stride, groups)) {
            return unsupported(format!("a composed norm sends rows that lie side by side, those of {name} do not"));
        }
    }
    match residual.map(|(row_stride, groups)| layout(row_stride, groups)) {
        Some(RowLayout { groups: Some(_), .. }) => {
            unsupported("a composed norm deals rows out, which those of a residual in groups cannot be".into())
        }
        Some(RowLayout { groups: None, .. }) | None => Ok(()),
    }
}

/// The distances of a matrix that is read or overwritten.
fn source<I, O>(source: &Source<I, O>) -> (Option<usize>, Option<RowGroups>) {
    match source {
        Source::Read(rows) => (rows.row_stride, rows.groups),
        Source::Overwrite(rows) => (rows.row_stride, rows.groups),
    }
}
