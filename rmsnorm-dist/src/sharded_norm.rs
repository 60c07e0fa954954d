//! [`ShardedNorm`]: the trait of norms over a group.

use rmsnorm_spec::{
    AnyBackward, AnyForward, Backward, Checked, Element, Error, Forward, NormBackend, NormSpec, OutputRows,
    ResidualPlacement, ShardedRows,
};

use crate::RowShares;

/// A call of a group. Its dtypes are values.
pub enum GroupCall<'a, 'c, B: NormBackend> {
    /// [`ShardedNorm::forward_reduced`].
    Reduced(AnyForward<'a, B>),
    /// [`ShardedNorm::forward_reduced_rows`].
    ReducedRows(OutputRows, AnyForward<'a, B>),
    /// [`ShardedNorm::forward_columns`].
    ForwardColumns(&'c [usize], AnyForward<'a, B>),
    /// [`ShardedNorm::backward_columns`].
    BackwardColumns(&'c [usize], AnyBackward<'a, B>),
}

impl<B: NormBackend> GroupCall<'_, '_, B> {
    /// The answer of an implementation that does not support this call.
    ///
    /// # Errors
    /// `Unsupported`, always.
    pub fn unsupported(&self) -> Result<(), Error> {
        let rule = match self {
            GroupCall::Reduced(_) => "this ShardedNorm has no forward_reduced: use Sharded or PeerGroup",
            GroupCall::ReducedRows(..) => {
                "this ShardedNorm supports no residual divided by rows: call forward_reduced, or use Sharded or PeerGroup"
            }
            GroupCall::ForwardColumns(..) | GroupCall::BackwardColumns(..) => {
                "this ShardedNorm supports no divided columns: use Sharded or PeerGroup"
            }
        };
        Err(Error::Unsupported { rule: rule.into() })
    }
}

/// A rank of a group that normalizes together. Implement `rank`, `ranks` and
/// [`launch`](Self::launch).
///
/// Every rank makes the same calls, in the same order, with the same [`NormSpec`], dtypes and set
/// of tensors. Calls are enqueued on the backend's stream; in host memory they are complete on
/// return.
pub trait ShardedNorm {
    /// The backend whose memory holds this rank's tensors.
    type Backend: NormBackend;

    /// This rank, from 0.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_cpu::CpuBackend;
    /// # use rmsnorm_dist::{Sharded, ShardedNorm, ThreadGroup};
    /// for (i, group) in ThreadGroup::new(3).into_iter().enumerate() {
    ///     let norm = Sharded::new(CpuBackend::new(), group);
    ///     assert_eq!(norm.rank(), i);
    /// }
    /// ```
    fn rank(&self) -> usize;

    /// Number of ranks, at least 1.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_cpu::CpuBackend;
    /// # use rmsnorm_dist::{Sharded, ShardedNorm, ThreadGroup};
    /// let group = ThreadGroup::new(3).remove(0);
    /// assert_eq!(Sharded::new(CpuBackend::new(), group).ranks(), 3);
    /// ```
    fn ranks(&self) -> usize;

    /// Makes a call that is not yet validated. Implementations validate it with [`check_reduced`],
    /// [`check_reduced_rows`] or [`DividedColumns`](crate::DividedColumns).
    ///
    /// # Errors
    /// As the method that makes this call; [`GroupCall::unsupported`] from an implementation that
    /// does not support it.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_cpu::{CpuBackend, Forward, spec::{Error, NormSpec}};
    /// # use rmsnorm_dist::{GroupCall, Sharded, ShardedNorm, ThreadGroup};
    /// let norm = Sharded::new(CpuBackend::new(), ThreadGroup::new(1).remove(0));
    /// let (x, mut y) = ([1.0f32, 7.0], [0.0f32; 2]);
    /// // As forward_reduced, with dtypes that are values.
    /// let args = Forward::<'_, f32>::new(&x[..], &mut y[..]).erase();
    /// norm.launch(&NormSpec::rms(1, 2, 0.0), GroupCall::Reduced(args))?;
    /// assert_eq!(y, [0.2, 1.4]);
    /// # Ok::<(), Error>(())
    /// ```
    fn launch(&self, spec: &NormSpec, call: GroupCall<'_, '_, Self::Backend>) -> Result<(), Error>;

    /// Adds the partial sums of all ranks and the residual, and normalizes:
    /// [math](rmsnorm_spec::math), equations (1') and (2) to (6).
    ///
    /// ```text
    /// h = rnd(((x of rank 0 + x of rank 1) + ...) + residual)       y = norm(h)
    /// ```
    ///
    /// `x` is this rank's partial sum. All matrices are (rows, cols). The caller passes the same
    /// residual, weight and bias on every rank; `y`, `residual_out`, `mean` and `rstd` then have
    /// the same bits on every rank. `y` may overwrite `x`, and `residual_out` the residual. `x` is
    /// one matrix, not a sum of [`parts`](Forward::parts), and the residual is added before the
    /// norm.
    ///
    /// # Errors
    /// As [`NormBackend::forward`], before anything is sent. `Device` if the group detects that a
    /// rank is missing or made another call; all outputs are then invalid. Not every group detects
    /// this: otherwise results are wrong or the call hangs.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_cpu::{CpuBackend, Forward, spec::{Error, NormSpec}};
    /// # use rmsnorm_dist::{Sharded, ShardedNorm, ThreadGroup};
    /// fn rank(group: ThreadGroup) -> Result<(), Error> {
    ///     let norm = Sharded::new(CpuBackend::new(), group);
    ///     let x = [[7.0f32, 2.0], [-6.0, 3.0]][norm.rank()]; // this rank's partial sum
    ///     let (residual, mut h, mut y) = ([0.0f32, 2.0], [0.0f32; 2], [0.0f32; 2]);
    ///     let args = Forward::new(&x, &mut y).residual(&residual).residual_out(&mut h);
    ///     norm.forward_reduced(&NormSpec::rms(1, 2, 0.0), args)?;
    ///     assert_eq!((h, y), ([1.0, 7.0], [0.2, 1.4])); // on both ranks
    ///     Ok(())
    /// }
    /// # let ranks = ThreadGroup::new(2).into_iter().map(|group| std::thread::spawn(|| rank(group)));
    /// # for rank in ranks.collect::<Vec<_>>() { rank.join().expect("no rank panics")?; }
    /// # Ok::<(), Error>(())
    /// ```
    fn forward_reduced<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Forward<'_, Self::Backend, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(spec, GroupCall::Reduced(args.erase()))
    }

    /// [`forward_reduced`](Self::forward_reduced) for a residual stream divided by rows: each rank
    /// adds and normalizes the rows that it owns, and holds the residual of these rows only.
    ///
    /// [`RowShares`](crate::RowShares) defines the rows of a rank: all ranks own the same number, except
    /// that the last ones may own fewer or none. `x` is this rank's partial sum of all rows, (rows,
    /// cols). `residual`, `residual_out`, `mean` and `rstd` have the owned rows only. `y` has all
    /// rows (the same on every rank) or the owned ones; if it overwrites `x` and only owned rows
    /// are wanted, other rows of `x` are kept. The sum has the bits of (1'), as in
    /// [`forward_reduced`](Self::forward_reduced), and the error bounds are the same.
    ///
    /// # Errors
    /// As [`forward_reduced`](Self::forward_reduced). `Unsupported` for rows in groups, and from an
    /// implementation without this call.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_cpu::{CpuBackend, Forward, spec::{Error, NormSpec, OutputRows}};
    /// # use rmsnorm_dist::{Sharded, ShardedNorm, ThreadGroup};
    /// fn rank(group: ThreadGroup) -> Result<(), Error> { // of two ranks, each owns one row
    ///     let norm = Sharded::new(CpuBackend::new(), group);
    ///     let x = [1.0f32, 2.0, 3.0, 4.0]; // partial sums of both rows
    ///     let residual = [[-1.0f32, 3.0], [1.0, -1.0]][norm.rank()]; // of the owned row
    ///     let mut y = [0.0f32; 2];
    ///     let args = Forward::new(&x, &mut y).residual(&residual);
    ///     norm.forward_reduced_rows(&NormSpec::rms(2, 2, 0.0), OutputRows::Own, args)?;
    ///     assert_eq!(y, [[0.2, 1.4], [1.0, 1.0]][norm.rank()]); // of (1, 7) and (7, 7)
    ///     Ok(())
    /// }
    /// # let ranks = ThreadGroup::new(2).into_iter().map(|group| std::thread::spawn(|| rank(group)));
    /// # for rank in ranks.collect::<Vec<_>>() { rank.join().expect("no rank panics")?; }
    /// # Ok::<(), Error>(())
    /// ```
    fn forward_reduced_rows<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        y_rows: OutputRows,
        args: Forward<'_, Self::Backend, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(spec, GroupCall::ReducedRows(y_rows, args.erase()))
    }

