//! The tensors of a call, as named borrowed views.
//!
//! Matrices are row-major with `rows` rows of `cols` elements; the last dimension is dense, rows may be further apart
//! than `cols` (a slice of a fused QKV buffer), each matrix with a row stride of its own. Three dtypes meet in a call:
//! `T` of the activations, `W` of weight and bias, `R` of the residual stream; `W` and `R` are each `T` or `f32`.
//! Saved statistics are always `f32`.
//!
//! The structs are built by methods, so that an optional tensor can be added without breaking a caller.

use crate::{Element, GradReduction, NormBackend};

/// A matrix: a view of its elements and the distance between its rows.
#[derive(Clone, Copy, Debug)]
pub struct Rows<V> {
    /// The elements, from the first of row 0 to at least the last of the last row.
    pub view: V,
    /// Elements from the start of a row to the start of the next; `None` means `cols`.
    pub row_stride: Option<usize>,
}

impl<V> Rows<V> {
    const fn dense(view: V) -> Self {
        Rows { view, row_stride: None }
    }
}

/// The tensors of a forward call: docs/math.md, equations (1) to (6).
///
/// ```text
/// h = x (+ residual)        x_hat = (h - mean) * rstd        y = x_hat * (weight + weight_offset) + bias
/// ```
///
/// # Shapes
/// `x`, `y`, `residual`, `residual_out`: (rows, cols). `weight`, `bias`: (cols). `mean`, `rstd`: (rows).
///
/// # Example
/// Code that is generic over the backend names the dtype. With a concrete backend it follows from the views, and
/// `Forward::new(x, y)` is enough; a backend's own alias, such as `rmsnorm_cpu::Forward`, takes `&Vec` and `&[T; N]` too.
/// ```
/// # use rmsnorm_spec::{Error, Forward, NormBackend, NormSpec};
/// fn normalize<B>(backend: &B, x: &[f32], weight: &[f32], y: &mut [f32], rstd: &mut [f32]) -> Result<(), Error>
/// where
///     B: for<'a> NormBackend<In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32]>,
/// {
///     let spec = NormSpec::rms(rstd.len(), weight.len(), 1e-6);
///     backend.forward(&spec, Forward::<_, f32>::new(x, y).weight(weight).rstd(rstd))
/// }
/// ```
#[non_exhaustive]
pub struct Forward<'a, B: NormBackend + ?Sized, T: Element, W: Element = T, R: Element = T> {
    /// The input.
    pub x: Rows<B::In<'a, T>>,
    /// Multiplied with the normalized row, after `weight_offset` was added to it; ones if absent.
    pub weight: Option<B::In<'a, W>>,
    /// Added last; zeros if absent.
    pub bias: Option<B::In<'a, W>>,
    /// Added to `x` before the norm. The sum is rounded to `R`, and the rounded value is what is normalized.
    pub residual: Option<Rows<B::In<'a, R>>>,
    /// Receives the rounded sum; backward takes it as its `x`. Only with `residual`.
    pub residual_out: Option<Rows<B::Out<'a, R>>>,
    /// The output.
    pub y: Rows<B::Out<'a, T>>,
    /// Receives the mean of every row. Layer norm only.
    pub mean: Option<B::Out<'a, f32>>,
    /// Receives `1 / sqrt(var + eps)` of every row, for the backward pass.
    pub rstd: Option<B::Out<'a, f32>>,
}

