//! Draws the axes of a case from a seed.

use rmsnorm_spec::{CastOrder, DType, DTypes, GradReduction, Norm, Tensor, TensorSet};

use crate::case::{Case, Family, Kind, Layout, presence};
use crate::testing::splitmix;

/// Row lengths: around powers of two (vector, warp, block and shared memory sizes), primes, lengths
/// that end in a half or a quarter of a vector, and hidden sizes of models.
pub(crate) const COLS: [usize; 57] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 20, 31, 32, 33, 63, 64, 65, 127, 128, 129, 252, 255, 256, 257, 511, 512,
    513, 516, 1000, 1004, 1023, 1024, 1025, 1284, 1538, 2880, 4095, 4096, 4097, 4099, 4100, 5120, 8191, 8192, 16_384,
    16_385, 16_388, 17_389, 32_771, 65_536, 65_537, 100_003, 131_072, 262_144,
];

/// Row counts: none, one, few, around powers of two, primes, more than 16 bits, and so many that
/// their square root (about the number of blocks) exceeds 256.
pub(crate) const ROWS: [usize; 15] = [0, 1, 2, 3, 7, 31, 64, 65, 257, 777, 4100, 20_011, 65_535, 65_537, 70_001];

/// Offsets added to the weight: none, Gemma's 1, and values that a kernel has no special case for.
pub(crate) const WEIGHT_OFFSETS: [f32; 4] = [0.0, 1.0, -0.5, 0.3];

pub(crate) const EPS: [f32; 5] = [1e-5, 1e-6, 1e-12, 0.1, 0.0];

/// Ways to sum gradients that many backends do not support.
pub(crate) const OTHER_REDUCTIONS: [GradReduction; 3] =
    [GradReduction::Locks { groups: 1 }, GradReduction::Locks { groups: 4 }, GradReduction::Atomics];

/// A case of one dtype, and which of its tensors are f32 nevertheless.
pub(crate) struct Drawn {
    pub case: Case,
    pub wide_weight: bool,
    pub wide_residual: bool,
}

/// The cases that a file adds to the profiles.
#[derive(Clone, Copy)]
pub(crate) struct Lists {
    pub smoke: fn() -> Vec<Case>,
    pub core: fn() -> Vec<Case>,
    /// The argument is the seed of the full profile.
    pub drawn: fn(u64) -> Vec<Case>,
    /// The arguments are the sizes at which a backend's plan changes.
    pub breakpoints: fn(&[(usize, usize)]) -> Vec<Case>,
    /// The kinds that are a single call, each with all of its tensors.
    pub calls: &'static [(Kind, TensorSet)],
}

impl Lists {
    pub const NONE: Lists =
        Lists { smoke: Vec::new, core: Vec::new, drawn: |_| Vec::new(), breakpoints: |_| Vec::new(), calls: &[] };
}

/// Every pair of two values, with the first value outermost.
pub(crate) fn each<A: Copy, B>(
    outer: impl IntoIterator<Item = A>,
    inner: impl IntoIterator<Item = B> + Clone,
) -> impl Iterator<Item = (A, B)> {
    outer.into_iter().flat_map(move |outer| inner.clone().into_iter().map(move |inner| (outer, inner)))
}

/// Dense and aligned tensors alternate with misaligned tensors that have strides.
pub(crate) fn alternate(i: usize) -> Layout {
    if i.is_multiple_of(2) { Layout::DENSE } else { Layout::Mixed(i as u32) }
}

/// Kinds with each norm.
pub(crate) fn with_norms(kinds: &[Kind]) -> impl Iterator<Item = (Kind, Norm)> {
    each(kinds.iter().copied(), Norm::USUAL)
}

/// `count` cases drawn from a seed. `draw` gets the number of cases so far, and may find none.
pub(crate) fn drawn(seed: u64, count: usize, mut draw: impl FnMut(&mut Dice, usize) -> Option<Case>) -> Vec<Case> {
    let mut dice = Dice { state: splitmix(seed) };
    let mut cases = Vec::new();
    while cases.len() < count {
        let turn = cases.len();
        cases.extend(draw(&mut dice, turn));
    }
    cases
}

/// The same index on machines with 32-bit and with 64-bit addresses.
pub(crate) fn index_of(draw: u64, len: usize) -> usize {
    (draw % len as u64) as usize
}

/// A pseudorandom sequence of choices.
pub(crate) struct Dice {
    pub(crate) state: u64,
}

impl Dice {
    pub(crate) fn roll(&mut self) -> u64 {
        self.state = splitmix(self.state);
        self.state >> 16
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[index_of(self.roll(), choices.len())]
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.roll().is_multiple_of(count)
    }

    pub(crate) fn case(&mut self, most_elements: usize) -> Case {
        let size = self.size(most_elements);
        self.case_of_size(size)
    }

    pub(crate) fn case_of_size(&mut self, size: (usize, usize)) -> Case {
        let Drawn { case, wide_weight, wide_residual } = self.draw(size);
        Case { dtypes: case.dtypes.widened(wide_weight, wide_residual), ..case }
    }

