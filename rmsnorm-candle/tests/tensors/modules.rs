//! Modules load the same tensors as candle-nn's, and compute the same results as the functions.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use candle_nn::{Module, VarBuilder, VarMap};
use rmsnorm_candle::Activation;
use rmsnorm_candle::nn::{self, AddRmsNorm, LayerNorm, LayerNormConfig, RmsNorm, RmsNormGated};

use crate::kit::{On, elements, f64s, message, on_each_device};

const EPS: f64 = 1e-5;

fn checkpoint(on: &On, names: &[&str]) -> VarBuilder<'static> {
    let named = names.iter().enumerate().map(|(seed, name)| ((*name).to_owned(), on.tensor::<f32>(&[16], seed as u64)));
    VarBuilder::from_tensors(named.collect::<HashMap<String, Tensor>>(), DType::F32, on.device())
}

#[test]
fn modules_load_the_names_of_candle_nn() {
    on_each_device(|on| {
        for names in [["weight", "bias"], ["gamma", "beta"]] {
            let vb = checkpoint(on, &names);
            let [weight, bias] = names.map(|name| elements::<f32>(&vb.get(16, name).unwrap()));
            let theirs = candle_nn::layer_norm(16, EPS, vb.clone()).unwrap();
            let ours = nn::layer_norm(16, EPS, vb.clone()).unwrap();
            assert_eq!((elements::<f32>(ours.weight()), elements::<f32>(ours.bias().unwrap())), (weight.clone(), bias));
            assert_eq!((ours.eps(), ours.remove_mean()), (theirs.eps(), theirs.remove_mean()));
            assert!(nn::layer_norm_no_bias(16, EPS, vb.clone()).unwrap().bias().is_none());
            let rms = nn::rms_norm(16, EPS, vb.clone()).unwrap();
            assert_eq!((elements::<f32>(rms.weight()), rms.eps()), (weight.clone(), EPS));
            let add = nn::add_rms_norm(16, EPS, vb.clone()).unwrap();
            assert_eq!(elements::<f32>(add.norm().weight()), weight);
            assert!(message(nn::rms_norm(8, EPS, vb.clone())).contains("shape mismatch"));
        }
        assert!(message(nn::layer_norm(16, EPS, checkpoint(on, &["weight"]))).contains("bias"));
        assert!(message(nn::rms_norm(16, EPS, checkpoint(on, &[]))).contains("weight"));
    });
}

#[test]
fn new_variables_are_ones_and_zeros_that_are_trained() {
    on_each_device(|on| {
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F32, on.device());
        let layer = nn::layer_norm(16, EPS, vb.pp("layer")).unwrap();
        let rms = nn::rms_norm(16, EPS, vb.pp("rms")).unwrap();
        let gemma = nn::gemma_rms_norm(16, EPS, vb.pp("gemma")).unwrap();
        let add = nn::add_rms_norm(16, EPS, vb.pp("add")).unwrap();
        let gated = nn::rms_norm_gated(16, EPS, vb.pp("gated")).unwrap();
        assert_eq!(elements::<f32>(gated.weight()), [1.0; 16]);
        assert_eq!(
            (elements::<f32>(layer.weight()), elements::<f32>(layer.bias().unwrap())),
            (vec![1.0; 16], vec![0.0; 16])
        );
        assert_eq!((elements::<f32>(rms.weight()), elements::<f32>(gemma.weight())), (vec![1.0; 16], vec![0.0; 16]));
        let x = on.tensor::<f32>(&[2, 3, 16], 1);
        let y = gemma.forward(&rms.forward(&layer.forward(&x).unwrap()).unwrap()).unwrap();
        let (y, sum) = add.forward(&gated.forward(&y, &x).unwrap(), &x).unwrap();
        let grads = (y + sum).unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let all = variables.all_vars();
        assert_eq!(all.len(), 6);
        assert!(all.iter().all(|variable| grads.get(variable).is_some()));
    });
}

