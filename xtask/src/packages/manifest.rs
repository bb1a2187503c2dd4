//! The manifest of an installation: the files that it wrote and the folders that it made, so that
//! `uninstall` removes exactly these.
//!
//! The text names one path in each line, absolute and without `--destdir`. A folder ends in `/`.
//!
//! A staged installation is copied to a root that has folders of its own. So its manifest names
//! only folders that neap alone uses, not `bin`, which the stage lacks and the root may have.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::packages::places::Places;

/// The manifest's own place, from the prefix.
const MANIFEST: &str = "share/neap/manifest";

/// An installation that is being written. All places are from the prefix.
pub(crate) struct Installation<'a> {
    pub(crate) places: &'a Places,
    files: BTreeSet<PathBuf>,
    folders: BTreeSet<PathBuf>,
    /// Files of the installation that this one replaces.
    before: BTreeSet<PathBuf>,
}

impl<'a> Installation<'a> {
    /// Begins an installation, also above an older one.
    pub(crate) fn begin(places: &'a Places) -> Result<Installation<'a>> {
        let (before, folders) = read(places)?.unwrap_or_default();
        Ok(Installation { places, files: BTreeSet::new(), folders, before })
    }

    /// Makes room for a file, and returns its place on this disk. A running program keeps the
    /// replaced file.
    pub(crate) fn make_room(&mut self, place: &Path) -> Result<PathBuf> {
        let path = self.places.prefix.join(place);
        let missing = path.ancestors().skip(1).take_while(|folder| !self.places.on_disk(folder).exists());
        let places = self.places;
        let is_ours = |folder: &&Path| !places.are_staged() || places.is_of_neap_alone(folder);
        self.folders.extend(missing.filter(is_ours).map(Path::to_path_buf));
        let file = self.places.on_disk(&path);
        fs::create_dir_all(file.parent().context("a file lies in a folder")?)
            .with_context(|| file.display().to_string())?;
        remove(&file)?;
        self.files.insert(path);
        Ok(file)
    }

    /// Copies a file.
    pub(crate) fn copy(&mut self, from: &Path, place: &Path, mode: u32) -> Result<()> {
        let file = self.make_room(place)?;
        fs::copy(from, &file).with_context(|| format!("{} to {}", from.display(), file.display()))?;
        set_mode(&file, mode)
    }

    /// Writes a text.
    pub(crate) fn write(&mut self, text: &str, place: &Path) -> Result<()> {
        let file = self.make_room(place)?;
        fs::write(&file, text).with_context(|| file.display().to_string())
    }

    /// Makes a link to a file of the same folder.
    pub(crate) fn link(&mut self, to: &str, place: &Path) -> Result<()> {
        let file = self.make_room(place)?;
        symlink(to, &file).with_context(|| file.display().to_string())
    }

    /// Writes the manifest, removes files that only the replaced installation had, and returns the
    /// paths of the installed files on this disk.
    pub(crate) fn finish(mut self) -> Result<Vec<PathBuf>> {
        let file = self.make_room(Path::new(MANIFEST))?;
        let folders = self.folders.iter().map(|folder| format!("{}/\n", folder.display()));
        let text: String = self.files.iter().map(|file| format!("{}\n", file.display())).chain(folders).collect();
        fs::write(&file, text).with_context(|| file.display().to_string())?;
        for gone in self.before.difference(&self.files) {
            remove(&self.places.on_disk(gone))?;
        }
        Ok(self.files.iter().map(|file| self.places.on_disk(file)).collect())
    }
}

/// Removes the files of an installation, then the folders that it made and that are empty. Returns
/// the removed files.
pub(crate) fn uninstall(places: &Places) -> Result<Vec<PathBuf>> {
    let Some((files, folders)) = read(places)? else {
        let manifest = places.on_disk(&places.prefix.join(MANIFEST));
        bail!("{} does not exist: nothing is installed there by `cargo xtask install`", manifest.display());
    };
    let files: Vec<PathBuf> = files.iter().map(|file| places.on_disk(file)).collect();
    for file in &files {
        remove(file)?;
    }
    // A folder comes after the one that it lies in.
    for folder in folders.iter().rev().map(|folder| places.on_disk(folder)) {
        match fs::remove_dir(&folder) {
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
                return Err(error).with_context(|| folder.display().to_string());
            }
            _ => {}
        }
    }
    Ok(files)
}

