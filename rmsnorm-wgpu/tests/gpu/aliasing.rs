//! Tensors that share a buffer, which never happens in the suite.

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::values;
use rmsnorm_wgpu::spec::{NormSpec, Rows, bf16};
use rmsnorm_wgpu::{Backward, Forward, WgpuSlice};

use crate::support::{Layer, backward, bits, forward, open, upload};

const SHAPES: [(usize, usize); 5] = [(7, 64), (5, 1024), (9, 33), (4, 501), (3, 4096)];

#[test]
fn x_and_y_may_be_halves_of_one_buffer() {
    let Some(gpu) = open() else { return };
    for (rows, cols) in SHAPES {
        let expected = forward::<bf16>(&gpu, rows, cols);
        let len = rows * cols;
        let all = [values::<bf16>(1, len), values(3, len), values(2, cols)].concat();
        let all = gpu.upload(&all).unwrap();
        let rstd = gpu.upload(&vec![0f32; rows]).unwrap();
        let view = |range| gpu.view(&all, range);
        let args = Forward::new(view(0..len), view(len..2 * len)).weight(view(2 * len..2 * len + cols));
        gpu.forward(&NormSpec::rms(rows, cols, 1e-5), args.rstd(WgpuSlice::whole(rstd.buffer()))).unwrap();
        assert_eq!(bits(&gpu, &all)[len..2 * len], expected.0[..], "{rows}x{cols}");
        assert_eq!(bits(&gpu, &rstd), expected.1, "{rows}x{cols}");
    }
}

/// x and y are the even and odd rows of one matrix, like the parts of a fused projection.
#[test]
fn rows_of_x_and_y_may_alternate() {
    let Some(gpu) = open() else { return };
    for (rows, cols) in SHAPES {
        let expected = forward::<bf16>(&gpu, rows, cols);
        let (x, weight) = (values::<bf16>(1, rows * cols), gpu.upload(&values::<bf16>(2, cols)).unwrap());
        let mut all = Vec::new();
        for row in x.chunks(cols) {
            all.extend_from_slice(row);
            all.extend_from_slice(&values::<bf16>(9, cols));
        }
        let both = gpu.upload(&all).unwrap();
        let len = (2 * rows - 1) * cols;
        let (x, y) = (gpu.view(&both, 0..len), gpu.view(&both, cols..cols + len));
        let args = Forward::new(Rows::strided(x, 2 * cols), Rows::strided(y, 2 * cols));
        gpu.forward(&NormSpec::rms(rows, cols, 1e-5), args.weight(gpu.view(&weight, 0..cols))).unwrap();
        let got = bits(&gpu, &both);
        for row in 0..rows {
            let at = 2 * row * cols;
            let before: Vec<u32> = all[at..at + cols].iter().map(|x| u32::from(x.to_bits())).collect();
            assert_eq!(got[at..at + cols], before, "x, {rows}x{cols}, row {row}");
            assert_eq!(got[at + cols..at + 2 * cols], expected.0[row * cols..(row + 1) * cols], "{rows}x{cols}, {row}");
        }
    }
}

/// All tensors in one buffer of f32, including the workspace.
#[test]
fn all_tensors_of_backward_may_share_a_buffer() {
    let Some(gpu) = open() else { return };
    for (rows, cols) in SHAPES {
        let (dx, dweight, dbias) = backward::<f32>(&gpu, rows, cols);
        let len = rows * cols;
        let mut arena = Vec::<f32>::new();
        let mut place = |data: Vec<f32>| {
            let start = arena.len();
            arena.extend(data);
            start..arena.len()
        };
        let [x, dy] = [1, 5].map(|seed| values(seed, len)).map(&mut place);
        let [mean, rstd] = [6, 7].map(|seed| values(seed, rows)).map(&mut place);
        let [weight, dw, db] = [2, 9, 10].map(|seed| values(seed, cols)).map(&mut place);
        let out = place(values(8, len));
        // More than any plan of these sizes needs. NaN would show up in results.
        let workspace = place(vec![f32::NAN; 1 << 17]);
        let arena = gpu.upload(&arena).unwrap();
        let view = |range| gpu.view(&arena, range);
        let args = Backward::new(view(dy), view(x), view(rstd), view(out.clone())).mean(view(mean));
        let args =
            args.weight(view(weight)).dweight(view(dw.clone())).dbias(view(db.clone())).workspace(view(workspace));
        gpu.backward(&NormSpec::layer(rows, cols, 1e-5), args).unwrap();
        let got = gpu.download(&arena).unwrap();
        let of = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(of(&got[out]), dx, "{rows}x{cols}");
        assert_eq!((of(&got[dw]), of(&got[db])), (of(&dweight), of(&dbias)), "{rows}x{cols}");
    }
}

/// Streamed rows leave their sums in the workspace, which is read while dx is written.
#[test]
fn the_workspace_may_share_the_buffer_of_dx_where_rows_stream() {
    let Some(gpu) = open() else { return };
    let (rows, cols) = (2, 1 << 17);
    let (expected, ..) = backward::<f32>(&gpu, rows, cols);
    let len = rows * cols;
    let layer = Layer::<f32>::new(&gpu, rows, cols);
    let shared = upload::<f32>(&gpu, 8, len + 64);
    let args = layer.args(gpu.view(&shared, 0..len)).workspace(gpu.view(&shared, len..len + 64));
    gpu.backward(&layer.norm, args).unwrap();
    assert_eq!(bits(&gpu, &shared)[..len], expected[..]);
}
