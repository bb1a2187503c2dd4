//! Small histories on a virtual machine, for Miri: every copy is written and read, every table
//! walked.

mod machine;

use machine::{Held, end, give, open, take, verify};
use neap_percpu::{Layout, Owner, Shape, Wait};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::Virtual;

#[test]
fn a_small_history_touches_nothing_but_its_own() {
    for layout in [Layout::Rows, Layout::CpuMajor] {
        let machine = Virtual::new(4096, 3);
        let shape = Shape { layout, unit: 32 << 10, span: 128 << 10, ..Shape::usual(3) };
        let data = open(&machine, &shape);
        let (mut random, mut held) = (Random(seed()), Vec::<Held>::new());
        let owners = [Owner::NONE, data.open_owner(&machine).unwrap(), data.open_owner(&machine).unwrap()];
        for stamp in 0..60 {
            let owner = owners[random.below(3)];
            let most = 1 << random.below(12);
            let request = (1 + random.below(most), 1 << random.below(8));
            let wait = [Wait::Never, Wait::Long][random.below(2)];
            held.extend(take(&data, &machine, owner, request, wait, stamp).ok());
            if random.below(5) < 3 && !held.is_empty() {
                give(&data, held.swap_remove(random.below(held.len())));
            }
            if stamp % 15 == 14 {
                data.tick(&machine);
                verify(&data);
            }
        }
        held.extract_if(.., |held| held.owner == owners[2]).for_each(|held| held.check(&data));
        // SAFETY: no code uses the owner's allocations any more.
        assert!(unsafe { data.close_owner(owners[2]) }.is_ok());
        end(&data, &machine, held);
        assert_eq!(machine.mapped_bytes(), 0);
    }
}
