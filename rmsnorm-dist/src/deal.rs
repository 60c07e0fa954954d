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

    /// The call that adds and normalizes what was dealt to this rank, but for the residual and the statistics.
    pub(crate) fn of_parts<'l, T: Element, W: Element, R: Element>(
        &self,
        shares: &Shares,
        parts: &'l B::Buffer<T>,
        y: impl Into<Rows<B::Out<'l, T>>>,
        weight: Option<&'l B::In<'_, W>>,
        bias: Option<&'l B::In<'_, W>>,
    ) -> Forward<'l, B, T, W, R> {
        let own = shares.elements(self.collective().rank()).len();
        let args = Forward::<B, T>::new(B::buffer_in(parts, 0..own * shares.ranks), y).parts(shares.ranks, own);
        let mut args = args.weight_dtype::<W>().residual_dtype::<R>();
        (args.weight, args.bias) = (weight.map(whole::<B, W>), bias.map(whole::<B, W>));
        args
    }
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
