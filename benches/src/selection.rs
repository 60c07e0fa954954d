//! The measurements behind `rmsnorm bench`: the time of an operation, and the time of a plain copy
//! on the same device in the same run. `operation` defines the operations and their bytes,
//! `measurable` the timers.
//!
//! Samples of the copy and of the operation alternate, so that a disturbance of the machine affects
//! both. A result is checked before it is timed.

use rmsnorm_core::cuda::DriverFailure;
use rmsnorm_core::wgpu::WgpuFailure;
use rmsnorm_core::{AnyBackend, DType, Device, Error, GradReduction, Norm};

use crate::document::Measured;
use crate::{
    BenchError, Form, Measurable, Measurement, Op, Operation, Samples, Sampling, Shape, Workload, alternate,
    workload_bytes,
};

/// The measurements to make: the product of all lists.
#[derive(Clone, Debug)]
pub struct Selection {
    /// The kinds of norm.
    pub norms: Vec<Norm>,
    /// The operations.
    pub ops: Vec<Op>,
    /// The forms of the norms.
    pub forms: Vec<Form>,
    /// The reductions of the weight gradients in backward.
    pub reductions: Vec<GradReduction>,
    /// The sizes.
    pub shapes: Shapes,
    /// The dtypes of all tensors.
    pub dtypes: Vec<DType>,
    /// Seconds of sampling for each row of the table.
    pub seconds: f64,
}

/// The sizes to measure.
#[derive(Clone, Debug)]
pub enum Shapes {
    /// All default shapes of the device.
    OfDevice,
    /// A common shape of the device, and a decode step.
    Two,
    /// The shapes of these sweeps, with [`Measurable::sweep_bytes`], and the seed of those that are drawn.
    Sweeps(Vec<Sweep>, u64),
    /// These shapes.
    Given(Vec<Shape>),
}

/// A series of shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// Growing row lengths, at a fixed number of bytes.
    Cols,
    /// Growing numbers of rows, of one length.
    Rows,
    /// Row lengths and numbers of rows that nobody chose: they are drawn from a seed.
    Between,
}

impl Sweep {
    /// The sweeps with a growing side, which a picture shows.
    pub const GROWING: [Sweep; 2] = [Sweep::Cols, Sweep::Rows];

    /// All sweeps.
    pub const ALL: [Sweep; 3] = [Sweep::Cols, Sweep::Rows, Sweep::Between];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Sweep::Cols => "cols",
            Sweep::Rows => "rows",
            Sweep::Between => "between",
        }
    }

    /// The shapes of the sweep, with at most `bytes` per matrix. Row lengths are powers of two and
    /// some lengths of models; numbers of rows are powers of two.
    fn shapes(self, bytes: usize, dtype: DType, seed: u64) -> Vec<Shape> {
        let elements = bytes / dtype.size();
        match self {
            Sweep::Cols => {
                let fitting = SWEPT_COLS.into_iter().filter(|&cols| cols <= elements);
                fitting.map(|cols| Shape { rows: even(elements / cols), cols }).collect()
            }
            Sweep::Rows => {
                let rows = (0..usize::BITS).map(|bits| 1 << bits);
                let fitting = rows.take_while(|rows| rows * SWEPT_ROWS_COLS <= elements);
                fitting.map(|rows| Shape { rows, cols: SWEPT_ROWS_COLS }).collect()
            }
            Sweep::Between => {
                let mut random = fastrand::Rng::with_seed(seed);
                let mut shapes: Vec<_> = (0..DRAWN).map(|_| drawn(&mut random, elements)).collect();
                shapes.sort_by_key(|shape| (shape.cols, shape.rows));
                shapes
            }
        }
    }
}

/// Rounds a number of rows down to a multiple of 64, if it is at least 64, as in the targets'
/// shapes. The matrix then has whole pages, which drivers copy fastest, and whole blocks of every
/// tile.
fn even(rows: usize) -> usize {
    if rows < 64 { rows } else { rows / 64 * 64 }
}

/// The row lengths of a sweep.
const SWEPT_COLS: [usize; 16] =
    [128, 256, 512, 768, 1024, 1536, 2048, 2560, 4096, 5120, 7168, 8192, 12288, 16384, 32768, 65536];

/// The row length of a sweep of the number of rows.
const SWEPT_ROWS_COLS: usize = 4096;

/// The number of shapes that are drawn.
const DRAWN: usize = 24;

/// A shape of up to `most` elements, and about a 64th of them or more. Row lengths from 64 to 65536 are
/// multiples of 8 and none of 128: no tile of a table ends there, and packs of 16 bytes fill the row.
/// The logarithms of lengths and of sizes are drawn evenly.
fn drawn(random: &mut fastrand::Rng, most: usize) -> Shape {
    let mut between = |least: f64, most: f64| least * (most / least).powf(random.f64());
    let cols = between(64.0, 65536.0) as usize / 8 * 8;
    let cols = if cols.is_multiple_of(128) { cols + 8 } else { cols };
    let elements = between(most as f64 / 64.0, most as f64) as usize;
    Shape { rows: (elements / cols).max(1), cols }
}

