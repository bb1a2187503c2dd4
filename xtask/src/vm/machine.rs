//! Runs the virtual machine: the emulator's command line, init's script, and the parsing of the
//! console.
//!
//! The console is the only output. Init prints a line before and after each test; the kernel's and
//! the test's output is between them. A time limit ends a machine that hangs.

use core::cell::Cell;
use core::time::Duration;
use std::path::Path;

use anyhow::{Result, anyhow};

use crate::process::{command, observe_lines};
use crate::target::Target;
use crate::vm::packages::Machine;

/// A machine's processors and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// CPUs 0 and 1 on node 0, 2 and 3 on node 1; CPU 3 is isolated.
    TwoNodes,
    /// CPU 0 on node 0; CPUs 1 and 2 on node 1, which has no memory and is nearer to node 2; CPU 3,
    /// isolated, on node 2.
    Memoryless,
    /// [`Shape::TwoNodes`] with a kernel for realtime.
    Realtime,
    /// [`Shape::TwoNodes`] with Linux 5.10.
    Old,
}

impl Shape {
    pub(crate) const ALL: &[Shape] = &[Shape::TwoNodes, Shape::Memoryless, Shape::Realtime, Shape::Old];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Shape::TwoNodes => "4 CPUs and 2 nodes, CPU 3 isolated",
            Shape::Memoryless => "4 CPUs and 3 nodes, one of them without memory",
            Shape::Realtime => "4 CPUs and 2 nodes, CPU 3 isolated, a kernel for realtime",
            Shape::Old => "4 CPUs and 2 nodes, CPU 3 isolated, Linux 5.10",
        }
    }

    fn nodes(self) -> &'static [&'static str] {
        match self {
            Shape::TwoNodes | Shape::Realtime | Shape::Old => &["node,memdev=m0,cpus=0-1", "node,memdev=m1,cpus=2-3"],
            Shape::Memoryless => &[
                "node,nodeid=0,memdev=m0,cpus=0",
                "node,nodeid=1,cpus=1-2",
                "node,nodeid=2,memdev=m1,cpus=3",
                "dist,src=0,dst=1,val=30",
                "dist,src=0,dst=2,val=40",
                "dist,src=1,dst=2,val=15",
            ],
        }
    }
}

/// The result of a test's program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The program's exit status; 143 if the time limit ended it.
    pub(crate) status: i32,
    /// The program's output.
    pub(crate) output: String,
}

/// The output of the console.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Console {
    /// The results of all tests that ended, in order.
    pub(crate) tests: Vec<Answer>,
    /// The output after the last of them.
    pub(crate) rest: String,
}

const BEGIN: &str = "<<< ";
const END: &str = ">>> ";
/// Seconds until init runs, with a large margin.
const BOOT: u32 = 60;
/// Begins a line of a test's output that is always kept.
pub(crate) const FIGURE: &str = "figure: ";
/// Last lines of output that are kept.
const KEPT: usize = 40;

/// The machine's first program: runs every line, and powers the machine off. It mounts cgroups of
/// version 2, and a file system at /tmp, unless /tmp has tests, of a checkout below /tmp.
pub(crate) fn init(lines: &[(&str, u32)]) -> String {
    let mut text = String::from(
        "#!/bin/busybox sh\n\
         export PATH=/bin PRELOAD=/lib/libneap_malloc.so RUST_BACKTRACE=0\n\
         /bin/busybox --install -s /bin\n\
         mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev\n\
         mount -t cgroup2 none /sys/fs/cgroup; echo +memory >/sys/fs/cgroup/cgroup.subtree_control\n\
         mkdir -p /tmp /dev/shm /etc; mount -t tmpfs shm /dev/shm; cd /tmp\n\
         [ -n \"$(ls)\" ] || { mount -t tmpfs tmp /tmp; cd /tmp; }\n",
    );
    for (at, (line, limit)) in lines.iter().enumerate() {
        let quoted = line.replace('\'', "'\\''");
        text.push_str(&format!("echo '{BEGIN}{at}'\ntimeout {limit} sh -c '{quoted}' 2>&1\necho \"{END}$?\"\n"));
    }
    text.push_str("poweroff -f\n");
    text
}

