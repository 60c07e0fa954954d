//! Tests that need a GPU. Without one a test prints that it is skipped, unless `RMSNORM_REQUIRE`
//! names its backend.

use std::path::PathBuf;

use rmsnorm_core::conformance::Harness;
use rmsnorm_core::conformance::testing::skip_or_fail;
use rmsnorm_core::cuda::CudaBackend;
use rmsnorm_core::wgpu::WgpuBackend;
use rmsnorm_core::{DType, Norm, NormBackend};
use serde_json::Value;

use crate::run::{check_on, inputs, metadata};
use crate::support::{Folder, Outcome, file};

/// A folder where the program finds a device of this backend, if the machine has one.
pub fn device(backend: &str) -> Option<Folder> {
    let folder = Folder::with_gpu();
    let report: Value = serde_json::from_str(&folder.rmsnorm(&["devices", "--json"]).stdout).unwrap();
    let devices = report["devices"].as_array().unwrap();
    let first = devices.iter().find(|device| device["name"] == backend).unwrap();
    if first["available"] == true {
        return Some(folder);
    }
    skip_or_fail(backend, &first["reason"]).unwrap();
    None
}

/// Runs files of both norms with several mixes of dtypes.
fn run_files(folder: &Folder, harness: &impl Harness) {
    let (backend, arithmetic) = (harness.backend().name(), harness.arithmetic());
    let (matrix, row): (&[usize], &[usize]) = (&[3, 5, 37], &[37]);
    for norm in Norm::ALL {
        for (activation, other) in [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::F16, DType::F32)] {
            let tensors = [
                ("x", activation, matrix),
                ("weight", other, row),
                ("bias", other, row),
                ("residual", other, matrix),
                ("dy", activation, matrix),
                ("dresidual_out", other, matrix),
            ];
            let inputs = inputs(norm, &tensors);
            folder.write("in", &file(&inputs.tensors, &metadata(norm)));
            check_on(&arithmetic, folder, &inputs, &["--backend", backend]);
        }
    }
}

#[test]
fn gpu_is_listed_with_its_versions() {
    let Some(folder) = device("cuda") else { return };
    let outcome = folder.rmsnorm(&["devices"]);
    let line = outcome.stdout.lines().find(|line| line.starts_with("cuda   ready    ")).unwrap();
    for word in ["sm_", "SMs", "GiB", "driver", "NVRTC"] {
        assert!(line.contains(word), "{word} is not in {line:?}");
    }
}

#[test]
fn gpu_runs_files_as_the_definition_says() {
    let Some(folder) = device("cuda") else { return };
    run_files(&folder, &CudaBackend::new(0).unwrap());
}

