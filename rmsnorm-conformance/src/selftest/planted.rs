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
    /// What shows where nothing is rounded before: in rows whose rstd is 1.
    Rms,
}

/// The stages that a bug can touch.
#[derive(Clone, Copy)]
enum Stages {
    /// All whose results are floats.
    Every,
    /// Those and forward to codes.
    EveryStage,
    /// Forward, in all forms.
    Forward,
    /// Where a residual is added before the norm.
    Before,
    /// With a y of its own.
    OutOfPlace,
    /// With a sum that does not overwrite the residual.
    SumOutOfPlace,
    InPlace,
    /// Where the residual is added after the norm.
    After,
    Backward,
    /// The stages whose matrix output is no input: all but the in-place form.
    OwnOutput,
    /// Forward, in all forms and to codes.
    EveryForward,
    /// Those where a residual is added before.
    EveryBefore,
    /// Forward to codes.
    Codes,
    /// Of a sum of parts.
    Parts,
    /// Of gradients as sums.
    Sums,
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
    EpsOutside "eps_outside" Both EveryForward "rstd is 1 / (sqrt(var) + eps)";
    EpsMissing "eps_missing" Both EveryForward "eps is not added";
    EpsBeforeDiv "eps_before_div" Both Forward "eps is added to the sum, before the division by cols";
    EpsAfter "eps_after" Both Forward "eps is added to rstd";
    EpsMax "eps_max" Both Forward "max(var, eps) stands for var + eps";
    EpsDefault "eps_default" Both Forward "eps is always 1e-5";
    EpsDtype "eps_dtype" Both Forward "eps is rounded to the 16-bit activation dtype";
    NMinusOne "n_minus_1" Both Forward "sums are divided by cols - 1";
    NPadded8 "n_padded8" Both Forward "sums are divided by cols rounded up to 8";
    NPow2 "n_pow2" Both Forward "sums are divided by the next power of two";
    DropLastCol "drop_last_col" Both EveryForward "the statistics miss the last column";
    DropTail8 "drop_tail8" Both Forward "the statistics miss the tail of cols mod 8";
    DupFirstCol "dup_first_col" Both Forward "the statistics count the first column twice";
    WarpLost "warp_lost" Both Forward "32 columns of row 0 never reach the sum of squares";
    SqLowacc "sq_lowacc" Both Forward "squares are accumulated in 16 bits";
    SqF16 "sq_f16" Both Forward "squares are formed in 16 bits";
    MeanLowacc "mean_lowacc" Layer Forward "the mean is accumulated in 16 bits";
    MeanUncorrected "mean_uncorrected" Layer Forward "the mean is a sum, and not corrected by the deviations from it";
    Onepass "onepass" Layer Forward "var is avg(x^2) - mean^2";
    Rsqrt12 "rsqrt12" Both Forward "rstd is a 12-bit estimate";
    RsqrtF16 "rsqrt_f16" Both Forward "rstd is rounded to f16";
    RsqrtStore "rsqrt_store" Both EveryForward "rstd is kept in 16 bits";
    RowOff "row_off" Both Forward "the last row uses the rstd of its neighbour";
    NanLeak "nan_leak" Both Every "an accumulator is cleared with a multiplication by zero";

    // From the statistics to y.
    CastLlama "cast_llama" Both Forward "x_hat is rounded to 16 bits before the weight, unasked";
    CastOrderIgnored "cast_order_ignored" Both Forward "x_hat is not rounded before the weight, though asked";
    RtzStore "rtz_store" Both Every "16-bit stores truncate";
    DoubleRound "double_round" Both Every "stores round to another 16-bit dtype first";
    SubnormalFlush "subnormal_flush" Both Every "subnormal results become zero at the store";
    NanSwallowed "nan_swallowed" Both Every "NaN becomes zero at the store";
    WShift "w_shift" Both EveryStage "the weight of column i is that of column i - 1";
    WTail "w_tail" Both Every "the tail of cols mod 8 uses the first weights";
    WeightBiasSwapped "weight_bias_swapped" Both Forward "weight and bias are exchanged";
    OffsetMissing "offset_missing" Both EveryStage "weight_offset is not added";
    OffsetDtype "offset_dtype" Both Every "weight_offset is added in the 16-bit weight dtype";
    BiasBeforeW "bias_before_w" Both Forward "bias is added before the weight multiplies";
    BiasMissing "bias_missing" Both EveryForward "bias is not added";

