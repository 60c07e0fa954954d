//! What the tests share: tensors with known values, and those of a tensor.

use candle_core::{DType, Device, Result, Tensor, Var, WithDType};
use rmsnorm_core::Element;
use rmsnorm_core::conformance::testing;

/// An element type of both libraries.
pub trait Native: Element + WithDType {}
impl<E: Element + WithDType> Native for E {}

/// Values between -2 and 2, other ones for each seed.
pub fn tensor<E: Native>(shape: &[usize], seed: u64) -> Tensor {
    let len = shape.iter().product();
    Tensor::from_vec(testing::values::<E>(seed, len), shape, &Device::Cpu).unwrap()
}

pub fn var<E: Native>(shape: &[usize], seed: u64) -> Var {
    Var::from_tensor(&tensor::<E>(shape, seed)).unwrap()
}

/// The same values in f64.
pub fn wide(tensor: &Tensor) -> Var {
    Var::from_tensor(&tensor.to_dtype(DType::F64).unwrap()).unwrap()
}

/// In the order of its rows.
pub fn elements<E: WithDType>(tensor: &Tensor) -> Vec<E> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Exactly.
pub fn f64s(tensor: &Tensor) -> Vec<f64> {
    elements(&tensor.to_dtype(DType::F64).unwrap())
}

/// A scalar whose gradient at y is exactly dy.
pub fn loss(y: &Tensor, dy: &Tensor) -> Tensor {
    (y * dy).unwrap().sum_all().unwrap()
}

/// What an error says, without a backtrace.
pub fn message<T>(result: Result<T>) -> String {
    let text = result.err().expect("an error").to_string();
    text.lines().next().unwrap_or_default().to_owned()
}
