//! Samples of a duration.

use std::time::{Duration, Instant};

use rmsnorm_core::Error;

use crate::measurable::{Measurable, Mode};

/// The fewest samples of anything.
const FEWEST_SAMPLES: usize = 7;

/// Seconds a call, sorted. Of no samples, every quantile is NaN.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// These samples, in seconds.
    pub fn new(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        Samples(seconds)
    }

    /// The middle sample.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The sample below which this share of all samples lies.
    pub fn quantile(&self, share: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        self.0.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
    }

    /// All samples, shortest first.
    pub fn all(&self) -> &[f64] {
        &self.0
    }
}

/// How much to sample.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Different calls that alternate, at least 1.
    pub turns: usize,
    /// Input sets that each of them visits.
    pub sets: usize,
    /// Seconds of all samples together; there are at least seven of each turn.
    pub seconds: f64,
}

/// What was measured of a turn.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Seconds a call.
    pub samples: Samples,
    /// How they were taken.
    pub mode: Mode,
}

/// Samples of several calls that take turns, so that a disturbance of the machine meets all of them; one timing a turn.
///
/// `call` gets the device to call, the number of the turn and that of the input set, which grows with every call.
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
        let batch = device.make_batch(sets, &mut |device, set| call(device, turn, set))?;
        let once = device.time(&batch, 0..1, &mut |device, set| call(device, turn, set))?;
        let repeats = (sample_seconds / once.max(1e-9)).ceil().clamp(1.0, 1e6) as usize;
        batches.push((batch, repeats));
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
