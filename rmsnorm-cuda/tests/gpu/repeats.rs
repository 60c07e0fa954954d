//! Repeated calls give the same bits, in every program.

use rmsnorm_cuda::{
    Backward, CudaBackend, Forward,
    spec::{NormSpec, bf16},
};

use crate::support::{Gpu, bytes, upload};

const REPEATS: usize = 100;

/// About this many elements per matrix.
const ELEMENTS: usize = 1 << 21;

fn results(backend: &CudaBackend, norm: &NormSpec) -> impl FnMut() -> [Vec<u8>; 6] {
    let (rows, cols, stream) = (norm.rows, norm.cols, backend.stream());
    let (x, dy) = (upload::<bf16>(backend, 1, rows * cols), upload::<bf16>(backend, 2, rows * cols));
    let (weight, bias) = (upload::<f32>(backend, 3, cols), upload::<f32>(backend, 4, cols));
    let mut matrices = [0; 2].map(|_| stream.alloc_zeros::<bf16>(rows * cols).unwrap());
    let mut statistics = [0; 2].map(|_| stream.alloc_zeros::<f32>(rows).unwrap());
    let mut gradients = [0; 2].map(|_| stream.alloc_zeros::<f32>(cols).unwrap());
    let (backend, norm) = (backend.clone(), *norm);
    move || {
        let stream = backend.stream();
        matrices.iter_mut().for_each(|matrix| stream.memset_zeros(matrix).unwrap());
        let [y, dx] = &mut matrices;
        let [mean, rstd] = &mut statistics;
        let [dweight, dbias] = &mut gradients;
        let forward = Forward::new(x.as_view(), y.as_view_mut()).f32_weight();
        let forward = forward.weight(weight.as_view()).bias(bias.as_view());
        backend.forward(&norm, forward.mean(mean.as_view_mut()).rstd(rstd.as_view_mut())).unwrap();
        let backward = Backward::<bf16, f32, bf16>::mixed(dy.as_view(), x.as_view(), rstd.as_view(), dx.as_view_mut());
        let backward = backward.weight(weight.as_view()).mean(mean.as_view());
        backend.backward(&norm, backward.dweight(dweight.as_view_mut()).dbias(dbias.as_view_mut())).unwrap();
        let [y, dx] = [bytes(&backend, y), bytes(&backend, dx)];
        let [mean, rstd, dweight, dbias] = [mean, rstd, dweight, dbias].map(|vector| bytes(&backend, vector));
        [y, mean, rstd, dx, dweight, dbias]
    }
}

#[test]
fn repeated_calls_have_the_same_bits() {
    let Some(gpu) = Gpu::open() else { return };
    for cols in [128, 1000, 4096, 16384, 40000, 131_072, 300_000] {
        let norm = NormSpec::layer(ELEMENTS.div_ceil(cols), cols, 1e-5);
        let mut results = results(&gpu, &norm);
        let expected = results();
        for repeat in 1..REPEATS {
            let names = ["y", "mean", "rstd", "dx", "dweight", "dbias"];
            for (name, (got, expected)) in names.into_iter().zip(results().iter().zip(&expected)) {
                assert!(got == expected, "{name} of {}x{cols} differs in repeat {repeat}", norm.rows);
            }
        }
    }
}

/// Rows in the registers of a cluster, of every size, with more rows than resident clusters. A
/// barrier orders the exchange between blocks, and no sanitizer checks all of it.
#[test]
fn repeated_forwards_of_long_rows_have_the_same_bits() {
    let Some(gpu) = Gpu::open() else { return };
    for (rows, cols) in [(600, 32768), (300, 65536), (200, 131_072), (100, 262_144)] {
        let (stream, norm) = (gpu.stream(), NormSpec::rms(rows, cols, 1e-6));
        let [x, residual] = [1, 2].map(|seed| upload::<bf16>(&gpu, seed, rows * cols));
        let weight = upload::<bf16>(&gpu, 3, cols);
        let mut outputs = [0; 2].map(|_| stream.alloc_zeros::<bf16>(rows * cols).unwrap());
        for has_residual in [false, true] {
            let mut results = || {
                let [y, residual_out] = &mut outputs;
                let mut args = Forward::new(x.as_view(), y.as_view_mut()).weight(weight.as_view());
                if has_residual {
                    args = args.residual(residual.as_view()).residual_out(residual_out.as_view_mut());
                }
                gpu.forward(&norm, args).unwrap();
                outputs.each_ref().map(|output| bytes(&gpu, output))
            };
            let expected = results();
            for repeat in 1..REPEATS {
                assert!(results() == expected, "{rows}x{cols}, residual {has_residual}: repeat {repeat} differs");
            }
        }
    }
}
