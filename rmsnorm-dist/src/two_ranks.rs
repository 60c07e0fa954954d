//! A sum over two ranks: each receives the whole `x` of the other, and adds and normalizes every
//! row. This sends the same number of bytes as with owners of rows, in one exchange instead of two.

use rmsnorm_spec::{AnyForward, DType, Error, Forward, Memory, NormSpec, Source};

use crate::any_order::in_one_exchange;
use crate::deal::{Beside, sent, written};
use crate::{Collective, RowShares, Sharded, ShardedNorm};

/// Largest x, in bytes, for which one exchange is faster than two. Times over NCCL on two H100s,
/// bf16:
///
/// | columns | rows | one exchange, us | by owners, us |
/// |---|---|---|---|
/// | 4096 | 1 | 8.8 | 17.2 |
/// | 8192 | 256 | 45 | 59 |
/// | 8192 | 1024 (16 MiB) | 132 | 140 |
/// | 8192 | 4096 (64 MiB) | 443 | 427 |
const MOST_BYTES: usize = 32 << 20;

/// Whether it is faster that every rank adds all rows. All ranks get the same answer.
pub(crate) fn is_sooner(ranks: usize, spec: &NormSpec, dtype: DType) -> bool {
    ranks == 2 && spec.rows * spec.cols <= MOST_BYTES / dtype.size()
}

impl<B: Memory, C: Collective<B>> Sharded<B, C> {
    /// The steps of a validated call that [`Sharded`] supports, for any number of ranks.
    pub(crate) fn add_everywhere(
        &self,
        spec: &NormSpec,
        args: AnyForward<'_, B>,
        is_sent: &mut bool,
    ) -> Result<(), Error> {
        let Forward { x, y, residual, residual_out, weight, bias, mean, rstd, dtypes, .. } = args;
        let len = spec.rows * spec.cols;
        let of_ranks = RowShares { units: self.ranks(), unit: len, ranks: self.ranks() };
        let mut parts = self.room(dtypes.activation, of_ranks.len())?;
        let of_sum = self.room_if(matches!(residual, Some(Source::Overwrite(_))), dtypes.residual, len)?;

        let Some(x) = x else { return Ok(()) };
        in_one_exchange(is_sent, || self.all_gather(&of_ranks, sent(&x, len), parts.view_mut(0..of_ranks.len())))?;
        let Some(y) = written(x, y) else { return Ok(()) };
        self.add_parts(spec, &parts, of_sum, y, Beside { dtypes, residual, residual_out, weight, bias, mean, rstd })
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
