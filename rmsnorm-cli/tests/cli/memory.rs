//! `rmsnorm run` with too little memory: whichever allocation fails first, the result is one line
//! and exit code 2.

use std::fs::File;
use std::io::Write;

use crate::support::{Folder, Outcome, raw_file};

const MIB: u64 = 1 << 20;

/// MiB that suffice for every run here. The limit ends the test of a program that always fails.
const PLENTY: u64 = 2048;

/// Writes `in`: F16 tensors of these shapes, as holes of a sparse file, and metadata.
fn sparse(folder: &Folder, tensors: &[(&str, &[u64])], metadata: &str) {
    let mut end = 0;
    let mut entry = |&(name, shape): &(&str, &[u64])| {
        let start = end;
        end += 2 * shape.iter().product::<u64>();
        let shape = format!("{shape:?}").replace(' ', "");
        format!(r#","{name}":{{"dtype":"F16","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    };
    let entries: String = tensors.iter().map(&mut entry).collect();
    let header = raw_file(&format!(r#"{{"__metadata__":{metadata}{entries}}}"#), &[]);
    let mut file = File::create(folder.path("in")).unwrap();
    file.write_all(&header).unwrap();
    file.set_len(header.len() as u64 + end).unwrap();
}

/// Runs with this much address space and one thread.
fn run(folder: &Folder, mib: u64) -> Outcome {
    let limit = mib * MIB / 1024;
    let run = r#"RAYON_NUM_THREADS=1 exec "$0" run in -o out --threads 1 --op layer_norm --eps 1 --allow-unknown"#;
    folder.shell(&format!("ulimit -v {limit}; {run}"))
}

/// The least address space for a small file: the program, and its reserve for small allocations. It
/// is exact to 1 MiB, so that the first allocations of a larger file fail.
fn least() -> u64 {
    let folder = Folder::new();
    sparse(&folder, &[("x", &[2, 8])], "{}");
    let suffices = |mib: &u64| run(&folder, *mib).code == Some(0);
    let coarse = (16..PLENTY).step_by(8).find(suffices).unwrap();
    (coarse - 7..=coarse).find(suffices).unwrap()
}

/// Runs with more and more address space until a run succeeds. Each run before it must end with one
/// line; together the lines must contain all of these words, each of which names an allocation.
fn climb(folder: &Folder, step: usize, words: &[&str]) {
    let mut lines = String::new();
    for mib in (least()..PLENTY).step_by(step) {
        let outcome = run(folder, mib);
        if outcome.code == Some(0) {
            for word in words {
                assert!(lines.contains(word), "{word:?} is not in {lines}");
            }
            return;
        }
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{mib} MiB: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{mib} MiB: {outcome:?}");
        assert!(outcome.stderr.ends_with("bytes, more than this machine has free\n"), "{mib} MiB: {outcome:?}");
        assert_eq!(folder.names(), ["in"], "{mib} MiB");
        lines += &outcome.stderr;
    }
    panic!("no run succeeded: {lines}");
}

#[test]
fn every_allocation_of_a_run_may_fail() {
    let folder = Folder::new();
    let x: &[u64] = &[2048, 1024];
    // 4 MiB each.
    sparse(&folder, &[("x", x), ("weight", &[1024]), ("residual", x), ("dy", x), ("dresidual_out", x)], "{}");
    climb(
        &folder,
        1,
        &["error: in needs ", "in: x needs 4194304 bytes", "residual", "y needs", "dresidual_out needs", "dx needs"],
    );
}

#[test]
fn outputs_may_be_larger_than_the_file() {
    let folder = Folder::new();
    sparse(&folder, &[("x", &[1 << 20, 1])], "{}");
    climb(&folder, 1, &["error: in needs ", "mean needs 4194304 bytes", "rstd needs 4194304 bytes"]);
}

#[test]
fn a_header_may_need_more_than_the_file_is_long() {
    let folder = Folder::new();
    let names: Vec<String> = (0..50_000).map(|i| format!(r#""{i}":"""#)).collect();
    sparse(&folder, &[("x", &[2, 8])], &format!("{{{}}}", names.join(",")));
    climb(&folder, 4, &["in: the header needs "]);

    let folder = Folder::new();
    sparse(&folder, &[("x", &[1; 300_000])], "{}");
    climb(&folder, 4, &["in: the header needs "]);
}

#[test]
fn a_file_larger_than_memory_is_one_line() {
    let folder = Folder::new();
    sparse(&folder, &[("x", &[3 << 10, 1 << 20])], "{}");
    let outcome = run(&folder, 4 << 10);
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert!(outcome.stderr.starts_with("error: in needs 6442451"), "{outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
}
