//! Measures calls in turn, and prints their times.

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result};

/// The time for all cases of a table, after each case has had each turn twice.
const PER_TABLE: Duration = Duration::from_millis(1100);
/// The same on a GPU, where each case is measured in two ways and samples vary less.
#[cfg(feature = "cuda")]
const PER_TABLE_ON_GPU: Duration = Duration::from_millis(450);

/// A measured call.
pub struct Case<'a> {
    pub name: &'static str,
    pub call: Box<dyn Fn() -> Result<()> + 'a>,
}

pub fn case<'a, T>(name: &'static str, call: impl Fn() -> Result<T> + 'a) -> Case<'a> {
    Case { name, call: Box::new(move || call().map(|made| drop(black_box(made)))) }
}

/// Measures and prints, or only calls.
pub struct Table {
    pub is_check: bool,
    pub shape: [usize; 2],
    pub dtype: DType,
    pub device: Device,
}

impl Table {
    /// Prints calls that move `tensors` tensors of x's size, relative to the first case.
    pub fn print(&self, title: &str, tensors: usize, cases: &[Case<'_>]) -> Result<()> {
        if self.is_check {
            cases.iter().try_for_each(|case| (case.call)())?;
            return self.device.synchronize();
        }
        let [rows, cols] = self.shape;
        println!("{title}, {:?} {rows}x{cols}", self.dtype);
        let calls = if rows == 1 || !self.device.is_cpu() { 100 } else { 1 };
        let whole = in_turn(cases, self.budget(), |case| {
            let start = Instant::now();
            for _ in 0..calls {
                (case.call)()?;
            }
            self.device.synchronize()?;
            Ok(Some(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)))
        })?;
        self.print_samples("", tensors, cases, whole);
        match &self.device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let behind = crate::cuda::Behind::new(device)?;
                let on_device = in_turn(cases, self.budget(), |case| behind.sample(&case.call))?;
                self.print_samples("on the GPU: ", tensors, cases, on_device);
            }
            _ => {}
        }
        Ok(())
    }

    fn budget(&self) -> Duration {
        match self.device {
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => PER_TABLE_ON_GPU,
            _ => PER_TABLE,
        }
    }

    /// Prints medians, their ratio to the first, and GB/s; or that a case has no samples.
    fn print_samples(&self, what: &str, tensors: usize, cases: &[Case<'_>], mut samples: Vec<Vec<f64>>) {
        let [rows, cols] = self.shape;
        let bytes = (tensors * rows * cols * self.dtype.size_in_bytes()) as f64;
        for samples in &mut samples {
            samples.sort_by(f64::total_cmp);
        }
        let median = |samples: &[f64]| samples.get(samples.len() / 2).copied();
        let first = samples.first().and_then(|samples| median(samples));
        for (case, samples) in cases.iter().zip(&samples) {
            let name = format!("{what}{}", case.name);
            let (Some(median), Some(least)) = (median(samples), samples.first()) else {
                println!("    {name:54} not measured: the host enqueues it too slowly");
                continue;
            };
            let ratio = first.map_or_else(|| "-".to_owned(), |first| format!("{:.2} x", median / first));
            let gbs = bytes / median / 1e3;
            println!("    {name:54} {median:>10.1} us  least {least:>10.1}  {ratio:>8}  {gbs:>6.1} GB/s");
        }
    }
}

/// The samples of each case, in microseconds a call, if it could be measured.
fn in_turn<'a>(
    cases: &[Case<'a>],
    budget: Duration,
    sample: impl Fn(&Case<'a>) -> Result<Option<f64>>,
) -> Result<Vec<Vec<f64>>> {
    let mut samples = vec![Vec::new(); cases.len()];
    let start = Instant::now();
    let mut round = 0;
    while round <= 2 * cases.len() || (start.elapsed() < budget && round < 100) {
        // A different first case each time, and back and forth: each case finds the memory that the
        // previous one freed.
        for turn in 0..cases.len() {
            let turn = if round % 2 == 0 { turn } else { cases.len() - 1 - turn };
            let index = (turn + round / 2) % cases.len();
            let sample = sample(&cases[index])?;
            // The first round warms memory and caches.
            if round > 0 {
                samples[index].extend(sample);
            }
        }
        round += 1;
    }
    Ok(samples)
}
