//! malloc's and free's assembly for arm64. The table's entry of CPU 0 is the base of all addresses.
//!
//! Each load of malloc up to the object has an address that depends on the load before it, so the
//! processor keeps their order (docs/design/arm64.md).

/// Offset of a field from CPU 0's entry, in bytes.
macro_rules! from_first {
    ($field:ident) => {
        from_table!($field) - SequenceTable::FIRST as isize
    };
}

/// Address of CPU 0's entry.
macro_rules! first {
    ($fast:ident) => {
        $fast.table.regions.as_ptr().wrapping_add(neap_os::rseq::UNREGISTERED)
    };
}

/// See `FastPath::take_top`. Null is a refusal.
macro_rules! take_top {
    ($fast:ident, $size:ident, $limit:ident) => {{
        let object: *mut u8;
        // again (27):     next := limit
        //                 value := null
        //                 if place >= next: go to end (23)
        //                 next := first, by a sum with next
        //                 area := offset of the rseq area, in front of next
        //                 place := size in grains
        //                 place := offset of the stack for place grains
        //                 area := area + thread pointer
        //                 pop_sequence (20 to 24), with
        //                   look: t := trailing zeros of value
        //                         area := states[t]
        //                         t := address of the state byte of value
        //                         if state byte at t != cached: go to again
        //                   then: state byte at t := allocated
        //
        // Registers: first: address of CPU 0's entry. place: the size, then the size in grains,
        // then the stack's offset, then its address. area: address of the rseq area, then the word
        // of the state table, then the state. t: scratch, the thread pointer, see pop_sequence,
        // then the address of the state byte. next: the limit, then CPU 0's entry, then see
        // pop_sequence. value: the object.
        asm!(
            on_cache_line!(),
            "27:",
            "ldur {next}, [{first}, #{limit}]",
            "mov {value}, xzr",
            "cmp {place}, {next}",
            "b.hs 23f",
            // The offset is loaded after the limit. In the other order the sequence would write
            // over the start of the thread's own control block:
            //
            //   this thread                    thread that opens
            //   1. loads the offset: 0
            //                                  2. stores the offset, and the limit in `enable`
            //   3. loads the limit, runs on
            //
            // No limit has bit 63, so the addition adds 0. It makes the address of the offset
            // depend on the limit, as a barrier would, but without waiting for other loads. The
            // CPU's id, the region and all after it depend on the offset.
            "add {next}, {first}, {next}, lsr #63",
            "ldur {area}, [{next}, #-{first_at}]",
            // The size in grains, rounded up. The entry of the largest lies in front.
            "add {place}, {place}, #{round}",
            "lsr {place}, {place}, #{grain_shift}",
            "add {t}, {first}, #{offsets_high}, lsl #12",
            "sub {t}, {t}, {place}, lsl #1",
            "ldrh {place:w}, [{t}, #{offsets_low}]",
            "mrs {t}, tpidr_el0",
            "add {area}, {area}, {t}",
            neap_os::pop_sequence!(
                look:
                    "rbit {t}, {value}",
                    "clz {t}, {t}",
                    "sub {area}, {first}, #{states}",
                    "ldr {area}, [{area}, {t}, lsl #3]",
                    "lsr {t}, {value}, {area}",
                    "add {t}, {t}, {area}",
                    "ldurb {area:w}, [{t}, #-{behind}]",
                    "cmp {area:w}, #{cached}",
                    // Null fails the check, too. The second comparison with the limit refuses:
                    // `place` holds a stack's address, which is above any size.
                    "b.ne 27b";
                then:
                    "mov {area:w}, #{allocated}",
                    "sturb {area:w}, [{t}, #-{behind}]"
            ),
            first = in(reg) first!($fast), first_at = const SequenceTable::FIRST,
            place = inout(reg) $size => _, area = out(reg) _, t = out(reg) _, next = out(reg) _, value = out(reg) object,
            limit = const $limit - SequenceTable::FIRST as isize, round = const crate::size_class::GRAIN - 1, grain_shift = const GRAIN_SHIFT,
            offsets_high = const (NO_SIZE - SequenceTable::FIRST as isize) >> 12, offsets_low = const (NO_SIZE - SequenceTable::FIRST as isize) & 0xfff,
            states = const -from_first!(states), behind = const BEHIND, cached = const CACHED, allocated = const ALLOCATED,
            options(nostack),
        );
        object
    }};
}

