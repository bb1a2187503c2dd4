//! Commands on a process that made a page up, and answers requests as it likes: memory and time
//! are bounded, and no text of it steers a terminal.
//!
//! Method: as in `made_up`.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod made_up;

use std::process::{Command, Stdio};
use std::time::Duration;

use made_up::{END, HOSTILE, Hostile, NUMBERS, Page, ROLE, WORDS, group, groups, name, say};
use neap_testing::terminal::Terminal;

/// Kinds of requests, and refusals.
const CHUNKS: u32 = 1;
const GROUPS: u32 = 2;
const SHRINKERS: u32 = 4;
const SHRINK: u32 = 5;
const MAP: u32 = 7;
const UNKNOWN: u32 = 4;

/// A shrinker with a number of groups; one that is barred is not asked for its objects.
fn shrinker(id: u64, flags: u64, barred: u64, called: &[u8], places: u64) -> Vec<u64> {
    let mut words = vec![id, flags, 2, 128, 0, 0, 0, 0, 0, 0, 0, barred];
    words.extend(name(called));
    words.push(places);
    (0..places).for_each(|_| words.extend([1, 0, 0]));
    words
}

fn shrinkers(next: u64, all: &[Vec<u64>]) -> Vec<u64> {
    let mut words = vec![1, all.len() as u64, next];
    words.extend([0; 17]);
    words.extend(all.iter().flatten());
    words
}

/// One group, for commands that need groups for their paths.
fn root() -> (u32, Vec<u64>) {
    (0, groups(END, &[group(1, 0, b"")]))
}

/// Descriptors of one page.
const DESCRIPTORS: usize = 20_000;

/// Raises the limit of open files, and returns how many of `wanted` more files may be opened.
fn allowed_descriptors(wanted: usize) -> usize {
    /// Files that this process has open besides.
    const OTHERS: libc::rlim_t = 64;
    let most = wanted as libc::rlim_t + OTHERS;
    // SAFETY: the calls read and write live locals. All-zero bytes are a valid `rlimit`.
    let now = unsafe {
        let mut now: libc::rlimit = core::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut now);
        // Only root may set a higher hard limit.
        for rlim_max in [now.rlim_max.max(most), now.rlim_max] {
            let wanted = libc::rlimit { rlim_cur: most.min(rlim_max), rlim_max };
            if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const wanted) == 0 {
                now = wanted;
                break;
            }
        }
        now.rlim_cur
    };
    wanted.min(now.saturating_sub(OTHERS) as usize)
}

/// Names of the layout of groups in the text of a page.
const LAYOUT: &str = "nodes bounds kinds events bytes at_dying at_slots at_ids at_fences chunks_table first_chunk \
                      group_length in_group_usage in_group_peak in_group_id in_group_bounds in_group_parent \
                      in_group_is_leaving in_group_name_length in_group_name in_group_counts in_group_stalls \
                      in_group_rest in_group_first_waiter \
                      in_group_stalled_since in_group_stalled in_group_local_events in_group_events_below name_length \
                      stocks_table stocks_cpus stocks_stride stocks_words stock_bytes_bits id_bits handle_address_bits";

/// Layouts of ids, of waits and of charged objects, whose tables lie at `address`. Every id leads
/// to another one, and every entry is a charge that waits. If `owned` is not 0, the first sheaf is
/// the next one of itself.
fn layouts_beside_groups(address: usize, owned: usize) -> String {
    let count = address + 8 * MAPPED_GROUPS;
    let owned = if owned == 0 { address + (32 << 20) } else { count };
    let ids = format!(
        "{{\"ids_table\":{address},\"first_chunk\":1048576,\"at_indexes\":{count},\"id_length\":8,\"in_id_generation\":0,\
         \"in_id_link\":4,\"in_id_references\":0,\"in_id_heirs\":0,\"free_link\":1,\"heir_bit\":4294967295,\
         \"dying_bit\":0,\"index_bits\":16}}"
    );
    let waits = format!(
        "{{\"waiters_table\":{address},\"first_chunk\":1048576,\"at_waiters\":{count},\"waiter_length\":8,\
         \"in_waiter_state\":100,\"in_waiter_place\":100,\"in_waiter_payer\":0,\"in_waiter_bytes\":0,\
         \"in_waiter_deadline\":0,\"in_waiter_since\":0,\"waiting\":0,\"held\":5}}"
    );
    let charged = format!(
        "{{\"at_owned\":{owned},\"barns_table\":{address},\"other_barns_table\":{address},\"other_barns_stride\":0,\
         \"nodes\":1024,\"barn_stride\":0,\"in_barn_chains\":0,\"chains\":64,\"in_sheaf_next\":0,\"in_sheaf_count\":8,\
         \"in_sheaf_capacity\":100,\"in_sheaf_contents\":256,\"run_address_bits\":48,\"origins_table\":{address},\
         \"origins\":65,\"shift_bits\":6,\"behind\":6,\"paid\":4,\"sampled\":16,\"arena_base\":{address},\
         \"at_arena_pages\":{count},\"page_shift\":12,\"frames_from_zero\":{address},\"frame_length\":0,\
         \"in_frame_word\":0,\"sole_bit\":63,\"vector_address_bits\":16,\"vector_shift\":15,\"grain\":16}}"
    );
    format!("\"group_ids\":{ids},\"group_waits\":{waits},\"charged\":{charged}")
}

