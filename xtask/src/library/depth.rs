//! Bounds the stack of the malloc family's functions to a few kilobytes, with all neap functions
//! that they call.
//!
//! Rare work that needs more runs on a stack of its own (`neap_os::stack`), and is checked against
//! that stack's size. The C library's functions, a program's callbacks, and the last message of a
//! process that aborts are not counted.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::library::listing::Listing;
use crate::library::stack::{Depth, Graph, Stated, Walk};
use crate::process::{capture, command};
use crate::report::Report;

/// Bytes that the malloc family may need of its caller's stack.
const MOST: i64 = 4096;

/// Most bytes of work on a stack of its own: half of it, so that a signal handler has the rest.
const MOST_APART: i64 = 128 << 10;

const STATED: Stated<'static> = Stated {
    unknown: UNKNOWN,
    left_out: &[
        // A process that ends with a message.
        "neap_os::fatal::die",
        "core::panicking::",
        "unwrap_failed",
        "expect_failed",
        "slice_index_fail",
        // Text: messages of misuse, which are printed once, malloc_info and malloc_stats.
        "neap_os::fatal::say",
        "neap::trace::say_cut_short",
        // A charge that the program makes inline, and no allocation.
        "::ask_inline",
        // Rare work where no stack can be mapped.
        "::reclaim_on_this_stack",
        "core::fmt::",
    ],
    repeated: &[
        // First for the remote stack, then for the local one.
        ("transfer::<impl neap_objects::objects::Objects<P>>::spill", 2),
        // Only one tick is due.
        ("after_per_cpu", 2),
    ],
};

/// Calls that leave the library, to functions of a program or another library, or to work on
/// another stack.
const OUTSIDE: &[&str] = &[];

/// Closures that stop long work, and the recorder of `trace:`. Those of neap's own shrinkers run on
/// another stack.
const STOPS: &[&str] = &[
    "::inside_to_the_end::{{closure}}",
    "::drain_with::{{closure}}",
    "neap::returning::maintenance::<impl neap::mm::Core<P>>::give_back::{{closure}}",
    "::release_scattered::{{closure}}",
    RECORDER,
];

const RECORDER: &str = "neap::trace::Trace as neap_base::platform::Recorder>::note";

/// Hooks of a manager.
const HOOKS: &[&str] = &["neap::numbers::text::publish$", "neap::process::spawn$"];

const OWN_SHRINKERS: &[&str] = &["neap::reclaim::builtin_shrinkers::count$", "neap::reclaim::builtin_shrinkers::scan$"];

