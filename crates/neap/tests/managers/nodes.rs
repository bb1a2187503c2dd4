//! Several nodes, from the program's side: memory is near, wherever it was freed, and none is lost
//! between nodes.
//!
//! Method: virtual machines with CPUs on several nodes, and the real system with simulated nodes,
//! so that sequences, fences and fork take part. Random tests print their seed.

use crate::program::{OPTIONS, Opened, Program, Request, nothing_is_kept};
use neap::options::Options;
use neap_base::Linux;
use neap_base::platform::Platform;
use neap_testing::random::{Random, seed};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::{Call, Virtual};

/// Sizes of every kind of class, and of runs.
const SIZES: [usize; 8] = [16, 64, 300, 1000, 4096, 20_000, 100_000, 1 << 20];

/// Two CPUs on each of two nodes.
fn two_by_two() -> Shared<Virtual> {
    Shared::new(Virtual::new(4096, 4).with_nodes(&[0, 0, 1, 1]))
}

fn request(size: usize) -> Request {
    Request { size, align: 1, zeroed: false }
}

fn cached<P: Platform>(mm: &Opened<P>) -> u64 {
    mm.classes().iter().map(|class| class.in_slots + class.in_barn).sum()
}

#[test]
fn what_a_program_gets_is_of_the_nearest_node() {
    let machine = two_by_two();
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    let mut blocks = Vec::new();
    for round in 0..200 {
        for cpu in 0..4 {
            Virtual::run_on(cpu);
            let block = mm.allocate(SIZES[round % 8]);
            assert_eq!(mm.node_of(block), Some(cpu / 2), "{} bytes", SIZES[round % 8]);
            assert_eq!(machine.bound_to(block.addr()), Some(cpu / 2));
            blocks.push(block);
        }
    }
    assert_eq!(mm.node_of((&raw const blocks).cast()), None);
    mm.verify(0).unwrap();
    // SAFETY: allocated above.
    blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
    mm.release_all();
    nothing_is_kept(&mm);
}

#[test]
fn what_is_freed_on_another_node_goes_home_by_way_of_the_barn() {
    let machine = two_by_two();
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    for size in [16, 200, 4096, 20_000] {
        let count = (4 << 20) / size.max(200);
        for _ in 0..3 {
            Virtual::run_on(0);
            let near: Vec<*mut u8> = (0..count).map(|_| mm.allocate(size)).collect();
            assert!(near.iter().all(|&block| mm.node_of(block) == Some(0)));
            Virtual::run_on(3);
            // SAFETY: allocated above.
            near.into_iter().for_each(|block| unsafe { mm.free(block) });
            mm.verify(0).unwrap();
            let far: Vec<*mut u8> = (0..count).map(|_| mm.allocate(size)).collect();
            assert!(far.iter().all(|&block| mm.node_of(block) == Some(1)), "{size} bytes");
            // SAFETY: allocated above.
            far.into_iter().for_each(|block| unsafe { mm.free(block) });
        }
        assert!(cached(&mm) > 0, "{size} bytes");
        mm.verify(0).unwrap();
    }
    // None of it is used, and every node releases its own.
    (0..20).for_each(|now| _ = mm.tick(now));
    nothing_is_kept(&mm);
    assert_eq!([mm.node(0), mm.node(1)].map(|node| node.unwrap().used), [0, 0]);
    assert!(mm.node(2).is_none());
}

#[test]
fn a_sheaf_of_many_nodes_is_sorted() {
    let machine = Shared::new(Virtual::new(4096, 3).with_nodes(&[0, 1, 2]));
    let mm = Opened::new(machine.clone(), &OPTIONS).unwrap();
    let blocks: Vec<*mut u8> = (0..30_000)
        .map(|n| {
            Virtual::run_on(n % 3);
            mm.allocate(64)
        })
        .collect();
    // All remote objects of one CPU, and of every node in turn: `verify` looks into every barn.
    Virtual::run_on(1);
    for (n, block) in blocks.into_iter().enumerate() {
        // SAFETY: allocated above.
        unsafe { mm.free(block) };
        if n % 1000 == 0 {
            mm.verify(0).unwrap_or_else(|finding| panic!("after {n} frees: {finding}"));
        }
    }
    mm.release_all();
    nothing_is_kept(&mm);
}

