//! Rows that cancel, and long rows. In a row of equal values the mean is exactly that value and the
//! variance is 0, for every source of h and every length, and backward gets x_hat = 0. Errors of
//! other rows are compared with bounds from the order of summation, not with observed errors.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::values;
use rmsnorm_cpu::{Backward, BackwardInputs, CpuBackend, Forward, ForwardInputs, Isa, QuantizedForward};
use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind};
use rmsnorm_spec::{
    Element, F8E4M3, Norm, NormBackend, NormSpec, PartialStatistics, Tensor, WithStatistics, bf16, f16,
};

const EPS: f32 = 1e-5;
/// Unit roundoff.
const U: f64 = 1.0 / (1 << 24) as f64;

/// Short ends, whole groups, both sides of a block of a sum, and several blocks, also when their
/// number is not a power of two.
const LENGTHS: [usize; 11] = [1, 3, 33, 64, 1000, 2047, 2048, 2049, 4097, 6145, 65_569];

/// Sums of these constants round in every way. The last two overflow f32 when squared or summed.
const CONSTANTS: [f32; 10] = [0.1, 0.3, -123.456, 1e4 + 0.1, 1.0, -0.0, 7.7e-39, 1e20 / 3.0, 1e33 / 3.0, 3.1e38];

fn backends() -> impl Iterator<Item = CpuBackend> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(|isa| CpuBackend::with_isa_and_threads(isa, 1).unwrap())
}

fn bits<E: Element>(values: &[E]) -> Vec<u32> {
    values.iter().map(|value| value.bits()).collect()
}

/// The constants that a dtype can represent.
fn constants<E: Element>() -> Vec<E> {
    CONSTANTS.into_iter().map(E::from_f32).filter(|value| value.to_f32().is_finite()).collect()
}

/// One row per constant.
fn rows_of<E: Element>(constants: &[E], cols: usize) -> Vec<E> {
    constants.iter().flat_map(|&value| std::iter::repeat_n(value, cols)).collect()
}

/// Values that are not zero in any dtype, because the sign of zero is not tested here.
fn biases<E: Element>(cols: usize) -> Vec<E> {
    values::<E>(2, cols).into_iter().map(|value| if value.to_f32() == 0.0 { E::from_f32(1.0) } else { value }).collect()
}

struct Exact<'a, E> {
    what: String,
    of_rows: &'a [E],
    mean: &'a [f32],
    rstd: &'a [f32],
}

impl<E: Element> Exact<'_, E> {
    fn check(&self) {
        let expected: Vec<f32> = self.of_rows.iter().map(|value| value.to_f32()).collect();
        assert_eq!(self.mean, expected, "mean: {}", self.what);
        let rstd = 1.0 / EPS.sqrt();
        assert_eq!(self.rstd, vec![rstd; expected.len()], "rstd: {}", self.what);
    }
}

