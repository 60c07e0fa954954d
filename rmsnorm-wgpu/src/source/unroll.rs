//! Unrolls the loops over registers in a file, since WGSL cannot index registers.
//!
//! `@unroll(K) { .. }` repeats its lines for each value of `K`; `K1` is the value after it. `@unroll(K of BATCH) { .. }`
//! divides the values of `K` into batches of at most `BATCH` and repeats its lines for each batch;
//! `@unroll(K)` inside counts through the batch. The lines that begin and end a block contain
//! nothing else.

use std::ops::Range;
use std::str::Lines;

use super::substitute::substitute;

/// The unrolled text. `counts`: the values of a counter.
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
            let next = format!("{counter}1");
            unrolled.extend(
                counts(counter).map(|n| substitute(&body, &[(counter, &n.to_string()), (&next, &(n + 1).to_string())])),
            );
        }
    }
    unrolled
}

/// The text between the parentheses of `@unroll`.
pub(super) fn opened(line: &str) -> Option<&str> {
    line.trim().strip_prefix("@unroll(")?.strip_suffix(") {")
}

/// The lines of a block, without the closing brace.
fn block(lines: &mut Lines<'_>) -> String {
    let (mut body, mut depth) = (String::new(), 1usize);
    for line in lines {
        let (code, _) = line.split_once("//").unwrap_or((line, ""));
        depth = (depth + code.matches('{').count()).saturating_sub(code.matches('}').count());
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
}
