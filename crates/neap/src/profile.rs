//! Samples of allocations: which code asked for the memory that the program has.
//!
//! # Design
//! While the option `profile` is on, neap samples each allocation with the probability 1 -
//! exp(-size / mean). So the samples are a Poisson process over the bytes that a thread allocates.
//! A mean of 512 KiB or more doubles while there are more than 1280 samples a second. Each sample
//! records its own mean. The process writes a sample to the [area](neap_base::profile_area) that
//! the command `neap profile` reads. The command unwinds the sample's stack. This process only
//! copies the bytes of the stack, and calls no unwinder.
//!
//! - While the option is off, the fast paths have no instruction for it. While it is on, they
//!   refuse every call ([`FastPath::count_all`](neap_objects::fast_path::FastPath::count_all)), and
//!   the slow path subtracts the size from a thread-local
//!   [countdown](neap_os::thread_state::count_down).
//! - The state byte of a sampled object is [marked](neap_objects::object_state::SAMPLED), so only
//!   frees of sampled objects are slow. The free of a run looks the run's address up while there
//!   are samples.
//! - A forked child samples into its own area, and knows none of the parent's samples. A child that
//!   was forked by the bare system call has no area, and samples nothing.
//! - `realloc` that resizes or moves a run ends its sample, and counts the new size as an
//!   allocation. Where it fails, the sample is lost.
//!
//! # Locking
//! Each sample, and each free of a sampled allocation, takes one mutex inside the fork gate. The
//! thread holds it while it copies up to 32 KiB of stack, and packs the stacks in about as many
//! older bytes.

use crate::mm::{Core, Mm};
use crate::options::Setting;
use crate::state::profile::recorder::{Recorder, Sampled};
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_base::profile_area::{AreaHeader, MOST_STACK};
use neap_objects::size_class::Class;
use neap_os::thread_state::{count_down, countdown_mean, set_countdown, set_countdown_mean};
use neap_os::{call_stack, clock, thread};

impl<P: Platform> Mm<P> {
    /// Records an allocation at which the countdown ended as a sample. A thread that has drawn no
    /// number yet draws one first, which may leave the allocation out.
    #[cold]
    #[inline(never)]
    pub(crate) fn sample(&self, memory: *mut u8, size: usize) {
        let (registers, is_drawn) = (call_stack::registers(), countdown_mean() > 0);
        let (mean, Some(core)) = (self.profile.mean.load(Ordering::Relaxed), self.core_if_open()) else { return };
        // If nothing is recorded below, the thread comes here again after about `mean` bytes.
        set_countdown(mean.max(1) as usize);
        if memory.is_null() || mean == 0 {
            return;
        }
        let (is_recorded, time) = (self.profile.is_recorded.load(Ordering::Relaxed), clock::precise());
        // These functions make system calls, so they run before the lock is taken.
        let stack_bytes = if is_recorded { call_stack::readable(registers.stack_pointer, MOST_STACK) } else { 0 };
        let thread = if is_recorded { thread::id() } else { 0 };
        let group = self.group_of_thread().map_or(0, |group| group.to_bits());
        let _inside = self.gate.enter(core.objects.platform.cpu());
        let area = core.page.samples().filter(|_| is_recorded);
        if is_recorded && area.is_none() {
            return;
        }
        let mut recorder = self.profile.recorder.lock();
        // A thread's first number is drawn at its first allocation, which it may leave out.
        if !is_drawn {
            let first = recorder.interval(mean);
            set_countdown_mean(first.mean);
            if size < first.bytes {
                set_countdown(first.bytes - size);
                return;
            }
        }
        let next = |recorder: &mut Recorder| {
            let next = recorder.interval(mean);
            set_countdown(next.bytes);
            set_countdown_mean(next.mean);
        };
        let Some(area) = area else {
            next(&mut recorder);
            return self.rest_from_guarding(core, &recorder, memory, size);
        };
        let drawn_of = countdown_mean() as u64;
        let sampled = Sampled { address: memory.addr() as u64, size: size as u64, mean: drawn_of, group, time, thread };
        // SAFETY: the area is mapped, and written to under this lock alone. The stack is this
        // thread's, and `readable` says that a multiple of 8 bytes, at most `MOST_STACK`, can be
        // read.
        let has_slot = unsafe { recorder.record(area, &sampled, registers, stack_bytes) };
        self.profile.live.store(recorder.live(), Ordering::Relaxed);
        next(&mut recorder);
        // With `check`, an allocation does not begin where its object does. Its free looks its
        // address up instead.
        let is_object = !core.options.check && core.objects.class_at(memory).is_some_and(|class| class != Class::NONE);
        if has_slot && is_object {
            core.objects.mark_sampled(memory);
        }
    }

