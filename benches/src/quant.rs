//! The measured quantizations.

use rmsnorm_core::quant::{CodeType, QuantSpec, ScaleKind, ScaleLayout, ScaleRounding, ScaleType};
use rmsnorm_core::{Tensor, TensorSet};

use crate::Shape;

/// The quantization of a measured call. All codes are E4M3, quantized from `y` in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quant {
    /// Static scaling: one given scale.
    Tensor,
    /// Delayed scaling: one given scale, and the tensor's `amax` for later calls.
    Delayed,
    /// `Delayed`, and the codes also transposed.
    Transposed,
    /// Current scaling: one scale, computed from the tensor.
    Current,
    /// A scale for each row.
    Row,
    /// An f32 scale for each 128 columns, column-major as matrix products on Hopper read them.
    Block128,
    /// An E8M0 scale for each 32 columns.
    Mx,
    /// `Block128`, and a columnwise copy with separate scales.
    Block128Columnwise,
    /// `Mx`, and a columnwise copy with separate scales.
    MxColumnwise,
}

impl Quant {
    /// All quantizations.
    pub const ALL: [Quant; 9] = [
        Quant::Tensor,
        Quant::Delayed,
        Quant::Transposed,
        Quant::Current,
        Quant::Row,
        Quant::Block128,
        Quant::Mx,
        Quant::Block128Columnwise,
        Quant::MxColumnwise,
    ];

    /// The name on the command line: `tensor`, `delayed`, `transposed`, `current`, `row`, `block128`, `mx`, `block128_columnwise` or
    /// `mx_columnwise`.
    pub const fn name(self) -> &'static str {
        match self {
            Quant::Tensor => "tensor",
            Quant::Delayed => "delayed",
            Quant::Transposed => "transposed",
            Quant::Current => "current",
            Quant::Row => "row",
            Quant::Block128 => "block128",
            Quant::Mx => "mx",
            Quant::Block128Columnwise => "block128_columnwise",
            Quant::MxColumnwise => "mx_columnwise",
        }
    }

    /// The spec of a call with this shape.
    pub fn spec(self, shape: Shape) -> QuantSpec {
        let spec = |scale| QuantSpec::new(CodeType::E4m3, scale);
        let column_major = |rows: usize| ScaleLayout::ColumnMajor { ld: rows.next_multiple_of(4) };
        match self {
            Quant::Tensor | Quant::Delayed | Quant::Transposed => spec(ScaleKind::Given),
            Quant::Current => spec(ScaleKind::Current),
            Quant::Row => spec(ScaleKind::Row),
            Quant::Block128 => {
                spec(ScaleKind::Block { cols: 128, is_power_of_two: false }).layout(column_major(shape.rows))
            }
            Quant::Block128Columnwise => Quant::Block128.spec(shape).columnwise_layout(column_major(shape.cols)),
            Quant::Mx | Quant::MxColumnwise => spec(ScaleKind::Mx { rounding: ScaleRounding::Up }),
        }
    }

    /// The optional output tensors of its calls.
    pub const fn tensors(self) -> TensorSet {
        match self {
            Quant::Delayed => TensorSet::of(&[Tensor::Amax]),
            Quant::Transposed => TensorSet::of(&[Tensor::Amax, Tensor::CodesT]),
            Quant::Tensor | Quant::Current | Quant::Row | Quant::Block128 | Quant::Mx => TensorSet::of(&[]),
            Quant::Block128Columnwise | Quant::MxColumnwise => {
                TensorSet::of(&[Tensor::CodesColumnwise, Tensor::ScalesColumnwise])
            }
        }
    }

    /// The fewest bytes of codes and scales that a call must write.
    pub fn bytes(self, shape: Shape) -> usize {
        let Shape { rows, cols } = shape;
        let spec = self.spec(shape);
        let size = match spec.scale_type() {
            ScaleType::F32 => size_of::<f32>(),
            ScaleType::E8m0 => 1,
        };
        let scales = spec.scale.groups(cols).map_or(1, |groups| rows * groups);
        let is_columnwise = self.tensors().has(Tensor::CodesColumnwise);
        let along = spec.scale.groups(rows).filter(|_| is_columnwise).map_or(0, |groups| cols * groups);
        let copies = if is_columnwise || self.tensors().has(Tensor::CodesT) { 2 } else { 1 };
        copies * shape.elements() + (scales + along) * size
    }
}
