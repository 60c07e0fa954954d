//! For tests of the suite: the simulated backend, with a fault that a test applies to chosen calls
//! after they were made.

use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use rmsnorm_spec::{DType, DTypes, Error, GradReduction, NormSpec, Problem};

use crate::Arithmetic;
use crate::run::calls::Context;
use crate::run::device::{About, Device};
use crate::run::harness::{Answer, TransferError};
use crate::run::memory::Call;
use crate::selftest::simulate::SimulatedBackend;

/// The change of a finished call. Arguments: the call's number from 0 on, its norm, and its
/// tensors.
type Fault = Box<dyn Fn(usize, &NormSpec, &mut Call) + Sync>;

/// The error with which a call is refused, if it is not made.
pub(crate) type Refusal = Box<dyn Fn(&Call) -> Option<Error> + Sync>;

/// A backend with an arbitrary fault.
pub(crate) struct Faulty {
    correct: SimulatedBackend,
    fault: Fault,
    calls: AtomicUsize,
    /// Refuses calls instead of making them.
    pub refusal: Option<Refusal>,
    /// Breakpoints of cols, and of rows.
    pub breakpoints: (Vec<usize>, Vec<usize>),
}

impl Faulty {
    pub fn new(fault: impl Fn(usize, &NormSpec, &mut Call) + Sync + 'static) -> Self {
        let (fault, breakpoints) = (Box::new(fault), (Vec::new(), Vec::new()));
        Faulty { correct: SimulatedBackend::new(None), fault, calls: AtomicUsize::new(0), refusal: None, breakpoints }
    }

    /// Without a fault.
    pub fn correct() -> Self {
        Faulty::new(|_, _, _| {})
    }

    /// Number of calls made.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// The context for a trial against this backend.
    pub fn context(&self) -> Context<'_> {
        Context { device: self, arithmetic: &Arithmetic::IEEE }
    }
}

impl Device for Faulty {
    fn about(&self) -> About {
        About { name: "faulty", breakpoints: self.breakpoints.clone(), ..self.correct.about() }
    }

    fn shape_breakpoints(&self, dtype: DType) -> Vec<(usize, usize)> {
        if dtype == DType::F32 { vec![(7, 11)] } else { Vec::new() }
    }

    fn workspace_elements(&self, problem: &Problem) -> usize {
        self.correct.workspace_elements(problem)
    }

    fn check_spans(&self) -> LocalBoxFuture<'_, Result<Result<(), String>, TransferError>> {
        self.correct.check_spans()
    }

    fn make<'a>(
        &'a self,
        spec: &'a NormSpec,
        dtypes: DTypes,
        reduction: GradReduction,
        call: &'a mut Call,
    ) -> LocalBoxFuture<'a, Answer> {
        let make = async move {
            // As a device that is waited for.
            let mut is_made = false;
            poll_fn(|context| {
                context.waker().wake_by_ref();
                if std::mem::replace(&mut is_made, true) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            if let Some(error) = self.refusal.as_ref().and_then(|refusal| refusal(call)) {
                return Ok(Err(error));
            }
            let answer = Device::make(&self.correct, spec, dtypes, reduction, call).await;
            (self.fault)(self.calls.fetch_add(1, Ordering::Relaxed), spec, call);
            answer
        };
        make.boxed_local()
    }
}
