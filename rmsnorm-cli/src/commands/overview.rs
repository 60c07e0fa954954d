//! `rmsnorm` without a command: the devices, each proven and measured in brief.

use rmsnorm_core::conformance::Options;
use rmsnorm_core::wgpu::WgpuBackend;
use rmsnorm_core::{AnyBackend, available};

use super::conformance::{all_threads, prove};
use super::{bench, devices};
use crate::failure::Failure;
use crate::output::print;

/// Everything a newcomer wants to see. Speed is shown only of what is right, and of no software adapter.
pub fn run() -> Result<(), Failure> {
    let devices = available();
    print(&format!("Devices\n\n{}\n", devices::table(&devices)))?;

    let mut proven = Vec::new();
    for entry in devices.iter().filter(|entry| entry.status.is_ok()) {
        let (backend, name) = (AnyBackend::open(entry.device)?, entry.device);
        if backend.as_wgpu().is_some_and(WgpuBackend::is_software) {
            let how = format!("rmsnorm conformance --backend {name} --profile smoke");
            print(&format!("Conformance, {name}\n\nleft out: a software adapter takes minutes; run {how}\n\n"))?;
            continue;
        }
        let options = Options { jobs: all_threads(), ..Options::default() };
        let summary = prove(&backend, &options, None)?;
        print(&format!("Conformance, {name}\n\n{summary}\n\n"))?;
        if !summary.is_success() {
            return Err(Failure::Check);
        }
        proven.push(backend);
    }

    for backend in &proven {
        print("Benchmark, ")?;
        bench::short(backend)?;
    }
    Ok(())
}
