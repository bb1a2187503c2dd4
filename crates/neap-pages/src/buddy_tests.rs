//! The buddy against models: every short sequence in tiny zones, random long ones in larger ones.
//!
//! A model has one entry per page: whether it is free, and whether it may hold data. It determines
//! exactly which blocks may be handed out, which requests must be refused and which pages are known
//! to be zero. So the tests compare for equality.

use crate::buddy::{Buddy, Memory, take_out};
use crate::isolate::{DetachedBlock, DetachedChunks};
use crate::units::CHUNK;
use neap_base::{Order, Pfn};
use proptest::prelude::*;
use std::boxed::Box;
use std::vec::Vec;

/// A buddy with its tables in memory of its own.
struct Tiny {
    memory: Box<[u64]>,
    pages: u32,
    buddy: Buddy,
}

impl Tiny {
    fn over(mut memory: Box<[u64]>, pages: u32) -> Tiny {
        let start = memory.as_mut_ptr().expose_provenance();
        let frames = pages as usize * 16;
        let words = |bits: u32| bits.div_ceil(64) as usize * 8;
        let (backed, chunks) = (words(pages), words(pages.div_ceil(CHUNK)));
        let maps = [0, 1, 2].map(|n| start + frames + backed + n * chunks);
        let buddy = Buddy::new(start, start + frames, maps);
        Tiny { memory, pages, buddy }
    }

    fn new(pages: u32) -> Tiny {
        let words = pages as usize * 2 + pages.div_ceil(64) as usize + 3 * pages.div_ceil(CHUNK).div_ceil(64) as usize;
        let mut tiny = Tiny::over(std::vec![0; words].into(), pages);
        // SAFETY: `over` has laid out zeroed tables for these pages in `memory`, which belongs to
        // this value.
        unsafe { tiny.buddy.add(Pfn(0), pages) };
        tiny
    }

    /// A copy of the state, with its tables in memory of its own.
    fn copy(&self) -> Tiny {
        let mut other = Tiny::over(std::vec![0; self.memory.len()].into(), self.pages);
        // SAFETY: `over` has laid out zeroed tables for these pages in `memory`, which belongs to
        // this value. Its state is overwritten at once.
        unsafe { other.buddy.add(Pfn(0), self.pages) };
        let (from, to) = (self.memory.as_ptr(), other.memory.as_mut_ptr());
        // SAFETY: two different allocations of the same length. Both buddies access theirs by
        // exposed addresses only.
        unsafe { to.copy_from_nonoverlapping(from, self.memory.len()) };
        let (from, to) = (&self.buddy, &mut other.buddy);
        to.chunk_hint = from.chunk_hint;
        (to.lists, to.filled) = (from.lists, from.filled);
        (to.managed, to.free) = (from.managed, from.free);
        (to.backed_free, to.backed_low, to.lazy) = (from.backed_free, from.backed_low, from.lazy);
        other
    }
}

/// The blocks in use, and a bit per page: free, and dirty. For up to 64 pages.
#[derive(Clone)]
struct Small {
    held: Vec<(Pfn, u32, Option<Order>)>,
    free: u64,
    dirty: u64,
}

fn mask(pfn: Pfn, pages: u32) -> u64 {
    (u64::MAX >> (64 - pages)) << pfn.0
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Block(u8),
    Run(u32),
    Free(usize),
    Resize(usize, u32),
    Release,
    Chain(u8, u32),
}

