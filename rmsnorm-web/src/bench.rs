//! Measures forward and backward passes, and a copy by the same backend. The copy shows what the
//! device's memory allows.

use rmsnorm_conformance::Harness;
use rmsnorm_spec::{Element, Error, Norm, NormSpec, bf16};
use rmsnorm_wgpu::wgpu::{
    Buffer, BufferDescriptor, BufferUsages, CommandEncoderDescriptor, ComputePassDescriptor,
    ComputePassTimestampWrites, Features, QuerySet, QuerySetDescriptor, QueryType,
};
use rmsnorm_wgpu::{Backward, Forward, TestBuffer, WgpuBackend, WgpuSlice};
use serde_json::{Value, json};
use web_time::Instant;

/// Row lengths, in columns.
const COLS: [usize; 4] = [256, 1024, 4096, 8192];

/// Time of a measurement in ms: a hundred times what browsers round to.
const LEAST_MS: f64 = 10.0;

/// Calls of a measurement at most.
const MOST_CALLS: u32 = 1 << 10;

/// Measurements of a number; the median counts.
const TIMES: usize = 5;

/// Measures all rows of the table.
///
/// # Errors
/// Errors of the device.
pub(crate) async fn run(backend: &WgpuBackend, progress: &mut dyn FnMut(usize, usize)) -> Result<Value, Error> {
    let (mut table, total) = (Vec::new(), 4 * COLS.len());
    progress(0, total);
    // All rows share the tensors and queries, because a browser frees dropped ones late.
    let bench = backend.catch(Bench::new).await?;
    for norm in Norm::USUAL {
        for cols in COLS {
            table.push(bench.row::<f32>(norm, cols).await?);
            progress(table.len(), total);
            table.push(bench.row::<bf16>(norm, cols).await?);
            progress(table.len(), total);
        }
    }
    Ok(Value::Array(table))
}

type Call<'c> = dyn Fn(&WgpuBackend) -> Result<(), Error> + 'c;

struct Bench {
    backend: WgpuBackend,
    /// Bytes of a matrix.
    bytes: usize,
    matrices: [TestBuffer<f32>; 3],
    vectors: [TestBuffer<f32>; 5],
    /// The device's clock: two numbers of 64 bits, and where they are resolved. Not every device has one.
    clock: Option<(QuerySet, Buffer)>,
    stamps: TestBuffer<f32>,
}

impl Bench {
    fn new(backend: &WgpuBackend) -> Result<Self, Error> {
        // More than a cache holds; a processor would take minutes.
        let bytes: usize = if backend.is_software() { 1 << 20 } else { 64 << 20 };
        let matrix = || TestBuffer::new(backend, bytes / size_of::<f32>());
        // The longest is a column of the shortest rows.
        let vector = || TestBuffer::new(backend, (bytes / size_of::<bf16>() / COLS[0]).max(COLS[3]));
        let device = backend.device();
        let clock = device.features().contains(Features::TIMESTAMP_QUERY).then(|| {
            let queries =
                device.create_query_set(&QuerySetDescriptor { label: None, ty: QueryType::Timestamp, count: 2 });
            let usage = BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC;
            let resolved =
                device.create_buffer(&BufferDescriptor { label: None, size: 16, usage, mapped_at_creation: false });
            (queries, resolved)
        });
        Ok(Bench {
            backend: backend.clone(),
            bytes,
            matrices: [matrix()?, matrix()?, matrix()?],
            vectors: [vector()?, vector()?, vector()?, vector()?, vector()?],
            clock,
            stamps: TestBuffer::new(backend, 4)?,
        })
    }

