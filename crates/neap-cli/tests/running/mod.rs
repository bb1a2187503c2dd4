//! Programs under neap that a test communicates with, and the commands that inspect them.
//!
//! Method: the test executable runs itself with the library preloaded, in a role (`program` below)
//! that reports its progress on standard output and goes on when it is written to. The library is
//! the one that `NEAP_LIBRARY` names, or is built.
#![allow(dead_code, reason = "not every test file uses every piece")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

pub(crate) const ROLE: &str = "NEAP_TEST_ROLE";
pub(crate) const LINK: &str = "/memfd:neap-stat (deleted)";

/// The preload library, up to date.
pub(crate) fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        if let Some(given) = std::env::var_os("NEAP_LIBRARY") {
            return fs::canonicalize(&given).unwrap_or_else(|error| panic!("NEAP_LIBRARY {given:?}: {error}"));
        }
        let target = Path::new(env!("CARGO_BIN_EXE_neap")).parent().and_then(Path::parent).unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--release", "--package", "neap-malloc", "--target-dir"]).arg(target);
        let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
        assert!(built.success(), "cannot build the library");
        target.join("release/libneap_malloc.so")
    })
}

/// Returns an empty folder below the target folder.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Compiles a C program in a folder, without frame pointers.
pub(crate) fn compiled(folder: &Path, name: &str, source: &str) -> PathBuf {
    compiled_by("cc", folder, &format!("{name}.c"), source)
}

/// Compiles a program of one file in a folder, without frame pointers.
pub(crate) fn compiled_by(compiler: &str, folder: &Path, file: &str, source: &str) -> PathBuf {
    let file = folder.join(file);
    let program = file.with_extension("");
    fs::write(&file, source.trim_start()).unwrap();
    let mut compiler = Command::new(compiler);
    compiler.args(["-O2", "-g", "-fomit-frame-pointer", "-w", "-pthread", "-o"]).args([&program, &file]);
    assert!(compiler.status().unwrap().success(), "{}", file.display());
    program
}

/// A process that the test talks to; it ends with the test.
pub(crate) struct Program {
    pub(crate) child: Child,
    input: Option<ChildStdin>,
    output: BufReader<std::process::ChildStdout>,
}

