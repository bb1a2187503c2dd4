//! `neap top` on real processes: as text, as JSON, and in a terminal, with keys and every way out.
//!
//! No test depends on speed: expected states are waited for, up to a minute.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use neap_testing::terminal::Terminal;
use running::{Program, neap, numbers, numbers_with, object, until};
use serde_json::Value;

/// `neap top` of a process in a terminal.
fn top(pid: u32, columns: u16, rows: u16, more: &[&str]) -> Terminal {
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.args(["top", &pid.to_string()]).args(more);
    Terminal::run(command, columns, rows)
}

fn started(role: &str, options: &str) -> Program {
    let mut program = Program::start(role, options, &[]);
    program.hear("ready");
    program
}

/// Waits until the initial content of a screen is complete.
fn shown(terminal: &mut Terminal, pid: u32) -> String {
    let title = format!("neap top {pid} (");
    terminal.wait_for("screen", |screen| screen.starts_with(&title) && screen.contains("? help"))
}

#[test]
fn one_screen_as_text_has_every_part() {
    let program = started("burst", "limit:1g,nodes:2");
    let output = neap("top", program.id(), &["--once", "--interval", "50"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[0].starts_with(&format!("neap top {} (", program.id())) && lines[0].ends_with(", every 50 ms"),
        "{text}"
    );
    assert!(lines[1].contains("limit 1.0G"), "{text}");
    assert!(!text.contains("-- Groups"), "{text}");
    for part in ["\n-- Zones --", "\n-- CPU caches --", "\n-- Events --", " low ", "  misses\n"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(!text.contains('\u{1b}') && lines.iter().all(|line| *line == line.trim_end()), "{text}");
}

#[test]
fn one_screen_as_json_says_what_stat_says() {
    // It waits, and has no thread that would change the numbers.
    let program = started("burst", "background:off,interval:10,limit:1g,nodes:2");
    let pid = program.id();
    let (said, top) = until("second without other numbers", || {
        let said = numbers(pid).unwrap();
        let top = object("top", pid, &["--interval", "50"]).unwrap();
        let cached = !said["cpus"].as_array().unwrap().is_empty();
        (cached && numbers(pid).unwrap()["ticks"] == said["ticks"]).then_some((said, top))
    });
    let summary = &top["summary"];
    assert_eq!((&summary["used_bytes"], &summary["limit_bytes"]), (&said["bytes"]["used"], &(1_u64 << 30).into()));
    assert_eq!((&summary["ticks_per_s"], &summary["thread"]), (&0.0.into(), &said["mode"]["background"]));
    assert_eq!((top["pid"].as_u64(), &top["version"]), (Some(pid.into()), &said["version"]));
    let page = said["mode"]["page_size"].as_u64().unwrap();
    // Compares both outputs of each row: the same numbers by other names.
    let compare = |shown: &str, published: &str, names: &[(&str, &str, u64)]| {
        let (shown, published) = (top[shown].as_array().unwrap(), said[published].as_array().unwrap());
        assert_eq!(shown.len(), published.len());
        for (shown, published) in shown.iter().zip(published) {
            for (name, pointer, unit) in names {
                let expected = published.pointer(pointer).and_then(Value::as_u64).map(|number| number * unit);
                assert!(expected.is_some() && shown[name].as_u64() == expected, "{name}: {shown} of {published}");
            }
        }
    };
    let zones = [
        ("node", "/node", 1),
        ("managed_bytes", "/managed", page),
        ("used_bytes", "/used", page),
        ("free_bytes", "/free", page),
        ("free_resident_bytes", "/backed_free", page),
        ("listed_bytes", "/listed", page),
        ("highs_bytes", "/highs", page),
        ("min_bytes", "/watermarks/min", page),
        ("low_bytes", "/watermarks/low", page),
        ("high_bytes", "/watermarks/high", page),
        ("misses", "/misses", 1),
    ];
    compare("zones", "nodes", &zones);
    let cpus = [
        ("cpu", "/cpu", 1),
        ("object_bytes", "/cached_bytes", 1),
        ("stacks", "/stacks", 1),
        ("listed_bytes", "/page_list", page),
        ("high_bytes", "/list_high", page),
    ];
    compare("cpus", "cpus", &cpus);
}

#[test]
fn work_between_two_readings_has_rates_and_events() {
    let program = started("churn", "interval:10");
    let object = until("busy interval", || {
        let object = object("top", program.id(), &["--interval", "200"]).unwrap();
        let ticks = object["summary"]["ticks_per_s"].as_f64().unwrap();
        (ticks > 0.0 && object["summary"]["faults_per_s"].as_f64().unwrap() > 0.0).then_some(object)
    });
    for event in object["events"].as_array().unwrap() {
        assert!(event["time"].as_str().unwrap().len() == 8 && !event["what"].as_str().unwrap().is_empty(), "{object}");
    }
}

#[test]
fn top_shows_released_memory_and_q_restores_terminal() {
    let mut program = started("burst", "interval:10");
    let pid = program.id();
    numbers_with(pid, "burst in use", |object| object["bytes"]["used"].as_u64().unwrap() > 10 << 20);
    let mut terminal = top(pid, 80, 24, &["--interval", "50"]);
    let screen = shown(&mut terminal, pid);
    assert_eq!(screen.lines().count(), 24);
    assert!(terminal.alternate && !terminal.cursor && terminal.is_raw());
    program.go_on();
    program.hear("freed");
    terminal.wait_for("release", |screen| {
        let mut lines = screen.lines();
        lines.any(|line| line.contains("  released  ") && line.contains(" to the system by "))
    });
    terminal.press("q");
    let (status, _) = terminal.end();
    assert!(status.success(), "{status}");
    terminal.assert_restored();
    assert_eq!(program.child.try_wait().unwrap(), None, "what was looked at goes on");
}

#[test]
fn keys_freeze_drain_and_explain() {
    // The nap is a minute long: only a request ends it.
    let mut program = started("burst", "interval:60000");
    program.go_on();
    program.hear("freed");
    let pid = program.id();
    let mut terminal = top(pid, 100, 30, &["--interval", "50"]);
    shown(&mut terminal, pid);
    terminal.press(" ");
    terminal.wait_for("freeze", |screen| screen.contains("FROZEN at "));
    terminal.press(" +");
    terminal.wait_for("interval", |screen| screen.contains(", every 100 ms"));
    terminal.press("?");
    terminal.wait_for("help", |screen| screen.contains("powers of 1024"));
    terminal.press("?d");
    let screen = terminal.wait_for("answer", |screen| screen.contains(" went back"));
    let objects = |screen: &str| -> u64 {
        let before = screen.split(" objects of ").next().unwrap();
        before.rsplit(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{screen}"))
    };
    assert!(objects(&screen) > 1000 && screen.contains("to drain everything"), "{screen}");
    terminal.press("D");
    terminal.wait_for("hint", |screen| screen.contains("Choose a CPU first"));
    terminal.press("\x03");
    assert!(terminal.end().0.success());
    terminal.assert_restored();
}

#[test]
fn the_chosen_cpu_is_drained() {
    let program = started("churn", "interval:10");
    let pid = program.id();
    let mut terminal = top(pid, 100, 30, &["--interval", "50"]);
    shown(&mut terminal, pid);
    let (hint, answer) = ("Choose a CPU first", " of 1 CPUs went back");
    until("answer", || {
        // There is no row to select while no CPU caches anything.
        terminal.press("\x1b[BD");
        terminal
            .wait_for("word", |screen| screen.contains(hint) || screen.contains(answer))
            .contains(answer)
            .then_some(())
    });
}

/// The row of a group in the output of `neap top --json`.
fn row<'v>(object: &'v Value, path: &str) -> Option<&'v Value> {
    object["groups"].as_array()?.iter().find(|row| row["path"] == path)
}

#[test]
fn groups_are_shown_folded_and_bounded() {
    let mut program = started("threads", "groups:by-thread-name,interval:10");
    let pid = program.id();
    let top_json = || object("top", pid, &["--interval", "50"]).unwrap();
    let full = until("groups in numbers", || Some(top_json()).filter(|object| !object["groups"].is_null()));
    assert!(full["groups_age_ms"].is_u64() && full["groups_failed"].is_null(), "{full}");
    for (path, mib) in [("", 11), ("alpha", 8), ("beta", 3)] {
        let row = row(&full, path).unwrap_or_else(|| panic!("{full}"));
        assert!(row["used_bytes"].as_u64() >= Some(mib << 20) && row["max_bytes"].is_null(), "{full}");
        assert!(row["charged_bytes"].as_u64() >= row["used_bytes"].as_u64(), "{full}");
    }
    let text = String::from_utf8(neap("top", pid, &["--once", "--interval", "50"]).stdout).unwrap();
    assert!(text.contains("\n-- Groups --") && text.contains("\n(all) ") && text.contains("\nalpha "), "{text}");

    let mut terminal = top(pid, 100, 40, &["--interval", "50"]);
    terminal.wait_for("groups", |screen| screen.contains("\nalpha "));
    // From the CPUs' caches by the zones to the groups, and there to the first: all of them.
    terminal.press("\x1b[Z\x1b[Z\x1b[B\r");
    terminal.wait_for("fold", |screen| screen.contains("\n(all) +") && !screen.contains("\nalpha "));
    terminal.press("\r");
    let screen = terminal.wait_for("groups again", |screen| screen.contains("\nalpha "));
    let rows: Vec<&str> = screen.lines().skip_while(|line| !line.starts_with("(all)")).collect();
    let down = rows.iter().position(|row| row.starts_with("alpha ")).unwrap();
    terminal.press(&"\x1b[B".repeat(down));
    terminal.press("m1x\r");
    terminal.wait_for("complaint", |screen| screen.contains("max: 1x_  of alpha: not a number of bytes"));
    terminal.press("\x7fm\r");
    terminal.wait_for("answer", |screen| screen.contains("alpha: max 1.0 MiB (was none)"));
    terminal.wait_for("change", |screen| {
        screen.lines().any(|line| line.starts_with("alpha ") && line.split_whitespace().any(|word| word == "1.0M"))
    });
    assert_eq!(row(&top_json(), "alpha").unwrap()["max_bytes"], 1 << 20);
    program.go_on();
    program.hear("freed");
    terminal.wait_for("memory that is free", |screen| {
        let beta = screen.lines().find(|line| line.starts_with("beta "));
        beta.is_some_and(|line| line.split_whitespace().nth(1).is_some_and(|used| !used.ends_with('M')))
    });
    terminal.press("q");
    assert!(terminal.end().0.success());
    terminal.assert_restored();
}

#[test]
fn top_reads_groups_of_a_stopped_process_in_its_memory() {
    let program = started("threads", "groups:by-thread-name,interval:10");
    let pid = program.id();
    let mut terminal = top(pid, 100, 40, &["--interval", "50"]);
    terminal.wait_for("groups", |screen| screen.contains("\nalpha "));
    program.stop();
    let screen = terminal.wait_for("memory", |screen| screen.contains("-- Groups, from memory --"));
    assert!(screen.contains("\nalpha "), "{screen}");
    program.resume();
    terminal.wait_for("new groups", |screen| screen.contains("-- Groups --"));
}

#[test]
fn signals_end_it_as_they_should_and_give_the_terminal_back() {
    let program = started("burst", "");
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        let mut terminal = top(program.id(), 80, 24, &[]);
        shown(&mut terminal, program.id());
        // SAFETY: a signal to a child of this process that was not awaited yet.
        unsafe { libc::kill(terminal.child.id() as i32, signal) };
        let (status, _) = terminal.end();
        assert_eq!(status.signal(), Some(signal), "{status}");
        terminal.assert_restored();
    }
}

