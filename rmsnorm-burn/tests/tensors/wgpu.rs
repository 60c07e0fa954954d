//! Devices of wgpu: shared ones, and the norms on them.

use burn::backend::{CubeDevice, DispatchDevice};
use burn::tensor::wgpu::{WgpuSetup, wgpu};
use burn::tensor::{Device, Tensor};
use rmsnorm_burn::wgpu::{backend, share};
use rmsnorm_burn::{
    add_layer_norm, add_rms_norm, gemma_rms_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm, layer_norm,
    layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
};
use rmsnorm_core::{Error, bf16};

use crate::kit::{f64s, message, shared, tensor_on};

const EPS: f64 = 1e-5;

/// Another device of the same adapter, which no other test uses, and its setup. It is not shared.
fn another(setup: &WgpuSetup) -> (Device, WgpuSetup) {
    let request = wgpu::DeviceDescriptor {
        required_features: setup.adapter.features() - wgpu::Features::all_experimental_mask(),
        required_limits: setup.adapter.limits(),
        ..Default::default()
    };
    let (device, queue) = burn::tensor::read_sync(setup.adapter.request_device(&request)).unwrap();
    let setup = WgpuSetup { device, queue, ..setup.clone() };
    (Device::wgpu_options().setup(setup.clone()).init().unwrap(), setup)
}

fn norm(device: &Device, cols: usize) -> Vec<f64> {
    let (x, w) = (tensor_on::<f32, 2>(device, [3, cols], 1), tensor_on::<f32, 1>(device, [cols], 2));
    f64s(&rms_norm(x, w, EPS))
}

/// The number of our kernels that were compiled for a shared device.
fn count(device: &Device) -> usize {
    backend(device).unwrap().kernel_count()
}

fn assert_close(ours: &[f64], burns: &[f64]) {
    assert_eq!(ours.len(), burns.len());
    for (ours, burns) in ours.iter().zip(burns) {
        assert!((ours - burns).abs() <= 1e-5 * burns.abs(), "{ours} and {burns}");
    }
}

#[test]
fn norms_are_kernels_on_a_shared_device_and_burns_operations_on_others() {
    let Some((_, first)) = shared() else { return };
    let (device, setup) = another(&first);
    assert!(backend(&device).is_none());
    let burns = norm(&device, 4999);
    share(&device, &setup).unwrap();
    assert_eq!(count(&device), 1, "of the row that share tries");
    let ours = norm(&device, 4999);
    assert_eq!(count(&device), 2);
    assert_close(&ours, &burns);
    // A second share compiles nothing.
    share(&device, &setup).unwrap();
    assert_eq!((norm(&device, 4999), count(&device)), (ours, 2));
}

/// The first result of a function of x, residual and two vectors.
type Function = fn(Tensor<2>, Tensor<2>, Tensor<1>, Tensor<1>) -> Tensor<2>;

/// Every function, forward and backward, each on a separate device, for which nothing else compiles
/// kernels.
#[test]
fn every_function_takes_kernels() {
    let Some((_, first)) = shared() else { return };
    let functions: [(&str, Function); 10] = [
        ("rms_norm", |x, _, w, _| rms_norm(x, w, EPS)),
        ("gemma_rms_norm", |x, _, w, _| gemma_rms_norm(x, w, EPS)),
        ("layer_norm", |x, _, w, b| layer_norm(x, w, Some(b), EPS)),
        ("add_rms_norm", |x, r, w, _| add_rms_norm(x, r, w, EPS).0),
        ("add_layer_norm", |x, r, w, b| add_layer_norm(x, r, w, Some(b), EPS).0),
        ("rms_norm_add", |x, r, w, _| rms_norm_add(x, r, w, EPS)),
        ("gemma_rms_norm_add", |x, r, w, _| gemma_rms_norm_add(x, r, w, EPS)),
        ("layer_norm_add", |x, r, w, b| layer_norm_add(x, r, w, Some(b), EPS)),
        ("rms_norm_add_rms_norm", |x, r, w, b| rms_norm_add_rms_norm(x, r, w, b, EPS).0),
        ("gemma_rms_norm_add_rms_norm", |x, r, w, b| gemma_rms_norm_add_rms_norm(x, r, w, b, EPS).0),
    ];
    for (name, function) in functions {
        let (device, setup) = another(&first);
        share(&device, &setup).unwrap();
        // With autodiff it is the same device.
        let device = device.autodiff();
        let matrix = |seed| tensor_on::<f32, 2>(&device, [3, 40], seed).require_grad();
        let vector = |seed| tensor_on::<f32, 1>(&device, [40], seed).require_grad();
        let (x, w) = (matrix(1), vector(2));
        assert_eq!(count(&device), 1, "of the row that share tries");
        let y = function(x.clone(), matrix(3), w.clone(), vector(4));
        assert!(f64s(&y).iter().all(|y| y.is_finite()), "{name}");
        let after = count(&device);
        assert_eq!(after, 2, "{name}, forward");
        let grads = y.sum().backward();
        assert!(f64s(&x.grad(&grads).unwrap()).iter().all(|dx| dx.is_finite()), "{name}");
        assert!(f64s(&w.grad(&grads).unwrap()).iter().all(|dw| dw.is_finite()), "{name}");
        assert!(count(&device) > after, "{name}: no kernel of ours backward");
    }
}

