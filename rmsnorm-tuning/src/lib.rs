//! What the backends of rmsnorm share of tuning. What stands on a rung, and what of it is legal, is a backend's own.
//!
//! | here | role |
//! |---|---|
//! | [`table`] | a table as data: ladders of rungs, whose entries are named numbers |
//! | [`file`](mod@file) | the file of a table: for which device and kernels it is, when it was made, its rungs |
//! | [`choice`] | which table a backend uses: `RMSNORM_TUNING`, the folder of caches, or the built-in one |
//! | [`folder`] | where a user's caches are |
//! | [`tunable`] | what `rmsnorm tune` asks of a backend |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod choice;
pub mod file;
pub mod folder;
pub mod table;
pub mod tunable;

pub use choice::{Chosen, Source, choose};
pub use file::Identity;
pub use table::{Entry, Rung, Table};
pub use tunable::{Calls, Kind, Slot, Tunable, VALUE};

use std::sync::{Mutex, PoisonError};

/// Tables that plans refer to for as long as the process lives: one of each that differs. A process opens a handful of backends, and
/// plans copy their capabilities freely, so that a table is leaked rather than counted.
#[derive(Debug)]
pub struct Kept<T: 'static>(Mutex<Vec<&'static T>>);

impl<T: PartialEq> Kept<T> {
    /// None yet.
    pub const fn new() -> Self {
        Kept(Mutex::new(Vec::new()))
    }

    /// The table that equals this one, which is kept from now on.
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
