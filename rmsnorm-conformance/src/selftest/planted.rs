//! The planted bugs: every way in which the simulated backend can be wrong, one at a time.
//!
//! A suite proves something only if it can fail. So before each run it is pointed at a
//! [`SimulatedBackend`](crate::selftest::simulate::SimulatedBackend) with each bug of this list in turn and must reject them
//! all. The bugs are ones that real kernels had: a wrong formula, a sum that misses its tail, a 16-bit accumulator,
//! a row that was never written, a result that depends on the size of the batch.

use std::fmt;

use rmsnorm_spec::Norm;

use crate::case::Kind;

/// The kinds of norm that a bug can touch.
#[derive(Clone, Copy)]
enum Norms {
    Both,
    Layer,
}

/// The stages that a bug can touch.
#[derive(Clone, Copy)]
enum Stages {
    Every,
    /// Forward, in both forms.
    Forward,
    /// Forward with an output of its own.
    OutOfPlace,
    InPlace,
    Backward,
    /// The stages whose matrix output is no input: all but the in-place form.
    OwnOutput,
}

/// Declares the enum and its tables from one list: variant, name, norms, stages, description.
macro_rules! bugs {
    ($($variant:ident $name:literal $norms:ident $stages:ident $description:literal;)*) => {
        /// One planted bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Bug {
            $(#[doc = concat!("`", $name, "`: ", $description, ".")] $variant,)*
        }

        impl Bug {
            /// Every bug, in the order of the list.
            pub const ALL: &[Bug] = &[$(Bug::$variant,)*];

            /// The name used in the self-test's table, in snake case.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Bug::$variant => $name,)*
                }
            }

            /// What is wrong, in one clause.
            pub const fn description(self) -> &'static str {
                match self {
                    $(Bug::$variant => $description,)*
                }
            }

            const fn scope(self) -> (Norms, Stages) {
                match self {
                    $(Bug::$variant => (Norms::$norms, Stages::$stages),)*
                }
            }
        }
    };
}

