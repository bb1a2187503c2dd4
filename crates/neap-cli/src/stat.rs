//! `neap stat`: the numbers that a process under neap publishes about itself, read while it runs.
//!
//! Sits between `/proc` and the reader. The library keeps a memfd named `neap-stat` up to date; this opens it through
//! `/proc/PID/fd`, which the kernel allows the process's own user and root, also with `kernel.yama.ptrace_scope` = 1. A
//! program that has closed the descriptor still has the mapping, which takes the right to trace the process. The process
//! is neither stopped nor signalled, nothing is written, and nothing is left behind. What comes from the process may be
//! wrong or hostile: it is checked, and escaped before it reaches a terminal.
//!
//! The page's format, version 1, is described where it is written, in the crate `neap`. It is read here by bytes, since the
//! library in a process may be of another version than this command.

use core::time::Duration;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde::Deserialize;
use serde_json::Value;

use crate::report::{number, table};

const EXAMPLES: &str = "\
Examples:
  neap stat 1234          what process 1234 has in use, in caches and given back
  neap stat 1234 --json   everything, as one JSON object

For the process's own user and root. The numbers are those of its last look for memory to give
back: a process that allocates nothing has old ones, and nothing has changed since. Its parts
are counted one after the other, so those of a busy process agree only about.";

/// Show the numbers of a running process.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// The process
    #[arg(value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn main(options: &Options) -> Result<ExitCode> {
    let process = Process::look(options.pid)?;
    let page = process.page()?;
    let age = monotonic().saturating_sub(page.published) / 1_000_000;
    let mut object: Value =
        serde_json::from_slice(&page.text).with_context(|| format!("process {} published no JSON", process.pid))?;
    let numbers = Numbers::deserialize(&object)
        .with_context(|| format!("the numbers of process {} are not those of neap {VERSION}", process.pid))?;
    if options.json {
        // Inside a container the process knows itself by another id.
        object["pid"] = process.pid.into();
        object["name"] = process.name.into();
        object["resident_bytes"] = (process.resident_kib << 10).into();
        object["age_ms"] = age.into();
        object["read_by"] = page.way.into();
        println!("{object}");
    } else {
        print!("{}", numbers.report(&process, age));
    }
    Ok(ExitCode::SUCCESS)
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn monotonic() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is valid for writing; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// What the kernel says about a process.
struct Process {
    pid: i32,
    name: String,
    user: String,
    /// The id by which the process knows itself.
    own_id: u32,
    resident_kib: u64,
}

/// What a process has published.
struct Page {
    writer: u32,
    published: u64,
    text: Vec<u8>,
    way: &'static str,
}

/// The name that the kernel gives the page among descriptors and mappings.
const LINK: &str = "/memfd:neap-stat (deleted)";

