//! The hot part: what every `malloc` and `free` of a small object touches, and nothing else.
//!
//! Sits between the entry points and the restartable sequences. A call that cannot be served by this CPU's stack alone
//! answers "no" and has changed nothing that matters; the caller then goes to [`Objects`](crate::objects::Objects). No
//! lock, no locked instruction, no system call, no statistics. All zeroes is a valid state in which everything is
//! answered "no", so an allocator that is not set up yet, or has no Rseq slots, needs no test of its own here.
//!
//! [`Hot::allocate`] and [`Hot::free`] are a block of assembly each, from the size or the pointer
//! to the commit: as the compiler writes them they lie on three lines of the processor's instead of
//! two, and lines are what calls of them cost (docs/design/fast-path.md).

use crate::paid::Payback;
use crate::region::STACKS_END;
use crate::size_class::{Class, GRAIN, LARGEST, OF_GRAINS};
use crate::state::{ACCOUNTED, ALLOCATED, BEHIND, CACHED, PAID, States};
use core::arch::asm;
use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use neap_base::Platform;
use neap_os::rseq::{self, Outcome, Table};
use neap_pages::{Frame, NodePages};

/// What lies in 4 KiB of the arena: an entry of the kind map, their home in the low 16 bits, which a comparison can look at where
/// they are, and above it the place of the class's stack ([`Class::place`]). A place of zero: no objects.
///
/// The home is the CPU that its objects were last handed to in bulk, the same for all of a [part](Class::home_bytes) of a slab. An object that is freed elsewhere is a guest there and
/// goes back by way of the barn instead of being allocated again on the spot. Otherwise objects that lie side by side come
/// to be used by different CPUs, and every allocation and free of one takes the cache line of its state byte, and perhaps
/// its own, from the others': a program whose threads exchange objects is then half as fast. A hint: a wrong home costs time only.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct KindEntry(AtomicU32);

impl KindEntry {
    /// Bytes of the arena that an entry stands for, on every page size, as a power of two.
    pub const SHIFT: u32 = 12;

    /// The shift of the kind map as a side table.
    pub const TABLE_SHIFT: u8 = 10;

    /// What lies there.
    pub fn class(&self) -> Class {
        Kind(self.0.load(Ordering::Relaxed)).class()
    }

    /// Says what lies there from now on; [`Class::NONE`] for no objects.
    pub fn set(&self, class: Class) {
        self.0.store(u32::from(class.place()) << HOME_BITS, Ordering::Relaxed);
    }

    /// The CPU where the page is at home; cut to 16 bits, more than any kernel has.
    pub fn home(&self) -> u16 {
        Kind(self.0.load(Ordering::Relaxed)).home()
    }

    /// Makes a CPU the home of the page. The caller has an object of the same slab, so what lies there does not change meanwhile.
    pub fn set_home(&self, cpu: u16) {
        let entry = self.0.load(Ordering::Relaxed);
        let new = entry >> HOME_BITS << HOME_BITS | u32::from(cpu);
        // Every free reads the entry: it is written only if that says something new.
        if entry != new {
            self.0.store(new, Ordering::Relaxed);
        }
    }
}

const HOME_BITS: u32 = u16::BITS;
const GRAIN_SHIFT: u32 = GRAIN.trailing_zeros();

/// What an entry of the kind map said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Kind(u32);

impl Kind {
    /// The class of what lies there.
    #[inline]
    pub fn class(self) -> Class {
        Class::of_place(self.place())
    }

    #[inline(always)]
    pub(crate) fn place(self) -> u16 {
        (self.0 >> HOME_BITS) as u16
    }

    #[inline(always)]
    fn home(self) -> u16 {
        self.0 as u16
    }
}

