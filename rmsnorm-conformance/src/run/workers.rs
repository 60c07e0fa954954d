//! Runs cases on several threads, and reports them in order.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

/// Applies `make` to each item on `threads` threads, and passes the results to `take` in the order
/// of the items, each as soon as all earlier ones are done. After `take` breaks, no further item is
/// started. With one thread, everything runs on the caller's thread.
pub(crate) fn in_order<T: Send, R: Send, B>(
    items: Vec<T>,
    threads: usize,
    make: impl Fn(T) -> R + Sync,
    mut take: impl FnMut(R) -> ControlFlow<B>,
) -> ControlFlow<B> {
    if threads < 2 {
        return items.into_iter().try_for_each(|item| take(make(item)));
    }
    let (items, (sender, receiver)) = (Mutex::new(items.into_iter().enumerate()), mpsc::channel());
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = |sender: mpsc::Sender<(usize, R)>| {
        while let Some((index, item)) = next() {
            // The receiver is gone: `take` has ended the run.
            if sender.send((index, make(item))).is_err() {
                break;
            }
        }
    };
    thread::scope(|scope| {
        let start = |_: &usize| {
            let (sender, work) = (sender.clone(), &work);
            thread::Builder::new().spawn_scoped(scope, move || work(sender)).is_ok()
        };
        let started = (0..threads).filter(start).count();
        if started == 0 {
            // The system allows no more threads.
            work(sender.clone());
        }
        drop(sender);
        let (mut done, mut turn) = (BTreeMap::new(), 0);
        for (index, made) in receiver {
            done.insert(index, made);
            while let Some(made) = done.remove(&turn) {
                take(made)?;
                turn += 1;
            }
        }
        ControlFlow::Continue(())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn everything_is_taken_in_its_order() {
        for (threads, len) in [(1, 20_u64), (2, 20), (7, 20), (7, 3), (3, 0)] {
            let mut taken = Vec::new();
            let (sender, receiver) = mpsc::channel();
            let (sender, receiver) = (Mutex::new(sender), Mutex::new(receiver));
            let make = |item: u64| {
                // The first item ends after all items that other threads can do in the meantime.
                if threads > 1 && item == 0 {
                    receiver.lock().unwrap().recv().unwrap();
                }
                if item + 1 == len {
                    sender.lock().unwrap().send(()).unwrap();
                }
                item * item
            };
            let flow = in_order((0..len).collect(), threads, make, |made| {
                taken.push(made);
                ControlFlow::<()>::Continue(())
            });
            assert!(flow.is_continue());
            assert_eq!(taken, (0..len).map(|item| item * item).collect::<Vec<_>>(), "{threads} threads");
        }
    }

    /// Each item waits for the others, so one thread alone would never end.
    #[test]
    fn as_many_are_made_at_once_as_there_are_threads() {
        let barrier = Barrier::new(3);
        let mut taken = 0;
        let flow = in_order(
            vec![(); 6],
            3,
            |()| barrier.wait().is_leader(),
            |_| {
                taken += 1;
                ControlFlow::<()>::Continue(())
            },
        );
        assert_eq!((flow, taken), (ControlFlow::Continue(()), 6));
    }

    /// One of two threads waits in item 3, the last one taken, until the other has passed on item
    /// 4, which is kept until the end. All later items wait for that.
    #[test]
    fn none_is_begun_after_the_end() {
        for (threads, expected) in [(1, 4), (2, 7)] {
            let (begun, (go, may_go), (keep, is_kept)) = (AtomicUsize::new(0), mpsc::channel(), mpsc::channel::<()>());
            let (may_go, keep, is_kept) = (Mutex::new(may_go), Mutex::new(Some(keep)), Mutex::new(is_kept));
            let make = |item: usize| {
                begun.fetch_add(1, Ordering::Relaxed);
                match item {
                    3 if threads > 1 => may_go.lock().unwrap().recv().unwrap(),
                    4 => return (item, keep.lock().unwrap().take()),
                    5.. => {
                        go.send(()).unwrap();
                        is_kept.lock().unwrap().recv().unwrap_err();
                    }
                    _ => {}
                }
                (item, None)
            };
            let flow = in_order((0..1000).collect(), threads, make, |(item, _)| {
                if item == 3 { ControlFlow::Break(item) } else { ControlFlow::Continue(()) }
            });
            assert_eq!(flow, ControlFlow::Break(3));
            assert_eq!(begun.load(Ordering::Relaxed), expected, "{threads} threads");
        }
    }
}
