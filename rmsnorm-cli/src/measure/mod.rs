//! The measurements behind `rmsnorm bench`: how long an operation takes, and how long a plain copy takes on the same
//! device, in the same run, with the same threads. What an operation is and moves stands in `rmsnorm_core::measure`.
//!
//! Cold rows visit several input sets in turn, which together exceed every cache; a call that fits the cache many times
//! over (a decode step) is measured there, and is to be read in microseconds. Samples of the copy and of the operation
//! alternate, so that a disturbance of the machine meets both. A result is judged before it is timed.

mod clock;
mod copies;

use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::measure::{Op, Shape, Workload};
use rmsnorm_core::{DType, Element, Norm, bf16, f16};

use crate::failure::Failure;
use crate::output::print;
use clock::Samples;
use copies::Copies;

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
/// If a call is refused, or an element of a result is outside its error bound.
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
    let mut workload = Workload::<_, T>::new(backend, shape)?;
    let mut copies = Copies::new(backend, shape.bytes(T::DTYPE), workload.sets())?;
    for &norm in &selection.norms {
        for &op in &selection.ops {
            let wrong = workload.wrong_elements(op, norm)?;
            if wrong > 0 {
                let (norm, op) = (norm.name(), op.name());
                print(&format!("{norm} {op} {} {shape}: {wrong} elements outside their bounds\n", T::DTYPE))?;
                return Err(Failure::Check);
            }
            let [samples, cached_copy, streaming_copy] = clock::alternate(selection.seconds, |turn, set| match turn {
                0 => workload.call(op, norm, set),
                1 => copies.copy(set, false),
                _ => copies.copy(set, true),
            })?;
            let copy = if cached_copy.median() < streaming_copy.median() { cached_copy } else { streaming_copy };
            progress(Row {
                op,
                norm,
                dtype: T::DTYPE,
                shape,
                is_cold: workload.sets() > 1,
                bytes: op.bytes(norm, T::DTYPE, shape),
                samples,
                copy_bytes: 2 * shape.bytes(T::DTYPE),
                copy,
            });
        }
    }
    Ok(())
}
