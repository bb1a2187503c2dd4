//! The processor and the C library that tests are built for: this machine's, arm64 by a cross
//! compiler, or musl on this machine's processor.
//!
//! Programs for arm64 run under QEMU: as single processes here, or in a virtual machine. Those for
//! musl run as they are; Debian's `musl-gcc` has no C++.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::build::{STUB, stub_of};
use crate::process::{cargo, command, command_quiet, which};
use crate::{Skipped, layout};

/// A processor, with the compilers and libraries for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// This machine's.
    Native,
    /// `aarch64-unknown-linux-gnu`.
    Arm64,
    /// `x86_64-unknown-linux-musl`.
    Musl,
}

/// Rust's name of arm64.
pub(crate) const ARM64: &str = "aarch64-unknown-linux-gnu";

/// Rust's name of musl on x86-64.
pub(crate) const MUSL: &str = "x86_64-unknown-linux-musl";

/// The folder of Debian's cross compiler with the C library.
const ROOT: &str = "/usr/aarch64-linux-gnu";

/// Emulator of single programs.
const EMULATOR: &str = "qemu-aarch64";

impl Target {
    /// Takes `--target NAME` from the start of arguments.
    pub(crate) fn parse(arguments: &[String]) -> Result<(Target, &[String])> {
        match arguments {
            [option, name, rest @ ..] if option == "--target" && name == ARM64 => Ok((Target::Arm64, rest)),
            [option, name, rest @ ..] if option == "--target" && name == MUSL => Ok((Target::Musl, rest)),
            [option, ..] if option == "--target" => bail!("--target needs the name {ARM64} or {MUSL}"),
            rest => Ok((Target::Native, rest)),
        }
    }

    /// Rust's name; `None` for this machine's.
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            Target::Native => None,
            Target::Arm64 => Some(ARM64),
            Target::Musl => Some(MUSL),
        }
    }

    /// Whether this machine runs its programs.
    pub(crate) fn is_of_this_processor(self) -> bool {
        self != Target::Arm64
    }

    /// A program of the GNU toolchain.
    pub(crate) fn tool(self, name: &str) -> String {
        match self {
            Target::Musl if name == "gcc" => "musl-gcc".to_string(),
            Target::Native | Target::Musl => name.to_string(),
            Target::Arm64 => format!("aarch64-linux-gnu-{name}"),
        }
    }

    /// Cargo with its subcommand and arguments, in the root of the sources.
    pub(crate) fn cargo(self, arguments: &[&str]) -> Command {
        let (subcommand, rest) = arguments.split_at(1.min(arguments.len()));
        let mut cargo = cargo(subcommand);
        cargo.current_dir(layout::root());
        if self == Target::Arm64 {
            cargo.args(["--target", ARM64]).env(layout::cargo_variable(ARM64, "LINKER"), self.tool("gcc"));
            cargo.env(layout::cargo_variable(ARM64, "RUNNER"), format!("{EMULATOR} -L {ROOT}"));
        }
        if self == Target::Musl {
            cargo.args(["--target", MUSL]);
        }
        cargo.args(rest);
        cargo
    }

    /// Cargo for the preload library. Rust's programs for musl are static, but the library is not.
    /// A library for glibc is linked with the stub of its oldest version.
    pub(crate) fn cargo_of_library(self) -> Result<Command> {
        let mut cargo = self.cargo(&["build", "--release", "--package", "neap-malloc"]);
        if self == Target::Arm64 {
            cargo.env(STUB, stub_of(ARM64, &self.tool("gcc"))?);
        }
        if self == Target::Musl {
            cargo.env(layout::cargo_variable(MUSL, "LINKER"), self.tool("gcc"));
            let variable = layout::cargo_variable(MUSL, "RUSTFLAGS");
            // `cargo xtask release` names folders in this variable.
            let given = std::env::var(&variable).unwrap_or_default();
            let flags = format!("{given} -C target-feature=-crt-static -C link-self-contained=no");
            cargo.env(variable, flags.trim_start());
        }
        Ok(cargo)
    }

    /// The folder of optimised products.
    fn release(self) -> PathBuf {
        layout::target().join(self.name().unwrap_or_default()).join("release")
    }

    /// The preload library.
    pub(crate) fn library(self) -> PathBuf {
        self.release().join("libneap_malloc.so")
    }

    /// The command line tool.
    pub(crate) fn command_line(self) -> PathBuf {
        self.release().join("neap")
    }

    /// The command that runs a program here.
    pub(crate) fn start(self, program: &Path) -> Command {
        match self {
            Target::Native | Target::Musl => Command::new(program),
            Target::Arm64 => {
                let mut line = command(EMULATOR, ["-L", ROOT]);
                line.arg(program);
                line
            }
        }
    }

    /// The variable that names preloaded libraries to a program that [`Target::start`] starts, and
    /// what stands before the names.
    pub(crate) fn preload(self) -> (&'static str, &'static str) {
        match self {
            Target::Native | Target::Musl => ("LD_PRELOAD", ""),
            // The emulator's own loader would read the variable LD_PRELOAD.
            Target::Arm64 => ("QEMU_SET_ENV", "LD_PRELOAD="),
        }
    }

    /// The loader and the libraries of all test programs, by their place in a file system.
    pub(crate) fn libraries(self) -> Vec<(String, PathBuf)> {
        let names = ["ld-linux-aarch64.so.1", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6"];
        let names = if self == Target::Arm64 { &names[..] } else { &[][..] };
        names.iter().map(|name| (format!("lib/{name}"), Path::new(ROOT).join("lib").join(name))).collect()
    }

    /// Whether programs can be built for it here.
    ///
    /// # Errors
    /// [`Skipped`], with the missing programs.
    pub(crate) fn is_there(self, emulated: bool) -> Result<()> {
        let Some(name) = self.name() else { return Ok(()) };
        let wanted = match self {
            Target::Native | Target::Musl => vec![(self.tool("gcc"), "musl-tools")],
            Target::Arm64 => {
                vec![(self.tool("gcc"), "gcc-aarch64-linux-gnu"), (self.tool("g++"), "g++-aarch64-linux-gnu")]
            }
        };
        let emulator = (emulated && !self.is_of_this_processor()).then(|| (EMULATOR.to_string(), "qemu-user"));
        let wanted = wanted.into_iter().chain(emulator);
        let missing: Vec<&str> = wanted.filter(|(tool, _)| which(tool).is_none()).map(|(_, package)| package).collect();
        if !missing.is_empty() {
            let missing = missing.join(" ");
            return Err(Skipped(format!("{name}: SKIPPED, nothing was tested: apt-get install {missing}")).into());
        }
        standard_library(name)
    }
}

