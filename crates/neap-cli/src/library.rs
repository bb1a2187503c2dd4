//! Finds the preload library and the libraries of the peers, starting from the executable.
//!
//! The search covers only the folders that a build and an installation use. A library that the
//! loader would find elsewhere is never used.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::linkage;

/// The folders of an installation that distributions use for libraries.
const LIBRARY_FOLDERS: [&str; 3] =
    ["lib", "lib64", if cfg!(target_arch = "aarch64") { "lib/aarch64-linux-gnu" } else { "lib/x86_64-linux-gnu" }];

/// File name of neap's preload library.
pub(crate) const LIBRARY: &str = "libneap_malloc.so";

/// Returns the path of this executable with links resolved. So a link in `/usr/local/bin` leads to
/// the library as well.
pub(crate) fn executable() -> Result<PathBuf> {
    let path = std::env::current_exe().or_else(|error| executed_path().ok_or(error));
    let path = path.context("cannot tell where this executable lies")?;
    path.canonicalize().with_context(|| format!("cannot resolve {}", path.display()))
}

/// Returns the path that was given to `execve` for this process. The kernel passes it in the
/// auxiliary vector, also without `/proc`. It may be relative to the working directory.
fn executed_path() -> Option<PathBuf> {
    // SAFETY: the call reads the auxiliary vector, which no code changes.
    let text = unsafe { libc::getauxval(libc::AT_EXECFN) } as *const c_char;
    // SAFETY: the kernel put the text on the first stack, where it ends with a NUL and stays.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })?;
    Some(PathBuf::from(OsStr::from_bytes(text.to_bytes())))
}

/// Finds the preload library: beside `executable`, or in a library folder of the same prefix.
/// Returns a path that `LD_PRELOAD` can name.
pub(crate) fn find(executable: &Path) -> Result<PathBuf> {
    let folder = executable.parent().context("the executable lies in no folder")?;
    let prefix = folder.parent().unwrap_or(folder);
    let [lib, lib64, multiarch] = LIBRARY_FOLDERS.map(|folder| prefix.join(folder));
    let candidates = [folder.to_path_buf(), lib, lib64, multiarch].map(|folder| folder.join(LIBRARY));
    let Some(found) = candidates.iter().find(|path| path.is_file()) else {
        bail!(
            "cannot find {LIBRARY}: {} do not exist; `cargo xtask build` makes it, `neap run --library FILE` names another",
            candidates.map(|path| path.display().to_string()).join(", ")
        );
    };
    check_preloadable(found)?;
    Ok(found.clone())
}

/// Returns the absolute path of the preload library that the user names.
pub(crate) fn named(file: &Path) -> Result<PathBuf> {
    let path = file.canonicalize().with_context(|| format!("--library {}", file.display()))?;
    if !linkage::is_shared_object(&path) {
        bail!("--library {}: not a shared library", file.display());
    }
    check_preloadable(&path)?;
    Ok(path)
}

/// Checks that `LD_PRELOAD` can name the path of `library`. The variable separates its entries by
/// colons and spaces, and has no escape for either.
pub(crate) fn check_preloadable(library: &Path) -> Result<()> {
    let text = library.to_str().with_context(|| format!("{} is not UTF-8", library.display()))?;
    if text.contains([':', ' ']) {
        bail!("LD_PRELOAD cannot name {text}: the path has a colon or a space in it; move the file");
    }
    Ok(())
}

/// Returns the folder of the peers that `cargo xtask peers` builds: `target/peers` beside
/// `target/release`.
pub(crate) fn peers_folder(executable: &Path) -> Option<PathBuf> {
    Some(executable.parent()?.parent()?.join("peers"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A folder of its own per test, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("neap-library-{name}-{}", std::process::id()));
            fs::create_dir_all(path.join("bin")).unwrap();
            fs::create_dir_all(path.join("lib")).unwrap();
            Folder(path)
        }

        fn executable(&self) -> PathBuf {
            self.0.join("bin/neap")
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_library_beside_the_executable_wins_over_lib() {
        let folder = Folder::new("beside");
        fs::write(folder.0.join("lib").join(LIBRARY), "").unwrap();
        assert_eq!(find(&folder.executable()).unwrap(), folder.0.join("lib").join(LIBRARY));
        fs::write(folder.0.join("bin").join(LIBRARY), "").unwrap();
        assert_eq!(find(&folder.executable()).unwrap(), folder.0.join("bin").join(LIBRARY));
    }

    #[test]
    fn library_folders_are_searched_in_their_order() {
        let folder = Folder::new("folders");
        for place in LIBRARY_FOLDERS.iter().rev().map(|place| folder.0.join(place)) {
            fs::create_dir_all(&place).unwrap();
            fs::write(place.join(LIBRARY), "").unwrap();
            assert_eq!(find(&folder.executable()).unwrap(), place.join(LIBRARY));
        }
    }

    #[test]
    fn executed_path_leads_to_this_executable() {
        let found = executed_path().unwrap().canonicalize().unwrap();
        assert_eq!(found, std::env::current_exe().unwrap().canonicalize().unwrap());
    }

    #[test]
    fn a_missing_library_is_reported_with_all_places() {
        let folder = Folder::new("missing");
        let message = find(&folder.executable()).unwrap_err().to_string();
        for place in ["bin"].iter().chain(&LIBRARY_FOLDERS) {
            assert!(message.contains(folder.0.join(place).join(LIBRARY).to_str().unwrap()), "{message}");
        }
    }

    #[test]
    fn a_path_that_ld_preload_cannot_hold_is_refused() {
        for bad in ["/opt/my tools/libneap_malloc.so", "/opt/a:b/libneap_malloc.so"] {
            assert!(check_preloadable(Path::new(bad)).unwrap_err().to_string().contains(bad));
        }
        assert!(check_preloadable(Path::new("/opt/neap/lib/libneap_malloc.so")).is_ok());
    }

    #[test]
    fn peers_lie_beside_the_folder_of_the_executable() {
        assert_eq!(peers_folder(Path::new("/t/release/neap")), Some(PathBuf::from("/t/peers")));
    }
}
