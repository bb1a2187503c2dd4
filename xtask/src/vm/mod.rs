//! `cargo xtask vm [--target aarch64-unknown-linux-gnu]`: tests on a larger, emulated machine.
//!
//! The command boots a virtual machine with 4 CPUs, 2 nodes and an isolated CPU in seconds. It runs
//! test programs in it that this machine has built. packages.rs obtains the virtual machine,
//! initrd.rs packs its file system, machine.rs runs it; this file has the tests. The command needs
//! no root, and installs nothing outside the target folder. If the virtual machine is not
//! available, the command ends with the status of a skipped check, so it never passes without a
//! test. Every instruction is emulated, so the tests check behaviour and never time.
//!
//! `--suite` instead runs all tests of the shipped libraries and programs (suite.rs).

use core::time::Duration;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, bail, ensure};

use crate::process::{need, run};
use crate::report::Report;
use crate::target::Target;
use crate::{Skipped, build, layout, programs, test_programs};

mod initrd;
mod machine;
pub(crate) mod packages;
mod suite;

use machine::{Answer, FIGURE, Shape};

/// One program that runs in the machine: a shell line that ends with status 0. `/tests` holds the
/// test programs of the crates, `/programs` those of `tests/programs`, `$PRELOAD` the library.
/// Lines of output that begin with `figure: ` are printed at the end.
#[derive(Clone)]
struct Guest {
    name: Cow<'static, str>,
    shape: Shape,
    line: Cow<'static, str>,
    /// Most seconds that it may take, against a hang.
    limit: u32,
    /// Files for this guest alone, by their path in the machine.
    files: Vec<(String, PathBuf)>,
}

const fn guest(name: &'static str, line: &'static str) -> Guest {
    guest_on(Shape::TwoNodes, name, line)
}

const fn guest_on(shape: Shape, name: &'static str, line: &'static str) -> Guest {
    Guest { name: Cow::Borrowed(name), shape, line: Cow::Borrowed(line), limit: 240, files: Vec::new() }
}

/// Takes CPUs offline and online while a test runs. The test must pass, after at least three turns.
/// One of CPUs 1 and 2 is always online, so that no thread loses all CPUs that it may run on.
const HOTPLUG: &str = "\
NEAP_SECONDS=10 /tests/neap-stress a6 & test=$!; turns=0
cpus=/sys/devices/system/cpu
while kill -0 $test 2>/dev/null; do
  for cpu in 1 2; do
    echo 0 >$cpus/cpu$cpu/online || exit 1
    sleep 0.05
    echo 1 >$cpus/cpu$cpu/online || exit 1
  done
  turns=$((turns + 1))
done
wait $test || exit 1
echo \"$turns turns\"; [ $turns -gt 2 ]";

/// With groups of version 2 the heap comes to its limit before the kernel kills, with one thread
/// and with several.
const CONTAINER_FULL: &str = "\
g=/sys/fs/cgroup; mkdir $g/full; echo 200M >$g/full/memory.max
for threads in 1 2; do
  (echo 0 >$g/full/cgroup.procs
   NEAP=limit:auto,refuse:on LD_PRELOAD=$PRELOAD exec /programs/container fill $threads 120 185) || exit 1
done
grep -q '^oom_kill 0' $g/full/memory.events";

/// A lower `memory.high` takes memory that a program keeps free, and then `memory.max` can follow.
const CONTAINER_SHRINKS: &str = "\
g=/sys/fs/cgroup; mkdir $g/less; echo 400M >$g/less/memory.max
(echo 0 >$g/less/cgroup.procs; NEAP=limit:auto LD_PRELOAD=$PRELOAD exec /programs/container keep 300 80 94 /tmp/keeps) & test=$!
until grep -q keeps /tmp/keeps 2>/dev/null; do sleep 0.2; kill -0 $test || exit 1; done
echo 100M >$g/less/memory.high
wait $test || exit 1
echo 100M >$g/less/memory.max; grep -q '^oom_kill 0' $g/less/memory.events";

