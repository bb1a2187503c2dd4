//! The processor that tests are built for: this machine's, or arm64 by a cross compiler.
//!
//! Programs for arm64 run under QEMU: as single processes here, or in a virtual machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::process::{cargo, command, which};
use crate::{Skipped, layout};

/// A processor, with the compilers and libraries for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// This machine's.
    Native,
    /// `aarch64-unknown-linux-gnu`.
    Arm64,
}

/// Rust's name of arm64.
pub(crate) const ARM64: &str = "aarch64-unknown-linux-gnu";

/// The folder of Debian's cross compiler with the C library.
const ROOT: &str = "/usr/aarch64-linux-gnu";

/// Emulator of single programs.
const EMULATOR: &str = "qemu-aarch64";

impl Target {
    /// Takes `--target NAME` from the start of arguments.
    pub(crate) fn parse(arguments: &[String]) -> Result<(Target, &[String])> {
        match arguments {
            [option, name, rest @ ..] if option == "--target" && name == ARM64 => Ok((Target::Arm64, rest)),
            [option, ..] if option == "--target" => bail!("--target needs the name {ARM64}"),
            rest => Ok((Target::Native, rest)),
        }
    }

    /// A program of the GNU toolchain.
    pub(crate) fn tool(self, name: &str) -> String {
        match self {
            Target::Native => name.to_string(),
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
        cargo.args(rest);
        cargo
    }

    /// The folder of optimised products.
    fn release(self) -> PathBuf {
        match self {
            Target::Native => layout::target().join("release"),
            Target::Arm64 => layout::target().join(ARM64).join("release"),
        }
    }

    /// The preload library.
    pub(crate) fn library(self) -> PathBuf {
        self.release().join("libneap_malloc.so")
    }

    /// The command that runs a program here.
    pub(crate) fn start(self, program: &Path) -> Command {
        match self {
            Target::Native => Command::new(program),
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
            Target::Native => ("LD_PRELOAD", ""),
            // Else the emulator's own loader would read it.
            Target::Arm64 => ("QEMU_SET_ENV", "LD_PRELOAD="),
        }
    }

    /// The loader and the libraries of all test programs, by their place in a file system.
    pub(crate) fn libraries(self) -> Vec<(String, PathBuf)> {
        let names = ["ld-linux-aarch64.so.1", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6"];
        let names = if self == Target::Native { &[][..] } else { &names[..] };
        names.iter().map(|name| (format!("lib/{name}"), Path::new(ROOT).join("lib").join(name))).collect()
    }

    /// Whether programs can be built for it here.
    ///
    /// # Errors
    /// [`Skipped`], with the missing programs.
    pub(crate) fn is_there(self, emulated: bool) -> Result<()> {
        if self == Target::Native {
            return Ok(());
        }
        let wanted = [("gcc", "gcc-aarch64-linux-gnu"), ("g++", "g++-aarch64-linux-gnu")];
        let wanted = wanted.map(|(tool, package)| (self.tool(tool), package)).into_iter();
        let wanted = wanted.chain(emulated.then(|| (EMULATOR.to_string(), "qemu-user")));
        let missing: Vec<&str> = wanted.filter(|(tool, _)| which(tool).is_none()).map(|(_, package)| package).collect();
        if !missing.is_empty() {
            let missing = missing.join(" ");
            return Err(Skipped(format!("{ARM64}: SKIPPED, nothing was tested: apt-get install {missing}")).into());
        }
        let folder = layout::rustc(["--print", "target-libdir", "--target", ARM64])?;
        if !Path::new(&folder).is_dir() {
            let reason = format!("{ARM64}: SKIPPED, nothing was tested: rustup target add {ARM64}");
            return Err(Skipped(reason).into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_named_first_or_not_at_all() {
        let words = |text: &str| text.split(' ').map(str::to_string).collect::<Vec<_>>();
        let named = words("--target aarch64-unknown-linux-gnu neap");
        assert_eq!(Target::parse(&named).unwrap(), (Target::Arm64, &named[2..]));
        let other = words("neap --target");
        assert_eq!(Target::parse(&other).unwrap(), (Target::Native, &other[..]));
        assert!(Target::parse(&words("--target x86_64-unknown-linux-gnu")).is_err());
        assert!(Target::parse(&words("--target")).is_err());
    }
}