#[test]
fn the_end_of_the_process_ends_it_with_a_sentence() {
    let program = started("burst", "");
    let pid = program.id();
    let mut terminal = top(pid, 80, 24, &["--interval", "50"]);
    shown(&mut terminal, pid);
    // Dead, awaited, and so gone.
    drop(program);
    let (status, screen) = terminal.end();
    assert!(status.success(), "{status}");
    assert!(screen.starts_with(&format!("process {pid} (")) && screen.contains(") has ended\n"), "{screen}");
    terminal.assert_restored();
}

#[test]
fn top_ends_with_reason_when_process_execs_without_neap() {
    let mut program = Program::start("spawn", "", &[]);
    program.hear("inherited");
    let pid = program.id();
    let mut terminal = top(pid, 80, 24, &["--interval", "50"]);
    shown(&mut terminal, pid);
    program.go_on();
    let (status, screen) = terminal.end();
    assert_eq!(status.code(), Some(1), "{screen}");
    let screen = screen.replace('\n', " ");
    assert!(screen.starts_with(&format!("neap: process {pid} (")) && screen.contains("under neap"), "{screen}");
    terminal.assert_restored();
}

#[test]
fn a_small_terminal_is_told_so() {
    let program = started("burst", "");
    let mut terminal = top(program.id(), 50, 10, &[]);
    terminal.wait_for("sentence", |screen| screen.starts_with("50x10 is too small: neap top needs 60x16."));
    terminal.press("q");
    assert!(terminal.end().0.success());
    terminal.assert_restored();
}

