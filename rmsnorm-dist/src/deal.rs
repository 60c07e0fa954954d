//! The first exchange of a sum over ranks: each rank receives its rows from all ranks, then adds
//! and normalizes them.

use rmsnorm_spec::{AnyForward, AnyIn, AnyOut, DTypes, Error, Memory, NormSpec, Rows, Source};

use crate::untyped::{Room, forward};
use crate::{Collective, RowShares, Sharded};

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// Sends `x` to the owners of its rows and receives this rank's rows of every `x`. It is the
    /// first exchange of a call.
    pub(crate) fn deal(
        &self,
        shares: &RowShares,
        x: &Source<AnyIn<'_, B>, AnyOut<'_, B>>,
        parts: &mut Room<B>,
        is_sent: &mut bool,
    ) -> Result<(), Error> {
        *is_sent = true;
        self.all_to_all(shares, sent(x, shares.len()), parts.view_mut(0..self.len_of_parts(shares)))
    }

    /// Elements of this rank's rows, over all ranks' `x`.
    pub(crate) fn len_of_parts(&self, shares: &RowShares) -> usize {
        shares.elements(self.collective().rank()).len() * shares.ranks
    }

    /// The call that adds the partial sums of these rows and normalizes, without residual and
    /// statistics.
    pub(crate) fn of_parts<'l>(
        &self,
        (spec, dtypes): (&NormSpec, DTypes),
        parts: &'l Room<B>,
        y: impl Into<Rows<AnyOut<'l, B>>>,
        weight: Option<&'l AnyIn<'_, B>>,
        bias: Option<&'l AnyIn<'_, B>>,
    ) -> AnyForward<'l, B> {
        let (ranks, len) = (self.collective().ranks(), spec.rows * spec.cols);
        let mut args = AnyForward::<B>::new(parts.view(0..len * ranks), y).parts(ranks, len);
        args.dtypes = dtypes;
        (args.weight, args.bias) = (weight.map(AnyIn::whole), bias.map(AnyIn::whole));
        args
    }

    /// Runs [`of_parts`](Self::of_parts) with the other tensors of these rows, `given`. A sum of
    /// parts cannot overwrite the residual: it is written to `of_sum` and copied.
    pub(crate) fn add_parts(
        &self,
        spec: &NormSpec,
        parts: &Room<B>,
        mut of_sum: Option<Room<B>>,
        mut y: Rows<AnyOut<'_, B>>,
        given: Beside<'_, B>,
    ) -> Result<(), Error> {
        let Beside { dtypes, residual, mut residual_out, weight, bias, mut mean, mut rstd } = given;
        let (residual, mut overwritten) = match residual {
            Some(Source::Overwrite(sum)) => (None, Some(sum.view)),
            Some(Source::Read(residual)) => (Some(residual), None),
            None => (None, None),
        };
        let len = spec.rows * spec.cols;
        let mut args = self.of_parts((spec, dtypes), parts, all_of(&mut y), weight.as_ref(), bias.as_ref());
        args.residual = match (&residual, &overwritten) {
            (Some(residual), _) => Some(Source::Read(residual.with(residual.view.whole()))),
            (None, Some(sum)) => Some(Source::Read(sum.read().into())),
            (None, None) => None,
        };
        args.residual_out = match &mut of_sum {
            Some(of_sum) => Some(of_sum.view_mut(0..len).into()),
            None => residual_out.as_mut().map(all_of),
        };
        args.mean = mean.as_mut().map(AnyOut::whole);
        args.rstd = rstd.as_mut().map(AnyOut::whole);
        forward(self.backend(), spec, args)?;
        match of_sum.as_ref().zip(overwritten.as_mut()) {
            Some((of_sum, sum)) => self.copy(of_sum.view(0..len), sum.part(0..len)),
            None => Ok(()),
        }
    }
}

/// The tensors of a call except `x` and `y`.
pub(crate) struct Beside<'a, B: Memory> {
    pub(crate) dtypes: DTypes,
    pub(crate) residual: Option<Source<AnyIn<'a, B>, AnyOut<'a, B>>>,
    pub(crate) residual_out: Option<Rows<AnyOut<'a, B>>>,
    pub(crate) weight: Option<AnyIn<'a, B>>,
    pub(crate) bias: Option<AnyIn<'a, B>>,
    pub(crate) mean: Option<AnyOut<'a, B>>,
    pub(crate) rstd: Option<AnyOut<'a, B>>,
}

/// The elements of `x`, whose rows are contiguous.
pub(crate) fn sent<'a, B: Memory>(x: &'a Source<AnyIn<'_, B>, AnyOut<'_, B>>, len: usize) -> AnyIn<'a, B> {
    match x {
        Source::Read(x) => x.view.part(0..len),
        Source::Overwrite(x) => x.view.read(),
    }
}

/// The output `y`: `x` if it is overwritten.
pub(crate) fn written<I, O>(x: Source<I, O>, y: Option<Rows<O>>) -> Option<Rows<O>> {
    match x {
        Source::Overwrite(y) => Some(y),
        Source::Read(_) => y,
    }
}

/// Checks that the rows of a matrix that is sent are contiguous.
pub(crate) fn check_dense(spec: &NormSpec, name: &str, matrix: Option<Rows<()>>) -> Result<(), Error> {
    // Groups may end with a gap inside the view even if their rows are contiguous.
    let is_dense = |rows: &Rows<()>| rows.groups.is_none() && rows.layout(spec.rows, spec.cols).row_stride == spec.cols;
    match matrix {
        Some(rows) if !is_dense(&rows) => {
            let rule = format!(
                "Sharded sends {name}, whose rows must be contiguous, got strided or grouped rows: pass a contiguous copy"
            );
            Err(Error::Unsupported { rule })
        }
        Some(_) | None => Ok(()),
    }
}

/// The row layout of a matrix that is read or overwritten, without its view.
pub(crate) fn distances<I, O>(source: &Source<I, O>) -> Rows<()> {
    match source {
        Source::Read(rows) => rows.with(()),
        Source::Overwrite(rows) => rows.with(()),
    }
}

/// Reborrows the same rows for writing.
pub(crate) fn all_of<'a, B: Memory>(rows: &'a mut Rows<AnyOut<'_, B>>) -> Rows<AnyOut<'a, B>> {
    rows.with(()).with(rows.view.whole())
}
