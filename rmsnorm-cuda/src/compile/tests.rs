//! Compiles programs, and checks the errors of failures.

mod programs;

use std::error::Error as _;

use super::*;
use programs::nvrtc;

fn request(source: &str, options: &[&str]) -> Request {
    let options = options.iter().map(ToString::to_string).collect();
    Request { arch: Arch::HOPPER, file: "kernels/test.cu", source: source.to_owned(), options }
}

#[test]
fn a_program_becomes_an_elf_file_for_its_device() {
    let Some(nvrtc) = nvrtc() else { return };
    let source = "extern \"C\" __global__ void nothing() {}";
    let cubin = request(source, &["--gpu-architecture=sm_90"]).compile(nvrtc).expect("a program");
    assert_eq!(&cubin[..4], b"\x7fELF");
}

/// Cubins are cached under this version.
#[test]
fn the_version_is_the_one_that_programs_see() {
    let Some(nvrtc) = nvrtc() else { return };
    let (major, minor) = nvrtc_version().expect("a version");
    let is_it = format!("__CUDACC_VER_MAJOR__ == {major} && __CUDACC_VER_MINOR__ == {minor}");
    for (condition, is_good) in [(is_it.clone(), true), (format!("!({is_it})"), false)] {
        let source = format!("#if !({condition})\n#error another version\n#endif\n");
        let compiled = request(&source, &["--gpu-architecture=sm_90"]).compile(nvrtc);
        assert_eq!(compiled.is_ok(), is_good, "{condition}: {compiled:?}");
    }
    assert!(format!("{nvrtc:?}").contains(&format!("({major}, {minor})")), "{nvrtc:?}");
}

#[test]
fn a_refused_program_is_an_error_with_the_log() {
    let Some(nvrtc) = nvrtc() else { return };
    let source = "#line 7 \"kernels/other.cuh\"\n__global__ void broken() { undeclared(); }\n";
    let error = request(source, &["--gpu-architecture=sm_90", "-DPACK=8"]).compile(nvrtc).expect_err("no program");
    let text = error.to_string();
    for part in ["kernels/test.cu", "nvrtcCompileProgram", "-DPACK=8", "kernels/other.cuh(7)", "undeclared"] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    assert!(error.source().is_some_and(|source| source.is::<CompileError>()), "{error:?}");
}

#[test]
fn a_refused_option_is_an_error_too() {
    let Some(nvrtc) = nvrtc() else { return };
    let error = request("", &["--gpu-architecture=sm_1"]).compile(nvrtc).expect_err("no such device");
    assert!(error.to_string().contains("--gpu-architecture"), "{error}");
    let error = request("a\0b", &[]).compile(nvrtc).expect_err("no text");
    assert!(error.to_string().contains("NUL"), "{error}");
}

#[test]
fn an_architecture_that_the_compiler_has_dropped_comes_with_advice() {
    assert!(advice(Arch(70), (13, 0)).contains("RMSNORM_NVRTC"));
    for (arch, version) in [(70, (12, 9)), (75, (13, 0)), (90, (13, 2))] {
        assert_eq!(advice(Arch(arch), version), "", "sm_{arch}, {version:?}");
    }
    let Some(nvrtc) = nvrtc().filter(|nvrtc| nvrtc.version().0 >= 13) else { return };
    let request = Request { arch: Arch(70), ..request("", &["--gpu-architecture=sm_70"]) };
    let error = request.compile(nvrtc).expect_err("a device of the past");
    assert!(error.to_string().contains("to its folder\noptions: "), "{error}");
}

#[test]
fn everything_that_decides_the_code_is_in_the_id() {
    let one = request("source", &["-DPACK=8", "-DPACKS=2"]);
    let same = request("source", &["-DPACK=8", "-DPACKS=2"]);
    assert!(one.id((13, 0)) == same.id((13, 0)));
    let others = [
        one.id((13, 1)),
        one.id((12, 0)),
        request("source ", &["-DPACK=8", "-DPACKS=2"]).id((13, 0)),
        request("source", &["-DPACK=8", "-DPACKS=1"]).id((13, 0)),
        request("source", &["-DPACK=8-DPACKS=2"]).id((13, 0)),
        request("source-DPACK=8", &["-DPACKS=2"]).id((13, 0)),
    ];
    assert!(others.into_iter().all(|other| other != one.id((13, 0))));
}
