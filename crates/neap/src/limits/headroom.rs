//! The headroom of the container at the last look, and the event of its changes.
//!
//! # Design
//! Each [look](super::following) adds its numbers to a [`Series`], which `neap pressure --watch`
//! also uses. A changed level or limit is the event [`Event::Container`] of the root group. The
//! event has no numbers. A listener reads them by [`headroom`]. Each new listener causes the event
//! once, so that it learns the present state.
//!
//! neap makes looks for a limit that follows the container, for listeners of the event, and for
//! calls of [`headroom`].
//!
//! # Locking
//! One mutex guards the looks. Threads take it inside the gate. The holder only computes, and takes
//! no other lock.
//!
//! [`Event::Container`]: crate::groups::Event::Container

use crate::limits::limit::{Following, PERIOD};
use crate::mm::{Core, Mm};
use crate::process::PROCESS;
pub use crate::state::headroom::Headroom;
use core::fmt::{self, Write};
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_base::platform::Room;
pub use neap_base::platform::{LimitedBy, Pressure};

/// Returns the headroom of the process's container, at most a second old. Returns `None` if no
/// limit is visible.
///
/// A look reads files of `/proc` and of control groups for about half a millisecond. A signal
/// handler must not call this.
///
/// ```
/// use neap::{Pressure, headroom};
///
/// if let Some(headroom) = headroom() {
///     let may_grow = headroom.pressure == Pressure::Roomy;
///     println!("{} of {} bytes left: {may_grow}", headroom.bytes(), headroom.limit);
/// }
/// ```
pub fn headroom() -> Option<Headroom> {
    PROCESS.headroom()
}

impl<P: Platform> Core<P> {
    /// Records a look. If it shows a change, requests a call of the listeners. Returns the headroom
    /// at the look before.
    pub(crate) fn note_headroom(&self, mm: &Mm<P>, now: u64, room: Option<&Room>) -> Option<Headroom> {
        let (before, has_changed, pressure) = {
            let inside = mm.gate.enter(self.objects.platform.cpu());
            let mut looks = self.following.headroom.lock(&inside);
            (looks.last, looks.add(now, room), looks.last.map(|last| last.pressure))
        };
        if has_changed {
            pressure.inspect(|&pressure| self.profile_at_pressure(pressure));
            mm.container_changed();
        }
        before
    }

    /// Writes the container that the limit follows as JSON: numbers of the last look, and counts.
    /// Writes `null` if the limit follows none.
    pub(crate) fn describe_container(&self, inside: &Inside<'_>, text: &mut impl Write) -> fmt::Result {
        if self.settings.follows().is_none() {
            return text.write_str("null,");
        }
        let Following { looks, looks_for_allocations, passed, .. } = &self.following;
        let last = self.following.seen(inside);
        let [limit, used] = last.map_or([0; 2], |last| [last.limit, last.used]);
        write!(text, "{{\"limit\":{limit},\"used\":{used},\"heap_limit\":{},", self.settings.limit())?;
        // Relaxed: statistics.
        let [looks, asked, passed] = [looks, looks_for_allocations, passed].map(|count| count.load(Ordering::Relaxed));
        write!(text, "\"looks\":{looks},\"looks_for_allocations\":{asked},\"passed\":{passed},")?;
        let Some(Headroom { pressure, limited_by, ms_to_wall, .. }) = last else {
            return text.write_str("\"pressure\":null,\"limited_by\":null,\"ms_to_wall\":null},");
        };
        write!(text, "\"pressure\":\"{}\",\"limited_by\":\"{}\",", pressure.name(), limited_by.name())?;
        match ms_to_wall {
            Some(ms) => write!(text, "\"ms_to_wall\":{ms}}},"),
            None => text.write_str("\"ms_to_wall\":null},"),
        }
    }
}

