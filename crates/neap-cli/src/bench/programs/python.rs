//! Python: threads build dictionaries and drop them, then the program waits. CPython's small-object
//! allocator is switched off, so that every object comes from malloc.

use std::process::Stdio;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use super::scratch::Scratch;
use super::{LIMIT, Method, Output, Program, read_until, tool};
use crate::process::{Process, rss_kib};
use crate::variant::Variant;
use crate::work::Outcome;

const SCRIPT: &str = "\
import sys, threading

ENTRIES, ROUNDS, THREADS = int(sys.argv[1]), 2, 8
sums = [0] * THREADS
step = threading.Barrier(THREADS)

def build(number):
    for turn in range(ROUNDS):
        book = {}
        for key in range(ENTRIES):
            book[f'key-{number}-{key}'] = [key, str(key * turn)]
        step.wait()
        sums[number] += sum(len(name) + len(value[1]) for name, value in book.items())
        del book
        step.wait()

threads = [threading.Thread(target=build, args=(number,)) for number in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print('dropped', flush=True)
sys.stdin.read()
print(sums)
";

pub(super) fn program() -> Program {
    Program { name: "python", needs: &["python3"], prepare, run: Method::Own(run) }
}

fn prepare(scratch: &Scratch) -> Result<()> {
    scratch.file("dictionaries.py", |file| file.write_all(SCRIPT.as_bytes()))
}

fn run(scratch: &Scratch, variant: &Variant) -> Result<Outcome> {
    let mut command = tool(scratch, "python3")?;
    command.arg("dictionaries.py").arg(scratch.amount(200_000).to_string());
    variant.apply(&mut command);
    command.env("PYTHONMALLOC", "malloc").env("PYTHONHASHSEED", "0");
    command.stdin(Stdio::piped()).stderr(scratch.errors()?);
    let mut process = Process::start(command, LIMIT)?;
    let hold = process.stdin().context("standard input was not asked for")?;
    let mut output = Output::default();
    let dropped = read_until(&mut process, &mut output, "dropped");
    if dropped.is_err() {
        scratch.show_errors();
    }
    dropped?;
    thread::sleep(Duration::from_secs(2));
    let kept = rss_kib(process.id())?;
    drop(hold);
    process.read(|bytes| {
        output.add(bytes);
        true
    })?;
    Ok(Outcome { rss_kib: vec![kept], ..output.outcome(&process.wait()?) })
}
