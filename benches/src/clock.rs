//! Samples of the time of a call.

use std::time::{Duration, Instant};

use rmsnorm_core::Error;

use crate::measurable::{Measurable, Mode};

/// The smallest number of samples of a call.
const FEWEST_SAMPLES: usize = 7;

/// Seconds per call, sorted. Without samples every quantile is NaN.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// These samples, in seconds.
    pub fn new(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        Samples(seconds)
    }

    /// The median, in seconds.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The sample below which the fraction `share` of the samples lies, in seconds.
    pub fn quantile(&self, share: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        self.0.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
    }

    /// All samples, shortest first.
    pub fn all(&self) -> &[f64] {
        &self.0
    }
}

/// The number and the duration of samples.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// The number of calls that alternate, at least 1.
    pub turns: usize,
    /// The number of input sets that each call visits.
    pub sets: usize,
    /// Seconds for all samples together. Each call gets at least seven samples.
    pub seconds: f64,
}

/// The measurements of one of the alternating calls.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Seconds per call.
    pub samples: Samples,
    /// The timer of the samples.
    pub mode: Mode,
}

/// The number of calls of `once` seconds in a sample of `seconds`.
pub(crate) fn repeats_in<D: Measurable>(seconds: f64, once: f64) -> usize {
    (seconds / once.max(1e-9)).ceil().clamp(1.0, D::MOST_CALLS as f64) as usize
}

/// Samples several calls in turn, so that a disturbance of the machine affects all of them. Returns
/// one timing per turn.
///
/// `call` gets the device, the number of the turn, and the number of the input set, which grows
/// with every call.
///
/// # Errors
/// The first error of a call.
pub fn alternate<D: Measurable>(
    device: &D,
    sampling: Sampling,
    mut call: impl FnMut(&D, usize, usize) -> Result<(), Error>,
) -> Result<Vec<Timing>, Error> {
    let Sampling { turns, sets, seconds } = sampling;
    let sample_seconds = D::SAMPLE_SECONDS.min(seconds / (turns * FEWEST_SAMPLES) as f64);
    let mut batches = Vec::with_capacity(turns);
    for turn in 0..turns {
        batches.push((device.make_batch(sets, &mut |device, set| call(device, turn, set))?, 1));
    }
    let (start, wake) = (Instant::now(), Duration::from_secs_f64(D::WAKE_SECONDS));
    loop {
        for (turn, (batch, repeats)) in batches.iter_mut().enumerate() {
            let once = device.time(batch, 0..*repeats, &mut |device, set| call(device, turn, set))?;
            *repeats = repeats_in::<D>(sample_seconds, once);
        }
        if start.elapsed() >= wake {
            break;
        }
    }

    let mut samples = vec![Vec::new(); turns];
    let (start, budget) = (Instant::now(), Duration::from_secs_f64(seconds));
    let mut set = 0;
    while start.elapsed() < budget || samples.iter().any(|samples| samples.len() < FEWEST_SAMPLES) {
        for (turn, ((batch, repeats), samples)) in batches.iter().zip(&mut samples).enumerate() {
            samples.push(device.time(batch, set..set + repeats, &mut |device, set| call(device, turn, set))?);
            set += repeats;
        }
    }
    let timing = |((batch, _), samples): (&(D::Batch, usize), _)| Timing {
        samples: Samples::new(samples),
        mode: device.mode(batch),
    };
    Ok(batches.iter().zip(samples).map(timing).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_sorted_samples() {
        let samples = Samples::new(vec![3.0, 1.0, 2.0, 5.0, 4.0]);
        assert_eq!((samples.median(), samples.quantile(0.0), samples.quantile(1.0)), (3.0, 1.0, 5.0));
        assert_eq!(samples.all(), [1.0, 2.0, 3.0, 4.0, 5.0]);
    }

    mod on_the_cpu {
        use super::*;
        use rmsnorm_core::cpu::CpuBackend;

        #[test]
        fn alternate_takes_turns_and_visits_the_sets_in_order() {
            let mut calls = Vec::new();
            let sampling = Sampling { turns: 2, sets: 3, seconds: 0.0 };
            let timings = alternate(&CpuBackend::new(), sampling, |_, turn, set| {
                calls.push((turn, set));
                std::thread::sleep(Duration::from_micros(200));
                Ok(())
            });
            let timings = timings.unwrap();
            assert_eq!(timings.len(), 2);
            for Timing { samples, mode } in timings {
                assert!(samples.all().len() >= FEWEST_SAMPLES && samples.quantile(0.0) >= 200e-6);
                assert_eq!(mode, Mode::Wall);
            }
            // After the warm-up of both, turns alternate and every call gets the next set.
            for (i, pair) in calls[4..].windows(2).enumerate() {
                assert_eq!(pair[0].0, i % 2);
                assert_eq!(pair[1].1, pair[0].1 + 1);
            }
        }

        #[test]
        fn alternate_stops_at_an_error() {
            let sampling = Sampling { turns: 1, sets: 2, seconds: 10.0 };
            let result = alternate(
                &CpuBackend::new(),
                sampling,
                |_, _, set| if set < 5 { Ok(()) } else { Err(Error::EmptyRow) },
            );
            assert!(matches!(result, Err(Error::EmptyRow)));
        }
    }
}
