//! The search for the fastest entry of a rung.
//!
//! All candidates are timed briefly, in turn. Clearly slower ones drop out, and the others are
//! timed longer. At the end, samples of the best and of the built-in entry alternate.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rmsnorm_core::{NormBackend, Problem};
use rmsnorm_tuning::{Entry, Table};

use super::task::{Subject, Task};
use super::{Ending, Search, Tuned};
use crate::clock::repeats_in;
use crate::{BenchError, Measurable, Samples, Workload, problem};

/// The largest number of candidates of a rung, without the built-in entry.
const MOST_CANDIDATES: usize = 18;

/// The longest duration of a sample, in seconds.
const SAMPLE_SECONDS: f64 = 4e-3;

/// (samples of a round, the largest time relative to the best with which a candidate stays for the
/// next round).
const ROUNDS: [(usize, f64); 3] = [(2, 1.12), (4, 1.04), (7, 1.015)];

/// The number of alternating samples of the best and of the built-in entry.
const LAST_SAMPLES: usize = 25;

/// The smallest gain of a replacement, also without noise, and the largest loss on one of several
/// shapes.
const LEAST_GAIN: f64 = 0.01;
const MOST_LOSS: f64 = 0.005;

/// Compiled candidates, each with a device that uses its table.
pub(super) struct Prepared<D> {
    /// The built-in entry first.
    candidates: Vec<(Entry, D)>,
}

/// The result of a task.
pub(super) struct Found {
    pub(super) task: Task,
    pub(super) best: Entry,
    pub(super) tuned: Tuned,
}

impl Found {
    /// The result of a task that failed with this error.
    pub(super) fn failed(task: &Task, error: &BenchError) -> Found {
        let mut found = kept(task, f64::NAN, None);
        found.tuned.ending = Ending::PutBack(format!("not measured: {error}"));
        found
    }

    /// Puts the best entry into a table, unless it was put back.
    pub(super) fn put(&self, table: &mut Table) {
        match self.tuned.ending {
            Ending::Changed(_) => self.task.put(table, &self.best),
            Ending::Kept | Ending::PutBack(_) => {}
        }
    }
}

impl<D: Measurable> Prepared<D> {
    /// The compiled candidates of a task, without those that do not compile. After the time limit
    /// only the built-in entry is compiled.
    pub(super) fn new(search: &Search<'_, D>, task: &Task) -> Self {
        let Search { base, built_in, until, jobs } = *search;
        let problems: Vec<Problem> = task.subjects.iter().map(problem_of).collect();
        let planned = |device: &D| problems.iter().map(|problem| device.planned(problem)).collect::<Vec<_>>();
        let (above, up_to) = task.lengths;
        let mut seen = HashSet::new();
        let mut candidates = Vec::new();
        let others = base.candidates(&task.slot, above, up_to, &task.built_in);
        for entry in std::iter::once(task.built_in.clone()).chain(others) {
            let mut table = built_in.clone();
            task.put(&mut table, &entry);
            if let Ok(device) = base.with_table(&table)
                && seen.insert(planned(&device))
            {
                candidates.push((entry, device));
            }
            if candidates.len() > MOST_CANDIDATES {
                break;
            }
        }
        let compiled = compile(&candidates, &problems, jobs, until);
        // If the built-in entry does not compile, there is nothing to compare with.
        if !compiled.first().copied().unwrap_or(false) {
            candidates.clear();
        }
        let mut is_compiled = compiled.into_iter();
        candidates.retain(|_| is_compiled.next().unwrap_or(false));
        Prepared { candidates }
    }
}

/// Compiles the candidates' kernels on `jobs` threads. Returns for each candidate whether it is
/// ready.
fn compile<D: Measurable>(candidates: &[(Entry, D)], problems: &[Problem], jobs: usize, until: Instant) -> Vec<bool> {
    let (next, ready) = (AtomicUsize::new(0), Mutex::new(vec![false; candidates.len()]));
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, candidates.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some((_, device)) = candidates.get(index) else { break };
                    if index > 0 && Instant::now() > until {
                        break;
                    }
                    let is_ready = device.backend().prepare_all(problems).is_ok();
                    ready.lock().unwrap_or_else(std::sync::PoisonError::into_inner)[index] = is_ready;
                }
            });
        }
    });
    ready.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn problem_of(subject: &Subject) -> Problem {
    problem(subject.operation, subject.dtype, subject.shape)
}

