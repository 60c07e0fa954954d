//! [`ThreadGroup`]: a collective of threads of one process.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rmsnorm_spec::{AnyElement, Element, Error, HostMemory, Storage};

use crate::{Collective, RowShares, check_len};

/// A rank of a group whose ranks are threads of one process, for backends in host memory.
///
/// Move each rank that [`new`](Self::new) returns to a thread. Data that a rank sends is copied
/// once and then read by the others.
///
/// # Example
/// ```
/// use rmsnorm_cpu::{CpuBackend, Forward, Isa, spec::{Error, NormSpec}};
/// use rmsnorm_dist::{Sharded, ShardedNorm, ThreadGroup};
///
/// let spec = NormSpec::rms(2, 2, 0.0);
/// let partial = [[1.0f32, 2.0, 3.0, 4.0], [6.0, -1.0, 4.0, 3.0]];
/// let results = std::thread::scope(|scope| {
///     let rank = |(group, x): (ThreadGroup, [f32; 4])| {
///         scope.spawn(move || -> Result<[f32; 4], Error> {
///             let norm = Sharded::new(CpuBackend::with_isa_and_threads(Isa::detect(), 1)?, group);
///             let mut y = [0.0; 4];
///             norm.forward_reduced(&spec, Forward::new(&x, &mut y))?;
///             Ok(y)
///         })
///     };
///     let ranks: Vec<_> = ThreadGroup::new(2).into_iter().zip(partial).map(rank).collect();
///     ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<Result<Vec<_>, Error>>()
/// })?;
/// // (7, 1) has a root mean square of 5, (7, 7) of 7.
/// assert_eq!(results, [[1.4, 0.2, 1.0, 1.0]; 2]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct ThreadGroup {
    rank: usize,
    ranks: usize,
    deadline: Duration,
    shared: Arc<Shared>,
    /// A rank makes one call at a time.
    not_sync: PhantomData<Cell<()>>,
}

/// State shared by the ranks of a group.
#[derive(Debug)]
struct Shared {
    meeting: Mutex<Meeting>,
    changed: Condvar,
}

/// Progress of the ranks in the current call.
#[derive(Debug)]
struct Meeting {
    /// The data of each rank, until all ranks have read it.
    sent: Vec<Option<Sent>>,
    /// Number of ranks that have read it.
    read: usize,
    /// Number of completed calls.
    call: u64,
    /// The error of every later call, if there was one.
    failure: Option<String>,
    /// Time by which a test has advanced the clock.
    #[cfg(test)]
    ahead: Duration,
}

/// A rank's part of a call.
#[derive(Clone, Debug)]
struct Sent {
    call: Call,
    bytes: Arc<Vec<u8>>,
}

/// The properties of a call that must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Call {
    name: &'static str,
    shares: RowShares,
    storage: Storage,
}

impl Meeting {
    fn now(&self) -> Instant {
        let now = Instant::now();
        #[cfg(test)]
        let now = now + self.ahead;
        now
    }
}

impl ThreadGroup {
    /// Default time that a rank waits for the others; see [`deadline`](Self::deadline).
    pub const DEADLINE: Duration = Duration::from_secs(30);

    /// The ranks of a group of `ranks` (at least 1), in order.
    pub fn new(ranks: usize) -> Vec<ThreadGroup> {
        let ranks = ranks.max(1);
        let meeting = Meeting {
            sent: vec![None; ranks],
            read: 0,
            call: 0,
            failure: None,
            #[cfg(test)]
            ahead: Duration::ZERO,
        };
        let shared = Arc::new(Shared { meeting: Mutex::new(meeting), changed: Condvar::new() });
        let rank = |rank| {
            let (deadline, shared) = (ThreadGroup::DEADLINE, shared.clone());
            ThreadGroup { rank, ranks, deadline, shared, not_sync: PhantomData }
        };
        (0..ranks).map(rank).collect()
    }

    /// Sets the time that this rank waits for the others. A rank that waits longer ends the group:
    /// every later call of each rank is an error.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sends `bytes` to all ranks. Calls `take` with the bytes of every rank.
    fn exchange(&self, call: Call, bytes: Vec<u8>, take: impl FnOnce(&[Arc<Vec<u8>>])) -> Result<(), Error> {
        let mut meeting = self.lock();
        let turn = meeting.call;
        self.check(&meeting)?;
        meeting.sent[self.rank] = Some(Sent { call, bytes: Arc::new(bytes) });
        self.shared.changed.notify_all();
        meeting = self.wait(meeting, |meeting| {
            meeting.sent.iter().position(Option::is_none).map(|rank| format!("rank {rank} did not come"))
        })?;
        let others = meeting.sent.iter().flatten().map(|sent| sent.call);
        if let Some((rank, other)) = others.enumerate().find(|(_, other)| *other != call) {
            let reason = format!("rank {} called {call}, rank {rank} {other}", self.rank);
            return Err(self.fail(meeting, reason));
        }
        let sent: Vec<Arc<Vec<u8>>> = meeting.sent.iter().flatten().map(|sent| sent.bytes.clone()).collect();
        meeting.read += 1;
        if meeting.read == self.ranks {
            // The last reader opens the next call.
            meeting.read = 0;
            meeting.call += 1;
            meeting.sent.fill(None);
            self.shared.changed.notify_all();
        }
        // No rank returns before all have read, so none can enter the next call too early.
        let meeting = self.wait(meeting, |meeting| {
            (meeting.call == turn).then(|| "a rank entered this call and did not finish it".to_owned())
        })?;
        drop(meeting);
        take(&sent);
        Ok(())
    }

