//! More than 2^31 and 2^32 elements: in long rows, in short rows, and in a single row.

use rmsnorm_conformance::testing::values;
use rmsnorm_cuda::cudarc::driver::{CudaSlice, DevicePtrMut, DriverError, sys};
use rmsnorm_cuda::{
    Backward, CudaBackend, Forward,
    spec::{NormSpec, bf16},
};

use crate::support::Gpu;

const BYTES: usize = size_of::<bf16>();

/// A tensor that has one value everywhere.
fn constant(backend: &CudaBackend, value: bf16, len: usize) -> CudaSlice<bf16> {
    let stream = backend.stream();
    // SAFETY:
    // - contents: set below, all of them.
    let mut buffer = unsafe { stream.alloc::<bf16>(len) }.unwrap();
    fill(backend, &mut buffer, value).unwrap();
    buffer
}

fn fill(backend: &CudaBackend, buffer: &mut CudaSlice<bf16>, value: bf16) -> Result<(), DriverError> {
    let (stream, len) = (backend.stream(), buffer.len());
    let (address, _in_use) = buffer.device_ptr_mut(stream);
    // SAFETY:
    // - memory: `len` elements of two bytes, borrowed for writing;
    // - order: the stream's.
    unsafe { sys::cuMemsetD16Async(address, value.to_bits(), len, stream.cu_stream()) }.result()
}

/// Rows at both ends, and where a 31-bit or 32-bit index of elements or bytes would wrap.
fn telling_rows(rows: usize, cols: usize) -> Vec<usize> {
    let wraps = [1usize << 30, 1 << 31, 1 << 32].map(|elements| elements / cols);
    let around = wraps.into_iter().flat_map(|row| [row.saturating_sub(1), row, row + 1]);
    let mut telling: Vec<_> = [0, 1, 7, rows / 3, rows - 2, rows - 1].into_iter().chain(around).collect();
    telling.retain(|&row| row < rows);
    telling.sort_unstable();
    telling.dedup();
    telling
}

/// The tensors of both directions, for all rows or for a few of them.
struct Tensors {
    norm: NormSpec,
    x: CudaSlice<bf16>,
    dy: CudaSlice<bf16>,
    weight: CudaSlice<bf16>,
    y: CudaSlice<bf16>,
    dx: CudaSlice<bf16>,
    mean: CudaSlice<f32>,
    rstd: CudaSlice<f32>,
    dweight: CudaSlice<bf16>,
    dbias: CudaSlice<bf16>,
}

impl Tensors {
    /// Rows of ones with gradients of zero, and NaN in the outputs.
    fn new(backend: &CudaBackend, rows: usize, cols: usize) -> Self {
        let (stream, len) = (backend.stream(), rows * cols);
        Tensors {
            norm: NormSpec::layer(rows, cols, 1e-5),
            x: constant(backend, bf16::ONE, len),
            dy: constant(backend, bf16::ZERO, len),
            weight: stream.clone_htod(&values::<bf16>(1, cols)).unwrap(),
            y: constant(backend, bf16::NAN, len),
            dx: constant(backend, bf16::NAN, len),
            mean: stream.alloc_zeros(rows).unwrap(),
            rstd: stream.alloc_zeros(rows).unwrap(),
            dweight: constant(backend, bf16::NAN, cols),
            dbias: constant(backend, bf16::NAN, cols),
        }
    }

    fn bytes(rows: usize, cols: usize) -> usize {
        4 * rows * cols * BYTES + (4 << 30)
    }

    /// Gives a row different values.
    fn set_row(&mut self, backend: &CudaBackend, row: usize, seed: u64) {
        let range = row * self.norm.cols..(row + 1) * self.norm.cols;
        let (stream, len) = (backend.stream(), range.len());
        stream.memcpy_htod(&values::<bf16>(seed, len), &mut self.x.slice_mut(range.clone())).unwrap();
        stream.memcpy_htod(&values::<bf16>(seed + 1, len), &mut self.dy.slice_mut(range)).unwrap();
    }

    fn forward(&mut self, backend: &CudaBackend) {
        let args = Forward::new(self.x.as_view(), self.y.as_view_mut()).weight(self.weight.as_view());
        let args = args.mean(self.mean.as_view_mut()).rstd(self.rstd.as_view_mut());
        backend.forward(&self.norm, args).unwrap();
    }

    fn backward(&mut self, backend: &CudaBackend) {
        let args = Backward::new(self.dy.as_view(), self.x.as_view(), self.rstd.as_view(), self.dx.as_view_mut())
            .weight(self.weight.as_view())
            .mean(self.mean.as_view())
            .dweight(self.dweight.as_view_mut())
            .dbias(self.dbias.as_view_mut());
        backend.backward(&self.norm, args).unwrap();
    }

    fn row(&self, backend: &CudaBackend, matrix: &CudaSlice<bf16>, row: usize) -> Vec<u16> {
        let range = row * self.norm.cols..(row + 1) * self.norm.cols;
        bits(&backend.stream().clone_dtoh(&matrix.slice(range)).unwrap())
    }
}

fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Each telling row of a large call must have the bits of the same row in a small call, which the
/// conformance suite covers.
fn check_rows(backend: &CudaBackend, rows: usize, cols: usize) {
    let telling = telling_rows(rows, cols);
    // Also one of the rows that are all alike.
    let mut small = Tensors::new(backend, telling.len() + 1, cols);
    let mut large = Tensors::new(backend, rows, cols);
    for (index, &row) in telling.iter().enumerate() {
        let seed = 10 + 2 * index as u64;
        small.set_row(backend, index, seed);
        large.set_row(backend, row, seed);
    }
    for tensors in [&mut small, &mut large] {
        tensors.forward(backend);
        tensors.backward(backend);
    }
    let alike = (0..rows).step_by(rows / 50).filter(|row| !telling.contains(row)).map(|row| (telling.len(), row));
    for (index, row) in telling.iter().copied().enumerate().chain(alike) {
        for (name, of_small, of_large) in [("y", &small.y, &large.y), ("dx", &small.dx, &large.dx)] {
            let (expected, got) = (small.row(backend, of_small, index), large.row(backend, of_large, row));
            assert!(got == expected, "{name} of row {row} of {rows}x{cols}");
        }
    }
    check_gradients(backend, &mut large);
}

/// If only the last row has a gradient, the sums over all rows are exactly its terms.
fn check_gradients(backend: &CudaBackend, large: &mut Tensors) {
    let (rows, cols, stream) = (large.norm.rows, large.norm.cols, backend.stream());
    let mut single = Tensors::new(backend, 1, cols);
    fill(backend, &mut large.dy, bf16::ZERO).unwrap();
    single.set_row(backend, 0, 5);
    large.set_row(backend, rows - 1, 5);
    for tensors in [&mut single, large] {
        tensors.forward(backend);
        tensors.backward(backend);
        let dbias = stream.clone_dtoh(&tensors.dbias).unwrap();
        assert_eq!(bits(&dbias), bits(&values::<bf16>(6, cols)), "dbias of {}x{cols}", tensors.norm.rows);
    }
    let [expected, got] = [&single.dweight, &large.dweight].map(|dweight| bits(&stream.clone_dtoh(dweight).unwrap()));
    assert!(got == expected, "dweight of {rows}x{cols}");
}

#[test]
fn more_than_2_to_the_32_elements_in_long_rows() {
    let Some(gpu) = Gpu::open() else { return };
    let (rows, cols) = (66_000, 65_536);
    if gpu.has_free(Tensors::bytes(rows, cols)) {
        check_rows(&gpu, rows, cols);
    }
}

#[test]
fn more_than_2_to_the_32_elements_in_short_rows() {
    let Some(gpu) = Gpu::open() else { return };
    let (rows, cols) = (33_700_001, 128);
    if gpu.has_free(Tensors::bytes(rows, cols)) {
        check_rows(&gpu, rows, cols);
    }
}

/// All values are 1, so results are known without a reference: the mean square is 1, and y is the
/// weight.
#[test]
fn more_than_2_to_the_31_elements_in_one_row() {
    let Some(gpu) = Gpu::open() else { return };
    let (backend, cols): (&CudaBackend, usize) = (&gpu, (1 << 31) + 1000);
    // x, y, weight, dy, dweight in bf16, partial sums in f32.
    if !gpu.has_free(5 * cols * BYTES + cols * size_of::<f32>() + (4 << 30)) {
        return;
    }
    let (norm, stream) = (NormSpec::rms(1, cols, 0.0), backend.stream());
    let (one, two) = (bf16::ONE, bf16::from_f32(2.0));
    let x = constant(backend, one, cols);
    let mut weight = constant(backend, one, cols);
    stream.memcpy_htod(&[two], &mut weight.slice_mut(cols - 1..)).unwrap();
    let mut y = constant(backend, bf16::NAN, cols);
    let mut rstd = stream.alloc_zeros::<f32>(1).unwrap();
    let args = Forward::new(x.as_view(), y.as_view_mut()).weight(weight.as_view()).rstd(rstd.as_view_mut());
    backend.forward(&norm, args).unwrap();
    let ends = |buffer: &CudaSlice<bf16>| {
        let of = |col: usize| stream.clone_dtoh(&buffer.slice(col..col + 1)).unwrap()[0].to_f32();
        [0, 1 << 30, (1 << 31) - 1, 1 << 31, cols - 2, cols - 1].map(of)
    };
    assert_eq!(ends(&y), [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]);

    // With a gradient in the last column alone, mean_wdy_xhat is 2 / cols, so dx is 2 there and
    // about -1e-9 elsewhere.
    let mut dy = constant(backend, bf16::ZERO, cols);
    stream.memcpy_htod(&[one], &mut dy.slice_mut(cols - 1..)).unwrap();
    let mut dweight = constant(backend, bf16::NAN, cols);
    let args = Backward::new(dy.as_view(), x.as_view(), rstd.as_view(), y.as_view_mut()).weight(weight.as_view());
    backend.backward(&norm, args.dweight(dweight.as_view_mut())).unwrap();
    let [dx @ .., last] = ends(&y);
    assert!(dx.iter().all(|dx| *dx < -8e-10 && *dx > -1.1e-9) && last == 2.0, "{dx:?}, {last}");
    assert_eq!(ends(&dweight), [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]);
}
