//! Outputs are written to temporary files and renamed: they appear complete or not at all, and no
//! other file stays.

use std::fs;

use rmsnorm_core::{DType, Norm};

use crate::run::{inputs, metadata};
use crate::support::{Folder, PROGRAM, file};

/// A folder with `in`: this many rows of 1024 elements.
fn folder(rows: usize) -> Folder {
    let folder = Folder::new();
    let inputs = inputs(Norm::Rms, &[("x", DType::F16, &[rows, 1024])]);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Rms)));
    folder
}

fn run(folder: &Folder) {
    let outcome = folder.rmsnorm(&["run", "in", "-o", "out"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
}

#[test]
fn what_a_killed_run_left_is_removed_and_nothing_else() {
    let folder = folder(2);
    let stale = [".rmsnorm-abcdef.tmp", ".rmsnorm-A1b2C3.tmp"];
    let others = [
        ".rmsnorm-abcde.tmp",
        ".rmsnorm-abcdefg.tmp",
        ".rmsnorm-abc_ef.tmp",
        ".rmsnorm-abcdef",
        ".rmsnorm-abcdef.tmp.tmp",
        ".rmsnorm-notes.txt",
        "rmsnorm-abcdef.tmp",
        "x.rmsnorm-abcdef.tmp",
    ];
    for name in stale.iter().chain(&others) {
        folder.write(name, b"left");
    }
    // A folder is never a temporary file.
    fs::create_dir(folder.path(".rmsnorm-folder.tmp")).unwrap();
    run(&folder);
    let mut expected = [&others[..], &[".rmsnorm-folder.tmp", "in", "out"]].concat();
    expected.sort_unstable();
    assert_eq!(folder.names(), expected);
    assert!(others.iter().all(|name| fs::read(folder.path(name)).unwrap() == b"left"));
}

#[cfg(unix)]
#[test]
fn links_with_the_name_of_a_temporary_file_stay() {
    let folder = folder(2);
    folder.write("mine", b"mine");
    std::os::unix::fs::symlink("mine", folder.path(".rmsnorm-linked.tmp")).unwrap();
    run(&folder);
    assert_eq!(folder.names(), [".rmsnorm-linked.tmp", "in", "mine", "out"]);
}

#[test]
fn what_another_program_is_writing_stays_until_it_is_gone() {
    let folder = folder(2);
    folder.write(".rmsnorm-abcdef.tmp", b"half");
    let writer = fs::File::open(folder.path(".rmsnorm-abcdef.tmp")).unwrap();
    writer.lock().unwrap();
    run(&folder);
    assert_eq!(folder.names(), [".rmsnorm-abcdef.tmp", "in", "out"]);
    drop(writer);
    run(&folder);
    assert_eq!(folder.names(), ["in", "out"]);
}

#[cfg(unix)]
#[test]
fn a_run_killed_while_it_writes_leaves_what_the_next_one_removes() {
    let folder = folder(8 << 10);
    let temporary = |folder: &Folder| folder.names().into_iter().find(|name| name.starts_with(".rmsnorm-"));
    // A run that ends before it is killed leaves no temporary file.
    let killed = (0..20).any(|_| {
        let mut child = folder.command(PROGRAM).args(["run", "in", "-o", "out"]).spawn().unwrap();
        while temporary(&folder).is_none() && child.try_wait().unwrap().is_none() {}
        child.kill().unwrap();
        child.wait().unwrap();
        temporary(&folder).is_some()
    });
    assert!(killed, "no run was killed in time");
    run(&folder);
    assert_eq!(folder.names(), ["in", "out"]);
}

#[test]
fn an_older_output_keeps_its_content_under_its_other_names() {
    let folder = folder(2);
    folder.write("out", b"older");
    fs::hard_link(folder.path("out"), folder.path("other")).unwrap();
    run(&folder);
    assert_eq!(fs::read(folder.path("other")).unwrap(), b"older");
    assert_ne!(fs::read(folder.path("out")).unwrap(), b"older");
}

#[cfg(target_os = "linux")]
#[test]
fn a_write_that_fails_leaves_the_older_output_and_nothing_else() {
    let folder = folder(64);
    folder.write("out", b"older");
    let commands = [
        r#""$0" run in -o out"#,
        r#""$0" conformance --profile smoke --most-cases 60 --json out"#,
        r#""$0" bench --backend cpu --threads 1 --shapes 1x64,2x64,4x64 --seconds 0 --json out"#,
        r#""$0" bench --backend cpu --threads 1 --shapes 1x64,2x64,4x64 --seconds 0 --plot out"#,
    ];
    for command in commands {
        // In blocks of 512 bytes. Without the trap the signal would kill the program before it
        // cleans up.
        let outcome = folder.shell(&format!(r#"trap "" XFSZ; ulimit -f 8; exec {command}"#));
        assert_eq!(outcome.code, Some(2), "{command}: {outcome:?}");
        assert!(outcome.stderr.starts_with("error: cannot write out: "), "{command}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{command}: {outcome:?}");
        assert_eq!(fs::read(folder.path("out")).unwrap(), b"older", "{command}");
        assert_eq!(folder.names(), ["in", "out"], "{command}");
    }
}

#[cfg(unix)]
#[test]
fn no_other_folder_is_needed_and_the_permissions_are_those_of_a_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder(2);
    for (umask, mode) in [("022", 0o644), ("077", 0o600), ("000", 0o666)] {
        let outcome = folder.shell(&format!(r#"umask {umask}; TMPDIR=/nonexistent exec "$0" run in -o out"#));
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        assert_eq!(fs::metadata(folder.path("out")).unwrap().permissions().mode() & 0o777, mode, "{umask}");
    }
}
