//! Driver errors as text.
//!
//! cudarc's error asks the driver for its text whenever it is printed, and panics if the driver is
//! unloaded by then. The text is therefore copied here at once.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use rmsnorm_spec::Error;

/// The name of the backend in every error.
pub(crate) const BACKEND: &str = "cuda";

/// A call to the CUDA driver that failed: the source of [`Error::Device`].
///
/// # Example
/// ```
/// fn is_out_of_memory(error: &rmsnorm_cuda::spec::Error) -> bool {
///     let rmsnorm_cuda::spec::Error::Device { source, .. } = error else { return false };
///     source.downcast_ref().is_some_and(rmsnorm_cuda::DriverFailure::is_out_of_memory)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {description} ({name}){}", self.advice())]
pub struct DriverFailure {
    operation: &'static str,
    code: CUresult,
    name: String,
    description: String,
}

impl DriverFailure {
    pub(crate) fn new(operation: &'static str, error: DriverError) -> Self {
        let text = |text: Result<&std::ffi::CStr, DriverError>| {
            text.map_or_else(|_| format!("code {}", error.0 as u32), |text| text.to_string_lossy().into_owned())
        };
        DriverFailure {
            operation,
            code: error.0,
            name: text(error.error_name()),
            description: text(error.error_string()),
        }
    }

    /// Whether the device ran out of memory. A smaller call may succeed, or the same call after
    /// memory was freed.
    pub fn is_out_of_memory(&self) -> bool {
        self.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY
    }

    /// Whether the context is lost: a kernel of this process, perhaps not one of this crate, failed
    /// in a way that makes every later call fail.
    pub fn is_context_lost(&self) -> bool {
        matches!(
            self.code,
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
                | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
                | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
                | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
                | CUresult::CUDA_ERROR_ASSERT
                | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
                | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
                | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | CUresult::CUDA_ERROR_INVALID_PC
                | CUresult::CUDA_ERROR_LAUNCH_FAILED
        )
    }

    /// Whether the call is not allowed on a stream under capture.
    pub fn is_capture(&self) -> bool {
        matches!(
            self.code,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
                | CUresult::CUDA_ERROR_CAPTURED_EVENT
        )
    }

    fn advice(&self) -> &'static str {
        if self.is_out_of_memory() {
            "; the device has no room left: free memory, or pass fewer rows"
        } else if self.is_context_lost() {
            "; the context is lost, perhaps by another kernel of this process: every later call fails, and the process \
             must be restarted"
        } else if self.is_capture() {
            "; cudarc's events cannot be captured: call CudaContext::disable_event_tracking before the capture \
             (documentation of CudaBackend, CUDA graphs)"
        } else {
            ""
        }
    }
}

/// For `map_err`: turns a failed driver call into [`Error::Device`].
pub(crate) fn device_error(operation: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |error| Error::Device { backend: BACKEND, source: Box::new(DriverFailure::new(operation, error)) }
}

/// Whether the device does not hold all blocks of a cooperative launch at the same time.
pub(crate) fn is_too_large(error: &Error) -> bool {
    let Error::Device { source, .. } = error else { return false };
    let code = source.downcast_ref().map(|failure: &DriverFailure| failure.code);
    code == Some(CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
}

/// [`Error::Unavailable`] for this backend.
pub(crate) fn unavailable(reason: impl Into<String>) -> Error {
    Error::Unavailable { backend: BACKEND, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(code: CUresult) -> DriverFailure {
        // Built by hand, because `new` needs a driver.
        DriverFailure { operation: "cuTest", code, name: "NAME".into(), description: "words".into() }
    }

    #[test]
    fn a_launch_that_is_too_large_is_told_from_others() {
        let of = |code| is_too_large(&Error::Device { backend: BACKEND, source: Box::new(failure(code)) });
        assert!(of(CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE));
        assert!(!of(CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES) && !is_too_large(&Error::EmptyRow));
    }

    #[test]
    fn messages_tell_what_can_be_done() {
        for (code, advice) in [
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, "no room left"),
            (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "must be restarted"),
            (CUresult::CUDA_ERROR_LAUNCH_FAILED, "must be restarted"),
            (CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "cannot be captured"),
        ] {
            let message = failure(code).to_string();
            assert!(message.starts_with("cuTest: words (NAME); ") && message.contains(advice), "{message}");
        }
        assert_eq!(failure(CUresult::CUDA_ERROR_INVALID_VALUE).to_string(), "cuTest: words (NAME)");
    }
}