/// Tables and addresses, on cache lines that are only read, and behind these the table of the sequences, which takers write to.
///
/// `malloc` and `free` have the table's address in a register. Most of what they look at they reach from there by a displacement of one byte: it lies in
/// the 128 bytes before the table.
///
/// It is made for the start of a page, where the process's is. Programs touch the first line of every page that they get, and all of these compete for
/// the few places that caches have for them: what else lies there has to be had from farther away each time. And a load may wait for the stores before it
/// that go to the same place of another page, as those into the stacks of a region do. So what malloc and free look at lies behind both, but for the
/// words of the states, of which there is no room behind: they lie where a region has the stacks of two large classes.
#[derive(Debug)]
#[repr(C)]
pub struct Hot {
    apart: [u64; APART],
    /// The state tables.
    pub(crate) states: States,
    /// Sizes below this are served here to threads whose [word](neap_os::entered) nobody has looked at; 0: none.
    limit: AtomicUsize,
    /// The same for threads that are known to have entered nothing.
    limit_outside: AtomicUsize,
    /// The same for others, and whether anything is.
    pub(crate) served: AtomicUsize,
    /// The arena's base.
    base: AtomicUsize,
    /// Bytes of the arena that may hold objects.
    bytes: AtomicUsize,
    /// The kind map.
    kinds: AtomicPtr<KindEntry>,
    /// The frame of address 0. This and what follows are for objects that somebody pays for: see [`owners`](crate::owners).
    pub(crate) frames: AtomicPtr<Frame>,
    /// The page size as a power of two.
    pub(crate) page_shift: AtomicU32,
    /// The bits of an address that say where on a page it is.
    pub(crate) page_mask: AtomicUsize,
    /// Where who paid for an object is paid back.
    pub(crate) payback: AtomicPtr<Payback>,
    /// What the sequences start from.
    pub(crate) table: Table,
    /// For every size in grains, rounded up, the largest first: the place of its class's stack.
    places: [u16; PLACES],
}

/// Words from the start of a page to where it is calm.
const APART: usize = 389;

/// Sizes that are told apart, 0 among them.
const PLACES: usize = LARGEST / GRAIN + 1;

/// Where a field lies from the table.
macro_rules! from_table {
    ($field:ident) => {
        offset_of!(Hot, $field) as isize - offset_of!(Hot, table) as isize
    };
}

/// Where the place of size 0 lies from the table.
const NO_SIZE: isize = from_table!(places) + (PLACES as isize - 1) * size_of::<u16>() as isize;

const fn places() -> [u16; PLACES] {
    let mut places = [0; PLACES];
    let mut grains = 0;
    while grains < PLACES {
        places[PLACES - 1 - grains] = Class(OF_GRAINS[grains]).place();
        grains += 1;
    }
    places
}

const _: () = {
    assert!(offset_of!(Hot, table) <= offset_of!(Hot, limit) + 128 && align_of::<Table>() >= 64);
    // Behind the stacks.
    assert!(offset_of!(Hot, limit) % 4096 >= STACKS_END && offset_of!(Hot, table) % 4096 >= STACKS_END);
    // Not at the start of a page: the states, and the places of sizes of whole pages, which programs go through page by page.
    assert!(offset_of!(Hot, states) >= 64 && offset_of!(Hot, states) + size_of::<States>() <= 4096);
    let mut size = 4096;
    while size <= LARGEST {
        assert!((offset_of!(Hot, places) + (PLACES - 1 - size / GRAIN) * size_of::<u16>()) % 4096 >= 64);
        size += 4096;
    }
};

/// What became of a `free`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Freed {
    /// The object is in a stack of this CPU.
    Done,
    /// The object is marked as cached and belongs to the caller, who has to put it somewhere.
    Unplaced,
    /// Not a small object, or not one that this part knows, or not one that the program has: nothing has changed.
    Unknown,
}

impl Hot {
    /// Everything is answered "no".
    pub const fn closed() -> Hot {
        Hot {
            apart: [0; APART],
            states: States::none(),
            limit: AtomicUsize::new(0),
            limit_outside: AtomicUsize::new(0),
            served: AtomicUsize::new(0),
            base: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            kinds: AtomicPtr::new(core::ptr::null_mut()),
            frames: AtomicPtr::new(core::ptr::null_mut()),
            page_shift: AtomicU32::new(0),
            page_mask: AtomicUsize::new(0),
            payback: AtomicPtr::new(core::ptr::null_mut()),
            table: Table::unopened(),
            places: places(),
        }
    }

