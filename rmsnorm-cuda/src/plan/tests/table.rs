//! What is launched for the shapes that were measured, in the lines of `plan/describe.rs`.

use rmsnorm_spec::Norm;

use super::*;

const RMS_FORWARD: Call = Call::new(Direction::Forward, Norm::Rms, BF16, WEIGHT);
const RMS_ADD: Call = Call { tensors: WEIGHT_RESIDUAL, ..RMS_FORWARD };
const LAYER_FORWARD: Call = Call::new(Direction::Forward, Norm::Layer, BF16, WEIGHT_BIAS);
const LAYER_ADD: Call = Call { tensors: WEIGHT_BIAS_RESIDUAL, ..LAYER_FORWARD };
const RMS_BACKWARD: Call = Call::new(Direction::Backward, Norm::Rms, BF16, DWEIGHT);
const LAYER_BACKWARD: Call = Call::new(Direction::Backward, Norm::Layer, BF16, DWEIGHT_DBIAS);

/// Holds the plan of every shape to its line; shows all lines that differ, as they would have to be written.
#[track_caller]
fn check(caps: &Caps, call: Call, lines: &[(usize, usize, &str)]) {
    let differing = lines.iter().filter_map(|&(rows, cols, expected)| {
        let got = call.plan(rows, cols, caps).to_string();
        (got != expected).then(|| format!("        ({rows}, {cols}, \"{got}\"),\n"))
    });
    let differing: String = differing.collect();
    assert!(differing.is_empty(), "{call:?}: these lines are now\n{differing}");
}

#[test]
fn rms_forward_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_FORWARD,
        &[
            (1048576, 128, "Forward 1x16x1x8 in 16x2, on 32768x256"),
            (262144, 512, "Forward 1x32x2x8 in 8x2, on 16384x256"),
            (104832, 1280, "Forward 1x64x3x8~, on 104832x64"),
            (32768, 1024, "Forward 1x64x2x8, on 32768x64"),
            (65536, 2048, "Forward 1x128x2x8, on 65536x128"),
            (32768, 4096, "Forward 1x256x2x8, on 32768x256"),
            (16384, 8192, "Forward 1x256x4x8, on 16384x256"),
            (8192, 16384, "Forward 1x512x4x8, on 8192x512"),
            (4096, 32768, "Cluster 2x128x16x8, on 8192x128"),
            (2048, 65536, "Cluster 4x128x16x8, on 8192x128"),
            (1024, 131072, "Cluster 8x128x16x8, on 8192x128"),
            (512, 262144, "Long 8x512x8x8, 64 KiB, on 4096x512"),
            (4, 2097152, "Streaming 8x1024x1x8~, on 32x1024"),
        ],
    );
}

#[test]
fn rms_forward_of_decoding() {
    check(
        &Caps::h200(),
        RMS_FORWARD,
        &[
            (0, 4096, ""),
            (1, 4096, "Forward 1x256x2x8, on 1x256"),
            (8, 4096, "Forward 1x256x2x8, on 8x256"),
            (128, 4096, "Forward 1x256x2x8, on 128x256"),
            (128, 8192, "Forward 1x256x4x8, on 128x256"),
            (1024, 4096, "Forward 1x256x2x8, on 1024x256"),
        ],
    );
}

#[test]
fn add_and_rms_forward_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_ADD,
        &[
            (1048576, 128, "Forward 1x16x1x8 in 16x1, on 65536x256"),
            (262144, 512, "Forward 1x32x2x8 in 8x1, on 32768x256"),
            (32768, 1024, "Forward 1x128x1x8, on 32768x128"),
            (32768, 4096, "Forward 1x256x2x8, on 32768x256"),
            (16384, 8192, "Forward 1x256x4x8, on 16384x256"),
            (8192, 16384, "Forward 1x512x4x8, on 8192x512"),
            (4096, 32768, "Cluster 2x256x8x8, on 8192x256"),
            (2048, 65536, "Cluster 4x256x8x8, on 8192x256"),
            (1024, 131072, "Cluster 8x256x8x8, on 8192x256"),
            (512, 262144, "Cluster 8x512x8x8, on 4096x512"),
        ],
    );
}

#[test]
fn layer_forward_on_an_h200() {
    check(
        &Caps::h200(),
        LAYER_FORWARD,
        &[
            (1048576, 128, "Forward 1x8x2x8 in 16x2, on 32768x128"),
            (262144, 512, "Forward 1x32x2x8 in 4x2, on 32768x128"),
            (32768, 1024, "Forward 1x32x4x8, on 32768x32"),
            (116480, 1152, "Forward 1x32x5x8~, on 116480x32"),
            (65536, 2048, "Forward 1x32x8x8, on 65536x32"),
            (52416, 2560, "Forward 1x64x5x8, on 52416x64"),
            (32768, 4096, "Forward 1x128x4x8, on 32768x128"),
            (8192, 16384, "Forward 1x256x8x8, on 8192x256"),
            (4096, 32768, "Long 1x512x8x8, 64 KiB, on 4096x512"),
            (2048, 65536, "Long 1x1024x8x8, 128 KiB, on 2048x1024"),
            (1024, 131072, "Long 4x256x16x8, 64 KiB, on 4096x256"),
        ],
    );
}

