//! Looks at many processes, within one total of time and bytes.
//!
//! # Design
//! A few threads look at the processes, one after the other. A thread takes its next process from
//! the user whose processes have taken the least time so far. So slow processes of one user delay
//! those of another user by at most the same time. A thread may get stuck with a process, in the
//! kernel or in a wait for an answer. After [`STUCK`], another thread starts, up to
//! [`MOST_THREADS`]. While a thread is stuck with a process, no other thread looks at the process.
//! When the time is over, the remaining processes count as unread.

use core::time::Duration;
use std::collections::BTreeMap;
use std::fs;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use neap_base::listed_enum;

use crate::look::allowance::{Allowance, MOST_BYTES};
use crate::look::foreign::escaped;
use crate::look::handle::ProcessHandle;
use crate::look::refusal::LookRefusal;
use crate::look::stat_reader::ProcessStatus;

/// Threads that look at processes, besides stuck ones. Each may hold an untrusted page of numbers,
/// so there are few.
const THREADS: usize = 4;
/// Most threads, including stuck ones.
const MOST_THREADS: usize = 64;
/// Time with one process after which a thread counts as stuck.
const STUCK: Duration = Duration::from_millis(500);
/// Time between two looks for stuck threads.
const PAUSE: Duration = Duration::from_millis(100);
/// Bytes that a look at one process may keep.
const MOST_OF_ONE: usize = 8 << 20;

listed_enum! {
    /// Why a process was not read.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) enum Unread {
        /// The user has named the process, but it has ended or does not run under neap.
        NotThere = "not under neap",
        NotPermitted = "not permitted",
        NoNumbers = "no numbers",
        /// The process could not be read, or its numbers make no sense.
        Failed = "failed",
        /// The time or the bytes of the command were used up.
        LeftOut = "left out",
    }
}

impl Unread {
    fn of(error: &anyhow::Error) -> Unread {
        match LookRefusal::of(error) {
            Some(LookRefusal::Ended | LookRefusal::NotNeap) => Unread::NotThere,
            Some(LookRefusal::NotPermitted) => Unread::NotPermitted,
            Some(LookRefusal::NoNumbers) => Unread::NoNumbers,
            None => Unread::Failed,
        }
    }
}

/// Processes that were not read for one reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnreadCount {
    pub(crate) processes: u64,
    /// The error of the first one, escaped.
    pub(crate) example: String,
}

/// Returns a line on the processes that were not read. It is empty if all were read.
pub(crate) fn unread_line(unread: &BTreeMap<Unread, UnreadCount>) -> String {
    let reasons =
        unread.iter().map(|(reason, count)| format!("{} {} ({})", count.processes, reason.name(), count.example));
    let reasons: Vec<String> = reasons.collect();
    if reasons.is_empty() { String::new() } else { format!("Not read: {}\n", reasons.join("; ")) }
}

/// The processes that a command looks at.
#[derive(Clone, Debug)]
pub(crate) enum Chosen {
    /// All processes under neap. The counts leave out other processes.
    All,
    Named(Vec<i32>),
}

impl Chosen {
    /// Chooses the processes with these ids, or all under neap if there are no ids.
    pub(crate) fn new(pids: &[i32]) -> Chosen {
        if pids.is_empty() { Chosen::All } else { Chosen::Named(pids.to_vec()) }
    }

    fn pids(&self) -> Result<Vec<i32>> {
        let Chosen::Named(pids) = self else {
            let folder = fs::read_dir("/proc").context("cannot read /proc")?;
            return Ok(folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect());
        };
        let mut pids = pids.clone();
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }
}

/// Results of looks at many processes, and counts of the unread processes.
#[derive(Debug)]
pub(crate) struct Survey<T> {
    pub(crate) seen: Vec<T>,
    pub(crate) unread: BTreeMap<Unread, UnreadCount>,
}

impl<T> Survey<T> {
    pub(crate) fn count(&mut self, reason: Unread, error: &anyhow::Error) {
        let count = self.unread.entry(reason).or_default();
        if count.processes == 0 {
            count.example = escaped(format!("{error:#}").as_bytes());
        }
        count.processes += 1;
    }
}

