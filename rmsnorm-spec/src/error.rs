//! The one error type of the workspace.

use crate::Storage;

/// An error of a call. A variant about an argument names it as the argument structs do, with the
/// expected and the given value. Such an error is returned before anything is written or launched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `eps` is negative, infinite or NaN.
    #[error("eps must be finite and not negative, got {got}")]
    InvalidEps {
        /// The value given.
        got: f32,
    },
    /// `weight_offset` is infinite or NaN.
    #[error("weight_offset must be finite, got {got}")]
    InvalidWeightOffset {
        /// The value given.
        got: f32,
    },
    /// `cols` is zero: the mean of no elements does not exist.
    #[error("cols must be at least 1, got 0")]
    EmptyRow,
    /// Rows would overlap.
    #[error("{arg}: row stride must be at least cols = {cols}, got {got}")]
    Stride {
        /// The tensor.
        arg: &'static str,
        /// The smallest stride allowed, in elements.
        cols: usize,
        /// The stride given, in elements.
        got: usize,
    },
    /// A tensor has the wrong number of elements.
    #[error("{arg}: expected {} elements, got {got}", expected_elements(*.min, *.max))]
    Length {
        /// The tensor.
        arg: &'static str,
        /// The fewest elements allowed.
        min: usize,
        /// The most elements allowed.
        max: usize,
        /// The number of elements given.
        got: usize,
    },
    /// The size of a tensor in bytes is more than the address space holds.
    #[error(
        "{arg}: {rows} rows at a stride of {row_stride} {storage} elements exceed the largest size of {} bytes",
        isize::MAX
    )]
    TooLarge {
        /// The tensor.
        arg: &'static str,
        /// Its rows.
        rows: usize,
        /// Its row stride, in elements.
        row_stride: usize,
        /// The type of its elements.
        storage: Storage,
    },
    /// A tensor or parameter that this operation needs was not given.
    #[error("{arg} is missing: {why}")]
    Missing {
        /// The tensor.
        arg: &'static str,
        /// The rule that asks for it.
        why: &'static str,
    },
    /// A tensor was given that this operation does not take.
    #[error("{arg} must not be given: {why}")]
    Unexpected {
        /// The tensor.
        arg: &'static str,
        /// The rule that forbids it.
        why: &'static str,
    },
    /// An output shares memory with another tensor of the same call.
    #[error("{output} overlaps {other} in memory: use another buffer, or Forward::in_place to overwrite x")]
    Overlap {
        /// The output.
        output: &'static str,
        /// The other tensor.
        other: &'static str,
    },
    /// An argument that breaks another rule than those above.
    #[error("{arg}: {rule}")]
    InvalidArgument {
        /// The argument.
        arg: &'static str,
        /// The rule that it breaks, with the given value.
        rule: String,
    },
    /// A valid request that this backend, or every backend, does not implement.
    #[error("unsupported: {rule}")]
    Unsupported {
        /// The rule that excludes it, with the requested value.
        rule: String,
    },
    /// A backend cannot be used on this machine.
    #[error("the {backend} backend is not available: {reason}")]
    Unavailable {
        /// The backend.
        backend: &'static str,
        /// The missing part. `; fix: ` and the command or step that supplies it follow where the backend knows one.
        reason: String,
    },
    /// The device, its driver or its compiler failed.
    #[error("{backend} device error: {source}")]
    Device {
        /// The backend.
        backend: &'static str,
        /// The reported error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

fn expected_elements(min: usize, max: usize) -> String {
    if min == max {
        min.to_string()
    } else if max == usize::MAX {
        format!("at least {min}")
    } else {
        format!("{min} to {max}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    /// Messages name the argument, the expected value and the given value.
    #[test]
    fn messages_say_what_was_expected_and_what_came() {
        let length = |min, max, got| Error::Length { arg: "x", min, max, got }.to_string();
        assert_eq!(length(4, 4, 3), "x: expected 4 elements, got 3");
        assert_eq!(length(4, usize::MAX, 3), "x: expected at least 4 elements, got 3");
        assert_eq!(length(4, 8, 9), "x: expected 4 to 8 elements, got 9");
        let too_large = Error::TooLarge { arg: "dx", rows: 5, row_stride: 7, storage: DType::Bf16.into() }.to_string();
        let most = "9223372036854775807";
        assert_eq!(
            too_large,
            format!("dx: 5 rows at a stride of 7 bf16 elements exceed the largest size of {most} bytes")
        );
        let stride = Error::Stride { arg: "y", cols: 10, got: 9 }.to_string();
        assert_eq!(stride, "y: row stride must be at least cols = 10, got 9");
        let unavailable = Error::Unavailable { backend: "cuda", reason: "no driver".into() }.to_string();
        assert_eq!(unavailable, "the cuda backend is not available: no driver");
        let invalid = Error::InvalidArgument { arg: "x", rule: "begins at a multiple of 4, got 2".into() }.to_string();
        assert_eq!(invalid, "x: begins at a multiple of 4, got 2");
        let device = Error::Device { backend: "wgpu", source: "lost".into() }.to_string();
        assert_eq!(device, "wgpu device error: lost");
    }
}
