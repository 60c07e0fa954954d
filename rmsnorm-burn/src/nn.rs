//! Modules that are configured, called and saved like burn's:
//! `use burn::nn::{RmsNorm, RmsNormConfig}` becomes
//! `use rmsnorm_burn::nn::{RmsNorm, RmsNormConfig}`, and each loads the other's records.
//!
//! Differences: they round once, at the end, and take an f32 weight with 16-bit activations.
//! Besides `forward` a norm has `add_forward`, which adds a residual before the norm, and
//! `forward_add`, which adds one after it. RMS norms also have `forward_add_forward`: `forward_add`
//! and the next norm.
//!
//! # Example
//! ```
//! use burn::tensor::{Device, Tensor};
//! use rmsnorm_burn::nn::{AddRmsNormConfig, RmsNormConfig};
//!
//! let device = Device::flex();
//! let first = RmsNormConfig::new(64).with_epsilon(1e-6).init(&device);
//! let second = AddRmsNormConfig::new(64).with_epsilon(1e-6).init(&device);
//!
//! let stream = Tensor::<3>::ones([2, 5, 64], &device);
//! let attention = first.forward(stream.clone()); // and then attention
//! let (y, stream) = second.forward(attention, stream);
//! assert_eq!(y.dims(), stream.dims());
//! ```

/// Displays a norm's attributes in one line, as burn does. `$more` are attributes of only some
/// norms, each with a function of the norm.
macro_rules! in_one_line {
    ($norm:ident $(, $more:literal: $value:expr)*) => {
        impl burn::module::ModuleDisplay for $norm {
            fn custom_settings(&self) -> Option<burn::module::DisplaySettings> {
                burn::module::DisplaySettings::new().with_new_line_after_attribute(false).optional()
            }

            fn custom_content(&self, content: burn::module::Content) -> Option<burn::module::Content> {
                let [d_model] = self.gamma.shape().dims();
                let content = content.add("d_model", &d_model).add("epsilon", &self.epsilon);
                content$(.add($more, &($value)(self)))*.optional()
            }
        }
    };
}

mod add_rms_norm;
mod layer_norm;
mod rms_norm;
mod rms_norm_gated;

pub use add_rms_norm::{AddRmsNorm, AddRmsNormConfig};
pub use layer_norm::{LayerNorm, LayerNormConfig};
pub use rms_norm::{GemmaRmsNorm, GemmaRmsNormConfig, RmsNorm, RmsNormConfig};
pub use rms_norm_gated::{RmsNormGated, RmsNormGatedConfig};

use burn::module::Param;
use burn::tensor::{Device, Tensor};

/// Checks that one call can compute both norms: it has one `epsilon`.
fn has_one_epsilon(epsilon: f64, next: f64) -> Result<(), String> {
    if epsilon == next {
        return Ok(());
    }
    Err(format!("rms_norm: both norms must have one epsilon, got {epsilon} and {next}"))
}

/// A parameter of that size and one value.
fn parameter(size: usize, value: burn::nn::Initializer, device: &Device) -> Param<Tensor<1>> {
    value.init([size], device)
}