    /// Says where the tables of an arena are. Called once; alone, it is enough for objects that somebody pays for.
    ///
    /// # Safety
    /// The tables belong to the arena of `pages`, which `payback` is of, and no other thread has used this value before.
    pub(crate) unsafe fn open<P: Platform>(
        &self,
        pages: &NodePages<P>,
        kinds: usize,
        states: &States,
        payback: &Payback,
    ) {
        let base = pages.base();
        self.base.store(base, Ordering::Relaxed);
        self.kinds.store(core::ptr::with_exposed_provenance_mut(kinds), Ordering::Relaxed);
        self.states.copy(states);
        let frames = pages.frames().first().wrapping_sub(base >> pages.page_shift());
        self.frames.store(frames.cast_mut(), Ordering::Relaxed);
        self.page_shift.store(pages.page_shift(), Ordering::Relaxed);
        self.page_mask.store(pages.page_size() - 1, Ordering::Relaxed);
        self.payback.store(core::ptr::from_ref(payback).cast_mut(), Ordering::Relaxed);
    }

    /// Lets the fast paths work, after [`Hot::open`].
    pub(crate) fn serve(&self) {
        // Release: who sees them sees the rest; pairs with the load in `take_top`, and the Acquire in `allocate_owned` and `put`.
        for limit in [&self.served, &self.limit_outside, &self.limit] {
            limit.store(LARGEST + 1, Ordering::Release);
        }
    }

    /// Lets [`Hot::allocate`] answer "no" from now on, so that what a thread has entered is looked at first. Called by a thread before it enters
    /// anything: it sees its own store, and others, who have entered nothing, may see it when they like.
    pub fn look_at_entered(&self) {
        // Every malloc reads the line: it is written only if that says something new.
        if self.limit.load(Ordering::Relaxed) > 0 {
            self.limit.store(0, Ordering::Relaxed);
        }
    }

    /// Lets [`Hot::allocate_outside`] answer "no" as well, so that threads that have entered nothing are seen by the slow way.
    pub fn serve_entered_alone(&self) {
        self.look_at_entered();
        self.limit_outside.store(0, Ordering::Relaxed);
    }

    /// Lets `free` know that the arena reaches up to `bytes` from its base. Called before an object there is handed out.
    pub(crate) fn cover(&self, bytes: usize) {
        if self.bytes.load(Ordering::Relaxed) < bytes && self.served.load(Ordering::Relaxed) > 0 {
            self.bytes.fetch_max(bytes, Ordering::Release); // Pairs with the load in `free`.
        }
    }

    /// Whether [`Hot::allocate`] serves anything: no thread has entered anything yet.
    pub fn serves_unasked(&self) -> bool {
        self.limit.load(Ordering::Relaxed) > 0
    }

    /// Whether threads that have entered nothing are served at all.
    pub fn serves_all(&self) -> bool {
        self.limit_outside.load(Ordering::Relaxed) > 0
    }

    /// An object of at least `size` bytes, if the topmost is one that nobody pays for, and no thread has [`entered`](neap_os::entered) anything of this
    /// manager's yet; `None`: ask whether this one has.
    #[inline(always)]
    pub fn allocate(&self, size: usize) -> Option<NonNull<u8>> {
        self.take_top::<{ from_table!(limit) }>(size)
    }

    /// The same for a thread that has entered nothing; `None`: ask [`Objects`](crate::objects::Objects).
    #[inline(always)]
    pub fn allocate_outside(&self, size: usize) -> Option<NonNull<u8>> {
        self.take_top::<{ from_table!(limit_outside) }>(size)
    }