    /// Counts an allocation, and samples it if its countdown has ended, as long as allocations are
    /// counted.
    #[inline]
    pub(crate) fn count_allocation(&self, memory: *mut u8, size: usize) {
        if self.profile.is_on() && !count_down(size) {
            self.sample(memory, size);
        }
    }

    /// Ends the sample of an allocation that is about to be freed or moved.
    #[cold]
    #[inline(never)]
    pub(crate) fn end_sample(&self, core: &Core<P>, memory: *const u8) {
        let _inside = self.gate.enter(core.objects.platform.cpu());
        let Some(area) = core.page.samples() else { return };
        let mut recorder = self.profile.recorder.lock();
        // SAFETY: the area is mapped, and written to under this lock alone.
        unsafe { recorder.forget(area, memory.addr() as u64) };
        self.profile.live.store(recorder.live(), Ordering::Relaxed);
    }

    /// Ends the sample of a run, if there are samples.
    #[inline]
    pub(crate) fn end_sample_of_run(&self, core: &Core<P>, memory: *const u8) {
        if self.profile.live.load(Ordering::Relaxed) > 0 {
            self.end_sample(core, memory);
        }
    }
}

impl<P: Platform> Core<P> {
    /// Calls `read` with the recorder and the area. `None` if there is no area.
    pub(crate) fn with_samples<R>(&self, mm: &Mm<P>, read: impl FnOnce(&Recorder, &AreaHeader) -> R) -> Option<R> {
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        let area = self.page.samples()?;
        Some(read(&mm.profile.recorder.lock(), area))
    }

    /// Puts the number of the setting `profile` in force: samples every `mean` bytes, or ends
    /// sampling and forgets all samples. Only one thread may call this at a time.
    ///
    /// # Errors
    /// The reason why nothing is sampled.
    pub(crate) fn set_profile(&self, mm: &Mm<P>, _: &Inside<'_>, mean: u64) -> Result<(), &'static str> {
        let profile = &mm.profile;
        if mean > 0 {
            let area = self.page.map_samples().ok_or(NO_AREA)?;
            let mut recorder = profile.recorder.lock();
            recorder.begin(area, mean).map_err(|_| "is refused: the system gave no address space")?;
            // Stored under the lock, which callers of `rest_from_guarding` hold. That function does
            // nothing from here on.
            profile.is_recorded.store(true, Ordering::Relaxed);
            profile.mean.store(mean, Ordering::Relaxed);
            mm.fast_path.count_all();
        } else if profile.is_recorded.swap(false, Ordering::Relaxed) {
            match self.guard.mean.load(Ordering::Relaxed) {
                0 => {
                    profile.mean.store(0, Ordering::Relaxed);
                    mm.fast_path.count_none();
                }
                mean => profile.begin_guard(mean),
            }
            profile.recorder.lock().end(self.page.samples());
            profile.live.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Forgets the parent's samples in a forked child, and continues with the child's own. The
    /// child has one thread, and a new page or none.
    pub(crate) fn renew_profile(&self, mm: &Mm<P>) {
        self.at_limit.forget();
        if self.guard.rests.load(Ordering::Relaxed) {
            mm.count_for_guard(self);
        }
        let mean = mm.profile.mean.load(Ordering::Relaxed);
        let is_recorded = mean > 0 && mm.profile.is_recorded.load(Ordering::Relaxed);
        // A thread of the parent may have held the mutex, if a signal handler has forked.
        let Some(mut recorder) = mm.profile.recorder.try_lock().filter(|_| is_recorded) else { return };
        recorder.end(None);
        drop(recorder);
        mm.profile.live.store(0, Ordering::Relaxed);
        // Waits for no thread: only this one can have closed the gate.
        let inside = mm.gate.enter(self.objects.platform.cpu());
        if self.set_profile(mm, &inside, mean).is_err() {
            let _ = self.set_profile(mm, &inside, 0);
            self.settings.values[Setting::Profile as usize].store(0, Ordering::Relaxed);
        }
    }
}

/// Why a process cannot be sampled.
const NO_AREA: &str = "is refused: samples need the page of numbers, which this process does not have (stat:off, threads \
                       before its first allocation, or a limit on files), or has closed";