impl Shapes {
    /// Whether the user has listed the shapes, so that each must be measured.
    const fn is_given(&self) -> bool {
        matches!(self, Shapes::Given(_))
    }

    fn on<D: Measurable>(&self, device: &D, dtype: DType) -> Vec<Shape> {
        match (self, D::SHAPES) {
            (Shapes::Two, [first, .., last]) => vec![*first, *last],
            (Shapes::OfDevice | Shapes::Two, all) => all.to_vec(),
            (Shapes::Sweeps(sweeps, seed), _) => {
                sweeps.iter().flat_map(|sweep| sweep.shapes(device.sweep_bytes(), dtype, *seed)).collect()
            }
            (Shapes::Given(shapes), _) => shapes.clone(),
        }
    }
}

/// The outcome of a row.
#[derive(Debug)]
pub enum Outcome {
    /// The row was measured.
    Measured(Box<Measured>),
    /// The backend does not support the operation, with the rule of its error.
    Unsupported(Operation, String),
}

/// Checks, before anything is measured, that the backend can measure every listed size. Default
/// sizes are not checked: they are skipped later if they do not fit.
///
/// # Errors
/// The first size that cannot be measured, and the reason.
pub fn admit(backend: &AnyBackend, selection: &Selection) -> Result<(), BenchError> {
    crate::measure(backend, Admit(selection))?
}

/// The sizes that will be measured: (shape, dtype, whether it exceeds the caches).
///
/// # Errors
/// If the device fails.
pub fn sizes(backend: &AnyBackend, selection: &Selection) -> Result<Vec<(Shape, DType, bool)>, BenchError> {
    Ok(crate::measure(backend, Sizes(selection))?)
}

struct Sizes<'a>(&'a Selection);

impl Measurement for Sizes<'_> {
    type Output = Vec<(Shape, DType, bool)>;

    fn run<D: Measurable>(self, device: &D) -> Self::Output {
        let is_cold = |shape: Shape, dtype| device.sets(shape.bytes(dtype)).is_cold;
        let admitted = |&(shape, dtype): &(Shape, DType)| self.0.admit(device, shape, dtype).is_ok();
        let sizes = self.0.sizes(device).into_iter().filter(admitted);
        sizes.map(|(shape, dtype)| (shape, dtype, is_cold(shape, dtype))).collect()
    }
}

struct Admit<'a>(&'a Selection);

impl Measurement for Admit<'_> {
    type Output = Result<(), BenchError>;

    fn run<D: Measurable>(self, device: &D) -> Self::Output {
        if !self.0.shapes.is_given() {
            return Ok(());
        }
        self.0.sizes(device).into_iter().try_for_each(|(shape, dtype)| {
            let refuse = |why| BenchError::Input(format!("--shapes: {why}, got {shape} in {dtype}"));
            self.0.admit(device, shape, dtype).map_err(refuse)
        })
    }
}

/// Measures a selection. `progress` gets each row when it is done, and the total number of rows.
/// Returns the skipped sizes, each with the reason.
///
/// # Errors
/// If a call fails, or an element of a result is outside its error bound.
pub fn measure(
    backend: &AnyBackend,
    selection: &Selection,
    progress: &mut dyn FnMut(Outcome, usize),
) -> Result<Vec<String>, BenchError> {
    crate::measure(backend, Measure { selection, name: backend.device(), progress })?
}

struct Measure<'a> {
    selection: &'a Selection,
    name: Device,
    progress: &'a mut dyn FnMut(Outcome, usize),
}

impl Measurement for Measure<'_> {
    type Output = Result<Vec<String>, BenchError>;

    fn run<D: Measurable>(self, device: &D) -> Self::Output {
        let operations = self.selection.operations();
        let (mut sizes, mut skipped) = (self.selection.sizes(device), Vec::new());
        // Listed sizes were checked by `admit`. If one does not fit now, that is an error.
        if !self.selection.shapes.is_given() {
            sizes.retain(|&(shape, dtype)| {
                let refusal = self.selection.admit(device, shape, dtype).err();
                skipped.extend(refusal.iter().map(|why| format!("{shape} in {dtype}: {why}")));
                refusal.is_none()
            });
        }
        let total = operations.len() * sizes.len();
        for (shape, dtype) in sizes {
            let mut done = |outcome| (self.progress)(outcome, total);
            let no_room = self.selection.measure((device, self.name), (shape, dtype), &operations, &mut done)?;
            skipped.extend(no_room.map(|why| format!("{shape} in {dtype}: {why}")));
        }
        Ok(skipped)
    }
}

/// Whether an error says that the device is out of memory.
fn is_out_of_memory(error: &Error) -> bool {
    let Error::Device { source, .. } = error else { return false };
    let cuda = source.downcast_ref::<DriverFailure>().is_some_and(DriverFailure::is_out_of_memory);
    cuda || source.downcast_ref::<WgpuFailure>().is_some_and(WgpuFailure::is_out_of_memory)
}

