//! The planted bugs: every way in which the simulated backend can be wrong, one at a time.
//!
//! A suite proves something only if it can fail. Before each run, the suite tests a
//! [`SimulatedBackend`](crate::selftest::simulate::SimulatedBackend) with each bug of this list and
//! must reject all of them. Real kernels had bugs like these: a wrong formula, a sum that misses
//! its tail, a 16-bit accumulator, a row that was never written, a result that depends on the batch
//! size.
//!
//! The line of a bug names the norms and kinds of calls in which it is planted.

use std::fmt;

use rmsnorm_spec::Norm;

use crate::case::Kind;

// The norms in which a bug can show.
const BOTH: &[Norm] = &Norm::ALL;
const LAYER: &[Norm] = &[Norm::Layer];
/// Bugs that show only if nothing is rounded before: in rows whose rstd is 1.
const RMS: &[Norm] = &[Norm::Rms];

// The kinds of calls in which a bug can show.
const EVERY_STAGE: &[Kind] = &Kind::CALLS;
/// All kinds with float results.
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
/// All forward kinds with float results.
const FORWARD: &[Kind] =
    &[Kind::Forward, Kind::ForwardInPlace, Kind::ForwardAfter, Kind::ForwardAfterInPlace, Kind::ForwardParts];
/// Kinds that add a residual before the norm.
const BEFORE: &[Kind] = &[Kind::Forward, Kind::ForwardInPlace];
const EVERY_BEFORE: &[Kind] = &[Kind::Forward, Kind::ForwardInPlace, Kind::QuantizedForward];
/// Kinds with a separate y.
const OUT_OF_PLACE: &[Kind] = &[Kind::Forward, Kind::ForwardAfter, Kind::ForwardAfterInPlace, Kind::ForwardParts];
/// Kinds whose sum does not overwrite the residual.
const SUM_OUT_OF_PLACE: &[Kind] = &[Kind::Forward, Kind::ForwardAfter, Kind::ForwardParts];
const IN_PLACE: &[Kind] = &[Kind::ForwardInPlace];
/// Kinds that add the residual after the norm.
const AFTER: &[Kind] = &[Kind::ForwardAfter, Kind::ForwardAfterInPlace];
const BACKWARD: &[Kind] = &[Kind::Backward];
/// Kinds whose matrix output is not an input.
const OWN_OUTPUT: &[Kind] =
    &[Kind::Forward, Kind::Backward, Kind::ForwardAfter, Kind::ForwardAfterInPlace, Kind::ForwardParts];
const CODES: &[Kind] = &[Kind::QuantizedForward];
/// Kinds with a sum of parts.
const PARTS: &[Kind] = &[Kind::ForwardParts];
/// Kinds with gradients as f32 sums.
const SUMS: &[Kind] = &[Kind::BackwardSums];

