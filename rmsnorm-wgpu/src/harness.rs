//! The conformance suite's access to this backend.

use std::marker::PhantomData;
use std::ops::Range;

use rmsnorm_conformance::{Arithmetic, Harness, NonFinite, StoreRounding};
use rmsnorm_spec::depth::{policy_depth_rows, sum_depth};
use rmsnorm_spec::{AnyElement, Error, Problem};
use wgpu::{Buffer, BufferDescriptor, BufferUsages, CommandEncoderDescriptor};

use crate::download::read;
use crate::error::{IS_BROWSER, WgpuFailure, device_error, scoped, wait};
use crate::plan::Layout;
use crate::{WgpuBackend, WgpuSlice, plan};

/// A buffer of the suite: elements, and padding to a multiple of 4 bytes.
#[derive(Debug)]
pub struct TestBuffer<T> {
    buffer: Buffer,
    len: usize,
    element: PhantomData<T>,
}

impl<T: AnyElement> TestBuffer<T> {
    /// A buffer of `len` elements, all zero.
    ///
    /// # Errors
    /// `Device` if it does not fit the device's memory or its maximum buffer size.
    pub fn new(backend: &WgpuBackend, len: usize) -> Result<Self, Error> {
        let buffer = scoped(backend.device(), "making a buffer", || Ok(make(backend, size::<T>(len), false)))?;
        Ok(TestBuffer { buffer, len, element: PhantomData })
    }
}

impl<T> TestBuffer<T> {
    /// The wgpu buffer.
    pub const fn buffer(&self) -> &Buffer {
        &self.buffer
    }
}

impl Harness for WgpuBackend {
    type Backend = WgpuBackend;
    type Buffer<T: AnyElement> = TestBuffer<T>;

    fn backend(&self) -> &WgpuBackend {
        self
    }

    /// The guarantees of WGSL, not of one device: a sum or product is one of the two floats next to
    /// the exact value, an inverse square root is within 2 ulp, subnormals may be flushed, NaN and
    /// infinity are unspecified. Averages are products with `1 / cols`, which the host rounds.
    /// 16-bit values are rounded by exact integer arithmetic or equivalent conversions
    /// (`caps/f16.rs`).
    fn arithmetic(&self) -> Arithmetic {
        let unit_roundoff = 1.0 / f64::from(1u32 << 23);
        Arithmetic {
            unit_roundoff,
            rstd_error: 2.0 * unit_roundoff,
            mean_roundings: 1.5,
            // A reciprocal, within 2.5 ulp, and a product.
            quotient_error: 3.5 * unit_roundoff,
            exp_error: |z| (3.0 + 2.0 * z) / f64::from(1u32 << 23),
            store: StoreRounding::NearestEven,
            flushes_subnormals: true,
            non_finite: NonFinite::Unspecified,
            depth_cols: sum_depth,
            depth_rows: policy_depth_rows,
        }
    }

    fn device(&self) -> String {
        self.to_string()
    }

    fn is_slow(&self) -> bool {
        self.is_software()
    }

    fn tuning(&self) -> String {
        WgpuBackend::tuning(self)
    }

    fn plan(&self, problem: &Problem) -> String {
        let plan = plan::plan(problem, &Layout::dense(problem), self.caps());
        plan.map(|plan| plan.to_string()).unwrap_or_else(|error| error.to_string())
    }

    fn cols_breakpoints(&self) -> Vec<usize> {
        self.caps().tuning.cols_breakpoints()
    }

    fn rows_breakpoints(&self) -> Vec<usize> {
        plan::ROWS_BREAKPOINTS.to_vec()
    }

    fn upload<T: AnyElement>(&self, data: &[T]) -> Result<TestBuffer<T>, Error> {
        // A browser that cannot map a new buffer throws, which ends the program.
        if IS_BROWSER {
            return self.upload_parts(data.len(), &[(0, data)]);
        }
        let bytes = bytemuck::cast_slice::<T, u8>(data);
        let buffer = scoped(self.device(), "upload", || {
            let buffer = make(self, size::<T>(data.len()), true);
            let mut mapped = buffer
                .get_mapped_range_mut(..)
                .map_err(|error| device_error(WgpuFailure::lost("upload", error.to_string())))?;
            mapped.slice(..bytes.len()).copy_from_slice(bytes);
            drop(mapped);
            buffer.unmap();
            Ok(buffer)
        })?;
        Ok(TestBuffer { buffer, len: data.len(), element: PhantomData })
    }

