//! The planted bugs: every way in which the simulated backend can be wrong, one at a time.
//!
//! A suite proves something only if it can fail. Before each run, the suite tests a
//! [`SimulatedBackend`](crate::selftest::simulate::SimulatedBackend) with each bug and must reject
//! all of them. Real kernels had bugs like these: a wrong formula, a sum that misses its tail, a
//! 16-bit accumulator, a row that was never written, a result that depends on the batch size.
//!
//! The line of a bug names the norms and kinds of calls in which it is planted. The bugs of a piece
//! are in the piece's file; the others are here.

use std::fmt;

use rmsnorm_spec::{Norm, Tensor, TensorShape};

use crate::case::Kind;

/// A planted bug.
#[derive(Clone, Copy, Debug)]
pub struct Bug {
    /// The name in the self-test's table, in snake case.
    pub name: &'static str,
    /// The error, in one clause.
    pub description: &'static str,
    pub(crate) norms: &'static [Norm],
    pub(crate) kinds: fn(Kind) -> bool,
    /// The tensor that the bug is about, if each tensor has one like it.
    pub(crate) tensor: Option<Tensor>,
    /// The list that declares the bug, and the place there.
    pub(crate) place: (&'static str, usize),
}

impl Bug {
    /// Whether the bug makes the result of some call of this norm and kind wrong.
    ///
    /// The suite must find such a call: many bugs show only with a bias, a residual, a 16-bit
    /// dtype, a row stride or several rows.
    pub fn applies_to(self, norm: Norm, kind: Kind) -> bool {
        self.norms.contains(&norm) && (self.kinds)(kind) && self.tensor.is_none_or(|tensor| kind.has(tensor))
    }
}

impl fmt::Display for Bug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tensor.map_or(Ok(()), |tensor| write!(f, "{tensor}_"))?;
        f.write_str(self.name)
    }
}

/// A list of bugs: an enum that [`bugs!`] declares.
pub(crate) trait BugList: Copy + 'static {
    /// The name of the list.
    const LIST: &'static str;
    /// Every bug, in the order of the list.
    const EACH: &'static [Self];
    /// The same with their facts.
    const BUGS: &'static [Bug];

    /// The place in the list.
    fn index(self) -> usize;

    /// The bug with its facts.
    #[cfg(test)]
    fn bug(self) -> Bug {
        Self::BUGS[self.index()]
    }
}

/// The norms and the kinds of calls in which a bug can show.
pub(crate) mod scope {
    use rmsnorm_spec::{Direction, Norm, Slot};

    use crate::case::Kind;
    use crate::case::kind::Calls;

    /// The two norms that every bug is tried in.
    pub(crate) const BOTH: &[Norm] = &Norm::USUAL;
    pub(crate) const L2: &[Norm] = &[Norm::L2];
    pub(crate) const CLAMPED: &[Norm] = &[Norm::L2Clamped];
    /// Both L2 norms.
    pub(crate) const SUMMED: &[Norm] = &[Norm::L2, Norm::L2Clamped];
    pub(crate) const LAYER: &[Norm] = &[Norm::Layer];
    /// Bugs that show only if nothing is rounded before: in rows whose rstd is 1.
    pub(crate) const RMS: &[Norm] = &[Norm::Rms];

    type Kinds = fn(Kind) -> bool;

