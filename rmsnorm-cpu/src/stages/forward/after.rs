//! Forward with the residual added after the norm, and optionally the next norm of the sum:
//! math.md, equations (13) and (14). A row and its residual are read from memory once. The sum
//! stays on the stack for the next norm, or is computed again on each visit, from the cache, if a
//! row is too long.

use rmsnorm_spec::{CastOrder, Norm};

use super::batches::{MOST_COLS, Room, padded, whole};
use super::moments::{Deviations, Moments};
use super::{ForwardRows, Residual, Row, Statistics, rstd_of};
use crate::lanes::{self, Any, Elements, Fenced, In, Numbers, Out, Piece, Simd, Stores};
use crate::stages::Stage;

/// The rows of such a call, or some of them.
pub(crate) struct AfterRows<'a, T: Elements = Any, W: Elements = Any, R: Elements = Any> {
    /// The first norm, the residual with its sum, and the next norm's y.
    pub(crate) rows: ForwardRows<'a, T, W, R>,
    /// The next norm, if there is a y.
    pub(crate) next: Option<NextNorm<'a, W>>,
}

/// The tensors of the next norm other than y.
pub(crate) struct NextNorm<'a, W: Elements = Any> {
    pub(crate) weight: Option<In<'a, W>>,
    pub(crate) bias: Option<In<'a, W>>,
    pub(crate) mean: Option<Out<'a, f32>>,
    pub(crate) rstd: Option<Out<'a, f32>>,
}

impl AfterRows<'_> {
    /// The same rows of elements of these types, which must match their tags.
    #[inline(always)]
    pub(crate) fn known<T: Numbers, W: Numbers, R: Numbers>(&mut self) -> AfterRows<'_, T, W, R> {
        let next = self.next.as_mut().map(|NextNorm { weight, bias, mean, rstd }| NextNorm {
            weight: weight.map(In::known),
            bias: bias.map(In::known),
            mean: mean.as_mut().map(Out::reborrow),
            rstd: rstd.as_mut().map(Out::reborrow),
        });
        AfterRows { rows: self.rows.known(), next }
    }
}

impl<T: Numbers, W: Numbers, R: Numbers> AfterRows<'_, T, W, R> {
    /// The rows before `row`, and the rest.
    pub(crate) fn split_at(self, row: usize) -> (Self, Self) {
        let (low, high) = self.rows.split_at(row);
        let next = self.next.map(|NextNorm { weight, bias, mean, rstd }| {
            let (mean_low, mean_high) = mean.map(|mean| mean.split_at(row)).unzip();
            let (rstd_low, rstd_high) = rstd.map(|rstd| rstd.split_at(row)).unzip();
            (
                NextNorm { weight, bias, mean: mean_low, rstd: rstd_low },
                NextNorm { weight, bias, mean: mean_high, rstd: rstd_high },
            )
        });
        let (next_low, next_high) = next.unzip();
        (AfterRows { rows: low, next: next_low }, AfterRows { rows: high, next: next_high })
    }
}

/// Computes every sum, and its norm.
impl<T: Numbers, W: Numbers, R: Numbers> Stage for AfterRows<'_, T, W, R> {
    #[inline(always)]
    fn run<S: Simd>(&mut self) {
        let cols = self.rows.spec.cols;
        let fenced = Fenced::<S>::new(self.rows.streaming);
        // A sum that overwrites the residual is already in the cache.
        let own_line = matches!(self.rows.residual, Residual::InPlace(_));
        let fenced_sum = Fenced::<S>::new(self.rows.streaming && !own_line);
        let (stores, sum_stores) = (fenced.stores(), fenced_sum.stores());
        let (norm, eps) = (self.rows.spec.norm, self.rows.spec.eps);
        let is_plain = self.rows.bias.is_none() && self.rows.spec.cast_order == CastOrder::AtStore;
        let last = self.next.as_ref().map(|next| Row::of_sum(&self.rows, next.weight, next.bias));
        let mut room = Room::new();
        let mut kept = (self.next.is_some() && cols <= MOST_COLS).then(|| room.zeros(padded(cols)));
        for r in 0..self.rows.rows {
            let mut row = self.rows.row(r);
            // Written once, because each loop over a row takes time to compile for every mix of
            // dtypes and instruction set.
            let statistics = row.statistics::<S, false>(norm, eps);
            let of_sum = match (&last, &mut kept) {
                (None, _) => {
                    match is_plain {
                        true => row.add::<S, true>(statistics, sum_stores),
                        false => row.add::<S, false>(statistics, sum_stores),
                    }
                    None
                }
                (Some(last), Some(kept)) => {
                    let mut sums = Kept(kept);
                    let of_sum = match is_plain {
                        true => row.sum_statistics::<S>(&Onto::<true>(statistics), &mut sums, norm, eps),
                        false => row.sum_statistics::<S>(&Onto::<false>(statistics), &mut sums, norm, eps),
                    };
                    row.normalize_sum::<S>(&sums, last, of_sum, stores, sum_stores);
                    Some(of_sum)
                }
                (Some(last), None) => {
                    let sum = Onto::<false>(statistics);
                    let of_sum = row.sum_statistics::<S>(&sum, &mut MadeAgain(&sum), norm, eps);
                    row.normalize_sum::<S>(&MadeAgain(&sum), last, of_sum, stores, sum_stores);
                    Some(of_sum)
                }
            };
            save(&mut self.rows.mean, &mut self.rows.rstd, r, statistics);
            if let (Some(next), Some(of_sum)) = (&mut self.next, of_sum) {
                save(&mut next.mean, &mut next.rstd, r, of_sum);
            }
        }
    }
}

