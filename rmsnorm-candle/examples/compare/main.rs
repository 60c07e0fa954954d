//! Compares our norms with candle's in one process, with samples in turn: forward, and forward with
//! backward.
//!
//!     cargo run --release -p rmsnorm-candle --example compare
//!     cargo run --release -p rmsnorm-candle --features cuda --example compare -- --device cuda
//!     cargo run -p rmsnorm-candle --example compare -- --check   # each call once, for its result
//!
//! Times are medians of whole calls on candle's tensors, including the allocation of results. The
//! time without candle, and the time of candle's engine, are printed below. GB/s count the bytes
//! that a call must move: x and y forward; dy, x and dx in addition for backward.
//!
//! On the CPU, glibc returns large blocks to the system and requests them again, which takes longer
//! than a norm; with `MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296` in the
//! environment it keeps them. On a GPU, a sample enqueues many calls and waits, so it measures
//! mostly host time. Each case is therefore measured a second time, enqueued after other work that
//! keeps the GPU busy, for the GPU time.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod table;

use candle_core::{DType, Device, Result, Tensor, Var, bail};
use candle_nn::ops;
use rmsnorm_core::bf16;
use table::{Table, case};

const EPS: f32 = 1e-6;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let is_check = args.iter().any(|arg| arg == "--check");
    let device =
        args.iter().position(|arg| arg == "--device").map_or(Some("cpu"), |at| args.get(at + 1).map(String::as_str));
    let device = match device {
        Some("cpu") => cpu::device(),
        #[cfg(feature = "cuda")]
        Some("cuda") => cuda::device()?,
        other => bail!("--device is cpu or, with the feature, cuda, got {other:?}"),
    };
    let shapes = if is_check { [[64, 128], [1, 256]] } else { [[4096, 1024], [1, 4096]] };
    for shape in shapes {
        let table = |dtype| Table { is_check, shape, dtype, device: device.clone() };
        compare(&table(DType::BF16))?;
        compare(&table(DType::F32))?;
    }
    Ok(())
}

fn compare(table: &Table) -> Result<()> {
    let [rows, cols] = table.shape;
    let make = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &table.device)?.to_dtype(table.dtype);
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
    let tensors = [&x, &w, &dy];
    match (&table.device, table.dtype) {
        (Device::Cpu, DType::F32) => cpu::apart::<f32>(table, tensors),
        (Device::Cpu, _) => cpu::apart::<bf16>(table, tensors),
        #[cfg(feature = "cuda")]
        (Device::Cuda(device), DType::F32) => cuda::apart::<f32>(table, device, tensors),
        #[cfg(feature = "cuda")]
        (Device::Cuda(device), _) => cuda::apart::<bf16>(table, device, tensors),
        (device, _) => bail!("nothing to tell apart on {:?}", device.location()),
    }
}

/// Checks that our forms and candle's slow forms give equal results up to a few roundings of x_hat,
/// so that the comparison is fair.
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
