//! The thread that takes the profile of `neap top`, while the user wants one.
//!
//! Reading the symbols of a large program takes seconds. So a thread reads them, and the screen
//! does not wait. The thread makes a table every second, and the screen takes the last one.
//!
//! # Concurrency
//! `turn` counts how often the user switched the profile on or off. While it is odd, the user wants
//! a profile. The thread begins another profile for each odd turn, so two quick keys restart the
//! profile.
//!
//! The thread that changes the option of the process holds the lock of `switch`.
//! [`Profiling::finish`] first sets the last turn, [`CLOSED`]. The profiling thread compares the
//! turn under the lock, so it begins no profile afterwards. If `finish` returns no error, the
//! process has its previous option. If the process does not answer the profiling thread, its option
//! stays changed and `switch` stays set. The end of the next turn, or `finish`, tries again.

use core::time::Duration;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};

use super::asking::Asked;
use super::live::LOOK;
use super::state::View;
use crate::look::allowance::Allowance;
use crate::look::stat_reader::ProcessStatus;
use crate::profile::{LiveSites, SamplingSwitch, SiteTable, stop_flag};

/// Time between two tables.
const FRESH: Duration = Duration::from_secs(1);
/// The last turn. It is even, like every turn in which the user wants no profile.
const CLOSED: u64 = u64::MAX - 1;

/// A turn, and its table or the reason why there is none.
type News = (u64, Result<SiteTable>);

#[derive(Default)]
struct Shared {
    turn: AtomicU64,
    /// Restores the sampling option that the thread has changed. The value stays after a failure,
    /// for another try.
    switch: Mutex<Option<SamplingSwitch>>,
    news: Mutex<Option<News>>,
}

/// The screen's access to the profiling thread.
pub(super) struct Profiling {
    asked: Asked,
    shared: Arc<Shared>,
    /// `None` until the user wants a profile for the first time.
    thread: Option<Thread>,
}

/// Switches sampling on in a process, unless it is on, and begins to read the samples. The caller
/// has to restore the option by `switch`, even after an error.
fn begin(asked: &Asked, switch: &mut Option<SamplingSwitch>) -> Result<LiveSites> {
    let process = ProcessStatus::read(&asked.handle, Allowance::new(asked.time))?;
    let page = process.page()?;
    let on = SamplingSwitch::on(&process, &page, None, asked.time, None)?;
    *switch = Some(on.after(switch.take()));
    LiveSites::begin(&process, &page)
}

/// Takes a profile for `time`, or until a signal ends the command. Waits for `time` even if no
/// profile can begin, because the rates of the screen refer to that time.
pub(super) fn once(asked: &Asked, time: Duration) -> Result<SiteTable> {
    let (stop, start) = (stop_flag()?, Instant::now());
    let mut switch = None;
    let begun = begin(asked, &mut switch);
    let is_profiled = begun.is_ok();
    let table = begun.and_then(|mut sites| {
        sites.watch(time, &stop)?;
        sites.table(asked.time, &|| true)
    });
    let put = switch.map_or(Ok(()), SamplingSwitch::off);
    // Relaxed: a flag that publishes nothing.
    while !is_profiled && start.elapsed() < time && !stop.load(Ordering::Relaxed) && !asked.handle.has_ended() {
        std::thread::sleep(LOOK.min(time.saturating_sub(start.elapsed())));
    }
    put?;
    table?.context("the profile was given up")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Returns the current turn. Relaxed: the lock of `switch` orders the last turn, and the other
    /// turns publish no data.
    fn turn(&self) -> u64 {
        self.turn.load(Ordering::Relaxed)
    }

    fn tell(&self, turn: u64, news: Result<SiteTable>) {
        *lock(&self.news) = Some((turn, news));
    }

    /// Begins the profile of a turn; `None` if the turn is over.
    fn begin(&self, asked: &Asked, turn: u64) -> Result<Option<LiveSites>> {
        let mut switch = lock(&self.switch);
        if self.turn() != turn {
            return Ok(None);
        }
        begin(asked, &mut switch).map(Some)
    }

    /// Takes the profile of a turn until the turn is over.
    fn profile(&self, asked: &Asked, turn: u64) -> Result<()> {
        let Some(mut sites) = self.begin(asked, turn)? else { return Ok(()) };
        let is_wanted = || self.turn() == turn;
        let mut due = Instant::now();
        while is_wanted() {
            if Instant::now() >= due {
                match sites.table(asked.time, &is_wanted)? {
                    Some(table) => self.tell(turn, Ok(table)),
                    None => break,
                }
                due = Instant::now() + FRESH;
            }
            std::thread::park_timeout(sites.poll()?);
        }
        Ok(())
    }

    /// Restores the option of the process, if the thread has changed it.
    fn put_back(&self) -> Result<()> {
        lock(&self.switch).as_mut().map_or(Ok(()), SamplingSwitch::put_back)
    }

    fn run(&self, asked: &Asked) {
        loop {
            let turn = self.turn();
            if turn == CLOSED {
                return;
            }
            if turn % 2 == 1 {
                let (taken, left) = (self.profile(asked, turn), self.put_back());
                let again = || if asked.handle.has_ended() { "" } else { "; p twice begins another profile" };
                match (taken, left) {
                    (Ok(()), Ok(())) => {}
                    (Ok(()), Err(left)) => self.tell(turn, Err(left)),
                    (Err(error), Ok(())) => self.tell(turn, Err(anyhow!("{error:#}{}", again()))),
                    (Err(error), Err(left)) => self.tell(turn, Err(anyhow!("{error:#}; {left:#}"))),
                }
            }
            while self.turn() == turn {
                std::thread::park();
            }
        }
    }
}

impl Profiling {
    pub(super) fn new(asked: Asked) -> Profiling {
        Profiling { asked, shared: Arc::default(), thread: None }
    }

    /// Passes the turn of the screen to the thread, and starts the thread if there is none.
    pub(super) fn follow(&mut self, turn: u64) {
        if self.shared.turn() == turn {
            return;
        }
        self.set(turn);
        if self.thread.is_none() {
            let (shared, asked) = (Arc::clone(&self.shared), self.asked.clone());
            self.thread = Some(std::thread::spawn(move || shared.run(&asked)).thread().clone());
        }
    }

    fn set(&self, turn: u64) {
        // Relaxed: see `Shared::turn`, which reads the turn.
        self.shared.turn.store(turn, Ordering::Relaxed);
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }

    /// Takes the last table or error from the thread. Returns whether the screen has changed.
    pub(super) fn hear(&self, state: &mut View) -> bool {
        match lock(&self.shared.news).take() {
            Some((turn, news)) if turn == state.profile.turn => {
                state.profile.follow(news);
                true
            }
            // The thread could not restore the option.
            Some((_, Err(error))) => {
                state.message = Some(format!("{error:#}"));
                true
            }
            _ => false,
        }
    }

    /// Ends the profile, and restores the option of the process, even if the thread failed to.
    /// Waits for a change of the option that is under way.
    ///
    /// # Errors
    /// Returns an error if the option cannot be restored. Sampling then stays on.
    pub(super) fn finish(&self) -> Result<()> {
        self.set(CLOSED);
        lock(&self.shared.switch).take().map_or(Ok(()), SamplingSwitch::off)
    }
}