/// Computes the sum of a row.
pub(super) trait Sum<T: Elements, W: Elements, R: Elements> {
    /// The sum at a piece, rounded to the residual's dtype, as f32.
    fn make<S: Simd, P: Piece>(&self, row: &Row<'_, T, W, R>, piece: P) -> S::Lanes;
}

/// Equation (13): the sum of the residual and the norm with these statistics.
struct Onto<const PLAIN: bool>(Statistics);

impl<T: Numbers, W: Numbers, R: Numbers, const PLAIN: bool> Sum<T, W, R> for Onto<PLAIN> {
    #[inline(always)]
    fn make<S: Simd, P: Piece>(&self, row: &Row<'_, T, W, R>, piece: P) -> S::Lanes {
        row.sum::<S, _, PLAIN>(piece, self.0)
    }
}

/// The source of the sum for its norm.
pub(super) trait Sums<T: Elements, W: Elements, R: Elements> {
    /// Stores the sum at a piece. Lanes beyond a short piece are zeros.
    fn keep<S: Simd, P: Piece>(&mut self, piece: P, sum: S::Lanes);

    /// The sum at a piece. Lanes beyond a short piece are undefined.
    fn at<S: Simd, P: Piece>(&self, row: &Row<'_, T, W, R>, piece: P) -> S::Lanes;
}

/// The sum on the stack, in f32 and padded.
pub(super) struct Kept<'k>(pub(super) &'k mut [f32]);

impl<T: Numbers, W: Numbers, R: Numbers> Sums<T, W, R> for Kept<'_> {
    #[inline(always)]
    fn keep<S: Simd, P: Piece>(&mut self, piece: P, sum: S::Lanes) {
        lanes::store::<S, f32, _>(&mut Out::from(&mut *self.0), whole(piece), sum);
    }

    #[inline(always)]
    fn at<S: Simd, P: Piece>(&self, _: &Row<'_, T, W, R>, piece: P) -> S::Lanes {
        lanes::load::<S, f32, _>(self.0, whole(piece))
    }
}

/// The sum computed again from its inputs, which are in the cache.
pub(super) struct MadeAgain<'s, M>(pub(super) &'s M);

impl<T: Numbers, W: Numbers, R: Numbers, M: Sum<T, W, R>> Sums<T, W, R> for MadeAgain<'_, M> {
    #[inline(always)]
    fn keep<S: Simd, P: Piece>(&mut self, _: P, _: S::Lanes) {}

    #[inline(always)]
    fn at<S: Simd, P: Piece>(&self, row: &Row<'_, T, W, R>, piece: P) -> S::Lanes {
        self.0.make::<S, _>(row, piece)
    }
}

impl<'r, T: Numbers, W: Numbers, R: Numbers> Row<'r, T, W, R> {
    /// A row of the norm of a sum. Its y, x and residual are never used.
    pub(super) fn of_sum(rows: &ForwardRows<'_, T, W, R>, weight: Option<In<'r, W>>, bias: Option<In<'r, W>>) -> Self {
        let ForwardRows { spec, dtypes, .. } = *rows;
        Row {
            cols: spec.cols,
            dtypes,
            x: None,
            x_stride: 0,
            y: Out::none(T::tag(dtypes.activation)),
            residual: None,
            residual_stride: 0,
            residual_out: None,
            weight,
            weight_offset: spec.weight_offset,
            bias,
            cast_order: spec.cast_order,
        }
    }