/// The fastest candidate of a task. `None` if the time limit is reached first.
pub(super) fn search<D: Measurable>(
    search: &Search<'_, D>,
    task: &Task,
    prepared: &Prepared<D>,
) -> Result<Option<Found>, BenchError> {
    let Search { base, until, .. } = *search;
    let candidates = &prepared.candidates;
    if candidates.is_empty() || Instant::now() > until {
        return Ok(None);
    }
    // All entries give the same plan, for example on a device with clusters in the rungs for
    // devices without.
    if candidates.len() == 1 {
        return Ok(Some(kept(task, f64::NAN, None)));
    }
    let mut best = 0;
    let mut last = Vec::new();
    let mut contenders: Vec<usize> = (0..candidates.len()).collect();
    for (number, subject) in task.subjects.iter().enumerate() {
        let mut bench = Bench::new(base, *subject, candidates)?;
        if number == 0 {
            contenders = bench.rounds(&contenders, until)?;
            let Some(&first) = contenders.first() else { return Ok(None) };
            best = first;
            // A candidate with wrong results cannot win.
            while best != 0 && bench.is_wrong(best)? {
                contenders.retain(|contender| *contender != best);
                best = contenders.first().copied().unwrap_or(0);
            }
        } else if best != 0 && bench.is_wrong(best)? {
            best = 0;
        }
        if best == 0 {
            let us = if number == 0 { bench.median(0)? * 1e6 } else { f64::NAN };
            return Ok(Some(kept(task, us, last.first().copied())));
        }
        last.push(bench.against_built_in(best)?);
        if Instant::now() > until {
            break;
        }
    }
    if last.len() < task.subjects.len() {
        return Ok(None);
    }
    Ok(Some(conclude(task, &candidates[best].0, &last)))
}

/// The result of a task whose built-in entry is the best.
fn kept(task: &Task, us: f64, measured: Option<Compared>) -> Found {
    let us = measured.map_or([us; 2], |compared| [compared.built_in * 1e6, compared.built_in * 1e6]);
    let tuned = Tuned { rung: task.name(), subject: words(task), us, gain: 1.0, ending: Ending::Kept };
    Found { task: task.clone(), best: task.built_in.clone(), tuned }
}

/// Decides whether the best entry is faster by more than the noise, over all shapes.
fn conclude(task: &Task, best: &Entry, compared: &[Compared]) -> Found {
    let weights: f64 = task.subjects.iter().map(|subject| subject.weight).sum();
    let weighted = task.subjects.iter().zip(compared).map(|(subject, compared)| subject.weight * compared.gain.ln());
    let gain = (weighted.sum::<f64>() / weights).exp();
    let noise = compared.iter().map(|compared| compared.noise).fold(0.0, f64::max);
    let is_better =
        gain > 1.0 + LEAST_GAIN.max(noise) && compared.iter().all(|one| one.gain > 1.0 - MOST_LOSS - one.noise);
    let us = compared.first().map_or([f64::NAN; 2], |first| [first.built_in * 1e6, first.best * 1e6]);
    let ending = if is_better { Ending::Changed(best.to_string()) } else { Ending::Kept };
    let tuned = Tuned { rung: task.name(), subject: words(task), us, gain, ending };
    Found { task: task.clone(), best: best.clone(), tuned }
}

/// The first measured call of a task, and the number of others, as text.
fn words(task: &Task) -> String {
    let Some(Subject { operation, dtype, shape, .. }) = task.subjects.first() else { return String::new() };
    let others = task.subjects.len() - 1;
    let others = if others > 0 { format!(" and {others} more") } else { String::new() };
    format!("{} {} {dtype} {shape}{others}", operation.name(), operation.norm.name())
}

