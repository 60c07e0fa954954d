//! y of x, or of the sum of x and a residual; the sum of a residual and the norm of x, and the next norm of that sum.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::Shape;
use rmsnorm_core::cpu::{CpuBackend, Forward, ForwardInputs};
use rmsnorm_core::{Element, Error, NormSpec, ResidualPlacement, RowLayout, Tensor, TensorSet, WithDTypes};

use super::rows::{Owned, Regular, wrap};
use crate::kernels::{ForwardCall, Forwarded, Maybe};

impl ForwardCall<Flex> {
    /// y over x, and the sum over the residual.
    fn in_place<T: Element, W: Element, R: Element>(self) -> Result<Forwarded<Flex>, Error> {
        let ForwardCall { spec, x, residual, weight, bias, wanted, .. } = self;
        let Some(rows) = RowLayout::dense(x.layout().shape()) else {
            return Err(Error::Unsupported { rule: "x has no dimension to normalize over".to_owned() });
        };
        let (weight, bias) = (Regular::new(weight)?, bias.map(Regular::new).transpose()?);
        let (mut x, mut residual) = (Owned::new(x), residual.map(Owned::new));
        let mut statistics = Statistics::new(&rows, wanted);
        let args = Forward::<T>::in_place(x.elements::<T>()?).weight_dtype::<W>().residual_dtype::<R>();
        let mut args = statistics.lend(args.weight(weight.vector()?));
        if let Some(bias) = &bias {
            args = args.bias(bias.vector()?);
        }
        if let Some(residual) = &mut residual {
            args = args.residual_in_place(residual.elements::<R>()?);
        }
        CpuBackend::new().forward(&spec.sized(&rows), args)?;
        let residual_out = residual.map(Owned::into_tensor);
        Ok(statistics.beside(Some(x.into_tensor()), residual_out))
    }

    /// The sum with the norm of x over the residual, without a next norm.
    fn onto_residual<T: Element, W: Element, R: Element>(self, residual: FlexTensor) -> Result<Forwarded<Flex>, Error> {
        let ForwardCall { spec, x, weight, bias, wanted, .. } = self;
        let (x, weight, bias) = (Regular::new(x)?, Regular::new(weight)?, bias.map(Regular::new).transpose()?);
        let mut residual = Owned::new(residual);
        let mut statistics = Statistics::new(&x.rows, wanted);
        let args = Forward::<T>::onto_residual(x.read::<T>()?).weight_dtype::<W>().residual_dtype::<R>();
        let args = args.weight(weight.vector()?).residual_in_place(residual.elements::<R>()?);
        let mut args = statistics.lend(args);
        if let Some(bias) = &bias {
            args = args.bias(bias.vector()?);
        }
        CpuBackend::new().forward(&spec.sized(&x.rows), args)?;
        Ok(statistics.beside(None, Some(residual.into_tensor())))
    }
}

impl WithDTypes for ForwardCall<Flex> {
    type Output = Result<Forwarded<Flex>, Error>;

    fn call<T: Element, W: Element, R: Element>(mut self) -> Self::Output {
        match self.spec.residual_placement {
            ResidualPlacement::Before if Owned::is(&self.x) && self.residual.as_ref().is_none_or(Owned::is) => {
                return self.in_place::<T, W, R>();
            }
            // With a next norm y would have to be zeroed first: only where all results are new nobody needs to.
            ResidualPlacement::After if self.next_weight.is_none() => {
                if let Some(residual) = self.residual.take_if(|residual| Owned::is(residual)) {
                    return self.onto_residual::<T, W, R>(residual);
                }
            }
            ResidualPlacement::Before | ResidualPlacement::After => {}
        }
        let ForwardCall { spec, x, residual, weight, bias, next_weight, wanted } = self;
        let shape = x.layout().shape().clone();
        let (x, weight) = (Regular::new(x)?, Regular::new(weight)?);
        let residual = residual.map(Regular::new).transpose()?;
        let bias = bias.map(Regular::new).transpose()?;
        let next_weight = next_weight.map(Regular::new).transpose()?;
        let mut inputs = ForwardInputs::<T, W, R>::mixed(x.read::<T>()?).weight(weight.vector()?);
        if let Some(bias) = &bias {
            inputs = inputs.bias(bias.vector()?);
        }
        if let Some(residual) = &residual {
            inputs = inputs.residual(residual.read::<R>()?);
        }
        if let Some(next_weight) = &next_weight {
            inputs = inputs.next_weight(next_weight.vector()?);
        }
        let spec = spec.sized(&x.rows);
        let made = CpuBackend::new().forward_vec(&spec, inputs, wanted)?;
        let give = Given { spec, wanted };
        Ok(Forwarded {
            y: give.matrix(Tensor::Y, made.y, &shape),
            residual_out: give.matrix(Tensor::ResidualOut, made.residual_out, &shape),
            mean: give.statistic(Tensor::Mean, made.mean),
            rstd: give.statistic(Tensor::Rstd, made.rstd),
            next_mean: give.statistic(Tensor::NextMean, made.next_mean),
            next_rstd: give.statistic(Tensor::NextRstd, made.next_rstd),
        })
    }
}

/// Vectors as tensors, where they are wanted.
struct Given {
    spec: NormSpec,
    wanted: TensorSet,
}

impl Given {
    fn matrix<T: Element>(&self, name: Tensor, values: Vec<T>, shape: &Shape) -> Maybe<Flex> {
        Maybe::of(self.wanted.has(name).then(|| wrap(values, shape.clone())))
    }

    fn statistic(&self, name: Tensor, values: Vec<f32>) -> Maybe<Flex> {
        self.matrix(name, values, &Shape::from([self.spec.rows]))
    }
}

/// Those of x that are wanted, to be written beside what is overwritten.
struct Statistics {
    mean: Option<Vec<f32>>,
    rstd: Option<Vec<f32>>,
}

impl Statistics {
    fn new(rows: &RowLayout, wanted: TensorSet) -> Self {
        let of = |name: Tensor| wanted.has(name).then(|| vec![0f32; rows.rows]);
        Statistics { mean: of(Tensor::Mean), rstd: of(Tensor::Rstd) }
    }

    fn lend<'a, T: Element, W: Element, R: Element>(
        &'a mut self,
        mut args: Forward<'a, T, W, R>,
    ) -> Forward<'a, T, W, R> {
        args.mean = self.mean.as_deref_mut();
        args.rstd = self.rstd.as_deref_mut();
        args
    }

    fn beside(self, y: Option<FlexTensor>, residual_out: Option<FlexTensor>) -> Forwarded<Flex> {
        let tensor = |values: Option<Vec<f32>>| {
            Maybe::of(values.map(|values| {
                let shape = Shape::from([values.len()]);
                wrap(values, shape)
            }))
        };
        Forwarded {
            y: Maybe::of(y),
            residual_out: Maybe::of(residual_out),
            mean: tensor(self.mean),
            rstd: tensor(self.rstd),
            next_mean: Maybe::None,
            next_rstd: Maybe::None,
        }
    }
}
