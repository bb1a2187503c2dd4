//! `neap run --profile FILE`: profiles a program from its start to its end.
//!
//! The program is a child of this command. The command reads the program's samples meanwhile, and
//! exits with its status. It forwards signals that request its own end to the program. If the
//! program executes another program, the profile is of the last one.

use core::time::Duration;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::limits::ProfileLimits;
use super::output::ProfileFile;
use super::resolved::{ChosenSamples, Profile, Subjected};
use super::session::{PAUSE, Session};
use super::sums::ProfileView;
use crate::look::allowance::{Allowance, USUAL_TIME};
use crate::look::foreign::escaped;
use crate::look::handle::ProcessHandle;
use crate::look::stat_reader::ProcessStatus;

/// Time after the start in which looks follow each other at short intervals (`EARLY`), since the
/// program may be short, and this interval (`EARLY_PAUSE`).
const EARLY: Duration = Duration::from_secs(1);
const EARLY_PAUSE: Duration = Duration::from_millis(1);
/// Time after which the page is read again even if file and name are unchanged. The program may
/// have executed itself.
const AGE: Duration = Duration::from_millis(250);

/// Identity of the program in a process: the facts that the kernel reports at little cost.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    file: Option<PathBuf>,
    name: Option<Vec<u8>>,
}

impl Program {
    fn of(handle: &ProcessHandle) -> Program {
        Program { file: std::fs::read_link(handle.path("exe")).ok(), name: handle.read("comm").ok() }
    }
}

/// The profile of a program that runs.
struct Recording {
    child: Child,
    handle: Arc<ProcessHandle>,
    limits: ProfileLimits,
    start: Instant,
    /// The time and the program of the last look that found a page.
    looked: Option<(Instant, Program)>,
    /// The inode of the page's file, and the profile. `None` until the program has a page.
    session: Option<(u64, Session)>,
    name: String,
    in_use: Option<u64>,
}

impl Recording {
    fn begin(child: Child, memory: usize) -> Result<Recording> {
        let handle = Arc::new(ProcessHandle::open(child.id() as i32)?);
        let (limits, start) = (ProfileLimits::OWN.with(memory), Instant::now());
        Ok(Recording { child, handle, limits, start, looked: None, session: None, name: String::new(), in_use: None })
    }

    fn is_early(&self) -> bool {
        self.start.elapsed() < EARLY
    }

    /// Begins a session if the process has a page that is not of the current session.
    fn look(&mut self) {
        let program = Program::of(&self.handle);
        if self.looked.as_ref().is_some_and(|(at, known)| at.elapsed() < AGE && *known == program) {
            return;
        }
        // A program that is being executed has no page yet.
        let Ok(process) = ProcessStatus::read(&self.handle, Allowance::new(USUAL_TIME)) else { return };
        let Ok(page) = process.page() else { return };
        self.in_use = page.object.get("bytes").and_then(|bytes| bytes["used"].as_u64());
        self.name.clone_from(&process.name);
        let (Some(file), Some(inode)) = (&page.file, page.inode()) else { return };
        if self.session.as_ref().is_none_or(|(of, _)| *of != inode)
            && let Ok(session) = Session::begin(&self.handle, file, 0, self.limits)
        {
            self.session = Some((inode, session));
        }
        if self.session.is_some() {
            self.looked = Some((Instant::now(), program));
        }
    }

    /// Reads samples until the program ends.
    fn watch(&mut self, asked: &AtomicUsize) -> Result<ExitStatus> {
        loop {
            let ended = self.child.try_wait().context("cannot wait for the program")?;
            if ended.is_none() {
                self.look();
            }
            let mut pause = PAUSE;
            if let Some((_, session)) = &mut self.session {
                pause = session.poll()?;
                if ended.is_none() {
                    session.learn_groups();
                } else {
                    session.reconcile()?;
                }
            }
            if let Some(status) = ended {
                return Ok(status);
            }
            // Relaxed: the number publishes no other data.
            let signal = asked.swap(0, Ordering::Relaxed) as i32;
            if signal != 0 {
                // SAFETY: `kill` touches no memory. The child was not awaited, so no other process
                // has its number.
                unsafe { libc::kill(self.child.id() as i32, signal) };
            }
            std::thread::sleep(if self.is_early() { EARLY_PAUSE } else { pause });
        }
    }

    fn subject(&self) -> Subjected {
        Subjected {
            pid: self.handle.pid,
            name: self.name.clone(),
            seconds: self.start.elapsed().as_secs_f64(),
            in_use: self.in_use,
        }
    }
}

/// Starts a program, profiles it and writes the file. The profile shows the bytes at the peak,
/// since a program frees at its end. Returns the program's status.
///
/// # Errors
/// The program cannot be started.
pub(crate) fn to_file(command: &mut Command, file: &ProfileFile, memory: usize) -> io::Result<ExitCode> {
    run(command, memory, &mut |session, of| {
        let profile = Profile::of(session, of, ProfileView::Peak, ChosenSamples::default());
        file.write(&profile, None).with_context(|| file.path().display().to_string())
    })
}

/// Starts a program, profiles it within `memory` bytes, and gives the profile to `end`. Returns the
/// program's status.
///
/// # Errors
/// The program cannot be started.
pub(crate) fn run(
    command: &mut Command,
    memory: usize,
    end: &mut dyn FnMut(&Session, Subjected) -> Result<()>,
) -> io::Result<ExitCode> {
    let child = command.spawn()?;
    let asked = Arc::new(AtomicUsize::new(0));
    for number in [SIGTERM, SIGHUP] {
        signal_hook::flag::register_usize(number, Arc::clone(&asked), number as usize)?;
    }
    // A terminal sends these to the program, too.
    let unused = Arc::new(AtomicUsize::new(0));
    for number in [SIGINT, SIGQUIT] {
        signal_hook::flag::register_usize(number, Arc::clone(&unused), number as usize)?;
    }
    let mut recording = Recording::begin(child, memory).map_err(io::Error::other)?;
    let watched = recording.watch(&asked);
    let ended = match (&watched, &recording.session) {
        (Err(error), _) => Err(anyhow::anyhow!("there is no profile: {error:#}")),
        (Ok(_), None) => Err(anyhow::anyhow!("there is no profile: the program left no samples")),
        (Ok(_), Some((_, session))) => end(session, recording.subject()),
    };
    if let Err(error) = ended {
        eprintln!("neap: {}", escaped(format!("{error:#}").as_bytes()));
    }
    let status = match watched {
        Ok(status) => status,
        Err(_) => recording.child.wait()?,
    };
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Ok(ExitCode::from(code as u8))
}
