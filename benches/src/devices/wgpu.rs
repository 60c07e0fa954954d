//! Measuring a wgpu device: timestamps around calls in one submission, and a copy by a kernel.

use std::ops::Range;
use std::time::Instant;

use rmsnorm_core::wgpu::wgpu::{
    Buffer, BufferDescriptor, BufferUsages, CommandEncoderDescriptor, Features, MapMode, PollType, QuerySet,
    QuerySetDescriptor, QueryType,
};
use rmsnorm_core::wgpu::{TestBuffer, WgpuBackend, WgpuSlice};
use rmsnorm_core::{Element, Error};

use super::gpu::{self, SWEEP_BYTES, set_count};
use crate::Shape;
use crate::measurable::{Call, Measurable, Mode, Sets};

/// Tensors with more bytes in all count as exceeding the caches: wgpu does not report cache sizes.
const NO_CACHE_BYTES: usize = 128 << 20;

/// The largest matrix for a software adapter, which runs on the CPU, in elements.
const MOST_SOFTWARE_ELEMENTS: usize = 1 << 20;

/// The device features that timestamps need.
const TIMESTAMPS: Features = Features::TIMESTAMP_QUERY.union(Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);

/// The buffers of a sample's two timestamps; `None` on a device without timestamps.
pub struct Batch(Option<Stamps>);

struct Stamps {
    queries: QuerySet,
    resolved: Buffer,
}

impl Measurable for WgpuBackend {
    /// CUDA's shapes that wgpu has targets for, a call that hardly fills the device, and decode
    /// steps.
    const SHAPES: &'static [Shape] = &[
        Shape { rows: 32768, cols: 4096 },
        Shape { rows: 1_048_576, cols: 128 },
        Shape { rows: 32768, cols: 1024 },
        Shape { rows: 16384, cols: 8192 },
        Shape { rows: 8192, cols: 16384 },
        Shape { rows: 2048, cols: 65536 },
        Shape { rows: 256, cols: 4096 },
        // Shapes that the CPU is measured with, too.
        Shape { rows: 4096, cols: 1024 },
        Shape { rows: 2048, cols: 4096 },
        Shape { rows: 1, cols: 4096 },
    ];

    const COPIES: usize = 1;

    const SAMPLE_SECONDS: f64 = 30e-3;
    /// A sample is one submission: the driver keeps the resources of all its calls, and the host takes
    /// some 15 us to record one.
    const MOST_CALLS: usize = 1024;
    /// An idle H200 runs at 345 MHz instead of 1980. Its full clock is back 0.25 s after work has begun.
    const WAKE_SECONDS: f64 = 0.4;

    type Batch = Batch;

    fn sets(&self, matrix_bytes: usize) -> Sets {
        let count = if self.is_software() { 2 } else { set_count(matrix_bytes) };
        Sets { count, is_cold: 2 * count * matrix_bytes >= NO_CACHE_BYTES }
    }

    fn sweep_bytes(&self) -> usize {
        if self.is_software() { 2 * MOST_SOFTWARE_ELEMENTS } else { SWEEP_BYTES }
    }

    /// wgpu does not report free memory, so tensors that do not fit are an error of the device
    /// later.
    fn admit(&self, shape: Shape, _bytes: usize) -> Result<(), String> {
        let most = self.device().limits().max_buffer_size;
        if shape.elements() as u64 * 4 > most {
            return Err(format!("a buffer of this device has at most {most} bytes"));
        }
        if self.is_software() && shape.elements() > MOST_SOFTWARE_ELEMENTS {
            return Err(format!("a software adapter is measured with at most {MOST_SOFTWARE_ELEMENTS} elements"));
        }
        Ok(())
    }

    fn repeat<T: Element>(&self, period: &[T], len: usize, count: usize) -> Result<Vec<TestBuffer<T>>, Error> {
        gpu::repeat(self, period, len, count)
    }

    fn copy<T: Element>(&self, from: WgpuSlice<'_, T>, to: WgpuSlice<'_, T>, _way: usize) -> Result<(), Error> {
        if from.len() != to.len() {
            return Err(Error::Length { arg: "to", min: from.len(), max: from.len(), got: to.len() });
        }
        WgpuBackend::copy(self, from, to)
    }

    fn kernels(&self) -> usize {
        self.kernel_count()
    }

    fn make_batch(&self, sets: usize, call: &mut Call<'_, Self>) -> Result<Batch, Error> {
        (0..sets).try_for_each(|set| call(self, set))?;
        self.wait()?;
        let device = self.device();
        let stamps = device.features().contains(TIMESTAMPS).then(|| Stamps {
            queries: device.create_query_set(&QuerySetDescriptor { label: None, ty: QueryType::Timestamp, count: 2 }),
            resolved: device.create_buffer(&BufferDescriptor {
                label: None,
                size: 16,
                usage: BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            }),
        });
        Ok(Batch(stamps))
    }

    fn time(&self, batch: &Batch, sets: Range<usize>, call: &mut Call<'_, Self>) -> Result<f64, Error> {
        let calls = sets.len();
        let mut record = |recorder: &Self| sets.clone().try_for_each(|set| call(recorder, set));
        let seconds = match &batch.0 {
            Some(stamps) => self.between_stamps(stamps, record)?,
            None => {
                let start = Instant::now();
                self.batch(&mut record)?;
                self.wait()?;
                start.elapsed().as_secs_f64()
            }
        };
        Ok(seconds / calls.max(1) as f64)
    }

    fn mode(&self, batch: &Batch) -> Mode {
        if batch.0.is_some() { Mode::Timestamps } else { Mode::Wall }
    }
}

