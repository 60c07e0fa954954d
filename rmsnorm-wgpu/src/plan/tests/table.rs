//! What is dispatched for the shapes that are measured, in the lines of `plan/describe.rs`.

use super::*;

const RMS_FORWARD: Call = Call::new(Direction::Forward, Norm::Rms, BF16, WEIGHT);
const RMS_ADD: Call = Call { tensors: WEIGHT_RESIDUAL, ..RMS_FORWARD };
const LAYER_FORWARD: Call = Call::new(Direction::Forward, Norm::Layer, BF16, WEIGHT_BIAS);
const RMS_BACKWARD: Call = Call::new(Direction::Backward, Norm::Rms, BF16, DWEIGHT);
const LAYER_BACKWARD: Call = Call::new(Direction::Backward, Norm::Layer, BF16, DWEIGHT_DBIAS);

/// Holds the plan of every shape to its line; shows all lines that differ, as they would have to be written.
#[track_caller]
fn check_by(access: Access, caps: &Caps, call: Call, lines: &[(usize, usize, &str)]) {
    let differing = lines.iter().filter_map(|&(rows, cols, expected)| {
        let got = call.plan_by(access, rows, cols, caps).describe(cols);
        (got != expected).then(|| format!("            ({rows}, {cols}, \"{got}\"),\n"))
    });
    let differing: String = differing.collect();
    assert!(differing.is_empty(), "{call:?}: these lines are now\n{differing}");
}

#[track_caller]
fn check(caps: &Caps, call: Call, lines: &[(usize, usize, &str)]) {
    check_by(Access::Aligned, caps, call, lines);
}

#[test]
fn rms_forward_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_FORWARD,
        &[
            (0, 4096, ""),
            (1, 4096, "Forward 128x4s, on 1"),
            (1048576, 128, "Forward 4x4s in 32, on 32768"),
            (262144, 512, "Forward 16x4s in 8, on 32768"),
            (32768, 1024, "Forward 64x2s in 2, on 16384"),
            (65536, 2048, "Forward 64x4s, on 32768x2"),
            (32768, 4096, "Forward 128x4s, on 32768"),
            (18688, 7168, "Forward 128x7s, on 18688"),
            (16384, 8192, "Forward 128x8s, on 16384"),
            (8192, 16384, "Forward 256x8s, on 8192"),
            (4096, 32768, "Streaming 512x4s, on 4096"),
            (2048, 65536, "Forward 1024x8s, on 2048"),
            (1024, 131072, "Streaming 512x4s, on 1024"),
        ],
    );
}

#[test]
fn other_forwards_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_ADD,
        &[(32768, 1024, "Forward 64x2s in 2, on 16384"), (32768, 4096, "Forward 128x4s, on 32768")],
    );
    check(
        &Caps::h200(),
        LAYER_FORWARD,
        &[
            (32768, 1024, "Forward 32x4s, on 32768"),
            (32768, 4096, "Forward 128x4s, on 32768"),
            (8192, 16384, "Forward 256x8s, on 8192"),
        ],
    );
}

#[test]
fn backward_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_BACKWARD,
        &[
            (0, 4096, "Reduce 4 on 128"),
            (1, 4096, "Backward 128x4s, 1 chunks, on 1; Reduce 4 on 128"),
            (1048576, 128, "Backward 16x1s in 8, 1056 chunks, on 1056; Reduce 128 on 4"),
            (262144, 512, "Backward 16x4s in 8, 528 chunks, on 528; Reduce 128 on 16"),
            (32768, 1024, "Backward 32x4s in 4, 528 chunks, on 528; Reduce 128 on 32"),
            (65536, 2048, "Backward 64x4s in 2, 528 chunks, on 528; Reduce 128 on 64"),
            (32768, 4096, "Backward 128x4s, 528 chunks, on 528; Reduce 128 on 128"),
            (26176, 5120, "Backward 160x4s, 396 chunks, on 396; Reduce 128 on 160"),
            (18688, 7168, "Backward 224x4s, 264 chunks, on 264; Reduce 128 on 224"),
            (13440, 9984, "Backward 416x3s by 2, 132 chunks, on 132; Reduce 128 on 312"),
            (10880, 12288, "Backward 512x3s by 2, 132 chunks, on 132; Reduce 128 on 384"),
            (16384, 8192, "Backward 256x4s, 264 chunks, on 264; Reduce 128 on 256"),
            (8192, 16384, "Backward 512x4s, 132 chunks, on 132; Reduce 128 on 512"),
            (4096, 32768, "RowSums 512x1s, on 4096; Columns 256x1, 132 chunks, on 2112; Reduce 128 on 1024"),
            (512, 262144, "RowSums 512x1s, on 512; Columns 256x1, 17 chunks, on 2176; Reduce 16 on 8192"),
        ],
    );
    check(
        &Caps::h200(),
        LAYER_BACKWARD,
        &[
            (32768, 1024, "Backward 64x2s in 2, 792 chunks, on 792; Reduce 128 on 64"),
            (32768, 4096, "Backward 256x2s, 396 chunks, on 396; Reduce 128 on 256"),
            (8192, 16384, "Backward 512x4s, 132 chunks, on 132; Reduce 128 on 1024"),
        ],
    );
}

