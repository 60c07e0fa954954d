//! The tensors of a call, as named borrowed views.
//!
//! Matrices are row-major with `rows` rows of `cols` elements; the last dimension is dense, rows may be further apart
//! than `cols` (a slice of a fused QKV buffer), each matrix with a row stride of its own: [`Rows::strided`]. Rows may lie in
//! groups (the heads of a token in that buffer): [`Rows::grouped`]. Three dtypes meet in a call: `T` of the activations, `W` of
//! weight and bias, `R` of the residual stream; `W` and `R` are each `T` or `f32`. Saved statistics are always `f32`.
//!
//! The structs are built by methods, so that an optional tensor can be added without breaking a caller.

mod backward;
mod forward;
mod row_layout;
mod rows;
mod visit;

pub use backward::Backward;
pub use forward::Forward;
pub use row_layout::{RowGroups, RowLayout};
pub use rows::{Rows, Source};
pub use visit::Visitor;
pub(crate) use visit::{SpanVisitor, View, Views};

/// One builder method for each optional tensor: a vector as its view, a matrix as what becomes [`Rows`] of it.
macro_rules! builders {
    ($args:ident { $($kind:ident $name:ident : $view:ident $element:ty;)* }) => {
        impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> $args<'a, B, T, W, R> {
            $(builders!(@$kind $args $name : $view $element);)*
        }
    };
    (@vector $args:ident $name:ident : $view:ident $element:ty) => {
        #[doc = concat!("With this [`", stringify!($name), "`](Self#structfield.", stringify!($name), ").")]
        pub fn $name(self, $name: B::$view<'a, $element>) -> Self {
            $args { $name: Some($name), ..self }
        }
    };
    (@matrix $args:ident $name:ident : $view:ident $element:ty) => {
        #[doc = concat!("With this [`", stringify!($name), "`](Self#structfield.", stringify!($name), "): a view of \
            dense rows, [`Rows::strided`] or [`Rows::grouped`].")]
        pub fn $name(self, $name: impl Into<Rows<B::$view<'a, $element>>>) -> Self {
            $args { $name: Some($name.into()), ..self }
        }
    };
}
use builders;
