//! Measuring the CPU with the host's clock, and copies with the loads and stores of the kernels.

use std::ops::Range;
use std::time::Instant;

use bytemuck::{pod_align_to, pod_align_to_mut};
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::{Element, Error};

use crate::Shape;
use crate::measurable::{Call, Measurable, Mode, Sets};

/// Input and output of all sets together exceed this many bytes: several times any processor's
/// last-level cache.
const COLD_BYTES: usize = 512 << 20;

/// Calls on matrices of fewer bytes are decode steps, whose tensors are in the cache.
const HOT_BYTES: usize = 128 << 10;

/// The largest number of elements of a matrix: 256 MiB in f32. There are eight matrices of this
/// size, two sets of four. A single row takes more memory, since vectors are then as long as
/// matrices.
const MOST_ELEMENTS: usize = 1 << 26;

/// The bytes of a matrix in sweeps.
const SWEEP_BYTES: usize = 16 << 20;

impl Measurable for CpuBackend {
    /// Rows of one and of several thousand elements, short rows, and a decode step.
    const SHAPES: &'static [Shape] = &[
        Shape { rows: 4096, cols: 1024 },
        Shape { rows: 2048, cols: 4096 },
        Shape { rows: 512, cols: 8192 },
        Shape { rows: 8192, cols: 128 },
        Shape { rows: 1, cols: 4096 },
    ];

    /// Ordinary stores, and streaming stores that bypass the cache.
    const COPIES: usize = 2;

    const SAMPLE_SECONDS: f64 = 100e-6;
    const WAKE_SECONDS: f64 = 0.0;

    type Batch = ();

    fn sets(&self, matrix_bytes: usize) -> Sets {
        let is_cold = matrix_bytes >= HOT_BYTES;
        Sets { count: if is_cold { COLD_BYTES.div_ceil(2 * matrix_bytes).max(2) } else { 1 }, is_cold }
    }

    fn sweep_bytes(&self) -> usize {
        SWEEP_BYTES
    }

    fn admit(&self, shape: Shape, _bytes: usize) -> Result<(), String> {
        if shape.elements() <= MOST_ELEMENTS {
            return Ok(());
        }
        Err(format!("at most {MOST_ELEMENTS} elements can be measured on the cpu"))
    }

    fn copy<T: Element>(&self, from: &[T], to: &mut [T], way: usize) -> Result<(), Error> {
        if from.len() != to.len() {
            return Err(Error::Length { arg: "to", min: from.len(), max: from.len(), got: to.len() });
        }
        // The backend copies f32. Matrices begin on a cache line, so at most one 16-bit element is
        // left at the end.
        let (head, body, tail) = pod_align_to::<T, f32>(from);
        let (split, streaming) = (head.len(), way == 1);
        let (head_to, body_to, tail_to) = pod_align_to_mut::<T, f32>(to);
        if head_to.len() != split || body_to.len() != body.len() {
            to.copy_from_slice(from);
            return Ok(());
        }
        head_to.copy_from_slice(head);
        tail_to.copy_from_slice(tail);
        CpuBackend::copy(self, body, body_to, streaming)
    }

    fn kernels(&self) -> usize {
        0
    }

    fn make_batch(&self, _sets: usize, call: &mut Call<'_, Self>) -> Result<(), Error> {
        // Nothing is compiled at run time. One call fills the caches and wakes the threads.
        call(self, 0)
    }

    fn time(&self, _batch: &(), mut sets: Range<usize>, call: &mut Call<'_, Self>) -> Result<f64, Error> {
        let (calls, start) = (sets.len(), Instant::now());
        sets.try_for_each(|set| call(self, set))?;
        Ok(start.elapsed().as_secs_f64() / calls as f64)
    }

    fn mode(&self, _batch: &()) -> Mode {
        Mode::Wall
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmsnorm_core::bf16;
    use rmsnorm_core::conformance::Harness;

    #[test]
    fn cold_sets_exceed_the_caches_and_a_decode_step_has_one() {
        let backend = CpuBackend::new();
        assert_eq!(backend.sets(16 << 20), Sets { count: 16, is_cold: true });
        // Five sets of two matrices would have 12 MiB too few.
        assert_eq!(backend.sets(50 << 20), Sets { count: 6, is_cold: true });
        assert_eq!(backend.sets(1 << 30), Sets { count: 2, is_cold: true });
        assert_eq!(backend.sets(8 << 10), Sets { count: 1, is_cold: false });
    }

    #[test]
    fn repeat_fills_every_buffer() {
        let backend = CpuBackend::new();
        for (len, expected) in [(0, &[][..]), (2, &[1.0, 2.0]), (7, &[1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0])] {
            let buffers = backend.repeat(&[1.0f32, 2.0, 3.0], len, 2).unwrap();
            assert_eq!(buffers.len(), 2);
            assert!(buffers.iter().all(|buffer| backend.download(buffer).unwrap() == expected), "{len}");
        }
    }

    #[test]
    fn copy_takes_any_length_and_alignment() {
        let backend = CpuBackend::new();
        let from: Vec<bf16> = (0..100).map(|i| bf16::from_f32(i as f32)).collect();
        for way in 0..CpuBackend::COPIES {
            for (from, start) in [(&from[..], 0), (&from[1..], 1), (&from[1..], 2), (&from[..99], 0), (&from[..0], 0)] {
                let mut to = vec![bf16::NAN; 102];
                Measurable::copy(&backend, from, &mut to[start..start + from.len()], way).unwrap();
                assert_eq!(&to[start..start + from.len()], from);
                assert_eq!(to.iter().filter(|value| value.is_nan()).count(), 102 - from.len());
            }
        }
        assert!(Measurable::copy(&backend, &from, &mut [bf16::ZERO; 99], 0).is_err());
    }
}
