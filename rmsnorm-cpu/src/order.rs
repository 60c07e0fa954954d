//! Tests that stores past the cache are ordered before later stores of the stage's thread. They use
//! traced lanes, because no result on x86-64 depends on the order.

mod traced;

use rmsnorm_spec::{DType, DTypes, Element, NormSpec, bf16};

use self::traced::{Event, Traced, events};
use crate::lanes::{In, Out};
use crate::stages::backward::{BackwardBlocks, BackwardRows, Given, Gradients, Partials};
use crate::stages::copy::CopyRange;
use crate::stages::forward::affine::Vectors;
use crate::stages::forward::after::Store;
use crate::stages::forward::before::Summed;
use crate::stages::forward::statistics::OfRow;
use crate::stages::forward::{Rows, Saved};
use crate::stages::{Call, Matrix, MatrixMut, RowStarts, Stage};

const ROWS: usize = 3;
const COLS: usize = 200;

/// A matrix with the alignment of stores past the cache.
#[repr(align(64))]
struct Aligned<M>(M);

fn of<E: Element>(data: &[E]) -> Matrix<'_> {
    Matrix { data: In::from(data).any(), rows: RowStarts::strided(COLS) }
}

fn to<E: Element>(data: &mut [E]) -> MatrixMut<'_> {
    MatrixMut { data: Out::from(data).any(), rows: RowStarts::strided(COLS) }
}

const NONE: Vectors<'_> = Vectors { weight: None, bias: None };

/// Asserts that a streaming stage stored past the cache and ended with its only fence.
fn assert_fenced(streaming: bool, what: &str) {
    let events = events();
    match streaming {
        true => {
            let fences = events.iter().filter(|event| **event == Event::Fence).count();
            assert!(events.contains(&Event::Stream), "{what} stores nothing past the cache");
            assert_eq!((fences, events.last()), (1, Some(&Event::Fence)), "{what}: {events:?}");
        }
        false => assert_eq!(events, [], "{what}"),
    }
}

#[test]
fn stores_past_the_cache_are_fenced_before_a_stage_ends() {
    let spec = NormSpec::rms(ROWS, COLS, 1e-5);
    let (x, residual) = (Aligned([1.0f32; ROWS * COLS]), Aligned([2.0f32; ROWS * COLS]));
    for streaming in [true, false] {
        let (mut y, mut out) = (Aligned([0.0f32; ROWS * COLS]), Aligned([0.0f32; ROWS * COLS]));
        let call = Call { spec, dtypes: DTypes::uniform(DType::F32), streaming, column_groups: 1 };
        let before = Summed { x: of(&x.0), residual: Some(of(&residual.0)), out: Some(to(&mut out.0)) };
        let (after, saved) = (Store { y: to(&mut y.0) }, Saved::default());
        Rows { call, before, statistic: OfRow, affine: NONE, after, saved }.run::<Traced, (f32, f32, f32)>();
        assert_fenced(streaming, "forward");
        assert_eq!(out.0, [3.0; ROWS * COLS]);

        let (dy, mut dx) = (Aligned([bf16::ONE; ROWS * COLS]), Aligned([bf16::NAN; ROWS * COLS]));
        let mut dresidual = Aligned([f32::NAN; ROWS * COLS]);
        let rows = BackwardRows {
            call: Call { spec, dtypes: DTypes::of::<bf16, f32, f32>(), streaming, column_groups: 1 },
            dy: of(&dy.0),
            affine: NONE,
            x: of(&x.0),
            given: Given { mean: None, rstd: &[1.0; ROWS] },
            found: None,
        };
        BackwardBlocks {
            rows,
            block_rows: 2,
            stream: Gradients { dresidual_out: None, dx: to(&mut dx.0), dresidual: Some(to(&mut dresidual.0)) },
            partials: Partials::default(),
        }
        .run::<Traced, (bf16, f32, f32)>();
        assert_fenced(streaming, "backward");
        // dy is x_hat, so dx is zero: math.md, equation (10).
        assert_eq!((dx.0, dresidual.0), ([bf16::ZERO; ROWS * COLS], [0.0; ROWS * COLS]));

        CopyRange { from: &x.0, to: Out::from(&mut y.0[..]), streaming }.run::<Traced, (f32, f32, f32)>();
        assert_fenced(streaming, "copy");
        assert_eq!(y.0, x.0);
    }
}

/// Rows of 16-bit elements in batches; the last batch is not full.
#[test]
fn stores_of_batches_are_fenced_before_the_stage_ends() {
    const ROWS: usize = 21;
    let x = Aligned([bf16::ONE; ROWS * COLS]);
    for streaming in [true, false] {
        let (mut y, mut rstd) = (Aligned([bf16::NAN; ROWS * COLS]), [0.0; ROWS]);
        let call = Call {
            spec: NormSpec::rms(ROWS, COLS, 0.0),
            dtypes: DTypes::uniform(DType::Bf16),
            streaming,
            column_groups: 1,
        };
        let before = Summed { x: of(&x.0), residual: None, out: None };
        let saved = Saved { mean: None, rstd: Some(Out::from(&mut rstd[..])) };
        Rows { call, before, statistic: OfRow, affine: NONE, after: Store { y: to(&mut y.0) }, saved }.run::<Traced, (
            bf16,
            bf16,
            bf16,
        )>();
        assert_fenced(streaming, "batches");
        assert_eq!((y.0, rstd), (x.0, [1.0; ROWS]));
    }
}

/// The smallest store past the cache is fenced too.
#[test]
fn a_single_group_of_lanes_is_fenced() {
    let (x, mut y) = (Aligned([1.0f32; ROWS * COLS]), Aligned([0.0f32; ROWS * COLS]));
    CopyRange { from: &x.0[..32], to: Out::from(&mut y.0[..32]), streaming: true }.run::<Traced, (f32, f32, f32)>();
    assert_fenced(true, "copy");
}

/// Stage bodies store past the cache only through `store_or_stream`, and keep the value that
/// fences.
#[test]
fn stage_bodies_neither_stream_nor_fence_by_themselves() {
    for (name, text) in [
        ("forward", include_str!("stages/forward.rs")),
        ("batches", include_str!("stages/forward/batches.rs")),
        ("before", include_str!("stages/forward/before.rs")),
        ("after", include_str!("stages/forward/after.rs")),
        ("kept", include_str!("stages/forward/kept.rs")),
        ("backward", include_str!("stages/backward.rs")),
        ("copy", include_str!("stages/copy.rs")),
        ("reduce_partials", include_str!("stages/reduce_partials.rs")),
    ] {
        for word in ["stream(", "stream_halves(", "fence()", "forget", "ManuallyDrop", "unsafe"] {
            assert!(!text.contains(word), "{word} in {name}");
        }
    }
}
