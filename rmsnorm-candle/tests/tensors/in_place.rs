//! The in-place forms: the same bits as the forms that return y, no write outside of the rows, and
//! errors if other values would be overwritten.

use crate::kit::{Native, On, elements, f64s, message, on_each_device};
use candle_core::scalar::Scalar;
use candle_core::{DType, Result, Tensor, WithDType};
use rmsnorm_candle::{
    gemma_rms_norm, gemma_rms_norm_in_place, layer_norm, layer_norm_in_place, rms_norm, rms_norm_in_place,
};
use rmsnorm_core::{bf16, f16};

const EPS: f64 = 1e-5;

/// The form that returns y, and the form that overwrites x.
type Form = (fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>, fn(&Tensor, &Tensor, &Tensor) -> Result<()>);

/// The view of a tensor that is overwritten.
type View = fn(&Tensor) -> Tensor;

const FORMS: [Form; 4] = [
    (|x, w, _| rms_norm(x, w, EPS), |x, w, _| rms_norm_in_place(x, w, EPS)),
    (|x, w, _| gemma_rms_norm(x, w, EPS), |x, w, _| gemma_rms_norm_in_place(x, w, EPS)),
    (|x, w, _| layer_norm(x, w, None, EPS), |x, w, _| layer_norm_in_place(x, w, None, EPS)),
    (|x, w, b| layer_norm(x, w, Some(b), EPS), |x, w, b| layer_norm_in_place(x, w, Some(b), EPS)),
];

fn same_bits<T: Native, W: Native>(on: &On) {
    let views: [(&[usize], View); 5] = [
        (&[33], |x| x.clone()),
        (&[2, 3, 40], |x| x.clone()),
        (&[5, 96], |x| x.narrow(1, 32, 32).unwrap()),
        (&[3, 9 * 16], |x| x.reshape((3, 9, 16)).unwrap().narrow(1, 2, 4).unwrap()),
        (&[0, 8], |x| x.clone()),
    ];
    // candle's CUDA has no tensors without elements.
    for (shape, view) in views.into_iter().filter(|(shape, _)| !(on.device().is_cuda() && shape.contains(&0))) {
        for (returning, overwriting) in FORMS {
            let base = on.tensor::<T>(shape, 1);
            let x = view(&base);
            let cols = *x.dims().last().unwrap();
            let (w, b) = (on.tensor::<W>(&[cols], 2), on.tensor::<W>(&[cols], 3));
            let expected = returning(&x, &w, &b).unwrap();
            // The elements between the rows: the whole buffer, with x set to zero in a copy.
            let rest = |base: &Tensor| {
                let copy = base.copy().unwrap();
                view(&copy).const_set(Scalar::zero(<T as WithDType>::DTYPE)).unwrap();
                f64s(&copy)
            };
            let before = rest(&base);
            overwriting(&x, &w, &b).unwrap();
            assert_eq!(elements::<T>(&x), elements::<T>(&expected), "{shape:?}");
            assert_eq!(rest(&base), before, "{shape:?}: what lies between the rows");
        }
    }
}

#[test]
fn in_place_has_the_same_bits_and_touches_nothing_else() {
    on_each_device(|on| {
        same_bits::<f32, f32>(on);
        same_bits::<f16, f32>(on);
        same_bits::<bf16, bf16>(on);
    });
}

#[test]
fn aliases_see_the_new_values() {
    on_each_device(|on| {
        let x = on.tensor::<f32>(&[4, 16], 1);
        let (alias, w) = (x.clone(), on.tensor::<f32>(&[16], 2));
        let expected = rms_norm(&x, &w, EPS).unwrap();
        rms_norm_in_place(&x.narrow(0, 1, 2).unwrap(), &w, EPS).unwrap();
        let row = |tensor: &Tensor, row: usize| f64s(&tensor.get(row).unwrap());
        assert_eq!((row(&alias, 1), row(&alias, 2)), (row(&expected, 1), row(&expected, 2)));
        assert_eq!(row(&alias, 0), f64s(&on.tensor::<f32>(&[4, 16], 1).get(0).unwrap()));
    });
}

#[test]
fn what_would_be_lost_is_refused_before_anything_is_written() {
    on_each_device(|on| {
        let refused = |x: &Tensor, w: &Tensor, b: &Tensor, expected: &str| {
            let before = f64s(x);
            for (_, overwriting) in FORMS {
                let text = message(overwriting(x, w, b));
                assert!(text.contains(expected), "{text}");
                assert_eq!(f64s(x), before, "{text}");
            }
        };
        let (x, w) = (on.tensor::<f32>(&[16, 16], 1), on.tensor::<f32>(&[16], 2));
        // Tensors that a graph holds.
        let variable = on.var::<f32>(&[16, 16], 1);
        refused(&variable, &w, &w, "x is part of a graph");
        refused(&(variable.as_tensor() * 2.0).unwrap(), &w, &w, "x is part of a graph");
        refused(&x, &on.var::<f32>(&[16], 2), &w, "weight is part of a graph");
        let text = message(layer_norm_in_place(&x, &w, Some(&on.var::<f32>(&[16], 2)), EPS));
        assert!(text.contains("bias is part of a graph"), "{text}");
        // Parameters inside the overwritten tensor.
        refused(&x, &x.get(3).unwrap(), &w, "shares storage");
        let text = message(layer_norm_in_place(&x, &w, Some(&x.get(3).unwrap()), EPS));
        assert!(text.contains("shares storage"), "{text}");
        // Rows that overlap, and rows that cannot be written in place.
        refused(&x.get(0).unwrap().broadcast_as((3, 16)).unwrap(), &w, &w, "the rows of x must not overlap");
        refused(&x.t().unwrap(), &w, &w, "the rows of x must not overlap");
        refused(&x, &x.narrow(0, 0, 2).unwrap(), &w, "weight must have the shape [16]");
    });
}

#[test]
fn candles_path_overwrites_what_is_contiguous() {
    on_each_device(|on| {
        let (x, w) = (on.tensor::<f32>(&[4, 16], 1), on.tensor::<f32>(&[16], 2));
        for dtype in [DType::F64, DType::F32] {
            for (returning, overwriting) in FORMS {
                // A weight of f64: no kernels for either.
                let (x, w) = (x.to_dtype(dtype).unwrap().copy().unwrap(), w.to_dtype(DType::F64).unwrap());
                let expected = returning(&x, &w, &w).unwrap();
                let alias = x.clone();
                overwriting(&x, &w, &w).unwrap();
                assert_eq!(f64s(&alias), f64s(&expected));
                let (x, w) = (x.narrow(1, 0, 8).unwrap(), w.narrow(0, 0, 8).unwrap());
                let text = message(overwriting(&x, &w, &w));
                assert!(text.contains("needs a contiguous x"), "{text}");
            }
        }
    });
}

/// Concurrent calls of several threads, which read the same weight.
#[test]
fn threads_overwrite_tensors_of_their_own() {
    on_each_device(|on| {
        let w = on.tensor::<f32>(&[512], 2);
        let expected = rms_norm(&on.tensor::<f32>(&[200, 512], 1), &w, EPS).unwrap();
        on.settle();
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        let x = on.tensor::<f32>(&[200, 512], 1);
                        rms_norm_in_place(&x, &w, EPS).unwrap();
                        elements::<f32>(&x)
                    })
                })
                .collect();
            for thread in all {
                assert_eq!(thread.join().unwrap(), elements::<f32>(&expected));
            }
        });
    });
}
