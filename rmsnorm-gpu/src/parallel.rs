//! Compiles several kernels at once. One kernel takes about a tenth of a second.

use std::num::NonZero;
use std::thread::available_parallelism;

use rayon::ThreadPoolBuilder;
use rayon::iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator};

/// Calls `work` for each item on as many threads as the system offers, or on the caller's thread
/// for one item. The threads end with the call, so a later `fork` loses none. After an error no
/// other item is begun.
///
/// # Errors
/// The first error of `work` to occur.
pub fn try_for_each<T: Sync, E: Send>(items: &[T], work: impl Fn(&T) -> Result<(), E> + Sync) -> Result<(), E> {
    let threads = available_parallelism().map_or(1, NonZero::get).min(items.len());
    if threads < 2 {
        return items.iter().try_for_each(work);
    }
    match ThreadPoolBuilder::new().num_threads(threads).build() {
        Ok(pool) => pool.install(|| items.par_iter().with_max_len(1).try_for_each(&work)),
        // The system refuses another thread.
        Err(_) => items.iter().try_for_each(&work),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Barrier, Mutex};
    use std::thread;

    use super::*;

    #[test]
    fn each_item_is_worked_on_once() {
        for len in [0, 1, 2, 3, 100] {
            let (items, seen) = ((0..len).collect::<Vec<usize>>(), Mutex::new(Vec::new()));
            let Ok(()) = try_for_each(&items, |item| {
                seen.lock().expect("no panic").push(*item);
                Ok::<_, Infallible>(())
            });
            let mut seen = seen.into_inner().expect("no panic");
            seen.sort_unstable();
            assert_eq!(seen, items);
        }
    }

    /// Each item waits for the other, so serial work would hang.
    #[test]
    fn two_items_are_worked_on_at_once() {
        if available_parallelism().map_or(1, NonZero::get) < 2 {
            return;
        }
        let barrier = Barrier::new(2);
        let Ok(()) = try_for_each(&[(), ()], |()| {
            barrier.wait();
            Ok::<_, Infallible>(())
        });
    }

    #[test]
    fn one_item_takes_no_thread() {
        let caller = thread::current().id();
        assert_eq!(try_for_each(&[()], |()| if thread::current().id() == caller { Ok(()) } else { Err(()) }), Ok(()));
    }

    #[test]
    fn a_failure_ends_it() {
        let (items, begun) = ([(); 1000], AtomicUsize::new(0));
        let failed =
            try_for_each(&items, |()| if begun.fetch_add(1, Ordering::Relaxed) == 3 { Err("no") } else { Ok(()) });
        assert_eq!(failed, Err("no"));
        assert!(begun.into_inner() < 1000);
    }
}
