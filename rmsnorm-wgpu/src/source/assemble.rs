//! The three things done to the text of a file: choice of lines, repetition of lines, replacement of names.
//!
//! `// if NAME`, `// else`, `// end` keep one side; `// unroll NAME`, `// end` repeat lines with the name counted up. A
//! name is replaced where it is an identifier, or a part of one between underscores: `load_TENSOR`, `x_J_K`.

/// A block whose `// end` is to come.
enum Block {
    If { is_kept: bool },
    Unroll { counter: String, lines: String },
}

/// Chooses and repeats lines. `times`: how often, by the name that is counted.
pub(super) fn expand(text: &str, holds: impl Fn(&str) -> bool, times: impl Fn(&str) -> u32) -> String {
    let mut blocks: Vec<Block> = Vec::new();
    let mut expanded = String::new();
    for line in text.lines() {
        let directive = line.trim();
        if let Some(name) = directive.strip_prefix("// if ") {
            blocks.push(Block::If { is_kept: holds(name) });
        } else if directive == "// else" {
            if let Some(Block::If { is_kept }) = blocks.last_mut() {
                *is_kept = !*is_kept;
            }
        } else if let Some(counter) = directive.strip_prefix("// unroll ") {
            blocks.push(Block::Unroll { counter: counter.into(), lines: String::new() });
        } else if directive == "// end" {
            if let Some(Block::Unroll { counter, lines }) = blocks.pop() {
                let turn = |n: u32| substitute(&lines, &[(&counter, &n.to_string())]);
                let repeated: String = (0..times(&counter)).map(turn).collect();
                append(&mut blocks, &mut expanded, &repeated);
            }
        } else {
            append(&mut blocks, &mut expanded, &format!("{line}\n"));
        }
    }
    expanded
}

/// Adds lines to the innermost block that repeats, or to the whole, unless a block leaves them out.
fn append(blocks: &mut [Block], expanded: &mut String, lines: &str) {
    if blocks.iter().any(|block| matches!(block, Block::If { is_kept: false })) {
        return;
    }
    let innermost = blocks.iter_mut().rev().find_map(|block| match block {
        Block::Unroll { lines, .. } => Some(lines),
        Block::If { .. } => None,
    });
    innermost.unwrap_or(expanded).push_str(lines);
}

/// Replaces names by what they stand for.
pub(super) fn substitute(text: &str, names: &[(&str, &str)]) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let (word, after) = rest.split_at(rest.find(|c| !is_part(c)).unwrap_or(rest.len()));
        let (between, next) = after.split_at(after.find(is_part).unwrap_or(after.len()));
        for (index, part) in word.split('_').enumerate() {
            let found = names.iter().find(|(name, _)| *name == part);
            replaced.push_str(if index > 0 { "_" } else { "" });
            replaced.push_str(found.map_or(part, |(_, value)| value));
        }
        replaced.push_str(between);
        rest = next;
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_chosen() {
        let text = "a\n// if YES\nb\n    // if NO\nc\n    // else\nd\n    // end\n// else\ne\n// end\nf\n";
        assert_eq!(expand(text, |name| name == "YES", |_| 1), "a\nb\nd\nf\n");
        assert_eq!(expand(text, |_| false, |_| 1), "a\ne\nf\n");
    }

    #[test]
    fn lines_are_repeated() {
        let text = "// unroll K\nlet x_K = load(K);\n// if NO\nx_K\n// end\n// end\nK\n";
        assert_eq!(expand(text, |_| false, |_| 2), "let x_0 = load(0);\nlet x_1 = load(1);\nK\n");
        assert_eq!(expand("// if NO\n// unroll K\nx_K\n// end\n// end\nK\n", |_| false, |_| 2), "K\n");
        let nested = "// unroll J\na_J\n// unroll K\nx_J_K\n// end\n// end\n";
        let times = |counter: &str| if counter == "J" { 1 } else { 2 };
        assert_eq!(expand(nested, |_| false, times), "a_0\nx_0_0\nx_0_1\n");
    }

    #[test]
    fn names_are_replaced_where_they_stand_alone_or_are_a_part_of_an_identifier() {
        let names = [("TENSOR", "dy"), ("T", "bf16")];
        assert_eq!(substitute("load_TENSOR(TENSOR.x, pair_T) Ta aT 0xT", &names), "load_dy(dy.x, pair_bf16) Ta aT 0xT");
    }
}