/// Runs one step on both and compares; `false` if the step does not apply.
fn small_step(tiny: &mut Tiny, model: &mut Small, step: Step) -> bool {
    let positions = |model: &Small, size: u32| {
        let all = (0..tiny.pages / size).map(move |n| mask(Pfn(n * size), size));
        let free = model.free;
        all.filter(move |block| free & block == *block).collect::<Vec<u64>>()
    };
    match step {
        Step::Block(order) => {
            let open = positions(model, 1 << order);
            let got = tiny.buddy.allocate_block(Order(order));
            assert_eq!(got.is_some(), !open.is_empty(), "order {order} among {:#b}", model.free);
            let Some(block) = got else { return true };
            let taken = mask(block.pfn, 1 << order);
            assert!(open.contains(&taken));
            assert_eq!(block.zero, taken & model.dirty == 0);
            assert!(!block.zero || open.iter().all(|open| open & model.dirty == 0), "a backed block was left");
            model.free &= !taken;
            model.held.push((block.pfn, 1 << order, Some(Order(order))));
        }
        Step::Run(pages) => {
            let open = positions(model, Order::holding(pages).pages());
            let got = tiny.buddy.allocate_run(pages, 1);
            // Smaller blocks side by side may hold the run, too.
            assert!(got.is_some() || open.is_empty());
            let Some(run) = got else { return true };
            let taken = mask(run.pfn, pages);
            assert_eq!(model.free & taken, taken);
            assert_eq!(run.zero, taken & model.dirty == 0);
            model.free &= !taken;
            model.held.push((run.pfn, pages, None));
        }
        Step::Free(index) if index < model.held.len() => {
            let (pfn, pages, order) = model.held.remove(index);
            match order {
                Some(order) => {
                    take_out(&tiny.buddy.frames, pfn, order);
                    tiny.buddy.give(pfn, order, Memory::All);
                }
                None => tiny.buddy.free_run(pfn, pages, Memory::All),
            }
            model.free |= mask(pfn, pages);
            model.dirty |= mask(pfn, pages);
        }
        Step::Resize(index, new) if model.held.get(index).is_some_and(|held| held.2.is_none() && held.1 != new) => {
            let (pfn, old, _) = model.held[index];
            let fits = pfn.0 + new <= tiny.pages
                && (new < old || {
                    let more = mask(pfn.plus(old), new - old);
                    model.free & more == more
                });
            assert_eq!(tiny.buddy.resize_run(pfn, old, new), fits);
            if fits {
                model.held[index].1 = new;
                let (before, after) = (mask(pfn, old), mask(pfn, new));
                model.free = (model.free | before) & !after;
                model.dirty |= before & !after;
            }
        }
        Step::Release => {
            let Some(DetachedBlock { pfn, order, backed }) = tiny.buddy.detach_block(u32::MAX, Order(0), &|_| false)
            else {
                assert_eq!(model.free & model.dirty, 0);
                return false;
            };
            let block = mask(pfn, order.pages());
            assert_eq!(model.free & block, block);
            assert_eq!(backed, (block & model.dirty).count_ones());
            tiny.buddy.attach(pfn, order.pages(), order.pages());
            model.dirty &= !block;
        }
        Step::Chain(order, blocks) => {
            let mut chain = tiny.buddy.take_chain(Order(order), blocks);
            let open = positions(model, 1 << order).len() as u32;
            assert_eq!(chain.blocks, blocks.min(open));
            while chain.blocks > 0 {
                tiny.buddy.give_chain(&mut chain, Order(order), 1);
            }
        }
        _ => return false,
    }
    let sums = tiny.buddy.verify(|_| true).unwrap_or_else(|finding| panic!("after {step:?}: {finding}"));
    assert_eq!(sums.free, model.free.count_ones());
    assert_eq!(sums.backed_free, (model.free & model.dirty).count_ones());
    true
}

fn explore(tiny: &Tiny, model: &Small, steps: &[Step], depth: u32, visited: &mut u64) {
    *visited += 1;
    if depth == 0 {
        return;
    }
    for &step in steps {
        // Frees the first, the middle or the last of equal blocks. The others are equivalent by
        // symmetry.
        let (mut tiny, mut model) = (tiny.copy(), model.clone());
        if small_step(&mut tiny, &mut model, step) {
            explore(&tiny, &model, steps, depth - 1, visited);
        }
    }
}

fn everything(pages: u32, steps: &[Step], depth: u32) -> u64 {
    let mut visited = 0;
    let model = Small { held: Vec::new(), free: mask(Pfn(0), pages), dirty: 0 };
    explore(&Tiny::new(pages), &model, steps, depth, &mut visited);
    visited
}

#[test]
fn every_sequence_of_blocks_in_sixteen_pages() {
    let steps: Vec<Step> = (0..=4).map(Step::Block).chain((0..5).map(Step::Free)).chain([Step::Release]).collect();
    let visited = everything(16, &steps, 7);
    assert!(visited > 100_000, "{visited} states");
}

