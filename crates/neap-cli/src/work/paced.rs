//! A steady load: one thread replaces blocks at a rate, and sleeps in between.
//!
//! Sizes are those of [`steady`](super::steady), as in a server that does little.

use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use super::Outcome;
use super::meter::{Meter, Random};
use super::steady::{Exchange, Live, window};

/// Most bytes that are live.
const LIVE: usize = 16 << 20;
/// Allocations between two sleeps.
const AT_ONCE: u64 = 1000;

#[derive(Args)]
pub(super) struct PacedOptions {
    /// Allocations a second
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    rate: u64,
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=100))]
    seconds: u64,
}

pub(super) fn run(options: &PacedOptions) -> Result<Outcome> {
    let (mut live, exchange) = (Live::new(LIVE, Random::new(1))?, Exchange::new());
    let count = options.rate * options.seconds;
    live.fill();
    let (meter, start) = (Meter::start(), Instant::now());
    for number in 0..count {
        if number % AT_ONCE == 0 {
            let due = start + Duration::from_nanos(number * 1_000_000_000 / options.rate);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        live.replace(window(number, count), &exchange);
    }
    let outcome = meter.stop().outcome(count);
    exchange.empty();
    Ok(outcome)
}
