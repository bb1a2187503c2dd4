//! Page-sized blocks up and down: much memory is allocated in pages, touched and freed, several
//! times. One pinned thread; it takes no lock.

use anyhow::Result;
use clap::Args;

use super::Outcome;
use super::meter::{BlockTable, Meter, give, pin, take};

#[derive(Args)]
pub(super) struct PageOptions {
    /// Block size in bytes
    #[arg(long, default_value_t = 4096)]
    size: usize,
    /// Live memory at the peak of a round, in MiB
    #[arg(long, default_value_t = 128)]
    mib: usize,
    /// Rounds; each allocates all blocks, then frees them
    #[arg(long, default_value_t = 10)]
    repeats: usize,
}

pub(super) fn run(options: &PageOptions) -> Result<Outcome> {
    pin()?;
    let mut table = BlockTable::new((options.mib << 20) / options.size.max(1))?;
    let meter = Meter::start();
    for _ in 0..options.repeats {
        for entry in table.iter_mut() {
            *entry = take(options.size);
        }
        for &entry in table.iter() {
            // SAFETY: each entry came from `take` above, is freed once, and is not used again.
            unsafe { give(entry) };
        }
    }
    Ok(meter.stop().outcome((options.repeats * table.len()) as u64))
}
