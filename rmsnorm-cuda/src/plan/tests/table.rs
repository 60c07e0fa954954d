//! The launches of the measured shapes, described with `rmsnorm_gpu::describe`.

use rmsnorm_spec::Norm;

use super::*;

const RMS_FORWARD: Call = Call::new(Direction::Forward, Norm::Rms, BF16, WEIGHT);
const RMS_ADD: Call = Call { tensors: WEIGHT_RESIDUAL, ..RMS_FORWARD };
const LAYER_FORWARD: Call = Call::new(Direction::Forward, Norm::Layer, BF16, WEIGHT_BIAS);
const LAYER_ADD: Call = Call { tensors: WEIGHT_BIAS_RESIDUAL, ..LAYER_FORWARD };
const RMS_BACKWARD: Call = Call::new(Direction::Backward, Norm::Rms, BF16, DWEIGHT);
const LAYER_BACKWARD: Call = Call::new(Direction::Backward, Norm::Layer, BF16, DWEIGHT_DBIAS);

/// Compares the plan of every shape with its line; prints all lines that differ, ready to paste.
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
            (1048576, 128, "forward threads=16 packs=1x8 rows=16x2 grid=32768"),
            (262144, 512, "forward threads=32 packs=2x8 rows=8x2 grid=16384"),
            (104832, 1280, "forward threads=64 packs=3x8 ragged grid=104832"),
            (32768, 1024, "forward threads=64 packs=2x8 held grid=32768"),
            (65536, 2048, "forward threads=128 packs=2x8 grid=65536"),
            (32768, 4096, "forward threads=256 packs=2x8 grid=32768"),
            (16384, 8192, "forward threads=224 packs=5x8 ragged grid=16384"),
            (8192, 16384, "forward threads=384 packs=6x8 ragged grid=8192"),
            (4096, 32768, "forward_cluster threads=2x128 packs=16x8 grid=8192"),
            (2048, 65536, "forward_cluster threads=8x128 packs=8x8 grid=16384"),
            (1024, 131072, "forward_cluster threads=8x128 packs=16x8 grid=8192"),
            (512, 262144, "forward_long threads=8x512 packs=8x8 shared=64KiB grid=4096"),
            (4, 2097152, "forward_streaming threads=8x1024 packs=1x8 ragged grid=32"),
        ],
    );
}

/// Plans like those with a residual, also without one; in one step a block has one row of each
/// group.
#[test]
#[rustfmt::skip]
fn sums_of_parts() {
    let sum = Call { tensors: WEIGHT, ..RMS_ADD };
    check(&Caps::h200(), sum.of_parts(2), &[(1, 4096, "forward threads=256 packs=2x8 held parts grid=1")]);
    check(
        &Caps::h200(),
        RMS_ADD.of_parts(8),
        &[
            (0, 4096, ""),
            (1, 4096, "forward threads=256 packs=2x8 held parts grid=1"),
            (1048576, 128, "forward threads=16 packs=1x8 rows=16 held parts grid=65536"),
            (32768, 1024, "forward threads=128 packs=1x8 held parts grid=32768"),
            (32768, 4096, "forward threads=256 packs=2x8 held parts grid=32768"),
            (16384, 8192, "forward threads=256 packs=4x8 held parts grid=16384"),
            (8192, 16384, "forward threads=512 packs=4x8 held parts grid=8192"),
            (2048, 65536, "forward_cluster threads=8x512 packs=2x8 parts grid=16384"),
            (512, 262144, "forward_cluster threads=8x896 packs=5x8 ragged parts grid=4096"),
            (4, 2097152, "forward_streaming threads=8x1024 packs=1x8 ragged parts grid=32"),
        ],
    );
    let line = "forward threads=256 packs=4x4 held parts grid=16384";
    check(&Caps::h200(), Call { dtypes: F32, ..RMS_ADD }.of_parts(8), &[(16384, 4096, line)]);
    // The sum has the residual's dtype, also without a residual.
    check(&Caps::h200(), Call { dtypes: BF16_STREAM_F32, ..sum }.of_parts(8), &[(16384, 4096, line)]);
    check(
        &Caps::h200(),
        LAYER_ADD.of_parts(8),
        &[
            // With only a residual, two rows of this length are in flight.
            (2097152, 16, "forward threads=2 packs=1x8 rows=32 held parts grid=65536"),
            (32768, 4096, "forward threads=128 packs=4x8 held parts grid=32768"),
            (8192, 16384, "forward threads=512 packs=4x8 held parts grid=8192"),
            (1024, 131072, "forward_cluster threads=4x512 packs=8x8 parts grid=4096"),
        ],
    );
    check(
        &Caps::a100(),
        LAYER_ADD.of_parts(8),
        &[
            (4096, 32768, "forward_long threads=512 packs=8x8 parts shared=64KiB grid=4096"),
            (2048, 65536, "forward_streaming threads=1024 packs=1x8 ragged parts grid=108"),
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
            (1, 4096, "forward threads=256 packs=2x8 held grid=1"),
            (8, 4096, "forward threads=256 packs=2x8 held grid=8"),
            (128, 4096, "forward threads=256 packs=2x8 held grid=128"),
            (128, 8192, "forward threads=224 packs=5x8 ragged held grid=128"),
            (1024, 4096, "forward threads=256 packs=2x8 grid=1024"),
        ],
    );
}

