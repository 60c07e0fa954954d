//! Numbers of threads at and beyond the edge.

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
        // A system may have fewer threads to give.
        code => {
            assert_eq!((code, outcome.stderr.lines().count()), (Some(2), 1), "{outcome:?}");
            assert_eq!(std::fs::read(folder.path("out")).unwrap(), b"older");
        }
    }
    assert_eq!(folder.names(), ["in", "out"]);
}

#[test]
fn no_threads_are_refused() {
    let folder = folder();
    refuse_in(&folder, &["run", "in", "-o", "out", "--threads", "0"], &["at least 1 thread", "got 0"]);
}

#[cfg(target_os = "linux")]
#[test]
fn threads_that_the_system_refuses_are_one_line() {
    let folder = folder();
    // Stacks of a thousand threads are 2 GiB.
    let outcome = folder.shell(r#"ulimit -v 1000000; RAYON_NUM_THREADS=1 exec "$0" run in -o out --threads 1000"#);
    assert_eq!((outcome.code, outcome.stderr.lines().count()), (Some(2), 1), "{outcome:?}");
    assert_eq!(folder.names(), ["in"]);
}
