//! `cargo xtask smoke`: programs that know nothing of neap, run on its malloc.
//!
//! Each real program runs once as it is and once per mode under the preload library; standard output and exit status must
//! be the same, and neither the loader nor neap may complain. Programs that are not installed are counted as skipped. The
//! self-checking programs of `tests/programs` follow (programs.rs). The first check asks the loader whose `malloc` a
//! preloaded program gets: without it everything below could pass on the system's.

use core::time::Duration;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{self, Outcome, capture, need, observe, which};
use crate::report::Report;
use crate::{layout, programs};

/// The ways in which everything runs: a name and the variables that bring it about.
pub(crate) const MODES: &[(&str, &[(&str, &str)])] = &[
    ("default", &[]),
    ("rseq off", &[("NEAP", "rseq:off")]),
    ("background off", &[("NEAP", "background:off")]),
    ("glibc without rseq", &[("GLIBC_TUNABLES", "glibc.pthread.rseq=0")]),
];

/// A real program: its name, what must be on `PATH`, files laid out before, and the command line.
struct Program {
    name: &'static str,
    needs: &'static [&'static str],
    files: &'static [(&'static str, &'static str)],
    line: &'static [&'static str],
}

const BASH_LOOP: &str =
    "s=0; for i in $(seq 2000); do s=$((s + i)); a[i]=$s; done; echo ${#a[@]} ${a[1234]} $(echo x | tr x y)";

const PYTHON_THREADS: &str = "\
import threading
total = [0] * 8
def work(n):
    d = {}
    for i in range(20000):
        d[str(i)] = [i] * (i % 7)
    total[n] = sum(len(v) for v in d.values())
ts = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in ts]
[t.join() for t in ts]
print(total)
";

const PYTHON_FORK: &str = "\
import os, threading
stop = threading.Event()
def churn():
    while not stop.is_set():
        x = [bytes(n) for n in range(0, 4000, 16)]
ts = [threading.Thread(target=churn) for _ in range(4)]
[t.start() for t in ts]
codes = []
for i in range(20):
    pid = os.fork()
    if pid == 0:
        y = {k: str(k) * 3 for k in range(5000)}
        os._exit(len(y) % 251)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.set()
[t.join() for t in ts]
print(codes)
";

const PYTHON_SUBPROCESS: &str = "\
import subprocess, sys
from concurrent.futures import ThreadPoolExecutor
def child(n):
    code = 'import sys; print(sum(len(str(i)) for i in range(int(sys.argv[1]))))'
    return subprocess.run([sys.executable, '-c', code, str(n)], capture_output=True, text=True).stdout
with ThreadPoolExecutor(4) as pool:
    print(list(pool.map(child, range(1000, 9000, 1000))))
print(subprocess.check_output('echo shell', shell=True))
";