impl Program {
    /// Starts this executable in a role, under neap with options; `before` is a command that runs
    /// it. Roles with one thread have one of neap's too, unless the options say otherwise.
    pub(crate) fn start(role: &str, options: &str, before: &[&str]) -> Program {
        let options = if options.contains("background") { options.into() } else { format!("background:on,{options}") };
        let own = std::env::current_exe().unwrap();
        let mut line: Vec<_> = before.iter().map(std::ffi::OsString::from).collect();
        line.push(own.into());
        line.extend(["--exact", "running::program", "--ignored", "--nocapture", "--test-threads=1"].map(Into::into));
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).env(ROLE, role).env("NEAP", options).env("LD_PRELOAD", library());
        Program::run(command)
    }

    /// Stops it. It may answer until its last thread has stopped, so waits for that.
    pub(crate) fn stop(&self) {
        let (pid, mut status) = (self.id() as i32, 0);
        // SAFETY: a signal to a child of this process that was not awaited yet, and a wait for its
        // effect, which writes to a live local.
        let stopped = unsafe {
            libc::kill(pid, libc::SIGSTOP) == 0 && libc::waitpid(pid, &raw mut status, libc::WUNTRACED) == pid
        };
        assert!(stopped && libc::WIFSTOPPED(status), "status {status}");
    }

    /// Has it go on after [`Program::stop`].
    pub(crate) fn resume(&self) {
        // SAFETY: a signal to a child of this process that was not awaited yet.
        assert_eq!(unsafe { libc::kill(self.id() as i32, libc::SIGCONT) }, 0);
    }

    /// This executable in a role, with a manager of its own and without the library.
    pub(crate) fn start_alone(role: &str, options: &str) -> Program {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "running::program", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role).env_remove("NEAP");
        if !options.is_empty() {
            command.env("NEAP", options);
        }
        Program::run(command)
    }

    pub(crate) fn run(mut command: Command) -> Program {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Program { input: child.stdin.take(), output, child }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the rest of the next line that begins with `word`.
    pub(crate) fn hear(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the program ended before it said {word}");
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_string();
            }
        }
    }

    pub(crate) fn go_on(&mut self) {
        self.say("");
    }

    /// Writes a line to the program's input.
    pub(crate) fn say(&mut self, line: &str) {
        self.input.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn neap(command: &str, pid: u32, more: &[&str]) -> Output {
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    neap.arg(command).arg(pid.to_string()).args(more).output().unwrap()
}

/// Returns the object that `neap COMMAND PID --json` prints, or its error.
pub(crate) fn object(command: &str, pid: u32, more: &[&str]) -> Result<Value, String> {
    let output = neap(command, pid, &[more, &["--json"]].concat());
    if output.status.success() {
        Ok(serde_json::from_slice(&output.stdout).unwrap())
    } else {
        assert!(output.stdout.is_empty());
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

/// Returns the object that `neap stat --json` prints, or its error.
pub(crate) fn numbers(pid: u32) -> Result<Value, String> {
    object("stat", pid, &[])
}

/// Calls `wanted` until it returns a value.
pub(crate) fn until<T>(what: &str, mut wanted: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = wanted() {
            return answer;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "no {what} in a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn numbers_with(pid: u32, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    until(what, || numbers(pid).ok().filter(&wanted))
}

/// Returns the descriptors of a process that are a page, with the file's inode. The process may
/// close one meanwhile.
pub(crate) fn pages(pid: u32) -> Vec<(u32, u64)> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let pages = entries.filter(|entry| fs::read_link(entry.path()).is_ok_and(|link| link.as_os_str() == LINK));
    let number = |entry: &fs::DirEntry| entry.file_name().to_str().unwrap().parse().unwrap();
    pages.filter_map(|entry| Some((number(&entry), entry.path().metadata().ok()?.ino()))).collect()
}

/// Returns the files of a process's page, for each mapping.
pub(crate) fn mapped_pages(pid: u32) -> Vec<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let pages = maps.lines().filter(|line| line.ends_with(LINK));
    pages.map(|line| line.split_whitespace().nth(4).unwrap().parse().unwrap()).collect()
}

/// Uses the manager of a test, and of roles without the library, which has a page only if it is
/// used before the harness has a second thread.
extern "C" fn use_early() {
    if matches!(
        std::env::var(ROLE).as_deref(),
        Err(_) | Ok("cache" | "caches" | "percpu" | "tenants" | "cached tenants")
    ) {
        // SAFETY: just allocated.
        unsafe { neap::process::PROCESS.free(neap::process::PROCESS.allocate(1)) };
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = use_early;

/// The roles of programs under neap. Run by the tests below; by itself it does nothing.
#[test]
#[ignore = "a role that the other tests start"]
fn program() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let say = |text: &str| {
        // Not by `print!`, which libtest captures or delays.
        std::io::stdout().write_all(format!("\n{text}\n").as_bytes()).unwrap();
        std::io::stdout().flush().unwrap();
    };
    let wait = || {
        let mut byte = 0_u8;
        // SAFETY: one byte of the caller's. Not by std, whose lock a forked child may find taken.
        unsafe { libc::read(0, (&raw mut byte).cast(), 1) }
    };
    match role.as_str() {
        "burst" => {
            let mut kept: Vec<Vec<u8>> = (0..40_000).map(|n| vec![1; 16 + n % 2000]).collect();
            kept.extend((0..40).map(|n| vec![1; 100_000 + n]));
            let mut at = 0;
            kept.retain(|_| {
                at += 1;
                at % 4 == 0
            });
            say("ready");
            wait();
            drop(kept);
            say("freed");
            wait();
        }
        "churn" => {
            say("ready");
            let mut blocks: Vec<Vec<u8>> = Vec::new();
            for n in 0_usize.. {
                blocks.push(vec![1; 1 + n * 7919 % 60_000]);
                if blocks.len() > 500 {
                    blocks.swap_remove(n * 31 % 500);
                }
            }
        }
        "percpu" => {
            let owners: Vec<_> = (0..500).map(|_| neap::percpu::open_owner().unwrap()).collect();
            let make = |&owner| {
                let counter = neap::percpu::PerCpuCounter::of(owner, 64, neap::percpu::Wait::Long).unwrap();
                // Freed with the owner.
                core::mem::forget(counter);
                neap::percpu::allocate(owner, 2000, 8, neap::percpu::Wait::Long).unwrap();
            };
            owners.iter().for_each(make);
            say("ready");
            wait();
            let goes = |at: usize| !at.is_multiple_of(50);
            for (_, &owner) in owners.iter().enumerate().filter(|(at, _)| goes(*at)) {
                // SAFETY: no thread uses the owner's data.
                unsafe { neap::percpu::close_owner(owner) }.unwrap();
            }
            say("closed");
            wait();
        }
        "threads" => {
            let (made, go) = (std::sync::Barrier::new(3), std::sync::Barrier::new(3));
            std::thread::scope(|scope| {
                for (name, mib) in [("alpha", 8), ("beta", 3)] {
                    let (made, go) = (&made, &go);
                    let work = move || {
                        let small: Vec<Vec<u8>> = (0..mib * 500).map(|_| vec![1; 1000]).collect();
                        let large = vec![1_u8; mib << 19];
                        made.wait();
                        go.wait();
                        drop((small, large));
                        made.wait();
                        go.wait();
                    };
                    std::thread::Builder::new().name(name.into()).spawn_scoped(scope, work).unwrap();
                }
                for word in ["ready", "freed"] {
                    made.wait();
                    say(word);
                    wait();
                    go.wait();
                }
            });
            say("ended");
            wait();
        }
        "tenants" | "cached tenants" => {
            use neap::groups::{Bound, Group};
            let objects = |group: Group, count: usize, size: usize| -> Vec<*mut u8> {
                let _inside = group.enter().unwrap();
                (0..count).map(|_| neap::process::PROCESS.allocate(size)).collect()
            };
            let [acme, beta] = ["acme", "beta"].map(|name| Group::create(name).unwrap());
            let mut kept = objects(acme, 100, 500);
            // Bytes that stay with deleted groups, one of which inherits from the other.
            for name in ["gone", "gone/inner"] {
                kept.extend(objects(Group::create(name).unwrap(), 10, 1000));
            }
            for name in ["gone/inner", "gone"] {
                Group::find(name).unwrap().delete().unwrap();
            }
            if role == "cached tenants" {
                // Objects of two owners on the same pages, all of which go to caches.
                let each = |round: usize| [acme, beta].map(|group| objects(group, 4, 40 + 40 * (round % 7))).concat();
                let freed: Vec<*mut u8> = (0..800).flat_map(each).collect();
                // SAFETY: allocated once, and freed once.
                freed.into_iter().for_each(|block| unsafe { neap::process::PROCESS.free(block) });
                say(&format!("tenants {} {}", acme.used().unwrap(), beta.used().unwrap()));
                wait();
                return;
            }
            acme.set(Bound::Max, 1 << 20).unwrap();
            std::thread::scope(|scope| {
                for bytes in [900_000, 990_000, 980_000] {
                    scope.spawn(move || {
                        let _charge = acme.charge_or_wait(bytes, Duration::from_secs(3600)).unwrap();
                        wait();
                    });
                }
                say("tenants");
                wait();
            });
        }
        "holds" => {
            // Sizes of classes, and runs of whole pages.
            let hold = |size: usize, bytes: usize| (0..bytes / size).map(|_| vec![1_u8; size]).collect::<Vec<_>>();
            let mut kept = hold(64, 100 << 20);
            kept.extend(hold(1024, 200 << 20));
            kept.extend(hold(1 << 20, 200 << 20));
            let held = |kept: &[Vec<u8>], capacity: usize| {
                kept.iter().map(Vec::len).sum::<usize>() + capacity * size_of::<Vec<u8>>()
            };
            say(&format!("holds {}", held(&kept, kept.capacity())));
            wait();
            let mut at = 0;
            kept.retain(|_| {
                at += 1;
                at % 2 == 0
            });
            kept.shrink_to_fit();
            say(&format!("holds {}", held(&kept, kept.capacity())));
            wait();
        }
        "threads hold" => {
            let (holds, go) = (std::sync::Barrier::new(3), std::sync::Barrier::new(3));
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let mut runs: Vec<Vec<u8>> = (0..250).map(|_| vec![1; 1 << 20]).collect();
                        holds.wait();
                        go.wait();
                        runs.truncate(125);
                        holds.wait();
                        go.wait();
                    });
                }
                for mib in [500, 250] {
                    holds.wait();
                    say(&format!("holds {}", mib << 20));
                    wait();
                    go.wait();
                }
            });
        }
        "holding fork" => {
            let kept = vec![1_u8; 64 << 20];
            // SAFETY: as in the role below.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: asks for the child's end with its parent's.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                let more: Vec<Vec<u8>> = (0..64 << 10).map(|_| vec![1; 1024]).collect();
                // SAFETY: one line of the caller's.
                unsafe { libc::write(1, b"\nchild holds\n".as_ptr().cast(), 13) };
                wait();
                drop(more);
            }
            say(&format!("forked {child}"));
            // SAFETY: waits for the child made above.
            unsafe { libc::waitpid(child, core::ptr::null_mut(), 0) };
            drop(kept);
        }
        "spawn" => {
            let mut child = Command::new("ls");
            let listing = child.args(["-l", "/proc/self/fd"]).env_remove("LD_PRELOAD").output().unwrap();
            assert!(listing.status.success());
            say(&format!("inherited {}", String::from_utf8_lossy(&listing.stdout).matches("neap-stat").count()));
            wait();
            let _ = Command::new("sleep").arg("1000").env_remove("LD_PRELOAD").exec();
        }
        "cache" => {
            let _cache = neap::reclaim::Shrinker::named("pages").register(|| 1, |_| 1).unwrap();
            say("ready");
            loop {
                // A slow call, in which requests are answered if there is no thread.
                let run = neap::process::PROCESS.allocate(1 << 20);
                // SAFETY: allocated above.
                unsafe { neap::process::PROCESS.free(run) };
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        "caches" => {
            let allocate = |count: usize, largest: usize| -> Vec<*mut u8> {
                (0..count).map(|n| neap::process::PROCESS.allocate(1 + n * 7919 % largest)).collect()
            };
            // SAFETY: allocated once, and freed once.
            let free = |block: *mut u8| unsafe { neap::process::PROCESS.free(block) };
            for _ in 0..2 {
                // Objects of all classes, and runs, of which an eighth stays. Freeing so many
                // drains caches. Then a few more, which stay on stacks.
                let blocks = allocate(6000, 40_000).into_iter().enumerate();
                blocks.filter(|(at, _)| at % 8 != 0).for_each(|(_, block)| free(block));
                allocate(500, 1000).into_iter().for_each(free);
                let cached = neap::stats().cached;
                say(&format!("caches {} {}", cached.stacks, cached.page_lists));
                wait();
            }
        }
        "close" => {
            (3..65_536).for_each(|descriptor| {
                // SAFETY: a program that closes what is not its own, as daemons do.
                unsafe { libc::close(descriptor) };
            });
            say("ready");
            wait();
        }
        "late" => {
            // SAFETY: just allocated.
            unsafe { neap::process::PROCESS.free(neap::process::PROCESS.allocate(1 << 20)) };
            neap::process::PROCESS.release_all();
            say("ready");
            wait();
        }
        "fork" | "bare fork" => {
            // SAFETY: the child allocates under the allocator that is tested for this, and uses no
            // lock of std.
            let child = unsafe { if role == "fork" { libc::fork() } else { libc::syscall(libc::SYS_fork) as i32 } };
            if child == 0 {
                // SAFETY: asks for the child's end with its parent's.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                wait();
                // SAFETY: one word of the caller's.
                unsafe { libc::write(1, b"\ngoes on\n".as_ptr().cast(), 9) };
                loop {
                    // A run is allocated by a slow call, in which maintenance is done. Objects of
                    // many sizes take and leave slabs and barns.
                    core::hint::black_box(vec![1_u8; 1 << 20]);
                    core::hint::black_box((0..3000).map(|n| vec![1_u8; 1 + n]).collect::<Vec<_>>());
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            say(&format!("forked {child}"));
            // SAFETY: waits for the child made above.
            unsafe { libc::waitpid(child, core::ptr::null_mut(), 0) };
        }
        other => panic!("no role {other}"),
    }
}