    /// One norm, dtype and row length.
    async fn row<T: Element>(&self, norm: Norm, cols: usize) -> Result<Value, Error> {
        let rows = self.bytes / (cols * size_of::<T>());
        let [x, y, dy] = self.matrices.each_ref().map(|matrix| part::<T>(matrix, rows * cols));
        let [weight, bias, dweight, ..] = self.vectors.each_ref().map(|vector| part::<T>(vector, cols));
        let [.., mean, rstd] = self.vectors.each_ref().map(|vector| part::<f32>(vector, rows));
        let spec = NormSpec::new(norm, rows, cols, 1e-6);
        let is_layer = norm == Norm::Layer;
        let copy = |backend: &WgpuBackend| backend.copy(x, y);
        let forward = |backend: &WgpuBackend| {
            let args = Forward::<T>::new(x, y).weight(weight).rstd(rstd);
            backend.forward(&spec, if is_layer { args.bias(bias).mean(mean) } else { args })
        };
        let backward = |backend: &WgpuBackend| {
            let args = Backward::<T>::new(dy, x, rstd, y).weight(weight).dweight(dweight);
            backend.backward(&spec, if is_layer { args.mean(mean) } else { args })
        };
        let [copy, forward, backward] = self.times([&copy, &forward, &backward]).await?;
        Ok(json!({
            "norm": norm.name(), "dtype": T::DTYPE.to_string(), "rows": rows, "cols": cols,
            "copy_us": copy, "forward_us": forward, "backward_us": backward,
            // A backward pass reads two matrices and writes one, a copy reads and writes one.
            "forward_of_copy": copy / forward, "backward_of_copy": 1.5 * copy / backward,
        }))
    }

    /// Median times of calls in us. They are measured in turn, as a device changes its clock with its
    /// load.
    async fn times(&self, calls: [&Call<'_>; 3]) -> Result<[f64; 3], Error> {
        let mut numbers = [1; 3];
        for (call, number) in calls.iter().zip(&mut numbers) {
            // The first call compiles.
            self.backend.catch(call).await?;
            while self.elapsed_ms(call, *number).await? < LEAST_MS && *number < MOST_CALLS {
                *number *= 2;
            }
        }
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..TIMES {
            for ((call, number), times) in calls.iter().zip(numbers).zip(&mut times) {
                times.push(self.elapsed_ms(call, number).await? * 1e3 / f64::from(number));
            }
        }
        Ok(times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[TIMES / 2]
        }))
    }

    /// Time of several calls by the device's clock. If there is none, or it stands still: the host's
    /// time until their end, minus its time for no calls.
    async fn elapsed_ms(&self, call: &Call<'_>, calls: u32) -> Result<f64, Error> {
        let (by_device, by_host) = self.submit(call, calls).await?;
        if by_device > 0.0 {
            return Ok(by_device);
        }
        Ok((by_host - self.submit(call, 0).await?.1).max(1e-3))
    }

    /// Makes the calls in one pass: its time in ms by the device's clock, and by the host's.
    async fn submit(&self, call: &Call<'_>, calls: u32) -> Result<(f64, f64), Error> {
        let recorder = self.backend.recorder();
        (0..calls).try_for_each(|_| call(&recorder))?;
        let (device, queue) = (self.backend.device(), self.backend.queue());
        let mut encoder = device.create_command_encoder(&CommandEncoderDescriptor::default());
        {
            let timestamp_writes = self.clock.as_ref().map(|(query_set, _)| ComputePassTimestampWrites {
                query_set,
                beginning_of_pass_write_index: Some(0),
                end_of_pass_write_index: Some(1),
            });
            let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor { label: None, timestamp_writes });
            recorder.encode(&mut pass)?;
        }
        if let Some((queries, resolved)) = &self.clock {
            encoder.resolve_query_set(queries, 0..2, resolved, 0);
            encoder.copy_buffer_to_buffer(resolved, 0, self.stamps.buffer(), 0, 16);
        }
        let start = Instant::now();
        queue.submit([encoder.finish()]);
        let words = self.backend.fetch_part(&self.stamps, 0..4).await?;
        let by_host = start.elapsed().as_secs_f64() * 1e3;
        let stamp = |i: usize| u64::from(words[i].to_bits()) | u64::from(words[i + 1].to_bits()) << 32;
        let by_device = stamp(2).saturating_sub(stamp(0)) as f64 * f64::from(queue.get_timestamp_period()) / 1e6;
        Ok((by_device, by_host))
    }
}

/// The first `len` elements.
fn part<T: Element>(buffer: &TestBuffer<f32>, len: usize) -> WgpuSlice<'_, T> {
    WgpuSlice::new(buffer.buffer(), 0, len)
}
