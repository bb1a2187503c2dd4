//! The container of a process, read by the command where the process has not looked at it for a
//! while.
//!
//! A process whose limit follows its container looks at the container at ticks. If it has made none
//! for a while, a command reads the files of the process's control group itself. The command looks
//! once, so it knows the room, and no growth.

use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use core::time::Duration;

use anyhow::anyhow;
use neap_pressure::{Pressure, Room, Sensor, Subject, System};
use serde_json::{Map, Value, json};

use super::live::put;
use super::stat_reader::{Page, ProcessStatus};
use super::subject::within;

/// Longest time that a look takes. Files of `/proc` may wait for the process.
const TIME: Duration = Duration::from_secs(1);

/// Number of looks that have not ended. Each holds a thread, which may be stuck in the kernel.
static UNFINISHED: AtomicUsize = AtomicUsize::new(0);

/// The most unfinished looks. `neap top` looks at each reading, and a command that lists processes
/// looks at several at once.
const UNFINISHED_MAX: usize = 16;

/// Replaces the numbers of the container by those of now, if the limit of the process follows the
/// container, and a limit is visible.
pub(crate) fn refresh(process: &ProcessStatus, page: &mut Page) {
    let follows = page.object.get("container").is_some_and(Value::is_object);
    if !follows || process.allowance.is_over() || UNFINISHED.load(Relaxed) >= UNFINISHED_MAX {
        return;
    }
    let pid = process.pid as u32;
    UNFINISHED.fetch_add(1, Relaxed);
    let room = within(TIME, "its container", move || {
        let mut sensor = Box::new(Sensor::new(Subject::Other(pid)));
        let room = sensor.look(&System::new()).room().copied();
        UNFINISHED.fetch_sub(1, Relaxed);
        room.ok_or_else(|| anyhow!("no limit is visible"))
    });
    // A process that still runs had this number during the look.
    if let Ok(room) = room
        && !process.handle.has_ended()
    {
        put_room(&mut page.object, &room);
    }
}

fn put_room(object: &mut Map<String, Value>, room: &Room) {
    let pressure = Pressure::of(room.limit.saturating_sub(room.used), room.limit, None);
    put(
        object,
        "container",
        json!({
            "limit": room.limit, "used": room.used, "limited_by": room.owner.name(), "pressure": pressure.name(),
            "ms_to_wall": null, "read_now": true,
        }),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_pressure::LimitedBy;

    #[test]
    fn room_of_now_replaces_the_last_look_of_the_process() {
        let mut object = json!({"container": {
            "limit": 9, "used": 1, "heap_limit": 5, "looks": 3, "passed": 0, "pressure": "roomy", "limited_by": "machine",
            "ms_to_wall": 7,
        }});
        let object = object.as_object_mut().unwrap();
        let room = Room { owner: LimitedBy::Group, limit: 1 << 30, used: (1 << 30) - 1, smallest: 1 << 30 };
        put_room(object, &room);
        let expected = json!({
            "limit": 1 << 30, "used": (1 << 30) - 1, "heap_limit": 5, "looks": 3, "passed": 0, "pressure": "imminent",
            "limited_by": "group", "ms_to_wall": null, "read_now": true,
        });
        assert_eq!(object["container"], expected);
    }
}
