//! Shared helpers of the tests: devices, tensors with known values, and values of tensors.

#[cfg(feature = "cuda")]
use std::sync::OnceLock;

use candle_core::{DType, Device, Result, Tensor, Var, WithDType};
use rmsnorm_core::Element;
use rmsnorm_core::conformance::{Arithmetic, Harness, testing};
use rmsnorm_core::cpu::CpuBackend;
#[cfg(feature = "cuda")]
use rmsnorm_core::cuda::CudaBackend;

/// An element type of both libraries.
pub trait Native: Element + WithDType {}
impl<E: Element + WithDType> Native for E {}

/// A device that a test runs on.
pub struct On {
    device: Device,
    /// The arithmetic of the kernels there, which determines error bounds.
    pub arithmetic: Arithmetic,
}

/// Runs the test on the CPU and, with the feature, on a GPU. Without a GPU it prints the reason,
/// and fails if `RMSNORM_REQUIRE` names `cuda`.
pub fn on_each_device(test: impl Fn(&On)) {
    test(&On { device: Device::Cpu, arithmetic: CpuBackend::new().arithmetic() });
    #[cfg(feature = "cuda")]
    if let Some(cuda) = On::cuda() {
        test(&cuda);
    }
}

impl On {
    /// The first GPU. All tests share its device, each on the stream of its thread, as in candle.
    #[cfg(feature = "cuda")]
    pub fn cuda() -> Option<On> {
        static DEVICE: OnceLock<Device> = OnceLock::new();
        let backend = testing::available(CudaBackend::new(0)).unwrap()?;
        let device = DEVICE.get_or_init(|| Device::new_cuda(0).unwrap()).clone();
        Some(On { device, arithmetic: backend.arithmetic() })
    }

    /// Another device of the same kind.
    #[cfg(feature = "cuda")]
    pub fn with(&self, device: Device) -> On {
        On { device, arithmetic: self.arithmetic }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Values between -2 and 2, different for each seed.
    pub fn tensor<E: Native>(&self, shape: &[usize], seed: u64) -> Tensor {
        let len = shape.iter().product();
        Tensor::from_vec(testing::values::<E>(seed, len), shape, &self.device).unwrap()
    }

    pub fn var<E: Native>(&self, shape: &[usize], seed: u64) -> Var {
        Var::from_tensor(&self.tensor::<E>(shape, seed)).unwrap()
    }

    /// Waits for the work of this thread's stream, before other threads use the results.
    pub fn settle(&self) {
        self.device.synchronize().unwrap();
    }
}

/// The same values in f64.
pub fn wide(tensor: &Tensor) -> Var {
    Var::from_tensor(&tensor.to_dtype(DType::F64).unwrap()).unwrap()
}

/// The elements in row order.
pub fn elements<E: WithDType>(tensor: &Tensor) -> Vec<E> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// The elements in f64, exactly.
pub fn f64s(tensor: &Tensor) -> Vec<f64> {
    elements(&tensor.to_dtype(DType::F64).unwrap())
}

/// A scalar whose gradient at y is exactly dy.
pub fn loss(y: &Tensor, dy: &Tensor) -> Tensor {
    (y * dy).unwrap().sum_all().unwrap()
}

/// The message of an error, without a backtrace.
pub fn message<T>(result: Result<T>) -> String {
    let text = result.err().expect("an error").to_string();
    text.lines().next().unwrap_or_default().to_owned()
}