/// The limit of the outer group applies, though the inner group has a larger one.
const CONTAINER_NESTED: &str = "\
g=/sys/fs/cgroup; mkdir $g/outer; echo 150M >$g/outer/memory.max; echo +memory >$g/outer/cgroup.subtree_control
mkdir $g/outer/inner; echo 1G >$g/outer/inner/memory.max
(echo 0 >$g/outer/inner/cgroup.procs
 NEAP=limit:auto,refuse:on LD_PRELOAD=$PRELOAD exec /programs/container fill 1 80 140) || exit 1
grep -q '^oom_kill 0' $g/outer/memory.events";

/// `neap pressure` names the limit of the outer group. In a namespace whose mounts end at the inner
/// group, it names the inner group's limit, and says that ancestors are hidden.
const EXPLAIN: &str = "\
g=/sys/fs/cgroup; mkdir $g/above; echo 150M >$g/above/memory.max; echo +memory >$g/above/cgroup.subtree_control
mkdir $g/above/own; echo 1G >$g/above/own/memory.max
(echo 0 >$g/above/own/cgroup.procs; exec /bin/neap pressure) >seen || exit 1
cat seen; grep -q 'cgroup version 2' seen && grep -q 'Ancestors: all visible' seen || exit 1
grep -q '^Limit: *150.0 MiB, of /sys/fs/cgroup/above$' seen || exit 1
(echo 0 >$g/above/own/cgroup.procs; exec /programs/namespaced /bin/neap pressure) >seen || exit 1
cat seen; grep -q 'Ancestors: some are hidden' seen && grep -q '^Limit: *1.0 GiB, of /sys/fs/cgroup$' seen";

/// Events of a limit and stalls of a group notify, with privilege and without.
const SIGNALS: &str = "\
/tests/neap-pressure-kernel --include-ignored --test-threads 1 --nocapture --skip unprivileged::";

/// Functions for servers with a cache in a container of 64 MiB, those of `neap bench wall`: `serve
/// POLICY NEAP CACHE` starts one, `finish` succeeds if it was not killed.
const SERVER: &str = "\
g=/sys/fs/cgroup/cut
serve() {
  mkdir $g; echo 64M >$g/memory.max; mkfifo stop
  (echo 0 >$g/cgroup.procs; export NEAP=$2
   exec neap work wall --policy $1 --cache $3 --rate 50 --steady 200 --usage-file $g/memory.current \
     --limit-file $g/memory.max) <stop >said 2>&1 & server=$!
  exec 3>stop
  until grep -q steady said; do kill -0 $server || return 1; sleep 0.05; done
}
finish() { sleep 0.3; exec 3>&-; wait $server; status=$?; rm stop; rmdir $g; return $status; }
";

/// An operator that lowers `memory.high` first, and `memory.max` once the usage is below it, kills
/// no server.
const CUT_HIGH_FIRST: &str = "\
. /programs/server.sh
for run in $(seq 20); do
  serve shrinker limit:auto 40000000 || exit 1
  echo 24M >$g/memory.high
  until [ $(cat $g/memory.current) -le 25165824 ]; do kill -0 $server || exit 1; sleep 0.05; done
  echo 24M >$g/memory.max; grep -q '^oom_kill 0' $g/memory.events || exit 1
  finish || exit 1
done
echo 'figure: 20 cuts from 64 to 24 MiB, memory.high first: none killed'";

/// The kernel kills a process at once if `memory.max` is written below the usage. So a cut in one
/// write succeeds only as far as memory is free. The test prints how far that is. neap keeps a
/// tenth free, or as much as the option `reserve` says.
const CUT_AT_ONCE: &str = "\
. /programs/server.sh
survived() {
  most=0
  for cut in 2 4 6 8 12 16 20 24 28 32; do
    serve $1 $2 $3 || return 1
    echo $((64 - cut))M >$g/memory.max
    finish || break
    most=$cut
  done
  echo \"figure: memory.max less at once, $1 $2: $most of 64 MiB\"
}
survived fixed background:auto 48000000; survived poller background:auto 48000000
survived shrinker limit:auto 60000000; auto=$most
survived shrinker limit:auto,reserve:24m 60000000
[ $auto -ge 4 ] && [ $most -ge 16 ]";

