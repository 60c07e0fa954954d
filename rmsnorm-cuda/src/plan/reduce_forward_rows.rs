//! Plans of forward of a sum over ranks with row owners: the tile, and so the bits, of
//! `reduce_forward`.

use rmsnorm_spec::{Error, Problem};

use super::Program;
use super::ranks::{Group, Plan};
use super::reduce_forward;
use crate::caps::Caps;
use crate::peers::MOST_RANKS;

/// The plan of a call with at least one row; addresses and strides are multiples of `access_bytes`.
/// Its rounds count the rows of one owner.
///
/// # Errors
/// `Unsupported` if a row is too long for the device, or the group's memory is too small for two
/// rows.
pub(crate) fn plan(problem: &Problem, access_bytes: u32, group: &Group, caps: &Caps) -> Result<Plan, Error> {
    // Without clusters, whose threads could not tell together whether all parts have come.
    let of_all = reduce_forward::plan(problem, access_bytes, group, caps)?;
    // Each row takes two slots per pack: x on its way to the owner, and y on its way back.
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
    let most_blocks = group.fair_blocks(of_all.most_blocks);
    Ok(Plan { key, rows_per_launch, owners: group.ranks as usize, most_blocks, ..of_all })
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{DType, Norm, Tensor};

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
            // An odd number of blocks, so that each has rows of both owners.
            (300, 2, 16 * MIB, vec![(0, 300, 263)]),
            (5, 3, 4 * row_bytes, vec![(0, 2, 6), (2, 2, 6), (4, 1, 3)]),
            (2, 8, 3 * row_bytes, vec![(0, 1, 8), (1, 1, 8)]),
            (0, 2, MIB, vec![]),
        ] {
            let plan = plan(&problem(7, 4096), 16, &group(ranks, bytes), &Caps::h200()).expect("a plan");
            let rounds: Vec<_> =
                plan.rounds(own_rows).map(|Round { first_row, rows, grid, .. }| (first_row, rows, grid)).collect();
            assert_eq!(rounds, expected, "{own_rows} rows of each of {ranks}, {bytes} bytes");
        }
        let small = plan(&problem(7, 4096), 16, &group(2, 2 * row_bytes - 1), &Caps::h200());
        assert!(matches!(small, Err(Error::Unsupported { rule }) if rule.contains("room for two rows")));
    }
}
