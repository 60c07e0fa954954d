//! Tuning tables, shared by all backends of rmsnorm. Each backend defines the numbers of a rung and
//! checks that they are legal.
//!
//! | here | role |
//! |---|---|
//! | [`table`] | a table as data: ladders of rungs, and rungs of named numbers |
//! | [`file`](mod@file) | the file of a table: its device, its kernels, its date and its rungs |
//! | [`choice`] | selects the table: `RMSNORM_TUNING`, the cache folder, or the built-in one |
//! | [`folder`] | path of the user's cache folder |
//! | [`tunable`] | the trait of backends that `rmsnorm tune` can measure |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod choice;
pub mod file;
pub mod folder;
pub mod table;
pub mod tunable;

pub use choice::{Chosen, TuningSource, choose};
pub use file::Identity;
pub use table::{Entry, Rung, Table};
pub use tunable::{Calls, Kind, Slot, Tunable, VALUE};

use std::sync::{Mutex, PoisonError};

/// Tables that live as long as the process, each distinct table once. They are leaked, not counted:
/// a process opens a few backends only, and plans copy references to tables freely.
#[derive(Debug)]
pub struct Kept<T: 'static>(Mutex<Vec<&'static T>>);

impl<T: PartialEq> Kept<T> {
    /// An empty set.
    pub const fn new() -> Self {
        Kept(Mutex::new(Vec::new()))
    }

    /// The kept table that equals `table`; keeps `table` if there is none.
    pub fn keep(&self, table: T) -> &'static T {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kept.iter().find(|known| ***known == table) {
            return known;
        }
        let table = Box::leak(Box::new(table));
        kept.push(table);
        table
    }
}

impl<T: PartialEq> Default for Kept<T> {
    fn default() -> Self {
        Kept::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_tables_are_kept_once() {
        let kept = Kept::new();
        let (one, again, other) = (kept.keep(vec![1]), kept.keep(vec![1]), kept.keep(vec![2]));
        assert!(std::ptr::eq(one, again) && !std::ptr::eq(one, other));
    }
}