/// A profile has the stacks of the first thread and of another, up to where they began.
const PROFILE: &str = "\
neap run --library $PRELOAD --profile held.folded --every 64k -- /programs/profiled || exit 1
cat held.folded
grep -q 'main;asks_for_it;holds_here' held.folded && grep -q 'other_thread;asks_for_it;holds_here' held.folded";

/// Without the tests of a wait for two words (`futex_waitv`, Linux 5.16) and of copies of stacks
/// (`MADV_POPULATE_READ`, 5.14), for which neap has fallbacks.
const OLD_KERNEL: &str = "\
grep -q ' 5[.]10[.]' /proc/version || exit 1
/tests/neap-os --skip either_word_ends_the_wait --skip a_copy_has_what --skip what_cannot_be_read";

const GUESTS: &[Guest] = &[
    guest("what the machine has", "/tests/neap-managers second_machine:: --ignored --test-threads 1 --skip memoryless"),
    guest("neap-os", "/tests/neap-os"),
    guest("neap-base", "/tests/neap-base"),
    guest("nodes", "/tests/neap-managers nodes::"),
    guest("large", "/tests/neap-managers large::"),
    guest("limits", "/tests/neap-managers limits::"),
    guest("fork", "/tests/neap-fork"),
    guest("stress", "NEAP_SECONDS=10 /tests/neap-stress a6"),
    guest("stress while CPUs come and go", HOTPLUG),
    guest("family", "LD_PRELOAD=$PRELOAD /programs/family"),
    guest("fork_storm", "LD_PRELOAD=$PRELOAD /programs/fork_storm 5"),
    guest("thread_storm", "LD_PRELOAD=$PRELOAD /programs/thread_storm 300"),
    guest("signals_and_migration", "LD_PRELOAD=$PRELOAD /programs/signals_and_migration 15"),
    guest("children of vfork", "LD_PRELOAD=$PRELOAD /programs/vfork_children"),
    guest("signals at every step", "LD_PRELOAD=$PRELOAD /programs/unwind_signals"),
    guest("burst_idle", "LD_PRELOAD=$PRELOAD /programs/burst_idle 4 16 64"),
    guest("a profile", PROFILE),
    guest("signals of memory pressure", SIGNALS),
    guest("a container that is full", CONTAINER_FULL),
    guest("a container that shrinks", CONTAINER_SHRINKS),
    guest("a container in a container", CONTAINER_NESTED),
    guest("a container cut by memory.high first", CUT_HIGH_FIRST),
    guest("a container cut by memory.max at once", CUT_AT_ONCE),
    guest("a container is explained, in a namespace too", EXPLAIN),
    guest_on(
        Shape::Memoryless,
        "a node without memory",
        "/tests/neap-managers second_machine::a_memoryless --ignored --test-threads 1",
    ),
    guest_on(
        Shape::Memoryless,
        "signals_and_migration beside it",
        "LD_PRELOAD=$PRELOAD /programs/signals_and_migration 15",
    ),
    guest_on(
        Shape::Realtime,
        "realtime priorities",
        "grep -q PREEMPT_RT /proc/version && /tests/neap-realtime --nocapture",
    ),
    guest_on(Shape::Realtime, "stress, realtime kernel", "NEAP_SECONDS=10 /tests/neap-stress a6"),
    guest_on(Shape::Old, "neap-os, old kernel", OLD_KERNEL),
    guest_on(Shape::Old, "limits, old kernel", "/tests/neap-managers limits::"),
    guest_on(Shape::Old, "large, old kernel", "/tests/neap-managers large::"),
    guest_on(Shape::Old, "fork, old kernel", "/tests/neap-fork"),
    guest_on(Shape::Old, "stress, old kernel", "NEAP_SECONDS=10 /tests/neap-stress a6"),
    guest_on(Shape::Old, "family, old kernel", "LD_PRELOAD=$PRELOAD /programs/family"),
    guest_on(Shape::Old, "fork_storm, old kernel", "LD_PRELOAD=$PRELOAD /programs/fork_storm 5"),
    guest_on(Shape::Old, "thread_storm, old kernel", "LD_PRELOAD=$PRELOAD /programs/thread_storm 300"),
    guest_on(Shape::Old, "signals_and_migration, old kernel", "LD_PRELOAD=$PRELOAD /programs/signals_and_migration 15"),
    guest_on(Shape::Old, "burst_idle, old kernel", "LD_PRELOAD=$PRELOAD /programs/burst_idle 4 16 64"),
    guest_on(Shape::Old, "signals of memory pressure, old kernel", SIGNALS),
    guest_on(Shape::Old, "a container that is full, old kernel", CONTAINER_FULL),
];

