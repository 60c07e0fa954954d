//! The time of a call on the CPU without candle.

use candle_core::{Device, Error, Result, Tensor, WithDType};
use rmsnorm_core::cpu::{BackwardInputs, CpuBackend, Forward, ForwardInputs};
use rmsnorm_core::{Element, NormSpec, Tensor as Name};

use crate::EPS;
use crate::table::{Table, case};

/// The CPU device; prints its name.
pub fn device() -> Device {
    println!("{}", CpuBackend::new());
    Device::Cpu
}

/// Times forward and backward of an RMS norm without candle, and candle's engine without the norm.
pub fn apart<T: Element + WithDType>(table: &Table, [x, w, dy]: [&Tensor; 3]) -> Result<()> {
    let [rows, cols] = table.shape;
    let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<T>();
    let (xs, ws, dys) = (values(x)?, values(w)?, values(dy)?);
    let (backend, norm) = (CpuBackend::new(), NormSpec::rms(rows, cols, EPS));
    let forward = || {
        let inputs = ForwardInputs::<T>::new(&xs).weight(&ws);
        backend.forward_vec(&norm, inputs, &[Name::Rstd]).map_err(Error::wrap)
    };
    let reused = std::cell::RefCell::new(forward()?.y);
    let rstd = forward()?.rstd;
    let backward = || {
        let inputs = BackwardInputs::<T>::new(&dys, &xs, &rstd).weight(&ws);
        backend.backward_vec(&norm, inputs, &[Name::Dweight]).map_err(Error::wrap)
    };
    table.print(
        "of rms_norm forward, without candle",
        2,
        &[
            case("the kernel, into memory that is there", || {
                let mut y = reused.borrow_mut();
                backend.forward(&norm, Forward::new(&xs, &mut *y).weight(&ws)).map_err(Error::wrap)
            }),
            case("the kernel, into new memory", forward),
        ],
    )?;
    table.print(
        "of rms_norm forward + backward, told apart",
        5,
        &[
            case("the kernels, into new memory", || Ok((forward()?, backward()?))),
            // candle's backward fills the result's gradient with ones, and adds each gradient to
            // zeros.
            case("candle's engine: ones, zeros, additions", || {
                Ok((x.ones_like()?, (x.zeros_like()? + dy)?, (w.zeros_like()? + w)?))
            }),
        ],
    )
}
