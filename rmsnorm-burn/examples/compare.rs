//! Compares our norms with burn's on its CPU backend, in one process, with samples in turn:
//! forward, and forward with backward.
//!
//!     cargo run --release -p rmsnorm-burn --example compare
//!     cargo run -p rmsnorm-burn --example compare -- --check   # each call once, for its result
//!     cargo run --release -p rmsnorm-burn --features wgpu,burn/vulkan,burn/autotune --example compare -- --wgpu
//!
//! The last command runs on burn's default wgpu device, shared with our kernels. A sample is 16
//! calls and the wait for them. Their results are kept, because burn's fusion drops results without
//! an owner; it may fuse operations of several calls into one kernel. With `burn/vulkan` burn uses
//! its best compiler for its own kernels, and has bf16; with `burn/autotune`, a default, it chooses
//! among them.
//!
//! Times are medians of whole calls on burn's tensors, including the allocation of results. The
//! time without burn, and the time of burn's engine, are printed below. GB/s count the bytes that a
//! call must move: x and y forward; dy, x and dx in addition for backward. glibc returns large
//! blocks to the system and requests them again, which takes longer than a norm; with
//! `MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296` in the environment it
//! keeps them.

use std::any::Any;
use std::cell::RefCell;
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::module::Param;
use burn::nn::{LayerNormConfig, RmsNormConfig};
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use rmsnorm_core::cpu::{BackwardInputs, CpuBackend, Forward, ForwardInputs};
use rmsnorm_core::{Element, NormSpec, Tensor as Name, bf16, f16};

const EPS: f32 = 1e-6;
/// The time for all cases of a table, after each case has had each turn twice.
const PER_TABLE: Duration = Duration::from_millis(1100);

/// A measured call.
struct Case<'a> {
    name: &'static str,
    /// The call; it passes its result to the argument.
    call: Box<dyn Fn(&mut Results) + 'a>,
}

fn case<'a, T: 'static>(name: &'static str, call: impl Fn() -> T + 'a) -> Case<'a> {
    Case { name, call: Box::new(move |results| results.take(call())) }
}

/// Results of calls: dropped on the CPU; kept on a device that runs calls later, until it has run
/// them.
enum Results {
    Dropped,
    Kept(Vec<Box<dyn Any>>),
}

impl Results {
    fn of(device: &Device) -> Self {
        if *device == Device::flex() { Results::Dropped } else { Results::Kept(Vec::new()) }
    }

    fn take<T: 'static>(&mut self, result: T) {
        match self {
            Results::Dropped => drop(black_box(result)),
            Results::Kept(results) => results.push(Box::new(result)),
        }
    }
}

/// Measures and prints, or only calls.
struct Table {
    is_check: bool,
    shape: [usize; 2],
    dtype: DType,
    device: Device,
}