    pub(crate) const ANY_FORWARD: Kinds = Kind::has_forward;
    pub(crate) const ANY_BACKWARD: Kinds = |kind| !kind.has_forward();
    /// Kinds without a gate; kinds with one have bugs of their own.
    pub(crate) const EVERY_STAGE: Kinds = |kind| kind.gate().is_none();
    /// All kinds with float results.
    pub(crate) const FLOATS: Kinds = |kind| kind.direction != Direction::QuantizedForward;
    pub(crate) const EVERY: Kinds = |kind| FLOATS(kind) && EVERY_STAGE(kind);
    pub(crate) const EVERY_FORWARD: Kinds = |kind| kind.has_forward() && EVERY_STAGE(kind);
    /// All forward kinds with float results.
    pub(crate) const FORWARD: Kinds = |kind| kind.direction == Direction::Forward && EVERY_STAGE(kind);
    /// Kinds that add a residual before the norm.
    pub(crate) const BEFORE: Kinds = |kind| FORWARD(kind) && kind.pieces.is_empty();
    pub(crate) const EVERY_BEFORE: Kinds = |kind| BEFORE(kind) || CODES(kind);
    /// Kinds with a separate y.
    pub(crate) const OUT_OF_PLACE: Kinds = |kind| FORWARD(kind) && !kind.overwrites_x();
    pub(crate) const IN_PLACE: Kinds = |kind| kind.overwrites_x() && EVERY_STAGE(kind);
    /// Kinds that add the residual after the norm.
    pub(crate) const AFTER: Kinds = Kind::is_after;
    pub(crate) const BACKWARD: Kinds = |kind| kind == Kind::BACKWARD;
    /// Kinds whose matrix output is not an input.
    pub(crate) const OWN_OUTPUT: Kinds = |kind| OUT_OF_PLACE(kind) || BACKWARD(kind);
    pub(crate) const CODES: Kinds = |kind| kind.is_quantized() && EVERY_STAGE(kind);
    /// Kinds with a sum of parts.
    pub(crate) const PARTS: Kinds = Kind::has_parts;
    /// Kinds with gradients as f32 sums.
    pub(crate) const SUMS: Kinds = |kind| kind.calls == Calls::Sums && EVERY_STAGE(kind);
    pub(crate) const GATED: Kinds = |kind| kind.gate().is_some();
    pub(crate) const GATED_FORWARD: Kinds = |kind| kind.has_forward() && GATED(kind);
    pub(crate) const GATED_BACKWARD: Kinds = |kind| !kind.has_forward() && GATED(kind);
    /// Forward kinds with a gate after the norm.
    pub(crate) const GATE_AFTER: Kinds = |kind| GATED_FORWARD(kind) && kind.gate() == Some(Slot::After);
    pub(crate) const GATE_BEFORE: Kinds = |kind| GATED_FORWARD(kind) && kind.gate() == Some(Slot::Before);
    pub(crate) const BACKWARD_AFTER: Kinds = |kind| GATED_BACKWARD(kind) && kind.gate() == Some(Slot::After);
    pub(crate) const BACKWARD_BEFORE: Kinds = |kind| GATED_BACKWARD(kind) && kind.gate() == Some(Slot::Before);
    /// Kinds that have cases with groups of columns.
    pub(crate) const WITH_COLUMNS: Kinds = |kind| !PARTS(kind) && !AFTER(kind);
    pub(crate) const FORWARD_COLUMNS: Kinds = |kind| WITH_COLUMNS(kind) && kind.has_forward();
    pub(crate) const BACKWARD_COLUMNS: Kinds = |kind| WITH_COLUMNS(kind) && !kind.has_forward();
    /// Forward kinds with small cases of a weight before the norm.
    pub(crate) const WEIGHT_FIRST: Kinds =
        |kind| RSTD_FIRST(kind) && !AFTER(kind) && !PARTS(kind) && kind.gate() != Some(Slot::Before);
    pub(crate) const WEIGHT_FIRST_BACKWARD: Kinds = |kind| !kind.has_forward() && kind.gate() != Some(Slot::Before);
    /// Kinds with small cases that round rstd.
    pub(crate) const RSTD_FIRST: Kinds = |kind| kind.direction == Direction::Forward;
    /// Kinds of a single forward or backward call that have casts.
    pub(crate) const FORWARD_CAST: Kinds = |kind| [Kind::FORWARD, Kind::FORWARD_GATE_AFTER].contains(&kind);
    pub(crate) const BACKWARD_CAST: Kinds = |kind| [Kind::BACKWARD, Kind::BACKWARD_GATE_AFTER].contains(&kind);
    // Cases with a sum of parts have no groups of rows.
    pub(crate) const EVERY_WITH_GROUPS: Kinds = |kind| FLOATS(kind) && !PARTS(kind);
}

