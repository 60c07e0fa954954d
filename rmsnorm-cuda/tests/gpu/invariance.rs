//! A row has the same bits alone, among other rows, and at every alignment.

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::values;
use rmsnorm_cuda::cudarc::driver::CudaSlice;
use rmsnorm_cuda::{
    Backward, CudaBackend, Forward,
    spec::{DType, Norm, NormSpec, Problem, Rows, Tensor, bf16},
};

use crate::support::{Gpu, bytes, upload};

/// One length for each way to divide a row, aligned and ragged; the last two stream.
const COLS: [usize; 7] = [100, 4097, 16385, 40000, 70001, 131_072, 300_000];
const ROWS: usize = 40;
/// Rows that differ; the others repeat them, because generating values takes longer than
/// normalizing them.
const PERIOD: usize = 8;

/// The layout of a call's tensors in their buffers.
#[derive(Clone, Copy)]
struct Layout {
    /// Elements before every matrix and before the weight.
    offset: usize,
    /// Elements between the end of a row and the next row.
    gap: usize,
}

const DENSE: Layout = Layout { offset: 0, gap: 0 };
/// Only single elements are aligned.
const MISALIGNED: Layout = Layout { offset: 1, gap: 1 };

/// Some rows of the data, in a layout.
struct Call<'a> {
    gpu: &'a CudaBackend,
    norm: NormSpec,
    layout: Layout,
}

/// The bytes of each row's results: y, dx, rstd, and mean for layer norm.
type Results = [Vec<Vec<u8>>; 4];
const NAMES: [&str; 4] = ["y", "dx", "rstd", "mean"];

impl Call<'_> {
    fn stride(&self) -> usize {
        self.norm.cols + self.layout.gap
    }

    /// A matrix on the device, with NaN around its rows.
    fn upload(&self, dense: &[bf16]) -> CudaSlice<bf16> {
        let mut host = vec![bf16::NAN; self.layout.offset];
        for row in dense.chunks_exact(self.norm.cols) {
            host.extend_from_slice(row);
            host.resize(host.len() + self.layout.gap, bf16::NAN);
        }
        self.gpu.stream().clone_htod(&host).unwrap()
    }

    fn download(&self, matrix: &CudaSlice<bf16>) -> Vec<Vec<u8>> {
        let host = self.gpu.stream().clone_dtoh(matrix).unwrap();
        let rows = host[self.layout.offset..].chunks(self.stride());
        rows.map(|row| bytemuck::cast_slice(&row[..self.norm.cols]).to_vec()).collect()
    }

    /// Runs forward, then backward with the statistics of forward.
    fn run(&self, x: &[bf16], dy: &[bf16]) -> Results {
        let (Call { gpu, norm, layout: Layout { offset, .. } }, stride) = (self, self.stride());
        let is_layer = norm.norm == Norm::Layer;
        let (x, dy, weight) = (self.upload(x), self.upload(dy), self.upload(&values(3, norm.cols)));
        let mut matrices = [0; 2].map(|_| gpu.stream().alloc_zeros::<bf16>(x.len()).unwrap());
        let mut statistics = [0; 2].map(|_| gpu.stream().alloc_zeros::<f32>(norm.rows).unwrap());
        let ([y, dx], [mean, rstd]) = (&mut matrices, &mut statistics);
        let weight = || weight.slice(*offset..offset + norm.cols);

        let args =
            Forward::new(Rows::strided(x.slice(*offset..), stride), Rows::strided(y.slice_mut(*offset..), stride));
        let args = args.weight(weight()).rstd(rstd.as_view_mut());
        let args = if is_layer { args.mean(mean.as_view_mut()) } else { args };
        gpu.forward(norm, args).unwrap();

        let [dy, x] = [&dy, &x].map(|matrix| Rows::strided(matrix.slice(*offset..), stride));
        let args = Backward::new(dy, x, rstd.as_view(), Rows::strided(dx.slice_mut(*offset..), stride));
        let mut dweight = gpu.stream().alloc_zeros::<bf16>(norm.cols).unwrap();
        let args = args.weight(weight()).dweight(dweight.as_view_mut());
        let args = if is_layer { args.mean(mean.as_view()) } else { args };
        gpu.backward(norm, args).unwrap();

        let by_row =
            |values: &CudaSlice<f32>| bytes(gpu, values).chunks_exact(size_of::<f32>()).map(<[u8]>::to_vec).collect();
        [self.download(y), self.download(dx), by_row(rstd), by_row(mean)]
    }
}

