//! The folders of an installation, from the arguments that `install` and `uninstall` share.
//!
//! All folders are below the prefix: the files name each other by paths from it, so a staged
//! installation works.

use core::time::Duration;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::process::{command, observe};

/// Where an installation lies.
#[derive(Debug)]
pub(crate) struct Places {
    /// Put in front of the prefix, for packages; no file contains it.
    root: PathBuf,
    /// Absolute.
    pub(crate) prefix: PathBuf,
    /// From the prefix.
    pub(crate) libdir: PathBuf,
    /// From the prefix.
    pub(crate) debugdir: PathBuf,
}

impl Places {
    /// Folders below `prefix`, without another root, with libraries in `lib`.
    pub(crate) fn below(prefix: &Path) -> Places {
        Places { root: "/".into(), prefix: prefix.into(), libdir: "lib".into(), debugdir: "lib/debug".into() }
    }

    /// Folders below `prefix`, in another root.
    pub(crate) fn staged(prefix: &Path, root: &Path) -> Places {
        Places { root: root.into(), ..Places::below(prefix) }
    }

    /// Reads `--prefix FOLDER [--libdir FOLDER] [--debugdir FOLDER] [--destdir FOLDER]`.
    pub(crate) fn parse(arguments: &[String]) -> Result<Places> {
        let mut places = Places::below(Path::new(""));
        for pair in arguments.chunks(2) {
            let [option, folder] = pair else { bail!("`{}` needs a folder", pair.join(" ")) };
            let place = match option.as_str() {
                "--prefix" => &mut places.prefix,
                "--libdir" => &mut places.libdir,
                "--debugdir" => &mut places.debugdir,
                "--destdir" => &mut places.root,
                _ => bail!("`{option}`: the options are --prefix, --libdir, --debugdir and --destdir"),
            };
            *place = folder.into();
        }
        let prefix = &places.prefix;
        ensure!(!prefix.as_os_str().is_empty(), "--prefix FOLDER is needed, as in --prefix /usr/local");
        ensure!(prefix.is_absolute(), "--prefix {}: programs will look for an absolute path", prefix.display());
        for (option, folder) in [("--libdir", &mut places.libdir), ("--debugdir", &mut places.debugdir)] {
            // Packagers write /usr/lib/x86_64-linux-gnu, people lib64.
            if let Ok(rest) = folder.strip_prefix(prefix) {
                *folder = rest.into();
            }
            let inside = folder.components().all(|part| matches!(part, Component::Normal(_)));
            ensure!(inside, "{option} {}: not below {}", folder.display(), prefix.display());
        }
        // Messages and the manifest do not depend on the current folder.
        places.root = std::path::absolute(&places.root).context("--destdir")?;
        Ok(places)
    }

    /// An error if this user may not write to a folder of the installation, or to the one in which
    /// it would be made: a build takes minutes, so this is found before.
    pub(crate) fn may_write(&self) -> Result<()> {
        let (another, hint) = match self.are_staged() {
            true => ("another --destdir", ""),
            false => {
                ("another --prefix", ", such as $HOME/.local, or install as \"A prefix\" in docs/guide/install.md says")
            }
        };
        for folder in [Path::new("bin"), &self.libdir, &self.debugdir, Path::new("include"), Path::new("share")] {
            let place = self.on_disk(&self.prefix.join(folder));
            let there = place.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"));
            let is = |test: &str| observe(command("test", [test.as_ref(), there.as_os_str()]), Duration::from_secs(60));
            let there = there.display();
            ensure!(is("-d")?.success(), "{there} is not a folder: remove it, or name {another}");
            ensure!(is("-w")?.success(), "this user may not write to {there}: name {another}{hint}");
        }
        Ok(())
    }

    /// Whether the files go to a stage, from which they move on.
    pub(crate) fn are_staged(&self) -> bool {
        self.on_disk(&self.prefix) != self.prefix
    }

    /// Whether a folder below the prefix has files of no other project, as its name says.
    pub(crate) fn is_of_neap_alone(&self, folder: &Path) -> bool {
        folder != self.prefix && folder.starts_with(&self.prefix) && folder.ends_with("neap")
    }

    /// An installed file's place on this disk: `path` is absolute, as the installed files know it.
    pub(crate) fn on_disk(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Places> {
        Places::parse(&line.split(' ').map(str::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn folders_are_below_the_prefix() {
        let places = parse("--prefix /usr --libdir /usr/lib/x86_64-linux-gnu --destdir /stage").unwrap();
        assert_eq!(places.libdir, Path::new("lib/x86_64-linux-gnu"));
        assert_eq!(places.on_disk(Path::new("/usr/bin/neap")), Path::new("/stage/usr/bin/neap"));
        assert_eq!(parse("--prefix /usr --libdir lib64").unwrap().libdir, Path::new("lib64"));
    }

    #[test]
    fn folder_that_cannot_be_written_is_named() {
        let folder = std::env::temp_dir().join(format!("neap-places-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("prefix")).unwrap();
        let places = Places::below(&folder.join("prefix/of"));
        places.may_write().unwrap();
        // Where a folder is needed lies a file: that stops root, too.
        std::fs::create_dir_all(folder.join("prefix/of/lib")).unwrap();
        std::fs::write(folder.join("prefix/of/lib/debug"), "").unwrap();
        let error = places.may_write().unwrap_err().to_string();
        assert!(error.ends_with("lib/debug is not a folder: remove it, or name another --prefix"), "{error}");
        let places = Places::staged(Path::new("/of"), &folder.join("prefix"));
        let error = places.may_write().unwrap_err().to_string();
        assert!(error.ends_with("lib/debug is not a folder: remove it, or name another --destdir"), "{error}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn arguments_without_a_place_are_refused() {
        for line in ["--libdir lib", "--prefix local", "--prefix /usr --libdir /lib", "--prefix /usr --libdir ../lib"] {
            assert!(parse(line).is_err(), "{line}");
        }
        for line in ["--prefix", "--prefix /usr --target x"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
