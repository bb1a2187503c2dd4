//! The process's memory manager: the one instance behind `malloc` and [`Neap`](crate::Neap), with
//! its first use, forks and threads.
//!
//! This file holds the only mutable static of the workspace. All other code gets its instance as an
//! argument.
//!
//! # Fork
//! 1. The prepare handler takes the lock of the C library's streams.
//! 2. It closes the [fork gate](neap_base::gate), and waits until no thread is in a slow path.
//! 3. It closes the restartable sequences of the fast path, and fences every CPU.
//!
//! Then every object is in exactly one structure and every mutex is free, so the child's copy is
//! whole. Afterwards both processes open the gate and the sequences again.

use crate::guard::report_fault;
use crate::main_thread;
use crate::mm::{Hooks, Mm, Task};
use crate::numbers::text;
use crate::options::{Background, Options, Setting};
use crate::trace;
use core::ffi::{CStr, c_int, c_void};
use core::ops::Deref;
use core::ptr::{null_mut, without_provenance_mut};
use core::sync::atomic::Ordering;
use neap_base::platform::{Errno, Linux};
use neap_os::fatal::{say, say_if_heard};
use neap_os::own_thread::{self, End};
use neap_os::signal::{self, Action, Fault};
use neap_os::stdio_lock::StreamsLock;
use neap_os::{environment, fork_handlers, stack, thread};

/// The process's memory manager.
pub static PROCESS: OnPages<Mm<Linux>> =
    OnPages(Mm::new(Hooks { open, spawn: Some(spawn), ticked: Some(text::publish) }));

/// A value at the start of a page, so that the page offsets of its fields are known.
/// `neap-objects/src/fast_path/layout.rs` says why. For statics only.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct OnPages<T>(T);

impl<T> Deref for OnPages<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// The lock that a fork takes before it stops allocations; see [`stdio_lock`](neap_os::stdio_lock).
pub fn streams() -> &'static StreamsLock {
    &PROCESS.of_process.streams
}

/// Number of looks at the gate, in two or three seconds, after which fork reports that it waits for
/// a thread.
const FORK_REPORT_POLLS: u32 = 20_000;
/// Number of looks at the gate, in some tenths of a second, if a signal handler forks in a thread
/// that is inside. Other threads inside may wait for a lock of that thread, or may fork too and
/// wait for it.
const VAIN_POLLS_MAX: u32 = 2_000;

/// Opens the manager at its first use, which may be on a small stack. If the system maps no other
/// stack, the allocation fails.
fn open(mm: &Mm<Linux>) {
    let _ = stack::apart(|| open_apart(mm));
}

fn open_apart(mm: &Mm<Linux>) {
    let options = Options::of_environment();
    // SAFETY: the one manager is a static. On failure every allocation fails, and tries again.
    let opened = unsafe { mm.open(machine(&options).with_own_thread(&PROCESS.own_thread), &options) };
    if opened == Ok(true) {
        register_fork_handlers();
        text::open(mm);
        if options.profile > 0
            && let Err(wrong) = mm.set_number(Setting::Profile, options.profile)
        {
            let _ = mm.set_number(Setting::Profile, 0);
            say(format_args!("NEAP: \"profile\" {wrong}; ignored"));
        }
        // Every allocation of a checked program is checked already.
        if options.guard > 0 && !options.check {
            let begun = handle_faults().and_then(|()| mm.begin_guard(options.guard));
            begun.unwrap_or_else(|_| say(format_args!("NEAP: \"guard\" is refused by the system; ignored")));
        }
        mm.ticked();
    }
}

