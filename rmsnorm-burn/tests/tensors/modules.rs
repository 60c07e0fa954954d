//! Modules are configured like burn's, load burn's records, and compute the same results as the
//! functions.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use rmsnorm_burn::nn::{
    AddRmsNorm, AddRmsNormConfig, GemmaRmsNormConfig, LayerNorm, LayerNormConfig, RmsNorm, RmsNormConfig,
    RmsNormGatedConfig,
};
use rmsnorm_burn::{Activation, Norm};

use crate::kit::{device, f64s, message, tensor};

/// Not the default of the configs.
const EPS: f64 = 1.0 / 16.0;

fn parameter(seed: u64) -> Param<Tensor<1>> {
    Param::from_tensor(tensor::<f32, 1>([16], seed))
}

fn their_rms() -> burn::nn::RmsNorm {
    let mut norm = burn::nn::RmsNormConfig::new(16).with_epsilon(EPS).init(&device());
    norm.gamma = parameter(3);
    norm
}

fn their_layer(has_bias: bool) -> burn::nn::LayerNorm {
    let mut norm = burn::nn::LayerNormConfig::new(16).with_epsilon(EPS).with_bias(has_bias).init(&device());
    norm.gamma = parameter(3);
    norm.beta = has_bias.then(|| parameter(4));
    norm
}

/// In memory.
#[test]
fn records_of_burns_modules_load() {
    let fresh = RmsNormConfig::new(16).init(&device());
    let ours: RmsNorm = fresh.load_record(their_rms().into_record());
    assert_eq!(f64s(&ours.gamma.val()), f64s(&parameter(3).val()));
    let ours: AddRmsNorm = AddRmsNormConfig::new(16).init(&device()).load_record(their_rms().into_record());
    assert_eq!(f64s(&ours.gamma.val()), f64s(&parameter(3).val()));
    for has_bias in [true, false] {
        let fresh = LayerNormConfig::new(16).with_bias(has_bias).init(&device());
        let ours: LayerNorm = fresh.load_record(their_layer(has_bias).into_record());
        assert_eq!(f64s(&ours.gamma.val()), f64s(&parameter(3).val()));
        assert_eq!(ours.beta.map(|beta| f64s(&beta.val())), has_bias.then(|| f64s(&parameter(4).val())));
    }
    // burn's modules load our records.
    let back = burn::nn::RmsNormConfig::new(16).init(&device()).load_record(RmsNorm::from(their_rms()).into_record());
    assert_eq!(f64s(&back.gamma.val()), f64s(&parameter(3).val()));
}

#[test]
fn configs_and_displays_are_burns() {
    let (ours, theirs) = (RmsNormConfig::new(16), burn::nn::RmsNormConfig::new(16));
    assert_eq!(ours.to_string(), theirs.to_string());
    assert_eq!(ours.init(&device()).to_string(), theirs.init(&device()).to_string());
    let (ours, theirs) = (LayerNormConfig::new(16), burn::nn::LayerNormConfig::new(16));
    assert_eq!(ours.to_string(), theirs.to_string());
    assert_eq!(ours.init(&device()).to_string(), theirs.init(&device()).to_string());
    let loaded = RmsNormConfig::load_binary(theirs_binary().as_bytes()).unwrap();
    assert_eq!((loaded.d_model, loaded.epsilon), (16, 1e-3));
}

fn theirs_binary() -> String {
    burn::nn::RmsNormConfig::new(16).with_epsilon(1e-3).to_string()
}

