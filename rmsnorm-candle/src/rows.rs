//! candle's layouts as rows.

use std::ops::Range;

use candle_core::{Layout, Result, Tensor, bail};
use rmsnorm_core::RowLayout;

/// The rows of a tensor, relative to its start offset. `None` if they need more than two strides,
/// or overlap.
fn fold(layout: &Layout) -> Option<RowLayout> {
    if layout.is_contiguous() {
        return RowLayout::dense(layout.dims());
    }
    let strides: Option<Vec<isize>> = layout.stride().iter().map(|stride| isize::try_from(*stride).ok()).collect();
    RowLayout::fold(layout.dims(), &strides?)
}

/// The tensor itself if the kernels can read its rows, otherwise a contiguous copy, with a
/// gradient.
pub(crate) fn regular(x: &Tensor) -> Result<Tensor> {
    if is_regular(x.layout()) { Ok(x.clone()) } else { x.contiguous() }
}

/// Whether the kernels can read these rows without a copy.
pub(crate) fn is_regular(layout: &Layout) -> bool {
    fold(layout).is_some()
}

/// Rows in a storage.
pub(crate) struct Place {
    pub(crate) rows: RowLayout,
    pub(crate) range: Range<usize>,
}

impl Place {
    /// The place of a tensor that [`is_regular`].
    pub(crate) fn of(layout: &Layout) -> Result<Place> {
        let Some(rows) = fold(layout) else {
            bail!("the rows of {layout:?} overlap or need more than two strides: call contiguous()")
        };
        let start = layout.start_offset();
        Ok(Place { rows, range: start..start.saturating_add(rows.span()) })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use rmsnorm_core::RowGroups;

    use super::*;

    #[test]
    fn views_with_two_strides_are_rows_where_they_lie() {
        let qkv = Tensor::zeros((2, 5, 3 * 8), DType::F32, &Device::Cpu).unwrap();
        let at = |t: Tensor| {
            let place = Place::of(t.layout()).ok()?;
            Some((place.rows.rows, place.rows.cols, place.rows.row_stride, place.rows.groups, place.range))
        };
        let groups = |rows, stride| Some(RowGroups { rows, stride });
        assert_eq!(at(qkv.clone()), Some((10, 24, 24, None, 0..240)));
        assert_eq!(at(qkv.narrow(2, 8, 8).unwrap()), Some((10, 8, 24, None, 8..232)));
        assert_eq!(at(qkv.narrow(1, 1, 2).unwrap()), Some((4, 24, 24, groups(2, 120), 24..192)));
        assert_eq!(at(qkv.narrow(0, 1, 1).unwrap()), Some((5, 24, 24, None, 120..240)));
        let heads = qkv.reshape((10, 6, 4)).unwrap().narrow(1, 2, 2).unwrap();
        assert_eq!(at(heads), Some((20, 4, 4, groups(2, 24), 8..232)));
        assert_eq!(at(qkv.narrow(2, 3, 1).unwrap()), Some((10, 1, 24, None, 3..220)));
        assert_eq!(at(qkv.narrow(0, 0, 0).unwrap()).map(|place| (place.0, place.4)), Some((0, 0..0)));
        for irregular in [qkv.transpose(0, 1).unwrap(), qkv.transpose(1, 2).unwrap()] {
            assert_eq!(at(irregular.clone()), None);
            assert!(regular(&irregular).unwrap().is_contiguous());
        }
        let row = Tensor::zeros(8, DType::F32, &Device::Cpu).unwrap();
        assert_eq!(at(row.clone()), Some((1, 8, 8, None, 0..8)));
        assert_eq!(at(row.broadcast_as((4, 8)).unwrap()), None, "a row that is repeated");
    }
}
