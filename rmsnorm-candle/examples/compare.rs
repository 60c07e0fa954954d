//! Our norms and candle's on the CPU, in one process, samples in turn: forward, and forward with backward.
//!
//!     cargo run --release -p rmsnorm-candle --example compare
//!     cargo run -p rmsnorm-candle --example compare -- --check   # each call once, for its result
//!
//! Times are medians of whole calls on candle's tensors, allocation of results included. What a call takes without candle, and what
//! candle's own engine takes, is told apart below each. GB/s count what a call has to move: x and y forward, and besides dy, x and
//! dx backward. glibc gives large blocks back to the system and asks for them again, which costs more than a norm; with
//! `MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296` in the environment it does not.

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Error, Result, Tensor, Var, WithDType, bail};
use candle_nn::ops;
use rmsnorm_core::cpu::{BackwardInputs, CpuBackend, Forward, ForwardInputs};
use rmsnorm_core::{Element, NormSpec, Tensor as Name, bf16};

const EPS: f32 = 1e-6;
/// What the cases of a table may take together, once each has had each turn twice.
const PER_TABLE: Duration = Duration::from_millis(1100);

/// A call that is measured.
struct Case<'a> {
    name: &'static str,
    call: Box<dyn Fn() -> Result<()> + 'a>,
}

fn case<'a, T>(name: &'static str, call: impl Fn() -> Result<T> + 'a) -> Case<'a> {
    Case { name, call: Box::new(move || call().map(|made| drop(black_box(made)))) }
}

/// Measures and prints, or only calls.
struct Table {
    is_check: bool,
    shape: [usize; 2],
    dtype: DType,
}

