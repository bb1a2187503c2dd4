//! `neap run --trace` on real programs: what is recorded, which processes are not recorded, and
//! replay.
//!
//! Method: this executable runs itself in a role, by the installed command, and allocates runs of
//! unique lengths. The events of these lengths in the file are compared with the role's actions.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use neap_sim::trace::Trace;
use neap_testing::child::status_of;
use running::{ROLE, library};

/// Lengths in bytes, and in pages; for children of fork, of the bare system call, and of exec as
/// well.
const OWN: (usize, u32) = (1_234_567, 302);
const FORKED: (usize, u32) = (2_000_003, 489);
const UNTOLD: (usize, u32) = (3_000_001, 733);
const SECOND: (usize, u32) = (4_000_037, 977);

/// The command with the library beside it, in a folder that is removed at the end.
struct Installed(PathBuf);

impl Installed {
    fn new(name: &str) -> Installed {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("neap-trace-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::hard_link(env!("CARGO_BIN_EXE_neap"), folder.join("neap")).unwrap();
        std::os::unix::fs::symlink(library(), folder.join("libneap_malloc.so")).unwrap();
        Installed(folder.canonicalize().unwrap())
    }

    fn neap(&self) -> Command {
        let mut command = Command::new(self.0.join("neap"));
        command.current_dir(&self.0).env_remove("NEAP").env_remove("LD_PRELOAD");
        command
    }

    /// Records this executable in a role into `a.trace`.
    fn record(&self, role: &str) -> Output {
        let mut command = self.neap();
        command.args(["run", "--trace", "a.trace", "--"]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", "program_to_record", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role).output().unwrap()
    }

    fn trace(&self) -> Trace {
        let bytes = fs::read(self.0.join("a.trace")).unwrap();
        assert_eq!(bytes.len(), 64 << 20);
        Trace::read(&bytes).unwrap()
    }

    fn replay(&self) -> Output {
        self.neap().args(["lab", "replay", "a.trace"]).output().unwrap()
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Number of runs of a length that were handed out, and that came back.
fn runs(trace: &Trace, (_, pages): (usize, u32)) -> (usize, usize) {
    let count = |free| trace.events.iter().filter(|event| event.pages == pages && event.free == free).count();
    (count(false), count(true))
}

fn allocate((bytes, _): (usize, u32), count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|_| core::hint::black_box(Vec::with_capacity(bytes))).collect()
}

/// Waits for a forked child; in the child itself, allocates its run and ends it.
fn child(pid: libc::pid_t, kind: (usize, u32)) {
    if pid == 0 {
        drop(allocate(kind, 20));
        // SAFETY: ends this process at once.
        unsafe { libc::_exit(7) };
    }
    let status = status_of(pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
}

/// The roles of recorded programs. Run by the tests below; by itself it does nothing.
#[test]
#[ignore = "a role that the other tests start"]
fn program_to_record() {
    match std::env::var(ROLE).as_deref() {
        Ok("killed") => {
            let mut kept = allocate(OWN, 50);
            // SAFETY: the child allocates under the allocator that is tested for this, and uses no
            // lock of std.
            child(unsafe { libc::fork() }, FORKED);
            // SAFETY: the child allocates under the tested allocator, and uses no lock of std. No
            // fork handler runs.
            child(unsafe { libc::syscall(libc::SYS_fork) } as libc::pid_t, UNTOLD);
            let other = Command::new("sh").args(["-c", "exit 3"]).output().unwrap();
            assert_eq!((other.status.code(), text(&other.stderr)), (Some(3), String::new()));
            kept.truncate(20);
            std::thread::scope(|scope| {
                (0..3).for_each(|_| _ = scope.spawn(|| drop(allocate(OWN, 100))));
            });
            // SAFETY: ends this process at once.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        Ok("executes") => {
            let kept = allocate(OWN, 10);
            let own = std::env::current_exe().unwrap();
            let error = Command::new(own).args(std::env::args_os().skip(1)).env(ROLE, "second").exec();
            panic!("{error} with {} runs", kept.len());
        }
        Ok("second") => drop(allocate(SECOND, 5)),
        Ok("cut") => {
            let mut kept = allocate(OWN, 10);
            std::fs::OpenOptions::new().write(true).open("a.trace").unwrap().set_len(0).unwrap();
            kept.extend(allocate(OWN, 10));
            std::io::stdout().write_all(b"\nto the end\n").unwrap();
        }
        Ok("endless") => {
            // A little more than the file has places for.
            (0..2_100_000).for_each(|_| drop(allocate(OWN, 1)));
            std::io::stdout().write_all(b"\nto the end\n").unwrap();
        }
        _ => {}
    }
}

#[test]
fn killed_program_trace_has_own_events_only() {
    let neap = Installed::new("killed");
    let output = neap.record("killed");
    assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{}", text(&output.stderr));
    let trace = neap.trace();
    assert_eq!((runs(&trace, OWN), trace.cut_off), ((350, 330), false));
    assert_eq!((runs(&trace, FORKED), runs(&trace, UNTOLD)), ((0, 0), (0, 0)));
    assert!(trace.events.iter().any(|event| event.pages <= 8), "slabs are blocks");
    assert!(trace.events.is_sorted_by_key(|event| event.at));
    let replayed = neap.replay();
    assert!(replayed.status.success(), "{}", text(&replayed.stderr));
    let table = text(&replayed.stdout);
    let end = format!("\n{} events of {} CPUs, pages of 4096 bytes\n", trace.events.len(), trace.cpus);
    assert!(table.contains("\n| adaptive ") && table.ends_with(&end), "{table}");
}

#[test]
fn exec_discards_earlier_trace_and_recording_replaces_file() {
    let neap = Installed::new("executes");
    fs::write(neap.0.join("a.trace"), "of old").unwrap();
    for _ in 0..2 {
        let output = neap.record("executes");
        assert!(output.status.success(), "{}", text(&output.stderr));
        let trace = neap.trace();
        assert_eq!((runs(&trace, OWN), runs(&trace, SECOND)), ((0, 0), (5, 5)));
    }
}

#[test]
fn a_file_that_is_full_says_so_and_the_program_goes_on() {
    let neap = Installed::new("endless");
    let output = neap.record("endless");
    assert!(output.status.success() && text(&output.stdout).contains("to the end"), "{}", text(&output.stderr));
    let trace = neap.trace();
    assert!(trace.cut_off);
    // A thread that is killed between taking a place and writing to it leaves it empty.
    let places = ((64 << 20) - 64) / 16;
    assert!((places - 16..=places).contains(&trace.events.len()), "{} of {places}", trace.events.len());
}

#[test]
fn program_with_truncated_trace_file_continues() {
    let neap = Installed::new("cut");
    let output = neap.record("cut");
    assert!(output.status.success() && text(&output.stdout).contains("to the end"), "{:?}", output.status);
    assert_eq!(text(&output.stderr), "neap: the recording ends: its file was cut short\n");
}

/// A file that another user put at the place of the recording, with contents that a process takes
/// for its own.
#[test]
fn planted_file_is_not_recorded_into() {
    let neap = Installed::new("planted");
    let (file, link) = (neap.0.join("a.trace"), neap.0.join("link"));
    std::os::unix::fs::symlink(&file, &link).unwrap();
    for (at, owner) in [(&file, Some(65_534)), (&link, None)] {
        let planted = file.clone();
        let mut command = Command::new("sh");
        command.args(["-c", ":"]).env("LD_PRELOAD", library()).env("NEAP", format!("trace:{}", at.display()));
        // SAFETY: the child is a copy of a test that has one thread at that moment for all that it
        // uses: files.
        unsafe {
            command.pre_exec(move || {
                fs::write(&planted, neap::trace::claim(std::process::id()))?;
                std::os::unix::fs::chown(&planted, owner, None)
            })
        };
        let output = match command.output() {
            // Only root can give a file away.
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => continue,
            output => output.unwrap(),
        };
        let message = text(&output.stderr);
        assert!(output.status.success() && message.contains("nothing is recorded"), "{message}");
        assert_eq!(fs::read(&file).unwrap().len(), 12, "it stays as it was");
        fs::remove_file(&file).unwrap();
    }
}

#[test]
fn unusable_trace_file_is_named_and_unchanged() {
    let neap = Installed::new("refused");
    for (file, said) in [("a,b", "no comma"), ("no/such/folder", "cannot be made"), (".", "cannot be made")] {
        let output = neap.neap().args(["run", "--trace", file, "--", "true"]).output().unwrap();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{message}");
        assert!(message.contains(&format!("--trace {file}: ")) && message.contains(said), "{message}");
    }
    let file = neap.0.join("mine");
    fs::write(&file, "words").unwrap();
    for path in [file.to_str().unwrap(), "/dev/null", "/no/such/folder/file"] {
        let mut command = neap.neap();
        let output = command.args(["run", "--neap", &format!("trace:{path}"), "--", "sh", "-c", ":"]).output().unwrap();
        assert!(output.status.success());
        let message = text(&output.stderr);
        assert!(
            message.contains(&format!("\"trace:{path}\" ")) && message.contains("nothing is recorded"),
            "{message}"
        );
    }
    assert_eq!(fs::read(&file).unwrap(), b"words");
    // A file that is not there yet is made.
    let option = format!("trace:{}", neap.0.join("a.trace").display());
    assert!(neap.neap().args(["run", "--neap", &option, "--", "sh", "-c", ":"]).output().unwrap().stderr.is_empty());
    assert!(!neap.trace().events.is_empty());
    // A program that is not dynamically linked, or one that never allocates, leaves the earlier
    // contents.
    fs::write(neap.0.join("a.trace"), neap::trace::claim(1)).unwrap();
    let replayed = neap.replay();
    assert!(!replayed.status.success() && replayed.stdout.is_empty());
    assert!(text(&replayed.stderr).contains("a.trace: incomplete header: the program has not recorded"));
}
