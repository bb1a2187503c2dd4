//! Measures a pop after a push, for stacks with a head pointer and with a count.
//!
//! Run by `cargo run --release -p neap-os --example stack_forms`. Each form pops an object, finds
//! its stack by its address (as `free` does), and pushes it back. Prints the least time of many
//! short runs, so other work on the machine does not count.

use core::arch::asm;
use core::hint::black_box;
use std::time::Instant;

/// Table from an object's address to its stack: one load, as in `free`.
static KINDS: [u16; 4096] = [8; 4096];

/// Memory of a stack, which begins at word 8.
#[repr(align(64))]
struct Region([u64; 256]);

macro_rules! form {
    ($pop:ident, $push:ident, $pop_text:literal, $push_text:literal) => {
        #[inline(never)]
        fn $pop(region: *mut Region, place: usize) -> u64 {
            let object: u64;
            // SAFETY: the stack at `place` has an object and lies in the region.
            unsafe {
                // t := region + place * 8, the stack
                // $pop_text: object := the topmost object; the head is one lower (commit)
                //
                // Registers: t: address of the region, then of the stack. place: index of the
                // stack's first word. head: the count or the head pointer. object: the result.
                asm!("lea {t}, [{t} + {place} * 8]", $pop_text, t = inout(reg) region => _, place = in(reg) place,
                    head = out(reg) _, object = out(reg) object, options(nostack));
            }
            object
        }

        #[inline(never)]
        fn $push(region: *mut Region, object: u64) {
            let place = usize::from(KINDS[(object >> 12) as usize % KINDS.len()]);
            // SAFETY: the stack at `place` has room and lies in the region.
            unsafe {
                // t := region + place * 8, the stack
                // $push_text: the cell at the head := object; the head is one higher (commit)
                //
                // Registers: t: address of the region, then of the stack. place: index of the
                // stack's first word. head: the count or the head pointer. object: the argument.
                asm!("lea {t}, [{t} + {place} * 8]", $push_text, t = inout(reg) region => _, place = in(reg) place,
                    head = out(reg) _, object = in(reg) object, options(nostack));
            }
        }
    };
}

form!(
    pop_counted,
    push_counted,
    "mov {head}, [{t}]\ndec {head}\nmov {object}, [{t} + 8 + {head} * 8]\nmov [{t}], {head}",
    "mov {head}, [{t}]\nmov [{t} + 8 + {head} * 8], {object}\ninc {head}\nmov [{t}], {head}"
);
form!(
    pop_pointed,
    push_pointed,
    "mov {head}, [{t}]\nmov {object}, [{head} - 8]\nsub {head}, 8\nmov [{t}], {head}",
    "mov {head}, [{t}]\nmov [{head}], {object}\nadd {head}, 8\nmov [{t}], {head}"
);

fn least(mut pair: impl FnMut()) -> f64 {
    const PAIRS: u32 = 1000;
    let mut least = f64::MAX;
    for _ in 0..20_000 {
        let start = Instant::now();
        (0..PAIRS).for_each(|_| pair());
        least = least.min(start.elapsed().as_nanos() as f64 / f64::from(PAIRS));
    }
    least
}

pub(super) fn measure() {
    let (mut counted, mut pointed) = (Box::new(Region([0; 256])), Box::new(Region([0; 256])));
    let (counted, pointed) = (&raw mut *counted, &raw mut *pointed);
    // SAFETY: both regions live to the end of main; the pointed stack's cells begin behind its
    // head.
    unsafe { (*pointed).0[8] = (&raw mut (*pointed).0[9]).addr() as u64 };
    for object in 1..20 {
        push_counted(counted, object << 12);
        push_pointed(pointed, object << 12);
    }
    for (name, nanoseconds) in [
        ("count and cells, [base + count * 8]", least(|| push_counted(counted, black_box(pop_counted(counted, 8))))),
        ("head pointer, [head] and [head - 8]", least(|| push_pointed(pointed, black_box(pop_pointed(pointed, 8))))),
    ] {
        println!("{name}: {nanoseconds:.2} ns a pair");
    }
}
