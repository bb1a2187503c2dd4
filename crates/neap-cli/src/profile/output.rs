//! Files for profiles, and their formats.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::compare::Comparison;
use super::resolved::Profile;
use super::{dhat, folded, html, pprof};

/// A format of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Pprof,
    Folded,
    FlameGraph,
    Html,
    Dhat,
}

/// A file for a profile. It is chosen before the profile is taken, and made when the profile is
/// written.
#[derive(Debug)]
pub(crate) struct ProfileFile {
    path: PathBuf,
    format: Format,
}

impl ProfileFile {
    /// Chooses the file. The ending of its name determines the format. Leaves an existing file as
    /// it is, and makes no other one.
    ///
    /// # Errors
    /// Returns an error for an unknown ending, or if the file cannot be made.
    pub(crate) fn choose(path: &Path) -> Result<ProfileFile> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
        let format = match () {
            () if ends(&[".pb.gz", ".pprof"]) => Format::Pprof,
            () if ends(&[".folded"]) => Format::Folded,
            () if ends(&[".svg"]) => Format::FlameGraph,
            () if ends(&[".html"]) => Format::Html,
            () if ends(&[".dhat.json"]) => Format::Dhat,
            () => bail!(
                "{}: the name ends in none of .pb.gz, .pprof, .folded, .svg, .html and .dhat.json",
                path.display()
            ),
        };
        try_to_make(path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(ProfileFile { path: path.to_path_buf(), format })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether pprof compares two files of this format.
    pub(crate) fn is_pprof(&self) -> bool {
        self.format == Format::Pprof
    }

    /// Writes a profile, or its differences to an earlier one. A file for pprof
    /// or the Firefox profiler always contains the profile itself.
    pub(crate) fn write(&self, now: &Profile, before: Option<&Profile>) -> Result<()> {
        let file = File::create(&self.path).with_context(|| format!("cannot make {}", self.path.display()))?;
        let mut output = BufWriter::new(file);
        let comparison = before.map(|before| Comparison { before, now });
        let written = match (self.format, comparison) {
            (Format::Pprof, _) => pprof::write(&mut output, now),
            (Format::Dhat, _) => dhat::write(&mut output, now),
            (Format::Folded, None) => folded::write(&mut output, &folded::lines(now)),
            (Format::Folded, Some(comparison)) => folded::write(&mut output, &comparison.folded()),
            (Format::FlameGraph, None) => folded::flame_graph(&mut output, now),
            (Format::FlameGraph, Some(comparison)) => folded::difference_graph(&mut output, &comparison),
            (Format::Html, None) => html::write(&mut output, now),
            (Format::Html, Some(comparison)) => html::write_comparison(&mut output, &comparison),
        };
        written.and_then(|()| output.flush()).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// Finds out whether a file can be made, or an existing one written.
fn try_to_make(path: &Path) -> io::Result<()> {
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(_) => fs::remove_file(path),
        // Opening a FIFO would wait for its reader.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match fs::metadata(path) {
            Ok(found) if found.is_file() || found.is_dir() => OpenOptions::new().write(true).open(path).map(drop),
            _ => Ok(()),
        },
        Err(error) => Err(error),
    }
}
