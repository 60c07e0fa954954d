//! RMS norm with a gate, as a module.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use rmsnorm_core::Activation;

use super::parameter;
use crate::Norm;

/// The configuration of a [`RmsNormGated`].
#[derive(Config, Debug)]
pub struct RmsNormGatedConfig {
    /// Elements of a row.
    pub d_model: usize,
    /// The number added to the mean square. 1e-5 by default, as in burn's own norms.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether the gate's activation is sigmoid. By default it is silu.
    #[config(default = false)]
    pub sigmoid: bool,
    /// Whether the gate multiplies `x` before the norm, as in Mamba2. By default it multiplies the
    /// norm, as in Qwen3-Next.
    #[config(default = false)]
    pub gate_before: bool,
    /// Groups of columns, each with its own statistics: a divisor of `d_model`. 1 by default.
    #[config(default = 1)]
    pub groups: usize,
}

impl RmsNormGatedConfig {
    /// A norm with a weight of ones.
    pub fn init(&self, device: &Device) -> RmsNormGated {
        let &RmsNormGatedConfig { d_model, epsilon, sigmoid, gate_before, groups } = self;
        RmsNormGated { gamma: parameter(d_model, Initializer::Ones, device), epsilon, sigmoid, gate_before, groups }
    }
}

/// RMS norm over the last dimension with a gate: `norm(x) * silu(gate)` or `norm(x * silu(gate))`.
///
/// # Example
/// The norm of a Mamba2 layer, with 8 groups of 128 columns:
/// ```
/// use burn::tensor::{Device, Tensor};
/// use rmsnorm_burn::nn::RmsNormGatedConfig;
///
/// let device = Device::flex();
/// let norm = RmsNormGatedConfig::new(1024).with_gate_before(true).with_groups(8).init(&device);
/// let (x, z) = (Tensor::<3>::ones([2, 5, 1024], &device), Tensor::<3>::ones([2, 5, 1024], &device));
/// assert_eq!(norm.forward(x, z).dims(), [2, 5, 1024]);
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct RmsNormGated {
    /// The weight: (d_model).
    pub gamma: Param<Tensor<1>>,
    /// The number added to the mean square.
    pub epsilon: f64,
    /// Whether the gate's activation is sigmoid, not silu.
    pub sigmoid: bool,
    /// Whether the gate multiplies `x` before the norm.
    pub gate_before: bool,
    /// Groups of columns, each with its own statistics.
    pub groups: usize,
}

impl RmsNormGated {
    /// As [`Norm::gate_after`] or [`Norm::gate_before`].
    ///
    /// # Shapes
    /// `x`, `gate` and the result: (.., d_model), of any rank from 1.
    ///
    /// # Panics
    /// As [the crate](crate#panics) says.
    pub fn forward<const D: usize>(&self, x: Tensor<D>, gate: Tensor<D>) -> Tensor<D> {
        let norm = Norm::rms(self.epsilon).groups(self.groups);
        let activation = if self.sigmoid { Activation::Sigmoid } else { Activation::Silu };
        let norm =
            if self.gate_before { norm.gate_before(gate, activation) } else { norm.gate_after(gate, activation) };
        norm.apply(x, self.gamma.val())
    }
}

in_one_line!(
    RmsNormGated,
    "sigmoid": |norm: &RmsNormGated| norm.sigmoid,
    "gate_before": |norm: &RmsNormGated| norm.gate_before,
    "groups": |norm: &RmsNormGated| norm.groups
);
