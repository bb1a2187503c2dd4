//! Programs that run from start to end on a generated input: a database, two compilers, version
//! control, and others.
//!
//! Inputs come from fixed formulas, so the output is the same in every run. Features that would
//! make a program depend on time, threads or the user's settings are switched off.

use std::fs::File;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::scratch::Scratch;
use super::{Method, Program, tool};

pub(super) fn programs() -> Vec<Program> {
    let through = Method::Through;
    vec![
        Program { name: "sqlite3", needs: &["sqlite3"], prepare: prepare_sqlite3, run: through(sqlite3) },
        Program { name: "gcc", needs: &["gcc"], prepare: prepare_gcc, run: through(gcc) },
        Program { name: "git", needs: &["git", "sh"], prepare: prepare_git, run: through(git) },
        Program { name: "sort", needs: &["sort"], prepare: prepare_sort, run: through(sort) },
        Program { name: "node", needs: &["node"], prepare: prepare_node, run: through(node) },
        Program { name: "java", needs: &["java", "javac", "sh"], prepare: prepare_java, run: through(java) },
        Program { name: "rustc", needs: &["rustc"], prepare: prepare_rustc, run: through(rustc) },
    ]
}

/// The index-th of a fixed sequence of scattered 32-bit numbers.
pub(super) fn scattered(index: usize) -> u32 {
    (index as u32).wrapping_mul(2_654_435_761) ^ ((index as u32) >> 3).wrapping_mul(40_503)
}

fn prepare_sqlite3(scratch: &Scratch) -> Result<()> {
    let rows = scratch.amount(200_000);
    scratch.file("load.sql", |file| {
        writeln!(
            file,
            "CREATE TABLE entry(id INTEGER PRIMARY KEY, name TEXT, tag TEXT, value REAL);
             WITH RECURSIVE row(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM row WHERE i < {rows})
             INSERT INTO entry SELECT i, 'name-' || (i * 7919 % {rows}), printf('%04x', i * 40503 % 4096), i * 0.5 FROM row;
             CREATE INDEX entry_name ON entry(name);
             CREATE INDEX entry_tag ON entry(tag, value);
             SELECT tag, count(*), sum(value), max(name) FROM entry GROUP BY tag ORDER BY 3 DESC, 1 LIMIT 50;
             SELECT count(*), sum(length(a.name || b.name)) FROM entry a JOIN entry b ON b.name = 'name-' || a.id;
             UPDATE entry SET name = name || '-' || tag WHERE id % 2 = 0;
             DELETE FROM entry WHERE id % 3 = 0;
             SELECT length(group_concat(name)), count(DISTINCT tag) FROM entry;
             SELECT name FROM entry ORDER BY substr(name, 6), id LIMIT 200;"
        )
    })
}

fn sqlite3(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "sqlite3")?;
    let script = File::open(scratch.path("load.sql")).context("cannot open the generated SQL")?;
    command.args(["-batch", ":memory:"]).stdin(Stdio::from(script));
    Ok(command)
}

fn prepare_gcc(scratch: &Scratch) -> Result<()> {
    let functions = scratch.amount(250);
    scratch.file("many.c", |file| {
        writeln!(file, "typedef struct node {{ struct node *next; int key; double weight; char name[24]; }} node;")?;
        for number in 0..functions {
            let scatter = scattered(number);
            writeln!(
                file,
                "double walk_{number}(node *list, int *table, int length) {{
                     double sum = {number}.5;
                     for (int i = 0; i < length; i++) {{
                         table[i] = (table[i] ^ {scatter}u) % {};
                         switch (table[i] & 7) {{
                         case 0: sum += table[i] * 0.25; break;
                         case 1: sum -= i * {number}; break;
                         case {}: sum *= 1.0001; break;
                         default: table[(i + 1) % length] += table[i] >> {}; }}
                     }}
                     for (node *n = list; n; n = n->next)
                         if (n->key % {} == 0) sum += n->weight * n->name[n->key & 15];
                     return sum;
                 }}",
                scatter % 1000 + 1,
                2 + number % 6,
                number % 13,
                number % 17 + 1
            )?;
        }
        Ok(())
    })
}

fn gcc(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "gcc")?;
    command.args(["-O2", "-S", "-o", "-", "many.c"]);
    Ok(command)
}

/// git without the user's and the system's settings.
fn git_settings(command: &mut Command) -> &mut Command {
    let settings = [("GIT_CONFIG_NOSYSTEM", "1"), ("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_OPTIONAL_LOCKS", "0")];
    command.envs(settings)
}

