//! Tests of infos: bits, units and deferred work, on a virtual machine.

use super::*;
use core::alloc::Layout;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_groups::Reclaimer;
use neap_percpu::{PerCpuData, Shape, Standalone};
use neap_testing::virtual_platform::Virtual;
use std::alloc::{alloc_zeroed, dealloc};

#[derive(Clone, Copy)]
struct On<'a>(Standalone<'a, Virtual>);

impl neap_percpu::Host for On<'_> {
    type Platform = Virtual;
    type Charge = ();

    fn platform(&self) -> &Virtual {
        self.0.platform
    }

    fn data(&self) -> &PerCpuData {
        self.0.data
    }
}

impl Reclaimer for On<'_> {}

impl Host for On<'_> {
    fn memory(&self, _: &Inside<'_>, bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the layout has a size, since no caller requests 0 bytes.
        NonNull::new(unsafe { alloc_zeroed(Layout::from_size_align(bytes, 64).unwrap()) })
    }

    unsafe fn give_back(&self, _: &Inside<'_>, memory: NonNull<u8>, bytes: usize) {
        // SAFETY: `memory` allocated it with this layout, and no thread uses it any more.
        unsafe { dealloc(memory.as_ptr(), Layout::from_size_align(bytes, 64).unwrap()) };
    }
}

fn with_infos(f: impl FnOnce(&On<'_>, &ShrinkerInfos)) {
    let machine = Virtual::new(4096, 2).with_nodes(&[0, 1]);
    let shape = Shape { unit: 64 << 10, span: 256 << 10, ..Shape::usual(2) };
    let data = PerCpuData::open(&machine, &shape, |_| 0, ()).unwrap();
    let host = On(Standalone { data: &data, platform: &machine });
    let infos = Inside::assume(|inside| ShrinkerInfos::open(inside, &host, machine.nodes() as u32)).unwrap();
    f(&host, &infos);
    // SAFETY: no thread uses them any more.
    unsafe {
        Inside::assume(|inside| infos.close(inside, &host));
        data.close(&machine);
    }
    assert_eq!(machine.mapped_bytes(), 0);
}

/// Clears a shrinker's bit, and the bits above that have nothing below.
fn clear(infos: &ShrinkerInfos, index: u32, slot: u32, node: u32) {
    let unit_ref = infos.unit_ref((index / BLOCK) as usize, slot, node, index % BLOCK / UNIT).unwrap();
    assert!(unit_ref.clear_bit_if_empty(index, || true));
    if unit_ref.memory().unwrap().is_empty() {
        assert!(unit_ref.clear_unit_if_empty(|| true));
    }
    infos.settle(|| BLOCKS, slot, node);
}

#[test]
fn a_slot_has_something_as_long_as_a_shrinker_of_any_block_does() {
    with_infos(|host, infos| {
        let indexes = [0, 63, 64, UNIT * UNITS - 1, BLOCK, BLOCK * BLOCKS as u32 - 1];
        indexes.into_iter().for_each(|index| Inside::assume(|inside| infos.mark(inside, host, index, 5, 1)));
        for (at, index) in indexes.into_iter().enumerate() {
            assert_eq!(infos.next_with_anything(1, 0), Some(5), "{at} are gone");
            assert!(infos.has_anything(1, 5) && !infos.has_anything(1, 4) && !infos.has_anything(0, 5));
            clear(infos, index, 5, 1);
        }
        assert_eq!((infos.next_with_anything(1, 0), infos.next_with_anything(0, 0)), (None, None));
    });
}

#[test]
fn clearing_the_slot_bit_sees_a_mark_in_a_new_block() {
    with_infos(|host, infos| {
        Inside::assume(|inside| infos.mark(inside, host, 3, 7, 0));
        let unit_ref = infos.unit_ref(0, 7, 0, 0).unwrap();
        assert!(unit_ref.clear_bit_if_empty(3, || true) && unit_ref.clear_unit_if_empty(|| true));
        let asked = AtomicU32::new(0);
        let blocks = || match asked.fetch_add(1, Ordering::Relaxed) {
            0 => {
                // Comes in between: the slot's bit is set still.
                Inside::assume(|inside| infos.mark(inside, host, BLOCK, 7, 0));
                1
            }
            _ => 2,
        };
        assert!(!infos.settle(blocks, 7, 0));
        assert_eq!(infos.next_with_anything(0, 0), Some(7));
    });
}

#[test]
fn a_unit_that_gets_memory_while_its_bit_is_cleared_keeps_it() {
    with_infos(|host, infos| {
        Inside::assume(|inside| infos.mark(inside, host, 3, 7, 0));
        let unit_ref = infos.unit_ref(0, 7, 0, 1).unwrap();
        // Without memory, any shrinker of the second unit may have objects.
        infos.set_bits(unit_ref.above());
        assert!(unit_ref.memory().is_none());
        // Comes in between, and its objects are gone when the visitor looks.
        Inside::assume(|inside| infos.mark(inside, host, UNIT, 7, 0));
        assert!(!unit_ref.memory().unwrap().is_empty() && !unit_ref.clear_all_if_empty(|| true));
        clear(infos, 3, 7, 0);
        assert_eq!(infos.next_with_anything(0, 0), Some(7));
    });
}

/// See [`UnitRef::clear_unit_if_empty`].
#[test]
fn a_unit_that_is_not_ready_keeps_the_summary() {
    with_infos(|host, infos| {
        Inside::assume(|inside| infos.mark(inside, host, 3, 7, 0));
        let unit_ref = infos.unit_ref(0, 7, 0, 0).unwrap();
        let unit = unit_ref.memory().unwrap();
        // As if it had been made a moment ago, for a summary that stands for all.
        unit.bits.store(0, Ordering::Relaxed);
        unit.is_ready.store(false, Ordering::Relaxed);
        assert!(!unit.is_empty() && !unit_ref.clear_unit_if_empty(|| unit.is_empty()) && unit_ref.is_set());
        // A deleted group's marks move on.
        Inside::assume(|inside| infos.offline(inside, host, || 64, 7, 8));
        let heir = infos.info(0, 8, 0).unwrap().unit(0).unwrap();
        assert_eq!(heir.bits.load(Ordering::Relaxed), usize::MAX);
    });
}

#[test]
fn units_stay_where_they_are_while_tables_grow() {
    with_infos(|host, infos| {
        Inside::assume(|inside| infos.mark(inside, host, 3, 2, 0));
        let unit: *const InfoUnit = infos.info(0, 2, 0).unwrap().unit(0).unwrap();
        assert!(infos.info(0, 2, 0).unwrap().unit(0).unwrap().defer(3, 1, 7));
        let far = if cfg!(miri) { [40, 80] } else { [400, 1000] };
        for (index, slot) in [(200, 2), (5000, 2), (3, far[0]), (3, far[1])] {
            Inside::assume(|inside| infos.mark(inside, host, index, slot, 0));
        }
        let now = infos.info(0, 2, 0).unwrap().unit(0).unwrap();
        assert_eq!((core::ptr::from_ref(now), now.deferred(3, 1)), (unit, 7));
        assert_eq!(infos.next_with_anything(0, 3), Some(far[0]));
    });
}

#[test]
fn a_unit_is_made_once_whichever_is_the_first() {
    with_infos(|host, infos| {
        let slots = if cfg!(miri) { 4 } else { 200 };
        Inside::assume(|inside| infos.mark(inside, host, 0, slots, 0));
        for slot in 0..slots {
            let start = std::sync::Barrier::new(3);
            // Two threads make one of the units, and one the other.
            std::thread::scope(|scope| {
                for index in [5 * UNIT, 5 * UNIT + 1, 9 * UNIT] {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        Inside::assume(|inside| infos.mark(inside, host, index, slot, 0));
                    });
                }
            });
            let info = infos.info(0, slot, 0).unwrap();
            let bits = |unit: u32| info.unit(unit).map_or(0, |unit| unit.bits.load(Ordering::Relaxed));
            // More where a summary was raised before its unit was ready.
            assert_eq!((bits(0), bits(5) & 0b11, bits(9) & 0b1), (0, 0b11, 0b1), "slot {slot}");
            assert_eq!(info.units().count(), 2);
        }
    });
}

