//! Shared helpers of the tests: tensors with known values, and values of tensors.

use std::cell::RefCell;
#[cfg(feature = "wgpu")]
use std::sync::OnceLock;

#[cfg(feature = "wgpu")]
use burn::tensor::wgpu::WgpuSetup;
use burn::tensor::{DType, Device, Tensor, TensorData};
use rmsnorm_core::Element;
use rmsnorm_core::conformance::{Arithmetic, Harness, testing};
use rmsnorm_core::cpu::CpuBackend;
#[cfg(feature = "wgpu")]
use rmsnorm_core::wgpu::WgpuBackend;

/// An element type of both libraries.
pub trait Native: Element + burn::tensor::Element {}
impl<E: Element + burn::tensor::Element> Native for E {}

/// A device that a test runs on.
#[derive(Clone)]
struct On {
    device: Device,
    arithmetic: Arithmetic,
}

impl On {
    fn cpu() -> Self {
        On { device: Device::flex(), arithmetic: CpuBackend::new().arithmetic() }
    }

    #[cfg(feature = "wgpu")]
    fn wgpu() -> Option<Self> {
        let (device, _) = shared()?;
        let arithmetic = rmsnorm_burn::wgpu::backend(&device).unwrap().arithmetic();
        Some(On { device, arithmetic })
    }
}

/// burn's default wgpu device, shared, and its setup; one for all tests. `None` without an adapter.
#[cfg(feature = "wgpu")]
pub fn shared() -> Option<(Device, WgpuSetup)> {
    static SHARED: OnceLock<Result<(Device, WgpuSetup), String>> = OnceLock::new();
    testing::available(WgpuBackend::device_count()).unwrap()?;
    // A failure is the same for every test: burn opens a runtime once.
    let open = || -> Result<_, String> {
        let (device, setup) = Device::wgpu_options().init_with_setup().map_err(|error| error.to_string())?;
        rmsnorm_burn::wgpu::share(&device, &setup).map_err(|error| error.to_string())?;
        Ok((device, setup))
    };
    Some(SHARED.get_or_init(open).clone().unwrap())
}

thread_local! {
    /// The device of this thread's test.
    static ON: RefCell<On> = RefCell::new(On::cpu());
}

/// Runs the test on burn's CPU backend and, with the feature, on wgpu. Without an adapter it prints
/// the reason, and fails if `RMSNORM_REQUIRE` names `wgpu`.
pub fn on_each_device(test: impl Fn()) {
    test();
    #[cfg(feature = "wgpu")]
    if let Some(wgpu) = On::wgpu() {
        ON.set(wgpu);
        test();
    }
}

/// The test's device, without autodiff.
pub fn plain() -> Device {
    ON.with_borrow(|on| on.device.clone())
}

/// The test's device, with autodiff.
pub fn device() -> Device {
    plain().autodiff()
}

/// The arithmetic of the kernels there, which determines error bounds.
pub fn arithmetic() -> Arithmetic {
    ON.with_borrow(|on| on.arithmetic)
}

/// Whether burn can compute in that dtype there, for the operations around a norm. Prints if not.
pub fn has<E: Native>() -> bool {
    let has = plain().supports_dtype(E::dtype());
    if !has {
        println!("skipped: {:?} on {:?}, which burn cannot compute in", E::dtype(), plain());
    }
    has
}

/// Equal values: bitwise on the CPU. On other devices kernels may round differently, so only a
/// wrong term of a sum would show; `bounds` checks the bounds.
pub fn assert_same(got: &[Vec<f64>], expected: &[Vec<f64>], case: &str) {
    if plain() == Device::flex() {
        assert_eq!(got, expected, "{case}");
        return;
    }
    assert_eq!(got.len(), expected.len(), "{case}");
    for (got, expected) in got.iter().zip(expected) {
        assert_eq!(got.len(), expected.len(), "{case}");
        let largest = expected.iter().fold(0f64, |largest, value| largest.max(value.abs()));
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() <= largest / 32.0, "{case}: {got} and {expected}");
        }
    }
}

/// A generic test, for each 16-bit dtype that the device has.
macro_rules! in_each_half {
    ($test:ident) => {{
        if $crate::kit::has::<rmsnorm_core::f16>() {
            $test::<rmsnorm_core::f16>();
        }
        if $crate::kit::has::<rmsnorm_core::bf16>() {
            $test::<rmsnorm_core::bf16>();
        }
    }};
}
pub(crate) use in_each_half;

/// A generic test, for each mix of activations and residual that the device has.
macro_rules! in_each_mix {
    ($test:ident) => {{
        fn of_half<T: $crate::kit::Native>() {
            $test::<T, T>();
            $test::<T, f32>();
        }
        $test::<f32, f32>();
        $crate::kit::in_each_half!(of_half);
    }};
}
pub(crate) use in_each_mix;

/// Gradients of x, residual and weight through tensors with only the call as owner, and through
/// kept ones: bitwise equal, since no graph needs the overwritten tensors.
pub fn assert_overwriting_keeps_gradients(loss: impl Fn(Tensor<2>, Tensor<2>, Tensor<1>) -> Tensor<1>) {
    let gradients = |keep: bool| {
        let (x, r, w) = (var::<f32, 2>([6, 40], 1), var::<f32, 2>([6, 40], 2), var::<f32, 1>([40], 3));
        let (a, b) = (x.clone() * 2.0, r.clone() * 3.0);
        let kept = keep.then(|| (a.clone(), b.clone()));
        let grads = loss(a, b, w.clone()).backward();
        drop(kept);
        ([&x, &r].map(|leaf| f64s(&leaf.grad(&grads).unwrap())), f64s(&w.grad(&grads).unwrap()))
    };
    assert_eq!(gradients(true), gradients(false));
}

/// Values between -2 and 2 on that device, different for each seed.
pub fn tensor_on<E: Native, const D: usize>(device: &Device, dims: [usize; D], seed: u64) -> Tensor<D> {
    let values = testing::values::<E>(seed, dims.iter().product());
    Tensor::from_data(TensorData::new(values, dims), (device, E::dtype()))
}

/// A constant.
pub fn tensor<E: Native, const D: usize>(dims: [usize; D], seed: u64) -> Tensor<D> {
    tensor_on::<E, D>(&device(), dims, seed)
}

/// A tracked leaf.
pub fn var<E: Native, const D: usize>(dims: [usize; D], seed: u64) -> Tensor<D> {
    tensor::<E, D>(dims, seed).require_grad()
}

/// The same values, untracked: `detach` of a leaf is a new leaf, so it alone is not enough.
pub fn frozen<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    tensor.clone().detach().set_require_grad(false)
}

/// The same values in f64, as a leaf.
pub fn wide<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    frozen(tensor).cast(DType::F64).require_grad()
}

/// The elements in row order.
pub fn elements<E: Native, const D: usize>(tensor: &Tensor<D>) -> Vec<E> {
    tensor.clone().into_data().try_to_vec().unwrap()
}

/// The elements in f64, exactly.
pub fn f64s<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.clone().into_data().iter::<f64>().collect()
}

/// A scalar whose gradient at y is exactly dy.
pub fn loss<const D: usize>(y: Tensor<D>, dy: &Tensor<D>) -> Tensor<1> {
    (y * dy.clone()).sum()
}

/// The message of a panic.
pub fn message<T>(call: impl FnOnce() -> T) -> String {
    let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).err().expect("a panic");
    *payload.downcast::<String>().expect("a message")
}
