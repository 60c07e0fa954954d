//! How a sum of all ranks' parts begins: rows are dealt out, and a rank adds and normalizes its own.

use rmsnorm_spec::{Element, Error, Forward, Memory, NormSpec, Rows, Source, Stored};

use crate::columns::whole;
use crate::{Collective, Sharded, Shares};

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// Room for this rank's rows of every rank's `x`.
    pub(crate) fn room_for_parts<T: Stored>(&self, shares: &Shares) -> Result<B::Buffer<T>, Error> {
        self.backend().buffer(shares.elements(self.collective().rank()).len() * shares.ranks)
    }

    /// Sends `x`, each rank its rows, and takes the own ones of all. It is the first exchange of a call.
    pub(crate) fn deal<T: Stored>(
        &self,
        shares: &Shares,
        x: &Source<B::In<'_, T>, B::Out<'_, T>>,
        parts: &mut B::Buffer<T>,
        is_sent: &mut bool,
    ) -> Result<(), Error> {
        let len = shares.elements(self.collective().rank()).len() * shares.ranks;
        *is_sent = true;
        self.collective().all_to_all(shares, sent::<B, T>(x, shares.len()), B::buffer_out(parts, 0..len))
    }

    /// The call that adds the parts of these rows, one of each rank, and normalizes: but for the residual and the statistics.
    pub(crate) fn of_parts<'l, T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        parts: &'l B::Buffer<T>,
        y: impl Into<Rows<B::Out<'l, T>>>,
        weight: Option<&'l B::In<'_, W>>,
        bias: Option<&'l B::In<'_, W>>,
    ) -> Forward<'l, B, T, W, R> {
        let (ranks, len) = (self.collective().ranks(), spec.rows * spec.cols);
        let args = Forward::<B, T>::new(B::buffer_in(parts, 0..len * ranks), y).parts(ranks, len);
        let mut args = args.weight_dtype::<W>().residual_dtype::<R>();
        (args.weight, args.bias) = (weight.map(whole::<B, W>), bias.map(whole::<B, W>));
        args
    }

    /// Makes that call, with the tensors that this rank has of these rows. `of_sum` is room for the sum that overwrites a
    /// residual: a sum of parts is made beside it, and not in place.
    pub(crate) fn add_parts<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        parts: &B::Buffer<T>,
        mut of_sum: Option<B::Buffer<R>>,
        mut y: Rows<B::Out<'_, T>>,
        beside: Beside<'_, B, W, R>,
    ) -> Result<(), Error> {
        let Beside { residual, mut residual_out, weight, bias, mut mean, mut rstd } = beside;
        let (residual, mut overwritten) = match residual {
            Some(Source::Overwrite(sum)) => (None, Some(sum.view)),
            Some(Source::Read(residual)) => (Some(residual), None),
            None => (None, None),
        };
        let len = spec.rows * spec.cols;
        let mut args = self.of_parts::<T, W, R>(spec, parts, all_of::<B, T>(&mut y), weight.as_ref(), bias.as_ref());
        args.residual = match (&residual, &overwritten) {
            (Some(residual), _) => Some(Source::Read(residual.with(whole::<B, R>(&residual.view)))),
            (None, Some(sum)) => Some(Source::Read(B::read_out(sum).into())),
            (None, None) => None,
        };
        args.residual_out = match &mut of_sum {
            Some(of_sum) => Some(B::buffer_out(of_sum, 0..len).into()),
            None => residual_out.as_mut().map(all_of::<B, R>),
        };
        args.mean = mean.as_mut().map(|mean| B::part_out(mean, 0..spec.rows));
        args.rstd = rstd.as_mut().map(|rstd| B::part_out(rstd, 0..spec.rows));
        self.backend().forward(spec, args)?;
        match of_sum.as_ref().zip(overwritten.as_mut()) {
            Some((of_sum, sum)) => self.backend().copy(B::buffer_in(of_sum, 0..len), B::part_out(sum, 0..len)),
            None => Ok(()),
        }
    }
}

/// The tensors of a call but `x` and `y`.
pub(crate) struct Beside<'a, B: Memory, W: Element, R: Element> {
    pub(crate) residual: Option<Source<B::In<'a, R>, B::Out<'a, R>>>,
    pub(crate) residual_out: Option<Rows<B::Out<'a, R>>>,
    pub(crate) weight: Option<B::In<'a, W>>,
    pub(crate) bias: Option<B::In<'a, W>>,
    pub(crate) mean: Option<B::Out<'a, f32>>,
    pub(crate) rstd: Option<B::Out<'a, f32>>,
}

/// The elements of `x`, whose rows lie side by side.
pub(crate) fn sent<'a, B: Memory, T: Stored>(x: &'a Source<B::In<'_, T>, B::Out<'_, T>>, len: usize) -> B::In<'a, T> {
    match x {
        Source::Read(x) => B::part_in(&x.view, 0..len),
        Source::Overwrite(x) => B::read_out(&x.view),
    }
}

/// Where `y` goes: over `x`, or to its own place.
pub(crate) fn written<I, O>(x: Source<I, O>, y: Option<Rows<O>>) -> Option<Rows<O>> {
    match x {
        Source::Overwrite(y) => Some(y),
        Source::Read(_) => y,
    }
}

/// That a matrix which is sent, if there is one, has its rows side by side.
pub(crate) fn check_dense(spec: &NormSpec, name: &str, matrix: Option<Rows<()>>) -> Result<(), Error> {
    // Groups that lie as if there were none may have a gap behind the last, which the view may reach into.
    let is_dense = |rows: &Rows<()>| rows.groups.is_none() && rows.layout(spec.rows, spec.cols).row_stride == spec.cols;
    match matrix {
        Some(rows) if !is_dense(&rows) => {
            let rule = format!("a composed norm sends rows that lie side by side, those of {name} do not");
            Err(Error::Unsupported { rule })
        }
        Some(_) | None => Ok(()),
    }
}

/// A matrix that is read or overwritten, without its view.
pub(crate) fn distances<I, O>(source: &Source<I, O>) -> Rows<()> {
    match source {
        Source::Read(rows) => rows.with(()),
        Source::Overwrite(rows) => rows.with(()),
    }
}

/// The same rows again, to be written.
pub(crate) fn all_of<'a, B: Memory, E: Stored>(rows: &'a mut Rows<B::Out<'_, E>>) -> Rows<B::Out<'a, E>> {
    let (distances, len) = (rows.with(()), B::out_span(&rows.view).len);
    distances.with(B::part_out(&mut rows.view, 0..len))
}
