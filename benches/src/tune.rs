//! Finds the table of a device: what `rmsnorm tune` does.
//!
//! ```text
//! task (a rung, and shapes that stand for it) -> search (candidates, sooner or later stopped) -> prove (the suite) -> table
//! ```
//!
//! The built-in entry always takes part, and another takes its place only where it is faster by more than the noise. What was not
//! reached within the budget, or not proven, stays built in.

mod prove;
mod search;
mod task;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rmsnorm_core::{AnyBackend, DType, bf16, f16};
use rmsnorm_tuning::{Identity, Kind, Table};

use crate::{BenchError, Measurable, Measurement};
use search::{Found, Prepared};
use task::Task;

/// The share of the budget that measuring has; the rest is the proof's.
const MEASURING: f64 = 0.7;

/// What is asked for. Empty lists are all there is.
#[derive(Clone, Debug)]
pub struct Request {
    /// What is tuned.
    pub kinds: Vec<Kind>,
    /// Lengths of rows.
    pub cols: Vec<usize>,
    /// Dtypes of activations.
    pub dtypes: Vec<DType>,
    /// How long it may take.
    pub budget: Duration,
    /// How many threads compile and judge.
    pub jobs: usize,
}

/// A rung that was measured, or would have been.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// The ladder and the lengths: `16.forward.rms.block 385..512`, in the ladder's units.
    pub rung: String,
    /// What was measured, such as `forward rms_norm bf16 8192x4096`.
    pub subject: String,
    /// Microseconds of the built-in entry and of the best, of the first shape.
    pub us: [f64; 2],
    /// How much faster the best is than the built-in one, over all shapes: 1.02 is 2 %.
    pub gain: f64,
    /// What becomes of it.
    pub ending: Ending,
}

/// What becomes of a rung.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Nothing is faster by more than the noise.
    Kept,
    /// This takes the built-in entry's place.
    Changed(String),
    /// It was faster, and is not used for this reason.
    PutBack(String),
}

/// What is told while it goes on.
#[derive(Clone, Debug)]
pub enum Progress<'a> {
    /// So many rungs of so many were measured; this is the last.
    Measured(&'a Tuned, usize, usize),
    /// So many of so many changed rungs were proven.
    Proven(usize, usize),
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What the table is for.
    pub identity: Identity,
    /// The proven table.
    pub table: Table,
    /// The rungs that were measured, in that order.
    pub tuned: Vec<Tuned>,
    /// Rungs that the budget did not reach.
    pub not_reached: usize,
    /// Cases of the suite that were run.
    pub cases: usize,
}

/// Tunes a backend.
///
/// # Errors
/// If the request names nothing that the backend has, or the device fails.
pub fn tune(
    backend: &AnyBackend,
    request: &Request,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome, BenchError> {
    crate::measure(backend, Tune { request, progress })?
}

struct Tune<'a> {
    request: &'a Request,
    progress: &'a mut dyn FnMut(Progress<'_>),
}

impl Measurement for Tune<'_> {
    type Output = Result<Outcome, BenchError>;

    fn run<D: Measurable>(self, device: &D) -> Self::Output {
        let start = Instant::now();
        let Tune { request, progress } = self;
        let built_in = device.built_in();
        // Of the built-in table, whatever the environment says.
        let base = device.with_table(&built_in).map_err(BenchError::Input)?;
        let tasks = task::all(&base, &built_in, request);
        if tasks.is_empty() {
            return Err(BenchError::Input("nothing that is asked for has a rung in this backend's table".into()));
        }
        let measure_until = start + request.budget.mul_f64(MEASURING);
        let mut found = measure_all(&base, &built_in, &tasks, measure_until, request.jobs, progress)?;
        let not_reached = tasks.len() - found.len();
        let until = start + request.budget;
        let cases = prove::prove(&base, &built_in, &mut found, until, request.jobs, &mut |done, total| {
            progress(Progress::Proven(done, total));
        })?;
        let mut table = built_in;
        found.iter().for_each(|found| found.put(&mut table));
        let tuned = found.into_iter().map(|found| found.tuned).collect();
        Ok(Outcome { identity: base.identity(), table, tuned, not_reached, cases })
    }
}

/// Measures one task after the other, while the next one's candidates are compiled.
fn measure_all<D: Measurable>(
    base: &D,
    built_in: &Table,
    tasks: &[Task],
    until: Instant,
    jobs: usize,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Vec<Found>, BenchError> {
    let prepare = |task: usize| tasks.get(task).map(|task| Prepared::new(base, built_in, task, jobs, until));
    std::thread::scope(|scope| {
        let mut found = Vec::new();
        let mut next = scope.spawn(|| prepare(0));
        for (index, task) in tasks.iter().enumerate() {
            let prepared = next.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let Some(prepared) = prepared else { break };
            next = scope.spawn(move || prepare(index + 1));
            let Some(one) = on_dtype(base, task, &prepared, until)? else { break };
            progress(Progress::Measured(&one.tuned, index + 1, tasks.len()));
            found.push(one);
        }
        Ok(found)
    })
}

fn on_dtype<D: Measurable>(
    base: &D,
    task: &Task,
    prepared: &Prepared<D>,
    until: Instant,
) -> Result<Option<Found>, BenchError> {
    match task.dtype() {
        DType::F32 => search::search::<D, f32>(base, task, prepared, until),
        DType::F16 => search::search::<D, f16>(base, task, prepared, until),
        DType::Bf16 => search::search::<D, bf16>(base, task, prepared, until),
    }
}

/// Whether a list asks for this.
fn asks_for<T: PartialEq>(list: &[T], one: &T) -> bool {
    list.is_empty() || list.contains(one)
}

/// The lengths of rows that were measured.
fn measured_cols(task: &Task) -> BTreeSet<usize> {
    task.subjects.iter().map(|subject| subject.shape.cols).collect()
}
