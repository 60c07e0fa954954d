//! The trait that every backend implements and every caller uses.

use crate::{
    AnyCall, AnyElement, Backward, Checked, Code, Element, Error, Forward, NormSpec, PartialBackwardStatistics,
    PartialStatistics, Problem, QuantizedForward, Span, Storage, WithStatistics,
};

/// A device that can normalize.
///
/// Callers use [`forward`](Self::forward) and [`backward`](Self::backward). Both validate their
/// arguments once, the same way for every backend, and pass them to [`launch`](Self::launch).
///
/// # Ordering
/// A call enqueues its work on the backend's stream or queue and returns. It never synchronizes and
/// never copies. The CPU backend has finished on return.
///
/// # Implementer notes
/// Implement `In`, `Out`, `name`, `in_span`, `out_span`, `workspace_len` and `launch`. Override
/// [`prepare_all`](Self::prepare_all) if the backend compiles at first use. Do not override
/// `forward`, `backward` and `prepare`.
///
/// A [`Checked`] proves the guarantees of [`Problem`], so `launch` does not validate. A launched
/// call has no type parameters: [`Problem::dtypes`] has its dtypes, and each view its own type. A
/// backend is compiled once, not once for each mix of dtypes. Typed kernels get types from
/// [`with_types!`](crate::with_types) and [`Checked::restore`]:
/// `with_types!(call.problem().dtypes; T, W, R => forward(call.restore::<T, W, R>()?))`.
///
/// The conformance suite (`rmsnorm-conformance`) tests the result. New operations are new variants
/// of [`AnyCall`]; a backend without them returns [`AnyCall::unsupported`].
pub trait NormBackend {
    /// A read-only view of a tensor: `&[T]`, `CudaView<T>`, a range of a `wgpu::Buffer`.
    type In<'a, T: AnyElement>;
    /// A view of a tensor that the call writes: `&mut [T]`, `CudaViewMut<T>`, a range of a
    /// `wgpu::Buffer`.
    type Out<'a, T: AnyElement>;

    /// The name used in reports and bench ids: `cpu`, `cuda`, `wgpu`.
    fn name(&self) -> &'static str;

    /// The place of a read-only view in memory.
    fn in_span<T: AnyElement>(view: &Self::In<'_, T>) -> Span;

    /// The place of a written view in memory.
    fn out_span<T: AnyElement>(view: &Self::Out<'_, T>) -> Span;

    /// The storage of a read-only view's elements. A typed view has the storage of its type.
    #[doc(hidden)]
    fn in_storage<T: AnyElement>(view: &Self::In<'_, T>) -> Storage {
        let _ = view;
        T::STORAGE
    }

    /// The storage of a written view's elements.
    #[doc(hidden)]
    fn out_storage<T: AnyElement>(view: &Self::Out<'_, T>) -> Storage {
        let _ = view;
        T::STORAGE
    }

    /// The number of f32 elements of workspace that a backward call with this problem needs; 0 if
    /// none.
    ///
    /// With a workspace of that size in [`Backward::workspace`], a call allocates nothing.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_spec::{DType, Norm, NormBackend, Problem, Tensor};
    /// fn workspace(backend: &impl NormBackend) -> Vec<f32> {
    ///     let problem = Problem::backward(Norm::Rms, 4096, 1024, DType::Bf16, &[Tensor::Weight, Tensor::Dweight]);
    ///     vec![0.0; backend.workspace_len(&problem)]
    /// }
    /// ```
    fn workspace_len(&self, problem: &Problem) -> usize;

    /// Whether backward can store and accumulate f32 gradient sums: [`Backward::dweight_sum`]. If
    /// not, validation refuses such a call as `Unsupported`.
    fn has_gradient_sums(&self) -> bool {
        false
    }

    /// [`prepare_all`](Self::prepare_all) for one problem.
    ///
    /// # Errors
    /// As [`prepare_all`](Self::prepare_all).
    fn prepare(&self, problem: &Problem) -> Result<(), Error> {
        self.prepare_all(std::slice::from_ref(problem))
    }

    /// Compiles and loads the programs of these problems, on all CPU threads, without running them:
    /// call it before a stream capture or the first request. Programs that several problems share
    /// are compiled once; programs in the cache are reused.
    ///
    /// `prepare_all` assumes dense rows and tensors at the start of an allocation. Calls with other
    /// strides or offsets may compile more, and so may other numbers of rows, since large calls use
    /// other programs than small ones. Set [`Problem::rows_per_group`] for grouped rows; one group
    /// counts as ungrouped.
    ///
    /// # Errors
    /// `Unsupported` before anything is compiled, as in the call itself; `Device` with the first
    /// failure. Finished programs stay loaded.
    fn prepare_all(&self, problems: &[Problem]) -> Result<(), Error> {
        let _ = problems;
        Ok(())
    }

    /// Normalizes: [math](crate::math), equations (1) to (6), (13) and (14).
    ///
    /// # Errors
    /// Every validation error of [`Error`], before anything is written; `Unsupported` and `Device`
    /// from the backend.
    fn forward<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Forward<'_, Self, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::Forward(Checked::forward(*spec, args.erase())?))
    }

    /// Computes the gradients of a normalization: [math](crate::math), equations (7) to (12).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn backward<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Backward<'_, Self, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::Backward(Checked::backward(self, *spec, args.erase())?))
    }

