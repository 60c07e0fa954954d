//! The gradients of a norm.

use burn::backend::wgpu::CubeBackend;
use rmsnorm_core::wgpu::Backward;
use rmsnorm_core::{Element, Error, Tensor, WithDTypes};

use super::buffers::{Lent, Regular};
use super::shared_backend;
use crate::kernels::{BackwardCall, Gradients, Maybe};

impl WithDTypes for BackwardCall<CubeBackend> {
    type Output = Result<Gradients<CubeBackend>, Error>;

    fn call<T: Element, W: Element, R: Element>(self) -> Self::Output {
        let norms = shared_backend(&self.x.device, &self.x.client)?;
        let BackwardCall { spec, dy, x, weight, mean, rstd, wanted } = self;
        let (dy, x, weight) = (Regular::new(dy)?, Regular::new(x)?, Regular::new(weight)?);
        let (mean, rstd) = (mean.map(Regular::new).transpose()?, Regular::new(rstd)?);
        let dx = x.empty_matrix(T::DTYPE);
        // The gradient of an f32 stream is not to be rounded to the activations' dtype.
        let dresidual = (T::DTYPE != R::DTYPE).then(|| x.empty_matrix(R::DTYPE));
        let parameter = |name: Tensor| Maybe::of(wanted.has(name).then(|| weight.empty_matrix(W::DTYPE)));
        let (dweight, dbias) = (parameter(Tensor::Dweight), parameter(Tensor::Dbias));
        let spec = spec.sized(&x.rows);

        let (dy, x, weight, rstd) = (dy.lend()?, x.lend()?, weight.lend()?, rstd.lend()?);
        let mean = mean.as_ref().map(Regular::lend).transpose()?;
        let into_dx = Lent::of_new(&dx)?;
        let into_dresidual = dresidual.as_ref().map(Lent::of_new).transpose()?;
        let new = |tensor: &Maybe<CubeBackend>| tensor.as_ref().map(Lent::of_new).transpose();
        let (into_dweight, into_dbias) = (new(&dweight)?, new(&dbias)?);

        let args = Backward::<T, W, R>::mixed(dy.matrix::<T>(), x.matrix::<R>(), rstd.vector(), into_dx.matrix::<T>());
        let mut args = args.weight(weight.vector());
        args.mean = mean.as_ref().map(Lent::vector);
        args.dresidual = into_dresidual.as_ref().map(Lent::matrix);
        args.dweight = into_dweight.as_ref().map(Lent::vector);
        args.dbias = into_dbias.as_ref().map(Lent::vector);
        norms.backward(&spec, args)?;
        Ok(Gradients { dx: dresidual.unwrap_or(dx), dweight, dbias })
    }
}
