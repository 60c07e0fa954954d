//! y of x, or of the sum of x and a residual; the sum of a residual and the norm of x, and the next norm of that sum.

use burn::backend::wgpu::CubeBackend;
use rmsnorm_core::wgpu::Forward;
use rmsnorm_core::{Element, Error, Tensor, WithDTypes};

use super::buffers::{Lent, Regular};
use super::shared_backend;
use crate::kernels::{ForwardCall, Forwarded, Maybe};

impl WithDTypes for ForwardCall<CubeBackend> {
    type Output = Result<Forwarded<CubeBackend>, Error>;

    fn call<T: Element, W: Element, R: Element>(self) -> Self::Output {
        let norms = shared_backend(&self.x.device, &self.x.client)?;
        let ForwardCall { spec, x, residual, weight, bias, next_weight, wanted } = self;
        let (x, weight) = (Regular::new(x)?, Regular::new(weight)?);
        let (residual, bias) = (residual.map(Regular::new).transpose()?, bias.map(Regular::new).transpose()?);
        let next_weight = next_weight.map(Regular::new).transpose()?;
        let statistic = |name: Tensor| Maybe::of(wanted.has(name).then(|| x.empty_statistic()));
        let made = Forwarded {
            y: Maybe::of(wanted.has(Tensor::Y).then(|| x.empty_matrix(T::DTYPE))),
            residual_out: Maybe::of(wanted.has(Tensor::ResidualOut).then(|| x.empty_matrix(R::DTYPE))),
            mean: statistic(Tensor::Mean),
            rstd: statistic(Tensor::Rstd),
            next_mean: statistic(Tensor::NextMean),
            next_rstd: statistic(Tensor::NextRstd),
        };
        let spec = spec.sized(&x.rows);

        let lend = |tensor: &Option<Regular>| tensor.as_ref().map(Regular::lend).transpose();
        let (x, weight) = (x.lend()?, weight.lend()?);
        let (residual, bias, next_weight) = (lend(&residual)?, lend(&bias)?, lend(&next_weight)?);
        let new = |tensor: &Maybe<CubeBackend>| tensor.as_ref().map(Lent::of_new).transpose();
        let (y, residual_out) = (new(&made.y)?, new(&made.residual_out)?);
        let (mean, rstd) = (new(&made.mean)?, new(&made.rstd)?);
        let (next_mean, next_rstd) = (new(&made.next_mean)?, new(&made.next_rstd)?);

        let args = Forward::<T>::onto_residual(x.matrix::<T>()).weight_dtype::<W>().residual_dtype::<R>();
        let mut args = args.weight(weight.vector());
        if let Some(residual) = &residual {
            args = args.residual(residual.matrix());
        }
        args.y = y.as_ref().map(Lent::matrix);
        args.residual_out = residual_out.as_ref().map(Lent::matrix);
        args.bias = bias.as_ref().map(Lent::vector);
        args.next_weight = next_weight.as_ref().map(Lent::vector);
        args.mean = mean.as_ref().map(Lent::vector);
        args.rstd = rstd.as_ref().map(Lent::vector);
        args.next_mean = next_mean.as_ref().map(Lent::vector);
        args.next_rstd = next_rstd.as_ref().map(Lent::vector);
        norms.forward(&spec, args)?;
        Ok(made)
    }
}