#[test]
fn f32_on_an_h200() {
    let f32 = |call| Call { dtypes: F32, ..call };
    check(
        &Caps::h200(),
        f32(RMS_FORWARD),
        &[
            (32768, 1024, "Forward 64x2s, on 32768"),
            (16384, 4096, "Forward 256x2s, on 16384"),
            (2048, 65536, "Streaming 512x4s, on 2048"),
        ],
    );
    check(
        &Caps::h200(),
        f32(RMS_BACKWARD),
        &[
            (32768, 1024, "Backward 32x4s in 4, 528 chunks, on 528; Reduce 128 on 32"),
            (16384, 4096, "Backward 128x4s, 528 chunks, on 528; Reduce 128 on 128"),
        ],
    );
    let stream = |call| Call { dtypes: BF16_STREAM_F32, ..call };
    check(&Caps::h200(), stream(RMS_ADD), &[(32768, 4096, "Forward 256x2s, on 32768")]);
    // Without a residual there is no stream to be wider.
    check(&Caps::h200(), stream(RMS_FORWARD), &[(32768, 4096, "Forward 128x4s, on 32768")]);
}

#[test]
fn rows_that_lie_anywhere() {
    check_by(
        Access::Halves,
        &Caps::h200(),
        RMS_FORWARD,
        &[
            (4096, 1, "Forward 1x1~s in 128, on 32"),
            (4096, 333, "Streaming 16x1s in 8, on 512"),
            (4096, 4097, "Streaming 128x1s, on 4096"),
        ],
    );
    check_by(
        Access::Words,
        &Caps::h200(),
        RMS_BACKWARD,
        &[
            (4096, 2, "Backward 1x1~s in 128, 32 chunks, on 32; Reduce 16 on 1"),
            (4096, 334, "Backward 16x3~s in 8, 512 chunks, on 512; Reduce 128 on 11"),
            (4096, 4098, "RowSums 128x1s, on 4096; Columns 256x1, 704 chunks, on 2112; Reduce 128 on 129"),
        ],
    );
}

#[test]
fn devices_with_less() {
    check(
        &Caps::laptop(),
        RMS_FORWARD,
        &[
            (32768, 1024, "Forward 64x2s in 2, on 16384"),
            (32768, 4096, "2 of Forward 128x4s, on 10923; Forward 128x4s, on 10922"),
            (4096, 16384, "2 of Forward 256x8s, on 2048"),
            (2048, 32768, "2 of Streaming 256x4s, on 1024"),
        ],
    );
    check(
        &Caps::phone(),
        RMS_FORWARD,
        &[
            (1 << 20, 128, "3 of Forward 4x4 in 32, on 10923"),
            (32768, 1024, "Forward 64x2 in 2, on 16384"),
            (2048, 4096, "Forward 128x4, on 2048"),
        ],
    );
    check(
        &Caps::laptop(),
        RMS_BACKWARD,
        &[
            (32768, 1024, "Backward 32x4s in 4, 128 chunks, on 128; Reduce 32 on 32"),
            (8192, 8192, "2 of Backward 256x4s, 128 chunks, on 128; Reduce 32 on 256"),
            (4096, 16384, "2 of RowSums 256x1s, on 2048; 2 of Columns 256x1, 64 chunks, on 512; Reduce 32 on 512"),
        ],
    );
    check(
        &Caps::lavapipe(),
        RMS_BACKWARD,
        &[
            (25, 33, "Backward 8x1~s in 16, 2 chunks, on 2; Reduce 4 on 2"),
            (4096, 1024, "Backward 32x4s in 4, 16 chunks, on 16; Reduce 8 on 32"),
        ],
    );
}

#[test]
fn atomics_begin_with_zeros() {
    let call = Call { grad_reduction: GradReduction::Atomics, ..RMS_BACKWARD };
    check(
        &Caps::h200(),
        call,
        &[
            (0, 4096, "Reduce 4 on 128"),
            (32768, 4096, "Zero 4096; Backward 128x4s, 528 chunks, on 528; Reduce 4 on 128"),
            (4096, 32768, "Zero 32768; RowSums 512x1s, on 4096; Columns 256x1, 132 chunks, on 2112; Reduce 4 on 1024"),
        ],
    );
}

#[test]
fn ranges_share_partial_rows_where_there_are_few() {
    let short = Caps { binding_bytes: 64 << 10, ..Caps::lavapipe() };
    check(
        &short,
        RMS_BACKWARD,
        &[
            (100, 256, "Backward 32x1s in 4, 16 chunks, on 16; Reduce 8 on 8"),
            (1000, 256, "8 of Backward 32x1s in 4, 16 chunks, on 16; Reduce 8 on 8"),
            (1000, 1024, "33 of Backward 32x4s in 4, 8 chunks, on 8; Reduce 4 on 32"),
        ],
    );
}