    /// Sends this rank's share to all ranks, and writes every share to its place.
    fn gather<T: AnyElement>(&self, shares: &RowShares, own: Vec<u8>, to: &mut [T]) -> Result<(), Error> {
        let call = Call { name: "all_gather", shares: *shares, storage: T::STORAGE };
        self.exchange(call, own, |sent| {
            for (rank, sent) in sent.iter().enumerate() {
                bytemuck::cast_slice_mut(&mut to[shares.elements(rank)]).copy_from_slice(sent);
            }
        })
    }

    /// Adds the tensors of all ranks, in rank order.
    fn add<T: Element>(&self, own: Vec<u8>, to: &mut [T]) -> Result<(), Error> {
        let shares = RowShares { units: to.len(), unit: 1, ranks: self.ranks };
        let call = Call { name: "all_reduce", shares, storage: T::STORAGE };
        let mut part = vec![T::default(); to.len()];
        self.exchange(call, own, |sent| {
            for (rank, sent) in sent.iter().enumerate() {
                bytemuck::cast_slice_mut(&mut part).copy_from_slice(sent);
                if rank == 0 {
                    to.copy_from_slice(&part);
                } else {
                    to.iter_mut().zip(&part).for_each(|(to, x)| *to = T::from_f32(to.to_f32() + x.to_f32()));
                }
            }
        })
    }

    /// Waits until nothing is `missing` or the deadline has passed.
    fn wait<'m>(
        &self,
        mut meeting: MutexGuard<'m, Meeting>,
        missing: impl Fn(&Meeting) -> Option<String>,
    ) -> Result<MutexGuard<'m, Meeting>, Error> {
        // No deadline if the clock cannot represent it.
        let until = meeting.now().checked_add(self.deadline);
        loop {
            // A rank that has all data of this call continues, even if another has left the group.
            let Some(missing) = missing(&meeting) else { return Ok(meeting) };
            self.check(&meeting)?;
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(meeting.now()));
            if left.is_zero() {
                let reason = format!("{missing} within {:?}", self.deadline);
                return Err(self.fail(meeting, reason));
            }
            let waited = self.shared.changed.wait_timeout(meeting, left);
            meeting = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn check_shares(&self, shares: &RowShares) -> Result<(), Error> {
        if shares.ranks == self.ranks {
            return Ok(());
        }
        let rule = format!("`ranks` must be {}, the size of this group, got {}", self.ranks, shares.ranks);
        Err(Error::InvalidArgument { arg: "shares", rule })
    }

    /// A poisoned lock is valid: every change under it is one assignment, so a panic leaves no
    /// partial change.
    fn lock(&self) -> MutexGuard<'_, Meeting> {
        self.shared.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, meeting: &Meeting) -> Result<(), Error> {
        meeting.failure.as_ref().map_or(Ok(()), |reason| Err(device_error(reason.clone())))
    }

    fn fail(&self, mut meeting: MutexGuard<'_, Meeting>, reason: String) -> Error {
        let reason = meeting.failure.get_or_insert(reason).clone();
        self.shared.changed.notify_all();
        device_error(reason)
    }
}

fn device_error(reason: String) -> Error {
    Error::Device { backend: "thread group", source: reason.into() }
}

impl Drop for ThreadGroup {
    /// Tells the other ranks, which would otherwise wait until their deadline.
    fn drop(&mut self) {
        let mut meeting = self.lock();
        let rank = self.rank;
        meeting.failure.get_or_insert_with(|| format!("rank {rank} has left the group"));
        self.shared.changed.notify_all();
    }
}