fn check(gpu: &CudaBackend, norm: Norm, cols: usize) {
    let spec = |rows| match norm {
        Norm::Rms | Norm::L2 | Norm::L2Clamped => NormSpec::new(norm, rows, cols, 1e-6),
        Norm::Layer => NormSpec::layer(rows, cols, 1e-5),
    };
    let [x, dy] = [1, 2].map(|seed| values::<bf16>(seed, PERIOD * cols).repeat(ROWS / PERIOD));
    let batch = Call { gpu, norm: spec(ROWS), layout: DENSE }.run(&x, &dy);
    let misaligned = Call { gpu, norm: spec(ROWS), layout: MISALIGNED }.run(&x, &dy);
    for (name, (got, expected)) in NAMES.into_iter().zip(misaligned.iter().zip(&batch)) {
        assert!(got == expected, "{name} of {} of {ROWS}x{cols}, misaligned", norm.name());
    }
    // The programs of many rows: rows read twice, and partial sums of dweight.
    let large = Call { gpu: &gpu.with_large_plans(), norm: spec(ROWS), layout: DENSE }.run(&x, &dy);
    for (name, (got, expected)) in NAMES.into_iter().zip(large.iter().zip(&batch)) {
        assert!(got == expected, "{name} of {} of {ROWS}x{cols}, as if large", norm.name());
    }
    for row in [0, 3, ROWS - 1] {
        let range = row * cols..(row + 1) * cols;
        for (how, layout) in [("aligned", DENSE), ("misaligned", MISALIGNED)] {
            let alone = Call { gpu, norm: spec(1), layout }.run(&x[range.clone()], &dy[range.clone()]);
            for (name, (got, expected)) in NAMES.into_iter().zip(alone.iter().zip(&batch)) {
                assert!(got[0] == expected[row], "{name} of {}, row {row} of {cols} alone, {how}", norm.name());
            }
        }
    }
}

/// A small call keeps rows in registers, a large call reads them twice. Tests both programs, with
/// tiles of every form that the built-in table has up to 16384 columns of 16 bits.
#[test]
fn a_row_has_its_bits_among_few_and_among_many() {
    let Some(gpu) = Gpu::open() else { return };
    let bits = |norm: NormSpec, x: &CudaSlice<bf16>, first: usize| {
        let x = x.slice(first * norm.cols..(first + norm.rows) * norm.cols);
        let weight = upload::<bf16>(&gpu, 3, norm.cols);
        let mut y = gpu.stream().alloc_zeros::<bf16>(norm.rows * norm.cols).unwrap();
        let mut rstd = gpu.stream().alloc_zeros::<f32>(norm.rows).unwrap();
        let args = Forward::new(x, y.as_view_mut()).weight(weight.as_view()).rstd(rstd.as_view_mut());
        gpu.forward(&norm, args).unwrap();
        (bytes(&gpu, &y), bytes(&gpu, &rstd))
    };
    const FEW: usize = 5;
    for norm in Norm::USUAL {
        for cols in [24, 100, 512, 1021, 1024, 2048, 4096, 5001, 8192, 16384] {
            // About 12 million elements each, which is more than registers hold.
            let rows = (12_usize << 20).div_ceil(cols);
            let spec = |rows| match norm {
                Norm::Rms | Norm::L2 | Norm::L2Clamped => NormSpec::new(norm, rows, cols, 1e-6),
                Norm::Layer => NormSpec::layer(rows, cols, 1e-5),
            };
            let is_held = |rows| {
                let problem = Problem::forward(norm, rows, cols, DType::Bf16, &[Tensor::Weight, Tensor::Rstd]);
                gpu.plan(&problem).contains(" held")
            };
            if !is_held(FEW) || is_held(rows) {
                println!("skipped: by {} {cols} columns of {} have one program", gpu.tuning(), norm.name());
                continue;
            }
            let x = upload::<bf16>(&gpu, 1, rows * cols);
            let (y, rstd) = bits(spec(rows), &x, 0);
            for first in [0, rows / 2, rows - FEW] {
                let few = bits(spec(FEW), &x, first);
                let row_bytes = cols * size_of::<bf16>();
                let expected = (&y[first * row_bytes..][..FEW * row_bytes], &rstd[first * 4..][..FEW * 4]);
                assert!((&*few.0, &*few.1) == expected, "{} of {cols} columns from row {first} on", norm.name());
            }
        }
    }
}

#[test]
fn a_row_of_rms_norm_has_its_bits_wherever_it_lies() {
    let Some(gpu) = Gpu::open() else { return };
    COLS.into_iter().for_each(|cols| check(&gpu, Norm::Rms, cols));
}

#[test]
fn a_row_of_layer_norm_has_its_bits_wherever_it_lies() {
    let Some(gpu) = Gpu::open() else { return };
    COLS.into_iter().for_each(|cols| check(&gpu, Norm::Layer, cols));
}