    // The residual stream.
    ResUnrounded "res_unrounded" Both EveryBefore "the norm works on the unrounded sum with the residual";
    ResMissing "res_missing" Both Before "the norm works on x without the residual";
    ResOutBeforeAdd "res_out_before_add" Both Before "residual_out holds x, stored before the addition";
    ResOutMissing "res_out_missing" Both Forward "residual_out is never written";

    // A residual that is added after the norm, and the norm of the sum.
    SumWithoutNorm "sum_without_norm" Both After "residual_out is the residual as it was";
    SumWithoutResidual "sum_without_residual" Both After "residual_out is the norm alone";
    SumOfX "sum_of_x" Both After "x is added to the norm, not the residual";
    SumBeforeNorm "sum_before_norm" Both After "x and the residual are added, and the norm is of that";
    SumOfRounded "sum_of_rounded" Both After "the norm is rounded to 16 bits before it is added";
    SumWithoutBias "sum_without_bias" Both After "the bias is not in the sum";
    SumBiasTwice "sum_bias_twice" Both After "the bias is in the sum twice";
    NextOfUnrounded "next_of_unrounded" Both After "the next norm works on the sum before its rounding";
    NextOfNorm "next_of_norm" Both After "the next norm works on the norm that was added";
    NextOfResidual "next_of_residual" Both After "the next norm works on the residual as it was";
    NextByFirstRstd "next_by_first_rstd" Both After "y is scaled by the rstd of x";
    NextWeightOfFirst "next_weight_of_first" Both After "the next norm has the weight of the first";
    NextWeightMissing "next_weight_missing" Both After "the next norm has no weight";
    NextBiasOfFirst "next_bias_of_first" Both After "the next norm has the bias of the first";
    NextBiasMissing "next_bias_missing" Both After "the next norm has no bias";
    NextOffsetMissing "next_offset_missing" Both After "the next norm's weight has no offset";
    NextEpsMissing "next_eps_missing" Both After "the next norm has no eps";
    NextRstdOfFirst "next_rstd_of_first" Both After "the saved next_rstd is that of x";
    NextRstdMissing "next_rstd_missing" Both After "next_rstd is never written";
    NextMeanOfFirst "next_mean_of_first" Layer After "the saved next_mean is that of x";
    NextCastOrderIgnored "next_cast_order_ignored" Both After "x_hat of the sum is not rounded before the weight, though asked";

