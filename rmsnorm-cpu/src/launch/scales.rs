//! Scales of rows and blocks. A stage writes them row by row, each task its own rows: directly if
//! the layout is row by row, otherwise into a temporary buffer that is then copied to the layout
//! with its padding.

use rmsnorm_spec::Scales;
use rmsnorm_spec::quant::{QuantSpec, ScaleLayout, ScaleType};
use rmsnorm_spec::{AnyElement, AnyOut, Error, Rows};

use super::{SliceBackend, out};
use crate::lanes::Out;
use crate::memory::zeros;
use crate::stages::quantized_forward::Scaling;
use crate::stages::{MatrixMut, RowStarts};

/// The scales output of a call.
pub(super) type ScalesOut<'a> = Scales<Out<'a, f32>, Out<'a, u8>>;

/// Converts the scales output of a call.
pub(super) fn scales_out<'a, B: SliceBackend>(
    scales: Scales<AnyOut<'a, B>, AnyOut<'a, B>>,
) -> Result<ScalesOut<'a>, Error> {
    Ok(match scales {
        Scales::F32(scales) => Scales::F32(out::<B, f32>(scales)?),
        Scales::E8m0(scales) => Scales::E8m0(out::<B, u8>(scales)?),
    })
}

/// A temporary buffer of scales row by row, for calls with another layout.
#[derive(Default)]
pub(super) struct Compact {
    f32: Vec<f32>,
    e8m0: Vec<u8>,
}

impl Compact {
    /// Room for `len` scales, unless the layout is row by row.
    pub(super) fn new(quant: &QuantSpec, len: usize) -> Result<Self, Error> {
        let mut compact = Compact::default();
        if quant.layout != ScaleLayout::RowMajor {
            match quant.scale_type() {
                ScaleType::F32 => compact.f32 = zeros("scales", len)?,
                ScaleType::E8m0 => compact.e8m0 = zeros("scales", len)?,
            }
        }
        Ok(compact)
    }

    /// The destination of a stage's scales.
    pub(super) fn scaling<'a>(
        &'a mut self,
        quant: &QuantSpec,
        scales: &'a mut ScalesOut<'_>,
        groups: usize,
    ) -> Scaling<'a> {
        let is_compact = quant.layout != ScaleLayout::RowMajor;
        match scales {
            Scales::F32(_) if is_compact => Scaling::F32(matrix(Out::from(&mut self.f32[..]), groups)),
            Scales::E8m0(_) if is_compact => Scaling::E8m0(matrix(Out::from(&mut self.e8m0[..]), groups)),
            Scales::F32(scales) => Scaling::F32(matrix(scales.reborrow(), groups)),
            Scales::E8m0(scales) => Scaling::E8m0(matrix(scales.reborrow(), groups)),
        }
    }

    /// Copies the scales to the call's layout, and zeros the gaps.
    pub(super) fn lay_out(&self, quant: &QuantSpec, scales: ScalesOut<'_>, (rows, groups): (usize, usize)) {
        if quant.layout == ScaleLayout::RowMajor {
            return;
        }
        let place = |row, group| quant.layout.index(groups, row, group);
        match scales {
            Scales::F32(scales) => copy(scales.filled(0.0), &self.f32, (rows, groups), place),
            Scales::E8m0(scales) => copy(scales.filled(0), &self.e8m0, (rows, groups), place),
        }
    }
}

fn matrix<E: AnyElement>(data: Out<'_, E>, groups: usize) -> MatrixMut<'_, E> {
    // Only the starts of rows are used.
    MatrixMut { data, rows: RowStarts::of(Rows::dense(()).layout(0, groups)) }
}

fn copy<E: Copy>(to: &mut [E], from: &[E], (rows, groups): (usize, usize), place: impl Fn(usize, usize) -> usize) {
    for row in 0..rows {
        for group in 0..groups {
            to[place(row, group)] = from[row * groups + group];
        }
    }
}
