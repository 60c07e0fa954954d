//! The run-time parameters of every program, in one uniform buffer. `shaders/params.wgsl` is its
//! mirror; a test compares sizes, names and offsets with naga's.

use bytemuck::{Pod, Zeroable};
use rmsnorm_spec::Tensor;

/// Position of a tensor in its binding, in elements. The stride of a vector is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Place {
    /// First element of row 0 of the dispatch. If rows are in groups: of the first row in row 0's
    /// group, which may lie before the binding, so index sums wrap.
    pub(crate) first: u32,
    pub(crate) row_stride: u32,
}

/// All run-time parameters of a program. Absent ones are 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct Params {
    /// x of forward; the normalized tensor of backward.
    pub(crate) x: Place,
    pub(crate) residual: Place,
    pub(crate) dy: Place,
    pub(crate) dresidual_out: Place,
    /// Also x, if in place.
    pub(crate) y: Place,
    /// Also the residual, if in place.
    pub(crate) residual_out: Place,
    pub(crate) dx: Place,
    pub(crate) weight: Place,
    pub(crate) bias: Place,
    pub(crate) dweight: Place,
    pub(crate) dbias: Place,
    /// First element.
    pub(crate) mean: u32,
    /// First element.
    pub(crate) rstd: u32,
    /// First f32 of the partial rows; a multiple of 4.
    pub(crate) workspace: u32,
    /// First f32 of the dispatch's row sums in the workspace binding; even.
    pub(crate) row_sums: u32,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    /// Chunks of the dispatch's rows; the gradients of a chunk are summed sequentially.
    pub(crate) chunks: u32,
    /// Rows of partial sums of each gradient.
    pub(crate) partial_rows: u32,
    pub(crate) eps: f32,
    pub(crate) weight_offset: f32,
    /// 1 / cols, rounded; turns sums into averages.
    pub(crate) share: f32,
    /// Partial row of the first chunk.
    pub(crate) first_chunk: u32,
    /// 1 if the sums are added to partial rows of earlier dispatches, otherwise 0.
    pub(crate) accumulates: u32,
    /// 0, unknown to the compiler. Added to an index, it prevents the compiler from keeping an
    /// earlier load in registers.
    pub(crate) zero: u32,
    pub(crate) dresidual: Place,
    /// Rows of a group, if rows are in groups.
    pub(crate) rows_per_group: u32,
    /// Rows of the first group that belong to earlier dispatches.
    pub(crate) first_in_group: u32,
    pub(crate) x_group_stride: u32,
    pub(crate) residual_group_stride: u32,
    pub(crate) dy_group_stride: u32,
    pub(crate) dresidual_out_group_stride: u32,
    pub(crate) y_group_stride: u32,
    pub(crate) residual_out_group_stride: u32,
    pub(crate) dx_group_stride: u32,
    pub(crate) dresidual_group_stride: u32,
    pub(crate) codes_group_stride: u32,
    /// Rows of earlier dispatches; the scales of all rows are bound.
    pub(crate) first_row: u32,
    pub(crate) codes: Place,
    pub(crate) codes_t: Place,
    /// First element (first byte, for scales that are bytes). The same for the next two.
    pub(crate) scale: u32,
    pub(crate) scales: u32,
    pub(crate) amax: u32,
    /// Stride in the scale layout: groups or tiles of a row, or `ld`.
    pub(crate) scales_stride: u32,
    /// Bits of a non-negative f32: shaders compare magnitudes as bits.
    pub(crate) amax_floor: u32,
    pub(crate) amax_ceiling: u32,
    pub(crate) codes_columnwise: Place,
    pub(crate) scales_columnwise: u32,
    /// As `scales_stride`, for the transposed matrix.
    pub(crate) scales_columnwise_stride: u32,
    pub(crate) next_weight: Place,
    pub(crate) next_bias: Place,
    /// First element.
    pub(crate) next_mean: u32,
    /// First element.
    pub(crate) next_rstd: u32,
    /// Padding, so that the size is a multiple of 16.
    pub(crate) unused: Place,
}

