//! Errors for a missing or broken driver, NVRTC or device: typed, without panics.
//!
//! Libraries are loaded once per process, so each case runs this test again in its own process.
#![cfg(target_os = "linux")]
#![expect(clippy::expect_used, clippy::panic, reason = "a test fails by panicking, in its helper functions too")]

mod machine;

use machine::{Machine, has_c_compiler, line, told};
use rmsnorm_cuda::CudaBackend;
use rmsnorm_cuda::spec::Error;

/// A driver that works until a context is created. Each number can be changed.
const DRIVER: &str = r#"
    int cuDriverGetVersion(int *version) { *version = VERSION; return VERSION_STATUS; }
    #if HAS_INIT
    int cuInit(unsigned flags) { return INIT_STATUS; }
    #endif
    int cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
    int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
    int cuDevicePrimaryCtxRetain(void **context, int device) { return 2; }
    int cuGetErrorName(int code, const char **text) { *text = "STANDIN_NAME"; return 0; }
    int cuGetErrorString(int code, const char **text) { *text = code == 100 ? "no device" : "no memory"; return 0; }
    int cuMemAllocAsync(void) { return 1; }
    int cuLaunchKernelEx(void) { return 1; }
"#;
const DRIVER_NUMBERS: [(&str, i32); 5] =
    [("VERSION", 13000), ("VERSION_STATUS", 0), ("HAS_INIT", 1), ("INIT_STATUS", 0), ("DEVICES", 1)];

/// The functions of NVRTC that are needed until a program is compiled.
const NVRTC: &str = r#"
    int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
    const char *nvrtcGetErrorString(int status) { return "STANDIN"; }
    int nvrtcCreateProgram(void) { return 1; }
    int nvrtcCompileProgram(void) { return 1; }
    int nvrtcDestroyProgram(void) { return 1; }
    int nvrtcGetProgramLogSize(void) { return 1; }
    int nvrtcGetProgramLog(void) { return 1; }
    #if HAS_CUBIN
    int nvrtcGetCUBINSize(void) { return 1; }
    int nvrtcGetCUBIN(void) { return 1; }
    #endif
"#;

/// A driver and an NVRTC that cannot be loaded.
fn broken() -> Machine {
    Machine::broken(&["libcuda.so", "libcuda.so.1", "libnvrtc.so.13"])
}

impl Machine {
    /// Adds this driver.
    fn driver(self, changed: &[(&str, i32)]) -> Machine {
        let numbers =
            DRIVER_NUMBERS.map(|number| *changed.iter().find(|(name, _)| *name == number.0).unwrap_or(&number));
        for name in ["libcuda.so", "libcuda.so.1"] {
            self.library(name, DRIVER, &numbers);
        }
        self
    }

    /// Adds this NVRTC.
    fn nvrtc(self, has_cubin: bool) -> Machine {
        self.library("libnvrtc.so.13", NVRTC, &[("HAS_CUBIN", has_cubin.into())]);
        self
    }

    /// The result of `CudaBackend::new(0)` on this machine.
    fn answer(&self) -> String {
        let nvrtc = self.path().to_str().expect("a path");
        line(&self.run("backend", &[("RMSNORM_NVRTC", nvrtc)]), "answer: ").to_owned()
    }

    /// Checks the kind of the answer, and that it contains these words.
    fn answers(&self, kind: &str, words: &[&str]) {
        let answer = self.answer();
        println!("{answer}");
        assert!(answer.starts_with(kind), "{answer:?} is not {kind}");
        for word in words {
            assert!(answer.contains(word), "{answer:?} lacks {word:?}");
        }
    }
}

/// Runs in the child process of the tests above; prints the backend's answer.
#[test]
fn child_answers() {
    if told().is_none() {
        return;
    }
    // Twice, because the second call uses the cached result of the first.
    for backend in [CudaBackend::new(0), CudaBackend::new(0)] {
        match backend {
            Ok(backend) => println!("answer: present: {backend}"),
            Err(error @ Error::Unavailable { .. }) => println!("answer: unavailable: {error}"),
            Err(error @ Error::Device { .. }) => println!("answer: device: {error}"),
            Err(error) => println!("answer: another error: {error}"),
        }
    }
}

#[test]
fn a_driver_that_cannot_be_loaded_is_unavailable() {
    broken().answers("unavailable: ", &["cuda", "libcuda.so", "libcuda.so.1", "; fix: install NVIDIA's driver"]);
}

#[test]
fn a_library_that_is_no_driver_is_unavailable() {
    if !has_c_compiler() {
        return;
    }
    let machine = broken();
    machine.library("libcuda.so", "int other(void) { return 0; }", &[]);
    machine.answers("unavailable: ", &["not an NVIDIA driver", "cuDriverGetVersion", "; fix: install"]);
}

#[test]
fn a_driver_that_lacks_a_function_is_unavailable() {
    if has_c_compiler() {
        broken()
            .driver(&[("HAS_INIT", 0)])
            .answers("unavailable: ", &["too old or broken", "cuInit", "; fix: install NVIDIA's driver 525"]);
    }
}

#[test]
fn an_old_driver_is_unavailable() {
    if has_c_compiler() {
        broken()
            .driver(&[("VERSION", 11040)])
            .answers("unavailable: ", &["11.4", "; fix: install NVIDIA's driver 525"]);
    }
}

/// The toolkit's library for linking has every function, and each returns error 34.
#[test]
fn a_stub_of_the_toolkit_is_unavailable() {
    if has_c_compiler() {
        broken()
            .driver(&[("VERSION_STATUS", 34)])
            .answers("unavailable: ", &["not a working NVIDIA driver", "34", "; fix: remove", "stubs"]);
    }
}

#[test]
fn a_machine_without_a_device_is_unavailable() {
    if has_c_compiler() {
        broken().driver(&[("INIT_STATUS", 100)]).answers("unavailable: ", &["no device", "STANDIN_NAME", "; fix: "]);
        broken().driver(&[("DEVICES", 0)]).answers("unavailable: ", &["there is no CUDA device; fix: "]);
    }
}

#[test]
fn a_compiler_that_cannot_be_loaded_is_unavailable() {
    if has_c_compiler() {
        broken()
            .driver(&[])
            .answers("unavailable: ", &["no NVRTC", "libnvrtc.so.13", "; fix: set RMSNORM_NVRTC to the folder"]);
    }
}

#[test]
fn a_compiler_that_lacks_a_function_is_unavailable() {
    if has_c_compiler() {
        broken().driver(&[]).nvrtc(false).answers("unavailable: ", &["no usable NVRTC", "nvrtcGetCUBIN"]);
    }
}

/// Everything is present, but the device does not open.
#[test]
fn a_device_that_fails_is_a_device_error() {
    if has_c_compiler() {
        broken().driver(&[]).nvrtc(true).answers("device: ", &["no memory", "STANDIN_NAME"]);
    }
}