/// Boots and waits for the end, at most `limit` seconds after the boot. Calls `ended` with the
/// index and the status of each test that has ended.
pub(crate) fn run(
    target: Target,
    machine: &Machine,
    shape: Shape,
    initrd: &Path,
    limit: u32,
    ended: impl Fn(usize, i32) + Send + 'static,
) -> Result<Console> {
    let (program, root) = &machine.qemu;
    let console = if target == Target::Arm64 { "ttyAMA0" } else { "ttyS0" };
    // QARMA5, by which `max` signs arm64's return addresses, takes most of the time if emulated.
    let cpu = if target == Target::Arm64 { "max,pauth-impdef=on" } else { "max" };
    let mut qemu = command(&program.to_string_lossy(), ["-accel", "tcg,thread=multi", "-cpu", cpu]);
    if let Some(root) = root {
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        qemu.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        qemu.env("LD_LIBRARY_PATH", std::env::join_paths([&libraries, &root.join("lib/x86_64-linux-gnu")])?);
        for firmware in ["qemu", "seabios"] {
            qemu.arg("-L").arg(root.join("usr/share").join(firmware));
        }
    }
    if target == Target::Arm64 {
        qemu.args(["-machine", "virt"]);
    }
    qemu.args(["-smp", "4,sockets=4", "-m", "3G"]);
    for node in ["memory-backend-ram,id=m0,size=1536M", "memory-backend-ram,id=m1,size=1536M"] {
        qemu.args(["-object", node]);
    }
    shape.nodes().iter().for_each(|node| _ = qemu.args(["-numa", node]));
    qemu.args(["-nodefaults", "-nic", "none", "-nographic", "-serial", "stdio", "-no-reboot"]);
    let kernel = machine.kernel(shape).map_err(|error| anyhow!("{error:#}"))?;
    qemu.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
    qemu.args(["-append", &format!("console={console} loglevel=2 isolcpus=3 nohz_full=3 panic=-1")]);
    let count = Cell::new(0);
    let hear = move |line: &str| {
        if let Some(status) = status_in(line) {
            ended(count.replace(count.get() + 1), status);
        }
    };
    let found = observe_lines(qemu, Duration::from_secs(u64::from(limit + BOOT)), hear)?;
    let mut console = read(&String::from_utf8_lossy(&found.stdout));
    let complaint = String::from_utf8_lossy(&found.stderr);
    console.rest.push_str(complaint.trim_end());
    if found.status.is_none() {
        console.rest.push_str("\nstopped by the time limit");
    }
    Ok(console)
}

/// The status in the line after a test.
fn status_in(line: &str) -> Option<i32> {
    Some(line.strip_prefix(END)?.trim().parse().unwrap_or(-1))
}

/// Parses the output of the console.
fn read(text: &str) -> Console {
    let mut console = Console::default();
    let mut lines: Vec<&str> = Vec::new();
    let kept = |lines: &[&str]| {
        let (before, last) = lines.split_at(lines.len().saturating_sub(KEPT));
        let figures = before.iter().filter(|line| line.starts_with(FIGURE));
        figures.chain(last).copied().collect::<Vec<_>>().join("\n")
    };
    for line in text.lines().map(|line| line.trim_end_matches('\r')) {
        // The firmware leaves control sequences before the first line.
        if let Some(status) = status_in(line) {
            console.tests.push(Answer { status, output: kept(&lines) });
            lines.clear();
        } else if line.contains(BEGIN) {
            lines.clear();
        } else {
            lines.push(line);
        }
    }
    console.rest = kept(&lines);
    console
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_is_taken_apart() {
        let text = "\x1bcSeaBIOS\r\nnoise\r\n<<< 0\r\none\r\ntwo\r\n>>> 0\r\n<<< 1\r\nthree\r\n>>> 101\r\n<<< 2\r\nlast words\r\n";
        let answer = |status, output: &str| Answer { status, output: output.into() };
        let tests = vec![answer(0, "one\ntwo"), answer(101, "three")];
        assert_eq!(read(text), Console { tests, rest: "last words".into() });
        let noise = "noise\n".repeat(2 * KEPT);
        let long = read(&format!("<<< 0\n{FIGURE}1\n{noise}>>> 0\n")).tests.remove(0).output;
        assert!(long.starts_with("figure: 1\nnoise\n") && long.lines().count() == KEPT + 1, "{long}");
    }

    #[test]
    fn lines_are_quoted_for_the_shell() {
        assert!(init(&[("echo 'a'", 5)]).contains("timeout 5 sh -c 'echo '\\''a'\\''' 2>&1\n"));
    }
}
