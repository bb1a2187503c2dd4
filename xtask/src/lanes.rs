//! Two lanes: work on items of a list, two at a time, in their order.
//!
//! Many checks wait or use one CPU, and `ci` is made for machines with two.

use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use anyhow::{Result, bail};

/// Calls `work` for each item, on two threads. A lane ends at its first error, which is returned
/// once both have ended.
pub(crate) fn each<T: Sync>(items: &[T], work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    let lane = || -> Result<()> {
        while let Some(item) = items.get(next.fetch_add(1, Relaxed)) {
            work(item)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let second = scope.spawn(lane);
        lane().and(second.join().unwrap_or_else(|_| bail!("a panic in the second lane")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn each_item_is_worked_on_once() {
        let done = Mutex::new(Vec::new());
        each(&[1, 2, 3, 4, 5], |item| {
            done.lock().unwrap().push(*item);
            Ok(())
        })
        .unwrap();
        let mut done = done.into_inner().unwrap();
        done.sort_unstable();
        assert_eq!(done, [1, 2, 3, 4, 5]);
    }

    #[test]
    fn an_error_of_either_lane_is_returned() {
        for bad in [1, 2] {
            let answer = each(&[1, 2], |item| if *item == bad { bail!("item {item}") } else { Ok(()) });
            assert_eq!(answer.unwrap_err().to_string(), format!("item {bad}"));
        }
    }
}