impl<P: Platform> Mm<P> {
    /// Returns the headroom of the container at the last look. Makes a look first if the last one
    /// is a second old. Returns `None` if no limit is visible. A signal handler must not call this.
    pub fn headroom(&self) -> Option<Headroom> {
        let core = self.core()?;
        let looks = || {
            let inside = self.gate.enter(core.objects.platform.cpu());
            let looks = core.following.headroom.lock(&inside);
            (looks.has_any, looks.last)
        };
        // The time of a look is that of its start. Another thread may be making the first look
        // right now.
        if core.look_if_due(self, PERIOD).is_some() {
            let (has_any, last) = looks();
            if has_any {
                return last;
            }
            core.look_at_container(self, core.objects.platform.precise(), 0);
        }
        looks().1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::{AUTO, Background, Options};
    use core::sync::atomic::{AtomicBool, AtomicU64};
    use neap_groups::{Event, EventDelta, GroupId, Listener};
    use neap_testing::virtual_platform::{Call, Virtual};
    use std::boxed::Box;
    use std::string::String;
    use std::sync::{Arc, Mutex};

    const MIB: u64 = 1 << 20;

    /// A manager without a limit of its own, in a container of 4 GiB whose use a test sets.
    struct Contained {
        mm: Box<Mm<Virtual>>,
        limit: Arc<AtomicU64>,
        used: Arc<AtomicU64>,
        ticks: u64,
    }

    impl Contained {
        fn new() -> Contained {
            Contained::with(Options::DEFAULT)
        }

        fn with(options: Options) -> Contained {
            let mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
            let options = Options { stat: false, background: Background::Never, ..options };
            let (limit, used) = (Arc::new(AtomicU64::new(4096 * MIB)), Arc::new(AtomicU64::new(0)));
            let (its_limit, its_use) = (limit.clone(), used.clone());
            let platform = Virtual::new(4096, 1);
            platform.advance(PERIOD);
            platform.set_room(move || {
                let [limit, used] = [&its_limit, &its_use].map(|word| word.load(Ordering::Relaxed));
                Room { owner: LimitedBy::Group, limit, used, smallest: limit }
            });
            // SAFETY: the manager stays in its box.
            unsafe { mm.open(platform, &options) }.unwrap();
            Contained { mm, limit, used, ticks: 0 }
        }

        fn platform(&self) -> &Virtual {
            &self.mm.core().unwrap().objects.platform
        }

        fn looks(&self) -> usize {
            self.platform().made(Call::Room)
        }

        /// Ticks a period later, with so many MiB left.
        fn tick(&mut self, left: u64) {
            self.used.store(self.limit.load(Ordering::Relaxed) - left * MIB, Ordering::Relaxed);
            self.platform().advance(PERIOD);
            self.ticks += 1;
            self.mm.tick(self.ticks << 30);
        }

        fn close(mut self) {
            // SAFETY: no thread uses the manager any more.
            unsafe { self.mm.close() };
        }
    }

    #[test]
    fn root_listener_gets_container_events_while_subscribed() {
        static TOLD: AtomicU64 = AtomicU64::new(0);
        let tell = |_: usize, happened: EventDelta| {
            assert_eq!(happened.group, GroupId::ROOT);
            let times = happened.event.map_or(0, |(event, times)| if event == Event::Container { times } else { 0 });
            TOLD.fetch_add(times, Ordering::Relaxed);
        };
        let told = || TOLD.swap(0, Ordering::Relaxed);
        let mut it = Contained::new();
        let groups = |mm: &Mm<Virtual>| mm.groups().unwrap().create(GroupId::ROOT, "tenant").unwrap();
        let tenant = groups(&it.mm);
        it.tick(2000);
        assert_eq!((it.looks(), told()), (0, 0), "no look without a listener");
        let address = (&raw const *it.mm).expose_provenance();
        // SAFETY: the manager stays in its box until `close`, after the last use of this.
        let mm = unsafe { &*core::ptr::with_exposed_provenance::<Mm<Virtual>>(address) };
        let subscribe = |group| mm.groups().unwrap().subscribe(group, &[Event::Container], Listener::Callback(tell, 0));
        let other = subscribe(tenant).unwrap();
        it.tick(2000);
        assert_eq!((it.looks(), told()), (0, 0), "the event is the root's");
        let subscription = subscribe(GroupId::ROOT).unwrap();
        it.tick(2000);
        assert_eq!((it.looks(), told()), (1, 2), "the listener is new, and so is the level");
        it.tick(2000);
        assert_eq!((it.looks(), told()), (2, 0), "nothing changed");
        it.tick(40);
        let level = |it: &Contained| it.mm.headroom().unwrap().pressure.name();
        assert_eq!((told(), level(&it)), (1, "imminent"), "at such a growth");
        it.limit.store(2048 * MIB, Ordering::Relaxed);
        it.tick(40);
        assert_eq!((told(), level(&it)), (1, "critical"), "a changed limit ends the growth");
        assert_eq!(it.mm.headroom().unwrap().limit_changes, 1);
        let count = it.mm.groups().unwrap().info(GroupId::ROOT).unwrap().events[Event::Container as usize];
        assert_eq!(count, 4);
        let looks = it.looks();
        assert!(mm.groups().unwrap().unsubscribe(subscription) && mm.groups().unwrap().unsubscribe(other));
        it.tick(2000);
        assert_eq!((it.looks(), told()), (looks, 0), "no look after the last listener");
        it.close();
    }

    /// | thread A | thread B |
    /// |---|---|
    /// | 1. starts the first look | |
    /// | | 2. asks for the headroom |
    /// | 3. ends its look | |
    #[test]
    fn headroom_is_known_while_another_thread_makes_the_first_look() {
        let it = Contained::new();
        let address = (&raw const *it.mm).expose_provenance();
        let (is_first, asked) = (AtomicBool::new(true), Arc::new(Mutex::new(None)));
        let answer = asked.clone();
        it.platform().set_room(move || {
            if is_first.swap(false, Ordering::Relaxed) {
                // SAFETY: the manager stays in its box until `close`, with its platform.
                let mm = unsafe { &*core::ptr::with_exposed_provenance::<Mm<Virtual>>(address) };
                *answer.lock().unwrap() = mm.headroom();
            }
            Room { owner: LimitedBy::Group, limit: 100 * MIB, used: MIB, smallest: 100 * MIB }
        });
        let found = it.mm.headroom();
        assert_eq!(found.map(|found| found.limit), Some(100 * MIB));
        assert_eq!((*asked.lock().unwrap(), it.looks()), (found, 2));
        it.close();
    }

    #[test]
    fn headroom_is_a_second_old_at_most_and_none_without_a_limit() {
        let it = Contained::new();
        let used = |mib: u64| it.used.store(mib * MIB, Ordering::Relaxed);
        used(96);
        let first = it.mm.headroom().unwrap();
        assert_eq!((first.bytes() / MIB, first.limit / MIB, first.used / MIB), (4000, 4096, 96));
        assert_eq!((first.pressure, first.ms_to_wall, first.limit_changes), (Pressure::Roomy, None, 0));
        used(196);
        it.platform().advance(PERIOD - 1);
        assert_eq!((it.mm.headroom(), it.looks()), (Some(first), 1), "no look before a second is over");
        it.platform().advance(1);
        let second = it.mm.headroom().unwrap();
        assert_eq!((second.bytes() / MIB, second.ms_to_wall, it.looks()), (3900, Some(39_000), 2));
        assert_eq!(second.pressure, Pressure::Low, "in less than a minute");
        it.platform().fail(Call::Room, 0, usize::MAX);
        it.platform().advance(PERIOD);
        assert_eq!(it.mm.headroom(), None);
        it.close();
    }

    #[test]
    fn text_has_pressure_and_growth_of_followed_container() {
        let mut it = Contained::with(Options { limit: AUTO, ..Options::DEFAULT });
        let text = |it: &Contained| {
            let mut text = String::new();
            it.mm.core().unwrap().describe_container(&it.mm.gate.enter(0), &mut text).unwrap();
            text
        };
        assert!(text(&it).ends_with(
            r#""looks":0,"looks_for_allocations":0,"passed":0,"pressure":null,"limited_by":null,"ms_to_wall":null},"#
        ));
        it.tick(3000);
        let first = text(&it);
        assert!(first.starts_with(r#"{"limit":4294967296,"used":1149239296,"heap_limit":"#), "{first}");
        assert!(first.ends_with(r#""pressure":"roomy","limited_by":"group","ms_to_wall":null},"#), "{first}");
        it.tick(100);
        it.tick(50);
        let last = text(&it);
        let growth = (3000 - 50) * MIB / 2;
        let expected = 50 * MIB * 1000 / growth;
        let end = std::format!(r#""pressure":"imminent","limited_by":"group","ms_to_wall":{expected}}},"#);
        assert!(last.ends_with(&end), "{last}");
        it.close();
        let it = Contained::new();
        assert_eq!(text(&it), "null,");
        it.close();
    }
}
