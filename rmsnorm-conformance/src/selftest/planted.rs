//! The planted bugs: every way in which the simulated backend can be wrong, one at a time.
//!
//! A suite proves something only if it can fail. So before each run it is pointed at a
//! [`SimulatedBackend`](crate::selftest::simulate::SimulatedBackend) with each bug of this list in turn and must reject them
//! all. The bugs are ones that real kernels had: a wrong formula, a sum that misses its tail, a 16-bit accumulator,
//! a row that was never written, a result that depends on the size of the batch.
//!
//! A bug is planted in calls of some norms and kinds, which its line names.

use std::fmt;

use rmsnorm_spec::Norm;

use crate::case::Kind;

// The norms that a bug can touch.
const BOTH: &[Norm] = &Norm::ALL;
const LAYER: &[Norm] = &[Norm::Layer];
/// What shows where nothing is rounded before: in rows whose rstd is 1.
const RMS: &[Norm] = &[Norm::Rms];

// The calls that a bug can touch.
const EVERY_STAGE: &[Kind] = &Kind::CALLS;
/// All whose results are floats.
const EVERY: &[Kind] = &[
    Kind::Forward,
    Kind::ForwardInPlace,
    Kind::Backward,
    Kind::ForwardAfter,
    Kind::ForwardAfterInPlace,
    Kind::ForwardParts,
    Kind::BackwardSums,
];
const EVERY_FORWARD: &[Kind] = &[
    Kind::Forward,
    Kind::ForwardInPlace,
    Kind::QuantizedForward,
    Kind::ForwardAfter,
    Kind::ForwardAfterInPlace,
    Kind::ForwardParts,
];
/// Forward, in all forms whose results are floats.
const FORWARD: &[Kind] =
    &[Kind::Forward, Kind::ForwardInPlace, Kind::ForwardAfter, Kind::ForwardAfterInPlace, Kind::ForwardParts];
/// Where a residual is added before the norm.
const BEFORE: &[Kind] = &[Kind::Forward, Kind::ForwardInPlace];
const EVERY_BEFORE: &[Kind] = &[Kind::Forward, Kind::ForwardInPlace, Kind::QuantizedForward];
/// With a y of its own.
const OUT_OF_PLACE: &[Kind] = &[Kind::Forward, Kind::ForwardAfter, Kind::ForwardAfterInPlace, Kind::ForwardParts];
/// With a sum that does not overwrite the residual.
const SUM_OUT_OF_PLACE: &[Kind] = &[Kind::Forward, Kind::ForwardAfter, Kind::ForwardParts];
const IN_PLACE: &[Kind] = &[Kind::ForwardInPlace];
/// Where the residual is added after the norm.
const AFTER: &[Kind] = &[Kind::ForwardAfter, Kind::ForwardAfterInPlace];
const BACKWARD: &[Kind] = &[Kind::Backward];
/// Those whose matrix output is no input.
const OWN_OUTPUT: &[Kind] =
    &[Kind::Forward, Kind::Backward, Kind::ForwardAfter, Kind::ForwardAfterInPlace, Kind::ForwardParts];
const CODES: &[Kind] = &[Kind::QuantizedForward];
/// Of a sum of parts.
const PARTS: &[Kind] = &[Kind::ForwardParts];
/// Of gradients as sums.
const SUMS: &[Kind] = &[Kind::BackwardSums];

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

            const fn scope(self) -> (&'static [Norm], &'static [Kind]) {
                match self {
                    $(Bug::$variant => ($norms, $stages),)*
                }
            }
        }
    };
}