#[test]
fn what_cannot_be_shown_is_said_as_stat_says_it() {
    let mut sleep = Command::new("sleep");
    sleep.arg("1000").env_remove("LD_PRELOAD");
    let other = Program::run(sleep);
    let expected = until("sleep", || numbers(other.id()).err().filter(|complaint| complaint.contains("(sleep)")));
    for more in [&["--once"][..], &["--json"], &[]] {
        let output = neap("top", other.id(), more);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &b""[..]));
        assert_eq!(String::from_utf8(output.stderr).unwrap(), expected);
    }
    let program = started("burst", "");
    let output = neap("top", program.id(), &[]);
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && complaint.contains("needs a terminal; --once"), "{complaint}");
    for wrong in ["49", "60001", "much", "-1"] {
        let output = neap("top", program.id(), &["--once", &format!("--interval={wrong}")]);
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && complaint.contains("50 to 60000 milliseconds"), "{complaint}");
    }
    let both = neap("top", program.id(), &["--once", "--json"]);
    assert_eq!(both.status.code(), Some(2), "a usage error");
    let object: Value = object("top", program.id(), &["--interval", "50"]).unwrap();
    assert_eq!(object["interval_ms"], 50);
}

/// Selects a process in the list of all processes.
fn choose(terminal: &mut Terminal, pid: u32) {
    let row = |line: &str| line.trim_start().starts_with(&format!("{pid} "));
    let screen = terminal.wait_for("list", |screen| screen.starts_with("neap top, ") && screen.lines().any(row));
    let first = screen.lines().position(|line| line.contains(" resident ")).unwrap() + 1;
    let place = screen.lines().skip(first).position(row).unwrap();
    terminal.press("\x1b[H");
    terminal.press(&"\x1b[B".repeat(place));
}

