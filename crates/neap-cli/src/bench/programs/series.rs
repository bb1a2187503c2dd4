//! redis-series: fills a redis with about 250 MB of values of one size, flushes it, and goes on
//! with the next size.
//!
//! The peak shows how much memory of one size serves the next. The database is populated by a
//! command of redis's own tests (`DEBUG POPULATE`), which redis 7 and later allow only with an
//! option.

use anyhow::{Context, Result};

use super::redis::{Reply, Server};
use super::scratch::Scratch;
use super::{Method, Program, tool};
use crate::variant::Variant;
use crate::work::Outcome;

/// Bytes of a value.
pub(super) const VALUES: [usize; 6] = [64, 200, 1000, 4000, 300, 8000];
/// Bytes of a database.
const DATABASE: usize = 250_000_000;
/// Bytes of redis's overhead for a value: its key, its object and its part of the table.
pub(super) const BESIDE: usize = 90;

pub(super) const NAME: &str = "redis-series";

pub(super) fn program() -> Program {
    Program { name: NAME, needs: &["redis-server"], prepare: |_| Ok(()), run: Method::Own(run) }
}

fn run(scratch: &Scratch, variant: &Variant) -> Result<Outcome> {
    let said = tool(scratch, "redis-server")?.arg("--version").output().context("cannot run redis-server")?;
    let version = String::from_utf8_lossy(&said.stdout).into_owned();
    let mut server = Server::start(scratch, variant, allow_debug(&version), None)?;
    for value in VALUES {
        let keys = (scratch.amount(DATABASE) / (value + BESIDE)).to_string();
        let populate = ["DEBUG", "POPULATE", &keys, "key", &value.to_string()].map(str::to_string).to_vec();
        server.client.pipelined(1, |_| populate.clone(), Reply::Line)?;
        server.client.pipelined(1, |_| vec!["FLUSHALL".to_string()], Reply::Line)?;
    }
    server.stop()
}

/// Returns the options that allow `DEBUG`, from the output of `redis-server --version`. Before
/// redis 7, `DEBUG` needs no option, and redis does not know the option.
pub(super) fn allow_debug(version: &str) -> &'static [&'static str] {
    let major = version.split_once(" v=").and_then(|(_, rest)| rest.split('.').next()?.parse::<u32>().ok());
    if major.is_some_and(|major| major < 7) { &[] } else { &["--enable-debug-command", "yes"] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_is_asked_for_from_redis_7_on() {
        assert!(allow_debug("Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64").is_empty());
        assert_eq!(allow_debug("Redis server v=7.0.15 sha=00000000:0 bits=64")[0], "--enable-debug-command");
        assert_eq!(allow_debug("Redis server v=10.1.0").len(), 2);
    }
}