/// Programs of `tests/programs` that the machine gets.
const PROGRAMS: &[&str] = &[
    "family",
    "fork_storm",
    "thread_storm",
    "signals_and_migration",
    "burst_idle",
    "container",
    "namespaced",
    "profiled",
    "vfork_children",
    "unwind_signals",
];

/// Crates whose test programs the machine gets.
const TESTED: &[&str] = &["neap-os", "neap-base", "neap-pressure", "neap"];

/// Files of the machine's file system, by path.
type Files = BTreeMap<String, initrd::Entry>;

/// Runs the guests whose names contain one of `names`, or all.
pub(crate) fn command(arguments: &[String]) -> Result<()> {
    let (target, names) = Target::parse(arguments)?;
    let (is_suite, names) = match names {
        [option, names @ ..] if option == "--suite" => (true, names),
        names => (false, names),
    };
    ensure!(target != Target::Musl, "no virtual machine has musl");
    target.is_there(false)?;
    let folder = layout::target().join(if target == Target::Native { "vm" } else { "vm-arm64" });
    std::fs::create_dir_all(&folder)?;
    let found = match packages::obtain(target, &folder) {
        Ok(found) => found,
        Err(error) => return Err(Skipped(format!("vm: SKIPPED, nothing was tested: {error:#}")).into()),
    };
    match target {
        Target::Native => build::build()?,
        Target::Arm64 | Target::Musl => {
            run(target.cargo_of_library()?)?;
            run(target.cargo(&["build", "--release", "--package", "neap-cli"]))?;
        }
    }
    let start = Instant::now();
    let mut machines = Machines {
        target,
        found,
        initrd: folder.join("initrd"),
        report: Report::default(),
        figures: Vec::new(),
        time: Duration::ZERO,
    };
    let scratch = folder.join("programs");
    std::fs::create_dir_all(&scratch)?;
    let chosen = |name: &str| names.is_empty() || names.iter().any(|wanted| name.contains(wanted.as_str()));
    let (guests, batch) = match is_suite {
        true => (suite::guests(&mut machines.report, target, &scratch, &chosen)?, suite::BATCH),
        false => (lanes(target).into_iter().filter(|guest| chosen(&guest.name)).collect(), usize::MAX),
    };
    if let Some(unknown) = names.iter().find(|name| !guests.iter().any(|guest| guest.name.contains(name.as_str()))) {
        bail!("vm: no test's name contains `{unknown}`");
    }
    let files = contents(target, &machines.found, &scratch, is_suite)?;
    for shape in Shape::ALL {
        let guests: Vec<&Guest> = guests.iter().filter(|guest| guest.shape == *shape && chosen(&guest.name)).collect();
        guests.chunks(batch).try_for_each(|guests| machines.run(*shape, guests, &files))?;
    }
    machines.figures.iter().for_each(|figure| println!("vm: {figure}"));
    let built = start.elapsed() - machines.time;
    println!("vm: {} s in machines, {} s for builds of tests", machines.time.as_secs(), built.as_secs());
    machines.report.close("vm")
}

/// The guests for a processor.
fn lanes(target: Target) -> Vec<Guest> {
    let here = |guest: &&Guest| target == Target::Native || guest.shape == Shape::TwoNodes;
    // Another processor takes longer to emulate.
    let patience = if target == Target::Native { 1 } else { 3 };
    GUESTS.iter().filter(here).map(|guest| Guest { limit: guest.limit * patience, ..guest.clone() }).collect()
}

