//! A residual stream divided by rows: one exchange, a call of the backend on this rank's rows, and
//! a second exchange if all rows of `y` are wanted.

use rmsnorm_spec::{AnyForward, Error, Forward, Memory, NormSpec, OutputRows, ShardedRows, Source};

use crate::deal::{Beside, all_of, check_dense, distances, written};
use crate::untyped::forward;
use crate::{Collective, RowShares, Sharded, ShardedNorm, check_reduced_rows};

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// [`ShardedNorm::forward_reduced_rows`].
    pub(crate) fn normalize_rows(
        &self,
        spec: &NormSpec,
        y_rows: OutputRows,
        args: AnyForward<'_, B>,
    ) -> Result<(), Error> {
        let call = check_reduced_rows(spec, (self.rank(), self.ranks()), y_rows, args)?;
        let ShardedRows { args, .. } = call.into_args();
        if self.ranks() == 1 {
            return forward(self.backend(), spec, args);
        }
        check_form(spec, y_rows, &args)?;
        self.in_step(|is_sent| self.reduce_rows(spec, y_rows, args, is_sent))
    }

    /// The steps of a validated call that this form supports. `is_sent` is set while another
    /// exchange is to come.
    fn reduce_rows(
        &self,
        spec: &NormSpec,
        y_rows: OutputRows,
        args: AnyForward<'_, B>,
        is_sent: &mut bool,
    ) -> Result<(), Error> {
        let Forward { x, y, residual, residual_out, weight, bias, mean, rstd, dtypes, .. } = args;
        let shares = RowShares { units: spec.rows, unit: spec.cols, ranks: self.ranks() };
        let (own, rows) = (shares.elements(self.rank()), shares.units(self.rank()));

        // Allocate before anything is sent: a rank that fails later leaves the others waiting.
        let mut parts = self.room(dtypes.activation, self.len_of_parts(&shares))?;
        let of_sum = self.room_if(matches!(residual, Some(Source::Overwrite(_))), dtypes.residual, own.len())?;

        let Some(x) = x else { return Ok(()) };
        self.deal(&shares, &x, &mut parts, is_sent)?;
        // If it was the only exchange, a later error leaves all ranks in step.
        *is_sent = y_rows == OutputRows::All;
        let is_own_matrix = y_rows == OutputRows::Own && matches!(x, Source::Read(_));
        let Some(mut y) = written(x, y) else { return Ok(()) };
        let of_y = if is_own_matrix { all_of(&mut y) } else { y.view.part(own).into() };
        let beside = Beside { dtypes, residual, residual_out, weight, bias, mean, rstd };
        self.add_parts(&spec.rows(rows.len()), &parts, of_sum, of_y, beside)?;
        match y_rows {
            OutputRows::Own => Ok(()),
            OutputRows::All => self.all_gather_in_place(&shares, y.view),
        }
    }
}

/// Rejects calls that are valid but that this form does not support.
fn check_form<B: Memory>(spec: &NormSpec, y_rows: OutputRows, args: &AnyForward<'_, B>) -> Result<(), Error> {
    check_dense(spec, "x", args.x.as_ref().map(distances))?;
    check_dense(spec, "y", args.y.as_ref().filter(|_| y_rows == OutputRows::All).map(|y| y.with(())))?;
    match &args.residual {
        // Compare the given stride: a rank with one row must refuse the same calls as the others.
        Some(Source::Overwrite(sum)) if sum.row_stride.is_some_and(|row_stride| row_stride != spec.cols) => {
            let rule = "Sharded needs contiguous rows in a residual that is overwritten: pass a contiguous residual";
            Err(Error::Unsupported { rule: rule.into() })
        }
        Some(Source::Overwrite(_) | Source::Read(_)) | None => Ok(()),
    }
}
