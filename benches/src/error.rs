//! Why a measurement was not made.

use rmsnorm_core::Error;

/// Why there is no measurement, or no table or picture of one.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A result or a copy was wrong, so that its time means nothing. The message says which.
    #[error("{0}")]
    Wrong(String),
    /// What was asked for cannot be done: a size, a file, a device.
    #[error("{0}")]
    Input(String),
}

impl From<Error> for BenchError {
    fn from(error: Error) -> Self {
        BenchError::Input(error.to_string())
    }
}
