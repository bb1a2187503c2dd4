//! Lanes: work on items of a list, a few at a time, in their order.
//!
//! Lists begin with the items that take longest, since a long item that starts last runs alone.

use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use anyhow::{Result, bail};

/// Lanes for work that keeps a CPU busy. `ci` is made for machines with two CPUs.
pub(crate) const BUSY: usize = 2;

/// Lanes for programs that sleep or wait for most of their time: those under the preload library
/// use a CPU for a third of it.
pub(crate) const WAITING: usize = 3;

/// Calls `work` for each item, on as many threads as there are lanes. A lane ends at its first
/// error. The first lane's error is returned before those of later ones, once all have ended.
pub(crate) fn each<T: Sync>(lanes: usize, items: &[T], work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    let lane = || -> Result<()> {
        while let Some(item) = items.get(next.fetch_add(1, Relaxed)) {
            work(item)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..lanes).map(|_| scope.spawn(lane)).collect();
        let first = lane();
        others.into_iter().fold(first, |result, other| result.and(joined(other)))
    })
}

/// Runs two parts of a step side by side. Returns the first part's error before the second's.
pub(crate) fn both<A, B: Send>(
    first: impl FnOnce() -> Result<A>,
    second: impl FnOnce() -> Result<B> + Send,
) -> Result<(A, B)> {
    thread::scope(|scope| {
        let second = scope.spawn(second);
        let first = first();
        let second = joined(second);
        Ok((first?, second?))
    })
}

fn joined<T>(lane: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    lane.join().unwrap_or_else(|_| bail!("a panic in another lane"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Barrier, Mutex};

    #[test]
    fn each_item_is_worked_on_once() {
        for lanes in [1, 2, 4, 9] {
            let done = Mutex::new(Vec::new());
            each(lanes, &[1, 2, 3, 4, 5], |item| {
                done.lock().unwrap().push(*item);
                Ok(())
            })
            .unwrap();
            let mut done = done.into_inner().unwrap();
            done.sort_unstable();
            assert_eq!(done, [1, 2, 3, 4, 5]);
        }
    }

    #[test]
    fn an_error_of_any_lane_is_returned() {
        for bad in [1, 2, 3] {
            let answer = each(3, &[1, 2, 3], |item| if *item == bad { bail!("item {item}") } else { Ok(()) });
            assert_eq!(answer.unwrap_err().to_string(), format!("item {bad}"));
        }
    }

    /// Each item waits for the others, so fewer lanes would not end.
    #[test]
    fn lanes_work_side_by_side() {
        let barrier = Barrier::new(3);
        each(3, &[(); 3], |()| {
            barrier.wait();
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn an_error_of_either_part_is_returned() {
        let part = |is_good: bool| move || if is_good { Ok(1) } else { bail!("it is broken") };
        assert_eq!(both(part(true), part(true)).unwrap(), (1, 1));
        assert!(both(part(false), part(true)).is_err() && both(part(true), part(false)).is_err());
    }
}