/// The kernels compute in dtypes that burn cannot use there, for tensors that are passed and read
/// without burn's operations.
#[test]
fn bf16_needs_no_arithmetic_of_the_device() {
    let Some((device, _)) = shared() else { return };
    let norm = |device: &Device| {
        let x = tensor_on::<bf16, 2>(device, [5, 300], 1);
        let w = tensor_on::<bf16, 1>(device, [300], 2);
        f64s(&layer_norm(x, w.clone(), Some(w), EPS))
    };
    for (ours, cpus) in norm(&device).iter().zip(&norm(&Device::flex())) {
        // Rounded to 8 bits once, so it may be the other neighbour.
        assert!((ours - cpus).abs() <= cpus.abs() / 128.0, "{ours} and {cpus}");
    }
}

#[test]
fn tensors_of_another_device_are_named() {
    let Some((device, setup)) = shared() else { return };
    let (other, _) = another(&setup);
    let x = tensor_on::<f32, 2>(&device, [3, 40], 1);
    let (w, far) = (tensor_on::<f32, 1>(&device, [40], 2), tensor_on::<f32, 1>(&other, [40], 2));
    let text = message(|| rms_norm(x.clone(), far.clone(), EPS));
    assert!(text.starts_with("rms_norm: weight must be on the device"), "{text}");
    let text = message(|| layer_norm(x.clone(), w.clone(), Some(far.clone()), EPS));
    assert!(text.starts_with("layer_norm: bias must be on the device"), "{text}");
    let far = tensor_on::<f32, 2>(&other, [3, 40], 1);
    let text = message(|| add_rms_norm(x.clone(), far, w.clone(), EPS));
    assert!(text.starts_with("rms_norm: residual must be on the device"), "{text}");
    // Tensors with and without autodiff are on one device.
    let y = rms_norm(x, tensor_on::<f32, 1>(&device.autodiff(), [40], 2), EPS);
    assert_eq!(f64s(&y).len(), 120);
}

#[test]
fn what_is_not_of_one_runtime_is_refused() {
    let Some((_, setup)) = shared() else { return };
    let (other, _) = another(&setup);
    let refused = share(&other, &setup);
    assert!(matches!(refused, Err(Error::Unsupported { .. } | Error::Device { .. })), "{refused:?}");
    assert!(backend(&other).is_none());
    assert!(norm(&other, 33).iter().all(|y| y.is_finite()));
    let refused = share(&Device::flex(), &setup).unwrap_err().to_string();
    assert!(refused.contains("kernels are for burn's wgpu devices, got"), "{refused}");
}

/// A captured graph contains burn's operations: our kernels would run once and be missing from it.
#[test]
fn captured_graphs_have_burns_operations() {
    let Some((_, first)) = shared() else { return };
    let (device, setup) = another(&first);
    share(&device, &setup).unwrap();
    let DispatchDevice::Cube(cube @ CubeDevice::Wgpu(_)) = device.as_dispatch() else { panic!("{device:?}") };
    let client = cube.client();
    let (x, w) = (tensor_on::<f32, 2>(&device, [3, 40], 1), tensor_on::<f32, 1>(&device, [40], 2));
    let run = || {
        let y: Tensor<2> = rms_norm(x.clone(), w.clone(), EPS);
        device.flush().unwrap();
        y
    };
    let before = count(&device);
    client.graph_prepare().unwrap();
    drop(run());
    client.start_capture().unwrap();
    let y = run();
    let graph = client.stop_capture().unwrap();
    assert_eq!(count(&device), before);
    // SAFETY:
    // - liveness: x, w and y are alive, and the graph owns the tensors in between;
    // - ordering: this thread's stream is the graph's, and nobody else uses its tensors.
    unsafe { graph.replay() }.unwrap();
    let captured = f64s(&y);
    assert_close(&f64s(&run()), &captured);
    assert_eq!(count(&device), before + 1);
}