impl Table {
    /// Of calls that move so many tensors of x's size. The first is what the others are compared with.
    fn print(&self, title: &str, tensors: usize, cases: &[Case<'_>]) -> Result<()> {
        if self.is_check {
            return cases.iter().try_for_each(|case| (case.call)());
        }
        let [rows, cols] = self.shape;
        let bytes = (tensors * rows * cols * self.dtype.size_in_bytes()) as f64;
        let calls = if rows == 1 { 200 } else { 1 };
        let mut samples = vec![Vec::new(); cases.len()];
        let start = Instant::now();
        let mut round = 0;
        while round <= 2 * cases.len() || (start.elapsed() < PER_TABLE && round < 100) {
            // Another first each time, and back and forth: each finds the memory that the one before has freed.
            for turn in 0..cases.len() {
                let turn = if round % 2 == 0 { turn } else { cases.len() - 1 - turn };
                let index = (turn + round / 2) % cases.len();
                let (case, samples) = (&cases[index], &mut samples[index]);
                let start = Instant::now();
                for _ in 0..calls {
                    (case.call)()?;
                }
                // The first round is for memory and caches.
                if round > 0 {
                    samples.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls));
                }
            }
            round += 1;
        }
        println!("{title}, {:?} {rows}x{cols}", self.dtype);
        let mut first = None;
        for (case, samples) in cases.iter().zip(&mut samples) {
            samples.sort_by(f64::total_cmp);
            let (median, least) = (samples[samples.len() / 2], samples[0]);
            let ratio = median / *first.get_or_insert(median);
            let gbs = bytes / median / 1e3;
            println!("    {:42} {median:>10.1} us  least {least:>10.1}  {ratio:>6.2} x  {gbs:>6.1} GB/s", case.name);
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let is_check = std::env::args().any(|arg| arg == "--check");
    println!("{}", CpuBackend::new());
    let shapes = if is_check { [[64, 128], [1, 256]] } else { [[4096, 1024], [1, 4096]] };
    for shape in shapes {
        compare::<f32>(Table { is_check, shape, dtype: DType::F32 })?;
        compare::<bf16>(Table { is_check, shape, dtype: DType::BF16 })?;
    }
    Ok(())
}

fn compare<T: Element + WithDType>(table: Table) -> Result<()> {
    let [rows, cols] = table.shape;
    let make = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?.to_dtype(table.dtype);
    let (x, r, dy) = (make(&[rows, cols])?, make(&[rows, cols])?, make(&[rows, cols])?);
    let (w, b) = (make(&[cols])?, make(&[cols])?);
    let [vx, vr, vw, vb] = [&x, &r, &w, &b].map(Var::from_tensor);
    let (vx, vr, vw, vb) = (vx?, vr?, vw?, vb?);
    let eps = f64::from(EPS);
    let train = |y: Result<Tensor>| y?.backward();

    agree(&x, &w, &b)?;
    table.print(
        "rms_norm forward",
        2,
        &[
            case("rmsnorm_candle::rms_norm", || rmsnorm_candle::rms_norm(&x, &w, eps)),
            case("candle_nn::ops::rms_norm", || ops::rms_norm(&x, &w, EPS)),
            case("candle_nn::ops::rms_norm_slow", || ops::rms_norm_slow(&x, &w, EPS)),
        ],
    )?;
    table.print(
        "layer_norm forward",
        2,
        &[
            case("rmsnorm_candle::layer_norm", || rmsnorm_candle::layer_norm(&x, &w, Some(&b), eps)),
            case("candle_nn::ops::layer_norm", || ops::layer_norm(&x, &w, &b, EPS)),
            case("candle_nn::ops::layer_norm_slow", || ops::layer_norm_slow(&x, &w, &b, EPS)),
        ],
    )?;
    table.print(
        "residual + rms_norm forward",
        4,
        &[
            case("rmsnorm_candle::add_rms_norm", || rmsnorm_candle::add_rms_norm(&x, &r, &w, eps)),
            case("+, candle_nn::ops::rms_norm", || (&x + &r).and_then(|h| Ok((ops::rms_norm(&h, &w, EPS)?, h)))),
        ],
    )?;
    table.print(
        "rms_norm forward + backward",
        5,
        &[
            case("rmsnorm_candle::rms_norm", || train(rmsnorm_candle::rms_norm(&vx, &vw, eps))),
            case("candle_nn::ops::rms_norm_slow", || train(ops::rms_norm_slow(&vx, &vw, EPS))),
        ],
    )?;
    table.print(
        "layer_norm forward + backward",
        5,
        &[
            case("rmsnorm_candle::layer_norm", || train(rmsnorm_candle::layer_norm(&vx, &vw, Some(&vb), eps))),
            case("candle_nn::ops::layer_norm_slow", || train(ops::layer_norm_slow(&vx, &vw, &vb, EPS))),
        ],
    )?;
    table.print(
        "residual + rms_norm forward + backward, both results used",
        9,
        &[
            case("rmsnorm_candle::add_rms_norm", || {
                train(rmsnorm_candle::add_rms_norm(&vx, &vr, &vw, eps).and_then(|(y, h)| y + h))
            }),
            case("+, candle_nn::ops::rms_norm_slow", || {
                train((vx.as_tensor() + vr.as_tensor()).and_then(|h| ops::rms_norm_slow(&h, &vw, EPS)? + h))
            }),
        ],
    )?;
    apart::<T>(&table, [&x, &w, &dy])
}

/// What forward and backward of an RMS norm take without candle, and candle's engine without them.
fn apart<T: Element + WithDType>(table: &Table, [x, w, dy]: [&Tensor; 3]) -> Result<()> {
    let [rows, cols] = table.shape;
    let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<T>();
    let (xs, ws, dys) = (values(x)?, values(w)?, values(dy)?);
    let (backend, norm) = (CpuBackend::new(), NormSpec::rms(rows, cols, EPS));
    let forward = || {
        let inputs = ForwardInputs::<T>::new(&xs).weight(&ws);
        backend.forward_vec(&norm, inputs, &[Name::Rstd]).map_err(Error::wrap)
    };
    let reused = std::cell::RefCell::new(forward()?.y);
    let rstd = forward()?.rstd;
    let backward = || {
        let inputs = BackwardInputs::<T>::new(&dys, &xs, &rstd).weight(&ws);
        backend.backward_vec(&norm, inputs, &[Name::Dweight]).map_err(Error::wrap)
    };
    table.print(
        "of rms_norm forward, without candle",
        2,
        &[
            case("the kernel, into memory that is there", || {
                let mut y = reused.borrow_mut();
                backend.forward(&norm, Forward::new(&xs, &mut *y).weight(&ws)).map_err(Error::wrap)
            }),
            case("the kernel, into new memory", forward),
        ],
    )?;
    table.print(
        "of rms_norm forward + backward, told apart",
        5,
        &[
            case("the kernels, into new memory", || Ok((forward()?, backward()?))),
            // What backward does around an operation: ones for the result, and each gradient added to zeros.
            case("candle's engine: ones, zeros, additions", || {
                Ok((x.ones_like()?, (x.zeros_like()? + dy)?, (w.zeros_like()? + w)?))
            }),
        ],
    )
}

/// Ours and candle's slow forms give the same, up to a few roundings of x_hat, or what is measured is not the same.
fn agree(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<()> {
    let eps = f64::from(EPS);
    let pairs = [
        (rmsnorm_candle::rms_norm(x, w, eps)?, ops::rms_norm_slow(x, w, EPS)?),
        (rmsnorm_candle::layer_norm(x, w, Some(b), eps)?, ops::layer_norm_slow(x, w, b, EPS)?),
    ];
    let unit = if x.dtype() == DType::F32 { f32::EPSILON } else { 1.0 / 128.0 };
    for (ours, slow) in pairs {
        let (ours, slow) = (ours.to_dtype(DType::F32)?, slow.to_dtype(DType::F32)?);
        let most = |tensor: Tensor| tensor.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
        let (largest, difference) = (most(slow.clone())?, most((ours - slow)?)?);
        let is_close = difference <= 4.0 * unit * largest;
        if !is_close {
            bail!("results differ by {difference}, the largest is {largest}");
        }
    }
    Ok(())
}