#[test]
fn add_and_rms_forward_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_ADD,
        &[
            (1048576, 128, "forward threads=16 packs=1x8 rows=16 grid=65536"),
            (262144, 512, "forward threads=32 packs=2x8 rows=8 held grid=32768"),
            (32768, 1024, "forward threads=128 packs=1x8 held grid=32768"),
            (32768, 4096, "forward threads=256 packs=2x8 held grid=32768"),
            (16384, 8192, "forward threads=256 packs=4x8 held grid=16384"),
            (8192, 16384, "forward threads=512 packs=4x8 grid=8192"),
            (4096, 32768, "forward_cluster threads=8x256 packs=2x8 grid=32768"),
            (2048, 65536, "forward_cluster threads=8x512 packs=2x8 grid=16384"),
            (1024, 131072, "forward_cluster threads=8x512 packs=4x8 grid=8192"),
            (512, 262144, "forward_cluster threads=8x896 packs=5x8 ragged grid=4096"),
        ],
    );
}

#[test]
fn layer_forward_on_an_h200() {
    check(
        &Caps::h200(),
        LAYER_FORWARD,
        &[
            (1048576, 128, "forward threads=8 packs=2x8 rows=16x2 grid=32768"),
            (262144, 512, "forward threads=32 packs=2x8 rows=4x2 grid=32768"),
            (32768, 1024, "forward threads=32 packs=4x8 grid=32768"),
            (116480, 1152, "forward threads=32 packs=5x8 ragged grid=116480"),
            (65536, 2048, "forward threads=32 packs=8x8 grid=65536"),
            (52416, 2560, "forward threads=64 packs=5x8 grid=52416"),
            (32768, 4096, "forward threads=128 packs=4x8 grid=32768"),
            (8192, 16384, "forward threads=256 packs=8x8 grid=8192"),
            (4096, 32768, "forward_long threads=512 packs=8x8 shared=64KiB grid=4096"),
            (2048, 65536, "forward_long threads=2x256 packs=16x8 shared=64KiB grid=4096"),
            (1024, 131072, "forward_long threads=8x128 packs=16x8 shared=32KiB grid=8192"),
        ],
    );
}

