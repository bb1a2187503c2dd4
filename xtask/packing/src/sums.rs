//! The file `SHA256SUMS` of a folder, as `sha256sum --check` reads it.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// The name of the list.
const NAME: &str = "SHA256SUMS";

/// Writes the list of the folder's files, sorted by name. Folders in it have no line.
pub(crate) fn write(folder: &Path) -> Result<()> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name().into_string().ok().context("a name is not UTF-8")?;
        if entry.file_type()?.is_file() && name != NAME {
            names.push(name);
        }
    }
    names.sort();
    let mut text = String::new();
    for name in names {
        let mut hash = Sha256::new();
        std::io::copy(&mut File::open(folder.join(&name))?, &mut Writer(&mut hash))?;
        hash.finalize().iter().for_each(|byte| text += &format!("{byte:02x}"));
        text += &format!("  {name}\n");
    }
    fs::write(folder.join(NAME), text)?;
    Ok(())
}

/// A hash that is written to.
struct Writer<'h>(&'h mut Sha256);

impl std::io::Write for Writer<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_every_file_in_order_and_not_itself() {
        let folder = std::env::temp_dir().join(format!("neap-sums-{}", std::process::id()));
        fs::create_dir_all(folder.join("folder")).unwrap();
        fs::write(folder.join("b"), "abc").unwrap();
        fs::write(folder.join("a"), "").unwrap();
        for _ in 0..2 {
            write(&folder).unwrap();
            assert_eq!(
                fs::read_to_string(folder.join(NAME)).unwrap(),
                "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  a\n\
                 ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  b\n"
            );
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
