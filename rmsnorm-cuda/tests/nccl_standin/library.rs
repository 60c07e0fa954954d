//! Errors for a missing, broken or old NCCL.

use rmsnorm_cuda::NcclComm;
use rmsnorm_cuda::spec::Error;

use crate::machine::{Machine, has_c_compiler, line};
use crate::{NCCL, transcript};

/// Runs in the child process: calls that need NCCL but no device.
pub fn answer(what: &str) -> Option<()> {
    if what != "library" {
        return None;
    }
    // Twice, because the second call uses the cached result of the first.
    for _ in 0..2 {
        match (NcclComm::version(), NcclComm::unique_id()) {
            (Ok(version), Ok(id)) => println!("answer: {version:?}, {:?}", &id.as_bytes()[..4]),
            (Ok(_), Err(error @ Error::Device { .. })) => println!("answer: device: {error}"),
            (Err(version @ Error::Unavailable { .. }), Err(id)) if version.to_string() == id.to_string() => {
                println!("answer: unavailable: {id}");
            }
            other => println!("answer: another: {other:?}"),
        }
    }
    Some(())
}

fn answers(machine: &Machine, folder: &str, expected: &[&str]) {
    let text = machine.run("library", &[("RMSNORM_NCCL", folder)]);
    let answer = line(&text, "answer: ");
    println!("{answer}");
    for expected in expected {
        assert!(answer.contains(expected), "{answer:?} lacks {expected:?}");
    }
    assert_eq!(text.matches(answer).count(), 2, "the second answer is another: {text}");
}

#[test]
fn nccl_that_cannot_be_loaded_is_unavailable() {
    let machine = Machine::broken(&["libnccl.so.2", "libnccl.so"]);
    let begin = "unavailable: the nccl backend is not available: no NCCL library can be loaded, tried libnccl.so.2, libnccl.so (";
    answers(&machine, "", &[begin, "; fix: install NCCL", "or set RMSNORM_NCCL to the folder"]);
}

#[test]
fn a_folder_that_is_named_must_hold_it() {
    if has_c_compiler() {
        let (machine, other) = (Machine::broken(&[]), Machine::broken(&[]));
        machine.library("libnccl.so.2", NCCL, &[]);
        let folder = other.path().to_str().unwrap();
        answers(&machine, folder, &["unavailable: ", "no NCCL library can be loaded: RMSNORM_NCCL names ", folder]);
        other.library("libnccl.so.2", NCCL, &[("VERSION", 22703)]);
        answers(&machine, folder, &["(2, 27, 3), [0, 3, 6, 9]"]);
        answers(&machine, "", &["(2, 28, 9), [0, 3, 6, 9]"]);
    }
}

#[test]
fn a_plain_name_will_do() {
    if has_c_compiler() {
        let machine = Machine::broken(&["libnccl.so.2"]);
        machine.library("libnccl.so", NCCL, &[]);
        answers(&machine, "", &["(2, 28, 9)"]);
    }
}

#[test]
fn a_library_that_is_no_nccl_is_unavailable() {
    if has_c_compiler() {
        let machine = Machine::broken(&[]);
        machine.library("libnccl.so.2", "int other(void) { return 0; }", &[]);
        answers(&machine, "", &["unavailable: ", "libnccl.so.2 is no NCCL: ", "ncclGetVersion"]);
    }
}

#[test]
fn an_old_nccl_is_unavailable() {
    if has_c_compiler() {
        let machine = Machine::broken(&[]);
        for (code, version) in [(2804, "2.8.4"), (21304, "2.13.4")] {
            machine.library("libnccl.so.2", NCCL, &[("VERSION", code), ("NO_FINALIZE", 1)]);
            let reason = format!("libnccl.so.2 is NCCL {version}, 2.14.0 is the oldest that works");
            answers(&machine, "", &["unavailable: ", &reason]);
        }
    }
}

#[test]
fn an_nccl_that_lacks_a_function_is_unavailable() {
    if has_c_compiler() {
        let machine = Machine::broken(&[]);
        machine.library("libnccl.so.2", NCCL, &[("NO_FINALIZE", 1)]);
        answers(&machine, "", &["unavailable: ", "NCCL 2.28.9, libnccl.so.2, is broken: ", "ncclCommFinalize"]);
    }
}

#[test]
fn an_id_that_nccl_cannot_make_is_a_device_error() {
    if has_c_compiler() {
        let machine = Machine::broken(&[]);
        machine.library("libnccl.so.2", NCCL, &[]);
        let answers = transcript(&machine, "library", &[("FAIL_AT", "ncclGetUniqueId 1")]);
        let expected = "answer: device: nccl device error: ncclGetUniqueId: remote process exited (code 6); NCCL's last error: the \
                        stand-in was told to fail";
        // The second call succeeds.
        assert_eq!(answers, [expected, "answer: (2, 28, 9), [0, 3, 6, 9]"]);
    }
}
