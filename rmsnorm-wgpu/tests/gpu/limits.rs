//! Devices of the caller with lower limits: tensors in parts, grids in two dimensions, wgpu's
//! defaults.

use rmsnorm_conformance::{Harness, Options};
use rmsnorm_wgpu::WgpuBackend;
use rmsnorm_wgpu::spec::{Error, Rows, bf16};
use rmsnorm_wgpu::wgpu::Limits;

use crate::support::{Layer, backward, bits, forward, limited_device, open_limited, upload, view};

fn close(got: &[f32], expected: &[f32]) -> bool {
    got.len() == expected.len()
        && got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() <= 1e-4 * (1.0 + expected.abs()))
}

/// The bits of rows do not depend on the parts. Sums over rows have another order.
#[test]
fn tensors_beyond_the_largest_binding_are_worked_on_in_parts() {
    let Some(whole) = open_limited(|_| ()) else { return };
    let Some(parts) = open_limited(|limits| limits.max_storage_buffer_binding_size = 64 << 10) else { return };
    for (rows, cols) in [(100, 1024), (301, 257), (9, 4000), (5000, 24)] {
        assert!(forward::<f32>(&whole, rows, cols) == forward::<f32>(&parts, rows, cols), "{rows}x{cols}");
        assert!(forward::<bf16>(&whole, rows, cols) == forward::<bf16>(&parts, rows, cols), "{rows}x{cols}");
        let (expected, got) = (backward::<f32>(&whole, rows, cols), backward::<f32>(&parts, rows, cols));
        assert!(expected.0 == got.0, "{rows}x{cols}");
        assert!(close(&got.1, &expected.1) && close(&got.2, &expected.2), "{rows}x{cols}");
    }
}

/// Widely spaced rows take many ranges, and later ranges have separate partial rows: with a shared
/// one the chain of additions would be too long.
#[test]
fn later_parts_have_partial_rows_of_their_own() {
    let Some(whole) = open_limited(|_| ()) else { return };
    let Some(parts) = open_limited(|limits| limits.max_storage_buffer_binding_size = 64 << 10) else { return };
    let (rows, cols, row_stride) = (200, 64, 50 * 64);
    let expected = backward::<f32>(&whole, rows, cols);
    let layer = Layer::<f32>::new(&parts, rows, cols);
    let dx = upload::<f32>(&parts, 8, rows * row_stride);
    let [dweight, dbias] = [9, 10].map(|seed| upload::<f32>(&parts, seed, cols));
    let args = layer.args(Rows::strided(view(&dx, rows * row_stride), row_stride));
    parts.backward(&layer.norm, args.dweight(view(&dweight, cols)).dbias(view(&dbias, cols))).unwrap();
    let dx = bits(&parts, &dx);
    assert!((0..rows).flat_map(|row| &dx[row * row_stride..][..cols]).eq(&expected.0));
    let [dweight, dbias] = [dweight, dbias].map(|buffer| parts.download(&buffer).unwrap());
    assert!(close(&dweight[..cols], &expected.1) && close(&dbias[..cols], &expected.2));
}

/// With the workspace that a call allocates.
#[test]
fn a_workspace_beyond_the_largest_buffer_is_refused() {
    let Some(gpu) = open_limited(|limits| limits.max_buffer_size = 16 << 10) else { return };
    let (rows, cols) = (31, 256);
    let layer = Layer::<bf16>::new(&gpu, rows, cols);
    let dx = upload::<bf16>(&gpu, 8, rows * cols);
    let [dweight, dbias] = [9, 10].map(|seed| upload::<bf16>(&gpu, seed, cols));
    let args = || layer.args(view(&dx, rows * cols));
    gpu.backward(&layer.norm, args().dweight(view(&dweight, cols))).unwrap();
    let answer = gpu.backward(&layer.norm, args().dweight(view(&dweight, cols)).dbias(view(&dbias, cols)));
    let Err(Error::Unsupported { rule }) = answer else { panic!("{answer:?}") };
    assert!(rule.contains("a buffer of this device has at most 16384 bytes"), "{rule}");
}

#[test]
fn a_device_without_compute_is_unavailable() {
    let without: [fn(&mut Limits); 2] = [
        |limits| limits.max_compute_invocations_per_workgroup = 0,
        |limits| limits.max_storage_buffers_per_shader_stage = 0,
    ];
    for limits in without {
        let Some((device, queue)) = limited_device(limits) else { return };
        let answer = WgpuBackend::from_device(device, queue);
        assert!(matches!(&answer, Err(Error::Unavailable { reason, .. }) if reason.contains("without compute")));
    }
}

/// Groups of rows that begin and end in the middle of parts, judged by the suite with guarded
/// buffers.
#[test]
fn parts_begin_and_end_within_groups() {
    let Some(parts) = open_limited(|limits| limits.max_storage_buffer_binding_size = 64 << 10) else { return };
    let mut cases = Vec::new();
    for (kind, present, reduction) in [
        ("forward", "wro", "partials"),
        ("forward_in_place", "wro", "partials"),
        ("backward", "wsdW", "partials"),
        ("backward", "wsdW", "atomics"),
    ] {
        for dtype in ["f32", "bf16"] {
            // Each matrix has different gaps between groups, and different offsets.
            for layout in ["groups3s1", "groups100s2", "groups7s3"] {
                cases.push(format!(
                    "bounds:{kind}:rms_norm:{dtype},{dtype},{dtype}:1000x64:randn:eps1e-5:{present}:offset0:at_store:\
                     {reduction}:{layout}:seed1"
                ));
            }
        }
    }
    let options = Options { self_test: false, cases: cases.clone(), ..Options::default() };
    let summary = rmsnorm_conformance::run(&parts, &options, &mut |_, _| (), None).unwrap();
    assert_eq!(summary.counts.passed, cases.len(), "{summary}");
}