#[test]
fn every_sequence_of_runs_in_thirty_two_pages() {
    let mut steps: Vec<Step> = [1, 3, 7, 12, 17].map(Step::Run).into();
    steps.extend((0..3).map(Step::Free));
    steps.extend([Step::Resize(0, 2), Step::Resize(0, 9), Step::Resize(1, 5), Step::Release]);
    let visited = everything(32, &steps, 6);
    assert!(visited > 50_000, "{visited} states");
}

#[test]
fn every_sequence_with_chains_in_a_zone_of_odd_size() {
    let steps = [
        Step::Block(0),
        Step::Block(1),
        Step::Block(3),
        Step::Free(0),
        Step::Free(1),
        Step::Chain(0, 5),
        Step::Chain(1, 3),
        Step::Release,
    ];
    let visited = everything(23, &steps, 6);
    assert!(visited > 10_000, "{visited} states");
}

/// For zones of several chunks: a model of one byte per page.
#[derive(Clone, Debug)]
enum Large {
    Block(u8),
    Run(u32, u8),
    Free(usize),
    Resize(usize, u32),
    Chunks(u32, u32, bool),
    Release(u32),
    Part(u32, u8),
    Chain(u8, u32),
}

fn large() -> impl Strategy<Value = Large> {
    let pages = || prop_oneof![1..40_u32, 500..530_u32, 1000..1050_u32, 1500..3000_u32];
    prop_oneof![
        4 => (0..=10_u8).prop_map(Large::Block),
        4 => (pages(), 0..=11_u8).prop_map(|(pages, align)| Large::Run(pages, align)),
        6 => any::<usize>().prop_map(Large::Free),
        4 => (any::<usize>(), pages()).prop_map(|(index, pages)| Large::Resize(index, pages)),
        1 => (1..6_u32, 1..5000_u32, any::<bool>()).prop_map(|(most, pages, fails)| Large::Chunks(most, pages, fails)),
        2 => (1..1024_u32).prop_map(Large::Release),
        1 => (1..1024_u32, 3..10_u8).prop_map(|(pages, least)| Large::Part(pages, least)),
        2 => (0..=3_u8, 1..100_u32).prop_map(|(order, blocks)| Large::Chain(order, blocks)),
    ]
}

struct Model {
    free: Vec<bool>,
    dirty: Vec<bool>,
    held: Vec<(Pfn, u32, Option<Order>)>,
}

impl Model {
    fn range(pfn: Pfn, pages: u32) -> core::ops::Range<usize> {
        pfn.index()..(pfn.0 + pages) as usize
    }

    fn is_free(&self, pfn: Pfn, pages: u32) -> bool {
        Self::range(pfn, pages).end <= self.free.len() && self.free[Self::range(pfn, pages)].iter().all(|free| *free)
    }

    fn dirty(&self, pfn: Pfn, pages: u32) -> u32 {
        self.dirty[Self::range(pfn, pages)].iter().filter(|dirty| **dirty).count() as u32
    }

    /// Whether there are `pages` free pages in a row at a multiple of `align`.
    fn has(&self, pages: u32, align: u32) -> bool {
        (0..self.free.len() as u32).step_by(align as usize).any(|at| self.is_free(Pfn(at), pages))
    }

    fn take(&mut self, pfn: Pfn, pages: u32, order: Option<Order>) {
        assert!(self.is_free(pfn, pages));
        self.free[Self::range(pfn, pages)].fill(false);
        self.held.push((pfn, pages, order));
    }

    fn give(&mut self, pfn: Pfn, pages: u32) {
        self.free[Self::range(pfn, pages)].fill(true);
        self.dirty[Self::range(pfn, pages)].fill(true);
    }
}

