//! The things done to the text of a file: choice of lines, repetition of lines, replacement of names.
//!
//! `// if NAME`, `// else`, `// end` keep one side; `// unroll NAME`, `// end` repeat lines with the name counted up;
//! `// batches NAME SIZE`, `// end` repeat lines in which the name is counted over as many numbers at most as `SIZE` has, then
//! over the next. A name is replaced where it is an identifier, or a part of one between underscores: `load_TENSOR`, `x_J_K`.

use std::ops::Range;
use std::str::Lines;

/// Chooses and repeats lines. `holds`: the answer to a question; `counts`: the numbers of a name that is counted.
pub(super) fn expand(text: &str, holds: &dyn Fn(&str) -> bool, counts: &dyn Fn(&str) -> Range<u32>) -> String {
    let mut expanded = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = directive(line, "if") {
            let (then, otherwise) = block(&mut lines);
            expanded += &expand(if holds(name) { &then } else { &otherwise }, holds, counts);
        } else if let Some(counter) = directive(line, "unroll") {
            let body = expand(&block(&mut lines).0, holds, counts);
            expanded.extend(counts(counter).map(|n| substitute(&body, &[(counter, &n.to_string())])));
        } else if let Some(words) = directive(line, "batches") {
            let (body, _) = block(&mut lines);
            let (counter, size) = words.split_once(' ').unwrap_or((words, words));
            let (all, most) = (counts(counter), counts(size).len().max(1) as u32);
            for first in all.clone().step_by(most as usize) {
                let batch = first..all.end.min(first.saturating_add(most));
                let in_batch = |name: &str| if name == counter { batch.clone() } else { counts(name) };
                expanded += &expand(&body, holds, &in_batch);
            }
        } else {
            append(&mut expanded, line);
        }
    }
    expanded
}

/// What follows a directive's verb.
fn directive<'a>(line: &'a str, verb: &str) -> Option<&'a str> {
    line.trim().strip_prefix("// ")?.strip_prefix(verb)?.strip_prefix(' ')
}

/// The lines of a block up to its end, and those behind its `// else`.
fn block(lines: &mut Lines<'_>) -> (String, String) {
    let (mut before, mut after) = (String::new(), String::new());
    let (mut depth, mut is_else) = (0, false);
    for line in lines {
        match line.trim() {
            "// end" if depth == 0 => break,
            "// else" if depth == 0 => {
                is_else = true;
                continue;
            }
            "// end" => depth -= 1,
            _ if ["if", "unroll", "batches"].iter().any(|verb| directive(line, verb).is_some()) => depth += 1,
            _ => {}
        }
        append(if is_else { &mut after } else { &mut before }, line);
    }
    (before, after)
}

fn append(text: &mut String, line: &str) {
    text.push_str(line);
    text.push('\n');
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
        assert_eq!(expand(text, &|name| name == "YES", &|_| 0..1), "a\nb\nd\nf\n");
        assert_eq!(expand(text, &|_| false, &|_| 0..1), "a\ne\nf\n");
    }

    #[test]
    fn lines_are_repeated() {
        let text = "// unroll K\nlet x_K = load(K);\n// if NO\nx_K\n// end\n// end\nK\n";
        assert_eq!(expand(text, &|_| false, &|_| 0..2), "let x_0 = load(0);\nlet x_1 = load(1);\nK\n");
        assert_eq!(expand("// if NO\n// unroll K\nx_K\n// end\n// end\nK\n", &|_| false, &|_| 0..2), "K\n");
        let nested = "// unroll J\na_J\n// unroll K\nx_J_K\n// end\n// end\n";
        let counts = |counter: &str| if counter == "J" { 0..1 } else { 0..2 };
        assert_eq!(expand(nested, &|_| false, &counts), "a_0\nx_0_0\nx_0_1\n");
    }

    #[test]
    fn lines_are_repeated_in_batches() {
        let text = "// batches K SIZE\n// unroll K\na_K\n// if YES\n// unroll J\nb_J_K\n// end\n// end\n// end\n---\n// end\nK\n";
        let counts = |counter: &str| match counter {
            "J" => 0..1,
            "SIZE" => 0..2,
            _ => 0..3,
        };
        let expected = "a_0\nb_0_0\na_1\nb_0_1\n---\na_2\nb_0_2\n---\nK\n";
        assert_eq!(expand(text, &|name| name == "YES", &counts), expected);
        assert_eq!(expand("// batches K\na\n// end\n", &|_| false, &counts), "a\n");
    }

    #[test]
    fn names_are_replaced_where_they_stand_alone_or_are_a_part_of_an_identifier() {
        let names = [("TENSOR", "dy"), ("T", "bf16")];
        assert_eq!(substitute("load_TENSOR(TENSOR.x, pair_T) Ta aT 0xT", &names), "load_dy(dy.x, pair_bf16) Ta aT 0xT");
    }
}