/// The bits of the functions, and close to candle-nn's modules: both are within a few f32 roundings
/// of the exact value.
#[test]
fn modules_are_the_functions() {
    on_each_device(|on| {
        let x = on.tensor::<f32>(&[2, 3, 16], 1);
        let (r, w, b) = (on.tensor::<f32>(&[2, 3, 16], 2), on.tensor::<f32>(&[16], 3), on.tensor::<f32>(&[16], 4));
        let same = |module: &dyn Module, expected: Tensor| {
            assert_eq!(elements::<f32>(&module.forward(&x).unwrap()), elements::<f32>(&expected));
        };
        same(&RmsNorm::new(w.clone(), EPS), rmsnorm_candle::rms_norm(&x, &w, EPS).unwrap());
        same(&RmsNorm::gemma(w.clone(), EPS), rmsnorm_candle::gemma_rms_norm(&x, &w, EPS).unwrap());
        same(&LayerNorm::new_no_bias(w.clone(), EPS), rmsnorm_candle::layer_norm(&x, &w, None, EPS).unwrap());
        same(&LayerNorm::rms_norm(w.clone(), EPS), rmsnorm_candle::rms_norm(&x, &w, EPS).unwrap());
        let affine = LayerNorm::new(w.clone(), b.clone(), EPS);
        same(&affine, rmsnorm_candle::layer_norm(&x, &w, Some(&b), EPS).unwrap());
        let (y, sum) = AddRmsNorm::new(w.clone(), EPS).forward(&x, &r).unwrap();
        let (expected, expected_sum) = rmsnorm_candle::add_rms_norm(&x, &r, &w, EPS).unwrap();
        assert_eq!((elements::<f32>(&y), elements::<f32>(&sum)), (elements(&expected), elements(&expected_sum)));
        // The gate after the norm and before it.
        let gated = RmsNormGated::new(w.clone(), EPS);
        let norm = rmsnorm_candle::Norm::rms(EPS);
        let pairs = [
            (gated.clone().forward(&x, &r), norm.gate_after(&r, Activation::Silu).apply(&x, &w)),
            (
                gated.activation(Activation::Sigmoid).gate_before().groups(4).forward(&x, &r),
                norm.gate_before(&r, Activation::Sigmoid).groups(4).apply(&x, &w),
            ),
        ];
        for (y, expected) in pairs {
            assert_eq!(elements::<f32>(&y.unwrap()), elements::<f32>(&expected.unwrap()));
        }
        // The methods of a single norm.
        for (y, sum) in [
            RmsNorm::new(w.clone(), EPS).add_forward(&x, &r).unwrap(),
            LayerNorm::rms_norm(w.clone(), EPS).add_forward(&x, &r).unwrap(),
        ] {
            assert_eq!((elements::<f32>(&y), elements::<f32>(&sum)), (elements(&expected), elements(&expected_sum)));
        }
        let (y, sum) = affine.add_forward(&x, &r).unwrap();
        let (expected, expected_sum) = rmsnorm_candle::add_layer_norm(&x, &r, &w, Some(&b), EPS).unwrap();
        assert_eq!((elements::<f32>(&y), elements::<f32>(&sum)), (elements(&expected), elements(&expected_sum)));
        // The residual added after the norm, and the next norm of the sum.
        let sums = [
            (RmsNorm::new(w.clone(), EPS).forward_add(&x, &r), rmsnorm_candle::rms_norm_add(&x, &r, &w, EPS)),
            (RmsNorm::gemma(w.clone(), EPS).forward_add(&x, &r), rmsnorm_candle::gemma_rms_norm_add(&x, &r, &w, EPS)),
            (affine.forward_add(&x, &r), rmsnorm_candle::layer_norm_add(&x, &r, &w, Some(&b), EPS)),
        ];
        for (sum, expected) in sums {
            assert_eq!(elements::<f32>(&sum.unwrap()), elements::<f32>(&expected.unwrap()));
        }
        let (norm, next) = (RmsNorm::gemma(w.clone(), EPS), RmsNorm::gemma(b.clone(), EPS));
        let (y, sum) = norm.forward_add_forward(&x, &r, &next).unwrap();
        let (expected, expected_sum) = rmsnorm_candle::gemma_rms_norm_add_rms_norm(&x, &r, &w, &b, EPS).unwrap();
        assert_eq!((elements::<f32>(&y), elements::<f32>(&sum)), (elements(&expected), elements(&expected_sum)));
        for other in [RmsNorm::new(b.clone(), EPS), RmsNorm::gemma(b.clone(), 2.0 * EPS)] {
            let text = message(norm.forward_add_forward(&x, &r, &other));
            assert!(
                text.starts_with("rms_norm: both norms must have one eps and one form of the weight, got 0."),
                "{text}"
            );
        }
        // Gemma's norm of a sum equals two calls.
        let (y, sum) = AddRmsNorm::from(RmsNorm::gemma(w.clone(), EPS)).forward(&x, &r).unwrap();
        assert_eq!(elements::<f32>(&y), elements::<f32>(&rmsnorm_candle::gemma_rms_norm(&sum, &w, EPS).unwrap()));

        let rms_with_bias = LayerNormConfig { eps: EPS, remove_mean: false, affine: true };
        let vb = checkpoint(on, &["weight", "bias"]);
        let theirs: [Box<dyn Module>; 4] = [
            Box::new(candle_nn::RmsNorm::new(w.clone(), EPS)),
            Box::new(candle_nn::LayerNorm::new(w.clone(), b.clone(), EPS)),
            Box::new(candle_nn::LayerNorm::new_no_bias(w.clone(), EPS)),
            Box::new(candle_nn::layer_norm(16, rms_with_bias, vb.clone()).unwrap()),
        ];
        let ours: [Box<dyn Module>; 4] = [
            Box::new(RmsNorm::from(candle_nn::RmsNorm::new(w.clone(), EPS))),
            Box::new(LayerNorm::from(candle_nn::LayerNorm::new(w.clone(), b.clone(), EPS))),
            Box::new(LayerNorm::from(candle_nn::LayerNorm::new_no_bias(w.clone(), EPS))),
            Box::new(nn::layer_norm(16, rms_with_bias, vb.clone()).unwrap()),
        ];
        for (theirs, ours) in theirs.iter().zip(&ours) {
            let (theirs, ours) = (f64s(&theirs.forward(&x).unwrap()), f64s(&ours.forward(&x).unwrap()));
            let largest = theirs.iter().fold(1.0, |largest: f64, y| largest.max(y.abs()));
            let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 16.0 * f64::from(f32::EPSILON) * largest;
            assert!(theirs.iter().zip(&ours).all(close), "{theirs:?} {ours:?}");
        }
    });
}

#[test]
fn modules_overwrite_for_inference() {
    on_each_device(|on| {
        let (w, b) = (on.tensor::<f32>(&[16], 3), on.tensor::<f32>(&[16], 4));
        let x = || on.tensor::<f32>(&[2, 3, 16], 1);
        for norm in [RmsNorm::new(w.clone(), EPS), RmsNorm::gemma(w.clone(), EPS)] {
            let (y, over) = (norm.forward_diff(&x()).unwrap(), x());
            norm.forward_in_place(&over).unwrap();
            assert_eq!(elements::<f32>(&over), elements::<f32>(&y));
        }
        let norm = LayerNorm::new(w, b, EPS);
        let (y, over) = (norm.forward(&x()).unwrap(), x());
        norm.forward_in_place(&over).unwrap();
        assert_eq!(elements::<f32>(&over), elements::<f32>(&y));
    });
}
