//! The one table of options. It makes the struct [`Options`] with its defaults, and the parser of
//! `NEAP` reads it. `neap options` and `neap run --help` print it. A test compares the table in
//! `docs/guide/options.md` with it.

use crate::options::kinds::{ValueKind, number};
use crate::options::types::{AUTO, Background, LONGEST_PATH, Path, Setting, ThreadGroups};
use neap_os::cpuset;
use neap_os::nodes::MAX_NODES;
use neap_os::topology::{CpuSet, MAX_CPUS};
use neap_pages::{BATCH_SCALE, MOST_BATCH_SCALE};

/// One option: its key, its values, its default and what it does.
#[derive(Debug)]
pub struct OptionRow {
    /// The key.
    pub key: &'static str,
    /// The values that may follow the colon.
    pub values: &'static str,
    /// The value if the option is not given.
    pub default: &'static str,
    /// Its effect, and when to change it.
    pub text: &'static str,
    /// Set if the option may change while the process runs, as by `neap set`.
    pub setting: Option<Setting>,
    /// The values, for the parser.
    pub(super) kind: ValueKind,
    field: fn(&mut Options) -> Field<'_>,
}

/// The field of an option.
pub(super) enum Field<'a> {
    Switch(&'a mut bool),
    Count(&'a mut u32),
    Bytes(&'a mut u64),
    /// `None` is [`AUTO`].
    Pages(&'a mut Option<u32>),
    Background(&'a mut Background),
    Groups(&'a mut ThreadGroups),
    Cpus(&'a mut CpuSet),
    Path(&'a mut Path),
}

/// Makes the table, and [`Options`] with a field for each row. A row begins with the field: its doc
/// comment, its key, its variant of [`Field`], its type and its default.
macro_rules! options {
    ($($(#[$doc:meta])* $key:ident: $variant:ident($type:ty) = $value:expr, default: $default:literal,
        kind: $kind:expr, $(setting: $setting:ident,)? text: $text:literal;)*) => {
        /// Options of an instance.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Options {
            $($(#[$doc])* pub $key: $type,)*
        }

        impl Options {
            /// The defaults.
            pub const DEFAULT: Options = Options { $($key: $value,)* };
        }

        /// Every option there is.
        pub static TABLE: [OptionRow; [$($default),*].len()] = [$(OptionRow {
            key: stringify!($key),
            values: $kind.values,
            default: $default,
            text: $text,
            setting: [$(Setting::$setting)?].as_slice().first().copied(),
            kind: $kind,
            // A function, not a closure: its path begins with that of `TABLE`, which
            // `xtask/src/library/depth.rs` matches.
            field: {
                fn $key(options: &mut Options) -> Field<'_> {
                    Field::$variant(&mut options.$key)
                }
                $key
            },
        }),*];
    };
}

options! {
    /// Use restartable sequences if they work.
    rseq: Switch(bool) = true, default: "on", kind: ValueKind::ON_OFF,
        text: "restartable sequences for per-CPU lists, where kernel and C library have them; off for debuggers that step through malloc";

    /// When neap has a thread. Without it, ordinary calls release memory.
    background: Background(Background) = Background::Threaded, default: "auto", kind: ValueKind::BACKGROUND,
        text: "a thread that gives memory back: auto: from the program's first thread on; on: from the start; off: never, memory goes back from within calls that allocate or free";

    /// Use huge pages for fresh memory where much of it is used, or where the system gives them to
    /// all memory.
    huge: Switch(bool) = true, default: "on", kind: ValueKind::ON_OFF,
        text: "whole huge pages for memory that is used in bulk, and for allocations from 2 MiB on (unless the system gives them on request and the allocation is larger than the rest of the heap)";

    /// The most bytes that may be in use at a time; 0 for no limit; [`AUTO`] to follow the
    /// container.
    limit: Bytes(u64) = 0, default: "none", kind: ValueKind::LIMIT, setting: Limit,
        text: "the most resident memory of the heap, with its tables and untouched allocations; allocations beyond it fail once free memory was released and shrinkers were asked; auto: what the container or machine leaves, looked at once a second; a percentage: also at most that part of the container's limit; a heap at such a limit goes beyond it, unless refuse:on has allocations fail";

    /// The use above which neap releases memory in the background, as a number of
    /// [`Setting::High`]; 0 for no such bound.
    high: Bytes(u64) = 0, default: "none", kind: ValueKind::HIGH, setting: High,
        text: "use of the heap above which neap gives memory back in the background: it drains caches, releases free memory and asks shrinkers; allocations go on";

    /// Bytes that stay free below the limit, as a number of [`Setting::Reserve`].
    reserve: Bytes(u64) = AUTO, default: "auto", kind: ValueKind::RESERVE, setting: Reserve,
        text: "memory that stays free below the limit: of the container with limit:auto or a percentage (auto: a tenth, at most 64m), or of limit in bytes (auto: none); at most nine tenths of it";

    /// Milliseconds between two ticks.
    interval: Count(u32) = 250, default: "250", kind: number!(10, 60_000), setting: Interval,
        text: "maintenance interval in milliseconds";

    /// Make the page of numbers that `neap stat` reads.
    stat: Switch(bool) = true, default: "on", kind: ValueKind::ON_OFF,
        text: "a page of numbers for `neap stat`; descriptor 1000, or the next free one, belongs to it";

    /// CPUs that neap does not interrupt, besides those that the kernel lists as isolated.
    isolated: Cpus(CpuSet) = CpuSet::EMPTY, default: "the kernel's list", kind: ValueKind::CPUS,
        text: "more CPUs that nothing neap does interrupts: slower lists there, and no memory goes back by itself while they run the process";

    /// Most pages that a CPU's page list keeps; `None`: tuned at run time.
    page_list_high: Pages(Option<u32>) = None, default: "auto", kind: ValueKind::PAGES, setting: PageListHigh,
        text: "maximum pages per CPU page list; auto: tuned at run time; a number: fixed; 0: lists disabled";

    /// The most doublings of the pages that move between a page list and the zone at once.
    page_batch_scale: Count(u32) = BATCH_SCALE, default: "5", kind: number!(0, 6), setting: PageBatchScale,
        text: "most doublings of the pages that move at once between a CPU page list and the zone, 63 pages of 4 KiB at first; fewer: shorter calls, more of them";

    /// Number of simulated nodes, over which neap spreads the CPUs. 0 stands for the machine's own
    /// nodes. 1 treats all memory alike.
    nodes: Count(u32) = 0, default: "auto", kind: ValueKind::NODES,
        text: "memory from the NUMA node nearest to the CPU that asks; 1: from wherever it is touched first; a number simulates so many, for tests";

    /// Whether threads are put into groups of their own.
    groups: Groups(ThreadGroups) = ThreadGroups::Off, default: "off", kind: ValueKind::GROUPS,
        text: "memory groups for the program's threads, by their names or one each, for `neap stat --groups` and `neap top`";

    /// Whether `malloc` in a group at its limit returns null.
    refuse: Switch(bool) = false, default: "off", kind: ValueKind::ON_OFF, setting: Refuse,
        text: "malloc fails in a memory group at its limit, or at a limit:auto; off: it goes beyond the limit, and is counted";

    /// File of the [trace](crate::trace), which records pages that neap hands out and takes back.
    trace: Path(Path) = Path::NONE, default: "none", kind: ValueKind::PATH,
        text: "record pages that are handed out and come back, as `neap run --trace` does: 64 MiB of disk";

    /// Bytes between two samples of allocations, on average; 0: no samples.
    profile: Bytes(u64) = 0, default: "off", kind: ValueKind::PROFILE, setting: Profile,
        text: "samples of allocations for `neap profile`, one in so many bytes on average (on: 512k), with up to 32 KiB of the stack each; from 512k on, fewer while more than 1280 come in a second; at most 44 MiB of memory";

    /// File for heap profiles before an allocation is refused or the container's memory ends.
    profile_at_limit: Path(Path) = Path::NONE, default: "none", kind: ValueKind::PATH,
        text: "with profile: write a heap profile before an allocation is refused, and when the container's memory is about to run out; to the file with .PID.N behind its name, at most once a minute and 16 times, for `neap profile --read`";

    /// Whether writes beyond allocations and wrong frees are found.
    check: Switch(bool) = false, default: "off", kind: ValueKind::ON_OFF,
        text: "for tests and canaries: writes beyond an allocation, before it and after its free, and frees that name a wrong size, end the process with a line; found at a free or at the end; slow, 80 bytes for each allocation and 16 MiB of freed ones";

    /// Bytes between two guarded samples of allocations, on average; 0 for no samples.
    guard: Bytes(u64) = 0, default: "off", kind: ValueKind::GUARD,
        text: "samples of allocations of up to a page, one in so many bytes on average (on: 512k), each on a page between two without access, which also loses its access at the free: an overflow, an underflow or a use after free ends the process with a report; a handler of SIGSEGV; from 512k on, one between two ticks of neap's thread or of slow calls (at most 4 in a second); at most 256 at a time, 10 MiB of memory";

    /// Whether an unknown option ends the process.
    strict: Switch(bool) = false, default: "off", kind: ValueKind::ON_OFF,
        text: "a program that is told an unknown key or value exits with status 125 at its first allocation; NEAP_STRICT=1 is equivalent";
}

/// The table states these bounds as text.
const _: () = assert!(MOST_BATCH_SCALE == 6 && MAX_NODES == 32 && MAX_CPUS == 1024 && LONGEST_PATH == 255);

/// Length of the longest key.
pub(super) const LONGEST_KEY: usize = {
    let (mut longest, mut row) = (0, 0);
    while row < TABLE.len() {
        let length = TABLE[row].key.len();
        longest = if length > longest { length } else { longest };
        row += 1;
    }
    longest
};

impl OptionRow {
    /// Returns the option's field in `options`.
    // A function of its own, since `xtask/src/library/depth.rs` states the targets of its call.
    #[inline(never)]
    pub(super) fn field<'a>(&self, options: &'a mut Options) -> Field<'a> {
        (self.field)(options)
    }

    /// Sets the option in `options` to the value that is written as `text`. A list of CPUs is added
    /// to the CPUs before it.
    ///
    /// # Errors
    /// The fault of the text.
    pub(super) fn assign(&self, options: &mut Options, text: &[u8]) -> Result<(), &'static str> {
        let wrong = self.kind.wrong;
        match self.field(options) {
            Field::Path(path) => *path = Path::absolute(text).ok_or(wrong)?,
            Field::Cpus(cpus) => {
                let mut highest = None;
                let parsed = cpuset::parse(text, |_, high| highest = highest.max(Some(high as usize)));
                let (Ok(()), Some(highest), Some(set)) = (parsed, highest, CpuSet::parse(text)) else {
                    return Err(wrong);
                };
                if highest >= MAX_CPUS {
                    return Err("has CPUs beyond 1023, the last that can be named");
                }
                cpus.insert_all(&set);
            }
            field => field.set(self.kind.parse(text)?),
        }
        Ok(())
    }
}

impl Field<'_> {
    /// Returns the number of a setting's value; 0 for a type that no setting has.
    pub(super) fn number(self) -> u64 {
        match self {
            Field::Switch(on) => (*on).into(),
            Field::Count(count) => (*count).into(),
            Field::Bytes(bytes) => *bytes,
            Field::Pages(pages) => pages.map_or(AUTO, u64::from),
            Field::Background(_) | Field::Groups(_) | Field::Cpus(_) | Field::Path(_) => 0,
        }
    }

    /// Sets the field to the value of a number that the option's kind accepts.
    pub(super) fn set(self, number: u64) {
        match self {
            Field::Switch(on) => *on = number == 1,
            Field::Count(count) => *count = number as u32,
            Field::Bytes(bytes) => *bytes = number,
            Field::Pages(pages) => *pages = (number != AUTO).then_some(number.min(u32::MAX.into()) as u32),
            Field::Background(background) => *background = Background::ALL[number.min(2) as usize],
            Field::Groups(groups) => *groups = ThreadGroups::ALL[number.min(2) as usize],
            Field::Cpus(_) | Field::Path(_) => (),
        }
    }
}