/// Machines that run one after the other, and their results.
struct Machines {
    target: Target,
    found: packages::Machine,
    initrd: PathBuf,
    report: Report,
    figures: Vec<String>,
    /// Time that they ran.
    time: Duration,
}

impl Machines {
    /// Runs some tests on one machine. `files` are for all machines.
    fn run(&mut self, shape: Shape, guests: &[&Guest], files: &Files) -> Result<()> {
        if let Err(error) = self.found.kernel(shape) {
            let reason = format!("no kernel: {error:#}");
            guests.iter().for_each(|guest| self.report.skip(&guest.name, &reason));
            return Ok(());
        }
        let lines: Vec<(&str, u32)> = guests.iter().map(|guest| (&*guest.line, guest.limit)).collect();
        let own = guests.iter().flat_map(|guest| &guest.files);
        let mut files = files.clone();
        files.extend(own.map(|(name, path)| (name.clone(), initrd::Entry::File(path.clone()))));
        files.insert("init".into(), initrd::Entry::Text(machine::init(&lines)));
        initrd::write(&self.initrd, &files)?;
        println!("vm: {} tests on {}", guests.len(), shape.name());
        let limit = lines.iter().map(|line| line.1).sum();
        let boot = Instant::now();
        let names: Vec<String> = guests.iter().map(|guest| guest.name.to_string()).collect();
        let ended = move |at: usize, status| println!("vm: {} ended with status {status}", names[at]);
        let answers = machine::run(self.target, &self.found, shape, &self.initrd, limit, ended)?;
        self.time += boot.elapsed();
        for (at, guest) in guests.iter().enumerate() {
            let result = match answers.tests.get(at) {
                Some(Answer { status: 0, output }) if output.contains("test result: ok. 0 passed") => {
                    Err(anyhow::anyhow!("no test was run\n{output}"))
                }
                Some(Answer { status: 0, output }) => {
                    let said = output.lines().filter_map(|line| line.strip_prefix(FIGURE));
                    self.figures.extend(said.map(str::to_string));
                    Ok(())
                }
                Some(answer) => Err(anyhow::anyhow!("status {}\n{}", answer.status, answer.output)),
                None => Err(anyhow::anyhow!("the machine stopped before or in it; its last words:\n{}", answers.rest)),
            };
            self.report.check(&guest.name, result);
        }
        Ok(())
    }
}

/// The machine's file system, without files of single guests and without init.
fn contents(target: Target, found: &packages::Machine, scratch: &Path, is_suite: bool) -> Result<Files> {
    let mut files = BTreeMap::new();
    let file = |path: PathBuf| initrd::Entry::File(path);
    files.insert("bin/busybox".into(), file(found.busybox.clone()));
    files.insert("lib/libneap_malloc.so".into(), file(target.library()));
    files.insert("bin/neap".into(), file(target.command_line()));
    if !is_suite {
        files.insert("programs/server.sh".into(), initrd::Entry::Text(SERVER.into()));
        for (name, program) in tests(target, TESTED)? {
            files.insert(format!("tests/{name}"), file(program));
        }
        need("gcc", &["gcc", "libc6-dev"])?;
        for name in PROGRAMS {
            let source = layout::root().join(format!("tests/programs/{name}.c"));
            let program = programs::compile(target, &source, &["-fno-builtin"], scratch)?;
            files.insert(format!("programs/{name}"), file(program));
        }
    }
    match target {
        Target::Native => initrd::add_libraries(&mut files)?,
        Target::Arm64 | Target::Musl => {
            files.extend(target.libraries().into_iter().map(|(name, path)| (name, file(path))))
        }
    }
    Ok(files)
}

/// The test programs of some crates, by name.
fn tests(target: Target, packages: &[&str]) -> Result<BTreeMap<String, PathBuf>> {
    let arguments: Vec<&str> = packages.iter().flat_map(|package| ["--package", package]).collect();
    let programs = test_programs::build(target.cargo(&[&["test"], &arguments[..]].concat()))?;
    Ok(programs.into_iter().map(|program| (program.name, program.file)).collect())
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn every_name_in_the_list_is_another() {
        let mut names: Vec<&str> = GUESTS.iter().map(|guest| &*guest.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), GUESTS.len());
    }
}
