//! Calls whose dtypes are run-time values. Backends launch calls in this form, so they are compiled
//! once and not once for each mix of dtypes. A view in such a call is an enum of seven element
//! types.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::ops::Range;

use super::{
    Backward, Forward, PartialBackwardStatistics, PartialStatistics, QuantizedForward, Rows, Scales, Source, Visitor,
    WithStatistics,
};
use crate::{
    AnyCall, AnyElement, Error, F8E4M3, F8E5M2, Memory, NormBackend, Problem, Span, Storage, Tensor, bf16, f16,
};

/// Runs `body` with the view and its element type.
macro_rules! each {
    ($any:expr, $views:ident, $view:ident: $element:ident => $body:expr) => {
        match $any {
            $views::F32($view) => each!(@ f32, $element, $body),
            $views::F16($view) => each!(@ f16, $element, $body),
            $views::Bf16($view) => each!(@ bf16, $element, $body),
            $views::E4m3($view) => each!(@ F8E4M3, $element, $body),
            $views::E5m2($view) => each!(@ F8E5M2, $element, $body),
            $views::Int8($view) => each!(@ i8, $element, $body),
            $views::E8m0($view) => each!(@ u8, $element, $body),
        }
    };
    (@ $type:ty, $element:ident, $body:expr) => {{
        type $element = $type;
        $body
    }};
}

/// Declares a view of any element type.
macro_rules! any {
    ($(#[$doc:meta])* $any:ident of $view:ident, $of:ident) => {
        $(#[$doc])*
        pub enum $any<'a, B: NormBackend + ?Sized> {
            /// f32 elements.
            F32(B::$view<'a, f32>),
            /// f16 elements.
            F16(B::$view<'a, f16>),
            /// bf16 elements.
            Bf16(B::$view<'a, bf16>),
            /// Codes in E4M3.
            E4m3(B::$view<'a, F8E4M3>),
            /// Codes in E5M2.
            E5m2(B::$view<'a, F8E5M2>),
            /// Codes in 8-bit integers.
            Int8(B::$view<'a, i8>),
            /// Scales as bytes (E8M0).
            E8m0(B::$view<'a, u8>),
        }

        impl<'a, B: NormBackend + ?Sized> $any<'a, B> {
            /// The type of its elements.
            pub fn storage(&self) -> Storage {
                each!(self, $any, _view: E => E::STORAGE)
            }

            /// The view with its type.
            ///
            /// # Errors
            /// `InvalidArgument` if its elements have another type.
            pub fn typed<T: AnyElement>(self) -> Result<B::$view<'a, T>, Error> {
                let storage = self.storage();
                T::$of(self).ok_or_else(|| other_type::<T>(storage))
            }
        }
    };
}

any! {
    /// A read-only view of any element type.
    AnyIn of In, in_of
}

any! {
    /// A writable view of any element type.
    AnyOut of Out, out_of
}

impl<B: Memory + ?Sized> AnyIn<'_, B> {
    /// Elements of the view.
    pub fn part(&self, range: Range<usize>) -> AnyIn<'_, B> {
        each!(self, AnyIn, view: E => E::any_in(B::part_in::<E>(view, range)))
    }

    /// The same view again.
    pub fn whole(&self) -> AnyIn<'_, B> {
        self.part(0..Untyped::<B>::in_span::<f32>(self).len)
    }
}

impl<B: Memory + ?Sized> AnyOut<'_, B> {
    /// Elements of the view, for writing.
    pub fn part(&mut self, range: Range<usize>) -> AnyOut<'_, B> {
        each!(self, AnyOut, view: E => E::any_out(B::part_out::<E>(view, range)))
    }

    /// The same view again, for writing.
    pub fn whole(&mut self) -> AnyOut<'_, B> {
        self.part(0..Untyped::<B>::out_span::<f32>(self).len)
    }

    /// The view, for reading before or after it is written.
    pub fn read(&self) -> AnyIn<'_, B> {
        each!(self, AnyOut, view: E => E::any_in(B::read_out::<E>(view)))
    }
}

/// A marker that replaces `B` in argument structs. Its views are [`AnyIn`] and [`AnyOut`] of `B`,
/// for every element type. It has no values.
pub struct Untyped<B: ?Sized>(Infallible, PhantomData<fn(&B)>);

