//! A sum of two ranks: each gets all that the other has, and adds and normalizes every row. What is sent is as much as by the owners of rows,
//! in one exchange in place of two.

use rmsnorm_spec::{DType, Element, Error, Forward, Memory, NormSpec, Source};

use crate::any_order::in_one_exchange;
use crate::columns::whole;
use crate::deal::{all_of, sent, written};
use crate::{Collective, Sharded, ShardedNorm, Shares};

/// Bytes of x up to which it is sooner. Over NCCL on two H100s, bf16: 4096 columns 1 row 8.8 us, by owners 17.2; of 8192 columns 256 rows 45 and
/// 59, 1024 rows (16 MiB) 132 and 140, 4096 rows (64 MiB) 443 and 427: each rank then reads and writes twice the rows.
const MOST_BYTES: usize = 32 << 20;

/// Whether a sum is sooner made by every rank for itself. All ranks say the same.
pub(crate) fn is_sooner(ranks: usize, spec: &NormSpec, dtype: DType) -> bool {
    ranks == 2 && spec.rows * spec.cols <= MOST_BYTES / dtype.size()
}

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// The steps of a reduced call that is valid and has a composed form, whatever the number of ranks.
    pub(crate) fn add_everywhere<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Forward<'_, B, T, W, R>,
        is_sent: &mut bool,
    ) -> Result<(), Error> {
        let Forward { x, y, residual, mut residual_out, weight, bias, mut mean, mut rstd, .. } = args;
        let (residual, mut overwritten) = match residual {
            Some(Source::Overwrite(sum)) => (None, Some(sum.view)),
            Some(Source::Read(residual)) => (Some(residual), None),
            None => (None, None),
        };
        let len = spec.rows * spec.cols;
        let of_ranks = Shares { units: self.ranks(), unit: len, ranks: self.ranks() };
        let mut parts = self.backend().buffer::<T>(of_ranks.len())?;
        // A sum of parts is made beside the residual, and not in place.
        let mut of_sum = overwritten.as_ref().map(|_| self.backend().buffer::<R>(len)).transpose()?;

        in_one_exchange(is_sent, || {
            let to = B::buffer_out(&mut parts, 0..of_ranks.len());
            self.collective().all_gather(&of_ranks, sent::<B, T>(&x, len), to)
        })?;
        let Some(mut y) = written(x, y) else { return Ok(()) };
        {
            let parts = B::buffer_in(&parts, 0..of_ranks.len());
            let local = Forward::<B, T>::new(parts, all_of::<B, T>(&mut y)).parts(self.ranks(), len);
            let mut local = local.weight_dtype::<W>().residual_dtype::<R>();
            (local.weight, local.bias) = (weight.as_ref().map(whole::<B, W>), bias.as_ref().map(whole::<B, W>));
            local.residual = match (&residual, &overwritten) {
                (Some(residual), _) => Some(Source::Read(residual.with(whole::<B, R>(&residual.view)))),
                (None, Some(sum)) => Some(Source::Read(B::read_out(sum).into())),
                (None, None) => None,
            };
            local.residual_out = match &mut of_sum {
                Some(of_sum) => Some(B::buffer_out(of_sum, 0..len).into()),
                None => residual_out.as_mut().map(all_of::<B, R>),
            };
            local.mean = mean.as_mut().map(|mean| B::part_out(mean, 0..spec.rows));
            local.rstd = rstd.as_mut().map(|rstd| B::part_out(rstd, 0..spec.rows));
            self.backend().forward(spec, local)?;
        }
        match of_sum.as_ref().zip(overwritten.as_mut()) {
            Some((of_sum, sum)) => self.backend().copy(B::buffer_in(of_sum, 0..len), B::part_out(sum, 0..len)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_add_what_is_not_large() {
        let of_mib = |mib: usize| NormSpec::rms(mib, 1 << 19, 1e-6);
        assert!(is_sooner(2, &of_mib(32), DType::Bf16) && !is_sooner(2, &of_mib(33), DType::Bf16));
        assert!(is_sooner(2, &of_mib(16), DType::F32) && !is_sooner(2, &of_mib(17), DType::F32));
        assert!(!is_sooner(3, &of_mib(1), DType::Bf16));
    }
}