const HELLO_C: &str = "\
#include <stdio.h>
#include <stdlib.h>
int main(void) { char *p = malloc(100); sprintf(p, \"%d\", 42); puts(p); free(p); return 3; }
";

const HELLO_RS: &str = "\
use std::collections::BTreeMap;
fn main() {
    let m: BTreeMap<u32, String> = (0..1000).map(|i| (i, i.to_string())).collect();
    let t: Vec<_> = (0..4).map(|n| std::thread::spawn(move || vec![n; 1000].len())).collect();
    println!(\"{} {}\", m.len(), t.into_iter().map(|t| t.join().unwrap()).sum::<usize>());
}
";

const HELLO_JAVA: &str = "\
import java.util.*;
import java.util.stream.*;
class Hello {
    public static void main(String[] a) throws Exception {
        Map<Integer, String> m = new TreeMap<>();
        IntStream.range(0, 20000).forEach(i -> m.put(i, Integer.toString(i)));
        System.out.println(m.size() + \" \" + IntStream.range(0, 100000).parallel().sum());
        System.out.println(new ProcessBuilder(\"true\").start().waitFor());
    }
}
";

const GIT: &str = "\
export HOME=$PWD GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_DATE='1700000000 +0000' GIT_COMMITTER_DATE='1700000000 +0000'
export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e
git init -q -b main . && for i in $(seq 50); do seq $i 200 > f$i; done && git add f* && git commit -q -m one &&
seq 500 > f1 && git commit -q -a -m two && git log --stat --format='%H %s' && git diff HEAD~1 | wc && git gc -q && git fsck --full";

const SQL: &str = "\
create table t(a integer primary key, b text);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 20000) insert into t select i, 'row ' || i from n;
create index tb on t(b);
delete from t where a % 3 = 0;
select count(*), sum(length(b)), max(b) from t;
select group_concat(b) from (select b from t order by b desc limit 10);
";

const PROGRAMS: &[Program] = &[
    Program {
        name: "ls",
        needs: &["ls"],
        files: &[],
        line: &["ls", "-lR", "--time-style=+", "/usr/share/doc/bash", "/etc/apt"],
    },
    Program { name: "bash", needs: &["bash"], files: &[], line: &["bash", "-c", BASH_LOOP] },
    Program {
        name: "sort",
        needs: &["sort"],
        files: &[],
        line: &["bash", "-c", "seq 200000 | sort --parallel=4 -S 8M -r | md5sum"],
    },
    Program { name: "python threads", needs: &["python3"], files: &[], line: &["python3", "-c", PYTHON_THREADS] },
    Program {
        name: "python on malloc",
        needs: &["python3"],
        files: &[],
        line: &["env", "PYTHONMALLOC=malloc", "python3", "-c", PYTHON_THREADS],
    },
    Program { name: "python fork", needs: &["python3"], files: &[], line: &["python3", "-c", PYTHON_FORK] },
    Program { name: "python subprocess", needs: &["python3"], files: &[], line: &["python3", "-c", PYTHON_SUBPROCESS] },
    Program {
        name: "gcc",
        needs: &["gcc"],
        files: &[("hello.c", HELLO_C)],
        line: &["bash", "-c", "gcc -O2 -o hello hello.c && ./hello"],
    },
    Program { name: "git", needs: &["git"], files: &[], line: &["bash", "-c", GIT] },
    Program { name: "sqlite3", needs: &["sqlite3"], files: &[], line: &["sqlite3", "t.db", SQL] },
    Program {
        name: "rustc",
        needs: &["rustc"],
        files: &[("hello.rs", HELLO_RS)],
        line: &["bash", "-c", "rustc -O hello.rs && ./hello"],
    },
    Program {
        name: "node",
        needs: &["node"],
        files: &[],
        line: &[
            "node",
            "-e",
            "const m = new Map(); for (let i = 0; i < 1e5; i++) m.set('k' + i, [i]); require('zlib').gzip(Buffer.alloc(1e6, 'ab'), (e, b) => console.log(m.size, b.length, JSON.stringify([...m].slice(0, 3))))",
        ],
    },
    Program {
        name: "java",
        needs: &["java", "javac"],
        files: &[("Hello.java", HELLO_JAVA)],
        line: &["bash", "-c", "javac Hello.java && java Hello"],
    },
    Program {
        name: "valgrind",
        needs: &["valgrind"],
        files: &[],
        line: &["valgrind", "-q", "--tool=none", "sort", "/etc/passwd"],
    },
];

/// `smoke [--library FILE] [NAME...]`.
pub(crate) fn command(arguments: &[String]) -> Result<()> {
    let (library, names) = match arguments {
        [option, file, names @ ..] if option == "--library" => {
            (fs::canonicalize(file).with_context(|| file.clone())?, names)
        }
        [option] if option == "--library" => bail!("--library needs the name of a file"),
        names => (layout::library(), names),
    };
    let mut report = Report::default();
    into(&mut report, &library, names)?;
    report.close("smoke")
}

/// All programs whose name contains one of `names`, or all, counted in `report`.
pub(crate) fn into(report: &mut Report, library: &Path, names: &[String]) -> Result<()> {
    ensure!(library.exists(), "{} is not there: run `cargo xtask build`", library.display());
    need("gcc", &["gcc", "libc6-dev"])?;
    need("g++", &["g++"])?;
    let scratch = layout::target().join("smoke");
    fs::create_dir_all(&scratch)?;
    println!("programs under {}", library.display());
    report.check("malloc is the library's", preload_takes_effect(library, &scratch));
    let chosen = |name: &str| names.is_empty() || names.iter().any(|wanted| name.contains(wanted.as_str()));
    for program in PROGRAMS.iter().filter(|program| chosen(program.name)) {
        match program.needs.iter().find(|needed| which(needed).is_none()) {
            Some(missing) => report.skip(program.name, &format!("{missing} is not installed")),
            None => compare(report, program, library, &scratch)?,
        }
    }
    programs::into(report, library, &scratch, &chosen)
}

/// A program that was not preloaded at all would pass every comparison.
fn preload_takes_effect(library: &Path, scratch: &Path) -> Result<()> {
    let program = programs::compile(&layout::root().join("tests/programs/whose_malloc.c"), &["-fno-builtin"], scratch)?;
    let mut ask = Command::new(program);
    preload(&mut ask, library, &[]);
    let answer = capture(ask)?;
    for line in answer.lines() {
        let from = line.rsplit(' ').next().unwrap_or_default();
        ensure!(fs::canonicalize(from).ok() == fs::canonicalize(library).ok(), "{line}");
    }
    Ok(())
}

/// Sets the environment of a preloaded program. Variables that cargo sets for xtask do not reach it.
pub(crate) fn preload(command: &mut Command, library: &Path, mode: &[(&str, &str)]) {
    plain(command);
    command.env("LD_PRELOAD", library).envs(mode.iter().copied());
}

/// Sets the environment of the same program without the library.
pub(crate) fn plain(command: &mut Command) {
    for variable in ["LD_LIBRARY_PATH", "NEAP", "GLIBC_TUNABLES", "LD_PRELOAD"] {
        command.env_remove(variable);
    }
    command.env("LC_ALL", "C");
}

/// Runs one program as it is and in every mode, each in a fresh folder, and compares.
fn compare(report: &mut Report, program: &Program, library: &Path, scratch: &Path) -> Result<()> {
    let limit = Duration::from_secs(120);
    let folder = scratch.join("work");
    let fresh = || -> Result<Command> {
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        for (file, text) in program.files {
            fs::write(folder.join(file), text)?;
        }
        let (first, rest) = program.line.split_first().context("an empty command line")?;
        let mut line = process::command(first, rest);
        line.current_dir(&folder);
        Ok(line)
    };
    let mut line = fresh()?;
    plain(&mut line);
    let expected = observe(line, limit)?;
    for (mode, variables) in MODES {
        let mut line = fresh()?;
        preload(&mut line, library, variables);
        let found = observe(line, limit)?;
        report.check(&format!("{} ({mode})", program.name), same(&expected, &found));
    }
    Ok(())
}

/// True if both runs gave the same and the preloaded one was told nothing by the loader or by neap.
fn same(expected: &Outcome, found: &Outcome) -> Result<()> {
    ensure!(expected.status.is_some(), "without the library it was stopped by the time limit");
    complaints(found)?;
    ensure!(
        expected.status == found.status,
        "without the library: {}; with it: {}",
        expected.summary(),
        found.summary()
    );
    if expected.stdout != found.stdout {
        let differ = first_difference(&expected.stdout, &found.stdout);
        bail!("its output differs, first in line {differ}");
    }
    Ok(())
}

/// Lines on standard error that come from the loader (not preloaded) or from neap (an abort, a bad option).
pub(crate) fn complaints(found: &Outcome) -> Result<()> {
    let text = String::from_utf8_lossy(&found.stderr);
    let bad = text.lines().find(|line| line.starts_with("neap: ") || line.contains("ld.so: object"));
    match bad {
        Some(line) => bail!("{line}"),
        None => Ok(()),
    }
}

fn first_difference(expected: &[u8], found: &[u8]) -> String {
    let (expected, found) = (String::from_utf8_lossy(expected), String::from_utf8_lossy(found));
    let (mut a, mut b) = (expected.lines(), found.lines());
    let mut number = 1;
    loop {
        match (a.next(), b.next()) {
            (Some(x), Some(y)) if x == y => number += 1,
            (x, y) => {
                return format!("{number}: `{}` became `{}`", x.unwrap_or(""), y.unwrap_or(""));
            }
        }
    }
}
