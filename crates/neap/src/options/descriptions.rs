//! The one table of options. `neap options` and `neap run --help` print it, and a test compares the
//! table in `docs/guide/options.md` with it.

use crate::options::Setting;

/// One option: its key, its values, its default and what it does.
#[derive(Clone, Copy, Debug)]
pub struct Description {
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
}

/// Every option there is.
pub const DESCRIPTIONS: [Description; 20] = [
    Description {
        key: "rseq",
        values: "on, off",
        default: "on",
        text: "restartable sequences for per-CPU lists, where kernel and C library have them; off for debuggers that step through malloc",
        setting: None,
    },
    Description {
        key: "background",
        values: "auto, on, off",
        default: "auto",
        text: "a thread that gives memory back: auto: from the program's first thread on; on: from the start; off: never, memory goes back from within calls that allocate or free",
        setting: None,
    },
    Description {
        key: "huge",
        values: "on, off",
        default: "on",
        text: "whole huge pages for memory that is used in bulk, and for allocations from 2 MiB on (unless the system gives them on request and the allocation is larger than the rest of the heap)",
        setting: None,
    },
    Description {
        key: "limit",
        values: "none, auto, 1% to 100%, or bytes with k, m, g",
        default: "none",
        text: "the most resident memory of the heap, with its tables and untouched allocations; allocations beyond it fail once free memory was released and shrinkers were asked; auto: what the container or machine leaves, looked at once a second; a percentage: also at most that part of the container's limit; a heap at such a limit goes beyond it, unless refuse:on has allocations fail",
        setting: Some(Setting::Limit),
    },
    Description {
        key: "high",
        values: "none, 1% to 100% of the limit, or bytes with k, m, g",
        default: "none",
        text: "use of the heap above which neap gives memory back in the background: it drains caches, releases free memory and asks shrinkers; allocations go on",
        setting: Some(Setting::High),
    },
    Description {
        key: "reserve",
        values: "auto, 1% to 100% of the limit, or bytes with k, m, g",
        default: "auto",
        text: "memory that stays free below the limit: of the container with limit:auto or a percentage (auto: a tenth, at most 64m), or of limit in bytes (auto: none); at most nine tenths of it",
        setting: Some(Setting::Reserve),
    },
    Description {
        key: "interval",
        values: "10 to 60000",
        default: "250",
        text: "maintenance interval in milliseconds",
        setting: Some(Setting::Interval),
    },
    Description {
        key: "stat",
        values: "on, off",
        default: "on",
        text: "a page of numbers for `neap stat`; descriptor 1000, or the next free one, belongs to it",
        setting: None,
    },
    Description {
        key: "isolated",
        values: "CPUs, as in 1,3-5",
        default: "the kernel's list",
        text: "more CPUs that nothing neap does interrupts: slower lists there, and no memory goes back by itself while they run the process",
        setting: None,
    },
    Description {
        key: "page_list_high",
        values: "auto, pages",
        default: "auto",
        text: "maximum pages per CPU page list; auto: tuned at run time; a number: fixed; 0: lists disabled",
        setting: Some(Setting::PageListHigh),
    },
    Description {
        key: "page_batch_scale",
        values: "0 to 6",
        default: "5",
        text: "most doublings of the pages that move at once between a CPU page list and the zone, 63 pages of 4 KiB at first; fewer: shorter calls, more of them",
        setting: Some(Setting::PageBatchScale),
    },
    Description {
        key: "nodes",
        values: "auto, 1 to 32",
        default: "auto",
        text: "memory from the NUMA node nearest to the CPU that asks; 1: from wherever it is touched first; a number simulates so many, for tests",
        setting: None,
    },
    Description {
        key: "groups",
        values: "off, by-thread-name, by-thread",
        default: "off",
        text: "memory groups for the program's threads, by their names or one each, for `neap stat --groups` and `neap top`",
        setting: None,
    },
    Description {
        key: "refuse",
        values: "on, off",
        default: "off",
        text: "malloc fails in a memory group at its limit, or at a limit:auto; off: it goes beyond the limit, and is counted",
        setting: Some(Setting::Refuse),
    },
    Description {
        key: "trace",
        values: "a file, from / on",
        default: "none",
        text: "record pages that are handed out and come back, as `neap run --trace` does: 64 MiB of disk",
        setting: None,
    },
    Description {
        key: "profile",
        values: "off, on, or bytes with k, m, g",
        default: "off",
        text: "samples of allocations for `neap profile`, one in so many bytes on average (on: 512k), with up to 32 KiB of the stack each; from 512k on, fewer while more than 1280 come in a second; at most 44 MiB of memory",
        setting: Some(Setting::Profile),
    },
    Description {
        key: "profile_at_limit",
        values: "a file, from / on",
        default: "none",
        text: "with profile: write a heap profile before an allocation is refused, and when the container's memory is about to run out; to the file with .PID.N behind its name, at most once a minute and 16 times, for `neap profile --read`",
        setting: None,
    },
    Description {
        key: "check",
        values: "on, off",
        default: "off",
        text: "for tests and canaries: writes beyond an allocation, before it and after its free, and frees that name a wrong size, end the process with a line; found at a free or at the end; slow, 80 bytes for each allocation and 16 MiB of freed ones",
        setting: None,
    },
    Description {
        key: "guard",
        values: "off, on, or bytes with k, m, g",
        default: "off",
        text: "samples of allocations of up to a page, one in so many bytes on average (on: 512k), each on a page between two without access, which also loses its access at the free: an overflow, an underflow or a use after free ends the process with a report; a handler of SIGSEGV; from 512k on, one between two ticks of neap's thread or of slow calls (at most 4 in a second); at most 256 at a time, 10 MiB of memory",
        setting: None,
    },
    Description {
        key: "strict",
        values: "on, off",
        default: "off",
        text: "a program that is told an unknown key or value exits with status 125 at its first allocation; NEAP_STRICT=1 is equivalent",
        setting: None,
    },
];
