//! Groups of columns: each is a norm of its own, on a part of every row.

use rmsnorm_conformance::Harness;
use rmsnorm_wgpu::spec::{Activation, Element, Norm, NormSpec, Rows, bf16};
use rmsnorm_wgpu::{Backward, Forward, TestBuffer, WgpuBackend, WgpuSlice};

use crate::support::{bits, open, upload, view};

/// Rows, groups and columns of a group: in registers and streamed, aligned and not, and so few that
/// groups share a word.
const SHAPES: [(usize, usize, usize); 4] = [(40, 2, 64), (7, 3, 33), (5, 6, 1), (3, 2, 20_000)];

/// The outputs of a call, zeroed. Small multiples of a power of two have exact sums over rows.
struct Outputs<E> {
    y: TestBuffer<E>,
    dx: TestBuffer<E>,
    dgate: TestBuffer<E>,
    dweight: TestBuffer<f32>,
    dbias: TestBuffer<f32>,
}

impl<E: Element> Outputs<E> {
    fn new(gpu: &WgpuBackend, rows: usize, cols: usize) -> Self {
        let matrix = || gpu.upload(&vec![E::from_f32(0.0); rows * cols + 1]).unwrap();
        let vector = || gpu.upload(&vec![0f32; cols]).unwrap();
        Outputs { y: matrix(), dx: matrix(), dgate: matrix(), dweight: vector(), dbias: vector() }
    }

    fn bits(&self, gpu: &WgpuBackend) -> [Vec<u32>; 5] {
        let [y, dx, dgate] = [&self.y, &self.dx, &self.dgate].map(|matrix| bits(gpu, matrix));
        [y, dx, dgate, bits(gpu, &self.dweight), bits(gpu, &self.dbias)]
    }
}

fn from<E: Element>(buffer: &TestBuffer<E>, first: usize, len: usize) -> WgpuSlice<'_, E> {
    WgpuSlice::new(buffer.buffer(), (first * size_of::<E>()) as u64, len)
}

/// Forward and backward of the columns from `first` on, by the given statistics of all rows.
fn call<E: Element>(gpu: &WgpuBackend, spec: &NormSpec, cols: usize, first: usize, out: &Outputs<E>) {
    let rows = spec.rows;
    let integers = |factor: usize, len: usize| -> Vec<E> {
        (0..=len).map(|at| E::from_f32((at * factor / 8 % 9) as f32 - 4.0)).collect()
    };
    let [x, gate, dy] = [5, 7, 11].map(|factor| gpu.upload(&integers(factor, rows * cols)).unwrap());
    let [weight, bias] = [1, 2].map(|seed| upload::<E>(gpu, seed, cols));
    let statistics = rows * spec.groups;
    let (mean, rstd) = (gpu.upload(&vec![0f32; statistics]).unwrap(), gpu.upload(&vec![1f32; statistics]).unwrap());
    let len = (rows - 1) * cols + spec.cols;
    let args = Forward::new(Rows::strided(from(&x, first, len), cols), Rows::strided(from(&out.y, first, len), cols))
        .weight(from(&weight, first, spec.cols))
        .bias(from(&bias, first, spec.cols));
    let args = if spec.gate.is_some() { args.gate(Rows::strided(from(&gate, first, len), cols)) } else { args };
    gpu.forward(spec, args).unwrap();
    let args = Backward::new(
        Rows::strided(from(&dy, first, len), cols),
        Rows::strided(from(&x, first, len), cols),
        view(&rstd, statistics),
        Rows::strided(from(&out.dx, first, len), cols),
    )
    .weight(from(&weight, first, spec.cols));
    let args = args.dweight_sum(from(&out.dweight, first, spec.cols)).dbias_sum(from(&out.dbias, first, spec.cols));
    let args = if spec.norm == Norm::Layer { args.mean(view(&mean, statistics)) } else { args };
    let args = if spec.gate.is_some() {
        args.gate(Rows::strided(from(&gate, first, len), cols)).dgate(Rows::strided(from(&out.dgate, first, len), cols))
    } else {
        args
    };
    gpu.backward(spec, args).unwrap();
}

fn groups_are_norms<E: Element>(gpu: &WgpuBackend, spec: impl Fn(NormSpec) -> NormSpec) {
    for ((rows, groups, width), norm) in SHAPES.into_iter().flat_map(|shape| Norm::ALL.map(|norm| (shape, norm))) {
        let cols = groups * width;
        let [at_once, one_by_one] = [0; 2].map(|_| Outputs::<E>::new(gpu, rows, cols));
        let of = |cols| spec(NormSpec::new(norm, rows, cols, 1e-5));
        call(gpu, &of(cols).groups(groups), cols, 0, &at_once);
        for group in 0..groups {
            call(gpu, &of(width), cols, group * width, &one_by_one);
        }
        let name = format!("{norm:?} {rows}x{groups}x{width} {}", E::DTYPE);
        for (index, (got, expected)) in at_once.bits(gpu).into_iter().zip(one_by_one.bits(gpu)).enumerate() {
            // A gated x is no integer, so the order of its sums over rows matters.
            let is_exact = index != 3 || spec(NormSpec::rms(1, 1, 0.0)).gate.is_none();
            assert!(got == expected || !is_exact, "output {index} of {name}");
        }
    }
}

#[test]
fn groups_are_norms_of_their_columns() {
    let Some(gpu) = open() else { return };
    groups_are_norms::<f32>(&gpu, |spec| spec);
    groups_are_norms::<bf16>(&gpu, |spec| spec.gate_before(Activation::Silu));
}
