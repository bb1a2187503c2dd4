//! Events of groups for closures and for async programs.
//!
//! # Concurrency
//! A closure lives until its handle is dropped and no call of the closure runs. A call may drop the
//! handle of its own closure. Dropping the handle elsewhere waits until a running call has
//! returned.

extern crate std;

use super::{Event, EventDelta, Group, Heard, Listener, NotSubscribed};
use core::future::poll_fn;
use core::panic::AssertUnwindSafe;
use core::ptr::with_exposed_provenance;
use core::task::{Context, Poll, Waker};
use std::panic::catch_unwind;
use std::sync::{Arc, Mutex, PoisonError};

impl Group {
    /// Calls a closure at events of the group and those below it, until the returned handle is
    /// dropped or the group is gone. A last call reports that the group is gone.
    ///
    /// neap's thread calls the closure. Where neap can have no thread,
    /// [`Mm::tick`](crate::mm::Mm::tick) does. Only one thread calls it at a time. The closure may
    /// do anything. A panic ends only the call in which it happens.
    ///
    /// ```
    /// use neap::groups::{Bound, Event, Group};
    /// use std::sync::mpsc::channel;
    ///
    /// let tenant = Group::create("listened")?;
    /// tenant.set(Bound::Max, 4096)?;
    /// let (to, from) = channel();
    /// let _listening = tenant.listen(&[Event::Refused], move |happened| _ = to.send(happened))?;
    /// assert!(tenant.charge(8192).is_err());
    /// assert_eq!(from.recv()?.event, Some((Event::Refused, 1)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`NotSubscribed`].
    pub fn listen<F>(self, events: &[Event], listener: F) -> Result<Listening, NotSubscribed>
    where
        F: Fn(EventDelta) + Send + Sync + 'static,
    {
        let listener = Arc::new(listener);
        let context = Arc::as_ptr(&listener).expose_provenance();
        // The closure is dropped after the subscription: fields are dropped in their order.
        Ok(Listening { _heard: self.subscribe(events, Listener::Callback(call::<F>, context))?, _listener: listener })
    }

    /// Returns a sequence of the events of the group and those below it, from now on.
    ///
    /// If several events of one kind happen between two polls, a poll returns them as one, with
    /// their number. So the sequence needs little memory, however seldom the program polls it.
    ///
    /// ```no_run
    /// # async fn watch() -> Result<(), Box<dyn std::error::Error>> {
    /// use neap::groups::{Event, Group};
    ///
    /// let tenant = Group::find("tenant/acme")?;
    /// let mut events = tenant.events(&[Event::High, Event::PressureCritical])?;
    /// while let Some(happened) = events.next().await {
    ///     println!("{tenant}: {:?}", happened.event);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`NotSubscribed`].
    pub fn events(self, events: &[Event]) -> Result<Events, NotSubscribed> {
        let waiting: Arc<Mutex<Waiting>> = Arc::default();
        let told = waiting.clone();
        let listening = self.listen(events, move |happened| tell(&told, happened))?;
        Ok(Events { group: self, waiting, has_ended: false, _listening: listening })
    }
}

/// A subscription of a closure. Dropping it ends the subscription, and waits for a running call. A
/// drop inside the closure itself does not wait.
#[must_use = "the closure is called no more when this is dropped"]
pub struct Listening {
    _heard: Heard,
    _listener: Arc<dyn Fn(EventDelta) + Send + Sync>,
}

impl core::fmt::Debug for Listening {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("Listening").field(&self._heard).finish()
    }
}

/// Calls the closure at the address `context`.
fn call<F: Fn(EventDelta)>(context: usize, happened: EventDelta) {
    let listener = with_exposed_provenance::<F>(context);
    // SAFETY: `Arc::as_ptr` returned the address, for a closure of the type `F`. `Listening` keeps
    // one reference until no further call begins. This call takes another one, so the closure
    // outlives the call.
    let listener = unsafe {
        Arc::increment_strong_count(listener);
        Arc::from_raw(listener)
    };
    // The panic hook has reported a panic. Dropping its payload could panic again.
    let _ = catch_unwind(AssertUnwindSafe(|| listener(happened))).map_err(core::mem::forget);
}

/// Events for which neap has called the closure, and which no poll has returned yet.
#[derive(Default)]
struct Waiting {
    numbers: [u64; Event::ALL.len()],
    is_gone: bool,
    waker: Option<Waker>,
}

fn tell(waiting: &Mutex<Waiting>, happened: EventDelta) {
    let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
    match happened.event {
        Some((event, number)) => waiting.numbers[event as usize] += number,
        None => waiting.is_gone = true,
    }
    let waker = waiting.waker.take();
    drop(waiting);
    waker.inspect(Waker::wake_by_ref);
}

/// The events of a group as they happen. [`Group::events`] returns this.
///
/// With the feature `stream` it is a `Stream` of the crate `futures-core`.
#[derive(Debug)]
pub struct Events {
    group: Group,
    waiting: Arc<Mutex<Waiting>>,
    has_ended: bool,
    _listening: Listening,
}

impl core::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Waiting")
            .field("numbers", &self.numbers)
            .field("is_gone", &self.is_gone)
            .finish_non_exhaustive()
    }
}

impl Events {
    /// Waits for the next event. The last one has no [`EventDelta::event`]: the group is gone.
    /// `None` after that. No event is lost if the future is dropped.
    pub async fn next(&mut self) -> Option<EventDelta> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Returns the next event, or has the task woken when there is one.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<EventDelta>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let waker = context.waker().clone();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let event = Event::ALL.into_iter().find(|event| waiting.numbers[*event as usize] > 0);
        let event = event.map(|event| (event, core::mem::take(&mut waiting.numbers[event as usize])));
        if event.is_none() && !waiting.is_gone {
            waiting.waker = Some(waker);
            return Poll::Pending;
        }
        self.has_ended = event.is_none();
        Poll::Ready(Some(EventDelta { group: self.group.id(), event }))
    }
}

#[cfg(feature = "stream")]
impl futures_core::Stream for Events {
    type Item = EventDelta;

    fn poll_next(self: core::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<EventDelta>> {
        self.get_mut().poll_next(context)
    }
}
