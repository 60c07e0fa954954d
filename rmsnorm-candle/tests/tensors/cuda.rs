//! Tests that need a GPU: streams, contexts, mismatched devices.

use crate::kit::{On, elements, f64s, loss, message};
use candle_core::{DType, Device, Tensor, Var};
use rmsnorm_candle::{add_rms_norm, layer_norm, rms_norm, rms_norm_in_place};
use rmsnorm_core::bf16;

const EPS: f64 = 1e-5;

/// Devices with separate streams, each used by its own thread, and the default ones: the same bits
/// everywhere.
#[test]
fn streams_of_their_own_give_the_same_bits() {
    let Some(on) = On::cuda() else { return };
    let step = |on: &On| {
        let (x, r) = (on.var::<bf16>(&[300, 1024], 1), on.var::<f32>(&[300, 1024], 2));
        let (w, dy) = (on.var::<f32>(&[1024], 3), on.tensor::<bf16>(&[300, 1024], 4));
        let (y, sum) = add_rms_norm(&x, &r, &w, EPS).unwrap();
        let grads = loss(&y, &dy).backward().unwrap();
        let mut all = vec![f64s(&y), f64s(&sum)];
        all.extend([&x, &r, &w].map(|variable| f64s(grads.get(variable).unwrap())));
        all
    };
    let expected = step(&on);
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..6)
            .map(|_| {
                scope.spawn(|| {
                    let on = on.with(Device::new_cuda_with_stream(0).unwrap());
                    (0..8).map(|_| step(&on)).collect::<Vec<_>>()
                })
            })
            .collect();
        for thread in all {
            assert!(thread.join().unwrap().iter().all(|got| *got == expected));
        }
    });
}

/// A new device has the same context; state of an earlier device does not matter.
#[test]
fn devices_come_and_go() {
    let Some(on) = On::cuda() else { return };
    let step = |on: &On| {
        let (x, w) = (on.tensor::<f32>(&[5, 48], 1), on.tensor::<f32>(&[48], 2));
        elements::<f32>(&rms_norm(&x, &w, EPS).unwrap())
    };
    let expected = step(&on);
    for _ in 0..3 {
        assert_eq!(step(&on.with(Device::new_cuda(0).unwrap())), expected);
        assert_eq!(step(&on.with(Device::new_cuda_with_stream(0).unwrap())), expected);
    }
}

/// A call reads the results of the previous call without a wait in between; candle's kernels run
/// before and after.
#[test]
fn calls_follow_each_other_and_candles_kernels() {
    let Some(on) = On::cuda() else { return };
    let (x, w) = (on.tensor::<f32>(&[4096, 1024], 1), on.tensor::<f32>(&[1024], 2));
    let one_by_one = |wait: bool| {
        let mut h = x.copy().unwrap();
        for _ in 0..10 {
            let (y, sum) = add_rms_norm(&(&h * 0.5).unwrap(), &h, &w, EPS).unwrap();
            if wait {
                on.settle();
            }
            h = (y + sum.sin().unwrap()).unwrap();
            rms_norm_in_place(&h.narrow(1, 0, 512).unwrap(), &w.narrow(0, 0, 512).unwrap(), EPS).unwrap();
        }
        elements::<f32>(&h)
    };
    assert_eq!(one_by_one(false), one_by_one(true));
}

/// Errors name a tensor on another device, and a stream of another device.
#[test]
fn tensors_of_other_devices_are_named() {
    let Some(on) = On::cuda() else { return };
    let x = on.tensor::<f32>(&[4, 16], 1);
    let w = Tensor::ones(16, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(
        message(rms_norm(&x, &w, EPS)),
        "rms_norm: weight must be on the same Device as x, Cuda { gpu_id: 0 }, got Cpu"
    );
    let other = on.with(Device::new_cuda_with_stream(0).unwrap()).tensor::<f32>(&[16], 2);
    let text = message(layer_norm(&x, &on.tensor::<f32>(&[16], 2), Some(&other), EPS));
    assert!(text.starts_with("layer_norm: bias must be on the same Device as x, Cuda"), "{text}");
}

/// A graph made here and differentiated on another thread, after this stream has finished: candle
/// has one stream for each thread.
#[test]
fn gradients_may_be_computed_on_another_thread() {
    let Some(on) = On::cuda() else { return };
    let (x, w) = (on.var::<f32>(&[64, 256], 1), on.var::<f32>(&[256], 2));
    let total = layer_norm(&x, &w, None, EPS).unwrap().sqr().unwrap().sum_all().unwrap();
    let gradients = || {
        let grads = total.backward().unwrap();
        [&x, &w].map(|variable: &Var| f64s(grads.get(variable).unwrap()))
    };
    let expected = gradients();
    on.settle();
    let elsewhere = std::thread::scope(|scope| scope.spawn(gradients).join().unwrap());
    assert_eq!(elsewhere, expected);
}