/// Returns numbers with a layout of groups, whose table and counts lie at `address`, and the
/// [`layouts_beside_groups`].
fn numbers_with_layout(address: usize, owned: usize) -> String {
    let value = |name: &str| match name {
        "bounds" | "kinds" => 4,
        "events" => 10,
        "first_chunk" => 1 << 20,
        "group_length" => 8,
        "handle_address_bits" => 48,
        "stock_bytes_bits" | "id_bits" => 20,
        "nodes" => 1,
        name if name.starts_with("at_") => address + 8 * MAPPED_GROUPS,
        name if name.ends_with("_table") => address,
        name if name.starts_with("in_group_is") || name.starts_with("in_group_stalls") => 100,
        _ => 0,
    };
    let layout: Vec<String> = LAYOUT.split(' ').map(|name| format!("\"{name}\":{}", value(name))).collect();
    let per_cpu = format!(
        "{{\"cpus\":8192,\"offsets_table\":{},\"at_populated\":{address},\"at_empty\":{address},\
         \"at_isolated_empty\":{address},\"page\":{},\"groups\":2}}",
        address + (16 << 20),
        u64::MAX
    );
    let stacks = format!(
        "{{\"cpus\":1024,\"regions_table\":{address},\"regions_stride\":8,\"in_region_stacks\":0,\"stacks_of_class\":8,\
         \"stack_length\":256,\"in_stack_head\":256,\"in_stack_bottom\":0,\"in_stack_end\":8}}"
    );
    let lists = "{\"list_length\":65536,\"in_list_count\":0,\"in_list_run_pages\":8,\"in_list_high\":16}";
    let memory = format!(
        "\"memory\":{{\"groups\":{{{}}},{},\"per_cpu\":{per_cpu},\"stacks\":{stacks},\"lists\":{lists}}},\
         \"nodes\":[{}]",
        layout.join(","),
        layouts_beside_groups(address, owned),
        vec![format!("{{\"node\":7,\"lists_table\":{address},\"first_list_high\":{}}}", u64::MAX); 500].join(",")
    );
    NUMBERS.replacen('{', &format!("{{{memory},"), 1)
}

/// Groups of a role with a layout.
const MAPPED_GROUPS: usize = 90_000;

