//! Rows on their way through the norm and its pieces, in f32.

use super::norm::Normalized;

/// A row of a forward call. Vectors have (cols) elements.
pub(crate) struct ForwardRow {
    /// The row of `x`; of the first part, if there are several.
    pub(crate) x: Vec<f32>,
    /// The values to normalize.
    pub(crate) h: Vec<f32>,
    /// `residual_out`, rounded.
    pub(crate) sum: Vec<f32>,
    /// The norm of `h`.
    pub(crate) result: Normalized,
    /// The result of a piece that is stored as `y` instead of the norm.
    pub(crate) y: Option<Vec<f32>>,
}

impl ForwardRow {
    pub(crate) fn new(x: Vec<f32>) -> Self {
        ForwardRow { h: x.clone(), sum: x.clone(), x, result: Normalized::default(), y: None }
    }
}

/// A row of a backward call. Vectors have (cols) elements.
pub(crate) struct BackwardRow {
    /// `dy` as the call gets it.
    pub(crate) given: Vec<f32>,
    /// The gradient of the norm's result.
    pub(crate) dy: Vec<f32>,
    /// The tensor that was normalized.
    pub(crate) x: Vec<f32>,
    /// Of each group of columns; 0 for RMS norm.
    pub(crate) mean: Vec<f32>,
    pub(crate) rstd: Vec<f32>,
    /// `dx` divided by `rstd`.
    pub(crate) inner: Vec<f32>,
    /// Not yet rounded.
    pub(crate) dx: Vec<f32>,
}
