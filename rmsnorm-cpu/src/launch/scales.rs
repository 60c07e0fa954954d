//! Scales of rows and blocks. A stage writes them row by row, each task its own: in place where they lie so, and else into memory of
//! the call, from where they are laid out with their padding.

use rmsnorm_spec::Scales;
use rmsnorm_spec::quant::{QuantSpec, ScaleLayout, ScaleType};
use rmsnorm_spec::{AnyOut, Error, Rows, Stored};

use super::{SliceBackend, no_room, out};
use crate::lanes::Out;
use crate::stages::quantized_forward::Scaling;
use crate::stages::{MatrixMut, RowStarts};

/// A call's scales, to be written.
pub(super) type ScalesOut<'a> = Scales<Out<'a, f32>, Out<'a, u8>>;

/// What a stage writes them to.
pub(super) fn scales_out<'a, B: SliceBackend>(
    scales: Scales<AnyOut<'a, B>, AnyOut<'a, B>>,
) -> Result<ScalesOut<'a>, Error> {
    Ok(match scales {
        Scales::F32(scales) => Scales::F32(out::<B, f32>(scales)?),
        Scales::E8m0(scales) => Scales::E8m0(out::<B, u8>(scales)?),
    })
}

/// Scales row by row, of a call that wants them to lie otherwise.
#[derive(Default)]
pub(super) struct Compact {
    f32: Vec<f32>,
    e8m0: Vec<u8>,
}

impl Compact {
    /// Room for so many, if they do not lie row by row anyway.
    pub(super) fn new(quant: &QuantSpec, len: usize) -> Result<Self, Error> {
        let mut compact = Compact::default();
        if quant.layout != ScaleLayout::RowMajor {
            match quant.scale_type() {
                ScaleType::F32 => compact.f32 = room(len)?,
                ScaleType::E8m0 => compact.e8m0 = room(len)?,
            }
        }
        Ok(compact)
    }

    /// Where a stage puts them.
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

    /// Writes them where they are to lie, and zeros between them.
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

fn room<E: Stored>(len: usize) -> Result<Vec<E>, Error> {
    let mut room = Vec::new();
    room.try_reserve_exact(len).map_err(|error| no_room::<E>("scales", len, &error))?;
    room.resize(len, E::from_bits(0));
    Ok(room)
}

fn matrix<E: Stored>(data: Out<'_, E>, groups: usize) -> MatrixMut<'_, E> {
    // Each row's start is all that is asked for.
    MatrixMut { data, rows: RowStarts::of(Rows::dense(()).layout(0, groups)) }
}

fn copy<E: Copy>(to: &mut [E], from: &[E], (rows, groups): (usize, usize), place: impl Fn(usize, usize) -> usize) {
    for row in 0..rows {
        for group in 0..groups {
            to[place(row, group)] = from[row * groups + group];
        }
    }
}
