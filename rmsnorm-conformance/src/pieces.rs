//! The optional pieces of a norm ([`Piece`]), one file each: cases, bad calls, f32 arithmetic,
//! error bound, gradient and planted bugs. A new piece is a file here and a line in [`math`].

pub(crate) mod gate;
pub(crate) mod math;
pub(crate) mod next_norm;
pub(crate) mod parts;
pub(crate) mod quantize;
pub(crate) mod residual;
pub(crate) mod residual_after;
pub(crate) mod weight_first;

use rmsnorm_spec::{Piece, Slot};

use self::math::PieceMath;
use crate::case::cast::{self, CastBug};
use crate::case::cast_orders::CastOrderBug;
use crate::case::dice::{Lists, drawn};
use crate::case::groups::{self, GroupBug};
use crate::case::l2::{self, L2Bug};
use crate::case::{Case, Family, Kind, cast_orders, sums};
use crate::run::bad_call::Misuse;
use crate::selftest::planted::{Bug, BugList, NormBug, StrideBug};
use crate::selftest::simulate::call::Call;
use crate::selftest::simulate::rows::{BackwardRow, ForwardRow};
use crate::selftest::simulate::tensors::Tensors;

/// The contents of a piece.
struct Math {
    bugs: &'static [Bug],
    misuse: &'static [Misuse],
    lists: Lists,
    forward: fn(&Call, &mut Tensors<'_, '_>, &mut [ForwardRow]),
    again: fn(&Call, &Tensors<'_, '_>, &mut [BackwardRow]),
    pull: fn(&Call, &mut Tensors<'_, '_>, &mut [BackwardRow]),
}

const fn of<P: PieceMath>() -> Math {
    let (bugs, misuse, lists) = (P::BUGS, P::MISUSE, P::LISTS);
    Math { bugs, misuse, lists, forward: P::forward, again: P::again, pull: P::pull }
}

const fn math(piece: Piece) -> Math {
    match piece {
        Piece::Parts => of::<parts::Parts>(),
        Piece::Residual => of::<residual::Residual>(),
        Piece::ResidualAfter => of::<residual_after::ResidualAfter>(),
        Piece::NextNorm => of::<next_norm::NextNorm>(),
        Piece::Quantize => of::<quantize::Quantize>(),
        Piece::GateBefore => of::<gate::GateBefore>(),
        Piece::WeightFirst => of::<weight_first::WeightFirst>(),
        Piece::GateAfter => of::<gate::GateAfter>(),
    }
}

/// The cases of the pieces, the last piece first, of gradients as sums, of gates, of groups of
/// columns, of L2 norm, of cast orders, and of casts.
pub(crate) fn lists() -> impl Iterator<Item = Lists> {
    let others = [sums::LISTS, gate::LISTS, groups::LISTS, l2::LISTS, cast_orders::LISTS, cast::LISTS];
    Piece::ALL.into_iter().rev().map(|piece| math(piece).lists).chain(others)
}

/// The ways to misuse a piece.
pub(crate) fn misuse(piece: Piece) -> &'static [Misuse] {
    math(piece).misuse
}

/// Cases of [`Kind::PAIRS`], drawn from a seed.
pub(crate) fn pairs(seed: u64, count: usize) -> Vec<Case> {
    drawn(seed ^ 0x9a15, count, |dice, _| {
        let (kind, parts) = (dice.pick(&Kind::PAIRS), dice.pick(&parts::COUNTS));
        // Backward cannot be tested with the statistics that forward computed from non-finite rows.
        let is_good = |case: &Case| parts::is_good(case) && case.family != Family::Nonfinite;
        dice.one(1 << 13, |case| Case { kind, parts, ..case }, is_good)
    })
}

/// Every planted bug: of the norm, of groups of columns, of each piece, of the strides of each
/// tensor, then of L2 norm, of cast orders and of casts.
pub(crate) fn bugs() -> impl Iterator<Item = Bug> {
    let of_pieces = Piece::ALL.into_iter().flat_map(|piece| math(piece).bugs);
    let of_norms = NormBug::BUGS.iter().chain(GroupBug::BUGS).chain(of_pieces).copied();
    let others = L2Bug::BUGS.iter().chain(CastOrderBug::BUGS).chain(CastBug::BUGS).copied();
    of_norms.chain(StrideBug::of_tensors()).chain(others)
}

/// Computes the pieces of a slot, in their order.
pub(crate) fn forward(slot: Slot, call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [ForwardRow]) {
    for piece in call.problem.pieces().iter().filter(|piece| piece.slot() == slot) {
        (math(piece).forward)(call, tensors, rows);
    }
}

/// Makes again, in backward, what the norm took.
pub(crate) fn again(call: &Call, tensors: &Tensors<'_, '_>, rows: &mut [BackwardRow]) {
    for piece in call.problem.pieces().iter() {
        (math(piece).again)(call, tensors, rows);
    }
}

/// Takes the gradients back through the pieces of a slot, the last piece first.
pub(crate) fn pull(slot: Slot, call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [BackwardRow]) {
    let is_there = |piece: &Piece| piece.slot() == slot && call.problem.pieces().has(*piece);
    for piece in Piece::ALL.into_iter().rev().filter(is_there) {
        (math(piece).pull)(call, tensors, rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    use crate::Arithmetic;
    use crate::finding::Status;
    use crate::run::calls::Context;
    use crate::run::execute::execute_case;
    use crate::selftest::simulate::SimulatedBackend;

    /// The correct kernel passes every kind of pair, and the profiles with fixed lists have none.
    #[test]
    fn pairs_are_drawn_for_the_full_profile_alone() {
        let context = Context { device: &SimulatedBackend::new(None), arithmetic: &Arithmetic::IEEE };
        let cases = pairs(3, 40);
        for case in &cases {
            assert_eq!(case.to_string().parse(), Ok(*case));
            assert_eq!(execute_case(context, case).status, Status::Pass, "{case}");
        }
        let kinds: HashSet<Kind> = cases.iter().map(|case| case.kind).collect();
        assert_eq!(kinds, HashSet::from(Kind::PAIRS));
        assert_ne!(pairs(4, 40), cases);
        let lists = lists().flat_map(|lists| [(lists.smoke)(), (lists.core)(), (lists.drawn)(3)]).flatten();
        assert_eq!(lists.filter(|case| Kind::PAIRS.contains(&case.kind)).count(), 0);
    }
}