/// Declares the enum and its tables from one list: variant, name, norms, kinds, description.
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

            /// The name in the self-test's table, in snake case.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Bug::$variant => $name,)*
                }
            }

            /// The error, in one clause.
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

    // The residual stream.
    ResUnrounded "res_unrounded" BOTH EVERY_BEFORE "the norm works on the unrounded sum with the residual";
    ResMissing "res_missing" BOTH BEFORE "the norm works on x without the residual";
    ResOutBeforeAdd "res_out_before_add" BOTH BEFORE "residual_out holds x, stored before the addition";
    ResOutMissing "res_out_missing" BOTH FORWARD "residual_out is never written";

    // A residual that is added after the norm, and the next norm, which normalizes the sum.
    SumWithoutNorm "sum_without_norm" BOTH AFTER "residual_out is the unchanged residual";
    SumWithoutResidual "sum_without_residual" BOTH AFTER "residual_out is the norm alone";
    SumOfX "sum_of_x" BOTH AFTER "x is added to the norm instead of the residual";
    SumBeforeNorm "sum_before_norm" BOTH AFTER "the sum of x and the residual is normalized instead of x";
    SumOfRounded "sum_of_rounded" BOTH AFTER "the norm is rounded to 16 bits before it is added";
    SumWithoutBias "sum_without_bias" BOTH AFTER "the bias is not in the sum";
    SumBiasTwice "sum_bias_twice" BOTH AFTER "the bias is in the sum twice";
    NextOfUnrounded "next_of_unrounded" BOTH AFTER "the next norm works on the sum before its rounding";
    NextOfNorm "next_of_norm" BOTH AFTER "the next norm works on the norm that was added";
    NextOfResidual "next_of_residual" BOTH AFTER "the next norm works on the unchanged residual";
    NextByFirstRstd "next_by_first_rstd" BOTH AFTER "y is scaled by the rstd of x";
    NextWeightOfFirst "next_weight_of_first" BOTH AFTER "the next norm uses the weight of the first";
    NextWeightMissing "next_weight_missing" BOTH AFTER "the next norm ignores its weight";
    NextBiasOfFirst "next_bias_of_first" BOTH AFTER "the next norm uses the bias of the first";
    NextBiasMissing "next_bias_missing" BOTH AFTER "the next norm ignores its bias";
    NextOffsetMissing "next_offset_missing" BOTH AFTER "the next norm ignores weight_offset";
    NextEpsMissing "next_eps_missing" BOTH AFTER "the next norm ignores eps";
    NextRstdOfFirst "next_rstd_of_first" BOTH AFTER "the saved next_rstd is that of x";
    NextRstdMissing "next_rstd_missing" BOTH AFTER "next_rstd is never written";
    NextMeanOfFirst "next_mean_of_first" LAYER AFTER "the saved next_mean is that of x";
    NextCastOrderIgnored "next_cast_order_ignored" BOTH AFTER "x_hat of the sum is not rounded before the weight, against cast_order";

    // A sum of parts.
    PartMissing "part_missing" BOTH PARTS "the last part is not added";
    PartTwice "part_twice" BOTH PARTS "the first part is added twice";
    PartsReversed "parts_reversed" BOTH PARTS "parts are added from the last to the first";
    PartsByTree "parts_by_tree" BOTH PARTS "the two halves of the parts are summed separately, then added";
    PartsRounded "parts_rounded" BOTH PARTS "the sum of parts is rounded to the activations' dtype before the residual is added";
    PartsEachRounded "parts_each_rounded" BOTH PARTS "the sum is rounded after every part";
    PartsInF64 "parts_in_f64" BOTH PARTS "parts are added in f64";
    ResidualFirst "residual_first" BOTH PARTS "parts are added to the residual";
    ResidualPerPart "residual_per_part" BOTH PARTS "the residual is added with every part";
    ResidualOfLastPart "residual_of_last_part" BOTH PARTS "the residual is not added if there are more than two parts";
    PartsUnrounded "parts_unrounded" BOTH PARTS "the norm works on the sum before its rounding";
    PartsDense "parts_dense" BOTH PARTS "the distance of parts does not include the gaps between rows";

    // Saved statistics.
    MeanStore16 "mean_store16" LAYER FORWARD "the saved mean is rounded to 16 bits";
    RstdStore16 "rstd_store16" BOTH FORWARD "the saved rstd is rounded to 16 bits, but not the rstd that y uses";
    RstdIsVariance "rstd_is_variance" BOTH FORWARD "the saved rstd is the variance";
    RstdOfOtherRow "rstd_of_other_row" BOTH FORWARD "the saved rstd is that of the previous row";
    RstdMissing "rstd_missing" BOTH FORWARD "rstd is never written";

    // Memory: writes and reads at wrong places.
    SkipLastColWrite "skip_last_col_write" BOTH EVERY "the last column of the output is never written";
    SkipLastRowWrite "skip_last_row_write" BOTH EVERY "the last row of the output is never written";
    GapOverwritten "gap_overwritten" BOTH EVERY "the store of a row runs one element into the gap after it";
    OutputRead "output_read" BOTH OWN_OUTPUT "the old content of the output, times zero, is added";
    XStrideIgnored "x_stride_ignored" BOTH EVERY "the row stride of x is ignored";
    YStrideIgnored "y_stride_ignored" BOTH OUT_OF_PLACE "the row stride of y is ignored";
    ResStrideIgnored "res_stride_ignored" BOTH FORWARD "the row stride of residual is ignored";
    ResOutStrideIgnored "res_out_stride_ignored" BOTH SUM_OUT_OF_PLACE "the row stride of residual_out is ignored";
    DyStrideOfX "dy_stride_of_x" BOTH BACKWARD "dy is read with the row stride of x";
    DxStrideIgnored "dx_stride_ignored" BOTH BACKWARD "the row stride of dx is ignored";
    DresStrideIgnored "dres_stride_ignored" BOTH BACKWARD "the row stride of dresidual_out is ignored";
    DresidualStrideIgnored "dresidual_stride_ignored" BOTH BACKWARD "the row stride of dresidual is ignored";
    XGroupsIgnored "x_groups_ignored" BOTH EVERY "the group stride of x is ignored";
    YGroupsIgnored "y_groups_ignored" BOTH OUT_OF_PLACE "the group stride of y is ignored";
    ResGroupsIgnored "res_groups_ignored" BOTH FORWARD "the group stride of residual is ignored";
    ResOutGroupsIgnored "res_out_groups_ignored" BOTH SUM_OUT_OF_PLACE "the group stride of residual_out is ignored";
    DyGroupsIgnored "dy_groups_ignored" BOTH BACKWARD "the group stride of dy is ignored";
    DxGroupsIgnored "dx_groups_ignored" BOTH BACKWARD "the group stride of dx is ignored";
    DresGroupsIgnored "dres_groups_ignored" BOTH BACKWARD "the group stride of dresidual_out is ignored";
    DresidualGroupsIgnored "dresidual_groups_ignored" BOTH BACKWARD "the group stride of dresidual is ignored";
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

    // The largest magnitude.
    AmaxWithoutAbs "amax_without_abs" BOTH CODES "the largest value is taken, not the largest magnitude";
    AmaxOfXHat "amax_of_x_hat" BOTH CODES "the largest magnitude is taken before the weight";
    AmaxBeforeBias "amax_before_bias" BOTH CODES "the largest magnitude is taken before the bias";
    AmaxDropsLastCol "amax_drops_last_col" BOTH CODES "the largest magnitude misses the last column";
    AmaxDropsTail8 "amax_drops_tail8" BOTH CODES "the largest magnitude misses the tail mod 8";
    AmaxDropsChunk "amax_drops_chunk" BOTH CODES "the largest magnitude misses 32 columns";
    AmaxDropsLastRow "amax_drops_last_row" BOTH CODES "the tensor's largest magnitude misses the last row";
    AmaxOfHalfBlock "amax_of_half_block" BOTH CODES "only half of the elements that share a scale count for it";
    AmaxNotCleared "amax_not_cleared" BOTH CODES "amax keeps its old value, or loses it if the call must fold into it";
    AmaxOfQuotient "amax_of_quotient" BOTH CODES "amax is that of the results divided by their scale";
    AmaxOfClamped "amax_of_clamped" BOTH CODES "amax is that of the saturated results";
    AmaxDropsNan "amax_drops_nan" BOTH CODES "the largest magnitude ignores NaN";
    AmaxOfRounded "amax_of_rounded" BOTH CODES "the largest magnitude is taken from results rounded to 16 bits";
    AmaxOfF32 "amax_of_f32" BOTH CODES "the largest magnitude is taken before the requested rounding";

    // Scales.
    ScaleInverted "scale_inverted" BOTH CODES "the stored scale is the reciprocal";
    Largest240 "largest_240" BOTH CODES "scales are made for a largest code of 240";
    Largest256 "largest_256" BOTH CODES "scales are made for a largest code of 256";
    ScaleZero "scale_zero" BOTH CODES "the scale of zeros is 0";
    ScaleOfOtherRow "scale_of_other_row" BOTH CODES "the last row is quantized with the scale of the previous row";
    ScalesShifted "scales_shifted" BOTH CODES "scales are stored one place off";
    ScalesTransposed "scales_transposed" BOTH CODES "scales are stored column by column in a row-major buffer";
    ScaleOfEightRows "scale_of_eight_rows" BOTH CODES "eight rows share the scale of the first";
    FloorIgnored "floor_ignored" BOTH CODES "the floor of amax is ignored";
    CeilingIgnored "ceiling_ignored" BOTH CODES "the ceiling of amax is ignored";
    CeilingOfScale "ceiling_of_scale" BOTH CODES "the ceiling is applied to the scale";
    CodesByUnroundedScale "codes_by_unrounded_scale" BOTH CODES "results are quantized with the scale before its rounding";
    CodesByOtherBlock "codes_by_other_block" BOTH CODES "results are quantized with the neighbouring block's scale";
    PowerDown "power_down" BOTH CODES "the power of two is rounded down";
    PowerNearest "power_nearest" BOTH CODES "the power of two is rounded to nearest";
    PowerOneUp "power_one_up" BOTH CODES "the power of two is one too large";
    PowerOneDown "power_one_down" BOTH CODES "the power of two is one too small";
    FloorForUp "floor_for_up" BOTH CODES "the power is the difference of exponents, not rounded up";
    UpForFloor "up_for_floor" BOTH CODES "the power is rounded up, not the difference of exponents";
    OcpCeil "ocp_ceil" BOTH CODES "the power is amax rounded up to a power of two, less the exponent of the largest code";
    PowerUpAlways "power_up_always" BOTH CODES "the power is one too large if amax / Q is a power of two";
    PowerLowBits "power_low_bits" RMS CODES "the power of two ignores the lowest bits of amax";
    ScaleThroughBf16 "scale_through_bf16" BOTH CODES "amax is rounded to bf16";
    BlockBoundaryLate "block_boundary_late" BOTH CODES "a block's first column counts for the block before";
    PartialBlockByOther "partial_block_by_other" BOTH CODES "the last, partial block has the scale of the previous block";
    BlocksAlongRows "blocks_along_rows" BOTH CODES "blocks extend over rows instead of columns";
    PaddingNotZeroed "padding_not_zeroed" BOTH CODES "the padding between scales is not written";
    SwizzleExchanged "swizzle_exchanged" BOTH CODES "rows and groups are exchanged within a tile";
    PackedReversed "packed_reversed" BOTH CODES "the four scales of a word are in reverse order";

    // Codes.
    TimesScale "times_scale" BOTH CODES "results are multiplied with the scale";
    Reciprocal12 "reciprocal12" BOTH CODES "the reciprocal of the scale has 12 bits";
    CodesTruncated "codes_truncated" BOTH CODES "codes are truncated";
    TiesAway "ties_away" BOTH CODES "ties round away from zero";
    TiesAwayF32 "ties_away_f32" RMS CODES "ties of f32 results that are not rounded first round away from zero";
    TiesToZero "ties_to_zero" BOTH CODES "ties round to zero";
    QuotientThroughBf16 "quotient_through_bf16" BOTH CODES "the quotient is rounded to bf16";
    QuotientThroughF16 "quotient_through_f16" BOTH CODES "the quotient is rounded to f16";
    CodesOfRounded "codes_of_rounded" BOTH CODES "results are rounded to 16 bits before they are quantized";
    CodesOfF32 "codes_of_f32" BOTH CODES "results are quantized without the requested rounding";
    Fnuz "fnuz" BOTH CODES "codes have the bias of another format";
    OverflowToNan "overflow_to_nan" BOTH CODES "values that must saturate become NaN";
    OverflowToInfinity "overflow_to_infinity" BOTH CODES "values that must saturate become infinite";
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
    TransposedStrideIgnored "transposed_stride_ignored" BOTH CODES "the row stride of codes_t is ignored";
    TransposedTileMissing "transposed_tile_missing" BOTH CODES "the last tile of codes_t is never written";
    TransposedRoundedAgain "transposed_rounded_again" BOTH CODES "codes_t is quantized separately, with another rounding";
    TransposedRowsSwapped "transposed_rows_swapped" BOTH CODES "two rows are exchanged in codes_t";
    ColumnwiseOfCodes "columnwise_of_codes" BOTH CODES "the columnwise copy is made from the quantized values";
    ColumnwiseRounded "columnwise_rounded" BOTH CODES "the columnwise copy is made from results rounded to 16 bits";
    ColumnwiseByFirstBlock "columnwise_by_first_block" BOTH CODES "a column's second block has the scale of its first";
    ColumnwiseReshaped "columnwise_reshaped" BOTH CODES "the columnwise copy is reshaped, not transposed";
    ColumnwiseStrideIgnored "columnwise_stride_ignored" BOTH CODES "the row stride of the columnwise copy is ignored";
    ColumnwiseTailMissing "columnwise_tail_missing" BOTH CODES "the columnwise copy misses the last, partial block of rows";
}

impl Bug {
    /// Whether the bug makes the result of some call of this norm and kind wrong.
    ///
    /// The suite must find such a call: many bugs show only with a bias, a residual, a 16-bit
    /// dtype, a row stride or several rows.
    pub fn applies_to(self, norm: Norm, kind: Kind) -> bool {
        let (norms, stages) = self.scope();
        // Cases with a sum of parts have no groups of rows.
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
