//! A sum in whatever order: the collective's all-reduce, and a call of the backend.

use rmsnorm_spec::{Element, Error, Forward, Memory, NormSpec, Source};

use crate::columns::whole;
use crate::deal::{all_of, check_dense, distances};
use crate::{Collective, Sharded};

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// [`ShardedNorm::forward_reduced`](crate::ShardedNorm::forward_reduced) in any order, of arguments that are valid.
    pub(crate) fn normalize_sum<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        mut args: Forward<'_, B, T, W, R>,
    ) -> Result<(), Error> {
        check_dense(spec, "x", Some(distances(&args.x)))?;
        let len = spec.rows * spec.cols;
        self.in_step(|is_sent| {
            let x = match &mut args.x {
                Source::Overwrite(x) => {
                    let x = B::part_out(&mut x.view, 0..len);
                    in_one_exchange(is_sent, || self.collective().all_reduce_in_place(x))?;
                    return self.backend().forward(spec, args);
                }
                Source::Read(x) => B::part_in(&x.view, 0..len),
            };
            let mut sum = self.backend().buffer::<T>(len)?;
            let of_sum = B::buffer_out(&mut sum, 0..len);
            in_one_exchange(is_sent, || self.collective().all_reduce(x, of_sum))?;
            let Some(y) = &mut args.y else { return Ok(()) };
            let of_sum = Forward::<B, T>::new(B::buffer_in(&sum, 0..len), all_of::<B, T>(y));
            let mut of_sum = of_sum.weight_dtype::<W>().residual_dtype::<R>();
            of_sum.weight = args.weight.as_ref().map(whole::<B, W>);
            of_sum.bias = args.bias.as_ref().map(whole::<B, W>);
            of_sum.residual = match &args.residual {
                Some(Source::Read(residual)) => Some(Source::Read(residual.with(whole::<B, R>(&residual.view)))),
                // Only with x.
                Some(Source::Overwrite(_)) | None => None,
            };
            of_sum.residual_out = args.residual_out.as_mut().map(all_of::<B, R>);
            of_sum.mean = args.mean.as_mut().map(|mean| B::part_out(mean, 0..spec.rows));
            of_sum.rstd = args.rstd.as_mut().map(|rstd| B::part_out(rstd, 0..spec.rows));
            self.backend().forward(spec, of_sum)
        })
    }
}

/// Makes the only exchange of a call: what happens behind it leaves no rank out of step, nor does an engine that has none.
pub(crate) fn in_one_exchange(is_sent: &mut bool, exchange: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    let outcome = exchange();
    *is_sent = !matches!(outcome, Ok(()) | Err(Error::Unsupported { .. }));
    outcome
}