fn large_step(tiny: &mut Tiny, model: &mut Model, step: &Large) {
    let buddy = &mut tiny.buddy;
    match step {
        Large::Block(order) => {
            let got = buddy.allocate_block(Order(*order));
            assert_eq!(got.is_some(), model.has(1 << order, 1 << order));
            let Some(block) = got else { return };
            assert_eq!(block.zero, model.dirty(block.pfn, 1 << order) == 0);
            model.take(block.pfn, 1 << order, Some(Order(*order)));
        }
        Large::Run(pages, align) => {
            let align = 1 << align;
            let got = buddy.allocate_run(*pages, align);
            // A small run comes from an aligned block or from smaller ones side by side, a long one
            // from whole chunks.
            let whole = if (*pages).max(align) <= CHUNK {
                Order::holding((*pages).max(align)).pages()
            } else {
                pages.next_multiple_of(CHUNK)
            };
            let step = if whole <= CHUNK { whole.max(align) } else { align.max(CHUNK) };
            let (has, joins) = (model.has(whole, step), (*pages).max(align) <= CHUNK);
            assert!(got.is_some() == has || joins && got.is_some(), "{pages} pages at {align}");
            let Some(run) = got else { return };
            assert_eq!(run.pfn.0 % align, 0);
            assert_eq!(run.zero, model.dirty(run.pfn, *pages) == 0);
            model.take(run.pfn, *pages, None);
        }
        Large::Free(index) if !model.held.is_empty() => {
            let (pfn, pages, order) = model.held.swap_remove(index % model.held.len());
            match order {
                Some(order) => {
                    take_out(&buddy.frames, pfn, order);
                    buddy.give(pfn, order, Memory::All);
                }
                None => buddy.free_run(pfn, pages, Memory::All),
            }
            model.give(pfn, pages);
        }
        Large::Resize(index, new) if !model.held.is_empty() => {
            let index = index % model.held.len();
            let (pfn, old, None) = model.held[index] else { return };
            let fits = *new <= old || model.is_free(pfn.plus(old), new - old);
            assert_eq!(buddy.resize_run(pfn, old, *new), fits);
            if fits && *new < old {
                model.give(pfn.plus(*new), old - new);
            } else if fits {
                model.free[Model::range(pfn.plus(old), new - old)].fill(false);
            }
            model.held[index].1 = if fits { *new } else { old };
        }
        Large::Chunks(most, pages, fails) => {
            let mut below = u32::MAX;
            while let Some(DetachedChunks { first, count, backed }) = buddy.detach_chunks(below, *most, *pages) {
                let (pfn, all) = (Pfn(first * CHUNK), count * CHUNK);
                assert!(count <= *most && backed <= *pages && first + count <= below && model.is_free(pfn, all));
                assert_eq!(backed, model.dirty(pfn, all));
                let emptied = if *fails { all / 2 } else { all };
                buddy.attach(pfn, all, emptied);
                model.dirty[Model::range(pfn, emptied)].fill(false);
                below = first;
            }
            let chunks = (0..tiny.pages / CHUNK).map(|chunk| Pfn(chunk * CHUNK));
            let mut small = chunks.filter(|pfn| model.is_free(*pfn, CHUNK) && model.dirty(*pfn, CHUNK) <= *pages);
            assert!(*fails || small.all(|pfn| model.dirty(pfn, CHUNK) == 0), "a chunk was passed over");
        }
        Large::Release(pages) => {
            if let Some(DetachedBlock { pfn, order, backed }) = buddy.detach_block(*pages, Order(0), &|_| false) {
                assert!(backed <= *pages && backed == model.dirty(pfn, order.pages()));
                assert!(model.is_free(pfn, order.pages()));
                buddy.attach(pfn, order.pages(), order.pages());
                model.dirty[Model::range(pfn, order.pages())].fill(false);
            }
        }
        Large::Part(pages, least) => {
            if let Some(DetachedBlock { pfn, order, backed }) = buddy.detach_part(*pages, Order(*least)) {
                assert!(order >= Order(*least) && backed > 0 && backed <= *pages);
                assert!(backed == model.dirty(pfn, order.pages()) && model.is_free(pfn, order.pages()));
                buddy.attach(pfn, order.pages(), order.pages());
                model.dirty[Model::range(pfn, order.pages())].fill(false);
            }
        }
        Large::Chain(order, blocks) => {
            let mut chain = buddy.take_chain(Order(*order), *blocks);
            let most = (0..tiny.pages >> order).filter(|n| model.is_free(Pfn(n << order), 1 << order)).count();
            assert!(chain.blocks <= *blocks && (chain.blocks > 0) == (most > 0));
            let fresh = |n: u32| model.is_free(Pfn(n * 512), 512) && model.dirty(Pfn(n * 512), 512) == 0;
            let short = chain.blocks < (*blocks).min(most as u32);
            assert!(!short || (0..tiny.pages / 512).any(fresh), "a chain is short for no reason");
            while chain.blocks > 0 {
                buddy.give_chain(&mut chain, Order(*order), 7);
            }
        }
        _ => {}
    }
}

