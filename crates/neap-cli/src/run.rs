//! `neap run`: executes the given program with neap preloaded.
//!
//! This command sets `LD_PRELOAD` and `NEAP`, and executes the program in its own process. So
//! process id, standard streams, signals and exit status are the program's own. With `--profile`
//! the program is a child instead, and this command reads its samples until it ends. With `--trace`
//! this command also makes the file of the recording. The file names this process, which becomes
//! the program. If this command fails, its exit status is that of env(1).

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::Args;
use neap::{options, trace};
use neap_pressure::{Sensor, Subject, System};

use crate::profile::{self, ProfileFile};
use crate::{keys, library, linkage, signals};

/// Option in front of all others. It has the heap follow the container's limit. If a key occurs
/// twice, the last value counts.
const DEFAULT: &str = "limit:auto";

const EXAMPLES: &str = "\
Examples:
  neap run -- redis-server --port 7000
  neap run --limit none -- ./server
  neap run --limit 512M --high 90% --reserve 32M -- ./server
  neap run --neap rseq:off -- python3 -m http.server
  neap run --neap background:off,limit:2g -- ./a.out
  neap run --profile heap.html -- python3 big.py
  neap run --trace py.trace -- python3 big.py && neap lab replay py.trace

LD_PRELOAD and NEAP keep their values. The library goes in front of those in LD_PRELOAD, and the
options go behind those in NEAP. In front of all options stands limit:auto: the heap follows the
container's limit or, without a container, the machine's memory. --limit none switches that off.
--trace records the process that this command becomes, not its children. If that process executes
several programs, the recording is of the last one. It can be replayed at any time, also after the
program was killed.
--profile likewise samples one process, a child of this command. The bytes in the file are those at
the peak.
Exit status: the program's; 125 when neap's library is missing, an option is not known or the
program is statically linked, 126 when the program cannot be executed, 127 when it cannot be found.

Options for --neap and the variable NEAP:
";

/// Returns the examples, followed by all options.
fn after_help() -> String {
    format!("{EXAMPLES}{}", keys::listing())
}

