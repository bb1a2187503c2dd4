//! `neap stat` on real processes: under neap, without it, forked, shut off, and of another user.
//!
//! No test depends on speed: expected states are waited for, up to a minute.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use neap_testing::terminal::Terminal;
use running::{Program, mapped_pages, neap, numbers, numbers_with, object, pages, until};
use serde_json::Value;

#[test]
fn stat_shows_each_node_and_reports_misses_with_several() {
    for (options, nodes) in [("interval:10,nodes:1", 1), ("interval:10,nodes:2", 2)] {
        let mut program = Program::start("burst", options, &[]);
        program.hear("ready");
        let pid = program.id();
        let object = numbers_with(pid, "burst in use", |object| {
            let used = |node: &Value| node["used"].as_u64().unwrap();
            let sum: u64 = object["nodes"].as_array().unwrap().iter().map(used).sum();
            object["bytes"]["used"].as_u64().unwrap() > 10 << 20 && sum == object["pages"]["used"].as_u64().unwrap()
        });
        assert_eq!(object["nodes"].as_array().unwrap().len(), nodes, "{object}");
        assert_eq!((&object["nodes"][0]["misses"], &object["unbound_segments"]), (&0.into(), &0.into()));
        let report = String::from_utf8(neap("stat", pid, &[]).stdout).unwrap();
        assert_eq!(report.contains("came from elsewhere"), nodes > 1, "{report}");
    }
}

#[test]
fn pressure_of_a_followed_container_is_in_every_view() {
    let mut program = Program::start("burst", "limit:auto,interval:10", &[]);
    program.hear("ready");
    let pid = program.id();
    let text = |command, options: &[&str]| String::from_utf8(neap(command, pid, options).stdout).unwrap();
    // The level may change between two commands.
    let container = until("one level in all views", || {
        let container = numbers(pid).unwrap()["container"].take();
        let level = container["pressure"].as_str()?;
        let line = format!("Pressure: {level}, by the limit of the {}; ", container["limited_by"].as_str().unwrap());
        let top = object("top", pid, &["--interval", "100"]).unwrap();
        let is_same = text("stat", &[]).contains(&line) && top["summary"]["pressure"] == level;
        is_same.then_some(container)
    });
    let of = object("pressure", pid, &[]).unwrap();
    assert!(of["looks_by_neap"].as_u64() >= container["looks"].as_u64(), "{of}");
    let level = |level: &&Value| level["kind"] == container["limited_by"];
    let limits = of["levels"].as_array().unwrap().iter().filter(level);
    let mut limits = limits.flat_map(|level| [&level["limit"], &level["high"], &level["swap_limit"]]);
    assert!(limits.any(|limit| *limit == container["limit"]), "{container} is not in {of}");
    assert!(text("pressure", &[]).contains("\nIn use by: neap in the process, whose limit follows"));
    let metrics = text("metrics", &[]);
    for name in ["neap_container_pressure{", "neap_container_info{"] {
        assert!(metrics.contains(&format!("\n{name}pid=\"{pid}\"")), "{metrics}");
    }
    let mut program = Program::start("burst", "interval:10", &[]);
    program.hear("ready");
    let output = neap("pressure", program.id(), &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\nIn use by: neap in the process only if the program asks"), "{text}");
    assert!(numbers_with(program.id(), "text", |object| !object["age_ms"].is_null())["container"].is_null());
}

#[test]
fn container_of_a_process_without_ticks_is_that_of_now() {
    // Its one thread is in a read, so no tick comes.
    let mut program = Program::start("burst", "limit:auto,background:off,interval:60000", &[]);
    program.hear("ready");
    let pid = program.id();
    let object = numbers_with(pid, "look at the container", |object| object["container"]["read_now"] == true);
    let container = &object["container"];
    assert_eq!((&object["ticks"], &container["ms_to_wall"]), (&0.into(), &Value::Null), "{object}");
    let levels = levels_of(pid);
    let is_limit = |level: &Value| ["limit", "high", "swap_limit"].iter().any(|key| level[key] == container["limit"]);
    assert!(
        levels.iter().any(|level| level["kind"] == container["limited_by"] && is_limit(level)),
        "{container}: {levels:?}"
    );
    let report = String::from_utf8(neap("stat", pid, &[]).stdout).unwrap();
    assert!(
        report.contains(" used now; the heap may have ") && report.contains("; its growth was not observed\n"),
        "{report}"
    );
}

/// The levels of memory limits of a process, as `neap pressure` finds them.
fn levels_of(pid: u32) -> Vec<Value> {
    let Value::Array(levels) = object("pressure", pid, &[]).unwrap()["levels"].take() else { panic!("no levels") };
    levels
}

#[test]
fn counts_since_the_start_need_no_tick() {
    // Its one thread is in a read, so no tick comes.
    let mut program = Program::start("burst", "background:off,interval:60000", &[]);
    program.hear("ready");
    let pid = program.id();
    let before = numbers(pid).unwrap();
    program.go_on();
    program.hear("freed");
    let after = numbers(pid).unwrap();
    assert_eq!(after["ticks"], before["ticks"], "{after}");
    let grown = |object: &Value| object["reuse"]["grown"].as_u64().unwrap() * page_size();
    assert!(grown(&after) > 10 << 20, "{after}");
    let released = |object: &Value| object["released"]["pages"].as_u64().unwrap();
    assert!(released(&after) > released(&before) && after["released"]["calls"].as_u64() > Some(0), "{after}");
}

/// The whole output of a command in a terminal.
fn in_terminal(arguments: &[&str], variable: Option<(&str, &str)>) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.args(arguments).env_remove("NO_COLOR").envs(variable);
    let mut terminal = Terminal::run(command, 200, 100);
    let (status, screen) = terminal.end();
    assert!(status.success(), "{screen}");
    String::from_utf8(terminal.output.clone()).unwrap()
}