/// y equals the bias in each form of forward, and backward equals backward of rows of zeros.
fn constant_rows<T: Element, W: Element, R: Element>() {
    for backend in backends() {
        for cols in LENGTHS {
            let of_rows = constants::<T>();
            let (rows, x) = (of_rows.len(), rows_of(&of_rows, cols));
            let (weight, bias) = (values::<W>(1, cols), biases::<W>(cols));
            let spec = NormSpec::layer(rows, cols, EPS).weight_offset(0.5);
            let what = |form: &str| format!("{form}, {rows}x{cols} {} on {backend}", T::DTYPE);
            let expected: Vec<T> = (0..rows).flat_map(|_| bias.iter().map(|bias| T::from_f32(bias.to_f32()))).collect();

            let (mut mean, mut rstd) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
            let mut y = vec![T::from_f32(9.0); rows * cols];
            let args = Forward::new(&x, &mut y).weight_dtype::<W>().residual_dtype::<R>();
            backend.forward(&spec, args.weight(&weight).bias(&bias).mean(&mut mean).rstd(&mut rstd)).unwrap();
            Exact { what: what("forward"), of_rows: &of_rows, mean: &mean, rstd: &rstd }.check();
            assert!(bits(&y) == bits(&expected), "{}", what("forward"));

            let mut in_place = x.clone();
            let args = Forward::in_place(&mut in_place).weight_dtype::<W>().residual_dtype::<R>();
            backend.forward(&spec, args.weight(&weight).bias(&bias)).unwrap();
            assert!(bits(&in_place) == bits(&expected), "{}", what("in place"));

            // The sum of x and residual has equal values too: adding -0.0 changes nothing.
            let residual = vec![R::from_f32(-0.0); rows * cols];
            let inputs = ForwardInputs::mixed(&x).weight(&weight).bias(&bias).residual(&residual);
            let made = backend.forward_vec(&spec, inputs, &[Tensor::Mean, Tensor::Rstd, Tensor::ResidualOut]).unwrap();
            let of_sums: Vec<R> = of_rows.iter().map(|value| R::from_f32(value.to_f32())).collect();
            Exact { what: what("residual"), of_rows: &of_sums, mean: &made.mean, rstd: &made.rstd }.check();
            assert!(bits(&made.y) == bits(&expected), "{}", what("residual"));

            // Backward gives the same result as for zeros with a mean of zero.
            let (dy, h) = (values::<T>(3, rows * cols), &made.residual_out);
            let zeros = (vec![R::from_f32(0.0); rows * cols], vec![0.0; rows]);
            let wanted = [Tensor::Dx, Tensor::Dweight, Tensor::Dbias];
            let [got, of_zeros] = [(h, &made.mean), (&zeros.0, &zeros.1)].map(|(h, mean)| {
                let inputs = BackwardInputs::mixed(&dy, h, &made.rstd).weight(&weight).mean(mean);
                backend.backward_vec(&spec, inputs, &wanted).unwrap()
            });
            assert!(bits(&got.dx) == bits(&of_zeros.dx), "{}", what("backward"));
            assert!(got.dweight.iter().all(|value| value.to_f32() == 0.0), "{}", what("dweight"));
        }
    }
}

#[test]
fn rows_of_one_value_give_the_bias_in_f32() {
    constant_rows::<f32, f32, f32>();
}

#[test]
fn rows_of_one_value_give_the_bias_in_16_bits() {
    constant_rows::<bf16, bf16, bf16>();
    constant_rows::<f16, f16, f16>();
}

#[test]
fn rows_of_one_value_give_the_bias_in_mixed_dtypes() {
    constant_rows::<bf16, f32, f32>();
    constant_rows::<f16, f16, f32>();
}

/// The sum of two parts, and the next norm of a sum with the residual.
#[test]
fn sums_of_one_value_give_the_bias() {
    for backend in backends() {
        for cols in LENGTHS {
            let of_rows: Vec<f32> = CONSTANTS.into_iter().filter(|value| value.abs() < 1e38).collect();
            let (rows, weight, bias) = (of_rows.len(), values::<f32>(1, cols), biases::<f32>(cols));
            let what = |form: &str| format!("{form}, {rows}x{cols} on {backend}");
            let mut x = rows_of(&of_rows, cols);
            let expected: Vec<f32> = bias.repeat(rows);
            let (mut mean, mut rstd) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
            let mut y = vec![9.0f32; rows * cols];

            // The norm of zeros is zero, so the sum is the residual.
            let zeros = vec![0.0f32; rows * cols];
            let mut sum = vec![9.0f32; rows * cols];
            let args = Forward::new(&zeros, &mut y).residual(&x).residual_out(&mut sum).next_weight(&weight);
            let args = args.next_bias(&bias).next_mean(&mut mean).next_rstd(&mut rstd).bias(&zeros[..cols]);
            backend.forward(&NormSpec::layer(rows, cols, EPS).residual_after(), args.weight(&weight)).unwrap();
            Exact { what: what("after"), of_rows: &of_rows, mean: &mean, rstd: &rstd }.check();
            assert!(bits(&y) == bits(&expected), "{}", what("after"));

            x.extend_from_within(..);
            let args = Forward::new(&x, &mut y).parts(2, rows * cols).weight(&weight).bias(&bias);
            backend.forward(&NormSpec::layer(rows, cols, EPS), args.mean(&mut mean).rstd(&mut rstd)).unwrap();
            let doubled: Vec<f32> = of_rows.iter().map(|value| value + value).collect();
            Exact { what: what("parts"), of_rows: &doubled, mean: &mean, rstd: &rstd }.check();
            assert!(bits(&y) == bits(&expected), "{}", what("parts"));
        }
    }
}