/// Maps memory for a role with a layout: a word for each group, with its counts at the start of the
/// memory and in one of 2048 classes, then the number of groups in use, and zeroes as offsets.
fn mapped(groups: usize) -> usize {
    const LENGTH: usize = 256 << 20;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: maps new memory at an address of the kernel's choice.
    let memory = unsafe { libc::mmap(core::ptr::null_mut(), LENGTH, protection, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED);
    // SAFETY: the mapping has room for these words, and nothing else uses it yet.
    let words = unsafe { core::slice::from_raw_parts_mut(memory.cast::<u64>(), MAPPED_GROUPS + 1) };
    for (at, word) in words.iter_mut().enumerate() {
        *word = (at as u64 % 2048) << 48 | memory as u64;
    }
    words[MAPPED_GROUPS] = groups as u64;
    memory as usize
}

/// The roles. Run by the tests below; by itself it does nothing.
#[test]
#[ignore = "a role that the other tests start"]
fn hostile() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let of_text = format!(
        r#"{{"version":"{HOSTILE}","mode":{{"slots":"{HOSTILE}","why":"{HOSTILE}","background":"{HOSTILE}"}},"settings":{{"{HOSTILE}":"{HOSTILE}"}},"{HOSTILE}":["{HOSTILE}"],"cpus":[{{"kind":"{HOSTILE}"}}],"groups":1,"per_cpu":{{}}}}"#
    );
    // JSON allows every character but control characters below U+0020 and quotes.
    let of_text = of_text.replace('\u{1b}', "\\u001b").replace("'\"漢", "'漢");
    // A role may have a number of reports behind a colon.
    let (role, reports_max) = role.split_once(':').unwrap_or((&role, "4294967295"));
    let reports_max: u32 = reports_max.parse().unwrap();
    let page = match role {
        "array" => Page::publish("[]"),
        "text" => Page::publish(&of_text),
        "wrong text" => {
            Page::publish(&of_text.replacen('{', &format!("{{\"container\":{},", serde_json::Value::from(HOSTILE)), 1))
        }
        "memory nowhere" => Page::publish(&numbers_with_layout(8, 0)),
        "memory of many" => Page::publish(&numbers_with_layout(mapped(MAPPED_GROUPS), 0)),
        "memory in circles" => Page::publish(&numbers_with_layout(mapped(5000), 1)),
        "many" => Page::publish(&format!("{{\"a\":[{}]}}", vec!["{\"\":0}"; 8000].join(","))),
        _ => Page::publish(NUMBERS),
    };
    match role {
        "name" => {
            // As the kernel cuts it: within a letter. The name of the main thread is the process's.
            std::fs::write("/proc/self/comm", &"приложение".as_bytes()[..13]).unwrap();
        }
        "many" => {
            // Kept open for as long as the process lives.
            for _ in 0..allowed_descriptors(DESCRIPTORS) {
                core::mem::forget(page.0.try_clone().unwrap());
            }
        }
        "pages" => (0..20).for_each(|_| core::mem::forget(Page::publish(NUMBERS))),
        _ => {}
    }
    say("ready");
    let next = |from: u32| if from + 1 < reports_max { u64::from(from) + 1 } else { END };
    let mut reports = 0;
    page.serve(|what, from| match (role, what) {
        ("program", GROUPS) => {
            reports += 1;
            let called = if reports == 1 { "tenant" } else { "another program's" };
            (0, groups(END, &[group(1, 0, b""), group(2, 1, called.as_bytes())]))
        }
        ("chain", GROUPS) => {
            let end = 10_000.min(from + 190);
            let all: Vec<_> = (from..end).map(|at| group(u64::from(at) + 1, at.into(), &[b'n'; 56])).collect();
            (0, groups(if end < 10_000 { end.into() } else { END }, &all))
        }
        ("left" | "waiting", GROUPS) if from == 0 => (0, groups(1, &[group(1, 0, b"")])),
        ("left" | "waiting", GROUPS) => {
            let (kind, size) = if role == "left" { (1, 3) } else { (2, 6) };
            let count = (WORDS - 10) / size;
            let mut words = vec![1, count as u64, next(from), kind, 1, 0, 1, 1, 0, 0];
            let entry = |at: usize| [1, u64::from(from) << 16 | at as u64, 7, 7, 7, 7];
            (0..count).for_each(|at| words.extend(&entry(at)[..size]));
            (0, words)
        }
        ("wide", GROUPS) => {
            let id = |at: u32| u64::from(from) * 190 + u64::from(at) + 2;
            let all = (0..190).map(|at| group(id(at), 1, format!("{:x}\u{9b}", id(at)).as_bytes()));
            let root = (from == 0).then(|| group(1, 0, b""));
            (0, groups(next(from), &root.into_iter().chain(all).collect::<Vec<_>>()))
        }
        ("shrinkers", SHRINKERS) => {
            let all: Vec<_> = (0..100).map(|at| shrinker(u64::from(from) * 100 + at, 0, 1, b"evil", 16)).collect();
            (0, shrinkers(next(from), &all))
        }
        ("small chunks", CHUNKS) => {
            let mut words = vec![1, 800, next(from), 0, 2, 1, 1, 4096, 1, 1, 16, 4096];
            words.resize(WORDS, 1);
            (0, words)
        }
        ("places", SHRINKERS) => (0, shrinkers(END, &[shrinker(1, 16, 0, b"evil", 16)])),
        ("slow", SHRINKERS) => (0, shrinkers(END, &[shrinker(1, 0, 0, b"evil", 16)])),
        ("asleep", GROUPS) => loop {
            std::thread::park();
        },
        ("slow", SHRINK) => {
            std::thread::sleep(Duration::from_millis(700));
            (0, Vec::new())
        }
        ("chunks", CHUNKS) => {
            let pages = 64 * 4000;
            let mut words = vec![1, 1, u64::from(from) + 1, 0, 2, 1, 1, 4096, pages, pages, 16, 4096];
            words.extend([0; 10]);
            words.push(from.into());
            words.resize(WORDS, 0x5555_5555_5555_5555);
            (0, words)
        }
        ("map", MAP) => {
            let mut words = vec![1, u64::from(from) + 1, 4096, 1 << 30, 0, 0, 2000, 43];
            words.resize(8 + 43, 0);
            (0..2000).for_each(|_| words.extend([0x7f00_0000_0000, 4096, 1]));
            (0, words)
        }
        ("text", GROUPS) => {
            let names = [HOSTILE.as_bytes(), b"\xff\xfe\xc3(", b"a/b/../..", b"a\nb\r"];
            let all: Vec<_> = (2..).zip(names).map(|(id, called)| group(id, 1, called)).collect();
            (0, groups(END, &[vec![group(1, 0, b"")], all].concat()))
        }
        ("text", SHRINKERS) => (0, shrinkers(END, &[shrinker(1, 0, 0, HOSTILE.as_bytes(), 1)])),
        (_, GROUPS) => root(),
        (_, SHRINK) => (0, Vec::new()),
        _ => (UNKNOWN, Vec::new()),
    })
}

