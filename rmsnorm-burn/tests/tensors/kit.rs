//! What the tests share: tensors with known values, and those of a tensor.

use burn::tensor::{DType, Device, Tensor, TensorData};
use rmsnorm_core::Element;
use rmsnorm_core::conformance::testing;

/// An element type of both libraries.
pub trait Native: Element + burn::tensor::Element {}
impl<E: Element + burn::tensor::Element> Native for E {}

/// burn's CPU backend with autodiff.
pub fn device() -> Device {
    Device::flex().autodiff()
}

/// Values between -2 and 2 on that device, other ones for each seed.
pub fn tensor_on<E: Native, const D: usize>(device: &Device, dims: [usize; D], seed: u64) -> Tensor<D> {
    let values = testing::values::<E>(seed, dims.iter().product());
    Tensor::from_data(TensorData::new(values, dims), (device, E::dtype()))
}

/// A constant.
pub fn tensor<E: Native, const D: usize>(dims: [usize; D], seed: u64) -> Tensor<D> {
    tensor_on::<E, D>(&device(), dims, seed)
}

/// A leaf that is tracked.
pub fn var<E: Native, const D: usize>(dims: [usize; D], seed: u64) -> Tensor<D> {
    tensor::<E, D>(dims, seed).require_grad()
}

/// The same values, untracked: `detach` alone makes a new leaf of a leaf.
pub fn frozen<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    tensor.clone().detach().set_require_grad(false)
}

/// The same values in f64, as a leaf.
pub fn wide<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    frozen(tensor).cast(DType::F64).require_grad()
}

/// In the order of its rows.
pub fn elements<E: Native, const D: usize>(tensor: &Tensor<D>) -> Vec<E> {
    tensor.clone().into_data().try_to_vec().unwrap()
}

/// Exactly.
pub fn f64s<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.clone().cast(DType::F64).into_data().try_to_vec().unwrap()
}

/// A scalar whose gradient at y is exactly dy.
pub fn loss<const D: usize>(y: Tensor<D>, dy: &Tensor<D>) -> Tensor<1> {
    (y * dy.clone()).sum()
}

/// What a panic says.
pub fn message<T>(call: impl FnOnce() -> T) -> String {
    let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).err().expect("a panic");
    *payload.downcast::<String>().expect("a message")
}