#[test]
fn limit_is_shared_by_nodes_and_far_slabs_precede_failure() {
    let machine = two_by_two();
    let mm = Opened::new(machine, &Options { limit: 16 << 20, ..OPTIONS }).unwrap();
    for (one, other) in [(0, 2), (3, 1)] {
        Virtual::run_on(one);
        let mut near = Vec::new();
        while let block = mm.allocate(1000)
            && !block.is_null()
        {
            near.push(block);
        }
        assert!(near.len() > 15_000, "{} blocks of 1000 bytes", near.len());
        mm.verify(0).unwrap();
        // Every tenth, so that no slab is wholly free; only objects of the far node are left.
        let keep: Vec<bool> = (0..near.len()).map(|n| n % 10 != 0).collect();
        let (stay, go): (Vec<_>, Vec<_>) = near.into_iter().zip(keep).partition(|(_, keep)| *keep);
        // SAFETY: allocated above.
        go.iter().for_each(|(block, _)| unsafe { mm.free(*block) });
        Virtual::run_on(other);
        let far: Vec<*mut u8> = (0..go.len() / 2).map(|_| mm.allocate(1000)).collect();
        let nodes: Vec<usize> = far.iter().filter_map(|&block| mm.node_of(block)).collect();
        // The limit leaves less than a slab of the nearest.
        let nearest = nodes.iter().filter(|node| **node != one / 2).count();
        assert!(nearest < 32 && nodes.len() == go.len() / 2, "{nearest} of {}", nodes.len());
        mm.verify(0).unwrap();
        // SAFETY: allocated above.
        stay.iter().for_each(|(block, _)| unsafe { mm.free(*block) });
        // SAFETY: allocated above.
        far.into_iter().for_each(|block| unsafe { mm.free(block) });
        mm.release_all();
        nothing_is_kept(&mm);
        // Memory of one node is available to the other, in one piece.
        let run = mm.allocate(14 << 20);
        assert_eq!(mm.node_of(run), Some(other / 2));
        // SAFETY: allocated above.
        unsafe { mm.free(run) };
    }
}

/// Without huge pages, for which a run may be copied.
fn small_pages() -> Options {
    Options { huge: false, ..OPTIONS }
}

/// Moved page tables keep their memory, and the policy for more.
#[test]
fn run_grown_on_remote_node_is_copied_and_local_one_moved() {
    let machine = two_by_two();
    let mm = Opened::new(machine.clone(), &small_pages()).unwrap();
    let mut program = Program::new(&mm);
    // Allocates a run on CPU `from` and grows it on CPU `to`. Returns its node, and the number of
    // moves.
    let mut grow = |from: usize, to: usize, size: usize| {
        Virtual::run_on(from);
        let before: Vec<usize> = program.blocks.keys().copied().collect();
        assert!(program.allocate(request(size)) && program.allocate(request(size)), "one is in the way of the other");
        let new = program.blocks.keys().copied().filter(|start| before.binary_search(start).is_err()).min().unwrap();
        assert_eq!(mm.node_of(core::ptr::without_provenance(new)), Some(from / 2));
        let moves = machine.made(Call::MovePages);
        Virtual::run_on(to);
        assert!(program.reallocate(new, 4 * size));
        assert!(!program.blocks.contains_key(&new), "there was no room where it was");
        let block = program.blocks.keys().copied().find(|start| {
            before.binary_search(start).is_err() && mm.usable_size(core::ptr::without_provenance(*start)) == 4 * size
        });
        let node = mm.node_of(core::ptr::without_provenance(block.unwrap())).unwrap();
        assert_eq!(machine.bound_to(block.unwrap()), Some(node));
        (node, machine.made(Call::MovePages) - moves)
    };
    for size in [512 << 10, 3 << 20, 16 << 20] {
        assert_eq!([grow(0, 2, size), grow(3, 1, size)], [(1, 0), (0, 0)], "{size} bytes");
        assert_eq!([grow(0, 1, size), grow(3, 2, size)], [(0, 1), (1, 1)], "{size} bytes");
    }
    program.end();
}