    /// Normalizes rows whose columns are divided among the ranks: [math](rmsnorm_spec::math),
    /// equations (15) and (16).
    ///
    /// `spec.cols` is the length of a whole row, and `columns[i]` the number of columns of rank i,
    /// at least 1. Matrices are (rows, columns of this rank); weight and bias have the columns of
    /// this rank. `mean` and `rstd` describe whole rows and have the same bits on every rank. `x`
    /// may be overwritten, as in [`NormBackend::forward`]. `x` is one matrix, not a sum of
    /// [`parts`](Forward::parts), and the residual is added before the norm.
    ///
    /// # Errors
    /// As [`forward_reduced`](Self::forward_reduced). `InvalidArgument` if `columns` does not fit
    /// `spec` or the group. `Unsupported` from an implementation without this call.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_cpu::{CpuBackend, Forward, spec::{Error, NormSpec}};
    /// # use rmsnorm_dist::{Sharded, ShardedNorm, ThreadGroup};
    /// fn rank(group: ThreadGroup) -> Result<(), Error> {
    ///     let norm = Sharded::new(CpuBackend::new(), group);
    ///     let x = [[1.0f32], [7.0]][norm.rank()]; // this rank's column of the row (1, 7)
    ///     let (mut y, mut rstd) = ([0.0f32], [0.0f32]);
    ///     let args = Forward::new(&x, &mut y).rstd(&mut rstd);
    ///     norm.forward_columns(&NormSpec::rms(1, 2, 0.0), &[1, 1], args)?;
    ///     assert_eq!((y, rstd), ([[0.2], [1.4]][norm.rank()], [0.2]));
    ///     Ok(())
    /// }
    /// # let ranks = ThreadGroup::new(2).into_iter().map(|group| std::thread::spawn(|| rank(group)));
    /// # for rank in ranks.collect::<Vec<_>>() { rank.join().expect("no rank panics")?; }
    /// # Ok::<(), Error>(())
    /// ```
    fn forward_columns<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        columns: &[usize],
        args: Forward<'_, Self::Backend, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(spec, GroupCall::ForwardColumns(columns, args.erase()))
    }

    /// The gradients of [`forward_columns`](Self::forward_columns): equations (17) and (18), with
    /// `mean` and `rstd` of whole rows. `dweight` and `dbias` have the columns of this rank and
    /// need no sum over ranks.
    ///
    /// # Errors
    /// As [`forward_columns`](Self::forward_columns). `Unsupported` unless `grad_reduction` is
    /// `GradReduction::Partials`.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_cpu::{Backward, CpuBackend, spec::{Error, NormSpec}};
    /// # use rmsnorm_dist::{Sharded, ShardedNorm, ThreadGroup};
    /// fn rank(group: ThreadGroup) -> Result<(), Error> {
    ///     let norm = Sharded::new(CpuBackend::new(), group);
    ///     let (x, dy) = ([2.0f32], [[3.0f32], [1.0]][norm.rank()]); // this rank's column
    ///     let (rstd, mut dx) = ([0.5f32], [0.0f32]); // rstd of the row (2, 2)
    ///     let args = Backward::new(&dy, &x, &rstd, &mut dx);
    ///     norm.backward_columns(&NormSpec::rms(1, 2, 0.0), &[1, 1], args)?;
    ///     assert_eq!(dx, [[0.5], [-0.5]][norm.rank()]);
    ///     Ok(())
    /// }
    /// # let ranks = ThreadGroup::new(2).into_iter().map(|group| std::thread::spawn(|| rank(group)));
    /// # for rank in ranks.collect::<Vec<_>>() { rank.join().expect("no rank panics")?; }
    /// # Ok::<(), Error>(())
    /// ```
    fn backward_columns<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        columns: &[usize],
        args: Backward<'_, Self::Backend, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(spec, GroupCall::BackwardColumns(columns, args.erase()))
    }
}

