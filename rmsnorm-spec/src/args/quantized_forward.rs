//! [`QuantizedForward`]: the tensors of a forward call whose result is 8-bit codes.

use super::any::{self, AnyIn, AnyOut, Change, Erase, Restore, Untyped};
use super::{Rows, Source, SpanVisitor, Views, Visitor, tensors, visit};
use crate::quant::QuantSpec;
use crate::{Code, DTypes, Element, Error, NormBackend, Tensor};

/// The tensors of a quantized forward call: [math](crate::math), equations (1) to (6) and (Q1) to
/// (Q5).
///
/// ```text
/// y as in Forward        scale from max |y| of those who share it        code = nearest code of y / scale
/// ```
///
/// # Shapes
/// `x`, `residual`, `residual_out`, `codes`, `y`: (rows, cols). `codes_t`, `codes_columnwise`:
/// (cols, rows). `weight`, `bias`: (cols). `mean`, `rstd`: (rows). `scale`, `amax`: (1). `scales`:
/// [`QuantSpec::scales_len`] elements in the layout [`QuantSpec::layout`]. `scales_columnwise`:
/// `scales_len` of [`QuantSpec::columnwise`] for a (cols, rows) matrix.
///
/// # Dtypes
/// Activations, weight and residual stream as in [`Forward`](crate::Forward). `C` is the type of
/// the codes, which must match [`QuantSpec::codes`]. Scales are f32 or bytes:
/// [`QuantSpec::scale_type`].
///
/// # Which tensors go with which scales
/// | [`ScaleKind`](crate::quant::ScaleKind) | `scale` | `scales` | `amax` | `codes_t` | `codes_columnwise`, `scales_columnwise` |
/// |---|---|---|---|---|---|
/// | `WithStatistics` | read | - | optional | optional | - |
/// | `Current` | - | 1 | - | optional | - |
/// | `Row` | - | one a row | - | - | - |
/// | `Block`, `Mx` | - | one a block | - | - | optional |
///
/// # Training
/// Gradients flow as if `y` had not been quantized: [`Backward`](crate::Backward) takes `x` (or
/// `residual_out`), `mean` and `rstd` of this call, and needs nothing else.
///
/// # Example
/// ```
/// # use rmsnorm_spec::{Error, F8E4M3, NormBackend, NormSpec, QuantizedForward, AnyElement};
/// use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind};
/// fn tokens<B>(backend: &B, x: &[f32], weight: &[f32], codes: &mut [F8E4M3], scales: &mut [f32]) -> Result<(), Error>
/// where
///     B: for<'a> NormBackend<
///         In<'a, f32> = &'a [f32], Out<'a, f32> = &'a mut [f32], Out<'a, F8E4M3> = &'a mut [F8E4M3],
///     >,
/// {
///     let spec = NormSpec::rms(scales.len(), weight.len(), 1e-6);
///     let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
///     let args = QuantizedForward::<_, f32, F8E4M3>::new(quant, x, codes).weight(weight).scales(scales);
///     backend.quantized_forward(&spec, args)
/// }
/// ```
#[non_exhaustive]
pub struct QuantizedForward<'a, B: NormBackend + ?Sized, T: Element, C: Code, W: Element = T, R: Element = T> {
    /// How the result is quantized.
    pub quant: QuantSpec,
    /// The input.
    pub x: Rows<B::In<'a, T>>,
    /// Multiplied with the normalized row, after `weight_offset` is added to it; ones if absent.
    pub weight: Option<B::In<'a, W>>,
    /// Added last; zeros if absent.
    pub bias: Option<B::In<'a, W>>,
    /// Added to `x` before the norm: the call normalizes the sum, rounded to `R`.
    pub residual: Option<Rows<B::In<'a, R>>>,
    /// Receives the rounded sum, which is backward's `x`. Only with a `residual`.
    pub residual_out: Option<Rows<B::Out<'a, R>>>,
    /// Receives the unquantized result as well.
    pub y: Option<Rows<B::Out<'a, T>>>,
    /// Receives the mean of every row. Layer norm only; required with `codes_columnwise`.
    pub mean: Option<B::Out<'a, f32>>,
    /// Receives `1 / sqrt(var + eps)` of every row, for the backward pass; required with
    /// `codes_columnwise`.
    pub rstd: Option<B::Out<'a, f32>>,
    /// Receives the codes.
    pub codes: Rows<B::Out<'a, C>>,
    /// Receives the same codes, transposed. Only with one scale for the whole tensor. Its rows are
    /// not in groups.
    pub codes_t: Option<Rows<B::Out<'a, C>>>,
    /// The scale of the whole tensor, with [`ScaleKind::Given`](crate::quant::ScaleKind::Given).
    /// The device reads it, so validation cannot: if it is not positive and finite, the codes are
    /// unspecified.
    pub scale: Option<B::In<'a, f32>>,
    /// Receives the scales.
    pub scales: Option<Scales<B::Out<'a, f32>, B::Out<'a, u8>>>,
    /// Receives the quantized transpose of `y`, with its own scales along the columns: for the
    /// matrix product over rows in the weight gradient of the next linear layer.
    /// [`QuantSpec::columnwise`] is its spec. Its codes differ from `codes`, but both quantize the
    /// same values. It needs `rstd`, and layer norm's `mean`. Its rows are not in groups.
    pub codes_columnwise: Option<Rows<B::Out<'a, C>>>,
    /// Receives the scales of `codes_columnwise`.
    pub scales_columnwise: Option<Scales<B::Out<'a, f32>, B::Out<'a, u8>>>,
    /// Receives the largest magnitude of the quantized values, to choose the next call's scale; NaN
    /// if one value is NaN. With [`QuantSpec::folds_amax`] it receives the larger of this and its
    /// old value, which must not be negative.
    pub amax: Option<B::Out<'a, f32>>,
    /// The name of a tensor that a later change of its dtype dropped. Validation refuses the call.
    pub(crate) lost: Option<&'static str>,
    /// The dtypes of the type parameters. Set it where views carry their types at run time;
    /// validation compares them with it.
    pub dtypes: DTypes,
}