/// Selects a process in the list, and presses keys, until the last line of the screen says `what`
/// of that process. Processes of other tests come and go, so another one may be selected.
fn last_line(terminal: &mut Terminal, pid: u32, keys: &str, what: &str) -> String {
    for _ in 0..20 {
        choose(terminal, pid);
        terminal.press(keys);
        let last = |screen: &str| screen.lines().last().unwrap_or_default().to_string();
        let is_said = |screen: &str| last(screen).contains(what);
        let said = last(&terminal.wait_for(what, is_said));
        if said.contains(&format!("process {pid}")) {
            return said;
        }
        // Ends the input, if there is one.
        terminal.press("\x1b");
    }
    panic!("process {pid} was never selected");
}

#[test]
fn top_list_keys_drain_limit_and_profile_selected_process() {
    // The nap is a minute long: only a request ends it.
    let mut program = started("burst", "interval:60000");
    program.go_on();
    program.hear("freed");
    let pid = program.id();
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.args(["top", "--interval", "100"]).env_remove("NO_COLOR");
    let mut terminal = Terminal::run(command, 120, 60);
    terminal
        .wait_for("help", |screen| screen.starts_with("neap top, ") && screen.contains("p profile  d drain  m limit"));
    let said = last_line(&mut terminal, pid, "d", " went back");
    assert!(said.contains(" objects of "), "{said}");
    last_line(&mut terminal, pid, "m", "limit: _");
    terminal.press("1x\r");
    terminal.wait_for("complaint", |screen| screen.contains("limit: \"1x\" is not a valid limit"));
    terminal.press("\x7fg\r");
    terminal.wait_for("answer", |screen| screen.contains(&format!("process {pid}: limit: {} (was none)", 1 << 30)));
    let numbers = numbers(pid).unwrap();
    let number = |pointer: &str| numbers.pointer(pointer).and_then(Value::as_u64).unwrap();
    assert_eq!(number("/pages/budget") * number("/mode/page_size"), 1 << 30);
    choose(&mut terminal, pid);
    terminal.press("p");
    terminal.wait_for("profile", |screen| screen.starts_with("neap top ") && screen.contains("-- Profile"));
    terminal.press("q");
    terminal.wait_for("list", |screen| screen.starts_with("neap top, "));
    terminal.press("q");
    assert!(terminal.end().0.success());
    terminal.assert_restored();
}