fn prepare_git(scratch: &Scratch) -> Result<()> {
    let (commits, files) = (scratch.amount(200).max(5), 120);
    scratch.file("history", |file| {
        for commit in 0..commits {
            let message = format!("Change number {commit}\n");
            let time = 1_600_000_000 + commit * 3600;
            writeln!(file, "commit refs/heads/main\ncommitter A Person <person@example.org> {time} +0000")?;
            writeln!(file, "data {}\n{message}", message.len())?;
            for number in (0..files).filter(|number| commit == 0 || (number + commit) % 11 == 0) {
                let text: String = (0..200)
                    .map(|line| {
                        format!("line {line} of {number}: {:x}\n", scattered(line * files + number + line % 5 * commit))
                    })
                    .collect();
                writeln!(file, "M 100644 inline folder{}/file{number}\ndata {}\n{text}", number % 9, text.len())?;
            }
        }
        Ok(())
    })?;
    let mut shell = tool(scratch, "sh")?;
    let script =
        "git init -q -b main repository && cd repository && git fast-import --quiet <../history && git reset -q --hard";
    let made = git_settings(shell.args(["-c", script])).output().context("cannot run git")?;
    if !made.status.success() {
        bail!("git cannot make a repository: {}", String::from_utf8_lossy(&made.stderr).trim());
    }
    Ok(())
}

fn git(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "sh")?;
    let script = "set -e; cd repository; git status --short; git log --stat; git diff HEAD~3 HEAD; \
                  git -c pack.threads=1 repack -a -d -f -q; git fsck --no-progress; git count-objects; git blame folder0/file0";
    git_settings(command.args(["-c", script]));
    Ok(command)
}

fn prepare_sort(scratch: &Scratch) -> Result<()> {
    let lines = scratch.amount(1_500_000);
    scratch.file("lines", |file| (0..lines).try_for_each(|line| writeln!(file, "{:08x} entry {line}", scattered(line))))
}

fn sort(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "sort")?;
    command.args(["--parallel=2", "lines"]);
    Ok(command)
}

const NODE_SCRIPT: &str = "\
const zlib = require('zlib'), crypto = require('crypto');
const count = Number(process.argv[2]), entries = [];
for (let i = 0; i < count; i++) entries.push({ id: i, name: 'entry-' + (i * 7919 % count), tags: [i % 7, i % 11] });
const text = JSON.stringify(entries);
const buffers = [];
for (let i = 0; i < 2000; i++) buffers.push(Buffer.alloc(1000 + i * 13, i & 255));
const packed = zlib.gzipSync(Buffer.from(text), { level: 6 });
const back = JSON.parse(zlib.gunzipSync(packed).toString());
const digest = crypto.createHash('sha256').update(Buffer.concat(buffers)).digest('hex');
console.log(text.length, back.length, back[count - 1].name, digest);
";

fn prepare_node(scratch: &Scratch) -> Result<()> {
    scratch.file("work.js", |file| file.write_all(NODE_SCRIPT.as_bytes()))
}

fn node(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "node")?;
    command.arg("work.js").arg(scratch.amount(200_000).to_string());
    Ok(command)
}

const JAVA_SOURCE: &str = "\
import java.util.*;
import java.util.stream.*;

public class Hello {
    record Entry(int id, String name) {}

    public static void main(String[] arguments) {
        Map<Integer, List<Entry>> groups = IntStream.range(0, 200_000)
            .mapToObj(i -> new Entry(i, \"entry-\" + i * 31 % 977))
            .collect(Collectors.groupingBy(entry -> entry.name().hashCode() & 255, TreeMap::new, Collectors.toList()));
        groups.forEach((key, list) -> System.out.println(key + \" \" + list.size()));
        System.out.println(\"Hello, world\");
    }
}
";

fn prepare_java(scratch: &Scratch) -> Result<()> {
    scratch.file("Hello.java", |file| file.write_all(JAVA_SOURCE.as_bytes()))
}

fn java(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "sh")?;
    let script = "set -e; javac -J-Xmx256m -J-XX:+UseSerialGC -d classes Hello.java; \
                  java -Xmx256m -XX:+UseSerialGC -cp classes Hello";
    command.args(["-c", script]);
    Ok(command)
}

fn prepare_rustc(scratch: &Scratch) -> Result<()> {
    let types = scratch.amount(200);
    scratch.file("many.rs", |file| {
        writeln!(file, "use std::collections::BTreeMap;")?;
        for number in 0..types {
            writeln!(
                file,
                "#[derive(Clone, Debug, PartialEq, PartialOrd)]
                 pub struct Record{number} {{ pub id: u{}, pub names: Vec<String>, pub weight: f64 }}
                 impl Record{number} {{
                     pub fn index(records: &[Record{number}]) -> BTreeMap<String, f64> {{
                         let mut map = BTreeMap::new();
                         for record in records.iter().filter(|record| record.weight > {number}.0) {{
                             for name in &record.names {{
                                 *map.entry(format!(\"{{name}}-{{}}-{}\", record.id)).or_insert(0.0) += record.weight;
                             }}
                         }}
                         map
                     }}
                 }}",
                8 << (number % 4),
                scattered(number)
            )?;
        }
        Ok(())
    })
}

fn rustc(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "rustc")?;
    command.args(["--edition", "2021", "--crate-type", "lib", "--crate-name", "many", "-C", "opt-level=1"]);
    command.args(["-C", "codegen-units=1", "--emit", "asm", "-o", "-", "many.rs"]);
    Ok(command)
}