#[test]
fn colours_are_for_a_terminal_that_wants_them() {
    let mut program = Program::start("threads", "groups:by-thread-name,limit:1g", &[]);
    program.hear("ready");
    let pid = program.id().to_string();
    for (more, head) in [
        (&[][..], "\u{1b}[1m| memory "),
        (&["--groups"], "\u{1b}[1mgroup "),
        (&["--shrinkers"], "\u{1b}[1m| shrinker "),
        (&["--reconcile"], "\u{1b}[1mbytes "),
    ] {
        let arguments = [&["stat", pid.as_str()], more].concat();
        let text = in_terminal(&arguments, None);
        assert!(text.contains(head), "{more:?}: {text}");
        for text in [
            in_terminal(&arguments, Some(("NO_COLOR", "1"))),
            in_terminal(&[&arguments[..], &["--json"]].concat(), None),
            String::from_utf8(neap("stat", program.id(), more).stdout).unwrap(),
        ] {
            assert!(!text.contains('\u{1b}') && text.len() > 100, "{more:?}: {text}");
        }
    }
    // An empty variable asks for nothing.
    assert!(in_terminal(&["ps"], Some(("NO_COLOR", ""))).contains("\u{1b}[1m| command "));
    assert!(!in_terminal(&["ps"], Some(("NO_COLOR", "1"))).contains('\u{1b}'));
}

#[test]
fn a_limit_is_seen_with_its_watermarks() {
    let mut program = Program::start("burst", "limit:1g", &[]);
    program.hear("ready");
    let object = numbers(program.id()).unwrap();
    assert_eq!(object["pages"]["budget"].as_u64().map(|pages| pages * page_size()), Some(1 << 30), "{object}");
    let marks = ["min", "low", "high"].map(|mark| object["pages"]["watermarks"][mark].as_u64().unwrap());
    assert!(0 < marks[0] && marks.is_sorted(), "{object}");
    let report = String::from_utf8(neap("stat", program.id(), &[]).stdout).unwrap();
    assert!(report.contains("| budget ") && report.contains("| watermarks min, low, high "), "{report}");
}