#[test]
fn codes_of_rows_of_one_value_are_those_of_the_bias() {
    for backend in backends() {
        for cols in LENGTHS {
            let of_rows = constants::<bf16>();
            let (rows, x) = (of_rows.len(), rows_of(&of_rows, cols));
            let (weight, bias) = (values::<bf16>(1, cols), biases::<bf16>(cols));
            let mut codes = vec![F8E4M3::from_bits(0); rows * cols];
            let (mut mean, mut rstd, scale) = (vec![f32::NAN; rows], vec![f32::NAN; rows], [1.0f32]);
            let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Given);
            let args = QuantizedForward::new(quant, &x, &mut codes).weight(&weight).bias(&bias);
            let args = args.scale(&scale).mean(&mut mean).rstd(&mut rstd);
            backend.quantized_forward(&NormSpec::layer(rows, cols, EPS), args).unwrap();
            Exact { what: format!("codes, {rows}x{cols} on {backend}"), of_rows: &of_rows, mean: &mean, rstd: &rstd }
                .check();
            let row: Vec<u32> = bias.iter().map(|bias| CodeType::E4m3.encode(bias.to_f32()).into()).collect();
            let got: Vec<u32> = codes.iter().map(|code| u32::from(code.to_bits())).collect();
            assert!(got.chunks_exact(cols).all(|codes| codes == row), "{rows}x{cols} on {backend}");
        }
    }
}

/// Columns divided among ranks, one with few columns and one with several blocks. Sums are passed
/// between ranks, so neither they nor the squares of one unit in the last place may leave the range
/// of f32.
#[test]
fn columns_of_one_value_give_the_bias_on_every_rank() {
    let of_rows: Vec<f32> = CONSTANTS.into_iter().filter(|value| value.abs() < 1e25).collect();
    let rows = of_rows.len();
    for backend in backends() {
        for columns in [[1, 2], [40, 1000], [6145, 64], [33, 65_536]] {
            let mut found = Vec::new();
            for cols in columns {
                let (x, mut numbers) = (rows_of(&of_rows, cols), vec![f32::NAN; 3 * rows]);
                let args = PartialStatistics::<_, f32>::new(&x[..], &mut numbers[..]);
                backend.partial_statistics(&NormSpec::layer(rows, cols, EPS), args).unwrap();
                found.extend(numbers);
            }
            for cols in columns {
                let (x, bias) = (rows_of(&of_rows, cols), biases::<f32>(cols));
                let (mut mean, mut rstd) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
                let mut y = vec![9.0f32; rows * cols];
                let args = Forward::new(&x, &mut y).bias(&bias).mean(&mut mean).rstd(&mut rstd);
                let given = WithStatistics::new(args, &found[..], &columns);
                backend.forward_with_statistics(&NormSpec::layer(rows, cols, EPS), given).unwrap();
                let what = format!("{columns:?} on {backend}");
                Exact { what: what.clone(), of_rows: &of_rows, mean: &mean, rstd: &rstd }.check();
                assert!(y == bias.repeat(rows), "{what}");
            }
        }
    }
}