    /// Equation (13), rounded to the residual's dtype, as f32.
    #[inline(always)]
    fn sum<S: Simd, P: Piece, const PLAIN: bool>(&self, piece: P, statistics: Statistics) -> S::Lanes {
        let x = self.x().load::<S, _>(piece);
        let norm = self.value::<S, _, PLAIN>(piece, x, statistics);
        match self.residual() {
            Some(residual) => {
                lanes::round_through::<S>(R::dtype(self.dtypes.residual), S::add(residual.load::<S, _>(piece), norm))
            }
            // Unreachable: every call has a residual.
            None => norm,
        }
    }

    /// Stores the sum.
    #[inline(always)]
    fn add<S: Simd, const PLAIN: bool>(&mut self, statistics: Statistics, stores: Stores<'_>) {
        let head = self.residual_out.as_ref().map_or(0, |out| stores.head(out));
        lanes::for_each_piece!(head, self.cols, piece => {
            self.prefetch_next::<S, _, true>(piece);
            let sum = self.sum::<S, _, PLAIN>(piece, statistics);
            self.store_sum::<S, _>(piece, sum, stores);
        });
    }

    /// Stores the sum, and its norm with the parameters of `last`.
    #[inline(always)]
    pub(super) fn normalize_sum<S: Simd>(
        &mut self,
        sums: &impl Sums<T, W, R>,
        last: &Row<'_, T, W, R>,
        of_sum: Statistics,
        stores: Stores<'_>,
        sum_stores: Stores<'_>,
    ) {
        lanes::for_each_piece!(stores.head(&self.y), self.cols, piece => {
            self.prefetch_next::<S, _, true>(piece);
            let sum = sums.at::<S, _>(self, piece);
            self.store_sum::<S, _>(piece, sum, sum_stores);
            let y = last.value::<S, _, false>(piece, sum, of_sum);
            self.y.store_or_stream::<S, _>(piece, y, stores);
        });
    }

    #[inline(always)]
    fn store_sum<S: Simd, P: Piece>(&mut self, piece: P, sum: S::Lanes, stores: Stores<'_>) {
        if let Some(residual_out) = &mut self.residual_out {
            residual_out.store_or_stream::<S, _>(piece, sum, stores);
        }
    }

    /// Equations (2) to (4) of the sum.
    #[inline(always)]
    pub(super) fn sum_statistics<S: Simd>(
        &self,
        made: &impl Sum<T, W, R>,
        sums: &mut impl Sums<T, W, R>,
        norm: Norm,
        eps: f32,
    ) -> Statistics {
        let [total] = lanes::sum_up!(S, self.cols, piece => {
            let sum = lanes::within::<S, _>(piece, made.make::<S, _>(self, piece));
            sums.keep::<S, _>(piece, sum);
            [match norm {
                Norm::Rms => S::mul(sum, sum),
                Norm::Layer => sum,
            }]
        });
        match norm {
            Norm::Rms => Statistics { mean: 0.0, rstd: rstd_of(total / self.cols as f32, eps) },
            Norm::Layer => Moments::of::<S>(&OfSum { row: self, sums }, total).statistics(eps),
        }
    }
}

/// The deviations of the sum of a row.
struct OfSum<'s, R, M> {
    row: R,
    sums: &'s M,
}

impl<T: Numbers, W: Numbers, R: Numbers, M: Sums<T, W, R>> Deviations for OfSum<'_, &Row<'_, T, W, R>, M> {
    #[inline(always)]
    fn cols(&self) -> usize {
        self.row.cols
    }

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        self.sums.at::<S, _>(self.row, piece)
    }
}

#[inline(always)]
pub(super) fn save(
    mean: &mut Option<Out<'_, f32>>,
    rstd: &mut Option<Out<'_, f32>>,
    row: usize,
    statistics: Statistics,
) {
    if let Some(mean) = mean {
        mean.set(row, statistics.mean);
    }
    if let Some(rstd) = rstd {
        rstd.set(row, statistics.rstd);
    }
}