#[test]
fn groups_deeper_than_any_can_be_are_refused() {
    let hostile = Hostile::start("chain");
    for more in [&["--groups"][..], &["--groups", "--json"]] {
        hostile.refuses("stat", more, "deeper than 32 levels");
    }
}

#[test]
fn reports_without_an_end_are_refused_at_a_number_of_bytes() {
    for (role, option) in [
        ("left", "--groups"),
        ("waiting", "--groups"),
        ("shrinkers", "--shrinkers"),
        ("chunks", "--percpu"),
        ("map", "--reconcile"),
    ] {
        Hostile::start(role).refuses("stat", &[option, "--timeout", "60"], "more than 40 MiB");
    }
}

#[test]
fn as_many_bytes_as_are_read_are_shown_in_bounded_memory() {
    for (role, reports, option) in [
        ("left", 630, "--groups"),
        ("waiting", 470, "--groups"),
        ("wide", 440, "--groups"),
        ("shrinkers", 270, "--shrinkers"),
        ("small chunks", 360, "--percpu"),
    ] {
        let hostile = Hostile::start(&format!("{role}:{reports}"));
        let dead = if option == "--groups" { &["--dead"][..] } else { &[] };
        for json in [&[][..], &["--json"]] {
            hostile.shows(&[&[option, "--timeout", "60"], dead, json].concat());
        }
    }
}

#[test]
fn reports_without_an_end_are_refused_after_a_time() {
    // On a busy machine the time may be over before the first report.
    let hostile = Hostile::start("places");
    hostile.refuses("stat", &["--shrinkers", "--timeout", "3"], "in 3 s");
}

#[test]
fn hostile_layouts_of_memory_cost_bounded_time_and_bytes() {
    // The process has none of neap's threads, so its memory is read first.
    let hostile = Hostile::start("memory nowhere");
    let ended = hostile.run("stat", &["--groups"]);
    assert_eq!((ended.code, hostile.answered()), (Some(0), 1), "it is asked: {}", ended.said);
    let hostile = Hostile::start("memory of many");
    for json in [&[][..], &["--json"]] {
        let ended = hostile.run("stat", &[&["--groups"], json].concat());
        assert!(ended.code.is_some(), "{}", ended.said);
        // Its page has no time, so it is old.
        let ended = hostile.run("stat", json);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        assert!(json.is_empty() || ended.text.contains("\"cpus_read_now\":true"), "{}", ended.text);
    }
}

#[test]
fn sheaves_in_a_circle_are_read_for_a_time() {
    let hostile = Hostile::start("memory in circles");
    let ended = hostile.run("stat", &["--groups", "--timeout", "2"]);
    assert_eq!(ended.code, Some(1), "{}", ended.text);
    assert!(ended.said.contains("read within 2 s") || ended.said.contains("read in time"), "{}", ended.said);
}