#[test]
fn a_burst_is_seen_in_use_and_then_given_back() {
    let mut program = Program::start("burst", "interval:10", &[]);
    program.hear("ready");
    let pid = program.id();
    let used = |object: &Value| object["bytes"]["used"].as_u64().unwrap();
    let object = numbers_with(pid, "burst in use", |object| used(object) > 10 << 20);
    assert_eq!((object["pid"].as_u64(), &object["read_by"]), (Some(u64::from(pid)), &"descriptor".into()));
    for key in ["version", "mode", "pages", "released", "ticks", "fences", "skipped", "resident_bytes", "age_ms"] {
        assert!(!object[key].is_null(), "{key} is missing: {object}");
    }
    assert_eq!(object["mode"]["page_size"].as_u64(), Some(page_size()));
    assert!(object["resident_bytes"].as_u64().unwrap() > 10 << 20);
    let classes = object["classes"].as_array().unwrap();
    assert!(classes.len() > 20 && classes.iter().all(|class| class["slabs"].as_u64().unwrap() > 0), "{classes:?}");
    let in_use = used(&object);
    program.go_on();
    program.hear("freed");
    // The text may still be that of the sleep before the burst, until the live counters show that
    // the thread has worked.
    let object = numbers_with(pid, "memory given back by a sleeping process", |object| {
        let [cached, free] = ["cached", "free_resident"].map(|key| object["bytes"][key].as_u64().unwrap());
        used(object) < 5 << 20 && cached + free < 1 << 20 && object["mode"]["background"] == "asleep"
    });
    assert!(used(&object) < in_use && object["released"]["pages"].as_u64().unwrap() > 0, "{object}");
    assert_eq!(object["bytes"]["unaccounted"], 0, "{object}");
    // The report for people, from the same page.
    let report = neap("stat", pid, &[]);
    assert!(report.status.success());
    let report = String::from_utf8(report.stdout).unwrap();
    for part in [&format!("Process {pid} ("), "| in use ", "| unaccounted, exact when idle ", "thread asleep"] {
        assert!(report.contains(part), "{part} is not in\n{report}");
    }
}

