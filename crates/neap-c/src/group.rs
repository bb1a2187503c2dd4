//! Memory groups for C: the tree, bounds, information, and entering.
//!
//! C functions over [`neap::groups`]. A C program names a group by its number. Each function checks
//! the number, and refuses that of a deleted group. Later versions add fields to the structure with
//! a group's information, so the caller passes the size that it knows.

use crate::error::{Error, answer, into, store_known};
use crate::object::{Kind, Object};
use core::ffi::{CStr, c_char, c_int, c_void};
use neap::groups::{Bound, Entered, Event, Group, GroupError, GroupId, Name, payer_at};

/// `neap_group_info`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct GroupInfo {
    pub(crate) group: u64,
    pub(crate) parent: u64,
    pub(crate) name: [u8; 64],
    pub(crate) max_bytes: u64,
    pub(crate) high_bytes: u64,
    pub(crate) low_bytes: u64,
    pub(crate) min_bytes: u64,
    pub(crate) charged_bytes: u64,
    pub(crate) peak_bytes: u64,
    pub(crate) pages_bytes: u64,
    pub(crate) objects_bytes: u64,
    pub(crate) percpu_bytes: u64,
    pub(crate) by_hand_bytes: u64,
    pub(crate) low_events: u64,
    pub(crate) high_events: u64,
    pub(crate) max_events: u64,
    pub(crate) refused_events: u64,
    pub(crate) overcharged_events: u64,
    pub(crate) changed_events: u64,
    pub(crate) children: u64,
    pub(crate) pressure_low_events: u64,
    pub(crate) pressure_medium_events: u64,
    pub(crate) pressure_critical_events: u64,
    pub(crate) local_low_events: u64,
    pub(crate) local_high_events: u64,
    pub(crate) local_max_events: u64,
    pub(crate) local_refused_events: u64,
    pub(crate) local_overcharged_events: u64,
    pub(crate) local_changed_events: u64,
    pub(crate) local_pressure_low_events: u64,
    pub(crate) local_pressure_medium_events: u64,
    pub(crate) local_pressure_critical_events: u64,
    pub(crate) stalled_us: u64,
    pub(crate) container_events: u64,
}

impl From<neap::groups::Info> for GroupInfo {
    fn from(known: neap::groups::Info) -> GroupInfo {
        let mut name = [0; 64];
        name.iter_mut().zip(known.name.as_str().bytes()).for_each(|(to, from)| *to = from);
        let [max_bytes, high_bytes, low_bytes, min_bytes] = known.bounds;
        let [pages_bytes, objects_bytes, percpu_bytes, by_hand_bytes] = known.kinds;
        let [low_events, high_events, max_events, refused_events, overcharged_events, changed_events, pressure @ ..] =
            known.events;
        let [pressure_low_events, pressure_medium_events, pressure_critical_events, container_events] = pressure;
        let local = |event: Event| known.local_events[event as usize];
        GroupInfo {
            group: known.id.to_bits(),
            parent: known.parent.map_or(0, GroupId::to_bits),
            name,
            max_bytes,
            high_bytes,
            low_bytes,
            min_bytes,
            charged_bytes: known.charged,
            peak_bytes: known.peak,
            pages_bytes,
            objects_bytes,
            percpu_bytes,
            by_hand_bytes,
            low_events,
            high_events,
            max_events,
            refused_events,
            overcharged_events,
            changed_events,
            children: known.children.into(),
            pressure_low_events,
            pressure_medium_events,
            pressure_critical_events,
            local_low_events: local(Event::Low),
            local_high_events: local(Event::High),
            local_max_events: local(Event::Max),
            local_refused_events: local(Event::Refused),
            local_overcharged_events: local(Event::Overcharged),
            local_changed_events: local(Event::LimitChanged),
            local_pressure_low_events: local(Event::PressureLow),
            local_pressure_medium_events: local(Event::PressureMedium),
            local_pressure_critical_events: local(Event::PressureCritical),
            stalled_us: known.stalled_us,
            container_events,
        }
    }
}