    /// Normalizes, and quantizes the result to 8-bit codes: [math](crate::math), equations (1) to
    /// (6) and (Q1) to (Q5).
    ///
    /// # Errors
    /// As [`forward`](Self::forward); `Unsupported` from a backend without these codes.
    fn quantized_forward<T: Element, C: Code, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: QuantizedForward<'_, Self, T, C, W, R>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::QuantizedForward(Checked::quantized_forward(*spec, args.erase())?))
    }

    /// The first half of a forward call on a rank's columns: [math](crate::math), (15). `spec.cols`
    /// counts this rank's columns.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); `Unsupported` from a backend without halves. The CPU and CUDA
    /// backends have them.
    fn partial_statistics<T: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: PartialStatistics<'_, Self, T, R>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::PartialStatistics(Checked::partial_statistics(*spec, args.erase())?))
    }

    /// The second half: normalizes with the statistics of all ranks, (16). `spec.cols` counts this
    /// rank's columns.
    ///
    /// # Errors
    /// As [`partial_statistics`](Self::partial_statistics).
    fn forward_with_statistics<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        given: WithStatistics<'_, Self, Forward<'_, Self, T, W, R>>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::ForwardWithStatistics(Checked::forward_with_statistics(
            *spec,
            given.erase(Forward::erase),
        )?))
    }

    /// The first half of a backward call on a rank's columns: (17). `spec.cols` counts this rank's
    /// columns.
    ///
    /// # Errors
    /// As [`partial_statistics`](Self::partial_statistics).
    fn partial_backward_statistics<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: PartialBackwardStatistics<'_, Self, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::PartialBackwardStatistics(Checked::partial_backward_statistics(*spec, args.erase())?))
    }

    /// The second half: computes the gradients with the statistics of all ranks, (18). `dweight`
    /// and `dbias` belong to this rank's columns, and are complete.
    ///
    /// # Errors
    /// As [`partial_statistics`](Self::partial_statistics).
    fn backward_with_statistics<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        given: WithStatistics<'_, Self, Backward<'_, Self, T, W, R>>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::BackwardWithStatistics(Checked::backward_with_statistics(
            self,
            *spec,
            given.erase(Backward::erase),
        )?))
    }

    /// Runs a validated call. A backend refuses operations that it lacks with
    /// [`AnyCall::unsupported`], and pieces of a norm with [`Problem::require_pieces`].
    ///
    /// # Errors
    /// `Unsupported` and `Device`; `InvalidArgument` for a view that this backend cannot use;
    /// `Length` for a workspace that was checked for another device.
    fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error>;
}

