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

use rmsnorm_core::{AnyBackend, DType};
use rmsnorm_tuning::{Identity, Kind, Table};

use crate::{BenchError, Measurable, Measurement};
use search::{Found, Prepared};
use task::Task;

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

/// Tunes a backend. `progress` is called with every rung as it is done, its number from 1, and how many there are.
///
/// # Errors
/// If the request names nothing that the backend has, or the device fails.
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
        // Of the built-in table, whatever the environment says.
        let unsplit = device.built_in();
        let built_in = task::split(device, &unsplit);
        let base = device.with_table(&built_in).map_err(BenchError::Input)?;
        let tasks = task::all(&base, &built_in, request);
        if tasks.is_empty() {
            return Err(BenchError::Input("nothing that is asked for has a rung in this backend's table".into()));
        }
        let search = Search { base: &base, built_in: &built_in, until: start + request.budget, jobs: request.jobs };
        let (found, cases) = search.all(&tasks, progress)?;
        let not_reached = tasks.len() - found.len();
        let mut table = built_in.clone();
        found.iter().for_each(|found| found.put(&mut table));
        task::join(&mut table, &unsplit);
        // It is the same table, and legal as such.
        base.with_table(&table).map_err(BenchError::Input)?;
        let tuned = found.into_iter().map(|found| found.tuned).collect();
        Ok(Outcome { identity: base.identity(), table, tuned, not_reached, cases })
    }
}

/// What all tasks have in common.
struct Search<'a, D> {
    /// By the built-in table.
    base: &'a D,
    built_in: &'a Table,
    until: Instant,
    jobs: usize,
}

impl<D: Measurable> Search<'_, D> {
    /// Measures and proves one task after the other, while the next one's candidates are compiled: whenever the budget ends, what was
    /// found until then is whole. How many cases were run for the proofs.
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
                // What one shape has no room for says nothing of the next.
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

/// Whether a list asks for this.
fn asks_for<T: PartialEq>(list: &[T], one: &T) -> bool {
    list.is_empty() || list.contains(one)
}

/// The lengths of rows that were measured.
fn measured_cols(task: &Task) -> BTreeSet<usize> {
    task.subjects.iter().map(|subject| subject.shape.cols).collect()
}
