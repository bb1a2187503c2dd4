//! The file system that the virtual machine boots from: an archive in memory, written without other
//! programs.
//!
//! The format is cpio's "newc": a header of hexadecimal numbers, a name and the bytes, each padded
//! to four. The loader lists the libraries, which are added at the paths where it found them. Not
//! compressed: unpacking would take longer than reading.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::process::command;

/// The content of a file in the archive.
#[derive(Clone, Debug)]
pub(crate) enum Entry {
    /// A copy of this file, executable.
    File(PathBuf),
    /// This text, executable.
    Text(String),
}

/// Adds the loader and the libraries that the files need.
pub(crate) fn add_libraries(files: &mut BTreeMap<String, Entry>) -> Result<()> {
    let mut libraries = BTreeSet::new();
    for entry in files.values() {
        let Entry::File(program) = entry else { continue };
        let mut loader = command("ldd", [program]);
        // Fails for a program without libraries, which is fine.
        let output = loader.output().context("cannot start ldd")?;
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        let path = |word: &str| word.starts_with('/').then(|| word.to_string());
        libraries.extend(output.lines().filter_map(|line| line.split_whitespace().find_map(path)));
    }
    for library in libraries {
        files.insert(library.trim_start_matches('/').into(), Entry::File(library.into()));
    }
    Ok(())
}

/// Writes the archive.
pub(crate) fn write(archive: &Path, files: &BTreeMap<String, Entry>) -> Result<()> {
    let out = fs::File::create(archive).with_context(|| format!("cannot write {}", archive.display()))?;
    let mut out = BufWriter::new(out);
    let mut folders = BTreeSet::new();
    for name in files.keys() {
        folders.extend(Path::new(name).ancestors().skip(1).filter(|folder| folder.file_name().is_some()));
    }
    for folder in folders.into_iter().map(Path::to_string_lossy).chain(["proc".into(), "sys".into(), "dev".into()]) {
        member(&mut out, &folder, 0o040_755, &[])?;
    }
    for (name, entry) in files {
        match entry {
            Entry::Text(text) => member(&mut out, name, 0o100_755, text.as_bytes())?,
            Entry::File(path) => {
                let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
                member(&mut out, name, 0o100_755, &bytes)?;
            }
        }
    }
    member(&mut out, "TRAILER!!!", 0, &[])?;
    out.flush()?;
    Ok(())
}

fn member(out: &mut impl Write, name: &str, mode: u32, bytes: &[u8]) -> Result<()> {
    // inode, mode, user, group, links, time, length, four device numbers, length of the name with
    // its zero, checksum.
    let length = u32::try_from(bytes.len()).with_context(|| format!("{name} is too large for the archive"))?;
    let fields = [0, mode, 0, 0, 1, 0, length, 0, 0, 0, 0, name.len() as u32 + 1, 0];
    let mut head = String::from("070701");
    fields.iter().for_each(|field| head.push_str(&format!("{field:08x}")));
    head.push_str(name);
    head.push('\0');
    let pad = |length: usize| &[0_u8; 3][..length.next_multiple_of(4) - length];
    out.write_all(head.as_bytes())?;
    out.write_all(pad(head.len()))?;
    out.write_all(bytes)?;
    out.write_all(pad(bytes.len()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_padded_to_four_bytes() {
        let mut archive = Vec::new();
        member(&mut archive, "a", 0o100_755, b"hello").unwrap();
        let text = "07070100000000000081ed00000000000000000000000100000000000000050000000000000000000000000000000000000002\
                    00000000a\0hello\0\0\0";
        assert_eq!(String::from_utf8(archive).unwrap(), text);
    }

    #[test]
    fn a_program_brings_its_loader() {
        let mut files = BTreeMap::from([("x".to_string(), Entry::File(std::env::current_exe().unwrap()))]);
        add_libraries(&mut files).unwrap();
        assert!(files.keys().any(|name| name.contains("libc.so")) && files.keys().any(|name| name.contains("ld-")));
    }
}