/// The processes that threads look at now, each with the start of the look. One value serves all
/// censuses of a command.
#[derive(Clone, Debug, Default)]
pub(crate) struct Busy(Arc<Mutex<BTreeMap<i32, Instant>>>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under the lock is one step, so a thread that panicked has left a valid value.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Busy {
    /// Marks a process as looked at by this thread. Returns `false` if another thread looks at it.
    fn begin(&self, pid: i32) -> bool {
        let mut busy = lock(&self.0);
        let is_free = !busy.contains_key(&pid);
        if is_free {
            busy.insert(pid, Instant::now());
        }
        is_free
    }

    fn end(&self, pid: i32) {
        lock(&self.0).remove(&pid);
    }

    /// Returns the number of threads that have looked at one process for more than [`STUCK`].
    fn stuck(&self) -> usize {
        lock(&self.0).values().filter(|since| since.elapsed() > STUCK).count()
    }
}

/// Time that a user's queue counts for a process while a thread looks at the process.
const EXPECTED: Duration = Duration::from_millis(100);

/// The remaining processes of a user, and the time that the user's other processes took.
#[derive(Debug, Default)]
struct UserQueue {
    pids: Vec<i32>,
    spent: Duration,
}

/// The remaining processes, by user.
#[derive(Debug, Default)]
struct FairQueue(BTreeMap<String, UserQueue>);

impl FairQueue {
    fn add(&mut self, user: String, pid: i32) {
        self.0.entry(user).or_default().pids.push(pid);
    }

    /// Removes and returns a process of the user whose processes took the least time.
    fn begin(&mut self) -> Option<(String, i32)> {
        let waiting = self.0.iter_mut().filter(|(_, queue)| !queue.pids.is_empty());
        let (user, queue) = waiting.min_by_key(|(_, queue)| queue.spent)?;
        queue.spent += EXPECTED;
        Some((user.clone(), queue.pids.pop()?))
    }

    /// Counts the time that a process of a user took.
    fn end(&mut self, user: &str, took: Duration) {
        if let Some(queue) = self.0.get_mut(user) {
            queue.spent = (queue.spent + took).saturating_sub(EXPECTED);
        }
    }
}

/// The remaining processes, and the function that looks at each.
struct Worklist<L> {
    queue: Mutex<FairQueue>,
    busy: Busy,
    end: Instant,
    look: L,
}

impl<L> Worklist<L> {
    /// Looks at processes until none is left, or until the receiver of the results is gone.
    fn go_on<T>(&self, results: &Sender<Result<T>>)
    where
        L: Fn(&ProcessStatus) -> Result<T>,
    {
        loop {
            let Some((user, pid)) = lock(&self.queue).begin() else { return };
            if !self.busy.begin(pid) {
                let error = anyhow!("process {pid} still keeps an earlier look waiting");
                if results.send(Err(error)).is_err() {
                    return;
                }
                continue;
            }
            let start = Instant::now();
            let result = self.look_at(pid);
            self.busy.end(pid);
            lock(&self.queue).end(&user, start.elapsed());
            if results.send(result).is_err() {
                return;
            }
        }
    }

    fn look_at<T>(&self, pid: i32) -> Result<T>
    where
        L: Fn(&ProcessStatus) -> Result<T>,
    {
        let handle = Arc::new(ProcessHandle::open(pid)?);
        let rest = self.end.saturating_duration_since(Instant::now());
        (self.look)(&ProcessStatus::read(&handle, Allowance::of_bytes(MOST_OF_ONE, rest))?)
    }
}

/// Returns the user of a process. `None` for a kernel thread, which has no memory of its own.
fn user_of(pid: i32) -> Result<Option<String>> {
    let handle = Arc::new(ProcessHandle::open(pid)?);
    let process = ProcessStatus::read(&handle, Allowance::new(Duration::ZERO))?;
    Ok((process.resident_kib > 0).then_some(process.user))
}

/// Looks at the chosen processes until `end`. `size` returns the bytes of a result.
///
/// # Errors
/// Returns an error if this command cannot read the list of processes, or cannot start a thread.
/// Results so far are lost.
pub(crate) fn take<T: Send + 'static>(
    chosen: &Chosen,
    end: Instant,
    busy: &Busy,
    size: impl Fn(&T) -> usize,
    look: impl Fn(&ProcessStatus) -> Result<T> + Send + Sync + 'static,
) -> Result<Survey<T>> {
    let mut census = Survey { seen: Vec::new(), unread: BTreeMap::new() };
    let is_all = matches!(chosen, Chosen::All);
    let kept = Allowance::of_bytes(MOST_BYTES, end.saturating_duration_since(Instant::now()));
    let (mut queue, mut left) = (FairQueue::default(), 0);
    for pid in chosen.pids()? {
        match user_of(pid) {
            Ok(None) if is_all => {}
            Err(error) if LookRefusal::of(&error) == Some(LookRefusal::Ended) && is_all => {}
            user => {
                queue.add(user.ok().flatten().unwrap_or_default(), pid);
                left += 1;
            }
        }
    }
    let work = Arc::new(Worklist { queue: Mutex::new(queue), busy: busy.clone(), end, look });
    let (sender, receiver) = channel();
    let mut threads = 0;
    while left > 0 {
        while threads < (THREADS + busy.stuck()).min(MOST_THREADS).min(left) {
            let (work, sender) = (Arc::clone(&work), sender.clone());
            std::thread::Builder::new().spawn(move || work.go_on(&sender)).context("cannot start a thread")?;
            threads += 1;
        }
        let result = match receiver.recv_timeout(PAUSE.min(end.saturating_duration_since(Instant::now()))) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) if !kept.is_over() => continue,
            Err(_) => break,
        };
        left -= 1;
        match result {
            Ok(seen) => match kept.take(size(&seen)) {
                Ok(()) => census.seen.push(seen),
                Err(error) => census.count(Unread::LeftOut, &error),
            },
            Err(error) => match Unread::of(&error) {
                Unread::NotThere if is_all => {}
                reason => census.count(reason, &error),
            },
        }
    }
    *lock(&work.queue) = FairQueue::default();
    let late = anyhow!("the time for all processes was over; --timeout SECONDS allows more");
    (0..left).for_each(|_| census.count(Unread::LeftOut, &late));
    Ok(census)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn own() -> i32 {
        std::process::id() as i32
    }

    fn soon(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    #[test]
    fn named_processes_are_seen_or_counted_with_the_first_error() {
        let named = Chosen::Named(vec![own(), i32::MAX, i32::MAX - 1, own()]);
        let census = take(&named, soon(1000), &Busy::default(), |_| 1, |process| Ok(process.pid)).unwrap();
        assert_eq!(census.seen, [own()]);
        let count = &census.unread[&Unread::NotThere];
        assert!(count.processes == 2 && count.example.starts_with("there is no process"), "{count:?}");
        let refuse = |process: &ProcessStatus| -> Result<i32> { bail!("\u{9b}{}", process.pid) };
        let census = take(&Chosen::Named(vec![own()]), soon(1000), &Busy::default(), |_| 1, refuse).unwrap();
        assert_eq!(census.unread[&Unread::Failed].example, format!("\\u{{9b}}{}", own()));
    }

    #[test]
    fn all_processes_leave_out_those_without_neap() {
        let not_neap = |process: &ProcessStatus| match process.pid {
            pid if pid == own() => Ok(pid),
            pid => Err(LookRefusal::NotNeap.error(format!("{pid}"))),
        };
        let census = take(&Chosen::All, soon(1000), &Busy::default(), |_| 1, not_neap).unwrap();
        assert_eq!((census.seen, census.unread), (vec![own()], BTreeMap::new()));
    }

    #[test]
    fn slow_processes_of_a_user_let_those_of_others_go_first() {
        let mut queue = FairQueue::default();
        (0..10).for_each(|pid| queue.add("slow".into(), pid));
        (10..30).for_each(|pid| queue.add("swift".into(), pid));
        // Two at a time, as by two threads.
        let mut order = Vec::new();
        let mut open = Vec::new();
        while let Some((user, pid)) = queue.begin() {
            order.push(user.clone());
            open.push((user, pid));
            if open.len() == 2 {
                for (user, pid) in open.drain(..) {
                    queue.end(&user, Duration::from_millis(if pid < 10 { 200 } else { 1 }));
                }
            }
        }
        assert_eq!(order[..2], ["slow", "swift"], "each user has its turn");
        let slow_first = order.iter().take(22).filter(|user| *user == "slow").count();
        assert!(order.len() == 30 && slow_first <= 2, "{order:?}");
        queue.end("none", Duration::ZERO);
    }

    #[test]
    fn bytes_of_all_results_are_bounded() {
        let census =
            take(&Chosen::Named(vec![own()]), soon(1000), &Busy::default(), |_| MOST_BYTES + 1, |_| Ok(())).unwrap();
        assert!(census.seen.is_empty());
        assert!(census.unread[&Unread::LeftOut].example.contains("40 MiB"), "{census:?}");
    }

    #[test]
    fn census_skips_stuck_processes_and_reads_the_rest() {
        // More than there are threads at first.
        let children: Vec<_> = (0..THREADS + 2).map(|_| Sleeper::start()).collect();
        let pids: Vec<i32> = children.iter().map(|child| child.0.id() as i32).collect();
        let stuck = pids.clone();
        let look = move |process: &ProcessStatus| {
            while stuck.contains(&process.pid) {
                std::thread::park();
            }
            Ok(process.pid)
        };
        let busy = Busy::default();
        // The last process is looked at first.
        let chosen = Chosen::Named([vec![own()], pids.clone()].concat());
        let census = take(&chosen, soon(4), &busy, |_| 1, look.clone()).unwrap();
        assert_eq!((census.seen, census.unread[&Unread::LeftOut].processes), (vec![own()], pids.len() as u64));
        assert_eq!(busy.stuck(), pids.len(), "{busy:?}");
        // No other thread gets stuck with them.
        let census = take(&chosen, soon(1000), &busy, |_| 1, look).unwrap();
        assert_eq!((census.seen, census.unread[&Unread::Failed].processes), (vec![own()], pids.len() as u64));
    }

    /// A process that sleeps. It ends with the test.
    struct Sleeper(std::process::Child);

    impl Sleeper {
        fn start() -> Sleeper {
            Sleeper(std::process::Command::new("sleep").arg("1000").spawn().unwrap())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