/// The group with a number. It may have been deleted.
pub(crate) fn group(number: u64) -> Result<Group, Error> {
    let id = GroupId::from_bits(number);
    if id.to_bits() == number { Ok(Group::from_id(id)) } else { Err(Error::Group) }
}

/// Stores the number of the group that `get` finds or makes for a path at `place`.
///
/// # Safety
/// `path` is null or a C string; `place` is null, misaligned or writable.
unsafe fn at(path: *const c_char, place: *mut u64, get: fn(&str) -> Result<Group, GroupError>) -> c_int {
    let get = || {
        if path.is_null() {
            return Err(Error::Argument);
        }
        // SAFETY: `path` is not null, so the caller promises a C string.
        let path = unsafe { CStr::from_ptr(path) }.to_str().map_err(|_| Error::Name)?;
        Ok(get(path)?.id().to_bits())
    };
    // SAFETY: by the header's contract, `place` is null, misaligned or writable.
    unsafe { into(place, get) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_create(path: *const c_char, group: *mut u64) -> c_int {
    // SAFETY: by the header's contract, `path` is null or a C string, and `group` is null,
    // misaligned or writable.
    unsafe { at(path, group, Group::create) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_find(path: *const c_char, group: *mut u64) -> c_int {
    // SAFETY: by the header's contract, `path` is null or a C string, and `group` is null,
    // misaligned or writable.
    unsafe { at(path, group, Group::find) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_find_or_create(path: *const c_char, group: *mut u64) -> c_int {
    // SAFETY: by the header's contract, `path` is null or a C string, and `group` is null,
    // misaligned or writable.
    unsafe { at(path, group, Group::find_or_create) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_group_delete(number: u64) -> c_int {
    answer(group(number).and_then(|group| Ok(group.delete()?)).map(|()| 0))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_group_delete_all(number: u64) -> c_int {
    answer(group(number).and_then(|group| Ok(group.delete_all()?)).map(|()| 0))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_group_reset_peak(number: u64) -> c_int {
    answer(group(number).and_then(|group| Ok(group.reset_peak()?)).map(|_| 0))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_group_heir(number: u64) -> u64 {
    group(number).ok().and_then(Group::heir).map_or(0, |heir| heir.id().to_bits())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_of(memory: *const c_void) -> u64 {
    // SAFETY: by the header's contract the block at `memory` is not freed during the call.
    unsafe { payer_at(memory.cast()) }.map_or(0, |group| group.id().to_bits())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_next(parent: u64, child: *mut u64) -> c_int {
    let mut next = None;
    let step = || {
        // SAFETY: `into` calls this only if `child` is neither null nor misaligned, and the header
        // requires that it is readable.
        let after = match unsafe { child.read() } {
            0 => None,
            after => Some(group(after)?),
        };
        next = group(parent)?.next_child(after)?;
        Ok(next.map_or(0, |next| next.id().to_bits()))
    };
    // SAFETY: by the header's contract, `child` is null, misaligned or writable.
    match unsafe { into(child, step) } {
        0 => next.is_some().into(),
        error => error,
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_set(number: u64, bound: c_int, bytes: u64, before: *mut u64) -> c_int {
    let bound = usize::try_from(bound).ok().and_then(|bound| Bound::ALL.get(bound).copied());
    let set = || Ok(group(number)?.set(bound.ok_or(Error::Argument)?, bytes)?);
    if before.is_null() {
        return answer(set().map(|_| 0));
    }
    // SAFETY: by the header's contract, `before` is null, misaligned or writable.
    unsafe { into(before, set) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_used(number: u64, bytes: *mut u64) -> c_int {
    // SAFETY: by the header's contract, `bytes` is null, misaligned or writable.
    unsafe { into(bytes, || Ok(group(number)?.used()?)) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_protection(number: u64, min: *mut u64, low: *mut u64) -> c_int {
    if min.is_null() || !min.is_aligned() {
        return Error::Argument as c_int;
    }
    let get = || {
        let protection = group(number)?.protection()?;
        // SAFETY: `min` is neither null nor misaligned, as checked above, so it is writable by the
        // header's contract.
        unsafe { min.write(protection.min) };
        Ok(protection.low)
    };
    // SAFETY: by the header's contract, `low` is null, misaligned or writable.
    unsafe { into(low, get) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_group_drain(number: u64) -> c_int {
    answer(group(number).and_then(|group| Ok(group.drain()?)).map(|()| 0))
}

/// `neap_group_count`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct GroupCount {
    pub(crate) live: u64,
    pub(crate) dying: u64,
    pub(crate) ids: u64,
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_count_get(count: *mut GroupCount) -> c_int {
    let get = || {
        let now = neap::groups::count()?;
        Ok(GroupCount { live: now.live.into(), dying: now.dying.into(), ids: now.ids.into() })
    };
    // SAFETY: by the header's contract, `count` is null, misaligned or writable.
    unsafe { into(count, get) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_info_get(number: u64, info: *mut GroupInfo, size: usize) -> c_int {
    if info.is_null() || !info.is_aligned() || size == 0 {
        return Error::Argument as c_int;
    }
    let get = || {
        let known = GroupInfo::from(group(number)?.info()?);
        // SAFETY: `info` is neither null nor misaligned, and by the header's contract it has `size`
        // bytes.
        unsafe { store_known(known, info, size) };
        Ok(0)
    };
    answer(get())
}

/// The names on a group's path, from its last to its first, without the root's.
fn names(group: Group) -> impl Iterator<Item = Result<Name, GroupError>> {
    let mut next = Some(group);
    core::iter::from_fn(move || match next.take()?.info() {
        Ok(info) => {
            next = Some(Group::from_id(info.parent?));
            Some(Ok(info.name))
        }
        Err(denied) => Some(Err(denied)),
    })
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_path(number: u64, text: *mut c_char, size: usize) -> c_int {
    if text.is_null() && size > 0 {
        return Error::Argument as c_int;
    }
    let write = || {
        let group = group(number)?;
        let slashed =
            names(group).try_fold(0, |length, name| Ok::<_, GroupError>(length + name?.as_str().len() + 1))?;
        let length = slashed.saturating_sub(1);
        let put = |at: usize, byte: u8| {
            if at < size.saturating_sub(1) {
                // SAFETY: by the header's contract `text` has `size` bytes, and `at` is less.
                unsafe { text.add(at).write(byte as c_char) };
            }
        };
        let mut end = length;
        for name in names(group) {
            let name = name?;
            let start = end - name.as_str().len();
            name.as_str().bytes().enumerate().for_each(|(at, byte)| put(start + at, byte));
            end = start.saturating_sub(1);
            if start > 0 {
                put(end, b'/');
            }
        }
        if size > 0 {
            // SAFETY: by the header's contract `text` has `size` bytes, and the offset is less.
            unsafe { text.add(length.min(size - 1)).write(0) };
        }
        Ok(length as c_int)
    };
    answer(write())
}

/// `neap_entered`.
pub(crate) type Inside = Object<Entered>;

impl Kind for Entered {
    const MARK: u64 = u64::from_ne_bytes(*b"neapEntr");
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_enter(entered: *mut Inside, number: u64) -> c_int {
    // SAFETY: by the header's contract, `entered` is null, misaligned, or memory of the object's
    // size that no other thread uses during the call.
    unsafe { Object::make(entered, || Ok(group(number)?.enter()?)) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_leave(entered: *mut Inside) -> c_int {
    // SAFETY: by the header's contract, `entered` is null, misaligned, or an object that no other
    // thread uses any more.
    unsafe { Object::destroy(entered) }
}
