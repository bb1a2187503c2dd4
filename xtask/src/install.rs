//! `cargo xtask install --prefix FOLDER`: copies the products of `build` to the places where
//! programs, compilers and pkg-config look for them.
//!
//! `--destdir FOLDER` puts a root in front of the prefix, for packages; files contain the prefix
//! only. It needs only the right to write there.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::build::{self, SONAME};
use crate::layout;

/// `install --prefix FOLDER [--destdir FOLDER]`.
pub(crate) fn command(arguments: &[String]) -> Result<()> {
    let (mut prefix, mut root) = (None, PathBuf::from("/"));
    for pair in arguments.chunks(2) {
        match pair {
            [option, folder] if option == "--prefix" => prefix = Some(PathBuf::from(folder)),
            [option, folder] if option == "--destdir" => root = PathBuf::from(folder),
            other => bail!("`install` takes --prefix FOLDER and --destdir FOLDER, not `{}`", other.join(" ")),
        }
    }
    let prefix = prefix.context("`install` needs --prefix FOLDER, as in --prefix /usr/local")?;
    ensure!(prefix.is_absolute(), "--prefix {}: programs will look for an absolute path", prefix.display());
    build::build()?;
    for file in install(&prefix, &root)? {
        println!("{}", file.display());
    }
    Ok(())
}

/// Installs the built files, and returns their paths.
pub(crate) fn install(prefix: &Path, root: &Path) -> Result<Vec<PathBuf>> {
    let version = env!("CARGO_PKG_VERSION");
    let [shared, archive] = layout::c_libraries();
    let place = root.join(prefix.strip_prefix("/").unwrap_or(prefix));
    let (library, major) = (format!("libneap.so.{version}"), SONAME);
    let mut installed = Vec::new();
    let mut put = |from: &Path, to: &str, mode: u32| -> Result<()> {
        let to = place.join(to);
        fs::create_dir_all(to.parent().context("a file lies in a folder")?)?;
        // A running program keeps its file.
        if to.symlink_metadata().is_ok() {
            fs::remove_file(&to).with_context(|| to.display().to_string())?;
        }
        fs::copy(from, &to).with_context(|| format!("{} to {}", from.display(), to.display()))?;
        fs::set_permissions(&to, fs::Permissions::from_mode(mode))?;
        installed.push(to);
        Ok(())
    };
    put(&layout::tool(), "bin/neap", 0o755)?;
    put(&layout::library(), "lib/libneap_malloc.so", 0o755)?;
    put(&shared, &format!("lib/{library}"), 0o755)?;
    put(&archive, "lib/libneap.a", 0o644)?;
    put(&layout::header(), "include/neap.h", 0o644)?;
    for (link, to) in [(major, library.as_str()), ("libneap.so", major)] {
        let link = place.join("lib").join(link);
        if link.symlink_metadata().is_ok() {
            fs::remove_file(&link).with_context(|| link.display().to_string())?;
        }
        symlink(to, &link).with_context(|| link.display().to_string())?;
        installed.push(link);
    }
    let text = fs::read_to_string(layout::root().join("crates/neap-c/neap.pc.in"))?;
    let text = text.replace("@prefix@", &prefix.to_string_lossy()).replace("@version@", version);
    let config = place.join("lib/pkgconfig/neap.pc");
    fs::create_dir_all(place.join("lib/pkgconfig"))?;
    fs::write(&config, text).with_context(|| config.display().to_string())?;
    installed.push(config);
    Ok(installed)
}
