//! Events of memory groups: who is told of them, by a function or an eventfd.
//!
//! Sits between C and [`Group::subscribe`]. A listener lies in the caller's memory, where it stays until it has ended: what it calls is read there,
//! by neap's thread, without a lock.

use crate::error::{Error, answer};
use crate::group::group;
use crate::object::{Kind, Object};
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_uint, c_void};
use core::ptr::with_exposed_provenance;
use core::sync::atomic::{AtomicU32, Ordering};
use neap::groups::{Event, Group, Happened, Heard, Listener};
use neap_os::futex::{self, Scope};

/// What a listener calls.
pub(crate) type Told = extern "C" fn(*mut c_void, u64, c_int, u64);

/// Nanoseconds between two looks at a listener that is being made.
const LOOK: u64 = 100_000;

/// What happened when the group is gone, which no event is.
pub(crate) const GONE: c_int = -1;

/// A listener.
#[derive(Debug)]
pub(crate) struct Ear {
    told: Option<Told>,
    argument: *mut c_void,
    /// Written by whoever makes it, and by whoever ends it; callbacks read the others.
    heard: UnsafeCell<Option<Heard>>,
    /// 1: written by whoever makes it, who is not to be found here any more.
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

fn tell(context: usize, happened: Happened) {
    // SAFETY: `subscribe` was given a listener that stays there until it has ended, which waits for this.
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
    // SAFETY: as the caller promises.
    let made = unsafe {
        Object::make(place, || Ok(Ear { told, argument, heard: UnsafeCell::new(None), is_made: AtomicU32::new(0) }))
    };
    if made != 0 {
        return made;
    }
    let subscribe = || {
        let (group, (events, count)): (Group, _) = (group(number)?, events(mask)?);
        // SAFETY: made above.
        let ear: Option<&Ear> = unsafe { Object::value(place) };
        // From here on it may be called, and 1. a callback ends the listener 2. while this thread has not said what to end, 3. and the program
        // frees its memory. Therefore 1. waits for the store below, behind which nothing here is touched.
        let heard = group.subscribe(&events[..count], listener)?;
        ear.inspect(|ear| {
            // SAFETY: whoever ends it waits for the store below.
            unsafe { *ear.heard.get() = Some(heard) };
            ear.is_made.store(1, Ordering::Release); // Pairs with the Acquire in `neap_group_unsubscribe`.
        });
        Ok(0)
    };
    answer(subscribe().inspect_err(|_| {
        // SAFETY: nobody else has heard of it.
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
    // SAFETY: as the caller promises.
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
    // SAFETY: as the caller promises.
    unsafe { subscribe(listener, number, mask, (None, core::ptr::null_mut()), Listener::EventFd(descriptor)) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_unsubscribe(listener: *mut Listens) -> c_int {
    // SAFETY: as the caller promises.
    let Some(ear): Option<&Ear> = (unsafe { Object::value(listener) }) else { return Error::Argument as c_int };
    // Acquire pairs with the Release in `subscribe`. That is a few instructions away, and nobody wakes who waits for it.
    while ear.is_made.load(Ordering::Acquire) == 0 {
        futex::wait(&ear.is_made, 0, Some(LOOK), Scope::Process);
    }
    // Before it is no listener any more: a callback that runs elsewhere is waited for, and reads it.
    // SAFETY: only whoever ends it uses this part.
    drop(unsafe { (*ear.heard.get()).take() });
    // SAFETY: as the caller promises.
    unsafe { Object::destroy(listener) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::zeroed;
    use core::sync::atomic::AtomicBool;
    use core::time::Duration;

    /// 1. A listener can be called already. 2. Its callback ends it. 3. Who makes it has not said yet what that ends.
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
        // SAFETY: the memory is this test's, and stays until the thread is back.
        assert_eq!(unsafe { Object::make(place, none) }, 0);
        let address = place.expose_provenance();
        std::thread::scope(|scope| {
            let callback = scope.spawn(|| {
                // SAFETY: as above.
                let answer = unsafe { neap_group_unsubscribe(core::ptr::with_exposed_provenance_mut(address)) };
                ended.store(true, Ordering::Relaxed);
                answer
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!ended.load(Ordering::Relaxed), "before it is made");
            // SAFETY: as above.
            let ear: Option<&Ear> = unsafe { Object::value(place) };
            ear.expect("it has not ended").is_made.store(1, Ordering::Release); // Pairs with the Acquire in `neap_group_unsubscribe`.
            assert_eq!(callback.join().ok(), Some(0));
        });
    }
}