bugs! {
    // The statistics of a row.
    EpsOutside "eps_outside" Both Forward "rstd is 1 / (sqrt(var) + eps)";
    EpsMissing "eps_missing" Both Forward "eps is not added";
    EpsBeforeDiv "eps_before_div" Both Forward "eps is added to the sum, before the division by cols";
    EpsAfter "eps_after" Both Forward "eps is added to rstd";
    EpsMax "eps_max" Both Forward "max(var, eps) stands for var + eps";
    EpsDefault "eps_default" Both Forward "eps is always 1e-5";
    EpsDtype "eps_dtype" Both Forward "eps is rounded to the 16-bit activation dtype";
    NMinusOne "n_minus_1" Both Forward "sums are divided by cols - 1";
    NPadded8 "n_padded8" Both Forward "sums are divided by cols rounded up to 8";
    NPow2 "n_pow2" Both Forward "sums are divided by the next power of two";
    DropLastCol "drop_last_col" Both Forward "the statistics miss the last column";
    DropTail8 "drop_tail8" Both Forward "the statistics miss the tail of cols mod 8";
    DupFirstCol "dup_first_col" Both Forward "the statistics count the first column twice";
    WarpLost "warp_lost" Both Forward "32 columns of row 0 never reach the sum of squares";
    SqLowacc "sq_lowacc" Both Forward "squares are accumulated in 16 bits";
    SqF16 "sq_f16" Both Forward "squares are formed in 16 bits";
    MeanLowacc "mean_lowacc" Layer Forward "the mean is accumulated in 16 bits";
    Onepass "onepass" Layer Forward "var is avg(x^2) - mean^2";
    Rsqrt12 "rsqrt12" Both Forward "rstd is a 12-bit estimate";
    RsqrtF16 "rsqrt_f16" Both Forward "rstd is rounded to f16";
    RsqrtStore "rsqrt_store" Both Forward "rstd is kept in 16 bits";
    RowOff "row_off" Both Forward "the last row uses the rstd of its neighbour";
    NanLeak "nan_leak" Both Every "an accumulator is cleared with a multiplication by zero";

    // From the statistics to y.
    CastLlama "cast_llama" Both Forward "x_hat is rounded to 16 bits before the weight, unasked";
    CastOrderIgnored "cast_order_ignored" Both Forward "x_hat is not rounded before the weight, though asked";
    RtzStore "rtz_store" Both Every "16-bit stores truncate";
    DoubleRound "double_round" Both Every "stores round to another 16-bit dtype first";
    SubnormalFlush "subnormal_flush" Both Every "subnormal results become zero at the store";
    NanSwallowed "nan_swallowed" Both Every "NaN becomes zero at the store";
    WShift "w_shift" Both Every "the weight of column i is that of column i - 1";
    WTail "w_tail" Both Every "the tail of cols mod 8 uses the first weights";
    WeightBiasSwapped "weight_bias_swapped" Both Forward "weight and bias are exchanged";
    OffsetMissing "offset_missing" Both Every "weight_offset is not added";
    OffsetDtype "offset_dtype" Both Every "weight_offset is added in the 16-bit weight dtype";
    BiasBeforeW "bias_before_w" Both Forward "bias is added before the weight multiplies";
    BiasMissing "bias_missing" Both Forward "bias is not added";

    // The residual stream.
    ResUnrounded "res_unrounded" Both Forward "the norm works on the unrounded sum with the residual";
    ResMissing "res_missing" Both Forward "the norm works on x without the residual";
    ResOutBeforeAdd "res_out_before_add" Both Forward "residual_out holds x, stored before the addition";
    ResOutMissing "res_out_missing" Both Forward "residual_out is never written";

    // Saved statistics.
    MeanStore16 "mean_store16" Layer Forward "the saved mean is rounded to 16 bits";
    RstdStore16 "rstd_store16" Both Forward "the saved rstd is rounded to 16 bits, the one in use is not";
    RstdIsVariance "rstd_is_variance" Both Forward "the saved rstd is the variance";
    RstdOfOtherRow "rstd_of_other_row" Both Forward "the saved rstd is that of the row before";
    RstdMissing "rstd_missing" Both Forward "rstd is never written";

    // Memory: what is written where, and what is read.
    SkipLastColWrite "skip_last_col_write" Both Every "the last column of the output is never written";
    SkipLastRowWrite "skip_last_row_write" Both Every "the last row of the output is never written";
    GapOverwritten "gap_overwritten" Both Every "the store of a row runs one element into the gap after it";
    OutputRead "output_read" Both OwnOutput "what the output held before is added, times zero";
    XStrideIgnored "x_stride_ignored" Both Every "rows of x are taken to be dense";
    YStrideIgnored "y_stride_ignored" Both OutOfPlace "rows of y are taken to be dense";
    ResStrideIgnored "res_stride_ignored" Both Forward "rows of residual are taken to be dense";
    ResOutStrideIgnored "res_out_stride_ignored" Both OutOfPlace "rows of residual_out are taken to be dense";
    DyStrideOfX "dy_stride_of_x" Both Backward "dy is read with the row stride of x";
    DxStrideIgnored "dx_stride_ignored" Both Backward "rows of dx are taken to be dense";
    DresStrideIgnored "dres_stride_ignored" Both Backward "rows of dresidual_out are taken to be dense";
    DresidualStrideIgnored "dresidual_stride_ignored" Both Backward "rows of dresidual are taken to be dense";
    XGroupsIgnored "x_groups_ignored" Both Every "groups of rows of x are taken to follow at the row stride";
    YGroupsIgnored "y_groups_ignored" Both OutOfPlace "groups of rows of y are taken to follow at the row stride";
    ResGroupsIgnored "res_groups_ignored" Both Forward "groups of rows of residual are taken to follow at the row stride";
    ResOutGroupsIgnored "res_out_groups_ignored" Both OutOfPlace "groups of rows of residual_out are taken to follow at the row stride";
    DyGroupsIgnored "dy_groups_ignored" Both Backward "groups of rows of dy are taken to follow at the row stride";
    DxGroupsIgnored "dx_groups_ignored" Both Backward "groups of rows of dx are taken to follow at the row stride";
    DresGroupsIgnored "dres_groups_ignored" Both Backward "groups of rows of dresidual_out are taken to follow at the row stride";
    DresidualGroupsIgnored "dresidual_groups_ignored" Both Backward "groups of rows of dresidual are taken to follow at the row stride";
    ReadAfterWrite "read_after_write" Both InPlace "half of a row is normalized after the other half was overwritten";

    // Determinism.
    Nondeterministic "nondeterministic" Both Every "the order of summation changes from call to call";
    BatchVariant "batch_variant" Both Every "the order of summation within a row depends on rows";

    // dx.
    NoSecond "no_second" Both Backward "dx misses x_hat * avg(wdy * x_hat)";
    NoFirst "no_first" Layer Backward "dx misses avg(wdy)";
    SecondNoR "second_no_r" Both Backward "the second term of dx lacks a factor rstd";
    SecondSign "second_sign" Both Backward "the second term of dx has the wrong sign";
    SecondWTwice "second_w_twice" Both Backward "the second term of dx has the weight twice";
    DxDirectNoW "dx_direct_no_w" Both Backward "the direct term of dx lacks the weight";
    BwdNoOffset "bwd_no_offset" Both Backward "the backward pass alone ignores weight_offset";
    CWithoutW "c_without_w" Both Backward "avg(wdy * x_hat) is taken of dy * x_hat";
    CLow "c_low" Both Backward "avg(wdy * x_hat) is taken of 16-bit wdy";
    CLowacc "c_lowacc" Both Backward "avg(wdy * x_hat) is accumulated in 16 bits";
    CUncentered "c_uncentered" Layer Backward "avg(wdy * x_hat) uses x without its mean removed";
    CDropLast "c_drop_last" Both Backward "avg(wdy * x_hat) misses the last column";
    CWarpLost "c_warp_lost" Both Backward "avg(wdy * x_hat) misses 32 columns of row 0";
    CSumNotMean "c_sum_not_mean" Both Backward "avg(wdy * x_hat) is not divided by cols";
    CStale "c_stale" Both Backward "the last row uses the avg(wdy * x_hat) of its neighbour";
    BwdNoEps "bwd_no_eps" Both Backward "rstd is computed again, without eps";
    BwdNPadded8 "bwd_n_padded8" Both Backward "averages divide by cols rounded up to 8";
    BwdRowOff "bwd_row_off" Both Backward "the last row uses the rstd given for its neighbour";
    DresMissing "dres_missing" Both Backward "dresidual_out is not added";
    DresBeforeR "dres_before_r" Both Backward "dresidual_out is multiplied by rstd";
    DresAfterStore "dres_after_store" Both Backward "dx is rounded before dresidual_out is added";
    DresidualOfDx "dresidual_of_dx" Both Backward "dresidual is dx after its rounding to 16 bits";

    // dweight and dbias.
    DwLowXhat "dw_low_xhat" Both Backward "dweight is summed from 16-bit x_hat";
    DwLowacc "dw_lowacc" Both Backward "dweight is accumulated in 16 bits";
    DwLowPartials "dw_low_partials" Both Backward "the partial sums of dweight are stored in 16 bits";
    DwUncentered "dw_uncentered" Layer Backward "dweight uses x without its mean removed";
    DwDropLastRow "dw_drop_last_row" Both Backward "dweight misses the last row";
    DwDropTailRows "dw_drop_tail_rows" Both Backward "dweight misses the tail of rows mod 8";
    DwDupRow "dw_dup_row" Both Backward "dweight counts row 0 twice";
    DwLostOne "dw_lost_one" Both Backward "one element's term never reaches dweight";
    DwRowNoR "dw_row_no_r" Both Backward "one row enters dweight without its rstd";
    DwBlockLost "dw_block_lost" Both Backward "the last of several partial sums of dweight is lost";
    DwAccumulate "dw_accumulate" Both Backward "dweight is added to instead of overwritten";
    DwDbSwapped "dw_db_swapped" Both Backward "dweight and dbias are exchanged";
    DbDropLastRow "db_drop_last_row" Both Backward "dbias misses the last row";
    DbLowacc "db_lowacc" Both Backward "dbias is accumulated in 16 bits";
    WorkspaceNotCleared "workspace_not_cleared" Both Backward "partial sums start from what the workspace held";
    EmptyNotZeroed "empty_not_zeroed" Both Backward "with no rows, dweight and dbias are not written";
}

impl Bug {
    /// Whether some call of this norm and stage has a wrong result because of the bug.
    ///
    /// Which call it is, is for the suite to find out: many bugs need a bias, a residual, a 16-bit dtype, a row stride
    /// or several rows before they show.
    pub const fn applies_to(self, norm: Norm, kind: Kind) -> bool {
        let (norms, stages) = self.scope();
        let norm_fits = match norms {
            Norms::Both => true,
            Norms::Layer => matches!(norm, Norm::Layer),
        };
        let stage_fits = match stages {
            Stages::Every => true,
            Stages::Forward => matches!(kind, Kind::Forward | Kind::ForwardInPlace),
            Stages::OutOfPlace => matches!(kind, Kind::Forward),
            Stages::InPlace => matches!(kind, Kind::ForwardInPlace),
            Stages::Backward => matches!(kind, Kind::Backward),
            Stages::OwnOutput => matches!(kind, Kind::Forward | Kind::Backward),
        };
        norm_fits && stage_fits
    }
}

impl fmt::Display for Bug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
