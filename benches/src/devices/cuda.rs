//! Measuring a CUDA device: CUDA graphs of calls between two events, and the driver's copy.
//!
//! A batch is one call on every set, captured into a graph. A sample replays the graph many times
//! and measures the device's time. The calls on other sets have evicted a call's tensors from the
//! cache. If a call cannot be captured, the events enclose a loop of calls instead.

use std::ops::Range;

use rmsnorm_core::cuda::CudaBackend;
use rmsnorm_core::cuda::cudarc::driver::sys::{
    CUdevice_attribute, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use rmsnorm_core::cuda::cudarc::driver::{CudaGraph, CudaSlice, CudaView, CudaViewMut, DriverError};
use rmsnorm_core::{Element, Error, NormBackend};

use super::gpu::{self, SWEEP_BYTES, set_count};
use crate::Shape;
use crate::measurable::{Call, Measurable, Mode, Sets};

/// The number of calls before a capture. They load the kernels, which a capture does not allow.
const WARM_CALLS: usize = 3;

/// Device memory that is reserved for kernels, graphs and the allocator.
const RESERVED_BYTES: usize = 1 << 30;

/// The oldest driver with the function that cudarc reads events with. cudarc panics if it is
/// missing.
const OLDEST_TIMING_DRIVER: (u32, u32) = (12, 8);

/// The largest copy that always runs at the driver's full rate, if it is a whole number of pages.
/// Parts of a page and some larger sizes (a page more, 512 MiB, 1 GiB) run at two thirds of it
/// (H200, driver 580.159).
const PIECE_BYTES: usize = 256 << 20;

const PAGE_BYTES: usize = 4 << 10;

/// Calls that are timed together.
pub struct Batch {
    /// One call on every set; `None` if they could not be captured.
    graph: Option<CudaGraph>,
    sets: usize,
}

/// The backend on the calling thread's default stream, whose calls can be captured. A capture does
/// not allow the legacy default stream, nor the events that cudarc records on streams that it
/// makes.
pub(crate) fn capturable(backend: &CudaBackend) -> Result<CudaBackend, Error> {
    backend.on(backend.stream().context().per_thread_stream())
}

impl Measurable for CudaBackend {
    /// Rows of all lengths of models and research, a call that hardly fills the device, and decode
    /// steps.
    const SHAPES: &'static [Shape] = &[
        Shape { rows: 32768, cols: 4096 },
        Shape { rows: 1_048_576, cols: 128 },
        Shape { rows: 32768, cols: 1024 },
        Shape { rows: 16384, cols: 8192 },
        Shape { rows: 8192, cols: 16384 },
        Shape { rows: 4096, cols: 32768 },
        Shape { rows: 2048, cols: 65536 },
        Shape { rows: 1024, cols: 131_072 },
        Shape { rows: 4096, cols: 4096 },
        Shape { rows: 128, cols: 4096 },
        // Shapes that the CPU is measured with, too.
        Shape { rows: 4096, cols: 1024 },
        Shape { rows: 2048, cols: 4096 },
        Shape { rows: 1, cols: 4096 },
    ];

    /// One piece, or pieces that the driver always copies at its full rate.
    const COPIES: usize = 2;

    const SAMPLE_SECONDS: f64 = 30e-3;
    /// A context keeps the clock up.
    const WAKE_SECONDS: f64 = 0.0;

    type Batch = Batch;

    fn sets(&self, matrix_bytes: usize) -> Sets {
        let count = set_count(matrix_bytes);
        let l2_bytes = self.stream().context().attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
        let l2_bytes = l2_bytes.map_or(0, |bytes| bytes.unsigned_abs() as usize);
        // A call has at least an input and an output, so together they are twice the L2.
        Sets { count, is_cold: count * matrix_bytes >= l2_bytes }
    }

    fn sweep_bytes(&self) -> usize {
        SWEEP_BYTES
    }

    fn admit(&self, _shape: Shape, bytes: usize) -> Result<(), String> {
        require_timing(self.driver_version())?;
        let (free, _) = self.stream().context().mem_get_info().map_err(|error| device_error(error).to_string())?;
        if bytes.saturating_add(RESERVED_BYTES) <= free {
            return Ok(());
        }
        let gib = |bytes: usize| bytes as f64 / (1 << 30) as f64;
        let (needed, free) = (gib(bytes.saturating_add(RESERVED_BYTES)), gib(free));
        Err(format!("measuring needs {needed:.1} GiB, {} has {free:.1} GiB free", self.name()))
    }

    fn repeat<T: Element>(&self, period: &[T], len: usize, count: usize) -> Result<Vec<CudaSlice<T>>, Error> {
        gpu::repeat(self, period, len, count)
    }

    fn copy<T: Element>(&self, from: CudaView<'_, T>, mut to: CudaViewMut<'_, T>, way: usize) -> Result<(), Error> {
        if from.len() != to.len() {
            return Err(Error::Length { arg: "to", min: from.len(), max: from.len(), got: to.len() });
        }
        if from.is_empty() {
            return Ok(());
        }
        if way == 0 {
            return self.stream().memcpy_dtod(&from, &mut to).map_err(device_error);
        }
        for piece in pieces(from.len(), size_of::<T>()) {
            self.stream().memcpy_dtod(&from.slice(piece.clone()), &mut to.slice_mut(piece)).map_err(device_error)?;
        }
        Ok(())
    }

    fn kernels(&self) -> usize {
        self.kernel_count()
    }

    fn make_batch(&self, sets: usize, call: &mut Call<'_, Self>) -> Result<Batch, Error> {
        // Not all callers call `admit` first.
        require_timing(self.driver_version()).map_err(|reason| Error::Unavailable { backend: "cuda", reason })?;
        (0..sets.min(WARM_CALLS)).try_for_each(|set| call(self, set))?;
        self.stream().synchronize().map_err(device_error)?;
        let graph = capture(self, sets, call);
        if let Some(graph) = &graph {
            // The first launch of a graph also moves it to the device.
            graph.launch().and_then(|()| self.stream().synchronize()).map_err(device_error)?;
        }
        Ok(Batch { graph, sets })
    }

    fn time(&self, batch: &Batch, mut sets: Range<usize>, call: &mut Call<'_, Self>) -> Result<f64, Error> {
        let stream = self.stream();
        let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let (start, end) = (event().map_err(device_error)?, event().map_err(device_error)?);
        let mut calls = sets.len();
        start.record(stream).map_err(device_error)?;
        match &batch.graph {
            Some(graph) => {
                let replays = calls.div_ceil(batch.sets);
                (0..replays).try_for_each(|_| graph.launch()).map_err(device_error)?;
                calls = replays * batch.sets;
            }
            None => sets.try_for_each(|set| call(self, set))?,
        }
        end.record(stream).map_err(device_error)?;
        let milliseconds = start.elapsed_ms(&end).map_err(device_error)?;
        Ok(f64::from(milliseconds) * 1e-3 / calls as f64)
    }

    fn mode(&self, batch: &Batch) -> Mode {
        match batch.graph {
            Some(_) => Mode::Graph,
            None => Mode::Events,
        }
    }
}

