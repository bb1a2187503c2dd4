//! Measures a counter's addition in several forms, against a plain addition.
//!
//! Run by `cargo run --release -p neap-os --example addition_forms`. Each form adds 1 to the word
//! whose offset a table has for the CPU, and checks whether it has left its batch, as a counter
//! does.
//!
//! * *Stored*: the address of the sequence's descriptor is stored each time, as everywhere in neap.
//! * *Compared*: the sequence begins by comparing the address with the stored one, and is left to
//!   store it if they differ. This saves a store, but only if the same addition is repeated.
//! * *Bare*: the minimum of any sequence. It finds the word by a shift of the CPU's number without
//!   a check, and checks nothing afterwards. No counter can do with that.
//!
//! The start values are in registers, or loaded each time. Prints the least time of many short
//! runs, so other work on the machine does not count.

use core::arch::asm;
use core::hint::black_box;
use std::time::Instant;

use neap_os::rseq::registered_offset;
use neap_os::topology::nameable;

/// A CPU's word, on a cache line of its own.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Word(#[allow(dead_code, reason = "only sequences see it")] i64);

/// Start values of an addition: offset of a thread's rseq area, table of offsets, first word, and
/// the bits outside a batch.
#[derive(Clone, Copy)]
struct Start {
    area: isize,
    offsets: usize,
    words: usize,
    mask: i64,
}

/// Finds the CPU's word by its number and adds to it; `22:` is behind the commit.
macro_rules! addition {
    () => {
        "mov {t:e}, dword ptr fs:[{area} + 4]\nmov {t}, qword ptr [{offsets} + {t} * 8]\nadd {t}, {words}\n\
         mov {new}, qword ptr [{t}]\nadd {new}, 1\nmov qword ptr [{t}], {new}\n22: test {new}, {mask}\njnz 23f\n23:\n"
    };
}

/// An addition with a word at each multiple of 64 bytes, and without a check.
macro_rules! bare_addition {
    () => {
        "/* {offsets} {mask} {new} */\nmov {t:e}, dword ptr fs:[{area} + 4]\nshl {t}, 6\nadd qword ptr [{words} + {t}], 1\n22:\n23:\n"
    };
}

/// An addition as a sequence, of which `$known` tells the kernel; `21:` is its start.
macro_rules! sequence {
    ($known:literal, $addition:expr) => {
        concat!(
            ".pushsection .data.rel.ro, \"aw\", @progbits\n.balign 32\n",
            "20: .long 0, 0\n.quad 21f, 22f - 21f, 24f\n.popsection\n",
            ".pushsection __rseq_failure, \"ax\", @progbits\n.byte 0x0f, 0xb9, 0x3d\n.long 0x53053053\n",
            "24: jmp 23f\n25: mov qword ptr fs:[{area} + 8], {t}\njmp 21f\n.popsection\n",
            "lea {t}, [rip + 20b]\n",
            $known,
            $addition
        )
    };
}

macro_rules! form {
    ($name:ident, $text:expr) => {
        #[inline(always)]
        fn $name(start: Start) {
            // SAFETY: the table has an offset and the words a word for each CPU. Only this process
            // uses them, and their values do not matter.
            unsafe {
                // t := CPU's id; t := words + offsets[t]; bare: t := words + t * 64
                // new := word at t, plus 1; word at t := new (commit)
                // if new has a bit of mask: end of a batch
                // abort: go to the end
                //
                // Registers: area: offset of the rseq area. offsets: address of the table of
                // offsets. words: address of the first word. mask: bits outside a batch. t: address
                // of the descriptor, the CPU's id, then the word's address. new: the sum.
                asm!($text, area = in(reg) start.area, offsets = in(reg) start.offsets, words = in(reg) start.words,
                    mask = in(reg) start.mask, t = out(reg) _, new = out(reg) _, options(nostack));
            }
        }
    };
}

form!(plain, "/* {area} {offsets} {mask} {t} {new} */\nadd qword ptr [{words}], 1");
form!(unprotected, addition!());
form!(bare, sequence!("mov qword ptr fs:[{area} + 8], {t}\n21:\n", bare_addition!()));
form!(bare_compared, sequence!("21: cmp qword ptr fs:[{area} + 8], {t}\njne 25b\n", bare_addition!()));
form!(stored, sequence!("mov qword ptr fs:[{area} + 8], {t}\n21:\n", addition!()));
form!(compared, sequence!("21: cmp qword ptr fs:[{area} + 8], {t}\njne 25b\n", addition!()));

fn least(mut add: impl FnMut()) -> f64 {
    const TIMES: u32 = 1000;
    let mut least = f64::MAX;
    for _ in 0..20_000 {
        let start = Instant::now();
        for _ in 0..TIMES {
            add();
        }
        least = least.min(start.elapsed().as_nanos() as f64 / f64::from(TIMES));
    }
    least
}

pub(super) fn measure() {
    let Some(area) = registered_offset() else {
        println!("the C library has registered no rseq area");
        return;
    };
    let mut words = vec![Word(0); nameable()];
    let offsets: Vec<usize> = (0..words.len()).map(|cpu| cpu * size_of::<Word>()).collect();
    let start = Start {
        area,
        offsets: offsets.as_ptr().expose_provenance(),
        words: words.as_mut_ptr().expose_provenance(),
        mask: !0 << 62,
    };
    let plain = least(|| plain(start));
    for (name, nanoseconds) in [
        ("plain, to one word", plain),
        ("not protected at all, from registers", least(|| unprotected(start))),
        ("bare and stored, from registers", least(|| bare(start))),
        ("bare and compared, from registers", least(|| bare_compared(start))),
        ("stored, from registers", least(|| stored(start))),
        ("compared, from registers", least(|| compared(start))),
        ("stored, from memory", least(|| stored(*black_box(&start)))),
        ("compared, from memory", least(|| compared(*black_box(&start)))),
    ] {
        println!("{name}: {nanoseconds:.2} ns, {:.2} x", nanoseconds / plain);
    }
}
