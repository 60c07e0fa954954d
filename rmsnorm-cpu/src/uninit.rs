//! [`UninitBackend`]: outputs in uninitialized memory.

use std::mem::MaybeUninit;

use rmsnorm_spec::{AnyCall, AnyElement, Error, NormBackend, Problem, Span};

use crate::lanes::Out;
use crate::launch::{self, SliceBackend};
use crate::{CpuBackend, plan};

/// A [`CpuBackend`] with outputs of type `&mut [MaybeUninit<T>]`: they need not be zeroed first,
/// which takes longer than a norm in newly mapped memory. Same kernels, same bits. Made by
/// [`CpuBackend::uninit`]; to get results in vectors, call [`CpuBackend::forward_vec`].
///
/// # What is written
/// If a call succeeds, it has written every element of every given output: `rows * cols` of a
/// matrix, without the gaps between strided rows. If it fails, it may have written any of them or
/// none. The contents of a workspace are unspecified after a call.
///
/// Calls that read an output return [`Error::Unsupported`]: calls in place, with `folds_amax`, or
/// that accumulate gradients.
///
/// # Example
/// ```
/// use rmsnorm_cpu::{CpuBackend, UninitBackend, spec::{Error, Forward, NormSpec}};
/// # fn main() -> Result<(), Error> {
/// let (norm, x) = (NormSpec::rms(2, 2, 0.0), [3.0f32, 3.0, -5.0, 5.0]);
/// let mut y = Vec::with_capacity(x.len());
/// let out = &mut y.spare_capacity_mut()[..x.len()];
/// CpuBackend::new().uninit().forward(&norm, Forward::<UninitBackend, f32>::new(&x, out))?;
/// // SAFETY:
/// // - length: within the capacity;
/// // - contents: the call has succeeded, so it has written every element of y.
/// unsafe { y.set_len(x.len()) };
/// assert_eq!(y, [1.0, 1.0, -1.0, 1.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct UninitBackend(CpuBackend);

impl CpuBackend {
    /// This backend, with outputs that may be uninitialized before a call.
    pub fn uninit(&self) -> UninitBackend {
        UninitBackend(self.clone())
    }
}

rmsnorm_spec::inherent_methods!(UninitBackend);

impl NormBackend for UninitBackend {
    type In<'a, T: AnyElement> = &'a [T];
    type Out<'a, T: AnyElement> = &'a mut [MaybeUninit<T>];

    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn in_span<T: AnyElement>(view: &&[T]) -> Span {
        Span::of(view)
    }

    fn out_span<T: AnyElement>(view: &&mut [MaybeUninit<T>]) -> Span {
        Span::of(view)
    }

    fn workspace_len(&self, problem: &Problem) -> usize {
        plan::workspace_len(problem)
    }

    fn has_gradient_sums(&self) -> bool {
        true
    }

    fn prepare_all(&self, problems: &[Problem]) -> Result<(), Error> {
        self.0.prepare_all(problems)
    }

    fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error> {
        launch::launch(&self.0, call)
    }
}

impl SliceBackend for UninitBackend {
    fn input<'a, E: AnyElement>(view: Self::In<'a, E>) -> &'a [E] {
        view
    }

    fn out<'a, E: AnyElement>(view: Self::Out<'a, E>) -> Out<'a, E> {
        Out::from(view)
    }

    fn values<'a, E: AnyElement>(_: Self::Out<'a, E>) -> Result<&'a mut [E], Error> {
        let rule = "UninitBackend cannot read outputs, but calls in place, with folds_amax or that accumulate gradients do: call CpuBackend with initialized outputs".into();
        Err(Error::Unsupported { rule })
    }

    fn workspace(view: Self::Out<'_, f32>, len: usize) -> &mut [f32] {
        Out::from(&mut view[..len]).filled(0.0)
    }
}