#[test]
fn slow_answers_share_the_time_of_a_command() {
    let hostile = Hostile::start("slow");
    let ended = hostile.run("stat", &["--shrinkers", "--timeout", "2"]);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    assert!(ended.text.contains("shrinkers were asked within 2 s") && ended.text.contains(" ? "), "{}", ended.text);
    // A report of shrinkers, one of groups, and a few of sixteen counts.
    assert!(hostile.answered() < 8);
    // A process that has not answered is not asked for the second reading.
    let hostile = Hostile::start("asleep");
    let ended = hostile.run("top", &["--json", "--interval", "50", "--timeout", "1"]);
    assert!(
        ended.code == Some(0) && ended.text.contains("has not answered: it has no thread of neap's"),
        "{}",
        ended.said
    );
    assert_eq!(hostile.answered(), 0);
}

#[test]
fn process_without_samples_is_shown_with_the_reason() {
    let ended = Hostile::start("text").run("top", &["--once", "--profile", "--interval", "50", "--timeout", "2"]);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    let reason = "cannot change profile: its library is older than this command; start it with NEAP=profile:524288";
    assert!(ended.text.contains("-- Profile --") && ended.text.contains(reason), "{}", ended.text);
}

#[test]
fn a_page_behind_many_descriptors_is_read_once() {
    let hostile = Hostile::start("many");
    let opened = std::fs::read_dir(format!("/proc/{}/fd", hostile.child.id())).unwrap().count();
    if opened < DESCRIPTORS {
        eprintln!("the limit of open files allows {opened} descriptors instead of {DESCRIPTORS}");
    }
    let ended = hostile.run("stat", &["--json", "--timeout", "60"]);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    Hostile::start("pages").refuses("stat", &[], "more than 16 pages");
}

#[test]
fn numbers_that_are_no_object_are_refused() {
    let hostile = Hostile::start("array");
    for (command, more) in [
        ("stat", &[][..]),
        ("stat", &["--json"]),
        ("stat", &["--groups"]),
        ("stat", &["--percpu"]),
        ("stat", &["--shrinkers"]),
        ("stat", &["--reconcile"]),
        ("top", &["--once", "--interval", "50"]),
        ("drain", &[]),
    ] {
        hostile.refuses(command, more, "is not a JSON object");
    }
}

#[test]
fn a_name_that_is_not_utf_8_hides_no_process() {
    let hostile = Hostile::start("name");
    for (command, more) in [
        ("stat", &[][..]),
        ("stat", &["--json"]),
        ("stat", &["--groups"]),
        ("stat", &["--groups", "--json"]),
        ("top", &["--once", "--interval", "50"]),
        ("top", &["--json", "--interval", "50"]),
    ] {
        let ended = hostile.run(command, more);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        let shown = if more.contains(&"--json") { "прилож\\\\xd0" } else { "прилож\\xd0" };
        assert!(ended.text.contains(shown), "{}", ended.text);
    }
}