/// The comparison of the built-in with the best entry, in seconds per call.
#[derive(Clone, Copy, Debug)]
struct Compared {
    built_in: f64,
    best: f64,
    /// The median of the ratios of neighbouring samples.
    gain: f64,
    /// The uncertainty of this median.
    noise: f64,
}

/// The timing of candidates on one shape.
struct Bench<'d, D: Measurable> {
    workload: Workload<'d, D>,
    subject: Subject,
    candidates: &'d [(Entry, D)],
    batches: Vec<Option<(D::Batch, usize)>>,
    samples: Vec<Vec<f64>>,
    set: usize,
}

impl<'d, D: Measurable> Bench<'d, D> {
    fn new(base: &'d D, subject: Subject, candidates: &'d [(Entry, D)]) -> Result<Self, BenchError> {
        let mut workload = Workload::new(base, subject.shape, subject.dtype, &[subject.operation])?;
        let problem = problem_of(&subject);
        let lens = candidates.iter().map(|(_, device)| device.backend().workspace_len(&problem));
        workload.reserve_workspace(lens.max().unwrap_or(0))?;
        let batches = candidates.iter().map(|_| None).collect();
        let samples = vec![Vec::new(); candidates.len()];
        Ok(Bench { workload, subject, candidates, batches, samples, set: 0 })
    }

    /// Takes one more sample of a candidate, in seconds per call.
    fn sample(&mut self, candidate: usize) -> Result<f64, BenchError> {
        let (_, device) = &self.candidates[candidate];
        let (operation, sets) = (self.subject.operation, self.workload.sets());
        let workload = &mut self.workload;
        if self.batches[candidate].is_none() {
            let batch = device.make_batch(sets, &mut |device, set| workload.call_on(device, operation, set))?;
            let once = device.time(&batch, 0..1, &mut |device, set| workload.call_on(device, operation, set))?;
            let repeats = repeats_in::<D>(SAMPLE_SECONDS.min(D::SAMPLE_SECONDS), once);
            self.batches[candidate] = Some((batch, repeats));
        }
        let Some((batch, repeats)) = &self.batches[candidate] else { return Ok(f64::NAN) };
        let range = self.set..self.set + repeats;
        self.set = range.end;
        let seconds = device.time(batch, range, &mut |device, set| workload.call_on(device, operation, set))?;
        self.samples[candidate].push(seconds);
        Ok(seconds)
    }

    /// Times candidates in rounds. Returns the remaining ones, fastest first; none if the time
    /// limit is reached. Candidates that fail drop out.
    fn rounds(&mut self, candidates: &[usize], until: Instant) -> Result<Vec<usize>, BenchError> {
        let mut left = candidates.to_vec();
        for (samples, most) in ROUNDS {
            if left.len() < 2 {
                break;
            }
            for _ in 0..samples {
                for candidate in left.clone() {
                    let sampled = self.sample(candidate);
                    if candidate == 0 {
                        sampled?;
                    } else if sampled.is_err() {
                        left.retain(|other| *other != candidate);
                    }
                    if Instant::now() > until {
                        return Ok(Vec::new());
                    }
                }
            }
            left.sort_by(|one, other| self.typical(*one).total_cmp(&self.typical(*other)));
            let best = left.first().map_or(f64::NAN, |best| self.typical(*best));
            left.retain(|candidate| self.typical(*candidate) <= best * most);
        }
        Ok(left)
    }

    /// The median of a candidate's samples so far.
    fn typical(&self, candidate: usize) -> f64 {
        Samples::new(self.samples[candidate].clone()).median()
    }

    /// The median of at least three samples.
    fn median(&mut self, candidate: usize) -> Result<f64, BenchError> {
        while self.samples[candidate].len() < 3 {
            self.sample(candidate)?;
        }
        Ok(self.typical(candidate))
    }

    /// Whether results of a candidate are outside their bounds, or it fails.
    fn is_wrong(&mut self, candidate: usize) -> Result<bool, BenchError> {
        let (_, device) = &self.candidates[candidate];
        // The check allocates new outputs, so batches that were captured earlier would write to
        // freed memory.
        self.batches.fill_with(|| None);
        Ok(self.workload.wrong_elements_on(device, self.subject.operation).map_or(true, |wrong| wrong > 0))
    }