    fn upload_parts<T: AnyElement>(&self, len: usize, parts: &[(usize, &[T])]) -> Result<TestBuffer<T>, Error> {
        let buffer = scoped(self.device(), "upload", || Ok(make(self, size::<T>(len), false)))?;
        scoped(self.device(), "upload", || {
            for (first, part) in parts {
                let first = first * size_of::<T>();
                // Writes begin and end at a word. Bytes around a part have not been set yet.
                let before = first % WORD;
                let mut bytes = vec![0; before];
                bytes.extend_from_slice(bytemuck::cast_slice(part));
                bytes.resize(bytes.len().next_multiple_of(WORD), 0);
                self.queue().write_buffer(&buffer, (first - before) as u64, &bytes);
            }
            self.queue().submit([]);
            Ok(())
        })?;
        Ok(TestBuffer { buffer, len, element: PhantomData })
    }

    fn download<T: AnyElement>(&self, buffer: &TestBuffer<T>) -> Result<Vec<T>, Error> {
        self.download_part(buffer, 0..buffer.len)
    }

    fn download_part<T: AnyElement>(&self, buffer: &TestBuffer<T>, range: Range<usize>) -> Result<Vec<T>, Error> {
        wait("Harness::fetch_part", self.fetch_part(buffer, range))
    }

    async fn fetch_part<T: AnyElement>(&self, buffer: &TestBuffer<T>, range: Range<usize>) -> Result<Vec<T>, Error> {
        let device = self.device();
        let (first, end) = (range.start * size_of::<T>(), range.end * size_of::<T>());
        let from = first / WORD * WORD;
        let words = (end.next_multiple_of(WORD) - from).max(WORD);
        let staging = scoped(device, "download", || {
            let staging = device.create_buffer(&BufferDescriptor {
                label: None,
                size: words as u64,
                usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            let mut encoder = device.create_command_encoder(&CommandEncoderDescriptor::default());
            encoder.copy_buffer_to_buffer(&buffer.buffer, from as u64, &staging, 0, words as u64);
            self.queue().submit([encoder.finish()]);
            Ok(staging)
        })?;
        self.check_health()?;
        let mapped = read(device, &staging, "download").await;
        // A browser has reported its errors by now, with their reasons.
        self.check_health()?;
        let mapped = mapped?;
        let bytes = mapped.get(first - from..end - from).unwrap_or_default();
        Ok(bytemuck::pod_collect_to_vec(bytes))
    }

    async fn caught<O>(&self, work: impl FnOnce() -> Result<O, Error>) -> Result<O, Error> {
        if IS_BROWSER { self.catch(|_| work()).await } else { work() }
    }

    fn view<'a, T: AnyElement>(&self, buffer: &'a TestBuffer<T>, range: Range<usize>) -> WgpuSlice<'a, T> {
        WgpuSlice::new(&buffer.buffer, (range.start * size_of::<T>()) as u64, range.len())
    }

    fn view_mut<'a, T: AnyElement>(&self, buffer: &'a mut TestBuffer<T>, range: Range<usize>) -> WgpuSlice<'a, T> {
        self.view(buffer, range)
    }
}

/// Copies and writes have a multiple of this many bytes.
const WORD: usize = 4;

/// Bytes of a buffer for `len` elements: a multiple of 4, at least 4.
fn size<T>(len: usize) -> u64 {
    (len as u64).saturating_mul(size_of::<T>() as u64).checked_next_multiple_of(4).unwrap_or(u64::MAX).max(4)
}

fn make(backend: &WgpuBackend, size: u64, mapped_at_creation: bool) -> Buffer {
    let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
    backend.device().create_buffer(&BufferDescriptor { label: None, size, usage, mapped_at_creation })
}