/// The elements of a matrix in pieces that the driver copies at its full rate: whole pages, and a
/// rest of less than a page.
fn pieces(len: usize, element_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let (piece, page) = (PIECE_BYTES / element_bytes, PAGE_BYTES / element_bytes);
    let pages = len - len % page;
    let whole = (0..pages).step_by(piece).map(move |start| start..pages.min(start + piece));
    whole.chain((pages < len).then_some(pages..len))
}

/// Checks that a driver of this version can time calls.
///
/// # Errors
/// The rule, if it cannot.
fn require_timing(driver: (u32, u32)) -> Result<(), String> {
    if driver >= OLDEST_TIMING_DRIVER {
        return Ok(());
    }
    let (oldest, got) = (OLDEST_TIMING_DRIVER, driver);
    Err(format!("timing needs a driver of CUDA {}.{} or newer, this one is of {}.{}", oldest.0, oldest.1, got.0, got.1))
}

/// A graph of one call on every set, or `None` if a call or the driver fails. The stream is not
/// capturing afterwards.
fn capture(backend: &CudaBackend, sets: usize, call: &mut Call<'_, CudaBackend>) -> Option<CudaGraph> {
    let stream = backend.stream();
    // Thread-local mode: calls of other threads do not invalidate the capture.
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).ok()?;
    let calls = (0..sets).try_for_each(|set| call(backend, set));
    // A capture must end, also after an error.
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    match (calls, graph) {
        (Ok(()), Ok(Some(graph))) => Some(graph),
        (Ok(()) | Err(_), Ok(_) | Err(_)) => {
            // Clears the error that cudarc keeps; it would return it at the next call.
            stream.context().check_err().ok();
            None
        }
    }
}

fn device_error(error: DriverError) -> Error {
    Error::Device { backend: "cuda", source: error.to_string().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_pages_and_a_rest() {
        let ends = |len, element_bytes| pieces(len, element_bytes).map(|piece| piece.end).collect::<Vec<_>>();
        let piece = 64 << 20;
        assert_eq!(ends(3, 2), [3]);
        assert_eq!(ends(2048, 2), [2048]);
        assert_eq!(ends(5000, 2), [4096, 5000]);
        assert_eq!(ends(piece, 4), [piece]);
        assert_eq!(ends(2 * piece + 1, 4), [piece, 2 * piece, 2 * piece + 1]);
        assert_eq!(ends(piece + 1024, 4), [piece, piece + 1024]);
        // Each begins where the one before it ends.
        let all: Vec<_> = pieces(2 * piece + 1, 4).collect();
        assert_eq!((all[0].start, all[1].start, all[2].start), (0, all[0].end, all[1].end));
    }

    #[test]
    fn only_drivers_that_can_read_events_are_admitted() {
        assert!([(12, 8), (12, 9), (13, 0)].into_iter().all(|driver| require_timing(driver).is_ok()));
        let rule = "timing needs a driver of CUDA 12.8 or newer, this one is of 12.6";
        assert_eq!(require_timing((12, 6)).expect_err("too old"), rule);
    }
}
