//! The argument of every kernel: one struct, passed by value. `kernels/params.cuh` is its mirror. Kernels of calls without
//! groups of rows do not have the fields of those, nor others those of a next norm, nor those of parts, which come last.
//!
//! Kernels of halves of a call, on a rank's columns, have [`Columns`] beside it, whose mirror is `kernels/columns.cuh`.
//!
//! Sizes are checked where a program is compiled (`static_assert`), names and order by tests.

use std::mem::offset_of;

use rmsnorm_gpu::program::CallKey;
use rmsnorm_spec::Tensor;

/// A matrix on the device: address of its first element and elements from row to row. Address 0: absent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Matrix {
    pub(crate) data: u64,
    pub(crate) row_stride: u64,
}

/// Everything a kernel is told at run time. Absent tensors have address 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Params {
    /// x of forward; the normalized tensor of backward.
    pub(crate) x: Matrix,
    pub(crate) residual: Matrix,
    pub(crate) dy: Matrix,
    pub(crate) dresidual_out: Matrix,
    pub(crate) y: Matrix,
    pub(crate) residual_out: Matrix,
    pub(crate) dx: Matrix,
    pub(crate) weight: u64,
    pub(crate) bias: u64,
    /// Written by forward, read by backward.
    pub(crate) mean: u64,
    /// Written by forward, read by backward.
    pub(crate) rstd: u64,
    pub(crate) dweight: u64,
    pub(crate) dbias: u64,
    /// f32: partial rows of dweight, then those of dbias.
    pub(crate) partials: u64,
    /// u32: spin locks of `GradReduction::Locks`, zeroed before each call.
    pub(crate) locks: u64,
    /// f32: mean_wdy and mean_wdy_xhat of every row, where backward takes two passes over memory.
    pub(crate) row_sums: u64,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    /// Sets of rows whose gradients are summed one after the other; chunk c has the rows c, c + chunks, ...
    pub(crate) chunks: u64,
    /// Partial rows: the chunks, the groups of `Locks`, or a few; none where a call is split.
    pub(crate) partial_rows: u64,
    pub(crate) eps: f32,
    pub(crate) weight_offset: f32,
    /// 1 / cols, rounded: sums become averages by a product.
    pub(crate) share: f32,
    /// Padding, so that the size is the same on both sides.
    pub(crate) unused: u32,
    pub(crate) dresidual: Matrix,
    /// Kernels of calls that write no codes have neither this nor what follows.
    pub(crate) codes: Matrix,
    /// Its rows are columns.
    pub(crate) codes_t: Matrix,
    /// The scale that is given, or was found before.
    pub(crate) scale: u64,
    pub(crate) scales: u64,
    pub(crate) amax: u64,
    /// The largest magnitude, and the blocks that have looked for it.
    pub(crate) found: u64,
    /// Scales from row to row or from group to group, as their layout has it.
    pub(crate) scales_stride: u64,
    pub(crate) amax_floor: f32,
    pub(crate) amax_ceiling: f32,
    /// Its rows are columns.
    pub(crate) codes_columnwise: Matrix,
    pub(crate) scales_columnwise: u64,
    /// Scales from column to column or from group to group, as their layout has it.
    pub(crate) scales_columnwise_stride: u64,
    /// Rows of a group, where rows lie in groups. Kernels of other calls have neither this nor what follows.
    pub(crate) rows_per_group: u64,
    /// 2^64 / `rows_per_group`, rounded up: a product with it takes the place of a division.
    pub(crate) group_reciprocal: u64,
    pub(crate) x_group_stride: u64,
    pub(crate) residual_group_stride: u64,
    pub(crate) dy_group_stride: u64,
    pub(crate) dresidual_out_group_stride: u64,
    pub(crate) y_group_stride: u64,
    pub(crate) residual_out_group_stride: u64,
    pub(crate) dx_group_stride: u64,
    pub(crate) dresidual_group_stride: u64,
    pub(crate) codes_group_stride: u64,
    /// Kernels that norm once, and add no parts, have neither this nor what follows.
    pub(crate) next_weight: u64,
    pub(crate) next_bias: u64,
    pub(crate) next_mean: u64,
    pub(crate) next_rstd: u64,
    /// Matrices that x is the sum of. Kernels of calls with one have neither this nor what follows.
    pub(crate) parts: u64,
    /// Elements from one to the next.
    pub(crate) part_stride: u64,
}

