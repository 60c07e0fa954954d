//! Extreme numbers of threads.

use rmsnorm_core::{DType, Norm};

use crate::bad_input::refuse_in;
use crate::run::{inputs, metadata};
use crate::support::{Folder, file};

/// Large enough to be split over threads.
fn folder() -> Folder {
    let folder = Folder::new();
    let (x, w): (&[usize], &[usize]) = (&[700, 1024], &[1024]);
    let inputs = inputs(
        Norm::Layer,
        &[("x", DType::F32, x), ("weight", DType::F32, w), ("bias", DType::F32, w), ("dy", DType::F32, x)],
    );
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Layer)));
    folder
}

#[test]
fn threads_change_no_bit_of_a_result() {
    let folder = folder();
    let with = |threads| {
        let outcome = folder.rmsnorm(&["run", "in", "-o", "out", "--threads", threads]);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
        std::fs::read(folder.path("out")).unwrap()
    };
    let alone = with("1");
    assert!(with("2") == alone && with("3") == alone);
    folder.write("out", b"older");
    let outcome = folder.rmsnorm(&["run", "in", "-o", "out", "--threads", "1000"]);
    match outcome.code {
        Some(0) => assert!(std::fs::read(folder.path("out")).unwrap() == alone),
        // The system may refuse so many threads.
        code => {
            assert_eq!((code, outcome.stderr.lines().count()), (Some(2), 1), "{outcome:?}");
            assert_eq!(std::fs::read(folder.path("out")).unwrap(), b"older");
        }
    }
    assert_eq!(folder.names(), ["in", "out"]);
}

/// The suite's digest of all outputs, from the report.
#[test]
fn conformance_shows_equal_bits_for_all_threads_and_instruction_sets() {
    let digest = |flags: &[&str]| {
        let outcome = Folder::new().rmsnorm(&[&["conformance"], flags].concat());
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        outcome.stdout.lines().find_map(|line| line.strip_prefix("bits        sha256 ").map(str::to_owned)).unwrap()
    };
    let list = Folder::new().rmsnorm(&["conformance", "--profile", "smoke", "--most-cases", "60", "--list"]).stdout;
    // Of the product of two NaN in a gate, the one that remains depends on the instruction set.
    let cases = list.lines().filter(|id| !(id.contains("gate") && id.contains(":nonfinite:")));
    let cases: Vec<&str> = cases.flat_map(|id| ["--case", id]).collect();
    assert!(cases.len() > 100);
    let of = |flags: &[&str]| digest(&[&cases, flags].concat());
    let alone = of(&["--threads", "1"]);
    assert_eq!(alone.len(), 64);
    assert_eq!(of(&["--threads", "3"]), alone);
    assert_eq!(of(&["--isa", "portable"]), alone);
    assert_ne!(
        digest(&[
            "--case",
            "bounds:forward:rms_norm:f16,f32,f16:3x17:randn:eps1e-6:ws:offset1:at_store:partials:p1o3:seed9"
        ]),
        alone
    );
}

#[test]
fn no_threads_are_refused() {
    let folder = folder();
    refuse_in(&folder, &["run", "in", "-o", "out", "--threads", "0"], &["threads must be at least 1", "got 0"]);
}

#[cfg(target_os = "linux")]
#[test]
fn threads_that_the_system_refuses_are_one_line() {
    let folder = folder();
    // The stacks of a thousand threads take 2 GiB. These limits differ by up to 2 MiB, the stack of
    // one.
    for kib in (1_000_000..1_002_048).step_by(128) {
        let run = r#"RAYON_NUM_THREADS=1 exec "$0" run in -o out --threads 1000"#;
        let outcome = folder.shell(&format!("ulimit -v {kib}; {run}"));
        assert_eq!((outcome.code, outcome.stderr.lines().count()), (Some(2), 1), "{kib} KiB: {outcome:?}");
        assert_eq!(folder.names(), ["in"]);
    }
}
