//! Results have the same bits on every instruction set, for any number of threads, in any floating-point mode of the
//! caller, and a row's result does not depend on the rows around it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use rmsnorm_cpu::{Backward, CpuBackend, Forward, Isa};
use rmsnorm_spec::{Element, NormBackend, NormSpec, bf16, f16};

/// A value for an element, from a hash of its position: the same everywhere, with no structure.
fn element<E: Element>(seed: u64, index: usize) -> E {
    let mut z = (seed << 32 | index as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    E::from_f32(((z ^ (z >> 31)) >> 40) as f32 / (1 << 22) as f32 - 2.0)
}

fn tensor<E: Element>(seed: u64, len: usize) -> Vec<E> {
    (0..len).map(|index| element(seed, index)).collect()
}

/// Everything a forward and a backward pass produce, as bits.
#[derive(PartialEq, Debug)]
struct Bits {
    y: Vec<u32>,
    mean: Vec<u32>,
    rstd: Vec<u32>,
    dx: Vec<u32>,
    dweight: Vec<u32>,
    dbias: Vec<u32>,
}

fn bits<E: Element>(values: &[E]) -> Vec<u32> {
    values.iter().map(|value| value.bits()).collect()
}

fn layer_norm<T: Element, W: Element>(backend: &CpuBackend, rows: usize, cols: usize) -> Bits {
    let norm = NormSpec::layer(rows, cols, 1e-5).weight_offset(1.0);
    let (x, dy) = (tensor::<T>(1, rows * cols), tensor::<T>(2, rows * cols));
    let (weight, bias) = (tensor::<W>(3, cols), tensor::<W>(4, cols));
    let (mut y, mut dx) = (vec![T::default(); rows * cols], vec![T::default(); rows * cols]);
    let (mut mean, mut rstd) = (vec![0.0; rows], vec![0.0; rows]);
    let (mut dweight, mut dbias) = (vec![W::default(); cols], vec![W::default(); cols]);
    let forward = Forward::<T, W, T>::mixed(&x, &mut y).weight(&weight).bias(&bias).mean(&mut mean).rstd(&mut rstd);
    backend.forward(&norm, forward).unwrap();
    let backward = Backward::<T, W, T>::mixed(&dy, &x, &mut dx).weight(&weight).mean(&mean).rstd(&rstd);
    backend.backward(&norm, backward.dweight(&mut dweight).dbias(&mut dbias)).unwrap();
    Bits {
        y: bits(&y),
        mean: bits(&mean),
        rstd: bits(&rstd),
        dx: bits(&dx),
        dweight: bits(&dweight),
        dbias: bits(&dbias),
    }
}

/// Small, odd, beyond a group of lanes, several tasks, and large enough for stores past the cache.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (3, 7), (5, 33), (67, 1000), (300, 129), (64, 4099), (2049, 1024), (9, 65537)];

fn same_bits<T: Element, W: Element>() {
    for (rows, cols) in SHAPES {
        let expected = layer_norm::<T, W>(&CpuBackend::with(Isa::Portable, 1).unwrap(), rows, cols);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for threads in [1, 2, 3, 16] {
                let backend = CpuBackend::with(isa, threads).unwrap();
                let got = layer_norm::<T, W>(&backend, rows, cols);
                assert!(got == expected, "{rows}x{cols} {} {} on {isa}, {threads} threads", T::DTYPE, W::DTYPE);
            }
        }
    }
}

#[test]
fn f32_bits_do_not_depend_on_isa_or_threads() {
    same_bits::<f32, f32>();
}

#[test]
fn f16_bits_do_not_depend_on_isa_or_threads() {
    same_bits::<f16, f16>();
}

#[test]
fn bf16_bits_do_not_depend_on_isa_or_threads() {
    same_bits::<bf16, bf16>();
    same_bits::<bf16, f32>();
}

#[test]
fn a_row_alone_has_the_bits_it_has_in_a_batch() {
    let (rows, cols) = (2049, 1024);
    let backend = CpuBackend::with(Isa::detect(), 2).unwrap();
    let batch = layer_norm::<bf16, f32>(&backend, rows, cols);
    let alone = layer_norm::<bf16, f32>(&backend, 1, cols);
    assert_eq!(alone.y, batch.y[..cols]);
    assert_eq!(alone.dx, batch.dx[..cols]);
    assert_eq!((alone.mean[0], alone.rstd[0]), (batch.mean[0], batch.rstd[0]));
}

/// A caller that flushes subnormals, as audio code does, gets the same bits and keeps its mode.
#[cfg(target_arch = "x86_64")]
#[test]
fn results_do_not_depend_on_the_callers_floating_point_mode() {
    const FLUSH: u32 = 0x9fc0;
    fn mode() -> u32 {
        let mut mode = 0u32;
        // SAFETY:
        // - feature: SSE is part of x86-64;
        // - memory: writes the one u32 given.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack, preserves_flags)) };
        mode
    }
    fn set_mode(mode: u32) {
        // SAFETY:
        // - feature: SSE is part of x86-64;
        // - memory: reads the one u32 given;
        // - state: the test sets the mode back, and does no arithmetic in between but the call under test.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &mode, options(nostack, preserves_flags)) };
    }
    let (rows, cols) = (3, 40);
    let tiny: Vec<f32> = tensor::<f32>(1, rows * cols).iter().map(|x| x * 1e-38).collect();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with(isa, 1).unwrap();
        let norm = NormSpec::rms(rows, cols, 1.0);
        let (mut expected, mut got) = (vec![0.0f32; rows * cols], vec![0.0f32; rows * cols]);
        backend.forward(&norm, Forward::new(&tiny, &mut expected)).unwrap();
        let default = mode();
        set_mode(FLUSH);
        let result = backend.forward(&norm, Forward::new(&tiny, &mut got));
        let (after, _) = (mode() & 0xffc0, set_mode(default));
        assert!(result.is_ok());
        assert_eq!(after, FLUSH, "the caller's mode was not restored on {isa}");
        assert_eq!(bits(&got), bits(&expected), "on {isa}");
        assert!(expected.iter().any(|y| y.is_subnormal()), "the data does not reach the subnormals");
    }
}
