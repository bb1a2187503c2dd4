//! Six thread-local words: the entered group, the running call, the gate that the thread is inside,
//! the latest guard, the bytes up to the next sample, and their average. Each is 0 if there is
//! none.
//!
//! Allocations read the entered group. Calls of a shrinker (a cache's functions for reclaim) form a
//! chain that begins at the running call. The fork gate reads which gate the thread is inside. The
//! library has no other thread-local variables.
//!
//! The words use initial-exec TLS. Their distance from the thread pointer is equal in all threads,
//! and a relocation provides it. A read is two loads and no call. std's thread-locals and
//! `__tls_get_addr` may allocate. Access takes no lock, needs no registration, and is signal-safe.
//! The words of a new thread are 0. A forked child has the words of the thread that forked.
//!
//! Behind the words lie the word `ASKED` and an [area for rseq](crate::rseq::OwnAreas). Together
//! they take 96 bytes of the space that the C library reserves for thread-local variables of
//! libraries that a program loads by `dlopen`.

use crate::arch::{self, set_word, word};
use core::arch::global_asm;

// The symbol is hidden, so each library and program has its own. No function of the C API has this
// name. The area's second word, the CPU id, is -1, which means that the thread is not registered.
// The area's address is a multiple of 32, as the kernel demands.
//
// bytes 0 to 47:  the six words, 0
// bytes 48 to 55: `ASKED`, 0
// bytes 56 to 63: unused
// bytes 64 to 95: the rseq area: cpu_id_start 0, cpu_id -1, then 0
global_asm!(
    ".pushsection .tdata.__entered_of_neap, \"awT\", %progbits",
    ".balign 32",
    ".globl __entered_of_neap",
    ".hidden __entered_of_neap",
    ".type __entered_of_neap, @object",
    ".size __entered_of_neap, 96",
    "__entered_of_neap:",
    ".zero 64",
    ".long 0, -1",
    ".zero 24",
    ".popsection",
);

/// Offsets of the words from the symbol, in bytes.
const ENTERED: usize = 0;
const CALLING: usize = 8;
const INSIDE: usize = 16;
const GUARDS: usize = 24;
const COUNTDOWN: usize = 32;
const MEAN: usize = 40;
const ASKED: usize = 48;
const AREA: isize = 64;

/// Word of the group that this thread has entered; 0 if it has entered none.
#[inline(always)]
pub fn entered() -> usize {
    word::<ENTERED>()
}

/// Sets the word of the group that this thread has entered; 0 for none.
#[inline(always)]
pub fn set_entered(word: usize) {
    set_word::<ENTERED>(word);
}

/// Word of the innermost call of a shrinker that this thread makes; 0 if it makes none.
#[inline(always)]
pub fn calling() -> usize {
    word::<CALLING>()
}

/// Sets the word of the innermost call; 0 for none. The compiler does not move earlier stores
/// behind this one. So a signal handler that finds the word also finds these stores.
#[inline(always)]
pub fn set_calling(word: usize) {
    set_word::<CALLING>(word);
}

/// Word of the gate that this thread is inside, in the gate's format; 0 if it is outside.
#[inline(always)]
pub fn inside() -> usize {
    word::<INSIDE>()
}

/// Sets the word of the gate that this thread is inside; 0 for none.
#[inline(always)]
pub fn set_inside(word: usize) {
    set_word::<INSIDE>(word);
}

/// Word of the latest guard of an entered group; 0 if there is none. The module that makes guards
/// defines its format.
#[inline(always)]
pub fn guards() -> usize {
    word::<GUARDS>()
}

/// Sets the word of the latest guard; 0 for none. Earlier stores stay before this one, as in
/// [`set_calling`].
#[inline(always)]
pub fn set_guards(word: usize) {
    set_word::<GUARDS>(word);
}

/// Sets the bytes that this thread allocates up to its next sample.
#[inline(always)]
pub fn set_countdown(bytes: usize) {
    set_word::<COUNTDOWN>(bytes);
}

/// The average of the distribution from which the countdown was drawn; 0 before the first draw.
pub fn countdown_mean() -> usize {
    word::<MEAN>()
}

/// Sets the average for [`countdown_mean`].
pub fn set_countdown_mean(bytes: usize) {
    set_word::<MEAN>(bytes);
}

/// Subtracts `bytes` from the countdown. If less than one byte would be left, changes nothing and
/// returns `false`.
#[inline(always)]
pub fn count_down(bytes: usize) -> bool {
    arch::count_down::<COUNTDOWN>(bytes)
}

/// Whether this thread has asked the kernel to register [its rseq area](own_area), or must not ask.
pub(crate) fn has_asked() -> bool {
    word::<ASKED>() != 0
}

/// Sets [`has_asked`].
pub(crate) fn set_asked(asked: bool) {
    set_word::<ASKED>(asked.into());
}

/// Distance of neap's own rseq area from the thread pointer. It is equal in all threads.
pub(crate) fn own_area() -> isize {
    arch::words_offset() + AREA
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
    fn a_countdown_keeps_at_least_one_byte() {
        std::thread::spawn(|| {
            assert!(!count_down(0) && !count_down(usize::MAX), "nothing is drawn");
            set_countdown(100);
            let left = word::<COUNTDOWN>;
            assert!(count_down(60) && count_down(0) && left() == 40);
            assert!(!count_down(40) && !count_down(usize::MAX) && left() == 40);
            assert!(count_down(39) && left() == 1 && !count_down(1));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_forked_child_keeps_the_word() {
        std::thread::spawn(|| {
            set_entered(0x1234_5678_9abc_def0);
            // SAFETY: the child reads the word and ends.
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

    /// A handler whose changes the interrupted code must not see: it changes the word and restores
    /// it.
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