impl<B: NormBackend + ?Sized> NormBackend for Untyped<B> {
    type In<'a, T: AnyElement> = AnyIn<'a, B>;
    type Out<'a, T: AnyElement> = AnyOut<'a, B>;

    fn name(&self) -> &'static str {
        match self.0 {}
    }

    fn in_span<T: AnyElement>(view: &AnyIn<'_, B>) -> Span {
        each!(view, AnyIn, view: E => B::in_span::<E>(view))
    }

    fn out_span<T: AnyElement>(view: &AnyOut<'_, B>) -> Span {
        each!(view, AnyOut, view: E => B::out_span::<E>(view))
    }

    fn in_storage<T: AnyElement>(view: &AnyIn<'_, B>) -> Storage {
        view.storage()
    }

    fn out_storage<T: AnyElement>(view: &AnyOut<'_, B>) -> Storage {
        view.storage()
    }

    fn workspace_len(&self, _: &Problem) -> usize {
        match self.0 {}
    }

    fn launch(&self, _: AnyCall<'_, '_, Self>) -> Result<(), Error> {
        match self.0 {}
    }
}

/// A [`Forward`] call whose dtypes are run-time values, in its field `dtypes`. The `f32` here is a
/// placeholder for the type parameters.
pub type AnyForward<'a, B> = Forward<'a, Untyped<B>, f32>;

/// A [`Backward`] call whose dtypes are run-time values: see [`AnyForward`].
pub type AnyBackward<'a, B> = Backward<'a, Untyped<B>, f32>;

/// A [`QuantizedForward`] call whose dtypes and type of codes are run-time values: see
/// [`AnyForward`].
pub type AnyQuantizedForward<'a, B> = QuantizedForward<'a, Untyped<B>, f32, i8>;

/// A [`PartialStatistics`] call whose dtypes are run-time values: see [`AnyForward`].
pub type AnyPartialStatistics<'a, B> = PartialStatistics<'a, Untyped<B>, f32>;

/// A [`PartialBackwardStatistics`] call whose dtypes are run-time values: see [`AnyForward`].
pub type AnyPartialBackwardStatistics<'a, B> = PartialBackwardStatistics<'a, Untyped<B>, f32>;

/// A visitor of typed views also visits views of any type.
impl<'a, B: NormBackend + ?Sized, V: Visitor<'a, B>> Visitor<'a, Untyped<B>> for V {
    fn read<T: AnyElement>(&mut self, tensor: Tensor, rows: Rows<AnyIn<'a, B>>) -> Result<(), Error> {
        let Rows { view, row_stride, groups } = rows;
        each!(view, AnyIn, view: E => Visitor::<'a, B>::read::<E>(self, tensor, Rows { view, row_stride, groups }))
    }

    fn write<T: AnyElement>(&mut self, tensor: Tensor, rows: Rows<AnyOut<'a, B>>) -> Result<(), Error> {
        let Rows { view, row_stride, groups } = rows;
        each!(view, AnyOut, view: E => Visitor::<'a, B>::write::<E>(self, tensor, Rows { view, row_stride, groups }))
    }
}

/// A conversion of all views of a call: [`Erase`] or [`Restore`].
pub(super) trait Change<'a> {
    /// The backend of the views before.
    type From: NormBackend + ?Sized;
    /// The backend of the views after.
    type To: NormBackend + ?Sized;
    /// The reason why a view cannot be converted.
    type Error;

    fn of_read<F: AnyElement, T: AnyElement>(
        view: <Self::From as NormBackend>::In<'a, F>,
    ) -> Result<<Self::To as NormBackend>::In<'a, T>, Self::Error>;

    fn of_written<F: AnyElement, T: AnyElement>(
        view: <Self::From as NormBackend>::Out<'a, F>,
    ) -> Result<<Self::To as NormBackend>::Out<'a, T>, Self::Error>;
}

/// Typed views become [`AnyIn`] and [`AnyOut`].
pub(super) struct Erase<B: ?Sized>(PhantomData<fn(&B)>);

/// [`AnyIn`] and [`AnyOut`] become typed views.
pub(super) struct Restore<B: ?Sized>(PhantomData<fn(&B)>);

