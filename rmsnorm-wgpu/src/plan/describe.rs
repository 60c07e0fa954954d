//! Plans in a line each, for tables and records. A line reads
//!
//! program, threads on a row `x` packs of a thread, `~` if they own more columns than there are, `s` if subgroups
//! exchange; `in` rows side by side, and `by` rows at once, if not one; chunks; `on` workgroups. `Reduce` says how many
//! threads share the partial rows of a column, `Zero` how many words. Equal dispatches of several ranges of rows are
//! counted once.

use super::{Dispatch, Flavour, KernelKey, Plan, Program, Step, Tile};

impl Plan {
    /// The line of a plan for rows of `cols` columns.
    pub(crate) fn describe(&self, cols: usize) -> String {
        let mut lines: Vec<(String, usize)> = Vec::new();
        for step in &self.steps {
            let line = match step {
                Step::Zero { len, .. } => format!("Zero {len}"),
                Step::Dispatch(dispatch) => describe_dispatch(dispatch, cols),
            };
            match lines.iter_mut().find(|(known, _)| *known == line) {
                Some((_, count)) => *count += 1,
                None => lines.push((line, 1)),
            }
        }
        let counted =
            lines.into_iter().map(|(line, count)| if count > 1 { format!("{count} of {line}") } else { line });
        counted.collect::<Vec<_>>().join("; ")
    }
}

fn describe_dispatch(dispatch: &Dispatch, cols: usize) -> String {
    let Dispatch { key: KernelKey { program, tile, .. }, chunks, grid: [x, y], .. } = dispatch;
    let Tile { threads_per_row, groups, packs, rows_at_once, flavour } = *tile;
    let grid = if *y == 1 { x.to_string() } else { format!("{x}x{y}") };
    let name = match program {
        Program::Forward => "Forward",
        Program::ForwardStreaming => "Streaming",
        Program::Backward => "Backward",
        Program::BackwardRowSums => "RowSums",
        Program::BackwardColumns => "Columns",
        Program::ReducePartials => return format!("Reduce {groups} on {grid}"),
        Program::Copy => "Copy",
    };
    let ragged = if program.is_on_chip() && tile.columns() != cols { "~" } else { "" };
    let subgroup = if flavour == Flavour::Workgroup { "" } else { "s" };
    let at_once = if rows_at_once > 1 { format!(" by {rows_at_once}") } else { String::new() };
    let rows = if groups > 1 { format!(" in {groups}") } else { String::new() };
    let chunks = if *chunks > 0 { format!(", {chunks} chunks") } else { String::new() };
    format!("{name} {threads_per_row}x{packs}{ragged}{subgroup}{rows}{at_once}{chunks}, on {grid}")
}
