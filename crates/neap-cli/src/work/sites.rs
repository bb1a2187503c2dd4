//! Allocates memory in 50 functions, to which a profile must attribute it.
//!
//! The functions differ in code, so that the compiler keeps each. Every second function is called
//! in a thread of its own. The blocks have five sizes, and stay allocated until the end.

use anyhow::{Context, Result};
use clap::Args;

use super::Outcome;
use super::meter::{Meter, take};

#[derive(Args)]
pub(super) struct SitesOptions {
    /// Memory of all sites in MiB
    #[arg(long, default_value_t = 512)]
    mib: usize,
}

/// Sizes of blocks, by site in turn.
const SIZES: [usize; 5] = [48, 200, 1000, 10_000, 100_000];

/// Count of sites.
pub(crate) const SITES: usize = 50;

/// Returns the number and size of each site's blocks, for `bytes` in all. Sites hold one to three
/// parts.
pub(crate) fn shares(bytes: usize) -> [(usize, usize); SITES] {
    let parts = |site: usize| 1 + site % 3;
    let all: usize = (0..SITES).map(parts).sum();
    core::array::from_fn(|site| {
        let size = SIZES[site % SIZES.len()];
        (bytes / all * parts(site) / size, size)
    })
}

/// The start of the sites' names, before their numbers.
pub(crate) const NAME: &str = "site_of_";

macro_rules! sites {
    ($($name:ident: $number:literal),* $(,)?) => {
        $(
            #[inline(never)]
            fn $name(count: usize, size: usize) {
                (0..count).for_each(|_| _ = take(size));
                // Makes each function differ from the others.
                core::hint::black_box($number);
            }
        )*

        /// The sites, by number.
        const FUNCTIONS: [fn(usize, usize); SITES] = [$($name),*];
    };
}

sites! {
    site_of_0: 0, site_of_1: 1, site_of_2: 2, site_of_3: 3, site_of_4: 4, site_of_5: 5, site_of_6: 6, site_of_7: 7,
    site_of_8: 8, site_of_9: 9, site_of_10: 10, site_of_11: 11, site_of_12: 12, site_of_13: 13, site_of_14: 14,
    site_of_15: 15, site_of_16: 16, site_of_17: 17, site_of_18: 18, site_of_19: 19, site_of_20: 20, site_of_21: 21,
    site_of_22: 22, site_of_23: 23, site_of_24: 24, site_of_25: 25, site_of_26: 26, site_of_27: 27, site_of_28: 28,
    site_of_29: 29, site_of_30: 30, site_of_31: 31, site_of_32: 32, site_of_33: 33, site_of_34: 34, site_of_35: 35,
    site_of_36: 36, site_of_37: 37, site_of_38: 38, site_of_39: 39, site_of_40: 40, site_of_41: 41, site_of_42: 42,
    site_of_43: 43, site_of_44: 44, site_of_45: 45, site_of_46: 46, site_of_47: 47, site_of_48: 48, site_of_49: 49,
}

pub(super) fn run(options: &SitesOptions) -> Result<Outcome> {
    let (shares, meter) = (shares(options.mib << 20), Meter::start());
    for (site, (count, size)) in shares.into_iter().enumerate() {
        let allocate = FUNCTIONS[site];
        if site % 2 == 0 {
            allocate(count, size);
        } else {
            let joined = std::thread::spawn(move || allocate(count, size)).join();
            joined.ok().context("a thread of the workload has ended early")?;
        }
    }
    Ok(meter.stop().outcome(shares.iter().map(|(count, _)| *count as u64).sum()))
}