    // A sum of parts.
    PartMissing "part_missing" Both Parts "the last part is not added";
    PartTwice "part_twice" Both Parts "the first part is added twice";
    PartsReversed "parts_reversed" Both Parts "parts are added from the last to the first";
    PartsByTree "parts_by_tree" Both Parts "the second half of the parts is added to the first before that has its sum";
    PartsRounded "parts_rounded" Both Parts "the sum of parts is rounded to the activations' dtype before the residual is added";
    PartsEachRounded "parts_each_rounded" Both Parts "the sum is rounded after every part";
    PartsInF64 "parts_in_f64" Both Parts "parts are added in f64";
    ResidualFirst "residual_first" Both Parts "parts are added to the residual";
    ResidualPerPart "residual_per_part" Both Parts "the residual is added with every part";
    ResidualOfLastPart "residual_of_last_part" Both Parts "the residual is not added where there are more than two parts";
    PartsUnrounded "parts_unrounded" Both Parts "the norm works on the sum before its rounding";
    PartsDense "parts_dense" Both Parts "parts are taken to follow without the gaps between their rows";

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
    ResOutStrideIgnored "res_out_stride_ignored" Both SumOutOfPlace "rows of residual_out are taken to be dense";
    DyStrideOfX "dy_stride_of_x" Both Backward "dy is read with the row stride of x";
    DxStrideIgnored "dx_stride_ignored" Both Backward "rows of dx are taken to be dense";
    DresStrideIgnored "dres_stride_ignored" Both Backward "rows of dresidual_out are taken to be dense";
    DresidualStrideIgnored "dresidual_stride_ignored" Both Backward "rows of dresidual are taken to be dense";
    XGroupsIgnored "x_groups_ignored" Both Every "groups of rows of x are taken to follow at the row stride";
    YGroupsIgnored "y_groups_ignored" Both OutOfPlace "groups of rows of y are taken to follow at the row stride";
    ResGroupsIgnored "res_groups_ignored" Both Forward "groups of rows of residual are taken to follow at the row stride";
    ResOutGroupsIgnored "res_out_groups_ignored" Both SumOutOfPlace "groups of rows of residual_out are taken to follow at the row stride";
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

    // Gradients as sums.
    SumRounded "sum_rounded" Both Sums "sums are rounded to the weight's dtype on their way";
    SumOverwrites "sum_overwrites" Both Sums "sums overwrite what they are to be added to";
    SumAddedAlways "sum_added_always" Both Sums "sums are added to what was there, though they are to overwrite it";
    SumHeldTwice "sum_held_twice" Both Sums "what was there is added twice";
    SumHeldOfNext "sum_held_of_next" Both Sums "what was there is taken from the next column";
    SumHeldRounded "sum_held_rounded" Both Sums "what was there goes through bf16";
    SumAveraged "sum_averaged" Both Sums "sums are divided by the number of rows";
    SumOfDbiasRounded "sum_of_dbias_rounded" Both Sums "dbias alone is rounded to the weight's dtype";
    SumOfDbiasOverwrites "sum_of_dbias_overwrites" Both Sums "dbias alone overwrites what it is to be added to";

    // The largest magnitude.
    AmaxWithoutAbs "amax_without_abs" Both Codes "the largest value is taken, not the largest magnitude";
    AmaxOfXHat "amax_of_x_hat" Both Codes "the largest magnitude is taken before the weight";
    AmaxBeforeBias "amax_before_bias" Both Codes "the largest magnitude is taken before the bias";
    AmaxDropsLastCol "amax_drops_last_col" Both Codes "the largest magnitude misses the last column";
    AmaxDropsTail8 "amax_drops_tail8" Both Codes "the largest magnitude misses the tail mod 8";
    AmaxDropsChunk "amax_drops_chunk" Both Codes "the largest magnitude misses 32 columns";
    AmaxDropsLastRow "amax_drops_last_row" Both Codes "the tensor's largest magnitude misses the last row";
    AmaxOfHalfBlock "amax_of_half_block" Both Codes "half of a set counts for its largest magnitude";
    AmaxNotCleared "amax_not_cleared" Both Codes "amax keeps what was there, or does not where it should";
    AmaxOfQuotient "amax_of_quotient" Both Codes "amax is that of the results over their scale";
    AmaxOfClamped "amax_of_clamped" Both Codes "amax is that of what has saturated";
    AmaxDropsNan "amax_drops_nan" Both Codes "the largest magnitude passes over NaN";
    AmaxOfRounded "amax_of_rounded" Both Codes "the largest magnitude is taken of results rounded to 16 bits";
    AmaxOfF32 "amax_of_f32" Both Codes "the largest magnitude is taken before the rounding that was asked for";