impl Process {
    fn look(pid: i32) -> Result<Process> {
        let status = match fs::read_to_string(format!("/proc/{pid}/status")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => bail!("there is no process {pid}"),
            status => status.with_context(|| format!("cannot read the status of process {pid}"))?,
        };
        let field = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.map(str::trim).unwrap_or_default()
        };
        if field("State").starts_with(['Z', 'X']) {
            bail!("process {pid} has ended");
        }
        // One id per nested namespace, the innermost last.
        let own_id = field("NStgid").split_whitespace().last().and_then(|id| id.parse().ok());
        Ok(Process {
            pid,
            name: field("Name").to_string(),
            user: field("Uid").split_whitespace().next().unwrap_or("?").to_string(),
            own_id: own_id.unwrap_or(pid as u32),
            resident_kib: field("VmRSS").split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0),
        })
    }

    /// What this process itself has published, by whichever way it can be read.
    fn page(&self) -> Result<Page> {
        let mut foreign = None;
        for path in self.descriptors()? {
            let page = self.through(&path)?;
            match page {
                Some(page) if page.writer == self.own_id => return Ok(page),
                Some(page) => foreign = Some(page.writer),
                None => {}
            }
        }
        let mut has_library = false;
        if foreign.is_none() {
            let maps = fs::read_to_string(self.path("maps")).map_err(|error| self.refused(error))?;
            has_library = maps.lines().any(|line| line.contains("/libneap_malloc.so"));
            if let Some(line) = maps.lines().find(|line| line.ends_with(LINK)) {
                let page = self.through_memory(line)?;
                if page.writer == self.own_id {
                    return Ok(page);
                }
                foreign = Some(page.writer);
            }
        }
        let pid = self.pid;
        match foreign {
            Some(parent) => bail!(
                "process {pid} was forked by process {parent} and has not published numbers of its own yet: it does so \
                 when it next gives memory back"
            ),
            None if !has_library => bail!("process {pid} ({}) does not run under neap", self.name.escape_debug()),
            None if self.has_stat_off() => {
                bail!("process {pid} runs under neap with NEAP=stat:off, and so publishes no numbers")
            }
            None => bail!(
                "process {pid} runs under neap and publishes no numbers: it has allocated nothing yet, or a limit or a \
                 sandbox kept neap from making its page"
            ),
        }
    }

    fn path(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid))
    }

    /// Why `/proc` did not answer.
    fn refused(&self, error: io::Error) -> anyhow::Error {
        let Process { pid, user, .. } = self;
        match error.kind() {
            io::ErrorKind::NotFound => anyhow!("process {pid} has ended"),
            io::ErrorKind::PermissionDenied => {
                anyhow!(
                    "not permitted: the numbers of process {pid} are for its user ({user}), and for root where it may trace processes"
                )
            }
            _ if error.raw_os_error() == Some(libc::ESRCH) => anyhow!("process {pid} has ended"),
            _ => anyhow::Error::new(error).context(format!("cannot look into process {pid}")),
        }
    }

    /// The descriptors that are a page.
    fn descriptors(&self) -> Result<Vec<PathBuf>> {
        let folder = fs::read_dir(self.path("fd")).map_err(|error| self.refused(error))?;
        let paths = folder.flatten().map(|entry| entry.path());
        Ok(paths.filter(|path| fs::read_link(path).is_ok_and(|link| link.as_os_str() == LINK)).collect())
    }

    /// Reads a page by one of the process's descriptors; `None` where it is gone again.
    fn through(&self, path: &PathBuf) -> Result<Option<Page>> {
        // The descriptor may be something else by now: opening must neither wait nor take a terminal.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(|error| self.refused(error))?,
        };
        let read = |at: u64, bytes: &mut [u8]| file.read_exact_at(bytes, at);
        let page = page(&read, "descriptor").with_context(|| format!("process {}", self.pid))?;
        Ok(Some(page))
    }

    /// Reads a page where the process has it mapped, by a line of `maps`.
    fn through_memory(&self, line: &str) -> Result<Page> {
        let start = line.split('-').next().and_then(|start| u64::from_str_radix(start, 16).ok());
        let start = start.with_context(|| format!("not a line of maps: {line}"))?;
        let pid = self.pid;
        let memory = File::open(self.path("mem")).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => anyhow!(
                "process {pid} has closed neap's descriptor, and reading its memory is not permitted (see \
                 kernel.yama.ptrace_scope): run this as root"
            ),
            _ => self.refused(error),
        })?;
        let read = |at: u64, bytes: &mut [u8]| memory.read_exact_at(bytes, start + at);
        page(&read, "memory").with_context(|| format!("process {pid}"))
    }

    /// Whether the process was started with the option that turns the page off.
    fn has_stat_off(&self) -> bool {
        let environment = fs::read(self.path("environ")).unwrap_or_default();
        let options = environment.split(|&byte| byte == 0).find_map(|entry| entry.strip_prefix(b"NEAP="));
        let mut items = options.unwrap_or_default().split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
        items.rfind(|item| item.starts_with(b"stat:")) == Some(b"stat:off")
    }
}

const MAGIC: &[u8] = b"neapstat";
const FORMAT: u32 = 1;
const HEADER: usize = 32;
/// No page has more text.
const MOST: u32 = 1 << 20;
/// Looks at a page that is being written, a millisecond apart; writing takes some microseconds.
const LOOKS: u32 = 200;