impl Table {
    /// Prints calls that move `tensors` tensors of x's size, relative to the first case.
    fn print(&self, title: &str, tensors: usize, cases: &[Case<'_>]) -> Result<(), Box<dyn Error>> {
        if self.is_check {
            let mut results = Results::of(&self.device);
            cases.iter().for_each(|case| (case.call)(&mut results));
            return Ok(self.device.sync()?);
        }
        let [rows, cols] = self.shape;
        let bytes = (tensors * rows * cols * self.dtype.size()) as f64;
        let calls = match (self.is_cpu(), rows) {
            (true, 1) => 200,
            (true, _) => 1,
            (false, _) => 16,
        };
        let mut samples = vec![Vec::new(); cases.len()];
        let start = Instant::now();
        let mut round = 0;
        while round <= 2 * cases.len() || (start.elapsed() < PER_TABLE && round < 100) {
            // A different first case each time, and back and forth: each case finds the memory that
            // the previous one freed.
            for turn in 0..cases.len() {
                let turn = if round % 2 == 0 { turn } else { cases.len() - 1 - turn };
                let index = (turn + round / 2) % cases.len();
                let (case, samples) = (&cases[index], &mut samples[index]);
                let mut results = Results::of(&self.device);
                let start = Instant::now();
                for _ in 0..calls {
                    (case.call)(&mut results);
                }
                self.device.sync()?;
                // The first round warms memory and caches.
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

    fn is_cpu(&self) -> bool {
        self.device == Device::flex()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let has = |flag: &str| std::env::args().any(|arg| arg == flag);
    let (is_check, device) = (has("--check"), if has("--wgpu") { wgpu()? } else { Device::flex() });
    if device == Device::flex() {
        println!("{}", CpuBackend::new());
    }
    let shapes = if is_check { [[64, 128], [1, 256]] } else { [[4096, 1024], [1, 4096]] };
    for shape in shapes {
        let table = |dtype: DType| Table { is_check, shape, dtype, device: device.clone() };
        compare::<f32>(&table(DType::F32))?;
        match device.supports_dtype(DType::BF16) {
            true => compare::<bf16>(&table(DType::BF16))?,
            false => compare::<f16>(&table(DType::F16))?,
        }
    }
    Ok(())
}

#[cfg(feature = "wgpu")]
fn wgpu() -> Result<Device, Box<dyn Error>> {
    let (device, setup) = Device::wgpu_options().init_with_setup()?;
    rmsnorm_burn::wgpu::share(&device, &setup)?;
    println!("{}", rmsnorm_burn::wgpu::backend(&device).ok_or("not shared")?);
    Ok(device)
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Result<Device, Box<dyn Error>> {
    Err("--wgpu needs the feature wgpu".into())
}

/// The tensors of the norms, and burn's modules with the same parameters.
struct Tensors {
    x: Tensor<2>,
    r: Tensor<2>,
    w: Tensor<1>,
    b: Tensor<1>,
    rms: burn::nn::RmsNorm,
    /// With the weight `b`.
    next: burn::nn::RmsNorm,
    layer: burn::nn::LayerNorm,
}

/// A random tensor; on a device with autodiff, a tracked leaf.
fn random<const D: usize>(dims: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    let tensor = Tensor::<D>::random(dims, Distribution::Normal(0.0, 1.0), device).cast(dtype);
    if device.is_autodiff() { tensor.require_grad() } else { tensor }
}

impl Tensors {
    fn new(table: &Table, device: &Device) -> Self {
        let [rows, cols] = table.shape;
        let matrix = || random([rows, cols], table.dtype, device);
        let vector = || random([cols], table.dtype, device);
        let (x, r, w, b) = (matrix(), matrix(), vector(), vector());
        let mut rms = RmsNormConfig::new(cols).with_epsilon(f64::from(EPS)).init(device);
        let mut next = rms.clone();
        rms.gamma = Param::from_tensor(w.clone());
        next.gamma = Param::from_tensor(b.clone());
        let mut layer = LayerNormConfig::new(cols).with_epsilon(f64::from(EPS)).init(device);
        layer.gamma = Param::from_tensor(w.clone());
        layer.beta = Some(Param::from_tensor(b.clone()));
        Tensors { x, r, w, b, rms, next, layer }
    }

    fn rms_norm(&self) -> Tensor<2> {
        rmsnorm_burn::rms_norm(self.x.clone(), self.w.clone(), f64::from(EPS))
    }

    fn layer_norm(&self) -> Tensor<2> {
        rmsnorm_burn::layer_norm(self.x.clone(), self.w.clone(), Some(self.b.clone()), f64::from(EPS))
    }

    fn add_rms_norm(&self) -> (Tensor<2>, Tensor<2>) {
        rmsnorm_burn::add_rms_norm(self.x.clone(), self.r.clone(), self.w.clone(), f64::from(EPS))
    }

    fn rms_norm_add_rms_norm(&self) -> (Tensor<2>, Tensor<2>) {
        let (w, next) = (self.w.clone(), self.b.clone());
        rmsnorm_burn::rms_norm_add_rms_norm(self.x.clone(), self.r.clone(), w, next, f64::from(EPS))
    }

    fn their_rms_norm(&self) -> Tensor<2> {
        self.rms.forward(self.x.clone())
    }

    fn their_layer_norm(&self) -> Tensor<2> {
        self.layer.forward(self.x.clone())
    }

    fn their_add_rms_norm(&self) -> (Tensor<2>, Tensor<2>) {
        let h = self.x.clone() + self.r.clone();
        (self.rms.forward(h.clone()), h)
    }

    fn their_rms_norm_add_rms_norm(&self) -> (Tensor<2>, Tensor<2>) {
        let h = self.r.clone() + self.rms.forward(self.x.clone());
        (self.next.forward(h.clone()), h)
    }
}

fn compare<T: Element + burn::tensor::Element>(table: &Table) -> Result<(), Box<dyn Error>> {
    let plain = Tensors::new(table, &table.device);
    agree(&plain)?;
    table.print(
        "rms_norm forward",
        2,
        &[case("rmsnorm_burn::rms_norm", || plain.rms_norm()), case("burn::nn::RmsNorm", || plain.their_rms_norm())],
    )?;
    table.print(
        "layer_norm forward",
        2,
        &[
            case("rmsnorm_burn::layer_norm", || plain.layer_norm()),
            case("burn::nn::LayerNorm", || plain.their_layer_norm()),
        ],
    )?;
    table.print(
        "residual + rms_norm forward",
        4,
        &[
            case("rmsnorm_burn::add_rms_norm", || plain.add_rms_norm()),
            case("+, burn::nn::RmsNorm", || plain.their_add_rms_norm()),
        ],
    )?;
    table.print(
        "two rms_norms around a residual, forward",
        4,
        &[
            case("rmsnorm_burn::rms_norm_add_rms_norm", || plain.rms_norm_add_rms_norm()),
            case("burn::nn::RmsNorm, +, burn::nn::RmsNorm", || plain.their_rms_norm_add_rms_norm()),
        ],
    )?;
    // Keeps y, which fusion would not write otherwise.
    let kept = |y: Tensor<2>| (y.clone(), y.backward());
    let tracked = Tensors::new(table, &table.device.clone().autodiff());
    table.print(
        "rms_norm forward + backward",
        5,
        &[
            case("rmsnorm_burn::rms_norm", || kept(tracked.rms_norm())),
            case("burn::nn::RmsNorm", || kept(tracked.their_rms_norm())),
        ],
    )?;
    table.print(
        "layer_norm forward + backward",
        5,
        &[
            case("rmsnorm_burn::layer_norm", || kept(tracked.layer_norm())),
            case("burn::nn::LayerNorm", || kept(tracked.their_layer_norm())),
        ],
    )?;
    let both = |(y, h): (Tensor<2>, Tensor<2>)| (y.clone(), h.clone(), (y + h).backward());
    table.print(
        "residual + rms_norm forward + backward, both results used",
        9,
        &[
            case("rmsnorm_burn::add_rms_norm", || both(tracked.add_rms_norm())),
            case("+, burn::nn::RmsNorm", || both(tracked.their_add_rms_norm())),
        ],
    )?;
    table.print(
        "two rms_norms around a residual, forward + backward, both results used",
        9,
        &[
            case("rmsnorm_burn::rms_norm_add_rms_norm", || both(tracked.rms_norm_add_rms_norm())),
            case("burn::nn::RmsNorm, +, burn::nn::RmsNorm", || both(tracked.their_rms_norm_add_rms_norm())),
        ],
    )?;
    if table.is_cpu() { apart::<T>(table, &plain, &tracked) } else { Ok(()) }
}

/// Times forward and backward of an RMS norm without burn, and burn's engine without the norm.
fn apart<T: Element + burn::tensor::Element>(
    table: &Table,
    plain: &Tensors,
    tracked: &Tensors,
) -> Result<(), Box<dyn Error>> {
    let [rows, cols] = table.shape;
    let xs = plain.x.to_data().try_to_vec::<T>()?;
    let dys = plain.r.to_data().try_to_vec::<T>()?;
    let ws = plain.w.to_data().try_to_vec::<T>()?;
    let (backend, norm) = (CpuBackend::new(), NormSpec::rms(rows, cols, EPS));
    let forward = || backend.forward_vec(&norm, ForwardInputs::<T>::new(&xs).weight(&ws), &[Name::Rstd]);
    let (reused, rstd) = (RefCell::new(forward()?.y), forward()?.rstd);
    let backward = || {
        let inputs = BackwardInputs::<T>::new(&dys, &xs, &rstd).weight(&ws);
        backend.backward_vec(&norm, inputs, &[Name::Dweight])
    };
    table.print(
        "of rms_norm forward, without burn",
        2,
        &[
            case("the kernel, into memory that is there", || {
                let mut y = reused.borrow_mut();
                backend.forward(&norm, Forward::new(&xs, &mut *y).weight(&ws))
            }),
            case("the kernel, into new memory", forward),
        ],
    )?;
    table.print(
        "of rms_norm forward + backward, told apart",
        5,
        &[
            case("the kernels, into new memory", || (forward(), backward())),
            // An operation with a gradient and no work: the graph, ones for the result, a gradient.
            case("burn's engine: reshape of x, backward", || tracked.x.clone().reshape([rows * cols]).backward()),
        ],
    )?;
    Ok(())
}

/// Checks that our norms and burn's give equal results up to a few roundings of x_hat, so that the
/// comparison is fair.
fn agree(tensors: &Tensors) -> Result<(), Box<dyn Error>> {
    let unit = FloatDType::from(tensors.x.dtype()).finfo().epsilon;
    for (ours, theirs) in [
        (tensors.rms_norm(), tensors.their_rms_norm()),
        (tensors.layer_norm(), tensors.their_layer_norm()),
        (tensors.add_rms_norm().0, tensors.their_add_rms_norm().0),
        (tensors.rms_norm_add_rms_norm().0, tensors.their_rms_norm_add_rms_norm().0),
    ] {
        let (ours, theirs) = (ours.into_data(), theirs.into_data());
        let largest = theirs.iter::<f64>().fold(0f64, |largest, theirs| largest.max(theirs.abs()));
        // False for NaN.
        let is_close = |(ours, theirs): (f64, f64)| (ours - theirs).abs() <= 4.0 * unit * largest;
        if !ours.iter::<f64>().zip(theirs.iter::<f64>()).all(is_close) {
            return Err(format!("results of {:?} differ, the largest is {largest}", tensors.x.dtype()).into());
        }
    }
    Ok(())
}
