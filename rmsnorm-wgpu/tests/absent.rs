//! Without a usable adapter the error says what was tried. Runs in a child process with another
//! environment.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::env;
use std::process::Command;

use rmsnorm_wgpu::WgpuBackend;
use rmsnorm_wgpu::spec::Error;

/// Set in the child process that looks for adapters.
const IS_CHILD: &str = "RMSNORM_TEST_ABSENCE";

/// The answers of a process to both questions for adapters, with this environment.
fn reasons(environment: &[(&str, &str)]) -> Vec<String> {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "child_looks_for_adapters", "--nocapture"]).env(IS_CHILD, "1");
    let output = child.envs(environment.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    text.lines().filter_map(|line| Some(line.split_once("unavailable: ")?.1.to_owned())).collect()
}

/// Not a test by itself: prints the backend's answers if a test below started this process.
#[test]
fn child_looks_for_adapters() {
    if env::var_os(IS_CHILD).is_none() {
        return;
    }
    for answer in [WgpuBackend::new(0).map(|_| ()), WgpuBackend::device_count().map(|_| ())] {
        match answer {
            Err(Error::Unavailable { backend: "wgpu", reason }) => {
                println!("unavailable: {}", reason.replace('\n', " "));
            }
            other => println!("found: {other:?}"),
        }
    }
}

/// OpenGL is not compiled in, so no adapter is found.
#[test]
fn a_wgpu_backend_that_is_not_there_is_unavailable() {
    let reasons = reasons(&[("WGPU_BACKEND", "gl")]);
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    assert!(reasons.iter().all(|reason| reason.contains("not compiled in")), "{reasons:?}");
    let fix = "; fix: unset WGPU_BACKEND, which is \"gl\"";
    assert!(reasons.iter().all(|reason| reason.ends_with(fix)), "{reasons:?}");
}

#[test]
fn a_name_that_no_adapter_has_is_unavailable() {
    let reasons = reasons(&[("WGPU_ADAPTER_NAME", "No Such Adapter")]);
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    // On a machine without any adapter, that is the reason.
    if let Ok(gpu) = WgpuBackend::new(0) {
        let info = gpu.device().adapter_info();
        let told = format!("{} ({})", info.name, info.backend);
        for reason in reasons {
            let names = reason.split_once("\"no such adapter\" (WGPU_ADAPTER_NAME); there are: ");
            assert!(names.is_some_and(|(_, names)| names.contains(&told)), "{told:?} is not in {reason:?}");
            assert!(reason.contains("; fix: unset WGPU_ADAPTER_NAME"), "{reason:?}");
        }
    }
}
