//! wgpu errors as values: calls run inside error scopes, because wgpu's default error handler
//! panics.

use std::fmt;

use rmsnorm_spec::Error;
use wgpu::{Device, ErrorFilter};

/// The name of the backend in every error.
pub(crate) const BACKEND: &str = "wgpu";

/// Whether this is a program in a browser: it must not wait for the device, and learns of the
/// device's errors after the call that caused them.
pub(crate) const IS_BROWSER: bool = cfg!(target_arch = "wasm32");

/// An operation that wgpu refused or the device could not perform: the source of [`Error::Device`].
///
/// # Example
/// ```
/// fn is_out_of_memory(error: &rmsnorm_wgpu::spec::Error) -> bool {
///     let rmsnorm_wgpu::spec::Error::Device { source, .. } = error else { return false };
///     source.downcast_ref().is_some_and(rmsnorm_wgpu::WgpuFailure::is_out_of_memory)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {description}{}", self.kind.advice())]
pub struct WgpuFailure {
    operation: &'static str,
    kind: Kind,
    description: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    OutOfMemory,
    Validation,
    Internal,
    Lost,
}

impl Kind {
    fn advice(self) -> &'static str {
        match self {
            Kind::OutOfMemory => "; the device has no room left",
            Kind::Lost => "; the device is lost: every later call fails, a new device is needed",
            Kind::Validation | Kind::Internal => "",
        }
    }
}

impl WgpuFailure {
    /// An error caught by a scope.
    pub(crate) fn caught(operation: &'static str, error: &wgpu::Error) -> Self {
        let (kind, description) = match error {
            // wgpu's sources say nothing in a browser.
            wgpu::Error::OutOfMemory { .. } if IS_BROWSER => (Kind::OutOfMemory, "out of memory".into()),
            wgpu::Error::Validation { description, .. } if IS_BROWSER => (Kind::Validation, description.clone()),
            wgpu::Error::OutOfMemory { source } => (Kind::OutOfMemory, chain(source.as_ref())),
            wgpu::Error::Validation { source, .. } => (Kind::Validation, chain(source.as_ref())),
            wgpu::Error::Internal { source, .. } => (Kind::Internal, chain(source.as_ref())),
        };
        WgpuFailure { operation, kind, description }
    }

    /// A device that is lost.
    pub(crate) fn lost(operation: &'static str, description: impl Into<String>) -> Self {
        WgpuFailure { operation, kind: Kind::Lost, description: description.into() }
    }

    /// An error that no scope reports.
    pub(crate) fn internal(operation: &'static str, description: impl fmt::Display) -> Self {
        WgpuFailure { operation, kind: Kind::Internal, description: description.to_string() }
    }

    /// Whether the device was out of memory. Smaller calls may succeed, or the same call after
    /// memory is freed.
    pub fn is_out_of_memory(&self) -> bool {
        self.kind == Kind::OutOfMemory
    }

    /// Whether the device is lost: the driver reset it, or it was destroyed. No later call on it
    /// can succeed.
    pub fn is_device_lost(&self) -> bool {
        self.kind == Kind::Lost
    }

    /// Whether wgpu refused the call: a buffer is destroyed, mapped, or belongs to another device.
    pub fn is_validation(&self) -> bool {
        self.kind == Kind::Validation
    }
}

/// An error and its causes, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// [`Error::Device`] of a failure.
pub(crate) fn device_error(failure: WgpuFailure) -> Error {
    Error::Device { backend: BACKEND, source: Box::new(failure) }
}

/// [`Error::Unavailable`] for this backend.
pub(crate) fn unavailable(reason: impl Into<String>) -> Error {
    Error::Unavailable { backend: BACKEND, reason: reason.into() }
}

/// [`Error::InvalidArgument`] with this rule.
pub(crate) fn invalid(arg: &'static str, rule: impl Into<String>) -> Error {
    Error::InvalidArgument { arg, rule: rule.into() }
}

/// [`Error::Unsupported`] with this rule.
pub(crate) fn unsupported(rule: impl Into<String>) -> Error {
    Error::Unsupported { rule: rule.into() }
}

/// Waits for `future`.
///
/// # Errors
/// Errors of `future`; in a browser `Unavailable`, with the method to call `instead`.
pub(crate) fn wait<O>(instead: &str, future: impl Future<Output = Result<O, Error>>) -> Result<O, Error> {
    if IS_BROWSER {
        return Err(unavailable(format!("a program in a browser cannot wait; fix: await `{instead}`")));
    }
    pollster::block_on(future)
}

/// As [`scoped_async`], without waiting for the device: native devices report errors during the
/// call. In a browser errors of the device are left to the handler of uncaptured errors.
///
/// # Errors
/// As [`scoped_async`]; in a browser errors of `work`.
pub(crate) fn scoped<O>(
    device: &Device,
    operation: &'static str,
    work: impl FnOnce() -> Result<O, Error>,
) -> Result<O, Error> {
    if IS_BROWSER { work() } else { pollster::block_on(scoped_async(device, operation, work)) }
}

/// Runs `work` and catches every device error of this thread. An error that wgpu reports takes
/// precedence over the result of `work`, because failures in `work` follow from it.
///
/// # Errors
/// `Device` with wgpu's error; errors of `work`.
pub(crate) async fn scoped_async<O>(
    device: &Device,
    operation: &'static str,
    work: impl FnOnce() -> Result<O, Error>,
) -> Result<O, Error> {
    // A scope catches one kind of error. wgpu requires that scopes are popped in reverse order.
    let memory = device.push_error_scope(ErrorFilter::OutOfMemory);
    let validation = device.push_error_scope(ErrorFilter::Validation);
    let internal = device.push_error_scope(ErrorFilter::Internal);
    let output = work();
    let [internal, validation, memory] = [internal, validation, memory].map(|scope| scope.pop());
    // The first error in this order is the cause: a buffer that could not be allocated is invalid
    // at its use.
    match memory.await.or(internal.await).or(validation.await) {
        Some(error) => Err(device_error(WgpuFailure::caught(operation, &error))),
        None => output,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caught(make: impl FnOnce(Box<dyn std::error::Error + Send + Sync>) -> wgpu::Error) -> WgpuFailure {
        WgpuFailure::caught("create_buffer", &make("no\n  words".into()))
    }

    #[test]
    fn messages_tell_what_can_be_done() {
        let failure = caught(|source| wgpu::Error::OutOfMemory { source });
        assert_eq!(failure.to_string(), "create_buffer: no words; the device has no room left");
        assert!(failure.is_out_of_memory() && !failure.is_device_lost() && !failure.is_validation());
        let failure = caught(|source| wgpu::Error::Validation { source, description: String::new() });
        assert_eq!(failure.to_string(), "create_buffer: no words");
        assert!(failure.is_validation() && !failure.is_out_of_memory());
        let failure = WgpuFailure::lost("submit", "it was destroyed");
        assert!(failure.to_string().starts_with("submit: it was destroyed; the device is lost"), "{failure}");
        assert!(failure.is_device_lost());
    }
}
