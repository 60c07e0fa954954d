//! RMS norm with a gate, as a module.

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use rmsnorm_core::{Activation, Slot};

use super::{WEIGHT, vector};
use crate::Norm;

/// RMS norm over the last dimension with a gate: `norm(x) * silu(gate)` as in Qwen3-Next or, after
/// [`gate_before`](Self::gate_before), `norm(x * silu(gate))` as in Mamba2. Called as `forward(&x, &gate)`.
///
/// # Example
/// The norm of a Mamba2 layer, with 8 groups of 128 columns:
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use rmsnorm_candle::nn::rms_norm_gated;
/// # fn main() -> candle_core::Result<()> {
/// let variables = VarMap::new();
/// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// let norm = rms_norm_gated(1024, 1e-5, vb.pp("mixer.norm"))?.gate_before().groups(8);
///
/// let (x, z) = (Tensor::ones((2, 5, 1024), DType::F32, &Device::Cpu)?, Tensor::ones((2, 5, 1024), DType::F32, &Device::Cpu)?);
/// assert_eq!(norm.forward(&x, &z)?.dims(), [2, 5, 1024]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RmsNormGated {
    weight: Tensor,
    eps: f64,
    activation: Activation,
    slot: Slot,
    groups: usize,
}

impl RmsNormGated {
    /// With this weight, (cols), and silu of a gate after the norm.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        RmsNormGated { weight, eps, activation: Activation::Silu, slot: Slot::After, groups: 1 }
    }

    /// With this activation of the gate.
    pub fn activation(self, activation: Activation) -> Self {
        RmsNormGated { activation, ..self }
    }

    /// With the gate before the norm.
    pub fn gate_before(self) -> Self {
        RmsNormGated { slot: Slot::Before, ..self }
    }

    /// With this number of groups of columns, each with its own statistics. It divides the columns.
    pub fn groups(self, groups: usize) -> Self {
        RmsNormGated { groups, ..self }
    }

    /// The loaded weight.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The number added to the mean square.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// The gated norm of `x`, in its dtype. `x` and `gate`: (.., cols).
    ///
    /// # Errors
    /// As [`Norm::apply`], for example if the gate has another shape than `x`.
    pub fn forward(&self, x: &Tensor, gate: &Tensor) -> Result<Tensor> {
        let norm = Norm::rms(self.eps).groups(self.groups);
        let norm = match self.slot {
            Slot::Before => norm.gate_before(gate, self.activation),
            Slot::After => norm.gate_after(gate, self.activation),
        };
        norm.apply(x, &self.weight)
    }
}

/// Loads `weight` (or `gamma`); a `VarMap` creates it as ones.
///
/// # Errors
/// As [`super::rms_norm`].
pub fn rms_norm_gated(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<RmsNormGated> {
    Ok(RmsNormGated::new(vector(size, WEIGHT, 1.0, &vb)?, eps))
}