    // Scales.
    ScaleInverted "scale_inverted" Both Codes "the stored scale is the reciprocal";
    Largest240 "largest_240" Both Codes "scales are made for a largest code of 240";
    Largest256 "largest_256" Both Codes "scales are made for a largest code of 256";
    ScaleZero "scale_zero" Both Codes "the scale of zeros is 0";
    ScaleOfOtherRow "scale_of_other_row" Both Codes "the last row's codes are made with the scale before";
    ScalesShifted "scales_shifted" Both Codes "scales are stored one place off";
    ScalesTransposed "scales_transposed" Both Codes "scales lie column by column in a row-major buffer";
    ScaleOfEightRows "scale_of_eight_rows" Both Codes "eight rows share the scale of the first";
    FloorIgnored "floor_ignored" Both Codes "the floor of amax is ignored";
    CeilingIgnored "ceiling_ignored" Both Codes "the ceiling of amax is ignored";
    CeilingOfScale "ceiling_of_scale" Both Codes "the ceiling is applied to the scale";
    CodesByUnroundedScale "codes_by_unrounded_scale" Both Codes "codes are made with the scale before its rounding";
    CodesByOtherBlock "codes_by_other_block" Both Codes "codes are made with the neighbouring block's scale";
    PowerDown "power_down" Both Codes "the power of two is rounded down";
    PowerNearest "power_nearest" Both Codes "the power of two is the nearest";
    PowerOneUp "power_one_up" Both Codes "the power of two is one too large";
    PowerOneDown "power_one_down" Both Codes "the power of two is one too small";
    FloorForUp "floor_for_up" Both Codes "exponents decide where the power is to be rounded up";
    UpForFloor "up_for_floor" Both Codes "the power is rounded up where exponents are to decide";
    OcpCeil "ocp_ceil" Both Codes "the power is the next above amax, less the exponent of the largest code";
    PowerUpAlways "power_up_always" Both Codes "the power is one too large where amax / Q is a power itself";
    PowerLowBits "power_low_bits" Rms Codes "the power of two passes over the lowest bits of amax";
    ScaleThroughBf16 "scale_through_bf16" Both Codes "amax goes through bf16";
    BlockBoundaryLate "block_boundary_late" Both Codes "a block's first column counts for the block before";
    PartialBlockByOther "partial_block_by_other" Both Codes "the last, partial block has the scale of the one before";
    BlocksAlongRows "blocks_along_rows" Both Codes "blocks lie along the rows";
    PaddingNotZeroed "padding_not_zeroed" Both Codes "what is between scales is not written";
    SwizzleExchanged "swizzle_exchanged" Both Codes "rows and groups are exchanged within a tile";
    PackedReversed "packed_reversed" Both Codes "four scales of a word are in reverse";

