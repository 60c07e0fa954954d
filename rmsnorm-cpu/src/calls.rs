//! The calls of [`CpuBackend`] and of [`UninitBackend`].

use std::mem::MaybeUninit;

use rmsnorm_spec::{AnyCall, AnyElement, Error, NormBackend, Problem, Span};

use crate::lanes::Out;
use crate::launch::{self, SliceBackend};
use crate::stages::copy::CopyRange;
use crate::{CpuBackend, UninitBackend, plan};

/// Implements the trait for a backend with outputs of `$out`, in terms of the `CpuBackend` of `$this`.
macro_rules! norm_backend {
    ($backend:ty, $out:ty, $this:ident => $cpu:expr, $($own:item)*) => {
        rmsnorm_spec::inherent_methods!($backend);

        impl NormBackend for $backend {
            type In<'a, T: AnyElement> = &'a [T];
            type Out<'a, T: AnyElement> = &'a mut [$out];

            fn name(&self) -> &'static str {
                "cpu"
            }

            fn in_span<T: AnyElement>(view: &&[T]) -> Span {
                Span::of(view)
            }

            fn out_span<T: AnyElement>(view: &&mut [$out]) -> Span {
                Span::of(view)
            }

            fn workspace_len(&self, problem: &Problem) -> usize {
                plan::workspace_len(problem)
            }

            fn has_gradient_sums(&self) -> bool {
                true
            }

            fn prepare_all(&self, problems: &[Problem]) -> Result<(), Error> {
                problems.iter().try_for_each(launch::require_supported)
            }

            fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error> {
                let $this = self;
                launch::launch($cpu, call)
            }
        }

        impl SliceBackend for $backend {
            fn input<'a, E: AnyElement>(view: Self::In<'a, E>) -> &'a [E] {
                view
            }

            fn out<'a, E: AnyElement>(view: Self::Out<'a, E>) -> Out<'a, E> {
                Out::from(view)
            }

            $($own)*
        }
    };
}

norm_backend! { CpuBackend, T, this => this,
    fn values<'a, E: AnyElement>(view: Self::Out<'a, E>) -> Result<&'a mut [E], Error> {
        Ok(view)
    }

    fn workspace(view: Self::Out<'_, f32>, len: usize) -> &mut [f32] {
        &mut view[..len]
    }
}

norm_backend! { UninitBackend, MaybeUninit<T>, this => &this.0,
    fn values<'a, E: AnyElement>(_: Self::Out<'a, E>) -> Result<&'a mut [E], Error> {
        let rule = "UninitBackend cannot read outputs, but calls in place, with folds_amax or that accumulate gradients do: call CpuBackend with initialized outputs".into();
        Err(Error::Unsupported { rule })
    }

    fn workspace(view: Self::Out<'_, f32>, len: usize) -> &mut [f32] {
        Out::from(&mut view[..len]).filled(0.0)
    }
}

impl CpuBackend {
    /// Copies `from` to `to` with the threads, loads and stores of the kernels, through the cache
    /// or, if `streaming`, past it. The kernels' speed is compared with it.
    ///
    /// # Errors
    /// `Length` if the lengths differ. Nothing is written then.
    pub fn copy(&self, from: &[f32], to: &mut [f32], streaming: bool) -> Result<(), Error> {
        if from.len() != to.len() {
            return Err(Error::Length { arg: "to", min: from.len(), max: from.len(), got: to.len() });
        }
        #[cfg(feature = "planted")]
        let (from, to) = (&from[..crate::planted::copied(from.len())], &mut to[..crate::planted::copied(from.len())]);
        launch::copy(self, CopyRange { from, to: Out::from(to), streaming });
        Ok(())
    }
}