#[test]
fn text_of_a_process_is_escaped_in_every_output() {
    let hostile = Hostile::start("text");
    for (command, more) in [
        ("stat", &[][..]),
        ("stat", &["--json"]),
        ("stat", &["--groups"]),
        ("stat", &["--groups", "--json"]),
        ("stat", &["--shrinkers"]),
        ("stat", &["--shrinkers", "--json"]),
        ("top", &["--once", "--interval", "50"]),
        ("top", &["--json", "--interval", "50"]),
    ] {
        // The output is checked where it is read.
        let ended = hostile.run(command, more);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        assert!(ended.text.contains("u{9b}") && ended.text.contains("приём"), "{}", ended.text);
    }
    // A text in place of numbers is quoted in the reason why they are not known.
    let wrong = Hostile::start("wrong text");
    let ended = wrong.run("pressure", &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    let reason = ended.text.lines().find(|line| line.starts_with("In use by: ")).unwrap();
    assert!(reason.contains("not known") && reason.contains("u{9b}") && reason.contains("приём"), "{reason}");
    assert_eq!(wrong.run("pressure", &["--json"]).code, Some(0));
    // A shown path names the group, and a slash in a name makes no path.
    let text = hostile.run("stat", &["--groups"]).text;
    assert!(
        text.contains("\\xff\\xfe\\xc3(") && text.contains("a\\u{2f}b\\u{2f}..") && text.contains("a\\nb\\r"),
        "{text}"
    );
    hostile.refuses("group", &["a/b/../..", "max=1m"], "has no group");
    hostile.refuses("group", &["a\\nb\\r", "max=1m"], "refused the request (status 4)");
}

#[test]
fn lists_of_processes_escape_text_and_count_what_makes_no_sense() {
    for (role, more, shown) in [
        ("text", &[][..], "\\u{1b}[2J\\u{9b}2J"),
        ("text", &["--json"], "\\\\u{1b}[2J\\\\u{9b}2J"),
        ("name", &[], "прилож\\xd0"),
        ("many", &[], "| hostile-"),
        ("array", &[], "Not read: 1 failed (process"),
        ("pages", &["--json"], "more than 16 pages"),
    ] {
        let ended = Hostile::start(role).run("ps", more);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        assert!(ended.text.contains(shown), "{role}: {}", ended.text);
    }
}

#[test]
fn metrics_of_a_process_escape_text_and_are_bounded() {
    for (role, shown) in [
        ("text", "group=\"\\\\u{1b}[2J\\\\u{9b}2J"),
        ("text", "slots=\"\\\\u{1b}[2J\\\\u{9b}2J"),
        ("name", "command=\"прилож\\\\xd0\""),
        ("many", "neap_processes 1\n"),
        ("array", "neap_unread_processes{reason=\"failed\"} 1\n"),
        ("chain", "neap_unread_groups_processes 1\n"),
        ("left", "neap_unread_groups_processes 1\n"),
        ("wide:60", "group=\"(other)\"} "),
        ("asleep", "neap_unread_groups_processes 1\n"),
    ] {
        let ended = Hostile::start(role).run("metrics", &[]);
        assert_eq!(ended.code, Some(i32::from(role == "array")), "{role}: {}", ended.said);
        assert!(ended.text.contains(shown), "{role}: {}", ended.text);
        assert!(ended.text.matches("neap_group_used_bytes{").count() <= 501, "{role}");
    }
}

/// Starts hostile processes until one has the number that a process had.
fn reuse(pid: u32) -> Option<Hostile> {
    for _ in 0..50 {
        std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
        let hostile = Hostile::start("other");
        if hostile.child.id() == pid {
            return Some(hostile);
        }
    }
    None
}

#[test]
fn top_does_not_mix_two_processes_of_one_number() {
    let mut first = Hostile::start("first");
    let pid = first.child.id();
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    neap.args(["top", &pid.to_string(), "--json", "--interval", "3000"]);
    let top = neap.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The first reading is complete once its groups are.
    first.hear("answered");
    first.end();
    let Some(_later) = reuse(pid) else {
        eprintln!("skipped: numbers of processes cannot be chosen here");
        let _ = top.wait_with_output();
        return;
    };
    let ended = top.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success() && said.contains(&format!("process {pid} has ended")), "{said}");
}

/// `neap top` of a process in a terminal, with one reading in a minute.
fn top(pid: u32) -> Terminal {
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    neap.args(["top", &pid.to_string(), "--interval", "60000"]);
    let mut top = Terminal::run(neap, 100, 40);
    top.wait_for("groups", |screen| screen.contains("\n(all) "));
    assert!(top.is_raw());
    top
}

#[test]
fn keys_of_top_change_no_group_of_another_program() {
    let hostile = Hostile::start("program");
    let mut top = top(hostile.child.id());
    // From the CPUs' caches by the zones to the groups, and there to the second.
    top.press("\x1b[Z\x1b[Z\x1b[B\x1b[Bm1\r");
    top.wait_for("answer", |screen| screen.contains("group \"tenant\" is gone"));
    top.press("q");
    assert!(top.end().0.success());
    top.assert_restored();
    assert_eq!(hostile.answered(), 2, "two reports, and no change");
}

#[test]
fn keys_of_top_reach_no_later_process_of_the_number() {
    let mut first = Hostile::start("first");
    let pid = first.child.id();
    let mut top = top(pid);
    first.end();
    let Some(later) = reuse(pid) else {
        eprintln!("skipped: numbers of processes cannot be chosen here");
        return;
    };
    top.press("d");
    top.wait_for("answer", |screen| screen.contains(&format!("process {pid} has ended")));
    top.press("\x1b[Z\x1b[Z\x1b[Bm1\r");
    let bound = |line: &str| line.contains("asked") && line.contains("for max");
    top.wait_for("request", |screen| screen.lines().any(bound) && screen.matches("has ended").count() > 2);
    top.press("q");
    assert!(top.end().0.success());
    top.assert_restored();
    assert_eq!(later.answered(), 0);
}
