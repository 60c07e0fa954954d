//! The conformance suite's access to a group of ranks.

use std::sync::{Mutex, PoisonError};
use std::thread;

use rmsnorm_conformance::ranks::{Group, Normalize};
use rmsnorm_conformance::testing::{Answer, Call, TransferError};
use rmsnorm_conformance::{Arithmetic, Harness};
use rmsnorm_spec::{AnyBackward, AnyForward, DTypes, Error, NormSpec, YRows, with_types};

use crate::ShardedNorm;

/// The ranks of a group, each with what moves its test data.
pub struct Ranks<N, H> {
    ranks: Vec<(Mutex<N>, H)>,
}

impl<N, H> Ranks<N, H> {
    /// These ranks, in order.
    pub fn new(ranks: impl IntoIterator<Item = (N, H)>) -> Self {
        Ranks { ranks: ranks.into_iter().map(|(norm, harness)| (Mutex::new(norm), harness)).collect() }
    }
}

/// A rank's calls.
struct Reduced<'n, N>(&'n N);

impl<N: ShardedNorm> Normalize<N::Backend> for Reduced<'_, N> {
    fn forward(&self, spec: &NormSpec, args: AnyForward<'_, N::Backend>) -> Result<(), Error> {
        args.dtypes.check()?;
        with_types!(args.dtypes; T, W, R => self.0.forward_reduced(spec, args.restore::<T, W, R>()?))
    }
}

/// A rank's calls on the rows that it owns.
struct OnRows<'n, N>(&'n N, YRows);

impl<N: ShardedNorm> Normalize<N::Backend> for OnRows<'_, N> {
    fn forward(&self, spec: &NormSpec, args: AnyForward<'_, N::Backend>) -> Result<(), Error> {
        args.dtypes.check()?;
        with_types!(args.dtypes; T, W, R => self.0.forward_reduced_rows(spec, self.1, args.restore::<T, W, R>()?))
    }
}

/// A rank's calls on its columns.
struct OnColumns<'n, N>(&'n N, &'n [usize]);

impl<N: ShardedNorm> Normalize<N::Backend> for OnColumns<'_, N> {
    fn forward(&self, spec: &NormSpec, args: AnyForward<'_, N::Backend>) -> Result<(), Error> {
        args.dtypes.check()?;
        with_types!(args.dtypes; T, W, R => self.0.forward_columns(spec, self.1, args.restore::<T, W, R>()?))
    }

    fn backward(&self, spec: &NormSpec, args: AnyBackward<'_, N::Backend>) -> Result<(), Error> {
        args.dtypes.check()?;
        with_types!(args.dtypes; T, W, R => self.0.backward_columns(spec, self.1, args.restore::<T, W, R>()?))
    }
}

impl<N: ShardedNorm + Send, H: Harness<Backend = N::Backend>> Ranks<N, H> {
    /// Every rank's call at once, each on a thread of its own.
    fn on_threads(&self, calls: &mut [Call], make: impl Fn(&N, &H, &mut Call) -> Answer + Sync) -> Vec<Answer> {
        let make = &make;
        thread::scope(|scope| {
            let rank = |((norm, harness), call): (&'_ (Mutex<N>, H), &'_ mut Call)| {
                let norm = norm.lock().unwrap_or_else(PoisonError::into_inner);
                make(&norm, harness, call)
            };
            let threads: Vec<_> =
                self.ranks.iter().zip(calls).map(|rank_and_call| scope.spawn(move || rank(rank_and_call))).collect();
            let panicked = || {
                let reason = "the rank panicked".to_owned();
                Err(TransferError::Download(Error::Device { backend: "ranks", source: reason.into() }))
            };
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
        })
    }
}

impl<N, H> Group for Ranks<N, H>
where
    N: ShardedNorm + Send,
    H: Harness<Backend = N::Backend>,
{
    fn ranks(&self) -> usize {
        self.ranks.len()
    }

    fn arithmetic(&self) -> Arithmetic {
        self.ranks.first().map_or(Arithmetic::IEEE, |(_, harness)| harness.arithmetic())
    }

    fn make(&self, spec: &NormSpec, dtypes: DTypes, calls: &mut [Call]) -> Vec<Answer> {
        self.on_threads(calls, |norm, harness, call| call.make_by(harness, &Reduced(norm), spec, dtypes))
    }

    fn make_on_rows(&self, spec: &NormSpec, y_rows: YRows, dtypes: DTypes, calls: &mut [Call]) -> Vec<Answer> {
        self.on_threads(calls, |norm, harness, call| call.make_by(harness, &OnRows(norm, y_rows), spec, dtypes))
    }

    fn make_on_columns(&self, spec: &NormSpec, columns: &[usize], dtypes: DTypes, calls: &mut [Call]) -> Vec<Answer> {
        self.on_threads(calls, |norm, harness, call| call.make_by(harness, &OnColumns(norm, columns), spec, dtypes))
    }
}