#[test]
fn new_parameters_are_ones_and_zeros_that_are_trained() {
    let (layer, rms) = (LayerNormConfig::new(16).init(&device()), RmsNormConfig::new(16).init(&device()));
    let (gemma, add) = (GemmaRmsNormConfig::new(16).init(&device()), AddRmsNormConfig::new(16).init(&device()));
    let beta = layer.beta.as_ref().unwrap();
    assert_eq!((f64s(&layer.gamma.val()), f64s(&beta.val())), (vec![1.0; 16], vec![0.0; 16]));
    assert_eq!((f64s(&rms.gamma.val()), f64s(&gemma.gamma.val())), (vec![1.0; 16], vec![0.0; 16]));
    let x = tensor::<f32, 3>([2, 3, 16], 1);
    let y = gemma.forward(rms.forward(layer.forward(x.clone())));
    let gated = RmsNormGatedConfig::new(16).init(&device());
    let (y, sum) = add.forward(gated.forward(y, x.clone()), x);
    let grads = (y + sum).square().sum().backward();
    for gamma in [&layer.gamma, beta, &rms.gamma, &gemma.gamma, &gated.gamma, &add.gamma] {
        assert!(gamma.val().grad(&grads).is_some());
    }
}

/// The bits of the functions, and close to burn's modules: both are within a few f32 roundings of
/// the exact value.
#[test]
fn modules_are_the_functions() {
    let (x, r) = (tensor::<f32, 3>([2, 3, 16], 1), tensor::<f32, 3>([2, 3, 16], 2));
    let (w, b) = (parameter(3).val(), parameter(4).val());
    let same = |y: Tensor<3>, expected: Tensor<3>| assert_eq!(f64s(&y), f64s(&expected));
    let rms = RmsNorm::from(their_rms());
    same(rms.forward(x.clone()), rmsnorm_burn::rms_norm(x.clone(), w.clone(), EPS));
    let mut gemma = GemmaRmsNormConfig::new(16).with_epsilon(EPS).init(&device());
    gemma.gamma = parameter(3);
    same(gemma.forward(x.clone()), rmsnorm_burn::gemma_rms_norm(x.clone(), w.clone(), EPS));
    let layer = |has_bias| {
        let fresh = LayerNormConfig::new(16).with_epsilon(EPS).with_bias(has_bias).init(&device());
        fresh.load_record(their_layer(has_bias).into_record())
    };
    let expected = rmsnorm_burn::layer_norm(x.clone(), w.clone(), Some(b.clone()), EPS);
    same(layer(true).forward(x.clone()), expected);
    same(layer(false).forward(x.clone()), rmsnorm_burn::layer_norm(x.clone(), w.clone(), None, EPS));
    let (y, sum) = AddRmsNorm::from(RmsNorm::from(their_rms())).forward(x.clone(), r.clone());
    let (expected, expected_sum) = rmsnorm_burn::add_rms_norm(x.clone(), r.clone(), w.clone(), EPS);
    same(y, expected.clone());
    same(sum, expected_sum.clone());
    let (y, sum) = rms.add_forward(x.clone(), r.clone());
    same(y, expected);
    same(sum, expected_sum);
    // The gate after the norm and before it.
    let config = RmsNormGatedConfig::new(16).with_epsilon(EPS);
    let gated = |config: RmsNormGatedConfig| {
        let mut norm = config.init(&device());
        norm.gamma = parameter(3);
        norm.forward(x.clone(), r.clone())
    };
    let expected = Norm::rms(EPS).gate_after(r.clone(), Activation::Silu).apply(x.clone(), w.clone());
    same(gated(config.clone()), expected);
    let expected = Norm::rms(EPS).gate_before(r.clone(), Activation::Sigmoid).groups(4).apply(x.clone(), w.clone());
    same(gated(config.with_sigmoid(true).with_gate_before(true).with_groups(4)), expected);
    // Gemma's norm of the sum, which has no function.
    let (y, sum) = gemma.add_forward(x.clone(), r.clone());
    same(y, rmsnorm_burn::gemma_rms_norm(sum.clone(), w.clone(), EPS));
    same(sum, x.clone() + r.clone());
    for (has_bias, bias) in [(true, Some(b)), (false, None)] {
        let (y, sum) = layer(has_bias).add_forward(x.clone(), r.clone());
        let (expected, expected_sum) = rmsnorm_burn::add_layer_norm(x.clone(), r.clone(), w.clone(), bias, EPS);
        same(y, expected);
        same(sum, expected_sum);
    }

    for (theirs, ours) in [
        (their_rms().forward(x.clone()), rms.forward(x.clone())),
        (their_layer(true).forward(x.clone()), layer(true).forward(x.clone())),
        (their_layer(false).forward(x.clone()), layer(false).forward(x.clone())),
    ] {
        let (theirs, ours) = (f64s(&theirs), f64s(&ours));
        let largest = theirs.iter().fold(1.0, |largest: f64, y| largest.max(y.abs()));
        let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 16.0 * f64::from(f32::EPSILON) * largest;
        assert!(theirs.iter().zip(&ours).all(close), "{theirs:?} {ours:?}");
    }
    let text = message(|| rms.forward(tensor::<f32, 2>([2, 8], 1)));
    assert_eq!(text, "rms_norm: weight must have the shape [8] of x's last dimension, got [16]");
}