#[test]
fn gpu_bench_replays_graphs_over_rotating_sets() {
    let Some(folder) = device("cuda") else { return };
    let args = ["bench", "--backend", "cuda", "--shapes", "64x1000,1x4096", "--seconds", "0", "--dtype", "bf16"];
    let reductions = ["--reduction", "partials,locks,atomics", "--json", "-"];
    let outcome = folder.rmsnorm(&[&args[..], &reductions].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{}", outcome.stdout);
    let document: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let rows = document["reports"][0]["rows"].as_array().unwrap();
    // Two shapes and two norms; forward, add_forward and backward with three reductions.
    assert_eq!(rows.len(), 2 * 2 * 5);
    for row in rows {
        assert_eq!((&row["mode"], &row["sets"]), (&"graph".into(), &64.into()), "{row}");
        assert!(row["us"].as_f64().unwrap() > 0.1 && row["copy_gbs"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn gpu_has_no_room_for_everything() {
    let Some(folder) = device("cuda") else { return };
    for (args, words) in [
        (["bench", "--backend", "cuda", "--shapes", "1x4096,1048576x1048576"], &["GiB", "1048576x1048576"] as &[_]),
        (["bench", "--backend", "cuda:99", "--shapes", "1x4096"], &["no device 99"]),
    ] {
        let outcome = folder.rmsnorm(&args);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{outcome:?}");
        assert!(words.iter().all(|word| outcome.stderr.contains(word)), "{}", outcome.stderr);
    }
}

#[test]
fn adapter_is_listed_with_its_limits() {
    let Some(folder) = device("wgpu") else { return };
    let outcome = folder.rmsnorm(&["devices"]);
    let line = outcome.stdout.lines().find(|line| line.starts_with("wgpu   ready    ")).unwrap();
    for word in ["vulkan", "bindings", "storage buffers"] {
        assert!(line.to_lowercase().contains(word), "{word} is not in {line:?}");
    }
}

#[test]
fn adapter_runs_files_as_the_definition_says() {
    let Some(folder) = device("wgpu") else { return };
    run_files(&folder, &WgpuBackend::new(0).unwrap());
}

#[test]
fn adapter_bench_measures_by_timestamps() {
    let Some(folder) = device("wgpu") else { return };
    let args = [
        "bench",
        "--backend",
        "wgpu",
        "--shapes",
        "64x1000,65x1000",
        "--seconds",
        "0",
        "--dtype",
        "bf16",
        "--json",
        "-",
    ];
    let outcome = folder.rmsnorm(&args);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let rows = report["reports"][0]["rows"].as_array().unwrap();
    assert!(!rows.is_empty());
    for row in rows {
        assert!(["timestamps", "wall"].iter().any(|mode| row["mode"] == *mode), "{row}");
        assert!(row["us"].as_f64().unwrap() > 0.0, "{row}");
        // The other number of rows runs the same kernels.
        let first_call = row["first_call_us"].as_f64();
        assert_eq!(first_call.is_some_and(|us| us > 0.0), row["rows"] == 64, "{row}");
    }
}

/// Whether the first CUDA device is an H200.
fn is_h200(folder: &Folder) -> bool {
    folder.rmsnorm(&["devices"]).stdout.lines().any(|line| line.starts_with("cuda ") && line.contains("H200"))
}

/// The files in the folder `cache`.
fn entries(folder: &Folder) -> Vec<(Vec<u8>, PathBuf)> {
    let kept = std::fs::read_dir(folder.path("cache"));
    let mut kept: Vec<_> = kept.into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    kept.sort();
    kept.into_iter().map(|path| (std::fs::read(&path).unwrap(), path)).collect()
}

/// The cache folder then has the kernels for every number of rows, so that a second process
/// compiles none.
#[test]
fn what_was_warmed_is_kept() {
    for backend in ["cuda", "wgpu"] {
        let Some(folder) = device(backend) else { continue };
        let entries = || entries(&folder);
        let warm = |more: &[&str]| {
            let args = ["warm", "--backend", backend, "--cols", "64,1000", "--op", "forward,backward"];
            let outcome = folder.rmsnorm_with(&[("RMSNORM_CACHE_DIR", "cache")], &[&args[..], more].concat());
            assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
            assert!(
                outcome.stdout.starts_with(backend) && outcome.stdout.contains(" ready after "),
                "{}",
                outcome.stdout
            );
        };
        warm(&[]);
        let first = entries();
        // Some drivers keep no compiled code for wgpu.
        assert!(backend == "wgpu" || first.len() > 4, "{}", first.len());
        warm(&["--norm", "rms_norm"]);
        assert!(backend == "wgpu" || entries() == first, "all was there");
        if backend == "cuda" && is_h200(&folder) {
            let args = ["warm", "--gpu", "h200", "--cols", "64,1000", "--op", "forward,backward"];
            let outcome = folder.rmsnorm_with(&[("RMSNORM_CACHE_DIR", "cache")], &args);
            assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
            assert!(entries() == first, "a device that is not asked has the same kernels");
        }
        warm(&["--f32-weight"]);
        assert!(backend == "wgpu" || entries().len() > first.len(), "other dtypes are other kernels");
    }
}

/// `warm --gpu` needs NVRTC. It needs no device and no driver.
#[test]
fn what_was_compiled_for_another_gpu_is_kept() {
    let folder = Folder::new();
    let warm = |gpus: &str, op: &str| {
        let args = ["warm", "--gpu", gpus, "--cols", "64", "--norm", "rms_norm", "--op", op];
        folder.rmsnorm_with(&[("RMSNORM_CACHE_DIR", "cache")], &args)
    };
    let first = warm("h200", "forward,backward");
    if first.stderr.contains("no NVRTC library can be loaded") {
        return skip_or_fail("nvrtc", first.stderr).unwrap();
    }
    let compiled = |outcome: Outcome, gpus: &[&str]| {
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
        let lines: Vec<_> = outcome.stdout.lines().collect();
        assert!(
            lines.len() == gpus.len() && lines.iter().zip(gpus).all(|(line, gpu)| line.starts_with(gpu)),
            "{lines:?}"
        );
        entries(&folder)
    };
    let first = compiled(first, &["h200"]);
    assert!(first.len() > 4, "{}", first.len());
    assert!(compiled(warm("h200", "backward"), &["h200"]) == first, "all was there");
    let with_sum = compiled(warm("h200", "forward,add_forward,backward"), &["h200"]);
    assert!(with_sum.len() > first.len() + 1, "forward of a sum, and its backward");
    assert!(compiled(warm("h100", "forward,add_forward,backward"), &["h100"]) == with_sum, "those of the H200");
    let with_a100 = compiled(warm("a100", "forward"), &["a100"]);
    let with_both = compiled(warm("a100,t4", "forward"), &["a100", "t4"]);
    assert!(with_sum.len() < with_a100.len() && with_a100.len() < with_both.len(), "each has kernels of its own");
    // Nothing is said to be ready that was not kept.
    folder.write("file", &[]);
    let args = ["warm", "--gpu", "h200", "--cols", "64", "--op", "forward"];
    let refused = folder.rmsnorm_with(&[("RMSNORM_CACHE_DIR", "file/folder")], &args);
    assert!(refused.code != Some(0) && refused.stdout.is_empty(), "{refused:?}");
    assert!(refused.stderr.contains("folder: is one that can be written, got file/folder"), "{}", refused.stderr);
}