    /// The topmost object of this CPU's stack for `size` bytes, if the size is below the limit that lies so far from the table. The object's state is
    /// looked at before it is taken, so that there is one way to say no.
    #[inline(always)]
    fn take_top<const LIMIT: isize>(&self, size: usize) -> Option<NonNull<u8>> {
        if cfg!(miri) {
            return None; // It has no sequences, and so nothing to serve.
        }
        let object: *mut u8;
        // SAFETY: below the limit, which is not 0 then, the slots have been opened, and a size has an entry in `places`. The stack's objects lie
        // in the arena, whose states have bytes for all of it. Who sees the limit sees the rest: plain loads on x86-64, which stay in order,
        // pair with the Release in `serve`. The only stores are the commit, and that of the state of an object that is this thread's then.
        unsafe {
            asm!(
                "27:",
                "xor {value:e}, {value:e}",
                "cmp {place}, qword ptr [{table} + {limit}]",
                "jae 23f",
                // Grains, rounded up, below 0.
                "neg {place}",
                "sar {place}, {grain_shift}",
                "movzx {place:e}, word ptr [{table} + {place} * 2 + {places}]",
                // Only now. 1: this thread loads the offset, which is 0. 2: another opens the slots, and serves. 3: this one sees the limit, and writes over
                // the thread's own control block.
                "mov {offset}, qword ptr [{table}]",
                neap_os::pop_sequence!(
                    look:
                        "tzcnt {offset}, {value}",
                        "mov {t}, qword ptr [{table} + {offset} * 8 + {states}]",
                        "shrx {offset}, {value}, {t}",
                        "cmp byte ptr [{t} + {offset} - {behind}], {cached}",
                        // Null is not either. A stack's address is beyond any size, too.
                        "jne 27b";
                    then:
                        "mov byte ptr [{t} + {offset} - {behind}], {allocated}"
                ),
                table = in(reg) &raw const self.table, first = const Table::FIRST,
                place = inout(reg) size => _, offset = out(reg) _, t = out(reg) _, next = out(reg) _, value = out(reg) object,
                limit = const LIMIT, places = const NO_SIZE, grain_shift = const GRAIN_SHIFT,
                states = const from_table!(states), behind = const BEHIND, cached = const CACHED, allocated = const ALLOCATED,
                options(nostack),
            );
        }
        if object.is_null() {
            // SAFETY: no instruction. It keeps the way on from here behind the function, where a short jump reaches it.
            unsafe { asm!("", options(nomem, nostack, preserves_flags)) };
        }
        NonNull::new(object)
    }

    /// The topmost object of this CPU's stack for `size` bytes. It is marked as cached, and in the caller's hands.
    ///
    /// # Safety
    /// The size is no larger than the largest, and [`Hot::serve`] was called.
    #[inline(always)]
    pub(crate) unsafe fn pop(&self, size: usize) -> Option<NonNull<u8>> {
        #[expect(clippy::manual_div_ceil, reason = "two instructions instead of five")]
        // SAFETY: as the caller promises.
        let place = unsafe { *self.places.get_unchecked(PLACES - 1 - (size + GRAIN - 1) / GRAIN) };
        // SAFETY: the slots have been opened.
        NonNull::new(unsafe { rseq::pop(&self.table, usize::from(place)) })
    }

