//! y of a gated norm, from h, the parameters and the gate.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use rmsnorm_core::NormParams;

use super::cell::Cell;
use super::differentiate::differentiate;
use super::normalize::Node;
use super::parameters::Parameters;
use crate::call::{Kernels, Operand};

/// The operation on h, parameters and gate.
pub(crate) struct Gated {
    node: Arc<Node>,
    parameters: Parameters,
}

impl Gated {
    /// y of x. Its rows and the gate's are regular, weight and bias are contiguous, and kernels take
    /// their dtypes.
    pub(crate) fn apply(
        spec: NormParams,
        x: &Tensor,
        (weight, bias): (&Tensor, Option<&Tensor>),
        gate: &Tensor,
    ) -> Result<Tensor> {
        let save = [Some(x), Some(weight), bias, Some(gate)].into_iter().flatten().any(Tensor::track_op);
        Gated::of(Node::alone(spec, save), x, (weight, bias), gate)
    }

    /// y of h.
    pub(super) fn of(
        node: Arc<Node>,
        h: &Tensor,
        (weight, bias): (&Tensor, Option<&Tensor>),
        gate: &Tensor,
    ) -> Result<Tensor> {
        let save = node.save;
        let (tensor, parameters) = Parameters::join(weight, bias)?;
        let op = Gated { node, parameters };
        if save { h.apply_op3(&tensor, gate, op) } else { h.apply_op3_no_bwd(&tensor, gate, &op) }
    }

    fn run<S: Kernels>(&self, [h, parameters, gate]: [Operand<'_, S>; 3]) -> Result<(S, Shape)> {
        let y = Cell::new();
        self.parameters.lend(parameters, |weight, bias| {
            y.put(self.node.y(h, weight, bias, Some(gate))?);
            Ok(())
        })?;
        Node::applied(y.take().flatten(), h)
    }
}

impl CustomOp3 for Gated {
    fn name(&self) -> &'static str {
        self.node.spec.name()
    }

    on_devices!(run: s1 l1, s2 l2, s3 l3);

    fn bwd(
        &self,
        h: &Tensor,
        parameters: &Tensor,
        gate: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (weight, bias) = self.parameters.split(parameters)?;
        let Node { spec, statistics, .. } = &*self.node;
        let made = differentiate(spec, statistics, dy, h, &weight, bias.as_ref(), Some(gate))?;
        let of_parameters = self.parameters.gradient(parameters, (made.dweight, made.dbias))?;
        Ok((made.dx, of_parameters, made.dgate))
    }
}