/// A buffer for scales: f32 or bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales<F, E> {
    /// f32.
    F32(F),
    /// The byte `127 + exponent` of each power of two.
    E8m0(E),
}

impl<'a, B: NormBackend + ?Sized, T: Element, C: Code> QuantizedForward<'a, B, T, C> {
    /// `codes` from `x`: views of dense rows, [`Rows::strided`] or [`Rows::grouped`].
    pub fn new(quant: QuantSpec, x: impl Into<Rows<B::In<'a, T>>>, codes: impl Into<Rows<B::Out<'a, C>>>) -> Self {
        QuantizedForward {
            quant,
            x: x.into(),
            weight: None,
            bias: None,
            residual: None,
            residual_out: None,
            y: None,
            mean: None,
            rstd: None,
            codes: codes.into(),
            codes_t: None,
            scale: None,
            scales: None,
            codes_columnwise: None,
            scales_columnwise: None,
            amax: None,
            lost: None,
            dtypes: DTypes::of::<T, T, T>(),
        }
    }
}

impl<'a, B: NormBackend + ?Sized, T: Element, C: Code, W: Element, R: Element> QuantizedForward<'a, B, T, C, W, R> {
    /// With these [`scales`](Self#structfield.scales), as f32.
    pub fn scales(self, scales: B::Out<'a, f32>) -> Self {
        QuantizedForward { scales: Some(Scales::F32(scales)), ..self }
    }

    /// With these [`scales`](Self#structfield.scales), as bytes: for MX and
    /// [`ScaleLayout::PackedUe8m0`](crate::quant::ScaleLayout).
    pub fn scales_e8m0(self, scales: B::Out<'a, u8>) -> Self {
        QuantizedForward { scales: Some(Scales::E8m0(scales)), ..self }
    }

    /// With these [`scales_columnwise`](Self#structfield.scales_columnwise), as f32.
    pub fn scales_columnwise(self, scales: B::Out<'a, f32>) -> Self {
        QuantizedForward { scales_columnwise: Some(Scales::F32(scales)), ..self }
    }

    /// With these [`scales_columnwise`](Self#structfield.scales_columnwise), as bytes.
    pub fn scales_columnwise_e8m0(self, scales: B::Out<'a, u8>) -> Self {
        QuantizedForward { scales_columnwise: Some(Scales::E8m0(scales)), ..self }
    }
}

tensors!(QuantizedForward [C D] {
    given matrix X = x: In T;
    optional matrix Residual = residual: In R;
    optional vector Weight = weight: In W;
    optional vector Bias = bias: In W;
    optional matrix Y = y: Out T;
    optional matrix ResidualOut = residual_out: Out R;
    optional vector Mean = mean: Out f32;
    optional vector Rstd = rstd: Out f32;
    given matrix Codes = codes: Out C;
    optional matrix CodesT = codes_t: Out C;
    optional vector Scale = scale: In f32;
    by_hand scales Scales = scales: Out f32;
    optional vector Amax = amax: Out f32;
    optional matrix CodesColumnwise = codes_columnwise: Out C;
    by_hand scales ScalesColumnwise = scales_columnwise: Out f32;
} with { quant: QuantSpec } and residual);
