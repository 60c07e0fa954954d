//! The trait that every backend implements and every caller uses.

use crate::{
    AnyCall, Backward, BackwardStatistics, Checked, Code, ColumnStatistics, Element, Error, Forward, Given, NormSpec,
    Problem, QuantizedForward, Span, Storage, Stored,
};

/// A device that can normalize.
///
/// Callers use [`forward`](Self::forward) and [`backward`](Self::backward). Each validates its arguments, once and the
/// same way for every backend, then hands them to [`launch`](Self::launch).
///
/// # Ordering
/// A call enqueues its work on the backend's stream or queue and returns; it never synchronizes and never copies. The
/// CPU backend is done on return.
///
/// # Implementer notes
/// Implement `In`, `Out`, `name`, `in_span`, `out_span`, `workspace_len` and `launch`. Override
/// [`prepare_all`](Self::prepare_all) if something is compiled when it is first used. Do not override `forward`, `backward` and `prepare`.
///
/// A [`Checked`] proves everything that [`Problem`] documents, so `launch` takes no decisions about validity. A launched call has no type
/// parameters: [`Problem::dtypes`] has its dtypes, and each view says its own type. So a backend is compiled once, not once for every
/// mix. Typed kernels get types by [`with_types!`](crate::with_types) and [`Checked::restore`]:
/// `with_types!(call.problem().dtypes; T, W, R => forward(call.restore::<T, W, R>()?))`.
///
/// The conformance suite (`rmsnorm-conformance`) proves the result. New operations arrive as new variants of [`AnyCall`], which a backend
/// answers with [`AnyCall::unsupported`] until it has them.
pub trait NormBackend {
    /// A read-only view of a tensor: `&[T]`, `CudaView<T>`, a range of a `wgpu::Buffer`.
    type In<'a, T: Stored>;
    /// A view of a tensor that is written: `&mut [T]`, `CudaViewMut<T>`, a range of a `wgpu::Buffer`.
    type Out<'a, T: Stored>;

    /// The name used in reports and bench ids: `cpu`, `cuda`, `wgpu`.
    fn name(&self) -> &'static str;

    /// Where a read-only view lies.
    fn in_span<T: Stored>(view: &Self::In<'_, T>) -> Span;

    /// Where a written view lies.
    fn out_span<T: Stored>(view: &Self::Out<'_, T>) -> Span;

    /// What the elements of a read-only view are stored as. Of views that have a type, that is it.
    #[doc(hidden)]
    fn in_storage<T: Stored>(view: &Self::In<'_, T>) -> Storage {
        let _ = view;
        T::STORAGE
    }

    /// What the elements of a written view are stored as.
    #[doc(hidden)]
    fn out_storage<T: Stored>(view: &Self::Out<'_, T>) -> Storage {
        let _ = view;
        T::STORAGE
    }

    /// The f32 elements of workspace that a backward call with this problem needs; 0 if it needs none.
    ///
    /// A workspace of that size may be passed in with [`Backward::workspace`], and a call then allocates nothing.
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

    /// Whether backward stores and adds up gradients as f32 sums: [`Backward::dweight_sum`]. Where it does not, a call that asks for them is
    /// `Unsupported`, without the backend being asked again.
    fn has_gradient_sums(&self) -> bool {
        false
    }

    /// [`prepare_all`](Self::prepare_all) for one call.
    ///
    /// # Errors
    /// As there.
    fn prepare(&self, problem: &Problem) -> Result<(), Error> {
        self.prepare_all(std::slice::from_ref(problem))
    }

    /// Compiles and loads what calls with these problems need, on all of the system's threads, and runs nothing: before a
    /// stream is captured, or before the first request. What two of them share is compiled once, and what is there not again.
    /// Their tensors are taken to have rows side by side and to begin where allocations do; a call on others may have
    /// something left to compile, and so may one of another number of rows: large calls have programs that small ones have
    /// not. For rows in groups [`Problem::rows_per_group`] says so; a call with one group of them is one without.
    ///
    /// # Errors
    /// `Unsupported` before anything is compiled, as the call itself; `Device` if something cannot be, of several whichever came
    /// first. What was done stays.
    fn prepare_all(&self, problems: &[Problem]) -> Result<(), Error> {
        let _ = problems;
        Ok(())
    }

    /// Normalizes: [math](crate::math), equations (1) to (6), (13) and (14).
    ///
    /// # Errors
    /// Every validation error of [`Error`], before anything is written; `Unsupported` and `Device` from the backend.
    fn forward<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: Forward<'_, Self, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::Forward(Checked::forward(*spec, args.erase())?))
    }

    /// The gradients of a normalization: [math](crate::math), equations (7) to (12).
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

    /// Normalizes, and quantizes the result to 8-bit codes: [math](crate::math), equations (1) to (6) and (Q1) to (Q5).
    ///
    /// # Errors
    /// As [`forward`](Self::forward); `Unsupported` from a backend that writes no codes, or not these.
    fn quantized_forward<T: Element, C: Code, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: QuantizedForward<'_, Self, T, C, W, R>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::QuantizedForward(Checked::quantized_forward(*spec, args.erase())?))
    }

