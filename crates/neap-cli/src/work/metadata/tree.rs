//! Files and directories below a directory, sorted by path.
//!
//! The walk does not follow symbolic links. It leaves out directories that it cannot read, and
//! files that are removed meanwhile. This module has no lock.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// Largest file whose content is cached, in bytes.
pub(super) const SMALL: u64 = 16 << 10;
/// Least number of small files.
const LEAST: usize = 256;

/// A regular file.
pub(super) struct TreeFile {
    pub(super) path: Box<OsStr>,
    pub(super) bytes: u64,
}

impl TreeFile {
    pub(super) fn is_small(&self) -> bool {
        self.bytes <= SMALL
    }
}

pub(super) struct Tree {
    pub(super) files: Vec<TreeFile>,
    pub(super) directories: Vec<Box<OsStr>>,
}

impl Tree {
    /// Finds all regular files and directories below `root`, and `root` itself.
    ///
    /// # Errors
    /// `root` cannot be read, or has too few small files.
    pub(super) fn walk(root: &Path) -> Result<Tree> {
        let remedy = "name another directory with --directory";
        let first =
            fs::read_dir(root).with_context(|| format!("cannot read directory {}; {remedy}", root.display()))?;
        let mut tree = Tree { files: Vec::new(), directories: vec![root.as_os_str().into()] };
        let (mut left, mut next) = (Vec::new(), Some(first));
        while let Some(entries) = next {
            for entry in entries.flatten() {
                let path = entry.path().into_os_string();
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => left.push(path.into_boxed_os_str()),
                    Ok(kind) if kind.is_file() => tree.files.extend(
                        entry.metadata().ok().map(|metadata| TreeFile { path: path.into(), bytes: metadata.len() }),
                    ),
                    _ => {}
                }
            }
            next = None;
            while next.is_none()
                && let Some(directory) = left.pop()
            {
                next = fs::read_dir(&*directory).ok();
                tree.directories.push(directory);
            }
        }
        tree.files.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        tree.directories.sort_unstable();
        let small = tree.files.iter().filter(|file| file.is_small()).count();
        ensure!(
            small >= LEAST,
            "directory {} has {small} files of at most {} KiB, and the benchmark needs {LEAST}; {remedy}",
            root.display(),
            SMALL >> 10
        );
        Ok(tree)
    }
}

/// The directory of a path.
pub(super) fn directory_of(path: &OsStr) -> &OsStr {
    Path::new(path).parent().map_or(OsStr::new("/"), Path::as_os_str)
}

/// The path of the file in `directory` that has the same name as `path`.
pub(super) fn moved_to(directory: &OsStr, path: &OsStr) -> Box<OsStr> {
    let name = Path::new(path).file_name().unwrap_or_default();
    let moved = [directory.as_bytes(), b"/", name.as_bytes()].concat();
    std::ffi::OsString::from_vec(moved).into_boxed_os_str()
}

#[cfg(test)]
mod tests {
    use super::super::made::Made;
    use super::*;

    #[test]
    fn walk_finds_files_and_directories_in_order_and_no_links() {
        let made = Made::new("walk", 300);
        std::os::unix::fs::symlink(&made.0, made.0.join("d0/loop")).unwrap();
        fs::write(made.0.join("d0/large"), vec![0; SMALL as usize + 1]).unwrap();
        let tree = Tree::walk(&made.0).unwrap();
        assert_eq!((tree.files.len(), tree.directories.len()), (301, 1 + 300_usize.div_ceil(16)));
        assert!(tree.files.is_sorted_by(|a, b| a.path < b.path) && tree.directories.is_sorted());
        let large: Vec<&TreeFile> = tree.files.iter().filter(|file| !file.is_small()).collect();
        assert_eq!((large.len(), &*large[0].path), (1, made.0.join("d0/large").as_os_str()));
    }

    #[test]
    fn missing_or_small_directories_are_named_with_the_remedy() {
        let made = Made::new("small", 3);
        for (root, problem) in
            [(made.0.join("absent"), "cannot read"), (made.0.clone(), "has 3 files of at most 16 KiB")]
        {
            let message = format!("{:#}", Tree::walk(&root).err().unwrap());
            assert!(message.contains(problem) && message.contains(root.to_str().unwrap()), "{message}");
            assert!(message.contains("--directory"), "{message}");
        }
    }

    #[test]
    fn paths_move_between_directories_by_name() {
        let path = OsStr::new("/usr/include/linux/stat.h");
        assert_eq!(directory_of(path), "/usr/include/linux");
        assert_eq!(&*moved_to(OsStr::new("/usr/local"), path), "/usr/local/stat.h");
    }
}