/// One or a few elements are the next number. The error of the first mean may exceed all
/// deviations, and the row is visited again.
#[test]
fn rows_of_neighbours_have_the_same_bits_on_every_instruction_set() {
    let (rows, wanted) = (20, [Tensor::Mean, Tensor::Rstd]);
    for cols in [33, 300, 1000, 2500, 70_001] {
        let row = |row: usize| {
            let value = 1e4 + 0.1 * row as f32;
            (0..cols).map(move |i| if i % (row * row + 2) == 1 { value.next_up() } else { value })
        };
        let x: Vec<f32> = (0..rows).flat_map(row).collect();
        let made = |backend: &CpuBackend, x: &[f32]| {
            let spec = NormSpec::layer(x.len() / cols, cols, 1e-12);
            backend.forward_vec(&spec, ForwardInputs::new(x), &wanted).unwrap()
        };
        let expected = made(&CpuBackend::with_isa_and_threads(Isa::Portable, 1).unwrap(), &x);
        for backend in backends() {
            assert_eq!(made(&backend, &x), expected, "{cols} columns on {backend}");
            let alone = made(&backend, &x[3 * cols..][..cols]);
            assert_eq!(alone.y, expected.y[3 * cols..][..cols], "{cols} columns on {backend}");
        }
        for (r, x) in x.chunks_exact(cols).enumerate() {
            let ((mean, var), rstd) = (moments(x), f64::from(expected.rstd[r]));
            assert!((f64::from(expected.mean[r]) - mean).abs() <= 1.01 * U * mean, "mean of row {r}, {cols} columns");
            // Deviations are whole units in the last place, so their sums are exact. Errors come
            // from two quotients, a square, three additions and a root.
            let exact = 1.0 / (var + 1e-12).sqrt();
            assert!((rstd / exact - 1.0).abs() <= 6.0 * U, "rstd of row {r}, {cols} columns: {rstd:e}, not {exact:e}");
        }
    }
}

/// Rows with sums, or sums of squares, that round in the same direction again and again, or lose
/// their low bits to a mean; and random rows.
fn hard_rows(cols: usize) -> Vec<(&'static str, Vec<f32>)> {
    let noise = values::<f32>(7, cols);
    let row = |make: &dyn Fn(usize) -> f32| (0..cols).map(make).collect::<Vec<f32>>();
    vec![
        ("one value", row(&|_| 123.456)),
        ("100 and 100.001", row(&|i| if i % 2 == 0 { 100.0 } else { 100.001 })),
        ("100, then 100.001", row(&|i| if i < cols / 2 { 100.0 } else { 100.001 })),
        ("1 + small", row(&|i| 1.0 + 1e-4 * noise[i])),
        ("1e4 + small", row(&|i| 1e4 + 0.01 * noise[i])),
        ("one apart", row(&|i| if i == cols / 3 { 1e4 } else { 0.1 })),
        ("a first one apart", row(&|i| if i == 0 { -1e6 } else { 0.1 })),
        ("random", noise.clone()),
    ]
}

/// Mean and variance in f64.
fn moments(row: &[f32]) -> (f64, f64) {
    let n = row.len() as f64;
    let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    (mean, row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n)
}

/// Relative error of 1 / sqrt(v) for v >= 0 with an error of `error`, and of the root and the
/// division.
fn of_rstd(v: f64, error: f64) -> f64 {
    (v / (v - error).max(f64::MIN_POSITIVE)).sqrt() - 1.0 + 3.0 * U
}