fn page_size() -> u64 {
    // SAFETY: a query without side effects.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

#[test]
fn a_process_that_works_all_the_time_is_never_read_torn() {
    let mut program = Program::start("churn", "interval:10", &[]);
    program.hear("ready");
    let mut ticks = 0;
    for _ in 0..100 {
        // Parsed by `numbers`: half an object would not be one.
        let object = numbers(program.id()).unwrap();
        assert!(object["ticks"].as_u64().unwrap() >= ticks);
        ticks = object["ticks"].as_u64().unwrap();
        assert_eq!(object["truncated"], false);
    }
    assert_eq!(program.child.try_wait().unwrap(), None, "it works on");
}

#[test]
fn the_mode_says_why() {
    let reason = |options: &str, tunable: &str| {
        let before = ["env", &format!("GLIBC_TUNABLES=glibc.pthread.rseq={tunable}")];
        let mut program = Program::start("burst", options, &before);
        program.hear("ready");
        let mode = numbers(program.id()).unwrap()["mode"].take();
        (mode["slots"].as_str().unwrap().to_string(), mode["why"].as_str().unwrap().to_string())
    };
    assert_eq!(reason("rseq:off", "1"), ("atomic".into(), "rseq:off was set".into()));
    let (slots, why) = reason("", "0");
    assert_eq!((slots.as_str(), why.as_str()), ("atomic", "the C library registered no rseq"));
    let (slots, why) = reason("", "1");
    assert!(slots == "atomic" || why == "restartable sequences and fences work", "{slots}: {why}");
}

#[test]
fn the_page_stays_behind_at_exec() {
    let mut program = Program::start("spawn", "", &[]);
    assert_eq!(program.hear("inherited"), "0", "a child that was executed has the page");
    let pid = program.id();
    assert_eq!(pages(pid).len(), 1);
    assert!(numbers(pid).is_ok());
    program.go_on();
    let expected = format!("process {pid} (sleep) does not run under neap");
    until(&expected, || numbers(pid).err().filter(|complaint| complaint.contains(&expected)));
}

#[test]
fn forked_child_gets_own_stat_page_before_first_tick() {
    let mut program = Program::start("fork", "interval:10", &[]);
    let child: u32 = program.hear("forked").parse().unwrap();
    let parent = program.id();
    let parents = pages(parent);
    // The child waits, so its fork handler makes the page. The page has a low descriptor for a
    // moment, and then that of the parent's page, which is closed.
    let own = until("page of the child's own in place of the parent's", || {
        let own = pages(child);
        (own.len() == 1 && own[0].1 != parents[0].1 && own[0].0 == parents[0].0).then_some(own)
    });
    assert_eq!(parents.len(), 1);
    until("mapping of it", || (mapped_pages(child) == [own[0].1]).then_some(()));
    assert_eq!(mapped_pages(parent), [parents[0].1]);
    // It waits, and has made no tick.
    let object = numbers(child).unwrap();
    assert!(object["age_ms"].is_null() && object["bytes"]["used"].as_u64().unwrap() > 0, "{object}");
    let report = String::from_utf8(neap("stat", child, &[]).stdout).unwrap();
    assert!(report.contains("like a child of fork before its first tick") && report.contains("| in use "), "{report}");
    program.go_on();
    let object = numbers_with(child, "numbers of the child's own", |object| !object["pid"].is_null());
    assert_eq!(object["pid"].as_u64(), Some(u64::from(child)));
    assert_eq!(pages(child), own, "no other page is made");
    assert_eq!(numbers(parent).unwrap()["pid"].as_u64(), Some(u64::from(parent)), "the parent's is as it was");
    assert_eq!(pages(parent), parents);
}

#[test]
fn child_of_the_bare_system_call_has_no_page_mapped_and_goes_on() {
    let mut program = Program::start("bare fork", "interval:10", &[]);
    let child: u32 = program.hear("forked").parse().unwrap();
    assert_eq!(pages(child), pages(program.id()));
    assert!(mapped_pages(child).is_empty());
    program.go_on();
    program.hear("goes on");
    let complaint = numbers(child).unwrap_err();
    assert!(complaint.contains(&format!("process {child} was forked by process {}", program.id())), "{complaint}");
    // It has allocated many times.
    until("time that passed in the child", || {
        let times = fs::read_to_string(format!("/proc/{child}/stat")).unwrap();
        let used: Vec<u64> =
            times.rsplit(") ").next().unwrap().split(' ').skip(11).take(2).flat_map(str::parse).collect();
        (used.iter().sum::<u64>() > 2).then_some(())
    });
    assert!(mapped_pages(child).is_empty());
}

#[test]
fn process_that_uses_neap_late_has_no_page() {
    // While a page is made its descriptor is the lowest free one, which another thread could get.
    // With options the library is used when it is loaded.
    let mut program = Program::start_alone("late", "");
    program.hear("ready");
    assert!(pages(program.id()).is_empty() && mapped_pages(program.id()).is_empty());
}

#[test]
fn a_program_that_closed_every_descriptor_is_read_by_its_memory() {
    let mut program = Program::start("close", "", &[]);
    program.hear("ready");
    assert!(pages(program.id()).is_empty());
    match numbers(program.id()) {
        Ok(object) => assert_eq!(object["read_by"], "memory"),
        // On systems where even a user's own processes may not be traced.
        Err(complaint) => assert!(complaint.contains("has closed neap's descriptor"), "{complaint}"),
    }
}

#[test]
fn limits_keep_the_page_out_of_the_way_and_the_program_alive() {
    let under = |limit: &str| {
        let mut program = Program::start("burst", "", &["sh", "-c", &format!("ulimit {limit}; exec \"$@\""), "sh"]);
        program.hear("ready");
        program
    };
    let program = under("-n 100");
    assert!(matches!(pages(program.id())[..], [(50.., _)]), "{:?}", pages(program.id()));
    assert!(numbers(program.id()).is_ok());
    let program = under("-n 20");
    assert!(numbers(program.id()).unwrap_err().contains("a limit or a sandbox"));
    // Growing a file over this limit would end the program by a signal.
    let mut program = under("-f 8");
    let complaint = numbers(program.id()).unwrap_err();
    assert!(complaint.contains("a limit or a sandbox"), "{complaint}");
    assert_eq!(program.child.try_wait().unwrap(), None);
}

#[test]
fn a_process_without_numbers_is_told_from_one_without_neap() {
    let mut program = Program::start("burst", "stat:on,stat:off", &[]);
    program.hear("ready");
    assert!(pages(program.id()).is_empty());
    let complaint = numbers(program.id()).unwrap_err();
    assert!(complaint.contains("runs under neap with NEAP=stat:off"), "{complaint}");
    // A program with a manager of its own has no library that tells why.
    let mut built_in = Program::start_alone("late", "stat:off");
    built_in.hear("ready");
    let complaint = numbers(built_in.id()).unwrap_err();
    assert!(complaint.contains("if neap is built into it, NEAP=stat:off"), "{complaint}");
    let mut sleep = Command::new("sleep");
    sleep.arg("1000").env_remove("LD_PRELOAD");
    let other = Program::run(sleep);
    let complaint = numbers(other.id()).unwrap_err();
    assert!(complaint.contains("does not run under neap"), "{complaint}");
}

#[test]
fn a_process_that_ended_or_never_was_is_named() {
    let mut child = Command::new("true").spawn().unwrap();
    let pid = child.id();
    let complaint = until("end of the process", || numbers(pid).err().filter(|text| text.contains("has ended")));
    assert!(complaint.contains(&format!("process {pid} has ended")), "{complaint}");
    child.wait().unwrap();
    let highest: u32 = fs::read_to_string("/proc/sys/kernel/pid_max").unwrap().trim().parse().unwrap();
    let complaint = numbers(highest + 1).unwrap_err();
    assert_eq!(complaint, format!("neap: there is no process {}\n", highest + 1));
    assert_eq!(neap("stat", 0, &[]).status.code(), Some(2), "0 is a usage error");
}

#[test]
fn another_users_process_is_not_shown() {
    const OTHER_USER: u32 = 65_534;
    // SAFETY: a query without side effects.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can run a process of another user");
        return;
    }
    let mut program = Program::start("burst", "", &[]);
    program.hear("ready");
    // A copy where another user can execute it.
    let folder = std::env::temp_dir().join(format!("neap-stat-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    let copy = folder.join("neap");
    fs::copy(env!("CARGO_BIN_EXE_neap"), &copy).unwrap();
    let mut command = Command::new(&copy);
    command.args(["stat", &program.id().to_string()]).uid(OTHER_USER).gid(OTHER_USER).current_dir("/");
    // A process that another test forks holds the copy open for writing until it executes
    // something.
    let output = until("copy that can be executed", || match command.output() {
        Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => None,
        output => Some(output),
    });
    fs::remove_dir_all(&folder).unwrap();
    let output = output.unwrap();
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());
    assert!(complaint.contains("not permitted") && complaint.contains("its user (0)"), "{complaint}");
}

/// Bytes beside those that a role allocates: the test harness's, and objects on the stacks of CPUs.
const BESIDE: u64 = 12 << 20;

/// Checks the memory of a process that has `held` bytes, by one look. Returns the numbers.
fn assert_holds(pid: u32, held: u64, what: &str) -> Value {
    let bytes = |object: &Value, key: &str| object["bytes"][key].as_u64().unwrap();
    let object = numbers(pid).unwrap();
    assert!(bytes(&object, "used").abs_diff(held) < BESIDE, "{what}: {held} bytes held: {object}");
    // The kernel counts the program itself, and not what was allocated and never touched. It is
    // asked at another moment, and neap's thread may release memory in between.
    numbers_with(pid, "resident bytes that are the sum", |object| {
        let sum = ["used", "cached", "free_resident"].map(|key| bytes(object, key)).iter().sum();
        object["resident_bytes"].as_u64().unwrap().abs_diff(sum) < 3 * BESIDE
    });
    object
}

#[test]
fn sleeping_and_stopped_processes_show_what_they_hold() {
    for (role, options) in [("holds", "background:off"), ("holds", "background:on"), ("threads hold", "interval:1000")]
    {
        let mut program = Program::start(role, options, &[]);
        let pid = program.id();
        let all: u64 = program.hear("holds").parse().unwrap();
        assert!(all >= 500 << 20);
        assert_holds(pid, all, &format!("{role}, {options}, all"));
        program.go_on();
        let half: u64 = program.hear("holds").parse().unwrap();
        assert!(half < all / 2 + (1 << 20));
        let object = assert_holds(pid, half, &format!("{role}, {options}, half"));
        if options == "background:off" {
            // No thread returns freed objects to their slabs, or pages to the system, in a second.
            let object = object["bytes"].as_object().unwrap();
            let free = object["cached"].as_u64().unwrap() + object["free_resident"].as_u64().unwrap();
            assert!(free > 100 << 20, "{object:?}");
        }
        program.stop();
        assert_holds(pid, half, &format!("{role}, {options}, stopped"));
    }
}

#[test]
fn forked_child_shows_what_it_holds_before_its_first_tick() {
    let mut program = Program::start("holding fork", "background:off", &[]);
    let child: u32 = program.hear("forked").parse().unwrap();
    program.hear("child holds");
    let of_both = |key: &str| [program.id(), child].map(|pid| numbers(pid).unwrap()["bytes"][key].as_u64().unwrap());
    let [parents, own] = of_both("used");
    assert!(own.abs_diff(parents + (64 << 20)) < BESIDE, "{own} bytes, its parent {parents}");
    let [parents, own] = of_both("tables");
    assert!(own >= parents && parents > 0, "{own} bytes of tables, its parent {parents}");
}

#[test]
fn sleeping_process_shows_its_cpus_caches_without_a_tick() {
    for options in ["", ",rseq:off", ",nodes:2"] {
        // Its one thread is in a read, so no tick comes.
        let mut program = Program::start_alone("caches", &format!("background:off,interval:60000{options}"));
        let pid = program.id();
        for round in 0..2 {
            let said = program.hear("caches");
            let said: Vec<u64> = said.split(' ').map(|number| number.parse().unwrap()).collect();
            assert!(said[0] > 10_000, "{said:?}");
            // The text is used until it is a second old.
            let object = numbers_with(pid, "numbers of now", |object| object["cpus_read_now"] == true);
            assert_eq!(object["ticks"], 0, "{object}");
            let sum = |list: &str, of: &dyn Fn(&Value) -> u64| -> u64 {
                object[list].as_array().unwrap().iter().map(of).sum()
            };
            let number = |value: &Value| value.as_u64().unwrap();
            let listed = |row: &Value, key: &str| number(&row[key]) * page_size();
            let seen = [
                sum("cpus", &|cpu| number(&cpu["cached_bytes"])),
                sum("cpus", &|cpu| listed(cpu, "page_list")),
                number(&object["bytes"]["on_stacks"]),
                sum("classes", &|class| number(&class["in_slots"]) * number(&class["size"])),
                sum("nodes", &|node| listed(node, "listed")),
            ];
            assert_eq!(seen, [said[0], said[1], said[0], said[0], said[1]], "{options}, round {round}: {object}");
            let report = String::from_utf8(neap("stat", pid, &[]).stdout).unwrap();
            assert!(report.contains("memory counters and CPU caches read now, other numbers "), "{report}");
            program.go_on();
        }
    }
}
