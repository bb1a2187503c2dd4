//! Tests for a larger machine: several nodes, an isolated CPU.
//!
//! Goal: neap sees the machine that the kernel describes, and works on every CPU of it. Method: the
//! tests run on the virtual machine of `cargo xtask vm`, whose shape they know; elsewhere they are
//! ignored.

use crate::program::{OPTIONS, Opened, Program, Request, linux, nothing_is_kept};
use core::mem::zeroed;
use neap::options::Options;
use neap_base::{Linux, Platform};
use neap_os::topology::Topology;
use neap_testing::shared::Shared;

/// Sizes of every kind of class, and of runs.
const SIZES: [usize; 7] = [16, 64, 300, 4096, 20_000, 100_000, 3 << 20];

/// Puts this thread on a CPU.
fn run_on(cpu: usize) {
    // SAFETY: all zeroes is a valid set, which is this function's.
    unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        libc::CPU_SET(cpu, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set), 0, "CPU {cpu}");
    }
}

/// The kernel's id of the node whose memory is behind an address.
fn node_behind(address: *mut u8) -> i32 {
    let (page, mut node) = (address.map_addr(|address| address & !4095), -1_i32);
    let none = core::ptr::null::<i32>();
    // SAFETY: without nodes to move to, the kernel only looks where the page is, and writes one
    // number.
    let answer = unsafe { libc::syscall(libc::SYS_move_pages, 0, 1_usize, &raw const page, none, &raw mut node, 0) };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    node
}

/// Writes to every page.
fn touch(block: *mut u8, size: usize) {
    // SAFETY: the block is the caller's and has that many bytes.
    (0..size).step_by(4096).chain([size - 1]).for_each(|at| unsafe { block.add(at).write(1) });
}

/// Allocates blocks of every size on each CPU in turn, several times, and frees them on another.
/// Checks that the kernel has each on the node that `nodes` has for the CPU.
fn everybody_gets_what_is_near(nodes: [i32; 4]) {
    for rseq in [true, false] {
        let (linux, options) = linux(rseq);
        let mm = Opened::new(linux, &options).unwrap();
        let (mut right, mut all) = (0, 0);
        for round in 0..12 {
            for (cpu, node) in nodes.into_iter().enumerate() {
                run_on(cpu);
                let mut blocks = Vec::new();
                for size in SIZES {
                    for _ in 0..(1 << 18) / size.max(4096) + 1 {
                        let block = mm.allocate(size);
                        touch(block, size);
                        for at in (0..size).step_by(1 << 18) {
                            right += usize::from(node_behind(block.wrapping_add(at)) == node);
                            all += 1;
                        }
                        blocks.push(block);
                    }
                }
                run_on((cpu + 1 + round) % 4);
                // SAFETY: allocated above.
                blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
            }
            mm.verify(0).unwrap();
        }
        assert_eq!((right, all > 10_000), (all, true), "rseq: {rseq}");
        let misses: u64 = (0..2).map(|node| mm.node(node).unwrap().node_misses).sum();
        assert_eq!((misses, mm.node(0).unwrap().unbound_segments), (0, 0));
        mm.release_all();
        nothing_is_kept(&mm);
    }
}

/// Takes a CPU online or offline.
fn switch(cpu: usize, online: bool) {
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    std::fs::write(&file, if online { "1" } else { "0" }).unwrap_or_else(|error| panic!("{file}: {error}"));
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
    let command_line = std::fs::read_to_string("/proc/cmdline").unwrap();
    assert!(command_line.contains("isolcpus=3"), "{command_line}");
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

#[test]
#[ignore = "for the machine of `cargo xtask vm`"]
fn memory_is_on_the_node_of_the_cpu_that_asks() {
    let linux = Linux::probe();
    let distances: Vec<u8> = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(from, to)| linux.distance(from, to)).into();
    assert_eq!((linux.nodes(), distances), (2, vec![10, 20, 20, 10]));
    everybody_gets_what_is_near([0, 0, 1, 1]);
}