    /// Compares a candidate with the built-in entry, with alternating samples.
    fn against_built_in(&mut self, candidate: usize) -> Result<Compared, BenchError> {
        let mut pairs = Vec::with_capacity(LAST_SAMPLES);
        // The first pair is a warm-up and is dropped.
        for _ in 0..=LAST_SAMPLES {
            pairs.push((self.sample(0)?, self.sample(candidate)?));
        }
        pairs.remove(0);
        let of = |pick: fn(&(f64, f64)) -> f64| Samples::new(pairs.iter().map(pick).collect());
        let (built_in, best, gains) = (of(|pair| pair.0), of(|pair| pair.1), of(|pair| pair.0 / pair.1));
        // Two standard errors of a median, estimated from the distance of the quartiles.
        let spread = gains.quantile(0.75) - gains.quantile(0.25);
        let noise = 2.0 * 0.93 * spread / (LAST_SAMPLES as f64).sqrt();
        Ok(Compared { built_in: built_in.median(), best: best.median(), gain: gains.median(), noise })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rmsnorm_core::cpu::CpuBackend;
    use rmsnorm_tuning::Tunable;

    use super::super::{Request, task};
    use super::*;

    fn first_task(device: &CpuBackend) -> Task {
        let request = Request { kinds: vec![], cols: vec![], dtypes: vec![], budget: Duration::ZERO, jobs: 1 };
        task::all(device, &device.built_in(), &request).swap_remove(0)
    }

    fn conclusion(compared: &[(f64, f64)]) -> Ending {
        let mut task = first_task(&CpuBackend::new());
        task.subjects.truncate(compared.len());
        let compared: Vec<Compared> =
            compared.iter().map(|&(gain, noise)| Compared { built_in: 1.0, best: 1.0 / gain, gain, noise }).collect();
        conclude(&task, &Entry::none().with("value", 1), &compared).tuned.ending
    }

    #[test]
    fn what_is_faster_by_more_than_the_noise_is_taken() {
        let changed = Ending::Changed("value = 1".into());
        assert_eq!(conclusion(&[(1.02, 0.001)]), changed);
        assert_eq!(conclusion(&[(1.009, 0.001)]), Ending::Kept);
        assert_eq!(conclusion(&[(1.02, 0.03)]), Ending::Kept);
        assert_eq!(conclusion(&[(1.1, 0.001), (0.996, 0.001)]), changed);
        assert_eq!(conclusion(&[(1.3, 0.001), (0.99, 0.001)]), Ending::Kept, "one shape is slower");
    }

    #[test]
    fn candidates_run_different_things_and_the_built_in_one_comes_first() {
        let device = CpuBackend::with_isa_and_threads(rmsnorm_core::cpu::Isa::detect(), 2).unwrap();
        let task = first_task(&device);
        // Longer than a test takes on any machine.
        let until = Instant::now() + Duration::from_secs(1 << 20);
        let search = Search { base: &device, built_in: &device.built_in(), until, jobs: 2 };
        let prepared = Prepared::new(&search, &task);
        assert_eq!(prepared.candidates[0].0, task.built_in);
        assert!(prepared.candidates.len() > 2);
        let planned = |device: &CpuBackend| {
            task.subjects.iter().map(|subject| device.planned(&problem_of(subject))).collect::<Vec<_>>()
        };
        let different: HashSet<_> = prepared.candidates.iter().map(|(_, device)| planned(device)).collect();
        assert_eq!(different.len(), prepared.candidates.len());
    }

    #[test]
    fn too_late_is_not_reached() {
        let device = CpuBackend::new();
        let task = first_task(&device);
        let late = Search { base: &device, built_in: &device.built_in(), until: Instant::now(), jobs: 1 };
        let found = search(&late, &task, &Prepared::new(&late, &task)).unwrap();
        assert!(found.is_none());
    }
}
