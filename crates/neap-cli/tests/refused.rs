//! A process whose limit follows its container, where the kernel refuses what it asks: it starts,
//! runs, and the commands tell what it could not see.
//!
//! Method: the child forbids itself interfaces before it executes a shell under neap, or `neap run`
//! that starts the shell: by mounts of its own, and by a seccomp filter that answers EPERM. A test
//! ends early where the machine does not let it mount.
#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use running::{folder, library};

/// Makes the child's own mounts private, and calls `mount` for `/proc` and `/sys`.
fn mounts(mount: impl Fn(&std::ffi::CStr) -> libc::c_int) -> io::Result<()> {
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    let null = std::ptr::null();
    // SAFETY: both calls take constants and null, and change this child alone.
    let alone = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0 && libc::mount(null, c"/".as_ptr(), null, flags, null.cast()) == 0
    };
    let done = alone && [c"/sys", c"/proc"].into_iter().all(|path| mount(path) == 0);
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn without_proc_and_sys() -> io::Result<()> {
    mounts(|path| {
        let kind = c"tmpfs".as_ptr();
        // SAFETY: the strings are constants, and there is no data.
        unsafe { libc::mount(kind, path.as_ptr(), kind, 0, std::ptr::null()) }
    })
}

fn read_only() -> io::Result<()> {
    mounts(|path| {
        let (path, null) = (path.as_ptr(), std::ptr::null());
        let again = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
        // SAFETY: the strings are constants, and there is no data.
        unsafe {
            libc::mount(path, path, null, libc::MS_BIND | libc::MS_REC, null.cast())
                | libc::mount(null, path, null, again, null.cast())
        }
    })
}

/// Answers EPERM to calls that neap can do without.
fn filtered() -> io::Result<()> {
    const CALLS: [libc::c_long; 6] = [
        libc::SYS_memfd_create,
        libc::SYS_membarrier,
        libc::SYS_process_madvise,
        libc::SYS_rseq,
        libc::SYS_eventfd2,
        libc::SYS_mbind,
    ];
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let mut filter = [statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW); 2 * CALLS.len() + 2];
    filter[0] = statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0);
    for (pair, call) in filter[1..].chunks_exact_mut(2).zip(CALLS) {
        let jump = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        pair[0] = libc::sock_filter { code: jump, jt: 0, jf: 1, k: call as u32 };
        pair[1] = statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32);
    }
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program describes the live array, which the kernel copies.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if set { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the shell does.
const SCRIPT: &str = "echo up; read line; echo \"$line\"";

/// A shell with neap preloaded.
fn preloaded() -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", SCRIPT]).env("LD_PRELOAD", library()).env("NEAP", "limit:auto,background:on");
    command
}

/// `neap run` in a folder that also has the library: the command has to find it by itself.
fn neap_run(folder_name: &str, arguments: &[&str]) -> Command {
    let folder = folder(folder_name);
    fs::hard_link(env!("CARGO_BIN_EXE_neap"), folder.join("neap")).unwrap();
    symlink(library(), folder.join("libneap_malloc.so")).unwrap();
    let mut command = Command::new("neap");
    command.env("PATH", &folder).arg("run").args(arguments);
    command
}

/// Starts the command with interfaces refused. `None` if the machine does not let it mount.
fn start(mut command: Command, forbid: fn() -> io::Result<()>) -> Option<Child> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: the closures make system calls only, and build errors of a number.
    unsafe { command.pre_exec(forbid) };
    let child = command.spawn();
    let refused = child.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EPERM));
    if refused {
        eprintln!("SKIPPED: mounts are not permitted");
        return None;
    }
    Some(child.unwrap())
}

/// Waits until the shell is up and neap has looked, has `look` see it, and ends it. It must have
/// said nothing else.
fn see(mut child: Child, look: impl FnOnce(&str)) {
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    std::thread::sleep(Duration::from_millis(1500));
    look(&child.id().to_string());
    child.stdin.take().unwrap().write_all(b"goes on\n").unwrap();
    line.clear();
    output.read_line(&mut line).unwrap();
    let end = child.wait_with_output().unwrap();
    assert_eq!((line.as_str(), end.status.code()), ("goes on\n", Some(0)));
    assert_eq!(String::from_utf8(end.stderr).unwrap(), "");
}

fn neap(command: &str, pid: &str) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_neap")).args([command, pid]).output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    (output.status.code(), text)
}

/// Checks that the commands of this process, which sees all, tell about one that sees nothing.
fn told_of_a_sandbox(pid: &str) {
    let (status, text) = neap("stat", pid);
    assert!(status != Some(0) && text.contains("a sandbox kept neap from making its page"), "{text}");
    let (status, text) = neap("pressure", pid);
    assert!(status == Some(0) && text.contains("Limit:"), "{text}");
    assert!(text.contains("for the process it is not known"), "{text}");
}

fn all() -> io::Result<()> {
    without_proc_and_sys().and_then(|()| filtered())
}

#[test]
fn without_proc_and_sys_a_process_runs_and_the_commands_tell() {
    let Some(child) = start(preloaded(), without_proc_and_sys) else { return };
    see(child, told_of_a_sandbox);
}

#[test]
fn with_read_only_files_a_process_sees_its_limit() {
    let Some(child) = start(preloaded(), read_only) else { return };
    see(child, |pid| {
        let (status, text) = neap("stat", pid);
        assert!(status == Some(0) && !text.contains("no limit is visible"), "{text}");
    });
}

#[test]
fn with_calls_refused_a_process_runs_and_the_command_tells() {
    see(start(preloaded(), filtered).unwrap(), told_of_a_sandbox);
}

#[test]
fn with_all_refused_a_process_runs_and_the_commands_tell() {
    let Some(child) = start(preloaded(), all) else { return };
    see(child, told_of_a_sandbox);
}

#[test]
fn neap_run_starts_a_process_with_all_of_that_refused() {
    for forbid in [without_proc_and_sys, all] {
        let command = neap_run("refused-run", &["--", "/bin/sh", "-c", SCRIPT]);
        let Some(child) = start(command, forbid) else { return };
        see(child, told_of_a_sandbox);
    }
}

#[test]
fn neap_run_says_that_it_sees_no_limit() {
    let command = neap_run("refused-says", &["-v", "--", "/bin/sh", "-c", "echo up"]);
    let Some(child) = start(command, all) else { return };
    let end = child.wait_with_output().unwrap();
    let said = String::from_utf8(end.stderr).unwrap();
    assert_eq!((end.status.code(), end.stdout.as_slice()), (Some(0), &b"up\n"[..]), "{said}");
    for expected in [
        "no memory group found, and the machine's numbers cannot be read",
        "Limit:     unknown",
        "Not seen:  the process's groups (",
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
}
