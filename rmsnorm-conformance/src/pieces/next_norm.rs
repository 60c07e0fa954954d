//! The next norm, of the sum with a residual: math.md, equation (14).

use rmsnorm_spec::{CastOrder, Tensor};

use super::math::{Bug, BugList, Call, ForwardRow, NormKernel, Normalized, PieceMath, Tensors, bugs};

bugs! {
    /// The bugs of the next norm.
    NextBug:
    OfUnrounded "next_of_unrounded" BOTH AFTER "the next norm works on the sum before its rounding";
    OfNorm "next_of_norm" BOTH AFTER "the next norm works on the norm that was added";
    OfResidual "next_of_residual" BOTH AFTER "the next norm works on the unchanged residual";
    ByFirstRstd "next_by_first_rstd" BOTH AFTER "y is scaled by the rstd of x";
    WeightOfFirst "next_weight_of_first" BOTH AFTER "the next norm uses the weight of the first";
    WeightMissing "next_weight_missing" BOTH AFTER "the next norm ignores its weight";
    BiasOfFirst "next_bias_of_first" BOTH AFTER "the next norm uses the bias of the first";
    BiasMissing "next_bias_missing" BOTH AFTER "the next norm ignores its bias";
    OffsetMissing "next_offset_missing" BOTH AFTER "the next norm ignores weight_offset";
    EpsMissing "next_eps_missing" BOTH AFTER "the next norm ignores eps";
    RstdOfFirst "next_rstd_of_first" BOTH AFTER "the saved next_rstd is that of x";
    RstdMissing "next_rstd_missing" BOTH AFTER "next_rstd is never written";
    MeanOfFirst "next_mean_of_first" LAYER AFTER "the saved next_mean is that of x";
    CastOrderIgnored "next_cast_order_ignored" BOTH AFTER "x_hat of the sum is not rounded before the weight, against cast_order";
}

/// The piece.
pub(crate) struct NextNorm;

impl PieceMath for NextNorm {
    const BUGS: &'static [Bug] = NextBug::BUGS;

    fn forward(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [ForwardRow]) {
        let mut kernel = kernel(call, tensors);
        for (index, row) in rows.iter_mut().enumerate() {
            let h = match call.bug() {
                Some(NextBug::OfUnrounded) => row.h.clone(),
                Some(NextBug::OfNorm) => row.result.y.clone(),
                Some(NextBug::OfResidual) => tensors.row(Tensor::Residual, index).unwrap_or_default(),
                Some(_) | None => row.sum.clone(),
            };
            let mut last = kernel.normalize(index, &h);
            if call.has(NextBug::ByFirstRstd) {
                let factor = |of: &Normalized| of.rstd.as_ref().map_or(1.0, |rstd| rstd[0]);
                let ratio = factor(&row.result) / factor(&last);
                last.y.iter_mut().for_each(|y| *y *= ratio);
            }
            match call.bug() {
                Some(NextBug::RstdMissing) => last.rstd = None,
                Some(NextBug::RstdOfFirst) => last.rstd.clone_from(&row.result.rstd),
                Some(NextBug::MeanOfFirst) => last.mean.clone_from(&row.result.mean),
                Some(_) | None => {}
            }
            last.store_statistics(tensors, [Tensor::NextMean, Tensor::NextRstd], index);
            row.y = Some(last.y);
        }
    }
}

/// The kernel of the next norm.
fn kernel<'c>(call: &'c Call, tensors: &Tensors<'_, '_>) -> NormKernel<'c> {
    let vector = |next, first, of_first: NextBug, missing: NextBug| {
        let read = if call.has(of_first) { first } else { next };
        tensors.values(read).filter(|_| !call.has(missing))
    };
    let weight = vector(Tensor::NextWeight, Tensor::Weight, NextBug::WeightOfFirst, NextBug::WeightMissing);
    let bias = vector(Tensor::NextBias, Tensor::Bias, NextBug::BiasOfFirst, NextBug::BiasMissing);
    let has_weight = weight.is_some();
    let mut kernel = NormKernel::new(call, weight, bias);
    match call.bug() {
        Some(NextBug::OffsetMissing) if has_weight => {
            kernel.weight.iter_mut().for_each(|weight| *weight -= call.spec.weight_offset);
        }
        Some(NextBug::EpsMissing) => kernel.eps = 0.0,
        Some(NextBug::CastOrderIgnored) => kernel.cast_order = CastOrder::AtStore,
        Some(_) | None => {}
    }
    kernel
}
