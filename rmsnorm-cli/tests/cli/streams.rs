//! Closed and full streams change no exit code, and the program does not panic.

use rmsnorm_core::{DType, Norm};

use crate::run::{inputs, metadata};
use crate::support::{Folder, file};

/// A folder with a file for which `run --allow-unknown` prints a note.
fn folder() -> Folder {
    let folder = Folder::new();
    let inputs = inputs(Norm::Rms, &[("x", DType::F32, &[2, 8]), ("wieght", DType::F32, &[8])]);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Rms)));
    folder
}

#[test]
fn stderr_that_takes_nothing_changes_no_exit_code() {
    let cases = [
        (r#""$0" run in -o out --allow-unknown"#, 0),
        (r#""$0" devices"#, 0),
        (r#""$0" --help"#, 0),
        (r#""$0" run absent -o out"#, 2),
        (r#""$0" run in -o out --allow-unknown --eps nan"#, 2),
        (r#""$0" run in"#, 2),
        (r#""$0" dance"#, 2),
        (r#""$0" conformance --case bad"#, 2),
    ];
    for redirection in ["2>&-", "2>/dev/full", ">&- 2>&-", "<&- >&- 2>&-"] {
        for (command, code) in cases {
            let folder = folder();
            let outcome = folder.shell(&format!("exec {command} {redirection}"));
            assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(code), ""), "{command} {redirection}");
            let is_written = command.contains("run") && code == 0;
            assert_eq!(folder.names().contains(&"out".to_owned()), is_written, "{command} {redirection}");
        }
    }
}

#[test]
fn stdout_that_is_full_is_one_line_and_one_that_is_closed_is_none() {
    let commands = [
        r#""$0" run in -o out --allow-unknown 2>/dev/null"#,
        r#""$0" run in -o out --allow-unknown --json 2>/dev/null"#,
        r#""$0" devices"#,
        r#""$0" devices --json"#,
        r#""$0" conformance --case bad --help"#,
        r#""$0" --help"#,
        r#""$0" --version"#,
        r#""$0" bench --backend cpu --threads 1 --shapes 2x8 --seconds 0 --json -"#,
    ];
    for command in commands {
        let folder = folder();
        let full = folder.shell(&format!("exec {command} >/dev/full"));
        assert_eq!(full.code, Some(2), "{command}: {full:?}");
        if !command.contains("2>") {
            assert!(full.stderr.starts_with("error: cannot write to stdout: "), "{command}: {full:?}");
            assert_eq!(full.stderr.lines().count(), 1, "{command}: {full:?}");
        }
        let closed = folder.shell(&format!("exec {command} >&-"));
        assert_eq!((closed.code, closed.stderr.as_str()), (Some(0), ""), "{command}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    // The reader ends before anything is written, and signals that through another pipe.
    let script =
        r#"mkfifo gone; { read -r _ <gone; "$0" devices; echo "$?" >code; } | { exec <&-; echo >gone; }; cat code"#;
    let outcome = folder().shell(script);
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("0\n", ""));
}
