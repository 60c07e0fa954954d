//! The measurements behind `rmsnorm bench`: what an operation moves, how long it takes, and how long a plain copy takes
//! on the same device, in the same run, with the same threads.
//!
//! GB/s counts the fewest bytes an operation must move, so that it compares with the copy. Cold rows visit several
//! input sets in turn, which together exceed every cache; one that fits the cache many times over (a decode step) is
//! measured there, and is to be read in microseconds. Samples of the copy and of the operation alternate, so that a
//! disturbance of the machine meets both. A result is checked against its error bound before it is timed.

mod clock;
mod workload;

use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::{DType, Element, Norm, bf16, f16};

use crate::failure::Failure;
use clock::Samples;
use workload::Workload;

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

    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Forward => "forward",
            Op::AddForward => "add_forward",
            Op::Backward => "backward",
        }
    }

    /// The fewest bytes that must move: every matrix once, every vector once.
    fn bytes(self, norm: Norm, dtype: DType, shape: Shape) -> usize {
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
        let elements = matrices * shape.rows * shape.cols + weight_vectors * shape.cols;
        elements * dtype.size() + statistics * shape.rows * DType::F32.size()
    }
}

/// The size of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
}

impl Shape {
    /// Bytes of one matrix.
    fn bytes(self, dtype: DType) -> usize {
        self.rows * self.cols * dtype.size()
    }
}

/// What to measure: the product of all of it.
#[derive(Clone, Debug)]
pub struct Selection {
    /// The kinds of norm.
    pub norms: Vec<Norm>,
    /// The operations.
    pub ops: Vec<Op>,
    /// The sizes.
    pub shapes: Vec<Shape>,
    /// The dtypes of all tensors.
    pub dtypes: Vec<DType>,
    /// Seconds of samples for each row of the table.
    pub seconds: f64,
}

impl Selection {
    /// The number of rows of the table.
    pub fn len(&self) -> usize {
        self.norms.len() * self.ops.len() * self.shapes.len() * self.dtypes.len()
    }
}

/// One row of the table.
#[derive(Clone, Debug)]
pub struct Row {
    /// The operation.
    pub op: Op,
    /// The kind of norm.
    pub norm: Norm,
    /// The dtype of all tensors.
    pub dtype: DType,
    /// The size.
    pub shape: Shape,
    /// Whether the input sets exceed the caches.
    pub is_cold: bool,
    /// The fewest bytes a call must move.
    pub bytes: usize,
    /// Seconds a call.
    pub samples: Samples,
    /// Bytes that the copy moves: one matrix read, one written.
    pub copy_bytes: usize,
    /// Seconds a copy, the better of the two ways to store.
    pub copy: Samples,
}

impl Row {
    /// GB/s of the operation, from the median.
    pub fn rate(&self) -> f64 {
        self.bytes as f64 / self.samples.median() * 1e-9
    }

    /// GB/s of the copy, from the median.
    pub fn copy_rate(&self) -> f64 {
        self.copy_bytes as f64 / self.copy.median() * 1e-9
    }
}

/// Measures a selection on the CPU. `progress` is called with every row as it is done.
///
/// # Errors
/// If a call is refused, or a result is outside its error bound.
pub fn measure(backend: &CpuBackend, selection: &Selection, progress: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    for &shape in &selection.shapes {
        for &dtype in &selection.dtypes {
            match dtype {
                DType::F32 => measure_shape::<f32>(backend, selection, shape, progress)?,
                DType::F16 => measure_shape::<f16>(backend, selection, shape, progress)?,
                DType::Bf16 => measure_shape::<bf16>(backend, selection, shape, progress)?,
            }
        }
    }
    Ok(())
}

fn measure_shape<T: Element>(
    backend: &CpuBackend,
    selection: &Selection,
    shape: Shape,
    progress: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let mut workload = Workload::<T>::new(shape);
    for &norm in &selection.norms {
        for &op in &selection.ops {
            workload.check(backend, op, norm)?;
            let [samples, cached_copy, streaming_copy] = clock::alternate(selection.seconds, |turn, set| match turn {
                0 => workload.call(backend, op, norm, set),
                1 => workload.copy(backend, set, false),
                _ => workload.copy(backend, set, true),
            })?;
            let copy = if cached_copy.median() < streaming_copy.median() { cached_copy } else { streaming_copy };
            progress(Row {
                op,
                norm,
                dtype: T::DTYPE,
                shape,
                is_cold: workload.is_cold(),
                bytes: op.bytes(norm, T::DTYPE, shape),
                samples,
                copy_bytes: 2 * shape.bytes(T::DTYPE),
                copy,
            });
        }
    }
    Ok(())
}
