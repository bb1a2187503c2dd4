//! malloc's and free's assembly for x86-64.
//!
//! Plain loads stay in order here, so they pair with the Release stores in `enable` and
//! `extend_covered_range`.

/// See `FastPath::take_top`. Null is a refusal.
macro_rules! take_top {
    ($fast:ident, $size:ident, $limit:ident) => {{
        let object: *mut u8;
        // again (27):     value := null
        //                 if place >= limit: go to end (23)
        //                 place := offset of the stack for place bytes
        //                 offset := offset of the rseq area
        //                 pop_sequence (20 to 24), with
        //                   look: offset := trailing zeros of value
        //                         t := states[offset]
        //                         offset := value >> t
        //                         if state byte at t + offset != cached: go to again
        //                   then: state byte at t + offset := allocated
        //
        // Registers: table: address of `FastPath::table`. place: the size, then minus the size in
        // grains, then the stack's offset, then its address. offset: see pop_sequence, then the
        // number of zeros, then the index of the state byte. t: see pop_sequence, then the word of
        // the state table. next: the new head. value: the object.
        asm!(
            on_cache_line!(),
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
        //
        //                 place := value - base
        //                 if place >= bytes: go to unknown
        //                 home := trailing zeros of value
        //                 t := states[home]
        //                 home := value >> t
        //                 if state byte at t + home != allocated: go to charged
        //                 state byte at t + home := cached
        // marked (25):    home := kinds[place >> kind_shift]
        //                 place := home >> home_bits
        //                 push_sequence (20 to 24)
        //
        // behind the function:
        // charged (26):   if state byte at t + home != accounted: go to unknown
        //                 state byte at t + home := paid
        //                 go to marked
        // last (28):
        //
        // Registers: table: address of `FastPath::table`. value: the object. place: its distance
        // from the arena's base, then its stack's offset. home: the number of zeros, then the index
        // of the state byte, then the entry of the kind map, whose low 16 bits are the home. t: the
        // word of the state table, then see push_sequence. offset: offset of the rseq area.
        asm!(
            on_cache_line!(),
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
