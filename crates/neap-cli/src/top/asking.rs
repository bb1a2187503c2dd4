//! Requests of `neap top` to a process: a report of its groups for each reading, and the user's
//! commands.
//!
//! An answer may take seconds, and the screen does not wait for it. So a thread makes one request
//! after the other, and waits for the answers. At most one request for a report and one command of
//! the user are under way.

use core::time::Duration;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use anyhow::{Context, Result};

use super::groups::readable;
use super::listing::size;
use super::reading::{Reading, time_of_day};
use super::state::{Change, View};
use crate::drain;
use crate::groups::{self, ReadGroups, ReportedGroup};
use crate::look::allowance::Allowance;
use crate::look::control_channel::ControlChannel;
use crate::look::control_channel::Haste;
use crate::look::handle::ProcessHandle;
use crate::look::stat_reader::{ProcessStatus, monotonic};
use neap::groups::UNLIMITED;

/// A request.
pub(super) enum Query {
    Groups,
    /// Drain the caches of a CPU, or of all.
    Drain(Option<u32>),
    Change(Change),
}

enum Answer {
    Groups(Result<Option<ReadGroups>>),
    /// The result of a command, in words.
    Done(Result<String>),
}

/// The screen's end of the channels to the requesting thread.
pub(super) struct Asking {
    wanted: Sender<Query>,
    answers: Receiver<Answer>,
    /// Whether a request for a report (`report`) or a command (`request`) is under way.
    report: bool,
    request: bool,
}

/// Most bytes that this command keeps of a report. A screen has two reports, and rows of text made
/// of them.
const MOST_BYTES: usize = 8 << 20;

/// The process that gets the requests, and the time for each request.
#[derive(Clone)]
pub(super) struct Asked {
    pub(super) handle: Arc<ProcessHandle>,
    pub(super) time: Duration,
}

impl Asked {
    fn process(&self) -> Result<ProcessStatus> {
        ProcessStatus::read(&self.handle, Allowance::of_bytes(MOST_BYTES, self.time))
    }

    /// Requests the groups of the process. Returns `None` if there are none.
    pub(super) fn groups(&self) -> Result<Option<ReadGroups>> {
        let process = self.process()?;
        ReadGroups::ask(&process, &process.page()?, Haste::Unhurried)
    }

    fn change(&self, wanted: &Change) -> Result<String> {
        let process = self.process()?;
        let page = process.page()?;
        let seen = ReadGroups::ask(&process, &page, Haste::Unhurried)?.unwrap_or_default();
        // The process may have executed another program, whose groups have the same ids.
        let is_it = |group: &&ReportedGroup| group.id == wanted.group && readable(&group.path) == wanted.path;
        let group = seen.groups.iter().find(is_it);
        let group = group.with_context(|| format!("group \"{}\" is gone", wanted.path))?;
        let done = groups::change(&ControlChannel::of(&process, &page)?, group, wanted.bound, wanted.bytes)?;
        Ok(format!("{}: {done}", wanted.path))
    }
}

impl Query {
    fn words(&self) -> String {
        match self {
            Query::Groups => "for groups".to_string(),
            Query::Drain(None) => "to drain everything".to_string(),
            Query::Drain(Some(cpu)) => format!("to drain CPU {cpu}"),
            Query::Change(Change { path, bound, bytes, .. }) => {
                let bytes = if *bytes == UNLIMITED { "none".to_string() } else { size(*bytes) };
                format!("for {} {bytes} of {path}", bound.name())
            }
        }
    }
}

impl Asking {
    /// Starts the thread that makes the requests. The thread ends after the returned value is
    /// dropped. If a request is under way then, the thread first waits for its answer.
    pub(super) fn start(asked: Asked) -> Asking {
        let (wanted, requests) = channel();
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for wanted in requests {
                let answer = match wanted {
                    Query::Groups => Answer::Groups(asked.groups()),
                    Query::Drain(cpu) => Answer::Done(asked.process().and_then(|process| drain::drain(&process, cpu))),
                    Query::Change(wanted) => Answer::Done(asked.change(&wanted)),
                };
                if sender.send(answer).is_err() {
                    // The user has quit.
                    break;
                }
            }
        });
        Asking { wanted, answers, report: false, request: false }
    }

    /// Requests the groups for a new reading, if the process has some and has answered the last
    /// such request.
    pub(super) fn follow(&mut self, reading: &Reading) {
        if reading.numbers.groups.is_some() && !self.report {
            self.report = self.wanted.send(Query::Groups).is_ok();
        }
    }

    /// Makes a request of the user, unless one is under way.
    pub(super) fn ask(&mut self, wanted: Query, state: &mut View) {
        if self.request {
            state.message = Some("The process has not answered the last request yet.".to_string());
            return;
        }
        state.log.add(&time_of_day(), "asked", wanted.words());
        // If the thread has ended, `hear` finds the channel of answers closed.
        let _ = self.wanted.send(wanted);
        self.request = true;
    }

    /// Takes an answer, if there is one. Returns whether there was one.
    pub(super) fn hear(&mut self, state: &mut View) -> bool {
        let answer = match self.answers.try_recv() {
            Ok(answer) => answer,
            Err(TryRecvError::Disconnected) if self.request => Answer::Done(Ok("The request was lost.".to_string())),
            Err(_) => return false,
        };
        match answer {
            Answer::Groups(asked) => {
                self.report = false;
                if let Some(failed) = state.groups.follow(asked, monotonic()) {
                    state.message = Some(failed.to_string());
                }
            }
            Answer::Done(done) => {
                self.request = false;
                let said = done.unwrap_or_else(|error| format!("{error:#}"));
                state.log.add(&time_of_day(), "answer", said.clone());
                state.message = Some(said);
            }
        }
        true
    }
}
