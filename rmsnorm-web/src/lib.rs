//! rmsnorm in a browser, for the worker of the page: [`Device`] opens the GPU, proves the kernels by
//! the conformance suite, and measures them.

use std::io::{self, Write};

use js_sys::Function;
use rmsnorm_conformance::{Options, Profile, run_async};
use rmsnorm_wgpu::WgpuBackend;
use wasm_bindgen::prelude::*;

use crate::train::{EVERY, Norms, STEPS};

mod bench;
mod plain;
mod train;

/// Cases that run at once: while one waits for its results, others are prepared and judged. The
/// largest cases need some hundred MB each, of the 4 GB that a program in a browser has.
const JOBS: usize = 4;

/// The name of a first look at a device.
const LOOK: &str = "look";

/// Its number of cases: a software adapter takes half a minute.
const LOOK_CASES: usize = 36;

/// The GPU of the browser.
#[wasm_bindgen]
#[derive(Debug)]
pub struct Device {
    backend: WgpuBackend,
}

#[wasm_bindgen]
impl Device {
    /// Opens the fastest GPU that the browser offers.
    ///
    /// # Errors
    /// Without WebGPU, or if the device is too small: what to do.
    pub async fn open() -> Result<Device, JsError> {
        console_error_panic_hook::set_once();
        Ok(Device { backend: WgpuBackend::new_async(0).await? })
    }

    /// The properties of the device.
    #[wasm_bindgen(js_name = toString)]
    pub fn describe(&self) -> String {
        self.backend.to_string()
    }

    /// Runs a profile of the suite, or `cases` if there are any, or for the profile `look` some cases of
    /// the smoke profile. Calls `progress` with the numbers of finished and of all cases, and `line`
    /// with each line of the report. `host` is the browser and its adapter, for the report.
    ///
    /// # Errors
    /// If there is no such profile, or an id of a case cannot be parsed.
    pub async fn prove(
        &self,
        profile: &str,
        cases: Vec<String>,
        host: String,
        progress: &Function,
        line: &Function,
    ) -> Result<Proof, JsError> {
        let most_cases = (profile == LOOK).then_some(LOOK_CASES);
        let known = Profile::ALL.into_iter().find(|known| known.name() == profile);
        let profile =
            known.or(most_cases.map(|_| Profile::Smoke)).ok_or_else(|| JsError::new("there is no such profile"))?;
        let self_test = most_cases.is_none() && cases.is_empty();
        let options =
            Options { profile, most_cases, cases, self_test, jobs: JOBS, host: Some(host), ..Options::default() };
        let writer: &mut dyn Write = &mut Lines(line);
        let summary = run_async(&self.backend, &options, &mut calls(progress), Some(writer)).await?;
        Ok(Proof {
            summary: serde_json::to_string(&summary)?,
            text: summary.to_string(),
            // Cases fail on a device that is lost, and say nothing about it.
            lost: self.backend.catch(|_| Ok(())).await.err().map(|error| error.to_string()),
        })
    }

    /// Measures forward and backward passes against a copy. Calls `progress` with the number of
    /// finished and of all rows of the table. Returns the table in JSON.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn bench(&self, progress: &Function) -> Result<String, JsError> {
        Ok(serde_json::to_string(&bench::run(&self.backend, &mut calls(progress)).await?)?)
    }

    /// Trains a small network with fused norms, then with norms by plain operations. Calls
    /// `progress` with the number of finished and of all steps. Returns both loss curves in JSON.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn train(&self, progress: &Function) -> Result<String, JsError> {
        let (mut curves, mut progress) = (Vec::new(), calls(progress));
        for (i, norms) in [Norms::Fused, Norms::Plain].into_iter().enumerate() {
            let mut progress = |step| progress(i * STEPS + step, 2 * STEPS);
            curves.push(train::train(&self.backend, norms, &mut progress).await?);
        }
        Ok(serde_json::to_string(&serde_json::json!({ "every": EVERY, "fused": curves[0], "plain": curves[1] }))?)
    }

    /// Frees the device's memory. The device is lost then.
    pub fn close(&self) {
        self.backend.device().destroy();
    }
}

/// The calls of a function of the page with two numbers. Its errors do not end a run.
fn calls(progress: &Function) -> impl FnMut(usize, usize) {
    move |done, total| {
        let _ = progress.call2(&JsValue::NULL, &done.into(), &total.into());
    }
}

/// Gives each line to a function of the page.
struct Lines<'f>(&'f Function);

impl Write for Lines<'_> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let _ = self.0.call1(&JsValue::NULL, &String::from_utf8_lossy(text).as_ref().into());
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The result of a run of the suite.
#[wasm_bindgen(getter_with_clone)]
#[derive(Debug)]
pub struct Proof {
    /// The summary in JSON.
    pub summary: String,
    /// The summary for people.
    pub text: String,
    /// How the device was lost, if it was.
    pub lost: Option<String>,
}