impl<'a, B: NormBackend + ?Sized, T: Element> Forward<'a, B, T> {
    /// `y` from `x`, all tensors of one dtype.
    pub fn new(x: B::In<'a, T>, y: B::Out<'a, T>) -> Self {
        Forward::mixed(x, y)
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Forward<'a, B, T, W, R> {
    /// `y` from `x`, where weight and bias (`W`) or the residual stream (`R`) have a dtype of their own.
    pub fn mixed(x: B::In<'a, T>, y: B::Out<'a, T>) -> Self {
        Forward {
            x: Rows::dense(x),
            weight: None,
            bias: None,
            residual: None,
            residual_out: None,
            y: Rows::dense(y),
            mean: None,
            rstd: None,
        }
    }
}

/// The tensors of a forward call that overwrites its input: `y` over `x`, and `residual_out` over `residual`.
///
/// # Shapes
/// `x`, `residual`: (rows, cols). `weight`, `bias`: (cols). `mean`, `rstd`: (rows).
#[non_exhaustive]
pub struct ForwardInPlace<'a, B: NormBackend + ?Sized, T: Element, W: Element = T, R: Element = T> {
    /// The input; holds `y` afterwards.
    pub x: Rows<B::Out<'a, T>>,
    /// As in [`Forward`].
    pub weight: Option<B::In<'a, W>>,
    /// As in [`Forward`].
    pub bias: Option<B::In<'a, W>>,
    /// Added to `x` before the norm; holds the rounded sum (`residual_out`) afterwards.
    pub residual: Option<Rows<B::Out<'a, R>>>,
    /// As in [`Forward`].
    pub mean: Option<B::Out<'a, f32>>,
    /// As in [`Forward`].
    pub rstd: Option<B::Out<'a, f32>>,
}

impl<'a, B: NormBackend + ?Sized, T: Element> ForwardInPlace<'a, B, T> {
    /// `y` over `x`, all tensors of one dtype.
    pub fn new(x: B::Out<'a, T>) -> Self {
        ForwardInPlace::mixed(x)
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> ForwardInPlace<'a, B, T, W, R> {
    /// `y` over `x`, where weight and bias (`W`) or the residual stream (`R`) have a dtype of their own.
    pub fn mixed(x: B::Out<'a, T>) -> Self {
        ForwardInPlace { x: Rows::dense(x), weight: None, bias: None, residual: None, mean: None, rstd: None }
    }
}

/// The tensors of a backward call: docs/math.md, equations (7) to (12).
///
/// ```text
/// wdy = dy * (weight + weight_offset)     c1 = avg(wdy) (layer norm, else 0)     c2 = avg(wdy * x_hat)
/// dx = rstd * (wdy - c1 - x_hat * c2) (+ dresidual_out)
/// dweight = sum over rows of dy * x_hat                  dbias = sum over rows of dy
/// ```
///
/// # Shapes
/// `dy`, `x`, `dx`, `dresidual_out`: (rows, cols). `weight`, `dweight`, `dbias`: (cols). `mean`, `rstd`: (rows).
/// `workspace`: at least [`NormBackend::workspace_len`] elements.
#[non_exhaustive]
pub struct Backward<'a, B: NormBackend + ?Sized, T: Element, W: Element = T, R: Element = T> {
    /// The gradient of `y`.
    pub dy: Rows<B::In<'a, T>>,
    /// The tensor that was normalized: the forward pass's `x`, or its `residual_out` where a residual was added.
    pub x: Rows<B::In<'a, R>>,
    /// The forward pass's weight; ones if absent.
    pub weight: Option<B::In<'a, W>>,
    /// The forward pass's mean. Layer norm needs it, RMS norm has none.
    pub mean: Option<B::In<'a, f32>>,
    /// The forward pass's rstd. Always needed.
    pub rstd: Option<B::In<'a, f32>>,
    /// The gradient that arrives at `residual_out` from elsewhere; added to `dx` in f32, before the rounding.
    pub dresidual_out: Option<Rows<B::In<'a, R>>>,
    /// Receives the gradient of `x`, which is the gradient of `residual` too.
    pub dx: Rows<B::Out<'a, T>>,
    /// Receives the gradient of `weight`. Overwritten, never added to.
    pub dweight: Option<B::Out<'a, W>>,
    /// Receives the gradient of `bias`. Overwritten, never added to.
    pub dbias: Option<B::Out<'a, W>>,
    /// Room for the partial sums of `dweight` and `dbias`; the backend allocates it if absent. Contents are
    /// unspecified before and after.
    pub workspace: Option<B::Out<'a, f32>>,
    /// How `dweight` and `dbias` are summed.
    pub grad_reduction: GradReduction,
}