/// Codes: scales and the transposed copy are bound whole, and rows of later parts follow the rows
/// of the first.
#[test]
fn codes_of_parts_have_their_own_scales_and_columns() {
    let Some(parts) = open_limited(|limits| limits.max_storage_buffer_binding_size = 64 << 10) else { return };
    let mut cases = Vec::new();
    for dtype in ["f32", "bf16"] {
        for (present, quant) in [
            ("wrosta", "e4m3,given,f32,row_major"),
            ("wst", "int8,current,f32,row_major"),
            ("wrosy", "e5m2,row,f32,row_major"),
            ("ws", "e4m3,block64,f32,column_major1003"),
            ("ws", "e4m3,mx_up,f32,swizzled128x4"),
            // Parts of the columnwise copy begin at whole blocks.
            ("wsc", "e4m3,mx_up,f32,row_major"),
            ("wrosc", "e5m2,block64,f32,column_major1000"),
            ("wsc", "int8,block128,rounded,row_major"),
        ] {
            for layout in ["p0o0", "p5o3"] {
                cases.push(format!(
                    "bounds:quantized_forward:rms_norm:{dtype},{dtype},{dtype}:1000x64:randn:eps1e-5:{present}:offset0:\
                     at_store:partials:{layout}:seed1:{quant},floor0e0,ceilinginf"
                ));
            }
        }
    }
    let options = Options { self_test: false, cases: cases.clone(), ..Options::default() };
    let summary = rmsnorm_conformance::run(&parts, &options, &mut |_, _| (), None).unwrap();
    assert_eq!(summary.counts.passed, cases.len(), "{summary}");
}

/// Vectors and statistics share a binding where a device has fewer storage buffers than a call has
/// tensors, up to twelve.
#[test]
fn calls_with_more_tensors_than_storage_buffers_pass_the_suite() {
    let Some(few) = open_limited(|limits| limits.max_storage_buffers_per_shader_stage = 7) else { return };
    // Of the smoke profile, whose kernels a software device compiles in minutes.
    let options = Options { self_test: false, most_cases: Some(80), jobs: 2, ..Options::default() };
    let summary = rmsnorm_conformance::run(&few, &options, &mut |_, _| (), None).unwrap();
    assert!(summary.is_success(), "{summary}");
}

/// Copies change no bits.
#[test]
fn shared_bindings_have_the_same_values() {
    let Some(many) = open_limited(|_| ()) else { return };
    let Some(few) = open_limited(|limits| limits.max_storage_buffers_per_shader_stage = 4) else { return };
    for (rows, cols) in [(40, 1000), (6, 333), (3, 70_000)] {
        assert!(backward::<bf16>(&many, rows, cols) == backward::<bf16>(&few, rows, cols), "{rows}x{cols}");
        assert!(backward::<f32>(&many, rows, cols) == backward::<f32>(&few, rows, cols), "{rows}x{cols}");
    }
}

#[test]
fn grids_take_two_dimensions() {
    let Some(whole) = open_limited(|_| ()) else { return };
    let Some(narrow) = open_limited(|limits| limits.max_compute_workgroups_per_dimension = 12) else { return };
    for (rows, cols) in [(40, 2048), (30, 2049), (100, 5)] {
        assert!(forward::<bf16>(&whole, rows, cols) == forward::<bf16>(&narrow, rows, cols), "{rows}x{cols}");
        let (expected, got) = (backward::<f32>(&whole, rows, cols), backward::<f32>(&narrow, rows, cols));
        assert!(expected.0 == got.0 && close(&got.1, &expected.1) && close(&got.2, &expected.2), "{rows}x{cols}");
    }
}

#[test]
fn default_limits_will_do() {
    let Some(whole) = open_limited(|_| ()) else { return };
    let Some(default) = open_limited(|limits| *limits = Limits::default()) else { return };
    let Some(downlevel) = open_limited(|limits| *limits = Limits::downlevel_defaults()) else { return };
    for (rows, cols) in [(6, 1000), (4, 333)] {
        // Tiles depend on the maximum threads of a workgroup, and so may the order of a sum.
        let (expected, got) = (forward::<f32>(&whole, rows, cols), forward::<f32>(&default, rows, cols));
        let values = |bits: &[u32]| bits.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>();
        assert!(close(&values(&got.0), &values(&expected.0)), "{rows}x{cols}");
        let got = forward::<f32>(&downlevel, rows, cols);
        assert!(close(&values(&got.0), &values(&expected.0)), "{rows}x{cols}");
        let (expected, got) = (backward::<f32>(&whole, rows, cols), backward::<f32>(&default, rows, cols));
        assert!(close(&got.1, &expected.1) && close(&got.2, &expected.2), "{rows}x{cols}");
    }
}
