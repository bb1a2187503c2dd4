//! Futures whose allocations are charged to a group, on any thread that polls them.
//!
//! # Design
//! A thread enters the group when it polls the future, and leaves it when the poll returns. Between
//! polls no thread is in the group. So a task may move to another thread, and other tasks of a
//! thread are not charged to the group.

use super::{Entered, Group};
use core::pin::Pin;
use core::task::{Context, Poll};

impl Group {
    /// Wraps a future, so that its allocations are charged to the group.
    ///
    /// A thread is in the group while it polls the future. After the group's deletion its heir is
    /// charged.
    ///
    /// The result works with any executor: `tokio::spawn(tenant.scope(handle(request)))`. Tasks
    /// that the future spawns are not in the group.
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

/// A future that is in a group while a thread polls it. [`Group::scope`] returns it.
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
        // SAFETY: `future` is structurally pinned. No code moves it out of a pinned `Scope`, and
        // `Scope` has no `Drop`. `Scope` is `Unpin` only if `F` is.
        let future = unsafe { self.map_unchecked_mut(|scope| &mut scope.future) };
        // If there is no memory for the guard, the group is not charged for allocations of this
        // poll.
        let _inside = Entered::new(group.0).ok();
        future.poll(context)
    }
}
