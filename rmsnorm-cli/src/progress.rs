//! The progress bar. It is drawn on terminals only, so that logs and pipes hold no control
//! characters.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on stderr, or nothing if stderr is not a terminal. It is cleared when dropped.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar with this label. The first [`set`](Self::set) gives its length.
    pub fn new(label: &'static str) -> Self {
        let target = if stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target).with_message(label);
        // The template is valid; if it were not, the default style would be used.
        if let Ok(style) = ProgressStyle::with_template("{msg} [{wide_bar}] {pos}/{len} {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Progress(bar)
    }

    /// Shows that `done` of `total` steps are done.
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
