//! The distributions of inputs. [`data`](crate::case::data) draws them.

use crate::judge::bounds::Mode;
use crate::names::named_enum;

named_enum! {
    /// A distribution of inputs, with the kind of bug that it exposes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    enum Family {
        /// Standard normal: most bugs.
        Randn = "randn",
        /// Rows of variance eps: bugs in the use of eps.
        NearEps = "near_eps",
        /// Large values, far from overflow in f32: squares in 16 bits, eps in the wrong place.
        Large = "large",
        /// Mean much larger than the deviation: variance computed as E[x^2] - mean^2.
        Shifted = "shifted",
        /// Mean so large that its rounding error matters.
        ShiftedHi = "shifted_hi",
        /// dy nearly parallel to x_hat: cancellation in dx.
        CorrDy = "corr_dy",
        /// Positive x and dy: growing sums that absorb small addends.
        PosDy = "posdy",
        /// Magnitudes over sixteen binades.
        Loguni = "loguni",
        /// One large column and one large row, the last: elements lost at an edge.
        Outlier = "outlier",
        /// Few significant bits: every sum is exact in any order.
        Exact = "exact",
        /// One value everywhere: zero variance; for some calls a huge value, where only x - mean
        /// matters.
        Const = "const",
        /// Zeros.
        Zeros = "zeros",
        /// Zero, constant, tiny and huge rows next to each other: leaks between rows.
        Mixed = "mixed",
        /// Subnormal elements of the storage dtype.
        Subnormal = "subnormal",
        /// NaN, infinities and overflowing squares in some rows: isolation of the other rows.
        Nonfinite = "nonfinite",
        /// For quantized results. All x have one magnitude, and the weight is on quantization
        /// steps, on ties and next to them, so that y is exact before it is quantized.
        Codes = "codes",
    }
}

impl Family {
    /// The families for calls with float results: all except the last.
    pub const OF_FLOATS: &[Family] = Family::ALL.split_at(Family::ALL.len() - 1).0;

    /// The mode whose bounds are valid for the family. Independent rounding errors are a fair model
    /// only for continuous, roughly centred data. On a lattice or far from zero, rounding errors
    /// repeat, and the worst case applies.
    pub const fn mode(self) -> Mode {
        match self {
            Family::Randn | Family::NearEps | Family::Large | Family::CorrDy => Mode::Statistical,
            Family::PosDy | Family::Loguni | Family::Outlier => Mode::Statistical,
            Family::Shifted | Family::ShiftedHi | Family::Exact | Family::Const | Family::Zeros => Mode::Worst,
            Family::Mixed | Family::Subnormal | Family::Nonfinite | Family::Codes => Mode::Worst,
        }
    }
}
