//! The interface of a measured backend: a timer, a copy to compare with, and size limits.

use std::ops::Range;

use rmsnorm_core::conformance::Harness;
use rmsnorm_core::{Element, Error, NormBackend};
use rmsnorm_tuning::Tunable;

use crate::Shape;

/// A timed call: on a device, and on the input set of a number modulo the number of sets. The
/// device is the measured one, or a recorder that collects calls to submit them together.
pub(crate) type Call<'c, D> = dyn FnMut(&D, usize) -> Result<(), Error> + 'c;

type In<'a, D, T> = <<D as Harness>::Backend as NormBackend>::In<'a, T>;
type Out<'a, D, T> = <<D as Harness>::Backend as NormBackend>::Out<'a, T>;

/// A backend that can be measured.
pub trait Measurable: Harness + Tunable {
    /// The default shapes: a common one first, a decode step last.
    const SHAPES: &'static [Shape];

    /// The number of ways to copy. Operations are compared with the fastest one.
    const COPIES: usize;

    /// The duration of a sample in seconds. Calls are repeated to reach it, to hide the timer's
    /// cost.
    const SAMPLE_SECONDS: f64;

    /// The largest number of calls in a sample.
    const MOST_CALLS: usize = 1_000_000;

    /// Seconds of work after which an idle device has its full clock: samples begin then.
    const WAKE_SECONDS: f64;

    /// Prepared calls: a graph on CUDA, nothing on the CPU.
    type Batch;

    /// The sets of tensors that a measurement visits, for matrices of this many bytes.
    fn sets(&self, matrix_bytes: usize) -> Sets;

    /// The largest number of bytes of a matrix in a sweep: several times the caches.
    fn sweep_bytes(&self) -> usize;

    /// Whether tensors of this shape, with `bytes` in all, can be measured.
    ///
    /// # Errors
    /// The rule that forbids it.
    fn admit(&self, shape: Shape, bytes: usize) -> Result<(), String>;

    /// `count` buffers of `len` elements, each of which repeats the period. `len` must be 0 if the
    /// period is empty.
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

    /// Enqueues a copy of one view to the other. `way`: a number below [`COPIES`](Self::COPIES).
    ///
    /// # Errors
    /// `Length` if the lengths differ; nothing is written then. The device's.
    fn copy<T: Element>(&self, from: In<'_, Self, T>, to: Out<'_, Self, T>, way: usize) -> Result<(), Error>;

    /// The number of kernels compiled or read from disk so far; 0 if the backend compiles none.
    fn kernels(&self) -> usize;

    /// Makes a call on each of `sets` sets, which compiles and loads the kernels, and prepares to
    /// repeat the calls.
    ///
    /// # Errors
    /// The first error of a call. The device's.
    fn make_batch(&self, sets: usize, call: &mut Call<'_, Self>) -> Result<Self::Batch, Error>;

    /// The average seconds per call over calls on these sets, or over more calls if a batch can be
    /// repeated only as a whole.
    ///
    /// # Errors
    /// The first error of a call. The device's.
    fn time(&self, batch: &Self::Batch, sets: Range<usize>, call: &mut Call<'_, Self>) -> Result<f64, Error>;

    /// The timer that [`time`](Self::time) uses for this batch.
    fn mode(&self, batch: &Self::Batch) -> Mode;
}

/// The number of sets of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sets {
    /// The number of sets, at least 1.
    pub count: usize,
    /// Whether input and output of all sets together exceed the caches.
    pub is_cold: bool,
}

/// A timer.
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
    /// The result of the measurement.
    type Output;

    /// Measures this backend.
    fn run<D: Measurable>(self, device: &D) -> Self::Output;
}
