//! A limit of the process's own manager that follows the container or, without one, the machine.

use neap::process::PROCESS;

const BLOCK: usize = 16 << 20;

/// Allocates untouched blocks until one is refused, or there are as many as `most`.
fn fill(most: usize) -> Vec<*mut u8> {
    (0..most).map(|_| PROCESS.allocate(BLOCK)).take_while(|block| !block.is_null()).collect()
}

/// Bytes of the machine.
fn machine() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    kib.unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn part_of_the_limit_bounds_the_heap_until_it_is_lifted() {
    neap::set("refuse", "on").unwrap();
    neap::set("limit", "1%").unwrap();
    let most = machine() / 100 / BLOCK;
    let mut blocks = fill(most + 2);
    assert!(blocks.len() <= most, "{} blocks of {most}", blocks.len());
    assert!(PROCESS.allocate(most * BLOCK + BLOCK).is_null());
    neap::set("limit", "none").unwrap();
    blocks.extend(fill(4));
    assert!(blocks.len() >= 4);
    // SAFETY: allocated above, and not used after this.
    blocks.into_iter().for_each(|block| unsafe { PROCESS.free(block) });
    PROCESS.verify(64).unwrap();
}