/// Validates a reduced call. For implementations of [`ShardedNorm`].
///
/// # Errors
/// As [`ShardedNorm::forward_reduced`] before anything is sent.
pub fn check_reduced<'a, B: NormBackend>(
    spec: &NormSpec,
    args: AnyForward<'a, B>,
) -> Result<Checked<AnyForward<'a, B>>, Error> {
    if args.parts.is_some() {
        let rule = "forward_reduced takes one matrix x on each rank, got a sum of parts: add the parts first";
        return Err(Error::Unsupported { rule: rule.into() });
    }
    if spec.gate.is_some() || spec.groups > 1 || spec.cast_order.is_weight_first() {
        let rule = "forward_reduced has no gate, no groups of columns and no weight before the norm: reduce x first, and \
            normalize the sum";
        return Err(Error::Unsupported { rule: rule.into() });
    }
    if args.x.is_none() {
        let rule = "forward_reduced sums x in the dtype of y, got another dtype: use Forward::new, or convert x first";
        return Err(Error::Unsupported { rule: rule.into() });
    }
    match spec.residual_placement {
        ResidualPlacement::Before => Checked::forward(*spec, args),
        ResidualPlacement::After => {
            let rule = "forward_reduced needs ResidualPlacement::Before, got After: add the residual before the norm";
            Err(Error::Unsupported { rule: rule.into() })
        }
    }
}

/// Validates a reduced call whose residual stream is divided by rows, for rank `rank` of `ranks`.
/// For implementations of [`ShardedNorm`].
///
/// # Errors
/// As [`ShardedNorm::forward_reduced_rows`] before anything is sent.
pub fn check_reduced_rows<'a, B: NormBackend>(
    spec: &NormSpec,
    (rank, ranks): (usize, usize),
    y_rows: OutputRows,
    args: AnyForward<'a, B>,
) -> Result<Checked<ShardedRows<AnyForward<'a, B>>>, Error> {
    let own = RowShares { units: spec.rows, unit: spec.cols, ranks }.units(rank);
    Checked::forward_rows(*spec, ShardedRows::new(args, own, y_rows))
}
