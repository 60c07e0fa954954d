//! The types of codes and scales of an operator, and their layouts for PyTorch's `_scaled_mm`.

use rmsnorm_core::quant::{CodeType, QuantSpec, ScaleKind, ScaleLayout, ScaleRounding};
use rmsnorm_core::{Error, Storage};

use super::shim::Shim;
use super::tensor::{DeviceOf, Owned};
use crate::call::F32;

/// The kinds of scales. The index is the operator's argument `scale_kind`.
const KINDS: [ScaleKind; 5] = [
    ScaleKind::Given,
    ScaleKind::Current,
    ScaleKind::Row,
    ScaleKind::Block { cols: 128, is_power_of_two: false },
    ScaleKind::Mx { rounding: ScaleRounding::Up },
];

/// The `QuantSpec` of a call with `rows` rows.
///
/// # Errors
/// `InvalidArgument` if a number is out of range.
pub(super) fn spec(codes: i64, kind: i64, rows: usize) -> Result<QuantSpec, Error> {
    let index = |number: i64| usize::try_from(number).unwrap_or(usize::MAX);
    let unknown = |arg, count: usize, got| Error::InvalidArgument {
        arg,
        rule: format!("expected a number from 0 to {}, got {got}", count - 1),
    };
    let codes = *CodeType::ALL.get(index(codes)).ok_or_else(|| unknown("codes_type", CodeType::ALL.len(), codes))?;
    let kind = *KINDS.get(index(kind)).ok_or_else(|| unknown("scale_kind", KINDS.len(), kind))?;
    let spec = QuantSpec::new(codes, kind);
    Ok(match kind {
        ScaleKind::Given | ScaleKind::Current | ScaleKind::Row => spec,
        ScaleKind::Block { .. } => spec.layout(ScaleLayout::ColumnMajor { ld: rows }),
        ScaleKind::Mx { .. } => spec.layout(ScaleLayout::Swizzled128x4),
    })
}

/// A new tensor for the scales: empty for a given scale, a scalar for one per tensor, (.., 1) for
/// one per row, column-major (rows, blocks) for one per block, the bytes of the tiles for MX.
pub(super) fn scales<'s>(
    shim: &'s Shim,
    quant: &QuantSpec,
    dims: &[i64],
    (rows, cols): (usize, usize),
    on: DeviceOf,
) -> Result<Owned<'s>, Error> {
    let blocks = quant.scale.groups(cols).unwrap_or(0) as i64;
    match quant.scale {
        ScaleKind::Given => Owned::empty(shim, &[0], F32, on),
        ScaleKind::Current => Owned::empty(shim, &[], F32, on),
        ScaleKind::Row => {
            let mut dims = dims.to_vec();
            if let Some(last) = dims.last_mut() {
                *last = 1;
            }
            Owned::empty(shim, &dims, F32, on)
        }
        ScaleKind::Block { .. } => {
            Owned::with_strides(shim, &[rows as i64, blocks], &[1, (rows as i64).max(1)], F32, on)
        }
        ScaleKind::Mx { .. } => {
            let len = quant.scales_len(rows, cols).ok_or(Error::EmptyRow)?;
            Owned::empty(shim, &[len as i64], Storage::E8m0, on)
        }
    }
}