/// Functions with calls by pointers, and the functions that these may call. The first match counts.
const UNKNOWN: &[(&str, &[&str])] = &[
    ("::call_on_stack", OUTSIDE),
    ("neap_os::stack::run", HOOKS),
    // The kernel's clock, inlined into its callers.
    ("Platform>::now", OUTSIDE),
    ("Platform>::precise", OUTSIDE),
    ("neap_os::clock::", OUTSIDE),
    ("neap::reclaim::callback_clock::", OUTSIDE),
    ("neap_os::environment::random", OUTSIDE),
    ("neap_groups::groups::Groups::create", HOOKS),
    ("neap_groups::", OUTSIDE),
    // The clock and `memset`, by addresses in registers.
    ("neap_percpu::data::PerCpuData<C>::allocate", OUTSIDE),
    // `memcpy`, by an address in a register.
    ("neap_reclaim::shrinkers::registry::Shrinkers::prepare_any", OUTSIDE),
    // Jumps by tables.
    ("neap_pressure::", OUTSIDE),
    ("neap::reclaim::watching::", OUTSIDE),
    ("reclaim::pass::Pass<D>::attempt", OUTSIDE),
    // The C library's functions of these names, and the function that makes neap's thread.
    ("neap_os::own_thread::make", OUTSIDE),
    ("neap_os::dynamic_linker::", OUTSIDE),
    ("neap_os::rseq::own_areas::", OUTSIDE),
    ("pthread_create", OUTSIDE),
    ("thrd_create", OUTSIDE),
    ("dlopen", OUTSIDE),
    ("neap_malloc::dl_open::", OUTSIDE),
    ("neap_malloc::cxx::", OUTSIDE),
    ("operator new", OUTSIDE),
    ("neap::process::", OUTSIDE),
    ("neap::trace::", OUTSIDE),
    ("neap::fork::", &["neap::process::close_all::{{closure}}"]),
    ("allocate_run::{{closure}}", &[RECORDER]),
    ("neap::allocation::large::", &["allocate_run::{{closure}}", RECORDER]),
    ("neap::returning::maintenance::<impl neap::mm::Core<P>>::give_back", STOPS),
    ("::scan_as", OWN_SHRINKERS),
    ("neap::reclaim::host::<impl neap_reclaim::host::Host", &[RECORDER]),
    (
        "each_range::{{closure}}",
        &["neap::reports::map_report::write::{{closure}}", "neap::reports::map_report::describe::{{closure}}"],
    ),
    ("::each_range", &["each_range::{{closure}}"]),
    ("::each_mapping", &["each_range::{{closure}}"]),
    ("neap::options::table::OptionRow::field", &["neap::options::table::TABLE::"]),
    ("neap::", HOOKS),
    ("hand_out_paid", &["neap::groups::memory_groups::repay$"]),
    ("SheafList::look", &["::tally::{{closure}}"]),
    (
        "take_from_slabs",
        &["Objects<P>>::take::{{closure}}", "Objects<P>>::fill::{{closure}}", "::take_one::{{closure}}"],
    ),
    ("neap_objects::", STOPS),
    ("neap_pages::", STOPS),
    ("core::iter::traits::iterator::Iterator::fold", &[RECORDER]),
    ("neap_reclaim::shrinkers::visit::", OWN_SHRINKERS),
];

/// The exported functions whose stack is bounded.
fn roots(library: &Path) -> Result<Vec<(String, u64)>> {
    let symbols = capture(command("nm", ["-D", "--defined-only", &library.to_string_lossy()]))?;
    let root = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let name = words.get(2)?.split('@').next()?;
        (!name.starts_with("neap_")).then_some((name.to_string(), u64::from_str_radix(words.first()?, 16).ok()?))
    };
    Ok(symbols.lines().filter_map(root).collect())
}

/// Checks the preload library, counted in a report with other checks.
pub(crate) fn into(report: &mut Report, library: &Path, listing: &Listing) -> Result<()> {
    let graph = Graph::of(library, listing)?;
    let mut walk = Walk::new(&graph, &STATED);
    let mut deepest = Depth::default();
    for (name, address) in roots(library)? {
        let found = walk.depth(address).with_context(|| name.clone())?;
        if found.bytes > deepest.bytes {
            deepest = found;
        }
    }
    report.check(&format!("at most {MOST} bytes of stack"), within(&graph, &deepest, MOST));
    let first = graph.functions.keys().copied().filter(|at| graph.name(*at).contains("neap_os::stack::run"));
    let mut apart = Depth::default();
    for address in first.collect::<Vec<_>>() {
        let found = walk.depth(address)?;
        if found.bytes > apart.bytes {
            apart = found;
        }
    }
    report.check("work on a stack of its own fits", within(&graph, &apart, MOST_APART));
    let wrong = walk.wrong.iter().fold(String::new(), |text, line| text + "\n    " + line);
    let known = if wrong.is_empty() { Ok(()) } else { Err(anyhow::anyhow!("{wrong}")) };
    report.check("what is called at run time is stated", known);
    Ok(())
}

/// An error that shows the deepest path, if it is too deep.
fn within(graph: &Graph<'_>, deepest: &Depth, most: i64) -> Result<()> {
    let way = deepest.way.iter().map(|(at, bytes)| format!("\n    {bytes:>6} {}", graph.name(*at)));
    ensure!(deepest.bytes > 0, "no function was found");
    ensure!(deepest.bytes <= most, "{} bytes:{}", deepest.bytes, way.collect::<String>());
    Ok(())
}
