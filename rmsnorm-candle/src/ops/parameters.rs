//! Weight and bias of an operation that gets them as one tensor: candle takes no fourth tensor with
//! a gradient.

use candle_core::{Layout, Result, Tensor, bail};

use super::lend::lend;
use crate::call::{Kernels, Operand};

/// The weight and, if it has a gradient, the bias in one tensor.
pub(super) struct Parameters {
    cols: usize,
    /// A bias that has no gradient.
    lent: Option<Tensor>,
}

impl Parameters {
    /// The tensor for the operation, and how to read it.
    pub(super) fn join(weight: &Tensor, bias: Option<&Tensor>) -> Result<(Tensor, Self)> {
        let cols = weight.elem_count();
        match bias {
            Some(bias) if bias.track_op() => Ok((Tensor::cat(&[weight, bias], 0)?, Parameters { cols, lent: None })),
            _ => Ok((weight.clone(), Parameters { cols, lent: bias.cloned() })),
        }
    }

    /// Calls `f` with weight and bias.
    pub(super) fn lend<S: Kernels>(
        &self,
        (storage, layout): Operand<'_, S>,
        f: impl Fn(Operand<'_, S>, Option<Operand<'_, S>>) -> Result<()>,
    ) -> Result<()> {
        let part = |first| layout.narrow(0, first, self.cols);
        let weight = part(0)?;
        let bias: Option<Layout> = self.has_bias(layout.shape().elem_count()).then(|| part(self.cols)).transpose()?;
        let bias = bias.as_ref().map(|bias| (storage, bias));
        lend(self.lent.as_ref(), |lent| f((storage, &weight), lent.or(bias)))
    }

    /// Weight and bias as tensors, tracked as their tensor is.
    pub(super) fn split(&self, parameters: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        if !self.has_bias(parameters.elem_count()) {
            return Ok((parameters.clone(), self.lent.clone()));
        }
        Ok((parameters.narrow(0, 0, self.cols)?, Some(parameters.narrow(0, self.cols, self.cols)?)))
    }

    /// The gradient of the tensor.
    pub(super) fn gradient(
        &self,
        parameters: &Tensor,
        (dweight, dbias): (Option<Tensor>, Option<Tensor>),
    ) -> Result<Option<Tensor>> {
        match (self.has_bias(parameters.elem_count()), dweight, dbias) {
            (false, dweight, _) => Ok(dweight),
            (true, Some(dweight), Some(dbias)) => Tensor::cat(&[dweight, dbias], 0).map(Some),
            (true, None, _) | (true, _, None) => bail!("backward computed no gradient of the weight or of the bias"),
        }
    }

    const fn has_bias(&self, len: usize) -> bool {
        len > self.cols
    }
}
