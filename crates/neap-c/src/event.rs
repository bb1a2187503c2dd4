//! Events of memory groups for C: a listener is a function or an eventfd.
//!
//! C functions over [`Group::subscribe`]. A listener lies in the caller's memory, and stays there
//! until it has ended. neap's thread reads it there without a lock.

use crate::error::{Error, answer};
use crate::group::group;
use crate::object::{Kind, Object};
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_uint, c_void};
use core::ptr::with_exposed_provenance;
use core::sync::atomic::{AtomicU32, Ordering};
use neap::groups::{Event, EventDelta, Group, Heard, Listener};
use neap_os::futex::{self, Sharing};

/// Function that a listener calls.
pub(crate) type Told = extern "C" fn(*mut c_void, u64, c_int, u64);

/// Nanoseconds between two checks of a listener that is being made.
const LOOK: u64 = 100_000;

/// Event number for the end of a group.
pub(crate) const GONE: c_int = -1;

/// A listener.
#[derive(Debug)]
pub(crate) struct Ear {
    told: Option<Told>,
    argument: *mut c_void,
    /// The thread that makes the listener stores the subscription, and the thread that ends the
    /// listener takes it. Callbacks read the other fields.
    heard: UnsafeCell<Option<Heard>>,
    /// The thread that makes the listener stores 1 here after its last access to the listener.
    is_made: AtomicU32,
}

impl Kind for Ear {
    const MARK: u64 = u64::from_ne_bytes(*b"neapEars");
}

/// `neap_listener`.
pub(crate) type Listens = Object<Ear>;

fn events(mask: c_uint) -> Result<([Event; Event::ALL.len()], usize), Error> {
    if mask == 0 || mask >> Event::ALL.len() != 0 {
        return Err(Error::Argument);
    }
    let (mut events, mut count) = (Event::ALL, 0);
    for event in Event::ALL.into_iter().filter(|event| mask >> *event as u32 & 1 == 1) {
        events[count] = event;
        count += 1;
    }
    Ok((events, count))
}

fn tell(context: usize, happened: EventDelta) {
    // SAFETY: `subscribe` was given an aligned listener, which stays at its address until it has
    // ended. Its end waits for this call.
    let Some(ear): Option<&Ear> = (unsafe { Object::value(with_exposed_provenance::<Listens>(context)) }) else {
        return;
    };
    let (event, times) = happened.event.map_or((GONE, 1), |(event, times)| (event as c_int, times));
    if let Some(told) = ear.told {
        told(ear.argument, happened.group.to_bits(), event, times);
    }
}

/// # Safety
/// As for [`neap_group_subscribe`].
unsafe fn subscribe(
    place: *mut Listens,
    number: u64,
    mask: c_uint,
    (told, argument): (Option<Told>, *mut c_void),
    listener: Listener,
) -> c_int {
    // SAFETY: the caller promises that `place` is null, misaligned, or memory that no other thread
    // uses during the call.
    let made = unsafe {
        Object::make(place, || Ok(Ear { told, argument, heard: UnsafeCell::new(None), is_made: AtomicU32::new(0) }))
    };
    if made != 0 {
        return made;
    }
    let subscribe = || {
        let (group, (events, count)): (Group, _) = (group(number)?, events(mask)?);
        // SAFETY: `place` was made above. A thread that ends the listener waits for the store to
        // `is_made`.
        let ear: Option<&Ear> = unsafe { Object::value(place) };
        // From here on the listener may be called. Its end waits for the store to `is_made`, after
        // which this thread does not access it. Otherwise:
        //
        // | this thread | callback |
        // |---|---|
        // | | 1. ends the listener, without a subscription to end |
        // | | 2. the program frees its memory |
        // | 3. stores the subscription | |
        let heard = group.subscribe(&events[..count], listener)?;
        ear.inspect(|ear| {
            // SAFETY: a thread that ends the listener waits for the store to `is_made` below.
            unsafe { *ear.heard.get() = Some(heard) };
            ear.is_made.store(1, Ordering::Release); // Pairs with the Acquire in `neap_group_unsubscribe`.
        });
        Ok(0)
    };
    answer(subscribe().inspect_err(|_| {
        // SAFETY: the subscription failed, so no other thread uses the listener.
        unsafe { Object::destroy(place) };
    }))
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_subscribe(
    listener: *mut Listens,
    number: u64,
    mask: c_uint,
    told: Option<Told>,
    argument: *mut c_void,
) -> c_int {
    if told.is_none() {
        return Error::Argument as c_int;
    }
    // SAFETY: by the header's contract, `listener` is null, misaligned, or memory that no other
    // thread uses during the call, and stays at its address until it has ended.
    unsafe {
        subscribe(listener, number, mask, (told, argument), Listener::Callback(tell, listener.expose_provenance()))
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_subscribe_fd(
    listener: *mut Listens,
    number: u64,
    mask: c_uint,
    descriptor: c_int,
) -> c_int {
    // SAFETY: by the header's contract, `listener` is null, misaligned, or memory that no other
    // thread uses during the call, and stays at its address until it has ended.
    unsafe { subscribe(listener, number, mask, (None, core::ptr::null_mut()), Listener::EventFd(descriptor)) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_unsubscribe(listener: *mut Listens) -> c_int {
    // SAFETY: by the header's contract, `listener` is null, misaligned, or an object that no thread
    // destroys during the call.
    let Some(ear): Option<&Ear> = (unsafe { Object::value(listener) }) else { return Error::Argument as c_int };
    // Acquire pairs with the Release in `subscribe`. The store follows within a few instructions
    // and wakes no waiter, so this loop polls.
    while ear.is_made.load(Ordering::Acquire) == 0 {
        futex::wait(&ear.is_made, 0, Some(LOOK), Sharing::Process);
    }
    // The subscription ends before the object is destroyed: the drop waits for a callback that runs
    // on another thread and reads the object.
    // SAFETY: only the thread that ends the listener uses this field, once `is_made` is 1.
    drop(unsafe { (*ear.heard.get()).take() });
    // SAFETY: by the header's contract, `listener` is null, misaligned, or an object that no other
    // thread uses any more.
    unsafe { Object::destroy(listener) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::zeroed;
    use core::sync::atomic::AtomicBool;
    use core::time::Duration;

    /// A listener is called before its maker has stored the subscription, and its callback ends it.
    #[test]
    fn a_listener_that_is_being_made_ends_when_it_is_made() {
        let (mut memory, ended) = (zeroed::<Listens>(), AtomicBool::new(false));
        let place = memory.as_mut_ptr();
        let none = || {
            Ok(Ear {
                told: None,
                argument: core::ptr::null_mut(),
                heard: UnsafeCell::new(None),
                is_made: AtomicU32::new(0),
            })
        };
        // SAFETY: the memory is a local, and stays until the thread was joined.
        assert_eq!(unsafe { Object::make(place, none) }, 0);
        let address = place.expose_provenance();
        std::thread::scope(|scope| {
            let callback = scope.spawn(|| {
                // SAFETY: the memory is a local, and stays until the thread was joined.
                let answer = unsafe { neap_group_unsubscribe(core::ptr::with_exposed_provenance_mut(address)) };
                ended.store(true, Ordering::Relaxed);
                answer
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!ended.load(Ordering::Relaxed), "before it is made");
            // SAFETY: the object is made above, and stays until the callback has destroyed it.
            let ear: Option<&Ear> = unsafe { Object::value(place) };
            ear.expect("it has not ended").is_made.store(1, Ordering::Release); // Pairs with the Acquire in `neap_group_unsubscribe`.
            assert_eq!(callback.join().ok(), Some(0));
        });
    }
}
