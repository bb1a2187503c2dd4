//! The `neap` command. This file has only the arguments; each command has its own file.
//!
//! This process does not allocate through neap. Only programs into which the library is preloaded
//! do.

#![allow(
    clippy::std_instead_of_core,
    reason = "an ordinary program on std; only the crates inside the allocator avoid it"
)]

mod bench;
mod chunks;
mod colours;
mod demo;
mod drain;
#[cfg(all(test, fuzzing))]
mod fuzz_engine;
#[cfg(test)]
mod fuzz_targets;
mod generate;
mod groups;
mod keys;
mod lab;
mod library;
mod linkage;
mod look;
mod machine;
mod metrics;
mod pressure;
mod process;
mod profile;
mod ps;
mod reconcile;
mod report;
mod run;
mod set;
mod shrinkers;
mod signals;
mod stat;
mod statistics;
mod top;
mod variant;
mod work;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

const EXAMPLES: &str = "\
Examples:
  neap run -- python3 server.py        run a program on neap's malloc
  neap options                         list the options of its library
  neap ps                              list all processes under neap
  neap stat 1234                       see what a process under neap has in use and in caches
  neap stat 1234 --groups              see which of its memory groups holds what
  neap group 1234 tenant/acme max=1g   limit one of its memory groups to 1 GiB
  neap set 1234 limit=2g               change an option of the running process
  neap shrink 1234 pages 100           have one of its caches free objects
  neap top 1234                        watch a process live; drain its caches by a key
  neap metrics --all --listen 127.0.0.1:9808
                                       serve the numbers of all processes to Prometheus
  neap profile 1234                    see which code holds what memory
  neap leaks 1234                      see what memory it does not free
  neap drain 1234                      return its per-CPU caches to its free pages
  neap pressure 1234                   see which memory limit binds a process, and the room below it
  neap demo                            see a burst of memory flow back to the system
  neap bench pair                      compare the cost of malloc and free with other allocators
  neap bench idle --json > idle.json   compare the memory kept after a burst, as one JSON object
  neap lab compare --quick             run the page lists' policies on simulated machines

`neap COMMAND --help` has more examples for each command.";

/// Memory that flows back: runs programs on neap's malloc, shows what it does and measures it.
#[derive(Parser)]
#[command(name = "neap", version, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::RunOptions),
    Options(keys::KeysOptions),
    Ps(ps::PsOptions),
    Stat(stat::StatOptions),
    Top(top::Options),
    Metrics(metrics::MetricsOptions),
    Profile(profile::ProfileOptions),
    Leaks(profile::LeaksOptions),
    Drain(drain::DrainOptions),
    Set(set::SetOptions),
    Limit(set::LimitOptions),
    Pressure(pressure::PressureOptions),
    Group(groups::BoundOptions),
    Shrink(shrinkers::ShrinkersOptions),
    Demo(demo::DemoOptions),
    Bench(bench::Options),
    Lab(lab::LabOptions),
    #[command(hide = true)]
    Lines(profile::LinesOptions),
    #[command(hide = true)]
    Work(work::WorkOptions),
    #[command(hide = true)]
    Generate(generate::GenerateOptions),
}

fn main() -> ExitCode {
    signals::end_by_a_closed_pipe();
    let outcome = match Arguments::parse().command {
        Command::Run(options) => return run::main(&options),
        Command::Options(options) => keys::main(&options),
        Command::Ps(options) => ps::main(&options),
        Command::Stat(options) => stat::main(&options),
        Command::Top(options) => top::main(&options),
        Command::Metrics(options) => metrics::main(&options),
        Command::Profile(options) => profile::main(&options),
        Command::Leaks(options) => profile::leaks(&options),
        Command::Drain(options) => drain::main(&options),
        Command::Set(options) => set::main(&options),
        Command::Limit(options) => set::limit_main(&options),
        Command::Pressure(options) => pressure::main(&options),
        Command::Group(options) => groups::change_bound(&options),
        Command::Shrink(options) => shrinkers::shrink(&options),
        Command::Demo(options) => demo::main(&options),
        Command::Bench(options) => bench::main(&options),
        Command::Lab(options) => lab::main(&options),
        Command::Lines(options) => profile::lines(&options),
        Command::Work(options) => work::main(&options),
        Command::Generate(options) => generate::main(&options, &Arguments::command()),
    };
    outcome.unwrap_or_else(|error| {
        // The error may quote text of another process, or a path.
        let lines: Vec<String> =
            format!("{error:#}").lines().map(|line| look::foreign::escaped(line.as_bytes())).collect();
        eprintln!("neap: {}", lines.join("\n"));
        ExitCode::FAILURE
    })
}
