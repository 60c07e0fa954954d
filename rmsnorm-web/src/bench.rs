//! Times of forward and backward passes, beside those of a copy by the same backend: what the
//! device's memory allows.

use rmsnorm_conformance::Harness;
use rmsnorm_spec::{Element, Error, Norm, NormSpec, bf16};
use rmsnorm_wgpu::wgpu::{
    BufferDescriptor, BufferUsages, CommandEncoderDescriptor, ComputePassDescriptor, ComputePassTimestampWrites,
    Features, QuerySetDescriptor, QueryType,
};
use rmsnorm_wgpu::{Backward, Forward, TestBuffer, WgpuBackend, WgpuSlice};
use serde_json::{Value, json};
use web_time::Instant;

/// Row lengths, in columns.
const COLS: [usize; 4] = [256, 1024, 4096, 8192];

/// Time of a measurement in ms: a hundred times what browsers round to.
const LEAST_MS: f64 = 10.0;

/// Calls of a measurement. A clock that stands still ends there.
const MOST_CALLS: u32 = 1 << 12;

/// Measurements of a number; the median counts.
const TIMES: usize = 5;

/// Measures all rows of the table.
///
/// # Errors
/// Errors of the device.
pub(crate) async fn run(backend: &WgpuBackend, progress: &mut dyn FnMut(usize, usize)) -> Result<Value, Error> {
    let mut table = Vec::new();
    let total = 4 * COLS.len();
    progress(0, total);
    for norm in Norm::USUAL {
        for cols in COLS {
            table.push(row::<f32>(backend, norm, cols).await?);
            progress(table.len(), total);
            table.push(row::<bf16>(backend, norm, cols).await?);
            progress(table.len(), total);
        }
    }
    Ok(Value::Array(table))
}

/// One norm, dtype and row length.
async fn row<T: Element>(backend: &WgpuBackend, norm: Norm, cols: usize) -> Result<Value, Error> {
    // More than a cache holds; a processor would take minutes.
    let bytes = if backend.is_software() { 1 << 20 } else { 64 << 20 };
    let rows = bytes / (cols * size_of::<T>());
    let matrix = || TestBuffer::<T>::new(backend, rows * cols);
    let (x, y, dy) = (matrix()?, matrix()?, matrix()?);
    let (weight, bias, dweight) = (
        TestBuffer::<T>::new(backend, cols)?,
        TestBuffer::<T>::new(backend, cols)?,
        TestBuffer::<T>::new(backend, cols)?,
    );
    let (mean, rstd) = (TestBuffer::<f32>::new(backend, rows)?, TestBuffer::<f32>::new(backend, rows)?);
    let spec = NormSpec::new(norm, rows, cols, 1e-6);
    let (x, y, dy) = (whole(&x), whole(&y), whole(&dy));
    let (weight, bias, dweight) = (whole(&weight), whole(&bias), whole(&dweight));
    let (mean, rstd) = (whole::<f32>(&mean), whole::<f32>(&rstd));
    let is_layer = norm == Norm::Layer;
    let copy = time(backend, |backend| backend.copy(x, y)).await?;
    let forward = time(backend, |backend| {
        let mut args = Forward::<T>::new(x, y).weight(weight).rstd(rstd);
        if is_layer {
            args = args.bias(bias).mean(mean);
        }
        backend.forward(&spec, args)
    })
    .await?;
    let backward = time(backend, |backend| {
        let mut args = Backward::<T>::new(dy, x, rstd, y).weight(weight).dweight(dweight);
        if is_layer {
            args = args.mean(mean);
        }
        backend.backward(&spec, args)
    })
    .await?;
    Ok(json!({
        "norm": norm.name(), "dtype": T::DTYPE.to_string(), "rows": rows, "cols": cols,
        "copy_us": copy, "forward_us": forward, "backward_us": backward,
        // A backward pass reads two matrices and writes one, a copy reads and writes one.
        "forward_of_copy": copy / forward, "backward_of_copy": 1.5 * copy / backward,
    }))
}

fn whole<T: Element>(buffer: &TestBuffer<T>) -> WgpuSlice<'_, T> {
    WgpuSlice::whole(buffer.buffer())
}

/// Median time of a call in us.
async fn time(backend: &WgpuBackend, call: impl Fn(&WgpuBackend) -> Result<(), Error>) -> Result<f64, Error> {
    // The first call compiles.
    backend.catch(&call).await?;
    let mut calls = 1;
    while elapsed_ms(backend, &call, calls).await? < LEAST_MS && calls < MOST_CALLS {
        calls *= 2;
    }
    let mut times = Vec::new();
    for _ in 0..TIMES {
        times.push(elapsed_ms(backend, &call, calls).await? * 1e3 / f64::from(calls));
    }
    times.sort_by(f64::total_cmp);
    Ok(times[TIMES / 2])
}

/// Time of several calls in one pass, by the device's clock, which browsers round to 0.1 ms. Without
/// one the time until the host learns of the end, with that of the submission.
async fn elapsed_ms(
    backend: &WgpuBackend,
    call: &impl Fn(&WgpuBackend) -> Result<(), Error>,
    calls: u32,
) -> Result<f64, Error> {
    let recorder = backend.recorder();
    (0..calls).try_for_each(|_| call(&recorder))?;
    let (device, queue) = (backend.device(), backend.queue());
    let mut encoder = device.create_command_encoder(&CommandEncoderDescriptor::default());
    let queries = device
        .features()
        .contains(Features::TIMESTAMP_QUERY)
        .then(|| device.create_query_set(&QuerySetDescriptor { label: None, ty: QueryType::Timestamp, count: 2 }));
    {
        let timestamp_writes = queries.as_ref().map(|query_set| ComputePassTimestampWrites {
            query_set,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        });
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor { label: None, timestamp_writes });
        recorder.encode(&mut pass)?;
    }
    // Two numbers of 64 bits.
    let stamps = TestBuffer::<f32>::new(backend, 4)?;
    if let Some(queries) = &queries {
        let usage = BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC;
        let resolved =
            device.create_buffer(&BufferDescriptor { label: None, size: 16, usage, mapped_at_creation: false });
        encoder.resolve_query_set(queries, 0..2, &resolved, 0);
        encoder.copy_buffer_to_buffer(&resolved, 0, stamps.buffer(), 0, 16);
    }
    let start = Instant::now();
    queue.submit([encoder.finish()]);
    let words: Vec<u64> = backend.fetch_part(&stamps, 0..4).await?.iter().map(|word| word.to_bits().into()).collect();
    if queries.is_none() {
        return Ok(start.elapsed().as_secs_f64() * 1e3);
    }
    let [first, end] = [words[0] | words[1] << 32, words[2] | words[3] << 32];
    Ok(end.saturating_sub(first) as f64 * f64::from(queue.get_timestamp_period()) / 1e6)
}
