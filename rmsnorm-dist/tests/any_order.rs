//! `Order::Engine`: sums within the bound of every order, equal on all ranks, and y as the norm of the
//! stored sum.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use std::thread;

use rmsnorm_conformance::bounds::{Mode, Model};
use rmsnorm_conformance::spec::reference::ForwardInputs;
use rmsnorm_conformance::testing::{Bits, ForwardTruth, exact, values};
use rmsnorm_conformance::{Arithmetic, Harness};
use rmsnorm_cpu::{CpuBackend, Isa};
use rmsnorm_dist::{Collective, Order, RowShares, Sharded, ShardedNorm, ThreadGroup};
use rmsnorm_spec::{AnyElement, DType, Element, Error, Forward, NormSpec, Rows, Tensor, bf16, f16};

const ROWS: usize = 5;
const COLS: usize = 67;
const LEN: usize = ROWS * COLS;

/// y and the sum with the residual, of each rank.
type Outputs<T> = Vec<(Vec<T>, Vec<T>)>;

fn backend() -> CpuBackend {
    CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap()
}

fn on_ranks<T: Element>(ranks: usize, in_place: bool) -> Outputs<T> {
    thread::scope(|scope| {
        let rank = |(rank, group): (usize, ThreadGroup)| {
            scope.spawn(move || {
                let norm = Sharded::new(backend(), group).order(Order::Engine);
                let (mut x, mut residual) = (values::<T>(rank as u64, LEN), values::<T>(100, LEN));
                let (mut y, mut sum, spec) =
                    (vec![T::default(); LEN], vec![T::default(); LEN], NormSpec::rms(ROWS, COLS, 1e-6));
                if in_place {
                    let args = Forward::<CpuBackend, T>::in_place(&mut x[..]).weight_dtype::<T>().residual_dtype::<T>();
                    norm.forward_reduced(&spec, args.residual_in_place(&mut residual[..])).unwrap();
                    return (x, residual);
                }
                let args = Forward::<CpuBackend, T>::new(&x[..], &mut y[..]).weight_dtype::<T>().residual_dtype::<T>();
                let args = args.residual(&residual[..]).residual_out(&mut sum[..]);
                norm.forward_reduced(&spec, args).unwrap();
                (y, sum)
            })
        };
        let threads: Vec<_> = ThreadGroup::new(ranks).into_iter().enumerate().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Half the distance between adjacent values of that magnitude. None is subnormal here.
fn half_ulp(magnitude: f64, dtype: DType) -> f64 {
    let bits = match dtype {
        DType::F32 => 23,
        DType::F16 => 10,
        DType::Bf16 => 7,
    };
    (magnitude.log2().floor() - f64::from(bits) - 1.0).exp2()
}

/// Let A be the sum of |x| over the ranks. A hop of any order rounds a sum of at most A (1 +
/// u)^hops to the dtype. So `|h - exact| <= (ranks - 1) half_ulp(A (1 + u)^(ranks - 1)) +
/// half_ulp_f32(|h|) + half_ulp(|h|)`: the hops, the f32 addition of the residual, and the last
/// rounding.
fn sums_are_within_the_bound<T: Element>(ranks: usize) {
    let parts: Vec<Vec<f64>> = (0..ranks).map(|rank| exact(&values::<T>(rank as u64, LEN))).collect();
    let residual = exact(&values::<T>(100, LEN));
    let outputs = on_ranks::<T>(ranks, false);
    let (y, h) = &outputs[0];
    let bits = |elements: &[T]| elements.iter().map(|element| element.bits()).collect::<Vec<_>>();
    for (rank, (other_y, other_h)) in outputs.iter().chain(&on_ranks::<T>(ranks, true)).enumerate() {
        assert_eq!((bits(y), bits(h)), (bits(other_y), bits(other_h)), "{rank}");
    }
    let h = exact(h);
    for i in 0..LEN {
        let sum: f64 = parts.iter().map(|part| part[i]).sum::<f64>() + residual[i];
        let hops = ranks as f64 - 1.0;
        // (1 + u)^hops is less than 1 + hops / 100 for every dtype.
        let of_hops = parts.iter().map(|part| part[i].abs()).sum::<f64>() * (1.0 + hops / 100.0);
        let largest = sum.abs() + hops * half_ulp(of_hops, T::DTYPE);
        let bound = hops * half_ulp(of_hops, T::DTYPE) + half_ulp(largest, DType::F32) + half_ulp(largest, T::DTYPE);
        assert!((h[i] - sum).abs() <= bound, "{ranks} ranks, {i}: {} of {sum} within {bound}", h[i]);
    }
    let arithmetic: Arithmetic = backend().arithmetic();
    let inputs = ForwardInputs { x: &h, residual: None, weight: None, bias: None };
    let model = Model { arithmetic: &arithmetic, mode: Mode::Worst };
    let truth = ForwardTruth::new(&NormSpec::rms(ROWS, COLS, 1e-6), inputs, T::DTYPE, None, model);
    assert!(truth.judge_bits(Tensor::Y, &Bits::of(y)).is_pass(), "{ranks} ranks of {}", T::DTYPE);
}

#[test]
fn sums_in_any_order_are_within_the_bound_and_y_is_theirs() {
    for ranks in [1, 2, 3, 4, 8] {
        sums_are_within_the_bound::<f32>(ranks);
        sums_are_within_the_bound::<f16>(ranks);
        sums_are_within_the_bound::<bf16>(ranks);
    }
}

/// Four ranks of bf16: 1, then three values that each hop rounds away. In f32 none is lost.
#[test]
fn the_order_says_where_sums_are_rounded() {
    let sums = |order| {
        thread::scope(|scope| {
            let rank = |(rank, group): (usize, ThreadGroup)| {
                scope.spawn(move || {
                    let x = [bf16::from_f32(if rank == 0 { 1.0 } else { 1.0 / 512.0 }); 2];
                    let (residual, mut y, mut sum) = ([bf16::ZERO; 2], [bf16::ZERO; 2], [bf16::ZERO; 2]);
                    let args = Forward::<CpuBackend, bf16>::new(&x[..], &mut y[..]).residual(&residual[..]);
                    let norm = Sharded::new(backend(), group).order(order);
                    norm.forward_reduced(&NormSpec::rms(1, 2, 1e-6), args.residual_out(&mut sum[..])).unwrap();
                    sum.map(bf16::to_f32)
                })
            };
            let threads: Vec<_> = ThreadGroup::new(4).into_iter().enumerate().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    assert_eq!(sums(Order::ByRank), [[1.0 + 1.0 / 128.0; 2]; 4]);
    assert_eq!(sums(Order::Engine), [[1.0; 2]; 4]);
    assert_eq!(Order::default(), Order::ByRank);
}

/// Implements the exchanges but no all-reduce.
struct Mover;

impl Collective<CpuBackend> for Mover {
    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        2
    }

    fn all_to_all<T: AnyElement>(&self, _: &RowShares, _: &[T], _: &mut [T]) -> Result<(), Error> {
        Ok(())
    }

    fn all_gather<T: AnyElement>(&self, _: &RowShares, _: &[T], _: &mut [T]) -> Result<(), Error> {
        Ok(())
    }

    fn all_gather_in_place<T: AnyElement>(&self, _: &RowShares, _: &mut [T]) -> Result<(), Error> {
        Ok(())
    }
}

/// The same error each time, because nothing was sent.
#[test]
fn what_is_not_to_be_had_is_refused_by_name() {
    let norm = Sharded::new(backend(), Mover).order(Order::Engine);
    let (mut x, mut y) = ([1.0f32; 10], [0.0f32; 6]);
    let spec = NormSpec::rms(2, 3, 1e-6);
    let rule = |answer: Result<(), Error>| match answer {
        Err(Error::Unsupported { rule }) => rule,
        answer => format!("{answer:?}"),
    };
    for _ in 0..2 {
        let adds_none = "this collective has no all-reduce: implement Collective::all_reduce, or use Order::ByRank";
        assert_eq!(rule(norm.forward_reduced(&spec, Forward::<CpuBackend, f32>::new(&x[..6], &mut y[..]))), adds_none);
        assert_eq!(rule(norm.forward_reduced(&spec, Forward::<CpuBackend, f32>::in_place(&mut x[..6]))), adds_none);
    }
    let apart = Forward::<CpuBackend, f32>::new(Rows::strided(&x[..], 5), &mut y[..]);
    let sends = "Sharded sends x, whose rows must be contiguous, got strided or grouped rows: pass a contiguous copy";
    assert_eq!(rule(norm.forward_reduced(&spec, apart)), sends);
}
