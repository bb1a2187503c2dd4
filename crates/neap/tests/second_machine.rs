//! What only a larger machine can show: several nodes, an isolated CPU.
//!
//! Goal: neap sees the machine that the kernel describes, and works on every CPU of it. Method: the tests run on the
//! virtual machine of `cargo xtask vm`, whose shape they know; elsewhere they are ignored.

#[path = "../../neap-objects/tests/machine/mod.rs"]
mod machine;
mod program;

use core::mem::zeroed;
use neap_base::{Linux, Platform};
use neap_os::topology::Topology;
use program::{Opened, Program, Request, linux};

/// Puts this thread on a CPU.
fn run_on(cpu: usize) {
    // SAFETY: all zeroes is a valid set, which is this function's.
    unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        libc::CPU_SET(cpu, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set), 0, "CPU {cpu}");
    }
}

#[test]
#[ignore = "for the machine of `cargo xtask vm`"]
fn the_isolated_cpu_is_known() {
    let topology = Topology::read();
    assert_eq!((topology.possible.count(), topology.table_length()), (4, 4));
    let isolated: Vec<usize> = (0..4).filter(|&cpu| topology.isolated.contains(cpu)).collect();
    assert_eq!(isolated, [3]);
    let linux = Linux::probe();
    assert!(linux.is_isolated(3) && !linux.is_isolated(2));
    assert_eq!(linux.no_sequences(), None);
}

#[test]
#[ignore = "for the machine of `cargo xtask vm`"]
fn every_cpu_allocates_and_frees_the_isolated_one_too() {
    for rseq in [true, false] {
        let (linux, options) = linux(rseq);
        let opened = Opened::new(linux, &options).unwrap();
        let mut program = Program::new(&opened);
        for cpu in 0..4 {
            run_on(cpu);
            assert_eq!(Linux::probe().cpu(), cpu);
            for n in 0..2000 {
                assert!(program.allocate(Request { size: 16 + 7 * n, align: 16, zeroed: n % 3 == 0 }));
            }
            for n in 0..1500 {
                let block = program.choose(n * 1_000_003).unwrap();
                program.free(block);
            }
            program.verify();
        }
        program.end();
    }
}
