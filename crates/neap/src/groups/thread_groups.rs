//! Groups for the threads of a program that uses no groups itself. There is one group for each name
//! of threads, or one for each thread.
//!
//! An allocation on the slow path puts its thread into a group. The thread is in no group yet, or
//! its group has no stock left on this CPU. Programs name threads some time after their start, and
//! some rename them. So the thread moves to the group of its current name each time. A tick deletes
//! a group that was made for one thread, after that thread has ended. This module has no lock.

use crate::groups::memory_groups::Grouped;
use crate::mm::Mm;
use crate::options::ThreadGroups;
use core::fmt::Write;
use neap_base::Platform;
use neap_groups::{GroupError, GroupId};
use neap_os::fatal::Line;
use neap_os::thread_state::entered;
use neap_os::{stack, thread};

/// Returns the name of the calling thread's group.
fn name_of_thread(how: ThreadGroups) -> Line {
    let (name, length) = thread::own_name();
    let mut line = Line::new();
    // A write to a line returns no error.
    for &byte in &name[..length] {
        let _ = line.write_char(if byte.is_ascii_graphic() && byte != b'/' { byte.into() } else { '_' });
    }
    if matches!(line.as_bytes(), b"" | b"." | b"..") {
        let _ = line.write_str("unnamed");
    }
    if how == ThreadGroups::ByThread {
        let _ = write!(line, ":{}", thread::id());
    }
    line
}

impl<P: Platform> Mm<P> {
    /// Puts the calling thread into the group of its name, unless the thread has entered a group
    /// itself. This runs on a separate stack, since making a group charges memory, and reclaim for
    /// that needs a deep stack.
    #[cold]
    pub(crate) fn put_thread_into_group(&self, how: ThreadGroups) {
        let _ = stack::apart(|| self.put_into_group(how));
    }

    fn put_into_group(&self, how: ThreadGroups) {
        let Ok(grouped) = self.groups() else { return };
        // The name of the thread's group, if that is the root or directly below it. A thread is in
        // the root if neap could make no group for it. A thread in a deeper group has entered it
        // itself, and stays there. `None` if the thread is in no group, or its group is gone.
        let mut now = None;
        if entered() != 0 {
            let Some(id) = self.group_of_thread() else { return };
            match grouped.place(id) {
                Ok((Some(above), _)) if above != GroupId::ROOT => return,
                Ok((_, name)) => now = Some(name),
                Err(_) => {}
            }
        }
        let line = name_of_thread(how);
        let name = core::str::from_utf8(line.as_bytes()).unwrap_or("?");
        if now.is_none_or(|now| now.as_str() != name) {
            let made = match grouped.create(GroupId::ROOT, name) {
                Ok(made) if how == ThreadGroups::ByThread => {
                    grouped.note_thread(made);
                    Ok(made)
                }
                Err(GroupError::Exists) => grouped.find(GroupId::ROOT, name),
                made => made,
            };
            // If no group can be made neap charges the root.
            self.enter(Some(made.unwrap_or(GroupId::ROOT)));
        }
    }
}

impl<P: Platform> Grouped<'_, P> {
    /// Notes that a group was made for the calling thread.
    fn note_thread(&self, id: GroupId) {
        self.groups().note_thread(self.source(), id, thread::id());
    }

    /// Deletes the groups of threads that have ended.
    pub(crate) fn delete_groups_of_ended_threads(&self) {
        let mut child = self.next_child(GroupId::ROOT, None);
        while let Some(id) = child {
            child = self.next_child(GroupId::ROOT, Some(id));
            // `thread_of` decides, not the group's name. A group of the program may have a similar
            // name.
            if self.groups().thread_of(self.source(), id).is_some_and(|thread| !thread::exists(thread)) {
                // A group with groups of the program below it stays.
                let _ = self.delete(id);
            }
        }
    }
}