#[test]
fn add_and_layer_forward_on_an_h200() {
    check(
        &Caps::h200(),
        LAYER_ADD,
        &[
            (1048576, 128, "Forward 1x8x2x8 in 32x1, on 32768x256"),
            (262144, 512, "Forward 1x32x2x8 in 8x1, on 32768x256"),
            (32768, 1024, "Forward 1x64x2x8, on 32768x64"),
            (65536, 2048, "Forward 1x128x2x8, on 65536x128"),
            (32768, 4096, "Forward 1x128x4x8, on 32768x128"),
            (16384, 8192, "Forward 1x256x4x8, on 16384x256"),
            (8192, 16384, "Forward 1x512x4x8, on 8192x512"),
            (4096, 32768, "Long 1x512x8x8, 128 KiB, on 4096x512"),
        ],
    );
}

#[test]
fn rms_backward_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_BACKWARD,
        &[
            (0, 4096, "Reduce 4 on 128x32"),
            (1, 4096, "Backward 1x512x1x8, ring 3 of 48 KiB, on 1x512; Reduce 4 on 128x32"),
            (1048576, 128, "Backward 1x16x1x8 in 16x1, ring 3 of 24 KiB, on 528x256; Reduce 128 on 4x1024"),
            (576000, 384, "Backward 1x16x3x8 in 16x1, ring 2 of 48 KiB, on 132x256; Reduce 128 on 12x1024"),
            (262144, 512, "Backward 1x64x1x8 in 8x2, ring 3 of 96 KiB, on 132x512; Reduce 128 on 16x1024"),
            (32768, 1024, "Backward 1x128x1x8 in 4x1, ring 3 of 48 KiB, on 264x512; Reduce 128 on 32x1024"),
            (65536, 2048, "Backward 1x256x1x8 in 4x1, ring 3 of 96 KiB, on 132x1024; Reduce 128 on 64x1024"),
            (32768, 4096, "Backward 1x512x1x8, ring 3 of 48 KiB, on 264x512; Reduce 128 on 128x1024"),
            (16384, 8192, "Backward 1x1024x1x8, ring 3 of 96 KiB, on 132x1024; Reduce 128 on 256x1024"),
            (8192, 16384, "Backward 2x256x4x8, ring 3 of 96 KiB, on 264x256; Reduce 128 on 512x1024"),
            (4096, 32768, "Backward 4x128x8x8, ring 2 of 64 KiB, on 240x128; Reduce 32 on 1024x256"),
            (2048, 65536, "Backward 8x128x8x8, ring 3 of 96 KiB, on 240x128; Reduce 16 on 2048x128"),
            (1024, 131072, "Backward 8x256x8x8, ring 3+ of 192 KiB, on 120x256; Reduce 8 on 4096x64"),
            (512, 262144, "RowSums 8x512x1x8~, on 264x512; Columns 1x256x1x8~, on 2176x256; Reduce 16 on 8192x128"),
            (104832, 1280, "Backward 1x32x5x8 in 8x1, ring 2 of 80 KiB, on 132x256; Reduce 128 on 40x1024"),
            (13056, 10240, "Backward 1x256x5x8, ring 3 of 120 KiB, on 132x256; Reduce 128 on 320x1024"),
            (4096, 1024, "Backward 1x128x1x8 in 4x1, ring 3 of 48 KiB, on 264x512; Reduce 128 on 32x1024"),
            (4096, 4096, "Backward 1x512x1x8, ring 3 of 48 KiB, on 264x512; Reduce 128 on 128x1024"),
            (4096, 8192, "Backward 1x1024x1x8, ring 3 of 96 KiB, on 132x1024; Reduce 128 on 256x1024"),
        ],
    );
}

#[test]
fn layer_backward_on_an_h200() {
    check(
        &Caps::h200(),
        LAYER_BACKWARD,
        &[
            (262144, 512, "Backward 1x32x2x8 in 8x1, ring 3 of 48 KiB, on 264x256; Reduce 128 on 32x1024"),
            (32768, 1024, "Backward 1x64x2x8 in 8x1, ring 3 of 96 KiB, on 132x512; Reduce 128 on 64x1024"),
            (65536, 2048, "Backward 1x128x2x8 in 4x1, ring 3 of 96 KiB, on 132x512; Reduce 128 on 128x1024"),
            (13056, 10240, "Backward 1x256x5x8, ring 2 of 80 KiB, on 132x256; Reduce 128 on 640x1024"),
            (32768, 4096, "Backward 1x128x4x8 in 2x1, ring 3 of 96 KiB, on 132x256; Reduce 128 on 256x1024"),
            (8192, 16384, "Backward 2x256x4x8, ring 3 of 96 KiB, on 264x256; Reduce 128 on 1024x1024"),
            (2048, 65536, "Backward 8x256x4x8, ring 3 of 96 KiB, on 240x256; Reduce 16 on 4096x128"),
            (1024, 131072, "Backward 8x512x4x8, ring 3+ of 192 KiB, on 120x512; Reduce 8 on 8192x64"),
        ],
    );
}