bugs! {
    // The statistics of a row.
    EpsOutside "eps_outside" BOTH EVERY_FORWARD "rstd is 1 / (sqrt(var) + eps)";
    EpsMissing "eps_missing" BOTH EVERY_FORWARD "eps is not added";
    EpsBeforeDiv "eps_before_div" BOTH FORWARD "eps is added to the sum, before the division by cols";
    EpsAfter "eps_after" BOTH FORWARD "eps is added to rstd";
    EpsMax "eps_max" BOTH FORWARD "max(var, eps) stands for var + eps";
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
    MeanUncorrected "mean_uncorrected" LAYER FORWARD "the mean is a sum, and not corrected by the deviations from it";
    Onepass "onepass" LAYER FORWARD "var is avg(x^2) - mean^2";
    Rsqrt12 "rsqrt12" BOTH FORWARD "rstd is a 12-bit estimate";
    RsqrtF16 "rsqrt_f16" BOTH FORWARD "rstd is rounded to f16";
    RsqrtStore "rsqrt_store" BOTH EVERY_FORWARD "rstd is kept in 16 bits";
    RowOff "row_off" BOTH FORWARD "the last row uses the rstd of its neighbour";
    NanLeak "nan_leak" BOTH EVERY "an accumulator is cleared with a multiplication by zero";

    // From the statistics to y.
    CastLlama "cast_llama" BOTH FORWARD "x_hat is rounded to 16 bits before the weight, unasked";
    CastOrderIgnored "cast_order_ignored" BOTH FORWARD "x_hat is not rounded before the weight, though asked";
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

    // The residual stream.
    ResUnrounded "res_unrounded" BOTH EVERY_BEFORE "the norm works on the unrounded sum with the residual";
    ResMissing "res_missing" BOTH BEFORE "the norm works on x without the residual";
    ResOutBeforeAdd "res_out_before_add" BOTH BEFORE "residual_out holds x, stored before the addition";
    ResOutMissing "res_out_missing" BOTH FORWARD "residual_out is never written";

    // A residual that is added after the norm, and the norm of the sum.
    SumWithoutNorm "sum_without_norm" BOTH AFTER "residual_out is the residual as it was";
    SumWithoutResidual "sum_without_residual" BOTH AFTER "residual_out is the norm alone";
    SumOfX "sum_of_x" BOTH AFTER "x is added to the norm, not the residual";
    SumBeforeNorm "sum_before_norm" BOTH AFTER "x and the residual are added, and the norm is of that";
    SumOfRounded "sum_of_rounded" BOTH AFTER "the norm is rounded to 16 bits before it is added";
    SumWithoutBias "sum_without_bias" BOTH AFTER "the bias is not in the sum";
    SumBiasTwice "sum_bias_twice" BOTH AFTER "the bias is in the sum twice";
    NextOfUnrounded "next_of_unrounded" BOTH AFTER "the next norm works on the sum before its rounding";
    NextOfNorm "next_of_norm" BOTH AFTER "the next norm works on the norm that was added";
    NextOfResidual "next_of_residual" BOTH AFTER "the next norm works on the residual as it was";
    NextByFirstRstd "next_by_first_rstd" BOTH AFTER "y is scaled by the rstd of x";
    NextWeightOfFirst "next_weight_of_first" BOTH AFTER "the next norm has the weight of the first";
    NextWeightMissing "next_weight_missing" BOTH AFTER "the next norm has no weight";
    NextBiasOfFirst "next_bias_of_first" BOTH AFTER "the next norm has the bias of the first";
    NextBiasMissing "next_bias_missing" BOTH AFTER "the next norm has no bias";
    NextOffsetMissing "next_offset_missing" BOTH AFTER "the next norm's weight has no offset";
    NextEpsMissing "next_eps_missing" BOTH AFTER "the next norm has no eps";
    NextRstdOfFirst "next_rstd_of_first" BOTH AFTER "the saved next_rstd is that of x";
    NextRstdMissing "next_rstd_missing" BOTH AFTER "next_rstd is never written";
    NextMeanOfFirst "next_mean_of_first" LAYER AFTER "the saved next_mean is that of x";
    NextCastOrderIgnored "next_cast_order_ignored" BOTH AFTER "x_hat of the sum is not rounded before the weight, though asked";

    // A sum of parts.
    PartMissing "part_missing" BOTH PARTS "the last part is not added";
    PartTwice "part_twice" BOTH PARTS "the first part is added twice";
    PartsReversed "parts_reversed" BOTH PARTS "parts are added from the last to the first";
    PartsByTree "parts_by_tree" BOTH PARTS "the second half of the parts is added to the first before that has its sum";
    PartsRounded "parts_rounded" BOTH PARTS "the sum of parts is rounded to the activations' dtype before the residual is added";
    PartsEachRounded "parts_each_rounded" BOTH PARTS "the sum is rounded after every part";
    PartsInF64 "parts_in_f64" BOTH PARTS "parts are added in f64";
    ResidualFirst "residual_first" BOTH PARTS "parts are added to the residual";
    ResidualPerPart "residual_per_part" BOTH PARTS "the residual is added with every part";
    ResidualOfLastPart "residual_of_last_part" BOTH PARTS "the residual is not added where there are more than two parts";
    PartsUnrounded "parts_unrounded" BOTH PARTS "the norm works on the sum before its rounding";
    PartsDense "parts_dense" BOTH PARTS "parts are taken to follow without the gaps between their rows";

    // Saved statistics.
    MeanStore16 "mean_store16" LAYER FORWARD "the saved mean is rounded to 16 bits";
    RstdStore16 "rstd_store16" BOTH FORWARD "the saved rstd is rounded to 16 bits, the one in use is not";
    RstdIsVariance "rstd_is_variance" BOTH FORWARD "the saved rstd is the variance";
    RstdOfOtherRow "rstd_of_other_row" BOTH FORWARD "the saved rstd is that of the row before";
    RstdMissing "rstd_missing" BOTH FORWARD "rstd is never written";

    // Memory: what is written where, and what is read.
    SkipLastColWrite "skip_last_col_write" BOTH EVERY "the last column of the output is never written";
    SkipLastRowWrite "skip_last_row_write" BOTH EVERY "the last row of the output is never written";
    GapOverwritten "gap_overwritten" BOTH EVERY "the store of a row runs one element into the gap after it";
    OutputRead "output_read" BOTH OWN_OUTPUT "what the output held before is added, times zero";
    XStrideIgnored "x_stride_ignored" BOTH EVERY "rows of x are taken to be dense";
    YStrideIgnored "y_stride_ignored" BOTH OUT_OF_PLACE "rows of y are taken to be dense";
    ResStrideIgnored "res_stride_ignored" BOTH FORWARD "rows of residual are taken to be dense";
    ResOutStrideIgnored "res_out_stride_ignored" BOTH SUM_OUT_OF_PLACE "rows of residual_out are taken to be dense";
    DyStrideOfX "dy_stride_of_x" BOTH BACKWARD "dy is read with the row stride of x";
    DxStrideIgnored "dx_stride_ignored" BOTH BACKWARD "rows of dx are taken to be dense";
    DresStrideIgnored "dres_stride_ignored" BOTH BACKWARD "rows of dresidual_out are taken to be dense";
    DresidualStrideIgnored "dresidual_stride_ignored" BOTH BACKWARD "rows of dresidual are taken to be dense";
    XGroupsIgnored "x_groups_ignored" BOTH EVERY "groups of rows of x are taken to follow at the row stride";
    YGroupsIgnored "y_groups_ignored" BOTH OUT_OF_PLACE "groups of rows of y are taken to follow at the row stride";
    ResGroupsIgnored "res_groups_ignored" BOTH FORWARD "groups of rows of residual are taken to follow at the row stride";
    ResOutGroupsIgnored "res_out_groups_ignored" BOTH SUM_OUT_OF_PLACE "groups of rows of residual_out are taken to follow at the row stride";
    DyGroupsIgnored "dy_groups_ignored" BOTH BACKWARD "groups of rows of dy are taken to follow at the row stride";
    DxGroupsIgnored "dx_groups_ignored" BOTH BACKWARD "groups of rows of dx are taken to follow at the row stride";
    DresGroupsIgnored "dres_groups_ignored" BOTH BACKWARD "groups of rows of dresidual_out are taken to follow at the row stride";
    DresidualGroupsIgnored "dresidual_groups_ignored" BOTH BACKWARD "groups of rows of dresidual are taken to follow at the row stride";
    ReadAfterWrite "read_after_write" BOTH IN_PLACE "half of a row is normalized after the other half was overwritten";

    // Determinism.
    Nondeterministic "nondeterministic" BOTH EVERY "the order of summation changes from call to call";
    BatchVariant "batch_variant" BOTH EVERY "the order of summation within a row depends on rows";

    // dx.
    NoSecond "no_second" BOTH BACKWARD "dx misses x_hat * avg(wdy * x_hat)";
    NoFirst "no_first" LAYER BACKWARD "dx misses avg(wdy)";
    SecondNoR "second_no_r" BOTH BACKWARD "the second term of dx lacks a factor rstd";
    SecondSign "second_sign" BOTH BACKWARD "the second term of dx has the wrong sign";
    SecondWTwice "second_w_twice" BOTH BACKWARD "the second term of dx has the weight twice";
    DxDirectNoW "dx_direct_no_w" BOTH BACKWARD "the direct term of dx lacks the weight";
    BwdNoOffset "bwd_no_offset" BOTH BACKWARD "the backward pass alone ignores weight_offset";
    CWithoutW "c_without_w" BOTH BACKWARD "avg(wdy * x_hat) is taken of dy * x_hat";
    CLow "c_low" BOTH BACKWARD "avg(wdy * x_hat) is taken of 16-bit wdy";
    CLowacc "c_lowacc" BOTH BACKWARD "avg(wdy * x_hat) is accumulated in 16 bits";
    CUncentered "c_uncentered" LAYER BACKWARD "avg(wdy * x_hat) uses x without its mean removed";
    CDropLast "c_drop_last" BOTH BACKWARD "avg(wdy * x_hat) misses the last column";
    CWarpLost "c_warp_lost" BOTH BACKWARD "avg(wdy * x_hat) misses 32 columns of row 0";
    CSumNotMean "c_sum_not_mean" BOTH BACKWARD "avg(wdy * x_hat) is not divided by cols";
    CStale "c_stale" BOTH BACKWARD "the last row uses the avg(wdy * x_hat) of its neighbour";
    BwdNoEps "bwd_no_eps" BOTH BACKWARD "rstd is computed again, without eps";
    BwdNPadded8 "bwd_n_padded8" BOTH BACKWARD "averages divide by cols rounded up to 8";
    BwdRowOff "bwd_row_off" BOTH BACKWARD "the last row uses the rstd given for its neighbour";
    DresMissing "dres_missing" BOTH BACKWARD "dresidual_out is not added";
    DresBeforeR "dres_before_r" BOTH BACKWARD "dresidual_out is multiplied by rstd";
    DresAfterStore "dres_after_store" BOTH BACKWARD "dx is rounded before dresidual_out is added";
    DresidualOfDx "dresidual_of_dx" BOTH BACKWARD "dresidual is dx after its rounding to 16 bits";

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
    DwAccumulate "dw_accumulate" BOTH BACKWARD "dweight is added to instead of overwritten";
    DwDbSwapped "dw_db_swapped" BOTH BACKWARD "dweight and dbias are exchanged";
    DbDropLastRow "db_drop_last_row" BOTH BACKWARD "dbias misses the last row";
    DbLowacc "db_lowacc" BOTH BACKWARD "dbias is accumulated in 16 bits";
    WorkspaceNotCleared "workspace_not_cleared" BOTH BACKWARD "partial sums start from what the workspace held";
    EmptyNotZeroed "empty_not_zeroed" BOTH BACKWARD "with no rows, dweight and dbias are not written";

    // Gradients as sums.
    SumRounded "sum_rounded" BOTH SUMS "sums are rounded to the weight's dtype on their way";
    SumOverwrites "sum_overwrites" BOTH SUMS "sums overwrite what they are to be added to";
    SumAddedAlways "sum_added_always" BOTH SUMS "sums are added to what was there, though they are to overwrite it";
    SumHeldTwice "sum_held_twice" BOTH SUMS "what was there is added twice";
    SumHeldOfNext "sum_held_of_next" BOTH SUMS "what was there is taken from the next column";
    SumHeldRounded "sum_held_rounded" BOTH SUMS "what was there goes through bf16";
    SumAveraged "sum_averaged" BOTH SUMS "sums are divided by the number of rows";
    SumOfDbiasRounded "sum_of_dbias_rounded" BOTH SUMS "dbias alone is rounded to the weight's dtype";
    SumOfDbiasOverwrites "sum_of_dbias_overwrites" BOTH SUMS "dbias alone overwrites what it is to be added to";

    // The largest magnitude.
    AmaxWithoutAbs "amax_without_abs" BOTH CODES "the largest value is taken, not the largest magnitude";
    AmaxOfXHat "amax_of_x_hat" BOTH CODES "the largest magnitude is taken before the weight";
    AmaxBeforeBias "amax_before_bias" BOTH CODES "the largest magnitude is taken before the bias";
    AmaxDropsLastCol "amax_drops_last_col" BOTH CODES "the largest magnitude misses the last column";
    AmaxDropsTail8 "amax_drops_tail8" BOTH CODES "the largest magnitude misses the tail mod 8";
    AmaxDropsChunk "amax_drops_chunk" BOTH CODES "the largest magnitude misses 32 columns";
    AmaxDropsLastRow "amax_drops_last_row" BOTH CODES "the tensor's largest magnitude misses the last row";
    AmaxOfHalfBlock "amax_of_half_block" BOTH CODES "half of a set counts for its largest magnitude";
    AmaxNotCleared "amax_not_cleared" BOTH CODES "amax keeps what was there, or does not where it should";
    AmaxOfQuotient "amax_of_quotient" BOTH CODES "amax is that of the results over their scale";
    AmaxOfClamped "amax_of_clamped" BOTH CODES "amax is that of what has saturated";
    AmaxDropsNan "amax_drops_nan" BOTH CODES "the largest magnitude passes over NaN";
    AmaxOfRounded "amax_of_rounded" BOTH CODES "the largest magnitude is taken of results rounded to 16 bits";
    AmaxOfF32 "amax_of_f32" BOTH CODES "the largest magnitude is taken before the rounding that was asked for";

    // Scales.
    ScaleInverted "scale_inverted" BOTH CODES "the stored scale is the reciprocal";
    Largest240 "largest_240" BOTH CODES "scales are made for a largest code of 240";
    Largest256 "largest_256" BOTH CODES "scales are made for a largest code of 256";
    ScaleZero "scale_zero" BOTH CODES "the scale of zeros is 0";
    ScaleOfOtherRow "scale_of_other_row" BOTH CODES "the last row's codes are made with the scale before";
    ScalesShifted "scales_shifted" BOTH CODES "scales are stored one place off";
    ScalesTransposed "scales_transposed" BOTH CODES "scales lie column by column in a row-major buffer";
    ScaleOfEightRows "scale_of_eight_rows" BOTH CODES "eight rows share the scale of the first";
    FloorIgnored "floor_ignored" BOTH CODES "the floor of amax is ignored";
    CeilingIgnored "ceiling_ignored" BOTH CODES "the ceiling of amax is ignored";
    CeilingOfScale "ceiling_of_scale" BOTH CODES "the ceiling is applied to the scale";
    CodesByUnroundedScale "codes_by_unrounded_scale" BOTH CODES "codes are made with the scale before its rounding";
    CodesByOtherBlock "codes_by_other_block" BOTH CODES "codes are made with the neighbouring block's scale";
    PowerDown "power_down" BOTH CODES "the power of two is rounded down";
    PowerNearest "power_nearest" BOTH CODES "the power of two is the nearest";
    PowerOneUp "power_one_up" BOTH CODES "the power of two is one too large";
    PowerOneDown "power_one_down" BOTH CODES "the power of two is one too small";
    FloorForUp "floor_for_up" BOTH CODES "exponents decide where the power is to be rounded up";
    UpForFloor "up_for_floor" BOTH CODES "the power is rounded up where exponents are to decide";
    OcpCeil "ocp_ceil" BOTH CODES "the power is the next above amax, less the exponent of the largest code";
    PowerUpAlways "power_up_always" BOTH CODES "the power is one too large where amax / Q is a power itself";
    PowerLowBits "power_low_bits" RMS CODES "the power of two passes over the lowest bits of amax";
    ScaleThroughBf16 "scale_through_bf16" BOTH CODES "amax goes through bf16";
    BlockBoundaryLate "block_boundary_late" BOTH CODES "a block's first column counts for the block before";
    PartialBlockByOther "partial_block_by_other" BOTH CODES "the last, partial block has the scale of the one before";
    BlocksAlongRows "blocks_along_rows" BOTH CODES "blocks lie along the rows";
    PaddingNotZeroed "padding_not_zeroed" BOTH CODES "what is between scales is not written";
    SwizzleExchanged "swizzle_exchanged" BOTH CODES "rows and groups are exchanged within a tile";
    PackedReversed "packed_reversed" BOTH CODES "four scales of a word are in reverse";

    // Codes.
    TimesScale "times_scale" BOTH CODES "results are multiplied with the scale";
    Reciprocal12 "reciprocal12" BOTH CODES "the reciprocal of the scale has 12 bits";
    CodesTruncated "codes_truncated" BOTH CODES "codes are truncated";
    TiesAway "ties_away" BOTH CODES "ties go away from zero";
    TiesAwayF32 "ties_away_f32" RMS CODES "ties go away from zero where results of f32 are not rounded first";
    TiesToZero "ties_to_zero" BOTH CODES "ties go to zero";
    QuotientThroughBf16 "quotient_through_bf16" BOTH CODES "the quotient goes through bf16";
    QuotientThroughF16 "quotient_through_f16" BOTH CODES "the quotient goes through f16";
    CodesOfRounded "codes_of_rounded" BOTH CODES "codes are made of results rounded to 16 bits";
    CodesOfF32 "codes_of_f32" BOTH CODES "codes are made before the rounding that was asked for";
    Fnuz "fnuz" BOTH CODES "codes have the bias of another format";
    OverflowToNan "overflow_to_nan" BOTH CODES "what saturates is NaN";
    OverflowToInfinity "overflow_to_infinity" BOTH CODES "what saturates is infinite";
    E5m2At448 "e5m2_at_448" BOTH CODES "E5M2 saturates where E4M3 does";
    NanToLargest "nan_to_largest" BOTH CODES "NaN becomes the largest code";
    SubnormalCodesFlushed "subnormal_codes_flushed" BOTH CODES "subnormal codes are zero";
    SignLost "sign_lost" BOTH CODES "codes have no sign";
    Int8Wraps "int8_wraps" BOTH CODES "integers wrap";
    Int8Truncates "int8_truncates" BOTH CODES "integers are truncated";
    PairsSwapped "pairs_swapped" BOTH CODES "two neighbouring codes are exchanged";
    CodesLastRowMissing "codes_last_row_missing" BOTH CODES "the last row of codes is never written";
    CodesLastColMissing "codes_last_col_missing" BOTH CODES "the last column of codes is never written";
    TransposedReshaped "transposed_reshaped" BOTH CODES "codes_t is reshaped, not transposed";
    TransposedStrideIgnored "transposed_stride_ignored" BOTH CODES "codes_t is taken to be dense";
    TransposedTileMissing "transposed_tile_missing" BOTH CODES "the last tile of codes_t is never written";
    TransposedRoundedAgain "transposed_rounded_again" BOTH CODES "codes_t is made anew, with another rounding";
    TransposedRowsSwapped "transposed_rows_swapped" BOTH CODES "two rows are exchanged in codes_t";
    ColumnwiseOfCodes "columnwise_of_codes" BOTH CODES "the copy along columns is made of the values of codes";
    ColumnwiseRounded "columnwise_rounded" BOTH CODES "the copy along columns is made of results rounded to 16 bits";
    ColumnwiseByFirstBlock "columnwise_by_first_block" BOTH CODES "a column's second block has the scale of its first";
    ColumnwiseReshaped "columnwise_reshaped" BOTH CODES "the copy along columns is reshaped, not transposed";
    ColumnwiseStrideIgnored "columnwise_stride_ignored" BOTH CODES "the copy along columns is taken to be dense";
    ColumnwiseTailMissing "columnwise_tail_missing" BOTH CODES "the last, partial block of rows has no codes along columns";
}

impl Bug {
    /// Whether some call of this norm and stage has a wrong result because of the bug.
    ///
    /// Which call it is, is for the suite to find out: many bugs need a bias, a residual, a 16-bit dtype, a row stride
    /// or several rows before they show.
    pub fn applies_to(self, norm: Norm, kind: Kind) -> bool {
        let (norms, stages) = self.scope();
        // Parts lie at one distance from each other, and their cases have no groups of rows.
        let has_no_case = self.is_of_groups() && kind == Kind::ForwardParts;
        norms.contains(&norm) && stages.contains(&kind) && !has_no_case
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