impl<'a, B: NormBackend + ?Sized, T: Element> Backward<'a, B, T> {
    /// `dx` from `dy` and the normalized tensor `x`, all tensors of one dtype. `rstd` must follow.
    pub fn new(dy: B::In<'a, T>, x: B::In<'a, T>, dx: B::Out<'a, T>) -> Self {
        Backward::mixed(dy, x, dx)
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> Backward<'a, B, T, W, R> {
    /// `dx` from `dy` and the normalized tensor `x`, where the weight (`W`) or the residual stream (`R`: `x` and
    /// `dresidual_out`) have a dtype of their own. `rstd` must follow.
    pub fn mixed(dy: B::In<'a, T>, x: B::In<'a, R>, dx: B::Out<'a, T>) -> Self {
        Backward {
            dy: Rows::dense(dy),
            x: Rows::dense(x),
            weight: None,
            mean: None,
            rstd: None,
            dresidual_out: None,
            dx: Rows::dense(dx),
            dweight: None,
            dbias: None,
            workspace: None,
            grad_reduction: GradReduction::default(),
        }
    }

    /// With this way of summing `dweight` and `dbias` over the rows.
    pub fn grad_reduction(self, grad_reduction: GradReduction) -> Self {
        Backward { grad_reduction, ..self }
    }
}

/// One builder method per optional tensor and per row stride. `vector` is (cols) or (rows), `matrix` (rows, cols).
macro_rules! builders {
    ($args:ident { $($kind:ident $name:ident $([$stride:ident])? : $view:ident $element:ty;)* }) => {
        impl<'a, B: NormBackend + ?Sized, T: Element, W: Element, R: Element> $args<'a, B, T, W, R> {
            $(builders!(@$kind $args $name $([$stride])? : $view $element);)*
        }
    };
    (@vector $args:ident $name:ident : $view:ident $element:ty) => {
        #[doc = concat!("With this [`", stringify!($name), "`](Self#structfield.", stringify!($name), ").")]
        pub fn $name(self, $name: B::$view<'a, $element>) -> Self {
            $args { $name: Some($name), ..self }
        }
    };
    (@matrix $args:ident $name:ident [$stride:ident] : $view:ident $element:ty) => {
        builders!(@vector_rows $args $name : $view $element);
        #[doc = concat!("With this many elements from row to row of `", stringify!($name), "`; no effect without it.")]
        pub fn $stride(self, row_stride: usize) -> Self {
            let $name = self.$name.map(|rows| Rows { row_stride: Some(row_stride), ..rows });
            $args { $name, ..self }
        }
    };
    (@vector_rows $args:ident $name:ident : $view:ident $element:ty) => {
        #[doc = concat!("With this [`", stringify!($name), "`](Self#structfield.", stringify!($name), "), dense.")]
        pub fn $name(self, $name: B::$view<'a, $element>) -> Self {
            $args { $name: Some(Rows::dense($name)), ..self }
        }
    };
    (@stride $args:ident $name:ident [$stride:ident] : $view:ident $element:ty) => {
        #[doc = concat!("With this many elements from row to row of `", stringify!($name), "`.")]
        pub fn $stride(self, row_stride: usize) -> Self {
            $args { $name: Rows { row_stride: Some(row_stride), ..self.$name }, ..self }
        }
    };
}

builders!(Forward {
    stride x [x_row_stride]: In T;
    stride y [y_row_stride]: Out T;
    vector weight: In W;
    vector bias: In W;
    matrix residual [residual_row_stride]: In R;
    matrix residual_out [residual_out_row_stride]: Out R;
    vector mean: Out f32;
    vector rstd: Out f32;
});

builders!(ForwardInPlace {
    stride x [x_row_stride]: Out T;
    vector weight: In W;
    vector bias: In W;
    matrix residual [residual_row_stride]: Out R;
    vector mean: Out f32;
    vector rstd: Out f32;
});

builders!(Backward {
    stride dy [dy_row_stride]: In T;
    stride x [x_row_stride]: In R;
    stride dx [dx_row_stride]: Out T;
    vector weight: In W;
    vector mean: In f32;
    vector rstd: In f32;
    matrix dresidual_out [dresidual_out_row_stride]: In R;
    vector dweight: Out W;
    vector dbias: Out W;
    vector workspace: Out f32;
});
