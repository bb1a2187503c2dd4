//! The temporary folder of a run, and the places of installed tools.
//!
//! [`Scratch::new`] makes a new folder; dropping the value removes the folder with its contents.
//! This module writes nothing outside the folder. It has no lock.

use core::sync::atomic::{AtomicU32, Ordering};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

pub(in crate::bench) struct Scratch {
    folder: PathBuf,
    /// Whether inputs are to be small.
    pub(super) quick: bool,
}

impl Scratch {
    pub(in crate::bench) fn new(quick: bool) -> Result<Scratch> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: the count publishes no other data.
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("neap-bench-{}-{number}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Scratch { folder, quick })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Makes a file with the output of `write`.
    pub(super) fn file(&self, name: &str, write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
        let path = self.path(name);
        let attempt = || {
            let mut file = BufWriter::new(File::create(&path)?);
            write(&mut file)?;
            file.flush()
        };
        attempt().with_context(|| format!("cannot write {}", path.display()))
    }

    /// The file for a program's standard error.
    pub(super) fn errors(&self) -> Result<Stdio> {
        Ok(File::create(self.path("errors")).context("cannot make a file for standard error")?.into())
    }

    /// Shows the end of the last program's standard error.
    pub(super) fn show_errors(&self) {
        let text = fs::read(self.path("errors")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(5)..] {
            eprintln!("  {line}");
        }
    }

    /// Returns the executable itself, not the wrapper of a version manager. The benchmark would
    /// measure the wrapper as well.
    pub(super) fn tool(&self, name: &str) -> Result<PathBuf> {
        let found = search(name)?;
        match name {
            "python3" => answer(&found, &["-c", "import sys; print(sys.executable)"]),
            "rustc" => Ok(answer(&found, &["--print", "sysroot"])?.join("bin/rustc")),
            _ => Ok(found),
        }
    }

    /// Returns a number of items: a tenth in a quick run.
    pub(super) fn amount(&self, usual: usize) -> usize {
        if self.quick { usual / 10 } else { usual }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            eprintln!("neap bench programs: cannot remove {}: {error}", self.folder.display());
        }
    }
}

/// Returns Debian's package of a tool.
pub(super) fn package(tool: &str) -> &str {
    match tool {
        "c++" => "g++",
        "db_bench" => "rocksdb-tools",
        "gs" => "ghostscript",
        "java" | "javac" => "default-jdk-headless",
        "node" => "nodejs",
        "postgres" => "postgresql",
        "psql" => "postgresql-client",
        "sh" => "dash",
        "sort" => "coreutils",
        same => same,
    }
}

fn search(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|candidate| candidate.is_file());
    found.with_context(|| format!("`{name}` is not in PATH"))
}

/// Returns the path that a tool prints about itself.
fn answer(tool: &Path, arguments: &[&str]) -> Result<PathBuf> {
    let output = Command::new(tool).args(arguments).stderr(Stdio::null()).stdin(Stdio::null()).output()?;
    if !output.status.success() {
        bail!("{} does not work: {}", tool.display(), output.status);
    }
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_goes_with_its_contents() {
        let scratch = Scratch::new(false).unwrap();
        scratch.file("one", |file| writeln!(file, "text")).unwrap();
        let folder = scratch.folder().to_path_buf();
        assert_eq!(fs::read_to_string(folder.join("one")).unwrap(), "text\n");
        assert!(scratch.tool("no-such-program").unwrap_err().to_string().contains("no-such-program"));
        assert!(scratch.tool("sh").unwrap().is_file());
        drop(scratch);
        assert!(!folder.exists());
    }
}