/// Memory that is mapped in place of pages that a refused move unmapped is of the same node.
#[test]
fn a_refused_move_leaves_its_destination_mapped_and_bound() {
    let machine = two_by_two();
    machine.let_refused_moves_unmap();
    machine.fail(Call::MovePages, 0, usize::MAX);
    let mm = Opened::new(machine.clone(), &small_pages()).unwrap();
    let mut program = Program::new(&mm);
    let node_of = |start: usize| mm.node_of(core::ptr::without_provenance(start));
    for round in 0..8 {
        let cpu = round % 4;
        Virtual::run_on(cpu);
        (0..3).for_each(|_| assert!(program.allocate(request(1 << 20))));
        let near = program.blocks.keys().copied().find(|start| node_of(*start) == Some(cpu / 2)).unwrap();
        assert!(program.reallocate(near, (2 + round) << 20));
        program.verify();
    }
    assert!(machine.made(Call::MovePages) > 4, "{} moves were tried", machine.made(Call::MovePages));
    // The freed targets of moves are among these.
    (0..200).for_each(|_| assert!(program.allocate(request(1 << 20))));
    program.blocks.keys().for_each(|start| assert_eq!(machine.bound_to(*start), node_of(*start), "{start:#x}"));
    program.end();
}

#[test]
fn a_refused_binding_changes_nothing_but_a_number() {
    let machine = two_by_two();
    machine.fail(Call::Bind, 0, usize::MAX);
    let mm = Opened::new(machine, &OPTIONS).unwrap();
    let mut program = Program::new(&mm);
    for n in 0..2000 {
        Virtual::run_on(n % 4);
        assert!(program.allocate(request(SIZES[n % 8])));
    }
    assert!(mm.node(0).unwrap().unbound_segments > 0);
    program.end();
}

fn random_program<P: Platform>(machine: &Shared<P>, options: &Options, cpus: usize) {
    let mut random = Random(seed());
    let mm = Opened::new(machine.clone(), options).unwrap();
    let mut program = Program::new(&mm);
    for step in 0..400 {
        Virtual::run_on(random.below(cpus));
        let size = SIZES[random.below(8)];
        (0..random.below((2 << 20) / size.max(2000)) + 1).for_each(|_| _ = program.allocate(request(size)));
        Virtual::run_on(random.below(cpus));
        for _ in 0..random.below(program.blocks.len() + 1).min(1500) {
            let block = program.choose(random.next() as usize).unwrap();
            program.free(block);
        }
        if let Some(block) = program.choose(random.next() as usize) {
            program.reallocate(block, SIZES[random.below(8)]);
        }
        match random.below(20) {
            0..4 => _ = mm.tick(machine.now()),
            4 => _ = mm.release_all(),
            5 => program.verify(),
            _ => {}
        }
        if step % 100 == 99 {
            program.verify();
        }
    }
    program.end();
}

#[test]
fn random_programs_on_many_nodes() {
    for limit in [0, 24 << 20] {
        let machine = Virtual::new(4096, 6).with_nodes(&[0, 3, 1, 1, 2, 0]);
        random_program(&Shared::new(machine), &Options { limit, ..OPTIONS }, 6);
        let machine = Virtual::new(16384, 2).with_nodes(&[1, 0]).with_scarce_address_space();
        random_program(&Shared::new(machine), &Options { limit, ..OPTIONS }, 2);
    }
}

#[test]
fn random_programs_on_made_up_nodes_of_the_real_system() {
    for rseq in [true, false] {
        for nodes in [2, 3, 32] {
            let machine = Shared::new(Linux::probe().with_nodes(nodes));
            assert_eq!(machine.nodes(), nodes);
            random_program(&machine, &Options { rseq, ..OPTIONS }, 1);
        }
    }
}