/// Reads a page by `read`, again until one whole object was read.
fn page(read: &dyn Fn(u64, &mut [u8]) -> io::Result<()>, way: &'static str) -> Result<Page> {
    for look in 0..LOOKS {
        if look > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (mut before, mut after) = ([0; HEADER], [0; HEADER]);
        read(0, &mut before).context("cannot read the page of numbers")?;
        let word = |at: usize| u32::from_ne_bytes(before[at..at + 4].try_into().unwrap_or_default());
        let (version, sequence, writer, length) = (word(8), word(12), word(16), word(20));
        // Sequence 0 is a page that is about to be written for the first time.
        if sequence == 0 || sequence % 2 == 1 {
            continue;
        }
        if &before[..8] != MAGIC {
            bail!("what is called neap-stat is no page of numbers");
        }
        if version != FORMAT {
            bail!("its numbers are of format {version}; this is neap {VERSION}, which reads format {FORMAT}");
        }
        if length > MOST {
            bail!("the page of numbers is damaged: {length} bytes of text");
        }
        let mut text = vec![0; length as usize];
        read(HEADER as u64, &mut text).context("cannot read the page of numbers")?;
        read(0, &mut after).context("cannot read the page of numbers")?;
        if before == after {
            let published = u64::from_ne_bytes(before[24..].try_into().unwrap_or_default());
            return Ok(Page { writer, published, text, way });
        }
    }
    bail!("the page of numbers was being written at every look; is the process stopped?")
}

