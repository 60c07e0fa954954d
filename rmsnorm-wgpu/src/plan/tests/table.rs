//! The plans of measured shapes, in the form of `rmsnorm_gpu::describe`.

use rmsnorm_spec::Slot;

use super::*;

const RMS_FORWARD: Call = Call::new(Direction::Forward, Norm::Rms, BF16, WEIGHT);
const RMS_ADD: Call = Call { tensors: WEIGHT_RESIDUAL, ..RMS_FORWARD };
const LAYER_FORWARD: Call = Call::new(Direction::Forward, Norm::Layer, BF16, WEIGHT_BIAS);
const RMS_BACKWARD: Call = Call::new(Direction::Backward, Norm::Rms, BF16, DWEIGHT);
const LAYER_BACKWARD: Call = Call::new(Direction::Backward, Norm::Layer, BF16, DWEIGHT_DBIAS);

/// Compares the plan of every shape with its line; prints all lines that differ, as they should be.
#[track_caller]
fn check_by(access: Access, caps: &Caps, call: Call, lines: &[(usize, usize, &str)]) {
    let differing = lines.iter().filter_map(|&(rows, cols, expected)| {
        let got = call.plan_by(access, rows, cols, caps).to_string();
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
            (1, 4096, "forward threads=128 packs=4x8 subgroups=32 grid=1"),
            (1048576, 128, "forward threads=4 packs=4x8 rows=32 subgroups=32 grid=32768"),
            (262144, 512, "forward threads=16 packs=4x8 rows=8 subgroups=32 grid=32768"),
            (32768, 1024, "forward threads=64 packs=2x8 rows=2 subgroups=32 grid=16384"),
            (65536, 2048, "forward threads=64 packs=4x8 subgroups=32 grid=32768x2"),
            (32768, 4096, "forward threads=128 packs=4x8 subgroups=32 grid=32768"),
            (18688, 7168, "forward threads=128 packs=7x8 subgroups=32 grid=18688"),
            (16384, 8192, "forward threads=128 packs=8x8 subgroups=32 grid=16384"),
            (8192, 16384, "forward threads=256 packs=8x8 subgroups=32 grid=8192"),
            (4096, 32768, "forward_streaming threads=512 packs=4x8 subgroups=32 grid=4096"),
            (2048, 65536, "forward threads=1024 packs=8x8 subgroups=32 grid=2048"),
            (1024, 131072, "forward_streaming threads=1024 packs=4x8 subgroups=32 grid=1024"),
        ],
    );
}

