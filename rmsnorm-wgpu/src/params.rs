//! What every program is told at run time: one uniform buffer. `shaders/params.wgsl` is its mirror.
//!
//! A test compares sizes, names and offsets with what naga reads there.

use bytemuck::{Pod, Zeroable};
use rmsnorm_spec::Tensor;

/// Where a tensor lies in its binding, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Place {
    pub(crate) first: u32,
    /// 0 for vectors.
    pub(crate) row_stride: u32,
}

/// Everything a program is told at run time. What is absent is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct Params {
    /// x of forward; the normalized tensor of backward.
    pub(crate) x: Place,
    pub(crate) residual: Place,
    pub(crate) dy: Place,
    pub(crate) dresidual_out: Place,
    /// In place it is x as well.
    pub(crate) y: Place,
    /// In place it is the residual as well.
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
    /// First f32 of the dispatch's row sums, in the binding of the workspace; even.
    pub(crate) row_sums: u32,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    /// Sets of the dispatch's rows whose gradients are summed one after the other.
    pub(crate) chunks: u32,
    /// Partial rows of each gradient.
    pub(crate) partial_rows: u32,
    pub(crate) eps: f32,
    pub(crate) weight_offset: f32,
    /// 1 / cols, rounded: sums become averages by a product.
    pub(crate) share: f32,
    /// Partial row of the first chunk.
    pub(crate) first_chunk: u32,
    /// 1 where the partial rows hold sums of earlier dispatches, to be added to; else 0.
    pub(crate) accumulates: u32,
    /// 0, which compilers cannot know: added to an index it keeps them from holding in registers what was loaded. With it
    /// the whole is a multiple of 16 bytes, which is what some devices ask of uniform buffers.
    pub(crate) zero: u32,
}

impl Params {
    /// Says where a tensor lies in its binding.
    pub(crate) const fn place(&mut self, tensor: Tensor, place: Place) {
        match tensor {
            Tensor::X => self.x = place,
            Tensor::Residual => self.residual = place,
            Tensor::Weight => self.weight = place,
            Tensor::Bias => self.bias = place,
            Tensor::Y => self.y = place,
            Tensor::ResidualOut => self.residual_out = place,
            Tensor::Mean => self.mean = place.first,
            Tensor::Rstd => self.rstd = place.first,
            Tensor::Dy => self.dy = place,
            Tensor::DresidualOut => self.dresidual_out = place,
            Tensor::Dx => self.dx = place,
            Tensor::Dweight => self.dweight = place,
            Tensor::Dbias => self.dbias = place,
            Tensor::Workspace => {
                self.workspace = place.first;
                // The plan counts from the workspace's start.
                self.row_sums += place.first;
            }
        }
    }
}
