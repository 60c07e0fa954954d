//! The argument of every kernel: one struct, passed by value. `kernels/params.cuh` mirrors it.
//! Fields of row groups, of a next norm and of parts come last, in this order; kernels without
//! these features lack the trailing fields.
//!
//! The phases of a call on column-divided rows have a second argument, [`Columns`], which
//! `kernels/columns.cuh` mirrors.
//!
//! Sizes are checked where a program is compiled (`static_assert`), names and order by tests.

use std::mem::offset_of;

use rmsnorm_gpu::program::CallKey;
use rmsnorm_spec::Tensor;

/// A matrix on the device: the address of its first element, and the stride between rows in
/// elements. Address 0 means absent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Matrix {
    pub(crate) data: u64,
    pub(crate) row_stride: u64,
}

/// The run-time arguments of a kernel. Absent tensors have address 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Params {
    /// x in forward; the normalized tensor in backward.
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
    /// f32: partial sums of dweight, then of dbias, one row each.
    pub(crate) partials: u64,
    /// u32: spin locks of `GradReduction::Locks`, zeroed before each call.
    pub(crate) locks: u64,
    /// f32: mean_wdy and mean_wdy_xhat of every row, for a backward that reads memory twice.
    pub(crate) row_sums: u64,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    /// Sets of rows whose gradients are summed serially; chunk c has the rows c, c + chunks, ...
    pub(crate) chunks: u64,
    /// Rows of partial sums: one per chunk, one per group of `Locks`, or a few; none for a split
    /// call.
    pub(crate) partial_rows: u64,
    pub(crate) eps: f32,
    pub(crate) weight_offset: f32,
    /// 1 / cols, rounded: turns sums into averages.
    pub(crate) share: f32,
    /// Padding, so that Rust and CUDA agree on the size.
    pub(crate) unused: u32,
    pub(crate) dresidual: Matrix,
    /// Absent, with all later fields, in kernels that write no codes.
    pub(crate) codes: Matrix,
    /// Transposed: its rows are columns.
    pub(crate) codes_t: Matrix,
    /// The scale that the caller passed, or that an earlier kernel wrote.
    pub(crate) scale: u64,
    pub(crate) scales: u64,
    pub(crate) amax: u64,
    /// The largest magnitude, and the number of blocks that have contributed.
    pub(crate) found: u64,
    /// Scales between rows or between groups, as the layout requires.
    pub(crate) scales_stride: u64,
    pub(crate) amax_floor: f32,
    pub(crate) amax_ceiling: f32,
    /// Transposed: its rows are columns.
    pub(crate) codes_columnwise: Matrix,
    pub(crate) scales_columnwise: u64,
    /// Scales between columns or between groups, as the layout requires.
    pub(crate) scales_columnwise_stride: u64,
    /// Rows of a group. Absent, with all later fields, in kernels without row groups.
    pub(crate) rows_per_group: u64,
    /// 2^64 / `rows_per_group`, rounded up: a product with it replaces a division.
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
    /// Absent, with all later fields, in kernels without a second norm and without parts.
    pub(crate) next_weight: u64,
    pub(crate) next_bias: u64,
    pub(crate) next_mean: u64,
    pub(crate) next_rstd: u64,
    /// x is the sum of this many matrices. Absent, with all later fields, in kernels with one
    /// matrix.
    pub(crate) parts: u64,
    /// Elements between parts.
    pub(crate) part_stride: u64,
}

/// The largest number of ranks that the columns of a row can be divided among.
pub(crate) const MOST_COLUMN_RANKS: usize = 64;

/// The second argument of kernels on column-divided rows: the ranks' statistics and column counts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    /// f32 statistics: (rows, numbers), written by the first phase, or (ranks, rows, numbers), read
    /// by the second.
    pub(crate) numbers: u64,
    pub(crate) ranks: u32,
    /// Padding, so that Rust and CUDA agree on the size.
    pub(crate) unused: u32,
    /// The number of columns of each rank.
    pub(crate) columns: [f32; MOST_COLUMN_RANKS],
}

/// The table from tensors to fields, for reading and writing addresses and strides.
macro_rules! fields_of_tensors {
    (
        in_groups { $($grouped:ident: $matrix:ident, $group_stride:ident;)* }
        matrices { $($plain:ident: $strided:ident;)* }
        vectors { $($vector:ident: $address:ident;)* }
    ) => {
        impl Params {
            /// The address and row stride of a tensor; a vector has no row stride.
            pub(crate) const fn tensor(&self, tensor: Tensor) -> Matrix {
                match tensor {
                    $(Tensor::$grouped => self.$matrix,)*
                    $(Tensor::$plain => self.$strided,)*
                    $(Tensor::$vector => Matrix { data: self.$address, row_stride: 0 },)*
                }
            }

            /// Elements between groups of a matrix; 0 for ungrouped tensors.
            pub(crate) const fn group_stride(&self, tensor: Tensor) -> u64 {
                match tensor {
                    $(Tensor::$grouped => self.$group_stride,)*
                    $(Tensor::$plain)|* | $(Tensor::$vector)|* => 0,
                }
            }

            /// Sets the address and strides of a tensor; a vector has no strides.
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
    // Transposed: their rows are columns.
    matrices { CodesT: codes_t; CodesColumnwise: codes_columnwise; }
    vectors {
        Weight: weight; Bias: bias; Mean: mean; Rstd: rstd; Dweight: dweight; Dbias: dbias; Workspace: partials;
        Scale: scale; Scales: scales; Amax: amax; ScalesColumnwise: scales_columnwise;
        NextWeight: next_weight; NextBias: next_bias; NextMean: next_mean; NextRstd: next_rstd;
    }
}

impl Params {
    /// The size in bytes of the argument of a kernel: up to the last field that it reads.
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