    /// A drawn case of at most `most_elements`, after `change`, for which `is_good` is true. Tries
    /// 64 times.
    pub(crate) fn one(
        &mut self,
        most_elements: usize,
        change: impl Fn(Case) -> Case,
        is_good: impl Fn(&Case) -> bool,
    ) -> Option<Case> {
        (0..64).map(|_| change(self.case(most_elements)).normalized()).find(is_good)
    }

    pub(crate) fn draw(&mut self, (rows, cols): (usize, usize)) -> Drawn {
        let (wide_weight, wide_residual) = (self.one_in(2), self.one_in(2));
        let case = Case {
            kind: self.pick(&Kind::BEFORE),
            norm: self.pick(&Norm::USUAL),
            dtypes: DTypes::uniform(self.pick(&DType::ALL)),
            present: self.present(),
            weight_offset: self.pick(&WEIGHT_OFFSETS),
            cast_order: self.pick(&[CastOrder::AtStore, CastOrder::AtStore, CastOrder::BeforeWeight]),
            eps: self.pick(&EPS),
            grad_reduction: self.grad_reduction(),
            layout: self.layout(cols),
            family: self.pick(Family::OF_FLOATS),
            seed: self.roll() as u32 % 1000,
            ..Case::plain(Kind::FORWARD, Norm::Rms, DType::F32, rows, cols)
        };
        Drawn { case, wide_weight, wide_residual }
    }

    pub(crate) fn size(&mut self, most_elements: usize) -> (usize, usize) {
        loop {
            let (rows, cols) = (self.pick(&ROWS), self.pick(&COLS));
            if rows * cols <= most_elements && cols <= most_elements {
                return (rows, cols);
            }
        }
    }

    fn present(&mut self) -> TensorSet {
        const USUAL: TensorSet = TensorSet::of(&[Tensor::Weight, Tensor::Rstd, Tensor::Dweight]);
        let is_drawn = |tensor: &Tensor| if USUAL.has(*tensor) { !self.one_in(4) } else { self.one_in(2) };
        presence::drawn().filter(is_drawn).collect()
    }

    pub(crate) fn layout(&mut self, cols: usize) -> Layout {
        match self.roll() % 6 {
            0 => Layout::DENSE,
            1 => Layout::Mixed(self.roll() as u32 % 1000),
            _ => Layout::Uniform { pad: self.pick(&[0, 1, 8, cols]), offset: self.roll() as usize % 8 },
        }
    }

    /// Mostly partials, so that a backend that supports nothing else keeps most of its backward
    /// cases.
    fn grad_reduction(&mut self) -> GradReduction {
        if self.one_in(16) { self.pick(&OTHER_REDUCTIONS) } else { GradReduction::Partials }
    }
}

/// Whether a case can prove something. With eps = 0, a variance that is zero or underflows has no
/// rstd. With few columns, the variance of layer norm may be tiny for any data. With a tiny eps,
/// rstd of such a row amplifies rounding errors.
pub(crate) fn is_meaningful(case: &Case) -> bool {
    let tiny_eps = case.eps < 1e-6;
    let zero_eps = case.eps == 0.0;
    let may_be_flat = match case.family {
        Family::Const | Family::Zeros | Family::Mixed | Family::Subnormal => true,
        Family::NearEps => zero_eps || (tiny_eps && case.dtypes.activation == DType::F16),
        Family::Randn | Family::Large | Family::Shifted | Family::ShiftedHi | Family::CorrDy => false,
        Family::PosDy | Family::Loguni | Family::Outlier | Family::Exact | Family::Nonfinite => false,
        // All rows have the same magnitude, far above flushed values.
        Family::Codes => false,
    };
    let few_cols = case.cols < 32 && case.norm == Norm::Layer;
    let far_from_zero = case.norm == Norm::Layer && matches!(case.family, Family::ShiftedHi | Family::Nonfinite);
    // Backward cannot be tested with the statistics that forward computed from non-finite rows.
    let tainted = case.family == Family::Nonfinite && case.kind == Kind::END_TO_END;
    // Constant x and dy are parallel; without a weight, dx consists of rounding errors.
    let parallel = case.family == Family::Const && case.kind.has_backward() && !case.present.has(Tensor::Weight);
    // Two large 16-bit values are often equal; then only the error of their mean remains.
    let far = matches!(case.family, Family::Large | Family::Shifted | Family::ShiftedHi);
    // With one column, dx is only the fraction eps / (x^2 + eps) of its terms.
    let square_cancels = case.cols == 1 && case.kind.has_backward() && (case.eps < 1e-5 || far);
    let flat_by_chance = case.norm == Norm::Layer && case.cols == 2 && far;
    !(tainted
        || parallel
        || square_cancels
        || flat_by_chance
        || (tiny_eps && (may_be_flat || few_cols || far_from_zero)))
}