/// The numbers that the report is made of. Those that an older or newer library does not have are zero.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Numbers {
    version: String,
    mode: Mode,
    bytes: Bytes,
    pages: Pages,
    released: Released,
    ticks: u64,
    drains: u64,
    fences: u64,
    skipped: u64,
    busy: u64,
    nodes: Vec<Node>,
    unbound_segments: u64,
    classes: Vec<Class>,
    cpus: Vec<Cpu>,
    truncated: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Mode {
    slots: String,
    why: String,
    isolated_cpus: Vec<u32>,
    background: String,
    interval_ms: u64,
    page_size: u64,
    huge: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Bytes {
    mapped: u64,
    used: u64,
    cached: u64,
    free_resident: u64,
    tables: u64,
    unaccounted: i64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Pages {
    managed: u64,
    free: u64,
    backed_free: u64,
    used: u64,
    listed: u64,
    releasing: u64,
    draining: u64,
    budget: Option<u64>,
    watermarks: Watermarks,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Node {
    node: u32,
    managed: u64,
    free: u64,
    backed_free: u64,
    used: u64,
    listed: u64,
    misses: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Watermarks {
    min: u64,
    low: u64,
    high: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Released {
    pages: u64,
    calls: u64,
    failures: u64,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct Class {
    size: u64,
    slabs: u64,
    objects: u64,
    in_slabs: u64,
    in_barn: u64,
    in_slots: u64,
}

impl Class {
    fn cached_bytes(&self) -> u64 {
        self.size.saturating_mul(self.in_slabs.saturating_add(self.in_barn).saturating_add(self.in_slots))
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Cpu {
    cpu: u32,
    kind: String,
    cached_bytes: u64,
    stacks: u64,
    page_list: u64,
}

/// Classes that the report shows.
const SHOWN: usize = 10;

impl Numbers {
    fn report(&self, process: &Process, age: u64) -> String {
        let Numbers { mode, bytes, pages, released, .. } = self;
        let mib = |bytes: u64| number(bytes as f64 / f64::from(1 << 20), 2);
        let isolated: Vec<String> = mode.isolated_cpus.iter().map(u32::to_string).collect();
        let rows = |cells: &[(&str, String)]| -> Vec<Vec<String>> {
            cells.iter().map(|(name, value)| vec![(*name).to_string(), value.clone()]).collect()
        };
        let mut text = format!(
            "Process {} ({}): neap {}, numbers {age} ms old\n\
             Slots: {} ({}); isolated CPUs: {}\n\
             Maintenance: thread {}, every {} ms; {} ticks, {} drains, {} fences, {} skipped, {} around busy slots\n\
             Given back: {} pages by {} calls, {} of them failed; huge pages {}\n\n",
            process.pid,
            process.name.escape_debug(),
            self.version.escape_debug(),
            mode.slots.escape_debug(),
            mode.why.escape_debug(),
            if isolated.is_empty() { "none".to_string() } else { isolated.join(", ") },
            mode.background.escape_debug(),
            mode.interval_ms,
            self.ticks,
            self.drains,
            self.fences,
            self.skipped,
            self.busy,
            released.pages,
            released.calls,
            released.failures,
            if mode.huge { "allowed" } else { "off" },
        );
        let memory = [
            ("resident, the whole process", mib(process.resident_kib << 10)),
            ("in use", mib(bytes.used)),
            ("free objects in slabs and caches", mib(bytes.cached)),
            ("free pages, resident", mib(bytes.free_resident)),
            ("unaccounted, exact when idle", mib_signed(bytes.unaccounted)),
            ("address space of the arena", mib(bytes.mapped)),
            ("address space of its tables", mib(bytes.tables)),
        ];
        text += &table(&["memory", "MiB"], &rows(&memory));
        let mut zone = vec![
            ("managed", pages.managed.to_string()),
            ("free", pages.free.to_string()),
            ("free and resident", pages.backed_free.to_string()),
            ("used, with those in CPUs' lists", pages.used.to_string()),
            ("in CPUs' lists", pages.listed.to_string()),
            ("releasing", pages.releasing.to_string()),
            ("draining", pages.draining.to_string()),
        ];
        if let Some(budget) = pages.budget {
            let Watermarks { min, low, high } = pages.watermarks;
            zone.push(("budget", budget.to_string()));
            zone.push(("watermarks min, low, high", format!("{min}, {low}, {high}")));
        }
        text += "\n";
        text += &table(&[&format!("pages of {} B", mode.page_size), "count"], &rows(&zone));
        text += &self.report_nodes();
        text += &self.report_classes();
        text += &self.report_cpus();
        if self.truncated {
            text += "Lists were cut off where they did not fit into the page.\n";
        }
        text
    }

    /// Nothing on a machine with one node.
    fn report_nodes(&self) -> String {
        if self.nodes.len() < 2 {
            return String::new();
        }
        let row = |node: &Node| {
            let counts = [node.managed, node.free, node.backed_free, node.used, node.listed, node.misses];
            [node.node.to_string()].into_iter().chain(counts.iter().map(u64::to_string)).collect()
        };
        let rows: Vec<Vec<String>> = self.nodes.iter().map(row).collect();
        let header = ["node", "pages", "free", "free and resident", "used", "in CPUs' lists", "came from elsewhere"];
        let refused = match self.unbound_segments {
            0 => String::new(),
            refused => format!("The system bound {refused} segments to no node.\n"),
        };
        format!("\n{}{refused}", table(&header, &rows))
    }

    fn report_classes(&self) -> String {
        let mut classes = self.classes.clone();
        classes.sort_by_key(|class| core::cmp::Reverse(class.cached_bytes()));
        let row = |class: &Class| {
            let counts = [class.slabs, class.objects, class.in_slabs, class.in_barn, class.in_slots];
            let free = number(class.cached_bytes() as f64 / 1024.0, 1);
            let counts = counts.iter().map(u64::to_string);
            [class.size.to_string()].into_iter().chain(counts).chain([free]).collect()
        };
        let rows: Vec<Vec<String>> = classes.iter().take(SHOWN).map(row).collect();
        if rows.is_empty() {
            return String::new();
        }
        let header = ["objects of B", "slabs", "objects", "free in slabs", "in the barn", "in CPUs", "free KiB"];
        let more = match classes.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!("{more} more classes with less free; --json has all.\n"),
        };
        format!("\n{}{more}", table(&header, &rows))
    }

    fn report_cpus(&self) -> String {
        let row = |cpu: &Cpu| {
            let cached = number(cpu.cached_bytes as f64 / 1024.0, 1);
            let kind = cpu.kind.escape_debug().to_string();
            vec![cpu.cpu.to_string(), kind, cached, cpu.stacks.to_string(), cpu.page_list.to_string()]
        };
        let rows: Vec<Vec<String>> = self.cpus.iter().map(row).collect();
        if rows.is_empty() {
            return "\nNo CPU holds anything.\n".to_string();
        }
        format!("\n{}", table(&["CPU", "slots", "objects KiB", "stacks", "pages"], &rows))
    }
}

fn mib_signed(bytes: i64) -> String {
    number(bytes as f64 / f64::from(1 << 20), 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    fn bytes(sequence: u32, text: &str) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for word in [FORMAT, sequence, 77, text.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(5_000_000_u64.to_ne_bytes());
        bytes.extend(text.as_bytes());
        bytes
    }

    /// A page that is another one at each read; the last stays.
    fn read_in_turn(pages: &[Vec<u8>]) -> Result<Page> {
        let reads = Cell::new(0);
        let read = |at: u64, to: &mut [u8]| {
            let page = &pages[reads.get().min(pages.len() - 1)];
            reads.set(reads.get() + 1);
            let from = page.get(at as usize..at as usize + to.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            to.copy_from_slice(from);
            Ok(())
        };
        page(&read, "test")
    }

    #[test]
    fn a_page_that_rests_is_read() {
        let page = read_in_turn(&[bytes(8, "{\"a\":1}")]).unwrap();
        assert_eq!((page.writer, page.published, page.text.as_slice()), (77, 5_000_000, &b"{\"a\":1}"[..]));
    }

    #[test]
    fn a_page_that_changes_between_two_reads_is_read_again() {
        let (old, torn, new) = (bytes(8, "old"), bytes(9, "onw"), bytes(10, "new"));
        for pages in [
            vec![torn.clone(), new.clone()],
            vec![old.clone(), torn.clone(), new.clone()],
            vec![old.clone(), torn.clone(), torn, new.clone()],
            vec![old.clone(), new.clone()],
            vec![old.clone(), old, new],
        ] {
            assert_eq!(read_in_turn(&pages).unwrap().text, b"new");
        }
    }

    #[test]
    fn what_is_no_page_is_refused_with_a_reason() {
        let mut other = bytes(2, "{}");
        other[0] = b'x';
        let mut newer = bytes(2, "{}");
        newer[8] = 2;
        let mut long = bytes(2, "{}");
        long[23] = 1;
        let cases = [
            (other, "is no page"),
            (newer, "format 2"),
            (long, "damaged"),
            (bytes(2, "{}")[..33].to_vec(), "cannot read"),
            (bytes(3, "{}"), "being written"),
            (vec![0; 64], "being written"),
        ];
        for (page, expected) in cases {
            let message = format!("{:#}", read_in_turn(&[page]).err().expect(expected));
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_report_has_every_part_and_no_control_characters() {
        let object = serde_json::json!({
            "version": "9.9", "mode": {"slots": "rseq", "why": "it works\u{1b}[2J", "isolated_cpus": [3, 4]},
            "bytes": {"used": 3 << 20, "unaccounted": -(1 << 20)}, "pages": {"budget": 500, "watermarks": {"low": 21}},
            "nodes": [{"node": 0, "used": 70}, {"node": 1, "misses": 17}], "unbound_segments": 4,
            "classes": (1..=12).map(|n| serde_json::json!({"size": 16 * n, "in_barn": n})).collect::<Vec<_>>(),
            "cpus": [{"cpu": 1, "kind": "rseq", "cached_bytes": 2048}], "truncated": true, "of a later version": 1,
        });
        let (name, user) = ("a\u{7}b".to_string(), "0".to_string());
        let process = Process { pid: 12, name, user, own_id: 12, resident_kib: 2048 };
        let text = Numbers::deserialize(&object).unwrap().report(&process, 345);
        for part in ["Process 12 (a\\u{7}b): neap 9.9, numbers 345 ms old", "it works\\u{1b}[2J", "isolated CPUs: 3, 4"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        for row in [
            ["in use", "3.00"],
            ["unaccounted, exact when idle", "-1.00"],
            ["budget", "500"],
            ["192", "2.2"],
            ["1", "2.0"],
            ["0", "70"],
            ["1", "17"],
        ] {
            let found = text.lines().any(|line| line.starts_with(&format!("| {} ", row[0])) && line.contains(row[1]));
            assert!(found, "{row:?} is not in\n{text}");
        }
        assert!(text.contains("bound 4 segments to no node"), "{text}");
        assert!(text.contains("2 more classes") && text.contains("cut off"), "{text}");
        assert!(!text.chars().any(|each| each.is_control() && each != '\n'));
    }
}