#[test]
fn no_colour_reaches_a_terminal_that_wants_none() {
    let program = started("burst", "limit:1g");
    let output = |variable: Option<(&str, &str)>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
        command.args(["top", &program.id().to_string()]).env_remove("NO_COLOR").envs(variable);
        let mut terminal = Terminal::run(command, 100, 40);
        shown(&mut terminal, program.id());
        terminal.press("q");
        assert!(terminal.end().0.success());
        String::from_utf8_lossy(&terminal.output).into_owned()
    };
    // Blue, for memory in use in the bar.
    assert!(output(None).contains("38;5;4"));
    let plain = output(Some(("NO_COLOR", "1")));
    assert!(!plain.contains("38;5;") && plain.contains('#'), "{plain}");
}

#[test]
fn all_processes_are_shown_and_enter_shows_the_selected_one() {
    let program = started("burst", "limit:1g");
    let pid = program.id();
    let run = |more: &[&str]| Command::new(env!("CARGO_BIN_EXE_neap")).arg("top").args(more).output().unwrap();
    let text = String::from_utf8(run(&["--once"]).stdout).unwrap();
    let row = |line: &str| line.trim_start().starts_with(&format!("{pid} "));
    assert!(text.starts_with("neap top, ") && text.lines().any(|line| row(line) && line.contains("1.0G")), "{text}");
    let object: Value = serde_json::from_slice(&run(&["--json"]).stdout).unwrap();
    assert!(object["processes"].as_array().unwrap().iter().any(|process| process["pid"] == pid), "{object}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.args(["top", "--interval", "100"]);
    let mut terminal = Terminal::run(command, 100, 60);
    // Processes of other tests come and go, so another one may be selected.
    let mut is_it = false;
    for _ in 0..20 {
        choose(&mut terminal, pid);
        terminal.press("\r");
        // Between the list and the process, the screen is empty.
        let shown = terminal.wait_for("process", |screen| {
            screen.starts_with("neap top ") || (screen.starts_with("neap top, ") && screen.contains("ended"))
        });
        is_it = shown.starts_with(&format!("neap top {pid} ("));
        if is_it {
            break;
        }
        if !shown.starts_with("neap top, ") {
            terminal.press("q");
        }
    }
    assert!(is_it, "process {pid} was never selected");
    terminal.press("q");
    terminal.wait_for("list", |screen| screen.starts_with("neap top, "));
    terminal.press("q");
    assert!(terminal.end().0.success());
    terminal.assert_restored();
}
