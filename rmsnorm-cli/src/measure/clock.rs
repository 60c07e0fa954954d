//! Samples of a duration.

use std::time::{Duration, Instant};

use rmsnorm_core::Error;

/// A sample covers at least this long, by repeating the call: the clock's own cost must not show.
const SHORTEST_SAMPLE: f64 = 100e-6;

/// The fewest samples of anything.
const FEWEST_SAMPLES: usize = 7;

/// Seconds a call, sorted.
#[derive(Clone, Debug)]
pub struct Samples(Vec<f64>);

impl Samples {
    fn new(mut seconds: Vec<f64>) -> Self {
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

/// Samples of `N` calls in turn, so that a disturbance of the machine meets all of them.
///
/// `call` gets the number of the turn, below `N`, and that of the input set, which grows with every call.
///
/// # Errors
/// The first error of a call.
pub fn alternate<const N: usize>(
    seconds: f64,
    mut call: impl FnMut(usize, usize) -> Result<(), Error>,
) -> Result<[Samples; N], Error> {
    let mut repeats = [1; N];
    for (turn, repeats) in repeats.iter_mut().enumerate() {
        call(turn, 0)?;
        let once = time(|| call(turn, 1))?;
        *repeats = (SHORTEST_SAMPLE / once.max(1e-9)).ceil().clamp(1.0, 1e6) as usize;
    }
    let mut samples = [const { Vec::new() }; N];
    let (start, budget) = (Instant::now(), Duration::from_secs_f64(seconds));
    let mut set = 0;
    while start.elapsed() < budget || samples.iter().any(|samples| samples.len() < FEWEST_SAMPLES) {
        for (turn, (samples, repeats)) in samples.iter_mut().zip(repeats).enumerate() {
            let all = time(|| (set..set + repeats).try_for_each(|set| call(turn, set)))?;
            set += repeats;
            samples.push(all / repeats as f64);
        }
    }
    Ok(samples.map(Samples::new))
}

fn time(work: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
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

    #[test]
    fn alternate_takes_turns_and_visits_the_sets_in_order() {
        let mut calls = Vec::new();
        let samples = alternate::<2>(0.0, |turn, set| {
            calls.push((turn, set));
            std::thread::sleep(Duration::from_micros(200));
            Ok(())
        });
        assert!(samples.is_ok_and(|samples| samples.iter().all(|samples| samples.all().len() >= FEWEST_SAMPLES)));
        // After the warm-up of both, turns alternate and every call gets the next set.
        for (i, pair) in calls[4..].windows(2).enumerate() {
            assert_eq!(pair[0].0, i % 2);
            assert_eq!(pair[1].1, pair[0].1 + 1);
        }
    }

    #[test]
    fn alternate_stops_at_an_error() {
        let result = alternate::<1>(10.0, |_, set| if set < 5 { Ok(()) } else { Err(Error::EmptyRow) });
        assert!(matches!(result, Err(Error::EmptyRow)));
    }
}