/// The same bits as the functions.
#[test]
fn modules_add_after_as_the_functions() {
    let (x, r) = (tensor::<f32, 3>([2, 3, 16], 1), tensor::<f32, 3>([2, 3, 16], 2));
    let [w, b, next_w] = [3, 4, 5].map(|seed| parameter(seed).val());
    let same = |y: Tensor<3>, expected: Tensor<3>| assert_eq!(f64s(&y), f64s(&expected));
    let both = |(y, sum), (expected, expected_sum)| {
        same(y, expected);
        same(sum, expected_sum);
    };
    let rms = |seed| {
        let mut norm = RmsNorm::from(their_rms());
        norm.gamma = parameter(seed);
        norm
    };
    let expected = rmsnorm_burn::rms_norm_add(x.clone(), r.clone(), w.clone(), EPS);
    same(rms(3).forward_add(x.clone(), r.clone()), expected);
    let expected = rmsnorm_burn::rms_norm_add_rms_norm(x.clone(), r.clone(), w.clone(), next_w.clone(), EPS);
    both(rms(3).forward_add_forward(x.clone(), r.clone(), &rms(5)), expected);
    let gemma = |seed| {
        let mut norm = GemmaRmsNormConfig::new(16).with_epsilon(EPS).init(&device());
        norm.gamma = parameter(seed);
        norm
    };
    let expected = rmsnorm_burn::gemma_rms_norm_add(x.clone(), r.clone(), w.clone(), EPS);
    same(gemma(3).forward_add(x.clone(), r.clone()), expected);
    let expected = rmsnorm_burn::gemma_rms_norm_add_rms_norm(x.clone(), r.clone(), w.clone(), next_w, EPS);
    both(gemma(3).forward_add_forward(x.clone(), r.clone(), &gemma(5)), expected);
    for (has_bias, bias) in [(true, Some(b)), (false, None)] {
        let fresh = LayerNormConfig::new(16).with_epsilon(EPS).with_bias(has_bias).init(&device());
        let layer: LayerNorm = fresh.load_record(their_layer(has_bias).into_record());
        let expected = rmsnorm_burn::layer_norm_add(x.clone(), r.clone(), w.clone(), bias, EPS);
        same(layer.forward_add(x.clone(), r.clone()), expected);
    }
}

#[test]
fn two_norms_of_one_call_have_one_epsilon() {
    let x = || tensor::<f32, 2>([2, 16], 1);
    let said = "rms_norm: both norms must have one epsilon, got 0.0625 and 0.001";
    let rms = |epsilon| RmsNormConfig::new(16).with_epsilon(epsilon).init(&device());
    assert_eq!(message(|| rms(EPS).forward_add_forward(x(), x(), &rms(1e-3))), said);
    let gemma = |epsilon| GemmaRmsNormConfig::new(16).with_epsilon(epsilon).init(&device());
    assert_eq!(message(|| gemma(EPS).forward_add_forward(x(), x(), &gemma(1e-3))), said);
}