/// See `FastPath::free`.
macro_rules! free {
    ($fast:ident, $pointer:ident) => {{
        // A thread that has an object got it after `extend_covered_range`, `enable` and the stores
        // of the tables. So it sees all of them. For a pointer to no object any of these may be
        // missing.
        //
        //                 place := value - base
        //                 if place >= bytes: go to unknown
        //                 home := states[trailing zeros of value]
        //                 t := address of the state byte of value
        //                 home := cached
        //                 if state byte at t != allocated: go to charged
        // marked (25):    state byte at t := home
        //                 home := kinds[place >> kind_shift]
        //                 place := home >> home_bits
        //                 push_sequence (20 to 24)
        // charged (26):   home := paid
        //                 if state byte at t = accounted: go to marked
        //                 go to unknown
        //
        // Registers: first: address of CPU 0's entry. value: the object. area: address of the rseq
        // area. place: the object's distance from the arena's base, then its stack's offset. home:
        // the word of the state table, then the old and the new state, then the entry of the kind
        // map, whose low 16 bits are the home. t: `bytes`, then the address of the state byte, then
        // the kind map, then see push_sequence.
        asm!(
            on_cache_line!(),
            "ldur {place}, [{first}, #{base}]",
            "ldur {t}, [{first}, #{bytes}]",
            "sub {place}, {value}, {place}",
            "cmp {place}, {t}",
            "b.hs {unknown}",
            // A pointer that is not a multiple of a grain has a state byte that is always 0.
            "rbit {home}, {value}",
            "clz {home}, {home}",
            "sub {t}, {first}, #{states}",
            "ldr {home}, [{t}, {home}, lsl #3]",
            "lsr {t}, {value}, {home}",
            "add {t}, {t}, {home}",
            "ldurb {home:w}, [{t}, #-{behind}]",
            "cmp {home:w}, #{allocated}",
            "mov {home:w}, #{cached}",
            "b.ne 26f",
            "25:",
            "sturb {home:w}, [{t}, #-{behind}]",
            // An object with a state byte has an entry in the kind map.
            "ldur {t}, [{first}, #{kinds}]",
            "lsr {place}, {place}, #{kind_shift}",
            "ldr {home:w}, [{t}, {place}, lsl #2]",
            "lsr {place:w}, {home:w}, #{home_bits}",
            neap_os::push_sequence!(
                // Charged objects. The new state is not computed from the old one without a jump:
                // the next malloc would wait for that.
                "26:",
                "ldurb {home:w}, [{t}, #-{behind}]",
                "cmp {home:w}, #{accounted}",
                "mov {home:w}, #{paid}",
                "b.eq 25b",
                "b {unknown}"
            ),
            first = in(reg) first!($fast), value = in(reg) $pointer,
            area = in(reg) neap_os::thread::pointer().wrapping_add_signed($fast.table.offset.load(Ordering::Relaxed)),
            place = out(reg) _, home = out(reg) _, t = out(reg) _,
            base = const from_first!(base), bytes = const from_first!(bytes), kinds = const from_first!(kinds),
            states = const -from_first!(states), behind = const BEHIND, kind_shift = const KindEntry::SHIFT,
            home_bits = const HOME_BITS, allocated = const ALLOCATED, cached = const CACHED,
            accounted = const ACCOUNTED, paid = const PAID,
            unknown = label { return FreeOutcome::NotFastPath },
            full = label { return FreeOutcome::CacheFull },
            aborted = label { return FreeOutcome::CacheFull },
            options(nostack),
        );
        FreeOutcome::Cached
    }};
}