    /// Takes an object back.
    #[inline(always)]
    pub fn free(&self, pointer: *mut u8) -> Freed {
        if cfg!(miri) {
            return Freed::Unknown; // As in `take_top`.
        }
        // Who sees the number of bytes sees what it was raised for: plain loads on x86-64, which stay in order, pair with the Release in `cover`. The
        // base and the table's offset are loaded before it, and known to whoever was ever handed an object; that offset not by way of the table's
        // address, so that a sequence does not wait for it.
        // SAFETY: below the number of bytes, which is 0 until the slots have been opened, the kind map has an entry, and the state tables have bytes, for
        // every part of the arena. The stores are that of the state of an object that is this thread's then, and those of a push.
        unsafe {
            asm!(
                "mov {place}, {value}",
                "sub {place}, qword ptr [{table} + {base}]",
                "cmp {place}, qword ptr [{table} + {bytes}]",
                "jae {unknown}",
                // What starts on no grain has a state that nobody changes.
                "tzcnt {home}, {value}",
                "mov {t}, qword ptr [{table} + {home} * 8 + {states}]",
                "shrx {home}, {value}, {t}",
                "cmp byte ptr [{t} + {home} - {behind}], {allocated}",
                "jne 26f",
                "mov byte ptr [{t} + {home} - {behind}], {cached}",
                "25:",
                // Who has a state has a kind.
                "shr {place}, {kind_shift}",
                "mov {home}, qword ptr [{table} + {kinds}]",
                "mov {home:e}, dword ptr [{home} + {place} * 4]",
                "mov {place:e}, {home:e}",
                "shr {place:e}, {home_bits}",
                neap_os::push_sequence!(),
                // What somebody pays for, behind the function, where a short jump reaches it. A state that depended on the one before, without a jump, is what
                // the next malloc would wait for.
                ".subsection 1",
                "26:",
                "cmp byte ptr [{t} + {home} - {behind}], {accounted}",
                "jne {unknown}",
                "mov byte ptr [{t} + {home} - {behind}], {paid}",
                "jmp 25b",
                "28:",
                ".subsection 0",
                neap_os::unwinds_like!("26b" to "28b", like: "25b"),
                table = in(reg) &raw const self.table, first = const Table::FIRST, value = in(reg) pointer,
                place = out(reg) _, home = out(reg) _, t = out(reg) _, offset = in(reg) self.table.offset.load(Ordering::Relaxed),
                base = const from_table!(base), bytes = const from_table!(bytes), kinds = const from_table!(kinds),
                states = const from_table!(states), behind = const BEHIND, kind_shift = const KindEntry::SHIFT, home_bits = const HOME_BITS,
                allocated = const ALLOCATED, cached = const CACHED, accounted = const ACCOUNTED, paid = const PAID,
                unknown = label { return Freed::Unknown },
                full = label { return Freed::Unplaced },
                aborted = label { return Freed::Unplaced },
                options(nostack),
            );
        }
        Freed::Done
    }

    /// What lies at an address.
    ///
    /// # Safety
    /// The address is in the arena that this was opened for.
    #[inline]
    pub unsafe fn kind(&self, pointer: *const u8) -> Kind {
        let offset = pointer.addr().wrapping_sub(self.base.load(Ordering::Relaxed));
        // SAFETY: the kind map has an entry for every part of the arena.
        let entry = unsafe { &*self.kinds.load(Ordering::Relaxed).wrapping_add(offset >> KindEntry::SHIFT) };
        Kind(entry.0.load(Ordering::Relaxed))
    }

    /// Puts an object that is marked as cached, and in the caller's hands, on a stack of this CPU; `false`: the caller still
    /// has it.
    ///
    /// # Safety
    /// `kind` is what lies at `object`, no [`Class::NONE`], in the instance that this was opened for.
    #[inline(always)]
    pub unsafe fn put(&self, kind: Kind, object: *mut u8) -> bool {
        // Acquire pairs with the Release in `serve`. Where that was not called there is nothing to put the object on.
        // SAFETY: that is not 0, so the slots have been opened; as the caller promises.
        let push = || unsafe { rseq::push(&self.table, kind.place().into(), kind.home(), object) };
        self.served.load(Ordering::Acquire) > 0 && push() == Outcome::Committed
    }
}

/// A stack gave out an object that was not cached: it was freed twice at the very same moment, or a state table was
/// overwritten.
///
/// Never returns; it has the type of an answer so that who hands an object out can end in it without a frame on the stack.
#[cold]
#[inline(never)]
pub fn corrupt(object: NonNull<u8>) -> Option<NonNull<u8>> {
    neap_os::write::die(format_args!(
        "double free: {object:p} was freed by two threads at once; found before it was handed out again"
    ))
}
