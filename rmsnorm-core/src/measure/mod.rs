//! What is measured, for `rmsnorm bench` and the criterion benchmarks: operations, the bytes they move, and tensors to
//! run them on. The clock is not here; each of the two has its own.
//!
//! Rates count the fewest bytes an operation must move, so that they compare with a plain copy. Tensors come in several
//! sets that together exceed every cache, unless the call is a decode step. A result is judged before it is timed.

mod workload;

pub use workload::{Workload, tensor};

use crate::{DType, Norm};

/// An operation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// y from x and weight (and bias, for layer norm), with rstd (and mean).
    Forward,
    /// The same with a residual added to x and its sum stored.
    AddForward,
    /// dx and dweight (and dbias, for layer norm), second stage included.
    Backward,
}

impl Op {
    /// Every operation.
    pub const ALL: [Op; 3] = [Op::Forward, Op::AddForward, Op::Backward];

    /// The name used on the command line, in bench ids and in reports: `forward`, `add_forward` or `backward`.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Forward => "forward",
            Op::AddForward => "add_forward",
            Op::Backward => "backward",
        }
    }

    /// The fewest bytes that must move: every matrix once, every vector once.
    pub fn bytes(self, norm: Norm, dtype: DType, shape: Shape) -> usize {
        let (matrices, weight_vectors) = match (self, norm) {
            (Op::Forward, Norm::Rms) => (2, 1),
            (Op::Forward, Norm::Layer) => (2, 2),
            (Op::AddForward, Norm::Rms) => (4, 1),
            (Op::AddForward, Norm::Layer) => (4, 2),
            (Op::Backward, Norm::Rms) => (3, 2),
            (Op::Backward, Norm::Layer) => (3, 3),
        };
        let statistics = match norm {
            Norm::Rms => 1,
            Norm::Layer => 2,
        };
        let elements = matrices * shape.elements() + weight_vectors * shape.cols;
        elements * dtype.size() + statistics * shape.rows * DType::F32.size()
    }
}

/// The size of a matrix. Its [`Display`](std::fmt::Display) form is `4096x1024`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
}

impl Shape {
    /// Elements of one matrix.
    pub const fn elements(self) -> usize {
        self.rows * self.cols
    }

    /// Bytes of one matrix.
    pub const fn bytes(self, dtype: DType) -> usize {
        self.elements() * dtype.size()
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Through a string, so that a width pads the whole.
        f.pad(&format!("{}x{}", self.rows, self.cols))
    }
}

/// The shapes that are measured unless others are asked for: rows of one and of several thousand elements, short rows,
/// and last a decode step.
pub const SHAPES: [Shape; 5] = [
    Shape { rows: 4096, cols: 1024 },
    Shape { rows: 2048, cols: 4096 },
    Shape { rows: 512, cols: 8192 },
    Shape { rows: 8192, cols: 128 },
    Shape { rows: 1, cols: 4096 },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_count_every_tensor_once() {
        let shape = Shape { rows: 10, cols: 3 };
        // x, y; weight; rstd.
        assert_eq!(Op::Forward.bytes(Norm::Rms, DType::Bf16, shape), 2 * (30 + 30 + 3) + 4 * 10);
        // x, residual, residual_out, y; weight, bias; mean, rstd.
        assert_eq!(Op::AddForward.bytes(Norm::Layer, DType::F32, shape), 4 * (4 * 30 + 2 * 3) + 4 * 20);
        // dy, x, dx; weight, dweight; rstd.
        assert_eq!(Op::Backward.bytes(Norm::Rms, DType::F16, shape), 2 * (3 * 30 + 2 * 3) + 4 * 10);
    }

    #[test]
    fn shape_is_padded_as_a_whole() {
        assert_eq!(format!("{:>8}", Shape { rows: 10, cols: 3 }), "    10x3");
    }
}
