//! NCCL's errors as text.

use rmsnorm_spec::Error;

use crate::library::nccl::{NAME, Nccl, Status};

/// A call to NCCL that failed, at once or later on the device: the source of [`Error::Device`].
///
/// # Example
/// ```
/// fn code(error: &rmsnorm_cuda::spec::Error) -> Option<i32> {
///     let rmsnorm_cuda::spec::Error::Device { source, .. } = error else { return None };
///     source.downcast_ref().map(rmsnorm_cuda::NcclFailure::code)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {description} (code {code}){}", self.detail())]
pub struct NcclFailure {
    operation: &'static str,
    code: Status,
    description: String,
    last_error: String,
}

impl NcclFailure {
    pub(super) fn new(nccl: &Nccl, operation: &'static str, code: Status) -> Self {
        NcclFailure { operation, code, description: nccl.description(code), last_error: nccl.last_error() }
    }

    /// NCCL's `ncclResult_t`.
    pub fn code(&self) -> i32 {
        self.code
    }

    /// NCCL's last error may belong to another call, so the text says "last error".
    fn detail(&self) -> String {
        if self.last_error.is_empty() { String::new() } else { format!("; NCCL's last error: {}", self.last_error) }
    }
}

impl From<NcclFailure> for Error {
    fn from(failure: NcclFailure) -> Error {
        Error::Device { backend: NAME, source: Box::new(failure) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_all_that_nccl_says() {
        let failure = |last_error: &str| NcclFailure {
            operation: "ncclSend",
            code: 6,
            description: "remote process exited".into(),
            last_error: last_error.into(),
        };
        let message = Error::from(failure("")).to_string();
        assert_eq!(message, "nccl device error: ncclSend: remote process exited (code 6)");
        let message = failure("socket closed").to_string();
        assert_eq!(message, "ncclSend: remote process exited (code 6); NCCL's last error: socket closed");
    }
}
