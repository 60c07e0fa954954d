//! The one thing that is done to the text of a file: its loops over registers are unrolled, since WGSL has no registers that
//! are counted.
//!
//! `@unroll(K) { .. }` repeats its lines with `K` counted up; `@unroll(K of BATCH) { .. }` repeats them for as many numbers at
//! most as `BATCH` has, over which an `@unroll(K)` within counts, then for the next. A counter is replaced where it is an
//! identifier, or a part of one between underscores: `h_K`, `x_J_K`. A block begins and ends with lines of its own.

use std::ops::Range;
use std::str::Lines;

/// The text, unrolled. `counts`: the numbers of a counter.
pub(super) fn unroll(text: &str, counts: &dyn Fn(&str) -> Range<u32>) -> String {
    let mut unrolled = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(counter) = opened(line) else {
            append(&mut unrolled, line);
            continue;
        };
        let body = block(&mut lines);
        if let Some((counter, size)) = counter.split_once(" of ") {
            let (all, most) = (counts(counter), counts(size).len().max(1) as u32);
            for first in all.clone().step_by(most as usize) {
                let batch = first..all.end.min(first.saturating_add(most));
                unrolled += &unroll(&body, &|name| if name == counter { batch.clone() } else { counts(name) });
            }
        } else {
            let body = unroll(&body, counts);
            unrolled.extend(counts(counter).map(|n| substitute(&body, &[(counter, &n.to_string())])));
        }
    }
    unrolled
}

/// What a line says between the brackets of `@unroll`.
pub(super) fn opened(line: &str) -> Option<&str> {
    line.trim().strip_prefix("@unroll(")?.strip_suffix(") {")
}

/// The lines of a block, without the brace that ends it.
fn block(lines: &mut Lines<'_>) -> String {
    let (mut body, mut depth) = (String::new(), 1);
    for line in lines {
        let (code, _) = line.split_once("//").unwrap_or((line, ""));
        depth += code.matches('{').count();
        depth -= code.matches('}').count();
        if depth == 0 {
            break;
        }
        append(&mut body, line);
    }
    body
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
    fn lines_are_repeated() {
        let text = "@unroll(K) {\nlet x_K = load(K);\n}\nK\n";
        assert_eq!(unroll(text, &|_| 0..2), "let x_0 = load(0);\nlet x_1 = load(1);\nK\n");
        let nested = "@unroll(J) {\na_J\n    @unroll(K) {\nx_J_K\n    }\n}\n";
        let counts = |counter: &str| if counter == "J" { 0..1 } else { 0..2 };
        assert_eq!(unroll(nested, &counts), "a_0\nx_0_0\nx_0_1\n");
    }

    #[test]
    fn braces_within_belong_to_a_block() {
        let text = "@unroll(K) {\nif (a) { b }\nif (c) {\n// }\nd_K\n}\n}\ne\n";
        assert_eq!(unroll(text, &|_| 0..1), "if (a) { b }\nif (c) {\n// }\nd_0\n}\ne\n");
    }

    #[test]
    fn lines_are_repeated_in_batches() {
        let text = "@unroll(K of SIZE) {\n@unroll(K) {\na_K\n@unroll(J) {\nb_J_K\n}\n}\n---\n}\nK\n";
        let counts = |counter: &str| match counter {
            "J" => 0..1,
            "SIZE" => 0..2,
            _ => 0..3,
        };
        assert_eq!(unroll(text, &counts), "a_0\nb_0_0\na_1\nb_0_1\n---\na_2\nb_0_2\n---\nK\n");
    }

    #[test]
    fn names_are_replaced_where_they_stand_alone_or_are_a_part_of_an_identifier() {
        let names = [("TENSOR", "dy"), ("T", "bf16")];
        assert_eq!(substitute("load_TENSOR(TENSOR.x, pair_T) Ta aT 0xT", &names), "load_dy(dy.x, pair_bf16) Ta aT 0xT");
    }
}