impl Selection {
    /// Every shape in every dtype, without duplicates. All dtypes of a shape follow each other.
    fn sizes<D: Measurable>(&self, device: &D) -> Vec<(Shape, DType)> {
        let of_dtype = |&dtype| (dtype, self.shapes.on(device, dtype));
        let lists: Vec<(DType, Vec<Shape>)> = self.dtypes.iter().map(of_dtype).collect();
        let mut sizes = Vec::new();
        for &shape in lists.iter().flat_map(|(_, shapes)| shapes) {
            for &(dtype, ref shapes) in &lists {
                if shapes.contains(&shape) && !sizes.contains(&(shape, dtype)) {
                    sizes.push((shape, dtype));
                }
            }
        }
        sizes
    }

    /// The operations.
    pub fn operations(&self) -> Vec<Operation> {
        Operation::product(&self.norms, &self.ops, &self.forms, &self.reductions)
    }

    fn admit<D: Measurable>(&self, device: &D, shape: Shape, dtype: DType) -> Result<(), String> {
        device.admit(shape, workload_bytes(device, shape, dtype, &self.operations()))
    }

    /// Measures the operations on one size. Returns the reason if the device has no room for it.
    fn measure<D: Measurable>(
        &self,
        (device, name): (&D, Device),
        (shape, dtype): (Shape, DType),
        operations: &[Operation],
        done: &mut dyn FnMut(Outcome),
    ) -> Result<Option<String>, BenchError> {
        let mut workload = match Workload::new(device, shape, dtype, operations) {
            Ok(workload) => workload,
            // Some devices report a lack of memory only on allocation.
            Err(error) if !self.shapes.is_given() && is_out_of_memory(&error) => {
                return Ok(Some(error.to_string()));
            }
            Err(error) => return Err(error.into()),
        };
        let wrong = workload.wrong_copies()?;
        if wrong > 0 {
            return Err(BenchError::Wrong(format!("copy {dtype} {shape}: {wrong} elements were not copied")));
        }
        for &operation in operations {
            let first_call = workload.first_call(operation);
            match first_call.and_then(|first_call| Ok((first_call, workload.wrong_elements(operation)?))) {
                Ok((first_call, 0)) => {
                    let row = self.row((device, name), &mut workload, operation)?;
                    let first_call_us = first_call.map(|seconds| seconds * 1e6);
                    done(Outcome::Measured(Box::new(Measured { first_call_us, ..row })));
                }
                Ok((_, wrong)) => {
                    let (norm, op) = (operation.norm.name(), operation.name());
                    let what = format!("{norm} {op} {dtype} {shape}: {wrong} elements outside their bounds");
                    return Err(BenchError::Wrong(what));
                }
                Err(Error::Unsupported { rule }) => done(Outcome::Unsupported(operation, rule)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    fn row<D: Measurable>(
        &self,
        (device, name): (&D, Device),
        workload: &mut Workload<'_, D>,
        operation: Operation,
    ) -> Result<Measured, BenchError> {
        let sampling = Sampling { turns: 1 + D::COPIES, sets: workload.sets(), seconds: self.seconds };
        let mut timings = alternate(device, sampling, |device, turn, set| match turn.checked_sub(1) {
            None => workload.call_on(device, operation, set),
            Some(way) => workload.copy_on(device, set, way),
        })?;
        let copy = fastest(timings.split_off(1).into_iter().map(|timing| timing.samples));
        let timing = timings.swap_remove(0);
        let row = Measured::new(operation, (workload.dtype, workload.shape), name, &timing, &copy);
        let plan = Some(workload.plan(operation));
        Ok(Measured { sets: workload.sets(), cold: workload.is_cold(), plan, ..row })
    }
}

/// The copy that operations are compared with: the one with the smallest median.
fn fastest(copies: impl Iterator<Item = Samples>) -> Samples {
    copies.min_by(|a, b| a.median().total_cmp(&b.median())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_compared_with_the_fastest_copy() {
        let copies = [[3.0, 3.0, 3.0], [1.0, 2.0, 9.0], [0.5, 4.0, 4.0]].map(|seconds| Samples::new(seconds.into()));
        assert_eq!(fastest(copies.into_iter()).all(), [1.0, 2.0, 9.0], "by the median, not by the shortest");
    }

    #[test]
    fn drawn_shapes_lie_between_those_that_were_chosen_and_depend_on_the_seed_alone() {
        let (bytes, shapes) = (1 << 28, |seed| Sweep::Between.shapes(1 << 28, DType::Bf16, seed));
        for Shape { rows, cols } in (0..100).flat_map(shapes) {
            assert!((64..=65536).contains(&cols) && cols.is_multiple_of(8) && !cols.is_multiple_of(128), "{cols}");
            assert!((bytes / 128..=bytes).contains(&(2 * rows * cols)), "{rows}x{cols}");
        }
        assert_eq!((shapes(3).len(), shapes(3)), (DRAWN, shapes(3)));
        assert_ne!(shapes(3), shapes(4));
        let all: Vec<_> = (0..100).flat_map(shapes).collect();
        assert!(all.iter().any(|shape| shape.cols < 256) && all.iter().any(|shape| shape.cols > 16384));
    }
}
