//! The errors of measurements.

use rmsnorm_core::Error;

/// The reason why there is no measurement, or no table or plot of one.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A result or a copy was wrong, so its time means nothing. The message names it.
    #[error("{0}")]
    Wrong(String),
    /// The request cannot be fulfilled: a size, a file, a device.
    #[error("{0}")]
    Input(String),
}

impl From<Error> for BenchError {
    fn from(error: Error) -> Self {
        BenchError::Input(error.to_string())
    }
}