/// Makes sure that Rust's libraries for a target are there.
///
/// # Errors
/// [`Skipped`], with the command that installs them.
pub(crate) fn standard_library(name: &str) -> Result<()> {
    let folder = layout::rustc(["--print", "target-libdir", "--target", name])?;
    let is_there = || Path::new(&folder).is_dir();
    if !is_there() && which("rustup").is_some() {
        // If the command fails, the next check shows it.
        let _ = command_quiet("rustup", ["target", "add", name]).status();
    }
    if is_there() {
        return Ok(());
    }
    Err(Skipped(format!("{name}: SKIPPED, nothing was tested: rustup target add {name}")).into())
}

/// This program with another command, for a target.
pub(crate) fn for_target<S: AsRef<OsStr>>(target: &str, host: &str, arguments: &[S]) -> Result<Command> {
    let mut xtask = command(&std::env::current_exe()?.to_string_lossy(), arguments);
    if target != host {
        xtask.env(layout::TARGET, target).envs(cross_tools(target));
    }
    Ok(xtask)
}

/// Variables for builds for another target by Debian's cross compiler: the linker and objcopy.
/// Variables that are set already stay as they are.
fn cross_tools(name: &str) -> Vec<(String, String)> {
    if name != ARM64 {
        return Vec::new();
    }
    let variables = [(layout::cargo_variable(ARM64, "LINKER"), "gcc"), ("OBJCOPY".to_string(), "objcopy")];
    let missing = variables.into_iter().filter(|(variable, _)| std::env::var_os(variable).is_none());
    missing.map(|(variable, tool)| (variable, Target::Arm64.tool(tool))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_named_first_or_not_at_all() {
        let words = |text: &str| text.split(' ').map(str::to_string).collect::<Vec<_>>();
        let named = words("--target aarch64-unknown-linux-gnu neap");
        assert_eq!(Target::parse(&named).unwrap(), (Target::Arm64, &named[2..]));
        assert_eq!(Target::parse(&words("--target x86_64-unknown-linux-musl")).unwrap(), (Target::Musl, &[][..]));
        let other = words("neap --target");
        assert_eq!(Target::parse(&other).unwrap(), (Target::Native, &other[..]));
        assert!(Target::parse(&words("--target x86_64-unknown-linux-gnu")).is_err());
        assert!(Target::parse(&words("--target")).is_err());
    }
}
