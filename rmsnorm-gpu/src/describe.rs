//! Plans as text, for tables and reports. Every backend uses this notation.
//!
//! A step is a program's name and its settings, such as
//! `forward threads=16 packs=2x8 rows=16x2 grid=32768`:
//!
//! | word | says |
//! |---|---|
//! | `threads=2x128` | blocks of a row, if several, and threads of a block |
//! | `packs=3x8` | packs of a thread, and columns of a pack; `ragged` if some threads own columns past the end of the row |
//! | `rows=16x2` | rows of a block, and rows that a thread works on at once; in the second stage: threads that share the partial rows |
//! | `held` | CUDA: forward keeps rows in registers instead of reading them again |
//! | `access=4`, `access=words` | bytes or units of an access, unless it is the widest |
//! | `ring=3`, `shared=48KiB` | CUDA: steps buffered in shared memory, `overlapped` if passes overlap; dynamic shared memory of a block |
//! | `subgroups=32`, `chunks=528` | wgpu: lanes of the subgroups that exchange sums; number of chunks of rows |
//! | `grid=132` | blocks in x and, if more than one, in y |
//! | `zero=4096` | 32-bit words of the workspace that are zeroed |
//!
//! Steps are joined with `; `. Equal steps are counted: `2 of`.

/// A launched kernel. `threads`: blocks of a row, threads of a block. `packs`: packs of a thread,
/// columns of a pack. `rows`: rows of a block, rows that a thread works on at once. `words`: other
/// settings.
pub fn launch(
    name: &str,
    threads: [u32; 2],
    packs: [u32; 2],
    rows: [u32; 2],
    words: impl IntoIterator<Item = Option<String>>,
    grid: [u32; 2],
) -> String {
    let [blocks, threads] = threads;
    let blocks = if blocks > 1 { format!("{blocks}x") } else { String::new() };
    let [packs, columns] = packs;
    let rows = match rows {
        [1, 1] => None,
        [rows, 1] => Some(format!("rows={rows}")),
        [rows, at_once] => Some(format!("rows={rows}x{at_once}")),
    };
    let words: String = [rows].into_iter().chain(words).flatten().map(|word| format!(" {word}")).collect();
    format!("{name} threads={blocks}{threads} packs={packs}x{columns}{words} {}", blocks_of(grid))
}

/// The second stage of gradients. `groups`: threads that share the partial rows of a column.
pub fn second_stage(name: &str, groups: u32, grid: [u32; 2]) -> String {
    format!("{name} rows={groups} {}", blocks_of(grid))
}

fn blocks_of([x, y]: [u32; 2]) -> String {
    if y > 1 { format!("grid={x}x{y}") } else { format!("grid={x}") }
}

/// The steps of a plan in one line.
pub fn steps(steps: impl IntoIterator<Item = String>) -> String {
    let mut lines: Vec<(String, usize)> = Vec::new();
    for step in steps {
        match lines.iter_mut().find(|(known, _)| *known == step) {
            Some((_, count)) => *count += 1,
            None => lines.push((step, 1)),
        }
    }
    let counted = lines.into_iter().map(|(line, count)| if count > 1 { format!("{count} of {line}") } else { line });
    counted.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_says_what_is_not_one() {
        let short = |rows| launch("forward", [1, 256], [2, 8], rows, [], [132, 1]);
        assert_eq!(short([1, 1]), "forward threads=256 packs=2x8 grid=132");
        assert_eq!(short([3, 1]), "forward threads=256 packs=2x8 rows=3 grid=132");
        let words = [Some("ragged".into()), None, Some("ring=3".into())];
        let long = launch("backward", [4, 256], [2, 4], [3, 5], words, [132, 2]);
        assert_eq!(second_stage("reduce_partials", 128, [4, 1]), "reduce_partials rows=128 grid=4");
        assert_eq!(long, "backward threads=4x256 packs=2x4 rows=3x5 ragged ring=3 grid=132x2");
    }

    #[test]
    fn equal_steps_are_counted() {
        assert_eq!(steps(["a", "b", "a", "c"].map(String::from)), "2 of a; b; c");
        assert_eq!(steps([]), "");
    }
}
