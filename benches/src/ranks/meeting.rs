//! A barrier of the ranks' threads that exchanges values and ends if a rank fails.

use std::any::Any;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::BenchError;

/// The barrier of the ranks.
pub(super) struct Meeting {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By rank, the value for the current meeting.
    brought: Vec<Option<Box<dyn Any + Send>>>,
    /// The number of ranks that have taken the values.
    taken: usize,
    /// The number of completed meetings.
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
    /// If a rank has failed.
    pub(super) fn wait(&self, rank: usize) -> Result<(), BenchError> {
        self.gather(rank, ()).map(|_| ())
    }

    /// The values of all ranks, by rank.
    ///
    /// # Errors
    /// If a rank has failed, or its value has another type.
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
        values.ok_or_else(|| BenchError::Input("the ranks have made different calls".into()))
    }

    /// Ends all current and later meetings with an error. The first failure counts.
    pub(super) fn fail(&self, failure: BenchError) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// The first failure, if a rank has failed.
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

    /// Locks the state. A panic cannot leave the state inconsistent, so a poisoned lock is ignored.
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
