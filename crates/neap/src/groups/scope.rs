//! Futures that are in a group, whichever thread polls them.
//!
//! # Design
//! A thread enters the group when it polls the future, and leaves it when the poll returns. Between
//! polls no thread is in the group, so a task may move, and other tasks of the thread are not charged.

use super::{Entered, Group};
use core::pin::Pin;
use core::task::{Context, Poll};

impl Group {
    /// Has a future's allocations charged to the group: each thread that polls it is in the group
    /// meanwhile. A group that is deleted leaves them to its heir.
    ///
    /// Works with any executor: `tokio::spawn(tenant.scope(handle(request)))`. Tasks that the future
    /// spawns are on their own.
    ///
    /// ```
    /// #[global_allocator]
    /// static ALLOCATOR: neap::Neap = neap::Neap;
    ///
    /// use core::pin::pin;
    /// use core::task::{Context, Waker};
    /// use neap::groups::Group;
    ///
    /// let query = Group::create("queries/19")?;
    /// let rows = query.scope(async { std::hint::black_box(vec![0_u8; 1 << 20]) });
    /// let rows = pin!(rows).poll(&mut Context::from_waker(Waker::noop()));
    /// assert!(query.used()? >= 1 << 20);
    /// drop(rows);
    /// assert!(query.used()? < 1 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub const fn scope<F: Future>(self, future: F) -> Scope<F> {
        Scope { group: self, future }
    }
}

/// A future that is in a group while it is polled: [`Group::scope`].
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct Scope<F> {
    group: Group,
    future: F,
}

impl<F: Future> Future for Scope<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let group = self.group;
        // SAFETY: the future is pinned as the whole is: it is not moved, and `Scope` has no `Drop`.
        let future = unsafe { self.map_unchecked_mut(|scope| &mut scope.future) };
        // Without memory for the guard the poll is not charged.
        let _inside = Entered::new(group.0).ok();
        future.poll(context)
    }
}
