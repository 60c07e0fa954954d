//! Plans as text, in the form of [`rmsnorm_gpu::describe`].

use std::fmt;

use rmsnorm_gpu::describe::{launch, second_stage, steps};

use super::{Access, Dispatch, KernelKey, PAIR, Plan, Program, Reduction, Step};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&steps(self.steps.iter().map(|step| match step {
            Step::Zero { len, .. } => format!("zero={len}"),
            Step::Dispatch(dispatch) => dispatched(dispatch),
        })))
    }
}

fn dispatched(dispatch: &Dispatch) -> String {
    let Dispatch { key, chunks, grid, .. } = dispatch;
    let KernelKey { program, tile, access, is_whole, .. } = key;
    let info = program.info();
    if info.is_reduction {
        return second_stage(info.stem, tile.groups, *grid);
    }
    let access = match access {
        // Unaligned rows count as ragged for every length.
        Access::Aligned => (program.is_on_chip() && !is_whole).then(|| "ragged".into()),
        Access::Words if matches!(program, Program::TransposeCodes | Program::TensorScale | Program::Clear) => None,
        Access::Words => Some("access=words".into()),
        Access::Parts => Some("access=parts".into()),
    };
    let subgroups = match tile.reduction {
        Reduction::Workgroup => None,
        Reduction::Subgroup(lanes) => Some(format!("subgroups={lanes}")),
    };
    let visits = if tile.reads_again { Some("again".into()) } else { key.visits_once.then(|| "once".into()) };
    let words = [access, subgroups, visits, (*chunks > 0).then(|| format!("chunks={chunks}"))];
    let (threads, packs) = ([1, tile.threads_per_row], [tile.packs, PAIR as u32]);
    launch(info.stem, threads, packs, [tile.groups, tile.rows_at_once], words, *grid)
}
