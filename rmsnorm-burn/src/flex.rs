//! The calls on tensors of burn's CPU backend. Results are new vectors, of which nobody zeroes the matrices first, or, as in
//! burn's own operations, take the place of what they are computed from, if nobody else has that.

mod add_after;
mod backward;
mod forward;

pub(crate) use add_after::{AddAfterCall, Added};
pub(crate) use backward::BackwardCall;
pub(crate) use forward::{ForwardCall, Normalized};

use burn::tensor::DType;
use rmsnorm_core::{Error, Norm, NormSpec, WithDTypes};

use crate::native::mix;

/// A forward pass's statistics, for backward.
#[derive(Debug)]
pub(crate) struct Statistics {
    /// Empty for RMS norm.
    mean: Vec<f32>,
    rstd: Vec<f32>,
}

impl Statistics {
    /// To be written, or empty unless they are saved.
    fn new(spec: &NormSpec, save: bool) -> Self {
        let of = |is_saved: bool| vec![0f32; if is_saved { spec.rows } else { 0 }];
        Statistics { mean: of(save && spec.norm == Norm::Layer), rstd: of(save) }
    }
}

/// Runs it with the types of these dtypes: of activations, weight and residual stream.
fn dispatch<T, F>(dtypes: [DType; 3], work: F) -> Result<T, Error>
where
    F: WithDTypes<Output = Result<T, Error>>,
{
    match mix(dtypes) {
        Some(dtypes) => dtypes.dispatch(work)?,
        None => {
            Err(Error::Unsupported { rule: format!("no kernels for activations, weight and residual of {dtypes:?}") })
        }
    }
}
