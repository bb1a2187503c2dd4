//! LRU lists for C: objects with a link inside, by group and node.
//!
//! C functions over [`RawList`]. A walk calls functions of the C program. It calls `isolate` while
//! it holds the lock of the items.

use crate::error::{Error, answer};
use crate::group::group;
use crate::object::{Kind, Object};
use core::ffi::{c_int, c_uint, c_void};
use core::ptr::NonNull;
use neap::lru::{By, Item, LruStatus, RawList};
use neap::reclaim::ShrinkerId;

/// A list in C's memory, which is closed when it is destroyed.
pub(crate) struct Open(RawList);

/// `neap_list`.
pub(crate) type List = Object<Open>;

impl Kind for Open {
    const MARK: u64 = u64::from_ne_bytes(*b"neapList");
}

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: the thread that destroys the list promises by the header's contract that no
        // thread uses it any more.
        unsafe { self.0.close() };
    }
}

type Isolate = unsafe extern "C" fn(*mut Item, *mut c_void) -> c_int;
type Dispose = unsafe extern "C" fn(*mut Item, *mut c_void);

/// `neap_walked`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Walked {
    pub(crate) scanned: u64,
    pub(crate) removed: u64,
    pub(crate) stopped: u64,
}

/// Verdicts in the order of their numbers.
pub(crate) const VERDICTS: [LruStatus; 5] =
    [LruStatus::Removed, LruStatus::Rotate, LruStatus::Skip, LruStatus::Retry, LruStatus::Stop];

/// The item at an address; `None` if no item can be there.
fn item(item: *mut Item) -> Option<NonNull<Item>> {
    NonNull::new(item).filter(|item| item.is_aligned())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_list_init(list: *mut List, flags: c_uint, shrinker: u64) -> c_int {
    let make = || {
        let list = match (flags, shrinker) {
            (0, 0) => RawList::open(By::RootAlone)?,
            (2, 0) => RawList::open(By::Group)?,
            (2, shrinker) => RawList::open_for(ShrinkerId::from_bits(shrinker))?,
            _ => return Err(Error::Argument),
        };
        Ok(Open(list))
    };
    // SAFETY: by the header's contract, `list` is null, misaligned, or memory of the object's size
    // that no other thread uses during the call.
    unsafe { Object::make(list, make) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_list_destroy(list: *mut List) -> c_int {
    // SAFETY: by the header's contract, `list` is null, misaligned, or an object that no other
    // thread uses any more.
    unsafe { Object::destroy(list) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_list_add(list: *const List, number: u64, node: c_uint, at: *mut Item) -> c_int {
    let add = || {
        // SAFETY: by the header's contract, `list` is null, misaligned, or an object that no thread
        // destroys during the call.
        let list: &Open = unsafe { Object::value(list) }.ok_or(Error::Argument)?;
        let (group, item) = (group(number)?, item(at).ok_or(Error::Argument)?);
        // SAFETY: `item` is neither null nor misaligned. By the header's contract it points to an
        // item, and no `isolate` callback calls this function. The item does not move until
        // `neap_list_del` has returned true for it or the `dispose` of a walk has got it.
        Ok(unsafe { list.0.add(group, node as usize, item) }?.into())
    };
    answer(add())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_list_add_by_memory(list: *const List, at: *mut Item) -> c_int {
    let add = || {
        // SAFETY: by the header's contract, `list` is null, misaligned, or an object that no thread
        // destroys during the call.
        let list: &Open = unsafe { Object::value(list) }.ok_or(Error::Argument)?;
        let item = item(at).ok_or(Error::Argument)?;
        // SAFETY: `item` is neither null nor misaligned. By the header's contract it points to an
        // item, and no `isolate` callback calls this function. The item does not move until
        // `neap_list_del` has returned true for it or the `dispose` of a walk has got it.
        Ok(unsafe { list.0.add_by_memory(item) }?.into())
    };
    answer(add())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_list_del(list: *const List, at: *mut Item) -> bool {
    // SAFETY: by the header's contract, `list` is null, misaligned, or an object that no thread
    // destroys during the call.
    let list: Option<&Open> = unsafe { Object::value(list) };
    // SAFETY: `item` is neither null nor misaligned. By the header's contract it points to an item
    // that was not freed, and no `isolate` callback calls this function.
    list.zip(item(at)).is_some_and(|(list, item)| unsafe { list.0.del(item) })
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_list_touch(list: *const List, at: *mut Item) -> bool {
    // SAFETY: by the header's contract, `list` is null, misaligned, or an object that no thread
    // destroys during the call.
    let list: Option<&Open> = unsafe { Object::value(list) };
    // SAFETY: `item` is neither null nor misaligned. By the header's contract it points to an item
    // that was not freed, and no `isolate` callback calls this function.
    list.zip(item(at)).is_some_and(|(list, item)| unsafe { list.0.touch(item) })
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_list_count(list: *const List, number: u64, node: c_uint) -> usize {
    // SAFETY: by the header's contract, `list` is null, misaligned, or an object that no thread
    // destroys during the call.
    let list: Option<&Open> = unsafe { Object::value(list) };
    list.zip(group(number).ok()).map_or(0, |(list, group)| list.0.count(group, node as usize))
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_list_walk(
    list: *const List,
    number: u64,
    node: c_uint,
    most: usize,
    isolate: Option<Isolate>,
    dispose: Option<Dispose>,
    argument: *mut c_void,
    walked: *mut Walked,
) -> c_int {
    let walk = || {
        // SAFETY: by the header's contract, `list` is null, misaligned, or an object that no thread
        // destroys during the call.
        let list: &Open = unsafe { Object::value(list) }.ok_or(Error::Argument)?;
        let (Some(isolate), Some(dispose), group) = (isolate, dispose, group(number)?) else {
            return Err(Error::Argument);
        };
        let isolate = |item: NonNull<Item>| {
            // SAFETY: by the header's contract, `isolate` accepts each item of the list and
            // `argument`.
            let verdict = unsafe { isolate(item.as_ptr(), argument) };
            // An invalid verdict leaves the item where it is.
            usize::try_from(verdict).ok().and_then(|verdict| VERDICTS.get(verdict).copied()).unwrap_or(LruStatus::Skip)
        };
        // SAFETY: by the header's contract, `dispose` accepts each item of the list and `argument`.
        let dispose = |item: NonNull<Item>| unsafe { dispose(item.as_ptr(), argument) };
        // SAFETY: by the header's contract, `isolate` calls no function of neap and does not wait
        // or allocate. `dispose` handles each item that was taken off.
        let done = unsafe { list.0.walk(group, node as usize, most, isolate, dispose) };
        if !walked.is_null() && walked.is_aligned() {
            let [scanned, removed, stopped] = [done.scanned, done.removed, usize::from(done.stopped)].map(|n| n as u64);
            // SAFETY: `walked` is neither null nor misaligned, so it is writable by the header's
            // contract.
            unsafe { walked.write(Walked { scanned, removed, stopped }) };
        }
        Ok(0)
    };
    answer(walk())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_item_is_linked(at: *const Item) -> bool {
    // SAFETY: the pointer is neither null nor misaligned. By the header's contract it is an item.
    item(at.cast_mut()).is_some_and(|item| unsafe { item.as_ref() }.is_linked())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_item_leave_hands(at: *mut Item) -> bool {
    // SAFETY: the pointer is neither null nor misaligned. By the header's contract it is an item.
    item(at).is_some_and(|item| unsafe { item.as_ref() }.leave_hands())
}