#[test]
fn chunks_that_are_kept_are_cut_up_last() {
    for keeps in [false, true] {
        let mut tiny = Tiny::new(3 * CHUNK);
        let rest = tiny.buddy.allocate_run(CHUNK - 1, 1).unwrap().pfn.plus(CHUNK - 1);
        let chunk = tiny.buddy.allocate_run(CHUNK, 1).unwrap().pfn;
        tiny.buddy.free_run(chunk, CHUNK, Memory::All);
        tiny.buddy.keeps_chunks = keeps;
        let mut page = || tiny.buddy.allocate_block(Order(0)).unwrap().pfn;
        assert_eq!((page() == rest, page().0 / CHUNK), (keeps, chunk.0 / CHUNK), "then one with memory");
    }
}

#[test]
fn small_blocks_take_fresh_chunks_up_to_half_of_those_kept() {
    let mut tiny = Tiny::new(9 * CHUNK);
    let kept = tiny.buddy.allocate_run(4 * CHUNK, 1).unwrap().pfn;
    tiny.buddy.free_run(kept, 4 * CHUNK, Memory::All);
    tiny.buddy.keeps_chunks = true;
    let mut taken = || tiny.buddy.allocate_block(Order(10)).unwrap().pfn.0 / CHUNK;
    let chunks = [(); 3].map(|()| taken());
    assert_eq!(chunks.map(|chunk| chunk < 4), [false, false, true]);
    tiny.buddy.verify(|_| true).unwrap();
}

#[test]
fn lazy_chunk_is_eager_again_once_it_was_used() {
    let mut tiny = Tiny::new(4 * CHUNK);
    let run = tiny.buddy.allocate_run(3 * CHUNK, 1).unwrap().pfn;
    tiny.buddy.free_run(run, 3 * CHUNK, Memory::All);
    let offer = |tiny: &mut Tiny| {
        let pfn = tiny.buddy.detach_eager_chunk()?;
        tiny.buddy.attach_lazy_chunk(pfn, true);
        tiny.buddy.verify(|_| true).unwrap();
        Some(pfn.0 / CHUNK)
    };
    assert_eq!([(); 4].map(|()| offer(&mut tiny)), [Some(2), Some(1), Some(0), None]);
    assert_eq!((tiny.buddy.lazy, tiny.buddy.backed_free), (3 * CHUNK, 3 * CHUNK), "it counts as resident");
    let page = tiny.buddy.allocate_block(Order(0)).unwrap();
    assert!(!page.zero && tiny.buddy.lazy == 2 * CHUNK, "it may hold anything");
    tiny.buddy.give(page.pfn, Order(0), Memory::All);
    assert_eq!((offer(&mut tiny), offer(&mut tiny), tiny.buddy.lazy), (Some(0), None, 3 * CHUNK));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(192) })]
    #[test]
    fn long_random_sequences_agree_with_a_model(steps in prop::collection::vec(large(), 1..120), chunks in 1..6_u32, odd in 0..1024_u32) {
        let pages = chunks * CHUNK + if odd % 3 == 0 { odd } else { 0 };
        let mut tiny = Tiny::new(pages);
        let mut model = Model { free: std::vec![true; pages as usize], dirty: std::vec![false; pages as usize], held: Vec::new() };
        for step in &steps {
            large_step(&mut tiny, &mut model, step);
            let sums = tiny.buddy.verify(|_| true).unwrap_or_else(|finding| panic!("after {step:?}: {finding}"));
            prop_assert_eq!(sums.free as usize, model.free.iter().filter(|free| **free).count());
            let backed = model.free.iter().zip(&model.dirty).filter(|(free, dirty)| **free && **dirty).count();
            prop_assert_eq!(sums.backed_free as usize, backed);
        }
        while !model.held.is_empty() {
            large_step(&mut tiny, &mut model, &Large::Free(0));
        }
        prop_assert_eq!(tiny.buddy.free, pages);
    }
}

