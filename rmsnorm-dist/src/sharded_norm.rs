//! [`ShardedNorm`]: what callers see, and what the suite proves.

use rmsnorm_spec::{
    Backward, Checked, Element, Error, Forward, NormBackend, NormSpec, ResidualPlacement, ShardedRows, YRows,
};

use crate::Shares;

/// A rank of a group that normalizes together.
///
/// Every rank makes the same calls, in the same order, with the same [`NormSpec`], dtypes and set of tensors. Calls enqueue on the
/// backend's stream; those in host memory are done on return.
pub trait ShardedNorm {
    /// What has this rank's tensors.
    type Backend: NormBackend;

    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many there are, at least 1.
    fn ranks(&self) -> usize;

    /// Adds what all ranks have, and normalizes: [math](rmsnorm_spec::math), equations (1') and (2) to (6).
    ///
    /// ```text
    /// h = rnd(((x of rank 0 + x of rank 1) + ...) + residual)       y = norm(h)
    /// ```
    ///
    /// `x`, this rank's part, and all other matrices are (rows, cols). The residual, weight and bias are the same on every rank, as the
    /// caller sees to. `y`, `residual_out`, `mean` and `rstd` then are the same on every rank, bit for bit.
    /// `y` may overwrite `x`, and `residual_out` the residual. `x` is one matrix, not a sum of [`parts`](Forward::parts), and the residual
    /// is added before the norm.
    ///
    /// # Errors
    /// As [`NormBackend::forward`], before anything is sent; `Device` where the group finds out that another rank did not come, or made
    /// another call. After that no output holds anything. Not every group can find out: different calls on its ranks may give wrong
    /// results, or wait for ever.
    fn forward_reduced<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Forward<'_, Self::Backend, T, W, R>,
    ) -> Result<(), Error>;

    /// The same where the residual stream is divided by rows: a rank adds and normalizes those that it owns, and has the residual of
    /// these alone.
    ///
    /// A rank owns the rows that [`Shares`](crate::Shares) deals to it: as many to each, of the last ones fewer or none. `x`, this rank's part of every
    /// row, is (rows, cols); `residual`, `residual_out`, `mean` and `rstd` are of the own rows. `y` is of all rows, and then the same on
    /// every rank, or of the own ones; where it overwrites `x` it leaves the other rows of it as they were. The sum has the bits
    /// of (1'), as in [`forward_reduced`](Self::forward_reduced), and everything is within the same bounds.
    ///
    /// # Errors
    /// As [`forward_reduced`](Self::forward_reduced); `Unsupported` for rows in groups, and from a form that does not override this.
    fn forward_reduced_rows<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        y_rows: YRows,
        args: Forward<'_, Self::Backend, T, W, R>,
    ) -> Result<(), Error> {
        let _ = (spec, y_rows, args);
        Err(Error::Unsupported { rule: "this form divides no residual stream by rows among ranks".into() })
    }

    /// Normalizes rows whose columns are divided among the ranks: [math](rmsnorm_spec::math), equations (15) and (16).
    ///
    /// `spec.cols` is the length of a whole row, `columns` how many of it each rank has, in their order; each has some. The tensors are
    /// of this rank's columns: matrices are (rows, columns of this rank), weight and bias have as many. `mean` and `rstd` are those of whole
    /// rows, the same bits on every rank. `x` may be overwritten, as in [`NormBackend::forward`]; it is one matrix, not a sum of
    /// [`parts`](Forward::parts), and the residual is added before the norm.
    ///
    /// # Errors
    /// As [`forward_reduced`](Self::forward_reduced); `InvalidArgument` if `columns` are not those of `spec`; `Unsupported` from a form
    /// that does not override this.
    fn forward_columns<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        columns: &[usize],
        args: Forward<'_, Self::Backend, T, W, R>,
    ) -> Result<(), Error> {
        let _ = (spec, columns, args);
        without_columns()
    }

    /// The gradients of [`forward_columns`](Self::forward_columns): (17) and (18), by the mean and rstd of whole rows. `dweight` and
    /// `dbias` are those of this rank's columns, and complete.
    ///
    /// # Errors
    /// As there.
    fn backward_columns<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        columns: &[usize],
        args: Backward<'_, Self::Backend, T, W, R>,
    ) -> Result<(), Error> {
        let _ = (spec, columns, args);
        without_columns()
    }
}

fn without_columns() -> Result<(), Error> {
    Err(Error::Unsupported { rule: "this form normalizes no rows whose columns are divided among ranks".into() })
}

/// A reduced call, validated: for who implements [`ShardedNorm`].
///
/// # Errors
/// As [`ShardedNorm::forward_reduced`] before anything is sent.
pub fn check_reduced<'a, B: NormBackend, T: Element, W: Element, R: Element>(
    spec: &NormSpec,
    args: Forward<'a, B, T, W, R>,
) -> Result<Checked<Forward<'a, B, T, W, R>>, Error> {
    if args.parts.is_some() {
        return Err(Error::Unsupported { rule: "a reduced x is one matrix on every rank, no sum of parts".into() });
    }
    match spec.residual_placement {
        ResidualPlacement::Before => Checked::forward(*spec, args),
        ResidualPlacement::After => {
            Err(Error::Unsupported { rule: "a reduced norm adds the residual before the norm".into() })
        }
    }
}

type CheckedRows<'a, B, T, W, R> = Checked<ShardedRows<Forward<'a, B, T, W, R>>>;

/// A reduced call whose residual stream is divided by rows, validated as that of rank `rank` of `ranks`: for who implements
/// [`ShardedNorm`].
///
/// # Errors
/// As [`ShardedNorm::forward_reduced_rows`] before anything is sent.
pub fn check_reduced_rows<'a, B: NormBackend, T: Element, W: Element, R: Element>(
    spec: &NormSpec,
    (rank, ranks): (usize, usize),
    y_rows: YRows,
    args: Forward<'a, B, T, W, R>,
) -> Result<CheckedRows<'a, B, T, W, R>, Error> {
    let own = Shares { units: spec.rows, unit: spec.cols, ranks }.units(rank);
    Checked::forward_rows(*spec, ShardedRows::new(args, own, y_rows))
}
