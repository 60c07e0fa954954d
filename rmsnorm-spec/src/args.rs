//! The tensors of a call, as named borrowed views.
//!
//! Matrices are row-major with `rows` rows of `cols` elements; the last dimension is dense, rows may be further apart
//! than `cols` (a slice of a fused QKV buffer), each matrix with a row stride of its own: [`Rows::strided`]. Rows may lie in
//! groups (the heads of a token in that buffer): [`Rows::grouped`]. Three dtypes meet in a call: `T` of the activations, `W` of
//! weight and bias, `R` of the residual stream; `W` and `R` are each `T` or `f32`. Saved statistics are always `f32`.
//!
//! The structs are built by methods, so that an optional tensor can be added without breaking a caller.

mod any;
mod backward;
mod columns;
mod forward;
mod quantized_forward;
mod row_layout;
mod rows;
mod sharded_rows;
mod visit;

pub use any::{
    AnyBackward, AnyBackwardStatistics, AnyColumnStatistics, AnyForward, AnyIn, AnyOut, AnyQuantizedForward, Untyped,
};
pub use backward::Backward;
pub use columns::{BackwardStatistics, ColumnStatistics, Given};
pub use forward::Forward;
pub use quantized_forward::{QuantizedForward, Scales};
pub use row_layout::{RowGroups, RowLayout};
pub use rows::{Parts, Rows, Source};
pub use sharded_rows::{ShardedRows, YRows};
pub use visit::Visitor;
pub(crate) use visit::{SpanVisitor, View, Views};

/// The tensors of an argument struct, in the order of validation: how validation and launches go through them, and a builder
/// method for each that is `optional`. Those `given` have none here: `new` takes them, or a method is written by hand. A matrix is
/// [`Rows`], a vector its view. A `source` is read as the first tensor, or overwritten as the second; `scales` are f32 or bytes. A `sum` is a
/// vector that takes the place of another of that tensor, under its own name.
macro_rules! tensors {
    ($args:ident $(<$code:ident>)? { $($how:ident $kind:ident $tensor:ident = $name:ident : $view:ident $element:ty;)* }) => {
        impl<'a, B: NormBackend + ?Sized, T: Element, $($code: Code,)? W: Element, R: Element> Views<'a, B>
            for $args<'a, B, T, $($code,)? W, R>
        {
            fn spans(&self, visitor: &mut impl SpanVisitor) -> Result<(), Error> {
                $(tensors!(@span self visitor $kind $tensor $name $view $element);)*
                Ok(())
            }

            fn visit(self, visitor: &mut impl Visitor<'a, B>) -> Result<(), Error> {
                $(tensors!(@visit self visitor $kind $tensor $name $view $element);)*
                Ok(())
            }
        }

        impl<'a, B: NormBackend + ?Sized, T: Element, $($code: Code,)? W: Element, R: Element>
            $args<'a, B, T, $($code,)? W, R>
        {
            $(tensors!(@$how $kind $args $name $view $element);)*
        }
    };
    (@span $self:ident $visitor:ident matrix $tensor:ident $name:ident In $element:ty) => {
        visit::matrix_in::<B, $element>($visitor, Tensor::$tensor, Option::from(&$self.$name))?
    };
    (@span $self:ident $visitor:ident matrix $tensor:ident $name:ident Out $element:ty) => {
        visit::matrix_out::<B, $element>($visitor, Tensor::$tensor, Option::from(&$self.$name))?
    };
    (@span $self:ident $visitor:ident vector $tensor:ident $name:ident In $element:ty) => {
        visit::vector_in::<B, $element>($visitor, Tensor::$tensor, Option::from(&$self.$name))?
    };
    (@span $self:ident $visitor:ident vector $tensor:ident $name:ident Out $element:ty) => {
        visit::vector_out::<B, $element>($visitor, Tensor::$tensor, Option::from(&$self.$name))?
    };
    (@span $self:ident $visitor:ident source $tensor:ident $name:ident $overwritten:ident $element:ty) => {
        visit::source::<B, $element>($visitor, [Tensor::$tensor, Tensor::$overwritten], Option::from(&$self.$name))?
    };
    (@span $self:ident $visitor:ident scales $tensor:ident $name:ident Out $element:ty) => {
        visit::scales_out::<B>($visitor, Tensor::$tensor, $self.$name.as_ref())?
    };
    (@span $self:ident $visitor:ident sum $tensor:ident $name:ident Out $element:ty) => {
        visit::sum_out::<B>($visitor, Tensor::$tensor, stringify!($name), $self.$name.as_ref())?
    };
    (@visit $self:ident $visitor:ident sum $tensor:ident $name:ident Out $element:ty) => {
        tensors!(@visit $self $visitor vector $tensor $name Out $element)
    };
    (@visit $self:ident $visitor:ident scales $tensor:ident $name:ident Out $element:ty) => {
        visit::hand_scales::<B>($visitor, Tensor::$tensor, $self.$name)?
    };
    (@visit $self:ident $visitor:ident source $tensor:ident $name:ident $overwritten:ident $element:ty) => {
        visit::hand_source::<B, $element>($visitor, [Tensor::$tensor, Tensor::$overwritten], Option::from($self.$name))?
    };
    (@visit $self:ident $visitor:ident matrix $tensor:ident $name:ident In $element:ty) => {
        if let Some(view) = Option::<Rows<B::In<'a, $element>>>::from($self.$name) {
            $visitor.read::<$element>(Tensor::$tensor, view)?;
        }
    };
    (@visit $self:ident $visitor:ident matrix $tensor:ident $name:ident Out $element:ty) => {
        if let Some(view) = Option::<Rows<B::Out<'a, $element>>>::from($self.$name) {
            $visitor.write::<$element>(Tensor::$tensor, view)?;
        }
    };
    (@visit $self:ident $visitor:ident vector $tensor:ident $name:ident In $element:ty) => {
        if let Some(view) = Option::<B::In<'a, $element>>::from($self.$name) {
            $visitor.read::<$element>(Tensor::$tensor, Rows::dense(view))?;
        }
    };
    (@visit $self:ident $visitor:ident vector $tensor:ident $name:ident Out $element:ty) => {
        if let Some(view) = Option::<B::Out<'a, $element>>::from($self.$name) {
            $visitor.write::<$element>(Tensor::$tensor, Rows::dense(view))?;
        }
    };
    (@given $kind:ident $args:ident $name:ident $view:ident $element:ty) => {};
    (@optional sum $args:ident $name:ident $view:ident $element:ty) => {
        tensors!(@optional vector $args $name $view $element);
    };
    (@optional vector $args:ident $name:ident $view:ident $element:ty) => {
        #[doc = concat!("With this [`", stringify!($name), "`](Self#structfield.", stringify!($name), ").")]
        pub fn $name(self, $name: B::$view<'a, $element>) -> Self {
            $args { $name: Some($name), ..self }
        }
    };
    (@optional matrix $args:ident $name:ident $view:ident $element:ty) => {
        #[doc = concat!("With this [`", stringify!($name), "`](Self#structfield.", stringify!($name), "): a view of \
            dense rows, [`Rows::strided`] or [`Rows::grouped`].")]
        pub fn $name(self, $name: impl Into<Rows<B::$view<'a, $element>>>) -> Self {
            $args { $name: Some($name.into()), ..self }
        }
    };
}
use tensors;