/// Runs whose length is no power of two leave no gaps between them in memory that was used before.
#[test]
fn runs_lie_side_by_side_in_memory_that_was_used() {
    let mut tiny = Tiny::new(CHUNK);
    let all = tiny.buddy.allocate_run(CHUNK, 1).unwrap();
    tiny.buddy.free_run(all.pfn, CHUNK, Memory::All);
    let runs = core::iter::from_fn(|| tiny.buddy.allocate_run(49, 1)).count() as u32;
    assert_eq!(runs, CHUNK / 49, "{} pages are left", tiny.buddy.free);
}

/// A run is made of blocks too small for it before memory is taken from the system.
#[test]
fn a_run_joins_blocks_that_lie_side_by_side() {
    let mut tiny = Tiny::new(2 * CHUNK);
    let all = tiny.buddy.allocate_run(CHUNK, 1).unwrap();
    tiny.buddy.free_run(all.pfn, CHUNK, Memory::All);
    let single: Vec<Pfn> = (0..CHUNK).map(|_| tiny.buddy.allocate_block(Order(0)).unwrap().pfn).collect();
    // 48 pages around a border of 64: blocks of 32 and 16 pages.
    single.iter().filter(|pfn| (96..144).contains(&pfn.0)).for_each(|&pfn| {
        take_out(&tiny.buddy.frames, pfn, Order(0));
        tiny.buddy.give(pfn, Order(0), Memory::All);
    });
    let run = tiny.buddy.allocate_run(48, 1).unwrap();
    assert_eq!((run.pfn, run.zero), (Pfn(96), false));
}

/// Two chunks of blocks of so many pages. Every other block is free, and has no memory behind its
/// first `gap` pages; the others are in use. A third chunk is fresh.
fn with_gaps(pages: u32, gap: u32) -> Tiny {
    let mut tiny = Tiny::new(3 * CHUNK);
    let all = tiny.buddy.allocate_run(2 * CHUNK, 1).unwrap();
    let order = Order(pages.trailing_zeros() as u8);
    tiny.buddy.free_run(all.pfn, 2 * CHUNK, Memory::All);
    let held: Vec<Pfn> = (0..2 * CHUNK / pages).map(|_| tiny.buddy.allocate_block(order).unwrap().pfn).collect();
    for &pfn in held.iter().filter(|pfn| (pfn.0 / pages).is_multiple_of(2)) {
        take_out(&tiny.buddy.frames, pfn, order);
        tiny.buddy.backed.set(pfn, gap, false);
        tiny.buddy.backed.set(pfn.plus(gap), pages - gap, true);
        tiny.buddy.give(pfn, order, Memory::AsRecorded);
    }
    tiny.buddy.verify(|_| true).unwrap();
    tiny
}

/// Blocks with memory behind a part of them are cut where they have it, before any page of them
/// comes from the system.
#[test]
fn wholly_backed_blocks_are_cut_out_of_partly_backed_ones() {
    let mut tiny = with_gaps(64, 8);
    let backed = tiny.buddy.backed_free;
    let grown = |tiny: &Tiny, taken: u32| taken * 16 - (backed - tiny.buddy.backed_free);
    let mut taken = 0;
    while tiny.buddy.has_backed(Order(4)) {
        assert!(!tiny.buddy.allocate_block(Order(4)).unwrap().zero);
        taken += 1;
        assert_eq!(grown(&tiny, taken), 0, "after {taken} blocks");
    }
    assert_eq!(taken, CHUNK / 64 * 3, "three of the four parts of each block");
    assert!(tiny.buddy.allocate_backed_block(Order(4)).is_none(), "all others lack pages");
    assert!(!tiny.buddy.allocate_block(Order(4)).unwrap().zero, "but serve before fresh ones");
    assert_eq!(grown(&tiny, taken + 1), 8);
    tiny.buddy.verify(|_| true).unwrap();
}

/// A larger block with all of its memory is cut before a smaller one that lacks some.
#[test]
fn wholly_backed_blocks_come_first() {
    let mut tiny = with_gaps(16, 8);
    let run = tiny.buddy.allocate_run(CHUNK, 1).unwrap();
    tiny.buddy.free_run(run.pfn, CHUNK, Memory::All);
    let block = tiny.buddy.allocate_block(Order(4)).unwrap();
    assert_eq!(block.pfn.0 / CHUNK, run.pfn.0 / CHUNK);
    tiny.buddy.verify(|_| true).unwrap();
}
