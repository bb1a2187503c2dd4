//! `neap run`: becomes the given program with neap preloaded.
//!
//! Sits between the shell and the program: it sets two variables and executes, so process id, standard streams, signals
//! and exit status are the program's own. Exit statuses of its own failures are those of env(1). It takes no lock and
//! leaves nothing running.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use clap::Args;

use crate::library;

const EXAMPLES: &str = "\
Examples:
  neap run -- redis-server --port 7000
  neap run --neap rseq:off -- python3 -m http.server
  neap run --neap background:off,verbose:on -- ./a.out

LD_PRELOAD and NEAP keep what they already hold: the library goes in front, the options behind.
Exit status: the program's; 125 when neap's library is missing, 126 when the program cannot be
executed, 127 when it cannot be found.";

/// Run a program on neap's malloc.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// Options for the library, as in the variable NEAP
    #[arg(long, value_name = "KEY:VALUE,...")]
    neap: Option<OsString>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn main(options: &Options) -> ExitCode {
    let library = match library::executable().and_then(|executable| library::find(&executable)) {
        Ok(library) => library,
        Err(error) => {
            eprintln!("neap: {error:#}");
            return ExitCode::from(125);
        }
    };
    let program = &options.command[0];
    let mut command = Command::new(program);
    command.args(&options.command[1..]);
    command.env("LD_PRELOAD", joined(Some(library.as_os_str()), ":", env::var_os("LD_PRELOAD").as_deref()));
    if let Some(given) = &options.neap {
        command.env("NEAP", joined(env::var_os("NEAP").as_deref(), ",", Some(given)));
    }
    let error = command.exec();
    eprintln!("neap: cannot run `{}`: {error}", program.to_string_lossy());
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

/// Both texts with `separator` between them, or the one that is there.
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
