//! Forward of a sum over ranks where each adds the rows that it owns: the tile of `reduce_forward`, and so its bits.

use rmsnorm_spec::{Error, Problem};

use super::Program;
use super::ranks::{Group, Plan};
use super::reduce_forward;
use crate::caps::Caps;
use crate::peers::MOST_RANKS;

/// What an owner sends of its rows: `reduce_forward_rows.cu` has the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Sends {
    Nothing = 0,
    Y = 1,
    /// The sum, which every rank normalizes itself.
    H = 2,
}

/// The plan of a call with rows, whose addresses and strides are multiples of `access_bytes`. Its pieces are of the rows that a rank owns.
///
/// # Errors
/// `Unsupported` if a row is too long for the device, or for the group's memory, which has room for two.
pub(crate) fn plan(problem: &Problem, access_bytes: u32, group: &Group, caps: &Caps) -> Result<Plan, Error> {
    let of_all = reduce_forward::plan(problem, access_bytes, group, caps)?;
    // A part on its way to the owner of a row, and a result on its way from the owner of another.
    // Those of all owners are counted in 32 bits, with a step beyond.
    let rows_per_launch = (of_all.rows_per_launch / 2).min(i32::MAX as usize / MOST_RANKS);
    if rows_per_launch == 0 {
        let rule = format!(
            "where rows are divided among ranks, the memory of a group has room for two rows of x, got {} bytes for {} columns",
            group.bytes, problem.cols
        );
        return Err(Error::Unsupported { rule });
    }
    let key = super::KernelKey { program: Program::ReduceForwardRows, ..of_all.key };
    Ok(Plan { key, rows_per_launch, owners: group.ranks as usize, ..of_all })
}

/// Bytes that the link carries while a row goes to its owner and back: 1.9 us (two H100s, 8 rows of 8192 bf16: 5.9 us for 4.0) of 344 GB/s.
///
/// A rank that sends all of x to all sends `(ranks - 1) * bytes`, one that sends to owners `2 * (ranks - 1) / ranks * bytes`.
const DETOUR_BYTES: u128 = 650_000;

/// Whether a call of whole rows is sooner done by their owners.
///
/// Not measured on more than two devices: the constant is of two, and the rest what is sent. Bits do not depend on it.
pub(crate) fn is_sooner(problem: &Problem, group: &Group) -> bool {
    let (ranks, size) = (u128::from(group.ranks), problem.dtypes.activation.size());
    let bytes = problem.rows as u128 * (problem.cols * size) as u128;
    may_be_sooner(problem, group) && bytes * (ranks - 1) * (ranks - 2) > DETOUR_BYTES * ranks
}

/// Whether that can be, whatever the number of rows. On two ranks it never is, as either way sends as much; and the sum is sent in the place
/// of x, whose dtype it must have.
pub(crate) fn may_be_sooner(problem: &Problem, group: &Group) -> bool {
    group.ranks > 2 && problem.dtypes.activation == problem.dtypes.residual
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{DType, DTypes, Norm, Tensor};

    use super::*;
    use crate::plan::ranks::Piece;

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

    /// First row of each owner's, its rows, and the blocks, of each launch.
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
            let pieces: Vec<_> =
                plan.pieces(own_rows).map(|Piece { first_row, rows, grid }| (first_row, rows, grid)).collect();
            assert_eq!(pieces, expected, "{own_rows} rows of each of {ranks}, {bytes} bytes");
        }
        let small = plan(&problem(7, 4096), 16, &group(2, 2 * row_bytes - 1), &Caps::h200());
        assert!(matches!(small, Err(Error::Unsupported { rule }) if rule.contains("room for two rows")));
    }

    /// KiB of x that all ranks still add.
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
