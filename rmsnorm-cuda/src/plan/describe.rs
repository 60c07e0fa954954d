//! Formats plans with [`rmsnorm_gpu::describe`].

use std::fmt;

use rmsnorm_gpu::describe::{launch, second_stage, steps};
use rmsnorm_spec::Piece;

use super::{KernelKey, Plan, Program, Step};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&steps(self.steps.iter().flatten().map(|each| step(each, self.groups))))
    }
}

fn step(step: &Step, groups: u32) -> String {
    let (KernelKey { program, tile, call, column_groups: _, ranks: _ }, grid, cluster, shared_bytes) = match *step {
        Step::Clear { bytes, .. } => return format!("clear={bytes}"),
        Step::Launch { key, grid, cluster, shared_bytes, .. } => (key, grid, cluster, shared_bytes),
    };
    let info = program.info();
    if info.is_reduction {
        return second_stage(info.stem, tile.groups, [grid, groups]);
    }
    let words = [
        tile.is_ragged.then(|| "ragged".into()),
        tile.reads.keeps_row.then(|| "held".into()),
        call.pieces(info.direction).has(Piece::Parts).then(|| Piece::Parts.name().into()),
        (tile.access_bytes < 16).then(|| format!("access={}", tile.access_bytes)),
        (tile.stages > 0).then(|| format!("ring={}", tile.stages)),
        tile.is_overlapped.then(|| "overlapped".into()),
        tile.is_cooperative.then(|| "cooperative".into()),
        (program == Program::BackwardSplit).then(|| format!("clusters={cluster}")),
        (shared_bytes > 0).then(|| format!("shared={}KiB", shared_bytes.div_ceil(1024))),
    ];
    let (threads, packs) = ([tile.cluster, tile.threads_per_row], [tile.packs, tile.pack]);
    launch(info.stem, threads, packs, [tile.groups, tile.unroll], words, [grid, groups])
}