impl<'a, B: NormBackend + ?Sized> Change<'a> for Erase<B> {
    type From = B;
    type To = Untyped<B>;
    type Error = Infallible;

    fn of_read<F: AnyElement, T: AnyElement>(view: B::In<'a, F>) -> Result<AnyIn<'a, B>, Infallible> {
        Ok(F::any_in(view))
    }

    fn of_written<F: AnyElement, T: AnyElement>(view: B::Out<'a, F>) -> Result<AnyOut<'a, B>, Infallible> {
        Ok(F::any_out(view))
    }
}

impl<'a, B: NormBackend + ?Sized> Change<'a> for Restore<B> {
    type From = Untyped<B>;
    type To = B;
    type Error = Error;

    fn of_read<F: AnyElement, T: AnyElement>(view: AnyIn<'a, B>) -> Result<B::In<'a, T>, Error> {
        view.typed()
    }

    fn of_written<F: AnyElement, T: AnyElement>(view: AnyOut<'a, B>) -> Result<B::Out<'a, T>, Error> {
        view.typed()
    }
}

fn other_type<T: AnyElement>(got: Storage) -> Error {
    Error::InvalidArgument { arg: "dtypes", rule: format!("expected a view of {} elements, got {got}", T::STORAGE) }
}

type In<'a, B, T> = <B as NormBackend>::In<'a, T>;
type Out<'a, B, T> = <B as NormBackend>::Out<'a, T>;

pub(super) fn rows_in<'a, C: Change<'a>, F: AnyElement, T: AnyElement>(
    rows: Rows<In<'a, C::From, F>>,
) -> Result<Rows<In<'a, C::To, T>>, C::Error> {
    let Rows { view, row_stride, groups } = rows;
    Ok(Rows { view: C::of_read::<F, T>(view)?, row_stride, groups })
}

pub(super) fn rows_out<'a, C: Change<'a>, F: AnyElement, T: AnyElement>(
    rows: Rows<Out<'a, C::From, F>>,
) -> Result<Rows<Out<'a, C::To, T>>, C::Error> {
    let Rows { view, row_stride, groups } = rows;
    Ok(Rows { view: C::of_written::<F, T>(view)?, row_stride, groups })
}

type SourceOf<'a, B, T> = Source<In<'a, B, T>, Out<'a, B, T>>;

pub(super) fn source<'a, C: Change<'a>, F: AnyElement, T: AnyElement>(
    source: SourceOf<'a, C::From, F>,
) -> Result<SourceOf<'a, C::To, T>, C::Error> {
    Ok(match source {
        Source::Read(rows) => Source::Read(rows_in::<C, F, T>(rows)?),
        Source::Overwrite(rows) => Source::Overwrite(rows_out::<C, F, T>(rows)?),
    })
}

/// Scales of the type that the view has.
impl<'a, B: NormBackend + ?Sized> From<AnyOut<'a, B>> for Scales<AnyOut<'a, B>, AnyOut<'a, B>> {
    fn from(view: AnyOut<'a, B>) -> Self {
        if view.storage() == Storage::E8m0 { Scales::E8m0(view) } else { Scales::F32(view) }
    }
}

type ScalesOf<'a, B> = Scales<Out<'a, B, f32>, Out<'a, B, u8>>;

pub(super) fn scales<'a, C: Change<'a>>(scales: ScalesOf<'a, C::From>) -> Result<ScalesOf<'a, C::To>, C::Error> {
    Ok(match scales {
        Scales::F32(view) => Scales::F32(C::of_written::<f32, f32>(view)?),
        Scales::E8m0(view) => Scales::E8m0(C::of_written::<u8, u8>(view)?),
    })
}

impl<'g, B: NormBackend + ?Sized, A> WithStatistics<'g, B, A> {
    /// The same call with its tensors converted by `change`, and statistics of any type.
    pub fn erase<E>(self, change: impl FnOnce(A) -> E) -> WithStatistics<'g, Untyped<B>, E> {
        let WithStatistics { args, statistics, columns } = self;
        WithStatistics { args: change(args), statistics: f32::any_in(statistics), columns }
    }
}
