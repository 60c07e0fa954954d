//! The residual added after the norm: results have the same bits on every instruction set, for
//! every number of threads and place in memory. The next norm has the bits of a separate call on
//! the sum.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use rmsnorm_conformance::testing::values;
use rmsnorm_cpu::{CpuBackend, Forward, ForwardInputs, Isa};
use rmsnorm_spec::{CastOrder, Element, Norm, NormSpec, ResidualPlacement, Rows, Tensor, bf16, f16};

/// The outputs of one call, as bits.
#[derive(Debug, PartialEq)]
struct AnyElement {
    sum: Vec<u32>,
    y: Vec<u32>,
    statistics: [Vec<f32>; 4],
}

fn bits<E: Element>(values: &[E]) -> Vec<u32> {
    values.iter().map(|value| value.bits()).collect()
}

/// Copies dense rows into a matrix with `pad` elements after each row, from `offset` on.
fn spread<E: Element>(dense: &[E], cols: usize, pad: usize, offset: usize) -> Vec<E> {
    let mut all = vec![E::from_f32(9.0); offset];
    for row in dense.chunks_exact(cols) {
        all.extend_from_slice(row);
        all.extend(std::iter::repeat_n(E::from_f32(9.0), pad));
    }
    all
}

fn gathered<E: Element>(all: &[E], cols: usize, pad: usize, offset: usize) -> Vec<E> {
    all[offset..].chunks_exact(cols + pad).flat_map(|row| &row[..cols]).copied().collect()
}

fn spec(norm: Norm, rows: usize, cols: usize, has_bias: bool) -> NormSpec {
    let cast_order = if has_bias { CastOrder::BeforeWeight } else { CastOrder::AtStore };
    NormSpec::new(norm, rows, cols, 1e-5).weight_offset(0.5).cast_order(cast_order).residual_after()
}

/// The outputs of the call, with rows padded by `pad`, an offset of `pad`, and the sum in place or
/// not.
fn stored<T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    (norm, rows, cols): (Norm, usize, usize),
    has_bias: bool,
    pad: usize,
    in_place: bool,
) -> AnyElement {
    let (x, residual) = (values::<T>(1, rows * cols), values::<R>(2, rows * cols));
    let [weight, bias, next_weight, next_bias] = [3, 4, 5, 6].map(|seed| values::<W>(seed, cols));
    let (x, mut residual) = (spread(&x, cols, pad, pad), spread(&residual, cols, pad, pad));
    let mut sum = vec![R::from_f32(9.0); residual.len()];
    let mut y = vec![T::from_f32(9.0); x.len()];
    let mut statistics = [(); 4].map(|()| vec![9.0f32; rows]);
    let [mean, rstd, next_mean, next_rstd] = &mut statistics;
    let stride = cols + pad;
    let args = Forward::<T>::new(Rows::strided(&x[pad..], stride), Rows::strided(&mut y[pad..], stride));
    let args = args.weight_dtype::<W>().residual_dtype::<R>().weight(&weight).next_weight(&next_weight);
    let mut args = args.rstd(rstd).next_rstd(next_rstd);
    if norm == Norm::Layer {
        args = args.mean(mean).next_mean(next_mean);
    }
    if has_bias {
        args = args.bias(&bias).next_bias(&next_bias);
    }
    args = match in_place {
        true => args.residual_in_place(Rows::strided(&mut residual[pad..], stride)),
        false => {
            args.residual(Rows::strided(&residual[pad..], stride)).residual_out(Rows::strided(&mut sum[pad..], stride))
        }
    };
    backend.forward(&spec(norm, rows, cols, has_bias), args).unwrap();
    let sum = if in_place { residual } else { sum };
    AnyElement { sum: bits(&gathered(&sum, cols, pad, pad)), y: bits(&gathered(&y, cols, pad, pad)), statistics }
}

/// Rows that fit the stack and rows that do not, with whole groups of lanes and short ends, and a
/// matrix that outgrows the cache.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (9, 33), (20, 128), (3, 4096), (3, 4097), (2, 9001), (70, 300), (2100, 1021)];

fn same_bits<T: Element, W: Element, R: Element>() {
    for (rows, cols) in SHAPES {
        for norm in Norm::ALL {
            for has_bias in [false, true] {
                let shape = (norm, rows, cols);
                let portable = CpuBackend::with_isa_and_threads(Isa::Portable, 1).unwrap();
                let expected = stored::<T, W, R>(&portable, shape, has_bias, 0, false);
                for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                    for (threads, pad, in_place) in [(1, 3, true), (3, 0, false), (2, 5, false)] {
                        let backend = CpuBackend::with_isa_and_threads(isa, threads).unwrap();
                        let got = stored::<T, W, R>(&backend, shape, has_bias, pad, in_place);
                        assert!(
                            got == expected,
                            "{isa}, {threads} threads, {shape:?}, pad {pad}, in place: {in_place}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn bits_are_those_of_every_instruction_set_and_place_in_f32() {
    same_bits::<f32, f32, f32>();
}

#[test]
fn bits_are_those_of_every_instruction_set_and_place_in_mixed_dtypes() {
    same_bits::<bf16, f32, f32>();
    same_bits::<f16, f16, f16>();
}

/// The sum without a next norm, and the next norm as a separate call, have the bits of the call
/// that computes both.
fn pairs<T: Element>() {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 2).unwrap();
    for (rows, cols) in SHAPES {
        for norm in Norm::ALL {
            for has_bias in [false, true] {
                let both = stored::<T, T, T>(&backend, (norm, rows, cols), has_bias, 0, false);
                let spec = spec(norm, rows, cols, has_bias);
                let (x, residual) = (values::<T>(1, rows * cols), values::<T>(2, rows * cols));
                let [weight, bias, next_weight, next_bias] = [3, 4, 5, 6].map(|seed| values::<T>(seed, cols));
                let inputs = ForwardInputs::new(&x).weight(&weight).residual(&residual);
                let inputs = if has_bias { inputs.bias(&bias) } else { inputs };
                let alone = backend.forward_vec(&spec, inputs, &[Tensor::Rstd]).unwrap();
                assert!(alone.y.is_empty() && bits(&alone.residual_out) == both.sum, "{norm:?} {rows}x{cols}");
                assert_eq!(alone.rstd, both.statistics[1]);
                // In new vectors, both in one call.
                let inputs = inputs.next_weight(&next_weight);
                let inputs = if has_bias { inputs.next_bias(&next_bias) } else { inputs };
                let made = backend.forward_vec(&spec, inputs, &[Tensor::Y, Tensor::NextRstd]).unwrap();
                assert_eq!((bits(&made.y), made.next_rstd), (both.y.clone(), both.statistics[3].clone()));
                let mut before = spec;
                before.residual_placement = ResidualPlacement::Before;
                let inputs = ForwardInputs::new(&alone.residual_out).weight(&next_weight);
                let inputs = if has_bias { inputs.bias(&next_bias) } else { inputs };
                let next = backend.forward_vec(&before, inputs, &[Tensor::Rstd]).unwrap();
                assert!(bits(&next.y) == both.y, "{norm:?} {rows}x{cols}");
                assert_eq!(next.rstd, both.statistics[3]);
            }
        }
    }
}

#[test]
fn both_norms_in_one_call_have_the_bits_of_two_calls() {
    pairs::<f32>();
    pairs::<bf16>();
}