#[test]
#[ignore = "for the machine of `cargo xtask vm`"]
fn block_touched_first_remotely_is_on_its_allocation_node() {
    let (linux, options) = linux(true);
    let mm = Opened::new(linux, &Options { huge: false, ..options }).unwrap();
    for (asks, touches) in [(0, 2), (3, 1)] {
        run_on(asks);
        let block = mm.allocate(8 << 20);
        run_on(touches);
        touch(block, 8 << 20);
        let nodes: Vec<i32> = (0..8).map(|n| node_behind(block.wrapping_add(n << 20))).collect();
        assert_eq!(nodes, [asks as i32 / 2; 8]);
        // SAFETY: allocated above.
        unsafe { mm.free(block) };
    }
    mm.release_all();
    nothing_is_kept(&mm);
}

#[test]
#[ignore = "for the machine of `cargo xtask vm`"]
fn a_memoryless_node_has_the_nearest_one_with_memory() {
    let linux = Linux::probe();
    assert_eq!((linux.nodes(), linux.distance(0, 1), linux.distance(1, 0)), (2, 40, 40));
    everybody_gets_what_is_near([0, 2, 2, 2]);
}

#[test]
#[ignore = "for the machine of `cargo xtask vm`"]
fn a_full_node_is_no_reason_to_be_killed() {
    const BLOCK: usize = 32 << 20;
    let (linux, options) = linux(true);
    let mm = Opened::new(linux, &options).unwrap();
    run_on(0);
    let mut blocks = Vec::new();
    // A node has 1.5 GiB.
    while blocks.len() < 50 && blocks.last().is_none_or(|&block: &*mut u8| node_behind(block) == 0) {
        let block = mm.allocate(BLOCK);
        touch(block, BLOCK);
        blocks.push(block);
    }
    assert!(
        blocks.len() > 10 && node_behind(blocks[0]) == 0 && node_behind(blocks[blocks.len() - 1]) == 1,
        "{blocks:?}"
    );
    // SAFETY: allocated above.
    blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
    mm.release_all();
    nothing_is_kept(&mm);
}

#[test]
#[ignore = "for the machine of `cargo xtask vm`"]
fn a_policy_of_the_users_is_kept() {
    // SAFETY: changes this thread's policy only, to MPOL_BIND to node 1 or back to MPOL_DEFAULT;
    // the kernel reads one word of nodes.
    let set =
        |mode: i32, nodes: u64| unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, &raw const nodes, 65_usize) };
    run_on(0);
    assert_eq!(set(2, 1 << 1), 0);
    assert_eq!(Linux::probe().nodes(), 1);
    let mm = Opened::new(Shared::new(Linux::probe()), &Options { huge: false, ..OPTIONS }).unwrap();
    let block = mm.allocate(1 << 20);
    touch(block, 1 << 20);
    assert_eq!(node_behind(block), 1, "the user wants it there");
    // SAFETY: allocated above.
    unsafe { mm.free(block) };
    assert_eq!(set(0, 0), 0);
    assert_eq!(Linux::probe().nodes(), 2);
}

#[test]
#[ignore = "for the machine of `cargo xtask vm`"]
fn hotplugged_cpu_uses_its_node_and_is_emptied_when_offline() {
    for rseq in [true, false] {
        switch(2, false);
        let (linux, options) = linux(rseq);
        let mm = Opened::new(linux, &options).unwrap();
        for _ in 0..3 {
            run_on(0);
            let mut program = Program::new(&mm);
            assert!(program.allocate(Request { size: 100, align: 1, zeroed: false }));
            switch(2, true);
            run_on(2);
            for n in 0..3000 {
                let block = mm.allocate(SIZES[n % 5]);
                touch(block, SIZES[n % 5]);
                assert_eq!(node_behind(block), 1);
                // SAFETY: just allocated.
                unsafe { mm.free(block) };
            }
            let in_stacks = || mm.classes().iter().map(|class| class.in_slots).sum::<u64>();
            assert!(in_stacks() > 0);
            run_on(0);
            switch(2, false);
            // Its stacks are drained although no thread runs there.
            (0..20).for_each(|now| _ = mm.tick(now));
            program.end();
            assert_eq!(in_stacks(), 0);
        }
        switch(2, true);
    }
}
