//! Failed checks: exit code 1, the finding and the command that replays it, and no measurement of
//! wrong results.
//!
//! The program under test has the feature `planted` of the cpu backend: a variable makes its
//! results wrong.

use serde_json::Value;

use crate::support::{Folder, Outcome};

/// Runs the program with this bug in its cpu backend.
fn planted(folder: &Folder, bug: &str, args: &[&str]) -> Outcome {
    folder.rmsnorm_with(&[("RMSNORM_PLANTED", bug)], args)
}

#[test]
fn conformance_of_a_wrong_backend_exits_with_1_and_says_how_to_replay() {
    for (bug, output) in [("forward", "y"), ("backward", "dx")] {
        let folder = Folder::new();
        let outcome =
            planted(&folder, bug, &["conformance", "--profile", "smoke", "--most-cases", "150", "--json", "report"]);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(1), ""), "{}", outcome.stdout);
        let finding = format!("FAILED bounds of {output}: ");
        assert!(outcome.stdout.contains(&finding), "{bug}: {}", outcome.stdout);
        let last = outcome.stdout.lines().last().unwrap();
        assert!(last.contains(" failed, ") && !last.contains(" 0 failed"), "{last}");

        // The report is written too, with the same outcome.
        let report = std::fs::read_to_string(folder.path("report")).unwrap();
        let summary: Value = serde_json::from_str(report.lines().last().unwrap()).unwrap();
        assert_eq!(summary["success"], false);
        assert!(summary["counts"]["failed"].as_u64().unwrap() > 0);

        let command = outcome.stdout.lines().find_map(|line| line.trim().strip_prefix("rmsnorm ")).unwrap();
        let replay: Vec<&str> = command.split(' ').collect();
        assert_eq!(planted(&folder, bug, &replay).code, Some(1), "{command}");
        assert_eq!(folder.rmsnorm(&replay).code, Some(0), "{command} without the bug");
    }
}

/// A good report, its summary, a changed one, one of a wrong backend, and one that is not there.
#[test]
fn report_is_checked() {
    let folder = Folder::new();
    let made = folder.rmsnorm(&["conformance", "--profile", "smoke", "--json", "report"]);
    assert_eq!(made.code, Some(0), "{}", made.stdout);
    let report = std::fs::read_to_string(folder.path("report")).unwrap();
    let last = report.lines().last().unwrap();
    std::fs::write(folder.path("summary"), last).unwrap();
    let outcome = folder.rmsnorm(&["report", "check", "report", "summary"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    for name in ["report: cpu | ", "summary: cpu | "] {
        let line = outcome.stdout.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(line.contains(" | smoke ") && line.ends_with(" | passed"), "{line}");
    }

    let changed = last.replacen("\"profile\":\"smoke\"", "\"profile\":\"core\"", 1);
    assert_ne!(changed, last);
    std::fs::write(folder.path("changed"), changed).unwrap();
    let outcome = folder.rmsnorm(&["report", "check", "changed", "summary"]);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stdout.contains("changed: refused: ") && outcome.stdout.contains("summary: cpu"), "{outcome:?}");

    planted(&folder, "forward", &["conformance", "--profile", "smoke", "--json", "wrong"]);
    let outcome = folder.rmsnorm(&["report", "check", "wrong"]);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stdout.contains(" | failed: "), "{outcome:?}");

    let outcome = folder.rmsnorm(&["report", "check", "nothing"]);
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert!(outcome.stderr.contains("nothing cannot be read"), "{outcome:?}");
}

#[test]
fn conformance_that_fails_fast_has_one_failure() {
    let folder = Folder::new();
    let outcome = planted(&folder, "forward", &["conformance", "--profile", "smoke", "--fail-fast"]);
    assert_eq!(outcome.code, Some(1));
    assert_eq!(outcome.stdout.matches("FAILED").count(), 1, "{}", outcome.stdout);
    assert!(outcome.stdout.lines().last().unwrap().contains(" 1 failed, "));
}

/// No case failed, but none passed either.
#[test]
fn conformance_that_proves_nothing_exits_with_1() {
    let id = "bounds:backward:rms_norm:f32,f32,f32:3x5:randn:eps1e-5:sW:offset0:at_store:atomics:p0o0:seed1";
    let outcome = Folder::new().rmsnorm(&["conformance", "--case", id]);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stdout.contains("nothing proven: no case passed"), "{}", outcome.stdout);
    assert_eq!(outcome.stdout.lines().last(), Some("0 passed, 0 failed, 0 skipped"));
}

