//! The path of burn's own operations, for f64, mixes without kernels and other devices.
//!
//! | | reference |
//! |---|---|
//! | [`definition`] | the definition in f64: every function alone, on two devices |
//! | [`chains`] | central differences, and the kernels: chains of all functions |
//! | [`mixes`] | the same functions in f64: every function in dtypes that are rounded |

mod chains;
mod definition;
mod mixes;

use burn::tensor::{Device, Tensor};

use crate::kit::{Native, device, f64s, tensor_on, wide};

/// Exact in f32, so that the reference has the same eps.
const EPS: f64 = 1.0 / 1024.0;

/// Both sides compute in f64, with different orders of about forty operations and of sums of up to
/// 96 terms.
const CLOSE: f64 = 256.0 * f64::EPSILON;

fn assert_close<const D: usize>(got: &Tensor<D>, expected: &[f64], closeness: f64, what: &str) {
    let got = f64s(got);
    assert_eq!(got.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1.0, |largest: f64, value| largest.max(value.abs()));
    let error = got.iter().zip(expected).fold(0.0, |error: f64, (got, expected)| error.max((got - expected).abs()));
    assert!(error <= closeness * largest, "{what}: {error:e} of {largest}");
}

/// Two devices: the one with our kernels, which this path does not use, and one without.
fn devices() -> [Device; 2] {
    #[expect(deprecated, reason = "burn would have Flex instead, which is the other one")]
    let other = Device::ndarray();
    [device(), other.autodiff()]
}

fn var_on<E: Native, const D: usize>(device: &Device, dims: [usize; D], seed: u64) -> Tensor<D> {
    tensor_on::<E, D>(device, dims, seed).require_grad()
}

fn var64<const D: usize>(device: &Device, dims: [usize; D], seed: u64) -> Tensor<D> {
    wide(&tensor_on::<f32, D>(device, dims, seed))
}

/// The leaves of a chain, or of a mix.
#[derive(Clone)]
struct Leaves {
    x: Tensor<2>,
    r: Tensor<2>,
    w: Tensor<1>,
    b: Tensor<1>,
}

impl Leaves {
    fn wide(&self) -> Leaves {
        Leaves { x: wide(&self.x), r: wide(&self.r), w: wide(&self.w), b: wide(&self.b) }
    }
}