#[test]
fn deferred_work_is_of_one_generation() {
    with_infos(|host, infos| {
        Inside::assume(|inside| infos.mark(inside, host, 9, 0, 0));
        let unit = infos.info(0, 0, 0).unwrap().unit(0).unwrap();
        assert!(unit.defer(9, 4, 10) && unit.defer(9, 4, 5));
        assert_eq!((unit.deferred(9, 4), unit.deferred(9, 5), unit.take(9, 5)), (15, 0, 0));
        // Late work of an earlier generation is not counted, and a later one begins anew.
        assert!(!unit.defer(9, 3, 100));
        assert!(unit.defer(9, 5, 1) && unit.deferred(9, 5) == 1 && unit.deferred(9, 4) == 0);
        assert!(unit.defer(9, 5, u64::MAX));
        assert_eq!((unit.take(9, 5), unit.take(9, 5)), (NUMBER, 0));
        // From the last generation of a tag to the first.
        assert!(unit.defer(9, 0xffff, 3) && unit.defer(9, 0x1_0000, 4) && !unit.defer(9, 0xffff, 5));
        assert_eq!(unit.deferred(9, 0x1_0000), 4);
    });
}

#[test]
fn what_threads_mark_while_bits_are_cleared_stays() {
    let rounds = if cfg!(miri) { 20 } else { 2000 };
    with_infos(|host, infos| {
        let there = [const { AtomicU32::new(0) }; 3];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..rounds {
                    for (index, there) in (0..).zip(&there) {
                        there.fetch_add(1, Ordering::Relaxed);
                        Inside::assume(|inside| infos.mark(inside, host, index, 7, 0));
                    }
                }
            });
            for _ in 0..rounds {
                let Some(unit_ref) = infos.unit_ref(0, 7, 0, 0) else { continue };
                for (index, there) in (0..).zip(&there) {
                    there.store(0, Ordering::Relaxed);
                    unit_ref.clear_bit_if_empty(index, || there.load(Ordering::Relaxed) == 0);
                }
                let Some(unit) = unit_ref.memory() else { continue };
                if unit.is_empty() {
                    unit_ref.clear_unit_if_empty(|| unit.is_empty());
                }
                infos.settle(|| 1, 7, 0);
            }
        });
        let unit = infos.info(0, 7, 0).unwrap().unit(0).unwrap();
        for (index, there) in there.iter().enumerate().filter(|(_, there)| there.load(Ordering::Relaxed) > 0) {
            let found =
                infos.next_with_anything(0, 0) == Some(7) && unit.bits.load(Ordering::Relaxed) >> index & 1 == 1;
            assert!(found, "{there:?} of {index} are not found");
        }
    });
}
