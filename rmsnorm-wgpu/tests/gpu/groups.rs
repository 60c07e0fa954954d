//! Groups of columns: each is a norm of its own, on a part of every row.

use rmsnorm_conformance::Harness;
use rmsnorm_wgpu::spec::quant::{CodeType, QuantSpec, ScaleKind, ScaleLayout};
use rmsnorm_wgpu::spec::{Activation, AnyElement, Element, Error, Norm, NormSpec, Rows, bf16};
use rmsnorm_wgpu::{Backward, Forward, QuantizedForward, TestBuffer, WgpuBackend, WgpuSlice};

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

fn from<E: AnyElement>(buffer: &TestBuffer<E>, first: usize, len: usize) -> WgpuSlice<'_, E> {
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

/// Rows and columns of a group of quantized calls, and the columns or rows of a block.
const QUANTIZED: (usize, usize, usize) = (96, 128, 64);

/// Codes and scales of the columns from `first` on, along rows and along columns.
fn codes(gpu: &WgpuBackend, spec: &NormSpec, cols: usize, first: usize, out: &Codes) -> Result<(), Error> {
    let (rows, _, block) = QUANTIZED;
    let [x, gate, weight] =
        [(1, rows * cols), (2, rows * cols), (3, cols)].map(|(seed, len)| upload::<bf16>(gpu, seed, len));
    let rstd = gpu.upload(&vec![0f32; rows * spec.groups]).unwrap();
    let len = (rows - 1) * cols + spec.cols;
    let quant = QuantSpec::new(CodeType::Int8, out.scale).layout(ScaleLayout::ColumnMajor { ld: rows });
    let (along, down) = (spec.cols / block, rows.div_ceil(block));
    let args = QuantizedForward::new(
        quant,
        Rows::strided(from(&x, first, len), cols),
        Rows::strided(from(&out.codes, first, len), cols),
    );
    let args = args.gate(Rows::strided(from(&gate, first, len), cols)).weight(from(&weight, first, spec.cols));
    let args = args.rstd(view(&rstd, rows * spec.groups)).scales(from(&out.scales, first / block * rows, along * rows));
    let args = args.codes_columnwise(from(&out.columnwise, first * rows, spec.cols * rows));
    gpu.quantized_forward(spec, args.scales_columnwise(from(&out.scales_columnwise, first * down, spec.cols * down)))
}

struct Codes {
    scale: ScaleKind,
    codes: TestBuffer<i8>,
    scales: TestBuffer<f32>,
    columnwise: TestBuffer<i8>,
    scales_columnwise: TestBuffer<f32>,
}

#[test]
fn codes_of_groups_are_those_of_their_columns() {
    let Some(gpu) = open() else { return };
    let (rows, width, block) = QUANTIZED;
    let (groups, cols) = (2, 2 * width);
    let outputs = |scale| Codes {
        scale,
        codes: gpu.upload(&vec![0i8; rows * cols]).unwrap(),
        scales: gpu.upload(&vec![0f32; rows * cols / block]).unwrap(),
        columnwise: gpu.upload(&vec![0i8; rows * cols]).unwrap(),
        scales_columnwise: gpu.upload(&vec![0f32; cols * rows.div_ceil(block)]).unwrap(),
    };
    let of = |cols| NormSpec::rms(rows, cols, 1e-5).gate_after(Activation::Silu);
    let scale = ScaleKind::Block { cols: block, is_power_of_two: false };
    let [at_once, one_by_one] = [0; 2].map(|_| outputs(scale));
    codes(&gpu, &of(cols).groups(groups), cols, 0, &at_once).unwrap();
    for group in 0..groups {
        codes(&gpu, &of(width), cols, group * width, &one_by_one).unwrap();
    }
    let got = [&at_once, &one_by_one].map(|out| {
        let codes = [&out.codes, &out.columnwise].map(|codes| gpu.download(codes).unwrap());
        (codes, [&out.scales, &out.scales_columnwise].map(|scales| bits(&gpu, scales)))
    });
    assert!(got[0] == got[1] && got[0].0.iter().all(|codes| codes.contains(&127)));
    // A block of columns of two groups.
    let refused = codes(&gpu, &of(cols).groups(4 * groups), cols, 0, &at_once);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
}