#[test]
fn f32_on_an_h200() {
    check(
        &Caps::h200(),
        Call { dtypes: F32, ..RMS_FORWARD },
        &[(32768, 1024, "Forward 1x128x2x4, on 32768x128"), (16384, 4096, "Forward 1x256x4x4, on 16384x256")],
    );
    check(
        &Caps::h200(),
        Call { dtypes: F32, ..RMS_BACKWARD },
        &[
            (32768, 1024, "Backward 1x256x1x4 in 4x1, ring 3 of 96 KiB, on 132x1024; Reduce 128 on 32x1024"),
            (16384, 4096, "Backward 1x1024x1x4, ring 3 of 96 KiB, on 132x1024; Reduce 128 on 128x1024"),
        ],
    );
}

#[test]
fn rows_that_no_tile_fits() {
    check(
        &Caps::h200(),
        RMS_FORWARD,
        &[
            (4096, 1, "Forward 1x1x1x8~ in 256x2, on 8x256"),
            (4096, 100, "Forward 1x16x1x8~ in 16x2, on 128x256"),
            (4096, 4097, "Forward 1x256x3x8~, on 4096x256"),
        ],
    );
    check(
        &Caps::h200(),
        RMS_BACKWARD,
        &[
            (4096, 1, "Backward 1x1x1x8~ in 256x1, ring 3 of 24 KiB, on 16x256; Reduce 8 on 1x64"),
            (4096, 100, "Backward 1x16x1x8~ in 16x1, ring 3 of 24 KiB, on 256x256; Reduce 128 on 4x1024"),
            (4096, 4097, "Backward 1x128x5x8~ in 2x1, ring 2 of 80 KiB, on 132x256; Reduce 128 on 129x1024"),
        ],
    );
}

#[test]
fn a_wider_stream_halves_the_packs() {
    let stream = |call| Call { dtypes: BF16_STREAM_F32, ..call };
    check(&Caps::h200(), stream(RMS_ADD), &[(32768, 4096, "Forward 1x256x4x4, on 32768x256")]);
    check(
        &Caps::h200(),
        stream(RMS_BACKWARD),
        &[(32768, 4096, "Backward 1x1024x1x4, ring 3 of 72 KiB, on 132x1024; Reduce 128 on 128x1024")],
    );
    // Without a residual there is no stream to be wider.
    check(&Caps::h200(), stream(RMS_FORWARD), &[(32768, 4096, "Forward 1x256x2x8, on 32768x256")]);
}

#[test]
fn devices_without_clusters() {
    check(
        &Caps::a100(),
        RMS_FORWARD,
        &[(2048, 65536, "Forward 1x1024x8x8, on 2048x1024"), (1024, 131072, "Streaming 1x1024x1x8~, on 108x1024")],
    );
    check(
        &Caps::a100(),
        RMS_BACKWARD,
        &[
            (32768, 4096, "Backward 1x512x1x8, ring 3 of 48 KiB, on 216x512; Reduce 128 on 128x1024"),
            (8192, 16384, "Backward 1x512x4x8, ring 2 of 128 KiB, on 108x512; Reduce 64 on 512x512"),
            (4096, 32768, "RowSums 1x512x1x8~, on 216x512; Columns 1x256x1x8~, on 1728x256; Reduce 64 on 1024x512"),
        ],
    );
    check(
        &Caps::t4(),
        LAYER_FORWARD,
        &[(4096, 32768, "Streaming 1x1024x1x8~, on 40x1024"), (2048, 65536, "Streaming 1x1024x1x8~, on 40x1024")],
    );
    check(
        &Caps::t4(),
        RMS_BACKWARD,
        &[
            (32768, 4096, "Backward 1x512x1x8, ring 3 of 48 KiB, on 120x512; Reduce 64 on 128x512"),
            (8192, 16384, "RowSums 1x512x1x8~, on 80x512; Columns 1x256x1x8~, on 640x256; Reduce 64 on 512x512"),
        ],
    );
}

#[test]
fn locks_and_atomics_begin_with_zeros() {
    let with = |grad_reduction| Call { grad_reduction, ..RMS_BACKWARD };
    check(
        &Caps::h200(),
        with(GradReduction::Locks { groups: 64 }),
        &[
            (0, 4096, "Reduce 4 on 128x32"),
            (32768, 4096, "Zero 262208; Backward 1x512x1x8, ring 3 of 48 KiB, on 264x512; Reduce 32 on 128x256"),
            (8192, 16384, "Zero 1048704; Backward 2x256x4x8, ring 3 of 96 KiB, on 264x256; Reduce 32 on 512x256"),
        ],
    );
    check(
        &Caps::h200(),
        with(GradReduction::Atomics),
        &[
            (0, 4096, "Reduce 4 on 128x32"),
            (32768, 4096, "Zero 4096; Backward 1x512x1x8, ring 3 of 48 KiB, on 264x512; Reduce 4 on 128x32"),
            (8192, 16384, "Zero 16384; Backward 2x256x4x8, ring 3 of 96 KiB, on 264x256; Reduce 4 on 512x32"),
        ],
    );
}
