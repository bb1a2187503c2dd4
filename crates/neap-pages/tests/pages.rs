//! Pages as a whole on virtual machines: handing out and taking back, every page size, scarce address space, budgets.

mod machine;

use machine::{Held, Opened, PAGE_SIZES, Random, give, seed, shape, take_block, take_run};
use neap_base::virtual_platform::{Call, Virtual};
use neap_base::{Order, Platform};
use neap_pages::{Drain, Exhausted};

fn machines() -> Vec<Virtual> {
    let usual = PAGE_SIZES.map(|size| Virtual::new(size, 3));
    let scarce = PAGE_SIZES.map(|size| Virtual::new(size, 3).with_scarce_address_space());
    usual.into_iter().chain(scarce).collect()
}

/// Random blocks and runs, half of them freed again, from several CPUs; contents and sums are right all the time.
#[test]
fn a_random_program_keeps_its_contents_on_every_machine() {
    let seed = seed();
    for machine in machines() {
        let o = Opened::new(&machine, &shape(None)).unwrap();
        let (mut random, mut held, mut now) = (Random(seed), Vec::<Held>::new(), 0);
        let most = (24 << 20) / machine.page_size() as u64;
        for step in 0..1500 {
            Virtual::run_on(random.below(3) as usize);
            match random.below(10) {
                0..4 => held.push(take_block(&o, random.below(4) as u8, step).unwrap()),
                4 => held.push(take_block(&o, 4 + random.below(6) as u8, step).unwrap()),
                5 => held.push(take_run(&o, 1 + random.below(most / 32) as u32, 1 << random.below(4), step).unwrap()),
                6 if !held.is_empty() => {
                    let index = random.below(held.len() as u64) as usize;
                    let new = 1 + random.below(20) as u32;
                    let old = held[index];
                    if old.order.is_none() && o.pages.resize_run(&machine, old.pfn, old.pages, new) {
                        Held { pages: old.pages.min(new), ..old }.check(&o.pages);
                        held[index] = Held::stamp(&o.pages, old.pfn, new, None, false, old.stamp);
                    }
                }
                _ if !held.is_empty() => give(&o, held.swap_remove(random.below(held.len() as u64) as usize)),
                _ => {}
            }
            while held.iter().map(|held| u64::from(held.pages)).sum::<u64>() > most {
                give(&o, held.swap_remove(random.below(held.len() as u64) as usize));
            }
            if step % 100 == 0 {
                now += 250_000_000;
                o.pages.tick(&machine, now);
                o.pages.verify().unwrap();
            }
        }
        held.into_iter().for_each(|held| give(&o, held));
        o.pages.release_all(&machine);
        o.pages.verify().unwrap();
        let statistics = o.pages.statistics();
        assert_eq!((statistics.used, statistics.backed_free, statistics.free), (0, 0, statistics.managed));
    }
}