/// Gives a backend inherent methods named `forward`, `backward`, `quantized_forward`,
/// `workspace_len`, `prepare` and `prepare_all`, so that its callers need not import
/// [`NormBackend`].
///
/// # Example
/// ```
/// mod mine {
///     # use rmsnorm_spec::*;
///     pub struct Mine;
///     # impl NormBackend for Mine {
///     #     type In<'a, T: AnyElement> = &'a [T];
///     #     type Out<'a, T: AnyElement> = &'a mut [T];
///     #     fn name(&self) -> &'static str { "mine" }
///     #     fn in_span<T: AnyElement>(view: &&[T]) -> Span { Span::of(view) }
///     #     fn out_span<T: AnyElement>(view: &&mut [T]) -> Span { Span::of(view) }
///     #     fn workspace_len(&self, _: &Problem) -> usize { 7 }
///     #     fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error> { Err(call.unsupported("mine")) }
///     # }
///     rmsnorm_spec::inherent_methods!(Mine); // which implements NormBackend
/// }
/// use rmsnorm_spec::{DType, Norm, Problem};
/// assert_eq!(mine::Mine.workspace_len(&Problem::backward(Norm::Rms, 4, 8, DType::F32, &[])), 7);
/// ```
#[macro_export]
macro_rules! inherent_methods {
    ($backend:ty) => {
        /// The methods of `NormBackend` for callers, without importing it.
        impl $backend {
            /// `NormBackend::forward`: normalizes.
            ///
            /// # Errors
            /// As the method of `NormBackend`.
            pub fn forward<T: $crate::Element, W: $crate::Element, R: $crate::Element>(
                &self,
                spec: &$crate::NormSpec,
                args: $crate::Forward<'_, Self, T, W, R>,
            ) -> Result<(), $crate::Error> {
                $crate::NormBackend::forward(self, spec, args)
            }

            /// `NormBackend::backward`: computes the gradients.
            ///
            /// # Errors
            /// As the method of `NormBackend`.
            pub fn backward<T: $crate::Element, W: $crate::Element, R: $crate::Element>(
                &self,
                spec: &$crate::NormSpec,
                args: $crate::Backward<'_, Self, T, W, R>,
            ) -> Result<(), $crate::Error> {
                $crate::NormBackend::backward(self, spec, args)
            }

            /// `NormBackend::quantized_forward`: normalizes, and quantizes the result.
            ///
            /// # Errors
            /// As the method of `NormBackend`.
            pub fn quantized_forward<T: $crate::Element, C: $crate::Code, W: $crate::Element, R: $crate::Element>(
                &self,
                spec: &$crate::NormSpec,
                args: $crate::QuantizedForward<'_, Self, T, C, W, R>,
            ) -> Result<(), $crate::Error> {
                $crate::NormBackend::quantized_forward(self, spec, args)
            }

            /// `NormBackend::workspace_len`: the f32 elements of workspace that a backward call
            /// needs.
            pub fn workspace_len(&self, problem: &$crate::Problem) -> usize {
                $crate::NormBackend::workspace_len(self, problem)
            }

            /// `NormBackend::prepare`: compiles the programs of a call, without running them.
            ///
            /// # Errors
            /// As the method of `NormBackend`.
            pub fn prepare(&self, problem: &$crate::Problem) -> Result<(), $crate::Error> {
                $crate::NormBackend::prepare(self, problem)
            }

            /// `NormBackend::prepare_all`: compiles the programs of several calls on several
            /// threads, without running them.
            ///
            /// # Errors
            /// As the method of `NormBackend`.
            pub fn prepare_all(&self, problems: &[$crate::Problem]) -> Result<(), $crate::Error> {
                $crate::NormBackend::prepare_all(self, problems)
            }
        }
    };
}
