//! The progress bar of long work: on a terminal only, so that logs and pipes stay clean.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on stderr, or nothing where stderr is no terminal. Vanishes when dropped.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar with this label; its length comes with the first [`set`](Self::set).
    pub fn new(label: &'static str) -> Self {
        let target = if stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target).with_message(label);
        // A template that does not parse would be seen at once; the default style is no worse than an error here.
        if let Ok(style) = ProgressStyle::with_template("{msg} [{wide_bar}] {pos}/{len} {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Progress(bar)
    }

    /// `done` of `total` steps are over.
    pub fn set(&self, done: usize, total: usize) {
        self.0.set_length(total as u64);
        self.0.set_position(done as u64);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
