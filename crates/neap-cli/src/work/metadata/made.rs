//! Directories of small files, for tests.

use std::fs;
use std::path::PathBuf;

/// A directory of small files, which is removed at the end.
pub(super) struct Made(pub(super) PathBuf);

impl Made {
    /// Makes `files` files of up to 4 KiB in directories of sixteen.
    pub(super) fn new(name: &str, files: usize) -> Made {
        let root = std::env::temp_dir().join(format!("neap-metadata-{name}-{}", std::process::id()));
        for file in 0..files {
            let directory = root.join(format!("d{}", file / 16));
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join(format!("f{file}.h")), vec![file as u8; 100 + file * 37 % 4000]).unwrap();
        }
        Made(root)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