impl Params {
    /// Sets the position of a tensor in its binding. Vectors have no group stride.
    pub(crate) const fn place(&mut self, tensor: Tensor, place: Place, group_stride: u32) {
        match tensor {
            Tensor::X => (self.x, self.x_group_stride) = (place, group_stride),
            Tensor::Residual => (self.residual, self.residual_group_stride) = (place, group_stride),
            Tensor::Dy => (self.dy, self.dy_group_stride) = (place, group_stride),
            Tensor::DresidualOut => (self.dresidual_out, self.dresidual_out_group_stride) = (place, group_stride),
            Tensor::Y => (self.y, self.y_group_stride) = (place, group_stride),
            Tensor::ResidualOut => (self.residual_out, self.residual_out_group_stride) = (place, group_stride),
            Tensor::Dx => (self.dx, self.dx_group_stride) = (place, group_stride),
            Tensor::Dresidual => (self.dresidual, self.dresidual_group_stride) = (place, group_stride),
            Tensor::Weight => self.weight = place,
            Tensor::Bias => self.bias = place,
            Tensor::Mean => self.mean = place.first,
            Tensor::Rstd => self.rstd = place.first,
            Tensor::Dweight => self.dweight = place,
            Tensor::Dbias => self.dbias = place,
            Tensor::Codes => (self.codes, self.codes_group_stride) = (place, group_stride),
            // Its rows are not in groups.
            Tensor::CodesT => self.codes_t = place,
            Tensor::Scale => self.scale = place.first,
            Tensor::Scales => self.scales = place.first,
            Tensor::Amax => self.amax = place.first,
            Tensor::CodesColumnwise => self.codes_columnwise = place,
            Tensor::ScalesColumnwise => self.scales_columnwise = place.first,
            Tensor::NextWeight => self.next_weight = place,
            Tensor::NextBias => self.next_bias = place,
            Tensor::NextMean => self.next_mean = place.first,
            Tensor::NextRstd => self.next_rstd = place.first,
            Tensor::Workspace => {
                self.workspace = place.first;
                // The plan counts row sums from the start of the workspace.
                self.row_sums += place.first;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The position of a tensor, as the program reads it.
    fn first(params: &Params, tensor: Tensor) -> u32 {
        match tensor {
            Tensor::X => params.x.first,
            Tensor::Residual => params.residual.first,
            Tensor::Weight => params.weight.first,
            Tensor::Bias => params.bias.first,
            Tensor::Y => params.y.first,
            Tensor::ResidualOut => params.residual_out.first,
            Tensor::Mean => params.mean,
            Tensor::Rstd => params.rstd,
            Tensor::Dy => params.dy.first,
            Tensor::DresidualOut => params.dresidual_out.first,
            Tensor::Dresidual => params.dresidual.first,
            Tensor::Dx => params.dx.first,
            Tensor::Dweight => params.dweight.first,
            Tensor::Dbias => params.dbias.first,
            Tensor::Workspace => params.workspace,
            Tensor::Codes => params.codes.first,
            Tensor::CodesT => params.codes_t.first,
            Tensor::Scale => params.scale,
            Tensor::Scales => params.scales,
            Tensor::Amax => params.amax,
            Tensor::CodesColumnwise => params.codes_columnwise.first,
            Tensor::ScalesColumnwise => params.scales_columnwise,
            Tensor::NextWeight => params.next_weight.first,
            Tensor::NextBias => params.next_bias.first,
            Tensor::NextMean => params.next_mean,
            Tensor::NextRstd => params.next_rstd,
        }
    }

    /// Each tensor has its position, and row sums move with the workspace.
    #[test]
    fn tensors_are_where_they_were_placed() {
        let mut params = Params { row_sums: 1000, ..Params::default() };
        for tensor in Tensor::ALL {
            params.place(tensor, Place { first: 1 + tensor as u32, row_stride: 100 }, 200 + tensor as u32);
        }
        for tensor in Tensor::ALL {
            assert_eq!(first(&params, tensor), 1 + tensor as u32, "{tensor}");
        }
        assert_eq!(params.row_sums, 1001 + Tensor::Workspace as u32);
        let strides = [
            params.x,
            params.residual,
            params.y,
            params.residual_out,
            params.dy,
            params.dresidual_out,
            params.dx,
            params.dresidual,
            params.codes,
            params.codes_t,
        ];
        assert!(strides.iter().all(|place| place.row_stride == 100));
        let group_strides = [
            (Tensor::X, params.x_group_stride),
            (Tensor::Residual, params.residual_group_stride),
            (Tensor::Dy, params.dy_group_stride),
            (Tensor::DresidualOut, params.dresidual_out_group_stride),
            (Tensor::Y, params.y_group_stride),
            (Tensor::ResidualOut, params.residual_out_group_stride),
            (Tensor::Dx, params.dx_group_stride),
            (Tensor::Dresidual, params.dresidual_group_stride),
            (Tensor::Codes, params.codes_group_stride),
        ];
        assert!(group_strides.iter().all(|(tensor, stride)| *stride == 200 + *tensor as u32), "{group_strides:?}");
    }
}
