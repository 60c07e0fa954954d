//! Plans of forward of a sum over ranks with row owners: the tile, and so the bits, of
//! `reduce_forward`.

use rmsnorm_spec::{Error, Problem};

use super::Program;
use super::ranks::{Group, Plan};
use super::reduce_forward;
use crate::caps::Caps;
use crate::peers::MOST_RANKS;

/// The tensor that an owner sends: `reduce_forward_rows.cu` has the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Sends {
    Nothing = 0,
    Y = 1,
    /// The sum, which every rank then normalizes.
    H = 2,
}

/// The plan of a call with at least one row; addresses and strides are multiples of `access_bytes`.
/// Its rounds count the rows of one owner.
///
/// # Errors
/// `Unsupported` if a row is too long for the device, or the group's memory is too small for two
/// rows.
pub(crate) fn plan(problem: &Problem, access_bytes: u32, group: &Group, caps: &Caps) -> Result<Plan, Error> {
    let of_all = reduce_forward::plan(problem, access_bytes, group, caps)?;
    // Each row takes two slots per pack: x on its way to the owner, and the result on its way back.
    // The kernel counts the rows of all owners in 32 bits, one step beyond the last.
    let rows_per_launch = (of_all.rows_per_launch / 2).min(i32::MAX as usize / MOST_RANKS);
    if rows_per_launch == 0 {
        let rule = format!(
            "bytes of the group is too small: rows divided among ranks need room for two rows of x, got {} for {} columns",
            group.bytes, problem.cols
        );
        return Err(Error::Unsupported { rule });
    }
    let key = super::KernelKey { program: Program::ReduceForwardRows, ..of_all.key };
    Ok(Plan { key, rows_per_launch, owners: group.ranks as usize, ..of_all })
}

/// Bytes that the link carries in the time of the detour through the owner: 1.9 us at 344 GB/s. On
/// two H100s, 8 rows of 8192 bf16 take 5.9 us with owners, 4.0 us without.
///
/// Without owners a rank sends `(ranks - 1) * bytes`, with owners
/// `2 * (ranks - 1) / ranks * bytes`.
const DETOUR_BYTES: u128 = 650_000;

/// Whether a call of whole rows is faster with row owners.
///
/// The constant was measured on two devices; with more, the decision extrapolates from the bytes
/// sent. It does not change bits.
pub(crate) fn is_sooner(problem: &Problem, group: &Group) -> bool {
    let (ranks, size) = (u128::from(group.ranks), problem.dtypes.activation.size());
    let bytes = problem.rows as u128 * (problem.cols * size) as u128;
    may_be_sooner(problem, group) && bytes * (ranks - 1) * (ranks - 2) > DETOUR_BYTES * ranks
}

/// Whether row owners can be faster for some number of rows. With two ranks both ways send the same
/// number of bytes. The sum is sent in the slots of x, so it must have x's dtype.
pub(crate) fn may_be_sooner(problem: &Problem, group: &Group) -> bool {
    group.ranks > 2 && problem.dtypes.activation == problem.dtypes.residual
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{DType, DTypes, Norm, Tensor};

    use super::*;
    use crate::plan::ranks::Round;

    const MIB: usize = 1 << 20;

    fn problem(rows: usize, cols: usize) -> Problem {
        Problem::forward(Norm::Rms, rows, cols, DType::Bf16, &[Tensor::Weight, Tensor::Residual, Tensor::ResidualOut])
    }

    fn group(ranks: u32, bytes: usize) -> Group {
        Group { ranks, sharers: 1, bytes }
    }

    /// The bits of a row follow from its tile.
    #[test]
    fn a_row_has_the_tile_that_it_has_where_all_ranks_add() {
        for (ranks, cols) in
            [1, 2, 3, 8].into_iter().flat_map(|ranks| [1, 100, 4096, 8192, 20_000].map(|cols| (ranks, cols)))
        {
            let (problem, group) = (problem(9, cols), group(ranks, MIB));
            let plan = plan(&problem, 8, &group, &Caps::h200()).expect("a plan");
            let all = reduce_forward::plan(&problem, 8, &group, &Caps::h200()).expect("a plan");
            assert_eq!((plan.key.tile, plan.shared_bytes), (all.key.tile, all.shared_bytes));
            assert_eq!((plan.key.program, plan.key.ranks), (Program::ReduceForwardRows, ranks));
        }
    }

    /// For each launch: the first row of each owner, its rows, and the blocks.
    #[test]
    fn launches_have_rows_of_every_owner_with_slots_for_two_of_each() {
        let row_bytes = 2 * 4096;
        for (own_rows, ranks, bytes, expected) in [
            (1, 2, MIB, vec![(0, 1, 2)]),
            (5, 4, MIB, vec![(0, 5, 20)]),
            (300, 2, 16 * MIB, vec![(0, 300, 264)]),
            (5, 3, 4 * row_bytes, vec![(0, 2, 6), (2, 2, 6), (4, 1, 3)]),
            (2, 8, 3 * row_bytes, vec![(0, 1, 8), (1, 1, 8)]),
            (0, 2, MIB, vec![]),
        ] {
            let plan = plan(&problem(7, 4096), 16, &group(ranks, bytes), &Caps::h200()).expect("a plan");
            let rounds: Vec<_> =
                plan.rounds(own_rows).map(|Round { first_row, rows, grid }| (first_row, rows, grid)).collect();
            assert_eq!(rounds, expected, "{own_rows} rows of each of {ranks}, {bytes} bytes");
        }
        let small = plan(&problem(7, 4096), 16, &group(2, 2 * row_bytes - 1), &Caps::h200());
        assert!(matches!(small, Err(Error::Unsupported { rule }) if rule.contains("room for two rows")));
    }

    /// The largest x, in KiB, for which all ranks add.
    #[test]
    fn owners_add_what_is_large_for_its_ranks() {
        for (ranks, most_kib) in [(3, 952), (4, 423), (8, 120)] {
            let of_kib = |kib: usize| Problem { rows: kib, ..problem(1, 512) };
            assert!(!is_sooner(&of_kib(most_kib), &group(ranks, MIB)), "{ranks}");
            assert!(is_sooner(&of_kib(most_kib + 1), &group(ranks, MIB)), "{ranks}");
        }
        for ranks in [1, 2] {
            assert!(!is_sooner(&problem(1 << 20, 8192), &group(ranks, MIB)));
        }
        let stream_f32 =
            Problem { dtypes: DTypes::uniform(DType::Bf16).widened(false, true), ..problem(1 << 20, 8192) };
        assert!(!is_sooner(&stream_f32, &group(8, MIB)));
    }

    #[test]
    fn both_sides_number_what_is_sent_alike() {
        let [nothing, y, h] = [Sends::Nothing, Sends::Y, Sends::H].map(|sends| sends as u32);
        let line = format!("SENDS_NOTHING = {nothing}, SENDS_Y = {y}, SENDS_H = {h};");
        assert!(rmsnorm_kernels::REDUCE_FORWARD_ROWS.text.contains(&line));
    }
}