    /// The first half of a forward call on a rank's columns: [math](crate::math), (15). `spec.cols` counts the columns that are here.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); `Unsupported` from a backend that has no halves: the CPU and CUDA have them.
    fn column_statistics<T: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: ColumnStatistics<'_, Self, T, R>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::ColumnStatistics(Checked::column_statistics(*spec, args.erase())?))
    }

    /// The second half: normalizes by what all ranks have found, (16). `spec.cols` counts the columns that are here.
    ///
    /// # Errors
    /// As [`column_statistics`](Self::column_statistics).
    fn forward_given<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        given: Given<'_, Self, Forward<'_, Self, T, W, R>>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::ForwardGiven(Checked::forward_given(*spec, given.erase(Forward::erase))?))
    }

    /// The first half of a backward call on a rank's columns: (17). `spec.cols` counts the columns that are here.
    ///
    /// # Errors
    /// As [`column_statistics`](Self::column_statistics).
    fn backward_statistics<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        args: BackwardStatistics<'_, Self, T, W, R>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::BackwardStatistics(Checked::backward_statistics(*spec, args.erase())?))
    }

    /// The second half: the gradients by what all ranks have found, (18). `dweight` and `dbias` are those of the columns that are here, and
    /// complete.
    ///
    /// # Errors
    /// As [`column_statistics`](Self::column_statistics).
    fn backward_given<T: Element, W: Element, R: Element>(
        &self,
        spec: &NormSpec,
        given: Given<'_, Self, Backward<'_, Self, T, W, R>>,
    ) -> Result<(), Error> {
        self.launch(AnyCall::BackwardGiven(Checked::backward_given(self, *spec, given.erase(Backward::erase))?))
    }

    /// Runs a validated call. What a backend has not, it refuses: by [`AnyCall::unsupported`] a call of another kind, by
    /// [`Problem::without_residual_after`] and [`Problem::without_parts`] a form of forward.
    ///
    /// # Errors
    /// `Unsupported` and `Device`; `InvalidArgument` for a view that this backend cannot use as it is; `Length` for a workspace that was
    /// checked for another device.
    fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error>;
}

/// Gives a backend inherent methods of the names `forward`, `backward`, `quantized_forward`, `workspace_len`, `prepare` and
/// `prepare_all`, so that its callers need not import [`NormBackend`].
///
/// # Example
/// ```
/// mod mine {
///     # use rmsnorm_spec::*;
///     pub struct Mine;
///     # impl NormBackend for Mine {
///     #     type In<'a, T: Stored> = &'a [T];
///     #     type Out<'a, T: Stored> = &'a mut [T];
///     #     fn name(&self) -> &'static str { "mine" }
///     #     fn in_span<T: Stored>(view: &&[T]) -> Span { Span::of(view) }
///     #     fn out_span<T: Stored>(view: &&mut [T]) -> Span { Span::of(view) }
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
        /// What `NormBackend` has for callers, who need not import it.
        impl $backend {
            /// `NormBackend::forward`: normalizes.
            ///
            /// # Errors
            /// As there.
            pub fn forward<T: $crate::Element, W: $crate::Element, R: $crate::Element>(
                &self,
                spec: &$crate::NormSpec,
                args: $crate::Forward<'_, Self, T, W, R>,
            ) -> Result<(), $crate::Error> {
                $crate::NormBackend::forward(self, spec, args)
            }

            /// `NormBackend::backward`: the gradients.
            ///
            /// # Errors
            /// As there.
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
            /// As there.
            pub fn quantized_forward<T: $crate::Element, C: $crate::Code, W: $crate::Element, R: $crate::Element>(
                &self,
                spec: &$crate::NormSpec,
                args: $crate::QuantizedForward<'_, Self, T, C, W, R>,
            ) -> Result<(), $crate::Error> {
                $crate::NormBackend::quantized_forward(self, spec, args)
            }

            /// `NormBackend::workspace_len`: f32 elements that a backward call needs.
            pub fn workspace_len(&self, problem: &$crate::Problem) -> usize {
                $crate::NormBackend::workspace_len(self, problem)
            }

            /// `NormBackend::prepare`: compiles what a call needs, and runs nothing.
            ///
            /// # Errors
            /// As there.
            pub fn prepare(&self, problem: &$crate::Problem) -> Result<(), $crate::Error> {
                $crate::NormBackend::prepare(self, problem)
            }

            /// `NormBackend::prepare_all`: compiles what calls need, on several threads, and runs nothing.
            ///
            /// # Errors
            /// As there.
            pub fn prepare_all(&self, problems: &[$crate::Problem]) -> Result<(), $crate::Error> {
                $crate::NormBackend::prepare_all(self, problems)
            }
        }
    };
}