/// Registers the fork handlers. Prepare handlers that are registered later run before these, while
/// the gate is open. So they may wait for threads that need the gate. That is why neap registers as
/// early as possible: when the library is loaded, or at its first use, which may be long before
/// that.
#[unsafe(link_section = "__at_load")]
extern "C" fn register_fork_handlers() {
    // Relaxed: it only decides which call is first.
    if !PROCESS.has_fork_handlers.swap(true, Ordering::Relaxed) {
        // SAFETY: the handlers are functions of this library, which is never unloaded.
        let error = unsafe { fork_handlers::register(before_fork, after_fork_in_parent, after_fork_in_child) };
        if error != 0 {
            say(format_args!("cannot register fork handlers (error {error}): forked children may hang"));
        }
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

#[unsafe(link_section = "__at_load")]
extern "C" fn at_load() {
    register_fork_handlers();
    // SAFETY: no thread of the program runs yet, and the text is not kept.
    if unsafe { environment::variable("NEAP") }.is_some() {
        start_if_asked();
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

/// With the option `check`, verifies all blocks of the program at exit.
extern "C" fn at_exit() {
    PROCESS.check_all("exit");
}

/// Makes the thread if the option `background:on` asks for it.
#[cold]
fn start_if_asked() {
    if PROCESS.core().is_some_and(|core| core.options.background == Background::Always) {
        PROCESS.start_background();
    }
}

/// Returns the machine with the options applied, and with the recorder of its events, if any.
fn machine(options: &Options) -> Linux {
    let machine = if options.rseq { Linux::probe() } else { Linux::probe_unregistered() };
    let machine = machine.with_isolated(&options.isolated);
    let machine = if options.nodes == 0 { machine } else { machine.with_nodes(options.nodes as usize) };
    let Some(path) = options.trace.as_c_str() else { return machine };
    match trace::open(path, &machine) {
        Ok(Some(trace)) => return machine.with_recorder(trace),
        Ok(None) => {}
        Err(error) => {
            let wrong = if error == Errno::EXIST { "exists already" } else { "cannot be used" };
            let (path, error) = (path.to_bytes().escape_ascii(), error.raw_os_error());
            say(format_args!("NEAP: \"trace:{path}\" {wrong} (error {error}); nothing is recorded"));
        }
    }
    machine
}

/// Registers neap's handler of faults. The handler then performs the action that the program had
/// set before.
///
/// # Errors
/// The system's error if a sandbox refuses the registration.
fn handle_faults() -> Result<(), Errno> {
    // SAFETY: the handler is safe to call anywhere. It passes each signal that it does not handle
    // to the returned action.
    PROCESS.of_process.at_faults.get_or_make(|| unsafe { signal::handle_faults(on_fault) }).map(|_| ())
}

/// Reports a fault in guarded memory. Then performs the action that was set before this handler,
/// for every fault.
///
/// # Safety
/// Those of a [handler](signal::Handler).
unsafe extern "C" fn on_fault(signal: c_int, info: *mut c_void, context: *mut c_void) {
    // SAFETY: the arguments are those of a handler (the caller's promise).
    let fault = unsafe { Fault::of(info, context) };
    if fault.is_some_and(|fault| report_fault(&PROCESS, &fault)) {
        // The instruction is executed again, unless the program's handler ends the process.
        signal::end_at_faults();
    }
    let previous = PROCESS.of_process.at_faults.get().copied().unwrap_or(Action::DEFAULT);
    // SAFETY: the arguments are those of a handler that the kernel has called (the caller's
    // promise). `handle_faults` returned the action, or it is the default action.
    unsafe { previous.go_on(signal, info, context) };
}

fn spawn(mm: &Mm<Linux>, task: Task) -> Result<usize, Errno> {
    extern "C" fn maintain(_: *mut c_void) -> *mut c_void {
        // Relaxed: read back by this thread alone.
        PROCESS.own_thread.store(thread::pointer(), Ordering::Relaxed);
        settle(c"neap");
        PROCESS.background();
        PROCESS.own_thread.store(0, Ordering::Relaxed);
        null_mut()
    }
    extern "C" fn reclaim(number: *mut c_void) -> *mut c_void {
        settle(c"neap-reclaim");
        PROCESS.reclaimer(number.addr() as u32);
        null_mut()
    }
    let functions = &mm.of_process.functions;
    // SAFETY: the bodies are sound on another thread, since they use only a static. They do not
    // dereference the number.
    let made = unsafe {
        match task {
            Task::Maintain => {
                main_thread::notice_end();
                own_thread::make(functions, maintain, null_mut(), own_thread::SMALL_STACK, End::Joined)
            }
            Task::Reclaim(number) => {
                let number = without_provenance_mut(number as usize);
                own_thread::make(functions, reclaim, number, own_thread::ORDINARY_STACK, End::Detached)
            }
        }
    };
    made.map(|id| id as usize)
}

/// Gives the calling thread the name and the CPUs of neap's own threads.
fn settle(name: &CStr) {
    if let Some(core) = PROCESS.core_if_open() {
        own_thread::settle(name, &core.objects.platform.own_cpus());
    }
}

extern "C" fn before_fork() {
    PROCESS.gate.close_by(close_all);
}

/// Closes streams, gate and sequences.
fn close_all() {
    streams().lock();
    PROCESS.close_for_fork(&|looks| {
        if PROCESS.gate.is_wait_vain() {
            return looks < VAIN_POLLS_MAX;
        }
        if looks == FORK_REPORT_POLLS {
            say_if_heard(format_args!("fork waits for a thread that has been inside malloc or free for some seconds"));
        }
        // Waits on: the thread inside holds locks, or pages that the child would lose. The C
        // library's fork waits without a limit for its own malloc, too.
        true
    });
}

extern "C" fn after_fork_in_parent() {
    if PROCESS.reopen_after_fork() {
        streams().unlock();
    }
}

extern "C" fn after_fork_in_child() {
    PROCESS.reopen_in_child();
    streams().forget();
}
