//! The last freed allocation is kept for an equal allocation. This is invisible: an inspection
//! finds it free, any allocation can use its room, and the worker learns of work at once.

use crate::machine::{Held, end, give, open, settle, shape, take, verify};
use neap_percpu::{Invalid, Layout, Owner, PerCpuData, Refused, Shape, Wait};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::Virtual;

const CPUS: usize = 2;

fn get(data: &PerCpuData, machine: &Virtual, owner: Owner, size: usize) -> Result<Held, Refused> {
    take(data, machine, owner, (size, 8), Wait::Long, 1)
}

#[test]
fn kept_rows_count_as_free_in_statistics_and_bitmap() {
    let machine = Virtual::new(4096, CPUS);
    let data = open(&machine, &shape(Layout::Rows, CPUS, 4096));
    let owner = data.open_owner(&machine).unwrap();
    let kept = get(&data, &machine, owner, 100).unwrap();
    settle(&data, &machine);
    let before = data.statistics();
    for _ in 0..10 {
        give(&data, get(&data, &machine, owner, 1000).unwrap());
    }
    let after = data.statistics();
    assert_eq!((after.rows, after.row_bytes, after.empty), (before.rows, before.row_bytes, before.empty));
    give(&data, get(&data, &machine, owner, 1000).unwrap());
    let mut taken = 0;
    data.chunk(0, |_| (), |word| taken += word.count_ones() as usize).unwrap();
    assert_eq!(taken * data.dimensions().stripe, before.row_bytes);
    give(&data, get(&data, &machine, owner, 1000).unwrap());
    verify(&data);
    end(&data, &machine, vec![kept]);
}

/// A smaller request gets a row of its own width, whatever is kept.
#[test]
fn what_is_kept_is_not_had_for_what_is_smaller() {
    let machine = Virtual::new(4096, CPUS);
    let data = open(&machine, &shape(Layout::Rows, CPUS, 4096));
    let owner = data.open_owner(&machine).unwrap();
    give(&data, get(&data, &machine, owner, 1000).unwrap());
    let small = get(&data, &machine, owner, 8).unwrap();
    assert_eq!(data.statistics().row_bytes, data.dimensions().stripe);
    end(&data, &machine, vec![small]);
}

/// Any allocation can use a kept allocation's room, even if it is the last free address space or
/// populated page.
#[test]
fn kept_chunks_delay_no_allocation() {
    let machine = Virtual::new(4096, CPUS);
    let data = open(&machine, &Shape { span: 64 << 10, ..shape(Layout::Rows, CPUS, 4096) });
    let [one, other] = [(); 2].map(|()| data.open_owner(&machine).unwrap());
    let all = core::iter::repeat_with(|| get(&data, &machine, one, 2048)).take(33);
    let mut held: Vec<Held> = all.take_while(Result::is_ok).map(Result::unwrap).collect();
    assert_eq!(held.len(), 32);
    give(&data, held.remove(7));
    held.push(take(&data, &machine, other, (2048, 8), Wait::Never, 2).unwrap());
    give(&data, held.remove(3));
    held.push(get(&data, &machine, other, 2048).unwrap());
    assert!(get(&data, &machine, one, 8).is_err());
    end(&data, &machine, held);
}

/// An owner ends alike with or without a kept allocation. Only that owner gets the kept allocation.
/// An allocation that was handed out again can be freed again, once.
#[test]
fn what_is_kept_was_freed() {
    let machine = Virtual::new(4096, CPUS);
    let data = open(&machine, &shape(Layout::Rows, CPUS, 4096));
    let owner = data.open_owner(&machine).unwrap();
    let others = [8, 8].map(|size| get(&data, &machine, owner, size).unwrap());
    let mut last = None;
    for size in [64, 64, 64, 16, 64, 64] {
        let held = get(&data, &machine, owner, size).unwrap();
        let handle = held.handle;
        assert!(last != Some((size, handle)) || data.statistics_at_once().allocations == 3);
        give(&data, held);
        for _ in 0..2 {
            // SAFETY: no code uses it any more.
            assert_eq!(unsafe { data.free(handle) }, Err(Invalid::NotAllocated));
        }
        last = Some((size, handle));
    }
    verify(&data);
    end(&data, &machine, others.into());
}

#[test]
fn an_owner_that_is_closed_takes_what_is_kept_along() {
    let machine = Virtual::new(4096, CPUS);
    let data = open(&machine, &shape(Layout::Rows, CPUS, 4096));
    for size in [8, 700, 2048] {
        let owner = data.open_owner(&machine).unwrap();
        give(&data, get(&data, &machine, owner, size).unwrap());
        // SAFETY: no code uses the owner's allocations any more.
        assert_eq!(unsafe { data.close_owner(owner) }, Ok(0));
        // An allocation that was handed out again.
        let owner = data.open_owner(&machine).unwrap();
        give(&data, get(&data, &machine, owner, size).unwrap());
        let handle = get(&data, &machine, owner, size).unwrap().handle;
        // SAFETY: no code uses the owner's allocations any more.
        assert_eq!(unsafe { data.close_owner(owner) }, Ok(size.next_multiple_of(8) * CPUS));
        // SAFETY: no code uses the owner's allocations any more.
        assert_eq!(unsafe { data.free(handle) }, Err(Invalid::NotAllocated));
        let next = data.open_owner(&machine).unwrap();
        let held = get(&data, &machine, next, size).unwrap();
        assert_eq!(data.statistics().rows, 1);
        give(&data, held);
    }
    end(&data, &machine, Vec::new());
}

/// The worker is requested after the same frees and has equal work, whether the instance is
/// inspected after each free or not.
#[test]
fn nothing_is_kept_where_its_end_is_work() {
    let mut random = Random(seed());
    let mut work = 0;
    for round in 0..60 {
        let machine = Virtual::new(4096, CPUS);
        let both = [(); 2].map(|()| open(&machine, &shape(Layout::Rows, CPUS, 4096)));
        let sizes: Vec<usize> = (0..80).map(|_| 1 << (3 + random.below(10))).collect();
        let mut held = both.each_ref().map(|data| {
            let held = |size: &usize| get(data, &machine, data.open_owner(&machine).unwrap(), *size).unwrap();
            sizes.iter().map(held).collect::<Vec<_>>()
        });
        both.iter().for_each(|data| settle(data, &machine));
        while !held[0].is_empty() {
            // Free from the end in even rounds, anywhere in odd ones.
            let which = if round % 2 == 0 { held[0].len() - 1 } else { random.below(held[0].len()) };
            both.iter().zip(&mut held).for_each(|(data, held)| give(data, held.swap_remove(which)));
            let hears = both[0].is_work_wanted();
            both[1].statistics();
            assert_eq!(hears, both[1].is_work_wanted(), "{} left", held[0].len());
            if hears || random.below(20) == 0 {
                let [done, expected] = both.each_ref().map(|data| data.tick(&machine));
                assert_eq!(done, expected);
                work += done.released;
            }
        }
        both.into_iter().for_each(|data| end(&data, &machine, Vec::new()));
    }
    assert!(work > 0);
}
