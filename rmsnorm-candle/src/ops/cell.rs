//! A value that one pass leaves for a later one.

use std::sync::{Mutex, PoisonError};

/// Holds a value from `put` to `take`. A panic while it is locked leaves a whole value.
pub(super) struct Cell<T>(Mutex<Option<T>>);

impl<T> Cell<T> {
    pub(super) const fn new() -> Self {
        Cell(Mutex::new(None))
    }

    pub(super) fn put(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    pub(super) fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
