//! Groups for the threads of a program that knows of none: by name, or one each.
//!
//! Sits between an allocation that does not know its thread's group yet, or has nothing stocked, and the groups. Threads are named by and by, and
//! some again and again, so a thread that needs a new stock is looked at again: it is in the group of the name that it has then. A group
//! of one thread goes with it, at a tick. No lock of its own.

use crate::memory_groups::Grouped;
use crate::mm::Mm;
use crate::options::ThreadGroups;
use core::fmt::Write;
use neap_base::Platform;
use neap_groups::{Denied, GroupId, LONGEST_NAME};
use neap_os::entered::entered;
use neap_os::thread;

/// A group's name, while it is put together.
struct Text {
    bytes: [u8; LONGEST_NAME],
    length: usize,
}

impl Text {
    fn as_str(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.length]).unwrap_or("?")
    }

    /// The name of the calling thread's group.
    fn of_thread(how: ThreadGroups) -> Text {
        let mut text = Text { bytes: [0; LONGEST_NAME], length: 0 };
        let (name, length) = thread::own_name();
        for &byte in &name[..length] {
            let _ = text.write_char(if byte.is_ascii_graphic() && byte != b'/' { byte.into() } else { '_' });
        }
        if matches!(text.as_str(), "" | "." | "..") {
            let _ = text.write_str("unnamed");
        }
        if how == ThreadGroups::ByThread {
            let _ = write!(text, ":{}", thread::id());
        }
        text
    }
}

impl Write for Text {
    fn write_str(&mut self, more: &str) -> core::fmt::Result {
        let end = self.length + more.len();
        self.bytes.get_mut(self.length..end).ok_or(core::fmt::Error)?.copy_from_slice(more.as_bytes());
        self.length = end;
        Ok(())
    }
}

impl<P: Platform> Mm<P> {
    /// Lets the calling thread be in the group of its name, unless it has entered one by itself.
    pub(crate) fn put_thread_into_group(&self, how: ThreadGroups) {
        let Ok(grouped) = self.groups() else { return };
        let text = Text::of_thread(how);
        let now = self.group_of_thread();
        // Who entered a group by itself, or is in none of this manager, stays there.
        if entered() != 0 && now.is_none_or(|id| !grouped.is_of_thread(id)) {
            return;
        }
        let group = match grouped.find(GroupId::ROOT, text.as_str()) {
            Err(Denied::NoSuchGroup) => match grouped.create(GroupId::ROOT, text.as_str()) {
                Err(Denied::Exists) => grouped.find(GroupId::ROOT, text.as_str()),
                answer => answer,
            },
            answer => answer,
        };
        // Where no group can be made the thread is charged to the root alone.
        self.enter(Some(group.unwrap_or(GroupId::ROOT)));
    }
}

impl<P: Platform> Grouped<'_, P> {
    /// Whether a group may be one of those made here: right below the root, or the root where none could be made.
    fn is_of_thread(&self, id: GroupId) -> bool {
        self.info(id).map_or(true, |info| info.parent.is_none_or(|parent| parent == GroupId::ROOT))
    }

    /// Deletes the groups of threads that have ended.
    pub(crate) fn delete_groups_of_ended_threads(&self) {
        let mut child = self.next_child(GroupId::ROOT, None);
        while let Some(id) = child {
            child = self.next_child(GroupId::ROOT, Some(id));
            let Ok(info) = self.info(id) else { continue };
            let thread = info.name.as_str().rsplit_once(':').and_then(|(_, number)| number.parse().ok());
            if thread.is_some_and(|thread| !thread::exists(thread)) {
                // One with groups of the program's own below it stays.
                let _ = self.delete(id);
            }
        }
    }
}