#[test]
fn other_forwards_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_ADD,
        &[
            (32768, 1024, "forward threads=64 packs=2x8 rows=2 subgroups=32 grid=16384"),
            (32768, 4096, "forward threads=128 packs=4x8 subgroups=32 grid=32768"),
        ],
    );
    check(
        &Caps::h200(),
        LAYER_FORWARD,
        &[
            (32768, 1024, "forward threads=32 packs=4x8 subgroups=32 grid=32768"),
            (32768, 4096, "forward threads=128 packs=4x8 subgroups=32 grid=32768"),
            (8192, 16384, "forward threads=256 packs=8x8 subgroups=32 grid=8192"),
            (4096, 32768, "forward_streaming threads=512 packs=4x8 subgroups=32 once grid=4096"),
            (2048, 65536, "forward threads=1024 packs=8x8 subgroups=32 grid=2048"),
            (1024, 131072, "forward_streaming threads=512 packs=4x8 subgroups=32 once grid=1024"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn backward_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_BACKWARD,
        &[
            (0, 4096, "reduce_partials rows=4 grid=128"),
            (1, 4096, "backward threads=128 packs=4x8 subgroups=32 chunks=1 grid=1; reduce_partials rows=4 grid=128"),
            (1048576, 128, "backward threads=16 packs=1x8 rows=8 subgroups=32 chunks=1056 grid=1056; reduce_partials rows=128 grid=4"),
            (262144, 512, "backward threads=16 packs=4x8 rows=8 subgroups=32 chunks=528 grid=528; reduce_partials rows=128 grid=16"),
            (32768, 1024, "backward threads=32 packs=4x8 rows=4 subgroups=32 chunks=528 grid=528; reduce_partials rows=128 grid=32"),
            (65536, 2048, "backward threads=64 packs=4x8 rows=2 subgroups=32 chunks=528 grid=528; reduce_partials rows=128 grid=64"),
            (32768, 4096, "backward threads=128 packs=4x8 subgroups=32 chunks=528 grid=528; reduce_partials rows=128 grid=128"),
            (26176, 5120, "backward threads=160 packs=4x8 subgroups=32 chunks=396 grid=396; reduce_partials rows=128 grid=160"),
            (18688, 7168, "backward threads=224 packs=4x8 subgroups=32 chunks=264 grid=264; reduce_partials rows=128 grid=224"),
            (13440, 9984, "backward threads=416 packs=3x8 rows=1x2 subgroups=32 chunks=132 grid=132; reduce_partials rows=128 grid=312"),
            (10880, 12288, "backward threads=512 packs=3x8 rows=1x2 subgroups=32 chunks=132 grid=132; reduce_partials rows=128 grid=384"),
            (16384, 8192, "backward threads=256 packs=4x8 subgroups=32 chunks=264 grid=264; reduce_partials rows=128 grid=256"),
            (8192, 16384, "backward threads=512 packs=4x8 subgroups=32 chunks=132 grid=132; reduce_partials rows=128 grid=512"),
            (4096, 32768, "backward threads=1024 packs=4x8 subgroups=32 again chunks=132 grid=132; reduce_partials rows=128 grid=1024"),
            (2048, 65536, "backward_row_sums threads=512 packs=1x8 subgroups=32 grid=2048; backward_columns threads=256 packs=1x8 chunks=66 grid=2112; reduce_partials rows=64 grid=2048"),
            (512, 262144, "backward_row_sums threads=512 packs=1x8 subgroups=32 grid=512; backward_columns threads=256 packs=1x8 chunks=17 grid=2176; reduce_partials rows=16 grid=8192"),
        ],
    );
    check(
        &Caps::h200(),
        LAYER_BACKWARD,
        &[
            (32768, 1024, "backward threads=64 packs=2x8 rows=2 subgroups=32 chunks=792 grid=792; reduce_partials rows=128 grid=64"),
            (32768, 4096, "backward threads=256 packs=2x8 subgroups=32 chunks=396 grid=396; reduce_partials rows=128 grid=256"),
            (8192, 16384, "backward threads=512 packs=4x8 subgroups=32 chunks=132 grid=132; reduce_partials rows=128 grid=1024"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn gated_backward_on_an_h200() {
    check(
        &Caps::h200(),
        RMS_BACKWARD.gated(Slot::After),
        &[
            (262144, 128, "backward threads=8 packs=2x8 rows=16 subgroups=32 again chunks=792 grid=792; reduce_partials rows=128 grid=4"),
            (8192, 4096, "backward threads=256 packs=2x8 subgroups=32 again chunks=396 grid=396; reduce_partials rows=128 grid=128"),
            (4096, 8192, "backward threads=512 packs=2x8 subgroups=32 again chunks=264 grid=264; reduce_partials rows=128 grid=256"),
            (2048, 16384, "backward threads=1024 packs=2x8 subgroups=32 again chunks=132 grid=132; reduce_partials rows=128 grid=512"),
            (1024, 32768, "backward_row_sums threads=512 packs=1x8 subgroups=32 grid=1024; backward_columns threads=256 packs=1x8 chunks=132 grid=2112; reduce_partials rows=128 grid=1024"),
        ],
    );
    check(
        &Caps::h200(),
        RMS_BACKWARD.gated(Slot::Before),
        &[
            (262144, 128, "backward threads=8 packs=2x8 rows=16 subgroups=32 chunks=396 grid=396; reduce_partials rows=128 grid=4"),
            (8192, 4096, "backward threads=128 packs=4x8 subgroups=32 again chunks=528 grid=528; reduce_partials rows=128 grid=128"),
            (5464, 6144, "backward threads=384 packs=2x8 subgroups=32 again chunks=264 grid=264; reduce_partials rows=128 grid=192"),
            (2048, 16384, "backward threads=1024 packs=2x8 subgroups=32 again chunks=132 grid=132; reduce_partials rows=128 grid=512"),
        ],
    );
    check(
        &Caps::h200(),
        LAYER_BACKWARD.gated(Slot::Before),
        &[
            (4096, 8192, "backward threads=256 packs=4x8 subgroups=32 chunks=264 grid=264; reduce_partials rows=128 grid=512"),
            (2048, 16384, "backward threads=512 packs=4x8 subgroups=32 again chunks=132 grid=132; reduce_partials rows=128 grid=1024"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn f32_on_an_h200() {
    let f32 = |call| Call { dtypes: F32, ..call };
    check(
        &Caps::h200(),
        f32(RMS_FORWARD),
        &[
            (32768, 1024, "forward threads=64 packs=2x8 subgroups=32 grid=32768"),
            (16384, 4096, "forward threads=256 packs=2x8 subgroups=32 grid=16384"),
            (2048, 65536, "forward_streaming threads=512 packs=4x8 subgroups=32 grid=2048"),
        ],
    );
    check(
        &Caps::h200(),
        f32(RMS_BACKWARD),
        &[
            (32768, 1024, "backward threads=32 packs=4x8 rows=4 subgroups=32 chunks=528 grid=528; reduce_partials rows=128 grid=32"),
            (16384, 4096, "backward threads=128 packs=4x8 subgroups=32 chunks=528 grid=528; reduce_partials rows=128 grid=128"),
        ],
    );
    let stream = |call| Call { dtypes: BF16_STREAM_F32, ..call };
    check(&Caps::h200(), stream(RMS_ADD), &[(32768, 4096, "forward threads=256 packs=2x8 subgroups=32 grid=32768")]);
    // Without a residual there is no wider stream.
    check(
        &Caps::h200(),
        stream(RMS_FORWARD),
        &[(32768, 4096, "forward threads=128 packs=4x8 subgroups=32 grid=32768")],
    );
}

/// Decisions of a plan that are not in its tables: more threads, rows side by side, two rows at
/// once, workgroups.
#[test]
#[rustfmt::skip]
fn rows_of_lengths_between() {
    let f32 = |call| Call { dtypes: F32, ..call };
    let f16 = |call| Call { dtypes: DTypes::uniform(DType::F16), ..call };
    check(&Caps::h200(), RMS_FORWARD, &[(4096, 768, "forward threads=32 packs=3x8 rows=2 subgroups=32 grid=2048")]);
    check(&Caps::h200(), f32(RMS_FORWARD), &[(4096, 512, "forward threads=32 packs=2x8 subgroups=32 grid=4096")]);
    check(
        &Caps::h200(),
        RMS_BACKWARD,
        &[
            (4096, 1280, "backward threads=32 packs=5x8 rows=4 subgroups=32 chunks=396 grid=396; reduce_partials rows=128 grid=40"),
            (4096, 1536, "backward threads=64 packs=3x8 rows=2x2 subgroups=32 chunks=396 grid=396; reduce_partials rows=128 grid=48"),
            (4096, 2560, "backward threads=160 packs=2x8 subgroups=32 chunks=792 grid=792; reduce_partials rows=128 grid=80"),
            (4096, 20480, "backward threads=1024 packs=3x8 ragged subgroups=32 again chunks=132 grid=132; reduce_partials rows=128 grid=640"),
        ],
    );
    check(
        &Caps::h200(),
        LAYER_BACKWARD,
        &[
            (4096, 800, "backward threads=64 packs=2x8 rows=2 ragged subgroups=32 chunks=792 grid=792; reduce_partials rows=128 grid=50"),
            (4096, 1280, "backward threads=32 packs=5x8 rows=4 subgroups=32 chunks=264 grid=264; reduce_partials rows=128 grid=80"),
            (4096, 8192, "backward threads=512 packs=2x8 rows=1x2 subgroups=32 chunks=132 grid=132; reduce_partials rows=128 grid=512"),
            (4096, 14000, "backward threads=512 packs=4x8 ragged subgroups=32 chunks=132 grid=132; reduce_partials rows=128 grid=876"),
        ],
    );
    check(&Caps::h200(), f32(LAYER_BACKWARD), &[(4096, 800, "backward threads=32 packs=4x8 rows=4 ragged subgroups=32 chunks=528 grid=528; reduce_partials rows=128 grid=50")]);
    check(&Caps::h200(), f16(LAYER_BACKWARD), &[(4096, 16384, "backward threads=512 packs=4x8 subgroups=32 chunks=132 grid=132; reduce_partials rows=128 grid=1024")]);
    let unpacks = Caps { f16: F16::Unpacks, ..Caps::h200() };
    check(&unpacks, f16(LAYER_BACKWARD), &[(4096, 16384, "backward threads=1024 packs=2x8 subgroups=32 chunks=132 grid=132; reduce_partials rows=128 grid=1024")]);
    let few = Caps { max_threads: 128, ..Caps::h200() };
    check(&few, f32(RMS_BACKWARD), &[(4096, 5120, "backward_row_sums threads=128 packs=1x8 subgroups=32 grid=4096; backward_columns threads=128 packs=1x8 chunks=423 grid=2115; reduce_partials rows=16 grid=160")]);
}

#[test]
#[rustfmt::skip]
fn rows_that_lie_anywhere() {
    check_by(
        Access::Parts,
        &Caps::h200(),
        RMS_FORWARD,
        &[
            (4096, 1, "forward threads=1 packs=1x8 rows=128 access=parts subgroups=32 grid=32"),
            (4096, 333, "forward_streaming threads=16 packs=1x8 rows=8 access=parts subgroups=32 grid=512"),
            (4096, 4097, "forward_streaming threads=128 packs=1x8 access=parts subgroups=32 grid=4096"),
        ],
    );
    check_by(
        Access::Words,
        &Caps::h200(),
        RMS_BACKWARD,
        &[
            (4096, 2, "backward threads=1 packs=1x8 rows=128 access=words subgroups=32 chunks=32 grid=32; reduce_partials rows=16 grid=1"),
            (4096, 334, "backward threads=16 packs=3x8 rows=8 access=words subgroups=32 chunks=512 grid=512; reduce_partials rows=128 grid=11"),
            (4096, 4098, "backward_row_sums threads=128 packs=1x8 access=words subgroups=32 grid=4096; backward_columns threads=256 packs=1x8 access=words chunks=704 grid=2112; reduce_partials rows=128 grid=129"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn devices_with_less() {
    check(
        &Caps::laptop(),
        RMS_FORWARD,
        &[
            (32768, 1024, "forward threads=64 packs=2x8 rows=2 subgroups=32 grid=16384"),
            (32768, 4096, "2 of forward threads=128 packs=4x8 subgroups=32 grid=10923; forward threads=128 packs=4x8 subgroups=32 grid=10922"),
            (4096, 16384, "2 of forward threads=256 packs=8x8 subgroups=32 grid=2048"),
            (2048, 32768, "2 of forward_streaming threads=256 packs=4x8 subgroups=32 grid=1024"),
        ],
    );
    check(
        &Caps::phone(),
        RMS_FORWARD,
        &[
            (1 << 20, 128, "3 of forward threads=4 packs=4x8 rows=32 grid=10923"),
            (32768, 1024, "forward threads=64 packs=2x8 rows=2 grid=16384"),
            (2048, 4096, "forward threads=128 packs=4x8 grid=2048"),
        ],
    );
    check(
        &Caps::laptop(),
        RMS_BACKWARD,
        &[
            (32768, 1024, "backward threads=32 packs=4x8 rows=4 subgroups=32 chunks=128 grid=128; reduce_partials rows=32 grid=32"),
            (8192, 8192, "2 of backward threads=256 packs=4x8 subgroups=32 chunks=128 grid=128; reduce_partials rows=32 grid=256"),
            (4096, 16384, "2 of backward_row_sums threads=256 packs=1x8 subgroups=32 grid=2048; 2 of backward_columns threads=256 packs=1x8 chunks=64 grid=512; reduce_partials rows=32 grid=512"),
        ],
    );
    check(
        &Caps::lavapipe(),
        RMS_BACKWARD,
        &[
            (25, 33, "backward threads=8 packs=1x8 rows=16 ragged subgroups=8 chunks=2 grid=2; reduce_partials rows=4 grid=2"),
            (4096, 1024, "backward threads=32 packs=4x8 rows=4 subgroups=8 chunks=16 grid=16; reduce_partials rows=8 grid=32"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn atomics_begin_with_zeros() {
    let call = Call { grad_reduction: GradReduction::Atomics, ..RMS_BACKWARD };
    check(
        &Caps::h200(),
        call,
        &[
            (0, 4096, "reduce_partials rows=4 grid=128"),
            (32768, 4096, "zero=4096; backward threads=128 packs=4x8 subgroups=32 chunks=528 grid=528; reduce_partials rows=4 grid=128"),
            (4096, 32768, "zero=32768; backward threads=1024 packs=4x8 subgroups=32 again chunks=132 grid=132; reduce_partials rows=4 grid=1024"),
        ],
    );
}

#[test]
#[rustfmt::skip]
fn ranges_share_partial_rows_where_there_are_few() {
    let short = Caps { binding_bytes: 64 << 10, ..Caps::lavapipe() };
    check(
        &short,
        RMS_BACKWARD,
        &[
            (100, 256, "backward threads=32 packs=1x8 rows=4 subgroups=8 chunks=16 grid=16; reduce_partials rows=8 grid=8"),
            (1000, 256, "8 of backward threads=32 packs=1x8 rows=4 subgroups=8 chunks=16 grid=16; reduce_partials rows=8 grid=8"),
            (1000, 1024, "33 of backward threads=32 packs=4x8 rows=4 subgroups=8 chunks=8 grid=8; reduce_partials rows=4 grid=32"),
        ],
    );
    // More ranges than bindings require: so many that a chunk's rows are summed in parts.
    check(
        &Caps { binding_bytes: 128 << 10, ..Caps::lavapipe() },
        LAYER_BACKWARD,
        &[(1000, 2000, "63 of backward threads=128 packs=2x8 ragged subgroups=8 chunks=8 grid=8; reduce_partials rows=4 grid=126")],
    );
}
