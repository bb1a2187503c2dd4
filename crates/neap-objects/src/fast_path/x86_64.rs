//! malloc's and free's assembly for x86-64.
//!
//! Plain loads stay in order here, so they pair with the Release stores in `enable` and
//! `extend_covered_range`.

/// See `FastPath::take_top`. Null is a refusal.
macro_rules! take_top {
    ($fast:ident, $size:ident, $limit:ident) => {{
        let object: *mut u8;
        asm!(
            "27:",
            "xor {value:e}, {value:e}",
            "cmp {place}, qword ptr [{table} + {limit}]",
            "jae 23f",
            // `place` becomes minus the size in grains, rounded up.
            "neg {place}",
            "sar {place}, {grain_shift}",
            "movzx {place:e}, word ptr [{table} + {place} * 2 + {offsets}]",
            // The offset is loaded after the limit. In the other order the sequence would write
            // over the start of the thread's own control block:
            //
            //   this thread                    thread that opens
            //   1. loads the offset: 0
            //                                  2. stores the offset, and the limit in `enable`
            //   3. loads the limit, runs on
            "mov {offset}, qword ptr [{table}]",
            neap_os::pop_sequence!(
                look:
                    "tzcnt {offset}, {value}",
                    "mov {t}, qword ptr [{table} + {offset} * 8 + {states}]",
                    "shrx {offset}, {value}, {t}",
                    "cmp byte ptr [{t} + {offset} - {behind}], {cached}",
                    // Null fails the check, too. The second comparison with the limit refuses:
                    // `place` holds a stack's address, which is above any size.
                    "jne 27b";
                then:
                    "mov byte ptr [{t} + {offset} - {behind}], {allocated}"
            ),
            table = in(reg) &raw const $fast.table, first = const SequenceTable::FIRST,
            place = inout(reg) $size => _, offset = out(reg) _, t = out(reg) _, next = out(reg) _, value = out(reg) object,
            limit = const $limit, offsets = const NO_SIZE, grain_shift = const GRAIN_SHIFT,
            states = const from_table!(states), behind = const BEHIND, cached = const CACHED, allocated = const ALLOCATED,
            options(nostack),
        );
        object
    }};
}

/// See `FastPath::free`.
macro_rules! free {
    ($fast:ident, $pointer:ident) => {{
        // The base and the table's offset were stored before any object was handed out, so
        // a thread that has an object sees both. The offset is not loaded by the table's address,
        // so that a sequence does not wait for that.
        asm!(
            "mov {place}, {value}",
            "sub {place}, qword ptr [{table} + {base}]",
            "cmp {place}, qword ptr [{table} + {bytes}]",
            "jae {unknown}",
            // A pointer that is not a multiple of a grain has a state byte that is always 0.
            "tzcnt {home}, {value}",
            "mov {t}, qword ptr [{table} + {home} * 8 + {states}]",
            "shrx {home}, {value}, {t}",
            "cmp byte ptr [{t} + {home} - {behind}], {allocated}",
            "jne 26f",
            "mov byte ptr [{t} + {home} - {behind}], {cached}",
            "25:",
            // An object with a state byte has an entry in the kind map.
            "shr {place}, {kind_shift}",
            "mov {home}, qword ptr [{table} + {kinds}]",
            "mov {home:e}, dword ptr [{home} + {place} * 4]",
            "mov {place:e}, {home:e}",
            "shr {place:e}, {home_bits}",
            neap_os::push_sequence!(),
            // Charged objects. The code lies behind the function, where a short jump reaches
            // it. The new state is not computed from the old one without a jump: the next
            // malloc would wait for that.
            ".subsection 1",
            "26:",
            "cmp byte ptr [{t} + {home} - {behind}], {accounted}",
            "jne {unknown}",
            "mov byte ptr [{t} + {home} - {behind}], {paid}",
            "jmp 25b",
            "28:",
            ".subsection 0",
            neap_os::unwinds_like!("26b" to "28b", like: "25b"),
            table = in(reg) &raw const $fast.table, first = const SequenceTable::FIRST, value = in(reg) $pointer,
            place = out(reg) _, home = out(reg) _, t = out(reg) _, offset = in(reg) $fast.table.offset.load(Ordering::Relaxed),
            base = const from_table!(base), bytes = const from_table!(bytes), kinds = const from_table!(kinds),
            states = const from_table!(states), behind = const BEHIND, kind_shift = const KindEntry::SHIFT, home_bits = const HOME_BITS,
            allocated = const ALLOCATED, cached = const CACHED, accounted = const ACCOUNTED, paid = const PAID,
            unknown = label { return FreeOutcome::NotFastPath },
            full = label { return FreeOutcome::CacheFull },
            aborted = label { return FreeOutcome::CacheFull },
            options(nostack),
        );
        FreeOutcome::Cached
    }};
}
