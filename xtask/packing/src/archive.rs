//! A folder as a `.tar.gz` whose bytes depend on names, contents and modes only.
//!
//! Entries are sorted by path and belong to root. All have one time. Modes are those of a release:
//! 755 for folders and executable files, 644 for others. The gzip header has neither a time nor a
//! name. The compressor is the one that Cargo.lock pins.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

/// Writes all entries below `folder` as `name/…` to `file`. `seconds` is the time of each entry,
/// since 1970.
pub(crate) fn write(folder: &Path, name: &str, seconds: u64, file: &Path) -> Result<()> {
    let output = File::create(file).with_context(|| file.display().to_string())?;
    let mut tar = Builder::new(GzEncoder::new(output, Compression::best()));
    let mut paths = Vec::new();
    list(folder, Path::new(""), &mut paths)?;
    paths.sort();
    for path in &paths {
        let from = folder.join(path);
        append(&mut tar, &from, &Path::new(name).join(path), seconds).with_context(|| from.display().to_string())?;
    }
    tar.into_inner()?.finish()?.flush()?;
    Ok(())
}

/// Adds the paths of all entries below `folder/path`, from `folder`.
fn list(folder: &Path, path: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    found.push(path.to_path_buf());
    for entry in fs::read_dir(folder.join(path)).with_context(|| folder.join(path).display().to_string())? {
        let entry = entry?;
        let path = path.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            list(folder, &path, found)?;
        } else {
            found.push(path);
        }
    }
    Ok(())
}

/// Appends one entry.
fn append(tar: &mut Builder<impl Write>, from: &Path, path: &Path, seconds: u64) -> Result<()> {
    let metadata = fs::symlink_metadata(from)?;
    let mut header = Header::new_gnu();
    header.set_mtime(seconds);
    header.set_uid(0);
    header.set_gid(0);
    header.set_username("root")?;
    header.set_groupname("root")?;
    header.set_size(0);
    let kind = metadata.file_type();
    if kind.is_symlink() {
        header.set_entry_type(EntryType::Symlink);
        header.set_mode(0o777);
        tar.append_link(&mut header, path, fs::read_link(from)?)?;
    } else if kind.is_dir() {
        header.set_entry_type(EntryType::Directory);
        header.set_mode(0o755);
        tar.append_data(&mut header, path, std::io::empty())?;
    } else if kind.is_file() {
        let executable = metadata.permissions().mode() & 0o111 != 0;
        header.set_mode(if executable { 0o755 } else { 0o644 });
        header.set_size(metadata.len());
        tar.append_data(&mut header, path, File::open(from)?)?;
    } else {
        bail!("neither a file, a folder nor a link");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;
    use std::io::Read;
    use std::os::unix::fs::symlink;
    use std::time::SystemTime;

    /// Fills a new folder. Files are made in the given order, with a time of their own.
    fn folder(name: &str, names: &[&str], seconds: u64) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("neap-archive-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        for name in names {
            let file = folder.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, name).unwrap();
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
        }
        fs::set_permissions(folder.join("bin/run"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink("run", folder.join("bin/link")).unwrap();
        folder
    }

    #[test]
    fn archive_depends_on_names_contents_and_modes_only() {
        let long = format!("share/{}", "long/".repeat(40) + "end");
        let first = folder("first", &["bin/run", "a", &long, "b"], 1_000_000);
        let second = folder("second", &["b", &long, "a", "bin/run"], 2_000_000);
        // Another umask.
        fs::set_permissions(second.join("a"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::set_permissions(second.join("share"), fs::Permissions::from_mode(0o700)).unwrap();
        let bytes = |folder: &Path| {
            let file = folder.with_extension("tar.gz");
            write(folder, "neap-1", 77, &file).unwrap();
            let bytes = fs::read(&file).unwrap();
            fs::remove_file(file).unwrap();
            bytes
        };
        let archive = bytes(&first);
        assert!(archive == bytes(&second), "order, times, modes or folder reach the archive");
        fs::set_permissions(second.join("a"), fs::Permissions::from_mode(0o700)).unwrap();
        assert!(archive != bytes(&second), "whether a file is a program does not reach the archive");
        let mut entries = tar::Archive::new(flate2::read::GzDecoder::new(&archive[..]));
        let mut paths = Vec::new();
        for entry in entries.entries().unwrap() {
            let mut entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.mtime().unwrap(), header.uid().unwrap(), header.gid().unwrap()), (77, 0, 0));
            let path = entry.path().unwrap().into_owned();
            if path.ends_with("link") {
                assert_eq!(entry.link_name().unwrap().unwrap(), Path::new("run"));
            } else if entry.header().entry_type().is_file() {
                let mut text = String::new();
                entry.read_to_string(&mut text).unwrap();
                assert_eq!(Path::new("neap-1").join(text), path);
            }
            paths.push(path);
        }
        assert!(paths.is_sorted() && paths.contains(&Path::new("neap-1").join(long)), "{paths:?}");
        fs::remove_dir_all(first).unwrap();
        fs::remove_dir_all(second).unwrap();
    }
}