/// Declares a list of bugs: variant, name, norms, kinds, description.
macro_rules! bugs {
    ($(#[$doc:meta])* $list:ident: $($variant:ident $name:literal $norms:ident $kinds:ident $description:literal;)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $list {
            $(#[doc = concat!("`", $name, "`: ", $description, ".")] $variant,)*
        }

        impl $crate::selftest::planted::BugList for $list {
            const LIST: &'static str = stringify!($list);
            const EACH: &'static [Self] = &[$($list::$variant,)*];
            const BUGS: &'static [$crate::selftest::planted::Bug] = &[$($crate::selftest::planted::Bug {
                name: $name,
                description: $description,
                norms: $crate::selftest::planted::scope::$norms,
                kinds: $crate::selftest::planted::scope::$kinds,
                tensor: None,
                place: (stringify!($list), $list::$variant as usize),
            },)*];

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}
pub(crate) use bugs;

bugs! {
    /// The bugs of each matrix of floats.
    StrideBug:
    Strides "stride_ignored" BOTH FLOATS "the row stride of the tensor is ignored";
    Groups "groups_ignored" BOTH EVERY_WITH_GROUPS "the group stride of the tensor is ignored";
}

impl StrideBug {
    /// The bugs with their tensors.
    pub(crate) fn of_tensors() -> impl Iterator<Item = Bug> {
        let is_float = |tensor: &Tensor| tensor.shape() == TensorShape::Matrix && *tensor != Tensor::Codes;
        let of_tensor = |tensor| StrideBug::BUGS.iter().map(move |bug| Bug { tensor: Some(tensor), ..*bug });
        Tensor::ALL.into_iter().filter(is_float).flat_map(of_tensor)
    }
}

