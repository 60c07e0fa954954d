//! The layout of block scales.

/// The memory layout of a matrix of scales, one for each row and group of columns. Padding is
/// written as zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// (rows, groups), dense: easy to read, or to convert.
    #[default]
    RowMajor,
    /// (groups, `ld`), at `group * ld + row`: for matrix products on Hopper.
    ColumnMajor {
        /// Scales from group to group, at least the number of rows.
        ld: usize,
    },
    /// (groups / 4, `ld`, 4) bytes, at `(group / 4 * ld + row) * 4 + group % 4`: for DeepGEMM on
    /// Blackwell.
    PackedUe8m0 {
        /// Words of 4 bytes from one group of four to the next, at least the number of rows.
        ld: usize,
    },
    /// (rows / 128, groups / 4) tiles of 512 bytes, in each at
    /// `row % 32 * 16 + row % 128 / 32 * 4 + group % 4`: for cuBLAS and tcgen05.
    Swizzled128x4,
}

impl ScaleLayout {
    /// The number of scales, padding included; `None` if it exceeds `usize`, or if `ld` is less
    /// than the number of rows.
    pub fn len(self, rows: usize, groups: usize) -> Option<usize> {
        match self {
            ScaleLayout::ColumnMajor { ld } | ScaleLayout::PackedUe8m0 { ld } if ld < rows => None,
            ScaleLayout::RowMajor => rows.checked_mul(groups),
            ScaleLayout::ColumnMajor { ld } => groups.checked_mul(ld),
            ScaleLayout::PackedUe8m0 { ld } => groups.div_ceil(4).checked_mul(ld)?.checked_mul(4),
            ScaleLayout::Swizzled128x4 => rows.div_ceil(128).checked_mul(groups.div_ceil(4))?.checked_mul(512),
        }
    }

    /// The index of the scale of a row and group, in a matrix with `groups` groups in a row.
    pub const fn index(self, groups: usize, row: usize, group: usize) -> usize {
        match self {
            ScaleLayout::RowMajor => row * groups + group,
            ScaleLayout::ColumnMajor { ld } => group * ld + row,
            ScaleLayout::PackedUe8m0 { ld } => (group / 4 * ld + row) * 4 + group % 4,
            ScaleLayout::Swizzled128x4 => {
                let tile = row / 128 * groups.div_ceil(4) + group / 4;
                tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_scale_has_a_place_of_its_own() {
        for (rows, groups) in [(0, 3), (1, 1), (5, 3), (128, 4), (129, 5), (300, 9), (3, 130)] {
            for layout in [
                ScaleLayout::RowMajor,
                ScaleLayout::ColumnMajor { ld: rows },
                ScaleLayout::ColumnMajor { ld: rows.next_multiple_of(4) + 4 },
                ScaleLayout::PackedUe8m0 { ld: rows },
                ScaleLayout::PackedUe8m0 { ld: rows + 7 },
                ScaleLayout::Swizzled128x4,
            ] {
                let len = layout.len(rows, groups).unwrap();
                let of_row = |row| (0..groups).map(move |group| layout.index(groups, row, group));
                let places: BTreeSet<usize> = (0..rows).flat_map(of_row).collect();
                assert_eq!(places.len(), rows * groups, "{layout:?} {rows}x{groups}");
                assert!(places.iter().all(|place| *place < len), "{layout:?} {rows}x{groups}: {len}");
            }
        }
    }

    /// By hand, from the documentation of the libraries that read them.
    #[test]
    fn layouts_are_those_of_their_readers() {
        let index = |layout: ScaleLayout, row, group| layout.index(6, row, group);
        assert_eq!(index(ScaleLayout::RowMajor, 2, 5), 17);
        assert_eq!(index(ScaleLayout::ColumnMajor { ld: 8 }, 2, 5), 42);
        // The second group of 4: row 2, second byte.
        assert_eq!(index(ScaleLayout::PackedUe8m0 { ld: 8 }, 2, 5), (8 + 2) * 4 + 1);
        let swizzled = |row, group| index(ScaleLayout::Swizzled128x4, row, group);
        assert_eq!([swizzled(0, 0), swizzled(0, 3), swizzled(1, 0), swizzled(31, 0)], [0, 3, 16, 496]);
        assert_eq!([swizzled(32, 0), swizzled(64, 1), swizzled(127, 3)], [4, 9, 511]);
        // The next tile along the columns, then along the rows, with two tiles in a row.
        assert_eq!([swizzled(0, 4), swizzled(128, 0), swizzled(128, 4)], [512, 1024, 1536]);
    }

    #[test]
    fn lengths_have_room_for_padding_and_do_not_wrap() {
        let len = |layout: ScaleLayout| layout.len(129, 5);
        assert_eq!(len(ScaleLayout::RowMajor), Some(645));
        assert_eq!(len(ScaleLayout::ColumnMajor { ld: 132 }), Some(660));
        assert_eq!(len(ScaleLayout::PackedUe8m0 { ld: 132 }), Some(2 * 132 * 4));
        assert_eq!(len(ScaleLayout::Swizzled128x4), Some(4 * 512));
        assert_eq!(ScaleLayout::ColumnMajor { ld: 128 }.len(129, 5), None);
        assert_eq!(ScaleLayout::PackedUe8m0 { ld: 128 }.len(129, 5), None);
        let most = usize::MAX;
        assert_eq!(ScaleLayout::RowMajor.len(most, 2), None);
        assert_eq!(ScaleLayout::ColumnMajor { ld: most }.len(1, 2), None);
        assert_eq!(ScaleLayout::PackedUe8m0 { ld: most / 2 }.len(1, 1), None);
        assert_eq!(ScaleLayout::Swizzled128x4.len(most, 1), None);
    }
}
