//! A walk over the chunks agrees with the statistics after any history, and names every list.

use crate::machine::{Held, end, give, open, shape, take, verify};
use neap_percpu::{Chunk, Layout, List, Owner, PerCpuData, Shape, Wait};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::Virtual;

/// A chunk and its maps.
struct Seen {
    chunk: Chunk,
    populated: Vec<u64>,
    taken: Vec<u64>,
}

fn walk(data: &PerCpuData) -> Vec<Seen> {
    let seen = |number| {
        let (mut populated, mut taken) = (Vec::new(), Vec::new());
        let chunk = data.chunk(number, |word| populated.push(word), |word| taken.push(word))?;
        assert_eq!(chunk.number, number);
        Some(Seen { chunk, populated, taken })
    };
    assert!(seen(data.chunk_numbers()).is_none() && seen(u32::MAX).is_none());
    (0..data.chunk_numbers()).filter_map(seen).collect()
}

fn bit(words: &[u64], at: usize) -> bool {
    words[at / 64] >> (at % 64) & 1 == 1
}

fn bits(words: &[u64]) -> usize {
    words.iter().map(|word| word.count_ones() as usize).sum()
}

/// Compares each chunk's numbers with a scan of its maps, and their sums with the statistics.
fn check(data: &PerCpuData) -> Vec<Chunk> {
    let (dimensions, statistics, walked) = (data.dimensions(), data.statistics(), walk(data));
    let sum = |of: &dyn Fn(&Chunk) -> usize| walked.iter().map(|seen| of(&seen.chunk)).sum::<usize>();
    let on = |list: List| sum(&|chunk| usize::from(chunk.list == list));
    let groups = dimensions.groups;
    for Seen { chunk, populated, taken } in &walked {
        assert_eq!((populated.len(), taken.len()), (dimensions.pages.div_ceil(64), dimensions.grains.div_ceil(64)));
        assert_eq!((bits(populated), bits(taken) * dimensions.grain), (chunk.populated, chunk.taken_bytes));
        let is_empty = |page: &usize| {
            let (start, end) = (page * dimensions.page, (page + 1) * dimensions.page);
            let touches = |grain: &usize| grain * dimensions.stripe < end && (grain + 1) * dimensions.stripe > start;
            bit(populated, *page) && !(0..dimensions.grains).filter(touches).any(|grain| bit(taken, grain))
        };
        assert_eq!((0..dimensions.pages).filter(is_empty).count(), chunk.empty);
        let run = |(longest, run): (usize, usize), grain| {
            let run = if bit(taken, grain) { 0 } else { run + 1 };
            (longest.max(run), run)
        };
        assert_eq!((0..dimensions.grains).fold((0, 0), run).0 * dimensions.grain, chunk.longest_bytes);
        let slot = usize::BITS - chunk.longest_bytes.leading_zeros();
        match chunk.list {
            List::Slot(0) => assert_eq!(chunk.longest_bytes, 0),
            List::Slot(number) => assert_eq!(number + 3, slot as usize, "{chunk:?}"),
            List::Free => assert_eq!((chunk.allocations, chunk.taken_bytes), (0, 0)),
            List::Sidelined | List::ToDepopulate => assert!(chunk.isolated),
        }
    }
    assert_eq!(sum(&|chunk| chunk.populated) * groups, statistics.populated);
    assert_eq!(sum(&|chunk| if chunk.isolated { 0 } else { chunk.empty }) * groups, statistics.empty);
    assert_eq!(sum(&|chunk| if chunk.isolated { chunk.empty } else { 0 }) * groups, statistics.isolated_empty);
    assert_eq!(sum(&|chunk| chunk.allocations), statistics.allocations);
    assert_eq!(sum(&|chunk| chunk.taken_bytes / dimensions.grain) * dimensions.stripe * groups, statistics.row_bytes);
    let lists = [on(List::Free), on(List::Sidelined), on(List::ToDepopulate)];
    let expected = [statistics.free_chunks, statistics.sidelined_chunks, statistics.depopulating_chunks];
    assert_eq!((walked.len(), lists), (statistics.chunks, expected));
    walked.iter().map(|seen| seen.chunk).collect()
}

#[test]
fn a_walk_agrees_with_the_statistics_through_a_life() {
    let mut random = Random(seed());
    for (layout, cpus, page) in [(Layout::Rows, 3, 4096), (Layout::CpuMajor, 2, 4096), (Layout::Rows, 7, 65536)] {
        let machine = Virtual::new(4096, cpus);
        let shape = Shape { unit: page.max(16384) * 4, ..shape(layout, cpus, page) };
        let data = open(&machine, &shape);
        assert!(check(&data).is_empty());
        let (mut held, mut seen): (Vec<Held>, [bool; 4]) = (Vec::new(), [false; 4]);
        for step in 0..3000 {
            // The instance grows, and then shrinks.
            let grows = random.below(10) < if step < 1500 { 7 } else { 2 };
            if grows {
                let owner = if random.below(2) == 0 { Owner::NONE } else { data.open_owner(&machine).unwrap() };
                let size = 1 + random.below(4000);
                held.push(take(&data, &machine, owner, (size, 8), Wait::Long, step).unwrap());
            } else if !held.is_empty() {
                give(&data, held.swap_remove(random.below(held.len())));
            }
            if step % 50 == 0 {
                for chunk in check(&data) {
                    seen[match chunk.list {
                        List::Slot(_) => 0,
                        List::Sidelined => 1,
                        List::Free => 2,
                        List::ToDepopulate => 3,
                    }] = true;
                }
            }
            if step % 200 == 125 {
                data.tick(&machine);
            }
        }
        assert_eq!(seen, [true; 4], "{layout:?}: a list that no chunk was ever on");
        verify(&data);
        end(&data, &machine, held);
    }
}
