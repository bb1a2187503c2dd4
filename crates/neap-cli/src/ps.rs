//! `neap ps`: lists all processes under neap, one line for each.

use std::cmp::Reverse;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::colours::Colours;
use crate::look::census::{Busy, Chosen, Survey, take, unread_line};
use crate::look::subject::{Rows, SCHEMA, Timeout, print, print_json};
use crate::look::totals::Totals;
use crate::report::{human, write_table};

const EXAMPLES: &str = "\
Examples:
  neap ps                 all processes under neap, those with the most resident memory first
  neap ps --sort cached   those that cache the most first
  neap ps --json          one JSON object; all sizes are bytes
  sudo neap ps            also the processes of other users

`resident` is the kernel's number for the whole process. The other sizes are neap's: `in use` is
memory that the program has, `cached` is memory in caches, and `free` is free pages that have
memory. `limit` is the option of that name. `thread` is the state of neap's thread. The last line
counts the processes that could not be read, with the reason. Only a process's own user and root may
read its numbers.";

/// The column to sort by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Column {
    Command,
    Pid,
    User,
    Resident,
    InUse,
    Cached,
    Free,
    Limit,
}

/// List all processes under neap.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PsOptions {
    /// Ids of processes to list; without any, all processes under neap
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pids: Vec<i32>,
    /// Column to sort by: names and ids in ascending order, sizes in descending order
    #[arg(long, value_name = "COLUMN", default_value = "resident")]
    sort: Column,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    timeout: Timeout,
}

pub(crate) fn main(options: &PsOptions) -> Result<ExitCode> {
    let end = Instant::now() + options.timeout.time();
    let mut census = take(&Chosen::new(&options.pids), end, &Busy::default(), Totals::size, Totals::look)?;
    sort(&mut census.seen, options.sort);
    if options.json {
        return print_json(&json(&census));
    }
    let colours = Colours::of_output();
    print(|output| {
        write_table(output, &HEADER, &census.seen, &|process| row(process, colours))?;
        write!(output, "{}", unread_line(&census.unread))
    })
}

fn sort(processes: &mut [Totals], column: Column) {
    // Processes with equal values stay in the order of their ids.
    processes.sort_unstable_by_key(|process| process.pid);
    match column {
        Column::Pid => {}
        Column::Command => processes.sort_by(|one, other| one.command.cmp(&other.command)),
        Column::User => processes.sort_by_key(|process| process.user.parse::<u32>().unwrap_or(u32::MAX)),
        Column::Resident => processes.sort_by_key(|process| Reverse(process.resident)),
        Column::InUse => processes.sort_by_key(|process| Reverse(process.in_use)),
        Column::Cached => processes.sort_by_key(|process| Reverse(process.cached())),
        Column::Free => processes.sort_by_key(|process| Reverse(process.free)),
        Column::Limit => processes.sort_by_key(|process| Reverse(process.limit)),
    }
}

const HEADER: [&str; 10] =
    ["command", "pid", "user", "resident", "in use", "cached", "free", "limit", "slots", "thread"];

fn row(process: &Totals, colours: Colours) -> Vec<String> {
    vec![
        process.command.clone(),
        process.pid.to_string(),
        process.user.clone(),
        human(process.resident),
        colours.warning_if(process.is_near_limit(), &human(process.in_use)),
        human(process.cached()),
        human(process.free),
        process.limit.map_or("none".to_string(), human),
        process.slots.clone(),
        process.background.clone(),
    ]
}

pub(crate) fn json(census: &Survey<Totals>) -> impl serde::Serialize {
    let process = |process: &Totals| -> Value {
        json!({
            "pid": process.pid, "user": process.user.parse::<u32>().ok(), "command": process.command,
            "version": process.version, "slots": process.slots, "thread": process.background,
            "resident_bytes": process.resident, "in_use_bytes": process.in_use,
            "cached_bytes": process.cached(), "cached_object_bytes": process.cached_objects,
            "cached_page_bytes": process.cached_pages, "cached_per_cpu_bytes": process.cached_per_cpu,
            "free_bytes": process.free, "limit_bytes": process.limit, "headroom_bytes": process.headroom(),
        })
    };
    let unread = census.unread.iter().map(
        |(reason, count)| json!({"reason": reason.name(), "processes": count.processes, "example": count.example}),
    );
    ListJson { schema: SCHEMA, processes: Rows(&census.seen, process), unread: unread.collect() }
}

/// The JSON object of processes.
#[derive(serde::Serialize)]
struct ListJson<P: serde::Serialize> {
    schema: u32,
    processes: P,
    unread: Vec<Value>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::look::census::{Unread, UnreadCount};

    fn process(pid: i32, command: &str, sizes: [u64; 5]) -> Totals {
        let [resident, in_use, cached_objects, free, limit] = sizes;
        let limit = (limit > 0).then_some(limit);
        let (command, user) = (command.to_string(), (10 - pid).to_string());
        Totals { pid, command, user, resident, in_use, cached_objects, free, limit, ..Totals::default() }
    }

    fn processes() -> Vec<Totals> {
        vec![process(3, "b", [10, 2, 5, 7, 0]), process(1, "c", [20, 1, 5, 8, 4]), process(2, "a", [10, 3, 6, 9, 5])]
    }

    #[test]
    fn processes_are_sorted_by_every_column() {
        for (column, expected) in [
            (Column::Command, [2, 3, 1]),
            (Column::Pid, [1, 2, 3]),
            (Column::User, [3, 2, 1]),
            (Column::Resident, [1, 2, 3]),
            (Column::InUse, [2, 3, 1]),
            (Column::Cached, [2, 1, 3]),
            (Column::Free, [2, 1, 3]),
            (Column::Limit, [2, 1, 3]),
        ] {
            let mut processes = processes();
            sort(&mut processes, column);
            let pids: Vec<i32> = processes.iter().map(|process| process.pid).collect();
            assert_eq!(pids, expected, "{column:?}");
        }
    }

    #[test]
    fn rows_and_objects_have_every_number_and_reasons_one_line() {
        let row = row(&process(7, "server", [1 << 20, 2 << 20, 3 << 20, 4 << 20, 5 << 20]), Colours::ALL);
        assert_eq!(row, ["server", "7", "3", "1.0 MiB", "2.0 MiB", "3.0 MiB", "4.0 MiB", "5.0 MiB", "", ""]);
        let is_near = |in_use| process(7, "server", [1 << 20, in_use, 0, 0, 1000]).is_near_limit();
        assert_eq!([is_near(900), is_near(901)], [false, true]);
        let mut census = Survey { seen: processes(), unread: [].into() };
        assert_eq!(unread_line(&census.unread), "");
        let count = |processes| UnreadCount { processes, example: "why".into() };
        census.unread = [(Unread::NotPermitted, count(3)), (Unread::LeftOut, count(1))].into();
        assert_eq!(unread_line(&census.unread), "Not read: 3 not permitted (why); 1 left out (why)\n");
        let object = serde_json::to_value(json(&census)).unwrap();
        assert_eq!(
            (&object["processes"][1]["limit_bytes"], &object["processes"][0]["limit_bytes"]),
            (&4.into(), &Value::Null)
        );
        assert_eq!(object["unread"][0], json!({"reason": "not permitted", "processes": 3, "example": "why"}));
    }
}