/// The timer that measuring adds to the backend.
trait Clock {
    /// Waits until all submitted work is done.
    fn wait(&self) -> Result<(), Error>;

    /// Runs the calls in one submission. Returns the seconds on the device from the first to the
    /// last call.
    fn between_stamps(&self, stamps: &Stamps, calls: impl FnOnce(&Self) -> Result<(), Error>) -> Result<f64, Error>;
}

impl Clock for WgpuBackend {
    fn wait(&self) -> Result<(), Error> {
        self.device().poll(PollType::wait_indefinitely()).map(|_| ()).map_err(failure)
    }

    fn between_stamps(&self, stamps: &Stamps, calls: impl FnOnce(&Self) -> Result<(), Error>) -> Result<f64, Error> {
        let device = self.device();
        let recorder = self.recorder();
        calls(&recorder)?;
        let mut encoder = device.create_command_encoder(&CommandEncoderDescriptor::default());
        encoder.write_timestamp(&stamps.queries, 0);
        recorder.encode(&mut encoder)?;
        encoder.write_timestamp(&stamps.queries, 1);
        encoder.resolve_query_set(&stamps.queries, 0..2, &stamps.resolved, 0);
        let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
        let staging =
            device.create_buffer(&BufferDescriptor { label: None, size: 16, usage, mapped_at_creation: false });
        encoder.copy_buffer_to_buffer(&stamps.resolved, 0, &staging, 0, 16);
        self.queue().submit([encoder.finish()]);
        // `get_mapped_range` reports a failure of the mapping.
        staging.map_async(MapMode::Read, .., |_| {});
        self.wait()?;
        let mapped = staging.get_mapped_range(..).map_err(failure)?;
        let [start, end] = [0, 8].map(|at| {
            let bytes: Option<[u8; 8]> = mapped.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            u64::from_le_bytes(bytes.unwrap_or_default())
        });
        if end <= start {
            // Earlier failures are reported to the device's error callback instead.
            return Err(Error::Device { backend: "wgpu", source: "the device has written no timestamps".into() });
        }
        Ok((end - start) as f64 * f64::from(self.queue().get_timestamp_period()) * 1e-9)
    }
}

fn failure(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Device { backend: "wgpu", source: Box::new(error) }
}
