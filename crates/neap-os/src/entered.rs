//! Four words for each thread: what it has entered, what it is calling, which gate it is inside,
//! and the latest of its guards, or 0.
//!
//! Sits between whoever enters and leaves, and an allocation that looks whether its thread has;
//! between whoever calls a program's functions, and what these call in turn; and between a gate and
//! a fork that looks whether its own thread is inside. The only thread-local of the library, and a
//! bare one: in initial-exec TLS, so it is at a fixed distance from the thread pointer, which a
//! relocation says. Reading it is two loads and no call; std's thread-locals and `__tls_get_addr`
//! may allocate. It takes 32 bytes of what the C library keeps free for libraries that are opened
//! late. No lock, no registration, signal-safe. A new thread has 0; a forked child has its parent's
//! words of the thread that forked.

use core::arch::{asm, global_asm};

// Hidden: each library and program has its own. Its name is no function of the C API's.
global_asm!(
    ".pushsection .tbss.__entered_of_neap, \"awT\", @nobits",
    ".balign 8",
    ".globl __entered_of_neap",
    ".hidden __entered_of_neap",
    ".type __entered_of_neap, @object",
    ".size __entered_of_neap, 32",
    "__entered_of_neap:",
    ".zero 32",
    ".popsection",
);

/// Where the words lie behind the name, in bytes.
const ENTERED: usize = 0;
const CALLING: usize = 8;
const INSIDE: usize = 16;
const GUARDS: usize = 24;

/// What this thread has entered; 0: nothing.
#[inline(always)]
pub fn entered() -> usize {
    word::<ENTERED>()
}

/// Says what this thread has entered from now on; 0: nothing.
#[inline(always)]
pub fn set_entered(word: usize) {
    set_word::<ENTERED>(word);
}

/// What this thread is calling; 0: nothing.
#[inline(always)]
pub fn calling() -> usize {
    word::<CALLING>()
}

/// Says what this thread is calling from now on; 0: nothing. What the word leads to is written before.
#[inline(always)]
pub fn set_calling(word: usize) {
    set_word::<CALLING>(word);
}

/// Which gate this thread is inside, as that writes it; 0: none.
#[inline(always)]
pub fn inside() -> usize {
    word::<INSIDE>()
}

/// Says which gate this thread is inside from now on; 0: none.
#[inline(always)]
pub fn set_inside(word: usize) {
    set_word::<INSIDE>(word);
}

/// The latest guard of what this thread has entered, as whoever made it writes it; 0: none.
#[inline(always)]
pub fn guards() -> usize {
    word::<GUARDS>()
}

/// Says which guard is the latest from now on; 0: none. What the word leads to is written before.
#[inline(always)]
pub fn set_guards(word: usize) {
    set_word::<GUARDS>(word);
}

#[inline(always)]
fn word<const AT: usize>() -> usize {
    let word: usize;
    // SAFETY: reads a word of this thread's own, whose place the loader has put where the first instruction looks.
    unsafe {
        asm!(
            "mov {0}, qword ptr [rip + __entered_of_neap@GOTTPOFF]",
            "mov {0}, qword ptr fs:[{0} + {at}]",
            out(reg) word, at = const AT, options(nostack, readonly, preserves_flags)
        );
    }
    word
}

#[inline(always)]
fn set_word<const AT: usize>(word: usize) {
    // SAFETY: writes a word of this thread's own, which nothing but the functions above knows.
    unsafe {
        asm!(
            "mov {0}, qword ptr [rip + __entered_of_neap@GOTTPOFF]",
            "mov qword ptr fs:[{0} + {at}], {1}",
            out(reg) _, in(reg) word, at = const AT, options(nostack, preserves_flags)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicUsize, Ordering};
    use std::vec::Vec;

    #[test]
    fn a_thread_has_its_own_word_which_is_0_at_first() {
        std::thread::spawn(|| {
            assert_eq!(entered(), 0);
            set_entered(usize::MAX);
            let others: Vec<_> = (1..9)
                .map(|n| {
                    std::thread::spawn(move || {
                        let first = entered();
                        assert_eq!(calling(), 0);
                        for round in 0..10_000 {
                            set_entered(n << 32 | round);
                            set_calling(round << 32 | n);
                            assert_eq!((entered(), calling()), (n << 32 | round, round << 32 | n));
                        }
                        set_calling(0);
                        set_entered(n);
                        (first, entered())
                    })
                })
                .collect();
            let seen: Vec<_> = others.into_iter().map(|thread| thread.join().unwrap()).collect();
            assert!(seen.iter().enumerate().all(|(n, &word)| word == (0, n + 1)), "{seen:?}");
            assert_eq!(entered(), usize::MAX, "no other thread's");
            set_entered(0);
            assert_eq!(entered(), 0);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_forked_child_keeps_the_word() {
        std::thread::spawn(|| {
            set_entered(0x1234_5678_9abc_def0);
            // SAFETY: the child looks at the word and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let same = entered() == 0x1234_5678_9abc_def0;
                // SAFETY: ends the child without anything of the parent's.
                unsafe { libc::_exit(if same { 7 } else { 8 }) };
            }
            let mut status = 0;
            // SAFETY: the child is this test's own.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7));
        })
        .join()
        .unwrap();
    }

    static HANDLED: AtomicUsize = AtomicUsize::new(0);

    /// What a handler does that is not to be seen in what it interrupted: it steps out, and in again.
    extern "C" fn step_out(_: i32) {
        let before = entered();
        set_entered(before + 1);
        HANDLED.fetch_add(entered() - before, Ordering::Relaxed);
        set_entered(before);
    }

    #[test]
    fn a_signal_handler_may_use_it() {
        // SAFETY: the handler touches nothing but the word and a counter.
        unsafe { libc::signal(libc::SIGURG, step_out as *const () as usize) };
        // SAFETY: this thread's own number.
        let (process, thread) = unsafe { (libc::getpid(), libc::gettid()) };
        let sender = std::thread::spawn(move || {
            // SAFETY: the thread waits for this one.
            (0..1000).for_each(|_| _ = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGURG) });
        });
        let mut round = 0;
        while !sender.is_finished() {
            round += 2;
            set_entered(round);
            assert_eq!(entered(), round);
        }
        sender.join().unwrap();
        assert!(HANDLED.load(Ordering::Relaxed) > 0);
        set_entered(0);
    }
}
