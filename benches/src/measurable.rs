//! What measuring needs of a backend: a clock, a copy to compare with, and how much it can hold.

use std::ops::Range;

use rmsnorm_core::conformance::Harness;
use rmsnorm_core::{AnyBackend, Element, Error, NormBackend};
use rmsnorm_tuning::Tunable;

use crate::Shape;

/// A call that is timed, made to that device on the input set of that number modulo their count. The device is the one that
/// is measured, or one that keeps the calls to submit them together.
pub(crate) type Call<'c, D> = dyn FnMut(&D, usize) -> Result<(), Error> + 'c;

type In<'a, D, T> = <<D as Harness>::Backend as NormBackend>::In<'a, T>;
type Out<'a, D, T> = <<D as Harness>::Backend as NormBackend>::Out<'a, T>;

/// A backend that can be measured.
pub trait Measurable: Harness + Tunable {
    /// The shapes that are measured unless others are asked for: a common one first, a decode step last.
    const SHAPES: &'static [Shape];

    /// How many ways to copy there are. Operations are compared with the fastest.
    const COPIES: usize;

    /// Seconds that a sample lasts, by repeating the call: the clock's own cost must not show.
    const SAMPLE_SECONDS: f64;

    /// Calls that were made ready to be timed: a graph on CUDA, nothing on the CPU.
    type Batch;

    /// How many sets of tensors a measurement visits, where a matrix has this many bytes.
    fn sets(&self, matrix_bytes: usize) -> Sets;

    /// Bytes of a matrix in a sweep, at most: several times the caches.
    fn sweep_bytes(&self) -> usize;

    /// Whether tensors of that shape, with this many bytes in all, can be measured here.
    ///
    /// # Errors
    /// The rule that forbids it, in words.
    fn admit(&self, shape: Shape, bytes: usize) -> Result<(), String>;

    /// That many buffers of `len` elements, each of them the period again and again. Without a period, `len` must be 0.
    ///
    /// # Errors
    /// If the device has no room or fails.
    fn repeat<T: Element>(&self, period: &[T], len: usize, count: usize) -> Result<Vec<Self::Buffer<T>>, Error> {
        let mut elements = Vec::with_capacity(len);
        while elements.len() < len {
            elements.extend_from_slice(&period[..period.len().min(len - elements.len())]);
        }
        (0..count).map(|_| self.upload(&elements)).collect()
    }

    /// Copies one view to the other, in the way of that number below [`COPIES`](Self::COPIES). Enqueues, like a call.
    ///
    /// # Errors
    /// `Length` if the lengths differ; nothing is written then. What the device says.
    fn copy<T: Element>(&self, from: In<'_, Self, T>, to: Out<'_, Self, T>, way: usize) -> Result<(), Error>;

    /// How many kernels were compiled or found on disk so far; 0 where there are none to compile.
    fn kernels(&self) -> usize;

    /// Makes a call on each of that many sets, so that all is compiled and loaded, and prepares to repeat them.
    ///
    /// # Errors
    /// The first error of a call. What the device says.
    fn make_batch(&self, sets: usize, call: &mut Call<'_, Self>) -> Result<Self::Batch, Error>;

    /// Seconds a call, on average over calls on these sets; where a batch can be repeated as a whole only, over at
    /// least as many.
    ///
    /// # Errors
    /// The first error of a call. What the device says.
    fn time(&self, batch: &Self::Batch, sets: Range<usize>, call: &mut Call<'_, Self>) -> Result<f64, Error>;

    /// How [`time`](Self::time) measures that batch.
    fn mode(&self, batch: &Self::Batch) -> Mode;
}

/// How many sets of tensors there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sets {
    /// Their number, at least 1.
    pub count: usize,
    /// Whether input and output of all sets together exceed the caches.
    pub is_cold: bool,
}

/// How time is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The host's clock around a loop of calls.
    Wall,
    /// Events around replays of a graph of calls: the device's time, without gaps between launches.
    Graph,
    /// Events around a loop of calls, whose launches may leave gaps.
    Events,
    /// Timestamps of the device around calls in one submission: the device's time.
    Timestamps,
}

impl Mode {
    /// The name in reports: `wall`, `graph`, `events` or `timestamps`.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Wall => "wall",
            Mode::Graph => "graph",
            Mode::Events => "events",
            Mode::Timestamps => "timestamps",
        }
    }
}

/// A measurement of any backend: a closure that is generic over its argument, like [`Task`](rmsnorm_core::Task).
pub trait Measurement {
    /// What it gives.
    type Output;

    /// Measures this backend.
    fn run<D: Measurable>(self, device: &D) -> Self::Output;
}

/// Runs a measurement on the backend, whichever it is; on a CUDA device on a stream whose calls can be captured into a
/// graph.
///
/// # Errors
/// `Device` if there is no such stream.
pub fn measure<M: Measurement>(backend: &AnyBackend, measurement: M) -> Result<M::Output, Error> {
    if let Some(backend) = backend.as_cpu() {
        Ok(measurement.run(backend))
    } else if let Some(backend) = backend.as_cuda() {
        Ok(measurement.run(&crate::devices::cuda::capturable(backend)?))
    } else if let Some(backend) = backend.as_wgpu() {
        Ok(measurement.run(backend))
    } else {
        let rule = format!("{} has no clock here", backend.device());
        Err(Error::Unsupported { rule })
    }
}
