//! `rmsnorm tune`: searches the tuning table of a device.
//!
//! ```text
//! task (a rung and its shapes) -> search (candidates, in rounds) -> prove (the conformance suite) -> table
//! ```
//!
//! A rung is an entry of the table for a range of row lengths. The built-in entry always takes part. Another
//! entry replaces it only if it is faster by more than the noise. Rungs that the budget does not reach, and
//! entries that fail the suite, keep the built-in entry.

mod prove;
mod search;
mod task;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rmsnorm_core::{AnyBackend, DType};
use rmsnorm_tuning::{Identity, Kind, Table};

use crate::{BenchError, Measurable, Measurement};
use search::{Found, Prepared};
use task::Task;

/// The request of a user. An empty list stands for everything.
#[derive(Clone, Debug)]
pub struct Request {
    /// The kinds of calls.
    pub kinds: Vec<Kind>,
    /// The row lengths.
    pub cols: Vec<usize>,
    /// The dtypes of activations.
    pub dtypes: Vec<DType>,
    /// The time limit.
    pub budget: Duration,
    /// The number of threads that compile and run the suite.
    pub jobs: usize,
}

/// The result of a rung.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// The ladder and the row lengths, in the ladder's units: `16.forward.rms.block 385..512`.
    pub rung: String,
    /// The measured call, such as `forward rms_norm bf16 8192x4096`.
    pub subject: String,
    /// Microseconds of the built-in and of the best entry, on the first shape.
    pub us: [f64; 2],
    /// The speedup of the best over the built-in entry, over all shapes: 1.02 is 2 %.
    pub gain: f64,
    /// The decision about the rung.
    pub ending: Ending,
}

/// The decision about a rung.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The built-in entry stays: no other one is faster by more than the noise.
    Kept,
    /// This entry replaces the built-in one.
    Changed(String),
    /// The built-in entry stays for this reason.
    PutBack(String),
}

/// The result of tuning.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The device, driver and version of the table.
    pub identity: Identity,
    /// The table, checked with the conformance suite.
    pub table: Table,
    /// The measured rungs, in the order of measurement.
    pub tuned: Vec<Tuned>,
    /// The number of rungs that the budget did not reach.
    pub not_reached: usize,
    /// The number of suite cases that were run.
    pub cases: usize,
}

/// Tunes a backend. `progress` gets each rung when it is done, its number from 1, and the number of
/// rungs.
///
/// # Errors
/// If the backend's table has no rung for the request, or the device fails.
pub fn tune(
    backend: &AnyBackend,
    request: &Request,
    progress: &mut dyn FnMut(&Tuned, usize, usize),
) -> Result<Outcome, BenchError> {
    crate::measure(backend, Tune { request, progress })?
}

struct Tune<'a> {
    request: &'a Request,
    progress: &'a mut dyn FnMut(&Tuned, usize, usize),
}

impl Measurement for Tune<'_> {
    type Output = Result<Outcome, BenchError>;

    fn run<D: Measurable>(self, device: &D) -> Self::Output {
        let start = Instant::now();
        let Tune { request, progress } = self;
        // Begins with the built-in table, also if the environment selects another one.
        let unsplit = device.built_in();
        let built_in = task::split(device, &unsplit);
        let base = device.with_table(&built_in).map_err(BenchError::Input)?;
        let tasks = task::all(&base, &built_in, request);
        if tasks.is_empty() {
            let rule = "this backend's table has no rung for these kinds, dtypes and columns: ask for others";
            return Err(BenchError::Input(rule.into()));
        }
        let search = Search { base: &base, built_in: &built_in, until: start + request.budget, jobs: request.jobs };
        let (found, cases) = search.all(&tasks, progress)?;
        let not_reached = tasks.len() - found.len();
        let mut table = built_in.clone();
        found.iter().for_each(|found| found.put(&mut table));
        task::join(&mut table, &unsplit);
        // Joining rungs does not change the meaning of the table; this checks that it is valid.
        base.with_table(&table).map_err(BenchError::Input)?;
        let tuned = found.into_iter().map(|found| found.tuned).collect();
        Ok(Outcome { identity: base.identity(), table, tuned, not_reached, cases })
    }
}

/// The common data of all tasks.
struct Search<'a, D> {
    /// The device with the built-in table.
    base: &'a D,
    built_in: &'a Table,
    until: Instant,
    jobs: usize,
}

impl<D: Measurable> Search<'_, D> {
    /// Measures and proves the tasks one by one, while the next task's candidates are compiled.
    /// When the budget ends, all results so far are complete. Returns the results and the number of
    /// suite cases.
    fn all(
        &self,
        tasks: &[Task],
        progress: &mut dyn FnMut(&Tuned, usize, usize),
    ) -> Result<(Vec<Found>, usize), BenchError> {
        let prepare = |task: usize| tasks.get(task).map(|task| Prepared::new(self, task));
        std::thread::scope(|scope| {
            let (mut all, mut cases, mut table) = (Vec::new(), 0, self.built_in.clone());
            let mut next = scope.spawn(move || prepare(0));
            for (index, task) in tasks.iter().enumerate() {
                let prepared = next.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                let Some(prepared) = prepared else { break };
                next = scope.spawn(move || prepare(index + 1));
                // An error on one task, such as a lack of memory, does not end the others.
                let measured =
                    search::search(self, task, &prepared).unwrap_or_else(|error| Some(Found::failed(task, &error)));
                let Some(mut found) = measured else { break };
                if matches!(found.tuned.ending, Ending::Changed(_)) {
                    cases += prove::prove(self, &table, &mut found)?;
                    found.put(&mut table);
                }
                progress(&found.tuned, index + 1, tasks.len());
                all.push(found);
            }
            Ok((all, cases))
        })
    }
}

/// Whether a request's list includes `one`.
fn asks_for<T: PartialEq>(list: &[T], one: &T) -> bool {
    list.is_empty() || list.contains(one)
}

/// The measured row lengths of a task.
fn measured_cols(task: &Task) -> BTreeSet<usize> {
    task.subjects.iter().map(|subject| subject.shape.cols).collect()
}
