//! The conformance suite's access to a group of ranks.

use std::sync::{Mutex, PoisonError};
use std::thread;

use rmsnorm_conformance::ranks::{Group, Normalize};
use rmsnorm_conformance::testing::{Answer, Call, TransferError};
use rmsnorm_conformance::{Arithmetic, Harness};
use rmsnorm_spec::{AnyBackward, AnyForward, DTypes, Error, NormSpec, OutputRows};

use crate::{GroupCall, ShardedNorm};

/// The ranks of a group, each with the harness that moves its test data.
pub struct Ranks<N, H> {
    ranks: Vec<(Mutex<N>, H)>,
}

impl<N, H> Ranks<N, H> {
    /// The ranks in order.
    pub fn new(ranks: impl IntoIterator<Item = (N, H)>) -> Self {
        Ranks { ranks: ranks.into_iter().map(|(norm, harness)| (Mutex::new(norm), harness)).collect() }
    }
}

/// The calls of a rank: on whole matrices, on its rows, or on its columns.
struct Of<'n, N>(&'n N, Divided<'n>);

#[derive(Clone, Copy)]
enum Divided<'n> {
    Nothing,
    Rows(OutputRows),
    Columns(&'n [usize]),
}

impl<N: ShardedNorm> Normalize<N::Backend> for Of<'_, N> {
    fn forward(&self, spec: &NormSpec, args: AnyForward<'_, N::Backend>) -> Result<(), Error> {
        let call = match self.1 {
            Divided::Nothing => GroupCall::Reduced(args),
            Divided::Rows(y_rows) => GroupCall::ReducedRows(y_rows, args),
            Divided::Columns(columns) => GroupCall::ForwardColumns(columns, args),
        };
        self.0.launch(spec, call)
    }

    fn backward(&self, spec: &NormSpec, args: AnyBackward<'_, N::Backend>) -> Result<(), Error> {
        match self.1 {
            Divided::Columns(columns) => self.0.launch(spec, GroupCall::BackwardColumns(columns, args)),
            Divided::Nothing | Divided::Rows(_) => {
                Err(Error::Unsupported { rule: "only calls on divided columns have a backward pass".into() })
            }
        }
    }
}

impl<N: ShardedNorm + Send, H: Harness<Backend = N::Backend>> Ranks<N, H> {
    /// Makes every rank's call at the same time, each on a thread.
    fn on_threads(&self, spec: &NormSpec, divided: Divided<'_>, dtypes: DTypes, calls: &mut [Call]) -> Vec<Answer> {
        thread::scope(|scope| {
            let rank = |((norm, harness), call): (&'_ (Mutex<N>, H), &'_ mut Call)| {
                let norm = norm.lock().unwrap_or_else(PoisonError::into_inner);
                call.make_by(harness, &Of(&*norm, divided), spec, dtypes)
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
        self.on_threads(spec, Divided::Nothing, dtypes, calls)
    }

    fn make_on_rows(&self, spec: &NormSpec, y_rows: OutputRows, dtypes: DTypes, calls: &mut [Call]) -> Vec<Answer> {
        self.on_threads(spec, Divided::Rows(y_rows), dtypes, calls)
    }

    fn make_on_columns(&self, spec: &NormSpec, columns: &[usize], dtypes: DTypes, calls: &mut [Call]) -> Vec<Answer> {
        self.on_threads(spec, Divided::Columns(columns), dtypes, calls)
    }
}