#[test]
fn conformance_first_proves_that_the_suite_can_fail() {
    let outcome = Folder::new().rmsnorm(&["conformance", "--profile", "smoke", "--most-cases", "1"]);
    assert_eq!(outcome.code, Some(0));
    assert!(
        outcome.stdout.contains("bugs planted in ") && outcome.stdout.contains(", all caught"),
        "{}",
        outcome.stdout
    );
}

#[test]
fn bare_command_stops_at_a_wrong_backend_and_measures_nothing() {
    for bug in ["forward", "backward"] {
        let outcome = planted(&Folder::new(), bug, &[]);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(1), ""), "{}", outcome.stdout);
        assert!(outcome.stdout.contains("\ncpu    FAILED: failed: ") && outcome.stdout.contains("\nFAILED bounds of "));
        for word in ["proved", "SPEEDS", "GB/s"] {
            assert!(!outcome.stdout.contains(word), "{word} is in {}", outcome.stdout);
        }
    }
}

/// The rows before the wrong result are kept, and the report says why it ends.
#[test]
fn bench_stops_at_a_wrong_result_and_keeps_what_it_measured() {
    let args =
        ["bench", "--shapes", "16x40", "--seconds", "0", "--dtype", "f32", "--norm", "rms_norm", "--json", "report"];
    for (bug, rows) in [("forward", 0), ("backward", 2)] {
        let folder = Folder::new();
        let outcome = planted(&folder, bug, &args);
        assert_eq!(outcome.code, Some(1), "{outcome:?}");
        let finding = format!("rms_norm {bug} f32 16x40: ");
        assert!(
            outcome.stderr.contains(&finding) && outcome.stderr.contains("outside their bounds"),
            "{}",
            outcome.stderr
        );
        if rows > 0 {
            let report = std::fs::read_to_string(folder.path("report")).unwrap();
            let report: Value = serde_json::from_str(&report).unwrap();
            let report = &report["reports"][0];
            assert_eq!(report["rows"].as_array().unwrap().len(), rows);
            assert!(report["failed"].as_str().unwrap().starts_with(&finding), "{}", report["failed"]);
        } else {
            assert!(folder.names().is_empty(), "nothing was measured: {:?}", folder.names());
        }
    }
    assert_eq!(Folder::new().rmsnorm(&args).code, Some(0), "without a bug");
}

#[test]
fn bench_measures_nothing_beside_a_copy_that_leaves_something_out() {
    let folder = Folder::new();
    let args = ["bench", "--shapes", "16x40", "--seconds", "0", "--dtype", "bf16", "--json", "report"];
    let outcome = planted(&folder, "copy", &args);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    // The last f32, which is two bf16, in each of the two ways to copy.
    assert!(outcome.stderr.contains("copy bf16 16x40: 4 elements were not copied"), "{}", outcome.stderr);
    assert!(folder.names().is_empty());
}

/// A group of threads on the cpu passes all cases, a wrong backend fails, and profiles without
/// ranks are refused.
#[test]
fn conformance_of_ranks_proves_a_group() {
    let folder = Folder::new();
    let args = ["conformance", "--profile", "smoke", "--ranks", "3"];
    let right = folder.rmsnorm(&args);
    assert_eq!((right.code, right.stderr.as_str()), (Some(0), ""), "{}", right.stdout);
    for what in ["sums over ranks", "rows divided among ranks", "columns divided among ranks"] {
        let line = right.stdout.lines().find_map(|line| line.strip_prefix(&format!("{what}: 3 ranks: ")));
        assert!(line.is_some_and(|line| line.contains(" passed, 0 failed, ")), "{}", right.stdout);
    }

    let wrong = planted(&folder, "forward", &args);
    assert_eq!((wrong.code, wrong.stderr.as_str()), (Some(1), ""), "{}", wrong.stdout);
    assert!(wrong.stdout.starts_with("sums over ranks: FAILED 3 ranks, bounds:forward_parts:"), "{}", wrong.stdout);

    let profile = folder.rmsnorm(&["conformance", "--profile", "stress", "--ranks", "3"]);
    assert_eq!(profile.code, Some(2));
    assert!(profile.stderr.contains("expected one of smoke, core, got \"stress\""), "{}", profile.stderr);
}
