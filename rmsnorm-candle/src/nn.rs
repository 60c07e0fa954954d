//! Modules that load and run like candle-nn's: `use candle_nn::{RmsNorm, rms_norm}` becomes
//! `use rmsnorm_candle::nn::{RmsNorm, rms_norm}`.
//!
//! Differences: they have gradients, take an f32 weight with 16-bit activations, and round once, at
//! the end.
//!
//! # Example
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, VarBuilder, VarMap};
//! use rmsnorm_candle::nn::{AddRmsNorm, RmsNorm, add_rms_norm, rms_norm};
//! # fn main() -> candle_core::Result<()> {
//! let variables = VarMap::new();
//! let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
//! let first: RmsNorm = rms_norm(64, 1e-6, vb.pp("input_layernorm"))?;
//! let second: AddRmsNorm = add_rms_norm(64, 1e-6, vb.pp("post_attention_layernorm"))?;
//!
//! let stream = Tensor::ones((2, 5, 64), DType::F32, &Device::Cpu)?;
//! let attention = first.forward(&stream)?; // and then attention
//! let (y, stream) = second.forward(&attention, &stream)?;
//! assert_eq!(y.dims(), stream.dims());
//! # Ok(())
//! # }
//! ```

mod add_rms_norm;
mod layer_norm;
mod rms_norm;
mod rms_norm_gated;

pub use add_rms_norm::{AddRmsNorm, add_rms_norm};
pub use candle_nn::LayerNormConfig;
pub use layer_norm::{LayerNorm, layer_norm, layer_norm_no_bias};
pub use rms_norm::{RmsNorm, gemma_rms_norm, rms_norm};
pub use rms_norm_gated::{RmsNormGated, rms_norm_gated};

use candle_core::{Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// A vector of `size` under the first of these names that exists. New vectors of a `VarMap` have
/// the first name.
fn vector(size: usize, names: [&str; 2], init: f64, vb: &VarBuilder<'_>) -> Result<Tensor> {
    let [name, old] = names;
    let is_old = !vb.contains_tensor(name) && vb.contains_tensor(old);
    vb.get_with_hints(size, if is_old { old } else { name }, Init::Const(init))
}

/// Old checkpoints name the weight `gamma`.
const WEIGHT: [&str; 2] = ["weight", "gamma"];
/// Old checkpoints name the bias `beta`.
const BIAS: [&str; 2] = ["bias", "beta"];