    // Codes.
    TimesScale "times_scale" Both Codes "results are multiplied with the scale";
    Reciprocal12 "reciprocal12" Both Codes "the reciprocal of the scale has 12 bits";
    CodesTruncated "codes_truncated" Both Codes "codes are truncated";
    TiesAway "ties_away" Both Codes "ties go away from zero";
    TiesAwayF32 "ties_away_f32" Rms Codes "ties go away from zero where results of f32 are not rounded first";
    TiesToZero "ties_to_zero" Both Codes "ties go to zero";
    QuotientThroughBf16 "quotient_through_bf16" Both Codes "the quotient goes through bf16";
    QuotientThroughF16 "quotient_through_f16" Both Codes "the quotient goes through f16";
    CodesOfRounded "codes_of_rounded" Both Codes "codes are made of results rounded to 16 bits";
    CodesOfF32 "codes_of_f32" Both Codes "codes are made before the rounding that was asked for";
    Fnuz "fnuz" Both Codes "codes have the bias of another format";
    OverflowToNan "overflow_to_nan" Both Codes "what saturates is NaN";
    OverflowToInfinity "overflow_to_infinity" Both Codes "what saturates is infinite";
    E5m2At448 "e5m2_at_448" Both Codes "E5M2 saturates where E4M3 does";
    NanToLargest "nan_to_largest" Both Codes "NaN becomes the largest code";
    SubnormalCodesFlushed "subnormal_codes_flushed" Both Codes "subnormal codes are zero";
    SignLost "sign_lost" Both Codes "codes have no sign";
    Int8Wraps "int8_wraps" Both Codes "integers wrap";
    Int8Truncates "int8_truncates" Both Codes "integers are truncated";
    PairsSwapped "pairs_swapped" Both Codes "two neighbouring codes are exchanged";
    CodesLastRowMissing "codes_last_row_missing" Both Codes "the last row of codes is never written";
    CodesLastColMissing "codes_last_col_missing" Both Codes "the last column of codes is never written";
    TransposedReshaped "transposed_reshaped" Both Codes "codes_t is reshaped, not transposed";
    TransposedStrideIgnored "transposed_stride_ignored" Both Codes "codes_t is taken to be dense";
    TransposedTileMissing "transposed_tile_missing" Both Codes "the last tile of codes_t is never written";
    TransposedRoundedAgain "transposed_rounded_again" Both Codes "codes_t is made anew, with another rounding";
    TransposedRowsSwapped "transposed_rows_swapped" Both Codes "two rows are exchanged in codes_t";
    ColumnwiseOfCodes "columnwise_of_codes" Both Codes "the copy along columns is made of the values of codes";
    ColumnwiseRounded "columnwise_rounded" Both Codes "the copy along columns is made of results rounded to 16 bits";
    ColumnwiseByFirstBlock "columnwise_by_first_block" Both Codes "a column's second block has the scale of its first";
    ColumnwiseReshaped "columnwise_reshaped" Both Codes "the copy along columns is reshaped, not transposed";
    ColumnwiseStrideIgnored "columnwise_stride_ignored" Both Codes "the copy along columns is taken to be dense";
    ColumnwiseTailMissing "columnwise_tail_missing" Both Codes "the last, partial block of rows has no codes along columns";
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
            Norms::Rms => matches!(norm, Norm::Rms),
        };
        let stage_fits = match stages {
            Stages::Every => !matches!(kind, Kind::QuantizedForward),
            Stages::EveryStage => true,
            Stages::Forward => {
                matches!(kind, Kind::Forward | Kind::ForwardInPlace | Kind::ForwardParts) || kind.is_after()
            }
            Stages::Parts => matches!(kind, Kind::ForwardParts),
            Stages::Sums => matches!(kind, Kind::BackwardSums),
            Stages::Before => matches!(kind, Kind::Forward | Kind::ForwardInPlace),
            Stages::OutOfPlace => matches!(kind, Kind::Forward | Kind::ForwardParts) || kind.is_after(),
            Stages::SumOutOfPlace => matches!(kind, Kind::Forward | Kind::ForwardAfter | Kind::ForwardParts),
            Stages::InPlace => matches!(kind, Kind::ForwardInPlace),
            Stages::After => kind.is_after(),
            Stages::Backward => matches!(kind, Kind::Backward),
            Stages::OwnOutput => matches!(kind, Kind::Forward | Kind::Backward | Kind::ForwardParts) || kind.is_after(),
            Stages::EveryForward => kind.has_forward(),
            Stages::EveryBefore => matches!(kind, Kind::Forward | Kind::ForwardInPlace | Kind::QuantizedForward),
            Stages::Codes => matches!(kind, Kind::QuantizedForward),
        };
        // Parts lie at one distance from each other, and their cases have no groups of rows.
        let has_no_case = self.is_of_groups() && matches!(kind, Kind::ForwardParts);
        norm_fits && stage_fits && !has_no_case
    }

    const fn is_of_groups(self) -> bool {
        matches!(self, Bug::XGroupsIgnored | Bug::YGroupsIgnored | Bug::ResGroupsIgnored | Bug::ResOutGroupsIgnored)
    }
}

impl fmt::Display for Bug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
