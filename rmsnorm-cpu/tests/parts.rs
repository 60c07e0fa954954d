//! The sum of several parts: results have the same bits on every instruction set, for every number
//! of threads and place of the parts. The norm has the bits of a call on the sum.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use rmsnorm_conformance::testing::{exact, values};
use rmsnorm_cpu::{CpuBackend, Forward, Isa};
use rmsnorm_spec::reference::sum_of_parts;
use rmsnorm_spec::{Element, Norm, NormSpec, RowGroups, Rows, bf16, f16};

/// The outputs of one call, as bits.
#[derive(Debug, PartialEq)]
struct AnyElement {
    sum: Vec<u32>,
    y: Vec<u32>,
    rstd: Vec<f32>,
}

fn bits<E: Element>(values: &[E]) -> Vec<u32> {
    values.iter().map(|value| value.bits()).collect()
}

/// The layout of the parts.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// One part after the other, with dense rows.
    Behind,
    /// The parts of a row are adjacent: `[rows, parts, cols]`.
    Beside,
    /// One part after the other, with rows in groups of three and gaps.
    Grouped,
}

struct Call {
    norm: Norm,
    rows: usize,
    cols: usize,
    parts: usize,
}

impl Call {
    fn stored<T: Element, W: Element, R: Element>(&self, backend: &CpuBackend, place: Place) -> AnyElement {
        let Call { norm, rows, cols, parts } = *self;
        let [dense, weight, bias, residual] = [parts * rows * cols, cols, cols, rows * cols];
        let dense = values::<T>(1, dense);
        let (weight, bias, residual) = (values::<W>(2, weight), values::<W>(3, bias), values::<R>(4, residual));
        let groups = RowGroups { rows: 3, stride: 3 * cols + 7 };
        let (row_stride, part_stride) = match place {
            Place::Behind => (cols, rows * cols),
            Place::Beside => (parts * cols, cols),
            Place::Grouped => (cols, rows.div_ceil(3) * groups.stride),
        };
        let start = |row: usize| match place {
            Place::Behind | Place::Beside => row * row_stride,
            Place::Grouped => groups.start(row_stride, row),
        };
        let end = (parts - 1) * part_stride + start(rows - 1) + cols;
        // Elements between rows are NaN, so reading them would show.
        let mut x = vec![T::from_f32(f32::NAN); end];
        for (i, row) in dense.chunks_exact(cols).enumerate() {
            x[i / rows * part_stride + start(i % rows)..][..cols].copy_from_slice(row);
        }
        let x = match place {
            Place::Behind | Place::Beside => Rows::strided(&x[..], row_stride),
            Place::Grouped => Rows::grouped(&x[..], row_stride, groups),
        };
        let (mut y, mut sum) = (vec![T::from_f32(9.0); rows * cols], vec![R::from_f32(9.0); rows * cols]);
        let mut rstd = vec![9.0f32; rows];
        let args = Forward::<T>::new(x, &mut y).parts(parts, part_stride).weight_dtype::<W>().residual_dtype::<R>();
        let args = args.weight(&weight).bias(&bias).residual(&residual).residual_out(&mut sum).rstd(&mut rstd);
        backend.forward(&NormSpec::new(norm, rows, cols, 1e-5).weight_offset(0.5), args).unwrap();
        AnyElement { sum: bits(&sum), y: bits(&y), rstd }
    }

    /// The outputs of a call on the sum, in activations of its dtype.
    fn of_sum<T: Element, W: Element>(&self, backend: &CpuBackend) -> AnyElement {
        let Call { norm, rows, cols, parts } = *self;
        let (dense, residual) = (values::<T>(1, parts * rows * cols), values::<T>(4, rows * cols));
        let (weight, bias) = (values::<W>(2, cols), values::<W>(3, cols));
        let sum = sum_of_parts(&exact(&dense), parts, Some(&exact(&residual)), T::DTYPE);
        let sum: Vec<T> = sum.iter().map(|sum| T::from_f32(*sum as f32)).collect();
        let (mut y, mut rstd) = (vec![T::from_f32(9.0); rows * cols], vec![9.0f32; rows]);
        let args = Forward::<T>::new(&sum, &mut y).weight_dtype::<W>().weight(&weight).bias(&bias).rstd(&mut rstd);
        backend.forward(&NormSpec::new(norm, rows, cols, 1e-5).weight_offset(0.5), args).unwrap();
        AnyElement { sum: bits(&sum), y: bits(&y), rstd }
    }
}

/// Rows that fit the stack and rows that do not, with whole groups of lanes and short ends, and a
/// matrix that outgrows the cache.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (9, 33), (20, 128), (3, 4096), (3, 4097), (2, 9001), (70, 300), (2100, 1021)];

fn calls() -> impl Iterator<Item = Call> {
    let call = |(i, (rows, cols)): (usize, (usize, usize))| {
        Norm::ALL.map(|norm| Call { norm, rows, cols, parts: [2, 3, 8, 5][i % 4] })
    };
    SHAPES.into_iter().enumerate().flat_map(call)
}

fn same_bits<T: Element, W: Element, R: Element>() {
    let first = CpuBackend::with_isa_and_threads(Isa::Portable, 1).unwrap();
    for call in calls() {
        let expected = call.stored::<T, W, R>(&first, Place::Behind);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (threads, place) in [(1, Place::Beside), (3, Place::Behind), (2, Place::Grouped)] {
                let backend = CpuBackend::with_isa_and_threads(isa, threads).unwrap();
                let stored = call.stored::<T, W, R>(&backend, place);
                assert!(
                    stored == expected,
                    "{isa} {threads} {place:?} {} {}x{}",
                    call.norm.name(),
                    call.rows,
                    call.cols
                );
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_instruction_set_threads_or_place() {
    same_bits::<f32, f32, f32>();
    same_bits::<bf16, f32, f32>();
    same_bits::<f16, f16, f16>();
}

#[test]
fn the_norm_has_the_bits_of_a_call_on_the_sum() {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 2).unwrap();
    for call in calls() {
        let what = || format!("{} {}x{}", call.norm.name(), call.rows, call.cols);
        assert!(
            call.stored::<f32, f32, f32>(&backend, Place::Behind) == call.of_sum::<f32, f32>(&backend),
            "{}",
            what()
        );
        assert!(
            call.stored::<bf16, f32, bf16>(&backend, Place::Behind) == call.of_sum::<bf16, f32>(&backend),
            "{}",
            what()
        );
        assert!(
            call.stored::<f16, f16, f16>(&backend, Place::Behind) == call.of_sum::<f16, f16>(&backend),
            "{}",
            what()
        );
    }
}
