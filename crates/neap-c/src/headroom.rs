//! `neap_headroom_get`: the room below the container's limit, for C.

use crate::error::Error;
use core::ffi::c_int;
use core::ptr::copy_nonoverlapping;
use neap::{Headroom, Pressure};

/// `neap_headroom`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Room {
    pub(crate) limit_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) wall_ms: u64,
    pub(crate) limit_changes: u64,
    pub(crate) pressure: u32,
    pub(crate) reserved: u32,
}

impl From<Option<Headroom>> for Room {
    fn from(found: Option<Headroom>) -> Room {
        let level = found.map_or(Pressure::Roomy, |found| found.pressure);
        Room {
            limit_bytes: found.map_or(0, |found| found.limit),
            used_bytes: found.map_or(0, |found| found.used),
            wall_ms: found.and_then(|found| found.ms_to_wall).unwrap_or(u64::MAX),
            limit_changes: found.map_or(0, |found| found.limit_changes),
            pressure: Pressure::ALL.iter().position(|&known| known == level).unwrap_or(0) as u32,
            reserved: 0,
        }
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_headroom_get(headroom: *mut Room, size: usize) -> c_int {
    if headroom.is_null() || !headroom.is_aligned() || size == 0 {
        return Error::Argument as c_int;
    }
    let known = Room::from(neap::headroom());
    // SAFETY: `headroom` is neither null nor misaligned, and by the header's contract there are
    // `size` bytes. Fields that this version does not know are 0.
    unsafe {
        headroom.cast::<u8>().write_bytes(0, size);
        copy_nonoverlapping((&raw const known).cast::<u8>(), headroom.cast(), size.min(size_of::<Room>()));
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Listens, neap_group_subscribe_fd, neap_group_unsubscribe};
    use crate::group::GroupInfo;
    use crate::tests::zeroed;
    use core::mem::MaybeUninit;
    use neap::LimitedBy;
    use neap::groups::{Event, Group};

    #[test]
    fn an_unseen_limit_is_roomy_and_zero() {
        let room = Room::from(None);
        assert_eq!((room.limit_bytes, room.used_bytes, room.wall_ms, room.pressure), (0, 0, u64::MAX, 0));
        let found = Headroom {
            pressure: Pressure::Critical,
            limited_by: LimitedBy::Group,
            limit: 100,
            used: 95,
            ms_to_wall: Some(7),
            limit_changes: 2,
        };
        let room = Room::from(Some(found));
        assert_eq!((room.limit_bytes, room.used_bytes, room.wall_ms), (100, 95, 7));
        assert_eq!((room.limit_changes, room.pressure), (2, 4));
    }

    #[test]
    fn headroom_get_zeroes_unknown_tail_and_respects_short_size() {
        let mut memory = [MaybeUninit::<Room>::new(Room::from(None)), MaybeUninit::new(Room::from(None))];
        let place = memory.as_mut_ptr().cast::<Room>();
        // SAFETY: the places are local, and the sizes within them.
        unsafe {
            assert_eq!(neap_headroom_get(place, 2 * size_of::<Room>()), 0);
            assert_eq!(place.add(1).read().wall_ms, 0, "beyond the known fields");
            assert!(place.read().limit_bytes > 0, "the machine has a limit");
            place.write(Room { wall_ms: 7, ..Room::from(None) });
            assert_eq!(neap_headroom_get(place, 8), 0);
            assert_eq!(place.read().wall_ms, 7, "beyond the size");
            for (place, size) in [(core::ptr::null_mut(), 8), (place, 0), (place.byte_add(1), 8)] {
                assert_eq!(neap_headroom_get(place, size), Error::Argument as c_int);
            }
        }
    }

    #[test]
    fn an_eventfd_of_the_root_is_told_of_the_container() {
        let mut ear = zeroed::<Listens>();
        // SAFETY: the listener and the count are local, and stay at their addresses.
        unsafe {
            let descriptor = libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
            let root = Group::ROOT.id().to_bits();
            assert_eq!(neap_group_subscribe_fd(ear.as_mut_ptr(), root, 1 << Event::Container as u32, descriptor), 0);
            let end = std::time::Instant::now() + core::time::Duration::from_secs(60);
            let mut count = 0_u64;
            while libc::read(descriptor, (&raw mut count).cast(), 8) != 8 {
                assert!(std::time::Instant::now() < end, "not told in a minute");
                crate::instance::neap_tick();
                std::thread::yield_now();
            }
            assert_eq!(neap_group_unsubscribe(ear.as_mut_ptr()), 0);
            assert_eq!(libc::close(descriptor), 0);
        }
        let info = GroupInfo::from(Group::ROOT.info().unwrap());
        assert!(info.container_events > 0, "{info:?}");
    }
}