bugs! {
    /// The bugs of a norm without pieces, and of its memory.
    NormBug:
    // The statistics of a row.
    EpsOutside "eps_outside" BOTH EVERY_FORWARD "rstd is 1 / (sqrt(var) + eps)";
    EpsMissing "eps_missing" BOTH EVERY_FORWARD "eps is not added";
    EpsBeforeDiv "eps_before_div" BOTH FORWARD "eps is added to the sum, before the division by cols";
    EpsAfter "eps_after" BOTH FORWARD "eps is added to rstd";
    EpsMax "eps_max" BOTH FORWARD "max(var, eps) is used instead of var + eps";
    EpsDefault "eps_default" BOTH FORWARD "eps is always 1e-5";
    EpsDtype "eps_dtype" BOTH FORWARD "eps is rounded to the 16-bit activation dtype";
    NMinusOne "n_minus_1" BOTH FORWARD "sums are divided by cols - 1";
    NPadded8 "n_padded8" BOTH FORWARD "sums are divided by cols rounded up to 8";
    NPow2 "n_pow2" BOTH FORWARD "sums are divided by the next power of two";
    DropLastCol "drop_last_col" BOTH EVERY_FORWARD "the statistics miss the last column";
    DropTail8 "drop_tail8" BOTH FORWARD "the statistics miss the tail of cols mod 8";
    DupFirstCol "dup_first_col" BOTH FORWARD "the statistics count the first column twice";
    WarpLost "warp_lost" BOTH FORWARD "32 columns of row 0 never reach the sum of squares";
    SqLowacc "sq_lowacc" BOTH FORWARD "squares are accumulated in 16 bits";
    SqF16 "sq_f16" BOTH FORWARD "squares are formed in 16 bits";
    MeanLowacc "mean_lowacc" LAYER FORWARD "the mean is accumulated in 16 bits";
    MeanUncorrected "mean_uncorrected" LAYER FORWARD "the mean is a plain sum, not corrected by the deviations from it";
    Onepass "onepass" LAYER FORWARD "var is avg(x^2) - mean^2";
    Rsqrt12 "rsqrt12" BOTH FORWARD "rstd is a 12-bit estimate";
    RsqrtF16 "rsqrt_f16" BOTH FORWARD "rstd is rounded to f16";
    RsqrtStore "rsqrt_store" BOTH EVERY_FORWARD "rstd is kept in 16 bits";
    RowOff "row_off" BOTH FORWARD "the last row uses the rstd of its neighbour";
    NanLeak "nan_leak" BOTH EVERY "an accumulator is cleared with a multiplication by zero";

    // From the statistics to y.
    CastLlama "cast_llama" BOTH FORWARD "x_hat is rounded to 16 bits before the weight, against cast_order";
    CastOrderIgnored "cast_order_ignored" BOTH FORWARD "x_hat is not rounded before the weight, against cast_order";
    RtzStore "rtz_store" BOTH EVERY "16-bit stores truncate";
    DoubleRound "double_round" BOTH EVERY "stores round to another 16-bit dtype first";
    SubnormalFlush "subnormal_flush" BOTH EVERY "subnormal results become zero at the store";
    NanSwallowed "nan_swallowed" BOTH EVERY "NaN becomes zero at the store";
    WShift "w_shift" BOTH EVERY_STAGE "the weight of column i is that of column i - 1";
    WTail "w_tail" BOTH EVERY "the tail of cols mod 8 uses the first weights";
    WeightBiasSwapped "weight_bias_swapped" BOTH FORWARD "weight and bias are exchanged";
    OffsetMissing "offset_missing" BOTH EVERY_STAGE "weight_offset is not added";
    OffsetDtype "offset_dtype" BOTH EVERY "weight_offset is added in the 16-bit weight dtype";
    BiasBeforeW "bias_before_w" BOTH FORWARD "bias is added before the weight multiplies";
    BiasMissing "bias_missing" BOTH EVERY_FORWARD "bias is not added";

    // Saved statistics.
    MeanStore16 "mean_store16" LAYER FORWARD "the saved mean is rounded to 16 bits";
    RstdStore16 "rstd_store16" BOTH FORWARD "the saved rstd is rounded to 16 bits, but not the rstd that y uses";
    RstdIsVariance "rstd_is_variance" BOTH FORWARD "the saved rstd is the variance";
    RstdOfOtherRow "rstd_of_other_row" BOTH FORWARD "the saved rstd is that of the previous row";
    RstdMissing "rstd_missing" BOTH FORWARD "rstd is never written";

    // Memory: writes and reads at wrong places.
    ResOutMissing "res_out_missing" BOTH FORWARD "residual_out is never written";
    SkipLastColWrite "skip_last_col_write" BOTH EVERY "the last column of the output is never written";
    SkipLastRowWrite "skip_last_row_write" BOTH EVERY "the last row of the output is never written";
    GapOverwritten "gap_overwritten" BOTH EVERY "the store of a row runs one element into the gap after it";
    OutputRead "output_read" BOTH OWN_OUTPUT "the old content of the output, times zero, is added";
    DyStrideOfX "dy_stride_of_x" BOTH BACKWARD "dy is read with the row stride of x";
    ReadAfterWrite "read_after_write" BOTH IN_PLACE "half of a row is normalized after the other half was overwritten";

    // Determinism.
    Nondeterministic "nondeterministic" BOTH EVERY "the order of summation changes from call to call";
    BatchVariant "batch_variant" BOTH EVERY "the order of summation within a row depends on the number of rows";

    // dx.
    NoSecond "no_second" BOTH BACKWARD "dx misses x_hat * avg(wdy * x_hat)";
    NoFirst "no_first" LAYER BACKWARD "dx misses avg(wdy)";
    SecondNoR "second_no_r" BOTH BACKWARD "the second term of dx lacks a factor rstd";
    SecondSign "second_sign" BOTH BACKWARD "the second term of dx has the wrong sign";
    SecondWTwice "second_w_twice" BOTH BACKWARD "the second term of dx has the weight twice";
    DxDirectNoW "dx_direct_no_w" BOTH BACKWARD "the direct term of dx lacks the weight";
    BwdNoOffset "bwd_no_offset" BOTH BACKWARD "the backward pass ignores weight_offset";
    CWithoutW "c_without_w" BOTH BACKWARD "avg(dy * x_hat) is used instead of avg(wdy * x_hat)";
    CLow "c_low" BOTH BACKWARD "avg(wdy * x_hat) is computed from 16-bit wdy";
    CLowacc "c_lowacc" BOTH BACKWARD "avg(wdy * x_hat) is accumulated in 16 bits";
    CUncentered "c_uncentered" LAYER BACKWARD "avg(wdy * x_hat) uses x without its mean removed";
    CDropLast "c_drop_last" BOTH BACKWARD "avg(wdy * x_hat) misses the last column";
    CWarpLost "c_warp_lost" BOTH BACKWARD "avg(wdy * x_hat) misses 32 columns of row 0";
    CSumNotMean "c_sum_not_mean" BOTH BACKWARD "avg(wdy * x_hat) is not divided by cols";
    CStale "c_stale" BOTH BACKWARD "the last row uses the avg(wdy * x_hat) of its neighbour";
    BwdNoEps "bwd_no_eps" BOTH BACKWARD "rstd is computed again, without eps";
    BwdNPadded8 "bwd_n_padded8" BOTH BACKWARD "averages divide by cols rounded up to 8";
    BwdRowOff "bwd_row_off" BOTH BACKWARD "the last row uses the rstd given for its neighbour";

    // dweight and dbias.
    DwLowXhat "dw_low_xhat" BOTH BACKWARD "dweight is summed from 16-bit x_hat";
    DwLowacc "dw_lowacc" BOTH BACKWARD "dweight is accumulated in 16 bits";
    DwLowPartials "dw_low_partials" BOTH BACKWARD "the partial sums of dweight are stored in 16 bits";
    DwUncentered "dw_uncentered" LAYER BACKWARD "dweight uses x without its mean removed";
    DwDropLastRow "dw_drop_last_row" BOTH BACKWARD "dweight misses the last row";
    DwDropTailRows "dw_drop_tail_rows" BOTH BACKWARD "dweight misses the tail of rows mod 8";
    DwDupRow "dw_dup_row" BOTH BACKWARD "dweight counts row 0 twice";
    DwLostOne "dw_lost_one" BOTH BACKWARD "one element's term never reaches dweight";
    DwRowNoR "dw_row_no_r" BOTH BACKWARD "one row enters dweight without its rstd";
    DwBlockLost "dw_block_lost" BOTH BACKWARD "the last of several partial sums of dweight is lost";
    DwAccumulate "dw_accumulate" BOTH BACKWARD "dweight is added to the old content instead of overwriting it";
    DwDbSwapped "dw_db_swapped" BOTH BACKWARD "dweight and dbias are exchanged";
    DbDropLastRow "db_drop_last_row" BOTH BACKWARD "dbias misses the last row";
    DbLowacc "db_lowacc" BOTH BACKWARD "dbias is accumulated in 16 bits";
    WorkspaceNotCleared "workspace_not_cleared" BOTH BACKWARD "partial sums start from the old content of the workspace";
    EmptyNotZeroed "empty_not_zeroed" BOTH BACKWARD "with no rows, dweight and dbias are not written";

    // Gradients as f32 sums.
    SumRounded "sum_rounded" BOTH SUMS "sums are rounded to the weight's dtype before they are stored as f32";
    SumOverwrites "sum_overwrites" BOTH SUMS "sums overwrite the held sums instead of being added to them";
    SumAddedAlways "sum_added_always" BOTH SUMS "sums are added to the old content instead of overwriting it";
    SumHeldTwice "sum_held_twice" BOTH SUMS "the held sum is added twice";
    SumHeldOfNext "sum_held_of_next" BOTH SUMS "the held sum is taken from the next column";
    SumHeldRounded "sum_held_rounded" BOTH SUMS "the held sum is rounded to bf16";
    SumAveraged "sum_averaged" BOTH SUMS "sums are divided by the number of rows";
    SumOfDbiasRounded "sum_of_dbias_rounded" BOTH SUMS "only dbias is rounded to the weight's dtype";
    SumOfDbiasOverwrites "sum_of_dbias_overwrites" BOTH SUMS "only dbias overwrites its held sum";
}