/// Run a program on neap's malloc.
#[derive(Args)]
#[command(after_help = after_help())]
pub(crate) struct RunOptions {
    /// Options for the library, as in the variable NEAP
    #[arg(long, value_name = "KEY:VALUE,...")]
    neap: Option<OsString>,
    /// Memory limit of the heap: auto (follows the container; the default), a percentage of the
    /// container's limit, bytes, or none
    #[arg(long, value_name = "VALUE")]
    limit: Option<OsString>,
    /// Use of memory above which neap returns memory in the background: a percentage of the limit,
    /// or bytes
    #[arg(long, value_name = "VALUE")]
    high: Option<OsString>,
    /// Memory that stays free below the limit: a percentage of the limit, or bytes
    #[arg(long, value_name = "VALUE")]
    reserve: Option<OsString>,
    /// Record which pages are allocated and freed, when and on which CPU, into a file of 64 MiB;
    /// the recording ends when the file is full
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Profile the program from its start to its end, and write a file: pprof (.pb.gz, .pprof),
    /// folded stacks (.folded), a flame graph (.svg), a page (.html) or DHAT (.dhat.json)
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Bytes between two samples of the profile, on average
    #[arg(long, value_name = "BYTES", default_value = "512k", requires = "profile", value_parser = profile::parse_every)]
    every: String,
    /// Memory that the profile may take
    #[arg(long, value_name = "BYTES", default_value = "64m", requires = "profile", value_parser = profile::parse_memory)]
    memory: usize,
    /// Preload this library instead of the one that was installed with the command
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Print the preloaded library, the options and the memory limits to standard error
    #[arg(short, long)]
    verbose: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn main(options: &RunOptions) -> ExitCode {
    let program = &options.command[0];
    let every = options.profile.is_some().then_some(options.every.as_str());
    let mut command = match prepared(options, every) {
        Ok(command) => command,
        Err(error) => {
            eprintln!("neap: {error:#}");
            return ExitCode::from(125);
        }
    };
    let command = signals::pass_on(&mut command);
    let error = match &options.profile {
        None => command.exec(),
        Some(path) => match ProfileFile::choose(path).map(|file| profile::to_file(command, &file, options.memory)) {
            Ok(Ok(code)) => return code,
            Ok(Err(error)) => error,
            Err(error) => {
                eprintln!("neap: {error:#}");
                return ExitCode::from(125);
            }
        },
    };
    eprintln!("neap: cannot run `{}`: {error}", program.to_string_lossy());
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

/// Returns the command for a program that is run under neap and samples its allocations.
pub(crate) fn sampled(command: &[OsString], library: Option<&Path>, every: &str) -> Result<Command> {
    let options = RunOptions {
        neap: None,
        limit: None,
        high: None,
        reserve: None,
        trace: None,
        profile: None,
        every: every.to_string(),
        memory: 0,
        library: library.map(Path::to_path_buf),
        verbose: false,
        command: command.to_vec(),
    };
    let mut command = prepared(&options, Some(every))?;
    signals::pass_on(&mut command);
    Ok(command)
}

/// Returns the command with `LD_PRELOAD` and `NEAP` set. The program samples its allocations if
/// `every` is given.
fn prepared(options: &RunOptions, every: Option<&str>) -> Result<Command> {
    let library = match &options.library {
        Some(file) => library::named(file)?,
        None => library::find(&library::executable()?)?,
    };
    let program = &options.command[0];
    let mut told = joined(Some(OsStr::new(DEFAULT)), ",", env::var_os("NEAP").as_deref());
    told = joined(Some(&told), ",", options.neap.as_deref());
    for (key, value) in [("limit", &options.limit), ("high", &options.high), ("reserve", &options.reserve)] {
        if let Some(value) = value {
            let option = joined(Some(OsStr::new(key)), ":", Some(value));
            told = joined(Some(&told), ",", Some(&option));
        }
    }
    if let Some(every) = every {
        let option = joined(Some(OsStr::new(profile::KEY)), ":", Some(OsStr::new(every)));
        told = joined(Some(&told), ",", Some(&option));
    }
    let complaints = keys::complaints(&told);
    if !complaints.is_empty() {
        bail!("NEAP: {}; `neap options` lists keys and values", complaints.join(", "));
    }
    if let Some(file) = linkage::static_file(program) {
        let (program, file) = (program.to_string_lossy(), file.display());
        bail!(
            "cannot run `{program}`: {file} is statically linked, so nothing can be preloaded; link it dynamically, or with libneap_malloc.a"
        );
    }
    if let Some(file) = &options.trace {
        let option = recording(file).with_context(|| format!("--trace {}", file.display()))?;
        told = joined(Some(&told), ",", Some(&option));
    }
    let mut command = Command::new(program);
    command.args(&options.command[1..]);
    command.env("LD_PRELOAD", joined(Some(library.as_os_str()), ":", env::var_os("LD_PRELOAD").as_deref()));
    if options.verbose {
        let mut limits = String::new();
        Sensor::new(Subject::Own).survey(&System::new()).explain(&mut limits)?;
        eprint!("neap: preloads {}\nneap: NEAP={}\n{limits}", library.display(), told.to_string_lossy());
    }
    command.env("NEAP", told);
    Ok(command)
}

/// Makes the file for the recording of this process. Returns the option that names it.
fn recording(file: &Path) -> Result<OsString> {
    let path = std::path::absolute(file)?;
    let text = path.as_os_str().as_bytes();
    if options::Path::absolute(text).is_none() || text.contains(&b',') || text.ends_with(b" ") {
        bail!("the absolute path may have at most {} bytes, no comma, and no space at its end", options::LONGEST_PATH);
    }
    if path.is_file() {
        // Another process may still have the file mapped, so this command does not truncate it.
        fs::remove_file(&path).context("the file cannot be replaced")?;
    }
    let made = fs::OpenOptions::new().write(true).create_new(true).open(&path);
    made.and_then(|mut made| made.write_all(&trace::claim(process::id()))).context("the file cannot be made")?;
    Ok(joined(Some(OsStr::new("trace")), ":", Some(path.as_os_str())))
}

/// Joins both texts with `separator` between them. Returns one text if the other is absent or
/// empty.
fn joined(first: Option<&OsStr>, separator: &str, second: Option<&OsStr>) -> OsString {
    let mut text = OsString::new();
    for part in [first, second].into_iter().flatten().filter(|part| !part.is_empty()) {
        if !text.is_empty() {
            text.push(separator);
        }
        text.push(part);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_variable_holds_is_kept() {
        let join = |a: Option<&str>, b: Option<&str>| joined(a.map(OsStr::new), ":", b.map(OsStr::new));
        assert_eq!(join(Some("a.so"), Some("b.so")), "a.so:b.so");
        assert_eq!(join(Some("a.so"), None), "a.so");
        assert_eq!(join(Some("a.so"), Some("")), "a.so");
        assert_eq!(join(None, Some("b.so")), "b.so");
    }
}