#[test]
fn add_and_layer_forward_on_an_h200() {
    check(
        &Caps::h200(),
        LAYER_ADD,
        &[
            (1048576, 128, "forward threads=8 packs=2x8 rows=32 grid=32768"),
            (262144, 512, "forward threads=32 packs=2x8 rows=8 grid=32768"),
            (32768, 1024, "forward threads=64 packs=2x8 held grid=32768"),
            (65536, 2048, "forward threads=128 packs=2x8 held grid=65536"),
            (32768, 4096, "forward threads=128 packs=4x8 held grid=32768"),
            (16384, 8192, "forward threads=256 packs=4x8 grid=16384"),
            (8192, 16384, "forward threads=512 packs=4x8 grid=8192"),
            (4096, 32768, "forward_long threads=512 packs=8x8 shared=128KiB grid=4096"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn rms_backward_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_BACKWARD,
        &[
            (0, 4096, "reduce_partials rows=8 grid=64"),
            (1, 4096, "backward_split threads=256 packs=2x8 rows=2 ring=2 clusters=1 shared=64KiB grid=65"),
            (128, 4096, "backward_split threads=256 packs=2x8 rows=2 ring=2 clusters=1 shared=64KiB grid=128"),
            (768, 4096, "backward_split threads=256 packs=2x8 rows=2 ring=2 clusters=2 shared=64KiB grid=260"),
            (512, 5120, "backward_split threads=320 packs=2x8 rows=2 ring=2 clusters=1 shared=80KiB grid=212"),
            (512, 8192, "backward_split threads=1024 packs=1x8 ring=2 clusters=1 shared=64KiB grid=260"),
            (2048, 1024, "backward threads=128 packs=1x8 rows=4 ring=3 shared=48KiB grid=264; reduce_partials rows=64 grid=32"),
            (4096, 256, "backward threads=32 packs=1x8 rows=8 ring=3 shared=24KiB grid=512; reduce_partials rows=64 grid=8"),
            (16384, 128, "backward threads=16 packs=1x8 rows=16 ring=3 shared=24KiB grid=528; reduce_partials rows=64 grid=4"),
            (64, 16384, "backward threads=4x128 packs=4x8 rows=2 ring=2 shared=64KiB grid=128; reduce_partials rows=16 grid=512"),
            (16, 131072, "backward threads=8x256 packs=8x8 ring=3 overlapped shared=192KiB grid=120; reduce_partials rows=8 grid=2048"),
            (1048576, 128, "backward threads=16 packs=1x8 rows=16 ring=3 shared=24KiB grid=528; reduce_partials rows=64 grid=4"),
            (576000, 384, "backward threads=16 packs=3x8 rows=16 ring=2 shared=48KiB grid=132; reduce_partials rows=64 grid=12"),
            (262144, 512, "backward threads=64 packs=1x8 rows=8 ring=3 shared=48KiB grid=264; reduce_partials rows=64 grid=16"),
            (32768, 1024, "backward threads=128 packs=1x8 rows=4 ring=3 shared=48KiB grid=264; reduce_partials rows=64 grid=32"),
            (65536, 2048, "backward threads=128 packs=2x8 rows=2 ring=2 shared=32KiB grid=264; reduce_partials rows=64 grid=64"),
            (32768, 4096, "backward threads=256 packs=2x8 rows=2 ring=3 shared=96KiB grid=132; reduce_partials rows=64 grid=128"),
            (16384, 8192, "backward threads=1024 packs=1x8 ring=3 shared=96KiB grid=132; reduce_partials rows=64 grid=256"),
            (8192, 16384, "backward threads=4x128 packs=4x8 rows=2 ring=2 shared=64KiB grid=240; reduce_partials rows=32 grid=512"),
            (4096, 32768, "backward threads=4x128 packs=8x8 ring=2 shared=64KiB grid=240; reduce_partials rows=32 grid=1024"),
            (2048, 65536, "backward threads=8x128 packs=8x8 ring=3 shared=96KiB grid=240; reduce_partials rows=16 grid=2048"),
            (1024, 131072, "backward threads=8x256 packs=8x8 ring=3 overlapped shared=192KiB grid=120; reduce_partials rows=8 grid=2048"),
            (512, 262144, "backward_row_sums threads=8x512 packs=1x8 ragged grid=264; backward_columns threads=256 packs=1x8 ragged grid=2176; reduce_partials rows=8 grid=4096"),
            (104832, 1280, "backward threads=32 packs=5x8 rows=8 ring=2 shared=80KiB grid=132; reduce_partials rows=64 grid=40"),
            (13056, 10240, "backward threads=256 packs=5x8 ring=3 shared=120KiB grid=132; reduce_partials rows=64 grid=320"),
            (4096, 1024, "backward threads=128 packs=1x8 rows=4 ring=3 shared=48KiB grid=264; reduce_partials rows=64 grid=32"),
            (4096, 4096, "backward threads=256 packs=2x8 rows=2 ring=3 shared=96KiB grid=132; reduce_partials rows=64 grid=128"),
            (4096, 8192, "backward threads=1024 packs=1x8 ring=3 shared=96KiB grid=132; reduce_partials rows=64 grid=256"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn layer_backward_on_an_h200() {
    check(
        &Caps::h200(),
        LAYER_BACKWARD,
        &[
            (262144, 512, "backward threads=32 packs=2x8 rows=8 ring=3 shared=48KiB grid=264; reduce_partials rows=64 grid=32"),
            (32768, 1024, "backward threads=64 packs=2x8 rows=4 ring=2 shared=32KiB grid=264; reduce_partials rows=64 grid=64"),
            (65536, 2048, "backward threads=128 packs=2x8 rows=4 ring=3 shared=96KiB grid=132; reduce_partials rows=64 grid=128"),
            (13056, 10240, "backward threads=256 packs=5x8 ring=3 shared=120KiB grid=132; reduce_partials rows=32 grid=640"),
            (32768, 4096, "backward threads=256 packs=2x8 rows=2 ring=3 shared=96KiB grid=132; reduce_partials rows=64 grid=256"),
            (8192, 16384, "backward threads=4x128 packs=4x8 rows=2 ring=2 shared=64KiB grid=240; reduce_partials rows=32 grid=1024"),
            (2048, 65536, "backward threads=8x256 packs=4x8 ring=3 shared=96KiB grid=240; reduce_partials rows=8 grid=2048"),
            (1024, 131072, "backward threads=8x512 packs=4x8 ring=3 shared=192KiB grid=120; reduce_partials rows=8 grid=4096"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn f32_on_an_h200() {
    check(
        &Caps::h200(),
        Call { dtypes: F32, ..RMS_FORWARD },
        &[
            (32768, 1024, "forward threads=64 packs=4x4 rows=1x2 grid=16384"),
            (16384, 4096, "forward threads=256 packs=4x4 grid=16384"),
        ],
    );
    check(
        &Caps::h200(),
        Call { dtypes: F32, ..RMS_BACKWARD },
        &[
            (32768, 1024, "backward threads=256 packs=1x4 rows=2 ring=3 shared=48KiB grid=264; reduce_partials rows=64 grid=32"),
            (16384, 4096, "backward threads=512 packs=2x4 ring=3 shared=96KiB grid=132; reduce_partials rows=64 grid=128"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn rows_that_no_tile_fits() {
    check(
        &Caps::h200(),
        RMS_FORWARD,
        &[
            (4096, 1, "forward threads=1 packs=1x8 rows=256x2 ragged held grid=8"),
            (4096, 100, "forward threads=16 packs=1x8 rows=16x2 ragged held grid=128"),
            (4096, 4097, "forward threads=256 packs=3x8 ragged grid=4096"),
        ],
    );
    check(
        &Caps::h200(),
        RMS_BACKWARD,
        &[
            (4096, 1, "backward threads=1 packs=1x8 rows=128x2 ragged ring=3 shared=24KiB grid=16; reduce_partials rows=8 grid=1"),
            (1048576, 1, "backward threads=1 packs=1x8 rows=128x2 ragged ring=3 shared=24KiB grid=396; reduce_partials rows=64 grid=1"),
            (4096, 100, "backward threads=16 packs=1x8 rows=16 ragged ring=3 shared=24KiB grid=256; reduce_partials rows=64 grid=4"),
            (1048576, 100, "backward threads=16 packs=1x8 rows=16 ragged ring=3 shared=24KiB grid=528; reduce_partials rows=64 grid=4"),
            (4096, 4097, "backward threads=320 packs=2x8 rows=2 ragged ring=2 shared=80KiB grid=132; reduce_partials rows=64 grid=129"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn a_wider_stream_halves_the_packs() {
    let stream = |call| Call { dtypes: BF16_STREAM_F32, ..call };
    check(&Caps::h200(), stream(RMS_ADD), &[(32768, 4096, "forward threads=256 packs=4x4 held grid=32768")]);
    check(
        &Caps::h200(),
        stream(RMS_BACKWARD),
        &[(32768, 4096, "backward threads=512 packs=2x4 ring=3 shared=72KiB grid=132; reduce_partials rows=64 grid=128")],
    );
    // Without a residual, the residual dtype does not matter.
    check(&Caps::h200(), stream(RMS_FORWARD), &[(32768, 4096, "forward threads=256 packs=2x8 grid=32768")]);
}

#[test]
#[rustfmt::skip]
fn devices_without_clusters() {
    check(
        &Caps::a100(),
        RMS_FORWARD,
        &[
            (2048, 65536, "forward threads=1024 packs=8x8 grid=2048"),
            (1024, 131072, "forward_streaming threads=1024 packs=1x8 ragged grid=108"),
        ],
    );
    check(
        &Caps::a100(),
        RMS_BACKWARD,
        &[
            (128, 4096, "backward_split threads=256 packs=2x8 rows=2 ring=2 clusters=1 shared=64KiB grid=128"),
            (512, 1024, "backward_split threads=128 packs=1x8 rows=4 ring=2 clusters=1 shared=32KiB grid=144"),
            (4096, 1024, "backward threads=128 packs=1x8 rows=4 ring=3 shared=48KiB grid=216; reduce_partials rows=64 grid=32"),
            (32768, 4096, "backward threads=256 packs=2x8 rows=2 ring=3 shared=96KiB grid=108; reduce_partials rows=64 grid=128"),
            (8192, 16384, "backward threads=512 packs=4x8 ring=2 shared=128KiB grid=108; reduce_partials rows=32 grid=512"),
            (4096, 32768, "backward_row_sums threads=512 packs=1x8 ragged grid=216; backward_columns threads=256 packs=1x8 ragged grid=1728; reduce_partials rows=16 grid=1024"),
        ],
    );
    check(
        &Caps::a100(),
        LAYER_FORWARD,
        &[
            (4096, 32768, "forward_long threads=512 packs=8x8 shared=64KiB grid=4096"),
            (2048, 65536, "forward_long threads=1024 packs=8x8 shared=128KiB grid=2048"),
            (1024, 131072, "forward_streaming threads=1024 packs=1x8 ragged grid=108"),
        ],
    );
    check(
        &Caps::t4(),
        LAYER_FORWARD,
        &[
            (4096, 32768, "forward_streaming threads=1024 packs=1x8 ragged grid=40"),
            (2048, 65536, "forward_streaming threads=1024 packs=1x8 ragged grid=40"),
        ],
    );
    check(
        &Caps::t4(),
        RMS_BACKWARD,
        &[
            (32768, 4096, "backward threads=256 packs=2x8 rows=2 ring=1 shared=32KiB grid=80; reduce_partials rows=32 grid=128"),
            (8192, 16384, "backward_row_sums threads=512 packs=1x8 ragged grid=80; backward_columns threads=256 packs=1x8 ragged grid=640; reduce_partials rows=8 grid=256"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn locks_and_atomics_begin_with_zeros() {
    let with = |grad_reduction| Call { grad_reduction, ..RMS_BACKWARD };
    check(
        &Caps::h200(),
        with(GradReduction::Locks { groups: 64 }),
        &[
            (0, 4096, "reduce_partials rows=8 grid=64"),
            (128, 4096, "backward_split threads=256 packs=2x8 rows=2 ring=2 clusters=1 shared=64KiB grid=128"),
            (32768, 4096, "clear=256; backward threads=256 packs=2x8 rows=2 ring=3 shared=96KiB grid=128; reduce_partials rows=32 grid=128"),
            (8192, 16384, "backward threads=4x128 packs=4x8 rows=2 ring=2 shared=64KiB grid=240; reduce_partials rows=32 grid=512"),
        ],
    );
    check(
        &Caps::h200(),
        with(GradReduction::Atomics),
        &[
            (0, 4096, "reduce_partials rows=8 grid=64"),
            (128, 4096, "backward_split threads=256 packs=2x8 rows=2 ring=2 clusters=1 shared=64KiB grid=128"),
            (32768, 4096, "clear=65536; backward threads=256 packs=2x8 rows=2 ring=3 shared=96KiB grid=132; reduce_partials rows=8 grid=64"),
            (8192, 16384, "clear=262144; backward threads=4x128 packs=4x8 rows=2 ring=2 shared=64KiB grid=240; reduce_partials rows=8 grid=256"),
        ],
    );
}
