//! The progress bar. It is drawn on terminals only, so that logs and pipes hold no control
//! characters.

use std::borrow::Cow;
use std::io::{IsTerminal, stderr};
use std::sync::LazyLock;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// All bars, each on a line of its own.
static BARS: LazyLock<MultiProgress> = LazyLock::new(|| {
    let is_shown = stderr().is_terminal();
    MultiProgress::with_draw_target(if is_shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() })
});

/// A bar on stderr, or nothing if stderr is not a terminal. It is cleared when dropped.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar with this label. The first [`set`](Self::set) gives its length.
    pub fn new(label: impl Into<Cow<'static, str>>) -> Self {
        let bar = BARS.add(ProgressBar::no_length().with_message(label));
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

/// Hides all bars while `print` writes.
pub fn hidden<T>(print: impl FnOnce() -> T) -> T {
    BARS.suspend(print)
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
