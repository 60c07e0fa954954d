//! [`ShardedNorm`]: what callers see, and what the suite proves.

use rmsnorm_spec::{
    AnyBackward, AnyForward, Backward, Checked, Element, Error, Forward, NormBackend, NormSpec, ResidualPlacement,
    ShardedRows, YRows,
};

use crate::Shares;

/// A call of a group, whose dtypes are values.
pub enum GroupCall<'a, 'c, B: NormBackend> {
    /// [`ShardedNorm::forward_reduced`].
    Reduced(AnyForward<'a, B>),
    /// [`ShardedNorm::forward_reduced_rows`].
    ReducedRows(YRows, AnyForward<'a, B>),
    /// [`ShardedNorm::forward_columns`].
    ForwardColumns(&'c [usize], AnyForward<'a, B>),
    /// [`ShardedNorm::backward_columns`].
    BackwardColumns(&'c [usize], AnyBackward<'a, B>),
}

impl<B: NormBackend> GroupCall<'_, '_, B> {
    /// The answer of a form that has no such call.
    ///
    /// # Errors
    /// `Unsupported`, always.
    pub fn unsupported(&self) -> Result<(), Error> {
        let rule = match self {
            GroupCall::Reduced(_) => "this form adds no sums over ranks",
            GroupCall::ReducedRows(..) => "this form divides no residual stream by rows among ranks",
            GroupCall::ForwardColumns(..) | GroupCall::BackwardColumns(..) => {
                "this form normalizes no rows whose columns are divided among ranks"
            }
        };
        Err(Error::Unsupported { rule: rule.into() })
    }
}

/// A rank of a group that normalizes together. Who implements it writes `rank`, `ranks` and [`launch`](Self::launch).
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

    /// Makes a call, which is not yet validated: [`check_reduced`] and [`check_reduced_rows`] do that, and
    /// [`DividedColumns`](crate::DividedColumns).
    ///
    /// # Errors
    /// As the method that makes this call; [`GroupCall::unsupported`] where a form has no such call.
    fn launch(&self, spec: &NormSpec, call: GroupCall<'_, '_, Self::Backend>) -> Result<(), Error>;

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
    ) -> Result<(), Error> {
        self.launch(spec, GroupCall::Reduced(args.erase()))
    }

    /// The same where the residual stream is divided by rows: a rank adds and normalizes those that it owns, and has the residual of
    /// these alone.
    ///
    /// A rank owns the rows that [`Shares`](crate::Shares) deals to it: as many to each, of the last ones fewer or none. `x`, this rank's part of every
    /// row, is (rows, cols); `residual`, `residual_out`, `mean` and `rstd` are of the own rows. `y` is of all rows, and then the same on
    /// every rank, or of the own ones; where it overwrites `x` it leaves the other rows of it as they were. The sum has the bits
    /// of (1'), as in [`forward_reduced`](Self::forward_reduced), and everything is within the same bounds.
    ///
    /// # Errors
    /// As [`forward_reduced`](Self::forward_reduced); `Unsupported` for rows in groups, and from a form that has no such call.
    fn forward_reduced_rows<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        y_rows: YRows,
        args: Forward<'_, Self::Backend, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(spec, GroupCall::ReducedRows(y_rows, args.erase()))
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
    /// that has no such call.
    fn forward_columns<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        columns: &[usize],
        args: Forward<'_, Self::Backend, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(spec, GroupCall::ForwardColumns(columns, args.erase()))
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
        self.launch(spec, GroupCall::BackwardColumns(columns, args.erase()))
    }
}

/// A reduced call, validated: for who implements [`ShardedNorm`].
///
/// # Errors
/// As [`ShardedNorm::forward_reduced`] before anything is sent.
pub fn check_reduced<'a, B: NormBackend>(
    spec: &NormSpec,
    args: AnyForward<'a, B>,
) -> Result<Checked<AnyForward<'a, B>>, Error> {
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

/// A reduced call whose residual stream is divided by rows, validated as that of rank `rank` of `ranks`: for who implements
/// [`ShardedNorm`].
///
/// # Errors
/// As [`ShardedNorm::forward_reduced_rows`] before anything is sent.
pub fn check_reduced_rows<'a, B: NormBackend>(
    spec: &NormSpec,
    (rank, ranks): (usize, usize),
    y_rows: YRows,
    args: AnyForward<'a, B>,
) -> Result<Checked<ShardedRows<AnyForward<'a, B>>>, Error> {
    let own = Shares { units: spec.rows, unit: spec.cols, ranks }.units(rank);
    Checked::forward_rows(*spec, ShardedRows::new(args, own, y_rows))
}
