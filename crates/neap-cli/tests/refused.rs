//! A process whose limit follows its container, where the kernel refuses what it asks: it starts,
//! runs, and the commands tell what it could not see.
//!
//! Method: the child forbids itself interfaces before it executes a shell under neap: by mounts of
//! its own, and by a seccomp filter that answers EPERM. A test ends early where the machine does
//! not let it mount.
#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use running::library;

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

/// A shell under neap that has said that it is up. `None` if the machine does not let it mount.
fn start(forbid: fn() -> io::Result<()>) -> Option<Child> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "echo up; read line; echo \"$line\""]);
    command.env("LD_PRELOAD", library()).env("NEAP", "limit:auto,background:on");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: the closures make system calls only, and build errors of a number.
    unsafe { command.pre_exec(forbid) };
    let child = command.spawn();
    let refused = child.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EPERM));
    if refused {
        eprintln!("not tested: mounts are not permitted");
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

#[test]
fn without_proc_and_sys_a_process_runs_and_the_commands_tell() {
    let Some(child) = start(without_proc_and_sys) else { return };
    see(child, |pid| {
        let (status, text) = neap("stat", pid);
        assert!(status != Some(0) && text.contains("a sandbox kept neap from making its page"), "{text}");
        let (status, text) = neap("pressure", pid);
        assert!(status == Some(0) && text.contains("Limit:"), "{text}");
    });
}

#[test]
fn with_read_only_files_a_process_sees_its_limit() {
    let Some(child) = start(read_only) else { return };
    see(child, |pid| {
        let (status, text) = neap("stat", pid);
        assert!(status == Some(0) && !text.contains("no limit is visible"), "{text}");
    });
}

#[test]
fn with_calls_refused_a_process_runs_and_the_command_tells() {
    see(start(filtered).unwrap(), |pid| {
        let (status, text) = neap("stat", pid);
        assert!(status != Some(0) && text.contains("a sandbox kept neap from making its page"), "{text}");
        let (status, text) = neap("pressure", pid);
        assert!(status == Some(0) && text.contains("Limit:"), "{text}");
    });
}

#[test]
fn with_all_of_that_refused_a_process_runs() {
    fn all() -> io::Result<()> {
        without_proc_and_sys().and_then(|()| filtered())
    }
    let Some(child) = start(all) else { return };
    see(child, |_| ());
}