/// Ranks that the columns of a row are divided among at the most.
pub(crate) const MOST_COLUMN_RANKS: usize = 64;

/// What ranks have found of their columns, or where this one's is written.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    /// f32: (rows, numbers), which a first half writes, or (ranks, rows, numbers), which a second one reads.
    pub(crate) numbers: u64,
    pub(crate) ranks: u32,
    /// Padding, so that the size is the same on both sides.
    pub(crate) unused: u32,
    /// How many columns each rank has.
    pub(crate) columns: [f32; MOST_COLUMN_RANKS],
}

/// Which fields are a tensor's: the one table of what says where a tensor lies and of what is asked of that.
macro_rules! fields_of_tensors {
    (
        in_groups { $($grouped:ident: $matrix:ident, $group_stride:ident;)* }
        matrices { $($plain:ident: $strided:ident;)* }
        vectors { $($vector:ident: $address:ident;)* }
    ) => {
        impl Params {
            /// Where a tensor lies; a vector has no row stride.
            pub(crate) const fn tensor(&self, tensor: Tensor) -> Matrix {
                match tensor {
                    $(Tensor::$grouped => self.$matrix,)*
                    $(Tensor::$plain => self.$strided,)*
                    $(Tensor::$vector => Matrix { data: self.$address, row_stride: 0 },)*
                }
            }

            /// Elements from group to group of a matrix; 0 of what lies in no groups.
            pub(crate) const fn group_stride(&self, tensor: Tensor) -> u64 {
                match tensor {
                    $(Tensor::$grouped => self.$group_stride,)*
                    $(Tensor::$plain)|* | $(Tensor::$vector)|* => 0,
                }
            }

            /// Says where a tensor lies; a vector has no strides.
            pub(crate) const fn place(&mut self, tensor: Tensor, matrix: Matrix, group_stride: u64) {
                match tensor {
                    $(Tensor::$grouped => (self.$matrix, self.$group_stride) = (matrix, group_stride),)*
                    $(Tensor::$plain => self.$strided = matrix,)*
                    $(Tensor::$vector => self.$address = matrix.data,)*
                }
            }
        }
    };
}

fields_of_tensors! {
    in_groups {
        X: x, x_group_stride;
        Residual: residual, residual_group_stride;
        Dy: dy, dy_group_stride;
        DresidualOut: dresidual_out, dresidual_out_group_stride;
        Y: y, y_group_stride;
        ResidualOut: residual_out, residual_out_group_stride;
        Dx: dx, dx_group_stride;
        Dresidual: dresidual, dresidual_group_stride;
        Codes: codes, codes_group_stride;
    }
    // Their rows are columns.
    matrices { CodesT: codes_t; CodesColumnwise: codes_columnwise; }
    vectors {
        Weight: weight; Bias: bias; Mean: mean; Rstd: rstd; Dweight: dweight; Dbias: dbias; Workspace: partials;
        Scale: scale; Scales: scales; Amax: amax; ScalesColumnwise: scales_columnwise;
        NextWeight: next_weight; NextBias: next_bias; NextMean: next_mean; NextRstd: next_rstd;
    }
}

impl Params {
    /// Bytes that a kernel of such a call is told: up to the last field that it reads.
    pub(crate) const fn bytes(call: &CallKey) -> usize {
        if call.has_parts {
            size_of::<Params>()
        } else if call.form.norms_twice() {
            offset_of!(Params, parts)
        } else if call.has_row_groups {
            offset_of!(Params, next_weight)
        } else if call.quant.is_some() {
            offset_of!(Params, rows_per_group)
        } else {
            offset_of!(Params, codes)
        }
    }
}
