//! Where a profile goes, and in which format.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::resolved::Profile;
use super::{folded, html, pprof};

/// A format of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Pprof,
    Folded,
    FlameGraph,
    Html,
}

/// A file for a profile, made before the profile is taken.
#[derive(Debug)]
pub(crate) struct ProfileFile {
    path: PathBuf,
    format: Format,
    file: File,
}

impl ProfileFile {
    /// Makes the file, whose name tells the format.
    ///
    /// # Errors
    /// The ending is not known, or the file cannot be made.
    pub(crate) fn create(path: &Path) -> Result<ProfileFile> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
        let format = match () {
            () if ends(&[".pb.gz", ".pprof"]) => Format::Pprof,
            () if ends(&[".folded"]) => Format::Folded,
            () if ends(&[".svg"]) => Format::FlameGraph,
            () if ends(&[".html"]) => Format::Html,
            () => bail!("{}: the name ends in none of .pb.gz, .pprof, .folded, .svg and .html", path.display()),
        };
        let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(ProfileFile { path: path.to_path_buf(), format, file })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a profile.
    pub(crate) fn write(&self, profile: &Profile) -> Result<()> {
        let mut output = BufWriter::new(&self.file);
        let written = match self.format {
            Format::Pprof => pprof::write(&mut output, profile),
            Format::Folded => folded::write(&mut output, profile),
            Format::FlameGraph => folded::flame_graph(&mut output, profile),
            Format::Html => html::write(&mut output, profile),
        };
        written.and_then(|()| output.flush()).with_context(|| format!("cannot write {}", self.path.display()))
    }
}
