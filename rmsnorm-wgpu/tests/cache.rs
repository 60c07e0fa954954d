//! The driver's compiled code in the user's cache folder: later processes use it, or work without
//! it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::{available, values};
use rmsnorm_wgpu::spec::NormSpec;
use rmsnorm_wgpu::wgpu::Features;
use rmsnorm_wgpu::{Forward, WgpuBackend, WgpuSlice};

/// Set in the child process that compiles.
const IS_CHILD: &str = "RMSNORM_TEST_CACHE";

/// Not a test by itself: makes a call if the test below started this process.
#[test]
fn child_compiles() {
    if env::var_os(IS_CHILD).is_none() {
        return;
    }
    let gpu = WgpuBackend::new(0).unwrap();
    let [x, y] = [1, 2].map(|seed| gpu.upload(&values::<f32>(seed, 64)).unwrap());
    let args = Forward::new(WgpuSlice::<f32>::whole(x.buffer()), WgpuSlice::whole(y.buffer()));
    gpu.forward(&NormSpec::rms(4, 16, 1e-6), args).unwrap();
    assert!(gpu.download(&y).unwrap().iter().all(|y: &f32| y.is_finite() && *y != 0.0));
}

fn run_child(folder: &Path) {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "child_compiles", "--nocapture"]).env(IS_CHILD, "1").env("RMSNORM_CACHE_DIR", folder);
    let output = child.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// All files in a folder and its subfolders.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn what_one_process_compiled_the_next_one_has() {
    let Some(gpu) = available(WgpuBackend::new(0)).unwrap() else { return };
    if !gpu.device().features().contains(Features::PIPELINE_CACHE) {
        println!("skipped: {gpu} has no pipeline cache");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    run_child(folder.path());
    let [file] = &files(folder.path())[..] else { panic!("{:?}", files(folder.path())) };
    let written = fs::read(file).unwrap();
    assert!(written.len() > 100, "{} bytes", written.len());

    // An existing file is not written again, although another driver may return different bytes
    // each time.
    let at = fs::metadata(file).unwrap().modified().unwrap();
    run_child(folder.path());
    assert_eq!(files(folder.path()), std::slice::from_ref(file));
    assert!(!gpu.is_software() || fs::metadata(file).unwrap().modified().unwrap() == at);

    // A damaged file is ignored and crashes no process.
    fs::write(file, &written[..written.len() / 2]).unwrap();
    run_child(folder.path());
    assert!(fs::read(file).unwrap().len() > 100 && fs::read(file).unwrap() != written[..written.len() / 2]);
}
