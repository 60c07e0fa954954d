//! Common parts of measuring GPUs.

use std::ops::Range;

use rmsnorm_core::{Element, Error};

use crate::Measurable;

/// Three matrices of all sets together exceed this many bytes: several times the L2 of any device.
const COLD_BYTES: usize = 512 << 20;

/// The largest number of sets. Small calls would otherwise need thousands.
const MOST_SETS: usize = 64;

/// The bytes of a matrix in sweeps.
pub(super) const SWEEP_BYTES: usize = 256 << 20;

/// The number of sets that together have [`COLD_BYTES`]. The peers are measured with the same
/// number.
pub(super) fn set_count(matrix_bytes: usize) -> usize {
    COLD_BYTES.div_ceil(3 * matrix_bytes.max(1)).clamp(2, MOST_SETS)
}

/// [`Measurable::repeat`] for GPUs: uploads only the period and repeats it with copies on the
/// device. Uploading gigabytes would take seconds.
pub(super) fn repeat<D: Measurable, T: Element>(
    device: &D,
    period: &[T],
    len: usize,
    count: usize,
) -> Result<Vec<D::Buffer<T>>, Error> {
    let from = device.upload(period)?;
    let repeated = |_| {
        let mut buffer = device.upload_parts(len, &[])?;
        repetitions(period.len(), len).try_for_each(|(part, place)| {
            Measurable::copy(device, device.view(&from, part), device.view_mut(&mut buffer, place), 0)
        })?;
        Ok(buffer)
    };
    (0..count).map(repeated).collect()
}

/// The copies that fill `len` elements with repetitions of the first `period`: (source,
/// destination).
fn repetitions(period: usize, len: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    (0..len).step_by(period.max(1)).map(move |start| {
        let part = 0..period.min(len - start);
        (part.clone(), start..start + part.len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_those_of_the_peers() {
        // bf16: 32768x4096, 4096x4096, 4096x1024, 1x4096.
        for (bytes, sets) in [(256 << 20, 2), (32 << 20, 6), (8 << 20, 22), (8 << 10, 64), (1, 64)] {
            assert_eq!(set_count(bytes), sets, "{bytes} bytes");
        }
    }

    #[test]
    fn repetitions_fill_all_of_it() {
        let all = |period, len| repetitions(period, len).collect::<Vec<_>>();
        assert_eq!(all(4, 10), [(0..4, 0..4), (0..4, 4..8), (0..2, 8..10)]);
        assert_eq!((all(4, 3), all(4, 0)), (vec![(0..3, 0..3)], vec![]));
    }
}
