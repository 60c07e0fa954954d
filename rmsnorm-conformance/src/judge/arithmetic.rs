//! The arithmetic that a backend declares. Error bounds follow from it; a policy limits the depth
//! of sums.

use rmsnorm_spec::depth::{policy_depth_rows, sum_depth};

/// How a backend rounds an f32 result to a 16-bit dtype at the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreRounding {
    /// To nearest, ties to even.
    NearestEven,
    /// To either neighbour, as WGSL's conversions may.
    EitherNeighbour,
}

/// The treatment of NaN and infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NonFinite {
    /// Propagates them as IEEE 754 says.
    Ieee,
    /// Unspecified for the row they are in (WGSL).
    Unspecified,
}

/// The arithmetic of a backend, from which its error bounds are derived
/// ([math](rmsnorm_spec::math), section 5).
#[derive(Clone, Copy, Debug)]
pub struct Arithmetic {
    /// Unit roundoff of one f32 operation: `|fl(a op b) - (a op b)| <= u |a op b|`.
    pub unit_roundoff: f64,
    /// Relative error of the computed `1 / sqrt(v)`.
    pub rstd_error: f64,
    /// Number of roundings of the division by cols: 2 for a multiplication with a rounded
    /// reciprocal, 1 for a true division. Not used if cols is a power of two, because the division
    /// is exact then.
    pub mean_roundings: f64,
    /// Relative error of a quotient, such as a result divided by its scale: 1 rounding for a
    /// division, 2 for a product with a rounded reciprocal.
    pub quotient_error: f64,
    /// Relative error of the computed `exp(-z)`, for a given `z` of at least 0. What underflows is
    /// not counted.
    pub exp_error: fn(f64) -> f64,
    /// The rounding of 16-bit stores.
    pub store: StoreRounding,
    /// Whether subnormal inputs and results may be flushed to zero.
    pub flushes_subnormals: bool,
    /// The treatment of NaN and infinity.
    pub non_finite: NonFinite,
    /// Longest chain of f32 additions in a sum over a row of `cols` columns; at most
    /// [`sum_depth`].
    pub depth_cols: fn(usize) -> usize,
    /// Longest chain of f32 additions in a sum over `rows` rows (dweight, dbias), for
    /// [`GradReduction::Partials`](rmsnorm_spec::GradReduction::Partials); at most
    /// [`policy_depth_rows`].
    pub depth_rows: fn(usize) -> usize,
}

impl Arithmetic {
    /// IEEE f32 with a correctly rounded square root and division, and an exponential function
    /// that is right to 2 ulp.
    pub const IEEE: Arithmetic = Arithmetic {
        unit_roundoff: F32_ROUNDOFF,
        rstd_error: 2.0 * F32_ROUNDOFF,
        mean_roundings: 2.0,
        quotient_error: 2.0 * F32_ROUNDOFF,
        exp_error: |_| 4.0 * F32_ROUNDOFF,
        store: StoreRounding::NearestEven,
        flushes_subnormals: false,
        non_finite: NonFinite::Ieee,
        depth_cols: sum_depth,
        depth_rows: policy_depth_rows,
    };

    /// The error of `factor` times an f32 operand if the operand may be flushed to zero; 0 if
    /// subnormals are kept.
    pub(crate) fn flush_loss(&self, factor: f64) -> f64 {
        // A product with 0 would be NaN for an infinite factor.
        if self.flushes_subnormals { f64::from(f32::MIN_POSITIVE) * factor.abs() } else { 0.0 }
    }

    /// Whether f32 additions round to nearest even. If so, the sum with the residual has one exact
    /// value.
    pub fn adds_to_nearest(&self) -> bool {
        self.unit_roundoff <= Arithmetic::IEEE.unit_roundoff && !self.flushes_subnormals
    }
}

const F32_ROUNDOFF: f64 = 1.0 / (1u64 << 24) as f64;
