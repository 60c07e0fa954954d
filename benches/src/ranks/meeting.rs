//! Where the threads of all ranks wait for each other, and for no rank that has failed.

use std::any::Any;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::BenchError;

/// The ranks' meeting place.
pub(super) struct Meeting {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By rank, what each has brought to this meeting.
    brought: Vec<Option<Box<dyn Any + Send>>>,
    /// Ranks that have taken it.
    taken: usize,
    /// Meetings that are over.
    over: u64,
    failure: Option<BenchError>,
}

impl Meeting {
    pub(super) fn new(ranks: usize) -> Self {
        let brought = (0..ranks).map(|_| None).collect();
        Meeting { ranks, state: Mutex::new(State { brought, ..State::default() }), changed: Condvar::new() }
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// If one has failed.
    pub(super) fn wait(&self, rank: usize) -> Result<(), BenchError> {
        self.gather(rank, ()).map(|_| ())
    }

    /// What every rank has brought, by rank. All bring the same type.
    ///
    /// # Errors
    /// If a rank has failed, or brings something else.
    pub(super) fn gather<V: Clone + Send + 'static>(&self, rank: usize, value: V) -> Result<Vec<V>, BenchError> {
        let mut state = self.lock();
        let turn = state.over;
        state.brought[rank] = Some(Box::new(value));
        self.changed.notify_all();
        state = self.wait_until(state, |state| state.brought.iter().all(Option::is_some))?;
        let values: Option<Vec<V>> =
            state.brought.iter().flatten().map(|value| value.downcast_ref::<V>().cloned()).collect();
        state.taken += 1;
        if state.taken == self.ranks {
            state.taken = 0;
            state.over += 1;
            state.brought.fill_with(|| None);
            self.changed.notify_all();
        }
        drop(self.wait_until(state, |state| state.over > turn)?);
        values.ok_or_else(|| BenchError::Input("ranks are not at the same place".into()))
    }

    /// Tells all ranks that there will be no further meeting. The first failure counts.
    pub(super) fn fail(&self, failure: BenchError) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// What went wrong, if anything did.
    pub(super) fn into_failure(self) -> Option<BenchError> {
        self.state.into_inner().unwrap_or_else(PoisonError::into_inner).failure
    }

    fn wait_until<'m>(
        &self,
        mut state: MutexGuard<'m, State>,
        is_so: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'m, State>, BenchError> {
        while !is_so(&state) {
            if state.failure.is_some() {
                return Err(BenchError::Input("another rank has failed".into()));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state)
    }

    /// Under the lock nothing is left half done.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_meet_again_and_again() {
        let meeting = Meeting::new(3);
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let meeting = &meeting;
                scope.spawn(move || {
                    for turn in 0..100 {
                        assert_eq!(meeting.gather(rank, 10 * turn + rank).unwrap(), [0, 1, 2].map(|it| 10 * turn + it));
                        meeting.wait(rank).unwrap();
                    }
                });
            }
        });
        assert!(meeting.into_failure().is_none());
    }

    #[test]
    fn nobody_waits_for_a_rank_that_failed() {
        let meeting = Meeting::new(2);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| meeting.wait(0).unwrap_err().to_string());
            meeting.fail(BenchError::Wrong("the first".into()));
            meeting.fail(BenchError::Wrong("the second".into()));
            assert_eq!(waiting.join().unwrap(), "another rank has failed");
        });
        assert_eq!(meeting.into_failure().map(|error| error.to_string()).as_deref(), Some("the first"));
    }
}