/// Sets the permissions of a file.
pub(crate) fn set_mode(file: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(file, fs::Permissions::from_mode(mode)).with_context(|| file.display().to_string())
}

/// Removes a file that may be missing.
fn remove(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error).with_context(|| file.display().to_string()),
        _ => Ok(()),
    }
}

/// Files and folders that a manifest names, if there is one.
fn read(places: &Places) -> Result<Option<(BTreeSet<PathBuf>, BTreeSet<PathBuf>)>> {
    let manifest = places.on_disk(&places.prefix.join(MANIFEST));
    let text = match fs::read_to_string(&manifest) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| manifest.display().to_string()),
    };
    let (folders, files): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| line.ends_with('/'));
    for line in &files {
        let inside = Path::new(line).starts_with(&places.prefix) && !line.contains("/../");
        ensure!(inside, "{}: `{line}` is not below the prefix", manifest.display());
    }
    let paths = |lines: Vec<&str>| lines.into_iter().map(|line| PathBuf::from(line.trim_end_matches('/'))).collect();
    Ok(Some((paths(files), paths(folders))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{capture, command};

    /// A prefix of its own for a test, removed at the end.
    struct Prefix(PathBuf);

    impl Prefix {
        fn new(name: &str) -> Prefix {
            let path = std::env::temp_dir().join(format!("neap-manifest-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Prefix(path)
        }
    }

    impl Drop for Prefix {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn install(places: &Places, names: &[&str]) {
        let mut installation = Installation::begin(places).unwrap();
        for name in names {
            installation.write(name, Path::new(name)).unwrap();
        }
        installation.finish().unwrap();
    }

    #[test]
    fn uninstall_removes_its_files_and_folders_only() {
        let prefix = Prefix::new("own");
        let places = Places::below(&prefix.0.join("made"));
        fs::create_dir_all(&prefix.0).unwrap();
        install(&places, &["bin/a", "lib/deep/b"]);
        let foreign = prefix.0.join("made/bin/foreign");
        fs::write(&foreign, "").unwrap();
        uninstall(&places).unwrap();
        let left: Vec<_> = fs::read_dir(prefix.0.join("made")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["bin"], "the folder with a foreign file stays");
        assert!(foreign.exists() && !prefix.0.join("made/bin/a").exists());
        assert!(uninstall(&places).is_err(), "there is no manifest");
    }

    #[test]
    fn second_install_removes_files_of_the_first() {
        let prefix = Prefix::new("twice");
        let places = Places::below(&prefix.0.join("made"));
        fs::create_dir_all(&prefix.0).unwrap();
        install(&places, &["bin/a", "old/b"]);
        install(&places, &["bin/a", "new/c"]);
        assert!(!prefix.0.join("made/old/b").exists() && prefix.0.join("made/new/c").exists());
        uninstall(&places).unwrap();
        assert!(prefix.0.exists() && !prefix.0.join("made").exists(), "all folders of both are gone");
    }

    #[test]
    fn staged_files_leave_the_folders_of_the_root_they_move_to() {
        let folder = Prefix::new("staged");
        let [stage, root] = ["stage", "root"].map(|name| folder.0.join(name));
        let prefix = Path::new("/opt/neap");
        install(&Places::staged(prefix, &stage), &["bin/neap", "share/doc/neap/a", "lib/cmake/neap/b"]);
        fs::create_dir_all(root.join("opt/neap/bin")).unwrap();
        let mut copy = command("cp", ["-a"]);
        copy.arg(stage.join(".")).arg(&root);
        capture(copy).unwrap();
        uninstall(&Places::staged(prefix, &root)).unwrap();
        for left in ["bin", "share/doc", "lib/cmake"] {
            assert!(root.join("opt/neap").join(left).is_dir(), "{left} may be the root's own");
        }
        for gone in ["bin/neap", "share/doc/neap", "lib/cmake/neap", "share/neap"] {
            assert!(!root.join("opt/neap").join(gone).exists(), "{gone}");
        }
    }

    #[test]
    fn manifest_that_leaves_the_prefix_is_refused() {
        let prefix = Prefix::new("outside");
        let places = Places::below(&prefix.0);
        install(&places, &["a"]);
        for line in ["/etc/passwd".to_string(), format!("{}/../x", prefix.0.display())] {
            fs::write(prefix.0.join(MANIFEST), line + "\n").unwrap();
            assert!(uninstall(&places).unwrap_err().to_string().contains("not below the prefix"));
        }
    }
}
