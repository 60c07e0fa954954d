//! [`Order::Engine`](crate::Order::Engine): the collective's all-reduce, then one call of the backend.

use rmsnorm_spec::{AnyForward, AnyIn, AnyOut, Error, Memory, NormSpec, Source};

use crate::deal::{all_of, check_dense, distances};
use crate::untyped::forward;
use crate::{Collective, Sharded};

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// [`ShardedNorm::forward_reduced`](crate::ShardedNorm::forward_reduced) with `Order::Engine`, for
    /// validated arguments.
    pub(crate) fn normalize_sum(&self, spec: &NormSpec, mut args: AnyForward<'_, B>) -> Result<(), Error> {
        check_dense(spec, "x", args.x.as_ref().map(distances))?;
        let len = spec.rows * spec.cols;
        self.in_step(|is_sent| {
            let x = match &mut args.x {
                Some(Source::Overwrite(x)) => {
                    let x = x.view.part(0..len);
                    in_one_exchange(is_sent, || self.all_reduce_in_place(x))?;
                    return forward(self.backend(), spec, args);
                }
                Some(Source::Read(x)) => x.view.part(0..len),
                None => return Ok(()),
            };
            let mut sum = self.room(args.dtypes.activation, len)?;
            let of_sum = sum.view_mut(0..len);
            in_one_exchange(is_sent, || self.all_reduce(x, of_sum))?;
            let Some(y) = &mut args.y else { return Ok(()) };
            let mut of_sum = AnyForward::<B>::new(sum.view(0..len), all_of(y));
            of_sum.dtypes = args.dtypes;
            of_sum.weight = args.weight.as_ref().map(AnyIn::whole);
            of_sum.bias = args.bias.as_ref().map(AnyIn::whole);
            of_sum.residual = match &args.residual {
                Some(Source::Read(residual)) => Some(Source::Read(residual.with(residual.view.whole()))),
                // x and the residual are overwritten together only.
                Some(Source::Overwrite(_)) | None => None,
            };
            of_sum.residual_out = args.residual_out.as_mut().map(all_of);
            of_sum.mean = args.mean.as_mut().map(AnyOut::whole);
            of_sum.rstd = args.rstd.as_mut().map(AnyOut::whole);
            forward(self.backend(), spec, of_sum)
        })
    }
}

/// Makes the only exchange of a call. An error after it, and `Unsupported` from it, leave all ranks
/// in step.
pub(crate) fn in_one_exchange(is_sent: &mut bool, exchange: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    let outcome = exchange();
    *is_sent = !matches!(outcome, Ok(()) | Err(Error::Unsupported { .. }));
    outcome
}