fn judge(backend: &CpuBackend, name: &str, row: &[f32]) {
    let (cols, eps) = (row.len(), f64::from(EPS));
    let depth = (backend.arithmetic().depth_cols)(cols) as f64;
    // The chain is within blocks, not cols / 32 long.
    assert!(depth <= 63.0 + 5.0 + (cols as f64 / 2048.0).log2().ceil().max(0.0), "{cols}: {depth}");
    for norm in Norm::USUAL {
        let inputs = ForwardInputs::new(row);
        let wanted: &[Tensor] = if norm == Norm::Layer { &[Tensor::Mean, Tensor::Rstd] } else { &[Tensor::Rstd] };
        let got = backend.forward_vec(&NormSpec::new(norm, 1, cols, EPS), inputs, wanted).unwrap();
        let (mean, var) = moments(row);
        let (mean, var) = if norm == Norm::Layer { (mean, var) } else { (0.0, var + mean * mean) };
        // The center of the squares is within an eighth of the deviation, or a rounded mean; the
        // rest comes from the sum of the deviations.
        let (of_mean, off) = match norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => (0.0, 0.0),
            Norm::Layer => {
                let off = (var.sqrt() / 8.0).max(U * mean.abs());
                (1.01 * U * mean.abs() + (depth + 3.0) * U * (var.sqrt() + off), off)
            }
        };
        let of_var = (depth + 6.0) * U * (var + 2.0 * off * off);
        let relative = of_rstd(var + eps, of_var + U * (var + eps));
        let rstd = 1.0 / (var + eps).sqrt();
        let what = format!("{name}, {norm:?}, {cols} columns on {backend}");
        let error = (f64::from(got.rstd[0]) / rstd - 1.0).abs();
        assert!(error <= relative, "rstd of {what}: {error:e} > {relative:e}");
        if norm == Norm::Layer {
            let error = (f64::from(got.mean[0]) - mean).abs();
            assert!(error <= of_mean, "mean of {what}: {error:e} > {of_mean:e}");
        }
        for (&x, &y) in row.iter().zip(&got.y) {
            let x_hat = (f64::from(x) - mean) * rstd;
            let bound = rstd * (1.0 + relative) * of_mean + x_hat.abs() * (relative + 3.0 * U);
            let error = (f64::from(y) - x_hat).abs();
            assert!(error <= bound, "y of {what}: {error:e} > {bound:e}");
        }
    }
}

#[test]
fn errors_of_hard_rows_grow_like_a_logarithm() {
    for backend in backends() {
        for cols in [64, 1000, 2048, 4096, 5120, 65_537, 1_000_003] {
            for (name, row) in hard_rows(cols) {
                judge(&backend, name, &row);
            }
        }
    }
}

#[test]
fn ten_million_columns_are_as_exact_as_their_depth_says() {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap();
    for (name, row) in hard_rows(10_000_000) {
        judge(&backend, name, &row);
    }
}

/// Sums over a row in backward: of `wdy`, and of `wdy * x_hat`.
#[test]
fn row_sums_of_backward_are_as_exact_as_their_depth_says() {
    for backend in backends() {
        for cols in [64, 2048, 4097, 65_537, 1_000_003] {
            let depth = (backend.arithmetic().depth_cols)(cols) as f64;
            for norm in Norm::USUAL {
                // All terms are equal or have one sign, so all roundings go in one direction.
                let (dy, x) = (vec![123.456f32; cols], vec![0.3f32; cols]);
                let (mean, rstd) = ([if norm == Norm::Layer { 0.1f32 } else { 0.0 }], [1.7f32]);
                let mut dx = vec![f32::NAN; cols];
                let args = Backward::new(&dy, &x, &rstd, &mut dx);
                let args = if norm == Norm::Layer { args.mean(&mean) } else { args };
                backend.backward(&NormSpec::new(norm, 1, cols, EPS), args).unwrap();
                let [dy, x, mean, rstd] = [dy[0], x[0], mean[0], rstd[0]].map(f64::from);
                let x_hat = (x - mean) * rstd;
                let mean_wdy = if norm == Norm::Layer { dy } else { 0.0 };
                let exact = rstd * (dy - mean_wdy - x_hat * (dy * x_hat));
                // The errors of each mean (sum, terms, division), then of the operations of (10).
                let of_sums = (depth + 2.0) * U * mean_wdy.abs() + (depth + 8.0) * U * (x_hat * dy * x_hat).abs();
                let bound = rstd * (of_sums + 4.0 * U * (dy.abs() + mean_wdy.abs() + (x_hat * dy * x_hat).abs()));
                let error = dx.iter().map(|&dx| (f64::from(dx) - exact).abs()).fold(0.0, f64::max);
                assert!(error <= bound, "{norm:?}, {cols} columns on {backend}: {error:e} > {bound:e}");
            }
        }
    }
}