impl<B: HostMemory> Collective<B> for ThreadGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_to_all<T: AnyElement>(
        &self,
        shares: &RowShares,
        from: B::In<'_, T>,
        mut to: B::Out<'_, T>,
    ) -> Result<(), Error> {
        let (from, to) = (B::slice(&from), B::slice_mut(&mut to));
        self.check_shares(shares)?;
        let own = shares.elements(self.rank);
        check_len("from", shares.len(), from.len())?;
        check_len("to", own.len() * self.ranks, to.len())?;
        let call = Call { name: "all_to_all", shares: *shares, storage: T::STORAGE };
        self.exchange(call, bytemuck::cast_slice(from).to_vec(), |sent| {
            for (part, sent) in to.chunks_exact_mut(own.len().max(1)).zip(sent) {
                let size = size_of::<T>();
                bytemuck::cast_slice_mut(part).copy_from_slice(&sent[own.start * size..own.end * size]);
            }
        })
    }

    fn all_gather<T: AnyElement>(
        &self,
        shares: &RowShares,
        from: B::In<'_, T>,
        mut to: B::Out<'_, T>,
    ) -> Result<(), Error> {
        let (from, to) = (B::slice(&from), B::slice_mut(&mut to));
        self.check_shares(shares)?;
        check_len("from", shares.elements(self.rank).len(), from.len())?;
        check_len("to", shares.len(), to.len())?;
        self.gather(shares, bytemuck::cast_slice(from).to_vec(), to)
    }

    fn all_gather_in_place<T: AnyElement>(&self, shares: &RowShares, mut tensor: B::Out<'_, T>) -> Result<(), Error> {
        let tensor = B::slice_mut(&mut tensor);
        self.check_shares(shares)?;
        check_len("tensor", shares.len(), tensor.len())?;
        let own = bytemuck::cast_slice(&tensor[shares.elements(self.rank)]).to_vec();
        self.gather(shares, own, tensor)
    }

    /// Adds in rank order and rounds to the dtype after each addition.
    fn all_reduce<T: Element>(&self, from: B::In<'_, T>, mut to: B::Out<'_, T>) -> Result<(), Error> {
        let (from, to) = (B::slice(&from), B::slice_mut(&mut to));
        check_len("to", from.len(), to.len())?;
        self.add(bytemuck::cast_slice(from).to_vec(), to)
    }

    fn all_reduce_in_place<T: Element>(&self, mut tensor: B::Out<'_, T>) -> Result<(), Error> {
        let tensor = B::slice_mut(&mut tensor);
        self.add(bytemuck::cast_slice(tensor).to_vec(), tensor)
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let RowShares { units, unit, ranks } = self.shares;
        write!(f, "{} of {units} units of {unit} {} on {ranks} ranks", self.name, self.storage)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const SHARES: RowShares = RowShares { units: 3, unit: 1, ranks: 3 };
    /// Longer than any test takes; the test advances the clock to it.
    const DEADLINE: Duration = Duration::from_secs(1 << 20);

    fn gather(group: &ThreadGroup) -> String {
        let (own, mut to) = ((group.rank as f32).to_ne_bytes().to_vec(), [-1.0f32; 3]);
        group.gather(&SHARES, own, &mut to).map_or_else(|error| error.to_string(), |()| format!("{to:?}"))
    }

    /// The answers of the first two ranks of three, in two calls. `event` runs while both wait for
    /// the third in the first call.
    fn answers(event: impl FnOnce(ThreadGroup)) -> [[String; 2]; 2] {
        let [first, second, third] = ThreadGroup::new(3).try_into().unwrap();
        let shared = third.shared.clone();
        thread::scope(|scope| {
            let calls = |group: ThreadGroup| scope.spawn(move || [gather(&group), gather(&group)]);
            let ranks = [first, second].map(|group| calls(group.deadline(DEADLINE)));
            let waits = |meeting: &mut Meeting| meeting.sent[..2].iter().any(Option::is_none);
            drop(shared.changed.wait_while(shared.meeting.lock().unwrap(), waits).unwrap());
            event(third);
            ranks.map(|rank| rank.join().unwrap())
        })
    }

    fn move_clock(group: &ThreadGroup, time: Duration) {
        group.lock().ahead += time;
        group.shared.changed.notify_all();
    }

    /// A missing rank is an error on the others at the deadline, and in every later call at once.
    #[test]
    fn a_rank_that_does_not_come_is_named_after_the_deadline() {
        let expected = format!("thread group device error: rank 2 did not come within {DEADLINE:?}");
        let answers = answers(|absent| {
            move_clock(&absent, DEADLINE);
            let woken = |meeting: &mut Meeting| meeting.failure.is_none();
            drop(absent.shared.changed.wait_while(absent.lock(), woken).unwrap());
            assert_eq!(gather(&absent), expected, "who comes late is told, too");
        });
        assert_eq!(answers, [[expected.clone(), expected.clone()], [expected.clone(), expected.clone()]]);
    }

    #[test]
    fn a_rank_that_comes_before_the_deadline_is_not_late() {
        let answers = answers(|last| {
            move_clock(&last, DEADLINE / 2);
            assert_eq!(gather(&last), "[0.0, 1.0, 2.0]");
        });
        let left = "thread group device error: rank 2 has left the group";
        assert_eq!(answers, [["[0.0, 1.0, 2.0]", left]; 2]);
    }

    /// Waiting ranks return when it leaves, not at the deadline.
    #[test]
    fn a_rank_that_leaves_is_named_to_those_who_wait() {
        let left = "thread group device error: rank 2 has left the group";
        assert_eq!(answers(drop), [[left; 2]; 2]);
    }

    /// `ThreadGroup` is `Send` and not `Sync`: a rank may move to a thread, but two threads may not
    /// share it.
    #[test]
    fn a_rank_is_sent_and_not_shared() {
        fn is_send<T: Send>() {}
        is_send::<ThreadGroup>();
        trait IsNotSync<Marker> {
            fn it() {}
        }
        impl<T> IsNotSync<()> for T {}
        impl<T: Sync> IsNotSync<u8> for T {}
        // Both impls apply to a type that is Sync, so this would not compile.
        <ThreadGroup as IsNotSync<_>>::it();
    }
}
